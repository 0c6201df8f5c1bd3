"""``quest-jax calibrate``."""

import dataclasses
import pathlib
from typing import Literal

from quest_jax.cli.common import Dtype, load_both


@dataclasses.dataclass(frozen=True)
class Calibrate:
    """Measure what a method wants to know of a model: of its keys the principal components, by which Loki ranks.

    On the end of the shipped text, whose beginning `quest-jax eval` reads. `quest_jax.policies.basis.load_basis` reads
    the file, and so does `--basis` of `eval fidelity` and the tasks of `eval`.

    Attributes:
      method: that is calibrated.
      out: the file to write, .npz.
      model: "smollm2-135m", a .gguf file, or a Hugging Face directory or repo id.
      tokens: length of the text, of Moby-Dick.
      dtype: of the weights and the keys.
    """

    method: Literal["loki"]
    out: pathlib.Path
    model: str = "smollm2-135m"
    tokens: int = 4096
    dtype: Dtype = "float32"

    def run(self) -> int:
        """Writes the file; says what is in it."""
        import numpy as np

        from quest_jax.evals.capture import capture
        from quest_jax.evals.needle import shipped_text
        from quest_jax.policies.basis import basis_of
        from quest_jax.progress import stderr_console

        console = stderr_console()
        params, tokenizer = load_both(self.model, self.dtype, console)
        ids = tokenizer.encode(shipped_text())
        if not params.config.head_dim < self.tokens <= len(ids):
            raise ValueError(
                f"--tokens: expected more than the {params.config.head_dim} channels of a key and at most {len(ids)}, "
                f"the shipped text, got {self.tokens}."
            )
        captured = capture(params, ids[-self.tokens :])
        basis = basis_of([np.asarray(captured.keys(layer)) for layer in range(params.config.n_layers)])
        basis.save(self.out)
        console.print(f"{self.out}: {basis!r}, of {self.tokens} tokens", highlight=False, soft_wrap=True)
        return 0

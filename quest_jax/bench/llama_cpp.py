"""llama.cpp on the same GGUF file and prompt, through ``xllamacpp``."""

import importlib
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any


def has_llama_cpp() -> bool:
    """Says whether ``xllamacpp`` is installed."""
    return importlib.util.find_spec("xllamacpp") is not None


class LlamaCpp:
    """A model in llama.cpp that has read one prompt, on all cores, with its own choice of kernels and dtypes.

    Args:
      gguf: the model.
      prompt: token ids.
      new_tokens: that the context has room for besides.

    Raises:
      ImportError: ``xllamacpp`` is not installed.
      RuntimeError: llama.cpp does not take the file or the prompt.
    """

    def __init__(self, gguf: pathlib.Path, prompt: Sequence[int], new_tokens: int):
        if not has_llama_cpp():
            raise ImportError('the method "llama.cpp" needs xllamacpp; pip install "quest-jax[bench]"')
        module: Any = importlib.import_module("xllamacpp")
        options = module.CommonParams()
        options.model.path = str(gguf)
        options.n_ctx = len(prompt) + new_tokens + 1
        options.n_parallel = 1
        options.n_gpu_layers = 0
        options.cache_ram_mib = 0
        options.warmup = False
        options.verbosity = 0
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = os.cpu_count() or 1
        self._server = module.Server(options)
        self._prompt = list(prompt)

    def read_prompt(self) -> int:
        """Reads the prompt; returns the tokens generated after it, one."""
        return self._complete(1)["predicted_n"]

    def decode(self, n_tokens: int) -> int:
        """Generates ``n_tokens`` after the prompt that was read, one pass of the model each.

        Returns:
          the tokens generated.

        Raises:
          RuntimeError: llama.cpp has forgotten the prompt or stopped early, so that a time would mean nothing.
        """
        timings = self._complete(n_tokens)
        # The last token of the prompt is read again, for its logits: a pass a token.
        if timings["prompt_n"] > 1 or timings["predicted_n"] != n_tokens:
            raise RuntimeError(
                f"llama.cpp: expected {n_tokens} new tokens after a prompt that it has read, got "
                f"{timings['predicted_n']} after {timings['prompt_n']} tokens read again."
            )
        return timings["predicted_n"]

    def _complete(self, n_tokens: int) -> dict[str, Any]:
        request = {"prompt": self._prompt, "n_predict": n_tokens, "cache_prompt": True, "ignore_eos": True,
                   "temperature": 0.0}  # fmt: skip
        answer = self._server.handle_completions(request)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp: {answer.get('error', answer)}")
        return answer["timings"]

"""What a task is."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quest_jax.evals.samples import Sample


@dataclasses.dataclass(frozen=True)
class Task:
    """A row of the table of tasks.

    Attributes:
      name: by which it is asked for.
      about: what is asked, in a few words.
      source: the benchmark whose protocol it follows.
      generate: ``(tokenizer, n_tokens, n_cases, seed) -> samples``; of a task that reads files, with ``path=`` as well.
      reads: what has to be given, a directory or a file; None if the task makes its texts itself.
    """

    name: str
    about: str
    source: str
    generate: Callable[..., list[Sample]]
    reads: str | None = None

    def make(self, tokenizer: Any, n_tokens: int, n_cases: int, seed: int = 0, path: Any = None) -> list[Sample]:
        """Builds questions, the same for the same arguments.

        Args:
          tokenizer: anything with ``encode(text, add_special_tokens=...) -> list[int]``; where files are read, with
            ``decode(ids) -> str`` too.
          n_tokens: of context, question and answer together, at most; the contexts come as near as their text allows.
          n_cases: how many questions; of a file, at most, as many as it has.
          seed: of what is asked and where it stands.
          path: the directory or file of a task that ``reads`` one.

        Raises:
          ValueError: a length that the task cannot have, no cases, a path where none is read, none where one is, or
            files that do not hold what they should.
        """
        if (path is None) != (self.reads is None):
            wanted = "no path, it makes its texts itself" if self.reads is None else f"the path of {self.reads}"
            raise ValueError(f"task {self.name}: expected {wanted}, got {path}.")
        more = {} if path is None else {"path": path}
        return self.generate(tokenizer, n_tokens, n_cases, seed, **more)


def draw_of(name: str, seed: int, context: int) -> str:
    """Seed of one context of one task: a text, so that neighbouring seeds share nothing."""
    return f"{name}/{seed}/{context}"

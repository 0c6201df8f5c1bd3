"""A method as the tables know it: its name, where it comes from, what it reads."""

import dataclasses
from collections.abc import Callable
from typing import Literal

from quest_jax.policies.base import Policy

Phase = Literal["decode", "prefill"]
Kind = Literal["select", "evict"]


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table of methods; a file of this folder lists its own in ``METHODS``.

    Attributes:
      name: in ``--methods`` and in tables; lower case, unique.
      make: the policy for a budget of tokens.
      phases: where it can serve, ``decode`` or ``prefill`` or both.
      reads: of the bytes of the cached keys and values, what a step reads to choose and to attend. B is the budget, L
        the tokens in the cache, S those of a page, T those of a chunk, G query heads of a KV head, D channels of a key.
      source: paper, or what it is for.
      kind: ``select`` leaves in memory what it does not read; ``evict`` never reads it again.
      exact: True where a row of at most the budget is read whole: dense attention.
    """

    name: str
    make: Callable[[int], Policy]
    phases: tuple[Phase, ...]
    reads: str
    source: str
    kind: Kind = "select"
    exact: bool = True

    def __post_init__(self):
        if not isinstance(self.name, str) or not self.name.isidentifier() or self.name != self.name.lower():
            raise ValueError(f"Method: expected a name in lower case like quest_box, got {self.name!r}.")
        if not isinstance(self.phases, tuple) or not self.phases or not {*self.phases} <= {*Phase.__args__}:
            raise ValueError(
                f'Method {self.name}: expected phases of decode and prefill, such as ("decode",), got {self.phases!r}.'
            )
        if self.kind not in Kind.__args__:
            raise ValueError(f"Method {self.name}: expected kind select or evict, got {self.kind!r}.")
        if not callable(self.make):
            raise TypeError(f"Method {self.name}: expected make to be a class of policies, got {self.make!r}.")
        if not isinstance(self.reads, str) or not isinstance(self.source, str):
            raise TypeError(
                f"Method {self.name}: expected reads and source in words, got {self.reads!r}, {self.source!r}."
            )

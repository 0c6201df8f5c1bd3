"""Quest that chooses anew every few steps."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from quest_jax.policies.base import LayerView, Selection, by_row
from quest_jax.policies.method import Method
from quest_jax.policies.quest import Quest


@dataclasses.dataclass(frozen=True)
class QuestReuse(Quest):
    """Reads Quest's pages of up to ``every - 1`` steps ago, and the pages that were begun since.

    A row chooses when it has had ``every`` tokens since it last did, by its own length, whatever the rows beside it do;
    after its prompt at once. The steps between score nothing: on average a step reads ``1 / (S every)`` of the cache to
    choose, and ``budget / L`` to attend, with at most ``ceil((every - 1) / S)`` pages more.

    Attributes:
      every: steps from one choice to the next; 1 is Quest.
      others: those of :class:`~quest_jax.policies.quest.Quest`, with one list per KV head.
    """

    every: int = 8

    carries_by_layer: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.every, bool) or not isinstance(self.every, int | np.integer):
            raise TypeError(f"QuestReuse: expected every to be an integer, got {self.every!r}.")
        if self.every < 1:
            raise ValueError(f"QuestReuse: expected every to be at least 1, got {self.every}.")
        if self._reduce == "per_head":
            raise ValueError(
                "QuestReuse: expected one list per KV head, got one per query head (reduce='per_head' or "
                "variant='sim'); take another reduce."
            )

    def new_carry(self, rows: int, kv_heads: int, pages: int, page_size: int) -> Any:
        """The last list of a layer, int32 ``[B, K, N]`` and ``[B, K]``, and the row's length then; 0: none yet."""
        width = min(-(-self.budget // page_size), pages)
        return {
            "pages": jnp.zeros((rows, kv_heads, width), jnp.int32),
            "counts": jnp.zeros((rows, kv_heads), jnp.int32),
            "length": jnp.zeros(rows, jnp.int32),
        }

    def reuses(self, view: LayerView) -> Bool[Array, "B"]:
        """Rows with a list of fewer than ``every`` tokens ago."""
        chosen = view.carry["length"]
        return (chosen > 0) & (view.lengths - chosen < self.every)

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Selects for the rows whose turn it is; lists the last pages, and those since, for the others."""
        reused = self.reuses(view)
        carry, pages, more = view.carry, view.pages_per_row, -(-(self.every - 1) // view.page_size)
        more = min(more, pages - carry["pages"].shape[-1])

        def select():
            found = super(QuestReuse, self).choose(q, view, implementation)
            return jnp.pad(found.pages, ((0, 0), (0, 0), (0, more))), found.counts

        # Of the last list, and then of the pages that follow the last one in it, which was the current page.
        at, counts = jnp.arange(carry["pages"].shape[-1] + more), carry["counts"][..., None]
        listed = jnp.pad(carry["pages"], ((0, 0), (0, 0), (0, more)))
        last = (carry["length"] - 1) // view.page_size
        since = last[:, None, None] + 1 + at - counts
        listed = jnp.where(at < counts, listed, jnp.clip(since, 0, pages - 1))
        added = (view.lengths - 1) // view.page_size - last
        old = listed, carry["counts"] + added[:, None]
        return Selection(*by_row(reused, old, lax.cond(reused.all(), lambda: old, select)))

    def carry_on(self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection | None) -> Any:
        """The new lists."""
        del q
        if selection is None:
            return view.carry
        reused = self.reuses(view)
        width = view.carry["pages"].shape[-1]
        new = {"pages": selection.pages[..., :width], "counts": selection.counts, "length": view.lengths}
        return by_row(reused, view.carry, new)


METHODS = (
    Method(
        "quest_reuse", lambda budget: QuestReuse(budget, reduce="mean"), ("decode",), "1 / (8 S) + B / L",
        "`quest_mean`, which chooses anew every 8 steps of a row",
    ),
)  # fmt: skip

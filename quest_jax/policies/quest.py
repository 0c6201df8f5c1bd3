"""Quest: read the pages whose keys could score highest (Tang et al., arXiv 2406.10774)."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.metadata import Metadata, bounds_of
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.policies import cost
from quest_jax.policies.base import LayerView, PagePolicy, Selection
from quest_jax.policies.method import Method
from quest_jax.policies.ranking import largest
from quest_jax.policies.two_level import block_count, find_candidates, lengths_within

Variant = Literal["quest", "kernel", "sim"]
Ranking = Literal["box", "shrunk_box"]
Reduce = Literal["mean", "max", "sum_softmax", "max_softmax", "round_robin", "per_head"]


@dataclasses.dataclass(frozen=True)
class Quest(PagePolicy):
    r"""Top pages by the upper bound of their attention logits, within a budget of tokens.

    A page with per-channel key bounds ``m`` and ``M`` scores :math:`\sum_i \max(q_i m_i, q_i M_i)`, which no
    ``q . k`` of the page exceeds. Per decode step and layer it reads all metadata and ``budget`` tokens:
    ``1 / S + budget / L`` of the cache's bytes (times 2D float32 per page for the metadata, less where it is narrow).
    With ``block_pages`` N it scores ``1 / N`` of that and ``candidates * budget`` tokens' pages instead of all.

    The paper has two programs that differ; ``variant`` names them:

    * ``quest`` (default): ``floor(budget / S)`` pages, of which the current page and the ``sink_pages`` first ones are
      always read. A row of at most ``budget`` tokens is read whole: exactly dense attention. Ranks by the shrunk box.
    * ``kernel``: the same by the bound and without the sink, as in the paper's speed figures.
    * ``sim``: as in the paper's accuracy figures: ``max(3, floor(min(budget, L) / S))`` pages, a list per query head,
      the current page competes by its score, and a row within the budget may still lose a page.

    Attributes:
      budget: tokens to read per KV head (per query head with ``per_head``), the current page included.
      variant: see above.
      ranking: ``box`` ranks by the bound; ``shrunk_box`` by ``q . mid + beta |q| . half``, a better guess of the
        true maximum and no bound; None is ``shrunk_box`` for ``quest``, ``box`` for the two of the paper.
      beta: size of the shrunk box.
      reduce: how a group of query heads that shares a KV head agrees on one list: ``mean`` or ``max`` of the bounds,
        ``sum_softmax`` or ``max_softmax`` (of the heads' softmax over pages), ``round_robin`` (best page of every
        head, then the second of every head, ...), or ``per_head``: every query head reads a list of its own, G times
        the bytes. None is ``max_softmax`` for ``quest`` on one level, which predicts best at equal bytes, else
        ``mean``, which takes least arithmetic.
      dense_layers: the first layers attend to everything; they need far more pages than the rest.
      sink_pages: pages at the start that are always read (``quest`` only).
      dense_below: rows shorter than this many tokens are read whole; ``"auto"``: where the device's
        :class:`~quest_jax.policies.cost.CostModel` says that this is faster. 0, the default, always selects.
      block_pages: two levels, for contexts of 128K tokens and more: score blocks of so many pages first (the cache then
        keeps their min and max), and of pages only those of the best blocks, by their bound where pages go by theirs,
        else by a box of half ``beta``. None scores every page. A group shares its blocks: by the ``mean`` of its scores
        where pages go by that, else by the ``max``; a softmax over all pages there is none.
      candidates: with two levels, pages that are scored for every page of the budget, in whole blocks, the current one
        besides. A cache of no more blocks is scored on one level.

    Raises:
      ValueError: a value outside these, or at first use a budget below a page.

    Every field is static: changing one recompiles.
    """

    budget: int
    variant: Variant = "quest"
    ranking: Ranking | None = None
    beta: float = 0.5
    reduce: Reduce | None = None
    dense_layers: int = 2
    sink_pages: int = 1
    dense_below: int | Literal["auto"] = 0
    block_pages: int | None = None
    candidates: int = 8

    def __post_init__(self):
        for name, least in (
            ("budget", 1), ("dense_layers", 0), ("sink_pages", 0), ("dense_below", 0), ("block_pages", 2),
            ("candidates", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if (name, value) in (("dense_below", "auto"), ("block_pages", None)):
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                known = 'an integer or "auto"' if name == "dense_below" else "an integer"
                raise TypeError(f"Quest: expected {name} to be {known}, got {value!r}.")
            if value < least:
                raise ValueError(f"Quest: expected {name} to be at least {least}, got {value}.")
        for name, choices in (("variant", Variant), ("ranking", Ranking), ("reduce", Reduce)):
            value = getattr(self, name)
            if value not in choices.__args__ and (value is not None or name == "variant"):
                known = ", ".join(repr(choice) for choice in choices.__args__)
                raise ValueError(f"Quest: expected {name} to be one of {known}, got {value!r}.")
        if not 0 <= self.beta <= 1:
            raise ValueError(f"Quest: expected beta in [0, 1] (0: middle of the box, 1: the bound), got {self.beta}.")
        if self.block_pages is not None and self._reduce.endswith("softmax"):
            raise ValueError(
                f"Quest: expected another reduce than {self.reduce!r} with block_pages, got both: it weighs a head by "
                "its softmax over all pages, and two levels do not score them all; take 'mean'."
            )

    @property
    def needs_blocks(self) -> int | None:
        """Two levels need them."""
        return self.block_pages

    def check(self, page_size: int) -> None:
        """Raises ValueError when the budget is below a page, or below the sinks."""
        if self.budget < page_size:
            raise ValueError(
                f"Quest: expected a budget of at least one page, {page_size} tokens, got {self.budget}; "
                "raise the budget or take smaller pages (page_size=)."
            )
        if self._sinks > max(1, self.budget // page_size):
            raise ValueError(
                f"Quest: expected no more sink_pages than the {self.budget // page_size} pages of the budget, got "
                f"{self.sink_pages}; raise the budget."
            )

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers, and caches that can never hold enough to choose from."""
        # `sim` prunes within the budget too, down to 3 pages.
        enough = 3 * view.page_size if self.variant == "sim" else self.budget
        return layer < self.dense_layers or view.capacity <= max(enough, self._dense_below(view) - 1)

    def covers(self, view: LayerView) -> Bool[Array, "B"] | None:
        """Rows shorter than ``dense_below``."""
        least = self._dense_below(view)
        return view.lengths < least if least else None

    def _dense_below(self, view: LayerView) -> int:
        return cost.break_even(view.kv, view.meta, self.budget) if self.dense_below == "auto" else self.dense_below

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """The pages; with two levels, the blocks and the pages of those that are taken."""
        count = self._blocks_taken(pages, page_size)
        if self.block_pages is None or count is None:
            return super().scored(starts, lengths, pages, page_size)
        block_tokens = self.block_pages * page_size
        within = lengths_within(lengths, count, block_tokens)
        return -(-lengths // block_tokens) + -(-within // page_size)

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Scores and selects for one query token per row."""
        pages = view.pages_per_row
        count = self._blocks_taken(pages, view.page_size)
        if self.block_pages is None or count is None or q.shape[1] != 1:
            return super().choose(q, view, implementation)
        if view.blocks is None or bounds_of(view.blocks).shape[-2] * self.block_pages != pages:
            raise ValueError(
                f"Quest: expected a cache that keeps the metadata of blocks of {self.block_pages} pages, got one of "
                "others or none; init_attention and prefill keep it for the policy they are given."
            )
        found = find_candidates(
            q[:, 0], view.meta, view.blocks, view.lengths, count, page_size=view.page_size,
            reduce="mean" if self._reduce == "mean" else "max", beta=self._block_box_size, sink_pages=self._sinks,
            implementation=implementation,
        )  # fmt: skip
        scores = self.score(q[:, 0], found.meta, found.lengths, view.page_size, implementation)
        selection = self.select(scores, found.lengths, view.page_size)
        return selection._replace(pages=found.pages(selection.pages))

    @property
    def _reduce(self) -> Reduce:
        if self.variant == "sim":
            return "per_head"
        one_level = self.variant == "quest" and self.block_pages is None
        return self.reduce or ("max_softmax" if one_level else "mean")

    @property
    def _box_size(self) -> float:
        bound = self.ranking == "box" or (self.ranking is None and self.variant != "quest")
        return 1.0 if bound else self.beta

    @property
    def _block_box_size(self) -> float:
        # The larger a box, the emptier its corners: half as much of it loses half as much attention on SmolLM2.
        return 1.0 if self._box_size == 1 else self.beta / 2

    @property
    def _sinks(self) -> int:
        return self.sink_pages if self.variant == "quest" else 0

    def _blocks_taken(self, pages: int, page_size: int) -> int | None:
        """Blocks whose pages are scored in a cache of ``pages`` pages; None on one level."""
        if self.block_pages is None:
            return None
        count = block_count(self.budget, page_size, self.block_pages, self.candidates, self._sinks)
        return count if count * self.block_pages < pages else None

    def score(
        self,
        q: Float[Array, "B H D"],
        meta: Metadata,
        lengths: Int[Array, "B"],
        page_size: int,
        implementation: str | None,
    ) -> Float[Array, "B lists P"]:
        """Scores every page; see the class."""
        reduce = self._reduce
        in_op = reduce if reduce in ("mean", "max") else "none"
        scores = page_scores(
            q, meta, lengths, page_size=page_size, reduce=in_op, beta=self._box_size, implementation=implementation
        )
        if reduce in ("mean", "max", "per_head"):
            return scores
        by_head = scores.reshape(q.shape[0], bounds_of(meta).shape[-3], -1, scores.shape[-1])
        return self.agree(by_head, q.shape[-1], lengths, page_size)

    def agree(
        self, by_head: Float[Array, "B K G P"], head_dim: int, lengths: Int[Array, "B"], page_size: int
    ) -> Float[Array, "B lists P"]:
        """Joins the scores of a group's heads as ``reduce`` says; ``-inf`` past the length."""
        reduce = self._reduce
        rows, kv_heads, group, pages = by_head.shape
        live = (jnp.arange(pages) * page_size < lengths[:, None])[:, None]
        # In a softmax one bound that overflowed would make all of them NaN.
        most = float(jnp.finfo(jnp.float32).max) / 2
        by_head = jnp.where(live[:, None], jnp.nan_to_num(by_head, nan=most, posinf=most, neginf=-most), -jnp.inf)
        if reduce == "per_head":
            return by_head.reshape(rows, -1, pages)
        if reduce == "mean":
            return by_head.mean(axis=2)
        if reduce == "max":
            return by_head.max(axis=2)
        if reduce in ("sum_softmax", "max_softmax"):
            # Logarithms: of a head that looks at one page, all other shares are 0, and ties, in float32.
            shares = jax.nn.log_softmax(by_head * head_dim**-0.5, axis=-1)
            shared = jax.nn.logsumexp(shares, axis=2) if reduce == "sum_softmax" else shares.max(axis=2)
        else:
            # The turn at which the heads, picking one page after the other, would take each of their best.
            best = largest(by_head, min(-(-self.budget // page_size), pages))
            turns = jnp.arange(best.shape[-1]) * group + jnp.arange(group)[:, None]
            at = jnp.arange(rows)[:, None, None, None], jnp.arange(kv_heads)[:, None, None], best
            shared = jnp.full((rows, kv_heads, pages), -float(pages * group)).at[at].max(-turns)
        return jnp.where(live, shared, -jnp.inf)

    def select(self, scores: Float[Array, "B lists P"], lengths: Int[Array, "B"], page_size: int) -> Selection:
        """Takes the top pages; the lowest page wins a tie, but on a GPU: see :func:`largest`."""
        pages = scores.shape[-1]
        page = jnp.arange(pages)
        used = -(-lengths // page_size)  # [B]
        most = self.budget // page_size
        if self.variant == "sim":
            most = max(3, most)
            width = min(most, pages)
            count = jnp.maximum(3, jnp.minimum(self.budget, lengths) // page_size)
        else:
            # One more than fits when the budget is no multiple of a page: a row within the budget is read whole.
            width = min(-(-self.budget // page_size), pages)
            count = jnp.where(lengths <= self.budget, width, most)
            # Forced pages enter by score, the current page above the sink: with a budget of one page it is the one.
            most_score = float(jnp.finfo(jnp.float32).max)
            scores = jnp.minimum(scores, most_score / 2)  # a bound that overflowed does not push out a forced page
            scores = jnp.where((page < self._sinks) & (scores > -jnp.inf), most_score, scores)
            scores = jnp.where(page == (used - 1)[:, None, None], jnp.inf, scores)
        count = jnp.minimum(count, used)
        best = largest(scores, width)
        # Ascending, the dead at the end; they stay in range because they are gathered all the same.
        if self.variant != "sim" and width <= most:
            # Fewer live than taken only where the row has no more pages: the rest scored -inf and lies behind them.
            ascending = jnp.sort(best, axis=-1)
        else:
            taken = jnp.arange(width) < count[:, None, None]
            ascending = jnp.minimum(jnp.sort(jnp.where(taken, best, pages), axis=-1), pages - 1)
        counts = jnp.broadcast_to(count[:, None], scores.shape[:2]).astype(jnp.int32)
        return Selection(ascending.astype(jnp.int32), counts)


_BOUNDS = "1 / S + B / L"
METHODS = (
    Method(
        "quest", Quest, ("decode",), _BOUNDS,
        "[Quest](https://arxiv.org/abs/2406.10774) ranked by a shrunk box, with the first page, one list per KV head "
        "by the largest of its heads' softmax over pages",
    ),
    Method(
        "quest_box", lambda budget: Quest(budget, ranking="box", reduce="mean"), ("decode",), _BOUNDS,
        "`quest_mean` ranked by the bound",
    ),
    Method(
        "quest_kernel", lambda budget: Quest(budget, variant="kernel"), ("decode",), _BOUNDS,
        "the rule of the paper's kernels",
    ),
    Method(
        "quest_sim", lambda budget: Quest(budget, variant="sim"), ("decode",), "1 / S + G B / L",
        "the rule of the paper's accuracy figures", exact=False,
    ),
    Method(
        "quest_per_head", lambda budget: Quest(budget, reduce="per_head"), ("decode",),
        "1 / S + G B / L", "a list for every query head",
    ),
    Method(
        "quest_round_robin", lambda budget: Quest(budget, reduce="round_robin"), ("decode",), _BOUNDS,
        "one list, the heads of a group choosing in turn",
    ),
    Method(
        "quest_sum_softmax", lambda budget: Quest(budget, reduce="sum_softmax"), ("decode",), _BOUNDS,
        "one list by the sum of the heads' softmax over pages",
    ),
    Method(
        "quest_mean", lambda budget: Quest(budget, reduce="mean"), ("decode",), _BOUNDS,
        "one list by the mean of the heads' scores",
    ),
    Method(
        "quest_max", lambda budget: Quest(budget, reduce="max"), ("decode",), _BOUNDS,
        "one list by the largest of the heads' scores",
    ),
    Method(
        "quest_two_level", lambda budget: Quest(budget, block_pages=16), ("decode",), "1 / (16 S) + (1 + 8 / S) B / L",
        "blocks of pages first, then the pages of the best blocks",
    ),
)  # fmt: skip

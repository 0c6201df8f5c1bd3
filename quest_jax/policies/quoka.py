"""QuoKA: the queries least like their chunk's mean choose what the chunk reads (Jones et al., arXiv 2602.08722)."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.norms import EPSILON
from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.pallas_kernels.token_scores.op import IMPLEMENTATIONS, token_scores
from quest_jax.policies.base import LayerView, Policy, Selection
from quest_jax.policies.lists import best, chunk_of
from quest_jax.policies.method import Method
from quest_jax.policies.ranking import largest

ChunkMode = Literal["dense", "compete"]
Score = Literal["cosine", "dot"]
Reduce = Literal["max", "mean"]
Group = Literal["mean", "each"]
Granularity = Literal["auto", "token", "page"]


@dataclasses.dataclass(frozen=True)
class QuoKA(Policy):
    r"""Top keys by their cosine with a few queries of the chunk, one set for all its queries and a KV head's group.

    Algorithm 1 of the paper, for a chunk of queries :math:`q_{h,t}` and past keys :math:`k_j`:

    1. of every query head, the ``n_queries`` queries of lowest cosine to the mean of the chunk's, lowest first; a chunk
       of no more takes all, in order;
    2. :math:`\bar q_r` is the mean over the heads of a group of their r-th picks, each of length 1;
    3. :math:`s_j = \max_r \bar q_r \cdot k_j / |k_j|`;
    4. the ``budget`` keys of highest score, of ties the first, are attended, and the chunk itself, causally.

    A step of T queries over L past keys reads the L keys (with their inverse norms, which the cache keeps) to score
    them, and keys and values of ``budget + T`` tokens to attend (of ``budget`` where the chunk competes; of whole pages
    where pages are listed). While the past (the past and the chunk, where it competes) is within the budget it is dense
    attention. Decoding by this policy is the same with one query: it still reads every key, so at best it halves what
    dense attention reads.

    Attributes:
      budget: past tokens to attend to per KV head.
      n_queries: queries that choose.
      chunk: tokens of a prefill step; the paper's is 128.
      chunk_mode: ``dense``: the budget is for the past, the chunk is attended besides. ``compete``: one budget for
        both, and every query attends at least to its own token.
      group: ``mean``: the paper's step 2. ``each``: no average, the picks of every head of a group choose. That keeps
        more, for no more bytes and G times as many products with the keys; see ``docs/study.md``.
      share_query_index: pick the same positions for all heads of a group, by the sum of their cosines.
      score: ``cosine``, or ``dot``: picked queries and keys keep their length.
      reduce: over the picked queries, ``max`` or ``mean``.
      granularity: ``token``; ``page``: pages by the score of their best token, ``budget // page_size`` of them, a form
        that needs no gather of single tokens; ``auto``: pages on a TPU or GPU, tokens elsewhere.
      dense_layers: the first layers attend to everything.
      sink, recent: tokens at the start and at the end of what is scored that are always taken, within the budget; with
        pages, the pages that hold them.

    Raises:
      ValueError, TypeError: a value outside these, or at first use with pages a budget below a page.

    Every field is static: changing one recompiles.
    """

    budget: int
    n_queries: int = 16
    chunk: int = 128
    chunk_mode: ChunkMode = "dense"
    group: Group = "mean"
    share_query_index: bool = False
    score: Score = "cosine"
    reduce: Reduce = "max"
    granularity: Granularity = "auto"
    dense_layers: int = 0
    sink: int = 0
    recent: int = 0

    prefills: ClassVar[bool] = True

    def __post_init__(self):
        least = {"budget": 1, "n_queries": 1, "chunk": 1, "dense_layers": 0, "sink": 0, "recent": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"QuoKA: expected {name} to be an integer, got {value!r}.")
            if value < low:
                raise ValueError(f"QuoKA: expected {name} to be at least {low}, got {value}.")
        choices = {
            "chunk_mode": ChunkMode, "group": Group, "score": Score, "reduce": Reduce, "granularity": Granularity,
        }  # fmt: skip
        for name, known in choices.items():
            if getattr(self, name) not in known.__args__:
                names = ", ".join(repr(choice) for choice in known.__args__)
                raise ValueError(f"QuoKA: expected {name} to be one of {names}, got {getattr(self, name)!r}.")
        if not isinstance(self.share_query_index, bool):
            raise TypeError(f"QuoKA: expected share_query_index to be a bool, got {self.share_query_index!r}.")
        if self.sink + self.recent > self.budget:
            raise ValueError(
                f"QuoKA: expected sink and recent within the budget of {self.budget} tokens, got {self.sink} and "
                f"{self.recent}."
            )

    @property
    def needs_norms(self) -> bool:
        """A cosine needs them."""
        return self.score == "cosine"

    @property
    def adds_own(self) -> bool:
        """Where the chunk competes, a query may lose every token before it."""
        return self.chunk_mode == "compete"

    def check(self, page_size: int) -> None:
        """Raises ValueError when pages are listed, and the budget holds none, or not those of sink and recent."""
        if self.unit(page_size) != page_size:
            return
        if self.budget < page_size:
            raise ValueError(
                f"QuoKA: expected a budget of at least one page, {page_size} tokens, got {self.budget}; raise it, take "
                'smaller pages (page_size=), or granularity="token".'
            )
        # The recent tokens may begin anywhere in a page.
        always = -(-self.sink // page_size) + (-(-(self.recent - 1) // page_size) + 1 if self.recent else 0)
        if always > self.budget // page_size:
            raise ValueError(
                f"QuoKA: expected a budget of at least {always} pages of {page_size} tokens for sink {self.sink} and "
                f"recent {self.recent}, got {self.budget} tokens; raise it, or take fewer."
            )

    def unit(self, page_size: int) -> int:
        """1 where tokens are listed."""
        on_cpu = dispatch.current_target().platform == "cpu"
        return 1 if self.granularity == "token" or (self.granularity == "auto" and on_cpu) else page_size

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers, and caches that can never hold more than the budget."""
        return layer < self.dense_layers or view.capacity <= self.budget

    def covers(self, view: LayerView) -> Bool[Array, "B"]:
        """The rows whose past, or with ``compete`` all of it, is within the budget."""
        return (view.starts if self.chunk_mode == "dense" else view.lengths) <= self.budget

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """The keys that are candidates."""
        del pages, page_size
        return starts if self.chunk_mode == "dense" else lengths

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A key, and its inverse norm."""
        del metadata
        return head_dim * itemsize + 4 * self.needs_norms

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Algorithm 1; see the class."""
        queries, live = pick_queries(
            q, view.lengths - view.starts, pool_shape(view.kv).kv_heads,
            n_queries=self.n_queries, share_index=self.share_query_index, unit_length=self.score == "cosine",
            group=self.group,
        )  # fmt: skip
        return self.choose_by(queries, live, q.shape[1], view, implementation)

    def choose_by(
        self,
        queries: Float[Array, "B K R D"],
        live: Bool[Array, "B R"],
        n_tokens: int,
        view: LayerView,
        implementation: str | None,
    ) -> Selection:
        """Selects for a chunk of ``n_tokens`` by queries that were picked: lines 9 to 11 of Algorithm 1."""
        live = live[:, None, :, None]
        if self.reduce == "mean":  # the mean of products is the product of the mean
            queries = jnp.where(live, queries, 0).sum(axis=2, keepdims=True) / jnp.maximum(
                live.sum(axis=2)[..., None], 1
            )
        else:  # a query twice changes no maximum
            queries = jnp.where(live, queries, queries[:, :, :1])
        if self.needs_norms and view.norms is None:
            raise ValueError(
                "QuoKA: expected a cache with inverse key norms, got one without; prefill drops them after the prompt "
                "unless the policy for decoding needs them, and init_attention keeps them for the policies it is given."
            )
        compete, unit = self.chunk_mode == "compete", self.unit(view.page_size)
        ends = view.lengths if compete else view.starts
        scores = token_scores(
            queries, view.kv, view.norms if self.needs_norms else None, ends, view.page_table,
            implementation=dispatch.if_offered(IMPLEMENTATIONS, implementation),
        )  # fmt: skip
        position = jnp.arange(scores.shape[-1])
        always = (position < self.sink) | (position >= ends[:, None] - self.recent)
        scores = jnp.where((always & (position < ends[:, None]))[:, None], jnp.inf, scores)
        scores = scores.reshape(*scores.shape[:2], -1, unit).max(axis=-1)
        # Pages that hold a token of the chunk are read with it, the past tokens in them too.
        candidates = -(-ends // unit) if compete else ends // unit
        scores = jnp.where((jnp.arange(scores.shape[-1]) < candidates[:, None])[:, None], scores, -jnp.inf)
        # A row within the budget is read whole, a last page that is not full included.
        most = jnp.where(ends <= self.budget, candidates, jnp.minimum(self.budget // unit, candidates))
        width = min(-(-self.budget // unit), scores.shape[-1])
        return best(scores, most[:, None], width, None if compete else chunk_of(n_tokens, view, unit))


def pick_queries(
    q: Float[Array, "B T H D"],
    n_real: Int[Array, "B"],
    kv_heads: int,
    *,
    n_queries: int,
    share_index: bool = False,
    unit_length: bool = True,
    group: Group = "mean",
) -> tuple[Float[Array, "B K R D"], Bool[Array, "B R"]]:
    """Lines 1 to 8 of Algorithm 1: the queries least like the chunk's mean, averaged over each group or not.

    Args:
      q: queries; of row ``b`` the first ``n_real[b]`` are real.
      n_real: a row of at most ``n_queries`` takes all in order.
      kv_heads: K.
      n_queries: how many to take of a head, at most T.
      share_index: the same positions for all heads of a group.
      unit_length: bring each to length 1 before the average.
      group: ``mean`` or ``each``, see :class:`QuoKA`.

    Returns:
      float32 averages rank by rank, or queries head by head; and which of them are made of real queries.
    """
    rows, tokens, heads, _ = q.shape
    real = jnp.arange(tokens) < n_real[:, None]
    if tokens > n_queries:
        cosine = mean_cosine(q, n_real)
        if share_index:
            cosine = cosine.reshape(rows, kv_heads, -1, tokens).sum(axis=2)
            cosine = jnp.repeat(cosine, heads // kv_heads, axis=1)
        few = (n_real <= n_queries)[:, None, None]
        order = jnp.where(real[:, None], jnp.where(few, jnp.arange(tokens), cosine), jnp.inf)
        picks = largest(-order, n_queries)
    else:
        picks = jnp.broadcast_to(jnp.arange(tokens), (rows, heads, tokens))
    live = jnp.arange(picks.shape[-1]) < n_real[:, None]
    if group == "mean":
        return average_picks(q, picks, kv_heads, unit_length), live
    picked = _gather(q, picks, kv_heads, unit_length)
    return picked.reshape(rows, kv_heads, -1, picked.shape[-1]), jnp.tile(live, picked.shape[2])


def mean_cosine(q: Float[Array, "B T H D"], n_real: Int[Array, "B"]) -> Float[Array, "B H T"]:
    """Cosine of every query with the mean of its head's real queries."""
    q = q.astype(jnp.float32)
    real = jnp.arange(q.shape[1]) < n_real[:, None]
    mean = jnp.where(real[..., None, None], q, 0).sum(axis=1) / jnp.maximum(n_real, 1)[:, None, None]
    return jnp.einsum("bthd,bhd->bht", _normalise(q), _normalise(mean), precision="highest")


def average_picks(
    q: Float[Array, "B T H D"], picks: Int[Array, "B H R"], kv_heads: int, unit_length: bool = True
) -> Float[Array, "B K R D"]:
    """Averages the r-th picks of a group's heads, each brought to length 1 first unless told otherwise."""
    return _gather(q, picks, kv_heads, unit_length).mean(axis=2)


def _gather(q, picks, kv_heads, unit_length):
    """Returns what was picked, ``[B, K, G, R, D]``."""
    q = q.astype(jnp.float32).swapaxes(1, 2)  # [B, H, T, D]
    picked = jnp.take_along_axis(_normalise(q) if unit_length else q, picks[..., None], axis=2)
    return picked.reshape(len(q), kv_heads, -1, *picked.shape[2:])


def _normalise(x):
    return x / jnp.maximum(jnp.sqrt((x * x).sum(axis=-1, keepdims=True)), EPSILON)


METHODS = (
    Method(
        "quoka", lambda budget: QuoKA(budget, granularity="token"), ("prefill", "decode"), "1 / 2 + (B + T) / L",
        "[QuoKA](https://arxiv.org/abs/2602.08722), Algorithm 1",
    ),
    Method(
        "quoka_pages", lambda budget: QuoKA(budget, granularity="page"), ("prefill", "decode"), "1 / 2 + (B + T) / L",
        "the same by pages",
    ),
    Method(
        "quoka_each", lambda budget: QuoKA(budget, group="each", granularity="token"), ("prefill",),
        "1 / 2 + (B + T) / L", "QuoKA without its mean over a group: the picks of every head choose",
    ),
    Method(
        "quoka_each_pages", lambda budget: QuoKA(budget, group="each", granularity="page"), ("prefill",),
        "1 / 2 + (B + T) / L", "the same by pages, its form on a TPU or GPU",
    ),
)  # fmt: skip

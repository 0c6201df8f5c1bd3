"""What most baselines share: scores of tokens or pages, and the best of them as a list."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Policy, Selection
from quest_jax.policies.compact import positions
from quest_jax.policies.ranking import largest

Granularity = Literal["token", "page"]


@dataclasses.dataclass(frozen=True)
class ListPolicy(Policy):
    """A policy for decoding that lists the best tokens, or pages: a subclass has :meth:`score`.

    What is scored ``inf`` is always taken, and the last token, or page, is so already. A row of at most the budget is
    read whole.

    Attributes:
      budget: tokens to read per list, the current one included.
      granularity: whether ``budget`` single tokens are listed, or ``budget // page_size`` pages.
      dense_layers: the first layers attend to everything.

    Raises:
      ValueError, TypeError: a value outside these, or at first use with pages a budget below a page.

    Every field is static: changing one recompiles.
    """

    forgets: ClassVar[tuple[str, ...]] = ()  # entries of its memory that are of no use once every row was cut

    budget: int
    granularity: Granularity = "token"
    dense_layers: int = 2

    def __post_init__(self):
        self.check_integer("budget", 1)
        self.check_integer("dense_layers", 0)
        if self.granularity not in Granularity.__args__:
            name = type(self).__name__
            raise ValueError(f"{name}: expected granularity 'token' or 'page', got {self.granularity!r}.")

    def check_integer(self, field: str, least: int) -> None:
        """Raises TypeError or ValueError when a field is no integer of at least ``least``."""
        name, value = type(self).__name__, getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise TypeError(f"{name}: expected {field} to be an integer, got {value!r}.")
        if value < least:
            raise ValueError(f"{name}: expected {field} to be at least {least}, got {value}.")

    def check(self, page_size: int) -> None:
        """Raises ValueError when pages are listed, and the budget holds none."""
        if self.budget < self.unit(page_size):
            raise ValueError(
                f"{type(self).__name__}: expected a budget of at least one page, {page_size} tokens, got "
                f'{self.budget}; raise the budget, take smaller pages (page_size=), or granularity="token".'
            )

    @property
    def drops(self) -> bool:
        """Whether what a step leaves out is never read again, so that :func:`quest_jax.compact` can free it."""
        return False

    def real(self, view: LayerView) -> Bool[Array, "B #K L"]:
        """The slots that hold a token which a later step may read: all of them, where nothing is dropped."""
        return positions(view) < view.lengths[:, None, None]

    def settled(self, view: LayerView) -> Bool[Array, "B"]:
        """The rows that hold no more than the method keeps of what was read so far."""
        return (self.real(view).sum(axis=-1) <= self.budget).all(axis=-1)

    def kept(self, view: LayerView) -> Bool[Array, "B #K L"]:
        """What :func:`quest_jax.compact` keeps of rows that are settled, or have ended."""
        return self.real(view)

    def check_room(self, tokens: int) -> None:
        """Raises where the method cannot work with rows that may come to ``tokens``."""
        del tokens

    def unit(self, page_size: int) -> int:
        """1 where tokens are listed."""
        return 1 if self.granularity == "token" else page_size

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers, and caches that can never hold more than the budget."""
        return layer < self.dense_layers or view.capacity <= self.budget

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Nothing, unless the method says otherwise."""
        del starts, pages, page_size
        return jnp.zeros_like(lengths)

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """Scores and selects for one query token per row."""
        del implementation
        if q.shape[1] != 1:
            raise ValueError(f"{type(self).__name__}: expected one query token per row, got {q.shape[1]}.")
        unit = self.unit(view.page_size)
        used = -(-view.lengths // unit)
        scores = jnp.asarray(self.score(q[:, 0], view))
        rows, kv_heads, room = len(q), pool_shape(view.kv).kv_heads, view.capacity // unit
        if scores.shape not in {(rows, lists, room) for lists in (1, kv_heads, q.shape[2])}:
            raise ValueError(
                f"{type(self).__name__}: expected score to return [{rows}, {kv_heads}, {room}], rows, KV heads (or 1, "
                f"or {q.shape[2]} query heads) and {'tokens' if unit == 1 else 'pages'}, got {[*scores.shape]}."
            )
        place = jnp.arange(room)
        scores = jnp.where(place == (used - 1)[:, None, None], jnp.inf, scores)
        scores = jnp.where(place < used[:, None, None], scores, -jnp.inf)
        # Of a row within the budget every page: one more than fits where the budget is no multiple of a page.
        width = min(-(-self.budget // unit), len(place))
        most = jnp.where(view.lengths <= self.budget, width, self.budget // unit)[:, None]
        return best(scores, jnp.minimum(self.available(view), most), width)

    def available(self, view: LayerView) -> Int[Array, "B #lists"]:
        """How many tokens, or pages, there are to choose from."""
        return -(-view.lengths // self.unit(view.page_size))[:, None]

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """Ranks all tokens that a row has room for, or all pages, for one query token per row; float32.

        What lies past the length may have any score.
        """
        raise NotImplementedError(f"{type(self).__name__} does not score; a list policy defines score.")


def best(
    scores: Float[Array, "B lists N"],
    counts: Int[Array, "B #lists"],
    width: int,
    beside: tuple[Int[Array, "B n"], Bool[Array, "B n"]] | None = None,
) -> Selection:
    """Lists the ``counts`` best of tokens or pages, ascending; of equal scores the first.

    Args:
      scores: ``-inf`` where there is nothing to take.
      counts: how many to take, at most ``width``, and no more than there are; lists may be 1 for all the same.
      width: the longest list.
      beside: more to list, and which of it is there; not among what is scored.
    """
    rows, lists, room = scores.shape
    width = min(width, room)
    taken = largest(scores, width).astype(jnp.int32)
    # A score may be anything, NaN of a NaN key included: which entries are live follows from how many there are.
    live = jnp.broadcast_to(jnp.arange(width) < counts[..., None], taken.shape)
    if beside is not None:
        more, real = (jnp.broadcast_to(x[:, None], (rows, lists, x.shape[-1])) for x in beside)
        taken, live = jnp.concatenate([taken, more], axis=-1), jnp.concatenate([live, real], axis=-1)
    pages = jnp.minimum(jnp.sort(jnp.where(live, taken, room), axis=-1), room - 1)
    return Selection(pages, live.sum(axis=-1, dtype=jnp.int32))


def marked(selection: Selection, room: int) -> Bool[Array, "B lists room"]:
    """Marks what is listed, of the ``room`` tokens or pages that a row can have."""
    rows, lists, width = selection.pages.shape
    live = jnp.arange(width) < selection.counts[..., None]
    at = jnp.arange(rows)[:, None, None], jnp.arange(lists)[:, None], selection.pages
    return jnp.zeros((rows, lists, room), bool).at[at].max(live)


def everything(real: Bool[Array, "B lists N"], width: int) -> Selection:
    """Lists all that is marked, of which there are at most ``width``: what :func:`marked` undoes."""
    return best(jnp.where(real, 0.0, -jnp.inf), real.sum(axis=-1), width)


def chunk_of(n_tokens: int, view: LayerView, unit: int) -> tuple[Int[Array, "B n"], Bool[Array, "B n"]]:
    """The tokens, or pages, that the chunk's own ``n_tokens`` lie in, and which of them are there: for ``beside``."""
    own = (view.starts // unit)[:, None] + jnp.arange(-(-(n_tokens - 1) // unit) + 1)
    return own.astype(jnp.int32), own < -(-view.lengths // unit)[:, None]

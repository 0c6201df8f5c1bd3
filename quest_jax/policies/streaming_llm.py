"""StreamingLLM: the first tokens and the last ones, at the places they have in a small cache (arXiv 2309.17453)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.models.rope import apply_rope, attention_scaling, rope_rotation
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.pages import as_tokens, pool_shape
from quest_jax.policies.base import LayerView, Policy, Selection
from quest_jax.policies.compact import as_slots
from quest_jax.policies.method import Method
from quest_jax.policies.sink_window import SinkWindow


@dataclasses.dataclass(frozen=True)
class StreamingLLM(SinkWindow):
    r"""Reads the ``sink`` first tokens and the last ``budget - sink``, rotated by their place among those.

    The authors cache keys without rotation, and give the n-th of them position n, the query the last one. Of a row of L
    tokens, more than the budget B, the last ones then move ``L - B`` places together with the query, which changes none
    of their products; only the sinks come nearer. So the cache stays as it is, and the query, which looks at the last
    ones as it is, looks at the sinks turned from position ``L - 1`` to ``B - 1``:

    .. math:: s_j = (R_{B-1} R_{L-1}^{-1} q) \cdot k_j / \sqrt D, \qquad j < \mathrm{sink}

    Here the prompt is attended by ``prefill_policy``, all of it unless told otherwise, and streaming begins with the
    first decode step, in every layer, as in the authors' program. Reads ``budget / L`` of the cache, and nothing to
    choose.

    Attributes:
      budget: tokens to read, the current one included: the authors' cache, with room made for it.
      sink: tokens at the start.
      dense_layers: the first layers attend to everything; 0, other than for most methods here.
      rope: the rotation of queries and keys. None: the model's, in :func:`quest_jax.generate` and all that is given
        ``params``; :func:`quest_jax.attend` must be told.
      unrotated_layers: that rotate nothing, where this is ``sink_window``; likewise.
    """

    dense_layers: int = 0
    rope: RopeConfig | None = None
    unrotated_layers: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "token":
            raise ValueError(f"StreamingLLM: expected granularity 'token', got {self.granularity!r}.")
        if not isinstance(self.rope, RopeConfig | None):
            raise TypeError(f"StreamingLLM: expected rope to be a quest_jax.RopeConfig or None, got {self.rope!r}.")

    def fitted(self, config: LlamaConfig) -> "StreamingLLM":
        """With the rotation of the model.

        Raises:
          ValueError: it has another one already.
        """
        if self.rope not in (None, config.rope):
            raise ValueError(f"StreamingLLM: expected the rope of the model, {config.rope}, or None, got {self.rope}.")
        return dataclasses.replace(self, rope=config.rope, unrotated_layers=config.unrotated_layers)

    def at(self, layer: int, layers: int) -> Policy:
        """``sink_window`` where nothing is rotated.

        Raises:
          ValueError: no ``rope``.
        """
        del layers
        if self.rope is None:
            raise ValueError(
                "StreamingLLM: expected rope=, the rotary embedding of the queries and keys, got None; what is given "
                "params (generate, prefill, decode_step, feed_tokens) takes it from them, attend does not."
            )
        if layer in self.unrotated_layers:
            return SinkWindow(self.budget, dense_layers=self.dense_layers, sink=self.sink)
        return dataclasses.replace(self, unrotated_layers=())

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """The first layers, and caches that can never hold more than the budget.

        Raises:
          NotImplementedError: rows may outgrow the length up to which the keys' frequencies stay the same.
        """
        if not (dense := super().is_dense(layer, view)):
            self.check_room(view.capacity)
        return dense

    def check_room(self, tokens: int) -> None:
        """Raises NotImplementedError, see :meth:`is_dense`."""
        limit = None if self.rope is None else self.rope.original_max_positions
        if self.rope and self.rope.kind in ("dynamic", "longrope") and tokens > (limit or 0):
            raise NotImplementedError(
                f"StreamingLLM: RoPE type {self.rope.kind!r} rotates rows of more than {limit} tokens by other "
                f"frequencies, and the keys in the cache have those of their time; got room for {tokens}. Take "
                "a smaller capacity, or sink_window, which moves nothing."
            )

    def in_place(self, selection: Selection, view: LayerView) -> Selection:
        """All but the sinks; all, of rows within the budget."""
        apart = jnp.where(view.lengths > self.budget, self.sink, 0)
        pages = jnp.where(apart[:, None, None] > 0, jnp.roll(selection.pages, -self.sink, axis=-1), selection.pages)
        return Selection(pages, selection.counts - apart[:, None])

    def beside(
        self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection, lse: Float[Array, "B T H"]
    ) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]] | None:
        """The sinks, as the turned query sees them."""
        del lse
        if not self.sink:
            return None
        lists = len(q), pool_shape(view.kv).kv_heads
        counts = jnp.where(view.lengths > self.budget, self.sink, 0)
        kv, table = as_tokens(view.kv, view.page_table)
        slots = as_slots(view)  # the sinks are the first, in a compact layer too
        return page_attention(
            self._turned(q, view), kv, slots.starts, slots.lengths, table,
            pages=jnp.broadcast_to(jnp.arange(self.sink, dtype=jnp.int32), (*lists, self.sink)),
            counts=jnp.broadcast_to(counts[:, None], lists).astype(jnp.int32),
        )  # fmt: skip

    def _turned(self, q, view):
        """``q`` at position ``budget - 1``. Back to 0 first: by the model's own angle, which float32 has rounded."""
        rope = self.rope
        assert rope is not None  # at() sees to it
        scaling = attention_scaling(rope)

        def turn(q, positions, sign):
            cos, sin = rope_rotation(rope, q.shape[-1], positions, view.lengths)
            return apply_rope(q, cos / scaling, sign * sin / scaling)

        there = jnp.full_like(view.starts, self.budget - 1)
        back = turn(q.astype(jnp.float32), view.starts[:, None], -1)
        return turn(back, there[:, None], 1).astype(q.dtype)


METHODS = (
    Method(
        "streaming_llm", StreamingLLM, ("decode",), "B / L",
        "[StreamingLLM](https://arxiv.org/abs/2309.17453): the first 4 tokens and the last, rotated by their place",
        kind="evict",
    ),
)  # fmt: skip

"""Methods that choose in a few layers: the layers after one of those read what it chose."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from quest_jax.models.config import LlamaConfig
from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.base import LayerView, Selection
from quest_jax.policies.lists import ListPolicy

Role = Literal["by_layer", "whole", "select", "reuse"]


@dataclasses.dataclass(frozen=True)
class CarriedPolicy(ListPolicy):
    """A :class:`~quest_jax.policies.lists.ListPolicy` that chooses in few layers, for those after them.

    A layer that chooses reads everything, and scores with the true products of its own queries; the layers up to the
    next one that chooses read its list, and score nothing. The layers before the first read everything. A step over L
    tokens reads L of keys and values in a layer that reads everything, of keys once more where it chooses, and
    ``budget`` in the others.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`; tokens only.
      selecting: the layers that choose, ascending, the first not among the ``dense_layers``; they must see everything.
        None: layer 2, and that at 13/32 of the depth (13 of the 32 layers of Llama 3.1 8B), where a layer lies between;
        in a model with windows the next ones without.
      role: of one layer, from :meth:`at`; nothing to pass.
    """

    selecting: tuple[int, ...] | None = None
    role: Role = "by_layer"

    copies_keys: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        name = type(self).__name__
        if self.granularity != "token":
            raise ValueError(f"{name}: expected granularity 'token', got {self.granularity!r}.")
        if self.role not in Role.__args__:
            raise ValueError(f"{name}: expected role to be left alone, got {self.role!r}.")
        chosen = self.selecting
        if chosen is None:
            return
        if not isinstance(chosen, tuple) or any(
            isinstance(one, bool) or not isinstance(one, int | np.integer) for one in chosen
        ):
            raise TypeError(f"{name}: expected selecting to be a tuple of layers or None, got {chosen!r}.")
        if list(chosen) != sorted({*chosen}) or (chosen and chosen[0] < self.dense_layers):
            raise ValueError(
                f"{name}: expected selecting to be ascending, from layer {self.dense_layers} on (dense_layers), got "
                f"{chosen}."
            )

    def selects_in(self, layers: int) -> tuple[int, ...]:
        """The layers that choose, of a model of so many.

        Raises:
          ValueError: ``selecting`` names one that there is not.
        """
        if self.selecting is None:
            first, again = max(2, self.dense_layers), 13 * layers // 32
            return (first, again) if again > first + 1 else (first,)
        if self.selecting and self.selecting[-1] >= layers:
            raise ValueError(
                f"{type(self).__name__}: expected selecting below the {layers} layers of the model, got "
                f"{self.selecting}; None chooses by the depth."
            )
        return self.selecting

    def fitted(self, config: LlamaConfig) -> "CarriedPolicy":
        """With layers that see everything.

        Raises:
          ValueError: ``selecting`` names a layer with a window, or one that there is not.
        """
        wanted = self.selects_in(config.n_layers)
        full = [layer for layer in range(config.n_layers) if config.window(layer) is None]
        if {*wanted} <= {*full}:
            return self
        if self.selecting is not None:
            raise ValueError(
                f"{type(self).__name__}: expected selecting among the layers that see everything, {full}, got "
                f"{self.selecting}; None takes the next ones."
            )
        later = [next((layer for layer in full if layer >= one), None) for one in wanted]
        return dataclasses.replace(self, selecting=tuple(dict.fromkeys(one for one in later if one is not None)))

    def at(self, layer: int, layers: int) -> "CarriedPolicy":
        """By its role in ``layer``; a list that no layer would read is not made."""
        if self.role != "by_layer":
            return self
        chosen = self.selects_in(layers)
        role: Role = "reuse" if chosen and layer > chosen[0] else "whole"
        if layer in chosen:
            role = "select" if layer + 1 < layers and layer + 1 not in chosen else "whole"
        return dataclasses.replace(self, role=role, selecting=None, dense_layers=0)

    @property
    def chooses_for_others(self) -> bool:
        """Where it chooses."""
        return self.role == "select"

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """By the role; and caches that can never hold more than the budget."""
        del layer
        return self.role in ("whole", "select") or view.capacity <= self.budget

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Every key where it chooses."""
        del starts
        enough = self.role == "select" and pages * page_size > self.budget
        return lengths if enough else jnp.zeros_like(lengths)

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """A key."""
        del metadata
        return head_dim * itemsize

    def new_carry(self, rows: int, kv_heads: int, pages: int, page_size: int) -> Any:
        """The list: ``tokens`` int32 ``[B, lists, N]`` and ``counts`` ``[B, lists]``, 4 bytes a token."""
        lists, width = self.lists(kv_heads), min(self.budget, pages * page_size)
        return {
            name: jnp.zeros((rows, lists, *size), jnp.int32) for name, size in (("tokens", (width,)), ("counts", ()))
        }

    def carry_on(self, q: Float[Array, "B T H D"], view: LayerView, selection: Selection | None) -> Any:
        """The list of a layer that chooses."""
        del selection
        if self.role != "select" or view.capacity <= self.budget:
            return view.carry
        tokens, counts = super().choose(q, view, None)
        return {"tokens": tokens, "counts": counts}

    def choose(self, q: Float[Array, "B T H D"], view: LayerView, implementation: str | None) -> Selection:
        """The list that was handed on, the current token in it."""
        del q, implementation
        tokens, counts = view.carry["tokens"], view.carry["counts"]
        repeats = pool_shape(view.kv).kv_heads // counts.shape[1]
        return Selection(jnp.repeat(tokens, repeats, axis=1), jnp.repeat(counts, repeats, axis=1))

    def lists(self, kv_heads: int) -> int:
        """How many lists a row has: one for each KV head, or 1 for all."""
        return kv_heads

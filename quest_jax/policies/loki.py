"""Loki: keys rank by their first principal components (Singhania et al., arXiv 2406.02542)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.policies.base import LayerView, Policy, Sizes
from quest_jax.policies.basis import Basis
from quest_jax.policies.exact import logits
from quest_jax.policies.lists import ListPolicy
from quest_jax.policies.method import Method


@dataclasses.dataclass(frozen=True)
class Loki(ListPolicy):
    r"""Top tokens of every query head by the logit in the first ``channels`` of a basis of principal components.

    With the r eigenvectors :math:`P` of the largest variance of a layer's and KV head's rotated keys, a token scores
    :math:`(P^\top q_h) \cdot (P^\top k_j)`. Each query head has its own list; the current token is in it, no first
    token is. The paper measures the basis beforehand on another text: that is a ``basis`` of
    :func:`~quest_jax.policies.basis.load_basis`, which ``quest-jax calibrate loki`` writes. Without one, which is not
    the paper's, the basis is that of the row's own keys, all it has when it first exceeds the budget. A step reads
    ``channels / 2 D`` of the cache to choose (where keys are kept in the basis; here it reads
    them whole, and counts the channels), and ``G budget / L`` to attend.

    Attributes:
      budget, dense_layers: see :class:`~quest_jax.policies.lists.ListPolicy`; tokens only.
      channels: [r] of the basis; None: a quarter of the head's.
      basis: of the model; None: of the row's own keys.
    """

    channels: int | None = None
    basis: Basis | None = None

    copies_keys: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        if self.granularity != "token":
            raise ValueError(f"Loki: expected granularity 'token', got {self.granularity!r}.")
        if self.basis is not None and not isinstance(self.basis, Basis):
            raise TypeError(f"Loki: expected a basis of load_basis or None, got {type(self.basis).__name__}.")
        channels = self.channels
        if channels is not None and (isinstance(channels, bool) or not isinstance(channels, int | np.integer)):
            raise TypeError(f"Loki: expected channels to be an integer, got {channels!r}.")
        if channels is not None and channels < 1:
            raise ValueError(f"Loki: expected channels to be at least 1, got {channels}.")

    @property
    def remembers(self) -> bool:
        """Always, the basis."""
        return True

    def _channels(self, head_dim: int) -> int:
        return max(1, head_dim // 4) if self.channels is None else self.channels

    def scored(self, starts: Int[Array, "B"], lengths: Int[Array, "B"], pages: int, page_size: int) -> Int[Array, "B"]:
        """Every key."""
        del starts, pages, page_size
        return lengths

    def scored_nbytes(self, head_dim: int, itemsize: int, metadata: Kind = "float32") -> int:
        """The channels of a key that count."""
        del metadata
        return self._channels(head_dim) * itemsize

    def continues(self, other: Policy) -> bool:
        """With as many channels of the same basis."""
        return isinstance(other, Loki) and (self.channels, self.basis) == (other.channels, other.basis)

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """``basis`` ``[B, K, D, r]``, of a file ``[1, K, D, r]``.

        Without a file besides: which rows have ``taken`` theirs, ``[B]``, and of every row the ``moments`` of its keys,
        ``[B, K, D, D]``, and their ``sums``, ``[B, K, D]``.
        """
        kept, keys = self._channels(sizes.head_dim), (sizes.kv_heads, sizes.head_dim)
        if kept > sizes.head_dim:
            raise ValueError(f"Loki: expected channels of at most {sizes.head_dim}, the head's, got {kept}.")
        if self.basis is not None:
            vectors, wanted = self.basis.vectors, (sizes.layers, *keys, sizes.head_dim)
            if vectors.shape != wanted:
                raise ValueError(
                    f"Loki: expected a basis of this model, {list(wanted)} (layers, KV heads, head dim twice), got "
                    f"{list(vectors.shape)}; calibrate with this model."
                )
            return {"basis": jnp.asarray(vectors[layer][None, ..., :kept])}
        return {
            "basis": jnp.zeros((sizes.rows, *keys, kept), jnp.float32),
            "taken": jnp.zeros(sizes.rows, bool),
            "moments": jnp.zeros((sizes.rows, *keys, sizes.head_dim), jnp.float32),
            "sums": jnp.zeros((sizes.rows, *keys), jnp.float32),
        }

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Adds the new keys to the sums."""
        del v
        if self.basis is not None:
            return view.memory
        real = (view.starts[:, None] + jnp.arange(k.shape[1]) < view.lengths[:, None])[..., None, None]
        k = jnp.where(real, k.astype(jnp.float32), 0)
        products = jnp.einsum("btkd,btke->bkde", k, k, precision=lax.Precision.HIGHEST)
        memory = view.memory
        return memory | {"moments": memory["moments"] + products, "sums": memory["sums"] + k.sum(axis=1)}

    def observe(
        self, q: Float[Array, "B T H D"], view: LayerView, seen: Bool[Array, "B K L"] | None, lse: Float[Array, "B T H"]
    ) -> Any:
        """Keeps the basis by which the step chose."""
        del lse
        if self.basis is not None or seen is None or q.shape[1] != 1:
            return view.memory
        return view.memory | {"basis": self._basis(view), "taken": view.memory["taken"] | self._takes(view)}

    def score(self, q: Float[Array, "B H D"], view: LayerView) -> Float[Array, "B lists N"]:
        """The logits of the channels that count."""
        basis = self._basis(view)
        grouped = q.astype(jnp.float32).reshape(len(q), basis.shape[1], -1, q.shape[-1])
        parts = jnp.matmul(grouped, basis, precision=lax.Precision.HIGHEST)
        within = jnp.matmul(parts, basis.swapaxes(-1, -2), precision=lax.Precision.HIGHEST)
        scores = logits(within.reshape(len(q), 1, *q.shape[1:]), (view.lengths - 1)[:, None], view)
        return scores.reshape(*q.shape[:2], view.capacity)

    def _takes(self, view: LayerView) -> Bool[Array, "B"]:
        """Rows that choose for the first time."""
        return ~view.memory["taken"] & (view.lengths > self.budget) & (view.lengths > view.starts)

    def _basis(self, view: LayerView) -> Float[Array, "rows K D r"]:
        memory = view.memory
        if self.basis is not None:
            return memory["basis"]
        takes = self._takes(view)

        def measured():
            count = jnp.maximum(view.lengths, 1)[:, None, None, None]
            mean = memory["sums"][..., None] / count
            _, vectors = jnp.linalg.eigh(memory["moments"] / count - mean * mean.swapaxes(-1, -2))
            kept = memory["basis"].shape[-1]
            return jnp.where(takes[:, None, None, None], vectors[..., ::-1][..., :kept], memory["basis"])

        return lax.cond(takes.any(), measured, lambda: memory["basis"])


METHODS = (
    Method(
        "loki", Loki, ("decode",), "1 / 8 + G B / L",
        "[Loki](https://arxiv.org/abs/2406.02542): a quarter of the principal components of the row's own keys",
    ),
)  # fmt: skip

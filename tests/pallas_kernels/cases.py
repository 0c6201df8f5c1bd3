"""Shapes that every implementation of every op is run over, and float64 references of the ops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.pages import stored_head_dim


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: K KV heads, G heads a group, D head dim, S page size, the rows' lengths, and how the pool is kept."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    lengths: tuple[int, ...] = (40,)
    capacity: int = 128
    dtype: str = "float32"
    layout: str = "split"
    table: bool = False
    layers: int = 0
    padded: bool = False

    def __str__(self):
        default = Case()
        names = [field.name for field in dataclasses.fields(self)]
        return "-".join(f"{n}={getattr(self, n)}" for n in names if getattr(self, n) != getattr(default, n)) or "plain"

    @property
    def stored(self) -> int:
        """Head dim of the pool."""
        return stored_head_dim(self.head_dim, "fused", "tpu") if self.padded else self.head_dim

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def pages(self) -> int:
        return self.capacity // self.page_size

    @property
    def layer(self):
        return self.layers - 1 if self.layers else None


CASES = [
    Case(),
    Case(layout="fused"),
    Case(table=True),
    Case(layout="fused", table=True, lengths=(40, 3)),
    *[Case(group=group) for group in (1, 3, 4, 7, 8)],
    *[Case(head_dim=head_dim, layout="fused") for head_dim in (80, 96, 128)],
    *[Case(head_dim=head_dim, layout="fused", padded=True) for head_dim in (80, 96)],
    Case(head_dim=80, layout="fused", padded=True, dtype="bfloat16", group=3, table=True, lengths=(40, 17)),
    Case(head_dim=40, layout="fused", padded=True, layers=2, lengths=(15, 16, 17, 0, 1, 128)),
    *[Case(page_size=size) for size in (8, 32, 64, 128)],
    Case(page_size=5, capacity=65),
    Case(lengths=(15, 16, 17, 0, 1, 128)),
    Case(lengths=(15, 16, 17, 0, 1, 128), layout="fused", group=1, kv_heads=3),
    Case(capacity=16, lengths=(16, 5)),
    Case(capacity=2560, lengths=(2048, 1500, 2559)),  # more than one block of the dense loop, and a ragged last block
    Case(dtype="bfloat16"),
    Case(dtype="bfloat16", group=1, layout="fused", lengths=(40, 17)),
    Case(dtype="float16"),
    Case(layers=3),
    Case(layers=3, layout="fused", table=True, lengths=(33, 20)),
]
to_the_bit = pytest.mark.skipif(
    jax.config.values["jax_disable_most_optimizations"], reason="a batch of one is compiled to other sums at -O0"
)
TOLERANCE = {"float32": 2e-6, "bfloat16": 5e-3, "float16": 2e-3}


@dataclasses.dataclass
class Filled:
    """A pool with random tokens in it, as JAX arrays for the op and float64 copies for the reference."""

    kv: object
    meta: object
    table: object
    lengths: object
    keys: np.ndarray  # [B, capacity, K, D]
    values: np.ndarray


def table_of(case: Case, rng: np.random.Generator):
    """A shuffled page table (a pool page belongs to one row only), or None."""
    if not case.table:
        return None
    rows = len(case.lengths)
    return jnp.asarray(rng.permutation(rows * case.pages).reshape(rows, case.pages), jnp.int32)


def empty_pool(case: Case, fill: float = 0.0):
    """A pool and metadata holding nothing but ``fill``."""
    stack = (case.layers,) if case.layers else ()
    rows = len(case.lengths)
    pool = (*stack, case.kv_heads, rows * case.pages, case.page_size)
    meta = jnp.full((*stack, rows, case.kv_heads, case.pages, 2 * case.stored), fill, jnp.float32)
    if case.layout == "fused":
        return jnp.full((*pool, 2 * case.stored), fill, case.dtype), meta
    return tuple(jnp.full((*pool, case.head_dim), fill, case.dtype) for _ in range(2)), meta


def fill(case: Case, seed: int = 0, poison: float = np.nan, scale: float = 1.0) -> Filled:
    """Appends random tokens to a pool whose memory held ``poison``."""
    rng = np.random.default_rng(seed)
    kv, meta = empty_pool(case, poison)
    table = table_of(case, rng)
    rows = len(case.lengths)
    shape = (rows, case.capacity, case.kv_heads, case.head_dim)
    keys, values = (jnp.asarray(rng.normal(size=shape) * scale, case.dtype) for _ in range(2))
    lengths = jnp.asarray(case.lengths, jnp.int32)
    kv, meta = append(kv, meta, keys, values, jnp.zeros(rows, jnp.int32), lengths, table, layer=case.layer)
    return Filled(kv, meta, table, lengths, np.asarray(keys, np.float64), np.asarray(values, np.float64))


def queries(case: Case, tokens: int, seed: int = 1):
    """Random queries ``[B, T, H, D]`` in the case's dtype."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(len(case.lengths), tokens, case.heads, case.head_dim)), case.dtype)


def with_nan_key(filled: Filled):
    """The fused pool with NaN in one channel of the key at position 5 of row 0, KV head 0 (without a page table)."""
    return filled.kv.at[0, 0, 5, 3].set(jnp.nan)


def sees_nan_key(case: Case, starts, tokens: int, pages=None, counts=None) -> np.ndarray:
    """bool ``[B, T, H]``: which queries see the key of :func:`with_nan_key`."""
    sees = np.zeros((len(case.lengths), tokens, case.heads), bool)
    for t in range(tokens):
        for head in range(case.group):  # those of KV head 0
            listed = True
            if pages is not None:
                own = head * pages.shape[1] // case.heads
                listed = 0 in np.asarray(pages)[0, own, : int(counts[0, own])]
            sees[0, t, head] = listed and 5 <= starts[0] + t < case.lengths[0]
    return sees


def attention_float64(q, keys, values, seen):
    """Softmax attention of one query ``[D]`` over the keys ``[L, D]`` where ``seen``; ``(out, lse)``."""
    if not seen.any():
        return np.zeros(values.shape[-1]), -np.inf
    scores = keys[seen] @ q / np.sqrt(q.shape[-1])
    top = scores.max()
    weights = np.exp(scores - top)
    return weights @ values[seen] / weights.sum(), top + np.log(weights.sum())

"""From matrices in full precision to :class:`~quest_jax.models.quant.QuantArray`, on the host, array by array."""

from typing import Any

import jax
import numpy as np

from quest_jax.models.quant import LIMITS, QuantArray, QuantKind, abstract_quantized
from quest_jax.params import Params

MATRICES = {
    "embed": -1,
    "lm_head": -2,
    "qkv": -2,
    "out": -2,
    "gate_up": -2,
    "down": -2,
    "experts_gate_up": -2,
    "experts_down": -2,
}
"""What is quantised, and the axis that its products sum over. A router is small, and what it decides is not."""

_CHUNK_BYTES = 16 * 1024 * 1024


def as_quant_kind(weights: Any) -> QuantKind | None:
    """Checks the argument ``weights``; raises ValueError."""
    if weights is None or (isinstance(weights, str) and weights in LIMITS):
        return weights
    raise ValueError(f'weights: expected "int8", "int4" or None for full precision, got {weights!r:.80}.')


def quantize(params: Params, weights: QuantKind) -> Params:
    """Rounds the matrices of a model in memory to integers; norms, biases, sinks and routers stay as they are.

    :func:`quest_jax.load` does the same on the way in, without the whole model in full precision.

    Args:
      params: of :func:`quest_jax.load`, in full precision.
      weights: ``"int8"``, one scale per column of a matrix (per row of an embedding), or ``"int4"``, one for every 32
        numbers of it. No number moves by more than half its scale, the largest number over 127 or 7.

    Raises:
      ValueError: another kind, weights that are quantised already, or that are not finite.

    Example:
      >>> import quest_jax
      >>> config = quest_jax.LlamaConfig(
      ...     vocab_size=8, hidden_size=64, intermediate_size=64, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=32,
      ...     max_positions=16)
      >>> params = quest_jax.random_params(config)
      >>> [sum(leaf.nbytes for leaf in jax.tree.leaves(p)) for p in (params, quantize(params, "int8"))]
      [103168, 27968]
    """
    kind = as_quant_kind(weights)
    if kind is None or params.quantized is not None:
        raise ValueError(
            f'quantize: expected weights in full precision and "int8" or "int4", got {params.quantized or "those"} and '
            f"{weights!r}; load the original again."
        )

    def convert(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array | QuantArray:
        name = path[-1].key
        if name not in MATRICES:
            return leaf
        made = quantize_array(np.asarray(leaf), kind, MATRICES[name], jax.tree_util.keystr(path))
        return jax.tree.map(lambda part: jax.block_until_ready(jax.device_put(part)), made)

    return params.replace(weights=jax.tree_util.tree_map_with_path(convert, params.weights))


def quantize_tree(weights: dict[str, Any], kind: QuantKind | None) -> dict[str, Any]:
    """The abstract tree of :func:`quest_jax.models.llama.abstract_weights` with its matrices quantised."""

    def convert(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct | QuantArray:
        axis = MATRICES.get(path[-1].key)
        return leaf if kind is None or axis is None else abstract_quantized(leaf.shape, kind, axis)

    return jax.tree_util.tree_map_with_path(convert, weights)


def quantize_array(array: np.ndarray, kind: QuantKind, axis: int, name: str) -> QuantArray:
    """One matrix or stack of them, as numpy arrays; needs little more memory than these.

    Raises:
      ValueError: a number is not finite; the message has ``name``.
    """
    made = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), abstract_quantized(array.shape, kind, axis))
    parts = (array, made.values, made.scales)
    for matrix, values, scales in zip(*parts, strict=True) if array.ndim == 3 else [parts]:
        if axis == -1:
            matrix, values, scales = matrix.T, values.T, scales.T
        _fill(matrix, values, scales, made)
    if not np.isfinite(made.scales).all():
        raise ValueError(f"{name}: expected finite numbers, got NaN or infinity; load it without weights={kind!r}.")
    return made


def _fill(matrix: np.ndarray, values: np.ndarray, scales: np.ndarray, made: QuantArray) -> None:
    """Rounds ``matrix [in, out]`` into ``values`` and ``scales``, some columns at a time."""
    rows, limit = len(scales) * made.group, LIMITS[made.kind]
    step = max(1, _CHUNK_BYTES // (4 * rows))
    for start in range(0, matrix.shape[1], step):
        columns = slice(start, start + step)
        piece = matrix[:, columns].astype(np.float32)
        piece = np.pad(piece, ((0, rows - len(piece)), (0, 0))).reshape(len(scales), made.group, -1)
        with np.errstate(invalid="ignore"):
            # A normal number even where all are zero: nothing is divided by zero, and nothing is lost.
            scale = np.maximum(np.abs(piece).max(axis=1) / np.float32(limit), np.finfo(np.float32).tiny)
            rounded = np.rint(piece / scale[:, None]).clip(-limit, limit)
            integers = np.where(np.isfinite(rounded), rounded, 0).astype(np.int8).reshape(rows, -1)
        scales[:, columns] = scale
        if made.kind == "int4":
            low, high = np.split((integers + 8).astype(np.uint8), 2)
            values[:, columns] = low | (high << 4)
        else:
            values[:, columns] = integers

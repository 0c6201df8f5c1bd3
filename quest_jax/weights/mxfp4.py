"""MXFP4 of the safetensors of GPT-OSS: 32 numbers of 4 bits that share an exponent (OCP Microscaling Formats 1.0)."""

import numpy as np

from quest_jax.weights.stored import StoredTensor

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTES = 16  # of a block: two numbers each, the lower half first


def decode(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers ``[.., 32 n]`` of blocks ``[.., n, 16]`` and their exponents ``[.., n]``, biased by 127; uint8."""
    numbers = np.stack([_VALUES[blocks & 15], _VALUES[blocks >> 4]], axis=-1).reshape(*scales.shape, 2 * _BYTES)
    return np.ldexp(numbers, scales.astype(np.int32)[..., None] - 127).reshape(*scales.shape[:-1], -1)


def joined(blocks: StoredTensor, scales: StoredTensor, name: str, where: str) -> StoredTensor:
    """The stack of matrices ``[X, in, out]`` that blocks ``[X, out, in / 32, 16]`` and scales stand for.

    Raises:
      ValueError: their shapes do not fit each other.
    """
    if len(blocks.shape) != 4 or blocks.shape[-1] != _BYTES or scales.shape != blocks.shape[:-1]:
        raise ValueError(
            f"{where}: {name}: expected blocks [X, out, n, {_BYTES}] and scales [X, out, n] of MXFP4, got "
            f"{blocks.shape} and {scales.shape}."
        )
    experts, out, count, _ = blocks.shape

    def read(start: int, stop: int) -> np.ndarray:
        return decode(blocks.read(start, stop), scales.read(start, stop)).swapaxes(1, 2)

    return StoredTensor(name, (experts, 2 * _BYTES * count, out), read)


def join_all(raw: dict[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Puts together every pair of ``<name>_blocks`` and ``<name>_scales``; an unpaired one is left for the caller."""
    tensors = dict(raw)
    for name in raw:
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in raw:
            tensors[stem] = joined(tensors.pop(name), tensors.pop(f"{stem}_scales"), stem, where)
    return tensors

"""The header of a safetensors file, checked byte for byte against the file, and its tensors as numpy arrays.

Format (https://github.com/huggingface/safetensors#format): header length as little-endian u64, a JSON object
``{name: {dtype, shape, data_offsets}}``, then the data, which the offsets must cover without holes or overlaps.
Read here rather than through the ``safetensors`` package, which hands out bfloat16 only to a framework and says
"invalid header" where the user wants to know which tensor and why.
"""

import dataclasses
import math
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from quest_jax.weights.stored import StoredTensor
from quest_jax.weights.strict_json import MAX_JSON_BYTES, parse_json

_FLOATS = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_OTHER_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4,
    "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
_MAX_DIMENSIONS = 8
_LIMIT = 2**63


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file; ``offset`` counts from the start of the file."""

    path: pathlib.Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int

    def stored(self) -> StoredTensor:
        """For :mod:`quest_jax.weights.assemble`.

        Raises:
          NotImplementedError: not a floating-point type of at least 16 bits.
        """
        if self.dtype not in _FLOATS:
            raise NotImplementedError(
                f"{self.path}: tensor {self.name}: expected one of {', '.join(_FLOATS)}, got {self.dtype}; "
                "load the checkpoint without quantisation, or a GGUF file of the model."
            )
        return StoredTensor(self.name, self.shape, self.read)

    def bytes(self) -> StoredTensor:
        """The same for a tensor of bytes, which stand for something else.

        Raises:
          NotImplementedError: not of type U8.
        """
        if self.dtype != "U8":
            raise NotImplementedError(f"{self.path}: tensor {self.name}: expected U8, got {self.dtype}.")
        return StoredTensor(self.name, self.shape, self.read)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop`` in the type of the file."""
        dtype = np.dtype(np.uint8) if self.dtype == "U8" else _FLOATS[self.dtype]
        row = math.prod(self.shape[1:])
        count = (stop - start) * row
        with open(self.path, "rb") as file:
            file.seek(self.offset + start * row * dtype.itemsize)
            data = file.read(count * dtype.itemsize)
        if len(data) != count * dtype.itemsize:
            raise ValueError(f"{self.path}: the file ended while tensor {self.name} was read; fetch it again.")
        return np.frombuffer(data, dtype).reshape(stop - start, *self.shape[1:])


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name.

    Raises:
      FileNotFoundError: no such file.
      ValueError: truncated, too long, or a header that contradicts itself or the size of the file.
      NotImplementedError: a dtype this version does not know.
    """
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ValueError(
                f"{path}: expected a safetensors file, got {size} bytes whose header would need {8 + length}; "
                "the file is truncated or of another format, fetch it again."
            )
        if length > MAX_JSON_BYTES:
            raise ValueError(f"{path}: expected a header of at most {MAX_JSON_BYTES} bytes, got one of {length}.")
        header = parse_json(file.read(length), f"{path} (header)")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, item, 8 + length) for name, item in header.items()}
    _check_cover(path, list(entries.values()), 8 + length, size)
    return entries


def _entry(path: pathlib.Path, name: str, item: Any, base: int) -> TensorEntry:
    where = f"{path}: tensor {name}"
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: expected an entry with dtype, shape and data_offsets, got {str(item)[:80]}.")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not _sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"{where}: expected a shape of up to {_MAX_DIMENSIONS} sizes, got {str(shape)[:80]}.")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: expected data_offsets [begin, end], got {str(offsets)[:80]}.")
    if not isinstance(dtype, str) or (dtype not in _FLOATS and dtype not in _OTHER_BYTES):
        raise NotImplementedError(f"{where}: expected one of the dtypes {', '.join(_FLOATS)}, got {str(dtype)[:80]!r}.")
    itemsize = _FLOATS[dtype].itemsize if dtype in _FLOATS else _OTHER_BYTES[dtype]
    needed = math.prod(shape) * itemsize
    if needed != offsets[1] - offsets[0]:
        raise ValueError(f"{where}: {dtype} {shape} takes {needed} bytes, but data_offsets are {offsets}.")
    return TensorEntry(path, name, dtype, tuple(shape), base + offsets[0], needed)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _LIMIT for item in value)


def _check_cover(path: pathlib.Path, entries: list[TensorEntry], position: int, size: int) -> None:
    """Every byte after the header belongs to exactly one tensor."""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.size)):
        if entry.offset != position:
            kind = "overlaps the one before it" if entry.offset < position else "leaves a hole before it"
            raise ValueError(f"{path}: tensor {entry.name} {kind}; the header is damaged, fetch the file again.")
        position += entry.size
    if position != size:
        raise ValueError(f"{path}: the header describes {position} bytes, the file has {size}; fetch it again.")

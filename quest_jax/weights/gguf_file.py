"""The directory of a GGUF file: metadata and where each tensor lies, checked against the size of the file.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, two counts, key/value pairs, tensor
infos, padding, tensor data. Every count and length in it is a claim of the file. None is believed before it is known
to fit into the bytes that are left, so a damaged or hostile file costs neither memory nor time.
"""

import dataclasses
import os
import pathlib
import struct
from typing import Any, BinaryIO

import numpy as np

from quest_jax.weights.fields import shown

_MAX_HEADER_BYTES = 64 * 1024 * 1024  # the largest vocabularies in use need about 15 MB
_MAX_KEY_BYTES = 65535  # specification
_MAX_DIMENSIONS = 4  # specification
_MAX_ARRAY_DEPTH = 4
_MAX_ITEMS = 1 << 22  # of all values; as Python objects they take up to 20 times their bytes. Gemma 3 has 1.3 million
_ARRAY_ITEMS = 16  # what an array within an array counts as: each is read on its own
_MAX_ENTRIES = 1 << 16  # pairs, and tensors
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
      name: its name in the file.
      shape: row-major, outermost first (the file itself lists the innermost first).
      type_id: number of its ggml type.
      offset: first byte, from the start of the file. That the data ends inside the file is not checked here: it
        depends on the type.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Directory:
    """What the header of a GGUF file says."""

    path: pathlib.Path
    size: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


class _Cursor:
    """Reads the header front to back and refuses to go beyond its end."""

    def __init__(self, file: BinaryIO, path: pathlib.Path, size: int):
        self._file, self._path = file, path
        self.position, self._end = 0, min(size, _MAX_HEADER_BYTES)
        self._items_left = _MAX_ITEMS
        self._limit = f"the file has {size} bytes" if size <= _MAX_HEADER_BYTES else f"a header may have {self._end}"

    def error(self, text: str) -> ValueError:
        return ValueError(f"{self._path}: damaged GGUF file at byte {self.position}: {text}; fetch the file again.")

    def need(self, count: int, what: str) -> None:
        if count > self._end - self.position:
            raise self.error(f"{what} needs {count} bytes more, but {self._limit}")

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        data = self._file.read(count)
        if len(data) != count:
            raise self.error(f"the file ended while {what} was read")
        self.position += count
        return data

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str, max_bytes: int | None = None) -> str:
        length = self.number("<Q", f"the length of {what}")
        if max_bytes is not None and length > max_bytes:
            raise self.error(f"{what} has {length} bytes, at most {max_bytes} are allowed")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} is not UTF-8") from error

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what, depth)
        return self._scalars(kind, 1, what)[0]

    def _array(self, what: str, depth: int) -> list[Any]:
        kind = self.number("<I", f"the item type of {what}")
        count = self.number("<Q", f"the item count of {what}")
        if kind not in (_STRING, _ARRAY):
            return self._scalars(kind, count, what)
        if depth >= _MAX_ARRAY_DEPTH:
            raise self.error(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        self.need(count * (8 if kind == _STRING else 12), f"{what}, an array of {count},")
        self._count(count if kind == _STRING else _ARRAY_ITEMS * count, what)
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def _count(self, items: int, what: str) -> None:
        self._items_left -= items
        if self._items_left < 0:
            raise self.error(f"{what} brings the items of all values to more than {_MAX_ITEMS}")

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in _SCALARS:
            raise self.error(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        data = self.take(count * dtype.itemsize, what)
        self._count(count, what)
        array = np.frombuffer(data, dtype)
        return (array.astype(bool) if kind == _BOOL else array).tolist()


def read_directory(path: str | os.PathLike[str]) -> Directory:
    """Reads the header of a GGUF file, versions 2 and 3, little endian.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not GGUF, truncated, or a header whose parts contradict each other or the size of the file.
      NotImplementedError: another version, or the big-endian variant.
    """
    path = pathlib.Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        cursor = _Cursor(file, path, size)
        _read_version(cursor, path)
        n_tensors = cursor.number("<Q", "the tensor count")
        n_pairs = cursor.number("<Q", "the metadata count")
        cursor.need(n_pairs * _MIN_PAIR_BYTES + n_tensors * _MIN_TENSOR_BYTES, f"a list of {n_tensors} tensors")
        if max(n_tensors, n_pairs) > _MAX_ENTRIES:
            raise cursor.error(f"it lists {n_tensors} tensors and {n_pairs} pairs, at most {_MAX_ENTRIES} are allowed")
        metadata = _read_metadata(cursor, n_pairs)
        infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
        tensors = _place(cursor, infos, metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    return Directory(path=path, size=size, metadata=metadata, tensors=tensors)


def _read_version(cursor: _Cursor, path: pathlib.Path) -> None:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise ValueError(f"{path}: expected a GGUF file, which starts with b'GGUF', got {magic!r}.")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = f"big-endian version {swapped}" if swapped in (2, 3) else f"version {version}"
        raise NotImplementedError(f"{path}: expected GGUF version 2 or 3, little endian, got {what}; convert it again.")


def _read_metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata = {}
    for _ in range(count):
        key = cursor.string("a metadata key", _MAX_KEY_BYTES)
        if key in metadata:
            raise cursor.error(f"the metadata key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.number("<I", f"the type of {key!r}"), f"the value of {key!r}")
    return metadata


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.string("a tensor name", _MAX_KEY_BYTES)
    n_dims = cursor.number("<I", f"the number of dimensions of {name!r}")
    if not 1 <= n_dims <= _MAX_DIMENSIONS:
        raise cursor.error(f"tensor {name!r} has {n_dims} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple(cursor.number("<Q", f"the shape of {name!r}") for _ in range(n_dims))[::-1]
    type_id = cursor.number("<I", f"the type of {name!r}")
    return TensorInfo(name, shape, type_id, cursor.number("<Q", f"the offset of {name!r}"))


def _place(cursor: _Cursor, infos: list[TensorInfo], alignment: Any) -> dict[str, TensorInfo]:
    """Turns offsets within the data section into offsets within the file."""
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.error(f"general.alignment is {shown(alignment)}, expected a power of two up to 2**20")
    start = -(-cursor.position // alignment) * alignment
    tensors = {}
    for info in infos:
        if info.name in tensors:
            raise cursor.error(f"the tensor {info.name!r} occurs twice")
        if info.offset % alignment:
            raise cursor.error(f"tensor {info.name!r} starts at {info.offset}, which is no multiple of {alignment}")
        tensors[info.name] = dataclasses.replace(info, offset=start + info.offset)
    return tensors

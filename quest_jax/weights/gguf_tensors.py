"""The tensors of a GGUF file, checked against its size, and dequantised by the ``gguf`` package when they are read."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from quest_jax.weights.gguf_file import Directory, TensorInfo
from quest_jax.weights.stored import StoredTensor

_STACKS = ("_exps.weight", "_exps.bias")
_MOST_EXPERTS = 65536  # before work that grows with a number that need not fill the file


def open_tensors(directory: Directory) -> dict[str, StoredTensor]:
    """All tensors of the file by name, none read yet; where one has three axes, rows count through the first two.

    Raises:
      ImportError: the extra ``gguf`` is not installed.
      ValueError: a tensor that reaches beyond the file or into another.
      NotImplementedError: a type that cannot be dequantised; names the tensor and the type.
    """
    gguf = import_gguf()
    result, spans = {}, []
    for info in directory.tensors.values():
        where = f"{directory.path}: tensor {info.name}"
        kind, block, block_bytes = _type_of(gguf, info, where)
        if info.shape[-1] % block:
            raise ValueError(f"{where}: {kind.name} packs {block} numbers, a row has {info.shape[-1]}.")
        row_bytes = info.shape[-1] // block * block_bytes
        end = info.offset + math.prod(info.shape[:-1]) * row_bytes
        if end > directory.size:
            raise ValueError(
                f"{where}: {kind.name} {list(info.shape)} ends at byte {end}, but the file has {directory.size}; "
                "it is truncated, fetch it again."
            )
        spans.append((info.offset, end, info.name))
        read = functools.partial(_read, gguf, directory, info, kind, row_bytes)
        result[info.name] = StoredTensor(info.name, info.shape, read)
    _check_apart(directory, sorted(spans))
    return result


def split_stacks(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """Takes apart the stacks of experts, ``[X, out, in]`` or ``[X, out]``: expert x is the tensor ``<name>[x]``.

    Raises:
      ValueError: more experts than any model has.
    """
    parts = {}
    for name, tensor in tensors.items():
        if not name.endswith(_STACKS) or len(tensor.shape) < 2:
            parts[name] = tensor
            continue
        experts, *shape = tensor.shape
        if experts > _MOST_EXPERTS:
            raise ValueError(f"{where}: tensor {name}: expected at most {_MOST_EXPERTS} experts, got {experts}.")
        for expert in range(experts):
            read = functools.partial(_read_expert, tensor, expert)
            parts[f"{name}[{expert}]"] = StoredTensor(f"{name}[{expert}]", tuple(shape), read)
    return parts


def _read_expert(stack: StoredTensor, expert: int, start: int, stop: int) -> np.ndarray:
    if len(stack.shape) == 2:
        return stack.read(expert, expert + 1)[0, start:stop]
    first = expert * stack.shape[1]
    return stack.read(first + start, first + stop)


def import_gguf() -> Any:
    """The ``gguf`` package, or an ImportError that says how to get it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError('reading GGUF files needs the package gguf: run `pip install "quest_jax[gguf]"`.') from error
    return gguf


def _type_of(gguf: Any, info: TensorInfo, where: str) -> tuple[Any, int, int]:
    """(type, numbers a block, bytes a block)."""
    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise NotImplementedError(f"{where}: unknown type {info.type_id}; a newer gguf package may know it.") from error
    if not _dequantises(gguf, kind, block_bytes):
        raise NotImplementedError(f"{where}: type {kind.name} has no dequantiser; take a file in Q8_0, Q4_K or F16.")
    return kind, block, block_bytes


@functools.cache
def _dequantises(gguf: Any, kind: Any, block_bytes: int) -> bool:
    """Asks before anything is loaded; the package has no other way to tell."""
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _check_apart(directory: Directory, spans: list[tuple[int, int, str]]) -> None:
    for (_, end, name), (start, _, other) in zip(spans, spans[1:], strict=False):
        if start < end:
            raise ValueError(f"{directory.path}: tensors {name} and {other} overlap; the header is damaged.")


def _read(
    gguf: Any, directory: Directory, info: TensorInfo, kind: Any, row_bytes: int, start: int, stop: int
) -> np.ndarray:
    """Rows ``start`` to ``stop``, float32; a vector is one row on disk and read whole."""
    vector = len(info.shape) == 1
    first, count = (0, 1) if vector else (start, stop - start)
    with open(directory.path, "rb") as file:
        file.seek(info.offset + first * row_bytes)
        data = file.read(count * row_bytes)
    if len(data) != count * row_bytes:
        raise ValueError(f"{directory.path}: the file ended while tensor {info.name} was read; fetch it again.")
    with np.errstate(all="ignore"):  # a scale may be infinite in a damaged file; the numbers then say so themselves
        rows = gguf.dequantize(np.frombuffer(data, np.uint8).reshape(count, row_bytes), kind)
    return rows.reshape(-1)[start:stop] if vector else rows

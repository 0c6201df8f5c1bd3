"""Tensors of a file that are not read yet."""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, not yet read.

    Attributes:
      name: its name in the file.
      shape: ``[out, in]``, or ``[n]`` for a norm or a bias.
      read: ``read(start, stop)`` gives those rows as a float array; both are multiples of the head dim or the end.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]

    def checked(self, shape: tuple[int, ...], where: str) -> "StoredTensor":
        """Itself; raises ValueError where it has another shape than the config says."""
        if self.shape != shape:
            raise ValueError(f"{where}: tensor {self.name}: the config says {shape}, the file has {self.shape}.")
        return self


def rows_of(tensor: StoredTensor, start: int, stop: int) -> StoredTensor:
    """A part of the rows of a tensor, as a tensor of its own."""

    def read(first: int, last: int) -> np.ndarray:
        return tensor.read(start + first, start + last)

    return StoredTensor(f"{tensor.name}[{start}:{stop}]", (stop - start, *tensor.shape[1:]), read)


ReadExpert = Callable[[StoredTensor, int], np.ndarray]


def keeping_the_last() -> ReadExpert:
    """A reader of one expert of a stack, which keeps the last: parts and chunks of an expert are read in turn."""

    @functools.lru_cache(maxsize=1)
    def read(tensor: StoredTensor, expert: int) -> np.ndarray:
        return tensor.read(expert, expert + 1)[0]

    return read


def expert_of(
    tensor: StoredTensor,
    expert: int,
    read_expert: ReadExpert,
    *,
    transposed: bool = False,
    step: int = 1,
    offset: int = 0,
) -> StoredTensor:
    """One expert's tensor of a stack ``[X, ..]`` of them, ``[out, in]`` or ``[out]``.

    Args:
      tensor: the stack.
      expert: which.
      read_expert: of :func:`keeping_the_last`, one for a checkpoint.
      transposed: it is stored ``[in, out]``.
      step, offset: every so manieth row of ``out``, from this one on.
    """
    rows, *rest = tensor.shape[:0:-1] if transposed else tensor.shape[1:]

    def read(first: int, last: int) -> np.ndarray:
        whole = read_expert(tensor, expert)
        return (whole.T if transposed else whole)[offset::step][first:last]

    return StoredTensor(f"{tensor.name}[{expert}]", (len(range(offset, rows, step)), *rest), read)

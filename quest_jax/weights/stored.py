"""Tensors of a file that are not read yet."""

import dataclasses
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


def expert_of(tensor: StoredTensor, expert: int, *, transposed: bool = False, step: int = 1, offset: int = 0):
    """One expert's tensor of a stack ``[X, ..]`` of them, ``[out, in]`` or ``[out]``.

    Args:
      tensor: the stack.
      expert: which.
      transposed: it is stored ``[in, out]``.
      step, offset: every so manieth row of ``out``, from this one on.
    """
    rows, *rest = tensor.shape[:0:-1] if transposed else tensor.shape[1:]

    def read(first: int, last: int) -> np.ndarray:
        whole = tensor.read(expert, expert + 1)[0]
        return (whole.T if transposed else whole)[offset::step][first:last]

    return StoredTensor(f"{tensor.name}[{expert}]", (len(range(offset, rows, step)), *rest), read)

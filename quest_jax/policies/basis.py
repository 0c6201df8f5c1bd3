"""A basis of principal components for the keys of every layer and KV head: what Loki ranks by."""

import hashlib
import math
import pathlib
import re
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

_NAME = "loki_basis"
_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00(..)\{'descr': '<f4', 'fortran_order': False, "
    rb"'shape': \((\d{1,6}), (\d{1,6}), (\d{1,6}), (\d{1,6})\), \} *\n",
    re.DOTALL,
)
_LONGEST_HEADER = 256


class Basis:
    """Orthonormal vectors, those of the largest variance first. Equal, and hashed, by its numbers.

    Attributes:
      vectors: float32 ``[layers, K, D, D]``, in columns; not to be written to.
      digest: of them, in hexadecimal.

    Raises:
      ValueError: another shape or dtype, a number that is not finite, or columns that are not orthonormal.
    """

    def __init__(self, vectors: np.ndarray):
        vectors = np.array(vectors)
        shape = vectors.shape
        if vectors.dtype != np.float32 or len(shape) != 4 or shape[2] != shape[3] or 0 in shape:
            raise ValueError(f"Basis: expected float32 [layers, K, D, D], got {vectors.dtype} of shape {shape}.")
        if not np.isfinite(vectors).all():
            raise ValueError("Basis: expected finite vectors, got NaN or infinity.")
        away = max(np.abs(one.swapaxes(-1, -2) @ one - np.eye(shape[3])).max() for one in vectors)
        if not away < 1e-3:
            raise ValueError(f"Basis: expected orthonormal columns, got products that are {away:.2g} off.")
        vectors.flags.writeable = False
        self.vectors = vectors
        self.digest = hashlib.sha256(repr(shape).encode() + vectors.tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Basis) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        layers, kv_heads, head_dim, _ = self.vectors.shape
        return f"Basis({layers} layers, {kv_heads} KV heads, {head_dim} channels, {self.digest[:8]})"

    def save(self, path: str | pathlib.Path) -> None:
        """Writes an uncompressed ``.npz`` of one array."""
        with open(path, "wb") as file:
            np.savez(file, loki_basis=self.vectors)


def basis_of(keys: Sequence[np.ndarray]) -> Basis:
    """Returns the principal components of keys ``[K, n, D]``, one array a layer: eigenvectors of their covariance."""
    layers = []
    for one in keys:
        away = np.asarray(one, np.float64)
        away = away - away.mean(axis=1, keepdims=True)
        layers.append(np.linalg.eigh(away.swapaxes(1, 2) @ away)[1][..., ::-1])
    return Basis(np.stack(layers).astype(np.float32))


def load_basis(path: str | pathlib.Path) -> Basis:
    """Reads what :meth:`Basis.save` wrote. Takes no more memory than the file has bytes, whatever it says.

    Raises:
      OSError: no such file.
      ValueError: another file, or a damaged one; the message names it.
    """
    path = pathlib.Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            return Basis(_only_array(file, path.stat().st_size))
    except (ValueError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: expected a basis that quest-jax calibrate wrote: {error}") from error


def _only_array(file: zipfile.ZipFile, most: int) -> np.ndarray:
    if file.namelist() != [f"{_NAME}.npy"]:
        raise ValueError(f"expected one array {_NAME}, got {str(file.namelist()):.80}")
    member = file.infolist()[0]
    if member.compress_type != zipfile.ZIP_STORED or member.file_size > most:
        raise ValueError(f"expected it uncompressed, got {member.file_size} bytes in a file of {most}")
    with file.open(member) as stream:
        data = stream.read(member.file_size)
    match = _HEADER.match(data[:_LONGEST_HEADER])
    shape = tuple(int(size) for size in match.groups()[1:]) if match else ()
    if match is None or len(data) - match.end() != 4 * math.prod(shape):
        raise ValueError(f"expected float32 [layers, K, D, D], got {len(data)} bytes that begin {data[:40]!r}")
    return np.frombuffer(data, "<f4", offset=match.end()).reshape(shape)

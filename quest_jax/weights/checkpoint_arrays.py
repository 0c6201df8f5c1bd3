"""What TensorStore parses of an Orbax checkpoint, checked before it does.

It parses natively: JSON nested deep enough ends the process instead of raising, and a chunk is allocated
as large as its header claims.
"""

import pathlib
from typing import Any

from quest_jax.weights.fields import shown
from quest_jax.weights.strict_json import parse_json, read_json

_METADATA, _SHARDING, _HEADER = "_METADATA", "_sharding", b"/.zarray"


def check_array_headers(folder: pathlib.Path) -> None:
    """Raises ValueError unless the arrays of the folder are as :func:`quest_jax.save` has Orbax write them.

    Raises:
      ValueError: another layout than OCDBT with Zarr 2, or the header of an array that is no such header.
      FileNotFoundError: no metadata.
    """
    import tensorstore

    layout = read_json(folder / _METADATA)
    if layout.get("use_ocdbt") is not True or layout.get("use_zarr3") is not False:
        raise ValueError(f"{folder}: expected the layout that quest_jax.save writes, OCDBT with Zarr 2, got another.")
    if (folder / _SHARDING).is_file():
        read_json(folder / _SHARDING)
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}).result()
    for key in store.list().result():
        if key.endswith(_HEADER):
            _check_header(store.read(key).result().value, f"{folder}: {key.decode(errors='replace')[:80]}")


def _check_header(data: bytes, where: str) -> None:
    header = parse_json(data, where)
    shape: Any = header.get("shape")
    chunks: Any = header.get("chunks")
    if not (_integers(shape) and _integers(chunks) and len(shape) == len(chunks)):
        raise ValueError(f"{where}: expected a shape and as many chunks, got {shown(shape)} and {shown(chunks)}.")
    if any(not 1 <= chunk <= size for chunk, size in zip(chunks, shape, strict=True)):
        raise ValueError(f"{where}: expected chunks within the shape {shown(shape)}, got {shown(chunks)}.")


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)

"""Checkpoints of this library: an Orbax checkpoint of the weights, and the config beside it as JSON.

* ``<path>/quest_jax.json``: ``{"format": 1, "config": {...}}``, and ``"weights": "int8"`` where they are quantised
* ``<path>/weights/``: Orbax; of a quantised matrix its ``values`` and ``scales``
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax.memory import check_memory
from quest_jax.models.config import Activation, Experts, LlamaConfig, RopeConfig, RopeKind, RouterKind
from quest_jax.models.llama import abstract_weights
from quest_jax.models.quant import QuantArray, QuantKind
from quest_jax.params import Params
from quest_jax.weights.assemble import check_rope, target_dtype
from quest_jax.weights.checkpoint_arrays import check_array_headers
from quest_jax.weights.fields import Fields, shown
from quest_jax.weights.quantize import as_quant_kind, quantize, quantize_tree
from quest_jax.weights.strict_json import read_json

MARKER = "quest_jax.json"
"""The file that makes a directory a checkpoint of this library."""

_WEIGHTS = "weights"
_FORMAT = 1


def save_checkpoint(params: Params, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """See :func:`quest_jax.weights.load.save`."""
    import orbax.checkpoint as ocp

    target = _target(path)
    _check_params(params)
    existing = target.exists()
    if existing and not target.is_dir():
        raise FileExistsError(f"{target}: expected a directory that is new or empty, got a file.")
    if existing and any(target.iterdir()):
        if not (target / MARKER).is_file():
            raise FileExistsError(f"{target}: the directory holds other files; choose a new or empty one.")
        if not overwrite:
            raise FileExistsError(f"{target}: a checkpoint is there; choose another path or pass overwrite=True.")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: the last step is then a rename within one file system, and a crash leaves no half checkpoint.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        fresh = pathlib.Path(folder) / "new"
        fresh.mkdir()
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(fresh / _WEIGHTS, _plain(params.weights))
            checkpointer.wait_until_finished()
        header = {"format": _FORMAT, "config": dataclasses.asdict(params.config)}
        header |= {} if params.quantized is None else {"weights": params.quantized}
        (fresh / MARKER).write_text(json.dumps(header, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        old = pathlib.Path(folder) / "old"  # removed with the folder
        if existing:
            os.replace(target, old)
        try:
            os.replace(fresh, target)
        except OSError:
            if existing:
                os.replace(old, target)
            raise


def load_checkpoint(
    path: str | os.PathLike[str], dtype: np.dtype | None = None, weights: QuantKind | None = None
) -> Params:
    """Restores what :func:`save_checkpoint` wrote, on JAX's default device, whatever devices it was written from.

    Args:
      path: the directory.
      dtype: convert to it; None keeps the dtype of the checkpoint, bit for bit.
      weights: quantise the matrices, once all are restored; None keeps them as they are.

    Raises:
      ValueError: a damaged checkpoint, one whose config and weights contradict each other, or whose weights are
        quantised in another way.
      MemoryError: the weights do not fit; raised before any is read.
    """
    import orbax.checkpoint as ocp

    path = _target(path)
    config, kind = _read_header(path / MARKER)
    if kind is not None and weights not in (None, kind):
        raise ValueError(
            f"{path}: weights: these are {kind}, got {weights}; load the original with weights={weights!r}."
        )
    with ocp.StandardCheckpointer() as checkpointer:
        with _naming(path):
            check_array_headers(path / _WEIGHTS)
            stored = checkpointer.metadata(path / _WEIGHTS).item_metadata.tree
            saved_dtype = stored["norm"].dtype
        target = _restore_target(config, stored, target_dtype(saved_dtype) if dtype is None else dtype, kind, path)
        with _naming(path):
            restored = checkpointer.restore(path / _WEIGHTS, _plain(target))
    params = Params(weights=_map(lambda leaf, parts: leaf.replace(**parts), target, restored), config=config)
    return params if weights is None or kind is not None else quantize(params, weights)


def _map(function: Callable[..., Any], weights: Any, *others: Any) -> Any:
    """The tree with its quantised matrices replaced, and all else as in the last of the trees."""

    def convert(leaf: Any, *parts: Any) -> Any:
        return function(leaf, *parts) if isinstance(leaf, QuantArray) else (leaf, *parts)[-1]

    return jax.tree.map(convert, weights, *others, is_leaf=lambda node: isinstance(node, QuantArray))


def _plain(weights: Any) -> Any:
    return _map(lambda leaf: {"values": leaf.values, "scales": leaf.scales}, weights)


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # on a damaged file Orbax raises this very class, among others
        first_line = str(error).split("\n")[0][:200]
        raise ValueError(f"{path}: the checkpoint is damaged or does not fit {MARKER}: {first_line}") from error


def _restore_target(
    config: LlamaConfig, stored: Any, dtype: np.dtype, kind: QuantKind | None, path: pathlib.Path
) -> dict[str, Any]:
    """What to restore and where to put it, once the config is known to fit what is stored."""
    layers = sum(name.startswith("layer_") for name in stored)
    if config.n_layers != layers:  # before work that grows with it
        raise ValueError(f"{path}: the config says {config.n_layers} layers, {layers} are stored.")
    stored_shapes = _shapes(stored)
    largest = max((size for shape in stored_shapes.values() for size in shape), default=0)
    if config.head_dim > largest:
        raise ValueError(f"{path}: the config says head_dim {config.head_dim}, the largest size stored is {largest}.")
    check_rope(config, str(path))  # allocates a head's frequencies
    abstract = quantize_tree(abstract_weights(config, dtype), kind)
    expected, actual = _shapes(_plain(abstract)), stored_shapes
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"{path}: {name}: the config calls for {expected.get(name)}, stored is {actual.get(name)}."
            )
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)]
    check_memory(sum(sizes), max(sizes), str(path))
    # Without a sharding Orbax asks for the devices that wrote the checkpoint.
    (device,) = jnp.zeros(()).devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract)


def _shapes(weights: Any) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=lambda node: hasattr(node, "shape"))
    return {jax.tree_util.keystr(path): list(getattr(leaf, "shape", ())) for path, leaf in leaves}


def _target(path: str | os.PathLike[str]) -> pathlib.Path:
    """Orbax wants absolute paths."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise TypeError(f"path: expected a string or a path, got {type(path).__name__}.")
    text = os.fspath(path)
    if "://" in text:
        raise NotImplementedError(f"path: expected one of the local file system, got {text}; copy to the bucket after.")
    if not text.strip() or "\0" in text:
        raise ValueError(f"path: expected the path of a directory, got {text!r}.")
    return pathlib.Path(text).expanduser().resolve()


def _check_params(params: Params) -> None:
    if not isinstance(params, Params):
        raise TypeError(f"params: expected quest_jax Params, as quest_jax.load returns, got {type(params).__name__}.")
    embed = params.weights.get("embed") if isinstance(params.weights, dict) else None
    if not isinstance(embed, jax.Array | np.ndarray | QuantArray):
        raise ValueError("params.weights: expected a dict with the array 'embed' and the others of models/llama.py.")
    typed = params.weights.get("norm") if isinstance(embed, QuantArray) else embed
    dtype = target_dtype(getattr(typed, "dtype", jnp.float32))
    expected = dict(_described(quantize_tree(abstract_weights(params.config, dtype), params.quantized)))
    actual = dict(_described(params.weights))
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise ValueError(
                f"params.weights: {name}: the config calls for {expected.get(name)}, got {actual.get(name)}."
            )


def _described(weights: Any) -> list[tuple[str, str]]:
    """Name, and dtype and shape as text, of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(weights)
    return [
        (jax.tree_util.keystr(path), f"{getattr(leaf, 'dtype', type(leaf).__name__)}{list(np.shape(leaf))}")
        for path, leaf in leaves
    ]


def read_checkpoint_config(path: pathlib.Path) -> LlamaConfig:
    """Reads the file ``MARKER``; raises ValueError where it is damaged."""
    return _read_header(path)[0]


def _read_header(path: pathlib.Path) -> tuple[LlamaConfig, QuantKind | None]:
    header = read_json(path)
    if header.get("format") != _FORMAT:
        raise ValueError(
            f"{path}: expected format {_FORMAT}, got {shown(header.get('format'))}; use the version that wrote it."
        )
    values = header.get("config")
    if not isinstance(values, dict) or not isinstance(values.get("rope"), dict):
        raise ValueError(f"{path}: expected an object config with an object rope; the file is damaged.")
    parts: dict[str, Any] = {"rope": RopeConfig, "window_rope": RopeConfig, "experts": Experts}
    try:
        for name, kind in parts.items():
            part = values.get(name)
            if part is not None and not isinstance(part, dict):
                raise ValueError(f"{path}: {name}: expected an object, got {shown(part)}; the file is damaged.")
            parts[name] = None if part is None else kind(**_arguments(kind, part, path))
        eos = Fields(values, str(path)).ids("eos_token_ids") or ()
        arguments: dict[str, Any] = {**_arguments(LlamaConfig, values, path), **parts, "eos_token_ids": eos}
        return LlamaConfig(**arguments), as_quant_kind(header.get("weights"))
    except (NotImplementedError, ValueError) as error:
        raise error if str(error).startswith(str(path)) else type(error)(f"{path}: {error}") from error


def _arguments(kind: type[Any], values: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """The numbers, flags and strings among the fields of a config class, checked for their types."""
    fields = Fields(values, str(path))
    readers: dict[Any, Any] = {int: fields.integer, float: fields.number, bool: fields.flag, RopeKind: fields.text}
    readers |= {int | None: fields.integer, float | None: fields.number}
    readers |= {Activation: fields.text, RouterKind: fields.text}
    readers |= {tuple[int, ...]: fields.integers, tuple[float, ...]: fields.numbers}
    declared = dataclasses.fields(kind)
    unknown = sorted(set(values) - {field.name for field in declared})
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0][:80]!r}; a newer version may have written it.")
    return {
        field.name: readers[field.type](field.name)
        for field in declared
        if field.type in readers and (values.get(field.name) is not None or field.default is dataclasses.MISSING)
    }

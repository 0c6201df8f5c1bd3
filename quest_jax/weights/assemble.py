"""From named tensors in a file to the weight tree: every name and shape checked, then one array after another.

A checkpoint keeps q, k, v and gate, up apart and stores matrices ``[out, in]``; the tree fuses and transposes them
(:mod:`quest_jax.models.llama`). Each array of the tree is filled on the host in its target dtype, a few rows at a
time, and handed to the device before the next one starts: peak memory is the model plus its largest array.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax.memory import check_memory
from quest_jax.models.config import LlamaConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.models.rope import inverse_frequencies
from quest_jax.params import Params

_FUSED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_CHUNK_BYTES = 16 * 1024 * 1024
_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file, not yet read.

    Attributes:
      name: its name in the file.
      shape: ``[out, in]``, or ``[E]`` for a norm.
      read: ``read(start, stop)`` gives those rows as a float array; both are multiples of the head dim or the end.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]


def target_dtype(dtype: Any) -> np.dtype:
    """The dtype weights are kept in, from a name or any dtype-like object.

    Raises:
      TypeError: not a dtype.
      ValueError: neither float32 nor bfloat16.
    """
    try:
        result = jnp.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f'dtype: expected "float32" or "bfloat16", got {dtype!r}.') from error
    if dtype is None or result not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(f'dtype: expected "float32" or "bfloat16", got {dtype!r}.')
    return result


def match_tensors(
    config: LlamaConfig, names: Mapping[str, str], stored: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredTensor]:
    """Pairs every tensor the model needs with one of the file.

    Args:
      config: the model.
      names: the file's name of each part: ``embed norm lm_head`` and, with ``{}`` for the layer,
        ``attn_norm q k v out mlp_norm gate up down``.
      stored: all tensors of the file that are not known to be superfluous.
      where: the file, for errors.

    Returns:
      ``stored`` under the keys ``embed``, ``norm``, ``lm_head`` and ``layer_<i>/<part>``.

    Raises:
      ValueError: a tensor is missing, not used, or has another shape than the config says.
    """
    if config.n_layers > len(stored):  # before a loop over a number that nothing has confirmed
        raise ValueError(f"{where}: the config says {config.n_layers} layers, but there are {len(stored)} tensors.")
    shapes = {key: (names[part].format(layer), shape) for layer, key, part, shape in _parts(config)}
    missing = [name for name, _ in shapes.values() if name not in stored]
    if missing:
        raise ValueError(f"{where}: expected every tensor of the model, {_listed(missing)} missing; fetch it again.")
    unused = set(stored) - {name for name, _ in shapes.values()}
    if unused:
        raise ValueError(f"{where}: expected the tensors of a Llama decoder only, {_listed(sorted(unused))} unknown.")
    for name, shape in shapes.values():
        if stored[name].shape != shape:
            raise ValueError(f"{where}: tensor {name}: the config says {shape}, the file has {stored[name].shape}.")
    return {key: stored[name] for key, (name, _) in shapes.items()}


def assemble(config: LlamaConfig, dtype: np.dtype, tensors: Mapping[str, StoredTensor], where: str) -> Params:
    """Reads the tensors of :func:`match_tensors` into the weight tree, on JAX's default device.

    Raises:
      MemoryError: they do not fit; raised before the first is read.
      ValueError: a RoPE whose frequencies cannot be computed, or a file that ends early.
    """
    check_rope(config, where)
    abstract = abstract_weights(config, dtype)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)]
    check_memory(sum(sizes), max(sizes), where)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        *layer, name = (key.key for key in path)
        parts = [tensors["/".join([*layer, part])] for part in _FUSED.get(name, (name,))]
        return _to_device(_filled(leaf, parts, config.head_dim, transpose=name != "embed"))

    return Params(weights=jax.tree_util.tree_map_with_path(place, abstract), config=config)


def check_rope(config: LlamaConfig, where: str) -> None:
    """Raises ValueError, naming the file, where the frequencies of the config's RoPE are not positive and finite."""
    try:
        with np.errstate(all="ignore"):
            frequencies = inverse_frequencies(config.rope, config.head_dim)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"{where}: no RoPE frequencies can be computed from {config.rope}: {error}") from error
    if not (np.isfinite(frequencies).all() and (frequencies > 0).all()):
        raise ValueError(f"{where}: expected positive, finite RoPE frequencies, not what {config.rope} gives.")


def _parts(config: LlamaConfig) -> Iterable[tuple[int, str, str, tuple[int, ...]]]:
    """(layer, key, part, shape ``[out, in]``) of everything a checkpoint stores."""
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    yield 0, "embed", "embed", (vocab, hidden)
    yield 0, "norm", "norm", (hidden,)
    if not config.tie_word_embeddings:
        yield 0, "lm_head", "lm_head", (vocab, hidden)
    block = {
        "attn_norm": (hidden,), "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden),
        "out": (hidden, queries), "mlp_norm": (hidden,), "gate": (inner, hidden), "up": (inner, hidden),
        "down": (hidden, inner),
    }  # fmt: skip
    for layer in range(config.n_layers):
        for part, shape in block.items():
            yield layer, f"layer_{layer}/{part}", part, shape


def _filled(leaf: jax.ShapeDtypeStruct, parts: list[StoredTensor], head_dim: int, transpose: bool) -> np.ndarray:
    """One array of the tree on the host: the parts side by side, transposed, converted chunk by chunk."""
    buffer = np.empty(leaf.shape, leaf.dtype)
    view = buffer.T if transpose else buffer  # [out, in] either way; the transpose of a vector is itself
    assert view.shape[0] == sum(part.shape[0] for part in parts)
    row_bytes = 4 * math.prod(view.shape[1:])
    step = max(1, _CHUNK_BYTES // (row_bytes * head_dim)) * head_dim
    begin = 0
    for part in parts:
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            view[begin + start : begin + stop] = part.read(start, stop)
        begin += part.shape[0]
    return buffer


def _to_device(array: np.ndarray) -> jax.Array:
    # Waiting keeps host buffers from piling up behind asynchronous transfers.
    return jax.block_until_ready(jax.device_put(array))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{rest} {'is' if len(names) == 1 else 'are'}"

"""From named tensors in a file to the weight tree: every name and shape checked, then one array after another.

A checkpoint keeps q, k, v and gate, up apart and stores matrices ``[out, in]``; the tree fuses and transposes them
(:mod:`quest_jax.models.llama`). Each array of the tree is filled on the host in its target dtype, a few rows at a
time, and handed to the device before the next one starts: peak memory is the model plus its largest array. An array
that is to be quantised is filled in float32 and rounded once: the peak is the quantised model plus such an array.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quest_jax.memory import check_memory
from quest_jax.models.config import LlamaConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.models.quant import QuantArray, QuantKind
from quest_jax.models.rope import attention_scaling, inverse_frequencies
from quest_jax.params import Params
from quest_jax.weights.quantize import quantize_array, quantize_tree
from quest_jax.weights.stored import StoredTensor

Progress = Callable[[int, int], None]

_FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
    "experts_gate_up": ("expert_gate", "expert_up"),
    "experts_gate_up_bias": ("expert_gate_bias", "expert_up_bias"),
    "experts_down": ("expert_down",),
    "experts_down_bias": ("expert_down_bias",),
}
_OF_EXPERTS = "experts_"
_CHUNK_BYTES = 16 * 1024 * 1024
_SHOWN = 5


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
      names: the file's name of each part, with ``{}`` for the layer and for an expert: ``embed norm lm_head``,
        ``attn_norm q k v out mlp_norm gate up down``, and what the config asks for besides.
      stored: all tensors of the file that are not known to be superfluous.
      where: the file, for errors.

    Returns:
      ``stored`` under the keys ``embed``, ``norm``, ``lm_head``, ``layer_<i>/<part>``, ``layer_<i>/<part>/<expert>``.

    Raises:
      ValueError: a tensor is missing, not used, or has another shape than the config says.
    """
    if config.n_layers > len(stored):  # before a loop over a number that nothing has confirmed
        raise ValueError(f"{where}: the config says {config.n_layers} layers, but there are {len(stored)} tensors.")
    experts = config.experts.count if config.experts else 0
    if experts * config.n_layers > len(stored):
        raise ValueError(f"{where}: the config says {experts} experts a layer, but there are {len(stored)} tensors.")
    shapes = {key: (names[part].format(*at), shape) for at, key, part, shape in _parts(config)}
    missing = [name for name, _ in shapes.values() if name not in stored]
    unused = set(stored) - {name for name, _ in shapes.values()}
    if missing:
        known = f"; {_listed(sorted(unused))} unknown" if unused else "; fetch it again"
        raise ValueError(f"{where}: expected every tensor of the model, {_listed(missing)} missing{known}.")
    if unused:
        raise ValueError(f"{where}: expected the tensors of this decoder only, {_listed(sorted(unused))} unknown.")
    for name, shape in shapes.values():
        if stored[name].shape != shape:
            raise ValueError(f"{where}: tensor {name}: the config says {shape}, the file has {stored[name].shape}.")
    return {key: stored[name] for key, (name, _) in shapes.items()}


def assemble(
    config: LlamaConfig,
    dtype: np.dtype,
    tensors: Mapping[str, StoredTensor],
    where: str,
    weights: QuantKind | None = None,
    progress: Progress | None = None,
) -> Params:
    """Reads the tensors of :func:`match_tensors` into the weight tree, on JAX's default device.

    Args:
      config, dtype, tensors, where, weights: as the loaders have them.
      progress: called with bytes done and in all after every array.

    Raises:
      MemoryError: they do not fit; raised before the first is read.
      ValueError: a RoPE whose frequencies cannot be computed, a file that ends early, or quantised weights that are
        not finite.
    """
    check_rope(config, where)
    abstract = quantize_tree(abstract_weights(config, dtype), weights)
    needed, staged = load_bytes(abstract)
    check_memory(needed, staged, where)
    done = 0

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct | QuantArray) -> Any:
        made = read(path, leaf)
        if progress is not None:
            nonlocal done
            done += _nbytes(leaf)
            progress(done, needed)
        return made

    def read(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct | QuantArray) -> Any:
        *layer, name = (key.key for key in path)
        keys = ["/".join([*layer, part]) for part in _FUSED.get(name, (name,))]
        buffer = np.empty(leaf.shape, np.float32 if isinstance(leaf, QuantArray) else leaf.dtype)
        if name.startswith(_OF_EXPERTS):
            for expert in range(len(buffer)):
                _fill(buffer[expert].T, [tensors[f"{key}/{expert}"] for key in keys], config.head_dim)
        else:
            _fill(buffer if name == "embed" else buffer.T, [tensors[key] for key in keys], config.head_dim)
        if not isinstance(leaf, QuantArray):
            return _to_device(buffer)
        made = quantize_array(buffer, leaf.kind, leaf.axis, f"{where}: {'/'.join([*layer, name])}")
        del buffer
        return jax.tree.map(_to_device, made)

    filled = jax.tree_util.tree_map_with_path(place, abstract, is_leaf=_is_quantized)
    return Params(weights=filled, config=config)


def load_bytes(abstract: dict[str, Any]) -> tuple[int, int]:
    """Bytes of all weights, and the most that loading one of them takes on the host."""
    leaves = jax.tree.leaves(abstract, is_leaf=_is_quantized)
    sizes = [_nbytes(leaf) for leaf in leaves]
    wide = [4 * math.prod(leaf.shape) if isinstance(leaf, QuantArray) else 0 for leaf in leaves]
    return sum(sizes), max(size + more for size, more in zip(sizes, wide, strict=True))


def _nbytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, QuantArray) else leaf.size * leaf.dtype.itemsize


def _is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QuantArray)


def check_rope(config: LlamaConfig, where: str) -> None:
    """Raises ValueError, naming the file, where frequencies or scaling of a RoPE are not positive and finite."""
    for rope in (config.rope, *([config.window_rope] if config.window_rope else [])):
        try:
            with np.errstate(all="ignore"):
                numbers = np.append(inverse_frequencies(rope, config.head_dim), attention_scaling(rope))
        except (ArithmeticError, ValueError) as error:
            raise ValueError(f"{where}: no RoPE frequencies can be computed from {str(rope):.900}: {error}") from error
        if not (np.isfinite(numbers).all() and (numbers > 0).all()):
            raise ValueError(f"{where}: expected positive, finite RoPE frequencies, not what {str(rope):.900} gives.")


def _parts(config: LlamaConfig) -> Iterable[tuple[tuple[int, ...], str, str, tuple[int, ...]]]:
    """((layer, expert), key, part, shape ``[out, in]``) of everything a checkpoint stores."""
    hidden, vocab, experts = config.hidden_size, config.vocab_size, config.experts
    yield (0,), "embed", "embed", (vocab, hidden)
    yield (0,), "norm", "norm", (hidden,)
    if not config.tie_word_embeddings:
        yield (0,), "lm_head", "lm_head", (vocab, hidden)
    block = _block_parts(config)
    for layer in range(config.n_layers):
        for part, shape in block.items():
            yield (layer,), f"layer_{layer}/{part}", part, shape
        for expert in range(experts.count if experts else 0):
            for part, shape in _expert_parts(config).items():
                yield (layer, expert), f"layer_{layer}/{part}/{expert}", part, shape


def _block_parts(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.n_heads * width, config.n_kv_heads * width
    parts: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,), "q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden),
        "out": (hidden, queries), "mlp_norm": (hidden,),
    }  # fmt: skip
    if config.qkv_bias:
        parts |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if config.out_bias:
        parts |= {"out_bias": (hidden,)}
    if config.qk_norm:
        parts |= {"q_norm": (width,), "k_norm": (width,)}
    if config.sinks:
        parts |= {"sinks": (config.n_heads,)}
    if config.output_norms:
        parts |= {"attn_out_norm": (hidden,), "mlp_out_norm": (hidden,)}
    if config.experts is None:
        return parts | {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    parts |= {"router": (config.experts.count, hidden)}
    return parts | ({"router_bias": (config.experts.count,)} if config.experts.biased else {})


def _expert_parts(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    experts, hidden = config.experts, config.hidden_size
    assert experts is not None
    parts = {"expert_gate": (experts.size, hidden), "expert_up": (experts.size, hidden)}
    parts |= {"expert_down": (hidden, experts.size)}
    if not experts.biased:
        return parts
    return parts | {
        "expert_gate_bias": (experts.size,),
        "expert_up_bias": (experts.size,),
        "expert_down_bias": (hidden,),
    }


def _fill(view: np.ndarray, parts: list[StoredTensor], head_dim: int) -> None:
    """Writes the parts one below the other into ``view [out, in]``, converted chunk by chunk."""
    assert view.shape[0] == sum(part.shape[0] for part in parts)
    row_bytes = 4 * math.prod(view.shape[1:])
    step = max(1, _CHUNK_BYTES // (row_bytes * head_dim)) * head_dim
    begin = 0
    for part in parts:
        for start in range(0, part.shape[0], step):
            stop = min(start + step, part.shape[0])
            view[begin + start : begin + stop] = part.read(start, stop)
        begin += part.shape[0]


def _to_device(array: np.ndarray) -> jax.Array:
    # Waiting keeps host buffers from piling up behind asynchronous transfers.
    return jax.block_until_ready(jax.device_put(array))


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{rest} {'is' if len(names) == 1 else 'are'}"

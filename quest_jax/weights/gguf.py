"""GGUF files of Llama architecture as :class:`quest_jax.params.Params`, dequantised tensor by tensor."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import numpy as np

from quest_jax.models.config import LlamaConfig
from quest_jax.models.quant import QuantKind
from quest_jax.params import Params
from quest_jax.weights.assemble import assemble, match_tensors
from quest_jax.weights.gguf_config import check_architecture, parse_metadata
from quest_jax.weights.gguf_file import read_directory
from quest_jax.weights.gguf_tensors import open_tensors
from quest_jax.weights.stored import StoredTensor

_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "out": "blk.{}.attn_output.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_ROPE_FACTORS = 65536


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The key/value pairs of a GGUF file as Python values; arrays are lists. Needs no extra package.

    Raises:
      FileNotFoundError: no such file.
      ValueError: not GGUF, truncated or damaged.
      NotImplementedError: a GGUF version other than 2 and 3.

    Example:
      ``read_metadata("model.gguf")["tokenizer.ggml.eos_token_id"]``
    """
    return read_directory(path).metadata


def load_gguf(path: str | os.PathLike[str], dtype: np.dtype, weights: QuantKind | None = None) -> Params:
    """Loads a GGUF file, one tensor at a time: peak memory is the model in ``dtype`` plus its largest array.

    Args:
      path: a file of architecture ``llama`` in any type the ``gguf`` package dequantises (F32, F16, BF16, Q8_0, Q4_0,
        Q4_1, Q4_K, Q6_K and more).
      dtype: float32 or bfloat16, see :func:`quest_jax.weights.assemble.target_dtype`.
      weights: quantise the matrices, whatever the file has them in.

    Raises:
      ImportError: the extra ``gguf`` is not installed.
      ValueError: a truncated or damaged file, or tensors that do not fit the metadata.
      NotImplementedError: another architecture, a variant of Llama this decoder does not compute, or a tensor type
        without a dequantiser.
      MemoryError: the weights do not fit; raised before any is read.
    """
    config, tensors, where = _open(path)
    matched = match_tensors(config, _NAMES, tensors, where)
    for key, tensor in matched.items():
        if key.endswith(("/q", "/k")):
            matched[key] = dataclasses.replace(
                tensor, read=functools.partial(_read_rotate_half, tensor, config.head_dim)
            )
    return assemble(config, dtype, matched, where, weights)


def read_gguf_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Reads the config of a GGUF file, and no weights; raises as :func:`load_gguf`."""
    return _open(path)[0]


def _open(path: str | os.PathLike[str]) -> tuple[LlamaConfig, dict[str, StoredTensor], str]:
    """The config, the tensors of the decoder, not yet read, and the file's name for errors."""
    path = pathlib.Path(path)
    where = str(path)
    directory = read_directory(path)
    check_architecture(directory.metadata, where)
    tensors = open_tensors(directory)
    factors = tensors.pop(_ROPE_FACTORS, None)
    if factors is not None and (len(factors.shape) != 1 or factors.shape[0] > _MAX_ROPE_FACTORS):
        raise ValueError(f"{where}: {_ROPE_FACTORS}: expected one number per pair of a head, got {factors.shape}.")
    biases = [name for name in tensors if name.endswith(".bias")]
    if biases:
        raise NotImplementedError(f"{where}: {biases[0]}: this decoder has no biases; only 'llama' without them loads.")
    if _NAMES["embed"] not in tensors:
        raise ValueError(f"{where}: expected the tensor {_NAMES['embed']}, the file has none; fetch it again.")
    config = parse_metadata(
        directory.metadata,
        vocab_size=tensors[_NAMES["embed"]].shape[0],
        tied=_NAMES["lm_head"] not in tensors,
        rope_factors=None if factors is None else factors.read(0, factors.shape[0]),
        where=where,
    )
    return config, tensors, where


def _read_rotate_half(tensor: StoredTensor, head_dim: int, start: int, stop: int) -> np.ndarray:
    """Rows of q or k, whole heads, in rotate-half order; the file has the two numbers of a pair side by side."""
    rows = tensor.read(start, stop)
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)

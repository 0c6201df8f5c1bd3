"""GGUF files as :class:`quest_jax.params.Params`, dequantised tensor by tensor."""

import dataclasses
import functools
import os
import pathlib
from typing import Any

import numpy as np

from quest_jax.models.config import LlamaConfig
from quest_jax.models.quant import QuantKind
from quest_jax.params import Params
from quest_jax.weights.assemble import Progress, assemble, match_tensors
from quest_jax.weights.gguf_config import check_architecture, parse_metadata
from quest_jax.weights.gguf_families import NAMES, Architecture
from quest_jax.weights.gguf_file import read_directory
from quest_jax.weights.gguf_tensors import open_tensors, split_stacks
from quest_jax.weights.stored import StoredTensor

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


def load_gguf(
    path: str | os.PathLike[str],
    dtype: np.dtype,
    weights: QuantKind | None = None,
    progress: Progress | None = None,
) -> Params:
    """Loads a GGUF file, one tensor at a time: peak memory is the model in ``dtype`` plus its largest array.

    Args:
      path: a file of one of the architectures in :mod:`quest_jax.weights.gguf_families`, in any type the ``gguf``
        package dequantises (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, MXFP4 and more).
      dtype: float32 or bfloat16, see :func:`quest_jax.weights.assemble.target_dtype`.
      weights: quantise the matrices, whatever the file has them in.
      progress: called with bytes done and in all.

    Raises:
      ImportError: the extra ``gguf`` is not installed.
      ValueError: a truncated or damaged file, or tensors that do not fit the metadata.
      NotImplementedError: another architecture, a variant this decoder does not compute, or a tensor type
        without a dequantiser.
      MemoryError: the weights do not fit; raised before any is read.
    """
    architecture, config, tensors, where = _open(path)
    if architecture.views is not None:
        tensors = architecture.views(config, tensors, where)
    if config.experts is not None:
        tensors = split_stacks(tensors, where)
    matched = match_tensors(config, {**NAMES, **architecture.names}, tensors, where)
    for key, tensor in matched.items():
        if architecture.interleaved and key.endswith(("/q", "/k")):
            matched[key] = dataclasses.replace(
                tensor, read=functools.partial(_read_rotate_half, tensor, config.head_dim)
            )
    return assemble(config, dtype, matched, where, weights, progress)


def read_gguf_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """Reads the config of a GGUF file, and no weights; raises as :func:`load_gguf`."""
    return _open(path)[1]


def _open(path: str | os.PathLike[str]) -> tuple[Architecture, LlamaConfig, dict[str, StoredTensor], str]:
    """The architecture, the config, the tensors of the decoder, not yet read, and the file's name for errors."""
    path = pathlib.Path(path)
    where = str(path)
    directory = read_directory(path)
    architecture = check_architecture(directory.metadata, where)
    tensors = open_tensors(directory)
    factors = {name: _factors(tensors.pop(name), where) for name in architecture.rope_tensors if name in tensors}
    if NAMES["embed"] not in tensors:
        raise ValueError(f"{where}: expected the tensor {NAMES['embed']}, the file has none; fetch it again.")
    config = parse_metadata(
        directory.metadata,
        vocab_size=tensors[NAMES["embed"]].shape[0],
        tied=NAMES["lm_head"] not in tensors,
        rope_factors=factors,
        where=where,
    )
    biases = [name for name in tensors if name.endswith(".bias")]
    if biases and not config.qkv_bias:
        raise NotImplementedError(f"{where}: {biases[0]}: this decoder has no biases for {architecture.name!r}.")
    return architecture, config, tensors, where


def _factors(tensor: StoredTensor, where: str) -> np.ndarray:
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_ROPE_FACTORS:
        raise ValueError(f"{where}: {tensor.name}: expected one number per pair of a head, got {tensor.shape}.")
    return tensor.read(0, tensor.shape[0])


def _read_rotate_half(tensor: StoredTensor, head_dim: int, start: int, stop: int) -> np.ndarray:
    """Rows of q or k, whole heads, in rotate-half order; the file has the two numbers of a pair side by side."""
    rows = tensor.read(start, stop)
    heads = rows.reshape(-1, head_dim // 2, 2, rows.shape[-1])
    return heads.swapaxes(1, 2).reshape(rows.shape)

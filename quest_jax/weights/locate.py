"""What a name given by a user means: which file or folder, and in which format."""

import os
import pathlib
import re
from typing import Literal, NamedTuple

from quest_jax.weights.checkpoint import MARKER
from quest_jax.weights.huggingface import fetch_repository
from quest_jax.weights.smollm2 import smollm2_gguf

MODELS = {"smollm2-135m": smollm2_gguf}
"""Models by name: a function that gives the path of a GGUF file."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Location(NamedTuple):
    """A place weights (and a tokenizer) can be read from."""

    kind: Literal["gguf", "huggingface", "checkpoint"]
    path: pathlib.Path


def locate(name_or_path: str | os.PathLike[str], *, config_only: bool = False) -> Location:
    """Finds a model; fetches it when the name is one of ``MODELS`` or a repository of huggingface.co.

    Args:
      name_or_path: a name of ``MODELS``, else an existing path, else a repo id ``organisation/name``.
      config_only: of a repository fetch the config alone, and take the path of a ``config.json`` too.

    Raises:
      TypeError: neither a string nor a path.
      FileNotFoundError: none of the three.
      ValueError: a path that exists but holds no model.
      RuntimeError, ConnectionError: fetching failed.
    """
    if not isinstance(name_or_path, str | os.PathLike) or not isinstance(os.fspath(name_or_path), str):
        raise TypeError(f"name_or_path: expected a string or a path, got {type(name_or_path).__name__}.")
    if isinstance(name_or_path, str) and name_or_path in MODELS:
        return Location("gguf", MODELS[name_or_path]())
    text = os.fspath(name_or_path)
    if not text.strip() or "\0" in text:
        raise ValueError(f"name_or_path: expected the name or path of a model, got {text!r}.")
    path = pathlib.Path(text).expanduser()
    if path.is_dir():
        return _directory(path)
    if path.is_file():
        return Location("huggingface", path.parent) if config_only and path.name == "config.json" else _file(path)
    if path.exists():
        raise ValueError(f"{path}: expected a file or a directory, got something else.")
    if isinstance(name_or_path, str) and _REPOSITORY.fullmatch(text) and not text.endswith((".gguf", ".safetensors")):
        return Location("huggingface", fetch_repository(text, config_only=config_only))
    raise FileNotFoundError(
        f"{text}: no such model; expected one of the names {', '.join(MODELS)}, an existing path "
        "(a .gguf file, a Hugging Face directory, or a directory written by quest_jax.save), "
        'or a repository "organisation/name" of huggingface.co.'
    )


def _directory(path: pathlib.Path) -> Location:
    if (path / MARKER).is_file():
        return Location("checkpoint", path)
    if (path / "config.json").is_file():
        return Location("huggingface", path)
    files = sorted(entry.name for entry in path.glob("*.gguf"))
    hint = f"; give the file {path / files[0]} itself" if files else ""
    raise ValueError(
        f"{path}: expected a directory with config.json (Hugging Face) or {MARKER} (quest_jax.save), "
        f"found neither{hint}."
    )


def _file(path: pathlib.Path) -> Location:
    with open(path, "rb") as file:
        magic = file.read(4)
    if magic == b"GGUF" or path.suffix == ".gguf":
        return Location("gguf", path)
    if path.suffix in (".safetensors", ".json"):
        raise ValueError(f"{path}: give the directory {path.parent}, which also has the config, instead of the file.")
    raise ValueError(f"{path}: expected a GGUF file, got one that starts with {magic!r}.")

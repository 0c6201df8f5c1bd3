"""Finds and reads the tokenizer that belongs to a model."""

import os
import pathlib

from quest_jax.tokenizer.gguf import load_gguf_tokenizer
from quest_jax.tokenizer.huggingface import load_huggingface_tokenizer
from quest_jax.tokenizer.tokenizer import Tokenizer
from quest_jax.weights.locate import MODELS, locate


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
      name_or_path: what :func:`quest_jax.load` takes: ``"smollm2-135m"``, a ``.gguf`` file, a Hugging Face directory or
        repo id; or a directory that holds a ``tokenizer.json`` and no model.

    Raises:
      TypeError: neither a string nor a path.
      FileNotFoundError: no such model, or no ``tokenizer.json`` in its directory.
      ValueError: a directory written by :func:`quest_jax.save`, which has no tokenizer; or a damaged file.
      NotImplementedError: a vocabulary or decoder that is not supported; the message names it.
      RuntimeError, ConnectionError: fetching failed.

    Example:
      ``quest_jax.load_tokenizer("smollm2-135m").encode("The capital of France is")``
    """
    if isinstance(name_or_path, str | os.PathLike) and not (isinstance(name_or_path, str) and name_or_path in MODELS):
        directory = pathlib.Path(name_or_path).expanduser()
        if (directory / "tokenizer.json").is_file():
            return load_huggingface_tokenizer(directory)
    kind, path = locate(name_or_path)
    if kind == "checkpoint":
        raise ValueError(
            f"{path}: a directory written by quest_jax.save holds weights and no tokenizer; "
            "load the tokenizer from where the model came from, or put its tokenizer.json into this directory."
        )
    return load_gguf_tokenizer(path) if kind == "gguf" else load_huggingface_tokenizer(path)

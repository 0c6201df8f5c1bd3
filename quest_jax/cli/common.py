"""What several commands share."""

import hashlib
import os
import pathlib
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Console

    from quest_jax import Params, Tokenizer

Dtype = Literal["float32", "bfloat16"]
Weights = Literal["int8", "int4"]


def keep_programs(console: "Console") -> None:
    """Lets the next run find this one's compiled programs; says so where that cannot be, and goes on."""
    from quest_jax import enable_compilation_cache

    try:
        enable_compilation_cache()
    except OSError as error:
        console.print(f"compiled programs are not kept: {error}", highlight=False)


def load_both(model: str, dtype: Dtype, console: "Console") -> "tuple[Params, Tokenizer]":
    """Loads weights and tokenizer, with a progress bar."""
    from quest_jax import load, load_tokenizer
    from quest_jax.progress import counting

    with counting(f"loading {model}", console, nbytes=True) as advance:
        return load(model, dtype=dtype, progress=advance), load_tokenizer(model)


def read_text(option: str, path: pathlib.Path) -> str:
    """Reads a file that an option names.

    Raises:
      ValueError: it is no text in UTF-8.
      OSError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{option}: {path}: expected text in UTF-8 ({error}).") from error


def identity(given: "str | os.PathLike[str]") -> str:
    """The name of a model, or of files, and where it is on this disk what tells other contents from these.

    Sizes and times of change, not the contents: weights are large.
    """
    path = pathlib.Path(given)
    if not path.exists():
        return str(given)
    files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    seen = [(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in files]
    return f"{given} {hashlib.sha256(repr(seen).encode()).hexdigest()[:12]}"

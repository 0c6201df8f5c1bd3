"""What several commands share."""

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

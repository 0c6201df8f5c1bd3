"""Compiled programs that outlive the process: JAX's persistent compilation cache, set up so that it helps."""

import hashlib
import os
import pathlib
import platform
import tempfile

import jax
from jax.experimental.compilation_cache import compilation_cache

from quest_jax.weights.smollm2 import cache_directory


def enable_compilation_cache(directory: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Keeps every program that is compiled from now on in a directory, and takes from there what it holds.

    A second process with the same shapes, versions and options then traces its programs but compiles none. What this
    process has compiled before is not stored. Whoever can write to the directory can make this process run code of
    theirs: it is made for its owner alone, and none that others can write to should be given. Nothing is ever removed
    from it; a program of a 30-layer model takes about 1 MB, and the directory may be deleted at any time.

    Args:
      directory: made if missing. None: the one that JAX is configured with (``JAX_COMPILATION_CACHE_DIR``), else
        ``compiled/<processor>`` beside the models that were fetched, such as ``~/.cache/quest_jax/compiled/...``:
        programs for a CPU run only on one with the same instructions.

    Returns:
      the directory.

    Raises:
      TypeError, ValueError: no path, or an empty one.
      OSError: it cannot be made or written to.

    Changes JAX's configuration for the whole process: ``jax_compilation_cache_dir``, ``jax_enable_compilation_cache``,
    and the least compile time and size of what is stored, so that small programs are stored too. A second call with the
    same directory changes nothing; with another one the cache moves there.
    """
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory: expected a path or None, got {directory!r}.")
    if directory is not None and not os.fspath(directory).strip():
        raise ValueError(f"directory: expected a path or None, got {directory!r}.")
    configured = jax.config.jax_compilation_cache_dir
    path = pathlib.Path(directory or configured or default_directory()).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise type(error)(
            f"{path}: expected a directory for compiled programs that can be written to ({error.strerror}); give "
            "another one."
        ) from error
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if str(path) != configured or not jax.config.jax_enable_compilation_cache:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_enable_compilation_cache", True)
        # JAX looks at its configuration once, when it first compiles.
        compilation_cache.reset_cache()
    return path


def default_directory() -> pathlib.Path:
    """Where programs are kept unless told otherwise: a folder for every kind of processor."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = ("flags", "Features", "model name")
    described = sorted({line for line in lines if line.startswith(names)}) or [platform.processor()]
    key = hashlib.sha256("\n".join(described).encode()).hexdigest()[:8]
    return cache_directory() / "compiled" / f"{platform.machine().lower()}-{key}"

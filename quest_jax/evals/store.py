"""Results in a folder, one small file for each: a run that was interrupted goes on where it was."""

import functools
import hashlib
import inspect
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping
from typing import Any


class Store:
    """A folder of results, each under the settings that it was measured with.

    A file holds ``{"settings": ..., "result": ...}`` and is named after its settings; other settings are another file.
    Files are written whole or not at all.

    Args:
      folder: made where it is not there.

    Raises:
      ValueError: it cannot be made; or a file in it is damaged: it is named, and nothing is overwritten.
    """

    def __init__(self, folder: pathlib.Path | str):
        self._folder = pathlib.Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{folder}: expected a folder for results that is there or can be made, got {error.strerror}; name "
                "another."
            ) from error
        for path in sorted(self._folder.glob("*.json")):
            _read(path)

    def get(self, settings: Mapping[str, Any]) -> Any:
        """Returns the result of these settings, or None."""
        path = self._path(settings)
        return _read(path)["result"] if path.exists() else None

    def put(self, settings: Mapping[str, Any], result: Any) -> None:
        """Keeps ``result``; both of what JSON has.

        Raises:
          ValueError: a NaN or infinity, which JSON does not have.
        """
        text = json.dumps({"settings": dict(settings), "result": result}, indent=1, allow_nan=False)
        # Beside its place and then renamed: what is killed while it writes leaves no half of a file.
        handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
            pathlib.Path(name).replace(self._path(settings))
        except BaseException:
            pathlib.Path(name).unlink(missing_ok=True)
            raise

    def damaged(self, settings: Mapping[str, Any], error: Exception) -> ValueError:
        """The error to raise where the result of these settings is not what it should be; names its file."""
        return _damaged(self._path(settings), f"{type(error).__name__}: {error}")

    def _path(self, settings: Mapping[str, Any]) -> pathlib.Path:
        text = json.dumps(dict(settings), sort_keys=True)
        shown = "-".join(str(settings[key]) for key in ("task", "method", "budget") if key in settings)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return self._folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', shown)[:60]}-{digest}.json"


@functools.cache
def source(kind: type) -> str:
    """Returns a digest of the files that a class and those it inherits from are written in.

    Among a result's settings: what a method that has been changed gave before is not its result.

    Raises:
      ValueError: a class without a file, such as one made in an interactive session.
    """
    files: dict[str, bytes] = {}
    for one in kind.__mro__:
        if one.__module__ in ("abc", "builtins", "typing"):
            continue
        try:
            path = pathlib.Path(inspect.getfile(one))
            files[one.__module__] = path.read_bytes()
        except (OSError, TypeError) as error:
            raise ValueError(
                f"store: expected a class in a file, whose content tells its results from those of another version, "
                f"got {one.__name__}; write it to a file, or measure without a store."
            ) from error
    digest = hashlib.sha256()
    for content in files.values():
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:12]


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.keys() != {"settings", "result"}:
            raise ValueError("expected settings and a result")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    return found


def _damaged(path: pathlib.Path, why: str) -> ValueError:
    return ValueError(
        f"{path}: expected a result of an earlier run, got a damaged file ({why}); move it away, and it is measured "
        "anew."
    )

"""Progress of the slow parts of a command, on stderr and only where somebody watches."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def stderr_console() -> Console:
    """A console on stderr, made when called so that a redirected stderr is respected."""
    return Console(file=sys.stderr)


@contextlib.contextmanager
def working(what: str, console: Console) -> Iterator[None]:
    """Shows a spinner beside ``what`` until the block ends; nothing where stderr is no terminal."""
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        bar.add_task(what)
        yield


@contextlib.contextmanager
def counting(what: str, console: Console, *, nbytes: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Shows a bar; yields ``advance(done, total)``, of things or bytes. Shows nothing where stderr is no terminal."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn() if nbytes else MofNCompleteColumn(),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

"""The ``quest-jax`` command: generate, demo, plan, models, methods, calibrate, doctor, eval, bench.

Options are frozen dataclasses, read by tyro; what only one command needs is imported when it runs. Text that was asked
for goes to stdout, everything about it to stderr.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from quest_jax import __version__
from quest_jax.cli.calibrate import Calibrate
from quest_jax.cli.demo import Demo
from quest_jax.cli.doctor import Doctor
from quest_jax.cli.generate import Generate
from quest_jax.cli.methods import Methods
from quest_jax.cli.models import Models
from quest_jax.cli.plan import Plan

INTERRUPTED = 130  # as shells report SIGINT
BROKEN_PIPE = 141  # as shells report SIGPIPE


@runtime_checkable
class Command(Protocol):
    """A command line that was read."""

    def run(self) -> int:
        """Does it; returns the exit code."""
        ...


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: arguments without the program's name; None takes the process's.

    Returns:
      Exit code: 0, or 2 after one line on stderr for anything a caller can get wrong, 130 after Ctrl-C, 141 when the
      reader of stdout has gone.

    Raises:
      SystemExit: for ``--help`` (0) and arguments that cannot be parsed (2), from tyro.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv == ["--version"]:
        print(f"quest-jax {__version__}")
        return 0
    try:
        return _parse(argv).run()
    except KeyboardInterrupt:
        print("\nquest-jax: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (ValueError, OSError, ImportError, MemoryError, RuntimeError, FloatingPointError) as error:
        print(f"quest-jax: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 2


# Commands with commands of their own, the module that has them, and what the list of all says about them.
GROUPS = {
    "eval": (
        "evaluate",
        "Measure what methods keep of dense attention: tasks, perplexity, fidelity, layers, study and more.",
    ),
    "bench": (
        "bench",
        "Time a method against dense attention: decode, prefill, generate, ops, breakdown, calibrate, compare.",
    ),
}


# Options that take several values, with blanks or commas between them.
LISTS = frozenset(f"--{name}" for name in "methods budgets tokens lengths shapes prompts steps parts kinds".split())


def _split_lists(argv: Sequence[str]) -> list[str]:
    """``--budgets 256,512`` and ``--budgets=256,512`` as ``--budgets 256 512``."""
    found: list[str] = []
    option = ""
    for word in argv:
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            listed = equals and option in LISTS
            found += [option, *value.split(",")] if listed else [word]
        else:
            found += word.split(",") if option in LISTS else [word]
    return found


def _parse(argv: list[str]) -> Command:
    try:
        import tyro
    except ModuleNotFoundError as error:
        raise ImportError('the command line needs tyro; pip install "quest-jax[cli]"') from error
    prog, app = "quest-jax", tyro.extras.SubcommandApp()
    if argv and argv[0] in GROUPS:
        module, description = GROUPS[argv[0]]
        commands = importlib.import_module(f"quest_jax.cli.{module}").COMMANDS
        prog, argv = f"{prog} {argv[0]}", argv[1:]
    else:
        # A group is handled above; it is here for the list of all.
        groups = {
            name: dataclasses.make_dataclass(name, [], namespace={"__doc__": says})
            for name, (_, says) in GROUPS.items()
        }
        commands = {
            "generate": Generate, "demo": Demo, "plan": Plan, "models": Models, "methods": Methods,
            "calibrate": Calibrate, "doctor": Doctor, **groups,
        }  # fmt: skip
        description = "Query-aware sparse attention for JAX. --version prints the version."
    argv = _split_lists(argv)
    for name, command in commands.items():
        app.command(name=name)(command)
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalRequiredArgs)
    return app.cli(prog=prog, description=description, args=argv, config=config)

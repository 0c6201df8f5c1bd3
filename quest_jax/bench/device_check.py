"""Checks and times the kernels on the device at hand, in one command of a few minutes; the result is JSON.

``python quest_jax/bench/device_check.py`` runs in a checkout where only JAX, Flax and NumPy are installed (PyTorch is
compared with where it is), ``python -m quest_jax.bench.device_check`` wherever the library is. First every op is
compared with float64 on fresh random inputs; nothing is timed that is wrong. ``--dry-run`` takes tiny sizes, for a CPU.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import sys
import types
from typing import Any


def main(arguments: list[str] | None = None) -> int:
    """Parses the arguments, runs, writes the JSON; returns 1 when a result was wrong."""
    parser = argparse.ArgumentParser(prog="device_check", description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="file for the JSON; otherwise it goes to standard output")
    parser.add_argument("--seed", type=int, help="of the random inputs; otherwise a fresh one, which the JSON has")
    parser.add_argument("--minutes", type=float, default=8.0, help="no measurement is begun after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to see that it runs; the times say nothing")
    args = parser.parse_args(arguments)
    # PyTorch needs memory of the same device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from quest_jax.bench import device_correctness, device_timing

    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    say(f"seed {seed}")
    shapes = device_correctness.DRY_RUN if args.dry_run else device_correctness.SHAPES
    correctness = device_correctness.check_all(seed, shapes, say)
    wrong = [one["case"] for one in correctness if not one["passed"]]
    result = {"environment": device_timing.describe(), "seed": seed, "dry_run": args.dry_run}
    result["correctness"] = correctness
    if wrong:
        say(f"WRONG, so nothing is timed: {', '.join(wrong)}")
    else:
        sizes = device_timing.DRY_RUN if args.dry_run else device_timing.FULL
        result["timing"] = device_timing.time_all(sizes, seed, args.minutes * 60, say)
    text = json.dumps(result, indent=1)
    if args.out is None:
        sys.stdout.write(text + "\n")
    else:
        args.out.write_text(text + "\n", encoding="utf-8")
    return 1 if wrong else 0


def say(line: str) -> None:
    """Progress, apart from the JSON."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run_without_installation(root: pathlib.Path) -> None:
    """Makes the submodules of the checkout at ``root`` importable without what the public face of the library needs."""
    # This file's own folder stands first on the path of a script; its modules are not top-level ones.
    sys.path[0] = str(root)
    package = types.ModuleType("quest_jax")
    package.__path__ = [str(root / "quest_jax")]
    sys.modules["quest_jax"] = package
    if importlib.util.find_spec("jaxtyping") is None:
        # Only annotations use it, and nobody checks them here.
        annotations: Any = types.ModuleType("jaxtyping")
        annotations.__getattr__ = lambda name: type(name, (), {"__class_getitem__": classmethod(lambda cls, _: Any)})
        sys.modules["jaxtyping"] = annotations


if __name__ == "__main__":
    if not __package__:
        run_without_installation(pathlib.Path(__file__).resolve().parents[2])
    sys.exit(main())

"""Feeds damaged models to a loader: each must load or raise a documented error that names the file, in bounded time.

    python -m tests.weights.fuzz --loader gguf|safetensors|checkpoint --mutations 10000 --seed 0

A child process loads, so that a crash or a hang costs one mutation and not the run. Its address space is limited to
1 GiB more than it needs idle; each mutation may take 10 seconds. ``--only SEED`` runs one and shows its traceback.
"""

import argparse
import collections
import multiprocessing
import pathlib
import random
import resource
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from tests.weights.fuzz_cases import CASES

SECONDS = 10
_EXTRA_BYTES = 1 << 30
_LONGEST_MESSAGE = 1500
_DOCUMENTED = (ValueError, NotImplementedError, MemoryError, FileNotFoundError)


def outcome(loader: str, seed: int) -> tuple[str, str | None]:
    """Runs one mutation: its outcome in a word, and what is wrong with it, if anything."""
    with tempfile.TemporaryDirectory() as folder:
        load = CASES[loader](random.Random(f"{loader} {seed}"), pathlib.Path(folder))
        started = time.monotonic()
        try:
            jax.block_until_ready(jax.tree.leaves(load().weights))
            name, wrong = "loaded", None
        except Exception as error:  # noqa: BLE001  the point of it: whatever comes is judged
            name, wrong = type(error).__name__, _judged(error, folder)
        if time.monotonic() - started > SECONDS:
            wrong = "slow"
    return name, wrong


def _judged(error: Exception, folder: str) -> str | None:
    """What is wrong with an error, or None. Exact types: UnicodeDecodeError is a ValueError that nobody meant."""
    message = str(error)
    if type(error) not in _DOCUMENTED:
        return f"{type(error).__name__}: {message[:200]}"
    if isinstance(error, MemoryError) and "are available" not in message:
        return "MemoryError of an allocation, not of the check before it"
    if str(pathlib.Path(folder).resolve()) not in message and folder not in message:
        return f"does not name the file: {message[:200]}"
    return f"long message: {message[:200]}" if len(message) > _LONGEST_MESSAGE else None


def _work(loader: str, seeds: range, connection: Any) -> None:
    outcome(loader, -1)  # compiles and imports what all of them need
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    connection.send(None)
    for seed in seeds:
        connection.send((seed, *outcome(loader, seed)))


def run(loader: str, seeds: range) -> Iterator[tuple[int, str, str | None]]:
    """(seed, outcome, what is wrong) of every mutation; a new child follows one that died or hung."""
    context, done = multiprocessing.get_context("spawn"), seeds.start
    while done < seeds.stop:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(loader, range(done, seeds.stop), theirs))
        child.start()
        theirs.close()
        try:
            patience = 120  # to start
            while done < seeds.stop:
                if not ours.poll(patience):
                    yield done, "hang", f"took more than {patience} s"
                    done += 1
                    break
                if (result := ours.recv()) is not None:
                    yield result
                    done += 1
                patience = 3 * SECONDS  # a loaded machine is not a hang; more than SECONDS is reported by the child
        except EOFError:
            child.join()
            yield done, "crash", f"the process ended with {child.exitcode}"
            done += 1
        finally:
            child.kill()
            child.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", choices=sorted(CASES), required=True)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first one; each mutation has the next")
    parser.add_argument("--only", type=int, help="run this seed in this process, with its traceback")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            load = CASES[options.loader](random.Random(f"{options.loader} {options.only}"), pathlib.Path(folder))
            try:
                print("loaded", load().config)
            except Exception:  # noqa: BLE001
                traceback.print_exc()
        return
    started, counts, offenders = time.monotonic(), collections.Counter(), 0
    for seed, name, wrong in run(options.loader, range(options.seed, options.seed + options.mutations)):
        counts[name] += 1
        if wrong:
            offenders += 1
            print(f"seed {seed}: {name}: {wrong}", flush=True)
    seconds = time.monotonic() - started
    print(f"{options.loader}: {sum(counts.values())} mutations in {seconds:.0f} s, {offenders} offenders")
    print("  " + ", ".join(f"{name} {count}" for name, count in counts.most_common()))


if __name__ == "__main__":
    main()

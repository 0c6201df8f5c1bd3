"""What every test shares: the CPU backend, run-time checks of all array annotations, repeatable property tests."""

import os

# Before anything imports jax: an installed CUDA or TPU plugin must not probe for its device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import itertools
import pathlib
import tempfile

import hypothesis
import jax
import jaxtyping
import pytest

# Before the first import of quest_jax: every annotation of the library is checked on every call of every test.
jaxtyping.install_import_hook("quest_jax", "beartype.beartype")

# No deadline: the first example compiles. Derandomized: a failure seen once is seen by everyone; explore with
# `--hypothesis-profile=explore`.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("repeatable")


# Linux gives a process 65,530 memory maps and XLA's CPU client takes several for every compiled program; where they run
# out, the process dies. Half of a whole run would need more. Counting reads a long file: not after every test.
MAPS = pathlib.Path("/proc/self/maps")
tests_run = itertools.count(1)


def pytest_collection_modifyitems(items):
    """Longest first: a worker that begins a test of minutes when all others are done leaves the others idle.

    With ``--dist worksteal`` every worker begins with a run of the list of its own, so each of these gets its share.
    """
    items.sort(key=_shortness)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = [item for first in range(workers) for item in items[first::workers]]


def _shortness(item):
    """By what ``pytest.mark.slow(seconds=...)`` says; slow tests that say nothing before the others."""
    mark = item.get_closest_marker("slow")
    return (mark is None, -mark.kwargs.get("seconds", 0) if mark else 0)


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept():
    """A program that one test has compiled is read by the next: a fifth of a run's time.

    Every process has a directory of its own, since JAX's writes to it are not atomic.
    """
    names = ("compilation_cache_dir", "persistent_cache_min_compile_time_secs", "persistent_cache_min_entry_size_bytes")
    with tempfile.TemporaryDirectory(prefix="quest-jax-programs.", ignore_cleanup_errors=True) as kept:
        for name, value in zip(names, (kept, 0, -1), strict=True):
            jax.config.update(f"jax_{name}", value)
        yield


@pytest.fixture(autouse=True)
def forget_programs():
    yield
    if next(tests_run) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()


@pytest.fixture
def as_a_user():
    """Switches the annotation checks off, as they are for users: what then raises is the library's own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

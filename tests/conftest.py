"""What every test shares: the CPU backend, run-time checks of all array annotations, repeatable property tests."""

import os

# Before anything imports jax: an installed CUDA or TPU plugin must not probe for its device.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import contextlib
import gc
import itertools
import pathlib
import shutil
import time

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


# Tracing makes many objects that live: looking through them for cycles after every 700 takes a tenth of a run.
gc.set_threshold(10_000, 10, 10)

# Linux gives a process 65,530 memory maps and XLA's CPU client takes several for every compiled program; where they run
# out, the process dies. Half of a whole run would need more. Counting reads a long file: not after every test.
MAPS = pathlib.Path("/proc/self/maps")
tests_run, looked = itertools.count(1), itertools.count()


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="run at most so many parameter sets of a test, spread evenly")


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(config, items):
    """Longest first: a worker that begins a test of minutes when all others are done leaves the others idle.

    With ``--dist worksteal`` every worker begins with a run of the list of its own. Each gets its share of the longest,
    and whole files, whose tests compile the same programs.
    """
    if most := config.getoption("cases"):
        cases = {}
        for item in items:
            cases.setdefault((item.path, item.cls, item.originalname), []).append(item)
        kept = {one[round(i * (len(one) - 1) / max(most - 1, 1))] for one in cases.values() for i in range(most)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    shares = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
    files = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    for longest in sorted(filter(_seconds, items), key=_seconds, reverse=True):
        min(shares, key=lambda share: sum(map(_seconds, share))).append(longest)
    for tests in sorted(files.values(), key=len, reverse=True):
        min(shares, key=len).extend(item for item in tests if not _seconds(item))
    items[:] = [item for share in shares for item in sorted(share, key=_seconds_then_slow)]


def _seconds(item):
    """What ``pytest.mark.slow(seconds=...)`` says."""
    mark = item.get_closest_marker("slow")
    return mark.kwargs.get("seconds", 0) if mark else 0


def _seconds_then_slow(item):
    return -_seconds(item), "slow" not in item.keywords


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """Where the programs of this process are kept, beside those of the other workers.

    A directory of its own: JAX's writes are not atomic, and what another process reads half of is an error.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    base = tmp_path_factory.getbasetemp()
    own = (base.parent if worker else base) / "programs" / (worker or "alone")
    own.mkdir(parents=True)
    for name, value in (
        ("compilation_cache_dir", str(own)),
        ("persistent_cache_min_compile_time_secs", 0),
        ("persistent_cache_min_entry_size_bytes", -1),
    ):
        jax.config.update(f"jax_{name}", value)
    yield own
    shutil.rmtree(own, ignore_errors=True)


@pytest.fixture(autouse=True)
def programs_are_shared(programs):
    """What one test has compiled is read by the next, in another worker too: a third of a run's time."""
    if next(looked) % 8:  # listing thousands of files takes its time too
        return
    have = set(os.listdir(programs))
    for other in programs.parent.iterdir():
        for name in set(os.listdir(other)) - have:
            if time.time() - (other / name).stat().st_mtime > 1:  # it is whole
                with contextlib.suppress(FileExistsError):  # compiled here in the meantime
                    os.link(other / name, programs / name)


# What LLVM makes of a program is checked here: kernels, models, memory, and what measures a real model. Elsewhere a
# program compiles without most of its passes, in two thirds of the time.
OPTIMIZED = {
    "pallas_kernels", "models", "parity", "aot", "test_plan.py", "test_memory.py", "test_demo.py", "test_attention.py",
    "test_passkey.py", "test_mass.py", "test_queries.py", "test_doctests.py", "test_load.py",
}  # fmt: skip
PLAIN = {"test_gpu_interpret.py", "test_tpu_interpret.py", "test_quant.py"}
GIVEN = jax.config.read("jax_disable_most_optimizations")


@pytest.fixture(autouse=True, scope="module")  # before what a module's tests share is computed
def optimizations(request):
    parts = request.path.relative_to(request.config.rootpath / "tests").parts
    plain = GIVEN or OPTIMIZED.isdisjoint(parts) or not PLAIN.isdisjoint(parts)
    if jax.config.read("jax_disable_most_optimizations") != plain:
        jax.config.update("jax_disable_most_optimizations", plain)


@pytest.fixture(autouse=True)
def forget_programs():
    yield
    if next(tests_run) % 16 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def as_a_user():
    """Switches the annotation checks off, as they are for users: what then raises is the library's own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)

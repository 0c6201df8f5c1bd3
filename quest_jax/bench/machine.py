"""The machine a bench runs on, and how fast it reads memory: the ceiling of everything that streams a cache."""

import concurrent.futures
import os
import pathlib
import platform
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from quest_jax.memory import available_host_bytes, check_memory

# Far beyond the caches of any machine, and their part of it beyond those of one core.
_READ_BYTES = 1 << 30
_ROUNDS = 9
KEYS = ("jax", "device", "platform", "processor", "cores", "system", "read_gb_s")
"""Of what :func:`measure_machine` returns."""


def measure_machine(read_bytes: int | None = None) -> dict[str, Any]:
    """Describes the device and measures its read bandwidth (a second or two).

    Args:
      read_bytes: size of what is read; None for 1 GiB, or a quarter of the free memory where that is less.

    Returns:
      ``jax`` (version), ``device`` (kind), ``platform``, ``processor``, ``cores``, ``system``, and ``read_gb_s`` in
      10**9 bytes a second.

    Raises:
      MemoryError: ``read_bytes`` are not free.
    """
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "system": platform.platform(),
        "read_gb_s": measure_read_bandwidth(read_bytes),
    }


def machine_line(machine: dict[str, Any]) -> str:
    """Says in one line what :func:`measure_machine` found."""
    return (
        f"jax {machine['jax']} on {machine['device']}, {machine['processor']} with {machine['cores']} cores, "
        f"{machine['system']}; reads {machine['read_gb_s']:.1f} GB/s from memory"
    )


def measure_read_bandwidth(read_bytes: int | None = None) -> float:
    """Measures how fast all cores together read memory, in 10**9 bytes a second.

    XLA sums one array on one core, so there is an array and a thread for every core; on an accelerator one array.
    """
    if read_bytes is None:
        read_bytes = min(_READ_BYTES, (available_host_bytes() or _READ_BYTES) // 4)
    check_memory(read_bytes, 0, "measuring the read bandwidth", "free memory")
    cores = (os.cpu_count() or 1) if jax.devices()[0].platform == "cpu" else 1
    # Random: the pages must be real, and different.
    parts = [jax.random.normal(jax.random.key(i), (max(1, read_bytes // cores // 4),)) for i in range(cores)]
    total = jax.jit(jnp.sum)
    jax.block_until_ready([total(part) for part in parts])
    times = []
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            list(pool.map(lambda part: total(part).block_until_ready(), parts))
            times.append(time.perf_counter() - start)
    return sum(part.nbytes for part in parts) / statistics.median(times) / 1e9


def _processor() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""Is there room? Asked before anything large is allocated."""

import pathlib
from typing import Any

import jax

_ADVICE = (
    'load with dtype="bfloat16" (half of float32) or weights="int8" (a fourth), free memory, or take a smaller model'
)


def check_memory(kept: int, staged: int, what: str, advice: str = _ADVICE) -> None:
    """Raises before an allocation on JAX's default device that cannot succeed.

    Args:
      kept: bytes that stay on the device, such as all weights in their target dtype.
      staged: bytes that exist on the host besides, for a while, such as the largest array while it is filled.
      what: what the memory is for, and ``advice`` what to do without it, for the message.

    Raises:
      MemoryError: with both numbers. Nothing is raised where the platform does not tell.
    """
    left, place = available_bytes()
    if default_device().platform == "cpu":
        _compare(kept + staged, left, what, place, advice)
        return
    _compare(staged, available_host_bytes(), what, "of host memory", advice)
    _compare(kept, left, what, place, advice)


def default_device() -> Any:
    """The device that arrays are made on unless told otherwise: ``jax.default_device``, or the first."""
    default = jax.config.jax_default_device
    if default is None:
        return jax.devices()[0]
    return jax.devices(default)[0] if isinstance(default, str) else default


def available_bytes() -> tuple[int | None, str]:
    """Bytes that may still be taken on the default device, None where it does not tell; and where, for messages."""
    device = default_device()
    if device.platform == "cpu":
        return available_host_bytes(), "of host memory"
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None, f"on {device}"
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0), f"on {device}"


def available_host_bytes() -> int | None:
    """Bytes a process may still take, swap included, within its control group; None where Linux is not asked."""
    limits = [limit for limit in (_system_bytes(), _control_group_bytes()) if limit is not None]
    return min(limits, default=None)


def _compare(needed: int, available: int | None, what: str, place: str, advice: str) -> None:
    if available is not None and needed > available:
        left = max(available, 0)
        raise MemoryError(
            f"{what}: needs {needed / 1e9:.2f} GB {place}, but {left / 1e9:.2f} GB are available; {advice}."
        )


def _system_bytes() -> int | None:
    text = _read(pathlib.Path("/proc/meminfo"))
    if text is None:
        return None
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if "MemAvailable" not in fields:
        return None
    return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree") if name in fields)


def _control_group_bytes(root: pathlib.Path = pathlib.Path("/sys/fs/cgroup")) -> int | None:
    """What a container's limit leaves (cgroup version 2); file cache counts as free, the kernel drops it on demand."""
    limit, used, stat = (_read(root / name) for name in ("memory.max", "memory.current", "memory.stat"))
    if limit is None or used is None or limit.strip() == "max":
        return None
    cache = 0
    for line in (stat or "").splitlines():
        if line.startswith("inactive_file "):
            cache = int(line.split()[1])
    return int(limit) - int(used) + cache


def _read(path: pathlib.Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:  # not Linux, or not allowed: then there is no answer
        return None

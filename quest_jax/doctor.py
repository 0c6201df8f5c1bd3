"""What this environment has: versions, devices, kernels, extras, cached models. Facts as plain data, then as text."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import IMPLEMENTATIONS as APPEND
from quest_jax.pallas_kernels.page_attention.op import IMPLEMENTATIONS as PAGE_ATTENTION
from quest_jax.pallas_kernels.page_scores.op import IMPLEMENTATIONS as PAGE_SCORES
from quest_jax.pallas_kernels.token_scores.op import IMPLEMENTATIONS as TOKEN_SCORES
from quest_jax.weights.smollm2 import cache_directory

PACKAGES = ("quest-jax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "tokenizers", "safetensors")
OPS = {"append": APPEND, "page_scores": PAGE_SCORES, "page_attention": PAGE_ATTENTION, "token_scores": TOKEN_SCORES}


def examine() -> dict[str, Any]:
    """Collects everything as JSON-ready data; asks for devices, so it initialises JAX's backend.

    Returns:
      ``versions`` by package (None: not installed); ``machine``; ``devices``; ``ops``: for each what it uses and why
      not the others; ``extras``: for each what it lacks; ``cache``: the folder and the bytes of each model in it.

    Raises:
      RuntimeError: JAX cannot start the platform it was told to use.
    """
    devices = jax.devices()
    return {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "machine": {"system": platform.platform(), "cores": os.cpu_count(), "memory_bytes": _memory_bytes()},
        "devices": [_device(device) for device in devices],
        "ops": {name: _op(name, implementations, devices[0]) for name, implementations in OPS.items()},
        "extras": extras(),
        "cache": _cache(),
    }


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints what :func:`examine` found as tables."""
    machine, cache = report["machine"], report["cache"]
    rows = {name: version or "not installed" for name, version in report["versions"].items()}
    rows |= {"system": machine["system"], "cores": machine["cores"], "memory": _gigabytes(machine["memory_bytes"])}
    for device in report["devices"]:
        rows[f"device {device['platform']}:{device['id']}"] = f"{device['kind']}, {_room(device)}"
    for name, op in report["ops"].items():
        declined = "".join(f"\nnot {other}: {reason}" for other, reason in op["declined"].items())
        rows[f"op {name}"] = f"{op['uses']}{declined or ' (there is no other implementation)'}"
    for name, missing in report["extras"].items():
        lacking = f'lacks {", ".join(missing)}; pip install "quest-jax[{name}]"'
        rows[f"extra {name}"] = lacking if missing else "installed"
    if not report["extras"]:
        rows["extras"] = "unknown: this is a checkout that is not installed"
    models = [f"{name} ({size / 1e6:.0f} MB)" for name, size in cache["models"].items()]
    rows["model cache"] = f"{cache['folder']}: {', '.join(models) or 'empty; smollm2-135m would be fetched (98 MB)'}"
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(escape(name), escape(str(value)))
    console.print(table)


def extras(distribution: str = "quest-jax") -> dict[str, list[str]]:
    """What each optional group of ``distribution`` lacks; nothing where it is not installed as a distribution."""
    groups = dict.fromkeys(group for group, _ in _optional(distribution))
    return {group: _lacking(distribution, group) for group in groups}


def _lacking(distribution: str, group: str) -> list[str]:
    missing = []
    for _, requirement in (found for found in _optional(distribution) if found[0] == group):
        name, _, groups = requirement.partition("[")
        if _version(name) is None:
            missing.append(name)
        else:
            nested = [part.strip() for part in groups.rstrip("]").split(",") if part.strip()]
            missing += [other for part in nested for other in _lacking(name, part)]
    return missing


def _optional(distribution: str) -> list[tuple[str, str]]:
    """Pairs of a group and a requirement in it, ``name`` or ``name[group,group]``."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    form = re.compile(r"([A-Za-z0-9._-]+(?:\[[^\]]*\])?).*extra\s*==\s*[\"']([^\"']+)[\"']")
    return [(found.group(2), found.group(1)) for found in map(form.match, lines) if found]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device(device: Any) -> dict[str, Any]:
    stats = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "id": device.id,
        "kind": device.device_kind,
        "memory_bytes": stats.get("bytes_limit"),
        "used_bytes": stats.get("bytes_in_use"),
    }


def _room(device: Mapping[str, Any]) -> str:
    if device["memory_bytes"] is None:
        return "the machine's memory"
    return f"{_gigabytes(device['used_bytes'])} of {_gigabytes(device['memory_bytes'])} in use"


def _op(name: str, implementations: tuple[dispatch.Implementation, ...], device: Any) -> dict[str, Any]:
    """The decision for a decode step of smollm2-135m in float32."""
    call = dispatch.Call(
        compute_capability=dispatch.target_of(device).compute_capability,
        platform=device.platform,
        device_kind=device.device_kind,
        dtype="float32",
        layout="split" if device.platform == "cpu" else "fused",
        kv_heads=3,
        group=3,
        head_dim=64,
        page_size=16,
    )
    reasons = dispatch.explain(implementations, call)
    return {
        "uses": dispatch.resolve(name, implementations, call, None).name,
        "declined": {other: reason for other, reason in reasons.items() if reason is not None},
    }


def _cache() -> dict[str, Any]:
    folder = cache_directory()
    return {"folder": str(folder), "models": {path.name: path.stat().st_size for path in sorted(folder.glob("*.gguf"))}}


def _gigabytes(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 1e9:.1f} GB"

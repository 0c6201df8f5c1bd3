"""Peak memory of a whole run in a process of its own, beside the plan of it.

``python -m quest_jax.bench.memory OPTIONS`` with the options as JSON is that process: it prints one line of JSON.
"""

import json
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np

import quest_jax


def measure(
    model: str,
    batch: int,
    max_len: int,
    dtype: str,
    weights: str | None = None,
    *,
    prompt: int | None = None,
    **options,
) -> dict[str, int]:
    """Loads a model, reads prompts that fill ``max_len`` but for a few tokens, and writes these, in a fresh process.

    Args:
      model, dtype, weights: as for :func:`quest_jax.load`.
      batch, max_len, options: as for :func:`quest_jax.plan`.
      prompt: tokens of the prompts, if they are not to fill the cache, all of which is resident all the same.

    Returns:
      bytes of resident memory of the process: ``baseline``, with Python, JAX and the library loaded and a first small
      program run; ``loaded``, the peak up to the end of loading; ``peak``, of all. On an accelerator also
      ``device_peak``, of what JAX had on the device.

    Raises:
      NotImplementedError: not on Linux or macOS, where the system does not count.
      RuntimeError: the process failed; with its last line.
    """
    if sys.platform not in ("linux", "darwin"):
        raise NotImplementedError(f"measuring memory: expected Linux or macOS, which count it, got {sys.platform}.")
    job = {"model": model, "batch": batch, "max_len": max_len, "dtype": dtype, "weights": weights}
    job |= {"prompt": prompt, "options": options}
    command = [sys.executable, "-m", "quest_jax.bench.memory", json.dumps(job)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip() or f"it ended with {result.returncode}").splitlines()[-1]
        raise RuntimeError(f"measuring memory: the process failed: {last}")
    return json.loads(result.stdout)


def report(plan: quest_jax.Plan, measured: dict[str, int]) -> str:
    """Says in two lines how what was measured compares with ``plan``."""
    if "device_peak" in measured:
        peak = measured["device_peak"]
        return f"  measured: peak {peak / 1e6:.0f} MB on the device, {peak / plan.total - 1:+.1%} of the total"
    peak, base, planned = measured["peak"], measured["baseline"], plan.total + plan.programs
    return (
        f"  measured: peak {peak / 1e6:.0f} MB resident, {base / 1e6:.0f} MB of it Python and JAX before "
        f"loading;\n  the rest, {(peak - base) / 1e6:.0f} MB, is {(peak - base) / planned - 1:+.1%} of total and "
        "programs"
    )


def main() -> None:
    """Runs the job of the command line and prints its memory."""
    job = json.loads(sys.argv[1])
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.zeros(1)))
    measured = {"baseline": _peak()}
    params = quest_jax.load(job["model"], dtype=job["dtype"], weights=job["weights"])
    measured["loaded"] = _peak()
    new = min(8, job["max_len"] - 1)
    shape = (job["batch"], job["prompt"] or job["max_len"] - new)
    prompts = np.random.default_rng(0).integers(0, params.config.vocab_size, shape)
    start = time.perf_counter()
    quest_jax.generate(params, prompts, max_new_tokens=new, capacity=job["max_len"], eos_token_ids=(), **job["options"])
    measured |= {"peak": _peak(), "milliseconds": round(1e3 * (time.perf_counter() - start))}
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        measured["device_peak"] = stats["peak_bytes_in_use"]
    sys.stdout.write(json.dumps(measured) + "\n")


def _peak() -> int:
    """Bytes of the largest resident set that this process has had."""
    if sys.platform == "linux":  # where ru_maxrss of a child begins at what its parent had
        status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()

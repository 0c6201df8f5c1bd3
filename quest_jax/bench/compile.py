"""``python -m quest_jax.bench.compile``: what the compilers say of the kernels, as the tables of ``docs/kernels.md``.

Compiles for TPUs where libtpu is installed and for NVIDIA GPUs where the CUDA plugin is (the environments of ``make
test-aot-tpu`` and ``make test-aot-gpu``), without such a device. Nothing is run: a time is what the cost model's bytes
take at the memory's nominal bandwidth. That model is ours, the bytes a program has to move at the least: XLA's counts
nothing of what a kernel reads.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from quest_jax.bench import compile_gpu, compile_tpu

LABEL = "Compiled, not run. Times are the least bytes over nominal bandwidth, not measurements."


def tpu_table(chips: Sequence[str]) -> list[str]:
    """Rows of markdown, a program each: least bytes, scalar memory, and per chip vector memory and time."""
    kernels = compile_tpu.kernel_programs()
    programs = [*kernels, compile_tpu.decode_program(), compile_tpu.prefill_program()]
    cells: list[list[str]] = [[] for _ in programs]
    for chip in chips:
        device, bandwidth = compile_tpu.device_of(chip), compile_tpu.CHIPS[chip][1]
        for row, program in zip(cells, programs, strict=True):
            found = compile_tpu.compile_for(device, program)
            peak = "" if program in kernels else f", {found.peak / 1e9:.2f} GB of HBM"
            row.append(f"{found.vmem / 1e6:.2f} MB, {_time(program.bytes, bandwidth)}{peak}")
    head = ["program", "least bytes", "SMEM", *(f"{chip}: VMEM, time" for chip in chips)]
    rows = [
        [program.name, _size(program.bytes), _size(program.scalar_bytes) if program in kernels else "", *row]
        for program, row in zip(programs, cells, strict=True)
    ]
    return _markdown(head, rows)


def gpu_table(architectures: Sequence[str]) -> list[str]:
    """Rows of markdown, a kernel of a program each: bytes, shared memory, per architecture registers, spills, time."""
    found = {
        (architecture, kernel.program, kernel.name): kernel
        for architecture in architectures
        for kernel in compile_gpu.compile_all(architecture)[1]
    }
    head = ["program", "kernel", "least bytes", "shared"]
    head += [f"sm_{architecture}: registers, spilled, time" for architecture in architectures]
    rows = []
    for title, sizes in compile_gpu.PROGRAMS.items():
        for name in ("page_attention", "page_attention_merge", "page_scores"):
            kernels = [found.get((architecture, title, name)) for architecture in architectures]
            if not any(kernels):  # another kernel, or one that a program before it has already
                continue
            reads = name != "page_attention_merge"  # that one reads partial results, which may lie in the L2 cache
            shared = f"{sizes.shared / 1024:.0f} KiB" if isinstance(sizes, compile_gpu.Attention) and reads else ""
            cells = [title, name, _size(sizes.bytes) if reads else "", shared]
            for architecture, kernel in zip(architectures, kernels, strict=True):
                time = f", {_time(sizes.bytes, compile_gpu.ARCHITECTURES[architecture].bandwidth)}" if reads else ""
                cells.append(f"{kernel.registers}, {kernel.spilled}{time}" if kernel else "")
            rows.append(cells)
    return _markdown(head, rows)


def _markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _size(size: int) -> str:
    if size < 1000:
        return f"{size} B"
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _time(size: int, gigabytes_a_second: int) -> str:
    return f"{size / gigabytes_a_second / 1e3:.1f} us"


def main() -> None:
    """Prints the tables of the chips that this environment has a compiler for, and names what it has none for."""
    known = [*compile_tpu.CHIPS, *compile_gpu.ARCHITECTURES]
    parser = argparse.ArgumentParser(prog="python -m quest_jax.bench.compile", description=__doc__)
    parser.add_argument("chips", nargs="*", metavar="CHIP", help=f"some of {', '.join(known)}; all otherwise")
    chips = parser.parse_args().chips
    if unknown := [chip for chip in chips if chip not in known]:
        parser.error(f"expected chips of {', '.join(known)}, got {unknown[0]!r}")
    families = (
        ("TPU", "libtpu", compile_tpu.CHIPS, tpu_table),
        ("NVIDIA GPU", "jax_plugins.xla_cuda13", compile_gpu.ARCHITECTURES, gpu_table),
    )
    for family, compiler, members, table in families:
        wanted = [chip for chip in members if chip in chips or not chips]
        if not wanted:
            continue
        if not _is_installed(compiler):
            sys.stderr.write(f"NOT COMPILED for {family} ({', '.join(wanted)}): {compiler} is not installed here.\n")
            if chips:
                sys.exit(1)
            continue
        sys.stdout.write("\n".join([f"{family}. {LABEL}", "", *table(wanted), "", ""]))


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not
        return False


if __name__ == "__main__":
    main()

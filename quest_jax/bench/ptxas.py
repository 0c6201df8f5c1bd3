"""Reads ptxas' report of the kernels that :mod:`quest_jax.bench.compile_gpu` compiled."""

import re
from typing import NamedTuple


class Kernel(NamedTuple):
    """One kernel of one program: registers of a thread, bytes spilled by it."""

    program: str
    name: str
    target: str
    registers: int
    spilled: int


def kernels_of(report: str) -> list[Kernel]:
    """Returns the kernels in the order of the report, of which a line ``PROGRAM name`` stands before each program's."""
    kernels, program, name, target, spilled = [], "", "", "", 0
    for line in report.splitlines():
        if line.startswith("PROGRAM "):
            program = line.removeprefix("PROGRAM ")
        elif found := re.search(r"Compiling entry function '(\w+?)_mosaic_gpu\w*' for 'sm_(\w+)'", line):
            name, target = found.groups()
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads\s*$", line):
            spilled = int(found[1]) + int(found[2])
        elif found := re.search(r"Used (\d+) registers", line):
            kernels.append(Kernel(program, name, target, int(found[1]), spilled))
    return kernels

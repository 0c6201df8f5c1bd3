"""The house style that a reader feels first: one subject a file, short files."""

import statistics

import pytest

from tests.imports import ROOT


@pytest.mark.parametrize("folder", ["quest_jax", "tests"])
def test_files_stay_short(folder):
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    subjects = [count for path, count in lines.items() if path.name != "__init__.py"]
    assert statistics.median(subjects) <= 150
    for path, count in lines.items():
        limit = 700 if path.name in ("tpu.py", "gpu.py") else 450  # a kernel and its tiling belong together
        assert count <= limit, f"{path.relative_to(ROOT)} has {count} lines, expected {limit} at most: split it"

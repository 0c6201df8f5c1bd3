"""The GPU programs compiled for five architectures: no spills, the fast selection, few launches, no cache copied.

Compiled, not run. ``make test-aot-gpu`` makes the environment; it needs Linux on x86-64 or AArch64, and no GPU.
"""

import concurrent.futures
import functools
import pathlib
import re

import pytest

from quest_jax.bench import compile_gpu, device_correctness
from quest_jax.bench.ptxas import Kernel

pytestmark = pytest.mark.aot
ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def started() -> dict[str, concurrent.futures.Future]:
    """All architectures, a process each, two at once."""
    pool = concurrent.futures.ThreadPoolExecutor(2)
    return {one: pool.submit(compile_gpu.compile_all, one, str(ROOT)) for one in compile_gpu.ARCHITECTURES}


def compiled(architecture: str) -> tuple[dict, list[Kernel]]:
    return started()[architecture].result()


@pytest.mark.parametrize("architecture", list(compile_gpu.ARCHITECTURES))
class TestEveryArchitecture:
    def test_kernels_do_not_spill(self, architecture):
        _, kernels = compiled(architecture)
        names = {kernel.name for kernel in kernels}
        assert names == {"page_attention", "page_attention_merge", "page_scores"}
        assert {re.match(r"\d+", kernel.target)[0] for kernel in kernels} == {architecture}
        assert [kernel for kernel in kernels if kernel.spilled or kernel.registers > 255] == []

    def test_a_chunk_of_queries_is_served_and_copies_no_cache(self, architecture):
        result, kernels = compiled(architecture)
        chunks = [title for title, sizes in compile_gpu.PROGRAMS.items() if getattr(sizes, "tokens", 1) > 1]
        assert sorted(result["chunks"]) == sorted(chunks) and len(chunks) >= 6
        assert {kernel.program for kernel in kernels if kernel.name == "page_attention"} >= set(chunks)
        for title, facts in result["chunks"].items():
            attention = [launch for launch in facts["launches"] if "mosaic_gpu" in launch]
            assert len(attention) in (1, 2), (title, attention)
            assert facts["cache_copies"] == [], title

    def test_score_select_attend_is_seven_launches(self, architecture):
        """Six, and one for the counts, which a whole decode step computes once for all layers."""
        ran = compiled(architecture)[0]["chain"]
        assert len(ran) == 7, ran
        assert sum("mosaic_gpu" in one for one in ran) == 3
        assert sum("__gpu$TopK" in one for one in ran) == 1

    def test_a_softmax_over_pages_is_one_more(self, architecture):
        """The default; the group's largest joins what prepares the selection."""
        ran = compiled(architecture)[0]["chain by softmax"]
        assert len(ran) == 8 and sum("log_softmax" in one for one in ran) == 1, ran
        assert sum("mosaic_gpu" in one for one in ran) == 3
        assert sum("__gpu$TopK" in one for one in ran) == 1

    def test_a_layer_of_the_decode_step_is_six_launches(self, architecture):
        ran = compiled(architecture)[0]["step"]["launches"]
        counts = [launch for launch in ran if "/attend/" in launch and launch.endswith("/broadcast_in_dim")]
        assert len(counts) == 1, counts
        for layer in ("layer_0", "layer_1"):
            scores, merge = (
                next(i for i, launch in enumerate(ran) if layer in launch and f"{kernel}/" in launch)
                for kernel in ("page_scores", "page_attention_merge")
            )
            # The counts are computed once for all layers, wherever the scheduler puts them.
            own = [launch for launch in ran[scores : merge + 1] if launch not in counts]
            assert len(own) == 6, own
        assert sum("mosaic_gpu" in launch for launch in ran) == 6
        assert sum("__gpu$TopK" in launch for launch in ran) == 2

    def test_what_is_no_fast_selection_is_told_apart(self, architecture):
        for control in ("stable", "129 of them"):
            ran = compiled(architecture)[0][control]
            assert ran and not any("__gpu$TopK" in launch for launch in ran), ran

    def test_the_decode_step_copies_no_cache(self, architecture):
        step = compiled(architecture)[0]["step"]
        assert step["cache_copies"] == []
        assert step["aliased_bytes"] >= step["cache_bytes"] > 1e9
        assert step["temporary_bytes"] < 0.1 * step["cache_bytes"]

    def test_padded_rows_are_served_and_not_copied(self, architecture):
        """A cache for head dim 80 has rows of 128."""
        step = compiled(architecture)[0]["step of head dim 80"]
        assert sum("mosaic_gpu" in launch for launch in step["launches"]) == 3
        assert step["cache_copies"] == []
        assert step["aliased_bytes"] >= step["cache_bytes"] == 8 * 2048 * (16 * 256 * 2 + 256 * 4)

    def test_no_product_of_one_row_is_written_as_large_as_its_weight(self, architecture):
        result = compiled(architecture)[0]
        assert result["step"]["weight_copies"] == result["step of head dim 80"]["weight_copies"] == []
        assert result["one row"] != [], "the control: XLA does so where the library does not prevent it"


def test_the_programs_of_the_device_check_compile():
    names = compiled("90")[0]["device check"]
    assert len(names) == 5 * len(device_correctness.SHAPES) + 2

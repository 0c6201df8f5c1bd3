"""Rows: bytes counted as the arrays have them, ratios of what was timed."""

import jax
import pytest

from quest_jax import LlamaConfig, init_attention, random_params
from quest_jax.bench.machine import KEYS, machine_line, measure_machine, measure_read_bandwidth
from quest_jax.bench.rows import Method, make_rows
from quest_jax.bench.sizes import SHAPES, dense_bytes, metadata_bytes, quest_bytes, step_bytes
from quest_jax.bench.timing import Timing


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_of_the_cache(name, dtype):
    shape = SHAPES[name]
    cache = init_attention(1, shape.kv_heads, shape.head_dim, batch=1, capacity=512, dtype=dtype).cache
    assert dense_bytes(shape, 512, dtype) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.kv))
    assert metadata_bytes(shape, 512) == cache.meta[0].nbytes
    assert quest_bytes(shape, 512, dtype, 128) == cache.meta[0].nbytes + dense_bytes(shape, 512, dtype) // 4
    assert quest_bytes(shape, 512, dtype, 512) == dense_bytes(shape, 512, dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_reads_every_weight_but_an_embedding_that_is_only_looked_up(tied):
    config = LlamaConfig(64, 32, 48, 3, 4, 2, 8, 512, tie_word_embeddings=tied)
    params = random_params(config)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    looked_up = 0 if tied else 64 * 32 * 4
    layer = 2 * 2 * 256 * 8 * 4
    assert step_bytes(params, 256, None) == weights - looked_up + 3 * layer
    # Two layers dense, one with its metadata and a quarter of the tokens.
    assert step_bytes(params, 256, 64) == weights - looked_up + 2 * layer + 2 * 16 * 2 * 8 * 4 + layer // 4


def test_ratios_refer_to_the_fastest_dense_method():
    timings = {
        "slow": Timing(0.4, 0.3, 0.5, 0.7, 1.5),
        "fast": Timing(0.2, 0.2, 0.3, 0.2, 0.5),
        "sparse": Timing(0.05, 0.04, 0.06, 0.05, None),
    }
    methods = {"slow": Method("slow", None, 8e9), "fast": Method("fast", None, 8e9), "sparse": Method("S", 64, 1e9)}
    slow, fast, sparse = make_rows("x", 512, "float32", timings, methods)
    assert (slow.ratio, fast.ratio, sparse.ratio) == pytest.approx((0.5, 1, 4))
    assert (sparse.byte_model, sparse.achieved, sparse.gb_s) == pytest.approx((8, 0.5, 20))
    assert (sparse.ms, sparse.ms_low, sparse.ms_high, sparse.cpu_ms) == pytest.approx((50, 40, 60, 50))
    assert (slow.compile_s, sparse.compile_s, sparse.budget, slow.budget) == (1.5, None, 64, None)
    steps = make_rows("x", 512, "float32", timings, methods, calls=4, yardstick=("slow",))
    assert steps[2].ms == pytest.approx(12.5) and steps[2].ratio == pytest.approx(8)
    assert steps[2].gb_s == pytest.approx(80)
    assert make_rows("x", 512, "float32", timings, methods, operations=True)[0].gb_s is None
    with pytest.raises(ValueError, match="dense method"):
        make_rows("x", 512, "float32", {"sparse": timings["sparse"]}, methods)


def test_the_machine_says_how_fast_it_reads():
    machine = measure_machine(64 << 20)
    assert tuple(machine) == KEYS and machine["processor"]
    assert 0.2 < machine["read_gb_s"] < 5000
    assert jax.__version__ in machine_line(machine) and "GB/s" in machine_line(machine)
    with pytest.raises(MemoryError, match="bandwidth"):
        measure_read_bandwidth(1 << 60)

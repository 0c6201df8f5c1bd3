"""Which calls the TPU kernels take: decided before anything is compiled, with the reason in words."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from quest_jax.cache import init_cache
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import IMPLEMENTATIONS as APPEND
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.page_attention.op import IMPLEMENTATIONS as PAGE_ATTENTION
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.page_scores.op import IMPLEMENTATIONS as PAGE_SCORES
from quest_jax.pallas_kernels.page_scores.op import page_scores
from tests.pallas_kernels.cases import Case, fill, queries

SERVED = dispatch.Call(
    platform="tpu", device_kind="TPU v5 lite", dtype="bfloat16", layout="fused", kv_heads=8, group=4, head_dim=128,
    page_size=16, pages=8192,
)  # fmt: skip
OPS = {"append": APPEND, "page_attention": PAGE_ATTENTION, "page_scores": PAGE_SCORES}


def reason(op, **changes):
    call = dataclasses.replace(SERVED, **changes)
    assert dispatch.explain(OPS[op], call)["xla"] is None
    why_not = dispatch.explain(OPS[op], call)["mosaic_tpu"]
    chosen = dispatch.resolve(op, OPS[op], call, None).name
    assert (chosen == "mosaic_tpu") == (why_not is None)
    return why_not


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128])
def test_what_is_served_is_served_without_being_asked_for(op, head_dim, page_size):
    for dtype in ("bfloat16", "float32"):
        assert reason(op, head_dim=head_dim, page_size=page_size, dtype=dtype, query_tokens=256) is None


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"platform": "gpu"}, "is of platform 'gpu'"),
        ({"layout": "split"}, "make the cache with layout='fused'"),
        ({"dtype": "float16"}, "float32 and bfloat16, and the cache has float16"),
        ({"head_dim": 80}, "2D = 160 numbers"),
        ({"page_size": 5}, "a page has 5 tokens"),
        ({"scalars": 1 << 18}, "1048576 bytes of scalar memory"),
    ],
)
def test_the_limits_of_all_kernels_are_named(op, changes, says):
    assert says in reason(op, **changes)


def test_the_limits_of_single_kernels_are_named():
    assert "metadata of 8191 pages" in reason("page_scores", pages=8191)
    assert "metadata of 8191 pages" in reason("append", pages=8191)
    assert "metadata of 8184 pages, no multiple of the 16 rows" in reason("page_scores", pages=8184, dtype="bfloat16")
    assert reason("page_scores", pages=8184, dtype="float32") is None
    assert "serves metadata in float32 or bfloat16, got int8" in reason("page_scores", dtype="int8")
    assert "writes metadata in float32, got bfloat16" in reason("append", metadata="bfloat16")
    assert reason("page_attention", pages=8191) is None
    assert "write fewer tokens at a time" in reason("append", query_tokens=16384)


def test_asked_for_by_name_on_a_cpu_each_raises_its_reason():
    case = Case(layout="fused")
    filled, q = fill(case), queries(case, 1)
    start, end = filled.lengths - 1, filled.lengths
    new = jnp.zeros((1, 1, case.kv_heads, case.head_dim))
    calls = [
        lambda name: append(filled.kv, filled.meta, new, new, start, end, implementation=name),
        lambda name: page_scores(q[:, 0], filled.meta, end, page_size=16, implementation=name),
        lambda name: page_attention(q, filled.kv, start, end, implementation=name),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match="'mosaic_tpu' does not serve this call: it is compiled for TPUs"):
            call("mosaic_tpu")
        call(None)


def test_a_target_decides_for_ops_and_for_the_layout_of_a_cache():
    case = Case(layout="fused")
    filled, q = fill(case), queries(case, 1)

    def program():
        return str(jax.make_jaxpr(lambda q: page_attention(q, filled.kv, filled.lengths - 1, filled.lengths))(q))

    assert "pallas_call" not in program()
    assert isinstance(init_cache(1, 2, 64, batch=1, capacity=64).kv[0], tuple)
    with dispatch.target("tpu", "TPU v5 lite"):
        assert "pallas_call" in program()
        assert not isinstance(init_cache(1, 2, 64, batch=1, capacity=64).kv[0], tuple)

"""The TPU kernels and a whole decode step, compiled by libtpu for chips that are not there. Nothing is run."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest

from quest_jax.bench import compile_tpu
from quest_jax.pallas_kernels.page_attention import tpu as page_attention

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOT COMPILED FOR TPU: libtpu is not installed, or has no wheel for this platform (Linux x86-64 has)",
    ),
]


@pytest.fixture(scope="module", params=list(compile_tpu.CHIPS))
def device(request):
    return compile_tpu.device_of(request.param)


@pytest.fixture(scope="module")
def v5e():
    return compile_tpu.device_of("v5e")


def check(found, program, kernels, besides=10 * 2**20):
    assert found.kernels == kernels
    assert found.copies == []
    if program.donated:
        assert found.cache <= found.aliased <= found.cache + besides  # the state is more than the cache
    assert 0 < found.vmem <= 16 * 2**20


# Each shape for two of the chips, so that every chip sees every kernel; `quest_jax.bench.compile` takes all for all.
CHIPS = list(compile_tpu.CHIPS)
SHAPES = [(CHIPS[(i + j) % len(CHIPS)], one) for i, one in enumerate(compile_tpu.kernel_programs()) for j in (0, 2)]


@pytest.mark.parametrize(("chip", "program"), SHAPES, ids=lambda one: getattr(one, "name", one))
def test_every_kernel_compiles_for_every_chip(chip, program):
    check(compile_tpu.compile_for(compile_tpu.device_of(chip), program), program, kernels=1)


def test_a_decode_step_of_a_large_model_is_made_of_the_kernels_and_updates_its_cache_in_place(device, as_a_user):
    program = compile_tpu.decode_program()
    found = compile_tpu.compile_for(device, program)
    check(found, program, kernels=3 + 1 + 3)  # append, the one sparse layer's scores, attention
    assert "sort" in found.text  # the selection is XLA's
    # Nothing but arguments and results in HBM, of which the cache is one: the peak that `bench.compile` reports.
    assert found.peak < 1.1 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.arguments))


def test_a_chunk_that_quoka_reads_is_made_of_the_kernels_and_copies_no_cache(device, as_a_user):
    program = compile_tpu.prefill_program()
    found = compile_tpu.compile_for(device, program)
    # Append and scores, and attention of both branches: of all pages, for the start of a prompt, and of those selected.
    norms = 3 * 8 * 131072 * 4
    check(found, program, kernels=3 + 3 + 2 * 3, besides=norms + 10 * 2**20)
    assert found.peak < 1.2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.arguments))


@pytest.mark.parametrize("dim", [80, 96])
def test_a_decode_step_with_rows_that_are_padded_copies_no_cache_either(v5e, dim, as_a_user):
    program = compile_tpu.decode_program(dim=dim, context=8192, budget=1024)
    assert {leaf.shape[-1] for leaf in program.cache} == {256}
    check(compile_tpu.compile_for(v5e, program), program, kernels=3 + 1 + 3)


def test_generate_is_made_of_the_kernels_and_its_loops_copy_no_cache(v5e, as_a_user):
    # All layers of SmolLM2-135M: with 4 of them XLA has room to keep a pool in vector memory from step to step, and
    # copies that one to HBM for every append.
    layers = 30
    program = compile_tpu.generate_program(layers=layers)
    found = compile_tpu.compile_for(v5e, program)
    # Prefill appends and attends; decoding does so too, and scores in all but the two dense layers.
    assert found.kernels == 2 * layers + 2 * layers + layers - 2
    # Outside the loops the cache is made.
    loops, entry = found.text.split("\nENTRY ")
    assert "tpu_custom_call" not in entry and loops.count('custom_call_target="tpu_custom_call"') == found.kernels
    assert compile_tpu.copies_of(loops, program.cache) == []


# Controls: each says that a check above would have seen the fault it is there for.


def test_without_donation_nothing_is_aliased(v5e):
    found = compile_tpu.compile_for(v5e, compile_tpu.append_program(donate=False))
    assert found.aliased == 0 and found.copies


def test_a_row_that_is_no_whole_tile_makes_xla_copy_the_cache(v5e):
    """What padding is for: head dim 80 as it is compiles, and would copy the pool at every step."""

    def direct(q, kv, starts, lengths, table, pages, counts):
        return page_attention.page_attention(
            q, kv, starts, lengths, table, pages=pages, counts=counts, layer=None, scale=80**-0.5
        )

    program = compile_tpu.attention_program(dim=80, listed=16, padded=False)
    program = dataclasses.replace(program, function=direct)
    assert compile_tpu.compile_for(v5e, program).copies


def test_the_reference_has_no_kernel(v5e):
    program = compile_tpu.attention_program(listed=16, implementation="xla")
    assert compile_tpu.compile_for(v5e, program).kernels == 0


def test_a_block_that_does_not_fit_vector_memory_does_not_compile(v5e):
    program = compile_tpu.attention_program(dim=256, page=128, dtype="float32")

    def too_large(q, kv, starts, lengths, *_):
        return page_attention.page_attention(
            q, kv, starts, lengths, None, pages=None, counts=None, layer=None, scale=1.0, block_tokens=16384
        )

    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)memory space vmem"):
        compile_tpu.compile_for(v5e, dataclasses.replace(program, function=too_large))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dim": 80, "padded": False}, "2D = 160 numbers"),
        ({"page": 4}, "a page has 4 tokens"),
        ({"dtype": "float16"}, "float32 and bfloat16"),
        ({"rows": 32, "pages": 8192, "table": True}, "bytes of scalar memory"),
    ],
)
def test_what_a_kernel_cannot_do_is_refused_by_name_and_left_to_xla(v5e, options, reason):
    with pytest.raises(NotImplementedError, match=reason):
        compile_tpu.compile_for(v5e, compile_tpu.attention_program(**options))


def test_the_default_device_is_what_the_ops_choose_by():
    """Without one, the same call is for this process' own device and takes XLA."""
    program = compile_tpu.attention_program(listed=16, implementation=None)
    assert "tpu_custom_call" not in jax.jit(program.function).lower(*program.arguments).as_text()
    assert jnp.zeros(1).devices() == {jax.devices("cpu")[0]}

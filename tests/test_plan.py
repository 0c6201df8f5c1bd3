"""The plan of memory: exact where it says so, never below the compiled programs, and what ``prefill`` refuses by."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import quest_jax
from quest_jax import Dense, LlamaConfig, Params, Quest, QuoKA, memory
from quest_jax.attention import init_attention
from quest_jax.bench.memory import measure, report
from quest_jax.decode import DecodeState, _prefill_chunk_jit, row_keys
from quest_jax.generate import _decode_block_jit
from quest_jax.models.config import Experts
from quest_jax.models.llama import abstract_weights
from quest_jax.policies.h2o import H2O
from quest_jax.policies.less_is_more import LessIsMore
from quest_jax.policies.oracle import Oracle, OracleChunk
from quest_jax.policies.sample_attention import SampleAttention
from quest_jax.policies.snapkv import SnapKV
from quest_jax.policies.sparq import SparQ
from quest_jax.sampling import make_sampler
from quest_jax.weights.quantize import quantize_tree
from tests.models_for_tests import CONFIG, tiny


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("options", [
    {},
    {"budget": 64, "page_size": 8},
    {"policy": QuoKA(64), "prefill_policy": QuoKA(64, chunk=32)},
    {"dtype": jnp.bfloat16, "budget": 64},
], ids=str)  # fmt: skip
def test_weights_and_cache_are_those_of_the_arrays(options):
    options = dict(options)
    params = tiny(options.pop("dtype", jnp.float32))
    state = quest_jax.prefill(params, [[1, 2, 3], [4]], capacity=300, **options)
    plan = quest_jax.plan(params, 2, 300, **options)
    cache = state.attention.cache
    assert (plan.kv, plan.metadata, plan.norms) == (nbytes(cache.kv), nbytes(cache.meta), nbytes(cache.norms))
    assert plan.cache == cache.nbytes and plan.capacity == cache.capacity
    assert plan.weights == nbytes(params.weights) and plan.logits == nbytes(state.logits)
    assert plan.needed == plan.cache + plan.logits + plan.temporaries
    # A config alone says the same, but that the weights are still to be loaded.
    alone = quest_jax.plan(params.config, 2, 300, dtype=params.weights["embed"].dtype, **options)
    assert alone.total == plan.total == alone.needed and alone.loading == max(w.nbytes for w in jax.tree.leaves(params))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_counted_as_they_are(kind, dtype):
    params = quest_jax.quantize(tiny(jnp.dtype(dtype)), kind)
    plan = quest_jax.plan(params, 2, 300)
    assert plan.weights == nbytes(params.weights) and (plan.quantized, plan.dtype) == (kind, dtype)
    alone = quest_jax.plan(CONFIG, 2, 300, dtype=dtype, weights=kind)
    assert alone.total == plan.total == alone.needed and alone.weights == plan.weights
    assert plan.kv == quest_jax.plan(CONFIG, 2, 300, dtype=dtype).kv
    assert str(plan).startswith(f"2 x 300 tokens, {dtype}, {kind} weights\n")
    assert plan.resized(batch=3).quantized == kind and quest_jax.plan(params, 2, 300, weights=kind).total == plan.total
    with pytest.raises(ValueError, match=f"these weights are {kind}, got .*; pass their config to plan for others"):
        quest_jax.plan(params, 2, 300, weights="int4" if kind == "int8" else "int8")
    with pytest.raises(ValueError, match=f"these weights are {dtype}, got {kind}; pass their config"):
        quest_jax.plan(tiny(jnp.dtype(dtype)), 2, 300, weights=kind)


def test_norms_that_only_the_prompt_needs_are_counted():
    assert quest_jax.plan(CONFIG, 1, 512, prefill_budget=64).norms == CONFIG.n_layers * CONFIG.n_kv_heads * 512 * 4
    assert quest_jax.plan(CONFIG, 1, 512, budget=64).norms == 0


SMOL = LlamaConfig(49152, 576, 1536, 2, 9, 3, 64, 8192, tie_word_embeddings=True)
LLAMA3 = LlamaConfig(128256, 4096, 14336, 2, 32, 8, 128, 8192)
MHA = LlamaConfig(1000, 512, 1024, 4, 8, 8, 64, 8192)
DEEP = LlamaConfig(1000, 576, 1536, 12, 9, 3, 64, 8192)
MIXTURE = LlamaConfig(1000, 1024, 384, 2, 16, 4, 64, 8192, qk_norm=True, experts=Experts(64, 8, 384))
WINDOWS = LlamaConfig(1000, 512, 1024, 3, 8, 4, 64, 8192, windows=(4096, 0, 4096), sinks=True)
TOKENS = QuoKA(1024, granularity="token")


def measured(config, batch, capacity, dtype, policy, prefill_policy, chunk, kind=None):
    """Bytes of temporaries of the compiled prefill and decode programs; nothing is allocated."""
    params = Params(quantize_tree(abstract_weights(config, dtype), kind), config)

    def init():
        return DecodeState(
            attention=init_attention(
                config.n_layers, config.n_kv_heads, config.head_dim, batch=batch, capacity=capacity, dtype=dtype,
                policy=policy, prefill_policy=prefill_policy, n_heads=config.n_heads,
            ),
            logits=jnp.zeros((batch, config.vocab_size)),
            done=jnp.zeros(batch, bool),
            keys=row_keys(0, batch),
            eos=jnp.array([-1]),
            sampler=make_sampler(0.7, None, 0.9),
        )  # fmt: skip

    state = jax.eval_shape(init)
    of = jax.ShapeDtypeStruct
    chunk_args = of((batch, chunk), jnp.int32), of((), jnp.int32), of((batch,), jnp.int32)
    programs = (
        _prefill_chunk_jit.lower(params, state, *chunk_args),
        _decode_block_jit.lower(params, state, of((), jnp.int32), 32),
    )
    return [program.compile().memory_analysis().temp_size_in_bytes for program in programs]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "batch", "capacity", "dtype", "policy", "prefill_policy"), [
    (CONFIG, 1, 2048, "float32", Quest(64), Dense()),
    (CONFIG, 3, 2048, "float32", Quest(64), QuoKA(64, granularity="page")),
    (SMOL, 1, 8192, "float32", Quest(1024), Dense()),
    (SMOL, 4, 8192, "float32", Dense(), Dense()),
    (SMOL, 1, 8192, "bfloat16", Quest(1024), Dense()),
    (SMOL, 4, 32768, "float32", Quest(1024), TOKENS),
    (SMOL, 1, 8192, "float32", Oracle(512, dense_layers=0), SampleAttention(512)),
    (SMOL, 2, 8192, "float32", H2O(512, dense_layers=0), Dense()),
    (SMOL, 1, 8192, "float32", SparQ(512, dense_layers=0), OracleChunk(512)),
    (DEEP, 3, 8192, "float32", LessIsMore(2048), Dense()),
    (SMOL, 2, 8192, "float32", SnapKV(512, dense_layers=0), Dense()),
    (SMOL, 1, 32768, "float32", Quest(8192), QuoKA(8192, granularity="token")),
    (SMOL, 2, 32768, "bfloat16", TOKENS, TOKENS),
    (LLAMA3, 1, 8192, "bfloat16", Quest(2048), Dense()),
    (LLAMA3, 1, 32768, "float32", Quest(2048), TOKENS),
    (MHA, 3, 8192, "float32", Quest(512, variant="sim"), TOKENS),
    (DEEP, 1, 8192, "float32", Dense(), Dense()),
    (MIXTURE, 4, 8192, "bfloat16", Quest(1024), Dense()),
    (WINDOWS, 1, 32768, "float32", Quest(1024), Dense()),
    (WINDOWS, 2, 8192, "float32", Dense(), Dense()),
], ids=str)  # fmt: skip
def test_temporaries_are_never_below_the_compiled_programs(
    as_a_user, config, batch, capacity, dtype, policy, prefill_policy
):
    plan = quest_jax.plan(config, batch, capacity, dtype=dtype, policy=policy, prefill_policy=prefill_policy)
    prefill, decode = measured(config, batch, capacity, dtype, policy, prefill_policy, plan.chunk)
    assert prefill <= plan.prefill <= 3 * prefill
    assert decode <= plan.decode <= 3 * decode


@pytest.mark.slow
@pytest.mark.parametrize(("config", "batch", "dtype", "kind"), [
    (SMOL, 4, "float32", "int4"),
    (LLAMA3, 1, "bfloat16", "int8"),
    (LLAMA3, 1, "bfloat16", "int4"),
    (DEEP, 24, "float32", "int8"),
], ids=str)  # fmt: skip
def test_widened_pieces_of_quantised_weights_are_planned(as_a_user, config, batch, dtype, kind):
    plan = quest_jax.plan(config, batch, 2048, dtype=dtype, weights=kind)
    prefill, decode = measured(config, batch, 2048, dtype, Dense(), Dense(), plan.chunk, kind)
    assert prefill <= plan.prefill <= 3 * prefill
    assert decode <= plan.decode <= 3 * decode


def test_what_fits_is_the_edge(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 50_000_000)
    plan = quest_jax.plan(CONFIG, 2, 1000, budget=64, prefill_budget=64)
    assert plan.fits and plan.largest_batch > 2 and plan.largest_len > 1000
    assert plan.resized(batch=plan.largest_batch).needed <= 50_000_000
    assert plan.resized(batch=plan.largest_batch + 1).needed > 50_000_000
    assert plan.resized(max_len=plan.largest_len).needed <= 50_000_000
    assert plan.resized(max_len=plan.largest_len + 1).needed > 50_000_000
    assert f"at most {plan.largest_batch} rows of 1000 tokens, or {plan.largest_len} tokens a row" in str(plan)
    assert "50.00 MB  of host memory: fits" in str(plan)
    big = plan.resized(batch=10**6)
    assert big.fits is False and big.largest_len == 0 and "DOES NOT FIT" in str(big)


def test_where_nobody_knows_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    plan = quest_jax.plan(CONFIG, 10**6, 10**6)
    assert (plan.fits, plan.largest_batch, plan.largest_len) == (None, None, None)
    plan.check()
    assert "available: unknown" in str(plan)


def test_prefill_refuses_by_the_plan(as_a_user, monkeypatch):
    """Cache and logits alone would fit: the temporaries are what is too much. One byte more, and it runs."""
    plan = quest_jax.plan(tiny(), 2, 512, budget=64)
    options = {"capacity": 512, "budget": 64, "max_new_tokens": 2}
    monkeypatch.setattr(memory, "available_host_bytes", lambda: plan.needed - 1)
    assert plan.cache + plan.logits < plan.needed - 1
    said = r"^2 x 512 tokens in float32: needs 6.53 MB of host memory \(the weights are there\), but 6.53 MB are"
    with pytest.raises(MemoryError, match=said) as caught:
        quest_jax.generate(tiny(), [[1, 2], [3]], **options)
    parts = dict(re.findall(r"(\w+) ([\d.]+) MB[,.]", str(caught.value)))
    assert float(parts["temporaries"]) == pytest.approx(plan.temporaries / 1e6, abs=0.01)
    assert float(parts["KV"]) == pytest.approx(plan.kv / 1e6, abs=0.01) and "weights" not in parts
    assert "Take at most 1 rows of this length or 384 tokens a row" in str(caught.value)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: plan.needed)
    quest_jax.generate(tiny(), [[1, 2], [3]], **options)


@pytest.mark.slow
def test_a_process_peaks_where_the_plan_says(tmp_path):
    """Resident memory of a fresh process with 0.4 GB of cache: within 15 % of the plan and what Python and JAX take."""
    config = dataclasses.replace(CONFIG, n_layers=8)
    quest_jax.save(quest_jax.random_params(config), tmp_path / "model")
    options = {"budget": 256, "prefill_budget": 256}
    plan = quest_jax.plan(quest_jax.load_config(tmp_path / "model"), 64, 3000, **options)
    found = measure(str(tmp_path / "model"), 64, 3000, "float32", prompt=40, **options)
    assert plan.cache > 4e8
    assert found["baseline"] < found["loaded"] < found["peak"]
    assert found["baseline"] < 4e8, "the child counts what its parent had"
    assert found["peak"] == pytest.approx(found["baseline"] + plan.total + plan.programs, rel=0.15)
    assert "MB resident" in report(plan, found)


@pytest.mark.parametrize(("arguments", "options", "error", "message"), [
    (({}, 1, 10), {}, TypeError, "what quest_jax.load or quest_jax.load_config returns, got dict"),
    ((CONFIG, 0, 10), {}, ValueError, "batch: expected at least 1, got 0"),
    ((CONFIG, 1, 1.5), {}, TypeError, "max_len: expected an integer"),
    ((CONFIG, 1, 10), {"dtype": "int8"}, ValueError, 'dtype: expected "float32" or "bfloat16", got .int8'),
    ((CONFIG, 1, 10), {"dtype": "many"}, TypeError, "dtype: expected"),
    ((CONFIG, 1, 10), {"weights": "int3"}, ValueError, 'weights: expected "int8", "int4" or None .*got .int3'),
    ((CONFIG, 1, 10), {"budget": 64, "policy": Quest(64)}, ValueError, "budget or policy, got both"),
    ((CONFIG, 1, 10), {"prefill_budget": 64, "chunk": 256}, ValueError, "chunk: expected 128"),
], ids=str)  # fmt: skip
def test_wrong_input_is_refused(as_a_user, arguments, options, error, message):
    with pytest.raises(error, match=message):
        quest_jax.plan(*arguments, **options)


def test_another_dtype_than_that_of_the_weights_is_refused():
    with pytest.raises(ValueError, match="these weights are float32, got bfloat16; pass their config"):
        quest_jax.plan(tiny(), 1, 10, dtype="bfloat16")

"""What a caller can get wrong: a typed error that says what was expected and got, before anything is compiled."""

import dataclasses
import inspect
import json
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import quest_jax
from quest_jax.models.config import Experts, LlamaConfig, RopeConfig
from tests.models_for_tests import CONFIG, tiny

NAN, INF = float("nan"), float("inf")


def generate(tokens=((1, 2, 3),), **options):
    # Without the annotation checks of the tests, as users call it.
    return inspect.unwrap(quest_jax.generate)(tiny(), [list(t) for t in tokens], **options)


def raw(tokens, **options):
    return inspect.unwrap(quest_jax.generate)(tiny(), tokens, **options)


def feed(tokens, **options):
    state = jax.eval_shape(lambda: quest_jax.prefill(tiny(), jnp.ones((1, 3), jnp.int32), capacity=128))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if x.dtype != state.keys.dtype else None, state)
    return inspect.unwrap(quest_jax.feed_tokens)(tiny(), zeros, tokens, **options)


unchecked = inspect.unwrap

CALLS = [
    # tokens
    (lambda: generate(()), ValueError, "at least one prompt, got an empty list"),
    (lambda: generate(((),)), ValueError, "at least one token in every prompt, got none in row 0"),
    (lambda: generate(((1, 2), ())), ValueError, "got none in row 1"),
    (lambda: generate(((1, 97),)), ValueError, r"ids in \[0, 97\), got 97 in row 0 at position 1"),
    (lambda: generate(((1,), (5, -3))), ValueError, "got -3 in row 1 at position 1"),
    (lambda: generate(((2**40,),)), ValueError, "got 1099511627776"),
    (lambda: raw([1, 2, 3]), ValueError, r"one flat sequence of 3; wrap a single prompt in a list: \[tokens\]"),
    (lambda: raw(np.array([1, 2, 3])), ValueError, r"wrap a single prompt in a list: \[tokens\]"),
    (lambda: raw(np.zeros((1, 2, 3), int)), ValueError, r"\[B, T\], got \(1, 2, 3\)"),
    (lambda: raw(np.zeros((0, 3), int)), ValueError, "at least one token"),
    (lambda: raw(np.zeros((2, 0), int)), ValueError, "at least one token"),
    (lambda: raw(np.ones((1, 3), np.float32)), TypeError, "integer ids, got float32"),
    (lambda: raw([[1.0, 2.0]]), TypeError, "integer ids, got float64"),
    (lambda: raw([[True, False]]), TypeError, "integer ids, got bool"),
    (lambda: raw("hello"), TypeError, "got text; encode it first"),
    (lambda: raw(["hello", "world"]), TypeError, "got text; encode it first"),
    (lambda: raw([[[1, 2], [3]]]), ValueError, "nested sequences of different lengths"),
    (lambda: raw(None), (TypeError, ValueError), "tokens"),
    (lambda: raw([None]), (TypeError, ValueError), "tokens"),
    (
        lambda: inspect.unwrap(quest_jax.generate)(tiny().weights, [[1]]),
        TypeError,
        "what quest_jax.load returns, got dict",
    ),
    # lengths
    (lambda: raw(np.ones((2, 3), int), lengths=[1]), ValueError, "lengths: expected 2 integers"),
    (lambda: raw(np.ones((1, 3), int), lengths=[4]), ValueError, r"values in \[1, 3\]"),
    (lambda: raw(np.ones((1, 3), int), lengths=[0]), ValueError, "at least one token"),
    (lambda: raw([[1, 2]], lengths=[2]), ValueError, "a list of prompts has its own lengths"),
    # budget, policy, page size
    (lambda: generate(budget=15), ValueError, "at least one page, 16 tokens, got 15"),
    (lambda: generate(budget=0), ValueError, "budget: expected at least 1, got 0"),
    (lambda: generate(budget=-1), ValueError, "budget: expected at least 1, got -1"),
    (lambda: generate(budget=1.5), TypeError, "budget: expected an integer, got 1.5"),
    (lambda: generate(budget=True), TypeError, "budget: expected an integer, got True"),
    (lambda: generate(budget="big"), TypeError, "budget: expected an integer, got 'big'"),
    (lambda: generate(budget=64, policy=quest_jax.Quest(64)), ValueError, "budget or policy, got both"),
    (lambda: generate(policy="quest"), TypeError, "expected a quest_jax policy"),
    (lambda: generate(policy=quest_jax.Quest), TypeError, "expected a quest_jax policy"),
    (lambda: generate(budget=16, page_size=32), ValueError, "at least one page, 32 tokens, got 16"),
    (lambda: generate(page_size=0), ValueError, "page_size: expected at least 1, got 0"),
    (lambda: generate(page_size=16.0), TypeError, "page_size: expected an integer"),
    # lengths of things
    (lambda: generate(max_new_tokens=0), ValueError, "max_new_tokens: expected at least 1, got 0"),
    (lambda: generate(max_new_tokens=-5), ValueError, "max_new_tokens: expected at least 1, got -5"),
    (lambda: generate(max_new_tokens=2.0), TypeError, "max_new_tokens: expected an integer"),
    (lambda: generate(capacity=100, max_new_tokens=98), ValueError, "capacity: expected at least 101"),
    (lambda: quest_jax.prefill(tiny(), [[1] * 50], capacity=49), ValueError, "longest prompt, 50 tokens, got 49"),
    (lambda: generate(chunk=0), ValueError, "chunk: expected at least 1, got 0"),
    (lambda: feed([[1] * 200]), ValueError, "at most 128 tokens in a row"),
    (lambda: feed([[1], [2]]), ValueError, "expected 1 rows as in the state, got 2"),
    (lambda: feed([[97]]), ValueError, r"ids in \[0, 97\)"),
    # sampling
    (lambda: generate(temperature=NAN), ValueError, "temperature"),
    (lambda: generate(temperature=INF), ValueError, "temperature"),
    (lambda: generate(temperature=-1.0), ValueError, "temperature"),
    (lambda: generate(temperature="hot"), TypeError, "temperature"),
    (lambda: generate(temperature=1.0, top_p=0.0), ValueError, "top_p"),
    (lambda: generate(temperature=1.0, top_p=1.1), ValueError, "top_p"),
    (lambda: generate(temperature=1.0, top_p=NAN), ValueError, "top_p"),
    (lambda: generate(temperature=1.0, top_k=0), ValueError, "top_k"),
    (lambda: generate(temperature=1.0, top_k=1.5), TypeError, "top_k"),
    (lambda: generate(temperature=1.0, top_k=98), ValueError, "top_k"),
    (lambda: generate(temperature=1.0, seed="x"), (TypeError, ValueError), "seed"),
    (lambda: generate(temperature=1.0, seed=[1, 2]), ValueError, "seed: expected one integer, or 1, one a row, got 2"),
    (lambda: generate(temperature=1.0, seed=1.5), TypeError, "seed: expected an integer"),
    (lambda: generate(temperature=1.0, seed=2**32), ValueError, r"seed: expected integers in \[0, 2\*\*32\)"),
    (lambda: generate(temperature=1.0, seed=-1), ValueError, r"seed: expected integers in \[0, 2\*\*32\)"),
    # ends
    (lambda: generate(eos_token_ids=[97]), ValueError, r"eos_token_ids: expected ids in \[0, 97\)"),
    (lambda: generate(eos_token_ids=[1.5]), TypeError, "eos_token_ids"),
    (lambda: generate(stop=["."]), ValueError, "need the model's tokenizer"),
    (lambda: generate(stop=[""]), ValueError, "non-empty strings"),
    # names
    (lambda: generate(implementation="cuda"), ValueError, "one of .*'xla', got 'cuda'"),
    (lambda: generate(nucleus=0.5), TypeError, "options of quest_jax.prefill, got 'nucleus'"),
    (lambda: generate(tokenizer="smollm2-135m"), TypeError, r"expected quest_jax.load_tokenizer\(...\), got str"),
    (lambda: quest_jax.stream(tiny(), [[1], [2]]), ValueError, "one prompt, got 2"),
    # configurations
    (lambda: RopeConfig(kind="ntk"), NotImplementedError, "'ntk'"),
    (lambda: RopeConfig(kind="longrope", original_max_positions=8), ValueError, "short_factors: expected positive"),
    (lambda: RopeConfig(rotary_dim=3), ValueError, "rotary_dim: expected an even number"),
    (
        lambda: dataclasses.replace(CONFIG, windows=(4,)),
        ValueError,
        f"windows: expected none or {CONFIG.n_layers} numbers",
    ),
    (
        lambda: dataclasses.replace(CONFIG, unrotated_layers=(CONFIG.n_layers,)),
        ValueError,
        f"unrotated_layers: expected layers below {CONFIG.n_layers}",
    ),
    (lambda: Experts(count=2, per_token=3, size=4), ValueError, "1 <= per_token <= count"),
    (lambda: quest_jax.random_params({"n_layers": 2}), TypeError, "expected a quest_jax.LlamaConfig, got dict"),
    # objects that are something else
    (lambda: unchecked(quest_jax.decode_step)(tiny(), tiny()), TypeError, "what quest_jax.prefill returns, got Params"),
    (lambda: unchecked(quest_jax.decode_step)({}, {}), TypeError, "what quest_jax.load returns, got dict"),
    (lambda: unchecked(quest_jax.feed_tokens)(tiny(), None, [[1]]), TypeError, "state: .* got NoneType"),
    (lambda: unchecked(quest_jax.replace_policy)(None, 64), TypeError, "state: .* got NoneType"),
    (lambda: quest_jax.enable_compilation_cache(""), ValueError, "directory: expected a path or None, got ''"),
    (lambda: generate(policy=quest_jax.Quest(64, sink_pages=5)), ValueError, "no more sink_pages than the 4 pages"),
    (lambda: RopeConfig(theta=NAN), ValueError, "positive finite number"),
    (lambda: RopeConfig(kind="llama3"), ValueError, "needs original_max_positions"),
    (lambda: LlamaConfig(10, 8, 8, 1, 3, 2, 4, 16), ValueError, "multiple of n_kv_heads, got 3 and 2"),
    (lambda: LlamaConfig(10, 8, 8, 1, 2, 2, 3, 16), ValueError, "must be even, got 3"),
    (lambda: LlamaConfig(10, 8, 8, 0, 2, 2, 4, 16), ValueError, "n_layers: expected an integer of at least 1"),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS, ids=[str(i) for i in range(len(CALLS))])
def test_bad_calls(as_a_user, compiled, call, error, message):
    tiny()
    compiled.clear()
    with pytest.raises(error, match=message) as caught:
        call()
    assert len(str(caught.value)) > 20
    assert [name for name in compiled if "prefill" in name or "decode" in name or "feed" in name] == []


@pytest.fixture
def compiled(caplog):
    """Names of the functions that were compiled while the test ran."""
    names = []

    class Names(list):
        def clear(self):
            caplog.clear()

        def __iter__(self):
            return iter([r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()])

    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        yield Names(names)


def test_out_of_memory_says_how_much(as_a_user):
    with pytest.raises(
        MemoryError, match=r"^1 x \d+ tokens in float32: needs [\d,]+.\d+ GB of host memory \(the weights"
    ):
        generate(max_new_tokens=2**40)


# Files.


def write_hf(folder, header_change=None, **changes):
    """A one-layer Hugging Face checkpoint, changed as asked."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8, "hidden_size": 4,
        "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True, "torch_dtype": "float32",
    } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,),
        layer + "input_layernorm.weight": (4,), layer + "post_attention_layernorm.weight": (4,),
        layer + "self_attn.q_proj.weight": (4, 4), layer + "self_attn.k_proj.weight": (2, 4),
        layer + "self_attn.v_proj.weight": (2, 4), layer + "self_attn.o_proj.weight": (4, 4),
        layer + "mlp.gate_proj.weight": (4, 4), layer + "mlp.up_proj.weight": (4, 4),
        layer + "mlp.down_proj.weight": (4, 4),
    }  # fmt: skip
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    data = safetensors.numpy.save(tensors)
    if header_change:
        size = struct.unpack("<Q", data[:8])[0]
        header = header_change(json.loads(data[8 : 8 + size]))
        text = json.dumps(header).encode() if isinstance(header, dict) else header
        data = struct.pack("<Q", len(text)) + text + data[8 + size :]
    (folder / "model.safetensors").write_bytes(data)
    return folder


def lie(name, **entry):
    return lambda header: header | {name: header[name] | entry}


def truncated(folder, size):
    path = folder / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 5) + b"\0" * size)
    return path


NORM = "model.norm.weight"
FILES = [
    (lambda d: d / "nothing", FileNotFoundError, "nothing"),
    (lambda d: d, (ValueError, FileNotFoundError), "config.json|no model"),
    (lambda d: "no/such/path/at/all", FileNotFoundError, "no/such/path"),
    (lambda d: truncated(d, 0), ValueError, "GGUF|gguf"),
    (lambda d: truncated(d, 1000), ValueError, "GGUF|gguf"),
    (lambda d: write_hf(d, rope_scaling={"rope_type": "ntk", "factor": 2.0}), NotImplementedError, "ntk"),
    (lambda d: write_hf(d, attention_bias=True), NotImplementedError, "attention_bias"),
    (
        lambda d: write_hf(d, architectures=["MixtralForCausalLM"], model_type="mixtral"),
        NotImplementedError,
        "Mixtral.*nearest that is: Qwen3-MoE",
    ),
    (lambda d: write_hf(d, hidden_act="gelu"), NotImplementedError, "gelu"),
    (lambda d: write_hf(d, num_hidden_layers=2), ValueError, "layers.1"),
    (lambda d: write_hf(d, hidden_size=8), ValueError, r"the config says \(8, 8\), the file has \(8, 4\)"),
    (lambda d: write_hf(d, swizzle=3), ValueError, "swizzle"),
    (lambda d: write_hf(d, num_attention_heads="many"), (ValueError, TypeError), "num_attention_heads"),
    (lambda d: write_hf(d, lie(NORM, data_offsets=[0, 10**12])), ValueError, "norm"),
    (lambda d: write_hf(d, lie(NORM, shape=[2**40, 2**40])), ValueError, "norm"),
    (lambda d: write_hf(d, lambda header: b"[" * 100_000), ValueError, "safetensors"),
    (lambda d: write_hf(d, lambda header: b'{"a": '), ValueError, "safetensors"),
]


@pytest.mark.parametrize(("make", "error", "message"), FILES, ids=[str(i) for i in range(len(FILES))])
def test_bad_files(as_a_user, tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        quest_jax.load(make(tmp_path))


def test_the_checkpoint_of_these_tests_loads_when_left_alone(tmp_path):
    """The negative control: what the table above refuses is refused for its change only."""
    params = quest_jax.load(write_hf(tmp_path))
    assert params.config.n_layers == 1 and params.weights["norm"].tolist() == [1] * 4


def test_there_are_many():
    assert len(CALLS) + len(FILES) >= 40 and CONFIG.vocab_size == 97

import json
import re
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quest_jax.weights import assemble
from quest_jax.weights.huggingface import fetch_repository, load_huggingface
from tests.weights.synthetic import expected_weights, make_config, make_tensors, write_huggingface

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
INDEX = "model.safetensors.index.json"


def assert_equal(weights, expected, dtype=FLOAT32):
    assert jax.tree.structure(weights) == jax.tree.structure(expected)
    for actual, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_array_equal(np.asarray(actual), wanted.astype(dtype))


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"head_dim": 12}, {"tie_word_embeddings": True}],
    ids=str,
)
def test_values(tmp_path, changes, shards):
    config = make_config(**changes)
    tensors = make_tensors(config)
    write_huggingface(tmp_path, config, tensors, shards=shards, generation={"eos_token_id": [3, 4]})
    params = load_huggingface(tmp_path, FLOAT32)
    assert_equal(params.weights, expected_weights(config, tensors))
    assert params.config.eos_token_ids == (3, 4)
    assert params.config.n_kv_heads == config["num_key_value_heads"]


@pytest.mark.parametrize("target", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes(tmp_path, source, target):
    config = make_config()
    tensors = {name: tensor.astype(source) for name, tensor in make_tensors(config).items()}
    write_huggingface(tmp_path, config, tensors)
    assert_equal(load_huggingface(tmp_path, target).weights, expected_weights(config, tensors), target)


def test_single_file_wins_over_an_index(tmp_path):
    config = make_config()
    write_huggingface(tmp_path, config, make_tensors(config, seed=1), shards=3)
    tensors = make_tensors(config, seed=2)
    write_huggingface(tmp_path, config, tensors)
    assert_equal(load_huggingface(tmp_path, FLOAT32).weights, expected_weights(config, tensors))


def test_superfluous_but_harmless_tensors(tmp_path):
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.arange(4, dtype=np.int64),
    }
    write_huggingface(tmp_path, config, tensors | extra)
    assert_equal(load_huggingface(tmp_path, FLOAT32).weights, expected_weights(config, tensors))


@pytest.mark.parametrize("row", [0, 39])
def test_a_tied_head_that_differs(tmp_path, row):
    config = make_config(tie_word_embeddings=True)
    tensors = make_tensors(config)
    head = tensors["model.embed_tokens.weight"].copy()
    head[row, -1] += 1
    write_huggingface(tmp_path, config, tensors | {"lm_head.weight": head})
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        load_huggingface(tmp_path, FLOAT32)


def remove(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove("lm_head.weight"), "lm_head.weight is missing"),
        (remove("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight is missing"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}),
            "q_proj.bias is unknown",
        ),
        (lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}), "config says (32,), the file has (31,)"),
        (lambda t: t.update({"model.embed_tokens.weight": np.zeros((41, 32), np.float32)}), "the file has (41, 32)"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": np.zeros((32, 32), np.float32)}),
            "k_proj.weight: the config says (16, 32), the file has (32, 32)",
        ),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_that_do_not_fit(tmp_path, change, message, shards):
    config = make_config()
    tensors = make_tensors(config)
    change(tensors)
    write_huggingface(tmp_path, config, tensors, shards=shards)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}: .*{re.escape(message)}"):
        load_huggingface(tmp_path, FLOAT32)


def test_quantised_tensors_are_named(tmp_path):
    config = make_config()
    tensors = make_tensors(config)
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    write_huggingface(tmp_path, config, tensors)
    with pytest.raises(NotImplementedError, match="tensor model.norm.weight: expected .*, got I8; load"):
        load_huggingface(tmp_path, FLOAT32)


def test_a_config_that_promises_too_much(tmp_path):
    config = make_config()
    for layers, says in ((100, "100 layers, but there are 21 tensors"), (2**31 - 1, "at most 4096, got 2147483647")):
        write_huggingface(tmp_path, config | {"num_hidden_layers": layers}, make_tensors(config))
        with pytest.raises(ValueError, match=says):
            load_huggingface(tmp_path, FLOAT32)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("pytorch_model.bin", "got the pickle file pytorch_model.bin, which can run code .*safe_serialization=True"),
        ("consolidated.00.pth", "got the pickle file consolidated.00.pth"),
        ("model.Q8_0.gguf", "got model.Q8_0.gguf; give the path of that file itself"),
        ("other.safetensors", "got other.safetensors; download"),
        (None, "got no weights; download"),
    ],
)
def test_no_safetensors(tmp_path, file, message):
    (tmp_path / "config.json").write_text(json.dumps(make_config()))
    if file:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(ValueError, match=f"expected model.safetensors or {INDEX}, {message}"):
        load_huggingface(tmp_path, FLOAT32)


def test_no_config(tmp_path):
    save_file({"a": np.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="expected config.json beside the weights"):
        load_huggingface(tmp_path, FLOAT32)


SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i: i.pop("weight_map"), "expected an object weight_map"),
        (lambda i: i.update(weight_map={}), "expected an object weight_map"),
        (lambda i: i.update(weight_map=["a"]), "expected an object weight_map"),
        (lambda i: i["weight_map"].update(extra="none.safetensors"), "expected the shard none.safetensors"),
        (lambda i: i["weight_map"].update(extra=SHARD), f"{SHARD} lacks extra"),
        (lambda i: i["weight_map"].pop("lm_head.weight"), "holds tensor lm_head.weight, which"),
        (lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"}), "tensor lm_head.weight: expected a"),
        (lambda i: i["weight_map"].update({"lm_head.weight": "/etc/passwd"}), "tensor lm_head.weight: expected a"),
        (lambda i: i["weight_map"].update({"lm_head.weight": "a\\b.safetensors"}), "tensor lm_head.weight: expected a"),
        (lambda i: i["weight_map"].update({"lm_head.weight": "model.bin"}), "tensor lm_head.weight: expected a"),
        (lambda i: i["weight_map"].update({"lm_head.weight": 3}), "tensor lm_head.weight: expected a"),
    ],
)
def test_damaged_index(tmp_path, change, message):
    config = make_config()
    write_huggingface(tmp_path, config, make_tensors(config), shards=2)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path))}.*{re.escape(message)}"):
        load_huggingface(tmp_path, FLOAT32)


def test_a_tensor_in_two_shards(tmp_path):
    config = make_config()
    write_huggingface(tmp_path, config, make_tensors(config), shards=2)
    shard = tmp_path / SHARD
    other = load_file(tmp_path / SHARD.replace("00001", "00002", 1))
    name = next(iter(other))
    save_file(load_file(shard) | {name: other[name]}, shard)
    with pytest.raises(ValueError, match=f"{SHARD}: holds tensor {name}, which {INDEX} places in"):
        load_huggingface(tmp_path, FLOAT32)


@pytest.mark.parametrize("source", ["BF16", "F32"])
def test_peak_memory_is_the_model_plus_one_array(tmp_path, monkeypatch, source):
    config = make_config(vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    dtype = ml_dtypes.bfloat16 if source == "BF16" else np.float32
    write_huggingface(tmp_path, config, {k: v.astype(dtype) for k, v in make_tensors(config).items()}, shards=3)
    chunk, largest = 1 << 18, 4096 * 256 * 4
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(assemble, "_to_device", lambda array: jnp.zeros(()))  # the model itself is elsewhere
    load_huggingface(tmp_path, FLOAT32)  # imports, and what JAX keeps of the abstract weights
    tracemalloc.start()
    load_huggingface(tmp_path, FLOAT32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < largest + 4 * chunk


def test_fetching_asks_for_what_is_needed(tmp_path, monkeypatch):
    asked = {}

    def download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert fetch_repository("org/name") == tmp_path
    assert asked["repo_id"] == "org/name"
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "LocalEntryNotFoundError",
            ConnectionError,
            "org/name: .*huggingface.co could not deliver it .*go online once",
        ),
        ("OfflineModeIsEnabled", ConnectionError, "huggingface.co could not deliver it"),
        ("HFValidationError", ValueError, "org/name: expected an existing path or a repository"),
    ],
)
def test_fetching_fails(monkeypatch, name, kind, message):
    from huggingface_hub import errors

    def download(repo_id, **options):
        raise getattr(errors, name)("no")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(kind, match=message):
        fetch_repository("org/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [("RepositoryNotFoundError", "check the spelling"), ("GatedRepoError", "licence to be accepted")],
)
def test_fetching_is_refused(monkeypatch, name, message):
    from huggingface_hub import errors

    def download(repo_id, **options):
        kind = getattr(errors, name)
        raise kind.__new__(kind)  # its __init__ wants an HTTP response, which differs between versions

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=f"org/name: .*{message}"):
        fetch_repository("org/name")

import pathlib

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.weights import locate
from quest_jax.weights.load import load, load_config, save
from quest_jax.weights.smollm2 import smollm2_gguf
from tests.weights.synthetic import (
    expected_weights,
    gguf_metadata,
    gguf_tensors,
    make_config,
    make_tensors,
    write_gguf,
    write_huggingface,
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The same model in the three formats; the checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("models")
    config = make_config()
    tensors = make_tensors(config)
    found = {
        "huggingface": write_huggingface(folder / "hf", config, tensors),
        "gguf": write_gguf(folder / "model.gguf", gguf_metadata(config), gguf_tensors(config, tensors)),
        "checkpoint": folder / "saved",
    }
    save(load(found["huggingface"], dtype="bfloat16"), found["checkpoint"])
    return found


@pytest.mark.parametrize("kind", ["huggingface", "gguf", "checkpoint"])
@pytest.mark.parametrize("dtype", ["bfloat16", jnp.float32, None])
def test_every_format_in_every_dtype(paths, kind, dtype):
    params = load(str(paths[kind]), dtype=dtype)
    wanted = jnp.dtype(dtype or ("bfloat16" if kind == "checkpoint" else "float32"))
    config = make_config()
    stored = jnp.dtype("bfloat16") if kind == "checkpoint" else wanted
    expected = expected_weights(config, make_tensors(config))
    assert jax.tree.structure(params.weights) == jax.tree.structure(expected)
    for actual, array in zip(jax.tree.leaves(params.weights), jax.tree.leaves(expected), strict=True):
        assert actual.dtype == wanted
        np.testing.assert_array_equal(np.asarray(actual), array.astype(stored).astype(wanted))


@pytest.mark.parametrize("kind", ["huggingface", "gguf", "checkpoint"])
def test_the_config_is_that_of_the_model(paths, kind):
    assert load_config(paths[kind]) == load(paths[kind]).config


def test_a_config_stands_alone(paths, tmp_path):
    alone = tmp_path / "config.json"
    alone.write_bytes((paths["huggingface"] / "config.json").read_bytes())
    assert load_config(alone) == load_config(tmp_path) == load(paths["huggingface"]).config
    with pytest.raises(ValueError, match="give the directory"):
        load(alone)


def test_of_a_repository_only_the_config_is_fetched(paths, monkeypatch):
    asked = []

    def download(repo_id, allow_patterns, ignore_patterns):
        asked.append((repo_id, allow_patterns))
        return str(paths["huggingface"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_config("someone/model") == load(paths["huggingface"]).config
    assert asked == [("someone/model", ["config.json", "generation_config.json"])]


@pytest.mark.parametrize(("dtype", "kind"), [("float16", ValueError), (np.int32, ValueError), ("fp32", TypeError)])
def test_dtype_is_checked_before_anything_is_fetched(monkeypatch, dtype, kind):
    def fetch():
        raise AssertionError("fetched")

    monkeypatch.setitem(locate.MODELS, "smollm2-135m", fetch)
    with pytest.raises(kind, match='dtype: expected "float32" or "bfloat16"'):
        load("smollm2-135m", dtype=dtype)


def test_no_such_path(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such model"):
        load(tmp_path / "none")


def test_save_passes_overwrite_on(paths, tmp_path):
    params = load(paths["gguf"])
    save(params, tmp_path / "x")
    with pytest.raises(FileExistsError):
        save(params, tmp_path / "x")
    save(params, tmp_path / "x", overwrite=True)


@pytest.mark.parametrize("name", ["gqa", "qwen3_moe"])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_progress_counts_bytes_up_to_all_of_them(name, weights):
    seen: list[tuple[int, int]] = []
    folder = pathlib.Path(__file__).parents[1] / "fixtures" / "parity" / name
    params = load(folder, weights=weights, progress=lambda done, total: seen.append((done, total)))
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params.weights))
    assert len(seen) > 4 and seen == sorted(seen)
    assert seen[-1] == (nbytes, nbytes) and {total for _, total in seen} == {nbytes}


@pytest.mark.slow
def test_smollm2():
    """The real file against the reader of the gguf package."""
    params = load("smollm2-135m")
    assert params.config == LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, n_layers=30, n_heads=9, n_kv_heads=3, head_dim=64,
        max_positions=8192, rms_norm_eps=9.999999747378752e-06, rope=RopeConfig(theta=100000.0),
        tie_word_embeddings=True, eos_token_ids=(2,), bos_token_id=1,
    )  # fmt: skip
    tensors = {t.name: t for t in gguf.GGUFReader(smollm2_gguf()).tensors}

    def stored(name):
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)

    np.testing.assert_array_equal(params.weights["embed"], stored("token_embd.weight"))
    block = params.weights["layer_17"]
    np.testing.assert_array_equal(block["down"], stored("blk.17.ffn_down.weight").T)
    np.testing.assert_array_equal(block["gate_up"][:, 1536:], stored("blk.17.ffn_up.weight").T)
    k = stored("blk.17.attn_k.weight").reshape(3, 32, 2, 576).swapaxes(1, 2).reshape(192, 576)
    np.testing.assert_array_equal(block["qkv"][:, 576:768], k.T)
    np.testing.assert_array_equal(block["qkv"][:, 768:], stored("blk.17.attn_v.weight").T)

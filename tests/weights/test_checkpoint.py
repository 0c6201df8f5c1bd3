import dataclasses
import functools
import inspect
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.models.llama import init_weights
from quest_jax.params import Params
from quest_jax.weights import checkpoint
from quest_jax.weights.checkpoint import MARKER, load_checkpoint, save_checkpoint

CONFIG = LlamaConfig(
    vocab_size=24, hidden_size=16, intermediate_size=20, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=6,
    max_positions=64, rms_norm_eps=9.999999747378752e-06, eos_token_ids=(2, 7), bos_token_id=1,
    rope=RopeConfig(1e5, "yarn", 2.5, 32, attention_factor=1.1, truncate=False),
)  # fmt: skip


make_weights = functools.cache(lambda config, dtype, seed: init_weights(config, jax.random.key(seed), jnp.dtype(dtype)))


def make_params(dtype="float32", config=CONFIG, seed=0) -> Params:
    weights = jax.tree.map(lambda leaf: leaf, make_weights(config, dtype, seed))  # new dicts, for tests to change
    return Params(weights=weights, config=config)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint16 if array.dtype == jnp.bfloat16 else np.uint32)


def assert_same(actual: Params, expected: Params) -> None:
    assert actual.config == expected.config
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(bits(one), bits(other))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save_checkpoint(make_params(), path)
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_is_bit_exact(tmp_path, dtype, tied):
    params = make_params(dtype, dataclasses.replace(CONFIG, tie_word_embeddings=tied))
    # Numbers that a detour through text, another dtype or a comparison would change.
    odd = jnp.asarray([-0.0, np.nan, np.inf, -np.inf, 1e-40, 3.4e38, 1 / 3, -1e-45], params.weights["norm"].dtype)
    params.weights["norm"] = params.weights["norm"].at[:8].set(odd)
    save_checkpoint(params, tmp_path / "model")
    loaded = load_checkpoint(tmp_path / "model")
    assert_same(loaded, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(loaded))
    save_checkpoint(loaded, tmp_path / "again")
    assert_same(load_checkpoint(tmp_path / "again"), params)


def test_conversion(saved):
    loaded = load_checkpoint(saved, jnp.dtype("bfloat16"))
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), make_params())
    assert_same(loaded, expected)


def test_folder_is_as_documented_and_nothing_else_is_left(saved):
    assert sorted(os.listdir(saved)) == [MARKER, "weights"]
    assert os.listdir(saved.parent) == ["model"]
    header = json.loads((saved / MARKER).read_text())
    assert header["format"] == 1 and header["config"]["rope"]["kind"] == "yarn"


def test_from_many_devices_to_one(tmp_path):
    """The checkpoint remembers its devices; another machine has others."""
    save_checkpoint(make_params(), tmp_path / "model")
    for file in (tmp_path / "model").rglob("_sharding"):
        file.write_text(file.read_text().replace("cpu:0", "TPU_3"))
    assert_same(load_checkpoint(tmp_path / "model"), make_params())


def test_relative_path_and_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(make_params(), "a/b")
    assert_same(load_checkpoint("a/b"), make_params())
    assert (tmp_path / "a" / "b" / MARKER).is_file()


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    save_checkpoint(make_params(), tmp_path / "model")
    assert_same(load_checkpoint(tmp_path / "model"), make_params())


def test_what_is_there_stays(tmp_path):
    path = tmp_path / "model"
    save_checkpoint(make_params(seed=1), path)
    with pytest.raises(FileExistsError, match="a checkpoint is there; choose another path or pass overwrite=True"):
        save_checkpoint(make_params(seed=2), path)
    assert_same(load_checkpoint(path), make_params(seed=1))
    save_checkpoint(make_params(seed=2), path, overwrite=True)
    assert_same(load_checkpoint(path), make_params(seed=2))
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_foreign_files_are_never_replaced(tmp_path, overwrite):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds other files"):
        save_checkpoint(make_params(), tmp_path, overwrite=overwrite)
    with pytest.raises(FileExistsError, match="got a file"):
        save_checkpoint(make_params(), tmp_path / "notes.txt", overwrite=overwrite)
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("call", [1, 2])
def test_a_failure_leaves_the_old_checkpoint(tmp_path, monkeypatch, call):
    path = tmp_path / "model"
    save_checkpoint(make_params(seed=1), path)
    replace, calls = os.replace, []

    def fail(source, target):
        calls.append(source)
        if len(calls) == call:
            raise OSError("disk on fire")
        replace(source, target)

    monkeypatch.setattr("quest_jax.weights.checkpoint.os.replace", fail)
    with pytest.raises(OSError, match="disk on fire"):
        save_checkpoint(make_params(seed=2), path, overwrite=True)
    monkeypatch.undo()
    assert_same(load_checkpoint(path), make_params(seed=1))
    assert os.listdir(tmp_path) == ["model"]


def change(key, value):
    def apply(weights):
        weights[key] = value

    return apply


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("norm"), "['norm']: the config calls for float32[16], got None"),
        (change("extra", jnp.zeros(3)), "['extra']: the config calls for None, got float32[3]"),
        (change("norm", jnp.zeros(15)), "['norm']: the config calls for float32[16], got float32[15]"),
        (change("norm", jnp.zeros(16, jnp.bfloat16)), "['norm']: the config calls for float32[16], got bfloat16[16]"),
        (change("norm", [0.0] * 16), "['norm']: the config calls for float32[16], got None"),
        (change("embed", jnp.zeros((24, 16), jnp.float16)), 'expected "float32" or "bfloat16"'),
        (change("embed", None), "expected a dict with the array 'embed'"),
    ],
)
def test_weights_that_are_not_the_models(tmp_path, edit, message):
    params = make_params()
    edit(params.weights)
    with pytest.raises(ValueError, match=re.escape(message)):
        save_checkpoint(params, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_not_params():
    with pytest.raises(TypeError, match="expected quest_jax Params"):
        inspect.unwrap(checkpoint._check_params)(make_params().weights)


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("", ValueError, "expected the path of a directory"),
        (" ", ValueError, "expected the path of a directory"),
        ("a\0b", ValueError, "expected the path of a directory"),
        (b"model", TypeError, "expected a string or a path, got bytes"),
        (3, TypeError, "expected a string or a path, got int"),
        ("gs://bucket/model", NotImplementedError, "expected one of the local file system, got gs://bucket/model"),
    ],
)
def test_paths(path, kind, message):
    with pytest.raises(kind, match=message):
        inspect.unwrap(checkpoint._target)(path)


def edit_header(path, edit):
    header = json.loads((path / MARKER).read_text())
    edit(header)
    (path / MARKER).write_text(json.dumps(header))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h.update(format=2), "expected format 1, got 2; use the version that wrote it"),
        (lambda h: h.pop("format"), "expected format 1, got None"),
        (lambda h: h.pop("config"), "expected an object config"),
        (lambda h: h["config"].update(rope=3), "expected an object config with an object rope"),
        (lambda h: h["config"].pop("vocab_size"), "vocab_size"),
        (lambda h: h["config"].update(flavour=3), "unknown key 'flavour'; a newer version may have written it"),
        (lambda h: h["config"].update(experts=3), "experts: expected an object, got 3"),
        (lambda h: h["config"].update(experts={"count": 2}), "per_token"),
        (lambda h: h["config"].update(windows=[4]), "windows: expected none or"),
        (lambda h: h["config"].update(windows="4"), "windows: expected a list"),
        (lambda h: h["config"]["rope"].update(sections=3), "unknown key 'sections'"),
        (lambda h: h["config"]["rope"].update(theta="x"), "theta: expected a finite number"),
        (lambda h: h["config"].update(n_layers="2"), "n_layers: expected an integer"),
        (lambda h: h["config"].update(eos_token_ids=["a"]), "eos_token_ids: expected a token id"),
        (lambda h: h["config"].update(n_layers=3), "the config says 3 layers, 2 are stored"),
        (lambda h: h["config"].update(n_layers=2**31 - 1), "the config says 2147483647 layers, 2 are stored"),
        (lambda h: h["config"].update(vocab_size=25), "['embed']: the config calls for [25, 16], stored is [24, 16]"),
        (
            lambda h: h["config"].update(tie_word_embeddings=True),
            "['lm_head']: the config calls for None, stored is [16, 24]",
        ),
        (lambda h: h["config"]["rope"].update(beta_fast=0), "RoPE"),
    ],
)
def test_damaged_config(saved, tmp_path, edit, message):
    path = shutil.copytree(saved, tmp_path / "model")
    edit_header(path, edit)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(message)}"):
        load_checkpoint(path)


def test_larger_than_memory(saved, monkeypatch):
    monkeypatch.setattr("quest_jax.memory.available_host_bytes", lambda: 20_000)
    with pytest.raises(MemoryError, match=f"^{re.escape(str(saved))}: needs 0.00 GB of host memory"):
        load_checkpoint(saved)


# Run in a process of its own: Orbax reads all arrays at once, and when one fails it abandons the other readers, whose
# complaints come at any later time.
LOAD_EACH = """
import sys
import jax, numpy as np
from quest_jax.weights.checkpoint import load_checkpoint
whole, *others = sys.argv[1:]
expected = jax.tree.leaves(load_checkpoint(whole))
for path in others:
    try:
        leaves = jax.tree.leaves(load_checkpoint(path))
        print("same" if all(map(np.array_equal, leaves, expected)) else "DIFFERENT")
    except (ValueError, FileNotFoundError) as error:
        print("refused" if path in str(error) else f"NOT NAMED {error}")
"""


def test_missing_or_truncated_files(saved, tmp_path):
    """Any file of the checkpoint lost or cut short: an error that names the checkpoint, or the very same weights."""
    cases = []
    for file in sorted(file.relative_to(saved) for file in saved.rglob("*") if file.is_file()):
        for kept in (None, 0.0, 0.5):
            path = shutil.copytree(saved, tmp_path / str(len(cases)))
            data = (path / file).read_bytes()
            (path / file).unlink()
            if kept is not None:
                (path / file).write_bytes(data[: int(len(data) * kept)])
            cases.append((file.name, str(path)))
    command = [sys.executable, "-c", LOAD_EACH, str(saved), *(path for _, path in cases)]
    root = pathlib.Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    outcomes = result.stdout.splitlines()
    assert len(outcomes) == len(cases) and set(outcomes) == {"same", "refused"}
    refused = {name for (name, _), outcome in zip(cases, outcomes, strict=True) if outcome == "refused"}
    assert {MARKER, "_METADATA", "manifest.ocdbt"} <= refused

"""A few hundred damaged models per loader, and each damage that once got through. More: see ``tests.weights.fuzz``."""

import json
import pathlib
import shutil
import struct
import time

import numpy as np
import pytest

from quest_jax.weights import gguf_file
from quest_jax.weights.checkpoint import MARKER, load_checkpoint, save_checkpoint
from quest_jax.weights.families import FAMILIES
from quest_jax.weights.gguf_file import read_directory
from quest_jax.weights.hf_config import parse_config
from quest_jax.weights.huggingface import load_huggingface
from tests.weights.fuzz import run
from tests.weights.fuzz_cases import FIXTURES
from tests.weights.test_checkpoint import make_params

FAMILY_FIXTURES = sorted(path.parent.name for path in FIXTURES.glob("*/config.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "count"), [("gguf", 400), ("safetensors", 400), ("checkpoint", 150)])
def test_damaged_models_load_or_say_why_not(loader, count):
    results = list(run(loader, range(count)))
    assert [seed for seed, _, _ in results] == list(range(count))
    assert not {seed: wrong for seed, _, wrong in results if wrong}


def config_of(name: str) -> dict:
    return json.loads((FIXTURES / name / "config.json").read_text())


@pytest.mark.parametrize("name", FAMILY_FIXTURES)
def test_huge_numbers_in_a_config_cost_no_work(name, as_a_user):
    config = config_of(name)
    numbers = [key for key, value in config.items() if type(value) is int] + ["num_experts", "num_local_experts"]
    started = time.monotonic()
    for key in numbers:
        for changes in ({key: 2**31 - 1}, {key: 2**31 - 1, "layer_types": None, "no_rope_layers": None}):
            try:
                parsed = parse_config(config | changes, {}, "config.json")
            except (ValueError, NotImplementedError) as error:
                assert str(error).startswith("config.json") and len(str(error)) < 1000
            else:
                assert len(parsed.windows) <= 4096 and parsed.n_layers <= 4096
    assert time.monotonic() - started < 2


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive number, got 0"),
        ("gemma3", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar: expected a positive number, got -4"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "experts: expected 1 <= per_token"),
        ("qwen3_moe", {"num_experts": 4097}, "num_experts: expected at most 4096 experts"),
        ("gpt_oss", {"num_local_experts": 4097}, "num_local_experts: expected at most 4096 experts"),
        ("gemma3", {"rope_parameters": None, "rope_local_base_freq": 0}, "RoPE theta: expected a positive"),
    ],
)
def test_config_values_that_once_got_through(name, changes, message):
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        parse_config(config_of(name) | changes, {}, "config.json")


def test_an_integer_beyond_float64_is_no_factor_of_longrope():
    config = config_of("phi3_longrope")
    rope = config.get("rope_parameters") or config["rope_scaling"]
    rope["short_factor"][0] = 10**400
    with pytest.raises(ValueError, match="short_factor: expected a list of finite numbers"):
        parse_config(config, {}, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
def test_long_texts_are_cut_in_errors(family):
    for changes in (
        {"rope_scaling": {"type": "x" * 9999}},
        {"architectures": ["x" * 9999]},
        {"hidden_act": "x" * 9999},
    ):
        config = {"model_type": family, "num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 1} | changes
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            parse_config(config, {}, "config.json")
        assert len(str(caught.value)) < 1000


def test_rows_of_nothing_are_not_compared(tmp_path):
    """An embedding and a tied head of 2**60 rows and no columns take no bytes and, compared, for ever."""
    config = config_of("tied")
    (tmp_path / "config.json").write_text(json.dumps(config))
    empty = {"dtype": "F32", "shape": [2**60, 0], "data_offsets": [0, 0]}
    header = json.dumps({"model.embed_tokens.weight": empty, "lm_head.weight": empty}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ValueError, match="tie_word_embeddings is true, but lm_head.weight differs"):
        load_huggingface(tmp_path, np.dtype(np.float32))


def gguf_header(n_tensors: int, n_pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_pairs) + rest


def test_a_gguf_header_has_a_limited_number_of_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MAX_ITEMS", 10)
    monkeypatch.setattr(gguf_file, "_MAX_ENTRIES", 5)
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_header(0, 6, bytes(999)))
    with pytest.raises(ValueError, match="lists 0 tensors and 6 pairs, at most 5"):
        read_directory(path)
    pair = struct.pack("<Q", 1) + b"%c" + struct.pack("<IIQ", 9, 0, 6) + bytes(6)
    path.write_bytes(gguf_header(0, 1, pair % b"a"))
    assert read_directory(path).metadata == {"a": [0] * 6}
    path.write_bytes(gguf_header(0, 2, pair % b"a" + pair % b"b"))
    with pytest.raises(ValueError, match="the value of 'b' brings the items of all values to more than 10"):
        read_directory(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save_checkpoint(make_params(), path)
    return path


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "copy"))


DEEP = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("name", ["_sharding", "_METADATA"])
def test_deep_json_beside_the_arrays_does_not_end_the_process(copy, name):
    (copy / "weights" / name).write_bytes(DEEP)
    with pytest.raises(ValueError, match="the checkpoint is damaged.*JSON"):
        load_checkpoint(copy)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (DEEP, "JSON with little nesting|at most 64 levels"),
        (b'{"shape": [16], "chunks": [1099511627776]}', r"chunks within the shape \[16\]"),
        (b'{"shape": [16], "chunks": [0]}', r"chunks within the shape \[16\]"),
        (b'{"shape": [16], "chunks": []}', "a shape and as many chunks"),
        (b'{"shape": [16], "chunks": [1.5]}', "a shape and as many chunks"),
    ],
    ids=["deep", "huge", "empty", "fewer", "no integer"],
)
def test_array_headers_are_checked_before_they_are_parsed_natively(copy, header, message):
    import tensorstore

    base = {"driver": "file", "path": f"{copy}/weights/"}
    tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result().write(b"norm/.zarray", header).result()
    with pytest.raises(ValueError, match=f"the checkpoint is damaged.*norm/.zarray: expected.*({message})"):
        load_checkpoint(copy)


def test_only_the_layout_that_save_writes_is_read(copy):
    path = copy / "weights" / "_METADATA"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_ocdbt": False}))
    with pytest.raises(ValueError, match="expected the layout that quest_jax.save writes"):
        load_checkpoint(copy)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"activation": "relu"}, NotImplementedError, "activation: expected one of silu"),
        ({"experts": {"count": 2, "per_token": 1, "size": 4, "router": "x"}}, NotImplementedError, "router: expected"),
        ({"rope": {"kind": "x" * 9999}}, NotImplementedError, "RoPE type: expected one of default"),
        ({"head_dim": 2**31 - 2}, ValueError, "head_dim 2147483646, the largest size stored is"),
    ],
)  # fmt: skip
def test_values_of_a_checkpoint_that_once_got_through(copy, changes, error, message, as_a_user):
    header = json.loads((copy / MARKER).read_text())
    header["config"] |= changes
    (copy / MARKER).write_text(json.dumps(header))
    with pytest.raises(error, match=message) as caught:
        load_checkpoint(copy)
    assert str(caught.value).startswith(str(copy)) and len(str(caught.value)) < 1000


def test_a_longrope_without_a_scaling_is_refused(tmp_path):
    """Trained on one token: the logarithm of its length is zero, and divides."""
    shutil.copytree(FIXTURES / "phi3_longrope", tmp_path, dirs_exist_ok=True)
    config = config_of("phi3_longrope")
    rope = config.get("rope_parameters") or config["rope_scaling"]
    config["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = 1
    rope.pop("attention_factor", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no RoPE frequencies can be computed"):
        load_huggingface(tmp_path, np.dtype(np.float32))

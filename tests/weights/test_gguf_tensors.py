import re
import struct
import sys

import gguf
import numpy as np
import pytest

from quest_jax.weights.gguf_file import read_directory
from quest_jax.weights.gguf_tensors import open_tensors, split_stacks
from tests.weights.synthetic import write_gguf
from tests.weights.test_gguf_file import header, tensor

KIND = gguf.GGMLQuantizationType
METADATA = {"general.architecture": "llama"}
# Types of which the package quantises only some; any bytes are valid blocks if the half-precision scales are finite.
SCALES = {
    KIND.Q2_K: (80, 82), KIND.Q3_K: (108,), KIND.Q4_K: (0, 2), KIND.Q5_K: (0, 2), KIND.Q6_K: (208,), KIND.IQ4_NL: (0,),
    KIND.IQ4_XS: (0,), KIND.Q5_0: (0,), KIND.Q5_1: (0, 2),
}  # fmt: skip


def random_blocks(kind: KIND, rows: int, columns: int) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(int(kind)).integers(0, 256, (rows, columns // block, size), np.uint8)
    for position in SCALES[kind]:
        data[..., position : position + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return data.reshape(rows, -1)


def reference(path) -> dict[str, np.ndarray]:
    """The package's own reader, which maps the whole file."""
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", [KIND.F32, KIND.F16, KIND.BF16, KIND.Q8_0, KIND.Q4_0, KIND.Q4_1])
def test_types_the_package_can_write(tmp_path, kind):
    rng = np.random.default_rng(0)
    tensors = {"m": rng.standard_normal((6, 64), np.float32), "v": rng.standard_normal(5).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", METADATA, tensors, kind)
    check(path, tensors["m"], 0 if kind == KIND.F32 else 0.3)


@pytest.mark.parametrize("kind", SCALES, ids=lambda kind: kind.name)
def test_types_the_package_only_reads(tmp_path, kind):
    path = write_gguf(tmp_path / "model.gguf", METADATA, {"m": random_blocks(kind, 6, 512)}, kind)
    check(path, None, 0)


def check(path, original, tolerance):
    expected = reference(path)
    opened = open_tensors(read_directory(path))
    assert {name: t.shape for name, t in opened.items()} == {name: t.shape for name, t in expected.items()}
    for name, stored in opened.items():
        rows = stored.read(0, stored.shape[0])
        assert rows.dtype == np.float32 and np.isfinite(rows).all() and np.ptp(rows) > 0
        np.testing.assert_array_equal(rows, expected[name])
        np.testing.assert_array_equal(stored.read(1, 3), expected[name][1:3])
    if original is not None:
        np.testing.assert_allclose(opened["m"].read(0, 6), original, atol=tolerance)


def test_experts_of_a_stack(tmp_path):
    """Any rows of any expert of a matrix [3, 4, 64]; biases too; what is no stack stays as it is."""
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((3, 4, 64), np.float32)
    tensors = {"ffn_up_exps.weight": stack, "ffn_up_exps.bias": stack[:, 0], "m": stack[0]}
    path = write_gguf(tmp_path / "model.gguf", METADATA, tensors, KIND.Q8_0)
    expected = reference(path)
    parts = split_stacks(open_tensors(read_directory(path)), "model.gguf")
    names = {f"ffn_up_exps.{kind}[{x}]" for kind in ("weight", "bias") for x in range(3)} | {"m"}
    assert set(parts) == names
    for x in range(3):
        part = parts[f"ffn_up_exps.weight[{x}]"]
        assert (part.name, part.shape) == (f"ffn_up_exps.weight[{x}]", (4, 64))
        np.testing.assert_array_equal(part.read(0, 4), expected["ffn_up_exps.weight"][x])
        np.testing.assert_array_equal(part.read(1, 3), expected["ffn_up_exps.weight"][x, 1:3])
        bias = parts[f"ffn_up_exps.bias[{x}]"]
        assert bias.shape == (64,)
        np.testing.assert_array_equal(bias.read(5, 9), expected["ffn_up_exps.bias"][x, 5:9])


def test_types_without_a_dequantiser_are_named(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(header((), [tensor(b"blk.0.x", (4, 2), KIND.I32)]) + bytes(256))
    with pytest.raises(NotImplementedError, match="tensor blk.0.x: type I32 has no dequantiser; take a file in Q8_0"):
        open_tensors(read_directory(path))


@pytest.mark.parametrize("kind", [4, 5, 36, 999, 2**32 - 1])
def test_unknown_types_are_named(tmp_path, kind):
    path = tmp_path / "model.gguf"
    path.write_bytes(header((), [tensor(b"blk.0.x", (4, 2), kind)]) + bytes(256))
    with pytest.raises(NotImplementedError, match=f"tensor blk.0.x: unknown type {kind}; a newer gguf package"):
        open_tensors(read_directory(path))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor(shape=(8, 9))], "tensor t: F32 [9, 8] ends at byte"),
        ([tensor(shape=(8, 8), offset=32)], "tensor t: F32 [8, 8] ends at byte"),
        ([tensor(shape=(2**32, 2**32))], "tensor t: F32 [4294967296, 4294967296] ends at byte 73786976294838206"),
        ([tensor(shape=(2**63, 2, 2, 2**63))], "but the file has"),
        ([tensor(shape=(4,), offset=2**64 - 32)], "but the file has"),
        ([tensor(shape=(33, 1), kind=KIND.Q8_0)], "tensor t: Q8_0 packs 32 numbers, a row has 33"),
        ([tensor(b"a", (8, 4)), tensor(b"b", (8, 4), offset=96)], "tensors a and b overlap"),
        ([tensor(b"a", (8, 4)), tensor(b"b", (8, 4))], "tensors a and b overlap"),
    ],
)
def test_lies_about_tensors(tmp_path, tensors, message):
    path = tmp_path / "model.gguf"
    start = header((), tensors)
    path.write_bytes(start + bytes(-len(start) % 32) + bytes(256))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{re.escape(message)}"):
        open_tensors(read_directory(path))


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", METADATA, {"m": np.ones((4, 8), np.float32)})
    stored = open_tensors(read_directory(path))["m"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="the file ended while tensor m was read"):
        stored.read(0, 4)


def test_infinite_scales_do_not_warn(tmp_path):
    block = struct.pack("<e", np.inf) + bytes([0] * 16 + [1] * 16)
    path = write_gguf(
        tmp_path / "model.gguf", METADATA, {"m": np.frombuffer(block, np.uint8).reshape(1, -1)}, KIND.Q8_0
    )
    rows = open_tensors(read_directory(path))["m"].read(0, 1)
    assert np.isnan(rows[0, 0]) and np.isinf(rows[0, 31])


def test_missing_package_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", METADATA, {"m": np.ones((4, 8), np.float32)})
    monkeypatch.setitem(sys.modules, "gguf", None)
    directory = read_directory(path)  # the header needs no package
    with pytest.raises(ImportError, match=r'pip install "quest_jax\[gguf\]"'):
        open_tensors(directory)

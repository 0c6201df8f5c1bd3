import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from quest_jax.weights import safetensors_file
from quest_jax.weights.safetensors_file import read_header

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(6, dtype=np.float16).reshape(3, 2) / 4,
    "c": np.array([1.5, -2.0, 1e30], ml_dtypes.bfloat16),
    "d": np.array([[1e-300], [3.0]]),
    "empty": np.zeros((0, 4), np.float32),
    "ids": np.arange(3, dtype=np.int64),
}


def write(path, header, data: bytes = b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_package_writes(tmp_path):
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "np"})
    entries = read_header(tmp_path / "x.safetensors")
    assert set(entries) == set(TENSORS)
    for name in "abcd":
        stored = entries[name].stored()
        assert stored.shape == TENSORS[name].shape
        rows = stored.read(0, stored.shape[0])
        assert rows.dtype == TENSORS[name].dtype
        np.testing.assert_array_equal(rows, TENSORS[name])
        np.testing.assert_array_equal(stored.read(1, 2), TENSORS[name][1:2])
    with pytest.raises(NotImplementedError, match="tensor ids: expected one of F64, F32, F16, BF16, got I64"):
        entries["ids"].stored()


def test_every_truncation_is_noticed(tmp_path):
    data = save(TENSORS)
    path = tmp_path / "x.safetensors"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}"):
            read_header(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="the header describes"):
        read_header(path)


def test_truncated_after_the_header_was_read(tmp_path):
    path = write(tmp_path / "x.safetensors", {"a": entry()}, bytes(16))
    stored = read_header(path)["a"].stored()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="the file ended while tensor a was read"):
        stored.read(0, 2)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ([], "JSON object"),
        (b'{"a": ' + b"[" * 100_000, "nesting"),
        ({"a": 3}, "tensor a: expected an entry"),
        ({"a": entry() | {"extra": 1}}, "tensor a: expected an entry"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "tensor a: expected an entry"),
        ({"a": entry(shape=(2, -2))}, "tensor a: expected a shape"),
        ({"a": entry(shape=(2, 2.0))}, "tensor a: expected a shape"),
        ({"a": entry(shape=(True, 4))}, "tensor a: expected a shape"),
        ({"a": entry(shape=(2**64, 2))}, "tensor a: expected a shape"),
        ({"a": entry(shape=[10**9] * 100_000)}, "tensor a: expected a shape"),
        ({"a": entry() | {"shape": "22"}}, "tensor a: expected a shape"),
        ({"a": entry(offsets=(0,))}, "tensor a: expected data_offsets"),
        ({"a": entry(offsets=(16, 0))}, "tensor a: expected data_offsets"),
        ({"a": entry(offsets=(-16, 0))}, "tensor a: expected data_offsets"),
        ({"a": entry(offsets=(0, 16.0))}, "tensor a: expected data_offsets"),
        ({"a": entry(shape=(2, 3))}, "takes 24 bytes, but data_offsets are"),
        ({"a": entry(dtype="F16")}, "takes 8 bytes, but data_offsets are"),
        # 2**62 numbers of 4 bytes: a product in 64 bits would be 0
        ({"a": entry(shape=(2**31, 2**31), offsets=(0, 0))}, "takes 18446744073709551616 bytes"),
        ({"a": entry(), "b": entry()}, "tensor b overlaps"),
        ({"a": entry(), "b": entry(offsets=(8, 24))}, "tensor b overlaps"),
        ({"a": entry(offsets=(4, 20))}, "tensor a leaves a hole"),
        ({"a": entry(), "b": entry(offsets=(20, 36))}, "tensor b leaves a hole"),
        ({"a": entry(), "b": entry(offsets=(16, 32))}, "the header describes"),
        ({"a": entry(offsets=(0, 2**50), shape=(2**24, 2**24))}, "the header describes"),
        (b'{"a": {"dtype": "F32", "shape": [4], "shape": [4], "data_offsets": [0, 16]}}', "'shape' twice"),
    ],
)
def test_lies_of_the_header(tmp_path, header, message):
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{re.escape(message)}"):
        read_header(path)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "Q4", 7, None])
def test_unknown_dtype_is_named(tmp_path, dtype):
    path = write(tmp_path / "x.safetensors", {"a": entry() | {"dtype": dtype}}, bytes(16))
    with pytest.raises(NotImplementedError, match=f"tensor a: expected one of the dtypes .*'{dtype}'"):
        read_header(path)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**32, 100])
def test_header_length_beyond_the_file(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ValueError, match=f"got 10 bytes whose header would need {8 + length}"):
        read_header(path)


def test_header_length_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_file, "MAX_JSON_BYTES", 20)
    with pytest.raises(ValueError, match="header of at most 20 bytes, got one of 21"):
        read_header(write(tmp_path / "x.safetensors", b"{}" + b" " * 19))


def test_random_damage_is_noticed_or_harmless(tmp_path):
    """Whatever byte of the header is changed: a typed error, or the tensors still lie inside the file."""
    data = bytearray(save({"a": TENSORS["a"], "b": TENSORS["b"]}))
    header = 8 + int.from_bytes(data[:8], "little")
    path = tmp_path / "x.safetensors"
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for position in rng.integers(0, header, rng.integers(1, 4)):
            damaged[position] = rng.integers(0, 256)
        path.write_bytes(damaged)
        try:
            entries = read_header(path)
        except (ValueError, NotImplementedError) as error:
            assert str(path) in str(error)
            refused += 1
        else:
            assert sum(item.size for item in entries.values()) == len(data) - min(
                item.offset for item in entries.values()
            )
    assert refused > 300

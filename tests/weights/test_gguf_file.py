import re
import struct

import gguf
import numpy as np
import pytest

from quest_jax.weights import gguf_file
from quest_jax.weights.gguf import read_metadata
from quest_jax.weights.gguf_file import read_directory

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"t", shape=(4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(pairs=(), tensors=(), *, version=3, n_pairs=None, n_tensors=None, magic=b"GGUF") -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs)
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def test_every_kind_of_value(path):
    values = {
        "u8": ("add_uint8", 255), "i8": ("add_int8", -128), "u16": ("add_uint16", 65535), "i16": ("add_int16", -5),
        "u32": ("add_uint32", 2**32 - 1), "i32": ("add_int32", -(2**31)), "u64": ("add_uint64", 2**64 - 1),
        "i64": ("add_int64", -(2**63)), "f32": ("add_float32", 0.5), "f64": ("add_float64", 1e300),
        "yes": ("add_bool", True), "no": ("add_bool", False), "text": ("add_string", "ä\n"),
        "ints": ("add_array", [1, -2, 3]), "floats": ("add_array", [0.5, 2.0]), "bools": ("add_array", [True, False]),
        "texts": ("add_array", ["a", "", "Ġé"]), "lists": ("add_array", [[1, 2], [3]]),
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for key, (method, value) in values.items():
        getattr(writer, method)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_metadata(path)
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == {key: value for key, (_, value) in values.items()}
    assert {key: type(value) for key, value in metadata.items()} == {k: type(v) for k, (_, v) in values.items()}
    assert all(type(item) is bool for item in metadata["bools"])


def test_tensors_lie_where_the_package_finds_them(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = read_directory(path)
    expected = {t.name: (t.data.shape, int(t.tensor_type), t.data_offset) for t in gguf.GGUFReader(path).tensors}
    assert {t.name: (t.shape, t.type_id, t.offset) for t in directory.tensors.values()} == expected
    assert directory.size == path.stat().st_size


def test_version_2_is_the_same_format(path):
    path.write_bytes(header([pair(b"a", U32, struct.pack("<I", 7))], version=2))
    assert read_metadata(path) == {"a": 7}


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_metadata(tmp_path / "none.gguf")


@pytest.mark.parametrize("data", [b"", b"GG", b"GGML" + bytes(20), b"\x80\x02}" + bytes(30), b"PK\x03\x04" + bytes(40)])
def test_other_files(path, data):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        read_metadata(path)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, "version 1"),
        (4, "version 4"),
        (0, "version 0"),
        (3 << 24, "big-endian version 3"),
        (2**31, "version 2147483648"),
    ],
)
def test_other_versions(path, version, message):
    path.write_bytes(header(version=version))
    with pytest.raises(NotImplementedError, match=f"expected GGUF version 2 or 3, little endian, got {message};"):
        read_metadata(path)


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(n_pairs=HUGE), "a list of 0 tensors needs"),
        (header(n_tensors=HUGE), "a list of 18446744073709551615 tensors needs"),
        (header(n_pairs=2**60, n_tensors=2**60), "bytes more, but the file has 24 bytes"),
        (header(n_pairs=3) + bytes(38), "a list of 0 tensors needs 39 bytes more"),
        (header([struct.pack("<Q", HUGE)], n_pairs=1) + bytes(20), "a metadata key has 18446744073709551615 bytes"),
        (header([pair(b"k", STRING, struct.pack("<Q", HUGE))]), "the value of 'k' needs 18446744073709551615 bytes"),
        (header([pair(b"k", ARRAY, array(U32, HUGE))]), "the value of 'k' needs 73786976294838206460 bytes"),
        (header([pair(b"k", ARRAY, array(STRING, 2**61))]), "the value of 'k', an array of 2305843009213693952, needs"),
        (header([pair(b"k", ARRAY, array(ARRAY, 2**61))]), "the value of 'k', an array of 2305843009213693952, needs"),
        (header([pair(b"k", ARRAY, array(ARRAY, 1) * 50)]), "nests arrays deeper than 4"),
        (header([pair(b"k", 13, bytes(8))]), "unknown value type 13"),
        (header([pair(b"k", ARRAY, array(99, 1, bytes(8)))]), "unknown value type 99"),
        (header([pair(b"k\xff", U32, bytes(4))]), "a metadata key is not UTF-8"),
        (header([pair(b"k", STRING, text(b"\xff"))]), "the value of 'k' is not UTF-8"),
        (header([pair(b"k", U32, bytes(4))] * 2), "the metadata key 'k' occurs twice"),
        (header((), [tensor(b"\xff")]), "a tensor name is not UTF-8"),
        (header((), [tensor(shape=())]) + bytes(8), "tensor 't' has 0 dimensions"),
        (header((), [tensor(shape=(1,) * 5)]), "tensor 't' has 5 dimensions"),
        (header((), [text(b"t") + struct.pack("<I", 2**32 - 1) + bytes(20)]), "tensor 't' has 4294967295 dimensions"),
        (header((), [tensor(), tensor()]), "the tensor 't' occurs twice"),
        (header((), [tensor(offset=8)]), "starts at 8, which is no multiple of 32"),
        (header([pair(b"general.alignment", U32, bytes(4))]), "general.alignment is 0"),
        (header([pair(b"general.alignment", U32, struct.pack("<I", 24))]), "general.alignment is 24"),
        (header([pair(b"general.alignment", U32, struct.pack("<I", 2**31))]), "general.alignment is 2147483648"),
        (header([pair(b"general.alignment", STRING, text(b"32"))]), "general.alignment is '32'"),
    ],
)
def test_lies_of_the_header(path, data, message):
    path.write_bytes(data)
    pattern = f"^{re.escape(str(path))}: damaged GGUF file at byte [0-9]+: .*{re.escape(message)}.*fetch the file again"
    with pytest.raises(ValueError, match=pattern):
        read_directory(path)


def test_every_truncation_is_noticed(path):
    pairs = [pair(b"k", STRING, text(b"value")), pair(b"n", ARRAY, array(STRING, 2, text(b"a") + text(b"b")))]
    data = header(pairs, [tensor(b"first"), tensor(b"second", (2, 3))])
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"^{re.escape(str(path))}"):
            read_directory(path)
    path.write_bytes(data)
    assert read_directory(path).metadata == {"k": "value", "n": ["a", "b"]}


def test_a_header_has_a_limit(path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MAX_HEADER_BYTES", 100)
    path.write_bytes(header([pair(b"k", STRING, text(bytes(100)))]) + bytes(1000))
    with pytest.raises(ValueError, match="needs 100 bytes more, but a header may have 100"):
        read_directory(path)


def test_a_file_that_shrinks_while_it_is_read(path):
    path.write_bytes(b"abc")
    with open(path, "rb") as file:
        cursor = gguf_file._Cursor(file, path, size=10)
        with pytest.raises(ValueError, match="at byte 0: the file ended while a name was read"):
            cursor.take(5, "a name")

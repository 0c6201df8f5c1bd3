"""GGUF files whose header is well-formed but for a few things: what damage to single bytes rarely makes."""

import functools
import pathlib
import random
import struct
import tempfile
from typing import Any

from tests.weights import synthetic
from tests.weights.mutators import EXTREMES

_TYPES = {bool: 7, str: 8, list: 9, int: 4, float: 6}
_KEYS = (
    *("llama.rope.scaling.factor llama.rope.scale_linear llama.expert_count llama.attention.value_length".split()),
    *("llama.rope.scaling.yarn_beta_fast llama.rope.dimension_count split.count general.type llama.x x".split()),
    *("llama.rope.scaling.original_context_length tokenizer.ggml.eos_token_ids".split()),
)


@functools.cache
def gguf_base() -> tuple[bytes, int]:
    """A file as a converter writes it, and the length of its header."""
    config = synthetic.make_config(num_hidden_layers=1)
    tensors = synthetic.gguf_tensors(config, synthetic.make_tensors(config))
    with tempfile.TemporaryDirectory() as folder:
        path = synthetic.write_gguf(pathlib.Path(folder) / "x.gguf", synthetic.gguf_metadata(config), tensors)
        data = path.read_bytes()
    return data, len(data) - sum(tensor.nbytes for tensor in tensors.values())


def forge_gguf(rng: random.Random) -> bytes:
    """A header in which one to three things are not as they should be, and data that fits the undamaged one."""
    config = synthetic.make_config(num_hidden_layers=1)
    pairs: list[tuple[str, Any]] = list(synthetic.gguf_metadata(config).items())
    pairs += [("llama.rope.scaling.type", "none"), ("tokenizer.ggml.tokens", ["a", "b"]), ("general.alignment", 32)]
    tensors, offset = [], 0
    for name, tensor in synthetic.gguf_tensors(config, synthetic.make_tensors(config)).items():
        tensors.append([name, list(tensor.shape[::-1]), 0, offset])
        offset += -(-tensor.nbytes // 32) * 32
    counts = [len(tensors), len(pairs)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        i, tensor = rng.randrange(len(pairs)), rng.choice(tensors)
        match rng.randrange(11):
            case 0 | 1 | 2:
                pairs[i] = (pairs[i][0], _odd_value(rng, pairs[i][1]))
            case 3:
                pairs.append((rng.choice(pairs)[0] if rng.random() < 0.5 else rng.choice(_KEYS), _odd_value(rng, 4)))
            case 4:
                del pairs[i]
            case 5:
                counts[rng.randrange(2)] = rng.choice(EXTREMES)
            case 6:
                tensor[1] = rng.choice(
                    ([], [0], [2**63, 2**63, 2**63, 2**63], tensor[1][::-1], [2**60, 0], tensor[1] * 3, [0, 2**62])
                )
            case 7:
                tensor[1][rng.randrange(len(tensor[1])) if len(tensor[1]) > 1 else 0 :] = [rng.choice(EXTREMES)]
            case 8:
                tensor[2] = rng.choice((*range(45), *EXTREMES)) % 2**32
            case 9:
                tensor[3] = rng.choice((*EXTREMES, tensor[3] + 32, tensor[3] - 32, tensor[3] + 1, 0)) % 2**64
            case 10:
                tensors.append([rng.choice((tensor[0], "rope_freqs.weight", "x.bias", "x")), [4], 0, offset])
    if rng.random() < 0.8:
        counts = [len(tensors) if counts[0] < 100 else counts[0], len(pairs) if counts[1] < 100 else counts[1]]
    header = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    header += b"".join(_text(key) + _value(value) for key, value in pairs)
    for name, shape, kind, start in tensors:
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)
    return header + bytes(-len(header) % 32) + rng.randbytes(offset)


def _odd_value(rng: random.Random, value: Any) -> Any:
    number = rng.choice((0, 1, 2, 3, 2**31 - 1, 2**31, 2**32 - 1))
    deep = b""
    for _ in range(rng.choice((2, 4, 5, 1000))):
        deep += struct.pack("<IQ", 9, 1)
    odd = (
        number, True, "", "yarn", "linear", "x" * 70_000, [], [number, number], [number] * 1000, float("nan"), 1e30,
        float("inf"), -1.0, 0.0, 1e-38, ["a"], value, [value], [[1], [2]], bytes((9, 0, 0, 0)) + deep,
        struct.pack("<IIQ", 9, rng.choice((0, 4, 8, 9, 10, 12, 99)), rng.choice(EXTREMES)),
        struct.pack("<IQ", 8, 2**62), struct.pack("<IQ", 10, 2**64 - 1), struct.pack("<Iq", 11, -5),
        struct.pack("<Id", 12, 1e300), b"\x63\0\0\0",
    )  # fmt: skip
    return rng.choice(odd)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Type and value; bytes stand for both as they are."""
    return value if isinstance(value, bytes) else struct.pack("<I", _TYPES[type(value)]) + _bare(value)


def _bare(value: Any) -> bytes:
    if isinstance(value, list):
        kind = _TYPES.get(type(value[0]), 4) if value else 4
        items = [item for item in value if _TYPES.get(type(item)) == kind]
        return struct.pack("<IQ", kind, len(items)) + b"".join(map(_bare, items))
    if isinstance(value, str):
        return _text(value)
    return struct.pack("<?" if isinstance(value, bool) else "<I" if isinstance(value, int) else "<f", value)

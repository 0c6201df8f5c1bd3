"""Seeded damage to bytes and to JSON: what the fuzz of the loaders feeds them."""

import copy
import json
import random
from typing import Any

EXTREMES = (0, 1, 2, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_MARK = "@@raw@@"  # stands in a tree for text that json.dumps would not write
_RAW = (
    *("null true false 0 -1 1 2 3 7 64 65536 2147483647 2147483648 9223372036854775807 18446744073709551615".split()),
    *("1e-320 1e-30 0.5 1.5 -0.0 -2.5 1e308 1e999 NaN Infinity -Infinity".split()),
    *('"" "x" "\\ud800" "\\u0000" "yarn" "llama3" "longrope" "dynamic" "linear" "mxfp4" "full_attention"'.split()),
    *('[] {} [[]] [0] [-1] [1,2] ["a"] [null] [1e400] {"a":1} {"a":1,"a":2} [true]'.split()),
    '"sliding_attention"', '["sliding_attention","full_attention"]', "9" * 400, "9" * 5000, "[" + "0," * 9999 + "0]",
    '"' + "x" * 70_000 + '"', "[" + "9" * 400 + "]", "[1,2", '{"a":', "\ufeff1",
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, head: int) -> bytes:
    """One to three damages, most of them within the first ``head`` bytes."""
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.randrange(max(1, min(head, len(result)) if rng.random() < 0.9 else len(result)))
        match rng.randrange(8):
            case 0 | 1:
                for _ in range(rng.randint(1, 4)):
                    if result:
                        result[min(len(result) - 1, at + rng.randrange(4))] ^= 1 << rng.randrange(8)
            case 2:
                del result[at:]
            case 3 | 4:
                width = rng.choice((1, 2, 4, 8, 8))
                result[at : at + width] = (rng.choice(EXTREMES) % 256**width).to_bytes(width, "little")
            case 5:
                del result[at : at + rng.randint(1, 16)]
            case 6:
                result[at:at] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(5), bytes(result[at : at + 40])))
            case 7:
                result += rng.choice((b"\0", b"\0" * 32, rng.randbytes(100)))
    return bytes(result)


def mutate_json(rng: random.Random, value: Any, others: tuple[Any, ...] = ()) -> bytes:
    """One to three damages to a tree of JSON; keys and values may come from the trees ``others``."""
    tree, raws = copy.deepcopy(value), []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        parent, key = rng.choice(list(_places(tree)) or [(tree, None)])
        if key is None:
            continue
        match rng.randrange(9):
            case 0:
                del parent[key]
            case 1 | 2 | 3:
                parent[key] = f"{_MARK}{len(raws)}"
                raws.append(rng.choice(_RAW))
            case 4:
                parent[key] = f"{_MARK}{len(raws)}"
                depth = int(10 ** rng.uniform(0, 5.3))
                raws.append("[" * depth + "]" * depth if rng.random() < 0.5 else '{"a":' * depth + "1" + "}" * depth)
            case 5:
                parent[key] = _bend(rng, parent[key])
            case 6:
                parent[key] = copy.deepcopy(rng.choice([place[at] for place, at in _places(tree)]))
            case 7 if isinstance(parent, dict):
                parent[rng.choice([*parent, "unknown", "_note", ""])] = parent.pop(key)
            case _ if others:
                other, at = rng.choice(list(_places(rng.choice(others))))
                if isinstance(other, dict):
                    tree[at] = copy.deepcopy(other[at])
    text = json.dumps(tree)
    for i, raw in enumerate(raws):
        text = text.replace(f'"{_MARK}{i}"', raw)
    if rng.random() < 0.02:
        text = rng.choice((text[: rng.randrange(len(text) + 1)], text + text, "[" + text + "]", text[:-1] + ',"a":1,}'))
    return text.encode("utf-8", "surrogatepass")


def _places(tree: Any) -> Any:
    """(container, key) of every value in a tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


def _bend(rng: random.Random, value: Any) -> Any:
    """The same value, but larger, of another sign, or of another type."""
    if isinstance(value, bool) or value is None:
        return rng.choice((not value, str(value), [value], 0, 1))
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value // 2, float(value), str(value), [value], 0))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e30, value * 1e-30, 0.0, int(value) if abs(value) < 1e9 else 1, str(value)))
    if isinstance(value, str):
        return rng.choice((value + "x", value.upper(), "", [value], {value: value}, value * 50))
    if isinstance(value, list):
        return rng.choice((value[:-1], value * 2, [], value[::-1], [value], value + value[:1]))
    return rng.choice(([value], {}, list(value), {**value, "unknown": 1}))

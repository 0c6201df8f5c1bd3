import math

import pytest

from quest_jax.weights.fields import Fields


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("integer", True), ("integer", 1.0), ("integer", "1"), ("integer", -1), ("integer", 2**31), ("integer", []),
        ("number", True), ("number", "1"), ("number", math.nan), ("number", math.inf), ("number", 10**400),
        ("flag", 1), ("flag", "true"), ("text", 1), ("text", ["a"]),
        ("ids", True), ("ids", 1.0), ("ids", "2"), ("ids", [1, -1]), ("ids", [1, None]), ("ids", [2**31]), ("ids", {}),
    ],
)  # fmt: skip
def test_wrong_type_or_range(method, value):
    with pytest.raises(ValueError, match="^config.json: key: expected .*, got "):
        getattr(Fields({"key": value}, "config.json"), method)("key")


@pytest.mark.parametrize(
    ("method", "value", "expected"),
    [
        ("integer", 0, 0),
        ("integer", 2**31 - 1, 2**31 - 1),
        ("number", 3, 3.0),
        ("number", 1e-5, 1e-5),
        ("flag", False, False),
        ("text", "", ""),
        ("ids", 5, (5,)),
        ("ids", [7, 5, 7], (7, 5)),
        ("ids", [], ()),
    ],
)
def test_right_values(method, value, expected):
    result = getattr(Fields({"key": value}, "config.json"), method)("key")
    assert result == expected and type(result) is type(expected)


def test_null_counts_as_absent():
    fields = Fields({"key": None}, "config.json")
    assert fields.integer("key", 4) == fields.integer("other", 4) == 4
    assert fields.ids("key") is None
    with pytest.raises(ValueError, match="^config.json: the key 'key' is missing"):
        fields.integer("key")

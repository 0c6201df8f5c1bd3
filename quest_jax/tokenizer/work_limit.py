"""How much one rendering of a chat template may do, counted in units.

A template comes with the model, so it is foreign code. Jinja's sandbox keeps it away from Python; it does not keep it
from looping or allocating without end. Here every step of a template is paid from one allowance, in proportion to the
time or memory it may cost, *before* it is taken.
"""

import contextlib
import contextvars
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

STEP = 4
"""Units for one loop iteration, one call, or one visited item; a character costs one unit."""
BASE_UNITS = 1 << 21
UNITS_PER_INPUT = 128  # some templates loop over every character of a message, looking for images
_MAX_INPUT_UNITS = 1 << 28
_MAX_DEPTH = 256
_LEFT: contextvars.ContextVar[list[int]] = contextvars.ContextVar("units left for the running template")


@contextlib.contextmanager
def allowance(inputs: Any) -> Iterator[None]:
    """Grants the code inside ``BASE_UNITS``, and ``UNITS_PER_INPUT`` for each unit of what the template is given."""
    token = _LEFT.set([_MAX_INPUT_UNITS])
    try:
        _LEFT.set([BASE_UNITS + UNITS_PER_INPUT * pay_content(inputs)])
        yield
    finally:
        _LEFT.reset(token)


def pay(units: int) -> None:
    """Takes ``units`` from the allowance of the running template.

    Raises:
      SecurityError: not enough is left.
    """
    left = _LEFT.get()
    left[0] -= units
    if left[0] < 0:
        raise SecurityError("it loops or allocates far more than its input calls for")


def pay_content(value: Any) -> int:
    """Pays for everything inside ``value``: what printing, comparing or hashing it would walk through.

    Nested lists can share their parts, so a short template can build a value that takes 2**60 steps to print. The walk
    that finds the price is paid for as it goes, so it ends as well.

    Returns:
      The units paid.
    """
    if isinstance(value, str):  # what nearly every call is about
        pay(STEP + len(value))
        return STEP + len(value)
    stack, total = [(value, 0)], 0
    while stack:
        item, depth = stack.pop()
        if depth > _MAX_DEPTH:  # what comes after, such as hashing a tuple, may recurse in C without a check
            raise SecurityError(f"it nests values more than {_MAX_DEPTH} deep")
        units = STEP + (len(item) if isinstance(item, str) else item.bit_length() if isinstance(item, int) else 0)
        pay(units)
        total += units
        if isinstance(item, Mapping):
            stack.extend((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list | tuple | Set | ValuesView | range):
            stack.extend((part, depth + 1) for part in item)
        elif isinstance(item, Namespace):
            raise SecurityError("it prints or compares a namespace")
    return total


def pay_length(value: Any) -> None:
    """Pays for one pass over ``value`` that does not look inside its items."""
    pay(STEP)
    if isinstance(value, str | list | tuple | Mapping | Set | ValuesView | range):
        pay(len(value))


def metered(values: Iterable[Any], units: int = STEP) -> Iterator[Any]:
    """The same items, each paid for when it is taken."""
    for value in values:
        pay(units)
        yield value


def unpack(value: Any) -> Any:
    """Iterators become lists, item by item; everything else stays."""
    return list(metered(value)) if isinstance(value, Iterator) else value

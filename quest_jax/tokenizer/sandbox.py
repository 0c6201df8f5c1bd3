"""Jinja for templates nobody has read: no way into Python, and a limit on the work of one rendering.

jinja2's immutable sandbox refuses private attributes and mutation. On top, a template gets only the functions of
:mod:`quest_jax.tokenizer.template_functions` and the methods listed here, and pays for every step from the allowance of
:mod:`quest_jax.tokenizer.work_limit`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quest_jax.tokenizer.template_functions import make_filters, make_globals, make_tests, pay_join, pay_replace
from quest_jax.tokenizer.template_rewrite import FILTERS, rewrite
from quest_jax.tokenizer.work_limit import STEP, metered, pay, pay_content, pay_length, unpack

_MAX_INTEGER_BITS = 4096
_MAX_FORMAT_LENGTH = 1000
_WIDE_FIELD = {
    "%": re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d{4}|\d*\.(\*|\d{4}))"),
    "{": re.compile(r"\{[^{}]*:[^{}]*(\{|\d{4})"),
}
_METHODS: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = (
    (
        str,
        frozenset(
            "capitalize casefold count endswith find format format_map index isalnum isalpha isdecimal isdigit islower "
            "isnumeric isspace istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind "
            "rindex rpartition rsplit rstrip split splitlines startswith strip swapcase title upper".split()
        ),
    ),
    (Mapping, frozenset(("get", "items", "keys", "values"))),
    ((list, tuple), frozenset(("count", "index"))),
    ((int, float, bytes, range, Set, ValuesView), frozenset()),
)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates can be compiled and rendered only inside an ``allowance``."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters = make_filters() | FILTERS
        self.tests = make_tests()
        self.globals = make_globals()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = rewrite(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may read ``obj.attr``."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        return next((attr in names for kinds, names in _METHODS if isinstance(obj, kinds)), True)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Refuses at once; jinja's own would print as nothing."""
        raise SecurityError(f"access to attribute {attribute!r:.40} of {type(obj).__name__!r} object is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, paid for."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def paid(*args: Any, **kwargs: Any) -> str:
            _pay_format(value.__self__, "{", (args, kwargs))
            return function(*args, **kwargs)

        return paid

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An arithmetic operator, paid for."""
        if operator == "%" and isinstance(left, str):
            _pay_format(left, "%", right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
            if bits > _MAX_INTEGER_BITS:
                raise SecurityError(f"it computes an integer of about {bits} bits")
        elif operator == "*":
            number, sequence = (left, right) if isinstance(left, int) else (right, left)
            if isinstance(number, int) and isinstance(sequence, str | list | tuple):
                pay(number * len(sequence) if number > 0 else 0)
        pay_length(left)
        pay_length(right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A function, method or macro, paid for."""
        owner = getattr(__obj, "__self__", None)
        if owner is None:  # a macro or a function, which only takes its arguments in
            for arg in (*args, *kwargs.values()):
                pay_length(arg)
        else:
            args = tuple(unpack(arg) for arg in args)
            pay_content(args)
            _pay_method(owner, __obj.__name__, args)
        pay(STEP)
        result = super().call(__context, __obj, *args, **kwargs)
        return metered(result) if isinstance(result, Iterator) else result


def _pay_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    if isinstance(owner, str | list | tuple):
        pay_content(owner)
    if isinstance(owner, str) and name == "join" and args:
        pay_join(args[0], owner)
    elif isinstance(owner, str) and name == "replace" and len(args) > 1:
        pay_replace(owner, *args)


def _pay_format(form: str, sign: str, values: Any) -> None:
    if len(form) > _MAX_FORMAT_LENGTH or _WIDE_FIELD[sign].search(form):
        raise SecurityError(f"it formats with {form!r:.40}; expected a short format and widths below 1000")
    pay((form.count(sign) + 1) * (1000 + pay_content(values)))


class _GenerationTag(Extension):
    """``{% generation %}``, with which training code marks what the assistant wrote: rendered like its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

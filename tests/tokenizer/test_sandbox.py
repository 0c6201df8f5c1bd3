"""Templates nobody has read: what they may not reach, and that they cannot work without end."""

import tracemalloc

import jinja2
import pytest

from quest_jax.tokenizer import work_limit
from quest_jax.tokenizer.chat import render_template

MESSAGES = [{"role": "user", "content": "Hi"}]
NESTED = "{% set ns = namespace(x=('a',)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
DEEP = "{% set ns = namespace(x=('a',)) %}{% for i in range(9000) %}{% set ns.x = (ns.x,) %}{% endfor %}"


def doubling(expression, before=""):
    loop = f"{{% for i in range(60) %}}{before}{{% set ns.x = {expression} %}}{{% endfor %}}"
    return "{% set ns = namespace(x='a') %}" + loop


def keeping(expression):
    loop = f"{{% for i in range(99999) %}}{{% set ns.x = [ns.x, {expression}] %}}{{% endfor %}}"
    return "{% set ns = namespace(x=[], y='a,' * 10**5) %}" + loop


REFUSED = {
    "private attribute": "{{ ''.__class__ }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "private item": "{{ messages[0]['__class__'] }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "attr filter": "{{ ''|attr('__class__') }}",
    "attribute in map": "{{ ['']|map(attribute='__class__')|list }}",
    "attribute in a format": "{{ '{0.__class__}'.format('') }}",
    "attribute in a format of map": "{{ '{a.__class__}'.format_map({'a': ''}) }}",
    "changing a list": "{{ messages.append(1) }}",
    "changing a dict": "{{ messages[0].update({}) }}",
    "private name in a namespace": "{{ namespace(__class__=1) }}",
    "private name set in a namespace": "{% set ns = namespace() %}{% set ns.__html__ = range %}",
    "include": "{% include 'x' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends 'x' %}",
}
UNBOUNDED = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{% set a = f(n-1), f(n-1) %}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive block": "{% block b %}{{ self.b() }}{% endblock %}",
    "large range": "{{ range(10**9)|list }}",
    "repeated text": "{{ 'a' * 10**10 }}",
    "repeated list": "{{ 10**10 * [0] }}",
    "power": "{{ 10 ** (10 ** 5) }}",
    "squares": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling by ~": doubling("ns.x ~ ns.x"),
    "doubling by +": doubling("ns.x + ns.x"),
    "doubling by %": doubling("'%s%s' % (ns.x, ns.x)"),
    "doubling by format": doubling("'{0}{0}'.format(ns.x)"),
    "doubling by replace": doubling("ns.x.replace('a', 'aa')"),
    "doubling by replacing nothing": doubling("ns.x.replace('', 'a')"),
    "doubling by the filter replace": doubling("ns.x|replace('a', 'aa')"),
    "doubling by join": doubling("''.join([ns.x, ns.x])"),
    "doubling by the filter join": doubling("[ns.x, ns.x]|join"),
    "doubling by a long separator": doubling("['', '', '']|join(ns.x)"),
    "doubling by tojson": doubling("[ns.x, ns.x]|tojson"),
    "doubling by capture": doubling("y", before="{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"),
    "doubling a list": doubling("[ns.x, ns.x]") + "{{ ns.x }}",
    "doubling with autoescape": "{% autoescape true %}" + doubling("ns.x ~ ns.x") + "{% endautoescape %}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "wide % by argument": "{{ '%*d' % (10**9, 1) }}",
    "precise %": "{{ '%.1000000000f' % 1.5 }}",
    "wide format": "{{ '{:1000000000}'.format(1) }}",
    "wide format by argument": "{{ '{:{}}'.format(1, 10**9) }}",
    "long format": "{{ ('%s' * 2000) % 1 }}",
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a'|center(10**9) }}",
    "center in map": "{{ ['a']|map('center', 10**9)|list }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "bytes of an integer": "{{ (1).to_bytes(10**9, 'big') }}",
    "indent": "{{ 'a\nb'|indent(10**9) }}",
    "indent of tojson": "{{ [1]|tojson(indent=10**9) }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "format of time": "{{ strftime_now('%Y' * 1000) }}",
    "literals in a loop": keeping("[" + "[]," * 9000 + "]"),
    "text in a loop": "{% macro f() %}{% for i in range(99999) %}"
    + "a" * 99999
    + "{% endfor %}{% endmacro %}{{ f() }}",
    "slices": keeping("ns.y[1:]"),
    "splits": keeping("ns.y.split(',')"),
    "searching an iterator": "{% for i in range(99999) %}{{ 'x' in (range(99999)|map('string')) }}{% endfor %}",
    "long attribute path": "{{ (range(99999)|list)|map(attribute='" + "a." * 9999 + "a')|list }}",
    "chained namespaces": doubling("namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "tall source": "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}",
    "long sum": "{{ 1" + " + 1" * 9999 + " }}",
    "tall ifs": "{% if 1 %}" * 999 + "{% endif %}" * 999,
    "many elifs": "{% if 0 %}" + "{% elif 0 %}" * 3000 + "{% endif %}",
    "long template": "a" * 140_000,
}
USES_OF_A_VALUE = {
    "print": "{{ ns.x }}",
    "~": "{{ 'a' ~ ns.x }}",
    "%": "{{ '%s' % (ns.x,) }}",
    "format": "{{ '{}'.format(ns.x) }}",
    "tojson": "{{ ns.x|tojson }}",
    "string": "{{ ns.x|string|length }}",
    "upper": "{{ ns.x|upper }}",
    "equal": "{% set y = ns.x == ns.x[0] %}",
    "equal test": "{% set y = ns.x is eq(ns.x[0]) %}",
    "less": "{% set y = ns.x < ns.x[0] %}",
    "in": "{% set y = ns.x in [ns.x[0]] %}",
    "sort": "{% set y = [ns.x, ns.x[0]]|sort %}",
    "max": "{% set y = [ns.x, ns.x[0]]|max %}",
    "unique": "{% set y = [ns.x, ns.x]|unique|list %}",
    "count": "{% set y = [ns.x].count(ns.x[0]) %}",
    "key of a dict": "{% set y = {ns.x: 1} %}",
    "key of a dict made by a call": "{% set y = dict([(ns.x, 1)]) %}",
    "key of a pair": "{% set y = {({'a': ns.x}.items()|list)[0]: 1} %}",
    "subscript": "{% set y = {'a': 1}[ns.x] %}",
    "get": "{% set y = {'a': 1}.get(ns.x) %}",
    "attribute": "{% set y = [{}]|map(attribute=ns.x)|list %}",
    "name of a filter": "{% set y = [1]|map(ns.x)|list %}",
    "name of a test": "{% set y = ns.x is filter %}",
    "changed": "{% for i in range(2) %}{% set y = loop.changed(ns.x) %}{% endfor %}",
    "exception": "{{ raise_exception(ns.x) }}",
    "join": "{{ [ns.x]|join }}",
    "replace": "{{ 'a'.replace(ns.x, 'b') }}{{ ns.x|replace('a', 'b') }}",
    "escape": "{{ ns.x|e }}",
    "safe": "{{ ns.x|safe|length }}",
}


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED)
def test_templates_reach_nothing_but_their_values(template):
    with pytest.raises(ValueError, match="The chat template stopped with") as caught:
        render_template(template, MESSAGES, {})
    assert isinstance(caught.value.__cause__, jinja2.TemplateError | TypeError)


@pytest.fixture
def small_allowance(monkeypatch):
    """For the tests that use all of it: type checks on every call make them slow."""
    monkeypatch.setattr(work_limit, "BASE_UNITS", 1 << 17)


@pytest.mark.parametrize("template", UNBOUNDED.values(), ids=UNBOUNDED)
def test_templates_do_not_work_without_end(template, small_allowance):
    with pytest.raises(ValueError, match="chat template"):
        render_template(template, MESSAGES, {})


@pytest.mark.parametrize("use", USES_OF_A_VALUE.values(), ids=USES_OF_A_VALUE)
def test_a_value_of_2_to_the_60_parts_is_never_walked_through(use, small_allowance):
    with pytest.raises(ValueError, match="loops or allocates far more than its input calls for"):
        render_template(NESTED + use, MESSAGES, {})


@pytest.mark.parametrize("name", ["print", "key of a dict", "subscript", "equal", "tojson", "exception"])
def test_a_value_nested_9000_deep_is_never_walked_through(name):
    with pytest.raises(ValueError, match="nests values more than 256 deep"):
        render_template(DEEP + USES_OF_A_VALUE[name], MESSAGES, {})


@pytest.mark.parametrize(
    "name", ["doubling by ~", "doubling by capture", "repeated list", "splits", "slices", "wide %"]
)
def test_memory_stays_bounded(name):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):
            render_template(UNBOUNDED[name], MESSAGES, {})
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()


def test_objects_of_the_caller_are_out_of_reach(tmp_path):
    """What is no JSON stands there by its type; its methods, which may do anything, are not those of the text."""
    kept = tmp_path / "kept"
    kept.touch()

    class Loud(str):
        def shout(self):
            return self.upper()

    variables = {"documents": [{"path": kept, "title": Loud("a"), "pair": (1, True, None, 0.5)}]}
    template = "{{ documents[0].path }} {{ documents[0].title }} {{ documents[0].pair }}"
    assert render_template(template, MESSAGES, variables) == f"<{type(kept).__name__}> a (1, True, None, 0.5)"
    for call in ("path.unlink()", "title.shout()"):
        with pytest.raises(ValueError, match="The chat template stopped with"):
            render_template(f"{{{{ documents[0].{call} }}}}", MESSAGES, variables)
    assert kept.exists()


def test_the_allowance_grows_with_the_input(small_allowance):
    # Some templates look at every character; on a long document that is much work, but work in proportion.
    template = "{% for m in messages %}{% for c in m.content %}{{ '!' if c == 'x' }}{% endfor %}{% endfor %}"
    messages = [{"role": "user", "content": "x" * 20_000}]
    assert render_template(template, messages, {}) == "!" * 20_000


def test_each_rendering_has_its_own_allowance(small_allowance):
    template = "{% for i in range(9000) %}{% endfor %}done"
    assert [render_template(template, MESSAGES, {}) for _ in range(12)] == ["done"] * 12
    with pytest.raises(ValueError, match="loops or allocates"):
        render_template(template * 12, MESSAGES, {})


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{% break %}", "SyntaxError"),
        ("{{ a.b.c }}", "UndefinedError: 'a' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ [1]|tojson(indent={}) }}", "TypeError"),
        ("{{ raise_exception('Roles!') }}", "TemplateError: Roles!"),
    ],
)
def test_the_cause_of_a_failure_is_named(template, cause):
    with pytest.raises(ValueError, match=f"The chat template stopped with {cause}.*chat_template="):
        render_template(template, MESSAGES, {})


def test_plain_templates_keep_their_meaning_under_the_rewrite():
    template = """
{% for a in [1, 2, 3] if a != 2 %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% else %}none{% endfor %}
{% for a in [] %}x{% else %}empty{% endfor %}
{% macro f(x, y=2) %}{{ x + y }}{{ caller() if caller }}{% endmacro %}{{ f(1) }}{% call f(3, y=4) %}!{% endcall %}
{{ 'abc'[1:] ~ 'abc'[-1] ~ none }}{{ 1 < 2 < 3 }}{{ {'k': 1}['k'] }}{{ {1 + 1: 3}[2] }}
{% for a in [[1, [2]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}{% with z = 5 %}{{ z }}{% endwith %}
"""
    options = {"trim_blocks": True, "lstrip_blocks": True}
    assert render_template(template, MESSAGES, {}) == jinja2.Environment(**options).from_string(template).render()

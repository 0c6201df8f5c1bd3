"""Runs the examples of the docstrings.

The docstrings are read from the source: `doctest` itself overlooks functions wrapped by `jax.jit` or by a type checker.
"""

import ast
import doctest
import importlib
import pathlib

import pytest

from tests.imports import ROOT

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def find_examples(root: pathlib.Path) -> list[tuple[str, str, int, str]]:
    """(module, object, line, docstring) of every docstring under ``root`` that holds an example."""
    found = []
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and ">>>" in docstring:
                    found.append((module, getattr(node, "name", ""), getattr(node, "lineno", 1), docstring))
    return found


EXAMPLES = find_examples(ROOT / "quest_jax")


@pytest.mark.parametrize(
    ("module", "name", "line", "docstring"), EXAMPLES, ids=[f"{module}:{name}" for module, name, *_ in EXAMPLES]
)
def test_example(module, name, line, docstring):
    names = dict(vars(importlib.import_module(module)))
    test = doctest.DocTestParser().get_doctest(docstring, names, f"{module}:{name}", module, line)
    report: list[str] = []
    outcome = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
    assert outcome.failed == 0, "".join(report)


def test_examples_are_found_under_decorators(tmp_path):
    source = '"""One.\n\n>>> 1\n1\n"""\n@wrap\ndef f():\n    """Two.\n\n    >>> f()\n    """\ndef g():\n    """No."""\n'
    (tmp_path / "a.py").write_text(source)
    assert [(name, line) for _, name, line, _ in find_examples(tmp_path)] == [("", 1), ("f", 7)]

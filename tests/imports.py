"""Reads the imports of Python files without running them: the ground of the tests about layout and packaging."""

import ast
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Import(NamedTuple):
    """One imported dotted name.

    Attributes:
      file: path relative to the tree that was read.
      line: line number.
      name: absolute dotted name; ``from a import b`` gives ``a.b``.
      lazy: inside a function, so that importing the file does not need it.
    """

    file: pathlib.PurePath
    line: int
    name: str
    lazy: bool

    @property
    def module(self) -> str:
        """Dotted name of the importing file: ``quest_jax/models/rope.py`` is ``quest_jax.models.rope``."""
        parts = self.file.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def __str__(self):
        return f"{self.file}:{self.line} imports {self.name}"


def read_imports(root: pathlib.Path, *folders: str) -> Iterator[Import]:
    """Every import in the Python files of ``folders`` under ``root``, those inside functions too.

    An attribute such as ``flax.linen`` after ``import flax`` counts as an import of that name. Symlinks to folders are
    not followed, so a file is read under one name only.
    """
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root)
            tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
            for node, lazy in _walk(tree, lazy=False):
                for name in _names(node, file):
                    yield Import(file, getattr(node, "lineno", 0), name, lazy)


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, lazy
        yield from _walk(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def _names(node: ast.AST, file: pathlib.PurePath) -> Iterator[str]:
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = module or ""
            if level:
                package = file.parent.parts[: len(file.parent.parts) - level + 1]
                base = ".".join((*package, *([module] if module else [])))
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Attribute(value=ast.Name(id="flax"), attr=attr):
            yield f"flax.{attr}"

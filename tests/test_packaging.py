"""What the wheel holds and what it asks of an environment, read from pyproject.toml and the tree."""

import importlib
import importlib.metadata
import pathlib
import re
import sys
import tomllib

import pytest

from tests.imports import ROOT, read_imports

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PACKAGE = ROOT / "quest_jax"


def normalize(requirement: str) -> str:
    """Name of the distribution a requirement asks for, in its normal spelling (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def undeclared_imports(root: pathlib.Path) -> list[str]:
    """Imports of the library that no dependency provides; at module level only the core ones count.

    The command line is the exception: its files may need its own extra to be imported.
    """
    core = {normalize(requirement) for requirement in PROJECT["dependencies"]}
    extras = {name: set(map(normalize, found)) for name, found in PROJECT["optional-dependencies"].items()}
    optional = core.union(*(found for name, found in extras.items() if name not in ("bench", "dev", "parity")))
    providers = importlib.metadata.packages_distributions()
    found = []
    for item in read_imports(root, "quest_jax"):
        top = item.name.split(".")[0]
        if top in sys.stdlib_module_names or top == "quest_jax":
            continue
        allowed = optional if item.lazy else core
        if "cli" in item.file.parts:
            allowed = core | extras["cli"]
        if not {normalize(name) for name in providers.get(top, [top])} & allowed:
            found.append(f"{item}, which none of {sorted(allowed)} provides")
    return found


def test_every_import_is_a_declared_dependency():
    assert undeclared_imports(ROOT) == []


@pytest.mark.parametrize(
    "source",
    ["import torch", "import gguf", "import pytest", "def late():\n  import transformers", "from scipy import special"],
)
def test_a_planted_import_is_found(tmp_path, source):
    (tmp_path / "quest_jax").mkdir()
    allowed = "import jax\nimport orbax.checkpoint\ndef late():\n  import gguf"
    (tmp_path / "quest_jax" / "weights.py").write_text(allowed)
    assert undeclared_imports(tmp_path) == []
    (tmp_path / "quest_jax" / "sampling.py").write_text(source)
    assert len(undeclared_imports(tmp_path)) == 1


def test_core_dependencies_have_a_lower_bound_and_nothing_else():
    """.ci/run installs exactly these bounds as its oldest environment."""
    for requirement in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["gguf"]:
        assert re.fullmatch(r"[A-Za-z0-9_-]+>=\d+(\.\d+)+", requirement), requirement


def test_every_file_of_the_package_is_shipped():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["quest_jax"]
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        inside = path.relative_to(PACKAGE)
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{inside.parent} needs an __init__.py, or no wheel has it"
        else:
            assert any(inside.match(pattern) for pattern in patterns), f"{inside} matches no pattern of package-data"


def test_console_script_exists():
    module, function = PROJECT["scripts"]["quest-jax"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("name", ["models", "pallas_kernels"])
def test_top_level_alias_is_only_an_alias(name):
    """A relative symlink; a zip may lose it and Windows may write it as a text file, but it never is a second copy."""
    alias, target = ROOT / name, f"quest_jax/{name}"
    if alias.is_symlink():
        assert alias.readlink().as_posix() == target
    else:
        assert not alias.is_dir()


def test_changelog_has_a_place_for_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings[0] in ("Unreleased", PROJECT["version"])

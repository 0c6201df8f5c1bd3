"""Imports run downwards only, and importing the library does nothing but import."""

import pathlib
import subprocess
import sys

import pytest

from tests.imports import ROOT, read_imports

# From the ground up. A module imports from lower rows and from its own component, never from its own row or above.
FLOORS = (
    {"pallas_kernels", "models"},
    {"memory", "params", "progress", "tables"},
    {"cache", "sampling", "weights"},
    {"compilation", "tokenizer"},
    {"policies"},
    {"reads"},
    {"attention", "inputs", "temporaries"},
    {"plan"},
    {"decode"},
    {"compaction", "stats"},
    {"generate"},
    {"quest_jax"},  # the public face, quest_jax/__init__.py
    {"evals", "bench"},
    {"demo", "doctor", "models_table"},
    {"cli"},
)
LEVEL = {component: level for level, row in enumerate(FLOORS) for component in row}
FOLDERS = ("quest_jax", "tests", "colab", "examples")


def component_of(root: pathlib.Path, name: str) -> str:
    """``quest_jax.models.rope`` belongs to ``models``; ``quest_jax.load``, not being a module, to the public face."""
    first = name.split(".")[1:2]
    if first and ((root / "quest_jax" / first[0]).is_dir() or (root / "quest_jax" / f"{first[0]}.py").is_file()):
        return first[0]
    return "quest_jax"


def find_violations(root: pathlib.Path) -> list[str]:
    """Every import under ``root`` that breaks a rule, with file, line and reason."""
    found = []
    for item in read_imports(root, *FOLDERS):
        top, inside = item.name.split(".")[0], item.file.parts[0] == "quest_jax"
        if top in ("models", "pallas_kernels"):
            found.append(f"{item}: the symlink would be a second module; import quest_jax.{item.name}")
        if inside and f"{item.name}.".startswith("flax.nnx."):
            found.append(f"{item}: decoders are written in Linen")
        if inside and f"{item.name}.".startswith("flax.linen.") and item.file.as_posix() != "quest_jax/models/llama.py":
            found.append(f"{item}: only quest_jax/models/llama.py may")
        if inside and top == "quest_jax":
            source, target = component_of(root, item.module), component_of(root, item.name)
            if missing := {source, target} - LEVEL.keys():
                found.append(f"{item}: {' and '.join(missing)} has no floor; give it a row in FLOORS")
            elif source != target and LEVEL[target] >= LEVEL[source]:
                found.append(f"{item}: {source} is on floor {LEVEL[source]}, {target} on floor {LEVEL[target]}")
    return found


def test_imports_run_downwards():
    assert find_violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("quest_jax/models/llama.py", "from quest_jax.pallas_kernels import dispatch", "on floor"),
        ("quest_jax/pallas_kernels/append/op.py", "import quest_jax.models.rope", "on floor"),
        ("quest_jax/pallas_kernels/append/op.py", "from ...models import rope", "on floor"),
        ("quest_jax/policies/quest.py", "from quest_jax import attention", "on floor"),
        ("quest_jax/cache.py", "def late():\n  from quest_jax.generate import generate", "on floor"),
        ("quest_jax/sampling.py", "from quest_jax import load", "on floor"),
        ("quest_jax/sampling.py", "import quest_jax", "on floor"),
        ("quest_jax/attic.py", "import quest_jax.params", "has no floor"),
        ("quest_jax/cache.py", "import flax.linen as nn", "only quest_jax/models/llama.py may"),
        ("quest_jax/cache.py", "from flax import linen", "only quest_jax/models/llama.py may"),
        ("quest_jax/cache.py", "from flax.linen import Module", "only quest_jax/models/llama.py may"),
        ("quest_jax/cache.py", "import flax\nflax.linen.Dense(1)", "only quest_jax/models/llama.py may"),
        ("quest_jax/models/llama.py", "from flax import nnx", "written in Linen"),
        ("tests/models/test_rope.py", "import models.rope", "second module"),
        ("quest_jax/generate.py", "from pallas_kernels.append import op", "second module"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, source, found):
    for name in ("params", "cache", "sampling", "attention", "generate"):
        _write(tmp_path / "quest_jax" / f"{name}.py", "import jax\n")
    for name in ("models/rope.py", "pallas_kernels/dispatch.py", "policies/quest.py"):
        _write(tmp_path / "quest_jax" / name, "import flax.struct\n")
    assert find_violations(tmp_path) == []
    _write(tmp_path / file, source)
    violations = find_violations(tmp_path)
    assert len(violations) >= 1
    assert all(file in text and found in text for text in violations)


def _write(path: pathlib.Path, text: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# jax refuses to change the number of CPU devices once a backend exists: the public way to know that none does.
WATCHED = """
import logging, os, sys
import jax
import jax.experimental.pallas.mosaic_gpu  # sets MOSAIC_GPU_CUDA_ROOT, which is JAX's own doing
environment, config, argv = dict(os.environ), dict(jax.config.values), list(sys.argv)
handlers = list(logging.root.handlers)
{statement}
assert dict(os.environ) == environment, "environment changed"
changed = {{name for name in config if jax.config.values[name] != config[name]}}
assert not changed, f"jax config changed: {{changed}}"
assert (logging.root.handlers, sys.argv) == (handlers, argv), "process changed"
jax.config.update("jax_num_cpu_devices", 3)
assert jax.device_count() == 3, "a backend was initialised"
"""


def run_watched(statement: str) -> subprocess.CompletedProcess:
    code = WATCHED.format(statement=statement)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_importing_has_no_side_effects():
    result = run_watched("import quest_jax")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "statement",
    [
        "jax.devices()",
        "jax.numpy.zeros(1)",
        "jax.config.update('jax_enable_x64', True)",
        "os.environ['QUEST_JAX'] = '1'",
        "logging.basicConfig()",
    ],
)
def test_a_planted_side_effect_is_found(statement):
    assert run_watched(statement).returncode == 1


def test_importing_needs_no_extra():
    """``pip install quest-jax`` without extras is enough to import every public name."""
    blocked = "for name in ('gguf', 'tyro', 'matplotlib', 'torch', 'transformers', 'chex'): sys.modules[name] = None"
    result = run_watched(f"{blocked}\nimport quest_jax\nfor name in quest_jax.__all__: getattr(quest_jax, name)")
    assert result.returncode == 0, result.stderr

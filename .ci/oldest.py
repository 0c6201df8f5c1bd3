"""Prints the oldest supported versions as pip constraints: every lower bound of pyproject.toml, pinned.

The linters are left out: they do not run in the oldest environment.
"""

import pathlib
import re
import tomllib

project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["gguf"] + extras["cli"] + extras["dev"]:
    bound = re.fullmatch(r"([A-Za-z0-9_-]+)>=([\d.]+)", requirement)
    if bound and bound[1] not in ("build", "pyright", "ruff"):
        print(f"{bound[1]}=={bound[2]}")

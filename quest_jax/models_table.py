"""The families of models, and what was checked for each: the table of ``quest-jax models`` and of the README."""

import importlib.resources
import json
from typing import Any

from quest_jax.weights.families import FAMILIES

FILE = "models.json"
"""In ``quest_jax/data``: written by ``python -m tests.check_models`` from what it computes."""

COLUMNS = ("family", "architecture", "checkpoints compared", "largest difference of a logit")


def read_checks() -> dict[str, Any]:
    """Returns, by ``model_type``, the tiny checkpoints compared with transformers, and by how much logits differed."""
    text = importlib.resources.files("quest_jax").joinpath("data", FILE).read_text(encoding="utf-8")
    return json.loads(text)["families"]


def rows() -> list[tuple[str, ...]]:
    """One row a family, of ``COLUMNS``."""
    checks = read_checks()
    return [
        (
            family.name,
            family.architecture,
            ", ".join(checks[kind]["checkpoints"]) if kind in checks else "none",
            f"{checks[kind]['largest_difference']:.0e}" if kind in checks else "",
        )
        for kind, family in FAMILIES.items()
    ]


def markdown() -> str:
    """The table as it stands in the README."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((name, f"`{kind}`", *rest) for name, kind, *rest in rows())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"

"""Policies of the methods that a command names."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quest_jax import Policy

# Rows of every table: what reads all, and what any method has to be held against.
ALWAYS = {
    "decode": ("full", "random", "sink_window", "oracle"),
    "prefill": ("full", "random_chunk", "sink_window_chunk", "oracle_chunk"),
}
DEFAULT = {"decode": "quest", "prefill": "quoka_each"}


def policies_for(
    names: Sequence[str], budgets: Sequence[int], page_size: int, basis: pathlib.Path | None, phase: str = "decode"
) -> "dict[str, Policy]":
    """The policies of several methods, those of ``ALWAYS`` first; ``all`` stands for every one of the phase.

    Raises:
      ValueError: as :func:`policies_of`, or a basis that none of them takes.
    """
    from quest_jax.inputs import as_size
    from quest_jax.policies import registry

    as_size("--page-size", page_size)
    for budget in budgets:
        as_size("--budgets", budget)
    if "all" in names:
        every = [name for name, method in registry.methods().items() if phase in method.phases]
        names = [one for name in names for one in (every if name == "all" else [name])]
    found: dict[str, Policy] = {}
    for name in dict.fromkeys((*ALWAYS[phase], *names)):
        found |= policies_of(name, budgets, page_size, basis, phase)
    if basis is not None and not any(hasattr(policy, "basis") for policy in found.values()):
        raise ValueError(f"--basis: expected a method that ranks by a basis, such as loki, got {', '.join(names)}.")
    return found


def policies_of(
    name: str, budgets: Sequence[int], page_size: int, basis: pathlib.Path | None = None, phase: str = "decode"
) -> "dict[str, Policy]":
    """The policies of one method, by its name and the budget; ``full`` has none.

    Args:
      name: of the registry.
      budgets: tokens.
      page_size: tokens of a page.
      basis: file for a method that ranks by a basis.
      phase: ``decode`` or ``prefill``, in which it must serve.

    Raises:
      ValueError: no such method, none for this phase, a budget it cannot work with, or a file that is no basis.
    """
    from quest_jax.policies import registry
    from quest_jax.policies.basis import load_basis

    method, found = registry.find(name), {}
    if phase not in method.phases:
        other = "reads prompts only" if phase == "decode" else "decodes only"
        raise ValueError(f"methods: expected those that {phase}, got {name!r}, which {other}.")
    if name == "full":
        return {"full": method.make(0)}
    for budget in budgets:
        policy = method.make(budget)
        if basis is not None and "basis" in {field.name for field in dataclasses.fields(policy)}:
            policy = dataclasses.replace(policy, basis=load_basis(basis))
        found[f"{name} {budget}"] = policy
        policy.check(page_size)
    return found

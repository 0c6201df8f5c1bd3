"""All tasks there are."""

from types import MappingProxyType

from quest_jax.evals.tasks import (
    facts,
    frequent_words,
    longbench,
    niah,
    passkey,
    ruler_files,
    variable_tracking,
)
from quest_jax.evals.tasks.task import Task

_FAMILIES = (passkey, facts, niah, variable_tracking, frequent_words, longbench, ruler_files)
TASKS = MappingProxyType({task.name: task for family in _FAMILIES for task in family.TASKS})
"""Every task by its name."""


def find(name: str) -> Task:
    """Returns the task of this name.

    Raises:
      ValueError: there is none; the message names them all.
    """
    if name not in TASKS:
        raise ValueError(f"tasks: expected one of {', '.join(TASKS)}, got {name!r}.")
    return TASKS[name]

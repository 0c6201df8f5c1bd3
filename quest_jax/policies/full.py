"""Ordinary attention: the row that every table begins with."""

from quest_jax.policies.base import Dense
from quest_jax.policies.method import Method

METHODS = (Method("full", lambda budget: Dense(), ("prefill", "decode"), "1", "the baseline: everything is read"),)

"""Where a decode step's time goes: the step again with one part after the other taken out."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Table

from quest_jax.attention import decode_attention, extend
from quest_jax.bench.sizes import SMOLLM2
from quest_jax.bench.timing import time_interleaved
from quest_jax.decode import prefill, replace_policy
from quest_jax.models import llama
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.params import random_params
from quest_jax.policies.base import Policy, Selection
from quest_jax.policies.quest import Quest


class Part(NamedTuple):
    """What of a decode step was taken out, and what it then took less.

    Attributes:
      name: of the part.
      seconds: by which the step got shorter; differences of medians, so below some percent of the step they are noise.
    """

    name: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class LastPages(Policy):
    """As many pages as Quest reads, the last ones: attention without a choice."""

    budget: int
    dense_layers: int

    def is_dense(self, layer, view):
        """The layers that Quest leaves dense."""
        del view
        return layer < self.dense_layers

    def choose(self, q, view, implementation):
        """The end of each row."""
        del q, implementation
        count = self.budget // view.page_size
        used = -(-view.lengths // view.page_size)
        pages = jnp.maximum(used[:, None, None] - count, 0) + jnp.arange(count)
        lists = pool_shape(view.kv).kv_heads
        counts = jnp.minimum(used, count)[:, None]
        return Selection(
            jnp.broadcast_to(pages, (len(used), lists, count)).astype(jnp.int32),
            jnp.broadcast_to(counts, (len(used), lists)).astype(jnp.int32),
        )


def run(length: int, budget: int, rounds: int) -> tuple[float, list[Part]]:
    """Takes a SmolLM2-shaped model's decode step apart, random weights, float32, batch 1.

    Args:
      length: tokens in the cache.
      budget: tokens that Quest reads.
      rounds: timed runs of each variant, interleaved.

    Returns:
      seconds of the whole step, and its parts, the most expensive first.
    """
    params = random_params(SMOLLM2)
    quest = Quest(budget)

    def skip(layer, q, k, v, state):
        del layer, k, v
        return q, state

    def only_sparse(layer, q, k, v, state):
        return (skip if layer < quest.dense_layers else decode_attention)(layer, q, k, v, state)

    def variant(policy, attend=decode_attention, logits=True):
        state = prefill(params, [[1] * 16], capacity=length + 64)
        # The time does not depend on what the cache holds, so the rest of the context is declared, not computed.
        cache = state.attention.cache.replace(lengths=jnp.array([length], jnp.int32))
        held = [replace_policy(state.replace(attention=state.attention.replace(cache=cache)), policy=policy)]
        step = jax.jit(functools.partial(_step, attend, logits), donate_argnums=1)

        def call():
            held[0] = step(params, held[0])
            return held[0].logits

        return call

    calls: dict[str, Callable[[], object]] = {
        "step": variant(quest),
        "choosing": variant(LastPages(budget, quest.dense_layers)),
        "dense layers": variant(quest, only_sparse),
        "attention": variant(quest, skip),
        "logits": variant(quest, logits=False),
        "all but the layers' weights": variant(quest, skip, logits=False),
    }
    seconds = {name: timing.median for name, timing in time_interleaved(calls, rounds).items()}
    step = seconds["step"]
    less = {name: step - value for name, value in seconds.items()}
    parts = [
        Part("weights of the layers", seconds["all but the layers' weights"]),
        Part("logits (the unembedding's weights)", less["logits"]),
        Part(f"attention of the {quest.dense_layers} dense layers", less["dense layers"]),
        Part("choosing pages (scores, top-k)", less["choosing"]),
        Part("append, and attention to the chosen pages", less["attention"] - less["dense layers"] - less["choosing"]),
    ]
    return step, sorted(parts, key=lambda part: -part.seconds)


def table(step: float, parts: list[Part], length: int, budget: int) -> Table:
    """Lays the parts out."""
    shown = Table(
        title=f"where a decode step of {step * 1e3:.1f} ms goes, SmolLM2-135M shape, {length} tokens, Quest {budget}",
        title_justify="left",
    )
    for column in ("part", "time", "share"):
        shown.add_column(column, justify="left" if column == "part" else "right")
    for part in parts:
        shown.add_row(part.name, f"{part.seconds * 1e3:.1f} ms", f"{part.seconds / step:.0%}")
    return shown


def _step(attend, logits, params, state):
    token = jnp.argmax(state.logits, axis=-1).astype(jnp.int32)
    attention = extend(state.attention, jnp.ones_like(token))
    positions = attention.starts[:, None]
    hidden, attention = llama.apply(params.weights, params.config, token[:, None], positions, attend, attention)
    new = llama.project_logits(params.weights, params.config, hidden[:, 0]) if logits else state.logits + hidden.sum()
    return state.replace(attention=attention, logits=new)

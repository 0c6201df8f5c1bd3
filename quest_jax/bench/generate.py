"""End to end: milliseconds a token and to the first token of a real model, dense, by Quest and QuoKA, by llama.cpp."""

import functools
import importlib.resources
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quest_jax.bench.decode import step_calls
from quest_jax.bench.llama_cpp import LlamaCpp
from quest_jax.bench.prefill import prompt_operations, time_prompts
from quest_jax.bench.rows import Method, Row, make_rows
from quest_jax.bench.sizes import dense_bytes, shape_of, step_bytes
from quest_jax.bench.timing import Timing, time_interleaved, timed
from quest_jax.decode import prefill
from quest_jax.params import Params
from quest_jax.policies.base import Dense
from quest_jax.policies.quest import Quest
from quest_jax.policies.quoka import QuoKA
from quest_jax.tokenizer import Tokenizer

NEW_TOKENS = 8
"""Tokens of one timed run."""


class Found(NamedTuple):
    """Rows of one context: a decoded token, and the first one (empty where it was not timed)."""

    tokens: list[Row]
    first: list[Row]


def make_prompt(tokenizer: Tokenizer, n_tokens: int) -> list[int]:
    """The shipped prose, from its start as often as it takes: what the text says does not change the time."""
    text = importlib.resources.files("quest_jax").joinpath("data", "moby_dick.txt").read_text(encoding="ascii")
    ids = tokenizer.encode(text)
    return (ids * -(-n_tokens // len(ids)))[:n_tokens]


def time_model(
    name: str,
    params: Params,
    prompt: Sequence[int],
    budget: int,
    prefill_budget: int,
    *,
    rounds: int,
    prompt_rounds: int,
    gguf: pathlib.Path | None,
    progress: Callable[[str], None],
) -> Found:
    """Times one context.

    A token is what :func:`quest_jax.generate` does for it after the prompt: drawn, and run through the model, in a
    compiled loop. The prompt of the timed tokens was read by QuoKA, which costs a decode step nothing. Ratios refer to
    our own dense attention, of the same weights; llama.cpp has its own, and reads its prompt once, after the others.

    Args:
      name: of the model, for the rows.
      params: the model.
      prompt: token ids.
      budget: of Quest.
      prefill_budget: of QuoKA.
      rounds: timed runs of each, ``NEW_TOKENS`` tokens a run.
      prompt_rounds: of the time to the first token; 0 leaves it out.
      gguf: file for llama.cpp, None to leave that out.
      progress: told what is done.
    """
    length, dtype = len(prompt), params.dtype.name
    quoka = QuoKA(prefill_budget, group="each")
    first: dict[str, Timing] = {}
    if prompt_rounds:
        first = time_prompts(params, prompt, quoka, prompt_rounds, progress)
    progress(f"decoding after {length} tokens")
    # Where the budget holds the prompt QuoKA is dense attention, and compiles more.
    policy = quoka if length > prefill_budget + quoka.chunk else Dense()
    state = prefill(
        params, [list(prompt)], capacity=length + NEW_TOKENS, prefill_policy=policy, eos_token_ids=()
    )  # fmt: skip
    calls: dict[str, Callable[[], object]] = {
        **step_calls(params, state, length, {"dense": Dense(), "quest": Quest(budget)}, NEW_TOKENS)
    }
    del state
    if gguf is not None:
        progress(f"llama.cpp reads {length} tokens")
        other = LlamaCpp(gguf, prompt, NEW_TOKENS)
        seconds, cpu = timed(other.read_prompt)
        if prompt_rounds:
            first["llama.cpp"] = Timing(seconds, seconds, seconds, cpu, None)
        calls["llama.cpp"] = functools.partial(other.decode, NEW_TOKENS)
    dense, ours = prompt_operations(params, length, quoka)
    tokens = {
        "dense": Method("dense", None, step_bytes(params, length, None)),
        "quest": Method(f"Quest {budget}", budget, step_bytes(params, length, budget)),
    }
    prompts = {
        "dense": Method("dense", None, dense),
        "quoka": Method(f"QuoKA {prefill_budget}", prefill_budget, ours),
    }
    if gguf is not None:
        # Its keys and values are float16.
        kv = params.config.n_layers * dense_bytes(shape_of(params.config), length, "float16")
        tokens["llama.cpp"] = Method("llama.cpp", None, gguf.stat().st_size + kv)
        prompts["llama.cpp"] = Method("llama.cpp", None, dense)
    timings = time_interleaved(calls, rounds)
    return Found(
        make_rows(f"{name} token", length, dtype, timings, tokens, calls=NEW_TOKENS, yardstick=("dense",)),
        make_rows(f"{name} first token", length, dtype, first, prompts, operations=True, yardstick=("dense",))
        if first else [],
    )  # fmt: skip

"""The demo: a fact hidden in a long text that is read densely and by QuoKA, asked for densely and by Quest."""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quest_jax import (
    DecodeState,
    Dense,
    Params,
    Policy,
    Quest,
    QuoKA,
    Tokenizer,
    load,
    load_tokenizer,
    prefill,
    replace_policy,
)
from quest_jax.evals.ask import Answers, ask
from quest_jax.evals.needle import Fact, hide, shipped_text
from quest_jax.inputs import as_chunk
from quest_jax.progress import counting, working


class Prefilled(NamedTuple):
    """A document in the cache, and the seconds that reading it and compiling for it took."""

    state: DecodeState
    seconds: float
    compile_seconds: float


class Row(NamedTuple):
    """One line of the table: a policy's answer, what it read, and the seconds that compiling for it took."""

    name: str
    text: str
    found: Answers
    compile_seconds: float


def run_demo(
    model: str,
    fact: Fact,
    *,
    tokens: int,
    depth: float,
    budgets: Sequence[int],
    prefill_budget: int | None,
    max_new_tokens: int,
    page_size: int,
    dtype: str,
    weights: str | None = None,
    out: Console,
    err: Console,
) -> None:
    """Loads the model, asks, and prints the table on ``out``; progress goes to ``err``.

    Args:
      model: as for :func:`quest_jax.load`.
      fact: what to hide and ask for.
      tokens: length of the document.
      depth: where the fact stands in it, 0 start, 1 end.
      budgets: of Quest, in tokens; none means a half, a quarter and an eighth of the document.
      prefill_budget: of QuoKA, in tokens; None is a quarter of the document.
      max_new_tokens: length of the answer.
      page_size: tokens of a page.
      dtype: of weights and cache.
      weights: as for :func:`quest_jax.load`.
      out: for the result.
      err: for progress.

    Raises:
      ValueError: settings that the text, the model or the policy cannot serve, before anything is compiled.
    """
    began = time.perf_counter()
    budgets = budgets or [max(page_size, tokens // part // page_size * page_size) for part in (2, 4, 8)]
    policies: dict[str, Policy] = {"dense": Dense(), **{f"Quest {n}": Quest(budget=n) for n in budgets}}
    quoka = QuoKA(max(page_size, tokens // 4) if prefill_budget is None else prefill_budget, group="each")
    for policy in (*policies.values(), quoka):
        policy.check(page_size)
    with working(f"loading {model}", err):
        tokenizer = load_tokenizer(model)
        params = load(model, dtype=dtype, weights=weights)
    document = tokenizer.encode(hide(fact, shipped_text(), tokens, depth, lambda text: len(tokenizer.encode(text))))
    question = tokenizer.encode(fact.question, add_special_tokens=False)
    room = len(document) + len(question) + max_new_tokens
    if room > params.config.max_positions:
        raise ValueError(
            f"tokens: expected document, question and answer within the model's {params.config.max_positions} "
            f"positions, got {room}; take fewer --tokens."
        )
    out.print(
        f"In {len(document)} tokens of Moby-Dick a fact is hidden, at {depth:.0%}:\n  {escape(fact.statement)}\nThen "
        f"{escape(model)} is asked:\n  {escape(fact.question.strip())}\n"
        "It reads the document once with dense attention and once by QuoKA; each line below then decodes question and "
        "answer token by token, and reads the pages of the cache that its budget of tokens allows (in the first two "
        "layers all).",
        highlight=False,
    )
    read = read_document(params, document, room, page_size, err, Dense())
    rows = [
        ask_policy(params, read.state, tokenizer, question, name, policy, max_new_tokens, err)
        for name, policy in policies.items()
    ]
    name = f"QuoKA {quoka.budget}"
    fast = read_document(params, document, room, page_size, err, quoka)
    rows += [
        ask_policy(params, fast.state, tokenizer, question, f"{name}\n+ {then}", policy, max_new_tokens, err)
        for then, policy in list(policies.items())[:2]
    ]
    out.print(_table(rows, fact))
    for how, one in (("dense", read), (name, fast)):
        out.print(
            f"First token, {how}: {len(document)} tokens read in {one.seconds:.2f} s, "
            f"{1e3 * one.seconds / len(document):.2f} ms per token, after {one.compile_seconds:.1f} s of compiling.",
            highlight=False,
        )
    out.print(
        "(Attention is the smaller part of reading so short a text with so small a model; quest-jax bench prefill "
        "shows what QuoKA saves in longer ones.)\n"
        f"Pages of {page_size} tokens, counted over layers and KV heads; bytes include the metadata that selects them. "
        f"The answers are what the model said, right or wrong. {time.perf_counter() - began:.0f} s in all, {dtype}"
        f"{f', {weights} weights' if weights else ''}, on "
        f"{escape(jax.devices()[0].device_kind)} ({os.cpu_count()} cores).",
        highlight=False,
    )


def read_document(
    params: Params, document: list[int], room: int, page_size: int, err: Console, policy: Policy
) -> Prefilled:
    """Prefills ``document`` into a cache for ``room`` tokens; compiling is told apart by reading the start twice."""
    options = {"capacity": room, "page_size": page_size, "eos_token_ids": (), "prefill_policy": policy}
    chunk = as_chunk(None, policy)
    with working("compiling prefill", err):
        start = time.perf_counter()
        jax.block_until_ready(prefill(params, [document[:chunk]], **options).logits)
        first = time.perf_counter() - start
    with counting("reading the document", err) as advance:
        ends: list[float] = []

        def progress(done: int, total: int) -> None:
            ends.append(time.perf_counter())
            advance(done, total)

        start = time.perf_counter()
        state = prefill(params, [document], progress=progress, **options)
    return Prefilled(state, ends[-1] - start, max(0.0, first - (ends[0] - start)))


def ask_policy(
    params: Params,
    state: DecodeState,
    tokenizer: Tokenizer,
    question: list[int],
    name: str,
    policy: Policy,
    max_new_tokens: int,
    err: Console,
) -> Row:
    """Asks under one policy; the answer ends before an eos."""
    state = replace_policy(state, policy=policy)
    with working(f"compiling {name}", err):
        first = ask(params, state, [question[:1]], max_new_tokens)
    with working(f"asking {name}", err):
        found = ask(params, state, [question], max_new_tokens)
    compile_seconds = max(0.0, first.seconds - first.steps * found.seconds / found.steps)
    ids = found.tokens[0].tolist()
    ends = [ids.index(eos) for eos in params.config.eos_token_ids if eos in ids]
    return Row(name, tokenizer.decode(ids[: min(ends, default=None)]), found, compile_seconds)


def _table(rows: Sequence[Row], fact: Fact) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("attention", no_wrap=True)
    table.add_column("answer", overflow="fold", min_width=13)
    table.add_column("right")
    for heading in ("pages\n/token", "MB\n/token", "of\ndense", "ms\n/token", "com-\npile"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        stats, steps = row.found.stats, row.found.steps
        table.add_row(
            row.name,
            escape("".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in row.text)),
            "[green]yes[/green]" if fact.found_in(row.text) else "[red]no[/red]",
            f"{stats.pages_read.sum() / steps:.0f}",
            f"{stats.bytes_read().sum() / steps / 1e6:.1f}",
            f"{stats.share_read():.0%}",
            f"{1e3 * row.found.seconds / steps:.0f}",
            f"{row.compile_seconds:.{1 if row.compile_seconds < 9.95 else 0}f} s",
        )
    return table

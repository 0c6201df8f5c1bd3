"""Which queries of a chunk should choose: QuoKA's against others, by what they find of a fact that is asked for.

The last chunk of a prompt holds the question, among prose. Of the groups of heads in which the last token looks at the
answer most, how much of the answer do the keys hold that each rule selects?
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from quest_jax import Params, QuoKA, Tokenizer
from quest_jax.evals.capture import capture, listed, probabilities
from quest_jax.evals.mass import FIRST_LAYER
from quest_jax.evals.needle import Fact, shipped_text, split_sentences
from quest_jax.pallas_kernels.pages import pool_shape
from quest_jax.policies.quoka import average_picks, mean_cosine

# Groups of heads that are looked at in a prompt: those that retrieve.
N_GROUPS = 8
RULES = ("far", "random", "near", "strided", "last", "all")
FACTS = (
    Fact("password of the vault", "accordion"),
    Fact("name of the blue parrot", "Marguerite"),
    Fact("code word of the expedition", "saxophone"),
)


class Prompt(NamedTuple):
    """A question about one of several facts in prose: its token ids, and where the asked one's answer stands."""

    ids: list[int]
    answer: list[int]


def make_prompts(tokenizer: Tokenizer, n_tokens: int, skip: int = 0, chunk: int = 128) -> list[Prompt]:
    """Hides all facts in the same prose, at a quarter, a half and three quarters, and asks for each.

    Args:
      tokenizer: of the model.
      n_tokens: most tokens of a prompt, question included.
      skip: sentences of the shipped text to leave out at its beginning.
      chunk: tokens at the end that hold the question, and no answer.

    Raises:
      ValueError: too few tokens, or more than the text has.
    """
    sentences = split_sentences(shipped_text())[skip:]
    prompts = []
    for asked in FACTS:

        def text(n_sentences: int, asked: Fact = asked) -> str:
            cuts = [round(n_sentences * part / 4) for part in range(5)]
            parts = [" ".join(sentences[a:b]) for a, b in zip(cuts, cuts[1:], strict=False)]
            told = [fact.statement for fact in FACTS]
            return " ".join([parts[0], told[0], parts[1], told[1], parts[2], told[2], parts[3]]) + asked.question

        low, high = 0, len(sentences)
        longest = len(tokenizer.encode(text(high)))
        # The last fact stands at three quarters: a quarter must be longer than the chunk.
        if not 5 * chunk <= n_tokens <= longest:
            raise ValueError(
                f"tokens: expected {5 * chunk} to {longest} after the first {skip} sentences of the shipped text, got "
                f"{n_tokens}; ask for a length in that range, or fewer texts."
            )
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(tokenizer.encode(text(middle))) <= n_tokens else (low, middle)
        ids = tokenizer.encode(text(low))
        answer = _where(tokenizer, ids, asked.answer)
        if not answer or answer[-1] >= len(ids) - chunk:
            raise ValueError(f"tokens: of {n_tokens} the last {chunk} would hold an answer; ask for more.")
        prompts.append(Prompt(ids, answer))
    return prompts


def run(
    params: Params,
    prompts: Sequence[Prompt],
    budgets: Sequence[int],
    *,
    n_queries: int = 16,
    chunk: int = 128,
    page_size: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, dict[int, float]]:
    """Measures every rule at every budget.

    Args:
      params: of :func:`quest_jax.load`.
      prompts: of :func:`make_prompts`.
      budgets: tokens.
      n_queries: of the chunk's queries that choose.
      chunk: the last tokens of each prompt, which are one step.
      page_size: tokens of a page.
      seed: of the rule that picks at random.
      progress: called with (prompts done, prompts in all).

    Returns:
      for every rule and budget the share of the answer's tokens that is selected, over the retrieving groups of all
      prompts.

    Raises:
      ValueError: a budget that holds all that stands before the last chunk.
    """
    shortest = min(len(prompt.ids) for prompt in prompts) - chunk
    if max(budgets) >= shortest:
        raise ValueError(
            f"budgets: expected less than the {shortest} tokens before the last chunk, got {max(budgets)}."
        )
    found: dict[str, dict[int, list[float]]] = {rule: {budget: [] for budget in budgets} for rule in RULES}
    for done, prompt in enumerate(prompts):
        seen = capture(params, prompt.ids, page_size)
        start = seen.n_tokens - chunk
        answer = jnp.asarray(prompt.answer)
        groups = _retrieving(params, seen, answer)
        for layer, group in groups:
            view, q = seen.view(layer, start, seen.n_tokens), seen.chunk(layer, start, seen.n_tokens)
            for rule in RULES:
                key = jax.random.fold_in(jax.random.key(seed), done * 1000 + layer)
                for budget in budgets:
                    marks = _marks(rule, QuoKA(budget, n_queries, chunk, granularity="token"), q, view, key)
                    found[rule][budget].append(float(marks[group, answer].mean()))
        if progress is not None:
            progress(done + 1, len(prompts))
    return {rule: {budget: float(np.mean(x)) for budget, x in by_budget.items()} for rule, by_budget in found.items()}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _marks(rule, policy, q, view, key):
    queries = average_picks(q, _picks(rule, q, policy.n_queries, key), pool_shape(view.kv).kv_heads)
    live = jnp.ones((1, queries.shape[2]), bool)
    return listed(policy.choose_by(queries, live, q.shape[1], view, None), 1, view.norms.shape[-1])


def _picks(rule: str, q: jax.Array, count: int, key: jax.Array) -> jax.Array:
    """Positions in the chunk, ``[1, H, R]``."""
    tokens, heads = q.shape[1], q.shape[2]
    cosine = mean_cosine(q, jnp.array([tokens]))
    if rule in ("far", "near"):
        return jax.lax.top_k(-cosine if rule == "far" else cosine, count)[1]
    if rule == "random":
        drawn = jax.vmap(lambda k: jax.random.permutation(k, tokens)[:count])(jax.random.split(key, heads))
        return drawn[None]
    same = {
        "strided": jnp.arange(count) * tokens // count,
        "last": jnp.arange(tokens - count, tokens),
        "all": jnp.arange(tokens),
    }[rule]
    return jnp.broadcast_to(same, (1, heads, same.shape[0]))


def _retrieving(params, seen, answer) -> list[tuple[int, int]]:
    """The (layer, KV head) pairs whose heads look at the answer most from the last token."""
    weight = {}
    for layer in range(FIRST_LAYER, params.config.n_layers):
        view, last = seen.view(layer, seen.n_tokens - 1, seen.n_tokens), seen.n_tokens - 1
        attention = probabilities(seen.chunk(layer, last, seen.n_tokens), view)[:, 0]
        by_group = attention[:, answer].sum(axis=-1).reshape(params.config.n_kv_heads, -1).mean(axis=-1)
        weight |= {(layer, group): float(x) for group, x in enumerate(by_group)}
    return sorted(weight, key=lambda pair: -weight[pair])[:N_GROUPS]


def _where(tokenizer: Tokenizer, ids: list[int], answer: str) -> list[int]:
    """Positions of the tokens that spell ``answer`` wherever it stands."""
    pieces = [tokenizer.decode([one]) for one in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    text, found, at = "".join(pieces), [], 0
    while (at := text.find(answer, at)) >= 0:
        found += [i for i, end in enumerate(ends) if at < end and end - len(pieces[i]) < at + len(answer)]
        at += len(answer)
    return found


def table(found: Mapping[str, Mapping[int, float]], n_prompts: int) -> Table:
    """Lays the shares out, a line a rule."""
    shown = Table(title=f"share of the asked answer that is selected, {n_prompts} prompts", title_justify="left")
    shown.add_column("queries that choose")
    for budget in next(iter(found.values())):
        shown.add_column(f"budget {budget}", justify="right")
    for rule, by_budget in found.items():
        shown.add_row(rule, *(f"{share:.2f}" for share in by_budget.values()))
    return shown

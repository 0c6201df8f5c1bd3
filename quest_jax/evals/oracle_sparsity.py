"""How many tokens each layer needs: one layer at a time reads its best tokens only, and the text gets less likely.

The experiment behind the figure of Quest (arXiv 2406.10774) on the sparsity of layers: in one layer attention reads the
tokens that get most of it, in the others everything, and the perplexity of a text may rise by at most 0.01. There every
query head has tokens of its own; here the heads of a group share them, as all methods of this library do.

On a short text the perplexity may also fall when a layer reads less, by luck. The divergence of the next-token
distributions from those of the model cannot, so it is measured too.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from rich.table import Table

from quest_jax import DecodeState, LayerView, Params, decode_step, plan, prefill
from quest_jax.policies.base import Sizes
from quest_jax.policies.oracle import Oracle

Measure = Literal["perplexity", "nll", "kl"]
GAP = 0.01  # of the perplexity: what Quest's figure allows
_EVERYTHING = 2**30


@dataclasses.dataclass(frozen=True)
class NumberedOracle(Oracle):
    """The best tokens, as many as a number in the memory of every layer and row says: one program for all of them.

    A row of no more tokens than its number is read whole. Until it is told otherwise every row is.
    """

    budget: int = _EVERYTHING

    def is_dense(self, layer: int, view: LayerView) -> bool:
        """Never: the numbers are known while running only."""
        del layer, view
        return False

    def covers(self, view: LayerView) -> Bool[Array, "B"]:
        """The rows within their number."""
        return view.lengths <= view.memory

    def available(self, view: LayerView) -> Int[Array, "B 1"]:
        """The number, or all there are."""
        return jnp.minimum(view.memory, view.lengths)[:, None]

    def new_memory(self, layer: int, sizes: Sizes) -> Int[Array, "B"]:
        """``[B]``, more than any row has tokens."""
        del layer
        return jnp.full(sizes.rows, _EVERYTHING, jnp.int32)


class Sparsity(NamedTuple):
    """How well the text's last tokens are predicted, means in nats.

    Attributes:
      dense: negative log-likelihood by the model.
      nll: the same ``[layers, budgets]`` with one layer that reads so many tokens per KV head.
      kl: Kullback-Leibler divergence from the model's next-token distributions, likewise.
      budgets: ascending.
      tokens: of the text.
      decoded: how many of its last tokens were predicted.
    """

    dense: float
    nll: Float[np.ndarray, "layers budgets"]
    kl: Float[np.ndarray, "layers budgets"]
    budgets: tuple[int, ...]
    tokens: int
    decoded: int

    def gaps(self, measure: Measure = "perplexity") -> Float[np.ndarray, "layers budgets"]:
        """What perplexity or negative log-likelihood are above those of the model, or the divergence from it."""
        if measure == "kl":
            return self.kl
        return self.nll - self.dense if measure == "nll" else np.exp(self.nll) - np.exp(self.dense)

    def needed(self, gap: float = GAP, measure: Measure = "perplexity") -> list[int]:
        """The smallest budget of every layer whose gap, as that of all larger ones, is at most ``gap``.

        The whole text where none is enough.
        """
        enough = np.logical_and.accumulate(self.gaps(measure)[:, ::-1] <= gap, axis=1).sum(axis=1)
        return [[self.tokens, *self.budgets[::-1]][count] for count in enough.tolist()]


def check(n_tokens: int, decoded: int, budgets: Sequence[int]) -> tuple[int, ...]:
    """Returns the budgets in order; if none are given, the powers of two from 16 on that are less than the text.

    Raises:
      ValueError: a text that is too short, or a budget that is not in it.
    """
    if not 0 < decoded < n_tokens - 1:
        raise ValueError(f"decoded: expected at least 1, of a text with 2 tokens before, got {decoded} of {n_tokens}.")
    found = tuple(sorted({*budgets})) or tuple(2**i for i in range(4, (n_tokens - 1).bit_length()))
    if not found or found[0] < 1 or found[-1] >= n_tokens:
        raise ValueError(f"budgets: expected at least 1 and less than the text of {n_tokens} tokens, got {[*found]}.")
    return found


def run(
    params: Params,
    ids: Sequence[int],
    *,
    budgets: Sequence[int] = (),
    decoded: int = 64,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> Sparsity:
    """Predicts the last tokens of a text through the decode path, with one sparse layer at a time.

    What comes before them is read densely, as a prompt is, once. Then for every layer one row of a batch a budget,
    teacher forced, all by one program. In memory are two caches of as many rows as there are budgets.

    Args:
      params: of :func:`quest_jax.load`.
      ids: the text.
      budgets: tokens that the layer reads per KV head, the current one included; powers of two if none.
      decoded: how many of the last tokens are predicted, after one that is decoded but not predicted.
      page_size: tokens of a page.
      progress: called with (layers done, layers in all).

    Raises:
      ValueError: a text that is too short, or budgets that are not positive integers below its length.
      NotImplementedError: a model with windows, whose layers no policy makes sparse.
      MemoryError: the caches do not fit.
    """
    budgets = check(len(ids), decoded, budgets)
    if params.config.windows:
        raise NotImplementedError(
            "oracle sparsity: expected a model in which every layer sees everything, got one with windows, which its "
            "layers read by no policy; take another model."
        )
    policy, context = NumberedOracle(), ids[: len(ids) - decoded - 1]
    plan(params, 2 * len(budgets), len(ids), policy=policy, page_size=page_size).check()
    state = prefill(params, [[*context]], capacity=len(ids), policy=policy, eos_token_ids=(), page_size=page_size)
    state = _repeated(state, len(budgets))
    last = jnp.asarray(ids[len(context) :], jnp.int32)
    numbers, layers = jnp.asarray(budgets, jnp.int32), params.config.n_layers

    def predict(layer, exact):
        *means, first = _predict(params, state, last, numbers, jnp.int32(layer), exact)
        return *(np.asarray(one, np.float64).mean(axis=0) for one in means), first

    nothing = jnp.zeros((decoded, params.config.vocab_size))
    dense, _, exact = predict(layers, nothing)  # a layer that there is not: none is sparse
    found = []
    for layer in range(layers):
        found.append(predict(layer, exact)[:2])
        if progress is not None:
            progress(layer + 1, layers)
    nll, kl = (np.stack(every) for every in zip(*found, strict=True))
    return Sparsity(float(dense[0]), nll, kl, budgets, len(ids), decoded)


def _repeated(state: DecodeState, rows: int) -> DecodeState:
    """The state of one row, ``rows`` times."""

    def along(axis: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.concatenate([x] * rows, axis=axis), tree)

    attention, cache = state.attention, state.attention.cache
    cache = cache.replace(
        kv=along(1, cache.kv), meta=along(0, cache.meta), lengths=along(0, cache.lengths), memory=along(0, cache.memory)
    )
    attention = attention.replace(cache=cache, starts=along(0, attention.starts), reads=along(1, attention.reads))
    return state.replace(
        attention=attention, logits=along(0, state.logits), done=along(0, state.done), keys=along(0, state.keys)
    )


@jax.jit
def _predict(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "n"],
    budgets: Int[Array, "B"],
    layer: Int[Array, ""],
    exact: Float[Array, "m V"],
) -> tuple[Float[Array, "m B"], Float[Array, "m B"], Float[Array, "m V"]]:
    """Of all tokens but the first, where ``layer`` alone reads ``budgets`` tokens.

    Returns:
      negative log-likelihoods, divergences from ``exact``, which are log-probabilities, and these of the first row.
    """
    cache = state.attention.cache
    assert cache.memory is not None  # of a NumberedOracle
    memory = tuple(jnp.where(layer == i, budgets, before) for i, before in enumerate(cache.memory))
    state = state.replace(attention=state.attention.replace(cache=cache.replace(memory=memory)))

    def step(state, now):
        token, following, exact = now
        # A given token is one that is certain.
        certain = jnp.where(jnp.arange(state.logits.shape[1]) == token, 0.0, -jnp.inf)
        state, _ = decode_step(params, state.replace(logits=jnp.broadcast_to(certain, state.logits.shape)))
        found = jax.nn.log_softmax(state.logits)
        return state, (-found[:, following], (jnp.exp(exact) * (exact - found)).sum(axis=-1), found[0])

    return lax.scan(step, state, (tokens[:-1], tokens[1:], exact))[1]


def about(found: Sparsity) -> str:
    """What was measured, in a line."""
    return (
        f"the last {found.decoded} of {found.tokens} tokens of prose; one layer reads its best tokens per KV head, the "
        f"others all: perplexity {np.exp(found.dense):.3f}"
    )


def table(found: Sparsity, gap: float = GAP) -> Table:
    """Lays the gaps of perplexity out, by layer and budget, and what each layer needs."""
    shown = Table(title=about(found), title_justify="left")
    for heading in ("layer", *map(str, found.budgets), f"tokens for {gap:g}", f"NLL {gap:g}", f"KL {gap:g}"):
        shown.add_column(heading, justify="right")
    needed = zip(*(found.needed(gap, measure) for measure in Measure.__args__), strict=True)
    for layer, (gaps, tokens) in enumerate(zip(found.gaps(), needed, strict=True)):
        shown.add_row(str(layer), *(f"{one:+.3f}" for one in gaps), *map(str, tokens))
    return shown


def as_json(found: Sparsity, gap: float = GAP) -> dict[str, Any]:
    """The same for a file."""
    return {
        "tokens": found.tokens, "decoded": found.decoded, "gap": gap, "budgets": list(found.budgets),
        "nll_dense": found.dense, "nll_by_layer_and_budget": found.nll.round(6).tolist(),
        "kl_by_layer_and_budget": found.kl.round(6).tolist(),
        "needed": {measure: found.needed(gap, measure) for measure in Measure.__args__},
    }  # fmt: skip

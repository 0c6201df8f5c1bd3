"""What quantised weights change in the next-token distributions of a model, on real prose."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from quest_jax import Params, extend, init_attention, prefill_attention, quantize
from quest_jax.models import llama
from quest_jax.models.quant import QuantKind

# Logits are compared for so many tokens at a time: those of a whole text would take more memory than the model.
_TOKENS = 64


class Change(NamedTuple):
    """Of the logits of every position, against those of the weights as loaded.

    Attributes:
      nbytes: of all weights.
      largest, rms: of the differences of single logits.
      kl: Kullback-Leibler divergence from the distribution of the weights as loaded, in nats, mean over positions.
      agreement: share of the positions with the same likeliest token.
      nll: what the mean negative log-likelihood of the text's own next tokens grows by, in nats.
    """

    nbytes: int
    largest: float
    rms: float
    kl: float
    agreement: float
    nll: float


def run(
    params: Params,
    ids: Sequence[int],
    kinds: Sequence[QuantKind] = ("int8", "int4"),
    *,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, dict[str, Change]]:
    """Quantises a model in memory, runs all of them densely over a text, and compares their logits.

    Args:
      params: of :func:`quest_jax.load`, in full precision.
      ids: the text, at least 2 tokens.
      kinds: of quantised weights.
      progress: called with (models done, models in all).

    Returns:
      the mean negative log-likelihood of the text by the weights as loaded, and what each kind changes.

    Raises:
      ValueError: a text of one token, or weights that are quantised already.
    """
    if len(ids) < 2:
        raise ValueError(f"ids: expected a text of at least 2 tokens, so that there is a next one, got {len(ids)}.")
    exact, found = _hidden(params, ids), {}
    nll = 0.0
    for done, kind in enumerate(kinds):
        changed = quantize(params, kind)
        hidden, sums, largest = _hidden(changed, ids), np.zeros(5), 0.0
        for start in range(0, len(ids) - 1, _TOKENS):
            end = min(start + _TOKENS, len(ids) - 1)
            now = slice(start, end)
            following = jnp.asarray(ids[start + 1 : end + 1])
            worst, added = _compare(params, changed, exact[now], hidden[now], following)
            largest, sums = max(largest, float(worst)), sums + np.asarray(added, np.float64)
        square, kl, same, before, after = (sums / (len(ids) - 1)).tolist()
        nbytes, nll = sum(leaf.nbytes for leaf in jax.tree.leaves(changed)), before
        found[kind] = Change(nbytes, largest, square**0.5, kl, same, after - before)
        if progress is not None:
            progress(done + 1, len(kinds))
    return nll, found


def _hidden(params: Params, ids: Sequence[int]) -> Float[Array, "T E"]:
    config, capacity = params.config, -(-len(ids) // 16) * 16
    state = init_attention(
        config.n_layers, config.n_kv_heads, config.head_dim, batch=1, capacity=capacity, dtype=params.dtype
    )
    return _run(params, jnp.asarray(ids, jnp.int32)[None], state)


@jax.jit
def _run(params, tokens, state):
    state = extend(state, jnp.array([tokens.shape[1]]))
    positions = jnp.arange(tokens.shape[1])[None]
    return llama.apply(params.weights, params.config, tokens, positions, prefill_attention, state)[0][0]


@jax.jit
def _compare(exact, changed, hidden_exact, hidden_changed, following):
    """The largest difference, and sums over positions."""
    one, two = (
        llama.project_logits(params.weights, params.config, hidden)
        for params, hidden in ((exact, hidden_exact), (changed, hidden_changed))
    )
    p, q = (jax.nn.log_softmax(logits) for logits in (one, two))
    own = following[:, None]
    sums = (
        jnp.square(one - two).mean(axis=-1),
        (jnp.exp(p) * (p - q)).sum(axis=-1),
        one.argmax(axis=-1) == two.argmax(axis=-1),
        -jnp.take_along_axis(p, own, axis=-1),
        -jnp.take_along_axis(q, own, axis=-1),
    )
    return jnp.abs(one - two).max(), jnp.stack([part.sum().astype(jnp.float32) for part in sums])


def table(params: Params, nll: float, found: dict[str, Change], n_tokens: int) -> Table:
    """Lays the changes out beside the bytes."""
    shown = Table(title=f"quantised weights against {params.dtype}, prose of {n_tokens} tokens", title_justify="left")
    for heading in ("weights", "MB", "largest", "RMS", "KL", "same token", "NLL"):
        shown.add_column(heading, justify="left" if heading == "weights" else "right")
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    shown.add_row(str(params.dtype), f"{nbytes / 1e6:.1f}", "", "", "", "", f"{nll:.4f}")
    for name, one in found.items():
        shown.add_row(
            name, f"{one.nbytes / 1e6:.1f}", f"{one.largest:.3f}", f"{one.rms:.4f}", f"{one.kl:.5f}",
            f"{one.agreement:.2%}", f"{nll + one.nll:.4f}",
        )  # fmt: skip
    return shown

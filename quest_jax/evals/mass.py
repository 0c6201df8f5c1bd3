"""The share of attention that QuoKA keeps on real prose: what is lost is what no budget of later layers brings back."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from quest_jax import Params, QuoKA, Tokenizer
from quest_jax.evals.capture import Captured, capture, listed, mass_kept, output_error, probabilities
from quest_jax.evals.needle import shipped_text
from quest_jax.policies.chunk_lists import ChunkListPolicy

# The first layers spread their attention over everything (Quest leaves them dense), the paper's figures leave them out.
FIRST_LAYER = 2


class Kept(NamedTuple):
    """What a policy keeps of dense attention, by layer (from the third on), chunk and head, ``[layers, chunks, H]``.

    Attributes:
      mass: share of the attention, mean over the chunk's queries.
      error: of the head's output, relative, in the 2-norm over the chunk's queries.
    """

    mass: np.ndarray
    error: np.ndarray


def prose(tokenizer: Tokenizer, n_tokens: int) -> list[int]:
    """The first ``n_tokens`` token ids of the shipped text.

    Raises:
      ValueError: the text is shorter.
    """
    ids = tokenizer.encode(shipped_text())
    if not 0 < n_tokens <= len(ids):
        raise ValueError(f"tokens: expected 1 to {len(ids)} with the shipped text, got {n_tokens}.")
    return ids[:n_tokens]


def starts_of(n_tokens: int, chunk: int, past: int) -> list[int]:
    """First positions of the whole chunks with more than ``past`` tokens before them.

    Raises:
      ValueError: there is none.
    """
    starts = list(range((past // chunk + 1) * chunk, n_tokens - chunk + 1, chunk))
    if not starts:
        raise ValueError(
            f"tokens: expected a text with a chunk of {chunk} after more than {past} tokens, the largest budget, got "
            f"{n_tokens} tokens; take a longer text or smaller budgets."
        )
    return starts


def run(
    params: Params,
    ids: Sequence[int],
    policies: Mapping[str, QuoKA | ChunkListPolicy],
    *,
    chunk: int = 128,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Kept]:
    """Measures what each policy would keep of dense attention, layer by layer; errors do not add up over layers.

    Looked at is every chunk that has more before it than the largest budget, so that all policies leave something out.

    Args:
      params: of :func:`quest_jax.load`.
      ids: the text.
      policies: for prefill, by name.
      chunk: tokens of a chunk.
      page_size: tokens of a page.
      progress: called with (layers done, layers in all).

    Returns:
      what every policy keeps.
    """
    starts = starts_of(len(ids), chunk, max(policy.budget for policy in policies.values()))
    found = capture(params, ids, page_size)
    kept = []
    layers = range(min(FIRST_LAYER, params.config.n_layers - 1), params.config.n_layers)
    for done, layer in enumerate(layers):
        kept.append([measure(found, layer, start, chunk, tuple(policies.values())) for start in starts])
        if progress is not None:
            progress(done + 1, len(layers))
    values = np.asarray(kept)  # [layers, chunks, policies, mass and error, H]
    return {name: Kept(values[:, :, i, 0], values[:, :, i, 1]) for i, name in enumerate(policies)}


def measure(
    found: Captured, layer: int, start: int, chunk: int, policies: tuple[QuoKA | ChunkListPolicy, ...]
) -> np.ndarray:
    """Returns ``[policies, 2, H]``: mass and error of every head in one layer, for the chunk from ``start`` on."""
    q, view = found.chunk(layer, start, start + chunk), found.view(layer, start, start + chunk)
    return np.asarray(_measure(policies, q, view))


@functools.partial(jax.jit, static_argnums=0)
def _measure(policies, q, view):
    attention = probabilities(q, view)

    def one(policy):
        marks = listed(policy.choose(q, view, None), policy.unit(view.page_size), attention.shape[-1])
        return jnp.stack([mass_kept(attention, marks).mean(axis=-1), output_error(attention, marks, view)])

    return jnp.stack([one(policy) for policy in policies])


def table(kept: Mapping[str, Kept], n_tokens: int) -> Table:
    """Lays the means out, with the tenth of heads, layers and chunks that keep least."""
    shown = Table(title=f"attention kept, prose of {n_tokens} tokens, layers from the third on", title_justify="left")
    for heading in ("prefill", "mean", "10th percentile", "output error"):
        shown.add_column(heading, justify="left" if heading == "prefill" else "right")
    for name, one in kept.items():
        shown.add_row(name, f"{one.mass.mean():.3f}", f"{np.quantile(one.mass, 0.1):.3f}", f"{one.error.mean():.3f}")
    return shown

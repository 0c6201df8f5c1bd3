"""What narrow metadata, and metadata on two levels, change in what Quest selects, on a model's own queries and keys."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from quest_jax import LayerView, Params, Quest
from quest_jax.evals.capture import capture, listed, mass_kept, probabilities
from quest_jax.evals.mass import FIRST_LAYER
from quest_jax.pallas_kernels.append.blocks import block_metadata
from quest_jax.pallas_kernels.metadata import Kind, decode, encode, metadata_nbytes

# The length that two levels are for, beside the text's own: bytes follow from it, recall would need a text as long.
LONG = 131072


class Form(NamedTuple):
    """A way to keep the metadata, and the policy that reads it.

    Attributes:
      policy: with or without blocks of pages.
      kind: of the metadata of pages, and of blocks.
    """

    policy: Quest
    kind: Kind


class Found(NamedTuple):
    """What a form selects, by layer (from the third on).

    Attributes:
      same: share of the pages that float32 on one level selects, mean over queries and KV heads, ``[layers]``.
      mass: share of the attention on the selected pages, mean over queries, ``[layers, H]``.
    """

    same: np.ndarray
    mass: np.ndarray


def forms(budget: int, block_pages: int, candidates: int) -> dict[str, Form]:
    """The forms that are compared at one budget, by name; float32 on one level first."""
    one = Quest(budget, reduce="mean")  # as on two levels, so that only the form of the metadata differs
    two = dataclasses.replace(one, block_pages=block_pages, candidates=candidates)
    levels = {kind: Form(one, kind) for kind in Kind.__args__}
    return levels | {f"{kind}, two levels": Form(two, kind) for kind in ("float32", "int8")}


def run(
    params: Params,
    ids: Sequence[int],
    compared: Sequence[Mapping[str, Form]],
    *,
    queries: int = 128,
    page_size: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Found]]:
    """Selects for each of the last tokens of a text as if it were decoded, layer by layer.

    Args:
      params: of :func:`quest_jax.load`.
      ids: the text.
      compared: forms by name, the first of each mapping is what the others are held against.
      queries: how many of the last tokens.
      page_size: tokens of a page.
      progress: called with (layers done, layers in all).

    Returns:
      for each of ``compared``, what its forms select.

    Raises:
      ValueError: the text has no page more than the largest budget before these tokens.
    """
    start, largest = len(ids) - queries, max(form.policy.budget for some in compared for form in some.values())
    if start < largest + page_size:
        raise ValueError(
            f"tokens: expected more than {largest + page_size + queries} (the largest budget, a page, and {queries} "
            f"queries), so that something is left out, got {len(ids)}; take a longer text or smaller budgets."
        )
    found = capture(params, ids, page_size)
    layers, values = range(min(FIRST_LAYER, params.config.n_layers - 1), params.config.n_layers), []
    flat = tuple(tuple(some.values()) for some in compared)
    for done, layer in enumerate(layers):
        view = found.view(layer, start, len(ids))
        values.append(jax.tree.map(np.asarray, _measure(flat, found.chunk(layer, start, len(ids)), view)))
        if progress is not None:
            progress(done + 1, len(layers))
    stacked = jax.tree.map(lambda *every: np.stack(every), *values)
    return [{name: Found(*stacked[i][j]) for j, name in enumerate(some)} for i, some in enumerate(compared)]


@functools.partial(jax.jit, static_argnums=0)
def _measure(compared: tuple[tuple[Form, ...], ...], q: Float[Array, "1 T H D"], view: LayerView):
    attention = probabilities(q, view)
    results = []
    for some in compared:
        marks = [_marks(form, q, view) for form in some]  # [T, lists, L]
        kept = [jax.vmap(mass_kept, (1, 0), 1)(attention[:, :, None], mark)[..., 0].mean(axis=1) for mark in marks]
        same = [(marks[0] * mark).sum() / marks[0].sum() for mark in marks]
        results.append(list(zip(same, kept, strict=True)))
    return results


def _marks(form: Form, q: Float[Array, "1 T H D"], view: LayerView) -> Float[Array, "T lists L"]:
    """1 where the selection of each query lists the position."""
    exact = decode(view.meta)
    pages, width = exact.shape[-2:]
    # Of the whole text: later tokens are in no page but those of the queries, which hardly differ between the forms.
    meta = encode(exact[..., : width // 2], exact[..., width // 2 :], form.kind)
    blocks, size = None, form.policy.block_pages
    if size is not None:
        n_blocks = pages // size
        every = jnp.arange(n_blocks)[None]
        blocks = block_metadata(meta, every, n_blocks, -(-view.lengths // view.page_size))

    def one(query, position):
        now = view._replace(meta=meta, blocks=blocks, starts=position[None], lengths=position[None] + 1)
        return listed(form.policy.choose(query[None, None], now, None), view.page_size, pages * view.page_size)

    return jax.vmap(one)(q[0], view.starts[0] + jnp.arange(q.shape[1]))


def scored_nbytes(form: Form, length: int, head_dim: int, kv_heads: int, page_size: int) -> int:
    """Bytes of metadata that a decode step reads in one layer at ``length`` tokens."""
    lengths = jnp.array([length])
    scored = int(form.policy.scored(lengths - 1, lengths, -(-length // page_size), page_size)[0])
    return scored * kv_heads * form.policy.scored_nbytes(head_dim, 4, form.kind)


def table(
    found: Sequence[Mapping[str, Found]],
    compared: Sequence[Mapping[str, Form]],
    params: Params,
    n_tokens: int,
    page_size: int,
) -> Table:
    """Lays the means out beside the bytes."""
    config = params.config
    shown = Table(
        title=f"metadata of pages of {page_size} tokens, prose of {n_tokens} tokens, layers from the third on",
        title_justify="left",
    )
    for heading in ("Quest", "metadata", "same pages", "mass kept", "bytes/page", "KB/step", f"at {LONG // 1024}K"):
        shown.add_column(heading, justify="left" if heading in ("Quest", "metadata") else "right")
    for some, of in zip(compared, found, strict=True):
        for name, form in some.items():
            page = metadata_nbytes(config.head_dim, form.kind) * (1 + 1 / (form.policy.block_pages or float("inf")))
            here, there = (
                scored_nbytes(form, length, config.head_dim, config.n_kv_heads, page_size) / 1e3
                for length in (n_tokens, LONG)
            )
            shown.add_row(
                f"{form.policy.budget}", name, f"{of[name].same.mean():.4f}", f"{of[name].mass.mean():.4f}",
                f"{page:.0f}", f"{here:.0f}", f"{there:.0f}",
            )  # fmt: skip
    return shown

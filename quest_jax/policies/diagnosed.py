r"""Quest that says, after each step, at most how much it missed: a diagnosis, and a loose one.

A step read the tokens S of a query head, with :math:`Z_S = \sum_{j \in S} e^{s_j}`, and its lse is :math:`\log Z_S`.
No token of a page p scores more than Quest's bound :math:`U_p`, so the pages that were not read have at most

.. math:: \rho = \sum_p n_p \, e^{U_p / \sqrt D - \log Z_S}

times the weight of what was read, and their share of dense attention is :math:`\tau \le \rho / (1 + \rho)`. The outputs
are averages of values, :math:`o - o_S = \tau (o_T - o_S)`, T what was not read, so that
:math:`|o - o_S| \le \tau (\max_{j \in S} |v_j| + \max_{j \in T} |v_j|)`.

**Rounding.** The bounds hold for attention in exact arithmetic over the keys and values of the cache. Float32 sums of D
products err by less than :math:`(D + 8) u \sum_i |q_i| \max(|m_i|, |M_i|)`, :math:`u = 2^{-24}`. Twice that is added to
every :math:`U_p` (a TPU makes its float32 products of several of bfloat16). The most of it of a page that was read is
taken from the lse, with the error of its sum of exponentials. Narrow metadata is rounded outward. The exponentials of
the attention's kernels are trusted to ``2^-16``. A sink, which takes part in the softmax beside what is read, makes
both shares smaller than without it, so the bounds hold there too.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from quest_jax.pallas_kernels.metadata import Metadata, decode
from quest_jax.pallas_kernels.pages import pad_head_dim
from quest_jax.policies.base import LayerView, Missed, Selection, Sizes
from quest_jax.policies.lists import marked
from quest_jax.policies.page_memory import rewrite
from quest_jax.policies.quest import Quest

_UNIT = 2.0**-24  # of rounding, in float32
_TINY = float(jnp.finfo(jnp.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Diagnosed(Quest):
    """Quest with upper bounds of what each step missed, ``stats.missed_mass_bound`` and ``stats.output_error_bound``.

    It reads, and gives, what Quest does. The bounds hold but are loose: where 3 % of the attention is missed they say
    close to 1, since a page's box reaches far beyond its keys. So they are good to know that little was missed where
    they are small, and no budget can be set by them. A step reads the metadata once more for them, in float32, and of
    each page the largest norm of a value, which are kept: not counted among the bytes read, those are of Quest.

    Attributes: those of :class:`~quest_jax.policies.quest.Quest`.

    Example:
      >>> import quest_jax
      >>> params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 3, 4, 2, 8, 512), seed=0)
      >>> policy = quest_jax.Diagnosed(budget=32)
      >>> stats = quest_jax.generate(params, [list(range(60))], policy=policy, max_new_tokens=4).stats
      >>> stats.missed_mass_bound[:, 0, 0].tolist()  # the first two layers are dense
      [0.0, 0.0, 0.0, 0.0]
      >>> bool((stats.missed_mass_bound[:, 2] > 0).all())
      True
    """

    diagnoses: ClassVar[bool] = True

    def new_memory(self, layer: int, sizes: Sizes) -> Any:
        """The largest norm of a value of every page, float32 ``[B, K, P]``."""
        del layer
        return jnp.zeros((sizes.rows, sizes.kv_heads, sizes.pages), jnp.float32)

    def remember(self, k: Float[Array, "B T K D"], v: Float[Array, "B T K D"], view: LayerView) -> Any:
        """Finds the norms of the pages that were written to."""
        del v
        return rewrite(view.memory, k, view, lambda keys, values, real: _largest_norm(values, real))

    def diagnose(
        self, q: Float[Array, "B 1 H D"], view: LayerView, selection: Selection, lse: Float[Array, "B 1 H"]
    ) -> Missed:
        """The bounds of the head that may have lost most; see the module."""
        listed = marked(selection, view.pages_per_row)
        mass = missed_mass(q[:, 0], view.meta, view.lengths, listed, lse[:, 0], view.page_size)
        used = jnp.arange(view.pages_per_row) * view.page_size < view.lengths[:, None]
        kv_heads = view.memory.shape[1]
        by_list = listed.reshape(len(q), kv_heads, -1, listed.shape[-1])  # [B, K, lists of a head, P]
        norms = jnp.where(used[:, None, None], view.memory[:, :, None], 0)
        read, unread = (jnp.where(which, norms, 0).max(axis=-1) for which in (by_list, ~by_list))
        reach = jnp.repeat((read + unread).reshape(len(q), -1), q.shape[2] // listed.shape[1], axis=1)
        output = jnp.maximum(mass * reach * (1 + 256 * _UNIT), jnp.where(mass > 0, _TINY, 0))
        output = jnp.where(mass > 0, jnp.where(jnp.isnan(output), jnp.inf, output), 0)
        return Missed(mass.max(axis=-1), output.max(axis=-1))


def missed_mass(
    q: Float[Array, "B H D"],
    meta: Metadata,
    lengths: Int[Array, "B"],
    listed: Bool[Array, "B lists P"],
    lse: Float[Array, "B H"],
    page_size: int,
) -> Float[Array, "B H"]:
    r"""Bounds the share of dense attention's weight on the pages that are not ``listed``: :math:`\tau` of the module.

    Args:
      q: rotated queries.
      meta: of one layer; may be padded with zeros.
      lengths: tokens of each row.
      listed: the pages that were read, of every KV head or every query head.
      lse: of what was read.
      page_size: [S] tokens of a page.

    Returns:
      0 where everything was listed, else above 0 and at most 1.
    """
    rows, heads, head_dim = q.shape
    low, high = jnp.split(decode(meta), 2, axis=-1)  # [B, K, P, D]
    by_head = pad_head_dim(q.astype(jnp.float32), low.shape[-1]).reshape(rows, low.shape[1], -1, low.shape[-1])

    def product(left, right):
        products = jnp.einsum("bkgd,bkpd->bkgp", left, right, precision=lax.Precision.HIGHEST)
        return products.reshape(rows, heads, -1)

    most = product(jnp.maximum(by_head, 0), high) + product(jnp.minimum(by_head, 0), low)
    terms = product(
        jnp.abs(by_head), jnp.maximum(jnp.abs(low), jnp.abs(high))
    )  # no sum of a page's |q_i k_i| is larger
    slack = 2 * (head_dim + 8) * _UNIT * terms
    count = jnp.clip(lengths[:, None] - jnp.arange(low.shape[2]) * page_size, 0, page_size)[:, None]  # [B, 1, P]
    listed = jnp.repeat(listed, heads // listed.shape[1], axis=1)
    read, unread = listed & (count > 0), ~listed & (count > 0)

    scale = head_dim**-0.5
    least = lse - scale * jnp.where(read, slack, 0).max(axis=-1) - _of_sum(jnp.where(read, count, 0).sum(axis=-1), lse)
    logits = jnp.where(unread, scale * (most + slack) + jnp.log(jnp.maximum(count, 1)), -jnp.inf)
    sums = jax.nn.logsumexp(logits, axis=-1)
    sums = sums + _of_sum(unread.sum(axis=-1), sums)
    ratio = sums - least
    share = jax.nn.sigmoid(ratio + 4 * _UNIT * jnp.abs(ratio)) * (1 + 256 * _UNIT)
    share = jnp.where(jnp.isnan(share), 1, jnp.clip(share, _TINY, 1))
    return jnp.where(unread.any(axis=-1), share, 0)


def _of_sum(terms, lse):
    """What the logarithm of a float32 sum of so many exponentials errs at most, and the exponentials with it."""
    return 2 * (terms + 128) * _UNIT + 4 * _UNIT * jnp.abs(lse)


def _largest_norm(values, real):
    """``[B, K, n]`` of values ``[B, K, n, S, D]``, rounded up; divided by the largest first, so that no square is 0."""
    values = jnp.where(real, values, 0)
    largest = jnp.abs(values).max(axis=(-2, -1), keepdims=True)
    norms = jnp.linalg.norm(values / jnp.where(largest > 0, largest, 1), axis=-1).max(axis=-1)
    return norms * largest[..., 0, 0] * (1 + 2 * (values.shape[-1] + 8) * _UNIT)

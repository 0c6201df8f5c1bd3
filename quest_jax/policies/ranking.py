"""The largest scores, as every policy takes them."""

from jax import lax
from jaxtyping import Array, Float, Int

from quest_jax.pallas_kernels import dispatch


def largest(scores: Float[Array, "*lists P"], count: int) -> Int[Array, "*lists count"]:
    """Returns the indices of the ``count`` largest scores, largest first.

    Of equal scores the lowest index comes first. On a GPU their order is arbitrary, and so is which of them are taken
    at the cut: only without an order of its own does XLA compile a selection (up to 128 of float32, Quest's usual 2048
    tokens in pages of 16) instead of a sort of everything. Compare selected scores across devices, not pages.
    """
    stable = dispatch.current_target().platform != "gpu"
    return lax.top_k(scores, count, is_stable=stable)[1]

"""When is reading everything faster than choosing? Three constants of a device answer that."""

from typing import NamedTuple

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.metadata import Metadata, metadata_kind, metadata_nbytes
from quest_jax.pallas_kernels.pages import KV, pool_dtype, pool_shape


class CostModel(NamedTuple):
    """The time of one layer's decode attention, for one row.

    Of ``L`` tokens, each ``t`` bytes of keys and values and ``m`` of metadata, all take ``stream L t``, and a selection
    ``fixed + stream L m + listed budget t``, both beside what every call takes. ``quest-jax bench calibrate`` measures
    the constants.

    Attributes:
      stream: seconds per byte that is read in order.
      listed: seconds per byte of listed pages, which are gathered first.
      fixed: seconds to choose.
    """

    stream: float
    listed: float
    fixed: float

    def dense(self, length: int, per_token: float) -> float:
        """Seconds to attend to all of ``length`` tokens of ``per_token`` bytes."""
        return self.stream * length * per_token

    def selected(self, length: int, per_token: float, metadata: float, budget: int) -> float:
        """Seconds to choose among ``length`` tokens, of ``metadata`` bytes each, and attend to ``budget`` of them."""
        return self.fixed + self.stream * length * metadata + self.listed * min(length, budget) * per_token

    def break_even(self, per_token: float, metadata: float, budget: int) -> int:
        """The length from which choosing ``budget`` tokens is faster; 2^31 - 1 where it never is."""
        spared = self.stream * (per_token - metadata)
        if spared <= 0:  # pages of one token, say: their metadata is as large as what they hold
            return 2**31 - 1
        return max(budget + 1, -int(-(self.fixed + self.listed * budget * per_token) // spared))


# Two cores of an EPYC (AVX2), float32: the command above. Bandwidth and overhead of other CPUs move together enough for
# a decision between two programs that take about as long at the break-even. What choosing takes by itself was too
# little to be seen beside the rest. No other device was measured: none has a model.
MODELS = {"cpu": CostModel(stream=4.0e-11, listed=9.0e-11, fixed=0.0)}


def break_even(kv: KV, meta: Metadata, budget: int) -> int:
    """Returns the length from which selection is faster than dense attention on the current target.

    Args:
      kv: a layer's pool, and ``meta`` its metadata: for their shapes and dtypes.
      budget: tokens that the selection reads.

    Returns:
      a length in tokens; 0 where the device has no :class:`CostModel`.
    """
    model = MODELS.get(dispatch.current_target().platform)
    if model is None:
        return 0
    shape = pool_shape(kv)
    per_token = float(shape.kv_heads * 2 * shape.head_dim * pool_dtype(kv).itemsize)
    metadata = shape.kv_heads * metadata_nbytes(shape.head_dim, metadata_kind(meta)) / shape.page_size
    return model.break_even(per_token, metadata, budget)

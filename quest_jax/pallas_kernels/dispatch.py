"""Which implementation serves a call, and why the others do not.

Every op keeps an ordered tuple of :class:`Implementation`. ``implementation=None`` takes the first that supports the
call; XLA stands last and supports everything, so ``None`` always works. A name takes that one or raises with its
reason: what was asked for by name is never replaced silently.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from quest_jax.pallas_kernels.pages import Layout, PoolShape


@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation needs to know to decide; all static, read while tracing.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      device_kind: the device's own name, e.g. ``TPU v5 lite`` or ``NVIDIA H200``.
      dtype: of the keys and values.
      layout: of the pool.
      kv_heads, group, head_dim, page_size: K, G, D, S.
      query_tokens: T, 1 while decoding.
    """

    platform: str
    device_kind: str
    dtype: str
    layout: Layout
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    query_tokens: int = 1


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    Attributes:
      name: as given to ``implementation=``.
      run: the function, with the op's own signature.
      why_not: returns None when it serves the call, else the reason in a sentence.
    """

    name: str
    run: Callable
    why_not: Callable[[Call], str | None]


def serves_everything(call: Call) -> str | None:
    """The ``why_not`` of the XLA references."""
    del call
    return None


def describe_call(shape: PoolShape, dtype, layout: Layout, query_heads: int, query_tokens: int = 1) -> Call:
    """Describes a call on the default device of this process."""
    device = jax.devices()[0]
    return Call(
        platform=device.platform,
        device_kind=device.device_kind,
        dtype=jnp.dtype(dtype).name,
        layout=layout,
        kv_heads=shape.kv_heads,
        group=query_heads // shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        query_tokens=query_tokens,
    )


def explain(implementations: Sequence[Implementation], call: Call) -> dict[str, str | None]:
    """Returns, in order of preference, every implementation's reason not to serve ``call`` (None: it does)."""
    return {candidate.name: candidate.why_not(call) for candidate in implementations}


def resolve(op: str, implementations: Sequence[Implementation], call: Call, name: str | None) -> Implementation:
    """Returns the implementation that serves ``call``.

    Raises:
      ValueError: no implementation is called ``name``.
      NotImplementedError: ``name`` does not serve this call; the message has its reason and who would.
    """
    reasons = explain(implementations, call)
    if name is None:
        return next(candidate for candidate in implementations if reasons[candidate.name] is None)
    if name not in reasons:
        known = ", ".join(repr(known) for known in reasons)
        raise ValueError(f"{op}: expected implementation=None or one of {known}, got {name!r}.")
    if reasons[name] is not None:
        able = ", ".join(repr(other) for other, reason in reasons.items() if reason is None)
        raise NotImplementedError(f"{op}: {name!r} does not serve this call: {reasons[name]} These do: {able}.")
    return next(candidate for candidate in implementations if candidate.name == name)

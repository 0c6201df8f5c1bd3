"""Which implementation serves a call, and why the others do not.

Every op keeps an ordered tuple of :class:`Implementation`. ``implementation=None`` takes the first that supports the
call; XLA stands last and supports everything, so ``None`` always works. A name takes that one or raises with its
reason: what was asked for by name is never replaced silently.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp

from quest_jax.pallas_kernels.pages import Layout, PoolShape


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is traced for.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      device_kind: the device's own name, e.g. ``TPU v5 lite`` or ``NVIDIA H200``.
      compute_capability: of a CUDA device, e.g. ``(9, 0)``; None for others.
    """

    platform: str
    device_kind: str
    compute_capability: tuple[int, int] | None = None


_TARGET: contextvars.ContextVar[Target | None] = contextvars.ContextVar("quest_jax_target", default=None)


@contextlib.contextmanager
def target(platform: str, device_kind: str, compute_capability: tuple[int, int] | None = None) -> Iterator[Target]:
    """Makes the ops choose for a device that is not the default one of this process, e.g. to compile ahead of time.

    It acts while tracing and is no part of the key of ``jax.jit``'s cache: lower a function that was not traced before.

    Example:
      >>> from quest_jax.pallas_kernels import dispatch
      >>> with dispatch.target("gpu", "NVIDIA H200", (9, 0)):
      ...     dispatch.current_target().platform
      'gpu'
    """
    chosen = Target(platform, device_kind, compute_capability)
    token = _TARGET.set(chosen)
    try:
        yield chosen
    finally:
        _TARGET.reset(token)


def current_target() -> Target:
    """Returns what :func:`target` set, or else ``jax.default_device``, or else the first device of this process.

    ``jax.default_device`` is the better way to say it where there is a device object, that of a topology included: it
    is part of the key of ``jax.jit``'s cache.
    """
    default = jax.config.jax_default_device
    if default is None:
        default = jax.devices()[0]
    return _TARGET.get() or target_of(jax.devices(default)[0] if isinstance(default, str) else default)


def target_of(device) -> Target:
    """Describes a device, or the description of a device that is not here."""
    # CUDA devices alone have this attribute; on AMD's it is a name such as gfx942.
    capability = str(getattr(device, "compute_capability", "")).split(".")
    numbers = len(capability) == 2 and all(part.isdigit() for part in capability)
    return Target(device.platform, device.device_kind, (int(capability[0]), int(capability[1])) if numbers else None)


@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation needs to know to decide; all static, read while tracing.

    Attributes:
      platform: ``cpu``, ``gpu`` or ``tpu``.
      device_kind: the device's own name, e.g. ``TPU v5 lite`` or ``NVIDIA H200``.
      dtype: of the keys and values.
      layout: of the pool.
      kv_heads, group, head_dim, page_size: K, G, D as it is stored, S.
      query_tokens: T, 1 while decoding.
      pages: P, of a row, where the op reads or writes one value for each.
      scalars: int32 numbers of page table and page lists, which a kernel may need in scalar memory.
      compute_capability: of a CUDA device, e.g. ``(9, 0)``; None for others.
      metadata: how the op keeps the page metadata that it writes.
      window: how many tokens each query sees, None for all.
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
    pages: int | None = None
    scalars: int = 0
    compute_capability: tuple[int, int] | None = None
    metadata: str = "float32"
    window: int | None = None


NAMES = ("mosaic_tpu", "mosaic_gpu", "xla")
"""Of all implementations there are; most ops have two or three of them."""


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


def describe_call(
    shape: PoolShape,
    dtype,
    layout: Layout,
    query_heads: int,
    query_tokens: int = 1,
    pages: int | None = None,
    scalars: int = 0,
    metadata: str = "float32",
    window: int | None = None,
) -> Call:
    """Describes a call on the current target."""
    device = current_target()
    return Call(
        platform=device.platform,
        device_kind=device.device_kind,
        compute_capability=device.compute_capability,
        dtype=jnp.dtype(dtype).name,
        layout=layout,
        kv_heads=shape.kv_heads,
        group=query_heads // shape.kv_heads,
        head_dim=shape.head_dim,
        page_size=shape.page_size,
        query_tokens=query_tokens,
        pages=pages,
        scalars=scalars,
        metadata=metadata,
        window=window,
    )


def explain(implementations: Sequence[Implementation], call: Call) -> dict[str, str | None]:
    """Returns, in order of preference, every implementation's reason not to serve ``call`` (None: it does)."""
    return {candidate.name: candidate.why_not(call) for candidate in implementations}


def resolve(op: str, implementations: Sequence[Implementation], call: Call, name: str | None) -> Implementation:
    """Returns the implementation that serves ``call``.

    Raises:
      ValueError: no implementation of any op is called ``name``.
      NotImplementedError: ``name`` does not serve this call; the message has its reason and who would.
    """
    reasons = explain(implementations, call)
    if name is None:
        return next(candidate for candidate in implementations if reasons[candidate.name] is None)
    if name not in NAMES:
        known = ", ".join(map(repr, NAMES))
        raise ValueError(f"{op}: expected implementation=None or one of {known}, got {name!r}.")
    reason = reasons.get(name, f"{op} has no such kernel.")
    if reason is not None:
        able = ", ".join(repr(other) for other, reason in reasons.items() if reason is None)
        raise NotImplementedError(f"{op}: {name!r} does not serve this call: {reason} These do: {able}.")
    return next(candidate for candidate in implementations if candidate.name == name)


def if_offered(implementations: Sequence[Implementation], name: str | None) -> str | None:
    """Returns ``name``, but None for an op that has no implementation of this name.

    For a name that stands for a whole step: appending has no kernel for GPUs, which is no reason to refuse the others.
    """
    return None if name in NAMES and all(candidate.name != name for candidate in implementations) else name

"""How much memory a generation needs, before anything is allocated or compiled."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from quest_jax.attention import init_attention
from quest_jax.inputs import as_chunk, as_policy, as_prefill_policy, as_size, bucket, short_chunk
from quest_jax.memory import available_bytes
from quest_jax.models.config import LlamaConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.models.quant import QuantKind
from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.params import Params
from quest_jax.policies.base import Policy
from quest_jax.temporaries import decode_temporaries, prefill_temporaries, program_bytes
from quest_jax.weights.assemble import load_bytes, target_dtype
from quest_jax.weights.quantize import as_quant_kind, quantize_tree


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes by part, and what there is. Weights, KV, metadata, norms and logits are exact, the rest is estimated.

    The resident memory of a process that loads, compiles and runs it on a CPU peaks at ``total + programs`` and what
    Python and JAX take before (0.25 GB); ``quest-jax plan --measure`` compares.

    Attributes:
      config: of the model.
      batch: [B] rows.
      max_len: tokens of a row, prompt and answer.
      capacity: tokens of a row that the cache has room for: ``max_len`` rounded up to one of four sizes per octave.
      dtype: of weights, keys and values, by name.
      quantized: the kind of quantised matrices, None where they are in ``dtype`` too.
      page_size: [S] tokens of a page.
      chunk: tokens of a prefill step; shorter rows take fewer.
      policy, prefill_policy: for decoding, and for the prompt.
      metadata_kind: how the metadata is kept.
      weights: all of them.
      kv: keys and values.
      metadata: minimum and maximum of every page, and what the decoding policy keeps besides.
      norms: inverse key norms, where a policy reads them; dropped after the prompt where only that did.
      logits: of the next token, float32 ``[B, V]``.
      prefill: temporaries of a chunk, see :mod:`quest_jax.temporaries`; memory that decoding uses again.
      decode: temporaries of a decode step.
      programs: host memory to compile the two programs and to keep them, an estimate for a CPU: not part of ``total``.
      loading: host memory besides the weights while they are loaded, the largest array; free again when that is done.
      loaded: the weights are there already, and so no longer part of ``available``.
      available: bytes that may still be taken, on an accelerator on the device; None where the platform does not say.
      place: where that is, for messages.
    """

    config: LlamaConfig
    batch: int
    max_len: int
    capacity: int
    dtype: str
    quantized: QuantKind | None
    page_size: int
    chunk: int
    policy: Policy
    prefill_policy: Policy
    metadata_kind: Kind
    weights: int
    kv: int
    metadata: int
    norms: int
    logits: int
    prefill: int
    decode: int
    programs: int
    loading: int
    loaded: bool
    available: int | None
    place: str

    @property
    def temporaries(self) -> int:
        """The larger of ``prefill`` and ``decode``: they do not run at the same time."""
        return max(self.prefill, self.decode)

    @property
    def cache(self) -> int:
        """Bytes of the KV cache with all that is kept beside it."""
        return self.kv + self.metadata + self.norms

    @property
    def total(self) -> int:
        """The most that is in use at a time once the weights are loaded."""
        return self.weights + self.cache + self.logits + self.temporaries

    @property
    def needed(self) -> int:
        """Bytes still to be taken: ``total``, without the weights where these are there."""
        return self.total - self.weights * self.loaded

    @property
    def fits(self) -> bool | None:
        """Whether ``needed`` is available; None where the platform does not say."""
        return None if self.available is None else self.needed <= self.available

    @property
    def largest_batch(self) -> int | None:
        """The most rows of ``max_len`` tokens that fit, 0 for none; None where the platform does not say."""
        return _largest(lambda n: self.resized(batch=n).fits)

    @property
    def largest_len(self) -> int | None:
        """The most tokens a row that fit with this batch, a capacity, 0 for none; None likewise."""
        return _largest(lambda n: self.resized(max_len=n).fits)

    def resized(self, *, batch: int | None = None, max_len: int | None = None) -> "Plan":
        """Returns the plan of another size, with the same memory available."""
        return _sized(
            self.config, self.batch if batch is None else batch, self.max_len if max_len is None else max_len,
            dtype=self.dtype, page_size=self.page_size, chunk=self.chunk, policy=self.policy,
            prefill_policy=self.prefill_policy, metadata=self.metadata_kind, weights=self.weights,
            quantized=self.quantized, loading=self.loading, loaded=self.loaded, available=(self.available, self.place),
        )  # fmt: skip

    def check(self) -> None:
        """Raises MemoryError with the numbers, and what to do, if it does not fit."""
        if self.fits is False:
            parts = ", ".join(f"{name} {_readable(size)}" for name, size in self._parts() if size)
            there = " (the weights are there)" if self.loaded else ""
            raise MemoryError(
                f"{self.batch} x {self.capacity} tokens in {self.dtype}: needs {_readable(self.needed)} {self.place}"
                f"{there}, but {_readable(max(0, self.available or 0))} are available: {parts}. "
                f"Take at most {self.largest_batch} rows of this length or {self.largest_len} tokens a row, bfloat16 "
                "or quantised weights, or free memory; see quest_jax.plan."
            )

    def bytes(self) -> dict[str, int | None]:
        """Returns all numbers of bytes by name, for JSON."""
        names = (
            "weights",
            "kv",
            "metadata",
            "norms",
            "logits",
            "prefill",
            "decode",
            "total",
            "needed",
            "loading",
            "programs",
        )
        return {name: getattr(self, name) for name in (*names, "available", "largest_batch", "largest_len")}

    def _parts(self) -> list[tuple[str, int]]:
        parts = [] if self.loaded else [("weights", self.weights)]
        parts += [("KV", self.kv), ("metadata", self.metadata), ("norms", self.norms), ("logits", self.logits)]
        return [*parts, ("temporaries", self.temporaries)]

    def __str__(self) -> str:
        rows: list[tuple[str, Any, str]] = [
            ("weights", self.weights, "there already" if self.loaded else ""),
            ("KV", self.kv, f"{self.batch} x {self.capacity} tokens"),
            ("metadata", self.metadata, f"min and max of pages of {self.page_size}"),
            ("key norms", self.norms, ""),
            ("logits", self.logits, ""),
            ("temporaries", self.temporaries, f"estimated; prefill by chunks of {self.chunk} "
             f"{_readable(self.prefill)}, decoding {_readable(self.decode)}"),
            ("total", self.total, f"{_readable(self.loading)} more for a moment while loading"),
            ("programs", self.programs, "besides, estimated; host memory to compile and keep them"),
        ]  # fmt: skip
        quantized = f", {self.quantized} weights" if self.quantized else ""
        lines = [f"{self.batch} x {self.max_len} tokens, {self.dtype}{quantized}"]
        lines += [f"  {name:<12} {_readable(size):>11}  {note}".rstrip() for name, size, note in rows]
        if self.available is None:
            return "\n".join([*lines, f"  available: unknown {self.place}"])
        verdict = "fits" if self.fits else "DOES NOT FIT"
        lines.append(f"  {'available':<12} {_readable(self.available):>11}  {self.place}: {verdict}")
        lines.append(
            f"  at most {self.largest_batch} rows of {self.max_len} tokens, or {self.largest_len} tokens a row with "
            f"{self.batch} {'row' if self.batch == 1 else 'rows'}"
        )
        return "\n".join(lines)


def plan(
    params_or_config: Params | LlamaConfig,
    batch: int,
    max_len: int,
    *,
    dtype: Any = None,
    weights: Any = None,
    budget: int | None = None,
    policy: Policy | None = None,
    prefill_budget: int | None = None,
    prefill_policy: Policy | None = None,
    page_size: int = 16,
    chunk: int | None = None,
    metadata: Kind = "float32",
) -> Plan:
    """Says how much memory a generation needs, by part, and what fits. Allocates and compiles nothing.

    Args:
      params_or_config: of :func:`quest_jax.load`, or the config alone, of :func:`quest_jax.load_config`.
      batch: [B] rows.
      max_len: tokens of a row, prompt and answer.
      dtype: of the weights and the cache, ``float32`` or ``bfloat16``; None: that of the weights, float32 for a config.
      weights: ``"int8"`` or ``"int4"`` for a config, as for :func:`quest_jax.load`; None: in ``dtype``, or as they are.
      budget, policy, prefill_budget, prefill_policy, page_size, chunk, metadata: as for :func:`quest_jax.prefill`.

    Returns:
      the plan: bytes as integers, and a table as text.

    Raises:
      TypeError, ValueError: input out of range, or another dtype or kind than that of the weights given.

    Example:
      >>> import quest_jax
      >>> config = quest_jax.LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128, 131072)
      >>> plan = quest_jax.plan(config, batch=1, max_len=131072, dtype="bfloat16", budget=2048)
      >>> f"{plan.weights / 1e9:.1f} GB, KV {plan.kv / 1e9:.1f} GB, metadata {plan.metadata / 1e9:.1f} GB"
      '16.1 GB, KV 17.2 GB, metadata 2.1 GB'
    """
    if not isinstance(params_or_config, Params | LlamaConfig):
        raise TypeError(
            "params_or_config: expected what quest_jax.load or quest_jax.load_config returns, got "
            f"{type(params_or_config).__name__}."
        )
    page_size = as_size("page_size", page_size)
    chosen = as_policy(budget, policy, page_size)
    for_prompt = as_prefill_policy(prefill_budget, prefill_policy, page_size)
    options: dict[str, Any] = dict(
        page_size=page_size, chunk=as_chunk(chunk, for_prompt), policy=chosen, prefill_policy=for_prompt,
        metadata=metadata,
    )  # fmt: skip
    batch, max_len = as_size("batch", batch), as_size("max_len", max_len)
    if isinstance(params_or_config, Params):
        there, kind = params_or_config.dtype, params_or_config.quantized
        if weights is not None and as_quant_kind(weights) != kind:
            raise ValueError(
                f"weights: these weights are {kind or there}, got {weights}; pass their config to plan for others."
            )
        if dtype is not None and target_dtype(dtype) != there:
            raise ValueError(f"dtype: these weights are {there}, got {dtype}; pass their config to plan for another.")
        return plan_generation(params_or_config, batch, max_len, **options)
    dtype, kind = target_dtype(jnp.float32 if dtype is None else dtype), as_quant_kind(weights)
    planned = quantize_tree(abstract_weights(params_or_config, dtype), kind)
    return _sized(
        params_or_config, batch, max_len, dtype=dtype.name, quantized=kind, **_weight_bytes(planned),
        loaded=False, available=available_bytes(), **options,
    )  # fmt: skip


def plan_generation(params: Params, batch: int, max_len: int, **options: Any) -> Plan:
    """As :func:`plan` for weights that are there, with its keywords, policies for budgets, checked."""
    return _sized(
        params.config, batch, max_len, dtype=params.dtype.name, quantized=params.quantized,
        **_weight_bytes(params.weights), loaded=True, available=available_bytes(), **options,
    )  # fmt: skip


def _weight_bytes(weights: dict[str, Any]) -> dict[str, int]:
    return dict(zip(("weights", "loading"), load_bytes(weights), strict=True))


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _sized(
    config: LlamaConfig,
    batch: int,
    max_len: int,
    *,
    dtype: str,
    quantized: QuantKind | None,
    page_size: int,
    chunk: int,
    policy: Policy,
    prefill_policy: Policy,
    metadata: Kind,
    weights: int,
    loading: int,
    loaded: bool,
    available: tuple[int | None, str],
) -> Plan:
    capacity, taken = bucket(max_len, 8 * page_size), short_chunk(chunk, max_len)
    room: dict[str, Any] = dict(batch=batch, capacity=capacity, page_size=page_size)
    policies: dict[str, Any] = dict(policy=policy, prefill_policy=prefill_policy)

    dense: dict[str, list[bool]] = {}

    def cache():
        layers = range(config.n_layers)
        state = init_attention(
            len(layers),
            config.n_kv_heads,
            config.head_dim,
            **room,
            **policies,
            dtype=jnp.dtype(dtype),
            metadata=metadata,
            n_heads=config.n_heads,
        )
        for name, one in policies.items():
            roles = [one.fitted(config).at(i, len(layers)) for i in layers]
            dense[name] = [role.is_dense(i, state.view(i)) for i, role in enumerate(roles)]
        made = state.cache
        return jax.tree.leaves((made, state.carry)), made.kv, made.norms, made.lengths

    every, kv, norms, lengths = (_nbytes(part) for part in jax.eval_shape(cache))
    itemsize = jnp.dtype(dtype).itemsize
    numbers: dict[str, Any] = dict(itemsize=itemsize, quantized=quantized is not None)
    return Plan(
        config=config, batch=batch, max_len=max_len, capacity=capacity, dtype=dtype, quantized=quantized,
        page_size=page_size, chunk=chunk, **policies, metadata_kind=metadata,
        weights=weights, kv=kv, metadata=every - kv - norms - lengths, norms=norms,
        logits=4 * batch * config.vocab_size,
        prefill=prefill_temporaries(
            config, prefill_policy, dense["prefill_policy"], **room, chunk=taken, **numbers, watched=policy.watches
        ),
        decode=decode_temporaries(config, policy, dense["policy"], **room, **numbers),
        programs=program_bytes(*dense["policy"], *dense["prefill_policy"]),
        loading=loading, loaded=loaded, available=available[0], place=available[1],
    )  # fmt: skip


def _largest(fits: Any) -> int | None:
    """The largest n that fits, where none above does; None where nobody knows."""
    if (first := fits(1)) is None:
        return None
    if not first:
        return 0
    low = 1
    while fits(2 * low):
        low *= 2
    high = 2 * low  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _readable(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"

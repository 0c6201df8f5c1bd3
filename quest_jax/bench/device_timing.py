"""How long the ops and the whole decode attention take on this device, against dense attention by several programs.

A measurement runs several sets of inputs one after the other in one program, so that neither a cache that still holds
them nor the launch of the program from Python is what is measured; it is repeated, and the median counts. What is left
of the launch is in the time, as the median of ``nothing`` shows.
"""

import dataclasses
import functools
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from quest_jax.attention import AttentionState, attend, extend, init_attention
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.metadata import bounds_of
from quest_jax.pallas_kernels.page_attention import op as attention_op
from quest_jax.pallas_kernels.page_scores import op as scores_op
from quest_jax.pallas_kernels.pages import PoolShape, pool_shape
from quest_jax.policies.base import Dense, Policy
from quest_jax.policies.quest import Quest, largest


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed: H, K, D, S, tokens read, tokens of context, batch sizes, bytes copied, runs, sets of inputs."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    budget: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    copy_bytes: int
    rounds: int
    most_sets: int
    dtype: str = "bfloat16"


# The middle first: it is what the library aims at, and the time may run out.
FULL = Sizes(32, 8, 128, 16, 2048, (32768, 131072, 8192), (8, 1, 32), 1 << 30, 25, 16)
DRY_RUN = Sizes(4, 2, 64, 16, 64, (256,), (1, 2), 1 << 16, 2, 2)
# Different inputs enough to push each other out of any cache on a device (at most 128 MB today).
_ROTATED_BYTES = 400e6
# Of the device's memory: our caches, and the same again in the shape other programs want.
_USABLE = 0.4


def describe() -> dict[str, Any]:
    """Device, versions, and which implementation serves a decode step of the timed shape."""
    device = jax.devices()[0]
    call = dispatch.describe_call(PoolShape(8, 2048, 16, 128), jnp.bfloat16, "fused", 32)
    scoring = dispatch.describe_call(PoolShape(8, 2048, 16, 128), jnp.float32, "fused", 32, pages=2048)
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "page_attention": dispatch.explain(attention_op.IMPLEMENTATIONS, call),
        "page_scores": dispatch.explain(scores_op.IMPLEMENTATIONS, scoring),
    }


def time_all(sizes: Sizes, seed: int, seconds: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Times everything; nothing is begun after ``seconds``.

    Returns:
      ``copy`` and ``nothing``, and a list of ``cases``, each with the median time of every candidate in seconds, the
      bytes it must read, and the rate these make. A candidate that cannot run has the ``error`` it raised.
    """
    end = time.monotonic() + seconds
    key = jax.random.key(seed)
    found: dict[str, Any] = {"copy": _copy(sizes, key), "nothing": _nothing(sizes), "cases": []}
    say(f"copy: {found['copy']}")
    say(f"nothing: {found['nothing']}")
    for context in sizes.contexts:
        for batch in sizes.batches:
            case: dict[str, Any] = {"context": context, "batch": batch}
            found["cases"].append(case)
            if time.monotonic() > end:
                case["skipped"] = "no time was left"
            elif (needed := _cache_bytes(sizes, context, batch)) > _USABLE * (limit := _memory()):
                case["skipped"] = (
                    f"needs {needed / 1e9:.0f} GB of caches, {_USABLE:.0%} of {limit / 1e9:.0f} GB may be used"
                )
            else:
                case |= _case(sizes, context, batch, key, end)
            say(f"{case}")
    return found


def _case(sizes: Sizes, context: int, batch: int, key, end: float) -> dict[str, Any]:
    each = _cache_bytes(sizes, context, batch)
    sets = max(1, min(sizes.most_sets, int(_ROTATED_BYTES / each) + 1, int(_USABLE * _memory() / each)))
    keys = jax.random.split(key, sets)
    q = [_normal(k, (batch, 1, sizes.heads, sizes.head_dim), sizes.dtype) for k in keys]
    states = [_state(sizes, context, batch, k) for k in keys]
    policy = Quest(sizes.budget, dense_layers=0)
    # The last token is written anew each time, so that every run reads the same.
    lengths = jnp.full(batch, context, jnp.int32)
    pages = context // sizes.page_size
    page_bytes = sizes.page_size * 2 * sizes.head_dim * jnp.dtype(sizes.dtype).itemsize
    lists = batch * sizes.kv_heads
    selected = min(policy.budget, context) // sizes.page_size
    bytes_of = {
        "scores": lists * pages * 2 * sizes.head_dim * 4,
        "top_k": lists * pages * 4,
        "sparse": lists * selected * page_bytes,
        "dense": lists * pages * page_bytes,
    }

    def score(q, meta):
        return policy.score(q[:, 0], meta, lengths, sizes.page_size, None)

    def attention(q, kv, selection=None):
        listed = {} if selection is None else {"pages": selection.pages, "counts": selection.counts}
        return attention_op.page_attention(q, kv, lengths - 1, lengths, **listed)[0]

    kv, meta = ([getattr(state.cache, name)[0] for state in states] for name in ("kv", "meta"))
    scores = _each(score)(q, meta)
    selections = _each(lambda scores: policy.select(scores, lengths, sizes.page_size))(scores)
    result: dict[str, Any] = {"sets": sets}

    def measure(name, call, read):
        result[name] = _measure(call, sets, sizes.rounds, read, end)

    measure("page_scores", functools.partial(_each(score), q, meta), bytes_of["scores"])
    measure("top_k", functools.partial(_each(lambda s: largest(s, selected)), scores), bytes_of["top_k"])
    measure("select", functools.partial(_each(lambda s: policy.select(s, lengths, sizes.page_size)), scores), 0)
    measure("page_attention", functools.partial(_each(attention), q, kv, selections), bytes_of["sparse"])
    measure("page_attention dense", functools.partial(_each(attention), q, kv), bytes_of["dense"])
    del kv, meta, scores, selections
    measure("decode attention Quest", _steps(q, states, policy, context), bytes_of["scores"] + bytes_of["sparse"])
    measure("decode attention dense", _steps(q, states, Dense(), context), bytes_of["dense"])
    states.clear()
    for name, call in _others(sizes, context, q, keys):
        measure(name, call, bytes_of["dense"])
    ours = result["decode attention Quest"].get("seconds")
    result["dense over Quest"] = {
        name: result[name]["seconds"] / ours
        for name in result
        if ours and "dense" in name and isinstance(result[name], dict) and "seconds" in result[name]
    }
    return result


def _measure(call: Callable[[], object], sets: int, rounds: int, read: int, end: float) -> dict[str, Any]:
    """Median time of one of the ``sets`` that ``call`` runs."""
    if time.monotonic() > end:
        return {"skipped": "no time was left"}
    times = []
    try:
        for _ in range(2):  # compile, and warm up
            jax.block_until_ready(call())
        for _ in range(rounds):
            start = time.perf_counter()
            jax.block_until_ready(call())
            times.append(time.perf_counter() - start)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    seconds = statistics.median(times) / sets
    return {"seconds": seconds, "bytes": read, "bytes_per_second": read / seconds}


def _each(op: Callable) -> Callable:
    """One program that runs ``op`` on every set of inputs."""

    @jax.jit
    def run(*sets: Sequence[Any]):
        return [op(*one) for one in zip(*sets, strict=True)]

    return run


def _steps(q: list, states: list[AttentionState], policy: Policy, context: int) -> Callable[[], object]:
    """Whole decode attention of one layer: append, and by ``policy`` score, select, attend; ``states`` are used up."""
    run = jax.jit(_step_of_each(policy, context), donate_argnums=1)

    def call():
        outs, states[:] = run(q, list(states))
        return outs

    return call


def _step_of_each(policy: Policy, context: int) -> Callable:
    """A function that runs the decode attention of every set of inputs, on states that hold ``context`` tokens."""

    def run(q, states):
        outs, after = [], []
        for one, state in zip(q, states, strict=True):
            full = state.cache.lengths
            before = state.cache.replace(lengths=jnp.full_like(full, context - 1))
            state = extend(state.replace(policy=policy, cache=before), jnp.ones_like(full))
            new = one[:, :, : pool_shape(state.cache.kv[0]).kv_heads]  # the values of a key do not matter to its time
            out, state = attend(0, one, new, new, state)
            outs.append(out)
            after.append(state)
        return outs, after

    return run


def abstract_programs(sizes: Sizes, context: int, batch: int) -> list[tuple[str, Callable, tuple[Any, ...], tuple]]:
    """Name, function, abstract arguments and donated ones of the whole decode attention, for one set of inputs."""
    state = jax.eval_shape(functools.partial(_state, sizes, context, batch), jax.random.key(0))
    q = jax.ShapeDtypeStruct((batch, 1, sizes.heads, sizes.head_dim), sizes.dtype)
    policies = {"Quest": Quest(sizes.budget, dense_layers=0), "dense": Dense()}
    return [
        (f"decode attention {name}", _step_of_each(policy, context), ([q], [state]), (1,))
        for name, policy in policies.items()
    ]


def _others(sizes: Sizes, context: int, q: list, keys) -> Iterator[tuple[str, Callable[[], object]]]:
    """Dense attention of other programs, over contiguous keys and values of the same number."""
    shape = (q[0].shape[0], context, sizes.kv_heads, sizes.head_dim)
    k, v = ([_normal(jax.random.fold_in(one, n), shape, sizes.dtype) for one in keys] for n in (1, 2))
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    yield f"jax.nn.dot_product_attention {implementation} dense", functools.partial(_each(attention), q, k, v)
    if importlib.util.find_spec("torch") is not None:
        del k, v
        yield "torch SDPA dense", _torch_attention(shape, sizes, len(q))


def _torch_attention(shape: tuple[int, ...], sizes: Sizes, sets: int) -> Callable[[], object]:
    """PyTorch's scaled_dot_product_attention, where PyTorch has a device; random inputs of its own."""
    torch: Any = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, sizes.dtype)
    batch, context, kv_heads, head_dim = shape

    def random(heads, tokens):
        return [torch.randn(batch, heads, tokens, head_dim, dtype=dtype, device=device) for _ in range(sets)]

    def make():
        return random(sizes.heads, 1), random(kv_heads, context), random(kv_heads, context)

    inputs: list[Any] = []

    def call():
        if not inputs:
            inputs.extend(make())
        for one in zip(*inputs, strict=True):
            torch.nn.functional.scaled_dot_product_attention(*one, enable_gqa=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return call


def _copy(sizes: Sizes, key) -> dict[str, Any]:
    """Reads and writes a large array: the bandwidth that a kernel can hope for."""
    arrays = [_normal(one, (sizes.copy_bytes // 2,), "bfloat16") for one in jax.random.split(key, 3)]
    return _measure(functools.partial(_each(lambda x: -x), arrays), 3, sizes.rounds, 2 * sizes.copy_bytes, float("inf"))


def _nothing(sizes: Sizes) -> dict[str, Any]:
    """A program that does next to nothing: what a launch from Python costs."""
    return _measure(functools.partial(jax.jit(lambda x: -x), jnp.ones(8)), 1, sizes.rounds, 0, float("inf"))


def _state(sizes: Sizes, context: int, batch: int, key) -> AttentionState:
    """One layer with a cache full of random tokens; the metadata is random too, which costs the same."""
    state = init_attention(
        1, sizes.kv_heads, sizes.head_dim, batch=batch, capacity=context, policy=Quest(sizes.budget, dense_layers=0),
        page_size=sizes.page_size, dtype=sizes.dtype, layout="fused",
    )  # fmt: skip
    half = _normal(key, (*bounds_of(state.cache.meta[0]).shape[:-1], sizes.head_dim), "float32")
    pages = (sizes.kv_heads, batch * state.cache.pages_per_row, sizes.page_size, 2 * sizes.head_dim)
    cache = state.cache.replace(
        kv=(_normal(jax.random.fold_in(key, 3), pages, sizes.dtype),),
        meta=(jnp.concatenate([-jnp.abs(half), jnp.abs(half)], axis=-1),),
        lengths=jnp.full(batch, context, jnp.int32),
    )
    return state.replace(cache=cache)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


def _cache_bytes(sizes: Sizes, context: int, batch: int) -> int:
    token = 2 * sizes.head_dim * jnp.dtype(sizes.dtype).itemsize + 2 * sizes.head_dim * 4 // sizes.page_size
    return batch * sizes.kv_heads * context * token


def _memory() -> float:
    """Bytes of the device, or a guess where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 4e9)

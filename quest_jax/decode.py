"""The state of a generation, and the functions that advance it: prefill, one decode step, given tokens.

Every function here works eagerly and inside a caller's ``jax.jit``. Values are checked where they are known: inside
``jit`` an id out of range gives a row without tokens, and what does not fit the cache is not written.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from quest_jax.attention import (
    AttentionState,
    decode_attention,
    extend,
    init_attention,
    init_carry,
    prefill_attention,
)
from quest_jax.inputs import (
    as_batch,
    as_chunk,
    as_eos,
    as_params,
    as_policy,
    as_prefill_policy,
    as_seeds,
    as_size,
    as_state,
    bucket,
    check_model,
    inside_jit,
    is_traced,
    short_chunk,
)
from quest_jax.models import llama
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.metadata import Kind
from quest_jax.params import Params
from quest_jax.plan import plan_generation
from quest_jax.policies.base import Policy
from quest_jax.reads import PageReads, room_for, with_bounds
from quest_jax.sampling import NO_TOKEN, Greedy, Sample, make_sampler, sample


class DecodeState(struct.PyTreeNode):
    """Where a batch of generations stands.

    Attributes:
      attention: the cache and what it reads.
      logits: float32 ``[B, V]``, of each row's next token.
      done: bool ``[B]``, rows that have ended: an eos id was sampled, the cache is full, or the logits are NaN.
      keys: random key of each row.
      eos: int32 ``[n]``, ids that end a row; -1 for none.
      sampler: how tokens are drawn; temperature and top_p are arrays in it.
    """

    attention: AttentionState
    logits: Float[Array, "B V"]
    done: Bool[Array, "B"]
    keys: Key[Array, "B"]
    eos: Int[Array, "n"]
    sampler: Greedy | Sample

    @property
    def lengths(self) -> Int[Array, "B"]:
        """int32 ``[B]``, tokens in the cache, prompt included."""
        return self.attention.cache.lengths


def prefill(
    params: Params,
    tokens: Any,
    *,
    lengths: Any = None,
    capacity: int | None = None,
    budget: int | None = None,
    policy: Policy | None = None,
    prefill_budget: int | None = None,
    prefill_policy: Policy | None = None,
    temperature: Any = 0.0,
    top_k: int | None = None,
    top_p: Any = None,
    seed: Any = 0,
    eos_token_ids: Any = None,
    page_size: int = 16,
    chunk: int | None = None,
    metadata: Kind = "float32",
    implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DecodeState:
    """Reads prompts into a new cache, in chunks: memory grows with the prompt, not with its square.

    Args:
      params: of :func:`quest_jax.load`.
      tokens: prompts, ``[B, T]`` ids or a list of lists of different lengths.
      lengths: real tokens of each row of an array; the rest is padding. Inside ``jit`` a row of none, or of more than
        there are, ends at once.
      capacity: tokens each row must have room for, prompt included. None: the prompt and 256 more. Rounded up to one
        of four sizes per octave.
      budget: tokens that a decode step reads, by ``Quest(budget, dense_below="auto")``: rows so short that reading all
        of them is faster are read whole. None is dense.
      policy: another policy, instead of ``budget``.
      prefill_budget: past tokens that a chunk of the prompt reads, by ``QuoKA(prefill_budget, group="each")``. None is
        dense.
      prefill_policy: another policy for the prompt, instead of ``prefill_budget``.
      temperature, top_k, top_p: 0 is greedy; see :func:`quest_jax.sampling.make_sampler`.
      seed: one for the batch, or one a row: then a row draws what it would draw alone with its seed.
      eos_token_ids: ids that end a row; None for the model's own, () for none.
      page_size: [S] tokens of a page.
      chunk: tokens of a prefill step; None for the prefill policy's own, 256 without one.
      metadata: how the min and max of pages are kept, ``float32``, ``bfloat16`` or ``int8``; see
        :func:`~quest_jax.cache.init_cache`.
      implementation: of every op that has one of this name, e.g. ``"xla"``; None takes the best that serves.
      progress: called with (tokens read, tokens in all) after every chunk; not inside ``jit``.

    Returns:
      a state whose ``logits`` predict the first new token. Inverse key norms that only the prefill policy needed are
      dropped from its cache.

    Raises:
      TypeError, ValueError: input out of range, before anything is compiled.
      NotImplementedError: an ``implementation`` asked for by name that does not serve, with the reason.
      MemoryError: cache and temporaries do not fit, by :func:`quest_jax.plan`; the message has the bytes by part.

    Recompiles for another batch size, capacity size, page size, metadata, chunk, policy, model or dtype, for
    sampling instead of greedy, another top_k or number of eos ids; not for another prompt length, seed, or other values
    of temperature, top_p and eos.
    """
    return read_prompts(
        params, tokens, lengths=lengths, capacity=capacity, budget=budget, policy=policy,
        prefill_budget=prefill_budget, prefill_policy=prefill_policy, temperature=temperature, top_k=top_k,
        top_p=top_p, seed=seed, eos_token_ids=eos_token_ids, page_size=page_size, chunk=chunk,
        metadata=metadata, implementation=implementation, progress=progress,
    )[0]  # fmt: skip


def read_prompts(
    params: Params,
    tokens: Any,
    *,
    lengths: Any = None,
    capacity: int | None = None,
    budget: int | None = None,
    policy: Policy | None = None,
    prefill_budget: int | None = None,
    prefill_policy: Policy | None = None,
    temperature: Any = 0.0,
    top_k: int | None = None,
    top_p: Any = None,
    seed: Any = 0,
    eos_token_ids: Any = None,
    page_size: int = 16,
    chunk: int | None = None,
    metadata: Kind = "float32",
    implementation: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[DecodeState, PageReads | list[PageReads]]:
    """As :func:`prefill`, and returns what every chunk read too, each ``[layers, B]``; ``[chunks, ...]`` inside jit."""
    config = as_params(params).config
    page_size = as_size("page_size", page_size)
    policy = as_policy(budget, policy, page_size)
    prefill_policy = as_prefill_policy(prefill_budget, prefill_policy, page_size)
    chunk = as_chunk(chunk, prefill_policy)
    sampler = make_sampler(temperature, top_k, top_p)
    if top_k is not None and top_k > config.vocab_size:
        raise ValueError(f"top_k: expected at most the vocabulary, {config.vocab_size}, got {top_k}.")
    if not is_traced(tokens, lengths):
        tokens, lengths = as_batch(tokens, lengths, config.vocab_size)
        longest = int(lengths.max())
    else:
        tokens = jnp.asarray(tokens)
        if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens: expected non-empty integer ids [B, T], got {tokens.shape} of {tokens.dtype}.")
        longest = tokens.shape[1]
        lengths = jnp.full(len(tokens), longest) if lengths is None else jnp.asarray(lengths)
        # What is an error outside jit: a row of a length that it cannot have has no tokens here, and so has ended.
        lengths = jnp.where((lengths > 0) & (lengths <= longest), lengths, 0)
    asked = longest + 256 if capacity is None else as_size("capacity", capacity)
    if asked < longest:
        raise ValueError(
            f"capacity: expected room for the longest prompt, {longest} tokens, got {asked}; raise capacity or "
            "shorten the prompt."
        )
    capacity = bucket(asked, 8 * page_size)
    dtype = params.dtype
    room: dict[str, Any] = dict(
        batch=len(tokens), capacity=capacity, page_size=page_size, dtype=dtype, metadata=metadata
    )
    traced = inside_jit() or is_traced(params, tokens, lengths)
    if not traced:
        sizes_of = dict(
            page_size=page_size, chunk=chunk, policy=policy, prefill_policy=prefill_policy, metadata=metadata
        )
        plan_generation(params, len(tokens), capacity, **sizes_of).check()
    attention = _Attention(
        **room, n_layers=config.n_layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        policy=policy, prefill_policy=prefill_policy, implementation=implementation, target=dispatch.current_target(),
    )  # fmt: skip
    eos = as_eos(eos_token_ids, config.eos_token_ids, config.vocab_size)
    init = _init_state if traced else _init_state_jit
    state = init(attention, config.vocab_size, as_seeds(seed, len(tokens)), eos, sampler)
    chunk = short_chunk(chunk, longest)
    padding = ((0, 0), (0, -longest % chunk))
    if traced:
        padded = jnp.pad(jnp.asarray(tokens, jnp.int32), padding)
        lengths = jnp.asarray(lengths, jnp.int32)
        state = state.replace(done=lengths == 0)

        def read(i, carry):
            state, reads = carry
            piece = lax.dynamic_slice_in_dim(padded, i * chunk, chunk, axis=1)
            state = prefill_chunk(params, state, piece, i * chunk, lengths)
            return state, jax.tree.map(lambda every, now: every.at[i].set(now), reads, state.attention.reads)

        reads = room_for(padded.shape[1] // chunk, state.attention.reads)
        state, reads = lax.fori_loop(0, -(-lengths.max() // chunk), read, (state, reads))
        return _without_norms(state), reads
    padded, chunks = np.pad(tokens, padding), []  # on the host: there no shape is compiled for
    for start in range(0, longest, chunk):
        piece = padded[:, start : start + chunk]
        state, reads = _prefill_chunk_jit(params, state, piece, np.int32(start), lengths)
        chunks.append(reads)
        if progress is not None:
            jax.block_until_ready(state.logits)
            progress(min(start + chunk, longest), longest)
    return _without_norms(state), chunks


class _Attention(NamedTuple):
    """What :func:`init_attention` is told, static; and the device for which its layout is chosen."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    batch: int
    capacity: int
    page_size: int
    dtype: Any
    metadata: Kind
    policy: Policy
    prefill_policy: Policy
    implementation: str | None
    target: dispatch.Target


def _init_state(attention: _Attention, vocab_size: int, seeds, eos, sampler) -> DecodeState:
    options = attention._asdict()
    del options["target"]
    return DecodeState(
        attention=init_attention(**options),
        logits=jnp.zeros((attention.batch, vocab_size), jnp.float32),
        done=jnp.zeros(attention.batch, bool),
        keys=row_keys(seeds, attention.batch),
        eos=jnp.asarray(eos),
        sampler=sampler,
    )


# One program, where every array made on its own would be one.
_init_state_jit = jax.jit(_init_state, static_argnums=(0, 1))


def _without_norms(state: DecodeState) -> DecodeState:
    """Drops what no decode step will read, so that none has to keep it up to date."""
    if state.attention.policy.needs_norms:
        return state
    return state.replace(attention=state.attention.replace(cache=state.attention.cache.replace(norms=None)))


def decode_step(params: Params, state: DecodeState) -> tuple[DecodeState, Int[Array, "B"]]:
    """Draws the next token of every row from ``state.logits``, then runs the model on it.

    Jit it with ``donate_argnums=1``, and the cache is updated in place.

    Returns:
      the new state, and int32 ``[B]`` tokens; ``-1`` for a row that had ended before. The token that ends a row, eos
      or the one for which the cache has no room, is returned and not fed to the model.

    Example:
      >>> import jax, quest_jax
      >>> params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 2, 4, 2, 8, 512), seed=0)
      >>> state = quest_jax.prefill(params, [[1, 2, 3]], budget=64)
      >>> step = jax.jit(quest_jax.decode_step, donate_argnums=1)
      >>> for _ in range(4):
      ...     state, token = step(params, state)
      >>> state.lengths.tolist()
      [7]
    """
    as_params(params)
    as_state(state)
    keys = jax.vmap(jax.random.split)(state.keys)
    token = sample(state.sampler, state.logits, keys[:, 1])
    token = jnp.where(state.done, NO_TOKEN, token)
    full = state.lengths >= state.attention.cache.capacity
    # No token from a row that had not ended: its logits are NaN, and it ends here.
    done = state.done | jnp.isin(token, state.eos) | (token == NO_TOKEN) | full
    return _feed(params, state.replace(keys=keys[:, 0], done=done), token, ~done), token


def feed_tokens(params: Params, state: DecodeState, tokens: Any, *, lengths: Any = None) -> DecodeState:
    """Runs given tokens one at a time through the decode path, as if they had been generated.

    With a sparse policy this reads a question as sparsely as the answer is written (Quest's own evaluation does).
    The state given stays usable: one prefilled context can take many questions. A row that had ended goes on with the
    tokens it is given, so a conversation can take its next turn.

    Args:
      params, state: as for :func:`decode_step`.
      tokens: ``[B, T]`` ids or a list of lists; see :func:`prefill`.
      lengths: real tokens of each row of an array.

    Returns:
      the state after the tokens; its ``logits`` predict what comes next.

    Raises:
      TypeError, ValueError: input out of range, or no room for the tokens.

    Recompiles for another batch size, capacity, policy, or width of ``tokens`` rounded up to a power of two.
    """
    as_params(params)
    as_state(state)
    if is_traced(params, state, tokens, lengths):
        tokens = jnp.asarray(tokens)
        lengths = jnp.full(len(tokens), tokens.shape[1]) if lengths is None else jnp.asarray(lengths)
        return _feed_all(params, state, tokens, lengths)
    tokens, lengths = as_batch(tokens, lengths, params.config.vocab_size)
    if len(tokens) != len(state.done):
        raise ValueError(f"feed_tokens: expected {len(state.done)} rows as in the state, got {len(tokens)}.")
    most, capacity = int((state.lengths + lengths).max()), state.attention.cache.capacity
    if most > capacity:
        raise ValueError(
            f"feed_tokens: expected at most {capacity} tokens in a row, the cache's capacity, got {most}; prefill with "
            "a larger capacity."
        )
    width = max(16, 1 << (tokens.shape[1] - 1).bit_length())
    padded = jnp.pad(jnp.asarray(tokens), ((0, 0), (0, width - tokens.shape[1])))
    return _feed_all_jit(params, state, padded, jnp.asarray(lengths))


def replace_policy(state: DecodeState, budget: int | None = None, *, policy: Policy | None = None) -> DecodeState:
    """Returns the state decoding with another budget or policy; neither is dense. The cache is shared, not copied.

    Raises:
      TypeError, ValueError: no policy, or one that needs key norms, blocks of pages, or a memory of its own, where the
        state has none.
    """
    as_state(state)
    cache = state.attention.cache
    policy = as_policy(budget, policy, cache.page_size)
    if policy.needs_norms and cache.norms is None:
        raise ValueError(
            f"policy: {type(policy).__name__} reads inverse key norms, which this cache does not keep; prefill with a "
            "policy that needs them (policy=), then others can replace it."
        )
    if policy.needs_blocks not in (None, cache.block_pages):
        kept = "none" if cache.block_pages is None else f"blocks of {cache.block_pages}"
        raise ValueError(
            f"policy: {type(policy).__name__} reads metadata of blocks of {policy.needs_blocks} pages, and this cache "
            f"keeps {kept}; prefill with a policy that needs them (policy=), then others can replace it."
        )
    attention = state.attention
    if cache.limit is not None and policy != attention.policy:
        raise ValueError(
            f"policy: a compact state decodes by the policy it was made for, {attention.policy!r}, got {policy!r}; "
            "replace it before quest_jax.compact."
        )
    if policy.remembers and (cache.memory is None or not policy.continues(attention.policy)):
        raise ValueError(
            f"policy: {type(policy).__name__} keeps a memory of the prompt, which this state has not, or not for this "
            "policy; prefill with it (policy=)."
        )
    cache = cache if policy.remembers else cache.replace(memory=None)
    reads, carry = with_bounds(policy.diagnoses, attention.reads), init_carry(policy, cache)
    return state.replace(attention=attention.replace(policy=policy, cache=cache, carry=carry, reads=reads))


def row_keys(seed: Any, batch: int) -> Key[Array, "B"]:
    """Returns a random key a row, from one seed for all or one for each."""
    seeds = jnp.asarray(as_seeds(seed, batch))
    # A seed of its own gives a row the key that it has as row 0 of a batch of one.
    rows = jnp.arange(batch) if seeds.ndim == 0 else jnp.zeros(batch, int)
    seeds = jnp.broadcast_to(seeds, batch)
    return jax.vmap(lambda s, row: jax.random.fold_in(jax.random.key(s), row))(seeds, rows)


def prefill_chunk(params, state, tokens, start, lengths):
    """Reads positions ``start ...`` of every prompt; rows that end before take nothing."""
    n_new = jnp.clip(lengths - start, 0, tokens.shape[1])
    hidden, attention = _run(params, state, tokens, n_new, prefill_attention, lengths)
    last = jnp.maximum(n_new - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return _with_logits(params, state, attention, hidden, n_new > 0)


def _prefill_chunk(params, state, tokens, start, lengths):
    """As :func:`prefill_chunk`, and returns the reads apart: the state is donated to the next chunk."""
    state = prefill_chunk(params, state, tokens, start, lengths)
    return state, state.attention.reads


_prefill_chunk_jit = jax.jit(_prefill_chunk, donate_argnames="state")


def _feed(params, state, token, write):
    """Runs one decode step on ``token [B]`` in the rows where ``write``."""
    token = jnp.where(write, token, 0)  # a row that has ended has no token; an id out of range stays what it is
    hidden, attention = _run(params, state, token[:, None], write.astype(jnp.int32), decode_attention, None)
    return _with_logits(params, state, attention, hidden[:, 0], write)


def _feed_all(params, state, tokens, lengths):
    def step(t, state):
        token = lax.dynamic_index_in_dim(tokens, t, axis=1, keepdims=False)
        full = state.lengths >= state.attention.cache.capacity
        given = t < lengths
        return _feed(params, state.replace(done=state.done | (given & full)), token, given & ~full)

    state = state.replace(done=state.done & (lengths <= 0))
    return lax.fori_loop(0, lengths.max(), step, state)


_feed_all_jit = jax.jit(_feed_all)


def _run(params, state, tokens, n_new, attend, rope_lengths):
    config, cache = params.config, state.attention.cache
    check_model(config, cache)
    attention = extend(state.attention, n_new)
    positions = attention.starts[:, None] + jnp.arange(tokens.shape[1])
    rope_lengths = attention.cache.lengths if rope_lengths is None else rope_lengths
    # For this run only: the state keeps the policies that it was given.
    given = dict(policy=attention.policy, prefill_policy=attention.prefill_policy)
    fitted = attention.replace(**{name: policy.fitted(config) for name, policy in given.items()})
    run = functools.partial(llama.apply, params.weights, params.config)
    hidden, attention = run(tokens, positions, attend, fitted, rope_lengths=rope_lengths)
    return hidden, attention.replace(**given)


def _with_logits(params, state, attention, hidden, fresh):
    logits = llama.project_logits(params.weights, params.config, hidden)
    return state.replace(attention=attention, logits=jnp.where(fresh[:, None], logits, state.logits))

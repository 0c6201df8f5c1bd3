"""Metadata in fewer bytes: the bound holds for every key, is not loose, and does not move when a page grows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.metadata import Kind, bounds_of, decode, empty_metadata, encode, metadata_nbytes
from quest_jax.pallas_kernels.page_scores.op import page_scores

KINDS = Kind.__args__
WIDTH, SIZE, PAGES = 8, 16, 2
TINY = float(np.finfo(np.float32).tiny)

write = jax.jit(append)


def grow(keys, kind, steps):
    """Yields ``(tokens written, metadata)`` after each of ``steps`` appends of ``keys [T, D]`` to an empty cache."""
    kv = tuple(jnp.full((1, PAGES, SIZE, WIDTH), jnp.nan, keys.dtype) for _ in range(2))
    meta, at = empty_metadata(1, 1, PAGES, WIDTH, kind), 0
    for step in steps:
        new = jnp.asarray(keys[None, at : at + step, None])
        kv, meta = write(kv, meta, new, new, jnp.array([at], jnp.int32), jnp.array([at + step], jnp.int32))
        at += step
        yield at, meta


def as_float32(meta):
    """The bounds as NumPy computes them, one rounding after each operation; the library's must be the same bits."""
    got = np.asarray(decode(meta))
    np.testing.assert_array_equal(got, np.asarray(jax.jit(decode)(meta)))
    if bounds_of(meta).dtype == jnp.int8:
        codes, steps, offsets = (np.asarray(leaf, np.float32) for leaf in meta)
        np.testing.assert_array_equal(got, offsets[..., None] + steps[..., None] * codes)
    return got[0, 0]


def check_bounds(keys, meta, length):
    """Every key of every page lies within its bounds; denormals count as zero, as in the CPU's arithmetic."""
    keys, bounds = (np.where(np.abs(x) < TINY, 0, x) for x in (keys, as_float32(meta)))
    assert not np.isnan(bounds).any()
    for page in range(-(-length // SIZE)):
        own = keys[page * SIZE : min(length, (page + 1) * SIZE)]
        assert (bounds[page, :WIDTH] <= own.min(axis=0)).all() and (own.max(axis=0) <= bounds[page, WIDTH:]).all()


@st.composite
def key_tables(draw):
    """Keys ``[2 S, D]``: of one magnitude or one a channel, of one sign or both, around zero or far from it."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    keys = rng.uniform(-1, 1, (PAGES * SIZE, WIDTH))
    if draw(st.booleans()):
        keys = rng.standard_cauchy(keys.shape).clip(-1e3, 1e3)
    kind_of_sign = draw(st.sampled_from(["both", "negative", "positive", "constant"]))
    keys = {"both": keys, "negative": -np.abs(keys), "positive": np.abs(keys), "constant": keys[:1] + 0 * keys}[
        kind_of_sign
    ]
    exponents = draw(st.lists(st.integers(-149, 118), min_size=1, max_size=WIDTH))
    keys = keys * 2.0 ** np.resize(exponents, WIDTH)
    keys = keys + draw(st.sampled_from([0.0, 0.0, 1.0, -3.0, 1e6, -1e30]))
    keys[rng.random(keys.shape) < draw(st.sampled_from([0.0, 0.3]))] = 0
    return keys.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(keys=key_tables())
def test_every_key_lies_within_the_bounds_after_every_append(kind, keys):
    *_, (_, whole) = grow(keys, kind, [len(keys)])
    for length, meta in grow(keys, kind, [1] * len(keys)):
        check_bounds(keys, meta, length)
    for one, other in zip(jax.tree.leaves(meta), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(one, other, err_msg="a page that grew by tokens has other bounds")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100)
@given(keys=key_tables())
def test_the_bounds_are_no_looser_than_the_form_must_be(kind, keys):
    *_, (_, meta) = grow(keys, kind, [len(keys)])
    bounds = as_float32(meta).astype(np.float64)
    for page in range(PAGES):
        own = keys[page * SIZE : (page + 1) * SIZE].astype(np.float64)
        low, high = own.min(axis=0), own.max(axis=0)
        loose = np.concatenate([low - bounds[page, :WIDTH], bounds[page, WIDTH:] - high])
        span, largest = high.max() - low.min(), np.abs(own).max()
        allowed = {
            "float32": TINY,
            "bfloat16": 2.0**-7 * np.concatenate([np.abs(low), np.abs(high)]) + TINY,
            # A step of a 251st of the span, rounded up by a sixteenth, unless the keys differ by too little.
            "int8": 17 / 16 * max(span / 251, largest * 2.0**-19, 2.0**-122) * (1 + 1e-6) + TINY,
        }[kind]
        assert (loose <= allowed).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_metadata_of_16_bit_keys_holds_and_in_their_own_dtype_is_exact(dtype):
    keys = jnp.asarray(np.random.default_rng(0).normal(size=(PAGES * SIZE, WIDTH)), dtype)
    for kind in KINDS:
        *_, (_, meta) = grow(keys, kind, [len(keys)])
        check_bounds(np.asarray(keys, np.float32), meta, len(keys))
        exact = np.asarray(keys, np.float32).reshape(PAGES, SIZE, WIDTH)
        same = (as_float32(meta) == np.concatenate([exact.min(axis=1), exact.max(axis=1)], axis=-1)).all()
        assert same == (kind == "float32" or (kind, dtype) == ("bfloat16", jnp.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38, -3.4e38])
def test_a_key_without_a_bound_leaves_its_page_ahead_of_the_others(kind, bad):
    """As in float32: its score is infinite or NaN, or as large as the key, and never below that of a sound page."""
    keys = np.random.default_rng(0).normal(size=(PAGES * SIZE, WIDTH)).astype(np.float32)
    keys[5, 3] = bad
    *_, (_, meta) = grow(keys, kind, [len(keys)])
    q = jnp.full((1, 1, WIDTH), np.sign(bad) if np.isfinite(bad) else 1.0)
    scores = np.asarray(page_scores(q, meta, jnp.array([len(keys)]), page_size=SIZE))[0, 0]
    assert np.isfinite(scores[1])
    assert not scores[0] <= scores[1]
    bounds = as_float32(meta)[0]
    assert not bounds[3] > bad and not bounds[WIDTH + 3] < bad


@pytest.mark.parametrize("pages", [40, 256, 300, 1000])
@pytest.mark.parametrize(("reduce", "beta"), [("mean", 1.0), ("max", 0.5), ("none", 1.0)])
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_narrow_metadata_scores_as_what_it_decodes_to(kind, reduce, beta, pages):
    """More than 256 pages are widened in pieces, of which the last overlaps; memory past the length is poisoned."""
    rng = np.random.default_rng(0)
    low = rng.normal(size=(2, 2, pages, WIDTH)) + 3 * rng.normal(size=(1, 1, 1, WIDTH))
    meta = encode(jnp.asarray(low, jnp.float32), jnp.asarray(low + rng.random(low.shape), jnp.float32), kind)
    lengths = np.array([pages * SIZE, pages * SIZE // 3])
    unused = np.arange(pages) * SIZE >= lengths[:, None]

    def poison(leaf):
        mask = jnp.asarray(unused).reshape(2, 1, pages, *(1,) * (leaf.ndim - 3))
        return jnp.where(mask, 127 if leaf.dtype == jnp.int8 else jnp.nan, leaf).astype(leaf.dtype)

    q = jnp.asarray(rng.normal(size=(2, 6, WIDTH)), jnp.float32)
    score = functools.partial(page_scores, q, page_size=SIZE, reduce=reduce, beta=beta)
    got = score(jax.tree.map(poison, meta), jnp.asarray(lengths))
    expected = score(decode(meta), jnp.asarray(lengths))
    np.testing.assert_array_equal(np.isneginf(got), np.broadcast_to(unused[:, None], got.shape))
    live = np.isfinite(expected)
    np.testing.assert_allclose(np.asarray(got)[live], np.asarray(expected)[live], rtol=1e-5, atol=1e-4)


def test_the_cpu_widens_no_more_than_a_piece_of_the_metadata():
    meta = empty_metadata(1, 8, 4096, 128, "bfloat16")
    compiled = jax.jit(functools.partial(page_scores, page_size=16)).lower(
        jnp.zeros((1, 32, 128)), meta, jnp.zeros(1, jnp.int32)
    )
    assert compiled.compile().memory_analysis().temp_size_in_bytes < bounds_of(meta).nbytes / 2


@pytest.mark.parametrize(("kind", "nbytes"), [("float32", 1024), ("bfloat16", 512), ("int8", 264)])
def test_bytes_of_a_page(kind, nbytes):
    assert metadata_nbytes(128, kind) == nbytes
    meta = empty_metadata(2, 3, 5, 128, kind)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(meta)) == 2 * 3 * 5 * nbytes


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
@pytest.mark.parametrize(("platform", "device"), [("tpu", "TPU v5 lite"), ("gpu", "NVIDIA H200")])
def test_the_kernels_say_what_narrow_metadata_they_do_not_serve(platform, device, kind):
    kv = jnp.zeros((1, 16, 16, 256), jnp.bfloat16)
    meta = empty_metadata(1, 1, 16, 128, kind)
    new, at = jnp.zeros((1, 1, 1, 128), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    q = jnp.zeros((1, 4, 128), jnp.bfloat16)
    with dispatch.target(platform, device, (9, 0) if platform == "gpu" else None):
        if platform == "tpu":
            with pytest.raises(NotImplementedError, match=f"writes metadata in float32, got {kind}"):
                append(kv, meta, new, new, at, at + 1, implementation="mosaic_tpu")
        if (platform, kind) != ("tpu", "bfloat16"):
            with pytest.raises(NotImplementedError, match=f"metadata in float32.*, got {kind}"):
                page_scores(q, meta, at + 1, page_size=16, implementation=f"mosaic_{platform}")
            assert "pallas_call" not in str(jax.make_jaxpr(functools.partial(page_scores, page_size=16))(q, meta, at))
        assert "pallas_call" not in str(jax.make_jaxpr(append)(kv, meta, new, new, at, at + 1))

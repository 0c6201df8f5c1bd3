"""Loki: every step against the method written once more in NumPy; its basis, and files that are none."""

import io
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.policies.basis import Basis, basis_of, load_basis
from quest_jax.policies.loki import Loki
from tests.policies.test_memories import KV_HEADS, PROMPTS, STEPS, WIDTH, draw, run, weights_of

BUDGET, CHANNELS = 16, 5


def of_another_text(n=60, seed=7):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((KV_HEADS, n, WIDTH)) * np.geomspace(3, 0.1, WIDTH)).astype(np.float32)


def components(keys, channels):
    """The first principal components of ``keys [n, D]``, by a singular value decomposition."""
    return np.linalg.svd(keys - keys.mean(axis=0))[2][:channels].T


@pytest.mark.parametrize("group", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_few_components_choose(group, calibrated):
    other = of_another_text()
    policy = Loki(BUDGET, dense_layers=0, channels=CHANNELS, basis=basis_of([other]) if calibrated else None)
    out, state = run(policy, group)
    for row, prompt in enumerate(PROMPTS):
        q, k, v = (x[row].astype(np.float64) for x in draw(group))
        for i in range(STEPS):
            t = prompt + i
            for h in range(KV_HEADS * group):
                kv = h // group
                # A row's own keys are those up to the step that first has more than the budget.
                own = k[: max(prompt, BUDGET) + 1, kv]
                basis = components(other[kv].astype(np.float64) if calibrated else own, CHANNELS)
                scores = (k[: t + 1, kv] @ basis) @ (q[t, h] @ basis)
                scores[t] = np.inf
                read = np.sort(np.argsort(-scores, kind="stable")[: min(BUDGET, t + 1)])
                want = weights_of(q[t, h], k[:, kv], read) @ v[read, kv]
                np.testing.assert_allclose(out[row, i, h], want, atol=2e-5, err_msg=f"{row} {i} {h}")
    heads = KV_HEADS * group
    assert np.asarray(state.reads.read)[0].tolist() == [heads * BUDGET] * len(PROMPTS)
    assert np.asarray(state.reads.scored)[0].tolist() == [KV_HEADS * (prompt + STEPS) for prompt in PROMPTS]
    assert policy.scored_nbytes(WIDTH, 2) == 2 * CHANNELS and Loki(BUDGET).scored_nbytes(WIDTH, 4) == WIDTH


def test_every_layer_has_its_own_basis():
    texts = [of_another_text(seed=seed) for seed in range(3)]
    policy = Loki(BUDGET, channels=CHANNELS, basis=basis_of(texts))
    memory = quest_jax.init_attention(3, KV_HEADS, WIDTH, batch=1, capacity=32, policy=policy).cache.memory
    for layer, keys in enumerate(texts):
        for kv in range(KV_HEADS):
            kept, want = np.asarray(memory[layer]["basis"][0, kv]), components(keys[kv], CHANNELS)
            np.testing.assert_allclose(kept @ kept.T, want @ want.T, atol=1e-5)


def test_a_basis_is_its_numbers(tmp_path):
    one = basis_of([of_another_text()])
    one.save(tmp_path / "basis.npz")
    again = load_basis(tmp_path / "basis.npz")
    assert again == one and hash(again) == hash(one) and again is not one
    np.testing.assert_array_equal(again.vectors, one.vectors)
    other = basis_of([of_another_text(seed=8)])
    assert other != one and other != "a basis"
    assert Loki(64, basis=one) == Loki(64, basis=again) != Loki(64, basis=other)
    assert Loki(32, basis=one).continues(Loki(64, basis=again)) and not Loki(64).continues(Loki(64, basis=one))
    assert repr(one).startswith("Basis(1 layers, 2 KV heads, 16 channels, ")
    with pytest.raises(ValueError, match="read-only"):
        one.vectors[0] = 0


def stored(array, name="loki_basis", write=np.savez):
    file = io.BytesIO()
    write(file, **{name: array})
    return file.getvalue()


def lying(shape):
    """A file whose header promises another shape than it holds, its checksum right."""
    file, member = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("loki_basis.npy", member.getvalue() + b"\0" * 64)
    return file.getvalue()


def test_files_that_are_no_basis_are_refused(tmp_path):
    good = basis_of([of_another_text()]).vectors
    whole = stored(good)
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 1
    scaled, nan = 1.1 * good, good.copy()
    nan[0, 0, 0, 0] = np.nan
    cases = {
        b"": "not a zip file", b"basis": "not a zip file", whole[:-40]: "not a zip file", bytes(broken): "Bad CRC-32",
        stored(good, "other"): "one array loki_basis, got ..other", stored(scaled): "orthonormal columns",
        stored(nan): "finite vectors", stored(good.astype(np.float64)): "float32", stored(good[0]): "float32",
        stored(good[..., :4]): "float32 .layers, K, D, D., got float32 of shape", stored(good[:0]): "shape .0, 2",
        stored(np.array([{}], dtype=object)): "float32", stored(good, write=np.savez_compressed): "uncompressed",
        lying((999999, 9999, 128, 128)): "got .* bytes that begin", lying((1, 1, 4)): "got .* bytes that begin",
    }  # fmt: skip
    path = tmp_path / "basis.npz"
    for data, message in cases.items():
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"basis.npz: expected a basis .*{message}"):
            load_basis(path)
    with pytest.raises(FileNotFoundError):
        load_basis(tmp_path / "none.npz")
    for cut in range(0, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="expected a basis that quest-jax calibrate wrote"):
            load_basis(path)


def test_what_does_not_fit_is_refused(as_a_user):
    basis = basis_of([of_another_text()])
    for changes, error, message in (
        (dict(granularity="page"), ValueError, "expected granularity 'token'"),
        (dict(channels=0), ValueError, "channels to be at least 1"),
        (dict(channels=True), TypeError, "channels to be an integer"),
        (dict(basis="basis.npz"), TypeError, "expected a basis of load_basis or None, got str"),
    ):
        with pytest.raises(error, match=message):
            Loki(64, **changes)
    for layers, heads, policy, message in (
        (2, KV_HEADS, Loki(16, basis=basis), r"expected a basis of this model, \[2, 2, 16, 16\] .*, got \[1, 2, 16"),
        (1, 1, Loki(16, basis=basis), "expected a basis of this model"),
        (1, 1, Loki(16, channels=17), "channels of at most 16"),
    ):
        with pytest.raises(ValueError, match=message):
            quest_jax.init_attention(layers, heads, WIDTH, batch=1, capacity=32, policy=policy)
    with pytest.raises(ValueError, match="float32"):
        Basis(jnp.ones((2, 3)))

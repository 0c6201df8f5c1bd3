"""What compiles, how often, and what a second process finds compiled."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import quest_jax
from quest_jax import compilation
from quest_jax.decode import _prefill_chunk_jit
from quest_jax.generate import _decode_block_jit
from quest_jax.inputs import bucket
from tests.imports import ROOT
from tests.models_for_tests import CONFIG, tiny

COUNTED = """if True:
    import collections, json, sys
    import jax, jax.numpy as jnp
    import quest_jax
    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rsplit("/", 1)[-1]]))
    jax.jit(lambda x: x + 1)(jnp.zeros(3)).block_until_ready()  # JAX has compiled before the cache is on
    path = quest_jax.enable_compilation_cache(sys.argv[1])
    assert path == quest_jax.enable_compilation_cache(sys.argv[1])
    params = quest_jax.random_params(quest_jax.LlamaConfig(64, 32, 64, 2, 4, 2, 8, 512), seed=0)
    out = quest_jax.generate(params, [[1, 2, 3]], budget=64, max_new_tokens=3)
    print(json.dumps([str(path), out.tokens.tolist(), events["cache_hits"], events["cache_misses"]]))
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    def process():
        environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", COUNTED, str(tmp_path / "new" / "cache")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    path, tokens, hits, misses = process()
    assert path == str(tmp_path / "new" / "cache") and hits == 0 and misses >= 3
    assert process() == [path, tokens, misses, 0]
    # The programs of prefill and decoding, and no long tail of small ones that each cost a call of the compiler.
    assert misses <= 20


@pytest.fixture
def as_before():
    """Puts JAX's configuration back."""
    names = (
        "jax_compilation_cache_dir", "jax_enable_compilation_cache",
        "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    values = {name: jax.config.values[name] for name in names}
    yield
    for name, value in values.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


def test_it_is_kept_beside_the_models_or_where_jax_was_told(as_before, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    path = quest_jax.enable_compilation_cache()
    assert path.parent == tmp_path / "quest_jax" / "compiled" and path.is_dir()
    assert path.stat().st_mode & 0o77 == 0, "others could plant programs"
    moved = quest_jax.enable_compilation_cache(tmp_path / "other")
    jax.jit(lambda x: x * 3)(np.ones(5)).block_until_ready()
    assert moved == tmp_path / "other" and any(moved.iterdir()) and not any(path.iterdir())
    assert quest_jax.enable_compilation_cache() == moved


def test_a_directory_that_cannot_be_is_an_error(as_a_user, as_before, tmp_path):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(OSError, match="file: expected a directory for compiled programs .*give another one"):
        quest_jax.enable_compilation_cache(tmp_path / "file")
    with pytest.raises(OSError, match="expected a directory for compiled programs"):
        quest_jax.enable_compilation_cache(tmp_path / "file" / "below")
    with pytest.raises(TypeError, match="directory: expected a path or None, got 3"):
        quest_jax.enable_compilation_cache(3)
    assert jax.config.jax_compilation_cache_dir == before


def compiled(prompt, **options):
    """How many programs of prefill and of decoding a call compiles."""
    before = _prefill_chunk_jit._cache_size(), _decode_block_jit._cache_size()
    tokens = [list(range(1, 1 + prompt))] if prompt < CONFIG.vocab_size else [[1] * prompt]
    quest_jax.generate(tiny(), tokens, **{"max_new_tokens": 3, "capacity": 900, "budget": 48} | options)
    return _prefill_chunk_jit._cache_size() - before[0], _decode_block_jit._cache_size() - before[1]


@pytest.mark.slow
def test_what_compiles_is_what_the_document_says():
    """The tables of docs/compilation.md, in their order. A page size of its own keeps other tests' programs out."""
    own = {"page_size": 24, "chunk": 128}
    assert compiled(300, **own) == (1, 1)
    # Nothing: another prompt length, number of new tokens, seed, end, and a capacity of the same size.
    for options in ({}, {"max_new_tokens": 40}, {"seed": 3}, {"eos_token_ids": [5]}, {"capacity": 960}):
        assert compiled(310, **own, **options) == (0, 0), options
    assert compiled(500, **own) == (0, 0)
    # Sampling is another program, once; its numbers are not.
    assert compiled(300, **own, temperature=0.5) == (1, 1)
    assert compiled(300, **own, temperature=1.5, seed=2) == (0, 0)
    assert compiled(300, **own, temperature=1.5, top_p=0.9) == (1, 1)
    # Budget, policy, capacity size, batch, chunk, and a prompt shorter than a chunk.
    assert compiled(300, **own, **{"budget": 72}) == (1, 1)
    assert compiled(300, **own, **{"budget": None}) == (1, 1)
    assert compiled(300, **own, prefill_budget=64) == (1, 1)
    assert compiled(300, **own, capacity=1000) == (1, 1)
    assert compiled(300, page_size=24, chunk=64) == (1, 0)
    assert compiled(30, **own) == (1, 0)
    assert compiled(20, **own) == (0, 0)


def test_four_sizes_an_octave():
    sizes = {bucket(n, 128) for n in range(1025, 32769)}
    assert sorted(sizes)[:4] == [1280, 1536, 1792, 2048] and len(sizes) == 4 * 5
    assert max(bucket(n, 128) / n for n in range(1025, 32769)) <= 1.25

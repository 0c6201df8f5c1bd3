"""Every family through the paged cache: prompts whole and in chunks, decoding, and policies that select everything."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file

import quest_jax
from quest_jax import cli, models_table
from quest_jax.weights.families import FAMILIES
from tests.check_models import FIXTURES, LENGTHS, POLICIES, ROOT, decoding_difference, model_type, prompt_difference

TOLERANCE = 1e-4
NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir() and model_type(path) != "llama")


@functools.cache
def loaded(name: str) -> tuple[quest_jax.Params, dict[str, np.ndarray]]:
    return quest_jax.load(FIXTURES / name), load_file(FIXTURES / name / "expected.safetensors")


def test_the_table_is_what_was_checked():
    checks = models_table.read_checks()
    folders = sorted(path for path in FIXTURES.iterdir() if path.is_dir())
    assert set(checks) == set(FAMILIES)
    for kind, check in checks.items():
        assert check["checkpoints"] == [folder.name for folder in folders if model_type(folder) == kind]
        assert 0 < check["largest_difference"] < TOLERANCE


def test_the_readme_has_the_table(capsys):
    assert cli.main(["models", "--markdown"]) == 0
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()
    assert cli.main(["models"]) == 0
    assert "GptOssForCausalLM" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("length", "chunk"), [*((length, None) for length in LENGTHS), (48, 7)])
@pytest.mark.parametrize("name", NAMES)
def test_prompts_give_the_logits_of_transformers(name, length, chunk):
    assert prompt_difference(FIXTURES / name, length, chunk) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("policies", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_gives_the_logits_of_transformers(name, policies):
    """A prompt of 13 tokens, then one token after the other; budgets hold everything, so nothing may be lost."""
    assert decoding_difference(FIXTURES / name, policies) < TOLERANCE


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
def test_layers_with_a_window_read_its_pages_only(name):
    params, expected = loaded(name)
    policy = quest_jax.Quest(8, dense_layers=0)
    out = quest_jax.generate(params, expected["tokens"][None], policy=policy, page_size=4, max_new_tokens=8)
    read, live = (np.asarray(count)[-1, :, 0] for count in (out.stats.reads.read, out.stats.reads.live))
    kv_heads = params.config.n_kv_heads
    for layer in range(params.config.n_layers):
        window = params.config.window(layer)
        pages = 2 if window is None else -(-(window - 1) // 4) + 1
        assert read[layer] <= pages * kv_heads
        assert live[layer] == read[layer] if window is not None else live[layer] > pages * kv_heads
        assert window is None or read[layer] >= (window // 4) * kv_heads


def letters() -> tokenizers.Tokenizer:
    """A tokenizer of 64 ids, as many as the checkpoints have: one a character."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {chr(35 + i): 3 + i for i in range(61)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_generates(name, tmp_path, capsys):
    folder = shutil.copytree(FIXTURES / name, tmp_path / name)
    letters().save(str(folder / "tokenizer.json"))
    command = ["generate", "--model", str(folder), "--prompt", "THE CAPITAL", "--budget", "16", "--max-new-tokens", "5"]
    assert cli.main([*command, "--no-compilation-cache"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_the_library_keeps_it(name, tmp_path):
    params, _ = loaded(name)
    quest_jax.save(params, tmp_path / "model")
    again = quest_jax.load(tmp_path / "model")
    assert again.config == params.config
    for stored, restored in zip(*(jax.tree.leaves(one.weights) for one in (params, again)), strict=True):
        np.testing.assert_array_equal(stored, restored)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near(name):
    params, expected = quest_jax.load(FIXTURES / name, dtype="bfloat16"), loaded(name)[1]
    state = quest_jax.prefill(params, expected["tokens"][None], page_size=4)
    exact = expected["logits_48"]
    assert np.sqrt(np.mean((np.asarray(state.logits[0]) - exact[-1]) ** 2)) < 0.1 * exact.std()
    assert params.weights["embed"].dtype == jnp.bfloat16

"""Fresh random checkpoints, computed by transformers and by us in one process. Needs ``quest-jax[parity]``.

    python -m pytest -m parity tests/parity

Where the ordinary tests compare with recorded values, this draws new configs, so that a newer transformers, another
seed or an unusual combination of settings shows up too.
"""

import random

import jax.numpy as jnp
import numpy as np
import pytest

import quest_jax
from quest_jax.weights.load import load
from tests.models.dense import init_dense, one_shot, stepwise

pytestmark = pytest.mark.parity

LENGTH = 40
OTHERS = ("mistral", "qwen2", "qwen3", "qwen3_moe", "smollm3", "phi3", "phi3_longrope", "gemma3", "gpt_oss")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


def draw_rope(kind: str, rng: random.Random) -> dict:
    """A `rope_parameters` entry whose scaling acts within LENGTH tokens."""
    rope: dict = {"rope_type": kind, "rope_theta": rng.choice([1000.0, 10000.0, 5e5])}
    if kind != "default":
        rope["factor"] = rng.choice([1.5, 4.0, 32.0])
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = rng.choice([16, 64, 100])
    if kind == "llama3":
        rope |= {"low_freq_factor": rng.choice([1.0, 1.5]), "high_freq_factor": rng.choice([4.0, 8.0])}
    if kind == "yarn":
        rope |= rng.choice([{}, {"truncate": False}, {"attention_factor": 1.1}, {"mscale": 0.7, "mscale_all_dim": 1.2}])
        rope |= rng.choice([{}, {"beta_fast": 8.0, "beta_slow": 0.5}])
    return rope


def draw_config(kind: str, seed: int) -> dict:
    rng = random.Random(f"{kind}-{seed}")
    kv_heads = rng.choice([1, 2, 3])
    heads = kv_heads * rng.choice([1, 2, 3, 4])
    return {
        "vocab_size": rng.randrange(20, 90),
        "hidden_size": heads * rng.choice([4, 6, 8]),
        "intermediate_size": rng.randrange(16, 64),
        "num_hidden_layers": rng.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([8, 10, 16, 20]),
        "max_position_embeddings": 16 if kind == "dynamic" else 512,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-2]),
        "initializer_range": 0.2,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": draw_rope(kind, rng),
    }


@pytest.fixture(params=["default", "linear", "dynamic", "yarn", "llama3"])
def kind(request):
    return request.param


@pytest.mark.filterwarnings("default")  # theirs are not our errors
@pytest.mark.parametrize("seed", range(4))
def test_logits_equal_transformers(torch, transformers, kind, seed, tmp_path):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**draw_config(kind, seed))
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    with torch.no_grad():
        cache = transformers.DynamicCache(config=config)
        # One by one first: dynamic NTK keeps the base of the longest sequence that a model has seen.
        steps = [model(token[None, None], cache=cache, use_cache=True).logits[0, 0] for token in tokens]
        whole = model(tokens[None]).logits[0].numpy()

    params = load(tmp_path)
    ours, _ = one_shot(params.weights, params.config, tokens[None].numpy(), init_dense(params.config, 1, LENGTH))
    assert whole.std() > 0.3
    np.testing.assert_allclose(ours[0], whole, rtol=0, atol=TOLERANCE)
    ours = stepwise(params.weights, params.config, tokens.numpy())
    np.testing.assert_allclose(ours, torch.stack(steps).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", OTHERS)
def test_other_families_equal_transformers(torch, transformers, name, seed, tmp_path):
    """The recorded configurations with other weights and tokens, through the paged cache."""
    from tests.parity import record

    assert set(record.FAMILIES) == set(OTHERS)
    record.make_model(name, 1000 + seed).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(4, 64, (LENGTH,))
    with torch.no_grad():
        whole = model(tokens[None]).logits[0].numpy()
    params = load(tmp_path)
    for chunk in (5, None):
        state = quest_jax.prefill(params, tokens[None].numpy(), page_size=4, chunk=chunk)
        np.testing.assert_allclose(state.logits[0], whole[-1], rtol=0, atol=TOLERANCE)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("seed", range(3))
def test_rotation_equals_transformers_at_long_positions(torch, transformers, kind, seed, tmp_path):
    """Cosine and sine at positions up to a million, realistic sizes."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from quest_jax.models.rope import rope_rotation
    from quest_jax.weights.hf_config import parse_config

    rng = random.Random(f"long-{kind}-{seed}")
    rope = draw_rope(kind, rng)
    if kind in ("yarn", "llama3"):
        rope["original_max_position_embeddings"] = rng.choice([4096, 8192])
    config = transformers.LlamaConfig(
        head_dim=rng.choice([64, 96, 128]), max_position_embeddings=8192, rope_parameters=rope
    )
    positions = np.array([[0, 1, 2, 4095, 8191, 8192, 131_071, 524_288, 1_000_000]], np.int32)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.from_numpy(positions))
    ours = parse_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, {})
    actual = rope_rotation(ours.rope, ours.head_dim, jnp.asarray(positions))
    half = ours.head_dim // 2
    # One unit in the last place of a frequency (another library's power) is 1e6 * 6e-8 radians at the far end.
    atol = 1e-6 + 1.2e-7 * positions[0, :, None]
    for expected, got in ((cos, actual[0]), (sin, actual[1])):
        assert np.all(np.abs(expected[0, :, :half].numpy() - np.asarray(got[0])) <= atol)

"""Writes tests/fixtures/parity: tiny random checkpoints with what transformers computes for them.

Run from the repository's root with an environment that has torch and transformers (5.24 recorded the files in the
repository):

    python tests/parity/record.py

Each folder is an ordinary Hugging Face checkpoint (config.json, generation_config.json, model.safetensors) plus
expected.safetensors:
    tokens            int32 [T]        the longest prompt; shorter ones are its prefixes
    logits_<length>   float32 [length, V]   one shot, for every length
    logits_stepwise   float32 [T, V]   one token at a time through transformers' KV cache (other numbers than one shot
                                       for dynamic NTK, whose base grows with the sequence)
rope.json holds inverse frequencies and the attention factor of RoPE variants at realistic sizes.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "parity"
LENGTHS = (1, 17, 48)

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Far above the usual 0.02: attention must be sharp enough for a wrong mask, head or angle to show.
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

MODELS: dict[str, dict] = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4, "eos_token_id": [2, 3]},
    "mqa": {"num_key_value_heads": 1, "rms_norm_eps": 1e-3},
    "head_dim": {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20},
    "tied": {"tie_word_embeddings": True},
    "bfloat16": {"dtype": "bfloat16"},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "dynamic": {
        "max_position_embeddings": 24,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "yarn": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "rope_theta": 10000.0,
        },
    },
    "yarn_mscale": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 1.3,
            "mscale_all_dim": 0.7,
            "truncate": False,
            "rope_theta": 5000.0,
        },
    },
    "llama3": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 500000.0,
        },
    },
}

_WINDOW = 12  # of 48 tokens: most are outside

FAMILIES: dict[str, dict] = {
    "mistral": {"model_type": "mistral", "sliding_window": _WINDOW, "head_dim": 12},
    "qwen2": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe", "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "norm_topk_prob": True,
    },
    "smollm3": {
        "model_type": "smollm3", "pad_token_id": 0, "num_hidden_layers": 4, "no_rope_layer_interval": 2,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "phi3": {"model_type": "phi3", "pad_token_id": 0, "sliding_window": _WINDOW},
    "phi3_longrope": {
        "model_type": "phi3", "pad_token_id": 0, "head_dim": 16, "hidden_size": 64, "max_position_embeddings": 96,
        "original_max_position_embeddings": 24, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2.0, 2.5, 3.0, 3.5, 4.0],
        },
    },
    "gemma3": {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "head_dim": 12, "sliding_window": _WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 20,
        "tie_word_embeddings": True, "pad_token_id": 0, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 2,
        "sliding_window": _WINDOW, "intermediate_size": 20, "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 32, "rope_theta": 150000.0,
        },
    },
}  # fmt: skip
"""Other families; each with what sets it apart set to a value that shows."""

LEGACY = ("linear", "llama3")
"""Written as transformers 4 did (rope_theta beside rope_scaling): most checkpoints in the wild look like that."""

ROPES: list[dict] = [
    {"head_dim": 64, "rope_theta": 100000.0, "rope_type": "default"},
    {"head_dim": 80, "rope_theta": 10000.0, "rope_type": "default"},
    {"head_dim": 128, "rope_theta": 1000000.0, "rope_type": "linear", "factor": 2.5},
    {
        "head_dim": 128,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "head_dim": 64,
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {
        "head_dim": 128,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    {
        "head_dim": 96,
        "rope_theta": 150000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    {
        "head_dim": 64,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    {
        "head_dim": 64,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attention_factor": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    # Both ends of the ramp fall on one index: transformers widens it by 0.001.
    {
        "head_dim": 64,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 6,
    },
    {"head_dim": 128, "rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0, "max": 2048, "length": 1000},
    {"head_dim": 128, "rope_theta": 10000.0, "rope_type": "dynamic", "factor": 4.0, "max": 2048, "length": 2049},
    {"head_dim": 64, "rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0, "max": 4096, "length": 1000000},
]


def make_model(name: str, seed: int) -> torch.nn.Module:
    """A random checkpoint in which no weight is trivial: norms differ from one, biases and sinks from zero."""
    torch.manual_seed(seed)
    if name in FAMILIES:
        options = {**BASE, **FAMILIES[name]}
        config = AutoConfig.for_model(options.pop("model_type"), **options)
    else:
        config = LlamaConfig(**{**BASE, **MODELS[name]})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                # Gemma adds one to what it stores.
                parameter.uniform_(-0.5, 0.5) if name == "gemma3" else parameter.uniform_(0.5, 1.5)
            elif key.endswith(("bias", "sinks")):
                parameter.normal_(0, 0.5)
            elif name == "gpt_oss" and "experts" in key:
                parameter.normal_(0, 0.2)
    return model.to(torch.bfloat16) if name == "bfloat16" else model


def write_legacy_config(folder: pathlib.Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    if scaling["rope_type"] == "linear":  # the first generation of configs calls it "type"
        scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    path.write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def expect(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """Logits of the checkpoint as it lies on the disk, always computed in float32."""

    def load() -> torch.nn.Module:  # a fresh one each time: dynamic NTK remembers the longest sequence it has seen
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(4, BASE["vocab_size"], (max(LENGTHS),), generator=generator)
    expected = {"tokens": tokens.to(torch.int32)}
    for length in LENGTHS:
        expected[f"logits_{length}"] = load()(tokens[None, :length]).logits[0].contiguous()
    model = load()
    cache = DynamicCache(config=model.config)
    steps = [model(token[None, None], cache=cache, use_cache=True).logits[0, 0] for token in tokens]
    expected["logits_stepwise"] = torch.stack(steps)
    return expected


def rope_row(case: dict) -> dict:
    rope = {k: v for k, v in case.items() if k not in ("head_dim", "max", "length")}
    config = LlamaConfig(
        **{**BASE, "head_dim": case["head_dim"], "max_position_embeddings": case.get("max", 131072)},
        rope_parameters=rope,
    )
    if case["rope_type"] == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        length = torch.tensor(case["length"]) if "length" in case else None
        frequencies, factor = ROPE_INIT_FUNCTIONS[case["rope_type"]](config, seq_len=length)
    return {"case": case, "inverse_frequencies": frequencies.tolist(), "attention_scaling": factor}


def main() -> None:
    for seed, name in enumerate([*MODELS, *FAMILIES]):
        folder = FIXTURES / name
        model = make_model(name, seed)
        model.save_pretrained(folder)
        GenerationConfig(bos_token_id=1, eos_token_id=model.config.eos_token_id).save_pretrained(folder)
        if name in LEGACY:
            write_legacy_config(folder)
        save_file(expect(folder), folder / "expected.safetensors")
        saved = load_file(folder / "expected.safetensors")
        size = sum(path.stat().st_size for path in folder.iterdir())
        print(f"{name:12} {size / 1000:6.1f} kB  logits std {saved['logits_48'].std():.2f}")
    (FIXTURES / "rope.json").write_text("[\n" + ",\n".join(json.dumps(rope_row(case)) for case in ROPES) + "\n]\n")


if __name__ == "__main__":
    main()

"""Hugging Face checkpoints of every family as GGUF files, by the conventions of llama.cpp's ``conversion/``.

Written down once more, independently of the loader, from what those scripts do.
"""

import json
import pathlib
import re
import shutil
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.weights.synthetic import write_gguf

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "parity"
# What differs from the recorded config, because GGUF has no place for it.
CASES = {
    "llama": ("head_dim", {}, {}),
    "mistral": ("mistral", {"sliding_window": None}, {}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "layer_types": None}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen3_moe": ("qwen3_moe", {}, {}),
    "smollm3": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 4}, {}),
    "phi3": ("phi3", {}, {}),
    "phi3_longrope": ("phi3_longrope", {}, {}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 12, "layer_types": ["sliding_attention"] * 3}, {}),
    "gemma3_pattern": ("gemma3", {"query_pre_attn_scalar": 12}, {"attention__sliding_window_pattern": 2}),
    "gemma3_pattern_of_layers": (
        "gemma3",
        {"query_pre_attn_scalar": 12, "layer_types": ["full_attention"] + ["sliding_attention"] * 2},
        {"attention__sliding_window_pattern": [False, True, True], "rope__freq_base_swa": 10000.0},
    ),
    "gemma3_no_window": (
        "gemma3",
        {"query_pre_attn_scalar": 12, "layer_types": ["full_attention"] * 3},
        {"attention__sliding_window": None},
    ),
    "gpt_oss": ("gpt_oss", {}, {}),
}

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3", "phi3": "phi3", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss",
}  # fmt: skip
_BY_ARCHITECTURE = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
}
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip


def make_folder(tmp_path: pathlib.Path, name: str, **changes: Any) -> pathlib.Path:
    """A copy of a recorded checkpoint with another config; None removes a key."""
    folder = tmp_path / "huggingface"
    folder.mkdir()
    shutil.copy(FIXTURES / name / "model.safetensors", folder)
    config = json.loads((FIXTURES / name / "config.json").read_text()) | changes
    keep = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    (folder / "config.json").write_text(json.dumps(keep))
    return folder


def make_case(tmp_path: pathlib.Path, case: str, **extra: Any) -> tuple[pathlib.Path, pathlib.Path]:
    """The Hugging Face folder and the GGUF file of a case, which may have more metadata."""
    name, changes, keys = CASES[case]
    folder = make_folder(tmp_path, name, **changes)
    return folder, write(tmp_path / "model.gguf", folder, extra=extra, **keys)


def convert(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Metadata and float32 tensors of the GGUF file of a Hugging Face folder."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    return _metadata(config, architecture), _tensors(config, architecture, load_file(folder / "model.safetensors"))


def write(
    path: pathlib.Path, folder: pathlib.Path, tensors: Any = None, extra: Any = None, **changes: Any
) -> pathlib.Path:
    """The file of a folder; with other tensors, other keys of the architecture, more metadata.

    A key that is None is left out; ``__`` stands for a dot.
    """
    metadata, converted = convert(folder)
    prefix = metadata["general.architecture"]
    metadata |= {f"{prefix}.{key.replace('__', '.')}": value for key, value in changes.items()}
    metadata |= extra or {}
    kept = {key: value for key, value in metadata.items() if value is not None}
    return write_gguf(path, kept, converted if tensors is None else tensors)


def _metadata(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    heads, rope = config["num_attention_heads"], config["rope_parameters"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    whole = rope.get("full_attention", rope)
    keys = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": whole["rope_theta"],
    }
    if whole["rope_type"] in ("linear", "yarn"):
        keys |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": whole["factor"]}
    if whole["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = whole["original_max_position_embeddings"]
        keys |= {f"rope.scaling.yarn_{key}": whole[key] for key in ("beta_fast", "beta_slow")}
    if architecture == "phi3":
        keys["rope.scaling.original_context_length"] = config["original_max_position_embeddings"]
        keys["rope.dimension_count"] = int(whole["partial_rotary_factor"] * width)
        keys["attention.sliding_window"] = config["sliding_window"] or 0
        if "long_factor" in whole:
            trained = config["original_max_position_embeddings"]
            growth = np.log(config["max_position_embeddings"] / trained) / np.log(trained)
            keys["rope.scaling.attn_factor"] = float(np.sqrt(1 + growth))
    elif "head_dim" in config:
        keys |= {"attention.key_length": width, "attention.value_length": width}
    if architecture in ("llama", "smollm3"):
        keys |= {"vocab_size": config["vocab_size"], "rope.dimension_count": width}
    if architecture in ("gemma3", "gpt-oss"):
        keys["attention.sliding_window"] = config["sliding_window"]
    if architecture in ("qwen3moe", "gpt-oss"):
        keys |= {"expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"]}
        keys["expert_feed_forward_length"] = config.get("moe_intermediate_size") or config["intermediate_size"]
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    ids = {f"tokenizer.ggml.{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos")}
    return {"general.architecture": architecture, "general.type": "model", **metadata, **ids}


def _tensors(config: dict[str, Any], architecture: str, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {}
    names = _NAMES | _BY_ARCHITECTURE.get(architecture, {})
    for name, tensor in _parts(stored).items():
        prefix, stem, kind = re.fullmatch(r"(model\.layers\.\d+\.)?(.*?)\.(weight|bias)", name).groups()
        heads = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}.get(stem)
        if architecture in ("llama", "smollm3") and heads:
            rows = tensor.shape[0]
            pairs = tensor.reshape(config[heads], 2, rows // config[heads] // 2, -1)
            tensor = pairs.swapaxes(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        block = f"blk.{prefix.split('.')[2]}." if prefix else ""
        tensors[f"{block}{names[stem]}.{kind}"] = tensor
    rope = config["rope_parameters"]
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
    return tensors


def _parts(stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as one stack ``[X, out, in]`` a matrix, and names that all end in ``.weight`` or ``.bias``."""
    parts, stacks = {}, {}
    for name, tensor in stored.items():
        tensor = tensor.astype(np.float32)
        if name.endswith("gate_up_proj_bias"):
            for start, part in enumerate(("gate", "up")):
                parts[name.replace("gate_up_proj_bias", f"{part}_proj.bias")] = tensor[:, start::2]
        elif name.endswith("down_proj_bias"):
            parts[name.replace("_bias", ".bias")] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for start, part in enumerate(("gate", "up")):
                parts[name.replace("gate_up", part) + ".weight"] = tensor.swapaxes(1, 2)[:, start::2]
        elif name.endswith("experts.down_proj"):
            parts[name + ".weight"] = tensor.swapaxes(1, 2)
        elif name.endswith("sinks"):
            parts[name + ".weight"] = tensor
        elif expert := re.fullmatch(r"(.*\.experts\.)(\d+)\.(.*)", name):
            stacks.setdefault(expert[1] + expert[3], {})[int(expert[2])] = tensor
        else:
            parts[name] = tensor
    return parts | {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}


def mxfp4_tensor(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks ``[X, out, n, 16]`` of a Hugging Face checkpoint, two numbers a byte, in the order of GGUF: uint8 rows."""
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = numbers[..., :16] | numbers[..., 16:] << 4
    whole = np.concatenate([scales[..., None], packed], axis=-1)
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.MXFP4] == (32, whole.shape[-1])
    return whole.reshape(*scales.shape[:-1], -1)

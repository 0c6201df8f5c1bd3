"""Small checkpoints in every format, written by the packages that own the formats, with the same tensors."""

import json
import pathlib
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_theta": 10000.0,
}


def make_config(**changes: Any) -> dict[str, Any]:
    """The config above with other values; None removes a key."""
    return {key: value for key, value in (CONFIG | changes).items() if value is not None}


def make_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under their Hugging Face names, ``[out, in]``."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width = config.get("head_dim", hidden // heads)
    kv_heads = config.get("num_key_value_heads", heads)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads * width, hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * width, hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * width, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, heads * width),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def expected_weights(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The weight tree, written down once more, independently of the loaders."""
    weights: dict[str, Any] = {
        "embed": tensors["model.embed_tokens.weight"],
        "norm": tensors["model.norm.weight"],
    }
    if "lm_head.weight" in tensors:
        weights["lm_head"] = tensors["lm_head.weight"].T
    for layer in range(config["num_hidden_layers"]):
        block = {name.split(f"layers.{layer}.")[1]: t for name, t in tensors.items() if f"layers.{layer}." in name}
        qkv = [block[f"self_attn.{name}_proj.weight"].T for name in "qkv"]
        weights[f"layer_{layer}"] = {
            "attn_norm": block["input_layernorm.weight"],
            "qkv": np.concatenate(qkv, axis=1),
            "out": block["self_attn.o_proj.weight"].T,
            "mlp_norm": block["post_attention_layernorm.weight"],
            "gate_up": np.concatenate([block["mlp.gate_proj.weight"].T, block["mlp.up_proj.weight"].T], axis=1),
            "down": block["mlp.down_proj.weight"].T,
        }
    return weights


def write_huggingface(
    directory: pathlib.Path,
    config: dict[str, Any],
    tensors: dict[str, np.ndarray],
    *,
    shards: int = 1,
    generation: dict[str, Any] | None = None,
) -> pathlib.Path:
    """A directory as ``save_pretrained`` leaves it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, directory / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_tensors(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors under their GGUF names, q and k in the order llama.cpp's converter gives them."""
    result = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        if stem in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config["num_attention_heads" if "q_proj" in stem else "num_key_value_heads"]
            rows, columns = tensor.shape
            tensor = tensor.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        result[f"{prefix}{_GGUF_NAMES[stem]}.weight"] = tensor
    return result


def gguf_metadata(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """What a converter writes; None removes a key. Underscores twice stand for the dots of a key."""
    heads = config["num_attention_heads"]
    metadata = {
        "general.architecture": "llama",
        "general.type": "model",
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.attention.key_length": config.get("head_dim", config["hidden_size"] // heads),
        "llama.rope.freq_base": config["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }
    metadata |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def write_gguf(
    path: pathlib.Path,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    floats: bool = False,
) -> pathlib.Path:
    """A file as a converter leaves it: matrices of the type ``kind``, vectors float32, uint8 data as it is.

    With ``floats`` the matrices that are not uint8 data already stay float32 too.
    """
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if tensor.dtype == np.uint8:
            writer.add_tensor(name, tensor, raw_dtype=kind)
        elif floats or tensor.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

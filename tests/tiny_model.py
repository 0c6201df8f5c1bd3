"""A random Llama model of 0.1 MB with a byte tokenizer, as a Hugging Face directory: what the command line can load."""

import json
import pathlib

import numpy as np
import tokenizers
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"


def write_tiny_model(folder: pathlib.Path) -> pathlib.Path:
    """Writes config, weights and tokenizer into ``folder`` and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(_weights(np.random.default_rng(0)), folder / "model.safetensors")
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _weights(draw: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, ffn, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, pairs = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (CONFIG["vocab_size"], hidden)}
    for i in range(CONFIG["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.{n}_proj": (rows, hidden) for n, rows in (("q", queries), ("k", pairs), ("v", pairs))
        }
        shapes |= {f"{layer}.self_attn.o_proj": (hidden, queries)}
        shapes |= {f"{layer}.mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, ffn)}
    norms = [f"model.layers.{i}.{name}" for i in range(CONFIG["num_hidden_layers"])
             for name in ("input_layernorm", "post_attention_layernorm")]  # fmt: skip
    weights = {name: draw.normal(0, 0.3, shape) for name, shape in shapes.items()}
    weights |= {name: np.ones(hidden) for name in [*norms, "model.norm"]}
    return {f"{name}.weight": weight.astype(np.float32) for name, weight in weights.items()}


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    return made

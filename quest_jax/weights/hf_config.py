"""``config.json`` of a Hugging Face checkpoint as :class:`quest_jax.models.config.LlamaConfig`.

Every key is read, must have the one value this decoder implements, or is listed here as ignored with the reason.
A key that is none of these is an error: it may change what the model computes.
"""

from collections.abc import Mapping
from typing import Any

from quest_jax.models.config import LlamaConfig
from quest_jax.weights.families import FAMILIES, Family
from quest_jax.weights.fields import Fields, shown
from quest_jax.weights.hf_rope import ROPE_KEYS, parse_ropes

_READ = {
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "bos_token_id", "eos_token_id", "layer_types", "quantization_config", *ROPE_KEYS,
}  # fmt: skip

_MOST_LAYERS = 4096  # before work that grows with a number that nothing has confirmed

_NEAREST = {
    "deepseek": "its latent attention (MLA) is not implemented; the nearest that is: Qwen3-MoE",
    "mamba": "state-space layers are not implemented; the nearest that is: Llama",
    "jamba": "state-space layers are not implemented; the nearest that is: Llama",
    "conditionalgeneration": "vision and encoders are not implemented; load the family's text model, if it has one",
    "t5": "encoder-decoder models are not implemented; the nearest that is: Llama",
    "bart": "encoder-decoder models are not implemented; the nearest that is: Llama",
    "vl": "vision is not implemented; load the family's text model, if it has one",
    "mixtral": "its experts are not implemented; the nearest that is: Qwen3-MoE",
    "phi3small": "the nearest that is implemented: Phi3ForCausalLM",
    "gemma": "the nearest that is implemented: Gemma3ForCausalLM",
    "qwen": "the nearest that is implemented: Qwen3ForCausalLM",
}
_QUANTIZED = {
    "gptq": 'weights of 4 bits in GPTQ\'s packing are not read; load a GGUF file, or the original with weights="int4"',
    "awq": 'weights of 4 bits in AWQ\'s packing are not read; load a GGUF file, or the original with weights="int4"',
    "bitsandbytes": 'its packing is not read; load the original with weights="int8" or "int4"',
}

# Key -> (values under which the model is what this decoder computes, what another value would mean).
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention_bias": ((None, False), "biases on q, k, v and the output"),
    "mlp_bias": ((None, False), "biases in the MLP"),
    "hidden_act": ((None, "swish", "silu"), "another activation in the MLP"),
    "hidden_activation": ((None, "gelu_pytorch_tanh"), "another activation in the MLP"),
    "pretraining_tp": ((None, 1), "matrices split as in training"),
    "compression_config": ((None,), "compressed weights; load a GGUF file or the uncompressed checkpoint"),
    "auto_map": ((None,), "code of its own that computes the model"),
    "sliding_window": ((None,), "attention within a window"),
    "use_sliding_window": ((None, False), "attention within a window"),
    "partial_rotary_factor": ((None, 1, 1.0), "a rotation of a part of each head"),
    "rope_interleaved": ((None, False), "rotary pairs side by side"),
    "per_layer_config": ((None,), "layers of different shapes"),
    "pruned_heads": ((None, {}), "layers of different shapes"),
    "is_encoder_decoder": ((None, False), "an encoder"),
    "add_cross_attention": ((None, False), "attention to an encoder"),
    "cross_attention_hidden_size": ((None,), "attention to an encoder"),
    "tie_encoder_decoder": ((None, False), "an encoder"),
}

_BOOKKEEPING = "describes the file or its making, not the model"
_TRAINING = "acts in training only"
_SERVING = "chooses an implementation or an output format of transformers"
_TASK = "belongs to other tasks than generation"
_DEFAULTS = "default of transformers' generate, here an argument of quest_jax.generate"

IGNORED: dict[str, str] = {
    **dict.fromkeys(("transformers_version", "name_or_path", "transformers.js_config"), _BOOKKEEPING),
    **dict.fromkeys(("unsloth_version", "unsloth_fixed", "unsloth_training", "is_llama_config"), _BOOKKEEPING),
    **dict.fromkeys(("torch_dtype", "dtype"), "the dtype is an argument of quest_jax.load"),
    **dict.fromkeys(("initializer_range", "attention_dropout", "use_bfloat16", "torchscript"), _TRAINING),
    **dict.fromkeys(("pad_token_id", "sep_token_id", "decoder_start_token_id"), "no token is padded or prepended here"),
    **dict.fromkeys(("use_cache", "return_dict", "output_attentions", "output_hidden_states"), _SERVING),
    **dict.fromkeys(("attn_implementation", "is_decoder", "chunk_size_feed_forward", "tf_legacy_loss"), _SERVING),
    **dict.fromkeys(("tie_last_hidden_states", "tokenizer_class", "prefix", "output_scores"), _SERVING),
    **dict.fromkeys(("finetuning_task", "id2label", "label2id", "num_labels", "problem_type"), _TASK),
    **dict.fromkeys(("task_specific_params",), _TASK),
    **dict.fromkeys(("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"), _DEFAULTS),
    **dict.fromkeys(("num_beam_groups", "diversity_penalty", "top_k", "top_p", "typical_p"), _DEFAULTS),
    **dict.fromkeys(("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids"), _DEFAULTS),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "num_return_sequences", "forced_bos_token_id"), _DEFAULTS),
    **dict.fromkeys(("forced_eos_token_id", "remove_invalid_values", "suppress_tokens"), _DEFAULTS),
    **dict.fromkeys(("begin_suppress_tokens", "exponential_decay_length_penalty"), _DEFAULTS),
    **dict.fromkeys(("return_dict_in_generate",), _DEFAULTS),
}
"""Keys without effect here, each with the reason. So are all keys that begin with ``_``: notes of a tool to itself."""


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any], where: str = "config.json") -> LlamaConfig:
    """Reads a config the way transformers does, its defaults included.

    Args:
      config: the parsed ``config.json``.
      generation: the parsed ``generation_config.json``, or an empty dict; its ``eos_token_id`` wins.
      where: the file, for errors.

    Raises:
      NotImplementedError: another architecture, or a variant this decoder does not compute; names it.
      ValueError: an unknown key, a missing one, or a value of the wrong type or range.
    """
    family = find_family(config, where)
    _check_keys(config, family, where)
    _check_quantization(config.get("quantization_config"), family, where)
    defaults = dict(family.defaults)
    if config.get("rope_parameters"):
        defaults.pop("rope_scaling", None)
    config = defaults | dict(config)
    fields = Fields(config, where)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", None)
    if head_dim is None:
        if heads == 0 or hidden % heads:
            raise ValueError(f"{where}: without head_dim, {heads} heads must divide hidden_size {hidden}.")
        head_dim = hidden // heads
    layers = fields.integer("num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise ValueError(f"{where}: num_hidden_layers: expected at most {_MOST_LAYERS}, got {layers}.")
    max_positions = fields.integer("max_position_embeddings", 2048)
    eos = Fields(generation, f"{where} (generation_config.json)").ids("eos_token_id")
    if eos is None:
        eos = fields.ids("eos_token_id") if "eos_token_id" in config else (2,)
    partly = head_dim if "partial_rotary_factor" in family.reads else None
    try:
        rope, window_rope = parse_ropes(config, max_positions, where, partly)
        differences = family.differences(fields, layers)
        if "sliding_attention" in (fields.layer_types(layers) or ()) and not differences.get("windows"):
            raise NotImplementedError(f"{where}: layer_types: expected full_attention only, got sliding_attention.")
        return LlamaConfig(
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size", None) or _expert_size(differences, fields),
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            max_positions=max_positions,
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope,
            window_rope=window_rope,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            eos_token_ids=eos or (),
            bos_token_id=fields.integer("bos_token_id", None) if "bos_token_id" in config else 1,
            **differences,
        )
    except ValueError as error:
        raise error if str(error).startswith(where) else ValueError(f"{where}: {error}") from error


def find_family(config: Mapping[str, Any], where: str) -> Family:
    """Returns the family of a config.

    Raises:
      NotImplementedError: another one; names it, and the nearest that is here.
      ValueError: a model_type that is no string.
    """
    architectures, model_type = config.get("architectures"), Fields(config, where).text("model_type", None)
    family = FAMILIES.get(model_type or "")
    if family is not None and architectures in (None, [family.architecture]):
        return family  # without architectures: written by hand or by an old tool; the tensors decide
    if model_type is None:
        for family in FAMILIES.values():
            if architectures == [family.architecture]:
                return family
    names = architectures if isinstance(architectures, list) else [architectures]
    named = " ".join(name[:80] if isinstance(name, str) else shown(name) for name in names[:4])
    nearest = next((f"; {why}" for part, why in _NEAREST.items() if part in f"{model_type} {named}".lower()), "")
    raise NotImplementedError(
        f"{where}: expected the architecture {', '.join(family.architecture for family in FAMILIES.values())}, "
        f"got {named[:80]} (model_type {str(model_type)[:80]}){nearest}."
    )


def _expert_size(differences: Mapping[str, Any], fields: Fields) -> int:
    experts = differences.get("experts")
    return experts.size if experts is not None else fields.integer("intermediate_size")


def _check_quantization(quantization: Any, family: Family, where: str) -> None:
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "mxfp4" and family.model_type == "gpt_oss":
        return
    instead = _QUANTIZED.get(str(method), "load a GGUF file or the unquantised checkpoint")
    raise NotImplementedError(
        f"{where}: quantization_config: expected none, got {shown(method or quantization)}; {instead}."
    )


def _check_keys(config: Mapping[str, Any], family: Family, where: str) -> None:
    for key, value in config.items():
        if key in family.reads or key in family.ignores:
            continue
        if key in _ONLY:
            allowed, meaning = _ONLY[key]
            if not any(type(value) is type(item) and value == item for item in allowed):
                raise NotImplementedError(
                    f"{where}: {key}: expected {allowed[-1]!r}, got {shown(value)}, "
                    f"which means {meaning}; this decoder has no such thing."
                )
        elif key not in _READ and key not in IGNORED and not key.startswith("_"):
            raise ValueError(
                f"{where}: unknown key {key[:80]!r}; it may change what the model computes. "
                "If you know that it does not, remove it from the file."
            )

"""Long-context inference in JAX that reads only the part of the KV cache that matters.

See :func:`generate` for the whole job, :func:`prefill` and :func:`decode_step` for a serving loop of your own,
:func:`attend` for a model of your own.
"""

from quest_jax.attention import (
    AttentionState,
    PageReads,
    attend,
    decode_attention,
    extend,
    init_attention,
    prefill_attention,
)
from quest_jax.cache import Cache, init_cache, rebuild_metadata
from quest_jax.compaction import compact
from quest_jax.compilation import enable_compilation_cache
from quest_jax.decode import DecodeState, decode_step, feed_tokens, prefill, replace_policy
from quest_jax.generate import Chunk, Generation, generate, stream
from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.models.quant import QuantArray
from quest_jax.params import Params, random_params
from quest_jax.plan import Plan, plan
from quest_jax.policies.base import Dense, LayerView, PagePolicy, Policy, Selection
from quest_jax.policies.diagnosed import Diagnosed
from quest_jax.policies.quest import Quest
from quest_jax.policies.quoka import QuoKA
from quest_jax.policies.registry import methods
from quest_jax.sampling import Greedy, Sample, make_sampler, sample
from quest_jax.stats import DecodeStats, ReadStats
from quest_jax.tokenizer import Detokenizer, StopStrings, Tokenizer, load_tokenizer
from quest_jax.weights.load import load, load_config, save
from quest_jax.weights.quantize import quantize

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "Cache",
    "Chunk",
    "DecodeState",
    "DecodeStats",
    "Dense",
    "Diagnosed",
    "Detokenizer",
    "Generation",
    "Greedy",
    "LayerView",
    "LlamaConfig",
    "PagePolicy",
    "PageReads",
    "Params",
    "Plan",
    "Policy",
    "QuantArray",
    "Quest",
    "QuoKA",
    "ReadStats",
    "RopeConfig",
    "Sample",
    "Selection",
    "StopStrings",
    "Tokenizer",
    "attend",
    "compact",
    "decode_attention",
    "decode_step",
    "enable_compilation_cache",
    "extend",
    "feed_tokens",
    "generate",
    "init_attention",
    "init_cache",
    "load",
    "load_config",
    "load_tokenizer",
    "make_sampler",
    "methods",
    "plan",
    "prefill",
    "prefill_attention",
    "quantize",
    "random_params",
    "rebuild_metadata",
    "replace_policy",
    "sample",
    "save",
    "stream",
]

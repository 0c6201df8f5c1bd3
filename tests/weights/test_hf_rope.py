import re

import pytest

from quest_jax.models.config import RopeConfig
from quest_jax.weights.hf_rope import parse_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeConfig()),
        ({"rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        # version 5: inside wins over outside
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(kind="linear", factor=4.0)),
        ({"rope_scaling": {"rope_type": "linear", "type": "x", "factor": 4}}, RopeConfig(kind="linear", factor=4.0)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeConfig(1e4, "dynamic", 2.0, 4096)),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 4096}},
            RopeConfig(1e4, "dynamic", 2.0, 4096),
        ),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192}},
            RopeConfig(1e4, "llama3", 8.0, 8192, 1.0, 4.0),
        ),
        ({"rope_scaling": LLAMA3}, RopeConfig(1e4, "llama3", 8.0, 4096, 1.0, 4.0)),
        # a trained length at the top level wins, as in transformers
        (
            {
                "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 8192},
                "original_max_position_embeddings": 1024,
            },
            RopeConfig(1e4, "llama3", 8.0, 1024, 1.0, 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
            RopeConfig(1e4, "yarn", 4.0, 1024),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 1024, "factor": None}},
            RopeConfig(1e4, "yarn", 4.0, 1024),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True, "attention_factor": None}},
            RopeConfig(1e4, "yarn", 2.0, 4096),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 2.0, "attention_factor": 1.1, "beta_fast": 16, "beta_slow": 2,
                    "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.8,
                }
            },
            RopeConfig(
                1e4, "yarn", 2.0, 4096, beta_fast=16.0, beta_slow=2.0, truncate=False, attention_factor=1.1,
                mscale=1.0, mscale_all_dim=0.8,
            ),
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, RopeConfig(1e4, "llama3", 8.0, 4096, 1.0, 4.0)),
        ({"rope_parameters": {"partial_rotary_factor": 1.0}}, RopeConfig()),
    ],
)  # fmt: skip
def test_spellings(config, expected):
    assert parse_rope(config, 4096, "config.json") == expected


@pytest.mark.parametrize("kind", ["proportional", "mrope", "ntk", ""])
def test_unknown_types_are_named(kind):
    with pytest.raises(NotImplementedError, match=f"^file: RoPE type: expected one of default, linear.*got '{kind}'"):
        parse_rope({"rope_scaling": {"rope_type": kind, "factor": 2.0}}, 4096, "file")


def test_partial_rotation():
    with pytest.raises(NotImplementedError, match="^file: partial_rotary_factor: expected 1, got 0.5"):
        parse_rope({"rope_parameters": {"partial_rotary_factor": 0.5}}, 4096, "file")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object or null"),
        ({"rope_parameters": [1]}, "rope_parameters: expected an object or null"),
        ({"rope_scaling": {"type": 3}}, "type: expected a string"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs the key 'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor: expected a finite number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "RoPE factor: expected a positive"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "RoPE factor: expected a positive"),
        ({"rope_scaling": {"type": "dynamic"}}, "'dynamic' needs the key 'factor'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs the key 'high_freq_factor'"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 3}}, "'llama3' has no key 'beta_fast'"),
        ({"rope_scaling": {"type": "default", "factor": 3}}, "'default' has no key 'factor'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "'default' has no key 'full_attention'"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "'default' has no key 'mrope_section'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}, "truncate: expected true or false"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs the key 'factor'"),
        ({"rope_theta": -1.0}, "RoPE theta"),
        ({"rope_theta": "10000"}, "rope_theta: expected a finite number"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1.0}}, "contradict each other"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2, "original_max_position_embeddings": 1024}},
            "dynamic RoPE is defined by max_position_embeddings (4096), but",
        ),
    ],
)
def test_wrong_values_are_named(config, message):
    with pytest.raises(ValueError, match=f"^file: (RoPE: )?.*{re.escape(message)}"):
        parse_rope(config, 4096, "file")

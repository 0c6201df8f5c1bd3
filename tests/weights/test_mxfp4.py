"""MXFP4: what the numbers are, and that a GPT-OSS checkpoint in it is the checkpoint it stands for."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import quest_jax
from quest_jax.weights import assemble, mxfp4
from quest_jax.weights.stored import StoredTensor

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "parity" / "gpt_oss"


def test_two_numbers_a_byte_the_lower_half_first():
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :3] = 0x21, 0x9F, 0x77
    numbers = mxfp4.decode(blocks, np.array([[128]], np.uint8))  # times 2
    assert numbers.shape == (1, 32) and numbers[0, :6].tolist() == [1.0, 2.0, -12.0, -1.0, 12.0, 12.0]
    assert not numbers[0, 6:].any()
    assert mxfp4.decode(blocks, np.array([[0]], np.uint8))[0, 0] == 2.0**-128  # float32 without a normal exponent


def test_every_number_of_four_bits():
    values = mxfp4.decode(np.arange(16, dtype=np.uint8)[None, None], np.full((1, 1), 127, np.uint8))[0, ::2]
    assert values.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]


@pytest.mark.parametrize("shapes", [((2, 3, 1, 15), (2, 3, 1)), ((2, 3, 1, 16), (2, 3, 2)), ((3, 1, 16), (3, 1))])
def test_shapes_that_do_not_fit_are_refused(shapes):
    blocks, scales = (StoredTensor(name, shape, lambda i, j: None) for name, shape in zip("bs", shapes, strict=True))
    with pytest.raises(ValueError, match="file: x: expected blocks .* and scales .* of MXFP4"):
        mxfp4.joined(blocks, scales, "x", "file")


def quantised(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Rewrites the fixture with experts of 32 channels in MXFP4; returns what their matrices are, ``[X, in, out]``."""
    config = json.loads((FIXTURE / "config.json").read_text())
    config |= {"intermediate_size": 32, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(FIXTURE / "generation_config.json", folder)
    rng, tensors, matrices = np.random.default_rng(0), {}, {}
    for name, tensor in load_file(FIXTURE / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor
            continue
        count, hidden = config["num_local_experts"], config["hidden_size"]
        out = {"gate_up": 64, "down": hidden}["gate_up" if "gate_up" in name else "down"]
        if name.endswith("_bias"):
            tensors[name] = rng.standard_normal((count, out)).astype(np.float32)
            continue
        blocks = rng.integers(0, 256, (count, out, 1, 16)).astype(np.uint8)
        scales = rng.integers(122, 127, (count, out, 1)).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        matrices[name] = mxfp4.decode(blocks, scales).swapaxes(1, 2)
    save_file(tensors, folder / "model.safetensors")
    return matrices


def test_a_checkpoint_in_mxfp4_is_what_it_stands_for(tmp_path):
    matrices = quantised(tmp_path)
    params = quest_jax.load(tmp_path)
    for layer in range(2):
        stem = f"model.layers.{layer}.mlp.experts."
        gate_up, down = matrices[stem + "gate_up_proj"], matrices[stem + "down_proj"]
        expected = np.concatenate([gate_up[..., ::2], gate_up[..., 1::2]], axis=-1)  # gate and up stand row about
        np.testing.assert_array_equal(params.weights[f"layer_{layer}"]["experts_gate_up"], expected)
        np.testing.assert_array_equal(params.weights[f"layer_{layer}"]["experts_down"], down)
    assert quest_jax.generate(params, [[5, 6, 7]], max_new_tokens=4).tokens.shape == (1, 4)


def test_every_expert_is_decoded_once(tmp_path, monkeypatch):
    """Gate, up and all of their chunks lie in one stack; to decode it for each would take most of the loading time."""
    matrices, decoded, decode = quantised(tmp_path), [], mxfp4.decode
    monkeypatch.setattr(mxfp4, "decode", lambda *parts: decoded.append(parts[0].shape[0]) or decode(*parts))
    monkeypatch.setattr(assemble, "_CHUNK_BYTES", 1)
    quest_jax.load(tmp_path)
    assert decoded == [1] * sum(len(matrix) for matrix in matrices.values())


def test_blocks_without_their_scales_are_named(tmp_path):
    quantised(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"down_proj_blocks|experts\.0\.down_proj"):
        quest_jax.load(tmp_path)

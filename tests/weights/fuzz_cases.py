"""One damaged model per seed, for each of the three loaders.

Every function takes the seed's generator and an empty folder, writes a damaged model there, and gives the function that
loads it. The same seed makes the same files.
"""

import functools
import json
import pathlib
import random
import struct
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save

from quest_jax.models.config import Experts, LlamaConfig, RopeConfig
from quest_jax.models.llama import init_weights
from quest_jax.params import Params
from quest_jax.weights.checkpoint import MARKER, load_checkpoint, save_checkpoint
from quest_jax.weights.gguf import load_gguf
from quest_jax.weights.huggingface import load_huggingface
from tests.weights.forged_gguf import forge_gguf, gguf_base
from tests.weights.mutators import EXTREMES, mutate_bytes, mutate_json

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures" / "parity"
_FLOAT32 = np.dtype(np.float32)
Load = Callable[[], Any]


def gguf_case(rng: random.Random, folder: pathlib.Path) -> Load:
    """A GGUF file with damaged bytes, or well-formed with damaged contents."""
    path = folder / "model.gguf"
    data, head = gguf_base()
    path.write_bytes(mutate_bytes(rng, data, head) if rng.random() < 0.5 else forge_gguf(rng))
    return lambda: load_gguf(path, _FLOAT32)


def safetensors_case(rng: random.Random, folder: pathlib.Path) -> Load:
    """A Hugging Face directory of any family with one damaged file."""
    families = _huggingface_bases()
    config, generation, data = families[rng.choice(list(families))]
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    configs = tuple(base[0] for base in families.values())
    files = {"config.json": json.dumps(config).encode(), "model.safetensors": data}
    files["generation_config.json"] = json.dumps(generation).encode()
    match rng.randrange(10):
        case 0 | 1 | 2 | 3 | 4:
            files["config.json"] = mutate_json(rng, config, configs)
        case 5:
            files["generation_config.json"] = mutate_json(rng, generation, configs)
        case 6:
            files["model.safetensors"] = mutate_bytes(rng, data, 8 + length)
        case 7 | 8:
            forged = mutate_json(
                rng, header, (header, {"x": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}})
            )
            start = rng.choice(EXTREMES) if rng.random() < 0.05 else len(forged)
            files["model.safetensors"] = struct.pack("<Q", start) + forged + data[8 + length :]
        case 9:
            files["one.safetensors"] = files.pop("model.safetensors")
            index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(header, "one.safetensors")}
            index["weight_map"].pop("__metadata__", None)
            names = ({"a": "../one.safetensors", "b": "two.safetensors", "c": "/etc/passwd", "d": "one.safetensors\0"},)
            files["model.safetensors.index.json"] = mutate_json(rng, index, names)
    _write(folder, files)
    return lambda: load_huggingface(folder, _FLOAT32)


def checkpoint_case(rng: random.Random, folder: pathlib.Path) -> Load:
    """A checkpoint of this library with one damaged or missing file, or one damaged array header inside."""
    files = dict(rng.choice(_checkpoint_bases()))
    if rng.random() < 0.2:
        _write(folder, files)
        _damage_header(rng, folder / "weights")
        return lambda: load_checkpoint(folder)
    readable = [name for name, data in files.items() if data[:1] == b"{"]
    name = MARKER if rng.random() < 0.5 else rng.choice(readable if rng.random() < 0.6 else list(files))
    if rng.random() < 0.03:
        del files[name]
    elif name in readable and rng.random() < 0.85:
        files[name] = mutate_json(rng, json.loads(files[name]))
    else:
        files[name] = mutate_bytes(rng, files[name], len(files[name]))
    _write(folder, files)
    return lambda: load_checkpoint(folder)


CASES = {"gguf": gguf_case, "safetensors": safetensors_case, "checkpoint": checkpoint_case}


def _damage_header(rng: random.Random, weights: pathlib.Path) -> None:
    """Replaces the Zarr header of one array; through TensorStore, whose checksums then vouch for it."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{weights}/"}}).result()
    key = rng.choice(sorted(key for key in store.list().result() if key.endswith(b".zarray")))
    header = store.read(key).result().value
    damaged = mutate_bytes(rng, header, len(header)) if rng.random() < 0.2 else mutate_json(rng, json.loads(header))
    store.write(key, damaged).result()


def _write(folder: pathlib.Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@functools.cache
def _huggingface_bases() -> dict[str, tuple[dict[str, Any], dict[str, Any], bytes]]:
    folders = sorted(path.parent for path in FIXTURES.glob("*/config.json"))
    names = ("config.json", "generation_config.json")
    return {
        folder.name: (
            *(json.loads((folder / name).read_text()) for name in names), (folder / "model.safetensors").read_bytes(),
        )
        for folder in folders
    } | {"gpt_oss_mxfp4": _packed()}  # fmt: skip


def _packed() -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """GPT-OSS as it is published, its experts in MXFP4."""
    folder = FIXTURES / "gpt_oss"
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 32}
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        outs = {"gate_up_proj": 64, "down_proj": 32, "gate_up_proj_bias": 64}
        if (out := outs.get(name.rpartition(".")[2])) is None:
            tensors[name] = tensor
        elif name.endswith("bias"):
            tensors[name] = np.zeros((len(tensor), out), np.float32)
        else:
            tensors |= {f"{name}_blocks": np.ones((len(tensor), out, 1, 16), np.uint8)}
            tensors |= {f"{name}_scales": np.full((len(tensor), out, 1), 127, np.uint8)}
    return config | {"quantization_config": {"quant_method": "mxfp4"}}, {"eos_token_id": 2}, save(tensors)


@functools.cache
def _checkpoint_bases() -> list[dict[str, bytes]]:
    """The files of two checkpoints."""
    plain = LlamaConfig(16, 8, 12, 2, 2, 1, 4, 64, rope=RopeConfig(1e5, "yarn", 2.5, 32), eos_token_ids=(2, 7))
    varied = LlamaConfig(
        16, 8, 12, 2, 2, 1, 4, 64, rope=RopeConfig(kind="longrope", original_max_positions=32, short_factors=(1.0, 2.0),
        long_factors=(1.0, 4.0)), window_rope=RopeConfig(1e4), windows=(0, 8), unrotated_layers=(1,), qk_norm=True,
        sinks=True, experts=Experts(4, 2, 6, biased=True), query_scale=0.25, activation="swiglu_clamped",
    )  # fmt: skip
    bases = []
    with tempfile.TemporaryDirectory() as root:
        for i, config in enumerate((plain, varied)):
            folder = pathlib.Path(root) / str(i)
            params = Params(weights=init_weights(config, jax.random.key(0), jnp.dtype("float32")), config=config)
            save_checkpoint(params, folder)
            files = [path for path in folder.rglob("*") if path.is_file()]
            bases.append({str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)})
    return bases

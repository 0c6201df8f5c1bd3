"""Compares every recorded checkpoint with transformers' logits, and writes what was seen to quest_jax/data/models.json.

    python -m tests.check_models

``quest-jax models`` and the README show that file; tests/test_families.py compares anew at every run.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file

import quest_jax
from quest_jax.models_table import FILE

ROOT = pathlib.Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "parity"
LENGTHS = (1, 17, 48)
POLICIES = {
    "dense": {},
    "sparse": {"policy": quest_jax.Quest(64, dense_layers=0), "prefill_policy": quest_jax.QuoKA(64)},
}


def model_type(folder: pathlib.Path) -> str:
    """The family of a checkpoint."""
    return json.loads((folder / "config.json").read_text())["model_type"]


def prompt_difference(folder: pathlib.Path, length: int, chunk: int | None) -> float:
    """How far the logits after a prompt of ``length`` tokens, read in chunks, are from the recorded ones."""
    params, expected = quest_jax.load(folder), load_file(folder / "expected.safetensors")
    state = quest_jax.prefill(params, expected["tokens"][None, :length], page_size=4, chunk=chunk, capacity=64)
    return float(np.abs(np.asarray(state.logits[0]) - expected[f"logits_{length}"][-1]).max())


def decoding_difference(folder: pathlib.Path, policies: str) -> float:
    """The same after every token behind a prompt of 13, by policies that select everything."""
    params, expected = quest_jax.load(folder), load_file(folder / "expected.safetensors")
    tokens, start, found = expected["tokens"], 13, []
    state = quest_jax.prefill(params, tokens[None, :start], page_size=4, capacity=64, **POLICIES[policies])
    for end in range(start, len(tokens)):
        found.append(np.abs(np.asarray(state.logits[0]) - expected["logits_stepwise"][end - 1]).max())
        state = quest_jax.feed_tokens(params, state, tokens[None, end : end + 1])
    return float(max(found))


def check_all() -> dict[str, dict]:
    """By family: its checkpoints, and the largest difference of all comparisons."""
    families: dict[str, dict] = {}
    for folder in sorted(path for path in FIXTURES.iterdir() if path.is_dir()):
        found = [prompt_difference(folder, length, chunk) for length in LENGTHS for chunk in (7, None)]
        found += [decoding_difference(folder, policies) for policies in POLICIES]
        entry = families.setdefault(model_type(folder), {"checkpoints": [], "largest_difference": 0.0})
        entry["checkpoints"].append(folder.name)
        entry["largest_difference"] = max(entry["largest_difference"], *found)
        print(folder.name, max(found))
    return families


if __name__ == "__main__":
    text = json.dumps({"families": check_all()}, indent=1)
    (ROOT / "quest_jax" / "data" / FILE).write_text(text + "\n")

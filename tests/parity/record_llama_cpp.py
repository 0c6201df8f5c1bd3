"""Writes tests/fixtures/gguf/llama_cpp.json: what llama.cpp computes for the GGUF files of the tests.

Run from the repository's root with an environment that has ``quest-jax[dev,bench]`` (xllamacpp 2026.10.11549 recorded
the file in the repository):

    PYTHONPATH=. python tests/parity/record_llama_cpp.py

Of every case of ``tests/weights/gguf_conversion.py`` the log-probabilities of all tokens after one prompt. Not of
``phi3``: llama.cpp reads its window and then attends to everything.
"""

import importlib.metadata
import json
import pathlib
import tempfile

import xllamacpp

from tests.weights.gguf_conversion import CASES, make_case

OUT = pathlib.Path(__file__).parents[1] / "fixtures" / "gguf" / "llama_cpp.json"
TOKENS = list(range(7, 55))
VOCABULARY = 64
TOKENIZER = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<0x0A>", *(f"t{i}" for i in range(4, VOCABULARY))],
    "tokenizer.ggml.scores": [-float(i) for i in range(VOCABULARY)],
    "tokenizer.ggml.token_type": [2, 3, 3, 6] + [1] * (VOCABULARY - 4),
    "tokenizer.ggml.add_bos_token": False,
}


def logprobs(path: pathlib.Path) -> list[float]:
    """By token id."""
    options = xllamacpp.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel, options.n_gpu_layers = 256, 1, 0
    options.cache_ram_mib, options.warmup, options.verbosity = 0, False, 0
    options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    request = {"prompt": TOKENS, "n_predict": 1, "temperature": 0.0, "n_probs": VOCABULARY}
    answer = xllamacpp.Server(options).handle_completions(request)
    assert answer["usage"]["prompt_tokens"] == len(TOKENS)
    found = {item["id"]: item["logprob"] for item in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}
    return [round(found[token], 5) for token in range(VOCABULARY)]


if __name__ == "__main__":
    recorded = {}
    for case in sorted(set(CASES) - {"phi3"}):
        with tempfile.TemporaryDirectory() as folder:
            recorded[case] = logprobs(make_case(pathlib.Path(folder), case, **TOKENIZER)[1])
        print(case)
    OUT.parent.mkdir(exist_ok=True)
    version = importlib.metadata.version("xllamacpp")
    OUT.write_text(json.dumps({"xllamacpp": version, "tokens": TOKENS, "logprobs": recorded}) + "\n")

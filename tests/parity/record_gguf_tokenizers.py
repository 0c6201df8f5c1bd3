"""Writes tests/fixtures/tokenizer/{phi3,qwen2}.json: parts of real vocabularies, and the ids llama.cpp gives with them.

Run from the repository's root with an environment that has ``quest-jax[dev,bench]`` (xllamacpp 2026.10.11549 recorded
the files in the repository) and the folder of llama.cpp's vocabularies, which the source distribution of
llama-cpp-python has as vendor/llama.cpp/models (0.3.36):

    PYTHONPATH=. python tests/parity/record_gguf_tokenizers.py FOLDER

Of each vocabulary the tokens that the texts can use, with the ids they have there. Left out are those that are no part
of any text, which changes no result.
"""

import json
import pathlib
import re
import sys
import tempfile
import unicodedata
import urllib.request

import gguf
import numpy as np
import tokenizers
import xllamacpp

from quest_jax.weights.gguf import read_metadata
from tests.tokenizer.vocabulary import recorded, write_values

OUT = pathlib.Path(__file__).parents[1] / "fixtures" / "tokenizer"
TEXTS = [
    *recorded()["texts"], "<|user|>\nHi  there<|end|>\n<|assistant|>\n", "<s>marked</s> x", "</s>\n y", "a<unk> b",
    "<|im_start|>user\nHi<|im_end|>\n", "<0x0A> a <0x41>", "▁▁ under", "hahaha", "((([[[[{{{{",
]  # fmt: skip


def llama_cpp_ids(metadata: dict, texts: list[str]) -> list[list[int]]:
    """Of a model of no size with this tokenizer."""
    size = len(metadata["tokenizer.ggml.tokens"])
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in {"context": 512, "embedding": 32, "feed_forward": 32}.items():
            getattr(writer, f"add_{name}_length")(value)
        writer.add_block_count(1), writer.add_head_count(1), writer.add_layer_norm_rms_eps(1e-5)
        write_values(writer, metadata)
        writer.add_tensor("token_embd.weight", np.ones((size, 32), np.float16))
        for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
            writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.0.{name}.weight", np.ones((32, 32), np.float16))
        writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
        options = xllamacpp.CommonParams()
        options.model.path = str(path)
        options.n_ctx, options.n_parallel, options.n_gpu_layers = 256, 1, 0
        options.cache_ram_mib, options.warmup, options.verbosity = 0, False, 0
        server = xllamacpp.Server(options)
        found = []
        for text in texts:
            body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
            request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
            request.add_header("Content-Type", "application/json")
            found.append(json.load(urllib.request.urlopen(request))["tokens"])
        return found


def excerpt(metadata: dict, texts: list[str]) -> dict:
    """The tokens that are part of a text; all others are left out."""
    tokens, types = (metadata.pop(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if metadata["tokenizer.ggml.model"] == "llama":
        # A space stands before every text, and before what follows a control token.
        parts = [part for text in texts for part in (text, *(part.lstrip() for part in re.split("<[^<>]*>", text)))]
        written = [("▁" + part).replace(" ", "▁") for part in parts]
    else:
        to_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        written = [part for text in texts for part, _ in to_bytes.pre_tokenize_str(text)]
    whole = "\0".join(written)
    kept = {i: token for i, token in enumerate(tokens) if types[i] != 1 or token in whole}
    data = {
        "texts": texts,
        "vocab_size": len(tokens),
        "tokens": kept,
        "types": {i: types[i] for i in kept if types[i] != 1},
    }
    if (scores := metadata.pop("tokenizer.ggml.scores", None)) is not None:
        data["scores"] = {i: scores[i] for i in kept}
    if (merges := metadata.pop("tokenizer.ggml.merges", None)) is not None:
        names = set(kept.values())
        data["merges"] = [line for line in merges if {*line.split(" "), line.replace(" ", "")} <= names]
    return {"metadata": metadata} | data


def record(name: str, source: pathlib.Path) -> None:
    read = read_metadata(source)
    metadata = {key: value for key, value in read.items() if key.startswith("tokenizer.") or key == "general.name"}
    texts = TEXTS
    if name == "qwen2":
        # Its tokenizer.json composes text first, which llama.cpp does not. And llama.cpp finds a control token in every
        # vocabulary that has the text </s>.
        texts = [unicodedata.normalize("NFC", text) for text in TEXTS if "</s>" not in text]
    ids = llama_cpp_ids(metadata, texts)
    data = excerpt(metadata, texts) | {"ids": ids}
    text = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items())
    (OUT / f"{name}.json").write_text("{\n" + text + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    for name, file in {"phi3": "ggml-vocab-phi-3.gguf", "qwen2": "ggml-vocab-qwen2.gguf"}.items():
        record(name, pathlib.Path(sys.argv[1]) / file)

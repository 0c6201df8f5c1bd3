"""Tokenizers of three kinds, each loaded once."""

import pytest

from quest_jax.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.vocabulary import FIXTURES, metadata, write_gguf


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_gguf(tmp_path_factory.mktemp("tokenizer") / "smollm2.gguf", metadata()))


@pytest.fixture(scope="session", params=["smollm2", "llama3", "llama2", "metaspace"])
def any_tokenizer(request, smollm2) -> Tokenizer:
    return smollm2 if request.param == "smollm2" else load_tokenizer(FIXTURES / "tokenizer" / request.param)

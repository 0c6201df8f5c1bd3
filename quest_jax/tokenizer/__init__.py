"""Text in, text out: token ids, chat prompts, streamed text."""

from quest_jax.tokenizer.detokenizer import Detokenizer
from quest_jax.tokenizer.load import load_tokenizer
from quest_jax.tokenizer.stop_strings import StopStrings
from quest_jax.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopStrings", "Tokenizer", "load_tokenizer"]

"""``quest-jax generate``."""

import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

from quest_jax.cli.common import Dtype, Weights, keep_programs, read_text


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continue a prompt; the text streams to stdout, numbers go to stderr.

    The prompt is --prompt, --prompt-file or what is piped in. Without a budget attention is dense.

    Attributes:
      model: "smollm2-135m", a .gguf file, a Hugging Face directory or repo id, or an orbax directory.
      tokenizer: where the tokenizer is, if not with the model; same forms.
      prompt: the text to continue.
      prompt_file: a UTF-8 file with the text to continue.
      budget: tokens that Quest reads per layer and KV head for each new token; leave it out for dense attention.
      prefill_budget: past tokens that QuoKA reads per layer and KV head for each chunk of the prompt; likewise.
      chat: put the prompt into the model's chat template, as the user's message.
      system: system message of the chat.
      max_new_tokens: most tokens to generate.
      temperature: 0 takes the likeliest token each time.
      top_k: sample from the k likeliest tokens only.
      top_p: sample from the likeliest tokens that together have this probability.
      seed: of the sampling.
      stop: end before this text appears.
      page_size: tokens in a page of the cache.
      dtype: of the weights and the cache.
      weights: round the matrices to integers of 8 or 4 bits.
      no_compilation_cache: compile everything anew, and keep no compiled program; else they are kept in
        ~/.cache/quest_jax/compiled (or the platform's folder, or JAX_COMPILATION_CACHE_DIR) for the next run.
    """

    model: str = "smollm2-135m"
    tokenizer: str | None = None
    prompt: str | None = None
    prompt_file: pathlib.Path | None = None
    budget: int | None = None
    prefill_budget: int | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    page_size: int = 16
    dtype: Dtype = "float32"
    weights: Weights | None = None
    no_compilation_cache: bool = False

    def run(self) -> int:
        """Streams the continuation."""
        prompt = self._read_prompt()
        if not prompt:
            raise ValueError("expected a prompt, got an empty text.")
        from quest_jax import load, load_tokenizer, stream
        from quest_jax.progress import counting, stderr_console, working

        console = stderr_console()
        if not self.no_compilation_cache:
            keep_programs(console)
        with working(f"loading {self.model}", console):
            tokenizer = load_tokenizer(self.tokenizer or self.model)
            params = load(self.model, dtype=self.dtype, weights=self.weights)
        if self.chat:
            system = [{"role": "system", "content": self.system}] if self.system is not None else []
            ids = tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])
        else:
            ids = tokenizer.encode(prompt)
        start = time.perf_counter()
        with counting("reading the prompt", console) as progress:
            chunks = stream(
                params, [ids], tokenizer=tokenizer, stop=self.stop, progress=progress,
                budget=self.budget, prefill_budget=self.prefill_budget,
                max_new_tokens=self.max_new_tokens, page_size=self.page_size,
                temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed,
            )  # fmt: skip
        times = [time.perf_counter()]
        for chunk in chunks:
            if chunk.token >= 0:
                times.append(time.perf_counter())
            print(chunk.text, end="", flush=True)
        print(flush=True)
        console.print(_speed(len(ids), times[0] - start, times), highlight=False)
        return 0

    def _read_prompt(self) -> str:
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a chat; add --chat.")
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("expected --prompt or --prompt-file, got both; leave one out.")
        if self.prompt is not None:
            return self.prompt
        if self.prompt_file is not None:
            return read_text("--prompt-file", self.prompt_file)
        if sys.stdin.isatty():
            raise ValueError("expected a prompt, got none; give --prompt TEXT, --prompt-file FILE, or pipe it in.")
        return sys.stdin.read()


def _speed(prompt_tokens: int, prefill_seconds: float, times: Sequence[float]) -> str:
    """The line after a generation; ``times`` has the end of prefill and of every token."""
    line = f"{prompt_tokens} prompt tokens in {prefill_seconds:.1f} s, compiling included; {len(times) - 1} new tokens"
    if len(times) < 3:
        return line
    per_token = (times[-1] - times[1]) / (len(times) - 2)
    return f"{line}, the first after {times[1] - times[0]:.1f} s, then {1e3 * per_token:.0f} ms per token"

"""Ahead-of-time compilation for TPUs that are not there: every kernel, and one decode step of a large model.

It needs libtpu (the version that ``jax[tpu]`` pins), no TPU. Nothing is run. ``python -m quest_jax.bench.compile``
prints what the compiler says as a table.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from quest_jax.attention import init_attention
from quest_jax.decode import DecodeState, decode_step, prefill_chunk, row_keys
from quest_jax.generate import generate
from quest_jax.models.config import LlamaConfig, RopeConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.append.op import append
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.page_scores.op import Reduce, page_scores
from quest_jax.pallas_kernels.pages import stored_head_dim
from quest_jax.pallas_kernels.token_scores.op import token_scores
from quest_jax.params import Params
from quest_jax.policies.quest import Quest
from quest_jax.policies.quoka import QuoKA
from quest_jax.sampling import make_sampler

# Chip: topology to ask libtpu for (its smallest), and nominal HBM bandwidth of one of its devices in GB/s
# (cloud.google.com/tpu/docs/system-architecture-tpu-vm). A tpu7x chip is two devices.
CHIPS = {
    "v4": ("v4:2x2x1", 1228),
    "v5e": ("v5e:2x2", 819),
    "v5p": ("v5p:2x2x1", 2765),
    "v6e": ("v6e:2x2", 1640),
    "tpu7x": ("tpu7x:2x2x1", 3690),
}
# libtpu looks for a TPU and for its neighbours, unless told what it is.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_LOG_DIR": "disabled",
}
# Nothing of these moves bytes.
_FREE = {"parameter", "bitcast", "custom-call", "get-tuple-element", "tuple", "while", "call", "opt-barrier"}


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with abstract arguments.

    Attributes:
      name: for the table.
      function: what is compiled.
      arguments: pytree of ``jax.ShapeDtypeStruct``, one entry per parameter.
      donated: positions of the arguments that are updated in place.
      cache: the arrays that must never be copied.
      bytes: what the program has to move through HBM, at the least.
    """

    name: str
    function: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...]
    cache: tuple[Any, ...]
    bytes: int

    @property
    def scalar_bytes(self) -> int:
        """Scalar memory that a kernel takes: page table, lists and lengths, which are copied there whole."""
        return _nbytes([leaf for leaf in jax.tree.leaves(self.arguments) if leaf.dtype == jnp.int32])


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What the compiler says.

    Attributes:
      text: the optimised program.
      kernels: how many Pallas kernels are in it.
      copies: lines that produce an array of a cache leaf's size.
      aliased, cache: bytes updated in place, and bytes of the cache.
      peak: bytes of HBM: arguments, results and temporaries.
      vmem: largest vector memory of a kernel.
    """

    text: str
    kernels: int
    copies: list[str]
    aliased: int
    cache: int
    peak: int
    vmem: int


def device_of(chip: str) -> Any:
    """Returns the description of one device of ``chip``.

    Raises:
      RuntimeError: libtpu is missing or does not know the chip.
    """
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    return topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip][0]).devices[0]


def compile_for(device: Any, program: Program) -> Compiled:
    """Compiles ``program`` for ``device``; raises what the compiler raises."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    there = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), program.arguments)
    # The default device is what the ops choose their kernels by, and what keeps jit's traces apart.
    with jax.default_device(device):
        compiled = jax.jit(program.function, donate_argnums=program.donated).lower(*there).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is None or memory is None:
        raise RuntimeError(f"{program.name}: this version of JAX says nothing about a program compiled ahead of time.")
    used = r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"\d+","size":"(\d+)"'
    vmem = [int(size) for size in re.findall(used, _kernel_lines(text))]
    return Compiled(
        text=text,
        kernels=text.count('custom_call_target="tpu_custom_call"'),
        copies=copies_of(text, program.cache),
        aliased=memory.alias_size_in_bytes,
        cache=_nbytes(program.cache),
        peak=memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes,
        vmem=max(vmem, default=0),
    )


def _kernel_lines(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if 'custom_call_target="tpu_custom_call"' in line)


def copies_of(text: str, leaves: Any) -> list[str]:
    """The instructions in the text of a program that produce an array as large, and as wide, as one of ``leaves``."""
    sizes = {(leaf.size, leaf.shape[-1]) for leaf in leaves}
    found = []
    for line in text.splitlines():
        instruction = re.match(r"\s*(?:ROOT )?%\S+ = \(?\w+\[([\d,]+)\]\S*(?:, [^)]*\))? ([\w-]+)\(", line)
        if instruction and instruction.group(2) not in _FREE:
            shape = [int(size) for size in instruction.group(1).split(",")]
            if (math.prod(shape), shape[-1]) in sizes:
                found.append(line.strip()[:200])
    return found


def _nbytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def attention_program(
    *, rows=2, kv_heads=8, group=4, dim=128, page=16, pages=512, tokens=1, listed=0, table=False, layers=0,
    dtype="bfloat16", padded=True, implementation: str | None = "mosaic_tpu",
) -> Program:  # fmt: skip
    """``page_attention`` over ``listed`` pages of each KV head, or over all (0)."""
    stack = (layers,) if layers else ()
    width = 2 * stored_head_dim(dim, "fused", "tpu") if padded else 2 * dim
    kv = _array((*stack, kv_heads, rows * pages, page, width), dtype)

    def run(q, kv, starts, lengths, table, lists, counts):
        layer = layers - 1 if layers else None
        return page_attention(
            q, kv, starts, lengths, table, pages=lists, counts=counts, layer=layer, implementation=implementation
        )

    arguments = (
        _array((rows, tokens, kv_heads * group, dim), dtype), kv, _array((rows,)), _array((rows,)),
        _array((rows, pages)) if table else None,
        _array((rows, kv_heads, listed)) if listed else None, _array((rows, kv_heads)) if listed else None,
    )  # fmt: skip
    read = rows * kv_heads * (listed or pages) * page * width * kv.dtype.itemsize
    what = f"{listed} of {pages} pages" if listed else f"all {pages} pages"
    name = f"page_attention {what}, T={tokens} G={group} D={dim} S={page} {dtype}"
    return Program(name, run, arguments, (), (kv,), read)


def scores_program(
    *, rows=2, kv_heads=8, group=4, dim=128, pages=8192, reduce: Reduce = "mean", layers=0, dtype="float32"
) -> Program:
    """``page_scores`` of all pages."""
    stack = (layers,) if layers else ()
    meta = _array((*stack, rows, kv_heads, pages, 2 * stored_head_dim(dim, "fused", "tpu")), dtype)

    def run(q, meta, lengths):
        layer = layers - 1 if layers else None
        return page_scores(q, meta, lengths, page_size=16, reduce=reduce, layer=layer, implementation="mosaic_tpu")

    arguments = (_array((rows, kv_heads * group, dim), "bfloat16"), meta, _array((rows,)))
    name = f"page_scores {reduce} of {pages} pages, G={group} D={dim}" + (f" {dtype}" if dtype != "float32" else "")
    return Program(name, run, arguments, (), (meta,), _nbytes(meta) // max(1, layers))


def token_scores_program(
    *, rows=2, kv_heads=8, queries=64, dim=128, page=16, pages=8192, layers=0, dtype="bfloat16"
) -> Program:
    """``token_scores`` of a group's picked queries and all keys."""
    stack = (layers,) if layers else ()
    kv = _array((*stack, kv_heads, rows * pages, page, 2 * stored_head_dim(dim, "fused", "tpu")), dtype)

    def run(q, kv, weights, ends):
        layer = layers - 1 if layers else None
        return token_scores(q, kv, weights, ends, layer=layer, implementation="mosaic_tpu")

    weights = _array((rows, kv_heads, pages * page), "float32")
    arguments = (_array((rows, kv_heads, queries, dim), "float32"), kv, weights, _array((rows,)))
    name = f"token_scores of {pages} pages, R={queries} D={dim} S={page} {dtype}"
    return Program(name, run, arguments, (), (kv,), _nbytes(kv) // max(1, layers) + _nbytes(weights))


def append_program(
    *, rows=2, kv_heads=8, dim=128, page=16, pages=512, tokens=1, table=False, layers=0, dtype="bfloat16", donate=True
) -> Program:
    """``append`` of ``tokens`` a row, in place unless ``donate`` is off."""
    stack = (layers,) if layers else ()
    width = 2 * stored_head_dim(dim, "fused", "tpu")
    kv = _array((*stack, kv_heads, rows * pages, page, width), dtype)
    meta = _array((*stack, rows, kv_heads, pages, width), "float32")
    new = _array((rows, tokens, kv_heads, dim), dtype)

    def run(kv, meta, keys, values, starts, ends, table):
        layer = layers - 1 if layers else None
        return append(kv, meta, keys, values, starts, ends, table, layer=layer, implementation="mosaic_tpu")

    arguments = (kv, meta, new, new, _array((rows,)), _array((rows,)), _array((rows, pages)) if table else None)
    touched = (tokens + page - 2) // page + 1
    moved = 2 * rows * kv_heads * width * (touched * page * kv.dtype.itemsize + (touched + 14) // 8 * 8 * 4)
    name = f"append T={tokens} D={dim} S={page} {dtype}"
    return Program(name, run, arguments, (0, 1) if donate else (), (kv, meta), moved)


def _array(shape: tuple[int, ...], dtype: str = "int32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _large_model(layers, rows, context, page, dim, **policies) -> tuple[Params, DecodeState]:
    """Abstract weights with the widths of Llama 3 8B, of whose 32 layers ``layers`` are there, and a state for them."""
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, n_layers=layers, n_heads=32, n_kv_heads=8,
        head_dim=dim, max_positions=context, rope=RopeConfig(theta=500000.0),
    )  # fmt: skip

    def initial() -> DecodeState:
        return DecodeState(
            attention=init_attention(
                layers, 8, dim, batch=rows, capacity=context, page_size=page, dtype=jnp.bfloat16, **policies
            ),
            logits=jnp.zeros((rows, config.vocab_size), jnp.float32),
            done=jnp.zeros(rows, bool),
            keys=row_keys(0, rows),
            eos=jnp.zeros(1, jnp.int32),
            sampler=make_sampler(0.0, None, None),
        )  # fmt: skip

    with dispatch.target("tpu", "any"):  # a cache as it is made there
        state = jax.eval_shape(initial)
    return Params(abstract_weights(config, jnp.bfloat16), config), state


def prefill_program(*, layers=3, rows=1, context=131072, budget=2048, page=16, dim=128) -> Program:
    """One chunk of a prompt, selected by QuoKA in pages, for the model of :func:`decode_program`."""
    policy = QuoKA(budget, group="each")
    params, state = _large_model(layers, rows, context, page, dim, prefill_policy=policy)
    cache = tuple(jax.tree.leaves((state.attention.cache.kv, state.attention.cache.meta)))
    # All weights but the embedding's table, all keys to score them, and the pages by budget and of the chunk.
    width = cache[0].shape[-1]
    read = _nbytes(params.weights) - 2 * params.config.vocab_size * params.config.hidden_size
    read += layers * rows * 8 * width * (context + 2 * (budget + policy.chunk))
    arguments = (params, state, _array((rows, policy.chunk)), _array(()), _array((rows,)))
    name = (
        f"prefill chunk of {policy.chunk}, Llama 3 8B with {layers} layers, {context} tokens, QuoKA {budget} in pages"
    )
    return Program(name, prefill_chunk, arguments, (1,), cache, read)


def decode_program(*, layers=3, rows=1, context=131072, budget=2048, page=16, dim=128) -> Program:
    """One ``decode_step`` of a model with the widths of Llama 3 8B, of whose 32 layers ``layers`` are there."""
    params, state = _large_model(layers, rows, context, page, dim, policy=Quest(budget=budget))
    config = params.config
    cache = tuple(jax.tree.leaves((state.attention.cache.kv, state.attention.cache.meta)))
    # All weights but the embedding's table, pages by budget in the sparse layers, all of them in the two dense ones.
    weights = _nbytes(params.weights) - 2 * config.vocab_size * config.hidden_size
    width = cache[0].shape[-1]
    per_token = rows * 8 * width * 2
    read = weights + min(layers, 2) * context * per_token
    read += max(0, layers - 2) * (budget * per_token + rows * 8 * context // page * width * 4)
    head_dim = "" if dim == 128 else f" of head dim {dim}"
    name = f"decode step, Llama 3 8B with {layers} layers{head_dim}, {context} tokens, budget {budget}"
    return Program(name, decode_step, (params, state), (1,), cache, read)


def generate_program(*, layers=30, rows=2, prompt=4096, new=64, budget=512) -> Program:
    """``generate`` as one program, for the shape of SmolLM2-135M: prefill in chunks, then the loop of decode steps."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, n_layers=layers, n_heads=9, n_kv_heads=3,
        head_dim=64, max_positions=8192, rope=RopeConfig(theta=100000.0), tie_word_embeddings=True,
    )  # fmt: skip

    def run(params, tokens):
        return generate(params, tokens, budget=budget, max_new_tokens=new, capacity=5120, eos_token_ids=()).tokens

    params = Params(abstract_weights(config, jnp.bfloat16), config)
    # The cache is made inside; its leaves are named here to be looked for.
    pages = 5120 // 16
    cache = (_array((3, rows * pages, 16, 128), "bfloat16"), _array((rows, 3, pages, 128), "float32"))
    name = f"generate, SmolLM2-135M with {layers} layers, {rows} x {prompt} + {new} tokens, budget {budget}"
    return Program(name, run, (params, _array((rows, prompt))), (), cache, _nbytes(params.weights) * new)


def kernel_programs() -> list[Program]:
    """What is compiled for every chip."""
    return [
        attention_program(listed=128, pages=8192, table=True),
        attention_program(listed=64, group=7, dim=64, page=8, dtype="float32", layers=2),
        attention_program(pages=8192, rows=1),
        attention_program(tokens=256, dim=256, group=3, page=32, pages=128),
        attention_program(tokens=256, dim=64, group=3, kv_heads=3, dtype="float32", table=True),
        attention_program(listed=128, dim=80, table=True),
        attention_program(tokens=256, dim=96, group=3, dtype="float32"),
        scores_program(),
        scores_program(reduce="max", group=3, dim=64, layers=2),
        scores_program(reduce="none", group=16, dim=256, pages=1000),
        scores_program(dim=96),
        scores_program(dtype="bfloat16"),
        token_scores_program(),
        token_scores_program(queries=48, dim=64, kv_heads=3, pages=320, layers=2, dtype="float32"),
        token_scores_program(queries=16, dim=80, page=8, pages=512),
        append_program(),
        append_program(dtype="float32", dim=64, kv_heads=3, table=True, layers=2),
        append_program(tokens=256, table=True),
        append_program(tokens=19, page=8, dim=256, dtype="float32"),
        append_program(tokens=19, dim=80),
    ]

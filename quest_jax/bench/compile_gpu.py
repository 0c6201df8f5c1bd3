"""Ahead-of-time compilation for NVIDIA GPUs that are not there: every kernel, the chain of a layer, decode steps.

:func:`compile_all` compiles for one architecture in a process of its own, because Mosaic GPU keeps what it learned
about the first; it needs the CUDA plugin and ptxas (``make test-aot-gpu`` installs them), no GPU. Nothing is run.
"""

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from quest_jax.attention import init_attention
from quest_jax.bench import device_correctness, device_timing
from quest_jax.bench.ptxas import Kernel, kernels_of
from quest_jax.decode import DecodeState, decode_step, row_keys
from quest_jax.models.config import LlamaConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention import gpu as attention_kernel
from quest_jax.pallas_kernels.page_attention.gpu_columns import columns_of
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.page_scores.op import Reduce, page_scores
from quest_jax.pallas_kernels.pages import stored_head_dim
from quest_jax.params import Params
from quest_jax.policies.quest import Quest, largest
from quest_jax.sampling import Greedy


class Architecture(NamedTuple):
    """A GPU as its vendor documents it: shared memory is that of a block in bytes, bandwidth nominal in GB/s."""

    capability: tuple[int, int]
    multiprocessors: int
    shared: int
    bandwidth: int
    name: str


ARCHITECTURES = {
    "80": Architecture((8, 0), 108, 166912, 2039, "NVIDIA A100-SXM4-80GB"),
    "89": Architecture((8, 9), 142, 101376, 864, "NVIDIA L40S"),
    "90": Architecture((9, 0), 132, 232448, 4800, "NVIDIA H200"),
    "100": Architecture((10, 0), 148, 232448, 8000, "NVIDIA B200"),
    "120": Architecture((12, 0), 188, 101376, 1792, "NVIDIA RTX PRO 6000 Blackwell"),
}


class Attention(NamedTuple):
    """Sizes of ``page_attention`` for one row: pages of it, pages that each list names (0: dense), query tokens."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    listed: int
    dtype: str = "bfloat16"
    stacked: bool = False
    table: bool = False
    tokens: int = 1

    @property
    def pool(self) -> tuple[int, ...]:
        """Shape of the pool."""
        stack = [4] if self.stacked else []
        return (*stack, self.kv_heads, self.pages, self.page_size, _width(self.head_dim))

    @property
    def bytes(self) -> int:
        """Keys and values that are read, once: every tile of a chunk's queries reads them again."""
        return self.kv_heads * (self.listed or self.pages) * self.page_size * _width(self.head_dim) * 2

    @property
    def shared(self) -> int:
        """Shared memory of a thread block."""
        stored = _width(self.head_dim) // 2
        step = attention_kernel.step_tokens(self.page_size)
        columns = columns_of(self.tokens, self.heads // self.kv_heads, stored, step)
        tiles = self.kv_heads * columns.tiles
        divided = attention_kernel.cut(tiles, self.listed or self.pages, self.page_size, stored)
        return attention_kernel.shared_bytes(divided, stored, columns)


class Scores(NamedTuple):
    """Sizes of ``page_scores`` for one row."""

    heads: int
    kv_heads: int
    head_dim: int
    pages: int
    reduce: Reduce

    @property
    def bytes(self) -> int:
        """Metadata that is read."""
        return self.kv_heads * self.pages * _width(self.head_dim) * 4


PROGRAMS: dict[str, Attention | Scores] = {
    "attention, 32/8 heads, D 128, 128 of 2048 pages of 16": Attention(32, 8, 128, 16, 2048, 128),
    "the same, dense": Attention(32, 8, 128, 16, 2048, 0),
    "the same, listed, page table, stacked layers": Attention(32, 8, 128, 16, 2048, 128, stacked=True, table=True),
    "attention, 9/3 heads, D 64, 64 of 512 pages of 16, float16": Attention(9, 3, 64, 16, 512, 64, "float16"),
    "attention, 64/8 heads, D 128, 32 of 512 pages of 64": Attention(64, 8, 128, 64, 512, 32),
    "attention, 8/8 heads, D 128, 64 of 512 pages of 8": Attention(8, 8, 128, 8, 512, 64),
    "attention, 32/8 heads, D 128, all 256 pages of 128": Attention(32, 8, 128, 128, 256, 0),
    "attention, 16/2 heads, D 256, 64 of 512 pages of 32": Attention(16, 2, 256, 32, 512, 64),
    "attention, 32/8 heads, D 80, 64 of 512 pages of 16": Attention(32, 8, 80, 16, 512, 64, table=True),
    "attention, 32/8 heads, D 96, all 512 pages of 16, float16": Attention(32, 8, 96, 16, 512, 0, "float16", True),
    "chunk of 128, 32/8 heads, D 128, 128 of 2048 pages of 16": Attention(32, 8, 128, 16, 2048, 128, tokens=128),
    "chunk of 128, 32/8 heads, D 128, all 2048 pages of 16": Attention(32, 8, 128, 16, 2048, 0, table=True, tokens=128),
    "chunk of 128, 32/8 heads, D 64, 64 of 512 pages of 32": Attention(32, 8, 64, 32, 512, 64, "float16", tokens=128),
    "chunk of 128, 9/3 heads, D 64, all 512 pages of 16": Attention(9, 3, 64, 16, 512, 0, stacked=True, tokens=128),
    "chunk of 128, 16/2 heads, D 256, 64 of 512 pages of 32": Attention(16, 2, 256, 32, 512, 64, tokens=128),
    "chunk of 128, 16/2 heads, D 256, all 512 pages of 16": Attention(16, 2, 256, 16, 512, 0, tokens=128),
    "chunk of 5, 32/8 heads, D 128, all 256 pages of 128": Attention(32, 8, 128, 128, 256, 0, tokens=5),
    "scores, 32/8 heads, D 128, 2048 pages, mean": Scores(32, 8, 128, 2048, "mean"),
    "scores, 32/8 heads, D 128, 2048 pages, none": Scores(32, 8, 128, 2048, "none"),
    "scores, 64/8 heads, D 128, 2048 pages, max": Scores(64, 8, 128, 2048, "max"),
    "scores, 9/3 heads, D 64, 512 pages, mean": Scores(9, 3, 64, 512, "mean"),
    "scores, 16/2 heads, D 256, 48 pages, mean": Scores(16, 2, 256, 48, "mean"),
    "scores, 32/8 heads, D 80, 2048 pages, mean": Scores(32, 8, 80, 2048, "mean"),
}
# Nothing of these is a launch.
_FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def compile_all(architecture: str, root: str | None = None) -> tuple[dict[str, Any], list[Kernel]]:
    """Compiles everything for ``architecture`` in another process, started in the folder ``root``.

    Returns:
      facts of the programs, see :func:`main`, and what ptxas says of every kernel.

    Raises:
      RuntimeError: the CUDA plugin is missing, or something did not compile; with the end of the compiler's output.
    """
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        raise RuntimeError("expected jax-cuda13-plugin and nvidia-cuda-nvcc in this environment; `make test-aot-gpu`.")
    # The plugin describes devices and compiles; it must not look for one. ptxas is to say what it does.
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MOSAIC_GPU_DUMP_PTXAS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "quest_jax.bench.compile_gpu", architecture],
        cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"compiling for sm_{architecture} failed:\n{done.stdout[-4000:]}")
    result = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return json.loads(result), kernels_of(done.stdout)


def device_of(architecture: str) -> Any:
    """Returns the description of one device."""
    description = describe(architecture)
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1").devices[0]


def describe(architecture: str) -> str:
    """A device in the text form of XLA's ``GpuTargetConfigProto``."""
    (major, minor), cores, shared, _, name = ARCHITECTURES[architecture]
    # Mosaic GPU emits architecture-specific code from 9.0 on, and ptxas must be told to expect it.
    features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: {cores}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared + 1024} shared_memory_per_block_optin: {shared}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 2000000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.7 device_memory_size: 80000000000
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
}}
runtime_version {{ major: 13 }}
platform_name: "CUDA"
device_description_str: "{name}"
"""


def compile_for(device, f, *args, donate=()):
    """Compiles ``f`` for a device that is only described."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    # Without the default device Mosaic GPU compiles for 9.0 whatever the sharding says.
    with jax.default_device(device):
        return jax.jit(f, donate_argnums=donate).lower(*args).compile()


def _text(program: Any) -> str:
    """The optimised program; every version of JAX that is supported has it for programs compiled ahead of time."""
    text = program.as_text()
    assert text is not None
    return text


def launches(text: str) -> list[str]:
    """What the entry computation of a compiled program runs on the device, in order."""
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        parts = re.match(r"\s+(?:ROOT )?%?\S+ = (?:\([^=]*\)|\S+) ([a-z\-]+)\(", line)
        if parts and parts[1] not in _FREE:
            target = re.search(r'custom_call_target="([^"]+)"', line)
            where = re.search(r'op_name="([^"]+)"', line)
            found.append(" ".join(filter(None, [parts[1], target and target[1], where and where[1]])))
    return found


def shape(dtype, *sizes):
    """An abstract array."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def _width(head_dim):
    return 2 * stored_head_dim(head_dim, "fused", "gpu")


def kernel(compiled: Callable, sizes: Attention | Scores):
    """Compiles one op for one row."""
    ints = functools.partial(shape, jnp.int32)
    if isinstance(sizes, Scores):
        run = functools.partial(page_scores, page_size=16, reduce=sizes.reduce, implementation="mosaic_gpu")
        meta = shape(jnp.float32, 1, sizes.kv_heads, sizes.pages, _width(sizes.head_dim))
        return compiled(run, shape(jnp.bfloat16, 1, sizes.heads, sizes.head_dim), meta, ints(1))
    operands = {
        "q": shape(sizes.dtype, 1, sizes.tokens, sizes.heads, sizes.head_dim), "kv": shape(sizes.dtype, *sizes.pool),
        "starts": ints(1), "lengths": ints(1),
    }  # fmt: skip
    if sizes.table:
        operands["page_table"] = ints(1, sizes.pages)
    if sizes.listed:
        operands |= {"pages": ints(1, sizes.kv_heads, sizes.listed), "counts": ints(1, sizes.kv_heads)}
    layer = 2 if sizes.stacked else None
    return compiled(lambda given: page_attention(**given, layer=layer, implementation="mosaic_gpu"), operands)


def chunk_facts(program: Any, sizes: Attention) -> dict[str, list[str]]:
    """Launches of a program of several query tokens, and what in it copies the pool."""
    text = _text(program)
    # As the op has it, and as the kernel reads it.
    pools = [shape(sizes.dtype, *sizes.pool), shape(sizes.dtype, math.prod(sizes.pool[:-2]), *sizes.pool[-2:])]
    return {"launches": launches(text), "cache_copies": _producers(text, pools, r"[a-z\-]+")}


def chain(compiled, reduce=None):
    """Score, select, attend: 32768 tokens of context, 2048 read, Llama-3-8B's layer, one row."""
    policy = Quest(2048, dense_layers=0, reduce=reduce)

    def run(q, kv, meta, starts, lengths):
        ranked = policy.score(q[:, 0], meta, lengths, 16, None)
        selection = policy.select(ranked, lengths, 16)
        return page_attention(q, kv, starts, lengths, pages=selection.pages, counts=selection.counts)[0]

    half, full, ints = (functools.partial(shape, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int32))
    return compiled(run, half(1, 1, 32, 128), half(8, 2048, 16, 256), full(1, 8, 2048, 256), ints(1), ints(1))


def step(compiled, n_layers, head_dim=128, context=131072, reduce=None):
    """A decode step: Llama-3-8B's attention, or one of another head dim, and a small model around it."""
    config = LlamaConfig(4096, 2048, 4096, n_layers, 32, 8, head_dim, context)
    policy = Quest(2048, dense_layers=0, reduce=reduce)

    def make_state():
        attention_state = init_attention(
            n_layers, 8, head_dim, batch=1, capacity=context, policy=policy, dtype=jnp.bfloat16,
        )  # fmt: skip
        return DecodeState(
            attention=attention_state, logits=jnp.zeros((1, 4096)), done=jnp.zeros(1, bool), keys=row_keys(0, 1),
            eos=jnp.zeros(1, jnp.int32), sampler=Greedy(),
        )  # fmt: skip

    state = jax.eval_shape(make_state)
    params = Params(weights=abstract_weights(config, jnp.bfloat16), config=config)
    program = compiled(decode_step, params, state, donate=(1,))
    cache = state.attention.cache
    memory, text = program.memory_analysis(), _text(program)
    return {
        "launches": launches(text),
        "cache_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((cache.kv, cache.meta))),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cache_copies": _producers(text, (cache.kv[0], cache.meta[0]), "copy|transpose|slice|dynamic-slice"),
        "weight_copies": _producers(text[text.index("\nENTRY ") :], jax.tree.leaves(params.weights), r"[a-z\-]+"),
    }


def _producers(text: str, leaves: Any, instructions: str) -> list[str]:
    """The lines of a program in which one of ``instructions`` produces an array of a leaf's shape with several axes."""
    shapes = "|".join(",".join(map(str, leaf.shape)) for leaf in leaves if len(leaf.shape) > 1)
    found = re.findall(rf"(?m)^.* = \S*\[(?:{shapes})\]\S* (?:{instructions})\(.*$", text)
    return [line.strip()[:200] for line in found if not re.search(r" (?:parameter|bitcast)\(", line)]


def device_check_programs(compiled: Callable) -> list[str]:
    """Compiles what :mod:`quest_jax.bench.device_check` runs, but for the programs of others; returns their names."""
    names = []
    for case in device_correctness.SHAPES:
        for name, function, arguments in device_correctness.abstract_programs(case):
            compiled(function, *arguments)
            names.append(f"{name} {case}")
    for name, function, arguments, donated in device_timing.abstract_programs(device_timing.FULL, 32768, 8):
        compiled(function, *arguments, donate=donated)
        names.append(f"{name} at 32768 x 8")
    return names


def main(architecture: str) -> None:
    """Compiles everything, printing ``PROGRAM name`` before each program and at the end the facts as one line of JSON.

    The facts are: ``chunks``, by program; ``chain``, launches of score, select, attend, the scores' mean over a group
    fused, and ``chain by softmax``, the default's; ``step``, by the mean, and ``step of head dim 80``, by softmax; the
    launches of ``stable`` and ``129 of them``, selections that are no fast ones; ``one row``, what a product of one row
    makes of a weight; and for 9.0 ``device check``, names of its programs.
    """
    device = device_of(architecture)
    capability, name = ARCHITECTURES[architecture].capability, ARCHITECTURES[architecture].name
    assert dispatch.target_of(device) == dispatch.Target("gpu", name, capability)
    compiled = functools.partial(compile_for, device)
    result: dict[str, Any] = {"chunks": {}}

    def begin(title):
        sys.stdout.write(f"PROGRAM {title}\n")
        sys.stdout.flush()

    with dispatch.target("gpu", name, capability):
        for title, sizes in PROGRAMS.items():
            begin(title)
            program = kernel(compiled, sizes)
            if isinstance(sizes, Attention) and sizes.tokens > 1:
                result["chunks"][title] = chunk_facts(program, sizes)
        begin("chain")
        result["chain"] = launches(_text(chain(compiled, "mean")))
        result["chain by softmax"] = launches(_text(chain(compiled)))
        begin("decode step of two layers")
        result["step"] = step(compiled, 2, reduce="mean")
        begin("decode step of one layer of head dim 80")
        result["step of head dim 80"] = step(compiled, 1, head_dim=80, context=32768)
        begin("controls")
        ranked = shape(jnp.float32, 8, 2048)
        result["stable"] = launches(_text(compiled(lambda x: jax.lax.top_k(x, 128), ranked)))
        result["129 of them"] = launches(_text(compiled(lambda x: largest(x, 129), ranked)))
        row, weight = shape(jnp.bfloat16, 1, 1, 2048), shape(jnp.bfloat16, 2048, 1024)
        plain = _text(compiled(lambda x, w, y: y + x @ w, row, weight, shape(jnp.bfloat16, 1, 1, 1024)))
        result["one row"] = _producers(plain[plain.index("\nENTRY ") :], (weight,), r"[a-z\-]+")
        if architecture == "90":
            begin("device check")
            result["device check"] = device_check_programs(compiled)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

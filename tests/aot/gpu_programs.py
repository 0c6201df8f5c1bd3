"""Compiles the GPU programs for one architecture, without a GPU: ``python gpu_programs.py 90``.

Prints a line ``PROGRAM name`` before each, ptxas' own report of every kernel after it, and at the end one line of JSON.
One architecture a process: Mosaic GPU keeps what it learned about the first.
"""

import functools
import json
import math
import os
import re
import sys

os.environ["JAX_PLATFORMS"] = "cpu"  # the plugin describes devices and compiles; it must not look for one
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from quest_jax.attention import init_attention
from quest_jax.decode import DecodeState, decode_step, row_keys
from quest_jax.models.config import LlamaConfig
from quest_jax.models.llama import abstract_weights
from quest_jax.pallas_kernels import dispatch
from quest_jax.pallas_kernels.page_attention.op import page_attention
from quest_jax.pallas_kernels.page_scores.op import page_scores
from quest_jax.pallas_kernels.pages import stored_head_dim
from quest_jax.params import Params
from quest_jax.policies.quest import Quest, largest
from quest_jax.sampling import Greedy

# Compute capability, multiprocessors, shared memory of a block in bytes, and a name, as the vendor documents them.
ARCHITECTURES = {
    "80": ((8, 0), 108, 166912, "NVIDIA A100-SXM4-80GB"),
    "89": ((8, 9), 142, 101376, "NVIDIA L40S"),
    "90": ((9, 0), 132, 232448, "NVIDIA H200"),
    "100": ((10, 0), 148, 232448, "NVIDIA B200"),
    "120": ((12, 0), 188, 101376, "NVIDIA RTX PRO 6000 Blackwell"),
}
# H, K, D, S, P, pages listed (0: dense), dtype, stacked, page table
ATTENTION = {
    "attention llama-3-8b": (32, 8, 128, 16, 2048, 128, "bfloat16", False, False),
    "attention llama-3-8b, dense": (32, 8, 128, 16, 2048, 0, "bfloat16", False, False),
    "attention llama-3-8b, page table, layers": (32, 8, 128, 16, 2048, 128, "bfloat16", True, True),
    "attention smollm2, float16": (9, 3, 64, 16, 512, 64, "float16", False, False),
    "attention group 8, pages of 64": (64, 8, 128, 64, 512, 32, "bfloat16", False, False),
    "attention group 1, pages of 8": (8, 8, 128, 8, 512, 64, "bfloat16", False, False),
    "attention pages of 128, dense": (32, 8, 128, 128, 256, 0, "bfloat16", False, False),
    "attention head dim 256": (16, 2, 256, 32, 512, 64, "bfloat16", False, False),
    "attention head dim 80": (32, 8, 80, 16, 512, 64, "bfloat16", False, True),
    "attention head dim 96, dense": (32, 8, 96, 16, 512, 0, "float16", True, False),
}
# H, K, D, P, reduce
SCORES = {
    "scores llama-3-8b": (32, 8, 128, 2048, "mean"),
    "scores llama-3-8b, per head": (32, 8, 128, 2048, "none"),
    "scores group 8, max": (64, 8, 128, 2048, "max"),
    "scores smollm2": (9, 3, 64, 512, "mean"),
    "scores head dim 256, 48 pages": (16, 2, 256, 48, "mean"),
    "scores head dim 80": (32, 8, 80, 2048, "mean"),
}
FREE = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")


def describe(architecture: str) -> str:
    """A device in the text form of XLA's ``GpuTargetConfigProto``."""
    (major, minor), cores, shared, name = ARCHITECTURES[architecture]
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


def launches(text: str) -> list[str]:
    """What the entry computation of a compiled program runs on the device, in order."""
    found = []
    for line in text[text.index("\nENTRY ") :].splitlines():
        parts = re.match(r"\s+(?:ROOT )?%?\S+ = (?:\([^=]*\)|\S+) ([a-z\-]+)\(", line)
        if parts and parts[1] not in FREE:
            target = re.search(r'custom_call_target="([^"]+)"', line)
            where = re.search(r'op_name="([^"]+)"', line)
            found.append(" ".join(filter(None, [parts[1], target and target[1], where and where[1]])))
    return found


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype)


def _width(head_dim):
    return 2 * stored_head_dim(head_dim, "fused", "gpu")


def attention(compiled, heads, kv_heads, head_dim, page_size, pages, listed, dtype, stacked, table):
    """One row; nothing but shapes."""
    kv = shape(dtype, *([4] if stacked else []), kv_heads, pages, page_size, _width(head_dim))
    ints = functools.partial(shape, jnp.int32)
    operands = {"q": shape(dtype, 1, 1, heads, head_dim), "kv": kv, "starts": ints(1), "lengths": ints(1)}
    if table:
        operands["page_table"] = ints(1, pages)
    if listed:
        operands |= {"pages": ints(1, kv_heads, listed), "counts": ints(1, kv_heads)}

    def run(operands):
        return page_attention(**operands, layer=2 if stacked else None, implementation="mosaic_gpu")

    return compiled(run, operands)


def scores(compiled, heads, kv_heads, head_dim, pages, reduce):
    run = functools.partial(page_scores, page_size=16, reduce=reduce, implementation="mosaic_gpu")
    meta = shape(jnp.float32, 1, kv_heads, pages, _width(head_dim))
    return compiled(run, shape(jnp.bfloat16, 1, heads, head_dim), meta, shape(jnp.int32, 1))


def chain(compiled):
    """Score, select, attend: 32768 tokens of context, 2048 read, Llama-3-8B's layer, one row."""
    policy = Quest(2048, dense_layers=0)

    def run(q, kv, meta, starts, lengths):
        ranked = policy.score(q[:, 0], meta, lengths, 16, None)
        selection = policy.select(ranked, lengths, 16)
        return page_attention(q, kv, starts, lengths, pages=selection.pages, counts=selection.counts)[0]

    half, full, ints = (functools.partial(shape, dtype) for dtype in (jnp.bfloat16, jnp.float32, jnp.int32))
    return compiled(run, half(1, 1, 32, 128), half(8, 2048, 16, 256), full(1, 8, 2048, 256), ints(1), ints(1))


def step(compiled, n_layers, head_dim=128, context=131072):
    """A decode step: Llama-3-8B's attention, or one of another head dim, and a small model around it."""
    config = LlamaConfig(4096, 2048, 4096, n_layers, 32, 8, head_dim, context)

    def make_state():
        attention_state = init_attention(
            n_layers, 8, head_dim, batch=1, capacity=context, policy=Quest(2048, dense_layers=0), dtype=jnp.bfloat16,
        )  # fmt: skip
        return DecodeState(
            attention=attention_state, logits=jnp.zeros((1, 4096)), done=jnp.zeros(1, bool), keys=row_keys(0, 1),
            eos=jnp.zeros(1, jnp.int32), sampler=Greedy(),
        )  # fmt: skip

    state = jax.eval_shape(make_state)
    params = Params(weights=abstract_weights(config, jnp.bfloat16), config=config)
    program = compiled(decode_step, params, state, donate=(1,))
    cache = state.attention.cache
    memory = program.memory_analysis()
    pool, bounds = cache.kv[0].shape, cache.meta[0].shape
    of_cache = [",".join(map(str, sizes)) for sizes in (pool, bounds)]
    return {
        "launches": launches(program.as_text()),
        "cache_bytes": sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((cache.kv, cache.meta))),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "cache_copies": [
            line.strip()[:200]
            for line in program.as_text().splitlines()
            if re.search(r"= \S*\[(?:" + "|".join(of_cache) + r")\]\S* (?:copy|transpose|slice|dynamic-slice)\(", line)
        ],
    }


def main(architecture: str) -> None:
    capability, _, _, name = ARCHITECTURES[architecture]
    topology = topologies.get_topology_desc(platform="cuda", target_config=describe(architecture), topology="1x1x1")
    device = topology.devices[0]
    assert dispatch.target_of(device) == dispatch.Target("gpu", name, capability)
    compiled = functools.partial(compile_for, device)
    result = {}

    def begin(title):
        print(f"PROGRAM {title}", flush=True)

    with dispatch.target("gpu", name, capability):
        for title, sizes in ATTENTION.items():
            begin(title)
            attention(compiled, *sizes)
        for title, sizes in SCORES.items():
            begin(title)
            scores(compiled, *sizes)
        begin("chain")
        result["chain"] = launches(chain(compiled).as_text())
        begin("decode step of two layers")
        result["step"] = step(compiled, 2)
        begin("decode step of one layer of head dim 80")
        result["step of head dim 80"] = step(compiled, 1, head_dim=80, context=32768)
        begin("controls")
        ranked = shape(jnp.float32, 8, 2048)
        result["stable"] = launches(compiled(lambda x: jax.lax.top_k(x, 128), ranked).as_text())
        result["129 of them"] = launches(compiled(lambda x: largest(x, 129), ranked).as_text())
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

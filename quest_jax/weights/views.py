"""Checkpoints that keep several parts of the decoder in one tensor: the parts, as tensors of their own.

A view takes the stored tensors by name and gives them back with what it knows taken apart, under the names that
:data:`quest_jax.weights.families.LLAMA_NAMES` has for the parts. It reads nothing.
"""

from collections.abc import Callable, Mapping

from quest_jax.models.config import LlamaConfig
from quest_jax.weights.stored import StoredTensor, expert_of, keeping_the_last, rows_of

Tensors = dict[str, StoredTensor]
Views = Callable[[LlamaConfig, Tensors, str], Tensors]


def split_rows(config: LlamaConfig, stored: Tensors, where: str) -> Tensors:
    """Phi-3: q, k, v in one matrix, and gate, up in another."""
    queries, keys = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    inner = config.intermediate_size
    attention, mlp = "self_attn.{}_proj.weight".format, "mlp.{}_proj.weight".format
    fused = {
        attention("qkv"): {attention("q"): queries, attention("k"): keys, attention("v"): keys},
        mlp("gate_up"): {mlp("gate"): inner, mlp("up"): inner},
    }
    return split_fused(stored, fused, config.hidden_size, where)


def split_fused(stored: Tensors, fused: Mapping[str, Mapping[str, int]], width: int, where: str) -> Tensors:
    """Matrices ``[out, width]`` whose rows are those of several parts, one part below the other.

    Args:
      stored: all tensors.
      fused: by the ending of such a matrix's name, the endings of its parts and how many rows each has, in order.
      width: columns.
      where: the file, for errors.

    Raises:
      ValueError: a matrix of another shape, or a part that is there by itself too.
    """
    parts = dict(stored)
    for name, tensor in stored.items():
        for ending, sizes in fused.items():
            if not name.endswith(ending):
                continue
            tensor.checked((sum(sizes.values()), width), where)
            del parts[name]
            start, stem = 0, name.removesuffix(ending)
            for part, rows in sizes.items():
                if stem + part in parts:
                    raise ValueError(f"{where}: expected {stem + part} within {name} only, the file has it twice.")
                parts[stem + part] = rows_of(tensor, start, start + rows)
                start += rows
    return parts


def split_experts(config: LlamaConfig, stored: Tensors, where: str) -> Tensors:
    """GPT-OSS: a stack of all experts a matrix, stored ``[in, out]``, gate and up row about in ``out``."""
    experts = config.experts
    assert experts is not None
    hidden, inner = config.hidden_size, experts.size
    shapes = {
        "gate_up_proj": (experts.count, hidden, 2 * inner),
        "gate_up_proj_bias": (experts.count, 2 * inner),
        "down_proj": (experts.count, inner, hidden),
        "down_proj_bias": (experts.count, hidden),
    }
    parts, read_expert = dict(stored), keeping_the_last()
    for name, tensor in stored.items():
        folder, _, ending = name.rpartition(".")
        if ending not in shapes or not folder.endswith(".experts"):
            continue
        tensor.checked(shapes[ending], where)
        del parts[name]
        kind = "bias" if ending.endswith("_bias") else "weight"
        sources = {"gate_proj": 0, "up_proj": 1} if ending.startswith("gate_up") else {"down_proj": 0}
        for expert in range(experts.count):
            for part, offset in sources.items():
                parts[f"{folder}.{expert}.{part}.{kind}"] = expert_of(
                    tensor, expert, read_expert, transposed=kind == "weight", step=len(sources), offset=offset
                )
    return parts

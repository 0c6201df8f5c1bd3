"""What the compiled programs need besides their arguments and results: an estimate, for planning memory.

Of everything that lives at the same time in a program of XLA's CPU backend, the largest part is one of three stages of
a layer. With N = B T new tokens, E, F, H, K, D, V as in :mod:`quest_jax.models.llama`, w bytes of a weight, G = H / K:

* held besides any stage: ``4 N E (2 + n)``, n the layers that always read everything: XLA adds up what such layers
  give to the residual stream late, and keeps each until then;
* MLP: ``N F (2 w + 4)``; of experts, k a token: ``R E w + 2 k N E (w + 4) + 3 E F w``, R the k N rows in blocks that
  are filled up;
* attention, one row and one list of keys at a time: ``2 w N D (H + 2 K) + 4 N H D``, then for a list of W keys
  ``8 G T W`` of scores and weights and ``2 w W D`` of gathered keys and values. Dense attention reads blocks of 1024
  keys, those of all KV heads at once where T is 1; in float32 it then scores nearly full rows at once, ``16 B H L``. A
  layer with a window has it, T and a page as keys;
* scoring, of C pages or keys: ``16 B H C``, for one token's choice of keys ``16 B K C``; of pages in more than one row
  also ``B K C c``, a copy of their metadata of c bytes.

Quantised weights add the blocks of a matrix that are widened at a time, and in bfloat16 both sides of a product again,
in float32.

Decoding also samples: ``40 B V``, with top_p. A quarter is added for all that is not listed. The kernels of TPUs and
GPUs need less, so there it is an upper estimate, not checked against a device.
"""

from collections.abc import Sequence

from quest_jax.models.config import LlamaConfig
from quest_jax.models.mlp import block_rows
from quest_jax.models.quant_cpu import widened_nbytes
from quest_jax.pallas_kernels.page_attention.contiguous import scores_are_few
from quest_jax.policies.base import PagePolicy, Policy

_DENSE_BLOCK = 1024  # of quest_jax.pallas_kernels.page_attention.reference


def prefill_temporaries(
    config: LlamaConfig,
    policy: Policy,
    dense: Sequence[bool],
    *,
    batch: int,
    capacity: int,
    chunk: int,
    page_size: int,
    itemsize: int,
    quantized: bool = False,
    watched: bool = False,
) -> int:
    """Returns the estimated bytes of temporaries of one chunk of the prompt.

    Args:
      config: of the model.
      policy: for the prompt.
      dense: which layers it always reads whole.
      batch, capacity, chunk, page_size: B, L, T, S.
      itemsize: bytes of a weight, and of a number in the cache.
      quantized: the matrices are, and blocks of them are widened.
      watched: the policy for decoding computes with the chunk's weights, one row after the other.
    """
    held, stage = _layers(config, policy, dense, batch, capacity, chunk, page_size, itemsize)
    stage += 8 * config.n_heads * chunk * capacity * watched
    widened = _widened(config, batch * chunk, batch, itemsize) if quantized else 0
    return _rounded(held + max(stage, 8 * batch * config.vocab_size) + widened)


def decode_temporaries(
    config: LlamaConfig,
    policy: Policy,
    dense: Sequence[bool],
    *,
    batch: int,
    capacity: int,
    page_size: int,
    itemsize: int,
    quantized: bool = False,
) -> int:
    """Returns the estimated bytes of temporaries of a decode step, sampling included; arguments as above."""
    held, stage = _layers(config, policy, dense, batch, capacity, 1, page_size, itemsize)
    widened = _widened(config, batch, batch, itemsize) if quantized else 0
    return _rounded(max(held + stage, 40 * batch * config.vocab_size) + widened)


def program_bytes(*dense: bool) -> int:
    """Returns the estimated host memory to compile the programs for prompt and answer, and to keep them.

    150 MB, and for a layer of a program 8 MB where it selects, 4.5 MB where it always reads everything
    (``dense``): measured with 2, 10 and 30 layers on a CPU, to 15 %.
    """
    return 150_000_000 + sum(4_500_000 if one else 8_000_000 for one in dense)


def _rounded(estimate: int) -> int:
    return estimate + estimate // 4


def _widened(config: LlamaConfig, new: int, batch: int, itemsize: int) -> int:
    """Bytes of the blocks of a quantised matrix in full precision; the output projection sees a row a prompt."""
    hidden, width, experts = config.hidden_size, config.head_dim, config.experts
    inner = config.intermediate_size if experts is None else experts.size
    shapes = [(hidden, (config.n_heads + 2 * config.n_kv_heads) * width), (config.n_heads * width, hidden)]
    shapes += [(hidden, 2 * inner), (inner, hidden)]
    counts = {new} if experts is None else {new, 1, 16}  # an expert's may be few
    layer = max(widened_nbytes(shape, -2, rows) for shape in shapes for rows in counts)
    if itemsize < 4:  # the product is made in float32, of float32
        layer += 4 * new * max(sum(shape) for shape in shapes)
    head, axis = (hidden, config.vocab_size), -2
    if config.tie_word_embeddings:
        head, axis = head[::-1], -1
    return max(layer, widened_nbytes(head, axis, batch))


def _layers(
    config: LlamaConfig,
    policy: Policy,
    dense: Sequence[bool],
    batch: int,
    capacity: int,
    tokens: int,
    page_size: int,
    itemsize: int,
) -> tuple[int, int]:
    """Bytes held through all layers, and of the largest stage of one."""
    new, heads, kv_heads, width = batch * tokens, config.n_heads, config.n_kv_heads, config.head_dim
    held = 4 * new * config.hidden_size * (2 + sum(dense))
    mlp = _mlp_bytes(config, new, itemsize)
    qkv = 2 * itemsize * new * width * (heads + 2 * kv_heads) + 4 * new * heads * width
    block = min(_DENSE_BLOCK, capacity)
    at_once = kv_heads if tokens == 1 else 1
    read = at_once * _list_bytes(config, block, tokens, itemsize)
    if tokens == 1 and itemsize == 4 and scores_are_few(heads, kv_heads, width):
        read = max(read, 16 * batch * heads * capacity)
    if window := max(config.windows, default=0):
        read = max(read, _list_bytes(config, min(capacity, window + tokens + page_size), tokens, itemsize))
    if not all(dense):
        budget = capacity if policy.grows else getattr(policy, "budget", capacity)
        listed = min(capacity, budget + tokens + page_size)
        scoring = _scoring(config, policy, batch, capacity, page_size, tokens)
        read = max(read, scoring, _list_bytes(config, listed, tokens, itemsize))
    return held, max(mlp, qkv + read)


def _mlp_bytes(config: LlamaConfig, new: int, itemsize: int) -> int:
    experts, hidden = config.experts, config.hidden_size
    if experts is None:
        return new * config.intermediate_size * (2 * itemsize + 4)
    pairs = new * experts.per_token
    rows = pairs + experts.count * block_rows(pairs, experts.count)
    return rows * hidden * itemsize + 2 * pairs * hidden * (itemsize + 4) + 3 * hidden * experts.size * itemsize


def _list_bytes(config: LlamaConfig, keys: int, tokens: int, itemsize: int) -> int:
    """Scores and weights of a group's queries over a list of keys, and the keys and values gathered for it."""
    return 8 * config.group_size * tokens * keys + 2 * itemsize * keys * config.head_dim


def _scoring(config: LlamaConfig, policy: Policy, batch: int, capacity: int, page_size: int, tokens: int) -> int:
    if policy.copies_keys:  # one row after the other; the softmax of the queries that choose
        queries = min(tokens, getattr(policy, "n_queries", 1))
        copy = 8 * config.n_kv_heads * capacity * config.head_dim
        once = 8 * config.n_heads * policy.prompt_queries * capacity  # at the end of a prompt
        return copy + max(8 * batch * config.n_heads * queries * capacity, once)
    if not isinstance(policy, PagePolicy):  # scores keys, for one token by the mean of a group's queries
        return 16 * batch * (config.n_kv_heads if tokens == 1 else config.n_heads) * capacity
    count = capacity // page_size
    copied = batch * config.n_kv_heads * count * policy.scored_nbytes(config.head_dim, 4) if batch > 1 else 0
    return 16 * batch * config.n_heads * count + copied

"""A Flax model of your own over quest_jax's cache: any module that hands q, k, v to `attend` decodes sparsely."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import quest_jax

LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 3, 4, 2, 16, 50


class Decoder(nn.Module):
    """Attention blocks without positions or MLP; nothing of Llama in it."""

    @nn.compact
    def __call__(self, tokens, state, attend):
        x = nn.Embed(VOCAB, HEADS * WIDTH)(tokens)
        for layer in range(LAYERS):
            q, k, v = (nn.DenseGeneral((heads, WIDTH))(x) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out, state = attend(layer, q, k, v, state)  # the cache of this layer is read and written here
            x = nn.LayerNorm()(x + nn.DenseGeneral(HEADS * WIDTH, axis=(-2, -1))(out))
        return nn.Dense(VOCAB)(x[:, -1]), state


def generate(model, weights, prompt, n, budget):
    """Greedy tokens of one prompt ``[1, T]``; a decode step reads ``budget`` tokens in every layer but the first."""
    policy = quest_jax.Quest(budget, dense_layers=1) if budget else None
    state = quest_jax.init_attention(LAYERS, KV_HEADS, WIDTH, batch=1, capacity=512, policy=policy)

    def step(tokens, state):
        state = quest_jax.extend(state, jnp.array([tokens.shape[1]]))  # announce them, once for all layers
        logits, state = model.apply(weights, tokens, state, quest_jax.attend)
        return jnp.argmax(logits, axis=-1, keepdims=True), state

    step = jax.jit(step, donate_argnums=1)
    token, state = step(prompt, state)
    answer = [int(token[0, 0])]
    while len(answer) < n:
        token, state = step(token, state)
        answer.append(int(token[0, 0]))
    return answer, state.reads


if __name__ == "__main__":
    model, prompt = Decoder(), jax.random.randint(jax.random.key(1), (1, 300), 0, VOCAB)
    weights = model.init(jax.random.key(0), prompt, None, lambda layer, q, k, v, state: (q, state))
    for budget in (None, 64):
        tokens, reads = generate(model, weights, prompt, 12, budget)
        print(f"budget {budget}: {tokens}, pages read by the last step {reads.read[:, 0].tolist()}")

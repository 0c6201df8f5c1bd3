"""A Flax model of your own over quest_jax's cache: any module that hands q, k, v to `attend` decodes sparsely."""

import flax.linen as nn
import jax
import jax.numpy as jnp

import quest_jax

LAYERS, HEADS, KV_HEADS, WIDTH, VOCAB = 3, 4, 2, 16, 50


class Decoder(nn.Module):  # attention blocks without positions or MLP; nothing of Llama in it
    @nn.compact
    def __call__(self, tokens, state, attend):
        x = nn.Embed(VOCAB, HEADS * WIDTH)(tokens)
        for layer in range(LAYERS):
            q, k, v = (nn.DenseGeneral((heads, WIDTH))(x) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out, state = attend(layer, q, k, v, state)  # the cache of this layer is read and written here
            x = nn.LayerNorm()(x + nn.DenseGeneral(HEADS * WIDTH, axis=(-2, -1))(out))
        return jnp.argmax(nn.Dense(VOCAB)(x[:, -1:]), axis=-1), state


def generate(model, weights, prompt, n, budget):
    def step(tokens, state):
        state = quest_jax.extend(state, jnp.array([tokens.shape[1]]))  # announce them, once for all layers
        return model.apply(weights, tokens, state, quest_jax.attend)

    policy = quest_jax.Quest(budget, dense_layers=1) if budget else None
    state = quest_jax.init_attention(LAYERS, KV_HEADS, WIDTH, batch=1, capacity=512, policy=policy)
    step, tokens = jax.jit(step, donate_argnums=1), [prompt]
    for _ in range(n):
        token, state = step(tokens[-1], state)
        tokens.append(token)
    return jnp.concatenate(tokens[1:], axis=1)[0].tolist(), state.reads


if __name__ == "__main__":
    model, prompt = Decoder(), jax.random.randint(jax.random.key(1), (1, 300), 0, VOCAB)
    weights = model.init(jax.random.key(0), prompt, None, lambda layer, q, k, v, state: (q, state))
    print(*(generate(model, weights, prompt, 12, budget)[0] for budget in (None, 64)), sep="\n")

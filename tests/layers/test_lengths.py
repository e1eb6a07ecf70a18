"""Undeclared layers that see rows of several lengths in one forward: one error, with the line that declares all."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.layers.merging import make_manager, normal, serve

WIDTH, VOCAB = 4, 7


def linear(rngs, k=WIDTH, n=WIDTH):
    return nnx.Linear(k, n, use_bias=False, rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(rngs) for _ in range(4))

    def __call__(self, x, of):
        scores = self.q_proj(x) @ jnp.swapaxes(self.k_proj(of), 1, 2)
        return x + self.out_proj(jax.nn.softmax(scores, axis=-1) @ self.v_proj(of))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.encoder_attn, self.fc1 = Attention(rngs), Attention(rngs), linear(rngs)

    def __call__(self, x, encoded):
        return self.fc1(self.encoder_attn(self.self_attn(x, x), encoded))


class Whisper(nnx.Module):
    """Frames [B, S, WIDTH] and tokens [B, T]: an encoder, and a decoder with cross-attention."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Dict(layers=nnx.List([Attention(rngs) for _ in range(2)]))
        layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])
        self.decoder = nnx.Dict(embed_tokens=nnx.Embed(VOCAB, WIDTH, rngs=rngs), layers=layers)

    def __call__(self, inputs):
        x, tokens = inputs
        for layer in self.encoder.layers:
            x = layer(x, x)
        y = self.decoder.embed_tokens(tokens)
        for layer in self.decoder.layers:
            y = layer(y, x)
        return y


def lines(error) -> list[dict[str, str]]:
    """Return the arguments in the lines of a message."""
    return [ast.literal_eval(found) for found in re.findall(r"row_groups=(\{.*?\})", str(error))]


def test_one_error_has_the_lines_that_declare_all():
    """The line for items names the tower alone, without the layers of the text."""
    inputs, want = (normal(3, 5, WIDTH), np.arange(12).reshape(3, 4) % VOCAB), {"decoder": "sequences"}
    model = Whisper()
    manager = make_manager(model, [])
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError, match="of several L") as caught:
        serve(model, inputs, batch)
    found, owned = lines(caught.value)
    assert found == want
    assert owned == dict.fromkeys(["encoder", "encoder_attn.k_proj", "encoder_attn.v_proj"], "images")
    assert "the decoder" not in str(caught.value)
    manager.unwrap()
    make_manager(model, [], row_groups=owned).unwrap()  # each name matches a layer
    manager = make_manager(model, [], row_groups=want)
    with manager.prepare([None] * 3) as batch:
        serve(model, inputs, batch)

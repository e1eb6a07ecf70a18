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


class EncoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.fc1 = Attention(rngs), linear(rngs)

    def __call__(self, x):
        return self.fc1(self.self_attn(x, x))


class DecoderLayer(nnx.Module):
    def __init__(self, rngs):
        self.self_attn, self.encoder_attn, self.fc1 = Attention(rngs), Attention(rngs), linear(rngs)

    def __call__(self, x, encoded):
        return self.fc1(self.encoder_attn(self.self_attn(x, x), encoded))


class Encoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([EncoderLayer(rngs) for _ in range(2)])


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])


class Whisper(nnx.Module):
    """Frames [B, S, WIDTH] and tokens [B, T]: an encoder, and a decoder with cross-attention."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.encoder, self.decoder = Encoder(rngs), Decoder(rngs)

    def __call__(self, inputs):
        x, tokens = inputs
        for layer in self.encoder.layers:
            x = layer(x)
        y = self.decoder.embed_tokens(tokens)
        for layer in self.decoder.layers:
            y = layer(y, x)
        return y


class Towers(nnx.Module):
    """A tower of images [B, 5, WIDTH], called last, and text [B, 3]. No layer but the table tells which is which."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.text, self.embed, self.vision = linear(rngs), nnx.Embed(VOCAB, WIDTH, rngs=rngs), linear(rngs)

    def __call__(self, inputs):
        images, tokens = inputs
        return self.text(self.embed(tokens))[:, :1] * self.vision(images)[:, :1]


def frames_and_tokens():
    return normal(3, 5, WIDTH), np.arange(12).reshape(3, 4) % VOCAB


CASES = {
    "whisper": (Whisper, frames_and_tokens(), {"decoder": "sequences"}),
    "towers": (Towers, frames_and_tokens(), {"vision": "sequences"}),
}


def lines(error) -> list[dict[str, str]]:
    """Return the arguments in the lines of a message."""
    return [ast.literal_eval(found) for found in re.findall(r"row_groups=(\{.*?\})", str(error))]


@pytest.mark.parametrize("case", CASES)
def test_one_error_has_the_line_that_declares_all(case):
    make, inputs, want = CASES[case]
    model = make()
    manager = make_manager(model, [])
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError, match="of several L") as caught:
        serve(model, inputs, batch)
    assert lines(caught.value)[0] == want
    assert "the decoder" not in str(caught.value)
    manager.unwrap()
    manager = make_manager(model, [], row_groups=want)
    with manager.prepare([None] * 3) as batch:
        serve(model, inputs, batch)


def test_lines_for_items_name_the_tower_alone():
    """Without the layers of the text that the line for sequences may declare with it."""
    model = Whisper()
    manager = make_manager(model, [])
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError) as caught:
        serve(model, frames_and_tokens(), batch)
    _, owned = lines(caught.value)
    assert owned == dict.fromkeys(["encoder", "encoder_attn.k_proj", "encoder_attn.v_proj"], "images")
    manager.unwrap()
    make_manager(model, [], row_groups=owned)  # each name matches a layer

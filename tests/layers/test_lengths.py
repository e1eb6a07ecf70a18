"""Undeclared layers that see rows of several lengths in one forward: one error, with the line that declares all."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge, normal, serve

WIDTH, VOCAB = 4, 7
NAMES = ["one", None, "two"]


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
    def __init__(self, rngs, embeds):
        if embeds:
            self.embed_tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(rngs) for _ in range(2)])


class Whisper(nnx.Module):
    """Frames [B, S, WIDTH] and tokens [B, T]: an encoder, and a decoder with cross-attention.

    With `shared`, one table embeds the tokens of both, and the logits are those of a layer of its own, as in T5.
    """

    def __init__(self, shared=False):
        rngs = nnx.Rngs(0)
        self.encoder, self.decoder = Encoder(rngs), Decoder(rngs, not shared)
        if shared:
            self.shared, self.lm_head = nnx.Embed(VOCAB, WIDTH, rngs=rngs), linear(rngs, WIDTH, VOCAB)

    def __call__(self, inputs):
        x, tokens = inputs
        shared = hasattr(self, "shared")
        x = self.shared(x) if shared else x
        for layer in self.encoder.layers:
            x = layer(x)
        y = (self.shared if shared else self.decoder.embed_tokens)(tokens)
        for layer in self.decoder.layers:
            y = layer(y, x)
        return self.lm_head(y) if shared else y


class MixerBlock(nnx.Module):
    def __init__(self, rngs, patches):
        self.token_mix, self.channel_mix = linear(rngs, patches, patches), linear(rngs)

    def __call__(self, x):
        return self.channel_mix(x + jnp.swapaxes(self.token_mix(jnp.swapaxes(x, 1, 2)), 1, 2))


class Mixer(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem, self.blocks = linear(rngs), nnx.List([MixerBlock(rngs, 6) for _ in range(2)])

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Towers(nnx.Module):
    """A tower of images [B, 5, WIDTH], called last, and text [B, 3]. No layer but the table tells which is which."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.text, self.embed, self.vision = linear(rngs), nnx.Embed(VOCAB, WIDTH, rngs=rngs), linear(rngs)

    def __call__(self, inputs):
        images, tokens = inputs
        return self.text(self.embed(tokens))[:, :1] * self.vision(images)[:, :1]


def frames_and_tokens(shared=False):
    tokens = np.arange(12).reshape(3, 4) % VOCAB
    return (np.arange(15).reshape(3, 5) % VOCAB if shared else normal(3, 5, WIDTH)), tokens


CASES = {
    "whisper": (Whisper, frames_and_tokens(), {"decoder": "sequences"}),
    "t5": (
        lambda: Whisper(shared=True),
        frames_and_tokens(shared=True),
        {"encoder": "sequences", "encoder_attn": "sequences", "shared": "sequences"},
    ),
    "mixer": (Mixer, normal(3, 6, WIDTH), {"token_mix": "sequences"}),
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


def test_declared_decoder_serves_each_row_its_adapter():
    targets = [
        Target(
            f"decoder.layers.{i}.encoder_attn.{name}", WIDTH, WIDTH, f"decoder.layers.{i}.encoder_attn.{name}.kernel"
        )
        for i in range(2)
        for name in ("q_proj", "k_proj")
    ] + [Target("encoder.layers.1.fc1", WIDTH, WIDTH, "encoder.layers.1.fc1.kernel")]
    model, inputs = Whisper(), frames_and_tokens()
    adapters = [make_adapter(name, targets, 2) for name in ("one", "two")]
    twins = {None: nnx.clone(model), **{each.name: merge(model, targets, each) for each in adapters}}
    manager = make_manager(model, adapters, row_groups={"decoder": "sequences"})
    with manager.prepare(NAMES) as batch:
        assert_close(serve(model, inputs, batch), expected_rows(twins, NAMES, inputs), 1e-5)


def test_an_encoder_beside_first_active_rows():
    """Its rows have no place among those that `active_from` counts, so they are items, one a sequence."""
    targets = [
        Target(f"{name}.layers.1.{layer}", WIDTH, WIDTH, f"{name}.layers.1.{layer}.kernel")
        for name, layer in (("encoder", "fc1"), ("decoder", "encoder_attn.k_proj"), ("decoder", "fc1"))
    ]
    model, inputs = Whisper(), frames_and_tokens()
    adapters = [make_adapter(name, targets, 2) for name in ("one", "two")]
    twins = {None: nnx.clone(model), **{each.name: merge(model, targets, each) for each in adapters}}
    active = {"active_from": [0] * 3, "length": 4}
    manager = make_manager(model, adapters, row_groups={"decoder": "sequences"}, activated=True)
    with manager.prepare(NAMES, **active) as batch, pytest.raises(jlora.LoRAError, match="an encoder's, are items"):
        serve(model, inputs, batch)
    manager.unwrap()
    groups = dict.fromkeys(["encoder", "encoder_attn.k_proj", "encoder_attn.v_proj"], "audio")
    manager = make_manager(model, adapters, row_groups=groups, activated=True)
    with manager.prepare(NAMES, **active, items={"audio": jlora.Items([0, 1, 2])}) as batch:
        assert_close(serve(model, inputs, batch), expected_rows(twins, NAMES, inputs), 1e-5)


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


def test_lengths_are_the_cause_of_errors_inside():
    model = Whisper()
    manager = make_manager(model, [])

    @jax.jit
    def step(model, inputs, batch):
        with jlora.use(batch):
            y = model(inputs)
            with jlora.rows(jlora.RowMap(jnp.arange(3), of="tokens")):  # of which length?
                return model.decoder.layers[0].fc1(y[:, -1])

    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError, match="of several L"):
        step(model, frames_and_tokens(), batch)


def test_many_layers_are_named_in_short():
    model = Whisper()
    manager = make_manager(model, [])
    with manager.prepare([None] * 3) as batch, pytest.raises(jlora.LoRAError) as caught:
        serve(model, frames_and_tokens(), batch)
    assert "L = 4: decoder.embed_tokens, decoder.layers.*.self_attn.q_proj" in str(caught.value)
    assert len(str(caught.value)) < 1500

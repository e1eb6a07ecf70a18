"""A model unlike ours: GPT-2, whose weights are transposed (`Conv1D`, `fan_in_fan_out`) and whose qkv is one module."""

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

import jlora
from tests.parity import cases
from tests.parity.test_logits import assert_close, forward_traced_once

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

WIDTH, HEADS, VOCAB, LENGTH = 32, 4, 61, 18

ADAPTERS = {
    "attention and mlp": {"r": 5, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
    "projections": {"r": 16, "target_modules": ["c_proj"], "fan_in_fan_out": True, "rank_pattern": {"mlp.c_proj": 1}},
    "tables and head": {"r": 4, "target_modules": ["wte", "wpe", "lm_head"]},
}
# Names of the model. The checkpoint has transformer.h.0.attn.c_attn.
NAME_MAP = {
    r"^transformer\.h\.(\d+)\.attn\.c_attn$": r"blocks.\1.qkv",
    r"^transformer\.h\.(\d+)\.attn\.c_proj$": r"blocks.\1.out",
    r"^transformer\.h\.(\d+)\.mlp\.c_fc$": r"blocks.\1.up",
    r"^transformer\.h\.(\d+)\.mlp\.c_proj$": r"blocks.\1.down",
    r"^transformer\.wte$": "table",
    r"^transformer\.wpe$": "places",
    r"^lm_head$": "table.attend",  # either table could serve as the head
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm_1, self.norm_2 = (nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        q, k, v = jnp.split(self.qkv(self.norm_1(x)).reshape(batch, length, 3 * HEADS, -1), 3, axis=2)
        x = x + self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, WIDTH))
        return x + self.down(jax.nn.gelu(self.up(self.norm_2(x)), approximate=True))


class GPT2(nnx.Module):
    def __init__(self, layers, rngs):
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.table.tie_word_embeddings = True
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)

    def __call__(self, tokens):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.table(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        return self.table.attend(self.norm(x))


def copied(theirs) -> GPT2:
    """`Conv1D` keeps its weight [in, out], as `nnx.Linear` does."""
    trunk = theirs.transformer
    model = GPT2(len(trunk.h), nnx.Rngs(0))

    def copy(layer, source):
        for ours, name in (("kernel", "weight"), ("embedding", "weight"), ("scale", "weight"), ("bias", "bias")):
            if getattr(layer, ours, None) is not None:
                getattr(layer, ours)[...] = jnp.asarray(getattr(source, name).detach().numpy())

    for layer, source in ((model.table, trunk.wte), (model.places, trunk.wpe), (model.norm, trunk.ln_f)):
        copy(layer, source)
    for block, h in zip(model.blocks, trunk.h, strict=True):
        layers = (block.norm_1, block.norm_2, block.qkv, block.out, block.up, block.down)
        for layer, source in zip(
            layers, (h.ln_1, h.ln_2, h.attn.c_attn, h.attn.c_proj, h.mlp.c_fc, h.mlp.c_proj), strict=True
        ):
            copy(layer, source)
    return model


def test_mixed_batches(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": LENGTH}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (5, LENGTH)).astype(np.int32)
    manager = jlora.LoRAManager(
        copied(theirs), jlora.LoRAConfig(max_loras=2, max_lora_rank=16, max_cpu_loras=4), name_map=NAME_MAP
    )
    want = {None: cases.logits(torch, theirs, tokens)}
    for name, fields in ADAPTERS.items():
        trained = cases.peft_model(torch, peft, theirs, name, fields)
        want[name] = cases.logits(torch, trained, tokens)
        assert np.abs(want[name] - want[None]).max() > 0.01 * np.abs(want[None]).max()
        manager.add_adapter(jlora.LoRARequest(name, str(cases.save_adapter(torch, trained, name, tmp_path))))
    forward = forward_traced_once()
    rng = np.random.default_rng(1)
    for _ in range(6):
        rows = rng.choice([*rng.choice(list(ADAPTERS), 2, replace=False), None], len(tokens)).tolist()
        with manager.prepare(rows) as batch:
            got = forward(manager.model, tokens, batch)
        for i, name in enumerate(rows):
            assert_close(got[i], want[name][i], name)

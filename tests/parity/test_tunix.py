"""Tunix: adapters that it trains with qwix against PEFT, and its models and sampler with adapters of PEFT."""

import importlib.util
import sys
import types
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import qwix
import torch
import transformers
from flax import nnx

if (spec := importlib.util.find_spec("tunix")) is None:
    pytest.skip("needs google-tunix", allow_module_level=True)
# The package imports its trainers and their requirements, which neither its models nor its sampler need.
package = types.ModuleType("tunix")
package.__path__ = list(spec.submodule_search_locations or ())
sys.modules.setdefault("tunix", package)

always_shard = flax.config.flax_always_shard_variable
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.gemma import model as gemma
    from tunix.models.gemma import params_safetensors as gemma_params
    from tunix.models.gemma4 import moe as gemma4_moe
    from tunix.models.llama3 import model as llama3
    from tunix.models.qwen2 import model as qwen2
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3 import params as qwen3_params
flax.config.update("flax_always_shard_variable", always_shard)  # Tunix turns it off, for the tests of other files too

import jlora
from jlora.integrations import qwix as adapters
from jlora.integrations import tunix
from tests.models.families import build

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

VOCAB, LENGTH, ALPHA = 64, 7, 6.0
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (4, LENGTH))
FLOAT32 = {"dtype": jnp.float32, "param_dtype": jnp.float32}
SIZES = {"embed_dim": 32, "hidden_dim": 40, "num_layers": 2, "num_heads": 4, "head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e6}  # Tunix's Qwen 3 has this theta, whatever its configuration says


def gemma_config(num_kv_heads, **fields):
    sizes = {"num_embed": VOCAB, "num_kv_heads": num_kv_heads, "sliding_window_size": 32} | SIZES | fields
    sizes |= {"final_logit_softcap": 30.0, "attn_logits_soft_cap": 50.0}
    kinds = (gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL)[-sizes["num_layers"] :]
    return gemma.ModelConfig(**sizes, attention_types=kinds, use_post_attn_norm=True, use_post_ffw_norm=True)


def config_of(module, **fields):
    return module.ModelConfig(
        vocab_size=VOCAB, num_kv_heads=2, norm_eps=1e-6, rope_theta=1_000_000, **{**SIZES, **fields}
    )


# name -> (fields of transformers, function that reads its folder with Tunix)
FAMILIES = {
    "qwen3": (
        {"head_dim": 8, "rope_parameters": ROPE, "rms_norm_eps": 1e-6},
        lambda path: qwen3_params.create_model_from_safe_tensors(path, config_of(qwen3, **FLOAT32), dtype=jnp.float32),
    ),
    "gemma2": (
        {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 32, "hidden_activation": "gelu_pytorch_tanh"},
        lambda path: gemma_params.create_model_from_safe_tensors(path, gemma_config(2), dtype=jnp.float32),
    ),
}


def logits(model, batch_size=4):
    positions = jnp.tile(jnp.arange(LENGTH), (batch_size, 1))
    mask = jnp.tile(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (batch_size, 1, 1))
    return model(jnp.asarray(TOKENS[:batch_size]), positions, None, mask)[0]


def randomize(model, seed):
    rng = np.random.default_rng(seed)
    state = nnx.state(model, nnx.LoRAParam)
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.15), x.dtype), state))
    return model


def trained(base, seed):
    """A copy of the model with random LoRA parameters of qwix, as Tunix makes them."""
    rule = qwix.LoraProvider(module_path=r".*(attn|mlp).*", rank=4, alpha=ALPHA)
    return randomize(qwix.apply_lora_to_model(base, rule, **base.get_model_input(), rngs=nnx.Rngs(0)), seed)


@pytest.fixture(scope="module", autouse=True)
def configured():
    """Promote ranks and dtypes, and shard variables, as Tunix expects."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        flax.config.update("flax_always_shard_variable", False)
        yield
        flax.config.update("flax_always_shard_variable", always_shard)


class World:
    """A base model of transformers, the same model of Tunix, and two adapters that Tunix's trainer could hold."""

    def __init__(self, name, folder):
        fields, read = FAMILIES[name]
        self.torch_model = build(torch, transformers, name, 0, **fields)
        self.torch_model.save_pretrained(folder / "base")
        self.read = lambda: read(str(folder / "base"))
        self.folders = {adapter: folder / adapter for adapter in ("one", "two")}
        self.trained = {adapter: trained(self.read(), i) for i, adapter in enumerate(self.folders)}
        for adapter, model in self.trained.items():
            adapters.export(model, self.folders[adapter], alpha=ALPHA, names=tunix.NAMES)

    def peft_logits(self, adapter):
        model = self.torch_model
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(self.torch_model, str(self.folders[adapter]))
        with torch.no_grad():
            found = model(torch.from_numpy(TOKENS)).logits.numpy()
        if adapter is not None:
            model.unload()
        return found


@pytest.fixture(scope="module", params=list(FAMILIES))
def world(request, tmp_path_factory):
    return World(request.param, tmp_path_factory.mktemp(request.param))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def test_exported_adapters_have_the_logits_of_the_trainer_in_peft(world):
    base = world.peft_logits(None)
    close(logits(world.read()), base)
    for name, model in world.trained.items():
        expected = world.peft_logits(name)
        assert np.abs(expected - base).max() > 0.05 * np.abs(base).max()
        close(logits(model), expected)
    model = trained(world.read(), 5)
    adapters.restore(model, world.folders["one"], alpha=ALPHA, names=tunix.NAMES)
    close(logits(model), world.peft_logits("one"))
    with pytest.raises(jlora.LoRAUsageError, match=r"qwix\.export"):  # parameters of the trainer are not served
        tunix.lora_manager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=4))


def test_batches_mix_adapters_of_files_and_of_the_trainer(world):
    model = world.read()
    manager = tunix.lora_manager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=8))
    traces = []

    @jax.jit
    def step(model, batch):
        traces.append(None)
        with jlora.use(batch):
            return logits(model)

    manager.add_adapter(jlora.LoRARequest("file", str(world.folders["one"])))
    factors = adapters.factors(world.trained["one"], tunix.NAMES)
    manager.add_adapter(jlora.Adapter.from_arrays("trainer", factors, alpha=ALPHA))
    expected = {name: world.peft_logits(name) for name in (None, "one", "two")}
    for version in ("one", "two"):
        with manager.prepare(["file", None, "trainer", "trainer"]) as batch:
            found = step(model, batch)
        close(found, np.stack([expected[name][i] for i, name in enumerate(("one", None, version, version))]))
        manager.update_adapter("trainer", adapters.tensors(world.trained["two"], tunix.NAMES))
    assert len(traces) == 1


def test_a_live_model_is_pushed_and_its_checkpoint_read(world, tmp_path):
    from tunix.sft.checkpoint_manager import CheckpointManager

    checkpoints = CheckpointManager(str(tmp_path / "run"))
    for step, name in enumerate(world.trained):
        checkpoints.save(step, world.trained[name], save_only_lora_params=True, force=True)
    checkpoints.close()
    manager = tunix.lora_manager(world.read(), jlora.LoRAConfig(max_loras=2, max_lora_rank=8))
    tunix.push(world.trained["one"], manager, "pushed", alpha=ALPHA)
    manager.add_adapter(tunix.from_orbax(tmp_path / "run", alpha=ALPHA, name="read"))
    with manager.prepare(["pushed", "read", None, "read"]) as batch, jlora.use(batch):
        found = logits(manager.model)
    expected = [world.peft_logits(name)[i] for i, name in enumerate(("one", "two", None, "two"))]
    close(found, np.stack(expected))


CHARACTERS = types.SimpleNamespace(  # a tokenizer with one token for each character
    encode=lambda text, **_: [ord(c) % (VOCAB - 4) + 4 for c in text],
    decode=lambda tokens, **_: " ".join(map(str, tokens)),
    **{f"{name}_id": lambda number=number: number for number, name in enumerate(("pad", "bos", "eos"))},
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
)


def test_rollouts_take_an_adapter_for_each_prompt(world):
    model = world.read()
    manager = tunix.lora_manager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=8))
    for name, folder in world.folders.items():
        manager.add_adapter(jlora.LoRARequest(name, str(folder)))
    layers = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8}
    rollout = tunix.Rollout(manager, CHARACTERS, CacheConfig(cache_size=32, **layers))
    prompts = ["sphinx", "quartz", "sphinx", "sphinx"]
    options = {"max_generation_steps": 6, "echo": False}
    mixed = rollout(prompts, ["one", "two", None, "two"], **options).tokens
    expected = {}
    for name in ("one", "two", None):
        # The sampler's own greedy decoding of the trainer's model, and of the base model.
        own = world.read() if name is None else world.trained[name]
        expected[name] = Sampler(own, CHARACTERS, CacheConfig(cache_size=32, **layers))(prompts, **options).tokens
    for i, name in enumerate(("one", "two", None, "two")):
        np.testing.assert_array_equal(mixed[i], expected[name][i])
    assert len({tuple(np.asarray(mixed[i])) for i in (0, 2, 3)}) == 3
    manager.update_adapter("one", adapters.tensors(world.trained["two"], tunix.NAMES))
    np.testing.assert_array_equal(rollout(prompts, ["one"] * 4, **options).tokens[0], expected["two"][0])
    with pytest.raises(jlora.LoRAUsageError, match="one name for each of 4 prompts, found 1"):
        rollout(prompts, ["one"], **options)
    with pytest.raises(jlora.LoRAUsageError, match="beam_size"):
        rollout(prompts, ["one"] * 4, beam_size=2, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: llama3.Llama3(config_of(llama3, num_layers=1), rngs=rngs),
        lambda rngs: qwen2.Qwen2(config_of(qwen2, num_layers=1, **FLOAT32), rngs=rngs),
        lambda rngs: gemma.Gemma(gemma_config(4, num_layers=1), rngs=rngs),
    ],
    ids=["llama3", "qwen2", "gemma with one product for q, k and v"],
)
def test_models_pass_verify(make):
    model = make(nnx.Rngs(0))
    manager = tunix.lora_manager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4))

    @jax.jit
    def forward(model, _, batch):
        with jlora.use(batch):
            return logits(model, 3)

    report = manager.verify(forward, jnp.asarray(TOKENS[:3]))
    assert not report.unserved
    assert not report.unchecked
    assert len(report.checked) >= 6


# --- Experts --------------------------------------------------------------------------------------------------------


def loop_of_qwen3():
    def describe(layer):
        experts, k, n = layer.gate_proj.shape
        names = {"gate_proj": (k, n), "up_proj": (k, n), "down_proj": (n, k)}
        products = {name: jlora.LinearSpec(*sizes, name) for name, sizes in names.items()}
        return jlora.ExpertsSpec(experts, products, names={name: [[name]] for name in names}, method="__call__")

    jlora.register_layer(qwen3.MoELayer, describe)
    config = config_of(qwen3, **FLOAT32, num_experts=3, num_experts_per_tok=2)
    return qwen3.MoELayer(config, rngs=nnx.Rngs(0)), ("router", "gate_proj", "up_proj", "down_proj")


def sorted_of_gemma4():
    def rows(layer, product, x, inputs, choices, weights):
        token = jnp.argsort(choices.reshape(-1)) // choices.shape[-1]
        return jlora.RowMap(token, of="tokens", length=inputs.shape[1])

    def describe(layer):
        experts, _, n, k = layer.gating_einsum.shape
        up = jlora.LinearSpec(k, 2 * n, "gating_einsum", in_axes=(2,), out_axes=(0, 1))
        products = {"gate_up": up, "down": jlora.LinearSpec(n, k, "linear")}
        return jlora.ExpertsSpec(experts, products, rows, method="_run_ffw_and_routing")

    jlora.register_layer(gemma4_moe.MoERagged, describe)
    sharding = types.SimpleNamespace(exp_weight_edf=None, exp_weight_efd=None)
    sizes = {"embed_dim": 16, "expert_dim": 8, "num_experts": 3, "num_experts_per_tok": 2}
    config = types.SimpleNamespace(**sizes, **FLOAT32, shd_config=sharding)
    return gemma4_moe.MoERagged(config, rngs=nnx.Rngs(0)), ("gating_einsum", "linear")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("make", [loop_of_qwen3, sorted_of_gemma4])
def test_experts_of_tunix_in_one_method(make):
    """The products of experts in Tunix's own methods, each against merged weights."""
    layer, names = make()
    for _, value in nnx.iter_graph(layer):
        if isinstance(value, nnx.Param) and value.ndim > 1:  # Tunix's initial values are too small to compare
            value[...] = jax.random.normal(jax.random.key(value.size), value.shape) * 0.3
    manager = jlora.LoRAManager(nnx.Dict(mlp=layer), jlora.LoRAConfig(max_loras=2, max_lora_rank=4))

    @jax.jit
    def step(model, x, batch):
        with jlora.use(batch):
            return model["mlp"](x)

    features = layer.linear.shape[-1] if make is sorted_of_gemma4 else layer.gate_proj.shape[1]
    report = manager.verify(step, jax.random.normal(jax.random.key(0), (5, 3, features)))
    assert set(report.checked) == {f"mlp.{name}" for name in names}

"""Adapters of Tunix's trainers: pushed from a live model, and read from checkpoints of Orbax. Oracle: merged kernels.

`tests/parity/test_tunix.py` has Tunix's own models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jlora
from jlora.integrations import tunix
from tests.serve.client import make_service, on_socket
from tests.serve.fake_engine import FakeEngine

ALPHA, RANK = 6.0, 4
pytestmark = pytest.mark.filterwarnings("ignore")  # of Orbax


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attn = nnx.Module()
        self.attn.q_proj, self.attn.o_proj = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)


class Model(nnx.Module):
    """The paths of Tunix's Llama 3 and Qwen, in which only the layers' products matter."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer.attn.o_proj(jnp.tanh(layer.attn.q_proj(x)))
        return x


def trained(seed):
    """A model with LoRA parameters of qwix, as a trainer holds them."""
    model, rng = Model(), np.random.default_rng(seed)
    for linear in (linear for layer in model.layers for linear in (layer.attn.q_proj, layer.attn.o_proj)):
        shapes = (linear.kernel.shape[0], RANK), (RANK, linear.kernel.shape[1])
        a, b = (nnx.LoRAParam(jnp.asarray(rng.normal(size=shape, scale=0.3), jnp.float32)) for shape in shapes)
        linear.kernel_lora_a, linear.kernel_lora_b = a, b
    return model


def merged(model):
    """The output of a trained model with its deltas added to its kernels."""
    plain = Model()
    for layer, own in zip(plain.layers, model.layers, strict=True):
        for name in ("q_proj", "o_proj"):
            linear, lora = getattr(layer.attn, name), getattr(own.attn, name)
            delta = np.asarray(lora.kernel_lora_a[...]) @ np.asarray(lora.kernel_lora_b[...]) * (ALPHA / RANK)
            linear.kernel[...] = linear.kernel[...] + delta
    return np.asarray(plain(inputs()))


def inputs():
    return jax.random.normal(jax.random.key(1), (3, 2, 8))


def manager_of():
    config = jlora.LoRAConfig(max_loras=2, max_lora_rank=8)
    return jlora.LoRAManager(Model(), config, name_map={r"^model\.(layers\.\d+)\.self_attn\.": r"\1.attn."})


@jax.jit
def step(model, batch):
    with jlora.use(batch):
        return model(inputs())


def served(manager, names):
    with manager.prepare(names) as batch:
        return np.asarray(step(manager.model, batch))


def save(root, params, number=3, metadata=None):
    """Write a checkpoint as `tunix.sft.checkpoint_manager.CheckpointManager.save` does."""
    handlers = {"model_params": ocp.PyTreeCheckpointHandler(), "optimizer_state": ocp.PyTreeCheckpointHandler()}
    with ocp.CheckpointManager(root, item_handlers=handlers) as manager:
        how = jax.tree.map(lambda _: ocp.SaveArgs(), params)
        items = ocp.args.Composite(model_params=ocp.args.PyTreeSave(item=params, save_args=how))
        manager.save(number, args=items, custom_metadata=metadata or {}, force=True)
        manager.wait_until_finished()
    return root


def test_push_to_a_manager_replaces_the_adapter():
    manager = manager_of()
    before = served(manager, [None] * 3)
    for seed in (0, 1):
        tunix.push(trained(seed), manager, "policy", alpha=ALPHA)
        found = served(manager, ["policy", None, "policy"])
        expected = merged(trained(seed)).copy()
        expected[1] = before[1]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert manager.list_adapters()["policy"].version == 1  # of 0 and 1


def test_push_to_a_server():
    engine = FakeEngine()
    model = trained(0)
    with on_socket(make_service(engine, administration=True)) as (host, port):
        url = f"http://{host}:{port}"
        options = {"alpha": ALPHA, "admin_key": "any", "base_model_name": "org/m"}
        tunix.push(nnx.state(model, nnx.LoRAParam), url, "policy", **options)
        with pytest.raises(jlora.LoRAUsageError, match=f"adapter 'policy': a push to {url} needs admin_key"):
            tunix.push(model, url, "policy", alpha=ALPHA)
    (adapter,) = engine.uploaded
    lora = adapter.modules["model.layers.1.self_attn.o_proj"]
    own = model.layers[1].attn.o_proj
    np.testing.assert_array_equal(lora.a, own.kernel_lora_a[...].T)
    np.testing.assert_array_equal(lora.b, own.kernel_lora_b[...].T)
    assert (adapter.name, lora.scaling, adapter.base_model_name) == ("policy", ALPHA / RANK, "org/m")


@pytest.mark.slow
def test_a_checkpoint_is_read_from_each_of_its_folders(tmp_path):
    root = save(tmp_path / "run", nnx.state(trained(0), nnx.LoRAParam))
    save(root, nnx.state(trained(1), nnx.LoRAParam), 20)
    for path, seed in ((root, 1), (root / "20", 1), (root / "3", 0), (root / "3" / "model_params", 0)):
        manager = manager_of()
        manager.add_adapter(tunix.from_orbax(path, alpha=ALPHA, name="policy"))
        np.testing.assert_allclose(served(manager, ["policy"] * 3), merged(trained(seed)), rtol=1e-5, atol=1e-5)
    assert tunix.from_orbax(str(root), alpha=ALPHA).name == "run"


def test_alpha_is_read_or_required_and_never_guessed(tmp_path):
    params = nnx.state(trained(0), nnx.LoRAParam)
    without = save(tmp_path / "without", params, metadata={"other": 3})
    with pytest.raises(jlora.LoRAUsageError, match=r"adapter 'without': .* does not hold alpha; give alpha="):
        tunix.from_orbax(without)
    kept = save(tmp_path / "kept", params, metadata={"alpha": 12})
    for options in ({}, {"alpha": 12.0}):
        assert {lora.scaling for lora in tunix.from_orbax(kept, **options).modules.values()} == {12 / RANK}
    with pytest.raises(jlora.LoRAUsageError, match=r"alpha=6.0 is given, and the checkpoint was saved with 12"):
        tunix.from_orbax(kept, alpha=ALPHA)
    odd = save(tmp_path / "odd", params, metadata={"alpha": "12"})
    with pytest.raises(jlora.LoRAError, match="alpha of _CHECKPOINT_METADATA must be a number"):
        tunix.from_orbax(odd)


def test_other_layouts_are_refused_with_their_paths(tmp_path):
    whole = save(tmp_path / "whole", nnx.state(trained(0)))
    with pytest.raises(jlora.AdapterMismatchError, match=r"holds 8 parameters that are not .*such as layers\.0\.attn"):
        tunix.from_orbax(whole, alpha=ALPHA)
    half = nnx.state(trained(0), lambda path, _: path[-1] == "kernel_lora_a")
    with pytest.raises(jlora.LoRAUsageError, match="kernel_lora_a without kernel_lora_b"):
        tunix.from_orbax(save(tmp_path / "half", half), alpha=ALPHA)
    (tmp_path / "some" / "file").mkdir(parents=True)
    for path, found in ((tmp_path / "some", r"\['file'\]"), (tmp_path / "none", "no folder")):
        with pytest.raises(jlora.AdapterNotFoundError, match=f"holds no checkpoint of Orbax; .*found {found}"):
            tunix.from_orbax(path, alpha=ALPHA)

"""A variant that jlora lacks, PEFT's `lora_bias`, registered at run time: files, batches, a mesh and `verify`."""

import json

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.variants import register
from tests.layers.merging import assert_close, normal, serve
from tests.layers.mesh_models import mesh_of, placed
from tests.layers.trial_variants import BIAS, COMBINED, broken, registered

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("lora_bias")]

K, INNER, N = 16, 24, 8
SIZES = {"column": (K, INNER), "row": (INNER, N)}
SPECS = {"column": P(None, "t"), "row": P("t")}
FIELDS = {"r": 4, "lora_alpha": 6, "target_modules": [*SIZES]}  # scaling 1.5
ADAPTERS = {
    "biased": FIELDS | {"lora_bias": True},
    "of one": FIELDS | {"r": 2, "target_modules": ["row"], "lora_bias": True},
    "plain": FIELDS,
}
NAMES = ["biased", None, "plain", "of one", "biased"]
X = normal(len(NAMES), 3, K)


@pytest.fixture
def lora_bias():
    with registered(BIAS):
        yield


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.column, self.row = (torch.nn.Linear(*sizes) for sizes in SIZES.values())

    def forward(self, x):
        return self.row(torch.tanh(self.column(x)))


class Model(nnx.Module):
    """`Base` in Flax, with its weights."""

    def __init__(self):
        for name, layer in Base().named_children():
            own = nnx.Linear(*SIZES[name], rngs=nnx.Rngs(0))
            own.kernel[...] = jnp.asarray(layer.weight.detach().numpy().T)
            own.bias[...] = jnp.asarray(layer.bias.detach().numpy())
            setattr(self, name, own)

    def __call__(self, x):
        return self.row(jnp.tanh(self.column(x)))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Folders that PEFT wrote, by name, and the outputs of PEFT for the rows of `NAMES`."""
    folders, outputs = {}, {None: Base()(torch.tensor(X)).detach().numpy()}
    for i, (name, fields) in enumerate(ADAPTERS.items()):
        model = peft.get_peft_model(Base(), peft.LoraConfig(**fields)).eval()
        generator = torch.Generator().manual_seed(i)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
        outputs[name] = model(torch.tensor(X)).detach().numpy()
    return folders, np.stack([outputs[name][i] for i, name in enumerate(NAMES)])


def managed(model, folders=(), **config):
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=4, variants=["lora_bias"], **config))
    for name in folders:
        manager.add_adapter(jlora.LoRARequest(name, str(folders[name])))
    return manager


@pytest.mark.parametrize(
    ("axes", "config"),
    [
        ({}, {}),
        pytest.param({"t": 2}, {}, marks=pytest.mark.mesh),
        pytest.param({"t": 2}, {"fully_sharded": True}, marks=pytest.mark.mesh),
    ],
    ids=["one device", "two devices", "fully sharded"],
)
def test_a_mixed_batch_equals_peft(theirs, axes, config):
    folders, want = theirs
    model = placed(Model(), mesh_of(**axes), SPECS) if axes else Model()
    manager = managed(model, folders, **config)
    with manager.prepare(NAMES) as batch:
        found = serve(model, X, batch)
    assert_close(found, want, 1e-5)
    with manager.prepare([None] * len(NAMES)) as batch:
        assert (serve(model, X, batch)[1] == found[1]).all()


def test_peft_reads_an_export(theirs, tmp_path):
    folders, want = theirs
    manager = managed(Model(), folders)
    manager.prepare(NAMES).close()
    manager.export_adapter("biased").save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_bias"] is True
    model = peft.PeftModel.from_pretrained(Base(), tmp_path).eval()
    assert_close(model(torch.tensor(X)).detach().numpy()[0], want[0], 1e-5)
    read = jlora.Adapter.from_pretrained(folders["biased"])
    for name, module in jlora.Adapter.from_pretrained(tmp_path).modules.items():
        np.testing.assert_array_equal(module.vectors["lora_bias"], read.modules[name].vectors["lora_bias"])


def test_verify_fails_for_a_wrong_function():
    assert managed(Model()).verify(serve, X).error < 1e-5
    with registered(broken(BIAS)), pytest.raises(LoRAError, match=r"verify: column.* is off"):
        managed(Model()).verify(serve, X)


def test_refusals(theirs):
    folders, _ = theirs
    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, variants=("dora",)))
    with pytest.raises(
        jlora.AdapterMismatchError, match=r"a LoRA bias adapter; LoRAConfig\(variants=\['lora_bias'\]\)"
    ):
        manager.add_adapter(jlora.LoRARequest("biased", str(folders["biased"])))
    with pytest.raises(
        LoRAUsageError, match=r"variant 'lora_bias': 'lora_B\.bias' is of the variant 'lora_bias' already"
    ):
        register(BIAS, COMBINED[BIAS])
    fields = json.loads((folders["biased"] / "adapter_config.json").read_text())
    with pytest.raises(ValueError, match="lora_bias=True is not supported for DoRA"):
        peft.LoraConfig(lora_bias=True, use_dora=True)
    tensors = load_file(folders["biased"] / "adapter_model.safetensors")
    tensors |= {
        f"base_model.model.{name}.lora_magnitude_vector": np.ones(n, np.float32) for name, (_, n) in SIZES.items()
    }
    with pytest.raises(
        jlora.AdapterMismatchError, match="use_dora and lora_bias are set together; PEFT has no variant"
    ):
        jlora.Adapter.from_state_dict(tensors, fields | {"use_dora": True}, name="both")

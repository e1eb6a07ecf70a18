"""Adapters trained by qwix: written as PEFT adapters, served, and restored. The oracle merges the files with NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jlora
from jlora.integrations import qwix as adapters

qwix = pytest.importorskip("qwix")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix")  # of names of Flax

RANK, ALPHA = 4, 6.0
NAMES = {r"blocks\.(\d+)\.kv": (r"model.\1.k", r"model.\1.v"), r"blocks\.(\d+)\.(\w+)": r"model.\1.\2"}


class Einsum(nnx.Module):
    def __init__(self, equation, shape, rngs):
        self.equation = equation
        self.w = nnx.Param(0.3 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


jlora.register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.equation, layer.w.shape))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 8, rngs=rngs)
        self.kv = Einsum("BTD,CNDH->CBTNH", (2, 2, 8, 3), rngs)
        self.out = Einsum("BTNH,NHD->BTD", (2, 3, 8), rngs)

    def __call__(self, x):
        k, v = self.kv(jax.nn.silu(self.up(x)))
        return x + self.out(k * jnp.tanh(v))


class Model(nnx.Module):
    packed_modules = {"kv": ("k", "v")}

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def inputs():
    return jax.random.normal(jax.random.key(1), (3, 2, 8))


def trained(seed=0, rank=RANK):
    """A model with LoRA parameters of qwix, B not zero."""
    rule = qwix.LoraProvider(module_path=".*", rank=rank, alpha=ALPHA)
    model = qwix.apply_lora_to_model(Model(), rule, inputs(), rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    for variable in jax.tree.leaves(nnx.state(model, nnx.LoRAParam), is_leaf=lambda x: isinstance(x, nnx.Variable)):
        variable[...] = jnp.asarray(rng.normal(size=variable.shape, scale=0.2), jnp.float32)
    nnx.update(model, nnx.state(model, nnx.LoRAParam))
    return model


def merged(folder):
    """The model with the files' deltas added to its kernels."""
    files = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]

    def delta(name):
        a, b = (files[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        return scale * (b @ a)  # [N, K]

    model = Model()
    for i, block in enumerate(model.blocks):
        block.up.kernel[...] += delta(f"model.{i}.up").T
        block.kv.w[...] += np.stack(
            [delta(f"model.{i}.{part}").reshape(2, 3, 8).transpose(0, 2, 1) for part in ("k", "v")]
        )
        block.out.w[...] += delta(f"model.{i}.out").T.reshape(2, 3, 8)
    return model


@pytest.mark.slow
def test_exported_adapter_merges_to_the_trained_model(tmp_path):
    model = trained()
    adapters.export(model, tmp_path / "sql", alpha=ALPHA, names=NAMES, base_model_name="tiny")
    np.testing.assert_allclose(merged(tmp_path / "sql")(inputs()), model(inputs()), rtol=0, atol=1e-5)
    assert float(jnp.abs(model(inputs()) - Model()(inputs())).max()) > 0.1
    adapter = jlora.Adapter.from_pretrained(str(tmp_path / "sql"))
    assert (adapter.rank, adapter.base_model_name, len(adapter.modules)) == (RANK, "tiny", 8)
    other = trained(seed=1)
    adapters.restore(other, tmp_path / "sql", alpha=ALPHA, names=NAMES)
    np.testing.assert_allclose(other(inputs()), model(inputs()), rtol=0, atol=1e-5)
    del adapter.modules["model.0.up"]  # a layer that an adapter lacks gets no delta
    adapters.restore(other, adapter, alpha=ALPHA, names=NAMES)
    expected = adapters.factors(model, NAMES)
    state = nnx.state(other)
    for one in (state, nnx.state(other, nnx.LoRAParam), nnx.to_pure_dict(state)):
        for name, (a, b) in adapters.factors(one, NAMES).items():
            if name == "model.0.up":
                assert not np.any(b)
            else:
                np.testing.assert_allclose(b @ a, expected[name][1] @ expected[name][0], rtol=1e-5, atol=1e-6)


def test_trained_parameters_are_served_and_updated(tmp_path):
    first, second, base = trained(0), trained(1), Model()
    expected = [np.asarray(model(inputs())) for model in (first, second, base)]
    manager = jlora.LoRAManager(
        base, jlora.LoRAConfig(max_loras=1, max_lora_rank=RANK), name_map={r"^model\.": "blocks."}
    )
    factors = adapters.factors(first, NAMES)
    manager.add_adapter(jlora.Adapter.from_arrays("sql", factors, alpha=ALPHA))

    @nnx.jit
    def step(model, batch):
        with jlora.use(batch):
            return model(inputs())

    for want in expected[:2]:
        with manager.prepare(["sql", None, "sql"]) as batch:
            found = step(base, batch)
        np.testing.assert_allclose(found[::2], want[::2], rtol=0, atol=1e-5)
        np.testing.assert_allclose(found[1], expected[2][1], rtol=0, atol=1e-5)
        manager.update_adapter("sql", adapters.tensors(second, NAMES))


def write(folder, alpha=4, rank=2, **shapes):
    """A PEFT adapter of random numbers, with k and v of different A."""
    rng, sizes = np.random.default_rng(0), {"up": (8, 8), "k": (8, 6), "v": (8, 6), "out": (6, 8)}
    sizes = {f"model.{i}.{name}": size for i in range(2) for name, size in sizes.items()} | shapes
    arrays = {
        name: tuple(rng.normal(size=size, scale=0.2).astype(np.float32) for size in ((rank, k), (n, rank)))
        for name, (k, n) in sizes.items()
    }
    jlora.Adapter.from_arrays("it", arrays, alpha=alpha).save_pretrained(folder)


def test_adapter_of_peft_is_restored_with_its_scaling_and_rank(tmp_path):
    write(tmp_path)
    model = trained()
    adapters.restore(model, tmp_path, alpha=ALPHA, names=NAMES)
    np.testing.assert_allclose(model(inputs()), merged(tmp_path)(inputs()), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: write(folder, rank=3), r"model\.0\.v needs rank 6 in blocks\.0\.kv, which has rank 4"),
        (lambda folder: write(folder, **{"model.2.up": (8, 8)}), r"no LoRA parameters for \['model\.2\.up'\]"),
        (lambda folder: write(folder, **{"model.1.up": (8, 7)}), r"model\.1\.up: A \(2, 8\) and B \(7, 2\) do not fit"),
    ],
)
def test_adapter_that_does_not_fit_changes_no_parameter(tmp_path, make, message):
    make(tmp_path)
    model = trained()
    before = adapters.factors(model)
    with pytest.raises(jlora.AdapterMismatchError, match=message):
        adapters.restore(model, tmp_path, alpha=ALPHA, names=NAMES)
    for name, pair in adapters.factors(model).items():
        for x, y in zip(pair, before[name], strict=True):
            np.testing.assert_array_equal(x, y)


def test_names_are_checked():
    model = trained()
    for names, message in (
        ({r".*\.kv": ("k", "v"), r".*": "x"}, r"another layer has the name 'x' too"),
        ({r"(.*)\.kv": (r"\1.q", r"\1.k", r"\1.v")}, r"`names` has 3 parts .* first out axis of \(2, 2, 3\) is not 3"),
        ({r"(.*)\.up": (r"\1.k", r"\1.v")}, r"`names` has 2 parts .* first out axis of \(8,\) is not 2"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=message):
            adapters.factors(model, names)
    with pytest.raises(jlora.LoRAUsageError, match=r"no LoRA parameters of qwix"):
        adapters.factors(Model())
    rule = qwix.LoraProvider(module_path=".*", rank=2, alpha=2.0)
    stacked = qwix.apply_lora_to_model(Einsum("BTD,BDF->BTF", (3, 8, 5), nnx.Rngs(0)), rule, inputs(), rngs=nnx.Rngs(0))
    with pytest.raises(jlora.LoRAUsageError, match=r"batch axis"):
        adapters.factors(stacked)

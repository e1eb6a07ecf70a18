"""Finishers that are registered for a test, in each kind of sum on each mesh, and combinations that PEFT refuses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import Target, assert_close, make_adapter, make_dora, merge, normal, run, serve
from tests.layers.mesh_models import K, Split, mesh_of, placed
from tests.layers.trial_variants import BIAS, IA3, broken, registered, with_values
from tests.verify.test_quantized import Int8
from tests.verify.test_quantized import Model as Quantized
from tests.verify.test_verify import Transformer, tokens_of

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

SPECS = {"column": P(None, "t"), "row": P("t"), "plain": P("t"), "both": P("u", "t"), "o_proj": P("t"), "out": P("t")}
TARGETS = [Target(name, K, 8, f"{name}.kernel") for name in SPECS]
FINISHERS = (SCALE_COLUMNS, BIAS, IA3)
IDS = [finisher.variant.name for finisher in FINISHERS]
NAMES = ["one", None, "two", "one"]


class Layers(nnx.Module):
    """Layers whose outputs are side by side: split by columns or by rows, with and without a bias."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        options = {"bias_init": nnx.initializers.normal(3.0), "rngs": rngs}
        self.column, self.row, self.both = (nnx.Linear(K, 8, **options) for _ in range(3))
        self.plain = nnx.Linear(K, 8, use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral((8, 2), (4, 2), axis=(-2, -1), **options)
        self.out = nnx.Einsum("BTNH,NHDE->BTED", (8, 2, 4, 2), (2, 4), **options)

    def __call__(self, x):
        heads = x.reshape(*x.shape[:-1], 8, 2)
        found = [getattr(self, name)(x) for name in ("column", "row", "plain", "both")]
        found += [self.o_proj(heads), self.out(heads).swapaxes(-1, -2)]
        return jnp.stack([y.reshape(*x.shape[:-1], 8) for y in found], axis=-2)  # [B, T, layers, 8]


def adapters_of(finisher):
    if finisher is SCALE_COLUMNS:
        return [make_dora("one", TARGETS, 4), make_dora("two", TARGETS[1:], 2)]
    return [
        with_values(make_adapter(name, targets, 3), finisher)
        for name, targets in (("one", TARGETS), ("two", TARGETS[1:]))
    ]


def expected(model, finisher, x):
    """Return the rows of merged weights, with the values of a trial in their columns."""
    outputs = {None: np.asarray(run(model, x), np.float64)}
    for adapter in adapters_of(finisher):
        y = np.asarray(run(merge(model, TARGETS, adapter), x), np.float64)
        for i, target in enumerate(TARGETS):
            module = adapter.modules.get(target.name)
            if finisher is BIAS and module is not None:
                y[:, :, i] += module.scaling * module.vectors["lora_bias"]
            if finisher is IA3 and module is not None:
                y[:, :, i] *= module.vectors["ia3"]
        outputs[adapter.name] = y
    return np.stack([outputs[name][i] for i, name in enumerate(NAMES)])


def managed(model, *finishers, **config):
    variants = [finisher.variant.name for finisher in finishers]
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=4, variants=variants, **config))


@pytest.mark.parametrize("finisher", FINISHERS, ids=IDS)
@pytest.mark.parametrize(
    ("axes", "config"),
    [
        pytest.param({"t": 2}, {}, marks=pytest.mark.mesh),
        pytest.param({"u": 2, "t": 2}, {"fully_sharded": True}, marks=pytest.mark.mesh),
        pytest.param({"data": 2, "t": 2}, {"data_axes": ["data"]}, marks=pytest.mark.slow),
        pytest.param({}, {}, marks=pytest.mark.slow),
    ],
    ids=["t", "fully sharded", "data", "one device"],
)
def test_each_finisher_on_each_mesh(finisher, axes, config):
    x = normal(4, 3, K)
    model = placed(Layers(), mesh_of(**axes), SPECS) if axes else Layers()
    with registered(finisher):
        manager = managed(model, finisher, **config)
        for adapter in adapters_of(finisher):
            manager.add_adapter(adapter)
        with manager.prepare(NAMES) as batch:
            assert_close(serve(model, x, batch), expected(Layers(), finisher, x), 1e-5)


class Two(nnx.Module):
    """A layer split by columns, and one by rows."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.column = nnx.Linear(K, K, rngs=rngs)
        self.row = nnx.Linear(K, K, bias_init=nnx.initializers.normal(3.0), rngs=rngs)

    def __call__(self, x):
        return self.row(jnp.tanh(self.column(x)))


@pytest.mark.mesh
@pytest.mark.parametrize("finisher", FINISHERS, ids=IDS)
def test_verify_on_a_mesh(finisher):
    wrong = broken(finisher) if finisher is SCALE_COLUMNS else replace(finisher, commutes=frozenset({"sum", "bias"}))
    cause = "column" if finisher is SCALE_COLUMNS else "row"
    for each in (finisher, wrong):
        with registered(each):
            manager = managed(placed(Two(), mesh_of(t=2), SPECS), finisher)
            if each is finisher:
                assert manager.verify(serve, normal(4, 3, K)).checked == ("column", "row")
            else:
                with pytest.raises(LoRAError, match=rf"verify: {cause} \(Linear\) is off"):
                    manager.verify(serve, normal(4, 3, K))


@pytest.mark.parametrize("finisher", FINISHERS, ids=IDS)
def test_verify_of_a_wrong_function(finisher):
    with registered(broken(finisher)), pytest.raises(LoRAError, match=r"verify: column \(Linear\) is off"):
        managed(Two(), finisher).verify(serve, normal(4, 3, K))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("build", [Quantized, pytest.param(Transformer, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_verify_of_several_finishers(build):
    """In a quantized layer; and in stacks, einsums and tied logits."""
    register_layer(Int8, lambda layer: jlora.LinearSpec(12, 12, dtype=jnp.float32, dequantize=lambda own: own.whole()))
    x = normal(4, 3, 12) if build is Quantized else tokens_of(4, 3)
    with registered(*FINISHERS):
        assert managed(build(), *FINISHERS).verify(serve, x).error < 2e-6


def test_a_bias_beside_the_output_is_not_left_out():
    adapter = make_adapter("one", [Target("split", K, 8, "")], 2)

    def serve(model, x, batch):
        with jlora.use(batch):
            return model["split"](x)

    for finisher in (BIAS, IA3):
        model = nnx.Dict(split=Split(K, 8, rngs=nnx.Rngs(0)))
        with registered(finisher):
            manager = managed(model, finisher)
            manager.add_adapter(with_values(adapter, finisher))
            with manager.prepare(["one"]) as batch:
                operands = model, jnp.asarray(normal(1, 3, K)), batch
                if finisher is BIAS:
                    jax.eval_shape(serve, *operands)
                    continue
                with pytest.raises(LoRAError, match=r"split.*IA3 changes the bias, and the layer returns it"):
                    jax.eval_shape(serve, *operands)


def test_a_combination_that_peft_lacks_is_refused():
    with registered(SCALE_COLUMNS, BIAS):
        plain, ones = make_adapter("one", TARGETS[:1], 2), np.ones(8, np.float32)

        def made(*variants, **fields):
            vectors = dict.fromkeys(variants, ones)
            return replace(plain, modules={"column": replace(plain.modules["column"], vectors=vectors)}, **fields)

        assert made("lora_bias").variants == ("lora_bias",)
        assert made("lora_bias", invocation_tokens=(1,)).variants == ("lora_bias",)  # PEFT has both together
        with pytest.raises(AdapterMismatchError, match="'one': use_dora and lora_bias are set together; PEFT has no"):
            made("lora_bias", "dora")
        with pytest.raises(AdapterMismatchError, match="use_dora and alora_invocation_tokens are set together"):
            made("dora", invocation_tokens=(1,))

"""Models that qwix has quantized: values against qwix's own product plus a float64 delta, bits, order, interception."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora import ops
from jlora.errors import LoRAError
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import (
    Target,
    assert_close,
    delta,
    make_adapter,
    make_manager,
    normal,
    serve,
    step_of_one_trace,
)
from tests.matrix import thinned
from tests.pallas import conftest

interpret = conftest.interpret
qwix = pytest.importorskip("qwix")
pytestmark = [
    pytest.mark.usefixtures("relaxed", "registered"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:qwix"),
    pytest.mark.filterwarnings("ignore:The 'm.iter_modules:DeprecationWarning"),
]

D = 32
HEADS = 16, 16  # qwix cuts an axis of a kernel into tiles of 16
TARGETS = [Target("up", D, 2 * D, ""), Target("mid", 2 * D, 256, ""), Target("down", 256, D, "")]
INT8 = {"weight_qtype": jnp.int8}
RULES = {
    "int8": INT8,
    "int4": {"weight_qtype": jnp.int4, "tile_size": 16},
    "nf4": {"weight_qtype": "nf4", "tile_size": 16},
    "fp8 activations": {"weight_qtype": jnp.float8_e4m3fn, "act_qtype": jnp.float8_e4m3fn},
}


@pytest.fixture
def relaxed():
    """Allow the promotion of ranks and dtypes that qwix uses."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


class Model(nnx.Module):
    """Layers of three kinds. `added` are values added to the output of each, for the reference."""

    def __init__(self, dtype=jnp.float32):
        rngs = nnx.Rngs(0)
        self.up = nnx.Linear(D, 2 * D, param_dtype=dtype, rngs=rngs)
        self.mid = nnx.LinearGeneral(2 * D, HEADS, param_dtype=dtype, rngs=rngs)
        self.down = nnx.Einsum("BTNH,NHD->BTD", (*HEADS, D), param_dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return self.run(x, (0.0, 0.0, 0.0))[-1]

    def run(self, x, added):
        first = jax.nn.silu(self.up(x) + added[0])
        second = jax.nn.silu(self.mid(first) + added[1])
        return first, second, self.down(second) + added[2]


class Reference(Model):
    def __call__(self, x, added=(0.0, 0.0, 0.0)):
        return self.run(x, added)


def quantize(model, rule, *inputs):
    rules = [qwix.QuantizationRule(module_path=".*", **rule)]
    return qwix.quantize_model(model, qwix.PtqProvider(rules), *inputs)


def expected(reference, adapter, x):
    """Return the output of the quantized model with float64 deltas, computed layer by layer outside of it."""
    added = [jnp.zeros(shape(x), x.dtype) for shape in SHAPES]
    if adapter is not None:
        for i, target in enumerate(TARGETS):
            values = np.asarray((x, *reference(x, added))[i], np.float64)
            change = values.reshape(*x.shape[:2], -1) @ delta(adapter.modules[target.name]).T
            added[i] = jnp.asarray(change.reshape(SHAPES[i](x)), x.dtype)
    return np.asarray(reference(x, added)[-1], np.float64)


SHAPES = [lambda x: (*x.shape[:2], 2 * D), lambda x: (*x.shape[:2], *HEADS), lambda x: (*x.shape[:2], D)]


@pytest.mark.parametrize("name", thinned(list(RULES), 0, 2, 3))
def test_rows_equal_the_quantized_product_plus_the_delta(name):
    x, adapters = jnp.asarray(normal(4, 3, D)), [make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS[:2], 1)]
    adapters[1].modules["down"] = make_adapter("down", TARGETS[2:], 1).modules["down"]
    reference = jax.jit(quantize(Reference(), RULES[name], x).__call__)
    model = quantize(Model(), RULES[name], x)
    base = np.asarray(jax.jit(lambda model, x: model(x))(model, x))
    manager = make_manager(model, adapters)
    assert {layer.path for layer in manager.layers() if layer.wrapped} == {"up", "mid", "down"}

    step = step_of_one_trace()
    for names in (["one", None, "two", None], [None, "two", "one", "one"]):
        with manager.prepare(names) as batch:
            found = np.asarray(step(model, x, batch))
        want = {adapter.name: expected(reference, adapter, x) for adapter in adapters}
        for i, each in enumerate(names):
            if each is None:
                np.testing.assert_array_equal(found[i], base[i])
            else:
                assert_close(found[i], want[each][i], 2e-5)
                assert np.abs(found[i] - base[i]).max() > 0.1 * np.abs(base).max()


def test_verify_confirms_quantized_layers():
    x = jnp.asarray(normal(4, 3, D), jnp.bfloat16)
    manager = make_manager(quantize(Model(jnp.bfloat16), RULES["nf4"], x))
    assert {layer.slot_bytes for layer in manager.layers() if layer.path == "up"} == {4 * 3 * D * 2 + 8}
    report = manager.verify(serve, x)
    assert report.checked == ("up", "mid", "down")
    assert report.rows_only == {}
    assert 0 < report.error < report.tolerance


def test_a_wrapped_model_that_is_quantized_raises_with_the_order():
    model, x = Model(), jnp.asarray(normal(4, 3, D))
    manager = make_manager(model, [make_adapter("one", TARGETS, 3)])
    order = r"(?s)^up: qwix.quantize_model was called with a model that jlora had wrapped.*Quantize first.*LoRAManager"
    with pytest.raises(LoRAError, match=order):
        quantize(model, INT8, x)
    with manager.prepare(["one", None, None, None]) as batch:
        with pytest.raises(LoRAError, match=order), jlora.use(batch):
            quantize(model, INT8, x)
        rules = [qwix.QuantizationRule(module_path=".*", **INT8)]
        copy = qwix.quantize_model(model, qwix.PtqProvider(rules), x, skip_nnx_init=True)
        with pytest.raises(LoRAError, match=order):
            serve(copy, x, batch)
        serve(model, x, batch)


class Head(nnx.Module):
    def __init__(self):
        self.table = nnx.Param(jnp.asarray(normal(11, D)))

    def attend(self, x):
        return jnp.einsum("btd,vd->btv", x, self.table[...])


def test_a_quantized_table_is_refused_by_name():
    class Tied(nnx.Module):
        def __init__(self):
            self.up, self.head = nnx.Linear(D, D, rngs=nnx.Rngs(0)), Head()

        def __call__(self, x):
            return self.head.attend(self.up(x))

    register_layer(Head, lambda layer: jlora.EmbedSpec(11, D, param="table", lookup=None, attend="attend"))
    manager = make_manager(quantize(Tied(), INT8, jnp.asarray(normal(4, 3, D))))
    (reason,) = (layer.reason for layer in manager.layers() if layer.path == "head")
    assert "its parameter 'table' is quantised by qwix" in reason
    assert "module_path" in reason


class Guest(nnx.Module):
    """A model with a step of the user's inside its call."""

    def __init__(self):
        self.proj = nnx.Linear(D, D, rngs=nnx.Rngs(0))

    def __call__(self, x, step):
        self.proj(x)
        x @ jnp.ones((D, 4), x.dtype)  # JAX caches this product with quantized operands
        return step()


def steps(backend):
    """Return rows, and functions of them that compute each of jlora's products that can be interpreted."""
    x, base = jnp.asarray(normal(12, D)), jnp.asarray(normal(12, D, seed=1))
    a, b = jnp.asarray(normal(2, 1, 4, D)), jnp.asarray(normal(2, 4, D))
    ids = jnp.asarray([0, 1, 2, 1, 0, 0, 1, 2, 0, 1, 1, 0])

    def forward(x):
        plan = ops.make_plan(ids, num_groups=2)
        return ops.add_lora(base, x, a, b, plan, backend=backend)

    def apart(x):
        plan = ops.make_plan(ids, num_groups=2)
        h = ops.shrink(x, a, plan, backend=backend)
        return ops.expand(h, b, plan, slice_sizes=(D,), base=base, backend=backend)

    return x, {"xla": [forward, apart], "triton": [forward], "mosaic_tpu": [forward]}[backend]


@pytest.mark.parametrize("backend", thinned(["xla", "triton", "mosaic_tpu"], 0))
def test_products_of_jlora_are_never_quantized(backend, interpret):
    calls = interpret()
    provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8)])
    guest = qwix.quantize_model(Guest(), provider, jnp.ones((1, D)), lambda: 0)
    x, products = steps(backend)
    rows = jnp.ones((1, D))
    for product in products:

        def inside(x, product=product):
            return jax.jit(lambda x: guest(rows, lambda: jax.jit(lambda x: product(x))(x)))(x)

        def outside(x, product=product):
            return jax.jit(lambda x: product(x))(x)

        for of in (lambda run: run(x), lambda run: jax.grad(lambda x: jnp.square(run(x)).sum())(x)):
            np.testing.assert_array_equal(of(inside), of(outside))
    assert set(calls) == {"xla": set(), "triton": {"add_lora"}, "mosaic_tpu": {"tpu_add_lora"}}[backend]

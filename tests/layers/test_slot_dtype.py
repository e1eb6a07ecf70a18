"""The dtype of the slots: from the configuration, the spec, the layer or its parameter, and never 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAUsageError
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import Holder, Target, assert_close, make_adapter, make_manager, normal, rounding_of, serve

pytestmark = pytest.mark.usefixtures("registered")

D = 6
ADAPTER = make_adapter("one", [Target("proj", D, D, "")], 3)
FLOAT8 = jnp.float8_e4m3fn


class Dense(nnx.Module):
    """A product in float32 for every dtype of the kernel."""

    def __init__(self, stored, **attributes):
        self.w = nnx.Param(jnp.asarray(normal(D, D)).astype(stored))
        for name, value in attributes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return x @ self.w[...].astype(jnp.float32)


class Model(nnx.Module):
    def __init__(self, stored, **attributes):
        self.proj = Dense(stored, **attributes)
        self.other = nnx.Linear(D, D, rngs=nnx.Rngs(0))


def register(dtype=None):
    given = {} if dtype is None else {"dtype": dtype}
    register_layer(Dense, lambda layer: jlora.LinearSpec(*layer.w.shape, param="w", **given))


def slot_dtype(manager):
    return manager.model.proj.jlora_a.dtype


@pytest.mark.parametrize(
    ("config", "spec", "layer", "stored", "expected"),
    [
        (jnp.float16, jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float16),
        (None, jnp.float16, jnp.bfloat16, jnp.float32, jnp.float16),
        (None, None, jnp.bfloat16, jnp.float32, jnp.bfloat16),
        (None, None, jnp.bfloat16, FLOAT8, jnp.bfloat16),
        (None, None, None, jnp.bfloat16, jnp.bfloat16),
        (None, None, "of the config", jnp.float32, jnp.float32),
    ],
)
def test_the_dtype_of_the_slots_has_a_fixed_precedence(config, spec, layer, stored, expected):
    register(spec)
    assert slot_dtype(make_manager(Model(stored, dtype=layer), dtype=config)) == expected


@pytest.mark.parametrize(("stored", "layer"), [(FLOAT8, None), (jnp.int8, FLOAT8)])
def test_a_kernel_of_8_bits_needs_a_configured_dtype(stored, layer):
    register()
    manager = make_manager(Model(stored, dtype=layer))
    reason = rf"parameter 'w' is {jnp.dtype(stored).name}, .*LoRAConfig\(dtype=.*jlora\.LinearSpec\(\.\.\., dtype="
    with pytest.raises(AdapterMismatchError, match=f"'proj' is not wrapped: .*{reason}"):
        manager.add_adapter(ADAPTER)
    assert [info.path for info in manager.layers() if info.wrapped] == ["other"]


def test_tables_and_experts_take_the_dtype_of_their_specs():
    class Table(nnx.Module):
        def __init__(self):
            self.t = nnx.Param(jnp.ones((11, D), FLOAT8))

        def __call__(self, tokens):
            return self.t[...].astype(jnp.float32)[tokens]

        def logits(self, x):
            return x @ self.t[...].astype(jnp.float32).T

    class Experts(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(jnp.ones((3, D, 8), FLOAT8))
            self.down = nnx.Param(jnp.ones((3, 8, D), FLOAT8))

    class Both(nnx.Module):
        def __init__(self):
            self.table, self.experts = Table(), Experts()

    register_layer(Table, lambda _: jlora.EmbedSpec(11, D, "t", attend="logits", dtype=jnp.float16))
    products = {"up": jlora.LinearSpec(D, 8, "up", dtype=jnp.float32), "down": jlora.LinearSpec(8, D, "down")}
    register_layer(Experts, lambda _: jlora.ExpertsSpec(3, products, dtype=jnp.bfloat16))
    model = make_manager(Both()).model
    assert model.table.jlora_a.dtype == model.table.jlora_attend_b.dtype == jnp.float16
    assert model.experts.jlora_up_a.dtype == jnp.float32
    assert model.experts.jlora_down_a.dtype == jnp.bfloat16


def test_an_einsum_spec_takes_a_dtype():
    register_layer(Dense, lambda layer: jlora.einsum_spec("btd,df->btf", layer.w.shape, dtype="bfloat16"))
    assert slot_dtype(make_manager(Model(FLOAT8))) == jnp.bfloat16


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: jlora.LinearSpec(D, D, dtype=dtype),
        lambda dtype: jlora.EmbedSpec(D, D, dtype=dtype),
        lambda dtype: jlora.ExpertsSpec(2, {"up": jlora.LinearSpec(D, D)}, dtype=dtype),
    ],
)
@pytest.mark.parametrize("dtype", [FLOAT8, "floaty"])
def test_a_spec_with_an_unsupported_dtype_is_refused(make, dtype):
    with pytest.raises(LoRAUsageError, match=r"Spec.dtype must be None or one of"):
        make(dtype)


@pytest.mark.device
@pytest.mark.parametrize(
    ("param", "compute", "slots"),
    [("bfloat16", "bfloat16", "float32"), ("float32", "float32", "bfloat16"), ("bfloat16", "float32", None)],
)
def test_slot_dtype_apart_from_the_models(param, compute, slots):
    """The output is the base plus the float64 delta of the slots, rounded once to the dtype of the base."""

    layer = nnx.Linear(6, 5, param_dtype=jnp.dtype(param), dtype=jnp.dtype(compute), rngs=nnx.Rngs(0))
    model, x = Holder(layer), jnp.asarray(normal(3, 2, 6), compute)
    base = np.asarray(jax.jit(lambda model, x: model(x))(model, x))
    assert base.dtype == compute
    adapter = make_adapter("one", [Target("proj", 6, 5, "")], 3)
    manager = make_manager(model, [adapter], dtype=slots)
    with manager.prepare(["one", None, "one"]) as batch:
        found = np.asarray(serve(model, x, batch))
    held = jnp.dtype(slots or compute)
    assert model.proj.jlora_a.dtype == model.proj.jlora_b.dtype == held
    module = adapter.modules["proj"]
    a, b = (np.asarray(jnp.asarray(factor, held), np.float64) for factor in (module.a, module.b))
    x_seen = np.asarray(x.astype(held), np.float64)
    expected = base.astype(np.float64)
    expected[[0, 2]] += module.scaling * (x_seen @ a.T @ b.T)[[0, 2]]
    assert found.dtype == base.dtype
    np.testing.assert_array_equal(found[1], base[1])
    assert_close(found, expected, tolerance=2**-8 if compute == "bfloat16" else rounding_of(held))
    assert np.abs(found - base).max() > 0.1

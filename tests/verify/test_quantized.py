"""`manager.verify` of layers that store their weight in a form of their own: wrong rows, columns and axes are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import LoRAError
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import make_manager, normal, serve
from tests.layers.trial_variants import broken, registered

pytestmark = pytest.mark.usefixtures("registered")

K, N = 12, 12


class Int8(nnx.Module):
    """A weight of 8 bits [N, K] with one scale for each output, and a bias."""

    def __init__(self, seed=0):
        self.values = nnx.Param(jnp.asarray(np.random.default_rng(seed).integers(-127, 128, (N, K), np.int8)))
        self.scales = nnx.Param(jnp.asarray(np.abs(normal(N, seed=seed)) / 256 + 1e-3))
        self.offset = nnx.Param(jnp.asarray(normal(N, seed=seed)))

    def whole(self):
        return (self.values[...].astype(jnp.float32) * self.scales[...][:, None]).T

    def __call__(self, x):
        return x @ self.whole().astype(x.dtype) + self.offset[...].astype(x.dtype).reshape((1,) * (x.ndim - 1) + (N,))


class Doubled(Int8):
    def __call__(self, x):
        return super().__call__(2 * x)


class Rounded(Int8):
    """A layer that rounds its input to 8 bits."""

    def __call__(self, x):
        size = jnp.abs(x).max(-1, keepdims=True) / 127
        return super().__call__(jnp.round(x / size) * size)


class Model(nnx.Module):
    def __init__(self, cls=Int8, dtype=jnp.float32):
        self.first, self.proj = nnx.Linear(K, K, param_dtype=dtype, rngs=nnx.Rngs(0)), cls()
        self.last = nnx.Linear(N, 5, param_dtype=dtype, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(jnp.tanh(self.proj(self.first(x))))


def register(cls, *, known=True, dequantize=None, **options):
    whole = dequantize or (lambda layer: layer.whole())
    spec = jlora.LinearSpec(K, N, dtype=jnp.float32, dequantize=whole if known else None, **options)
    register_layer(cls, lambda layer: spec)


def test_right_layers_pass():
    """A layer that rounds its input; one that does not is in `test_finishers_are_compared`."""
    register(Rounded)
    report = make_manager(Model(Rounded)).verify(serve, normal(4, 3, K))
    assert report.checked == ("first", "proj", "last")
    assert report.rows_only == {}
    assert report.unchecked == {}
    assert 0 <= report.error < 1e-5 < report.tolerance == 1e-4


def test_a_layer_without_a_dequantized_weight_is_checked_by_rows_only():
    register(Int8, known=False)
    report = make_manager(Model()).verify(serve, normal(4, 3, K))
    assert report.checked == ("first", "proj", "last")
    assert [*report.rows_only] == ["proj"]
    assert "order of the rows of one sequence" in report.rows_only["proj"]
    assert report.tolerance == 1e-1


@pytest.mark.parametrize("known", [True, False])
def test_finishers_are_compared(known):
    register(Int8, known=known)
    manager = make_manager(Model(), variants=["dora"])
    assert manager.verify(serve, normal(4, 3, K)).checked == ("first", "proj", "last")
    with registered(broken(SCALE_COLUMNS)), pytest.raises(LoRAError, match=r"verify: proj \(Int8\) is off"):
        make_manager(Model(), variants=["dora"], target_modules=["proj"]).verify(serve, normal(4, 3, K))


@pytest.mark.parametrize("known", [True, False])
def test_wrong_rows_are_found(known):
    class TimeMajor(nnx.Module):
        def __init__(self):
            self.proj = Int8()

        def __call__(self, x):
            return jnp.tanh(self.proj(x.swapaxes(0, 1))).swapaxes(0, 1)

    register(Int8, known=known)
    with pytest.raises(LoRAError, match=r"verify: proj \(Int8\) is off: .* differs from merged weights"):
        make_manager(TimeMajor()).verify(serve, normal(3, 3, K))


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Doubled, {}),
        (Int8, {"dequantize": lambda layer: layer.whole().T}),
        (Int8, {"rows": lambda layer, x, y: (x, y[..., ::-1], lambda out: out[..., ::-1])}),
    ],
)
def test_wrong_columns_and_scales_are_found(cls, options):
    register(cls, **options)
    with pytest.raises(LoRAError, match=rf"verify: proj \({cls.__name__}\) is off: .* dequantized weight"):
        make_manager(Model(cls)).verify(serve, normal(4, 3, K))


class Wide(nnx.Module):
    """A layer of 64 columns that rounds its weight and its input to 8 bits. `order` and `factors` change its output."""

    def __init__(self, values=jnp.int8):
        self.dtype = jnp.dtype(values)
        self.order, self.factors = nnx.Variable(jnp.arange(64)), nnx.Variable(jnp.ones(64))
        self.values, self.scales = self.rounded(jnp.asarray(normal(K, 64)), axis=0)
        self.values, self.scales = nnx.Param(self.values), nnx.Param(self.scales)

    def rounded(self, x, axis):
        scale = jnp.abs(x).max(axis, keepdims=True) / (127 if self.dtype == jnp.int8 else 448)
        return (jnp.round(x / scale) if self.dtype == jnp.int8 else x / scale).astype(self.dtype), scale

    def whole(self):
        return self.values[...].astype(jnp.float32) * self.scales[...]

    def __call__(self, x):
        values, scale = (array.astype(jnp.float32) for array in self.rounded(x, axis=-1))
        y = ((values * scale) @ self.whole())[..., self.order[...]]
        return y * self.factors[...].reshape((1,) * (y.ndim - 1) + (64,))


def wide_manager(values=jnp.int8, exchanged=False):
    spec = jlora.LinearSpec(K, 64, dtype=jnp.float32, dequantize=lambda layer: layer.whole())
    register_layer(Wide, lambda layer: spec)
    model = Model()
    model.proj, model.last = Wide(values), nnx.Linear(64, 5, rngs=nnx.Rngs(1))
    if exchanged:
        model.proj.order[...] = EXCHANGED
    return make_manager(model)


EXCHANGED = jnp.arange(64).at[jnp.array([3, 40])].set(jnp.array([40, 3]))


WIDE = normal(6, 6, K)  # 36 rows


def test_a_single_wrong_column_is_found():
    manager = wide_manager(jnp.float8_e4m3fn)
    layer, order, factors = manager.model.proj, jnp.arange(64), jnp.ones(64)
    assert manager.verify(serve, WIDE).checked == ("first", "proj", "last")
    changes = {
        "2 of 64 output features, the first of which is 3": (EXCHANGED, factors),
        "1 of 64 output features, the first of which is 5": (order, factors.at[5].set(-1)),
        "of 64 output features": (order, 1.05 * factors),
    }
    for found, (layer.order[...], layer.factors[...]) in changes.items():
        with pytest.raises(LoRAError, match=rf"verify: proj \(Wide\) is off: .* dequantized weight in .*{found}"):
            manager.verify(serve, WIDE)


class ScalesInput(nnx.Linear):
    def __call__(self, x):
        return super().__call__(1.01 * x)


@pytest.mark.slow
def test_float_layers_beside_a_quantized_one_are_judged_as_floats():
    register(Rounded)
    register_layer(ScalesInput, lambda layer: jlora.LinearSpec(layer.in_features, layer.out_features))
    model = Model(Rounded)
    model.last = ScalesInput(N, 5, rngs=nnx.Rngs(1))
    with pytest.raises(LoRAError, match=r"verify: last \(ScalesInput\) is off: .* and 0\.0001 is allowed"):
        make_manager(model).verify(serve, normal(4, 3, K))


def one_row(model, x, batch):
    return jnp.stack([serve(model, x[:, i], batch) for i in range(x.shape[1])], axis=1)


@pytest.mark.slow
def test_rows_of_all_steps_count():
    x = normal(1, 8, K)
    assert wide_manager().verify(one_row, x).unserved == {}
    with pytest.raises(
        LoRAError, match=r"proj \(Wide\) is off: .* in 2 of 64 output features, the first of which is 3"
    ):
        wide_manager(exchanged=True).verify(one_row, x)


@pytest.mark.slow
def test_a_layer_that_saw_one_row_is_unserved():
    manager = wide_manager(exchanged=True)
    for x in (normal(1, K), np.repeat(normal(1, 1, K), 3, axis=1)):
        report = manager.verify(serve, x)
        assert report.checked == ("first", "last")
        assert "fewer than two different rows" in report.unserved["proj"]
    assert manager.unserved == report.unserved


def test_a_dequantized_weight_of_another_shape_raises():
    register(Int8, dequantize=lambda layer: layer.whole()[1:])
    with pytest.raises(LoRAError, match=r"dequantize of Int8\w* must return \[K, N\] = \[12, 12\], .* \[11, 12\]"):
        make_manager(Model()).verify(serve, normal(4, 3, K))


def test_layers_with_padded_and_ordered_features_pass():
    register(Int8, in_index=[3, 1, 7, 8], out_blocks=[(6, 6), (0, 6)])
    report = make_manager(Model(), packed_modules={}).verify(serve, normal(4, 3, K))
    assert "proj" in report.checked


def test_merged_projections_and_bfloat16_pass():
    register(Int8)
    model = Model(dtype=jnp.bfloat16)
    manager = make_manager(model, packed_modules={"proj": {"q": 8, "k": 4}}, dtype=jnp.bfloat16)
    assert manager.verify(serve, jnp.asarray(normal(4, 3, K), jnp.bfloat16)).checked[1] == "proj"


def test_float32_rows_in_a_layer_of_bfloat16_pass():
    """The layer's output has its own dtype, and a carry of scan allows no other."""

    class Narrow(Int8):
        def __call__(self, x):
            return super().__call__(x.astype(jnp.bfloat16))

    class Repeated(nnx.Module):
        def __init__(self):
            self.proj = Narrow()

        def __call__(self, x):
            def step(x, _):
                return jnp.tanh(self.proj(x.astype(jnp.float32))), None

            return jax.lax.scan(step, x.astype(jnp.bfloat16), length=2)[0].astype(jnp.float32)

    spec = jlora.LinearSpec(K, N, dtype=jnp.bfloat16, dequantize=lambda layer: layer.whole())
    register_layer(Narrow, lambda layer: spec)
    manager = make_manager(Repeated())
    assert manager.verify(serve, normal(4, 3, K)).checked == ("proj",)

"""Layers that store their weight in a form of their own: values against merged dequantized weights."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import Target, assert_close, delta, make_adapter, make_dora, make_manager, normal, run, serve

pytestmark = pytest.mark.usefixtures("registered")

K, H, N = 256, 128, 64
TARGETS = [Target("up", K, H, ""), Target("down", H, N, "")]
NAMES = ["one", None, "two", "one", None]


class BlockScaled(nnx.Module):
    """A float8 weight with one scale for each block of 128 x 128."""

    def __init__(self, n_in, n_out, seed):
        blocks = normal(n_in // 128, 128, n_out // 128, 128, seed=seed)
        scales = np.abs(blocks).max((1, 3)) / 448
        values = (blocks / scales[:, None, :, None]).reshape(n_in, n_out)
        self.weight = nnx.Param(jnp.asarray(values, jnp.float8_e4m3fn))
        self.scales = nnx.Param(jnp.asarray(scales))

    def whole(self):
        scales = jnp.repeat(jnp.repeat(self.scales[...], 128, 0), 128, 1)
        return self.weight[...].astype(jnp.float32) * scales

    def __call__(self, x):
        return x @ self.whole().astype(x.dtype)


class PackedInt4(nnx.Module):
    """A weight of 4 bits, two input features to a byte, with one scale for each 32 input features of a column."""

    def __init__(self, n_in, n_out, seed):
        values = np.random.default_rng(seed).integers(0, 16, (n_in, n_out), np.uint8)
        self.packed = nnx.Param(jnp.asarray(values[::2] | values[1::2] << 4))
        self.scales = nnx.Param(jnp.asarray(np.abs(normal(n_in // 32, n_out, seed=seed)) / 8 + 0.01))
        self.bias = nnx.Param(jnp.asarray(normal(n_out, seed=seed)))

    def whole(self):
        packed = self.packed[...]
        values = jnp.stack([packed & 15, packed >> 4], axis=1).reshape(-1, packed.shape[1])
        return (values.astype(jnp.float32) - 8) * jnp.repeat(self.scales[...], 32, 0)

    def __call__(self, x):
        return x @ self.whole().astype(x.dtype) + self.bias[...][None, None]


class Model(nnx.Module):
    def __init__(self):
        self.up = BlockScaled(K, H, seed=0)
        self.down = PackedInt4(H, N, seed=1)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def known(**options):
    """Register both classes with their dequantized weights."""
    for cls, sizes in ((BlockScaled, (K, H)), (PackedInt4, (H, N))):
        spec = jlora.LinearSpec(*sizes, dtype=jnp.float32, dequantize=lambda layer: layer.whole(), **options)
        register_layer(cls, lambda layer, spec=spec: spec)


def unknown(**options):
    """Register both classes with nothing but their sizes."""
    for cls, sizes in ((BlockScaled, (K, H)), (PackedInt4, (H, N))):
        spec = jlora.LinearSpec(*sizes, **{"dtype": jnp.float32, **options})
        register_layer(cls, lambda layer, spec=spec: spec)


def merged(model, adapter, x):
    """Return the outputs of float64 weights, dequantized and merged with an adapter."""
    up, down = (
        np.asarray(layer.whole(), np.float64) + (0 if adapter is None else delta(adapter.modules[name]).T)
        for name, layer in (("up", model.up), ("down", model.down))
    )
    return np.tanh(x @ up) @ down + np.asarray(model.down.bias[...], np.float64)


@pytest.mark.parametrize("register", [known, unknown])
def test_rows_equal_adapters_merged_into_dequantized_weights(register):
    register()
    model, x = Model(), normal(len(NAMES), 3, K) / 16
    one, two = (make_adapter(name, TARGETS, 3) for name in ("one", "two"))
    expected = {a and a.name: merged(model, a, x) for a in (one, two, None)}
    base = np.asarray(run(model, x))
    manager = make_manager(model, [one, two])
    assert all(layer.wrapped for layer in manager.layers())

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(model, x, batch):
        with jlora.use(batch):
            return model(x)

    for names in (NAMES, NAMES[::-1]):
        with manager.prepare(names) as batch:
            found = np.asarray(step(model, x, batch))
        assert_close(found, np.stack([expected[name][i] for i, name in enumerate(names)]))
        plain = [i for i, name in enumerate(names) if name is None]
        np.testing.assert_array_equal(found[plain], base[plain])
    manager.unwrap()
    np.testing.assert_array_equal(np.asarray(run(model, x)), base)


def test_dtype_of_slots_must_be_known():
    unknown(dtype=None)
    with pytest.raises(LoRAError, match=r"up \(BlockScaled\): it has no parameter whose dtype .*LinearSpec\(.*dtype="):
        make_manager(Model())
    assert make_manager(Model(), dtype=jnp.bfloat16).model.up.jlora_a.dtype == jnp.bfloat16


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("options", [{"param": 3}, {"dequantize": "weight"}])
def test_options_of_the_wrong_type_are_refused(options):
    with pytest.raises(LoRAUsageError, match=f"LinearSpec.{next(iter(options))} must be"):
        jlora.LinearSpec(K, H, **options)


def test_dora_is_refused():
    known()
    manager = make_manager(Model(), dora=True)
    with pytest.raises(AdapterMismatchError, match="'one': up: DoRA needs the base weight in floating point"):
        manager.add_adapter(make_dora("one", TARGETS, 2))


class Scaled(nnx.Module):
    """A kernel of 8 bits with one scale for each column."""

    def __init__(self, n_in, n_out, seed):
        self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(seed).integers(-127, 128, (n_in, n_out), np.int8)))
        self.scale = nnx.Param(jnp.asarray(np.abs(normal(n_out, seed=seed)) / 256))

    def whole(self):
        return self.kernel[...].astype(jnp.float32) * self.scale[...][None]

    def __call__(self, x):
        return x @ self.kernel[...].astype(x.dtype) * self.scale[...][None, None]


def split_over(mesh, layer, kernel, scale):
    layer.kernel.set_value(jax.device_put(layer.kernel[...], NamedSharding(mesh, PartitionSpec(*kernel))))
    layer.scale.set_value(jax.device_put(layer.scale[...], NamedSharding(mesh, PartitionSpec(*scale))))


def test_kernels_of_8_bits_are_split_over_a_mesh():
    class Split(nnx.Module):
        def __init__(self):
            self.up, self.down = Scaled(K, H, seed=0), Scaled(H, N, seed=1)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    register_layer(
        Scaled,
        lambda layer: jlora.LinearSpec(*layer.kernel.shape, dtype=jnp.float32, dequantize=lambda layer: layer.whole()),
    )
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    x, adapters = normal(3, 3, K) / 16, [make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS, 3)]
    model = Split()
    weights = [np.asarray(layer.whole(), np.float64) for layer in (model.up, model.down)]
    split_over(mesh, model.up, (None, "tensor"), ("tensor",))
    split_over(mesh, model.down, ("tensor", None), (None,))
    manager = make_manager(model, adapters)
    assert model.up.jlora_b[...].sharding.shard_shape((4, 4, H))[-1] == H // 2
    assert model.down.jlora_a[...].sharding.shard_shape((4, 1, 4, H))[-1] == H // 2

    with manager.prepare(["one", None, "two"]) as batch:
        found = np.asarray(serve(model, x, batch))
    expected = []
    for row, adapter in zip(x, (adapters[0], None, adapters[1]), strict=True):
        up, down = (
            w + (0 if adapter is None else delta(adapter.modules[name]).T)
            for w, name in zip(weights, ("up", "down"), strict=True)
        )
        expected.append(np.tanh(row @ up) @ down)
    assert_close(found, np.stack(expected))

"""Layers that store their weight in a form of their own: values against merged dequantized weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import Target, assert_close, delta, make_adapter, make_dora, make_manager, normal, run, serve
from tests.layers.mesh_models import mesh_of

pytestmark = pytest.mark.usefixtures("registered")

K, H, N = 64, 32, 16
TARGETS = [Target("up", K, H, ""), Target("down", H, N, "")]
NAMES = ["one", None, "two", "one", None]


class Scaled(nnx.Module):
    """A kernel of 8 bits with one scale for each column."""

    def __init__(self, n_in, n_out, seed):
        self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(seed).integers(-127, 128, (n_in, n_out), np.int8)))
        self.scale = nnx.Param(jnp.asarray(np.abs(normal(1, n_out, seed=seed)) / 256))

    def whole(self):
        return self.kernel[...].astype(jnp.float32) * self.scale[...]

    def __call__(self, x):
        return x @ self.kernel[...].astype(x.dtype) * self.scale[...][None]


class Packed(nnx.Module):
    """A weight of 4 bits, two input features to a byte, with one scale for each column."""

    def __init__(self, n_in, n_out, seed):
        values = np.random.default_rng(seed).integers(0, 16, (n_in, n_out), np.uint8)
        self.packed = nnx.Param(jnp.asarray(values[::2] | values[1::2] << 4))
        self.scale = nnx.Param(jnp.asarray(np.abs(normal(n_out, seed=seed)) / 8))

    def whole(self):
        values = jnp.stack([self.packed[...] & 15, self.packed[...] >> 4], axis=1).reshape(-1, self.scale.shape[0])
        return (values.astype(jnp.float32) - 8) * self.scale[...][None]

    def __call__(self, x):
        return x @ self.whole().astype(x.dtype)


class Model(nnx.Module):
    def __init__(self, down=Scaled):
        self.up, self.down = Scaled(K, H, seed=0), down(H, N, seed=1)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def register(known, **options):
    """Register both classes with their dequantized weights, or with nothing but their sizes."""
    whole = {"dequantize": lambda layer: layer.whole()} if known else {}
    options = {"dtype": jnp.float32, **whole, **options}
    register_layer(Scaled, lambda layer: jlora.LinearSpec(*layer.kernel.shape, **options))
    register_layer(Packed, lambda layer: jlora.LinearSpec(H, N, **options))


def expected(model, adapters, x):
    """Return the rows of NAMES by float64 weights, dequantized and merged with an adapter."""
    by_name = {adapter.name: adapter.modules for adapter in adapters}
    found = []
    for row, name in zip(x, NAMES, strict=True):
        up, down = (
            np.asarray(layer.whole(), np.float64) + (0 if name is None else delta(by_name[name][target]).T)
            for target, layer in (("up", model.up), ("down", model.down))
        )
        found.append(np.tanh(row @ up) @ down)
    return np.stack(found)


@pytest.mark.parametrize(
    ("known", "down", "on_mesh"), [(True, Packed, False), (False, Packed, False), (True, Scaled, True)]
)
def test_rows_equal_adapters_merged_into_dequantized_weights(known, down, on_mesh):
    register(known)
    model, x = Model(down), normal(len(NAMES), 3, K) / 16
    adapters = [make_adapter(name, TARGETS, 3) for name in ("one", "two")]
    want = expected(model, adapters, x)
    for name, specs in {"up": (P(None, "t"), P(None, "t")), "down": (P("t"), P())}.items() if on_mesh else ():
        for value, spec in zip(("kernel", "scale"), specs, strict=True):
            param = vars(getattr(model, name))[value]
            param.set_value(jax.device_put(param[...], NamedSharding(mesh_of(t=2), spec)))
    base = np.asarray(run(model, x))
    manager = make_manager(model, adapters)
    if on_mesh:
        assert model.up.jlora_b[...].sharding.shard_shape((4, 4, H))[-1] == H // 2
        assert model.down.jlora_a[...].sharding.shard_shape((4, 1, 4, H))[-1] == H // 2

    with manager.prepare(NAMES) as batch:
        found = np.asarray(serve(model, x, batch))
    assert_close(found, want)
    if not on_mesh:
        np.testing.assert_array_equal(found[[1, 4]], base[[1, 4]])
    manager.unwrap()
    np.testing.assert_array_equal(np.asarray(run(model, x)), base)


def test_dtype_of_slots_must_be_known():
    register(known=False, dtype=None)
    with pytest.raises(LoRAError, match=r"down \(Packed\): it has no parameter whose dtype .*LinearSpec\(.*dtype="):
        make_manager(Model(Packed))
    assert make_manager(Model(Packed), dtype=jnp.bfloat16).model.down.jlora_a.dtype == jnp.bfloat16


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("options", [{"param": 3}, {"dequantize": "weight"}])
def test_options_of_the_wrong_type_are_refused(options):
    with pytest.raises(LoRAUsageError, match=f"LinearSpec.{next(iter(options))} must be"):
        jlora.LinearSpec(K, H, **options)


def test_dora_is_refused():
    register(known=True, bias=None)
    manager = make_manager(Model(), variants=["dora"])
    with pytest.raises(AdapterMismatchError, match="'one': up: DoRA needs the base weight in floating point"):
        manager.add_adapter(make_dora("one", TARGETS, 2))

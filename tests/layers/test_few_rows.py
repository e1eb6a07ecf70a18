"""The kernel of products of few rows, interpreted on a CPU, and the layers that it serves.

Calls of the kernel are counted while a step is traced.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import jlora
from jlora.layers.forward import few_rows
from jlora.layers.site import SlotParam, SlotRanks
from jlora.layers.specs import LinearSpec
from jlora.layers.wrap.discover import register_layer
from jlora.pallas import xla
from jlora.pallas.triton import lora as triton
from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    make_adapter,
    make_dora,
    make_manager,
    merge,
    normal,
)
from tests.pallas.lowering import for_gpu, lowered_text
from tests.pallas.running import interpret_of

# No user runs interpreted kernels, so XLA's optimisations are of no interest.
pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

KERNEL = few_rows.product_in_parts
TOLERANCE = 2e-2  # of bfloat16 through several layers; `manager.verify` allows as much


def weights(seed, rows, k, n, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(rows, k)), dtype), jnp.asarray(rng.normal(size=(k, n)), dtype)


# --- The kernel -------------------------------------------------------------------------------------------------------


def product(x, w, parts):
    return KERNEL(x, w, parts=parts, stages=1, interpret=interpret_of("triton"))


SHAPES = [  # rows, K, N, parts of K
    (33, 390, 70, 3),  # remainders of all
    (40, 256, 64, 3),  # a part of K that is empty
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("rows", "k", "n", "parts"), SHAPES)
def test_values_are_rounded_once(rows, k, n, parts, dtype):
    x, w = weights(rows, rows, k, n, dtype)
    got = product(x, w, parts)
    assert got.dtype == dtype
    want = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    error = np.abs(np.asarray(got, np.float64) - want)
    assert (error <= 0.505 * float(jnp.finfo(dtype).eps) * np.abs(want) + 1e-4).all()


@pytest.mark.parametrize(("rows", "k", "n"), [(37, 18944, 3584)])
def test_lowers_for_cuda(rows, k, n):
    args = jax.ShapeDtypeStruct((rows, k), "bfloat16"), jax.ShapeDtypeStruct((k, n), "bfloat16")
    text = lowered_text(lambda x, w: KERNEL(x, w, parts=2, stages=3), args, "cuda")
    assert text.count("custom_call @__gpu$xla.gpu.triton") + text.count("custom_call @triton_kernel_call_ffi") == 1
    assert "lora_base_product" in text
    assert "stablehlo.dot_general" not in text


# rows, K and N of decode steps -> parts of K, or None for products that XLA computes as fast
PRODUCTS = [
    (64, 4096, 4096, 4), (33, 4096, 6144, 2), (64, 18944, 3584, 4), (64, 5120, 7168, 2),
    (64, 3584, 37888, None), (64, 4096, 1024, None), (32, 4096, 4096, None), (65, 4096, 4096, None),
    (64, 512, 4096, None),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "k", "n", "parts"), PRODUCTS)
def test_parts_where_a_gain_is_predicted(rows, k, n, parts):
    with for_gpu("NVIDIA H200"):
        cut = few_rows.parts_and_stages(rows, k, n)
    # Three blocks of 128 in-features of 64 rows and 64 columns fill half of the shared memory.
    assert cut == (None if parts is None else (parts, 3))
    with for_gpu("NVIDIA A100-SXM4-80GB"):
        assert few_rows.parts_and_stages(rows, k, n) is None


# --- Layers that it serves --------------------------------------------------------------------------------------------


@pytest.fixture
def called(monkeypatch):
    """Interpret the kernel, and return the list of (rows, K, N) of its calls. XLA computes the LoRA."""
    calls = []

    def spy(x, w, **kwargs):
        calls.append((*x.shape, w.shape[1]))
        return KERNEL(x, w, interpret=interpret_of("triton"), **kwargs)

    def add_lora(*args, batch_invariant=False, **options):
        return xla.add_lora(*args, **options)

    monkeypatch.setattr(few_rows, "product_in_parts", spy)
    monkeypatch.setattr(triton, "add_lora", add_lora)
    monkeypatch.setattr(triton, "backward", xla)
    return calls


@pytest.fixture
def taken(monkeypatch, called):
    """Make the kernel take all shapes of up to 128 rows, and return its calls."""
    monkeypatch.setattr(few_rows, "parts_and_stages", lambda rows, k, n: (2, 1) if 0 < rows <= 128 else None)
    return called


def served(step=lambda model, x: model(x)):
    """Return a new jitted step, which shares no trace with another test."""

    @jax.jit
    def serve(model, x, batch):
        with jlora.use(batch):
            return step(model, x)

    return serve


def linear(**options):
    return lambda dtype, r: nnx.Linear(16, 16, rngs=r, **{"param_dtype": dtype, **options})


class Holder(nnx.Module):
    def __init__(self, dtype=jnp.bfloat16, build=None):
        self.proj = (build or linear(bias_init=nnx.initializers.normal(1.0)))(dtype, nnx.Rngs(1))

    def __call__(self, x):
        return self.proj(x)


PROJ = [Target("proj", 16, 16, "proj.kernel")]
SINGLE = [make_adapter("one", PROJ, 3), make_adapter("two", PROJ, 1)]
X = np.asarray(jnp.asarray(normal(5, 1, 16), jnp.bfloat16))
NAMES = ["one", None, "two", None, "one"]


def in_float32(model):
    """Return a model with the same weights that computes in float32."""
    twin = Holder(jnp.float32)
    nnx.update(twin, jax.tree.map(lambda v: v.astype(jnp.float32), nnx.state(model, nnx.Param)))
    return twin


def merged(adapters):
    """Return float32 models by name: the base, and one merged model for each adapter."""
    twin = in_float32(Holder())
    return {None: twin} | {adapter.name: merge(twin, PROJ, adapter) for adapter in adapters}


def wrapped(model, adapters, **config):
    return model, make_manager(model, adapters, backend="triton", **config)


@pytest.mark.parametrize("x", [X[:, 0], X.repeat(3, axis=1)], ids=["[B, K]", "[B, L, K]"])
@pytest.mark.parametrize("config", [{}, {"dtype": "float32"}, {"variants": ["dora"]}], ids=str)
def test_rows_of_several_adapters(taken, x, config):
    """DoRA's magnitudes do not scale the layer's bias."""
    adapters = [make_dora("one", PROJ, 3), SINGLE[1]] if "variants" in config else SINGLE
    twins = merged(adapters)
    model, manager = wrapped(Holder(), adapters, **config)
    with manager.prepare(NAMES) as batch:
        found = served()(model, x, batch)
    assert taken == [(x.size // 16, 16, 16)]
    assert found.dtype == jnp.bfloat16
    assert_close(found, expected_rows(twins, NAMES, x.astype(np.float32)), TOLERANCE)


# --- Transformations --------------------------------------------------------------------------------------------------


def test_gradients_through_the_model(taken):
    weight, found = normal(5, 1, 16, seed=3), {}
    for dtype, backend in ((jnp.bfloat16, "triton"), (jnp.float32, "xla")):
        model = Holder() if dtype == jnp.bfloat16 else in_float32(Holder())
        manager = make_manager(model, SINGLE, backend=backend)
        with manager.prepare(NAMES) as batch:
            graphdef, ranks, slots, params, rest = nnx.split(model, SlotRanks, SlotParam, nnx.Param, ...)

            @jax.jit
            def gradients(slots, params, x, ranks, rest, batch, graphdef=graphdef):
                def loss(slots, params, x):
                    with jlora.use(batch):
                        y = nnx.merge(graphdef, ranks, slots, params, rest)(x)
                    return (weight * y.astype(jnp.float32)).sum()

                return jax.grad(loss, (0, 1, 2))(slots, params, x)

            found[backend] = gradients(slots, params, jnp.asarray(X, dtype), ranks, rest, batch)
    assert [call[1:] for call in taken] == [(16, 16)]
    for one, other in zip(jax.tree.leaves(found["triton"]), jax.tree.leaves(found["xla"]), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 3e-2 * np.linalg.norm(other)
        assert np.linalg.norm(other) > 0


@pytest.mark.slow
def test_mapped_products_are_xlas(taken):
    """A model for one sequence [1, K] under `jax.vmap`: one product of all mapped rows is faster."""
    twins = merged(SINGLE)
    model, manager = wrapped(Holder(), SINGLE)

    def loss(x, batch):
        return jnp.square(served()(model, x, batch).astype(jnp.float32)).sum()

    with manager.prepare(NAMES) as batch:
        run = jax.vmap(lambda x, batch: served()(model, x, batch))
        assert "base_product" not in lowered_text(run, (X, batch), "cuda")
        found = jax.jit(run)(X, batch)
        each, together = jax.vmap(jax.grad(loss))(X, batch), jax.grad(lambda x: jax.vmap(loss)(x, batch).sum())(X)
    assert_close(found, expected_rows(twins, NAMES, X.astype(np.float32)), TOLERANCE)
    assert_close(each, together, TOLERANCE)
    assert np.abs(np.asarray(each, np.float32)).min(axis=-1).max() > 0


# --- Not by the kernel ------------------------------------------------------------------------------------------------


def own_product(x, kernel, dims, **options):
    return lax.dot_general(x, kernel, dims, **options)


def general(dtype, rngs):
    return nnx.LinearGeneral(16, 16, param_dtype=dtype, rngs=rngs)


class Subclass(nnx.Linear):
    """A layer with its own call, which may change the product."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


def wider_bias(dtype, rngs):
    """Return a layer whose x and kernel Flax promotes to the dtype of the bias."""
    layer = nnx.Linear(16, 16, param_dtype=dtype, rngs=rngs)
    layer.bias = nnx.Param(jnp.ones(16, jnp.float32))
    return layer


NOT = {  # the layer, dtype, what else is configured
    "precision": (linear(precision="highest"), jnp.bfloat16, {}),
    "preferred element type": (linear(preferred_element_type=jnp.float32, use_bias=False), jnp.bfloat16, {}),
    "a product of one's own": (linear(dot_general=own_product), jnp.bfloat16, {}),
    "another dtype of the product": (linear(dtype=jnp.float32), jnp.bfloat16, {}),
    "float32": (linear(), jnp.float32, {}),
    "batch invariant": (linear(), jnp.bfloat16, {"batch_invariant": True}),
    "xla": (linear(), jnp.bfloat16, {"backend": "xla"}),
    "promotion of one's own": (
        linear(promote_dtype=lambda arrays, dtype=None, **_: tuple(arrays)), jnp.bfloat16, {},
    ),
    "another class": (general, jnp.bfloat16, {}),
    "a call of one's own": (lambda dtype, r: Subclass(16, 16, param_dtype=dtype, rngs=r), jnp.bfloat16, {}),
    "a bias of another dtype": (wider_bias, jnp.bfloat16, {}),
}  # fmt: skip
ONE_ALONE = ["one", None, "one", None, "one"]


def serve_one(model, x=X, **config):
    """Check the rows with an adapter, and return True if the others have the bits of the unwrapped model."""
    adapter, x = make_adapter("one", PROJ, 3), x.astype(model.proj.kernel.dtype)
    bare = np.asarray(jax.jit(lambda model, x: model(x))(model, x), np.float32)
    manager = make_manager(model, [adapter], **{"backend": "triton", **config})
    with manager.prepare(ONE_ALONE) as batch:
        found = np.asarray(served()(model, x, batch), np.float32)
    assert (found[0] != bare[0]).any()
    return np.array_equal(found[1], bare[1]) and np.array_equal(found[3], bare[3])


@pytest.mark.parametrize("what", NOT)
def test_other_layers_keep_their_product(taken, registered, what):
    register_layer(Subclass, lambda layer: LinearSpec(layer.in_features, layer.out_features))
    build, dtype, config = NOT[what]
    with jax.numpy_dtype_promotion("standard"):
        assert serve_one(Holder(dtype, build), **config)
    assert taken == []


@pytest.mark.parametrize(
    ("rows", "n", "by_kernel"),
    [(32, 4224, False), (33, 4224, True), (65, 4224, False), (64, 4096, False)],
)
def test_the_rule_of_parts_decides(called, rows, n, by_kernel):
    """On an H200, two parts of K = 768 keep all multiprocessors busy from 4224 columns on."""
    model = Holder(build=lambda dtype, r: nnx.Linear(768, n, use_bias=False, param_dtype=dtype, rngs=r))
    manager = make_manager(model, backend="triton")
    with manager.prepare([None] * rows) as batch, for_gpu("NVIDIA H200"):
        jax.eval_shape(served(), model, jnp.zeros((rows, 1, 768), jnp.bfloat16), batch)
    assert called == [(rows, 768, n)] * by_kernel


def test_with_a_mesh_in_context(taken):
    model = Holder()
    manager = make_manager(model, SINGLE[:1], backend="triton")
    with (
        manager.prepare(ONE_ALONE) as batch,
        jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])),
    ):
        served()(model, X, batch)
    assert taken == []


def test_an_input_that_does_not_fit_raises_as_in_flax(taken):
    model, manager = wrapped(Holder(), SINGLE)
    with manager.prepare(NAMES) as batch, pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        served()(model, X[..., :8], batch)
    assert taken == []

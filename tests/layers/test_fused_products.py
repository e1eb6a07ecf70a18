"""Layers whose base product jlora's kernel computes, interpreted on a CPU, and layers that keep their own product.

Calls of the kernel are counted while a step is traced.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType

import jlora
from jlora.adapters import Adapter, ModuleLoRA
from jlora.layers.site import SlotParam, SlotRanks
from jlora.layers.specs import LinearSpec
from jlora.layers.wrap.discover import register_layer
from jlora.pallas import api, xla
from jlora.pallas.tiles import ProductTiles
from jlora.pallas.triton import lora as triton
from jlora.pallas.triton import product as triton_product
from tests.layers.merging import Target, assert_close, expected_rows, make_dora, make_manager, merge, normal
from tests.matrix import thinned
from tests.pallas.lowering import for_gpu

# No user runs interpreted kernels, so XLA's optimisations are of no interest.
pytestmark = [pytest.mark.device, pytest.mark.usefixtures("quickly_compiled")]

KERNEL = triton_product.product
TILES = ProductTiles(block_n=16, block_k=16, split_k=2, warps=4, stages=1)
TOLERANCE = 2e-2  # of bfloat16 through several layers; `manager.verify` allows as much


@pytest.fixture
def called(monkeypatch):
    """Interpret the kernel, and return the list of (rows, K, N) of its calls. XLA computes the LoRA."""
    calls = []

    def spy(x, w, **kwargs):
        calls.append((*x.shape, w.shape[1]))
        return KERNEL(x, w, interpret=True, **kwargs)

    def add_lora(*args, batch_invariant=False, **options):
        return xla.add_lora(*args, **options)

    monkeypatch.setattr(triton_product, "product", spy)
    monkeypatch.setattr(triton, "add_lora", add_lora)
    return calls


@pytest.fixture
def fused(monkeypatch, called):
    """Make the kernel take all shapes of up to 128 rows, and return its calls."""
    monkeypatch.setattr(api, "product_tiles", lambda rows, k, n: TILES if rows <= 128 else None)
    return called


def served(step=lambda model, x: model(x)):
    """Return a new jitted step, which shares no trace with another test."""

    @jax.jit
    def serve(model, x, batch):
        with jlora.use(batch):
            return step(model, x)

    return serve


class Model(nnx.Module):
    """Layers with kernels that flatten without a transpose, and one that needs a transpose (`turned`)."""

    packed_modules = {"qkv_proj": {"q": 16, "k": 8, "v": 8}}

    def __init__(self, dtype=jnp.bfloat16):
        given, bias = {"param_dtype": dtype, "rngs": nnx.Rngs(1)}, nnx.initializers.normal(1.0)
        self.up = nnx.Linear(16, 24, bias_init=bias, **given)
        self.qkv_proj = nnx.Linear(24, 32, use_bias=False, **given)
        self.mix = nnx.LinearGeneral(32, (4, 4), bias_init=bias, **given)
        self.out = nnx.Einsum("...NH,NHD->...D", (4, 4, 16), **given)
        self.turned = nnx.Einsum("...D,NDH->...NH", (4, 16, 4), (4, 4), bias_init=bias, **given)

    def __call__(self, x):
        y = self.mix(self.qkv_proj(jnp.tanh(self.up(x))))
        return x + self.out(y + self.turned(x))


class Pair(nnx.Module):
    """The first two layers of `Model`."""

    packed_modules = Model.packed_modules

    def __init__(self, dtype=jnp.bfloat16):
        given = {"param_dtype": dtype, "rngs": nnx.Rngs(1)}
        self.up = nnx.Linear(16, 24, bias_init=nnx.initializers.normal(1.0), **given)
        self.qkv_proj = nnx.Linear(24, 32, use_bias=False, **given)

    def __call__(self, x):
        return self.qkv_proj(jnp.tanh(self.up(x)))


def linear(**options):
    return lambda dtype, r: nnx.Linear(16, 16, rngs=r, **{"param_dtype": dtype, **options})


class Holder(nnx.Module):
    def __init__(self, dtype=jnp.bfloat16, build=None):
        self.proj = (build or linear())(dtype, nnx.Rngs(1))

    def __call__(self, x):
        return self.proj(x)


def turn(d):
    return d.T.reshape(16, 4, 4).transpose(1, 0, 2)


CALLS = [(16, 24), (24, 32), (32, 16), (16, 16)]  # K, N of the kernel's calls, in order
PARTS = {"q": slice(0, 16), "k": slice(16, 24), "v": slice(24, 32)}
TARGETS = [
    Target("up", 16, 24, "up.kernel"),
    *(
        Target(name, 24, part.stop - part.start, "qkv_proj.kernel", at=(slice(None), part))
        for name, part in PARTS.items()
    ),
    Target("mix", 32, 16, "mix.kernel"),
    Target("turned", 16, 16, "turned.kernel", turn),
    Target("out", 16, 16, "out.kernel"),
]


def make_adapter(name, targets, rank, seed=0):
    """Return an adapter with factors that bfloat16 represents exactly."""
    rng = np.random.default_rng((seed, rank))

    def values(*shape):
        return np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16), np.float32)

    modules = {
        t.name: ModuleLoRA(a=values(rank, t.k), b=values(t.n, rank) / 8, kind="linear", alpha=rank / 2, scaling=0.5)
        for t in targets
    }
    return Adapter(name=name, modules=modules)


def mixed(adapters, weights):
    """Return one adapter of `proj` with the weighted sum of the deltas of several."""
    modules = [adapter.modules["proj"] for adapter in adapters]
    a = np.concatenate([module.a for module in modules])
    b = np.concatenate([weight * module.b for module, weight in zip(modules, weights, strict=True)], axis=1)
    both = ModuleLoRA(a=a, b=b, kind="linear", alpha=len(a) / 2, scaling=0.5)
    return Adapter(name="mixed", modules={"proj": both})


ONE = make_adapter("one", TARGETS, 3)
TWO = make_adapter("two", [TARGETS[0], *TARGETS[2:4], *TARGETS[5:]], 2)
PROJ = [Target("proj", 16, 16, "proj.kernel")]
SINGLE = [make_adapter("one", PROJ, 3), make_adapter("two", PROJ, 1)]
PAIR = [make_adapter("one", TARGETS[:4], 3), make_adapter("two", TARGETS[2:4], 1)]
X = np.asarray(jnp.asarray(normal(5, 1, 16), jnp.bfloat16))
NAMES = ["one", None, "two", None, "one"]


def in_float32(model, cls=Model, **options):
    """Return a model with the same weights that computes in float32."""
    twin = cls(jnp.float32, **options)
    values = jax.tree.map(lambda v: v.astype(jnp.float32), nnx.state(model, nnx.Param))
    nnx.update(twin, values)
    return twin


def merged(model, targets=TARGETS, adapters=(ONE, TWO), **kwargs):
    """Return float32 models by name: the base, and one merged model for each adapter."""
    twin = in_float32(model, **kwargs)
    return {None: twin} | {adapter.name: merge(twin, targets, adapter) for adapter in adapters}


def wrapped(model=None, adapters=(ONE, TWO), **config):
    model = Model() if model is None else model
    return model, make_manager(model, adapters, backend="triton", **config)


# --- By the kernel ----------------------------------------------------------------------------------------------------


LAYOUTS = {"[B, 1, K]": lambda x: x, "[B, K]": lambda x: x[:, 0]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_a_sequence(fused, layout):
    x, twins = LAYOUTS[layout](X), merged(Holder(), PROJ, SINGLE, cls=Holder)
    model, manager = wrapped(Holder(), SINGLE)
    with manager.prepare(NAMES) as batch:
        found = served()(model, x, batch)
    assert fused == [(5, 16, 16)]
    assert found.dtype == jnp.bfloat16
    assert_close(found, expected_rows(twins, NAMES, x.astype(np.float32)), TOLERANCE)


@pytest.mark.parametrize("config", [{"dtype": "float32"}, {"dora": True}], ids=["slots of another dtype", "dora"])
def test_configured_slots(fused, config):
    adapters = SINGLE if "dtype" in config else [make_dora("one", PROJ, 3), SINGLE[1]]
    twins = merged(Holder(), PROJ, adapters, cls=Holder)
    model, manager = wrapped(Holder(), adapters, **config)
    with manager.prepare(NAMES) as batch:
        found = served()(model, X, batch)
    assert fused == [(5, 16, 16)]
    assert_close(found, expected_rows(twins, NAMES, X.astype(np.float32)), TOLERANCE)


def test_several_adapters_of_a_sequence(fused):
    twins = merged(Holder(), PROJ, [*SINGLE, mixed(SINGLE, (0.5, -2.0))], cls=Holder)
    model, manager = wrapped(Holder(), SINGLE, max_adapters_per_sequence=2)
    entries = ["one", None, jlora.Mix({"one": 0.5, "two": -2.0}), "two", None]
    with manager.prepare(entries) as batch:
        found = served()(model, X, batch)
    assert fused == [(5, 16, 16)]
    names = [entry if isinstance(entry, str | None) else "mixed" for entry in entries]
    assert_close(found, expected_rows(twins, names, X.astype(np.float32)), TOLERANCE)


@pytest.mark.slow
def test_some_rows_a_sequence(fused):
    x, twins = np.asarray(jnp.asarray(normal(5, 3, 16, seed=4), jnp.bfloat16)), merged(Model())
    model, manager = wrapped()
    with manager.prepare(NAMES) as batch:
        found = served()(model, x, batch)
    assert fused == [(15, *size) for size in CALLS]
    assert_close(found, expected_rows(twins, NAMES, x.astype(np.float32)), TOLERANCE)


@pytest.mark.slow
def test_packed_rows(fused):
    counts, twins = [2, 0, 4, 1, 3], merged(Model())
    x = np.asarray(jnp.asarray(normal(16, 16, seed=5), jnp.bfloat16))
    model, manager = wrapped()
    with manager.prepare(NAMES, token_counts=counts, pad_to=16) as batch:
        found = served()(model, x, batch)
    assert fused == [(16, *size) for size in CALLS]
    names = [name for name, count in zip(NAMES, counts, strict=True) for _ in range(count)] + [None] * 6
    assert_close(found, expected_rows(twins, names, x.astype(np.float32)), TOLERANCE)


def test_one_trace_for_all_batches_and_swaps_between_them(fused):
    """Serve three adapters in one slot, the base alone, and an adapter of another rank in a used slot."""
    adapters = [*PAIR, make_adapter("third", TARGETS[:3], 4, seed=1)]
    twins = merged(Pair(), TARGETS[:4], adapters, cls=Pair)
    model, manager = wrapped(Pair(), adapters, max_loras=1)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(model, x, batch):
        with jlora.use(batch):
            return model(x)

    for names in (["one", None] * 2, ["two"] * 4, ["third", None, None, "third"], [None] * 4, ["one"] * 4):
        with manager.prepare(names) as batch:
            found = step(model, X[:4], batch)
        assert_close(found, expected_rows(twins, names, X[:4].astype(np.float32)), TOLERANCE)
    assert fused == [(4, *size) for size in CALLS[:2]]


def test_the_base_keeps_the_bits_of_the_unwrapped_model(fused):
    """`use(None)` and a model after unwrap give the bits of the unwrapped model."""
    bare = Holder()
    base = np.asarray(jax.jit(lambda model, x: model(x))(bare, X), np.float32)
    model, manager = wrapped(Holder(), SINGLE)
    np.testing.assert_array_equal(np.asarray(served()(model, X, None), np.float32), base)
    assert fused == []
    with manager.prepare(NAMES) as batch:
        served()(model, X, batch)
    assert len(fused) == 1
    manager.unwrap()
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda model, x: 1 * model(x))(model, X), np.float32), base)


def test_a_sequence_has_the_same_bits_in_every_batch(fused):
    model, manager = wrapped(Holder(), SINGLE)
    step, found = served(), {}
    for names, order in ((NAMES, [0, 1, 2, 3, 4]), (["two", "one", "two", None, None], [2, 4, 0, 1, 3])):
        with manager.prepare(names) as batch:
            rows = np.asarray(step(model, X[order], batch), np.float32)
        for name, i, row in zip(names, order, rows, strict=True):
            np.testing.assert_array_equal(row, found.setdefault((name, i), row))
    assert len(found) < 10
    assert len(fused) == 1


def test_verify_passes(fused):
    """`verify` passes on layers with the kernel's product."""
    _, manager = wrapped(Holder(), SINGLE)

    def forward(model, x, batch):
        with jlora.use(batch):
            return model(x)

    report = manager.verify(forward, jnp.asarray(X))
    assert fused
    assert set(report.checked) == {"proj"}
    assert report.unserved == {}
    assert report.error < report.tolerance == TOLERANCE


def test_gradients_through_the_model(fused):
    """Gradients of slots and inputs agree with those of the same model in float32 on XLA."""
    weight, found = normal(5, 1, 32, seed=3), {}
    for dtype, backend in ((jnp.bfloat16, "triton"), (jnp.float32, "xla")):
        model = Pair() if dtype == jnp.bfloat16 else in_float32(Pair(), Pair)
        manager = make_manager(model, PAIR, backend=backend)
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
    assert [call[1:] for call in fused] == CALLS[:2]
    for one, other in zip(jax.tree.leaves(found["triton"]), jax.tree.leaves(found["xla"]), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 3e-2 * np.linalg.norm(other)
        assert np.linalg.norm(other) > 0


def test_vmap_serves_the_same_values(fused):
    """A model for one sequence [1, K] under vmap uses XLA for the rows of all sequences."""
    twins = merged(Holder(), PROJ, SINGLE, cls=Holder)
    model, manager = wrapped(Holder(), SINGLE)
    with manager.prepare(NAMES) as batch:
        found = jax.jit(jax.vmap(lambda x, batch: served()(model, x, batch)))(X, batch)
    assert_close(found, expected_rows(twins, NAMES, X.astype(np.float32)), TOLERANCE)


class Nested(nnx.Module):
    """A model with a layer inside `jax.checkpoint` and `lax.scan`, and one called twice."""

    def __init__(self, dtype=jnp.bfloat16):
        self.proj = nnx.Linear(16, 16, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.again = nnx.Linear(16, 16, param_dtype=dtype, rngs=nnx.Rngs(1))

    def __call__(self, x):
        x, _ = lax.scan(lambda x, _: (jnp.tanh(jax.checkpoint(self.proj)(x)), None), x, None, length=2)
        return self.again(jnp.tanh(self.again(inputs=x)))


@pytest.mark.slow
def test_scan_and_checkpoint_serve_the_kernels_products(fused):
    targets = [Target("proj", 16, 16, "proj.kernel"), Target("again", 16, 16, "again.kernel")]
    adapters = [make_adapter("one", targets, 3), make_adapter("two", targets[1:], 1)]
    twins = merged(Nested(), targets, adapters, cls=Nested)
    model, manager = wrapped(Nested(), adapters)
    with manager.prepare(NAMES) as batch:
        found = served()(model, X, batch)
    assert len(fused) >= 3
    assert_close(found, expected_rows(twins, NAMES, X.astype(np.float32)), TOLERANCE)


# --- Orders of axes, one layer each -----------------------------------------------------------------------------------


def einsum(equation, shape, **options):
    return lambda dtype, r: nnx.Einsum(equation, shape, param_dtype=dtype, rngs=r, **options)


def general(*sizes, **options):
    return lambda dtype, r: nnx.LinearGeneral(*sizes, param_dtype=dtype, rngs=r, **options)


def into(*shape, order):
    """Return a function from the delta [N, K] to the kernel, for the shape of its transpose and the order of axes."""
    return lambda d: d.T.reshape(shape).transpose(order)


ORDERS = {  # the layer, features of x, delta -> kernel, whether jlora's kernel takes it
    "features in first": (einsum("BTD,DNH->BTNH", (16, 4, 4)), (16,), np.transpose, True),
    "features in between": (einsum("BTD,NDH->BTNH", (4, 16, 4)), (16,), into(16, 4, 4, order=(1, 0, 2)), False),
    "features in last": (einsum("BTD,NHD->BTNH", (4, 4, 16)), (16,), into(16, 4, 4, order=(1, 2, 0)), False),
    "heads in": (einsum("BTNH,NHD->BTD", (4, 4, 16)), (4, 4), np.transpose, True),
    "heads in, in another order": (einsum("BTHN,NHD->BTD", (4, 4, 16)), (4, 4), np.transpose, True),
    "output in another order": (einsum("BTD,DNH->BHTN", (16, 4, 4)), (16,), np.transpose, True),
    "rows last": (einsum("BTD,DNH->NHBT", (16, 4, 4)), (16,), np.transpose, True),
    "einsum, bias": (
        einsum("BTD,DNH->BTNH", (16, 4, 4), bias_shape=(4, 4), bias_init=nnx.initializers.normal(1.0)),
        (16,), np.transpose, True,
    ),
    "general": (general(16, (4, 4)), (16,), np.transpose, True),
    # Flax sorts the axes, so the kernel's first axis meets the input's axis 2 here.
    "general, unsorted": (general((4, 4), (8, 2), axis=(-1, 2)), (4, 4), np.transpose, True),
}  # fmt: skip


@pytest.mark.parametrize("order", thinned(list(ORDERS), 1, 4, 9))
def test_orders_of_axes(fused, order):
    build, features, to_kernel, by_kernel = ORDERS[order]
    targets = [Target("proj", 16, 16, "proj.kernel", to_kernel)]
    adapters = [make_adapter("one", targets, 3), make_adapter("two", targets, 1)]
    twins = merged(Holder(build=build), targets, adapters, cls=Holder, build=build)
    model, manager = wrapped(Holder(build=build), adapters)
    x, last = np.asarray(jnp.asarray(normal(5, 2, *features), jnp.bfloat16)), order == "rows last"
    with manager.prepare(NAMES) as batch:
        found = served()(model, x, batch)
    assert fused == [(10, 16, 16)] * by_kernel

    def by_row(y):
        return np.moveaxis(np.asarray(y, np.float64), 2, 0) if last else np.asarray(y, np.float64)

    want = expected_rows(twins, NAMES, x.astype(np.float32), lambda twin, x: by_row(twin(x)))
    assert_close(by_row(found), want, 6e-3)


# --- Not by the kernel ------------------------------------------------------------------------------------------------


ONE_ALONE = ["one", None, "one", None, "one"]


def own_product(x, kernel, dims, **options):
    return lax.dot_general(x, kernel, dims, **options)


NOT = {  # the layer, dtype, what else is configured
    "precision": (linear(precision="highest"), jnp.bfloat16, {}),
    "preferred element type": (linear(preferred_element_type=jnp.float32, use_bias=False), jnp.bfloat16, {}),
    "a product of one's own": (linear(dot_general=own_product), jnp.bfloat16, {}),
    "another dtype of the product": (linear(dtype=jnp.float32), jnp.bfloat16, {}),
    "float32": (linear(), jnp.float32, {}),
    "batch invariant": (linear(), jnp.bfloat16, {"batch_invariant": True}),
    "bitwise": (linear(), jnp.bfloat16, {"bitwise_base": True}),
    "xla": (linear(), jnp.bfloat16, {"backend": "xla"}),
    "promotion of one's own": (
        linear(promote_dtype=lambda arrays, dtype=None, **_: tuple(arrays)), jnp.bfloat16, {},
    ),
    "einsum, precision": (einsum("BTD,DF->BTF", (16, 16), precision="highest"), jnp.bfloat16, {}),
    "einsum, bitwise": (einsum("BTD,DF->BTF", (16, 16)), jnp.bfloat16, {"bitwise_base": True}),
}  # fmt: skip


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
def test_other_layers_keep_their_product(fused, what):
    """Rows without an adapter have the bits of the unwrapped model."""
    build, dtype, config = NOT[what]
    assert serve_one(Holder(dtype, build), **config)
    assert fused == []


def test_a_bias_of_another_dtype(fused):
    """Flax brings x and kernel to the wider one."""

    def build(dtype, rngs):
        layer = nnx.Linear(16, 16, param_dtype=dtype, rngs=rngs)
        layer.bias = nnx.Param(jnp.ones(16, jnp.float32))
        return layer

    with jax.numpy_dtype_promotion("standard"):
        assert serve_one(Holder(build=build))
    assert fused == []


def test_the_plain_layer_has_the_kernels_product(fused):
    serve_one(Holder())
    assert fused == [(5, 16, 16)]


@pytest.mark.parametrize(("length", "by_kernel"), [(25, True), (26, False)])
def test_prefill_keeps_its_product(fused, length, by_kernel):
    """5 sequences: 125 rows, and 130."""
    x = np.asarray(jnp.asarray(normal(5, length, 16), jnp.bfloat16))
    assert serve_one(Holder(), x) or by_kernel
    assert fused == [(5 * length, 16, 16)] * by_kernel


@pytest.mark.parametrize(
    ("rows", "n", "by_kernel"),
    [(32, 4224, False), (33, 4224, True), (64, 4224, True), (65, 4224, False), (64, 4096, False)],
)
def test_the_rule_of_tiles_decides(called, rows, n, by_kernel):
    """On an H200, two parts of K = 768 keep all multiprocessors busy from 4224 columns on."""
    model = Holder(build=lambda dtype, r: nnx.Linear(768, n, use_bias=False, param_dtype=dtype, rngs=r))
    manager = make_manager(model, backend="triton")
    with manager.prepare([None] * rows) as batch, for_gpu("NVIDIA H200"):
        jax.eval_shape(served(), model, jnp.zeros((rows, 1, 768), jnp.bfloat16), batch)
    assert called == [(rows, 768, n)] * by_kernel


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_calls")
def test_an_array_of_numpy_is_served(fused):
    """Outside `jax.jit`, as Flax's layers take one."""
    model = Holder()
    manager = make_manager(model, [make_adapter("one", PROJ, 3)], backend="triton")
    with manager.prepare(ONE_ALONE) as batch, jlora.use(batch):
        np.testing.assert_allclose(
            np.asarray(model(X), np.float32), np.asarray(model(jnp.asarray(X)), np.float32), rtol=0, atol=2e-2
        )


@pytest.mark.parametrize("kind", thinned([AxisType.Auto, AxisType.Explicit], 0))
def test_with_a_mesh_in_context(fused, kind):
    """A mesh in context prevents the kernel, although the model is on one device."""
    model = Holder()
    manager = make_manager(model, [make_adapter("one", PROJ, 3)], backend="triton")
    with (
        manager.prepare(ONE_ALONE) as batch,
        jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(kind,), devices=jax.devices()[:1])),
    ):
        served()(model, X, batch)
    assert fused == []


class Padded(nnx.Linear):
    """A layer with padding in its last three outputs, or in runs of them."""


@pytest.mark.parametrize(
    "padding",
    [{"real_vocab": 13}, {"out_blocks": [(8, 5), (-1, 3), (0, 8)]}, {"in_index": range(3, 16)}],
    ids=["real_vocab", "out_blocks", "in_index"],
)
def test_padded_columns(fused, registered, padding):
    register_layer(Padded, lambda layer: LinearSpec(layer.in_features, layer.out_features, **padding))
    model = Holder(build=lambda dtype, r: Padded(16, 16, use_bias=False, param_dtype=dtype, rngs=r))
    bare = np.asarray(jax.jit(lambda model, x: model(x))(model, X), np.float32)
    k, n = (13, 16) if "in_index" in padding else (16, 13)
    adapter = make_adapter("one", [Target("proj", k, n, "")], 3)
    manager = make_manager(model, [adapter], backend="triton")
    with manager.prepare(ONE_ALONE) as batch:
        found = np.asarray(served()(model, X, batch), np.float32)
    module = adapter.modules["proj"]
    x = X[0].astype(np.float64)
    delta = (x[:, 3:] if k == 13 else x) @ module.a.T.astype(np.float64) @ module.b.T / 2
    if "real_vocab" in padding:
        delta = np.pad(delta, ((0, 0), (0, 3)))
    elif n == 13:
        delta = np.concatenate([delta[:, 8:], np.zeros((1, 3)), delta[:, :8]], axis=1)
    assert_close(found[0], bare[0] + delta, 6e-3)
    np.testing.assert_array_equal(found[[1, 3]], bare[[1, 3]])
    assert fused == []


class Stack(nnx.Module):
    def __init__(self):
        make = nnx.vmap(lambda rngs: nnx.Linear(16, 16, param_dtype=jnp.bfloat16, rngs=rngs), in_axes=0, out_axes=0)
        self.proj = make(nnx.Rngs(0).split(3))

    def __call__(self, x):
        return nnx.scan(lambda x, proj: proj(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.proj)


def test_a_stack_of_layers(fused):
    """The kernel is a slice, which the product of XLA reads in place."""
    model = Stack()
    bare = np.asarray(jax.jit(lambda model, x: model(x))(model, X), np.float32)
    adapter = make_adapter("one", [Target(f"proj.{i}", 16, 16, "") for i in range(3)], 3)
    manager = make_manager(model, [adapter], backend="triton")
    with manager.prepare(ONE_ALONE) as batch:
        found = np.asarray(served()(model, X, batch), np.float32)
    assert fused == []
    assert (found[0] != bare[0]).any()
    np.testing.assert_array_equal(found[[1, 3]], bare[[1, 3]])


class Subclass(nnx.Linear):
    """A layer with its own call, which may change the product."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs)


def test_a_subclass_with_its_own_call_keeps_its_product(fused, registered):
    register_layer(Subclass, lambda layer: LinearSpec(layer.in_features, layer.out_features))
    assert serve_one(Holder(build=lambda dtype, r: Subclass(16, 16, param_dtype=dtype, rngs=r)))
    assert fused == []


def test_a_spec_with_rows_keeps_its_product(fused, registered):
    """A spec with `rows` selects the rows of the layer, which are not those of the kernel."""

    class Layer(nnx.Linear):
        pass

    def rows(layer, x, y, *args, **kwargs):
        return x, y, lambda flat: flat

    register_layer(Layer, lambda layer: LinearSpec(layer.in_features, layer.out_features, rows=rows))
    assert serve_one(Holder(build=lambda dtype, r: Layer(16, 16, param_dtype=dtype, rngs=r)))
    assert fused == []


def test_no_rows(fused):
    model = Holder()
    manager = make_manager(model, [make_adapter("one", PROJ, 3)], backend="triton")
    with manager.prepare(ONE_ALONE) as batch:
        assert served()(model, X[:, :0], batch).shape == (5, 0, 16)
    assert fused == []

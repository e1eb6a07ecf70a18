"""LoRA on experts, in models of several styles, against a NumPy loop that merges expert by expert."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from tests.layers.expert_models import (
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    Gathering,
    Interleaved,
    Model,
    OneHot,
    Ragged,
    Rows,
    Scanned,
    Seams,
    reference,
)
from tests.layers.merging import normal, serve, wrapped_paths

pytestmark = pytest.mark.device

STYLES = {
    "methods": lambda rngs: Model(Gathering, rngs),
    "interleaved": lambda rngs: Model(Interleaved, rngs),
    "bare ragged_dot": lambda rngs: Model(Ragged, rngs),
    "one-hot with capacity": lambda rngs: Model(OneHot, rngs),
    "scanned": lambda rngs: Scanned(Seams, rngs),
}
PROJECTIONS = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}


def make_adapter(name, seed, *, experts=range(EXPERTS), projections=tuple(PROJECTIONS), rank=2, router=True):
    """Return an adapter. `rank` is an int, or a function of the expert."""
    rng = np.random.default_rng(seed)

    def pair(k, n, r):
        return rng.normal(size=(r, k)).astype(np.float32) * 0.5, rng.normal(size=(n, r)).astype(np.float32) * 0.5

    arrays = {}
    for layer in range(LAYERS):
        for e in experts:
            for projection in projections:
                r = rank(e) if callable(rank) else rank
                arrays[f"layers.{layer}.experts.{e}.{projection}"] = pair(*PROJECTIONS[projection], r)
        if router:
            arrays[f"layers.{layer}.gate"] = pair(HIDDEN, EXPERTS, 2)
    return jlora.Adapter.from_arrays(name, arrays, alpha=3)


ADAPTERS = {
    "all": make_adapter("all", 1),
    "some": make_adapter("some", 2, experts=(0, 3), rank=lambda e: 1 + e, router=False),
    "down": make_adapter("down", 3, projections=("down_proj",), rank=3),
    "one": make_adapter("one", 4, experts=(4,), projections=("up_proj",), router=False),
}
NAMES = ["all", None, "some", "down", "all", "one", None]


class World:
    def __init__(self, style):
        self.model = STYLES[style](nnx.Rngs(0))
        self.manager = jlora.LoRAManager(self.model, jlora.LoRAConfig(max_loras=4, max_lora_rank=4))
        for adapter in ADAPTERS.values():
            self.manager.add_adapter(adapter)
        self.x = jax.random.normal(jax.random.key(1), (len(NAMES), 3, HIDDEN))

        @jax.jit
        @chex.assert_max_traces(n=3)  # batches of [B, L], packed ones, and the base model alone
        def forward(model, x, batch):
            with jlora.use(batch):
                return model(x)

        self.forward = forward

    def serve(self, names, x=None, **layout):
        with self.manager.prepare(names, **layout) as batch:
            return np.asarray(self.forward(self.model, self.x if x is None else x, batch))

    def expected(self, names, x):
        owners = [ADAPTERS.get(name) for name in names]
        return reference(self.model, np.asarray(x).reshape(-1, HIDDEN), owners).reshape(x.shape)


@functools.cache
def world_of(style):
    return World(style)


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("style", STYLES)
def test_each_row_has_its_own_adapter(style):
    """Rows without one keep the bits of the base, and swaps of adapters do not retrace."""
    world = world_of(style)
    found = world.serve(NAMES)
    assert_close(found, world.expected([name for name in NAMES for _ in range(3)], world.x))
    base = np.asarray(world.forward(world.model, world.x, None))
    assert np.abs(found - base)[[0, 2, 3, 4, 5]].max(axis=(1, 2)).min() > 1e-3  # every adapter changes its rows
    if "capacity" not in style:  # dropped tokens depend on the order and on the adapters of the others
        np.testing.assert_array_equal(found[[1, 6]], base[[1, 6]])
        order = np.random.default_rng(0).permutation(len(NAMES))
        np.testing.assert_array_equal(world.serve([NAMES[i] for i in order], world.x[order]), found[order])
    world.manager.remove_adapter("some")
    world.manager.add_adapter(ADAPTERS["some"])
    names = ["down", "one", None, "all", "some", "some", "one"]
    assert_close(world.serve(names), world.expected([name for name in names for _ in range(3)], world.x))
    assert world.manager.stats().compilations == 1


@pytest.mark.parametrize("style", ["methods", "scanned"])
def test_modules_that_an_adapter_lacks_are_cleared_in_its_slot(style):
    world = world_of(style)
    for first in ("all", "some"):
        for name in ("all", "some", "one", "down"):
            world.manager.remove_adapter(name)
        for name in (first, *(other for other in ADAPTERS if other != first)):
            world.manager.add_adapter(ADAPTERS[name])
            world.manager.prepare([name]).close()
        assert_close(world.serve(NAMES), world.expected([name for name in NAMES for _ in range(3)], world.x))


@pytest.mark.parametrize("style", ["methods", "bare ragged_dot"])
def test_packed_rows(style):
    world, counts = world_of(style), [1, 4, 0, 2, 3, 1, 2]
    x = jax.random.normal(jax.random.key(2), (sum(counts) + 2, HIDDEN))  # and two rows of padding
    found = world.serve(NAMES, x, token_counts=counts, pad_to=len(x))
    names = [name for name, count in zip(NAMES, counts, strict=True) for _ in range(count)] + [None, None]
    assert_close(found, world.expected(names, x))


@pytest.mark.slow
def test_verify_agrees():
    world = world_of("methods")
    report = world.manager.verify(serve, world.x)
    assert len(report.checked) == len(world.manager.layers())
    assert not report.unserved


@pytest.mark.parametrize("style", ["interleaved", "scanned"])
def test_an_exported_adapter_equals_the_loaded_one(style):
    world = world_of(style)
    world.serve(NAMES)
    found = world.manager.export_adapter("some")
    assert found.modules.keys() == ADAPTERS["some"].modules.keys()
    for name, module in ADAPTERS["some"].modules.items():
        np.testing.assert_allclose(found.modules[name].a, module.a, rtol=1e-6)
        np.testing.assert_allclose(found.modules[name].b, module.b, rtol=1e-6)


@pytest.mark.parametrize("style", ["methods", "scanned"])
def test_unwrap_restores_the_model(style):
    model = STYLES[style](nnx.Rngs(0))

    def seen():
        modules = [module for _, module in nnx.iter_graph(model) if isinstance(module, nnx.Module)]
        return [(type(module), sorted(vars(module))) for module in modules]

    before, state = seen(), jax.tree.leaves(nnx.state(model))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    assert seen() != before
    manager.unwrap()
    assert seen() == before
    for mine, theirs in zip(jax.tree.leaves(nnx.state(model)), state, strict=True):
        assert mine is theirs


# --- adapters that do not fit ---------------------------------------------------------------------------------------


def small(cls=Seams, **config):
    model = Model(cls, nnx.Rngs(0))
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2, **config))


@pytest.fixture(scope="module")
def manager():
    return small()


@pytest.fixture
def ragged():
    return small(Ragged)


def adapter_of(modules):
    arrays = {name: (np.ones(a, np.float32), np.ones(b, np.float32)) for name, (a, b) in modules.items()}
    return jlora.Adapter.from_arrays("bad", arrays, alpha=1)


@pytest.mark.parametrize(
    ("name", "shapes", "message"),
    [
        ("layers.0.experts.5.gate_proj", ((2, 8), (6, 2)), "5 experts, and the name has no expert index below that"),
        ("layers.0.experts.01.gate_proj", ((2, 8), (6, 2)), "the model has no module"),
        ("layers.0.experts.1.gate_proj", ((2, 6), (8, 2)), "A and B have shapes"),
        ("layers.0.experts.1.gate_proj", ((3, 8), (6, 3)), "rank 3 is above max_lora_rank=2"),
        ("layers.0.experts.1.w9", ((2, 8), (6, 2)), "the model has no module"),
    ],
)
def test_modules_that_fit_no_expert_are_refused(manager, name, shapes, message):
    with pytest.raises(AdapterMismatchError, match=message):
        manager.add_adapter(adapter_of({"layers.0.gate": ((2, 8), (5, 2)), name: shapes}))
    assert not manager.list_adapters()


def test_an_excluded_product_serves_the_base():
    manager = small(Ragged, target_modules=["down_proj"])
    assert wrapped_paths(manager) == ["layers.0.experts.w2", "layers.1.experts.w2"]
    with pytest.raises(AdapterMismatchError, match="not among the configured target_modules"):
        manager.add_adapter(adapter_of({"layers.0.experts.0.gate_proj": ((2, 8), (6, 2))}))
    manager.add_adapter(make_adapter("down", 0, projections=("down_proj",), router=False))
    x = jax.random.normal(jax.random.key(0), (2, 3, HIDDEN))
    with manager.prepare(["down", None]) as batch:
        found = np.asarray(serve(manager.model, x, batch))
    down = make_adapter("down", 0, projections=("down_proj",), router=False)
    assert_close(found, reference(manager.model, x.reshape(-1, HIDDEN), [down] * 3 + [None] * 3).reshape(x.shape))


def test_ranks_are_configured_for_each_layer():
    model = Model(Seams, nnx.Rngs(0))
    manager = jlora.LoRAManager(
        model, jlora.LoRAConfig(max_loras=2, max_lora_rank={"*": 8, "experts": 2, "experts.wo": 3})
    )
    manager.add_adapter(make_adapter("down", 0, projections=("down_proj",), rank=3))
    with pytest.raises(AdapterMismatchError, match="rank 3 is above max_lora_rank=2"):
        manager.add_adapter(make_adapter("x", 0, rank=3))
    with pytest.raises(AdapterMismatchError, match="rank 4 is above max_lora_rank=3"):
        manager.add_adapter(make_adapter("x", 0, projections=("down_proj",), rank=4))
    manager.add_adapter(adapter_of({"layers.0.gate": ((8, HIDDEN), (EXPERTS, 8))}))
    with pytest.raises(LoRAUsageError, match=r"max_lora_rank \['expert'\] match no layer"):
        jlora.LoRAManager(Model(Seams, nnx.Rngs(0)), jlora.LoRAConfig(max_loras=1, max_lora_rank={"*": 8, "expert": 2}))


# --- specs of a class -----------------------------------------------------------------------------------------------


class Own(Ragged):
    """A class that each test registers with its own spec."""


def linear(k=HIDDEN, n=2 * INNER, param="w13"):
    return jlora.LinearSpec(k, n, param=param)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: jlora.ExpertsSpec(0, {"gate_up": linear()}), "experts must be a positive int"),
        (lambda: jlora.ExpertsSpec(5, {}), "products must map"),
        (lambda: jlora.ExpertsSpec(5, {"middle": linear()}), "names must say what checkpoints call"),
        (lambda: jlora.ExpertsSpec(4, {"gate_up": linear()}), "says 4 experts before its axes"),
        (lambda: jlora.ExpertsSpec(5, {"gate_up": linear(n=INNER)}), "has 8 features in and 12 out"),
        (lambda: jlora.ExpertsSpec(5, {"gate_up": linear(param="w")}), "names the parameter 'w'"),
        (lambda: jlora.ExpertsSpec(5, {"gate_up": linear()}, gathers=["down"]), "gathers must list names of products"),
        (lambda: jlora.ExpertsSpec(5, {"gate_up": linear()}, alternating=["up"]), "alternating must list names"),
        (lambda: jlora.ExpertsSpec(5, {"gate_up": linear()}, names={"gate_up": [["a"], ["b"], ["c"], ["d"], ["e"]]}),
         "no 5 slices of one size"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("registered", "unchecked_calls")
def test_a_spec_that_contradicts_its_class_leaves_the_layer_unwrapped(spec, message):
    jlora.register_layer(Own, lambda layer: spec())
    layers = small(Own).layers()
    assert [layer.path for layer in layers if layer.wrapped] == ["layers.0.gate", "layers.1.gate"]
    (reason,) = {layer.reason for layer in layers if not layer.wrapped}
    assert re.search(message, reason or "")


@pytest.mark.usefixtures("registered")
def test_a_product_that_is_a_method_needs_rows():
    class Methods(Seams):
        grouped_products = None

    jlora.register_layer(Methods, lambda layer: jlora.ExpertsSpec(5, {"gate_up": linear(param="wi")}))
    manager = small(Methods)
    with manager.prepare([None]) as batch, pytest.raises(LoRAError, match="has no `rows`"):
        jax.eval_shape(serve, manager.model, jnp.ones((1, 2, HIDDEN)), batch)


@pytest.mark.parametrize("said", [{"gate_up": "nothing"}, {"gate_up": "plain"}, "wi"])
def test_malformed_grouped_products_are_ignored(said):
    class Other(nnx.Module):
        def __init__(self):
            self.plain = nnx.Param(jnp.ones((2, 2)))
            self.linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Holder(nnx.Module):
        def __init__(self):
            self.other = Other()

    Other.grouped_products = said
    manager = jlora.LoRAManager(Holder(), jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    assert wrapped_paths(manager) == ["other.linear"]


def test_a_subclass_that_overrides_a_product_is_not_wrapped():
    class Louder(OneHot):
        def down(self, x, token):
            return 2 * super().down(x, token)

    (reason,) = {layer.reason for layer in small(Louder).layers() if not layer.wrapped}
    assert "Louder overrides the down of OneHot" in (reason or "")


@pytest.mark.usefixtures("unchecked_calls")
def test_row_maps_and_arrays_that_do_not_fit_the_product_are_refused(ragged):
    layer, source, expert = ragged.model.layers[0].experts, jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 2, 3])
    rows = jlora.RowMap(source, of="tokens", length=2, expert=expert)
    fewer = jlora.RowMap(source[1:], of="tokens", length=2, expert=expert[1:])
    x, y = jnp.ones((4, 8)), jnp.ones((4, 12))
    for arguments, error, message in (
        ((x, y, jlora.RowMap(source, of="tokens", length=2)), LoRAUsageError, "RowMap with `expert`"),
        ((x, y, fewer), LoRAUsageError, "a RowMap of 3 rows"),
        ((x[:, 1:], y, rows), LoRAError, r"takes \[..., 8\] floats, found float32\[4, 7\]"),
        ((x.astype(int), y, rows), LoRAError, "floats, found int32"),
        ((x, y[:, 6:], rows), LoRAError, r"returned \[..., 12\] floats, found float32\[4, 6\]"),
        ((x, jnp.ones((5, 12)), rows), LoRAError, "expected as many rows"),
    ):
        with ragged.prepare([None]) as batch, jlora.use(batch, without=["*"]), pytest.raises(error, match=message):
            jlora.expert_delta(layer, "gate_up", *arguments)


@pytest.mark.parametrize(("packed", "rows"), [(False, 4), (True, 6)])
@pytest.mark.usefixtures("unchecked_calls")
def test_a_product_that_gathers_takes_all_tokens(packed, rows):
    manager, of = small(Gathering), jnp.zeros(3, jnp.int32)
    where = Rows(of, of, jnp.array([3, 0, 0, 0, 0], jnp.int32), None if packed else 2)
    counts = {"token_counts": [4, 2]} if packed else {}

    def gate_up(model, x, batch):
        with jlora.use(batch, without=["*"]):
            return model.layers[0].experts.gate_up(x, where)

    with manager.prepare([None, None], **counts) as batch:
        assert jax.eval_shape(gate_up, manager.model, jnp.ones((rows, HIDDEN)), batch).shape == (3, 2 * INNER)
        for other in (rows - 1, rows + 1):
            with pytest.raises(LoRAError, match=f"gathers its rows from all {rows} tokens"):
                jax.eval_shape(gate_up, manager.model, jnp.ones((other, HIDDEN)), batch)


def test_expert_delta_returns_the_base_unwrapped_and_raises_outside_a_scope(ragged):
    y = jnp.ones((4, 12))
    rows = jlora.RowMap(jnp.zeros(4, jnp.int32), of="tokens", length=2, expert=jnp.zeros(4, jnp.int32))
    assert jlora.expert_delta(Ragged(nnx.Rngs(0)), "gate_up", jnp.ones((4, 8)), y, rows) is y
    with pytest.raises(LoRAError, match=r"called outside `jlora\.use`"):
        jlora.expert_delta(ragged.model.layers[0].experts, "gate_up", jnp.ones((4, 8)), y, rows)


def test_rows_of_experts_elsewhere_and_tokens_outside_take_no_adapter(ragged):
    ragged.add_adapter(make_adapter("all", 0))
    x, y = normal(4, 8), normal(4, 12, seed=1)
    source, expert = np.array([0, -1, 1, 4]), np.array([5, 0, -1, 1])

    @jax.jit
    def step(model, source, expert, batch):
        rows = jlora.RowMap(source, of="tokens", length=2, expert=expert)
        with jlora.use(batch, without=["*"]):
            return jlora.expert_delta(model.layers[0].experts, "gate_up", jnp.asarray(x), jnp.asarray(y), rows)

    with ragged.prepare(["all", "all"]) as batch:
        np.testing.assert_array_equal(step(ragged.model, source, expert, batch), y)
        served = step(ragged.model, source.clip(0, 3), expert.clip(0, 4), batch)
    assert (np.asarray(served) != np.asarray(y)).all()


def test_a_dense_layer_refuses_a_row_map_of_experts(manager):
    x = jnp.ones((1, 2, HIDDEN))
    rows = jlora.RowMap(jnp.zeros(2, jnp.int32), expert=jnp.zeros(2, jnp.int32))
    refused = pytest.raises(LoRAUsageError, match="for the products of experts")
    with manager.prepare([None]) as batch, jlora.use(batch, without=["*"]), refused, jlora.rows(rows):
        manager.model.layers[0].gate(x)


@pytest.mark.parametrize("expert", [jnp.zeros(3, jnp.int32), jnp.zeros(2)])
@pytest.mark.usefixtures("unchecked_calls")
def test_row_maps_with_malformed_experts_are_refused(expert):
    with pytest.raises(LoRAUsageError, match=r"RowMap.expert must be integers \[2\]"):
        jlora.RowMap(jnp.zeros(2, jnp.int32), expert=expert)

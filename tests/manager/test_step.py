"""`LoRAManager.jit`: values are current, the structure is fixed, and the rest is as under `jax.jit`."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from tests.compiled import compiled_programs
from tests.manager.tiny import SEQUENCES, WIDTH, make_adapter, make_world


def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def made():
    world = make_world()
    world.forward = world.manager.jit(forward)
    return world


@pytest.fixture(scope="module")
def world():
    return made()


def check(world, names):
    adapters = [None if name is None else make_adapter(name) for name in names]
    world.check(world.serve(names), adapters)


def test_weights_and_swaps_are_seen_and_one_program_is_compiled():
    world = made()
    world.load(*"abc")
    check(world, ["a", "b", None])
    check(world, ["c", None, "a"])  # swapped
    layer = world.model.layers[0].o_proj
    layer.kernel.set_value(2 * layer.kernel.get_value())
    check(world, ["c", None, "a"])
    layer.kernel = nnx.Param(-layer.kernel.get_value())  # another object at the path
    check(world, ["c", None, "a"])
    layer.kernel.set_value(3 * layer.kernel.get_value())  # followed
    check(world, ["c", None, "a"])
    nnx.update(world.model, jax.tree.map(lambda x: x + 0, nnx.state(world.model, nnx.Param)))
    world.model.layers[1] = nnx.clone(world.model.layers[1])  # slots of the copy are not written any more
    world.model.layers[1].o_proj.bias.set_value(jnp.ones(WIDTH))
    check(world, [None, None, None])
    assert compiled_programs(world.forward) == 1


class Odd(nnx.Module):
    """Variables and attributes that are not single arrays, and a layer that two paths reach."""

    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.again = self.first
        self.raw = nnx.data(jnp.ones(WIDTH))
        self.pair = nnx.Param((jnp.ones(WIDTH), jnp.full(WIDTH, 2.0)), hijax=False, ref=False)
        self.others = nnx.data([nnx.Linear(WIDTH, WIDTH, rngs=rngs), {"bias": nnx.Param(jnp.ones(WIDTH))}])

    def __call__(self, x):
        low, high = self.pair.get_value()
        x = self.again(self.first(x)) * (self.raw * low)[None] + high[None]
        return self.others[0](x) + self.others[1]["bias"][...][None]


class OldStyle(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.layers = [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def served(model):
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=2))
    return manager, manager.jit(forward), np.random.default_rng(0).normal(size=(SEQUENCES, WIDTH)).astype(np.float32)


@pytest.mark.parametrize(("kind", "defaults"), [(Odd, {}), (Odd, {"hijax": True}), (OldStyle, {"ref": True})])
def test_kinds_of_variables_and_modules(kind, defaults):
    with nnx.var_defaults(**defaults) if defaults else contextlib.nullcontext():
        model = kind(nnx.Rngs(0))
    plain = kind(nnx.Rngs(0))
    manager, step, x = served(model)
    with manager.prepare([None] * SEQUENCES) as batch:
        np.testing.assert_allclose(step(model, x, batch), plain(x), rtol=1e-5)
        kernel = (model.first if kind is Odd else model.layers[1]).kernel
        kernel.set_value(2 * kernel.get_value())
        (plain.first if kind is Odd else plain.layers[1]).kernel.set_value(kernel.get_value())
        if kind is Odd:
            model.raw = plain.raw = 3 * plain.raw
            own = model.others[1]["bias"]
            model.others[1]["bias"] = nnx.Param(jnp.zeros(WIDTH), hijax=own.hijax, ref=own.ref)
            plain.others[1]["bias"] = nnx.Param(jnp.zeros(WIDTH))
        np.testing.assert_allclose(step(model, x, batch), plain(x), rtol=1e-5)


@dataclasses.dataclass
class Pair:
    """A container that JAX flattens."""

    low: object
    high: object
    sign: int = 1


jax.tree_util.register_dataclass(Pair, ("low", "high"), ("sign",))


class Bag:
    """A container whose children are no attributes."""

    def __init__(self, items):
        self.items = list(items)


jax.tree_util.register_pytree_node(Bag, lambda bag: (tuple(bag.items), len(bag.items)), lambda _, items: Bag(items))


class Small(nnx.Module):
    """A linear layer, and a container of arrays."""

    def __init__(self, held):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
        self.held = nnx.data(held)

    def __call__(self, x):
        return self.linear(x)


class Plain(nnx.Module, pytree=False):
    def __init__(self, low, high):
        self.low, self.high = nnx.Param(low), nnx.Param(high)


def values_of(held):
    """The values of a container, in order of their names."""
    if isinstance(held, Bag):
        held = held.items
    elif isinstance(held, Pair | Plain):
        held = {"low": held.low, "high": held.high}
    found = held if isinstance(held, list) else [held[key] for key in sorted(held)]
    return [one[...] if isinstance(one, nnx.Variable) else one for one in found]


def exchange(held):
    """Give both names in a container the value of the other; the order of the values stays."""
    own = held if isinstance(held, dict) else vars(held)
    low, high = own.pop("low"), own.pop("high")
    own["high"], own["low"] = low, high


def exchange_attributes(held):
    low, high = held.low, held.high
    del held.low, held.high
    held.high, held.low = low, high


def pair_of_floats():
    return {"low": jnp.full((), 1.0), "high": jnp.full((), 5.0)}


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Pair(**pair_of_floats()), lambda held: setattr(held, "low", jnp.full((), 7.0))),
        (lambda: Pair(*map(nnx.Param, pair_of_floats().values())), exchange),
        (lambda: Pair(**pair_of_floats()), exchange),
        (pair_of_floats, exchange),
        (lambda: nnx.Dict(pair_of_floats()), exchange_attributes),
        (lambda: Plain(**pair_of_floats()), exchange),
        (lambda: Bag(pair_of_floats().values()), lambda held: held.items.reverse()),
        (lambda: [*pair_of_floats().values()], lambda held: held.reverse()),
    ],
)  # fmt: skip
def test_changes_in_containers_are_seen(make, change):
    model = Small(make())
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=1))
    step = manager.jit(lambda model: values_of(model.held))
    before = step(model)
    assert before == values_of(model.held)
    change(model.held)
    assert values_of(model.held) != before
    assert step(model) == values_of(model.held)
    assert step(model) == values_of(model.held)
    assert compiled_programs(step) == 1


def other_option(model):
    model.layers[0].o_proj.use_bias = False


def other_type(model):
    model.embed.embedding = nnx.Variable(model.embed.embedding.get_value())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "head", nnx.Linear(WIDTH, 4, rngs=nnx.Rngs(0))), r"added: head.bias, head.ker"),
        (lambda model: model.layers.append(nnx.clone(model.layers[0])), r"added: layers.2"),
        (lambda model: model.layers.pop(), r"removed: layers.1"),
        (other_option, "static attribute"),
        (other_type, "type or metadata"),
    ],
)
def test_changed_structure_is_refused_until_it_is_restored(world, change, message):
    check(world, [None] * SEQUENCES)
    with world.manager.prepare([None] * SEQUENCES) as batch:
        before = world.logits(batch)
        modules = [node for _, node in nnx.iter_graph(world.model) if isinstance(node, nnx.Module)]
        held = [dict(vars(module)) for module in modules]
        change(world.model)
        for _ in range(2):
            with pytest.raises(jlora.LoRAUsageError, match=message):
                world.logits(batch)
        for module, attributes in zip(modules, held, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        np.testing.assert_array_equal(world.logits(batch), before)
    assert compiled_programs(world.forward) == 1


def test_other_models_and_outer_functions_are_refused():
    world = made()
    with world.manager.prepare([None] * SEQUENCES) as batch:
        for other in (nnx.clone(world.model), nnx.state(world.model)):
            with pytest.raises(jlora.LoRAUsageError, match="takes the model of its manager as its first argument"):
                world.forward(other, world.tokens, batch)
        with pytest.raises(jlora.LoRAUsageError, match=r"called inside jax\.jit"):
            jax.jit(lambda tokens, batch: world.forward(world.model, tokens, batch))(world.tokens, batch)
        world.logits(batch)
    world.manager.unwrap()
    with pytest.raises(jlora.LoRAError, match="gave its model back"):
        world.forward(world.model, world.tokens, batch)


class Changing(nnx.Module):
    """A module that changes itself when it is called."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        y = self.project(self.norm(x)) + self.count[...]
        self.seen = nnx.Intermediate(y)
        return y, nnx.state(self, nnx.BatchStat), self.count[...]


def test_changes_inside_are_lost_and_may_be_returned_as_under_jax_jit():
    model = Changing(nnx.Rngs(0))
    manager, step, x = served(model)
    before = jax.tree.map(np.asarray, nnx.state(model))
    with manager.prepare([None] * SEQUENCES) as batch:
        for _ in range(2):
            got, want = step(model, x, batch), jax.jit(forward)(model, x, batch)
            jax.tree.map(np.testing.assert_array_equal, got, want)
            assert got[2] == 1
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert not hasattr(model, "seen")


def decode(model, tokens, cache, batch, *, scale=1, double=False):
    with jlora.use(batch):
        return model(tokens) * scale * (1 + double) + cache, cache + 1


def test_positions_and_names_are_those_of_the_function(world):
    options = {"donate_argnums": 2, "static_argnames": ("scale", "double")}
    step = world.manager.jit(decode, **options, compiler_options={"xla_backend_optimization_level": 0})
    with world.manager.prepare([None] * SEQUENCES) as batch:
        caches = jnp.zeros(()), jnp.zeros(())
        logits, _ = step(world.model, world.tokens, caches[0], batch)
        twice, _ = step(world.model, world.tokens, batch=batch, cache=caches[1], double=True)
    np.testing.assert_allclose(twice, 2 * logits, rtol=1e-5)
    assert all(cache.is_deleted() for cache in caches)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(world.model)))
    assert compiled_programs(step) == 2
    assert step.__name__ == "decode"


def test_arguments_may_have_any_name(world):
    step = world.manager.jit(lambda model, values, self: values - self)
    assert step(world.model, values=jnp.ones(()), self=jnp.zeros(())) == 1
    assert step.trace(world.model, self=jnp.zeros(()), values=jnp.ones(())).out_info.shape == ()
    assert step.lower(world.model, self=jnp.zeros(()), values=jnp.ones(())).out_info.shape == ()
    donating = world.manager.jit(lambda model, self: self + 1, donate_argnames="self")
    donated = jnp.zeros(())
    assert donating(world.model, self=donated) == 1
    assert donated.is_deleted()


@pytest.mark.parametrize(
    "options",
    [{"donate_argnums": 0}, {"donate_argnums": (1, 0)}, {"donate_argnums": -4}, {"donate_argnames": "model"},
     {"static_argnums": (0,)}, {"static_argnames": ["model", "scale"]}],
)  # fmt: skip
def test_donated_or_static_model_is_refused(world, options):
    with pytest.raises(jlora.LoRAUsageError, match=rf"jit\({next(iter(options))}=.*names the model"):
        world.manager.jit(decode, **options)


def test_functions_options_and_calls_that_do_not_fit(world):
    with pytest.raises(jlora.LoRAUsageError, match="whose first argument is the model"):
        world.manager.jit(lambda *, model: model)
    for options in ({"donate_argname": "cache"}, {"static_argnames": "scael"}, {"donate_argnums": 9}):
        with pytest.raises((TypeError, ValueError), match=r"donate_argname|scael|donate_argnums"):
            world.manager.jit(decode, **options)
    for call in (world.forward, world.forward.lower):
        with pytest.raises(jlora.LoRAUsageError, match=r"by position, and got none: call step\(manager\.model"):
            call(model=world.model, tokens=world.tokens, batch=None)


def test_programs_are_lowered_and_options_reach_the_compiler(world):
    assert isinstance(world.forward, jax.stages.Wrapped)
    dropped = world.manager.jit(forward, compiler_options={"xla_no_such_option": None})
    lowered = dropped.lower(world.model, world.tokens, None)
    assert lowered.out_info.shape == dropped(world.model, world.tokens, None).shape
    assert lowered.compile().memory_analysis().argument_size_in_bytes > 0
    step = world.manager.jit(forward, compiler_options={"xla_no_such_option": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step(world.model, world.tokens, None)


def test_shardings_of_arguments():
    world = made()
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    nnx.update(world.model, jax.device_put(nnx.state(world.model), whole))
    step = world.manager.jit(forward, in_shardings=(None, split, None), out_shardings=split)
    world.manager.add_adapter(make_adapter("a"))
    with world.manager.prepare(["a", None, "a"]) as batch:
        logits = step(world.model, np.asarray(world.tokens), batch)
    assert logits.sharding.is_equivalent_to(split, logits.ndim)
    world.check(np.asarray(logits), [make_adapter("a"), None, make_adapter("a")])

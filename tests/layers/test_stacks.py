"""Layers stacked for `nnx.scan` and `nnx.vmap`, with parameters on any axis and slots on axis 0."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAError
from tests.layers.merging import (
    Target,
    assert_close,
    check_against_merged,
    expected_rows,
    make_adapter,
    make_dora,
    make_manager,
    merge,
    normal,
    serve,
    wrapped_paths,
)
from tests.matrix import thinned

pytestmark = pytest.mark.usefixtures("registered")

D, HEADS, SIZE = 6, 2, 3
X = normal(3, 2, D)


class Einsum(nnx.Module):
    """An einsum class of a user, whose kernel holds its heads first."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (HEADS, D, SIZE)))

    def __call__(self, x):
        return jnp.einsum("BTD,NDH->BTNH", x, self.w[...])


class Heads(nnx.Module):
    """An attention without scores, in a stack with its parameters on `axis`."""

    def __init__(self, layers, axis):
        def make(rngs):
            return nnx.Dict(
                q=nnx.LinearGeneral(D, (HEADS, SIZE), rngs=rngs),
                k=nnx.Einsum("BTD,NDH->BTNH", (HEADS, D, SIZE), rngs=rngs),
                own=Einsum(rngs),
                o=nnx.LinearGeneral((HEADS, SIZE), D, axis=(-2, -1), rngs=rngs),
            )

        self.axes = nnx.StateAxes({nnx.Param: axis, jlora.SlotParam: 0, ...: None})
        self.layers = nnx.vmap(make, out_axes=nnx.StateAxes({nnx.Param: axis, ...: None}))(nnx.Rngs(0).split(layers))
        self.head = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    def __call__(self, x):
        def apply(layer, x):
            return x + layer["o"](jnp.tanh(layer["q"](x) + layer["k"](x) + layer["own"](x)))

        return self.head(nnx.scan(apply, in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x))


def heads_first(delta):
    return delta.reshape(HEADS, SIZE, D).swapaxes(1, 2)


def targets(layers, axis):
    """Return the modules of the checkpoint, layer by layer."""
    found = []
    for i in range(layers):
        at = (*[slice(None)] * axis, i)
        found += [
            Target(f"layers.{i}.q", D, HEADS * SIZE, "layers.q.kernel", at=at),
            Target(f"layers.{i}.k", D, HEADS * SIZE, "layers.k.kernel", heads_first, at),
            Target(f"layers.{i}.own", D, HEADS * SIZE, "layers.own.w", heads_first, at),
            Target(f"layers.{i}.o", HEADS * SIZE, D, "layers.o.kernel", at=at),
        ]
    return found


def register(letters="NDH"):
    axis = letters.find("L")
    shape = (lambda layer: layer.w.shape) if axis >= 0 else lambda layer: (HEADS, D, SIZE)
    jlora.register_layer(Einsum, lambda layer: jlora.einsum_spec(f"BTD,{letters}->BTNH", shape(layer), "w"))


# With as many layers as heads, two axes fit.
@pytest.mark.parametrize(
    ("layers", "axis", "letters"), [(2, 0, "LNDH"), (2, 1, "NLDH"), (2, 1, "NDH"), (4, 0, "LNDH"), (4, 1, "NDH")]
)
def test_a_stack_on_any_axis_serves_adapters(layers, axis, letters):
    register(letters)
    of = targets(layers, axis)
    check_against_merged(Heads(layers, axis), of, X)


def test_dora_of_a_stack_on_axis_1():
    register("NLDH")
    of = targets(3, 1)
    adapters = [make_dora("one", of, 3), make_dora("two", of[:5], 2)]
    check_against_merged(Heads(3, 1), of, X, adapters=adapters, variants=["dora"])


@pytest.mark.parametrize("options", thinned([{}, {"variants": ["dora"]}, {"dtype": "int8"}], 0))
@pytest.mark.parametrize("layers", thinned([HEADS, 3, D], 0))  # as many as heads, and as features
def test_verify_of_a_stack_on_axis_1(layers, options):
    register()
    manager = make_manager(Heads(layers, 1), **options)
    assert set(manager.verify(serve, X).checked) == {*(f"layers.{name}" for name in ("q", "k", "own", "o")), "head"}


class Square(nnx.Module):
    """A stack whose shapes alone do not show its axis."""

    def __init__(self, axis, layers=D):
        make = nnx.vmap(lambda rngs: nnx.Linear(D, D, use_bias=False, rngs=rngs), out_axes=axis)
        self.axes = nnx.StateAxes({nnx.Param: axis, jlora.SlotParam: 0, ...: None})
        self.layers = make(nnx.Rngs(0).split(layers))

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


def spec_of_axis(axis):
    return lambda layer: jlora.LinearSpec(D, D, stack_axis=axis)


@pytest.mark.parametrize(("axis", "given"), [(0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (2, 0)])
def test_a_wrong_axis_that_fits_is_found_by_verify(axis, given):
    jlora.register_layer(nnx.Linear, spec_of_axis(given))
    manager = make_manager(Square(axis))
    if given == axis:
        assert manager.verify(serve, X).checked == ("layers",)
    else:
        with pytest.raises(LoRAError, match=r"verify: layers"):
            manager.verify(serve, X)


@pytest.mark.parametrize(
    ("given", "said"), [(0, "without axis 0 of a stack has 3 features in"), (3, "the stack_axis 3")]
)
def test_a_wrong_axis_that_does_not_fit_is_refused(given, said):
    jlora.register_layer(nnx.Linear, spec_of_axis(given))
    with pytest.raises(LoRAError, match=re.escape(said)):
        make_manager(Square(1, layers=3))


class Pair(nnx.Module):
    def __init__(self, axis):
        make = nnx.vmap(lambda rngs: nnx.LinearGeneral(D, (3, 3), rngs=rngs), out_axes=axis)
        self.layers = make(nnx.Rngs(0).split(3))
        self.head = nnx.Linear(D, D, rngs=nnx.Rngs(1))


def test_an_axis_that_no_shape_shows_is_refused_by_name():
    manager = make_manager(Pair(1))
    (reason,) = [layer.reason for layer in manager.layers() if not layer.wrapped]
    assert "fits as a stack of 3 layers on axis 1 or 2 or 3: LinearSpec(stack_axis=)" in reason


@pytest.mark.slow
def test_exchanged_heads_are_found_by_verify():
    def exchanged(layer):
        return jlora.einsum_spec("BTD,NLDH->BTNH", layer.w.shape, "w", out_index=[3, 4, 5, 0, 1, 2])

    class Other(Einsum):
        def __call__(self, x):
            return super().__call__(x)[..., ::-1, :]

    jlora.register_layer(Einsum, exchanged)
    model = Heads(3, 1)
    of = [t for t in targets(3, 1) if t.name.endswith(".own")]
    moved = [
        Target(t.name, t.k, t.n, t.param, lambda delta: heads_first(np.roll(delta, SIZE, axis=0)), t.at) for t in of
    ]
    check_against_merged(model, moved, X)
    register("NLDH")
    jlora.register_layer(Other, lambda layer: jlora.einsum_spec("BTD,NLDH->BTNH", layer.w.shape, "w"))
    object.__setattr__(model.layers["own"], "__class__", Other)
    with pytest.raises(LoRAError, match=r"layers\.own"):
        make_manager(model).verify(serve, X)


def twice(make):
    """Return layers that are scanned twice, with parameters stacked on axes 1 and 2."""
    inner = nnx.vmap(make, out_axes=nnx.StateAxes({nnx.Param: 1, ...: None}))
    outer = nnx.vmap(inner, out_axes=nnx.StateAxes({nnx.Param: 2, ...: None}))
    return outer(nnx.Rngs(0).split((3, 2)))


def test_layers_that_are_scanned_twice_are_refused_by_name():
    class Twice(nnx.Module):
        def __init__(self):
            self.layers = twice(lambda rngs: nnx.LinearGeneral(D, (HEADS, SIZE), use_bias=False, rngs=rngs))
            self.head = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    manager = make_manager(Twice())
    (reason,) = [layer.reason for layer in manager.layers() if layer.path == "layers"]
    assert re.search(r"shape \(6, 2, 3, 2, 3\): several axes .* a scan inside of a scan", reason)
    with pytest.raises(AdapterMismatchError, match="a scan inside of a scan"):
        manager.add_adapter(make_adapter("x", [Target("layers.0.1", D, HEADS * SIZE, "")], 2))


@pytest.mark.parametrize("transform", [nnx.scan, nnx.vmap])
@pytest.mark.parametrize("max_loras", [3, 2])  # as many slots as layers, whose cut slots have the right shapes, or not
def test_slots_that_are_cut_on_axis_1_raise(transform, max_loras):
    """All state is mapped over axis 1, slots too."""

    class All(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Linear(D, D, use_bias=False, rngs=rngs), out_axes=1)
            self.layers = make(nnx.Rngs(0).split(3))

        def __call__(self, x):
            if transform is nnx.scan:
                return nnx.scan(lambda layer, x: layer(x), in_axes=(1, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)
            return nnx.vmap(lambda layer, x: layer(x), in_axes=(1, None))(self.layers, x).sum(0)

    model = All()
    jax.jit(lambda model, x: model(x))(model, X)  # the model itself is right
    manager = make_manager(model, max_loras=max_loras)
    with manager.prepare([None] * 3) as batch, pytest.raises(ValueError, match="axis 1"):
        serve(model, X, batch)


def test_heads_of_an_absorbed_projection_as_a_stack():
    """The kernel [A, N, H] has its batch axis between, and one pair of factors for each head."""

    class Absorbed(nnx.Module):
        def __init__(self):
            make = nnx.vmap(lambda rngs: nnx.Linear(D, SIZE, use_bias=False, rngs=rngs), out_axes=1)
            self.heads = make(nnx.Rngs(0).split(4))

        def __call__(self, x):
            axes = nnx.StateAxes({nnx.Param: 1, jlora.SlotParam: 0, ...: None})
            return nnx.vmap(lambda head, x: head(x), in_axes=(axes, None), out_axes=2)(self.heads, x)

    of = [Target(f"heads.{i}", D, SIZE, "heads.kernel", at=(slice(None), i)) for i in range(4)]
    check_against_merged(Absorbed(), of, X)


class Experts(nnx.Module):
    """Two experts, whose rows are the tokens of each sequence in turns."""

    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (2, D, D)) / D)

    def __call__(self, x):
        experts = jnp.tile(jnp.arange(2), x.shape[0])
        y = jnp.einsum("rk,rkn->rn", x.reshape(-1, D), self.w[...][experts])
        rows = jlora.RowMap(jnp.arange(len(experts)), of="tokens", length=2, expert=experts)
        return jlora.expert_delta(self, "up", x.reshape(-1, D), y, rows).reshape(x.shape)


def test_experts_of_a_stack_on_axis_1():
    """The kernel is [E, layers, K, N], as in MaxText's mixtures."""

    class Mixture(nnx.Module):
        def __init__(self):
            self.axes = nnx.StateAxes({nnx.Param: 1, jlora.SlotParam: 0, ...: None})
            self.mlp = nnx.vmap(Experts, out_axes=nnx.StateAxes({nnx.Param: 1, ...: None}))(nnx.Rngs(0).split(3))

        def __call__(self, x):
            run = nnx.scan(lambda layer, x: x + layer(x), in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)
            return run(self.mlp, x)

    jlora.register_layer(Experts, lambda layer: jlora.ExpertsSpec(2, {"up": jlora.LinearSpec(D, D, "w")}))
    of = [Target(f"mlp.{i}.{e}.up_proj", D, D, "mlp.w", at=(e, i)) for i in range(3) for e in range(2)]
    manager = check_against_merged(Mixture(), of, X, expert_slots=None)
    assert wrapped_paths(manager) == []


def test_a_scaled_kernel_takes_adapters_of_the_checkpoint():
    """The model holds a quarter of the checkpoint's kernel."""
    jlora.register_layer(nnx.Linear, lambda layer: jlora.LinearSpec(D, D, bias=None, scale=0.25))
    of = [Target(f"layers.{i}", D, D, "layers.kernel", lambda delta: delta.T / 4, (slice(None), i)) for i in range(3)]
    model = Square(1, layers=3)
    check_against_merged(model, of, X)
    dora, plain = make_dora("one", of, 3), [dataclasses.replace(target, into=np.transpose) for target in of]
    quarters = {
        name: dataclasses.replace(m, scaling=m.scaling / 4, vectors={"dora": m.vectors["dora"] / 4})
        for name, m in dora.modules.items()
    }
    twins = {"one": merge(model, plain, dataclasses.replace(dora, modules=quarters)), None: nnx.clone(model)}
    manager, names = make_manager(model, [dora], variants=["dora"]), ["one", None, "one"]
    with manager.prepare(names) as batch:
        assert_close(serve(model, X, batch), expected_rows(twins, names, X))
    np.testing.assert_array_equal(manager.export_adapter("one").modules["layers.0"].b, dora.modules["layers.0"].b)
    manager.unwrap()
    assert make_manager(model, dtype="int8").verify(serve, X).checked == ("layers",)

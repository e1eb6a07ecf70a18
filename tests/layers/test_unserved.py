"""Layers that cannot be served: the others are served, and adapters with weights for them raise the reason."""

import dataclasses
import re

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
from tests.layers.merging import (
    Target,
    assert_close,
    check_against_merged,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    serve,
    wrapped_paths,
)
from tests.layers.mesh_models import mesh_of, placed

pytestmark = pytest.mark.usefixtures("registered")

D = 6
PROJ = Target("proj", D, D, "proj.kernel")
ODD = make_adapter("odd", [Target("odd", D, D, "")], 2)
X = normal(3, 2, D)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Quantised:
    """A kernel replaced by an attribute that is no `nnx.Variable`, as quantisers do."""

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self):
        return self.values.shape

    def __getitem__(self, index):
        return (self.values * self.scale)[index]


nnx.register_data_type(Quantised)


def quantised(rngs):
    layer = nnx.Linear(D, D, rngs=rngs)
    kernel = layer.kernel[...]
    del layer.kernel
    layer.kernel = Quantised(jnp.round(kernel * 64), jnp.float32(1 / 64))
    return layer


class Renamed(nnx.Embed):
    """An embedding with a renamed table, available under the old name through `__getattr__`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weight = self.embedding
        del self.embedding

    def __getattr__(self, name):
        return vars(self)["weight"] if name == "embedding" else None

    def __call__(self, tokens):
        return super().__call__(tokens)


class Looked(nnx.Module):
    """A lookup of rounded features."""

    def __init__(self, rngs):
        self.table = Renamed(11, D, rngs=rngs)

    def __call__(self, x):
        return self.table(jnp.abs(x[..., 0] * 3).astype(jnp.int32) % 11)


class Unknown(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (D, D)))

    def __call__(self, x):
        return x @ self.w[...]


class Model(nnx.Module):
    def __init__(self, odd):
        self.odd = odd(nnx.Rngs(0))
        self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(0))
        self.proj = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.proj(self.norm(x)) + self.odd(x)


def raises(layer):
    raise KeyError("n_in")


def registered(describe):
    def make(rngs):
        register_layer(Unknown, describe)
        return Unknown(rngs)

    return make


REASONS = {
    "quantised": (quantised, "'kernel' is a Quantised and no nnx.Variable; .*LinearSpec\\(n_in, n_out, param=None"),
    "unknown class": (Unknown, r"jlora.register_layer\(Unknown, lambda layer: jlora.LinearSpec\(\*layer.w.shape"),
    "describe raises": (registered(raises), r"Unknown cannot be described: KeyError\('n_in'\)"),
    "describe returns nothing": (registered(lambda _: None), "describe of Unknown must return a LinearSpec.*NoneType"),
    "another size": (registered(lambda _: jlora.LinearSpec(D, 7, "w")), r"\(6, 6\) has 6 features in and 6 out"),
    "another name": (registered(lambda _: jlora.LinearSpec(D, D)), r"'kernel', and the layer holds \['w'\]"),
    "an equation that is no linear layer": (
        registered(lambda layer: jlora.einsum_spec("btd,bdh->bth", layer.w.shape)), "kernel of its own for each entry",
    ),
    "no such method": (
        registered(lambda _: jlora.EmbedSpec(D, D, "w", lookup="find")), "lookup is 'find', and Unknown has no such",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REASONS)
def test_an_unsupported_layer_leaves_the_others_served(kind):
    make, reason = REASONS[kind]
    model = Model(make)
    odd = model.odd
    one = make_adapter("one", [PROJ], 3)
    twins = {"one": merge(model, [PROJ], one), None: nnx.clone(model)}
    manager = make_manager(model, [one])
    with manager.prepare(["one", None, "one"]) as batch:
        assert_close(serve(model, X, batch), expected_rows(twins, ["one", None, "one"], X))
    shown = {layer.path: layer for layer in manager.layers()}
    assert set(shown) == {"odd", "proj"}
    assert not shown["odd"].wrapped
    assert re.search(reason, shown["odd"].reason)
    with pytest.raises(AdapterMismatchError, match=f"'odd' is not wrapped: .*{reason}"):
        manager.add_adapter(ODD)
    assert type(odd) is type(model.odd)
    manager.unwrap()
    with pytest.raises(LoRAUsageError, match=rf"\['odd'\] match 'odd' \({type(odd).__name__}\), but .*{reason}"):
        make_manager(model, target_modules=["proj", "odd"])


def test_an_excluded_layer_is_not_described():
    described = []
    register_layer(Unknown, lambda layer: described.append(layer) or jlora.LinearSpec(D, D, "w"))
    make_manager(Model(Unknown), exclude_modules=["odd"])
    assert not described
    make_manager(Model(Unknown))
    assert described


def test_a_renamed_table_names_the_line_that_serves_it():
    table = Target("odd.table", 11, D, "odd.table.weight", kind="embedding")
    model = Model(Looked)
    manager = make_manager(model)
    with pytest.raises(
        AdapterMismatchError, match=r"'embedding', and the layer holds \['weight'\]; .*EmbedSpec"
    ) as raised:
        manager.add_adapter(make_adapter("one", [table], 2))
    manager.unwrap()
    write(str(raised.value), Renamed)
    check_against_merged(model, [table, PROJ], X)


def write(message, cls):
    """Run the line of code that ends a message."""
    exec(message[message.index("jlora.register_layer") :].splitlines()[0], {"jlora": jlora, cls.__name__: cls})


class Bare(nnx.Module):
    """A model with layers of one unregistered class."""

    def __init__(self):
        self.layers = nnx.List([Unknown(nnx.Rngs(i)) for i in range(3)])
        self.norm = nnx.RMSNorm(D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.norm(x)


def test_a_model_with_nothing_to_serve_lists_its_candidates_and_the_line_for_each():
    model = Bare()
    with pytest.raises(LoRAError, match=r"Bare has no layer that can serve LoRA") as raised:
        make_manager(model)
    _, *lines = str(raised.value).splitlines()
    (line,) = lines
    assert line.strip().startswith("layers.0 and 2 more (Unknown): ")
    write(line, Unknown)
    targets = [Target(f"layers.{i}", D, D, f"layers.{i}.w") for i in range(3)]
    check_against_merged(model, targets, X)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"w": (2, D, 3)}, r'einsum_spec\("<its equation>", layer.w.shape, param="w"\)'),
        ({"wq": (D, D), "wk": (D, D)}, "it holds wq, wk: make each of them a layer of its own"),
        ({"q": (D, 2, 3), "o": (2, 3, D)}, "it holds q, o: make each of them a layer of its own"),
        ({"w13": (4, D, D), "w2": (4, D, D)}, "if w13, w2 are of experts, register Other with a jlora.ExpertsSpec"),
    ],
)
def test_the_line_for_a_class_follows_its_parameters(params, line):
    class Other(nnx.Module):
        def __init__(self, rngs):
            for name, shape in params.items():
                setattr(self, name, nnx.Param(jnp.ones(shape)))

    (reason,) = [layer.reason for layer in make_manager(Model(Other)).layers() if layer.path == "odd"]
    assert re.search(line, reason)


# --- exclude_modules of unread layers --------------------------------------------------------------------------------


def test_names_inside_an_excluded_layer_are_accepted():
    class Tied(nnx.Module):
        def __init__(self):
            self.embed = nnx.Embed(11, D, rngs=nnx.Rngs(0))
            self.proj = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    ranks = {"*": 4, "embed.attend": 2, "embed": 3}
    manager = make_manager(Tied(), exclude_modules=["embed", "lm_head"], max_lora_rank=ranks)
    assert wrapped_paths(manager) == ["proj"]
    for name, kind in (("embed", "embedding"), ("embed", "linear"), ("embed.attend", "linear")):
        with pytest.raises(AdapterMismatchError, match=r"is not wrapped: .* exclude_modules \(embed\)"):
            manager.add_adapter(make_adapter("x", [Target(name, 11, D, "", kind=kind)], 2))


# --- On a mesh -------------------------------------------------------------------------------------------------------


class Pieces(nnx.Linear):
    """q, k and v of sizes that a mesh splits into single columns."""

    output_sizes = (63, 130, 127)


def stacked(rngs):
    return nnx.vmap(lambda rngs: nnx.Linear(D, D, rngs=rngs))(rngs.split(2))


ON_MESH = {
    "a stack split along the stack": (stacked, P("t"), {}, r"stack of layers that is split over 't'"),
    "split in the middle": (lambda r: nnx.LinearGeneral(D, (2, 4), rngs=r), P(None, None, "t"), {}, "in the middle"),
    "pieces": (lambda r: Pieces(D, 320, rngs=r), P(None, "t"), {}, "pieces of 1"),
    "fully sharded": (lambda r: nnx.Linear(D, 5, rngs=r), P("t"), {"fully_sharded": True}, "splits its 5 outputs"),
}


class Beside(Model):
    """A model that does not call its unsupported layer."""

    def __call__(self, x):
        return self.proj(self.norm(x))


@pytest.mark.parametrize("kind", ON_MESH)
def test_a_layer_that_the_mesh_does_not_serve_leaves_the_others_served(kind):
    make, spec, options, reason = ON_MESH[kind]
    one = make_adapter("one", [PROJ], 3)
    twins = {"one": merge(Beside(make), [PROJ], one), None: Beside(make)}
    model = placed(Beside(make), mesh_of(t=2), {"odd": spec, "proj": P(None, "t")})
    manager = make_manager(model, [one], **options)
    with manager.prepare(["one", None, "one"]) as batch:
        assert_close(serve(model, X, batch), expected_rows(twins, ["one", None, "one"], X))
    assert re.search(reason, next(layer.reason for layer in manager.layers() if layer.path == "odd"))
    with pytest.raises(AdapterMismatchError, match=f"'odd' is not wrapped: .*{reason}"):
        manager.add_adapter(ODD)
    manager.unwrap()
    manager = make_manager(model, exclude_modules=["odd"], **options)
    assert "exclude_modules" in next(layer.reason for layer in manager.layers() if layer.path == "odd")


def test_an_excluded_layer_may_be_on_another_mesh():
    model = placed(Beside(lambda r: nnx.Linear(D, D, rngs=r)), mesh_of(t=2), {"proj": P(None, "t")})
    for param in (model.odd.kernel, model.odd.bias):
        param.set_value(jax.device_put(np.asarray(param[...]), NamedSharding(mesh_of(x=4), P())))
    with pytest.raises(LoRAError, match="different meshes"):
        make_manager(model)
    one = make_adapter("one", [PROJ], 3)
    manager = make_manager(model, [one], exclude_modules=["odd"])
    found = jax.device_get(manager.model.proj.jlora_a[...])
    assert not found.any()
    assert wrapped_paths(manager) == ["proj"]

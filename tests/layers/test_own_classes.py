"""Layer classes as users write them: registered in a line, guessed, subclassed, padded; against merged weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.adapters import Adapter
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.layers.wrap.discover import register_layer
from tests.layers.merging import (
    Holder,
    Target,
    assert_close,
    check_against_merged,
    delta,
    make_adapter,
    make_manager,
    make_module,
    normal,
    run,
    serve,
    wrapped_paths,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("registered")]


def tokens_of(*shape, vocab=11):
    return np.random.default_rng(1).integers(0, vocab, shape).astype(np.int32)


def bits(array):
    return np.asarray(array).view(np.int32)


# --- Unusual attributes --------------------------------------------------------------------------------------------


class Obliging:
    """A module with a `__getattr__` for every name, as modules that forward to a config have."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return


class Unusual(Obliging, nnx.Linear):
    """A layer with attributes that cannot be set or deleted after construction."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "sealed", True)

    def __setattr__(self, name, value):
        if "sealed" in vars(self):
            raise AttributeError(f"{name} is sealed")
        super().__setattr__(name, value)

    def __delattr__(self, name):
        raise AttributeError(f"{name} is sealed")


class ObligingHolder(Obliging, Holder):
    pass


def test_modules_with_unusual_attributes_are_wrapped():
    model = ObligingHolder(Unusual(6, 5, rngs=nnx.Rngs(0)))
    check_against_merged(model, [Target("proj", 6, 5, "proj.kernel")], normal(3, 2, 6))


# --- Embeddings ----------------------------------------------------------------------------------------------------


class Embedder(nnx.Module):
    """The embedding of Gemma, with other method names and rows scaled by the square root of the width."""

    def __init__(self, vocab, width):
        self.table = nnx.Param(jnp.asarray(normal(vocab, width, seed=5)))
        self.width = width

    def encode(self, tokens):
        return self.table[...][tokens] * self.width**0.5

    def decode(self, x):
        return x @ self.table[...].T


class Tied(nnx.Module):
    """An embedding, a projection, and the logits of the embedding."""

    tie_word_embeddings = True

    def __init__(self, embedder, lookup="encode", attend="decode"):
        self.embedder, self.lookup, self.attend = embedder, lookup, attend
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        hidden = self.proj(getattr(self.embedder, self.lookup)(tokens))
        return getattr(self.embedder, self.attend)(hidden)


def check_tied(model, tokens, modules, of_lookup=1.0, of_logits=1.0, **fields):
    """Compare rows with an adapter of these modules, and without, with merged tables in float64.

    Return the manager and the logits of ["one", None, "one"]. The last arguments are the scales of both methods.
    """
    values = (
        vars(model.embedder).get("table", vars(model.embedder).get("embedding")),
        model.proj.kernel,
        model.proj.bias,
    )
    table, kernel, bias = (np.asarray(v[...], np.float64) for v in values)
    changes = {name: np.zeros_like(table) for name in ("embedder", "lm_head")}
    for name, module in modules.items():
        change = delta(module).T if name == "embedder" else delta(module)
        changes[name][: len(change)] = change
    manager = make_manager(model, [Adapter(name="one", modules=modules, **fields)])
    with manager.prepare(["one", None, "one"]) as batch:
        found = np.asarray(serve(model, tokens, batch))
    for row, out, on in zip(tokens, found, (1, 0, 1), strict=True):
        hidden = of_lookup * (table + on * changes["embedder"])[row] @ kernel + bias
        assert_close(out, of_logits * hidden @ (table + on * changes["lm_head"]).T)
    return manager, found


def modules_of(vocab=11):
    rng = np.random.default_rng(0)
    return {"embedder": make_module(rng, vocab, 6, 2, "embedding"), "lm_head": make_module(rng, 6, vocab, 3)}


HEAD = {"lm_head": modules_of()["lm_head"]}


def embed_spec(layer, **kwargs):
    return jlora.EmbedSpec(
        *layer.table.shape, param="table", lookup="encode", attend="decode", scale=layer.width**0.5, **kwargs
    )


class ScaledLogits(Embedder):
    """An embedding with scaled logits, as in muP."""

    def decode(self, x):
        return super().decode(x) * 0.375


def test_logits_that_are_scaled():
    register_layer(ScaledLogits, lambda layer: embed_spec(layer, attend_scale=0.375))
    manager, _ = check_tied(Tied(ScaledLogits(11, 6)), tokens_of(3, 4), HEAD, 6**0.5, 0.375)
    assert "embedder.attend" in manager.verify(serve, tokens_of(3, 4)).checked


class ScaledLookup(nnx.Embed):
    def __call__(self, tokens):
        return super().__call__(tokens) * 2


class ScaledAttend(nnx.Embed):
    def attend(self, query):
        return super().attend(query) * 2


@pytest.mark.parametrize(
    ("cls", "kept", "lost", "scales"),
    [(ScaledLookup, "lm_head", "embedder", (2, 1)), (ScaledAttend, "embedder", "lm_head", (1, 2))],
)
def test_an_embed_subclass_that_overrides_one_method_keeps_the_other(cls, kept, lost, scales):
    model, modules = Tied(cls(11, 6, rngs=nnx.Rngs(0)), "__call__", "attend"), modules_of()
    manager, _ = check_tied(model, tokens_of(3, 4), {kept: modules[kept]}, *scales)
    reason = "overrides the (__call__|attend) of Embed" if lost == "embedder" else "no module 'lm_head'|overrides"
    with pytest.raises(AdapterMismatchError, match=reason):
        manager.add_adapter(Adapter(name="lost", modules={lost: modules[lost]}))


def test_the_tied_head_is_not_a_position_table():
    """A table of more positions than there are tokens; no layer is named lm_head."""
    model = Tied(nnx.Embed(11, 6, rngs=nnx.Rngs(0)), "__call__", "attend")
    model.wpe = nnx.Embed(40, 6, rngs=nnx.Rngs(1))
    manager = make_manager(model, [Adapter(name="head", modules=HEAD)])
    assert {"wpe", "embedder.attend"} <= set(wrapped_paths(manager))
    assert not [name for name in vars(model.wpe) if "attend" in name]


def test_tables_of_one_size_must_be_named():
    class Two(nnx.Module):
        def __init__(self):
            self.source = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
            self.target = nnx.Embed(11, 6, rngs=nnx.Rngs(1))
            self.small = nnx.Embed(7, 6, rngs=nnx.Rngs(1))

    model = Two()
    manager = make_manager(model)
    head = HEAD["lm_head"]
    with pytest.raises(AdapterMismatchError, match=r"any of 'source.attend', 'target.attend'; name one"):
        manager.add_adapter(Adapter(name="head", modules={"lm_head": head}))
    with pytest.raises(AdapterMismatchError, match=r"'target.attend' takes no adapter yet: it is not known"):
        manager.add_adapter(Adapter(name="head", modules={"target.attend": head}))
    manager.unwrap()
    manager = make_manager(model, target_modules=["target.attend"])
    manager.add_adapter(Adapter(name="head", modules={"target.attend": head}))


# --- Einsum classes ------------------------------------------------------------------------------------------------


class Einsum(nnx.Module):
    """A common einsum class."""

    def __init__(self, equation, shape, seed=0):
        self.equation = equation
        self.w = nnx.Param(jnp.asarray(normal(*shape, seed=seed)))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class CalledEinsum(nnx.Module):
    """The einsum of Gemma, with the equation as an argument before the input."""

    def __init__(self, shape):
        self.w = nnx.Param(jnp.asarray(normal(*shape)))

    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.w[...])


def into(*shape, order):
    return lambda d: d.T.reshape(shape).transpose(order)


@pytest.mark.parametrize("equation", ["BTD,NDH->BTNH", "123,435->1245", "...2,021->...01", "...δ,λδω->...λω"])
def test_einsum_class_in_one_line(equation):
    register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.equation, layer.w.shape))
    q = Target("proj", 6, 8, "proj.w", into(6, 2, 4, order=(1, 0, 2)))
    check_against_merged(Holder(Einsum(equation, (2, 6, 4))), [q], normal(3, 2, 6))


def test_einsum_class_with_several_axes_in():
    register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.equation, layer.w.shape))
    out = Target("proj", 8, 6, "proj.w", lambda d: d.T.reshape(2, 4, 6))
    check_against_merged(Holder(Einsum("BTNH,NHD->BTD", (2, 4, 6))), [out], normal(3, 2, 2, 4))


@pytest.mark.parametrize("how", ["keywords", "another equation"])
def test_einsum_class_with_the_equation_in_the_call(how):
    class Model(nnx.Module):
        def __init__(self):
            self.proj = CalledEinsum((2, 6, 4))

        def __call__(self, x):
            if how == "keywords":
                return self.proj(x=x, eqn="BTD,NDH->BTNH")
            return self.proj("BD,NDH->BNH", x[:, -1])[:, None] + self.proj("BTD,NDH->BTNH", x)

    register_layer(CalledEinsum, lambda layer: jlora.einsum_spec("BTD,NDH->BTNH", layer.w.shape))
    check_against_merged(Model(), [Target("proj", 6, 8, "proj.w", into(6, 2, 4, order=(1, 0, 2)))], normal(3, 2, 6))


@pytest.mark.parametrize(
    ("equation", "shape", "reason"),
    [
        ("BTD,BDH->BTH", (3, 6, 6), "kernel of its own for each entry of B"),
        ("BTD,DH->BTH", (6, 2, 3), "cannot have the shape"),
        ("BTD->BD", (6,), "is not an einsum of one input and one kernel"),
        ("TD,D->T", (6,), "has no axis that goes out"),
    ],
)
def test_einsum_spec_refuses_equations_that_are_not_linear(equation, shape, reason):
    with pytest.raises(LoRAUsageError, match=reason):
        jlora.einsum_spec(equation, shape)


# --- Guessed specs -------------------------------------------------------------------------------------------------


class Gate(nnx.Linear):
    """A router gate with float32 output for every dtype of the model."""

    def __call__(self, x):
        return super().__call__(x).astype(jnp.float32)


class Renamed(nnx.Einsum):
    """An einsum of Flax whose parameter has the name of the checkpoint."""

    def __init__(self):
        super().__init__("BTD,DF->BTF", (6, 6), rngs=nnx.Rngs(0))
        self.weight = self.kernel
        del self.kernel

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.weight[...])


GUESSED = {
    "einsum by its equation": (lambda: Einsum("BTD,DF->BTF", (6, 6)), "taken for an einsum by its equation"),
    "overridden call": (lambda: Gate(6, 6, rngs=nnx.Rngs(0)), "Gate overrides the __call__ of Linear"),
    "renamed parameter": (Renamed, "Renamed overrides the __call__ of Einsum"),
}


@pytest.mark.parametrize("kind", GUESSED)
def test_a_guessed_layer_takes_no_adapter_until_it_is_verified(kind):
    build, how = GUESSED[kind]
    model = Holder(build())
    base = np.asarray(run(nnx.clone(model), normal(3, 2, 6)))
    manager = make_manager(model)
    adapter = make_adapter("one", [Target("proj", 6, 6, "")], 2)
    with pytest.raises(AdapterMismatchError, match=rf"'proj' takes no adapter yet: .*{how}.*manager.verify"):
        manager.add_adapter(adapter)
    (info,) = [layer for layer in manager.layers() if layer.path == "proj"]
    assert info.wrapped
    assert how in (info.reason or "")
    with manager.prepare([None] * 3) as batch:
        np.testing.assert_array_equal(bits(serve(model, normal(3, 2, 6), batch)), bits(base))


class OfItsOwn(nnx.Linear):
    """A linear layer that has neither the parameters nor the fields of its base class."""

    def __init__(self):
        self.w = nnx.Param(jnp.asarray(normal(6, 6)))

    def __call__(self, x):
        return x @ self.w[...]


def test_the_reason_of_a_subclass_with_fields_of_its_own_has_the_line_that_serves_it():
    (info,) = [layer for layer in make_manager(Routed(OfItsOwn())).layers() if layer.path == "router"]
    line = 'jlora.register_layer(OfItsOwn, lambda layer: jlora.LinearSpec(*layer.w.shape, param="w"))'
    assert not info.wrapped
    assert line in (info.reason or "")


class TopK(nnx.Linear):
    """A router that does not return its logits."""

    def __call__(self, x):
        return jax.lax.top_k(super().__call__(x), 2)


class Routed(nnx.Module):
    def __init__(self, router=None):
        self.router = TopK(6, 4, rngs=nnx.Rngs(0)) if router is None else router
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))

    def __call__(self, x):
        weights, _ = self.router(x)
        return self.proj(x) * weights.sum(-1, keepdims=True)


def test_a_wrong_guess_serves_the_base_and_refuses_adapters():
    """The model serves the base, and adapters of the layer are refused."""
    manager = check_against_merged(Routed(), [Target("proj", 6, 6, "proj.kernel")], normal(3, 2, 6))
    manager = make_manager(manager.model)
    with manager.prepare([None] * 3) as batch:
        serve(manager.model, normal(3, 2, 6), batch)
    manager.verify(serve, normal(3, 2, 6))
    with pytest.raises(AdapterMismatchError, match=r"took float32\[3, 2, 6\] and returned a (list|tuple) of 2"):
        manager.add_adapter(make_adapter("one", [Target("router", 6, 4, "")], 2))


def test_a_registered_layer_that_is_not_linear_raises():
    register_layer(TopK, lambda layer: jlora.LinearSpec(6, 4))
    model = Routed()
    manager = make_manager(model)
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=r"router: a linear layer takes an array"):
        serve(model, normal(3, 2, 6), batch)


# --- Padding and order ---------------------------------------------------------------------------------------------


REAL = (np.arange(3)[:, None] * 8 + np.arange(5)).reshape(-1)  # positions of 3 x 5 in 4 x 8


def test_padded_columns_are_the_bits_of_the_base():
    class Zeros(nnx.Module):
        """A layer that returns -0.0, so that an addition of 0.0 shows."""

        def __init__(self):
            self.w = nnx.Param(jnp.ones((6, 4, 8)))

        def __call__(self, x):
            return jnp.full((*x.shape[:-1], 4, 8), -0.0)

    register_layer(Zeros, lambda layer: jlora.einsum_spec("TD,DNH->TNH", (6, 4, 8), out_index=REAL))
    model = Holder(Zeros())
    manager = make_manager(model, [make_adapter("one", [Target("proj", 6, 15, "")], 2)])
    with manager.prepare(["one"] * 3) as batch:
        found = np.asarray(serve(model, normal(3, 6), batch))
    real = np.zeros((4, 8), bool)
    real[:3, :5] = True
    assert (found[:, real] != 0).any()
    assert np.signbit(found[:, ~real]).all()
    assert not found[:, ~real].any()


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("index", [[0, 0], [0, 16], [-1], [], [0.5]])
def test_an_index_of_unknown_features_is_refused(index):
    with pytest.raises(LoRAUsageError, match="out_index must"):
        jlora.LinearSpec(6, 16, out_index=index)


def test_a_padded_vocabulary_takes_adapters_of_the_real_one():
    """A vocabulary of 100 tokens is stored as 128."""
    register_layer(Embedder, lambda layer: embed_spec(layer, real_vocab=100))
    model, modules = Tied(Embedder(128, 6)), modules_of(100)
    table = np.asarray(model.embedder.table[...])
    tokens = tokens_of(3, 4, vocab=128)
    tokens[:, 0], tokens[0, 1] = 127, -100  # padding, by two names
    base = np.asarray(run(nnx.clone(model), tokens))
    manager, found = check_tied(model, tokens, modules, 6**0.5, base_weights={"embedder": table[:100]})
    np.testing.assert_array_equal(bits(found[1]), bits(base[1]))
    np.testing.assert_array_equal(bits(found[:, 0, 100:]), bits(base[:, 0, 100:]))
    other = Adapter(name="other", modules=modules, base_weights={"embedder": table[:100] + 1})
    with pytest.raises(AdapterMismatchError, match="its values differ"):
        manager.add_adapter(other)

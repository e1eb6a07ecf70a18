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


class Holder(nnx.Module):
    def __init__(self, layer):
        self.proj = layer

    def __call__(self, x):
        return self.proj(x)


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


class Gemma(nnx.Module):
    tie_word_embeddings = True

    def __init__(self):
        self.embedder = Embedder(11, 6)
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.embedder.decode(self.proj(self.embedder.encode(tokens)))


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
    model = Gemma()
    model.embedder = ScaledLogits(11, 6)
    head = make_module(np.random.default_rng(0), 6, 11, 3)
    table, kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.embedder.table, model.proj.kernel, model.proj.bias)
    )
    manager = make_manager(model, [Adapter(name="head", modules={"lm_head": head})])
    tokens = tokens_of(3, 4)
    with manager.prepare(["head", None, "head"]) as batch:
        found = np.asarray(serve(model, tokens, batch))
    hidden = 6**0.5 * table[tokens] @ kernel + bias
    change = hidden @ delta(head).T
    change[1] = 0
    assert_close(found, 0.375 * (hidden @ table.T + change))
    assert "embedder.attend" in manager.verify(serve, tokens).checked


class ScaledLookup(nnx.Embed):
    def __call__(self, tokens):
        return super().__call__(tokens) * 2


class ScaledAttend(nnx.Embed):
    def attend(self, query):
        return super().attend(query) * 2


class TiedWith(nnx.Module):
    tie_word_embeddings = True

    def __init__(self, cls):
        self.embedder = cls(11, 6, rngs=nnx.Rngs(0))
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))

    def __call__(self, tokens):
        return self.embedder.attend(self.proj(self.embedder(tokens)))


@pytest.mark.parametrize(
    ("cls", "kept", "lost"), [(ScaledLookup, "lm_head", "embedder"), (ScaledAttend, "embedder", "lm_head")]
)
def test_an_embed_subclass_that_overrides_one_method_keeps_the_other(cls, kept, lost):
    modules = {
        "embedder": make_module(np.random.default_rng(0), 11, 6, 2, "embedding"),
        "lm_head": make_module(np.random.default_rng(1), 6, 11, 3),
    }
    model, tokens = TiedWith(cls), tokens_of(3, 4)
    table, kernel, bias = (
        np.asarray(v[...], np.float64) for v in (model.embedder.embedding, model.proj.kernel, model.proj.bias)
    )
    manager = make_manager(model, [Adapter(name="kept", modules={kept: modules[kept]})])
    with manager.prepare(["kept", None, "kept"]) as batch:
        found = np.asarray(serve(model, tokens, batch))
    d = {name: delta(modules[name]).T if name == kept else 0.0 for name in modules}
    in_scale, out_scale = (2, 1) if cls is ScaledLookup else (1, 2)
    for row, (name, out) in enumerate(zip(["kept", None, "kept"], found, strict=True)):
        e, h = (d["embedder"], d["lm_head"]) if name else (0.0, 0.0)
        embedded = in_scale * table[tokens[row]] + (e[tokens[row]] if name and kept == "embedder" else 0)
        hidden = embedded @ kernel + bias
        assert_close(out, hidden @ (out_scale * table.T + h))
    reason = "overrides the (__call__|attend) of Embed" if lost == "embedder" else "no module 'lm_head'|overrides"
    with pytest.raises(AdapterMismatchError, match=reason):
        manager.add_adapter(Adapter(name="lost", modules={lost: modules[lost]}))


class GPT2(nnx.Module):
    """A model with more positions than tokens and no layer named lm_head."""

    tie_word_embeddings = True

    def __init__(self):
        self.wte = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
        self.wpe = nnx.Embed(40, 6, rngs=nnx.Rngs(1))
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(2))

    def __call__(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return self.wte.attend(self.proj(self.wte(tokens) + self.wpe(positions)))


def test_the_tied_head_is_not_a_position_table():
    model, tokens = GPT2(), tokens_of(3, 4)
    head = make_module(np.random.default_rng(0), 6, 11, 3)
    base = np.asarray(run(nnx.clone(model), tokens), np.float64)
    hidden = np.linalg.lstsq(np.asarray(model.wte.embedding[...], np.float64), base.reshape(-1, 11).T, rcond=None)[0].T
    manager = make_manager(model, [Adapter(name="head", modules={"lm_head": head})])
    assert "wpe" in wrapped_paths(manager)
    assert not [name for name in vars(model.wpe) if "attend" in name]
    with manager.prepare(["head", None, "head"]) as batch:
        found = np.asarray(serve(model, tokens, batch))
    change = (hidden @ delta(head).T).reshape(base.shape)
    change[1] = 0
    assert_close(found, base + change, 1e-4)


def test_tables_of_one_size_must_be_named():
    class Two(nnx.Module):
        def __init__(self):
            self.source = nnx.Embed(11, 6, rngs=nnx.Rngs(0))
            self.target = nnx.Embed(11, 6, rngs=nnx.Rngs(1))
            self.small = nnx.Embed(7, 6, rngs=nnx.Rngs(1))

    model = Two()
    manager = make_manager(model)
    head = make_module(np.random.default_rng(0), 6, 11, 3)
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


def test_einsum_class_in_one_line():
    register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.equation, layer.w.shape))
    q = Target("proj", 6, 8, "proj.w", into(6, 2, 4, order=(1, 0, 2)))
    check_against_merged(Holder(Einsum("BTD,NDH->BTNH", (2, 6, 4))), [q], normal(3, 2, 6))
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


GUESSED = {
    "einsum by its equation": (lambda: Einsum("BTD,DF->BTF", (6, 6)), "taken for an einsum by its equation"),
    "overridden call": (lambda: Gate(6, 6, rngs=nnx.Rngs(0)), "Gate overrides the __call__ of Linear"),
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


class TopK(nnx.Linear):
    """A router that does not return its logits."""

    def __call__(self, x):
        return jax.lax.top_k(super().__call__(x), 2)


class Routed(nnx.Module):
    def __init__(self):
        self.router = TopK(6, 4, rngs=nnx.Rngs(0))
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


class PaddedVocab(nnx.Module):
    """A vocabulary of 100 tokens stored as 128."""

    tie_word_embeddings = True

    def __init__(self):
        self.embedder = Embedder(128, 6)
        self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(1))
        self.lm_head = nnx.Linear(6, 128, use_bias=False, rngs=nnx.Rngs(2))
        self.tied = True

    def __call__(self, tokens):
        hidden = self.proj(self.embedder.encode(tokens))
        return self.embedder.decode(hidden) if self.tied else self.lm_head(hidden)


def test_a_padded_vocabulary_takes_adapters_of_the_real_one():
    register_layer(Embedder, lambda layer: embed_spec(layer, real_vocab=100))
    model = PaddedVocab()
    del model.lm_head
    base_table = np.asarray(model.embedder.table[...])
    rng = np.random.default_rng(0)
    modules = {
        "embedder": make_module(rng, 100, 6, 2, "embedding"),
        "lm_head": make_module(rng, 6, 100, 3),
    }
    adapter = Adapter(name="one", modules=modules, base_weights={"embedder": base_table[:100]})
    tokens = tokens_of(3, 4, vocab=128)
    tokens[:, 0], tokens[0, 1] = 127, -100  # padding, by two names
    base = np.asarray(run(nnx.clone(model), tokens))
    table, kernel, bias = (np.asarray(v[...], np.float64) for v in (base_table, model.proj.kernel, model.proj.bias))
    manager = make_manager(model, [adapter])
    with manager.prepare(["one", None, "one"]) as batch:
        found = np.asarray(serve(model, tokens, batch))
    e, h = np.zeros((128, 6)), np.zeros((6, 128))
    e[:100], h[:, :100] = delta(modules["embedder"]).T, delta(modules["lm_head"]).T
    for i, name in enumerate(["one", None, "one"]):
        on = 1.0 if name else 0.0
        hidden = 6**0.5 * (table + on * e)[tokens[i]] @ kernel + bias
        assert_close(found[i], hidden @ (table.T + on * h))
    np.testing.assert_array_equal(bits(found[1]), bits(base[1]))
    np.testing.assert_array_equal(bits(found[:, 0, 100:]), bits(base[:, 0, 100:]))
    other = Adapter(name="other", modules=modules, base_weights={"embedder": base_table[:100] + 1})
    with pytest.raises(AdapterMismatchError, match="its values differ"):
        manager.add_adapter(other)

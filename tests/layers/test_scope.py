"""`jlora.use`: the adapter of each row in every layout, and the errors that prevent wrong adapters."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jlora.errors import LoRAError
from jlora.layers.forward.scope import use
from tests.layers.merging import (
    Target,
    assert_close,
    expected_rows,
    make_adapter,
    make_manager,
    merge,
    normal,
    run,
    serve,
)

pytestmark = pytest.mark.device

optimised = pytest.mark.optimised


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 6, rngs=rngs)
        self.proj = nnx.Linear(6, 6, rngs=rngs)
        self.lm_head = nnx.Linear(6, 11, rngs=rngs)

    def __call__(self, tokens):
        return self.lm_head(jnp.tanh(self.proj(self.embed(tokens))))


TARGETS = [
    Target("proj", 6, 6, "proj.kernel"),
    Target("lm_head", 6, 11, "lm_head.kernel"),
    Target("embed", 11, 6, "embed.embedding", kind="embedding"),
]
ONE, TWO = make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS[:1], 1)
TOKENS = np.random.default_rng(0).integers(0, 11, (4, 3)).astype(np.int32)
NAMES = ["one", None, "two", "one"]


@pytest.fixture(scope="module")
def served():
    """Return a wrapped model, its manager, and the outputs of merged weights and of the base for TOKENS."""
    model = Model()
    twins = {"one": merge(model, TARGETS, ONE), "two": merge(model, TARGETS, TWO), None: nnx.clone(model)}
    expected = expected_rows(twins, NAMES, TOKENS)
    base = np.asarray(run(twins[None], TOKENS))
    manager = make_manager(model, [ONE, TWO])
    with manager.prepare(["one", "two"]):
        pass
    return model, manager, expected, base


# --- Layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"length": 3}], ids=["by length", "by declared length"])
def test_rows_of_sequences(served, options):
    model, manager, expected, _ = served
    with manager.prepare(NAMES, **options) as batch:
        assert_close(serve(model, TOKENS, batch), expected)


def test_no_tokens(served):
    model, manager, _, _ = served
    with manager.prepare(NAMES) as batch:
        chex.assert_shape(serve(model, TOKENS[:, :0], batch), (4, 0, 11))


@pytest.mark.parametrize("shape", [(3, 4), (12,), (3,), ()])
def test_rows_of_other_shapes_are_refused(served, shape):
    """Twelve rows may be three for each of four sequences or a table of twelve positions."""
    model, manager, _, _ = served
    reason = rf"embed: its rows of shape {re.escape(str(shape))} fit no layout"
    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match=reason):
        serve(model, np.zeros(shape, np.int32), batch)


# --- The base, bitwise ----------------------------------------------------------------------------------------------


@optimised
def test_base_model_is_bitwise_the_unwrapped_one(served):
    model, manager, _, base = served

    @jax.jit
    def alone(model, tokens):
        with use(None):
            return model(tokens)

    np.testing.assert_array_equal(np.asarray(alone(model, TOKENS)).view(np.int32), base.view(np.int32))
    with manager.prepare([None] * 4) as batch:
        found = np.asarray(serve(model, TOKENS, batch))
    np.testing.assert_array_equal(found.view(np.int32), base.view(np.int32))


# --- Errors --------------------------------------------------------------------------------------------------------


def test_calls_outside_the_scope_raise(served):
    model, _, _, _ = served
    with pytest.raises(LoRAError, match=r"(?s)embed: .*outside `jlora.use`.*with jlora.use\(batch\):.*return model"):
        jax.jit(lambda model, tokens: model(tokens))(model, TOKENS)
    with pytest.raises(LoRAError, match=r"outside `jlora.use`"):
        model(TOKENS)
    with pytest.raises(LoRAError, match=r"lm_head: .*outside"):
        model.lm_head(normal(4, 6))


def test_a_batch_opened_outside_jit_raises(served):
    model, manager, _, _ = served
    with manager.prepare(NAMES) as batch:
        with use(batch, without=["*"]), pytest.raises(LoRAError, match=r"outside `jax.jit` and is read inside it"):
            jax.jit(lambda model, tokens: model(tokens))(model, TOKENS)

        def closed_over(model, tokens):
            with use(batch):
                return model(tokens)

        with pytest.raises(LoRAError, match=r"Pass it as an argument"):
            jax.jit(closed_over)(model, TOKENS)
        with use(batch, without=["*"]), pytest.raises(LoRAError, match=r"opened outside `jax.jit`"):
            jax.lax.scan(lambda x, _: (model.proj(x), None), jnp.zeros((4, 6)), None, length=2)


def test_generators_that_take_turns_inside_their_scopes_raise(served):
    model, manager, expected, _ = served

    def steps(names):
        with manager.prepare(names) as batch, use(batch):
            while True:
                yield model(TOKENS)

    first, second = steps(NAMES), steps(["two"] * 4)
    assert_close(next(first), expected)
    with pytest.raises(LoRAError, match=r"jlora.use\(batch\) was opened inside jlora.use\(batch\).*still open"):
        next(second)
    assert_close(next(first), expected)
    first.close()
    with pytest.raises(LoRAError, match=r"outside `jlora.use`"):
        model(TOKENS)


def test_scopes_closed_out_of_order_raise_and_serve_nothing_afterwards(served):
    model, manager, _, _ = served
    x = jnp.asarray(normal(4, 3, 6))
    twins = {"one": merge(Model(), TARGETS, ONE), "two": merge(Model(), TARGETS, TWO), None: Model()}
    expected = expected_rows(twins, NAMES, x, step=jax.jit(lambda model, x: model.proj(x)))
    other_model = Model()
    other = make_manager(other_model, [ONE, TWO])

    def steps(model, manager):
        with manager.prepare(NAMES) as batch, use(batch, without=["*"]):
            while True:
                yield model.proj(x)

    double = jax.jit(chex.assert_max_traces(lambda x: 2 * x, n=1))
    double(1)
    first, second = steps(model, manager), steps(other_model, other)
    next(first)
    next(second)  # of another manager, and so allowed
    with pytest.raises(LoRAError, match=r"closed out of order"):
        first.close()
    assert_close(next(second), expected)
    second.close()
    double(1)  # JAX reuses the trace from outside the scope
    for each in (model, other_model):
        with pytest.raises(LoRAError, match=r"outside `jlora.use`"):
            each(TOKENS)


def test_the_base_model_and_a_batch_do_not_mix_eagerly(served):
    model, manager, expected, base = served
    with manager.prepare(NAMES) as batch:
        with use(batch):
            with pytest.raises(LoRAError, match=r"jlora.use\(None\) was opened inside jlora.use\(batch\)"), use(None):
                pass
            assert_close(model(TOKENS), expected)
        with use(None):
            for inner in (batch, None):
                with pytest.raises(LoRAError, match=r"was opened inside jlora.use\(None\)"), use(inner):
                    pass
            with pytest.raises(LoRAError, match=r"was opened inside jlora.use\(None\)"):
                serve(model, TOKENS, batch)
            assert_close(model(TOKENS), base)
        assert_close(serve(model, TOKENS, batch), expected)


def test_a_model_closed_over_by_jit_raises(served):
    """The slots would be constants of the compiled function, which would ignore later adapters."""
    model, manager, _, _ = served

    @jax.jit
    def forward(tokens, batch):
        with use(batch):
            return model(tokens)

    with manager.prepare(NAMES) as batch, pytest.raises(LoRAError, match=r"without being an argument of it"):
        forward(TOKENS, batch)


def test_a_batch_of_another_manager_raises(served):
    model, _, _, _ = served
    other = make_manager(Model(), [ONE, TWO])
    with other.prepare(NAMES) as batch, pytest.raises(LoRAError, match=r"prepared by the manager of another model"):
        serve(model, TOKENS, batch)


@pytest.mark.usefixtures("unchecked_calls")
def test_use_refuses_other_objects(served):
    _, manager, _, _ = served
    with pytest.raises(LoRAError, match=r"takes a LoRABatch from manager.prepare.* got list"), use(NAMES):  # type: ignore
        pass
    assert manager.list_adapters()

"""`active_from` in every layout of rows: active rows equal merged weights, and the others have the bits of the base."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.layers.merging import assert_close, expected_rows, make_manager, merge, run, serve
from tests.layers.test_scope import NAMES, ONE, TARGETS, TOKENS, TWO, Model

pytestmark = pytest.mark.device

SEQUENCES, LENGTH = TOKENS.shape
FIRST = [(1, 0, 2, 3), (0, 1, jlora.NOWHERE, 2), (2, 2, 0, jlora.NOWHERE)]


class World:
    """A model served with `activated`, and its outputs for TOKENS: of merged weights, and of the base."""

    def __init__(self):
        self.model = Model()
        twins = {"one": merge(self.model, TARGETS, ONE), "two": merge(self.model, TARGETS, TWO), None: Model()}
        self.merged = expected_rows(twins, NAMES, TOKENS)
        self.base = np.asarray(run(twins[None], TOKENS), np.float64)
        self.manager = make_manager(self.model, [ONE, TWO], activated=True)

    def check(self, step, *args, take=lambda array: array, place=0, **options):
        """Compare a step with the expected values and with the bits of the base, for all of FIRST.

        Args:
          step: called with the model, `args` and a batch.
          take: the rows of the step's output, from values [B, L, ...].
          place: the place in TOKENS of row 0 of the step.
          options: further arguments of `prepare`; by default, the length of TOKENS.
        """
        options, served = options or {"length": LENGTH}, np.array([name is not None for name in NAMES])
        with self.manager.prepare([None] * SEQUENCES, active_from=[0] * SEQUENCES, **options) as batch:
            base = np.asarray(step(self.model, *args, batch))
        for first in FIRST:
            active = (np.arange(LENGTH) >= np.array(first)[:, None]) & served[:, None]
            starts = [max(0, row - place) for row in first]
            with self.manager.prepare(NAMES, active_from=starts, **options) as batch:
                found = np.asarray(step(self.model, *args, batch))
            assert_close(found, take(np.where(active[..., None], self.merged, self.base)))
            active = take(active)
            assert (~active).any()
            np.testing.assert_array_equal(found[~active], base[~active])


@pytest.fixture(scope="module")
def world():
    return World()


def flat(array):
    return array.reshape(-1, *array.shape[2:])


# --- Layouts ----------------------------------------------------------------------------------------------------------


def test_rows_of_sequences(world):
    world.check(serve, TOKENS)
    world.check(serve, flat(TOKENS), take=flat)


def test_sequences_under_vmap(world):
    mapped = jax.jit(jax.vmap(serve, in_axes=(None, 0, 0)))
    world.check(mapped, TOKENS)
    for place in range(LENGTH):
        world.check(mapped, TOKENS[:, place], take=lambda a, i=place: a[:, i], place=place, length=1)


def test_positions_under_vmap(world):
    """Each call sees one row a sequence, which need not be the last."""

    def one(model, tokens, batch):
        with jlora.use(batch):
            return model(tokens)

    step = jax.jit(jax.vmap(one, in_axes=(None, 1, None), out_axes=1))
    with world.manager.prepare(NAMES, active_from=[0] * SEQUENCES, length=LENGTH) as batch:
        with pytest.raises(jlora.LoRAUsageError, match=r"under jax\.vmap, a row of each sequence may be any"):
            step(world.manager.model, TOKENS, batch)
        step(world.manager.model, TOKENS[:, :1], batch.activate([0] * SEQUENCES, length=1))


# --- Batches without first rows ---------------------------------------------------------------------------------------


def test_an_activated_adapter_needs_first_rows():
    modules = {name: ONE.modules[name] for name in ("proj", "lm_head")}  # PEFT has no aLoRA of an embedding
    one = dataclasses.replace(ONE, modules=modules)
    manager = make_manager(Model(), [dataclasses.replace(one, invocation_tokens=(3, 4)), TWO], activated=True)
    plain = make_manager(Model(), [one, TWO], activated=True)
    with manager.prepare(NAMES) as batch:
        assert batch.needs_activation
        with pytest.raises(jlora.LoRAError, match=r"aLoRA.*prepare\(\.\.\., active_from=\) or batch\.activate\("):
            serve(manager.model, TOKENS, batch)
        found = np.asarray(serve(manager.model, TOKENS, batch.activate([2, 0, 0, LENGTH], length=LENGTH)))
        prompts = [[3, 4, 3, 4], [3, 4, 1, 2], [1], [7, 7, 7, 7]]
        again = np.asarray(serve(manager.model, TOKENS, batch.activate_in(prompts, length=LENGTH)))
    with manager.prepare([None, "two", "two", None]) as batch:
        assert not batch.needs_activation
        serve(manager.model, TOKENS, batch)
    with plain.prepare(NAMES, active_from=[2, 0, 0, LENGTH], length=LENGTH) as batch:
        want = np.asarray(serve(plain.model, TOKENS, batch))
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(again, want)


def test_a_prompt_for_each_sequence(world):
    count = SEQUENCES - 1
    message = f"{count} prompts for {SEQUENCES} sequences"
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAUsageError, match=message):
        batch.activate_in([[1]] * count, length=LENGTH)


# --- `activate` ------------------------------------------------------------------------------------------------------


def test_length_is_required(world):
    for options in ({}, {"length": None}):
        with pytest.raises(jlora.LoRAUsageError, match=r"`length`.*: prepare\(names, active_from=first_rows, length="):
            world.manager.prepare(NAMES, active_from=[0] * SEQUENCES, **options)
        with world.manager.prepare(NAMES) as batch:
            with pytest.raises(jlora.LoRAUsageError, match=r"`length`.*: batch\.activate\(first_rows, length="):
                batch.activate([0] * SEQUENCES, **options)
            with pytest.raises(jlora.LoRAUsageError, match=r"`length`"):
                batch.activate_in([[1]] * SEQUENCES, **options)


def test_rows_past_int32_are_nowhere(world):
    """Left padding adds to the first row that means nowhere."""
    large = [2**31, 2**31 + 5, jlora.NOWHERE + 3, 2**63 - 1]
    with world.manager.prepare([None] * SEQUENCES) as batch:
        base = np.asarray(serve(world.model, TOKENS, batch))
    for first in (large, np.array(large, np.uint64), jnp.array(np.minimum(large, 2**32 - 1).astype(np.uint32))):
        with world.manager.prepare(NAMES) as batch:
            np.testing.assert_array_equal(serve(world.model, TOKENS, batch.activate(first, length=LENGTH)), base)
        with world.manager.prepare(NAMES, active_from=first, length=LENGTH) as batch:
            np.testing.assert_array_equal(serve(world.model, TOKENS, batch), base)


@pytest.mark.parametrize(
    "first", [[True] * SEQUENCES, [0, 0, 0, -1], jnp.array([0, 0, 0, -1]), np.zeros((SEQUENCES, 1), int), 0], ids=str
)
@pytest.mark.usefixtures("unchecked_calls")
def test_first_rows_are_checked_alike(world, first):
    with pytest.raises(jlora.LoRAUsageError, match="active_from must be"):
        world.manager.prepare(NAMES, active_from=first, length=LENGTH)
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAUsageError, match="first_rows must be"):
        batch.activate(first, length=LENGTH)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("length", [0, 1.5, True])
def test_lengths_are_checked_alike(world, length):
    with pytest.raises(jlora.LoRAUsageError, match=r"^length must be"):
        world.manager.prepare(NAMES, active_from=[0] * SEQUENCES, length=length)
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAUsageError, match="activate: length must be"):
        batch.activate([0] * SEQUENCES, length=length)


def traced(world, batch, first, **options):
    """Return the rows of a batch that a step activates itself."""

    @jax.jit
    def step(model, tokens, first, batch):
        with jlora.use(batch.activate(first, **options)):
            return model(tokens)

    return np.asarray(step(world.model, TOKENS, first, batch))


@pytest.mark.parametrize("dtype", [np.int8, np.uint32])
def test_traced_first_rows_of_any_integer_type(world, dtype):
    """Values are clamped before they are narrowed: those below 0 act from the first row on."""
    most = np.iinfo(dtype).max
    first = np.array([1, 0, most, -5 if np.iinfo(dtype).min else 2], dtype)
    with world.manager.prepare(NAMES) as batch:
        found = traced(world, batch, first, length=LENGTH)
        want = serve(world.model, TOKENS, batch.activate([max(0, int(row)) for row in first], length=LENGTH))
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize(
    ("first", "options", "message"),
    [
        (np.zeros(SEQUENCES, np.float32), {"length": LENGTH}, r"takes integers \[4\].*got float32\[4\]"),
        (np.zeros(3, np.int32), {"length": LENGTH}, r"takes integers \[4\].*got int32\[3\]"),
        (np.zeros(SEQUENCES, np.int32), {}, "`length`"),
        (np.zeros(SEQUENCES, np.int32), {"length": 0}, "must be positive"),
    ],
)
def test_traced_first_rows_are_checked(world, first, options, message):
    with world.manager.prepare(NAMES) as batch, pytest.raises(jlora.LoRAUsageError, match=message):
        traced(world, batch, first, **options)


@pytest.mark.parametrize("mapped", [False, True])
def test_rows_whose_positions_no_shape_shows_are_refused(world, mapped):
    """Heads stand between the sequences and their positions."""

    @jax.jit
    def step(model, x, batch):
        with jlora.use(batch, without=["*"]):
            return model.proj(x)

    call, x = jax.vmap(step, in_axes=(None, 0, 0)) if mapped else step, jnp.zeros((SEQUENCES, 5, LENGTH, 6))
    refused = pytest.raises(jlora.LoRAError, match=r"proj: a sequence has rows of shape \(5, 3\), and `active_from`")
    with world.manager.prepare(NAMES, length=LENGTH, active_from=[0] * SEQUENCES) as batch, refused:
        call(world.model, x, batch)

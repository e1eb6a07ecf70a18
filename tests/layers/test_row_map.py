"""`RowMap`: permuted, dropped and nested rows, also under transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jlora
from tests.layers.merging import assert_close, normal
from tests.layers.rowwise import ADAPTERS, NAMES, K, World, base_of, bits

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def world():
    return World()


def run_mapped(model, x, source, batch):
    with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source)):
        return model.proj(x)


mapped = jax.jit(run_mapped)


@jax.jit
def mapped_tokens(model, x, source, batch):
    with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source, of="tokens")):
        return model.proj(x)


def named(names, source):
    return [names[i] if 0 <= i < len(names) else None for i in source]


indices = st.lists(st.integers(-2, 8), min_size=7, max_size=7)
batches = st.lists(st.sampled_from(["one", "two", None]), min_size=3, max_size=3)


@given(batches, indices)
def test_rows_of_sequences(world, names, source):
    """Beams may be permuted, repeated or omitted. An index outside the batch takes no adapter."""
    x = normal(7, K)
    with world.manager.prepare(names) as batch:
        found = mapped(world.model, x, np.array(source, np.int32), batch)
    rows = named(names, source)
    assert_close(found, world.expected(x, rows))
    free = [name is None for name in rows]
    np.testing.assert_array_equal(bits(found)[free], bits(base_of(world.bare.proj, x))[free])


@given(batches, st.lists(st.integers(0, 3), min_size=3, max_size=3).filter(any), st.data())
def test_rows_of_packed_tokens(world, names, counts, data):
    """Tokens may be sorted, dropped or repeated. Padding takes no adapter."""
    source = data.draw(st.lists(st.integers(-2, 12), min_size=7, max_size=7))
    x = normal(7, K)
    with world.manager.prepare(names, token_counts=counts, pad_to=9) as batch:
        found = mapped_tokens(world.model, x, np.array(source, np.int32), batch)
    tokens = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
    assert_close(found, world.expected(x, named(tokens, source)))


def test_the_length_of_tokens_comes_from_an_earlier_layer_or_the_map(world):
    source = np.array([5, 0, 3, 1], np.int32)
    x, adapters = normal(4, K), named(["one", "one", None, None, "two", "two"], source)

    @jax.jit
    def shown(model, x, whole, source, batch):
        with jlora.use(batch, without=["*"]):
            model.proj(whole)
            with jlora.rows(jlora.RowMap(source, of="tokens")):
                return model.proj(x)

    @jax.jit
    def said(model, x, source, batch):
        with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source, of="tokens", length=2)):
            return model.proj(x)

    @jax.jit
    def two_lengths(model, x, source, batch):
        with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source, of="tokens")):
            with jlora.rows(None):
                for length in (2, 1):
                    model.proj(jnp.zeros((3, length, K)))
            return model.proj(x)

    with world.manager.prepare(NAMES) as batch:
        assert_close(shown(world.model, x, normal(3, 2, K), source, batch), world.expected(x, adapters))
        assert_close(said(world.model, x, source, batch), world.expected(x, adapters))
        with pytest.raises(jlora.LoRAUsageError, match=r"how many rows a sequence has.*seen in this forward: none"):
            mapped_tokens(world.model, x, source, batch)
        with pytest.raises(jlora.LoRAUsageError, match=r"RowMap\(\.\.\., length=\)"):
            two_lengths(world.model, x, source, batch)


def test_mapped_rows_of_a_lookup_take_their_adapters(world):
    """The embedding reads a column of A for each row by its slot."""
    tokens, source = np.array([3, 10, 3, 0], np.int32), np.array([2, 0, 1, 2], np.int32)

    @jax.jit
    def lookup(model, tokens, source, batch):
        with jlora.use(batch, without=["*"]), jlora.rows(jlora.RowMap(source)):
            return model.embed(tokens)

    with world.manager.prepare(NAMES) as batch:
        found = lookup(world.model, tokens, source, batch)
    lora = ADAPTERS[1].modules["embed"]
    expected = np.asarray(world.bare.embed.embedding[...], np.float64)[tokens]
    for m, (token, index) in enumerate(zip(tokens, source, strict=True)):
        if NAMES[index] == "two":
            expected[m] += lora.scaling * lora.b @ lora.a[:, token]
    assert_close(found, expected)


def test_a_map_ends_with_an_exception(world):
    x = normal(3, K)
    with world.manager.prepare(NAMES) as batch, jlora.use(batch, without=["*"]):
        with pytest.raises(ZeroDivisionError), jlora.rows(jlora.RowMap(np.array([2, 2, 2]))):
            raise ZeroDivisionError
        assert_close(world.model.proj(jnp.asarray(x)), world.expected(x, NAMES))


@pytest.mark.parametrize("rows", [(6,), (3, 3)])
def test_rows_of_another_number_than_the_map_are_refused(world, rows):
    with (
        world.manager.prepare(["odd", None, None]) as batch,  # also for a layer without weights in the batch's adapters
        pytest.raises(jlora.LoRAUsageError, match=r"proj: .* rows of shape .*, and a RowMap of 7 rows"),
    ):
        mapped(world.model, normal(*rows, K), np.zeros(7, np.int32), batch)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize(
    ("source", "of", "reason"),
    [
        (np.zeros(3, np.float32), "sequences", r"vector of integers.* got float32\[3\]"),
        (np.zeros((3, 1), np.int32), "sequences", r"vector of integers.* got int32\[3, 1\]"),
        (np.zeros(3, bool), "sequences", r"vector of integers.* got bool"),
        (np.zeros(3, np.int32), "rows", r"""must be "sequences" or "tokens", got 'rows'"""),
    ],
)
def test_malformed_maps_are_refused(source, of, reason):
    with pytest.raises(jlora.LoRAUsageError, match=reason):
        jlora.RowMap(source, of=of)


@pytest.mark.usefixtures("unchecked_calls")
def test_rows_takes_a_map_or_none():
    with pytest.raises(jlora.LoRAUsageError, match=r"takes a RowMap or None, got ndarray"), jlora.rows(np.zeros(3)):  # type: ignore[arg-type]
        pass


def test_indices_of_a_narrow_integer_type(world):
    """A batch may have more sequences than a narrow type can count."""
    names = ["one" if i == 120 else "two" if i == 44 else None for i in range(300)]
    source = np.array([120, 44, 0, 45], np.int8)
    x = normal(4, K)
    with world.manager.prepare(names, length=1) as batch:
        for step in (mapped, mapped_tokens):
            assert_close(step(world.model, x, source, batch), world.expected(x, ["one", "two", None, None]))


# --- RowMap under transformations -----------------------------------------------------------------------------------

X, SOURCE = normal(4, K), np.array([2, 0, 1, 0], np.int32)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "remat"])
def test_a_shared_function_is_traced_for_each_map(world, wrap):
    """JAX caches the trace of `block`, which must not be reused for other rows."""
    block = wrap(lambda layer, x: layer(x))

    @jax.jit
    def step(model, x, source, batch):
        with jlora.use(batch, without=["*"]):
            row_map, outs = jlora.RowMap(source), []
            outs.append(block(model.proj, x))
            with jlora.rows(row_map):
                outs.append(block(model.proj, x))
                with jlora.rows(None):
                    outs.append(block(model.proj, x))
                with jlora.rows(jlora.RowMap(source[::-1])):
                    outs.append(block(model.proj, x))
            with jlora.rows(row_map):
                outs.append(block(model.proj, x))
            outs.append(model.proj(x))
            return outs

    x, source = X[:3], SOURCE[:3]
    inside, reverse = named(NAMES, source), named(NAMES, source[::-1])
    with world.manager.prepare(NAMES) as batch:
        found = step(world.model, x, source, batch)
    for out, names in zip(found, (NAMES, inside, NAMES, reverse, inside, NAMES), strict=True):
        assert_close(out, world.expected(x, names))


def test_a_map_opened_outside_jit_raises(world):
    """The map would become a constant, and functions compiled without it would ignore it."""

    @jax.jit
    def step(model, x, batch):
        with jlora.use(batch, without=["*"]):
            return model.proj(x)

    with world.manager.prepare(NAMES) as batch:
        for _ in range(2):
            assert_close(step(world.model, X[:3], batch), world.expected(X[:3], NAMES))
            with (
                jlora.rows(jlora.RowMap(SOURCE[:3])),
                pytest.raises(jlora.LoRAError, match=r"proj: this RowMap was opened outside `jax.jit`"),
            ):
                step(world.model, X[:3], batch)
            with jlora.rows(jlora.RowMap(SOURCE[:3])), jlora.rows(None):
                assert_close(step(world.model, X[:3], batch), world.expected(X[:3], NAMES))

"""Layouts of rows that are served, and rows of no sequence."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jlora
from tests.layers.merging import assert_close, normal
from tests.layers.rowwise import NAMES, K, N, World, base_of, bits

pytestmark = pytest.mark.device


@pytest.fixture(scope="module")
def world():
    return World()


@jax.jit
def through_proj(model, x, batch):
    with jlora.use(batch, without=["*"]):
        return model.proj(x)


@jax.jit
def through_both(model, x, odd, batch):
    """Run `other` on rows that may fit no layout, then `proj` on rows of the batch."""
    with jlora.use(batch, without=["*"]):
        return model.other(odd), model.proj(x)


# --- Layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [(), (2, 1, 3), (3, 3)])
def test_the_first_axis_is_the_batch(world, between):
    """[B, heads, L, F] and deeper, also if another axis is as long as the batch."""
    x = normal(3, *between, K)
    repeats = int(np.prod(between))
    with world.manager.prepare(NAMES) as batch:
        found = through_proj(world.model, x, batch)
    expected = world.expected(x.reshape(-1, K), np.repeat(np.array(NAMES, object), repeats))
    assert_close(found.reshape(-1, N), expected)


def test_flattened_rows_need_a_length_that_was_declared_or_seen_before(world):
    x = normal(6, K)
    adapters = ["one", "one", None, None, "two", "two"]

    @jax.jit
    def seen(model, x, batch, order):
        with jlora.use(batch, without=["*"]):
            outs = {}
            for step in ("whole", "flat") if order.size == 1 else ("flat", "whole"):
                outs[step] = model.proj(x.reshape(3, 2, K) if step == "whole" else x)
            return outs

    with world.manager.prepare(NAMES) as batch:
        outs = seen(world.model, x, batch, jnp.zeros(1))
        for out in outs.values():
            assert_close(out.reshape(-1, N), world.expected(x, adapters))
        with pytest.raises(jlora.LoRAError, match=r"proj: its rows of shape \(6,\) fit no layout"):
            seen(world.model, x, batch, jnp.zeros(2))  # before any layer defines the length
    with world.manager.prepare(NAMES, length=2) as batch:
        for order in (1, 2):
            for out in seen(world.model, x, batch, jnp.zeros(order)).values():
                assert_close(out.reshape(-1, N), world.expected(x, adapters))


def test_rows_of_four_axes_define_no_length(world):
    """With two axes between batch and features, neither defines the length."""

    @jax.jit
    def step(model, deep, flat, batch):
        with jlora.use(batch, without=["*"]):
            return model.proj(deep), model.proj(flat)

    with world.manager.prepare(NAMES) as batch:
        for rows in (6, 12):
            with pytest.raises(jlora.LoRAError, match=rf"proj: its rows of shape \({rows},\)"):
                step(world.model, normal(3, 2, 4, K), normal(rows, K), batch)


@pytest.mark.usefixtures("unchecked_calls")
@pytest.mark.parametrize("length", [0, 1.5, "2"])
def test_a_length_is_a_positive_integer(world, length):
    with pytest.raises(jlora.LoRAUsageError, match="length must be"):
        world.manager.prepare(NAMES, length=length)
    with pytest.raises(jlora.LoRAUsageError, match=r"RowMap.length must be a positive int"):
        jlora.RowMap(np.zeros(2, np.int32), of="tokens", length=length)


# --- Rows of no sequence --------------------------------------------------------------------------------------------

# Kind of rows, their shape, and the options of the batch of three.
NOBODYS = {
    "patches of an image that the sequences share": ((12,), {}),
    "rows by length of a batch of another size": ((6, 4), {}),
    "rows of another declared length": ((9,), {"length": 2}),
    "packed rows short of their padding": ((4,), {"token_counts": [1, 2, 1], "pad_to": 8}),
}


@pytest.mark.parametrize("what", NOBODYS)
def test_rows_of_no_sequence_raise_until_verify_makes_their_layer_unserved(what):
    """After verify, adapters for that layer are refused, others are served, and it serves the bits of the base."""
    world = World()
    lead, options = NOBODYS[what]
    packed = "token_counts" in options
    rows, odd = normal(options.get("pad_to", 4), K) if packed else normal(3, 2, K), normal(*lead, K, seed=1)
    if "pad_to" in options:
        names = ["one", None, None, "two", None, None, None, None]
    else:
        names = ["one", None, None, "two"] if packed else ["one", "one", None, None, "two", "two"]
    reason = rf"its rows of shape {re.escape(str(lead))} fit no layout"
    for batch_of in (NAMES, [None] * 3):
        with (
            world.manager.prepare(batch_of, **options) as batch,
            pytest.raises(jlora.LoRAError, match=rf"other: {reason}"),
        ):
            through_both(world.model, rows, odd, batch)
    shape = jlora.BatchShape(3, **options)
    report = world.manager.verify(lambda m, x, b: through_both(m, x, odd, b)[1], rows, shape)
    assert report.checked == ("proj",)
    assert re.match(reason, world.manager.unserved["other"])
    one = ["one", None, "one"]  # `embed` was not called, and "two" brings weights for it
    with world.manager.prepare(one, **options) as batch:
        found_odd, found = through_both(world.model, rows, odd, batch)
    np.testing.assert_array_equal(bits(found_odd), bits(base_of(world.bare.other, odd)))
    expected = world.expected(rows.reshape(-1, K), ["one" if name == "two" else name for name in names])
    assert_close(found.reshape(-1, N), expected)
    with pytest.raises(jlora.AdapterMismatchError, match=rf"'odd': .* 'other', which takes no adapter: {reason}"):
        world.manager.prepare([*NAMES[:2], "odd"], **options)

"""Rows of slots against loops over single values."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jlora.layers.site import SlotSpec
from jlora.slots.codec import Part, decode, encode, taken, to_stored

IN, OUTS, RANK = 6, (4, 2, 4), 5
ORDERS = {"plain": ((), ()), "reordered": (((3, 3), (-1, 2), (0, 3)), ((4, 6), (0, 4), (-1, 3)))}


def spec_of(order="plain", dtype="float32") -> SlotSpec:
    ins, outs = ORDERS[order]
    return SlotSpec(None, 2, IN, OUTS, RANK, dtype, in_blocks=ins, out_blocks=outs)


def places(blocks, size: int) -> list[int | None]:
    """Return the adapter's feature at each stored place, None for padding."""
    if not blocks:
        return list(range(size))
    return [None if first < 0 else first + i for first, count in blocks for i in range(count)]


def expected(spec: SlotSpec, parts) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B as stored, value by value."""
    ins, outs = places(spec.in_blocks, IN), places(spec.out_blocks, sum(OUTS))
    slice_of = [i for i, size in enumerate(OUTS) for _ in range(size)]
    a, b = np.zeros((len(OUTS), RANK, len(ins)), "f4"), np.zeros((RANK, len(outs)), "f4")
    for part in parts:
        start = slice_of.index(part.first)
        for r in range(part.rank):
            for at, k in enumerate(ins):
                for i in range(part.first, part.first + part.slices):
                    a[i, r, at] = 0 if k is None else part.a[r, k]
            for at, n in enumerate(outs):
                if n is not None and part.first <= slice_of[n] < part.first + part.slices:
                    b[r, at] = part.b[n - start, r]
    return a, b


def drawn(rng, first: int, slices: int, rank: int, dtype="float32") -> Part:
    outputs = sum(OUTS[first : first + slices])
    a, b = rng.normal(size=(rank, IN)), rng.normal(size=(outputs, rank))
    return Part(first, slices, rank, a.astype(dtype), b.astype(dtype))


@given(st.data())
def test_modules_lie_where_a_loop_puts_them(data):
    spec = spec_of(data.draw(st.sampled_from(sorted(ORDERS))))
    cuts = data.draw(st.sampled_from([[(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 1)], [(1, 2)], [(0, 3)], []]))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    parts = [drawn(rng, first, slices, data.draw(st.sampled_from([2, RANK]))) for first, slices in cuts]
    for xp in (np, jnp):
        given = [part._replace(a=xp.asarray(part.a), b=xp.asarray(part.b)) for part in parts]
        found = encode(spec, [(None, given)], RANK, xp)
        for array, want in zip(found[:2], expected(spec, parts), strict=True):
            np.testing.assert_array_equal(array[0], want)
    a, b = (half[0] for half in decode(spec, encode(spec, [(None, parts)], RANK, np)))
    for part in parts:
        where = part.first, part.slices, part.rank
        np.testing.assert_array_equal(taken(spec, 0, a, *where), part.a)
        np.testing.assert_array_equal(taken(spec, 1, b, *where), part.b)


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_part_without_a_factor_keeps_that_of_before(rng, xp, dtype):
    spec, old = spec_of(dtype=dtype), drawn(rng, 0, 3, RANK)
    cast = [old._replace(a=old.a.astype(jnp.dtype(dtype)), b=old.b.astype(jnp.dtype(dtype)))]
    before = [half[0] for half in decode(spec, encode(spec, [(None, cast)], RANK, np))]
    new = drawn(rng, 1, 1, 2)
    part = Part(1, 1, 2, None, xp.asarray(new.b.astype(jnp.dtype(dtype))))
    rows = [(before, [part]), (None, [])]
    a, b, _ = encode(spec, rows, RANK, xp)
    np.testing.assert_array_equal(np.asarray(a[0]), np.broadcast_to(cast[0].a, (3, RANK, IN)))
    wanted = np.array(cast[0].b.T)
    wanted[:, 4:6] = 0
    wanted[:2, 4:6] = new.b.T.astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(b[0]), wanted)
    assert not np.asarray(a[1]).any()
    assert not np.asarray(b[1]).any()


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_int8_changes_a_value_by_half_a_step_at_most(rng, order):
    spec = spec_of(order, "int8")
    part = drawn(rng, 0, 3, RANK)
    found = encode(spec, [(None, [part])], RANK, np)
    a, b = (half[0] for half in decode(spec, found))
    steps = np.abs(part.a).max(axis=1) / 127
    assert (np.abs(a - part.a) <= steps[:, None] * 0.5001).all()
    starts = np.cumsum((0, *OUTS))
    for i in range(len(OUTS)):  # each slice has steps of its own
        own = part.b.T[:, starts[i] : starts[i + 1]]
        step = np.abs(own).max(axis=1) / 127
        assert (np.abs(b[:, starts[i] : starts[i + 1]] - own) <= step[:, None] * 0.5001).all()
    on_device = encode(spec, [(None, [part._replace(a=jnp.asarray(part.a), b=jnp.asarray(part.b))])], RANK, jnp)
    for host, device in zip(found[:2], on_device[:2], strict=True):
        assert np.abs(np.asarray(device, int) - host).max() <= 1
    np.testing.assert_allclose(np.asarray(on_device.largest) / 127, found.largest, rtol=1e-6)


def test_padding_has_the_fill(rng):
    values = np.arange(sum(OUTS), dtype=np.float32)
    stored = to_stored(values, spec_of("reordered"), 1, np, fill=1.0)
    np.testing.assert_array_equal(stored, [4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 1, 1, 1])

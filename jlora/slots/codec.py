"""How the tensors of an adapter lie in slots, for NumPy arrays, JAX arrays and traces.

An entry of a site holds A [n, R, K] and B [R, N] for its n output slices. A module fills some adjacent slices: its A
[r, K] is repeated for each of them, and its B [N', r] lies transposed in their columns. On meshes whose shards hold
the features in another order than the adapter's, K and N are reordered and padded. In int8 a row of A, and a row of
each slice of B, is rounded with a quantum of its own.

`encode` writes modules into entries, and `decode` is its inverse. Loads write the same places in parts (`places`), so
that an adapter of gigabytes is not in memory twice.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np

from jlora.adapters.int8 import quanta_of, restored, rounded
from jlora.layers.site import SlotSpec
from jlora.slots.casting import bits_of

A, B = 0, 1  # the halves of an entry
Run: TypeAlias = tuple[slice, slice]  # features of the adapter, and their places as stored


class Part(NamedTuple):
    """One module in an entry: its first output slice, the number of its slices, its rank, and its factors as in PEFT.

    A is [r, K] and B is [N', r]. A factor that is None keeps its place.
    """

    first: int
    slices: int
    rank: int
    a: Any = None
    b: Any = None


class Encoded(NamedTuple):
    """Entries of a site as stored: A [entries, n, R, K] and B [entries, R, N].

    For int8, `largest` [2, entries, n, R] gives the quanta of A and of each slice of B. It is the quanta in NumPy, and
    the largest magnitudes in JAX, which has no float64.
    """

    a: Any
    b: Any
    largest: Any = None


def outputs(spec: SlotSpec, first: int, count: int) -> slice:
    """Return the features of N of `count` output slices from `first` on, in the adapter's order."""
    start = sum(spec.out_sizes[:first])
    return slice(start, start + sum(spec.out_sizes[first : first + count]))


def place(spec: SlotSpec, half: int, first: int, count: int, rank: int) -> tuple[slice, slice]:
    """Return the indices of a module in A [..., n, R, K] or B [..., R, N] of its entry, without those of K."""
    if half == A:
        return slice(first, first + count), slice(rank)
    return slice(rank), outputs(spec, first, count)


def places(spec: SlotSpec, half: int, first: int = 0, count: int | None = None) -> list[Run]:
    """Return the runs of a module's features: those of K, or those of N counted from its first one."""
    module = slice(0, spec.in_features) if half == A else outputs(spec, first, spec.slices if count is None else count)
    found: list[Run] = []
    for features, stored in (spec.in_runs, spec.out_runs)[half]:
        begin, end = max(features.start, module.start), min(features.stop, module.stop)
        if begin < end:
            at = stored.start + begin - features.start
            found.append((slice(begin - module.start, end - module.start), slice(at, at + end - begin)))
    return found


def is_reordered(spec: SlotSpec, half: int) -> bool:
    """Return True if the stored order of K or N differs from the adapter's."""
    return bool((spec.in_blocks, spec.out_blocks)[half])


def to_stored(array: Any, spec: SlotSpec, half: int, xp: Any, fill: float = 0) -> Any:
    """Return an array [..., K or N] in the stored order of features, with `fill` for padding."""
    blocks = (spec.in_blocks, spec.out_blocks)[half]
    if not blocks:
        return array
    lead = array.shape[:-1]
    runs = [
        xp.full((*lead, count), fill, array.dtype) if first < 0 else array[..., first : first + count]
        for first, count in blocks
    ]
    return xp.concatenate(runs, axis=-1)


def from_stored(array: Any, spec: SlotSpec, half: int) -> Any:
    """Return a NumPy array [..., K or N as stored] in the adapter's order of features."""
    if not is_reordered(spec, half):
        return array
    found = np.zeros((*array.shape[:-1], (spec.in_features, spec.out_features)[half]), array.dtype)
    for features, stored in places(spec, half):
        found[..., features] = array[..., stored]
    return found


def taken(spec: SlotSpec, half: int, factor: Any, first: int, count: int, rank: int) -> Any:
    """Return a module's A [r, K] or B [N', r] of A [n, R, K] or B [R, N] of its entry; of A that of its first slice."""
    found = factor[place(spec, half, first, count, rank)]
    return found.T if half else found[0]


def with_rank(factor: Any, rank: int, xp: Any) -> Any:
    """Return a factor [..., r, X], cut or padded with zeros to `rank`."""
    if (found := factor.shape[-2]) >= rank:
        return factor[..., :rank, :]
    return xp.pad(factor, [(0, 0)] * (factor.ndim - 2) + [(0, rank - found), (0, 0)])


def encode(spec: SlotSpec, entries: Sequence[tuple[Any, Iterable[Part]]], rank: int, xp: Any) -> Encoded:
    """Return entries with modules written into them, in the dtype of the slots.

    Args:
      spec: Spec of the site.
      entries: For each entry, its present factors (A [n, R, K], B [R, N]) as `decode` returns them, or None for zeros,
        and the modules to write. Arrays in JAX are not changed; those of NumPy are.
      rank: R of the result.
      xp: `numpy` or `jax.numpy`.
    """
    made = [_written(spec, before, parts, rank, xp) for before, parts in entries]
    a, b = (halves[0][None] if len(made) == 1 else xp.stack(halves) for halves in zip(*made, strict=True))
    largest = None
    if spec.dtype == "int8":
        a, of_a = _in_int8(a, xp)
        slices = [_in_int8(b[..., outputs(spec, i, 1)], xp) for i in range(spec.slices)]
        b = xp.concatenate([codes for codes, _ in slices], axis=-1)
        largest = xp.stack([of_a, xp.stack([own for _, own in slices], axis=1)])
    return Encoded(to_stored(a, spec, A, xp), to_stored(b, spec, B, xp), largest)


def decode(spec: SlotSpec, entries: Encoded) -> tuple[Any, Any]:
    """Return A [entries, n, R, K] and B [entries, R, N] of NumPy in the adapter's order, float32 for int8."""
    a, b = from_stored(entries.a, spec, A), from_stored(entries.b, spec, B)
    if spec.dtype == "int8":
        of_a, of_b = entries.largest
        a = restored(a, of_a)
        parts = [restored(b[..., outputs(spec, i, 1)], of_b[:, i]) for i in range(spec.slices)]
        b = np.concatenate(parts, axis=-1)
    return a, b


def _written(spec: SlotSpec, before: Any, parts: Iterable[Part], rank: int, xp: Any) -> tuple[Any, Any]:
    """Return A [n, R, K] and B [R, N] of an entry with the modules written into them."""
    if before is None:
        halves = [
            xp.zeros((spec.slices, rank, spec.in_features), spec.float_dtype),
            xp.zeros((rank, spec.out_features), spec.float_dtype),
        ]
    else:
        halves = [with_rank(xp.asarray(factor), rank, xp) for factor in before]
    for part in parts:
        for half, new in ((A, part.a), (B, part.b)):
            if new is not None:
                new = (new.T if half else new[None]).astype(spec.float_dtype, copy=False)
                where = place(spec, half, part.first, part.slices, rank)
                halves[half] = _set(halves[half], where, with_rank(new, rank, xp))
    return halves[A], halves[B]


def _set(array: Any, where: Any, values: Any) -> Any:
    if isinstance(array, np.ndarray):
        bits = bits_of(values.dtype)
        cast("Any", array).view(bits)[where] = values.view(bits)
        return cast("Any", array)
    return array.at[where].set(values)


def _in_int8(values: Any, xp: Any) -> tuple[Any, Any]:
    """Return the codes of values [..., R, X], and for each row its quantum (NumPy) or its largest magnitude (JAX)."""
    if xp is np:
        quanta = quanta_of(values)
        return rounded(values, quanta), quanta
    largest = xp.abs(values).max(axis=-1, initial=0)
    inverse = 127 / xp.where(largest > 0, largest, 1)
    return xp.rint(values * inverse[..., None]).clip(-127, 127).astype(np.int8), largest

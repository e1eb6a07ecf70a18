"""Tensors are read in runs, parts and pieces: every number is in its place, and an error names its tensor."""

import io
import os
import time
import weakref
from itertools import accumulate, groupby, pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save

from jlora.adapters.files import StableFile
from jlora.adapters.tensor_data import all_finite, read_tensors
from jlora.adapters.tensor_file import read_header
from jlora.errors import AdapterFormatError
from tests.adapters.reading import before_each_read, reading

DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


def read(folder, tensors, base=(), **options):
    file = folder / "some.safetensors"
    file.write_bytes(save(tensors))
    with StableFile(file, "here") as opened:
        return read_tensors(opened, read_header(opened, "here"), base, where="here", **options)


@pytest.fixture(params=[8, 24, 1 << 19])
def piece(request):
    with reading(request.param):
        yield


def some(seed=0):
    """Tensors of all dtypes and many sizes; safetensors orders them by dtype."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 5), (1,), (0, 4), (2, 2, 2), (7,)]
    return {f"{d.name}.{i}": rng.normal(size=s).astype(d) for d in DTYPES for i, s in enumerate(shapes)}


@pytest.mark.parametrize(
    ("whole", "shared"), [(1, [1] * 5), (24, [1] * 5), (25, [2, 2, 1]), (72, [3, 2]), (73, [4, 1]), (121, [5])]
)
def test_a_shared_array_is_limited_in_size_and_freed_with_its_last_tensor(tmp_path, whole, shared):
    tensors = {f"{i}": np.full((2, 3), i, np.float32) for i in range(5)}  # 24 bytes each
    with reading(whole=whole):
        found = read(tmp_path, tensors)
    assert [len(list(of)) for _, of in groupby(id(array.base) for array in found.values())] == shared
    for name, array in tensors.items():
        memory = weakref.ref(found[name].base)
        alone = found.pop(name).tobytes() == array.tobytes()
        assert alone
        assert (memory() is None) == (int(name) + 1 in accumulate(shared))


@pytest.mark.parametrize(
    ("stored", "bad", "place"), [*zip(DTYPES, [np.nan, -np.nan, np.inf, -np.inf], [0, 1, 14, 7], strict=True)]
)
def test_an_error_names_the_tensor_with_nan_or_infinity(tmp_path, piece, stored, bad, place):
    tensors = {name: -np.abs(array) for name, array in some().items()}
    name = f"{stored.name}.0"
    tensors[name].reshape(-1)[place] = np.asarray(bad, stored)
    with pytest.raises(AdapterFormatError, match=f"here: tensor '{name}' holds NaN or infinity"):
        read(tmp_path, tensors)
    found = read(tmp_path, tensors, allow_nonfinite=True)
    assert found[name].tobytes() == tensors[name].tobytes()


@pytest.mark.parametrize("allow_nonfinite", [False, True])
def test_values_too_large_for_the_dtype_are_refused(tmp_path, piece, allow_nonfinite):
    tensors = {"a": np.ones(6, np.float32), "b": np.ones(6, np.float32), "c": np.ones(6, np.float32)}
    tensors["b"][4] = -1e6
    with pytest.raises(AdapterFormatError, match=r"here: tensor 'b' \(float32\) holds values too large for float16"):
        read(tmp_path, tensors, dtype=np.dtype(np.float16), allow_nonfinite=allow_nonfinite)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), min_size=1, max_size=2)), min_size=1, max_size=9
    ),
    part=st.sampled_from([8, 16, 24, 40, 200, 1 << 25]),
    piece=st.sampled_from([8, 16, 56, 1 << 19]),
    whole=st.sampled_from([1, 40, 300, 1 << 26]),
    dtype=st.sampled_from([None, *DTYPES]),
    base=st.sets(st.integers(0, 8), max_size=2),
)
@example(shapes=[(DTYPES[2], [9, 9])] * 3, part=40, piece=16, whole=300, dtype=None, base=set())
def test_every_number_and_each_byte_once(tmp_path_factory, shapes, part, piece, whole, dtype, base):
    rng = np.random.default_rng(0)
    tensors = {f"{i}": rng.normal(size=shape).astype(stored) for i, (stored, shape) in enumerate(shapes)}
    base = {f"{i}" for i in base} & tensors.keys()
    reads = []
    with (
        reading(piece, part, whole, threads=True),
        before_each_read(lambda offset, size: reads.append((offset, offset + size))),
    ):
        found = read(tmp_path_factory.mktemp("read"), tensors, base, dtype=dtype)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        kept = want.dtype if dtype is None or name in base else dtype
        assert (found[name].dtype, found[name].shape) == (kept, want.shape)
        assert found[name].tobytes() == want.astype(kept).tobytes()
    reads.sort()
    assert reads[0][0] == 0
    assert reads[-1][1] == len(save(tensors))
    assert all(end == begin for (_, end), (begin, _) in pairwise(reads))


def ones(count=6, size=32):
    return {f"{i}": np.ones(size, np.float32) for i in range(count)}


@pytest.mark.parametrize("kind", ["not finite", "too large"])
@pytest.mark.parametrize(("part", "place"), [(64, 15), (64, 16), (136, 0), (192, 31)])  # beside borders of two parts
def test_the_first_wrong_tensor_is_named_although_a_later_read_ends_first(tmp_path, part, kind, place):
    tensors = ones()
    for name in ("2", "3", "4", "5"):
        tensors[name][place] = np.nan if kind == "not finite" else -1e6
    begin = len(save(tensors)) - 6 * 128  # of the tensors
    message = "holds NaN or infinity" if kind == "not finite" else r"\(float32\) holds values too large for float16"
    with (
        reading(part=part, threads=True),
        before_each_read(lambda offset, size: time.sleep(0.05 if 8 < offset < begin + 3 * 128 else 0)),
        pytest.raises(AdapterFormatError, match=f"here: tensor '2' {message}"),
    ):
        read(tmp_path, tensors, dtype=np.dtype(np.float16) if kind == "too large" else None)


def test_arrays_cannot_be_written(tmp_path):
    """Adapters in the cache are views of one array, so a write to one could change another."""
    with reading(part=128, threads=True):
        found = read(tmp_path, ones(), base=["3"], dtype=np.dtype(np.float16))
    for array in found.values():
        for view in (array, array.view(), array[1:], array.reshape(4, 8).T, array.base):
            assert not view.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                view[...] = 0
        for view in (array, array.view(), array[1:]):
            with pytest.raises(ValueError, match="cannot set WRITEABLE flag"):
                view.flags.writeable = True


class SlowSeek(io.FileIO):
    """Leave time for other threads between a seek and the read."""

    def seek(self, *place):
        super().seek(*place)
        time.sleep(0.002)


@pytest.mark.parametrize("most", [1, 3, None])
def test_short_reads_and_systems_without_positioned_reads(tmp_path, monkeypatch, most):
    if most is None:
        monkeypatch.delattr(os, "preadv")
        monkeypatch.setattr(os, "fdopen", lambda fd, mode, buffering: SlowSeek(fd, mode))
    else:
        original = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: original(fd, [buffers[0][:most]], at))
    tensors = {name: np.full(32, int(name), np.float32) for name in ones()}
    with reading(part=128, threads=True):
        found = read(tmp_path, tensors)
    assert all((array == int(name)).all() for name, array in found.items())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_bit_pattern(dtype):
    """All 65,536 numbers of two bytes, and as many of the wider ones, each alone among finite ones."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    width = np.dtype(dtype).itemsize
    numbers = bits.view(dtype) if width == 2 else (bits.astype(f"u{width}") << (8 * width - 16)).view(dtype)
    finite = np.array([np.isfinite(float(number)) for number in numbers])
    assert finite.any()
    assert not finite.all()
    assert all_finite(numbers[finite])
    assert not any(all_finite(numbers[i : i + 1]) for i in np.flatnonzero(~finite))
    assert all(all_finite(numbers[i : i + 1]) for i in np.flatnonzero(finite)[::97])

"""Tensors read in runs and pieces: each number where it belongs, and the tensor at fault named."""

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from jlora.adapters import values
from jlora.adapters.files import StableFile
from jlora.adapters.tensor_file import read_header
from jlora.adapters.values import all_finite, read_tensors
from jlora.errors import AdapterFormatError

DTYPES = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]


def read(folder, tensors, base=(), **options):
    file = folder / "some.safetensors"
    file.write_bytes(save(tensors))
    with StableFile(file, "here") as opened:
        return read_tensors(opened, read_header(opened, "here"), base, where="here", **options)


@pytest.fixture(params=[8, 24, 1 << 19])
def piece(request, monkeypatch):
    monkeypatch.setattr(values, "_PIECE", request.param)


def some(seed=0):
    """Tensors of all dtypes and many sizes; safetensors orders them by dtype."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 5), (1,), (0, 4), (2, 2, 2), (7,)]
    return {f"{d.name}.{i}": rng.normal(size=s).astype(d) for d in DTYPES for i, s in enumerate(shapes)}


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_every_number(tmp_path, piece, dtype):
    found = read(tmp_path, some(), dtype=dtype)
    assert found.keys() == some().keys()
    for name, want in some().items():
        got = found[name]
        assert got.dtype == (want.dtype if dtype is None else dtype)
        assert not got.flags.writeable
        assert got.tobytes() == want.astype(got.dtype).tobytes()
        assert got.shape == want.shape


def test_neighbours_share_memory_and_base_weights_do_not(tmp_path):
    names = [f"{i}" for i in range(5)]
    tensors = {name: np.full((2, 3), i, np.float32) for i, name in enumerate(names)}
    found = read(tmp_path, tensors, base=["2"], dtype=np.dtype(np.float16))
    assert found["0"].base is found["1"].base
    assert found["3"].base is found["4"].base
    assert found["2"].base.size == 6
    assert [found[name].dtype.name for name in names] == ["float16", "float16", "float32", "float16", "float16"]


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1, 14])
def test_the_tensor_at_fault(tmp_path, piece, stored, bad, place):
    tensors = {name: -np.abs(array) for name, array in some().items()}
    name = f"{stored.name}.0"
    tensors[name].reshape(-1)[place] = np.asarray(bad, stored)
    with pytest.raises(AdapterFormatError, match=f"here: tensor '{name}' holds NaN or infinity"):
        read(tmp_path, tensors)
    found = read(tmp_path, tensors, allow_nonfinite=True)
    assert found[name].tobytes() == tensors[name].tobytes()


@pytest.mark.parametrize("allow_nonfinite", [False, True])
def test_too_large_for_the_dtype(tmp_path, piece, allow_nonfinite):
    tensors = {"a": np.ones(6, np.float32), "b": np.ones(6, np.float32), "c": np.ones(6, np.float32)}
    tensors["b"][4] = -1e6
    with pytest.raises(AdapterFormatError, match=r"here: tensor 'b' \(float32\) holds values too large for float16"):
        read(tmp_path, tensors, dtype=np.dtype(np.float16), allow_nonfinite=allow_nonfinite)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_are_finite(dtype):
    largest = ml_dtypes.finfo(dtype).max
    assert all_finite(np.array([0.0, -0.0, largest, -largest], dtype))
    assert all_finite(np.array([], dtype))
    assert all_finite(np.array([[-1.0]], dtype))


@given(st.lists(st.integers(0, 2**16 - 1), max_size=6), st.sampled_from(["float16", "bfloat16"]))
def test_all_bits_of_short_floats(bits, name):
    array = np.array(bits, np.uint16).view(np.dtype(getattr(ml_dtypes, name, np.float16)))
    assert all_finite(array) == bool(np.isfinite(array.astype(np.float64)).all())


@given(st.lists(st.floats(width=64), max_size=6))
def test_all_bits_of_doubles(numbers):
    assert all_finite(np.array(numbers)) == all(abs(n) < float("inf") for n in numbers)
    singles = [struct.unpack("<f", struct.pack("<I", hash(n) & 0xFFFFFFFF))[0] for n in numbers]
    assert all_finite(np.array(singles, np.float32)) == all(abs(n) < float("inf") for n in singles)

"""Safetensors files read as by the format's own reader, and ambiguous files are refused."""

import json
import os
import struct
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from jlora.adapters import Adapter
from jlora.adapters.files import StableFile
from jlora.adapters.tensor_file import read_header
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAUsageError
from tests.adapters.conftest import PREFIX, Q, V, lora_tensors

WEIGHTS = "adapter_model.safetensors"
A, B = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


def written(header, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def read(path, content: bytes):
    path.write_bytes(content)
    with StableFile(path, "here") as opened:
        return {
            name: (info.dtype, info.shape, opened.read(info.start, info.end - info.start))
            for name, info in read_header(opened, "here").items()
        }


DTYPES = ["bool", "uint8", "int8", "int16", "uint32", "int64", "float16", "float32", "float64", ml_dtypes.bfloat16]


@given(
    st.dictionaries(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)),
        max_size=5,
    ),
    # safetensors itself writes no JSON for no tensors and empty metadata
    st.one_of(st.none(), st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1)),
)
def test_reads_files_of_safetensors(tmp_path_factory, tensors, metadata):
    path = tmp_path_factory.mktemp("tensors") / "file"
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in tensors.items()}
    found = read(path, save(arrays, metadata))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name][1:] == (array.shape, array.tobytes())


PLACES = st.integers(0, 9)


@settings(max_examples=10 * settings().max_examples)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "c", "__metadata__"]),
            st.sampled_from(["F32", "U8", "F16", "I64", "F4", "F31", ""]),
            st.one_of(st.lists(st.integers(-1, 4), max_size=3), st.none()),
            st.lists(st.integers(-1, 24), min_size=1, max_size=3),
        ),
        max_size=3,
    ),
    st.integers(0, 24),
)
def test_refuses_all_that_safetensors_refuses(tmp_path_factory, entries, size):
    path = tmp_path_factory.mktemp("tensors") / "file"
    members = [
        f"{json.dumps(name)}: {json.dumps({'dtype': dtype, 'shape': shape, 'data_offsets': offsets})}"
        for name, dtype, shape, offsets in entries
    ]
    content = written(("{" + ", ".join(members) + "}").encode(), bytes(size))
    try:
        found = read(path, content)
    except AdapterFormatError:
        return
    with safetensors.safe_open(path, "numpy") as opened:
        assert set(opened.keys()) == set(found)
        for name, (dtype, shape, _) in found.items():
            assert (dtype, list(shape)) == (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape())


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)} | more


REFUSED = {
    "hole": ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "tensor 'b' begins at byte .* expected"),
    "overlap": ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "tensor 'b' begins at byte"),
    "beyond the end": ({"a": entry()}, 7, "has .* bytes; expected"),
    "backwards": ({"a": entry(offsets=(8, 0))}, 8, "expected 8 bytes"),
    "too few bytes": ({"a": entry(offsets=(0, 4))}, 4, "expected 8 bytes"),
    "huge": ({"a": entry(shape=(2**62, 2**62))}, 8, "data_offsets"),
    "three offsets": ({"a": entry(offsets=(0, 8, 8))}, 8, "3 data_offsets"),
    "negative": ({"a": entry(shape=(-2,), offsets=(0, -8))}, 8, "whole numbers"),
    "fraction": ({"a": entry(shape=(2.0,))}, 8, "whole numbers"),
    "unknown dtype": ({"a": entry("F31")}, 8, "dtype 'F31'"),
    "dtype is a list": ({"a": entry(["F32"])}, 8, "dtype"),
    "no shape": ({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8, "must have dtype, shape and data_offsets"),
    "another field": ({"a": entry(extra=1)}, 8, "must have dtype, shape and data_offsets"),
    "metadata": ({"__metadata__": 3, "a": entry()}, 8, "__metadata__"),
    "NaN": (b'{"a": NaN}', 0, "NaN"),
    "space first": (b' {"a": 3}', 0, "begin with a brace"),
    "lone surrogate": (rb'{"\ud800": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8, "ud800"),
    "deep": (b'{"a":' + b"[" * 200_000, 0, "is not JSON"),
    "huge number": (b'{"a":' + b"1" * 5000 + b"}", 0, "is not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_headers(tmp_path, case):
    header, size, words = REFUSED[case]
    with pytest.raises(AdapterFormatError, match=f"here: is not a whole safetensors file: .*{words}") as raised:
        read(tmp_path / "file", written(header, bytes(size)))
    assert str(raised.value).isprintable()


def test_a_tensor_that_is_named_twice(folder_of):
    """The format's own reader takes the last; here the two could disagree about which was checked."""
    folder = folder_of()
    whole = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length].rstrip()
    twice = header[:-1] + b"," + json.dumps({A: json.loads(header)[A]}).encode()[1:]
    (folder / WEIGHTS).write_bytes(written(twice, whole[8 + length :]))
    assert A in load((folder / WEIGHTS).read_bytes())
    with pytest.raises(AdapterFormatError, match=rf"tensor '{A}' is given twice"):
        Adapter.from_pretrained(folder)


def sparse(folder, rows):
    """Write a sparse file with a header for a matrix of `rows` rows."""
    header = {A: entry("F32", (rows, 6), (0, 24 * rows)), B: entry("F32", (5, rows), (24 * rows, 44 * rows))}
    (folder / WEIGHTS).write_bytes(written(header))
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + 44 * rows)
    return folder


def refused_unread(error, words, folder, **options):
    tracemalloc.start()
    try:
        with pytest.raises(error, match=words):
            Adapter.from_pretrained(folder, **options)
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


ROWS = 68_000_000  # 3 GB of A and B


def test_a_sparse_file_is_refused_before_it_is_read(folder_of):
    def check(shapes):
        module = shapes.modules[Q]
        raise AdapterMismatchError(f"{shapes.name}: A is {module.a.shape}")

    folder = sparse(folder_of(r=ROWS), ROWS)
    assert (folder / WEIGHTS).stat().st_size > 2.9e9
    refused_unread(AdapterMismatchError, rf"sql: A is \({ROWS}, 6\)", folder, check=check)
    refused_unread(AdapterFormatError, "has rank 68000000; expected 4", sparse(folder_of(), ROWS))


def test_a_sparse_configuration(folder_of):
    folder = folder_of()
    os.truncate(folder / "adapter_config.json", 3 << 30)
    refused_unread(AdapterFormatError, "adapter_config.json: has 3221225472 bytes; at most", folder)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_check_receives_the_adapter_with_its_arrays_unread(folder_of, dtype):
    embed = "model.embed_tokens"
    tensors = lora_tensors({Q: 4, V: 2}, dtype=np.float16) | {
        f"{PREFIX}{embed}.lora_embedding_A": np.ones((4, 11), np.float32),
        f"{PREFIX}{embed}.lora_embedding_B": np.ones((6, 4), np.float64),
        f"{PREFIX}{embed}.base_layer.weight": np.ones((11, 6), np.float32),
    }
    folder = folder_of(tensors, rank_pattern={"v_proj": 2}, target_modules=["q_proj", "v_proj", "embed_tokens"])
    seen = []
    adapter = Adapter.from_pretrained(folder, name="x", dtype=dtype, check=seen.append)
    (unread,) = seen
    assert (unread.name, unread.nbytes) == ("x", adapter.nbytes)
    assert unread.modules.keys() == adapter.modules.keys() == {Q, V, embed}
    for module, lora in unread.modules.items():
        read = adapter.modules[module]
        assert (lora.kind, lora.scaling) == (read.kind, read.scaling)
        for found, want in ((lora.a, read.a), (lora.b, read.b)):
            assert (found.shape, found.dtype) == (want.shape, want.dtype)
    assert (unread.base_weights[embed].shape, unread.base_weights[embed].dtype) == ((11, 6), np.float32)
    with pytest.raises(LoRAUsageError, match=r"q_proj.lora_A.weight' has not been read"):
        np.asarray(unread.modules[Q].a)
    with pytest.raises(LoRAUsageError, match="has not been read"):
        unread.save_pretrained(folder / "copy")

"""A process reads the experts that it owns, and skips the bytes of others where the format allows it."""

import gc
import itertools
import json
import os
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from jlora.adapters import Adapter
from jlora.adapters.adapter import open_adapter
from jlora.adapters.resolve import resolve
from jlora.errors import AdapterFormatError
from tests.adapters.reading import before_each_read, hook_reads, reading
from tests.adapters.test_expert_formats import EXPERTS, FUSED, factors, flat, parameters, tensors, three_axes
from tests.matrix import thinned

E, R = 8, 3
Q = "model.layers.0.self_attn.q_proj"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Layouts of the expert tensors in a file.
KINDS = (
    *("each", "three axes", "gate and up in one", "shared A", "shared B"),
    *("flat", "flat exchanged", "grouped", "grouped exchanged"),
)


def file_of(kind, dtype=np.float32, spoil=None):
    """Return the tensors of a file and fields of its configuration. `spoil(name, expert, a, b)` changes factors."""

    def made(name):
        found = factors(name, E, R, dtype=dtype)
        for e, (a, b) in enumerate(found):
            if spoil is not None:
                spoil(name, e, a, b)
        return found

    q = np.random.default_rng(1).normal(size=(2, R, 5)).astype(dtype)
    modules = {Q: (q[0], q[1].T)}
    if kind == "each":
        modules |= {f"{EXPERTS}.{e}.{name}": pair for name in PROJECTIONS for e, pair in enumerate(made(name))}
        return tensors(modules), {"target_modules": ["q_proj", *PROJECTIONS]}
    if kind in ("three axes", "gate and up in one", "shared A", "shared B"):
        names = ("gate_up_proj", "down_proj") if kind == "gate and up in one" else PROJECTIONS
        how = {"shared_a": kind == "shared A", "shared_b": kind == "shared B"}
        modules |= {f"{EXPERTS}.{name}": three_axes(made(name), **how) for name in names}
        return tensors(modules), {"target_modules": ["q_proj", *names]}
    how = {"grouped": "grouped" in kind, "exchanged": "exchanged" in kind}
    places = {f"{EXPERTS}.base_layer": "gate_up_proj", EXPERTS: "down_proj"}
    modules |= {place: flat(made(name), **how) for place, name in places.items()}
    fields = {"target_modules": ["q_proj"], "lora_B_layout": "grouped_by_expert" if how["grouped"] else "rank_major"}
    return tensors(modules), fields | parameters(*FUSED)


def shares(adapter, own):
    """Return the shares of a process that owns these experts."""
    found = {}
    for name, module in adapter.modules.items():
        expert = name.removeprefix(f"{EXPERTS}.").partition(".")[0]
        if module.kind == "experts":
            found[name] = own
        elif name.startswith(EXPERTS) and not any(int(expert) in some for some in own):
            found[name] = ()
    return found


def wanted(file: Path, kind, own) -> np.ndarray:
    """Return the expected reads of each byte, derived from the header: uint8 [size], 0 for the header."""
    content = file.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    found = np.zeros(len(content), np.uint8)
    for name, info in json.loads(content[8:begin]).items():
        first, last = (begin + at for at in info["data_offsets"])
        numbers = found[first:last].reshape(*info["shape"], -1)  # the bytes of each number last
        if "experts" not in name:
            numbers[...] = 1
        elif kind == "each":
            numbers[...] = any(int(name.split("experts.")[1].split(".")[0]) in some for some in own)
        elif len(info["shape"]) == 3:
            for e in range(E):
                if len(numbers) == 1 or any(e in some for some in own):
                    numbers[e % len(numbers)] = 1
        elif "lora_A" in name:
            for e in range(E):
                numbers[e * R : (e + 1) * R] = any(e in some for some in own)
        else:
            numbers[...] = bool(own)  # experts are interleaved in every row
    return found


def counted(patch: pytest.MonkeyPatch, file: Path):
    """Return the number of reads of each byte until `patch` is undone: uint8 [size], 0 for the header."""
    begin = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    found = np.zeros(file.stat().st_size, np.uint8)

    def count(offset, size):
        if offset >= begin:
            found[offset : offset + size] += 1

    hook_reads(patch, count)
    return found


@pytest.fixture
def small_pieces():
    """Read on several threads, in pieces that cut tensors, and interleaved experts between rows."""
    with reading(80, part=240, threads=True):
        yield


def read(folder, own, dtype=None):
    with open_adapter(resolve(folder), dtype=None if dtype is None else np.dtype(dtype)) as opened:
        return opened.read(shares(opened.adapter, own))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    "own", [OWN[2], *(pytest.param(o, marks=pytest.mark.slow) for o in (*OWN[:2], *OWN[3:]))], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_own_experts_are_read_and_others_are_not(folder_of, kind, own):
    assert_own(folder_of, kind, own, np.float32, None)




def assert_own(folder_of, kind, own, stored, dtype):
    """Compare the numbers, zeros and bytes read with those of a whole read."""
    found, fields = file_of(kind, stored)
    folder = folder_of(found, r=R, **fields)
    whole = Adapter.from_pretrained(folder, dtype=dtype)
    file = folder / "adapter_model.safetensors"
    expected = wanted(file, kind, own)
    with pytest.MonkeyPatch.context() as patch:
        times = counted(patch, file)
        part = read(folder, own, dtype=dtype)
    np.testing.assert_array_equal(times, expected)
    assert list(part.modules) == list(whole.modules)
    seen = set()
    for name, module in whole.modules.items():
        mine = part.modules[name]
        assert all(getattr(mine, fact) == getattr(module, fact) for fact in ("rank", "alpha", "scaling", "kind"))
        for got, want in ((mine.a, module.a), (mine.b, module.b)):
            assert (got.shape, got.dtype, got.flags.writeable) == (want.shape, want.dtype, False)
            experts = range(len(want)) if module.kind == "experts" else [None]
            for e in experts:
                if module.kind == "experts":
                    is_own, one, other = len(want) == 1 or any(e in some for some in own), got[e], want[e]
                else:
                    place = name.removeprefix(f"{EXPERTS}.").partition(".")[0]
                    is_own, one, other = place == "model" or any(int(place) in some for some in own), got, want
                seen.add(is_own)
                assert other.any()
                np.testing.assert_array_equal(one, other if is_own else np.zeros_like(other))
    assert seen == {True, False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_without_shares_reads_every_byte_once(folder_of, kind):
    """The return value of a user's `check` is ignored."""
    found, fields = file_of(kind)
    folder = folder_of(found, r=R, **fields)
    with pytest.MonkeyPatch.context() as patch:
        times = counted(patch, folder / "adapter_model.safetensors")
        whole = Adapter.from_pretrained(folder, check=lambda unread: shares(unread, ()))
        with open_adapter(resolve(folder)) as opened:
            again = opened.read({})
    assert times.max() == 2
    assert times.sum() == 2 * sum(array.nbytes for array in found.values())
    for name, module in whole.modules.items():
        for half in "ab":
            got, want = getattr(again.modules[name], half), getattr(module, half)
            assert got.tobytes() == want.tobytes()
            assert got.strides == want.strides






@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_during_a_partial_read_is_refused(folder_of, kind):
    found, fields = file_of(kind)
    folder = folder_of(found, r=R, **fields)
    file = folder / "adapter_model.safetensors"

    def change_and_read():
        with open_adapter(resolve(folder)) as opened:
            file.write_bytes(file.read_bytes()[:-8] + bytes(8))
            os.utime(file, (1, 1))
            opened.read(shares(opened.adapter, OWN[0]))

    with pytest.raises(AdapterFormatError, match="changed while it was read"):
        change_and_read()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from Linux")
@pytest.mark.parametrize("kind", ["each", "three axes", "flat", "grouped"])
def test_memory_is_proportional_to_the_own_experts(tmp_path, kind):
    """One thread reads an eighth of 64 MB. The peak is the result and one piece."""
    experts, rank, size = 64, 8, 32 << 10  # half a megabyte a factor
    a, b = np.ones((experts, rank, size), np.uint16), np.ones((experts, size, rank), np.uint16)
    a, b = (array.view(ml_dtypes.bfloat16) for array in (a, b))
    a[...], b[...] = 1, 2
    if kind == "each":
        modules = {f"{EXPERTS}.{e}.down_proj": (a[e], b[e]) for e in range(experts)}
    elif kind == "three axes":
        modules = {f"{EXPERTS}.down_proj": (a, b)}
    else:
        columns = b.transpose(1, 0, 2) if kind == "grouped" else b.transpose(1, 2, 0)
        modules = {EXPERTS: (a.reshape(-1, size), columns.reshape(size, -1))}
    layout = "grouped_by_expert" if kind == "grouped" else "rank_major"
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "lora_B_layout": layout}
    targets = {"target_modules": ["down_proj"]} if kind in ("each", "three axes") else parameters("down_proj")
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": []} | targets))
    (tmp_path / "adapter_model.safetensors").write_bytes(save(tensors(modules)))
    del modules, a, b
    own = tuple(range(e, e + 1) for e in range(3, experts, 8))  # each on large pages of its own, if there were any
    read(tmp_path, own)  # loads all code and buffers
    gc.collect()
    before, marks = resident(), []
    with before_each_read(lambda offset, size: marks.append(resident())):
        adapter = read(tmp_path, own)
    share = adapter.nbytes // experts * 8
    assert share == 8 << 20
    assert len(marks) > 8
    assert share - (1 << 20) < resident() - before
    assert max(*marks, resident()) - before < share + (3 << 20)

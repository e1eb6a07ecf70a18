"""Loads by a process that has some of the experts: their blocks equal those of a full load, and others are zero.

Processes are simulated: each virtual device belongs to the process of its shard of experts.
"""

import functools
import json
import os

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

import jlora
from jlora.errors import AdapterFormatError
from jlora.sharding import rules
from tests.adapters.reading import before_each_read, reading
from tests.adapters.test_expert_formats import factors, flat, tensors, three_axes
from tests.layers import expert_models
from tests.layers.expert_models import HIDDEN, INNER, LAYERS, Gathering, Interleaved, Model, Scanned
from tests.records import content_of

E, R = 8, 3
SIZES = {
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
    "gate_up_proj": (HIDDEN, 2 * INNER),
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Layouts of the expert tensors in a file.
KINDS = (
    *("each", "three axes", "gate and up in one", "shared A", "shared B"),
    *("flat", "flat exchanged", "grouped", "grouped exchanged"),
)
EACH, FUSED = KINDS[0], KINDS[5:]


def file_of(kind, experts=range(E), spoil=None):
    """The tensors of a file for `Model`, and fields of its configuration; `spoil`: (layer, part, expert) of a NaN."""
    modules = {}
    for layer in range(LAYERS):
        block = f"layers.{layer}.experts"
        made = {part: factors(f"{part}{layer}", E, R, {f"{part}{layer}": SIZES[part]}) for part in SIZES}
        if spoil is not None and spoil[0] == layer:
            made[spoil[1]][spoil[2]][1][0, 0] = np.nan
        if kind == EACH:
            modules |= {f"{block}.{e}.{part}": made[part][e] for e in experts for part in PROJECTIONS}
        elif kind in FUSED:
            how = {"grouped": "grouped" in kind, "exchanged": "exchanged" in kind}
            places = {f"{block}.base_layer": "gate_up_proj", block: "down_proj"}
            modules |= {place: flat(made[part], **how) for place, part in places.items()}
        else:
            parts = ("gate_up_proj", "down_proj") if kind == "gate and up in one" else PROJECTIONS
            how = {"shared_a": kind == "shared A", "shared_b": kind == "shared B"}
            modules |= {f"{block}.{part}": three_axes(made[part], **how) for part in parts}
    targets = {"target_modules": list(SIZES)}
    if kind in FUSED:
        targets = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
        targets["lora_B_layout"] = "grouped_by_expert" if "grouped" in kind else "rank_major"
    return tensors(modules), {"r": R, **targets}


@pytest.fixture
def folder_of(tmp_path):
    def write(found, name="x", **fields):
        folder = tmp_path / name
        folder.mkdir()
        config = {"peft_type": "LORA", "lora_alpha": 8, **fields}
        (folder / "adapter_config.json").write_text(json.dumps(config))
        save_file(found, folder / "adapter_model.safetensors")
        for file in folder.iterdir():
            os.utime(file, (1, 1))  # a file of just now would be waited for
        return folder

    return write


class World:
    """A manager of a model whose experts are split into four shards, in a process that has some of them."""

    def __init__(self, cls, own, stacked=False, shared=False):
        self.own = [e for e in range(E) if e // 2 in own]
        mesh = Mesh(np.array(jax.devices()).reshape(-1, 4), ("data", "expert"))
        process = {device.id: 0 if at[1] in own else 1 for at, device in np.ndenumerate(mesh.devices)}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(expert_models, "EXPERTS", E)
            patched.setattr(rules, "process_of", lambda device: process[device.id])
            model = (Scanned if stacked else Model)(cls, nnx.Rngs(0))
            for path, param in nnx.iter_graph(model):
                if isinstance(param, nnx.Param):
                    value = param.get_value()
                    split = (*(None,) * (value.ndim - 3), "expert") if "experts" in path else ()
                    param.set_value(jax.device_put(value, NamedSharding(mesh, P(*split))))
            sizes = {"max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 8}
            sizes |= {"expert_slots": {"per_expert": 1, "shared": 1}} if shared else {}
            self.manager = jlora.LoRAManager(model, jlora.LoRAConfig(**sizes))
            for site in self.manager._state.slot_arrays.sites:  # computed once, and kept
                assert site.spec.experts is None or list(site.spec.own_shards) == list(own)

    def packed(self, adapter):
        """Return the packed adapter that the host cache holds after a load."""
        self.manager.add_adapter(adapter)
        content = content_of(self.manager, adapter.name).packed
        self.manager.remove_adapter(adapter.name)
        return content


@functools.cache
def world_of(*args, **config):
    return World(*args, **config)


def assert_same_where_own(part, whole, own):
    """Blocks of the same rows: bitwise the same where the expert is own, and zeros elsewhere."""
    said, expected = ([{**vars(p), "site": p.site.path} for p in found.placements] for found in (part, whole))
    assert said == expected
    np.testing.assert_array_equal(part.ranks, whole.ranks)
    assert len(part.blocks) == len(whole.blocks)
    seen = set()
    for mine, theirs in zip(part.blocks, whole.blocks, strict=True):
        assert (mine.entry, mine.start) == (theirs.entry, theirs.start)
        rows = [row for _, row in (mine.chunk.entries if mine.entry is None else [mine.chunk.entries[mine.entry]])]
        for i, row in enumerate(rows):
            is_own = mine.chunk.spec.experts is None or row % E in own
            seen.add(is_own)
            for got, want in ((mine.a[i], theirs.a[i]), (mine.b[i], theirs.b[i])):
                assert got.dtype == want.dtype
                assert got.tobytes() == (want if is_own else np.zeros_like(want)).tobytes()
    assert seen == {True, False}


WHOLE = (0, 1, 2, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_own_experts(folder_of, kind):
    found, fields = file_of(kind)
    folder = folder_of(found, **fields)
    request = jlora.LoRARequest("x", str(folder))
    whole = world_of(Gathering, WHOLE).packed(request)
    world, weights = world_of(Gathering, (1, 2)), (folder / "adapter_model.safetensors").read_bytes()
    header, times = 8 + int.from_bytes(weights[:8], "little"), np.zeros(len(weights), np.uint8)  # reads of each byte

    def count(offset, size):
        times[offset : offset + size] += offset >= header

    # in pieces that cut tensors, and interleaved experts between rows
    with reading(80, part=240, threads=True), before_each_read(count):
        part = world.packed(request)
    assert times.max() == 1
    # Half of an array, or all of one that experts share or that has all of them interleaved in every row.
    shared = {name for name, array in found.items() if len(array) == 1 or (kind in FUSED and "lora_B" in name)}
    assert times.sum() == sum(array.nbytes // (1 if name in shared else 2) for name, array in found.items())
    assert_same_where_own(part, whole, world.own)
    assert 2 * sum(block.nbytes for block in part.blocks) == sum(block.nbytes for block in whole.blocks)


@pytest.mark.parametrize(
    ("kind", "cls", "own", "options"),
    [
        (EACH, Gathering, (0, 3), {"stacked": True}),
        ("flat", Gathering, (1, 2), {"stacked": True}),
        ("flat exchanged", Interleaved, (0, 3), {}),
        ("grouped", Interleaved, (0, 3), {}),
        ("shared", Gathering, (1, 2), {"shared": True}),
        ("three axes", Gathering, (1, 2), {"shared": True}),
    ],
)
def test_other_layers_and_slots(folder_of, kind, cls, own, options):
    """From files and from memory. Of a factor that experts share, every process has all."""
    found, fields = file_of("three axes" if kind == "shared" else kind)
    for name, array in found.items():
        if kind == "shared" and ("lora_B" if "down_proj" in name else "lora_A") in name:
            found[name] = array[:1]
    folder = folder_of(found, **fields)
    whole, world = world_of(cls, WHOLE, **options), world_of(cls, own, **options)
    for source in (jlora.LoRARequest("x", str(folder)), jlora.Adapter.from_pretrained(folder, name="x")):
        part = world.packed(source)
        assert_same_where_own(part, whole.packed(source), world.own)
        alone = [block for block in part.blocks if block.chunk.spec.experts is None]
        assert bool(alone) == (kind == "shared")
        assert all(block.a.any() or block.b.any() for block in alone)


def test_rows_that_are_moved_alone_are_there_and_take_no_memory(folder_of):
    """Few experts have weights: every process writes the rows of each, for all write the same programs."""
    found, fields = file_of(EACH, experts=(1, 6))
    request = jlora.LoRARequest("x", str(folder_of(found, **fields)))
    whole, world = world_of(Gathering, WHOLE).packed(request), world_of(Gathering, (0, 1))
    part = world.packed(request)
    assert_same_where_own(part, whole, world.own)
    assert {block.chunk.entries[block.entry][1] for block in part.blocks} == {1, 6}
    for block in part.blocks:
        foreign = block.chunk.entries[block.entry][1] == 6
        assert all((set(array.strides) == {0}) == foreign for array in (block.a, block.b))
        assert block.nbytes == block.a.nbytes + block.b.nbytes


@pytest.mark.parametrize("kind", ["each", "three axes", "shared B", "flat", "grouped exchanged"])
def test_only_own_experts_are_checked_for_nan(folder_of, kind):
    world = world_of(Gathering, (1, 2))
    for e in (1, 4):
        part = "down_proj" if "up" not in kind else "gate_up_proj"
        found, fields = file_of(kind, spoil=(1, part, e))
        request = jlora.LoRARequest("x", str(folder_of(found, name=f"at{e}", **fields)))
        if e in world.own and kind != "shared B":
            with pytest.raises(AdapterFormatError, match="holds NaN or infinity"):
                world.packed(request)
        else:
            world.packed(request)

"""State of a wrapped layer: its slot arrays, the `Site` that describes them, and the `SlotSpec` with their shapes."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jlora._compat import Device, default_device
from jlora._memory import device_bytes
from jlora._typing import Backend
from jlora.adapters.variants import Variant
from jlora.config import LoRAConfig
from jlora.errors import LoRAError
from jlora.layers.specs import Blocks, Doubt
from jlora.layers.variants.finisher import Finisher
from jlora.sharding.rules import KernelSharding

HEAD = "jlora_head"  # prefix of the arrays of saved heads


class SlotParam(nnx.Variable[jax.Array]):
    """A slot array. Use this type as the filter for `nnx.split`, donation and sharding.

    It is no `nnx.Param`, so filters for the base model's parameters do not match it.
    """


class SlotRanks(SlotParam):
    """An array beside the slots: true ranks and scales (float32), extras of finishers (float32), or stamps (int32).

    It has its own type, so that A and B can be differentiated without it.
    """


# The values of `row_groups` for layers whose rows are those of the batch's own sequences. The last two declare the rows
# of packed batches: one of each sequence, or all.
SEQUENCES, LAST, PACKED = "sequences", "last", "packed"
OF_SEQUENCES = frozenset({SEQUENCES, LAST, PACKED})


@dataclass(frozen=True)
class SlotArray:
    """One array of the slots of a site, an attribute of its layer.

    Attributes:
      name: "a", "b", "ranks" or `Extra.name`. The attribute is `jlora_<name>`.
      axes: a letter for each axis: L layers of a stack, S slots, E experts, n output slices, K and N features as
        stored, R ranks, r ranks rounded up to a multiple of the shards that split them, c true rank and scales.
      shape: its shape.
      dtype: its dtype, by name.
      fill: value of empty slots.
      by_blocks: True if blocks of an adapter are written into it: A, B, and the scales of int8.
      sharding: its sharding; None off meshes.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    fill: float = 0
    by_blocks: bool = False
    sharding: NamedSharding | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, on a mesh the sum over all shards."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def device_nbytes(self) -> int:
        """Bytes of all slots on one device."""
        shape = self.shape if self.sharding is None else self.sharding.shard_shape(self.shape)
        return math.prod(shape) * jnp.dtype(self.dtype).itemsize

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of the values of one slot, without those that are written by blocks."""
        at = self.axes.index("S")
        shape = (*self.shape[:at], *self.shape[at + 1 :])
        return (*shape[:-1], 1) if self.by_blocks else shape


@dataclass(frozen=True)
class SlotSpec:
    """Shapes and dtype of the slot arrays of a site. Sites with equal specs are packed and written together.

    The ranks hold the true rank of each output slice, as a whole number, and the scale that multiplies its delta. In
    int8 they have a scale for each rank: the product of its quanta in A and B and of the delta's scale.

    Attributes:
      layers: length of the leading axis when the layer is a stack (`nnx.vmap` + `nnx.scan`), else None.
      num_slots: S.
      in_features: K, for an embedding the number of table rows; 0 if the site holds only B.
      out_sizes: sizes of the n output slices; their sum is N. All are 0 if the site holds only A.
      max_rank: R.
      dtype: dtype of A and B, by name: "bfloat16", "float16", "float32" or "int8".
      experts: E, if every expert has its own factors, else None.
      first_slot: index of the first of these slots among the slots of the model.
      sharding: how the base kernel is split over a mesh, which determines the sharding of these arrays; None off
        meshes.
      in_blocks, out_blocks: order of K in A, and of N in B, as stored: pairs (the adapter's first feature or -1 for
        padding, count) from left to right. They are set if the features are split and the layer's order differs from
        the adapter's; () for the adapter's order.
      finishers: functions of the output with its LoRA, in the order in which they run. The site holds their extras.
    """

    layers: int | None
    num_slots: int
    in_features: int
    out_sizes: tuple[int, ...]
    max_rank: int
    dtype: str
    experts: int | None = None
    first_slot: int = 0
    sharding: KernelSharding | None = None
    in_blocks: Blocks = ()
    out_blocks: Blocks = ()
    finishers: tuple[Finisher, ...] = ()

    @functools.cached_property
    def extras(self) -> tuple[Variant, ...]:
        """Variants whose vectors the slots hold, in the order of the finishers."""
        return tuple(finisher.variant for finisher in self.finishers)

    @functools.cached_property
    def expert_shards(self) -> int:
        """Number of shards that hold different experts."""
        return 1 if self.sharding is None or self.experts is None else self.sharding.size(self.sharding.experts)

    @functools.cached_property
    def own_shards(self) -> Sequence[int]:
        """Indices of the `expert_shards` on this process; all of them if they are not split or have no devices."""
        if self.sharding is None or self.expert_shards == 1 or not (found := self.sharding.experts_by_process):
            return range(self.expert_shards)
        return found.get(jax.process_index(), ())

    @functools.cached_property
    def most_shards(self) -> int:
        """Largest number of `expert_shards` that any one process holds."""
        if self.sharding is None or self.expert_shards == 1 or not (found := self.sharding.experts_by_process):
            return self.expert_shards
        return max(map(len, found.values()))

    @functools.cached_property
    def own_experts(self) -> tuple[range, ...]:
        """Experts of `own_shards`, as ranges that are not adjacent."""
        assert self.experts is not None
        size = self.experts // self.expert_shards
        found: list[range] = []
        for shard in self.own_shards:
            begin, end = shard * size, (shard + 1) * size
            if found and found[-1].stop == begin:
                begin = found.pop().start
            found.append(range(begin, end))
        return tuple(found)

    @property
    def stored_in(self) -> int:
        """K of A as stored."""
        return sum(count for _, count in self.in_blocks) or self.in_features

    @property
    def stored_out(self) -> int:
        """N of B as stored."""
        return sum(count for _, count in self.out_blocks) or self.out_features

    @property
    def stored_rank(self) -> int:
        """R of A as stored, rounded up to a multiple of the shards that split it."""
        parts = 1 if self.sharding is None else self.sharding.size(self.sharding.a[2])
        return -(-self.max_rank // parts) * parts

    @property
    def in_runs(self) -> tuple[tuple[slice, slice], ...]:
        """Pairs (features of the adapter, position as stored) of A, without padding."""
        return _runs(self.in_blocks, self.in_features)

    @property
    def out_runs(self) -> tuple[tuple[slice, slice], ...]:
        """Pairs (features of the adapter, position as stored) of B, without padding."""
        return _runs(self.out_blocks, self.out_features)

    @functools.cached_property
    def arrays(self) -> dict[str, SlotArray]:
        """Name -> array of the site: A and B unless the site holds only one, the ranks, and the extras."""
        int8, found = self.dtype == "int8", self.sharding
        slots = "L" * len(self.stack) + "S"
        entries = slots + "E" * (self.experts is not None)
        sizes = {"L": self.layers or 1, "S": self.num_slots, "E": self.experts or 1, "n": self.slices}
        sizes |= {"K": self.stored_in, "N": self.stored_out, "R": self.max_rank, "r": self.stored_rank}
        sizes["c"] = 1 + self.max_rank if int8 else 2
        split = {} if found is None else {"E": found.experts, "r": found.a[2], "K": found.ins, "N": found.outs}
        arrays: dict[str, SlotArray] = {}

        def add(name: str, axes: str, dtype: str, fill: float = 0, by_blocks: bool = False) -> None:
            of = split | {"N": found.b[2]} if found is not None and name == "b" else split
            sharding = None if found is None else found.named(*(of.get(letter, ()) for letter in axes))
            shape = tuple(sizes[letter] for letter in axes)
            arrays[name] = SlotArray(name, axes, shape, dtype, fill, by_blocks, sharding)

        if self.in_features:
            add("a", entries + "nrK", self.dtype, by_blocks=True)
        if self.out_features:
            add("b", entries + "RN", self.dtype, by_blocks=True)
        add("ranks", entries + "nc", "float32", by_blocks=int8)
        for extra in self.extras:
            add(extra.name, slots + "N", "float32", extra.fill)
        return arrays

    @functools.cached_property
    def of_blocks(self) -> tuple[SlotArray, ...]:
        """Arrays that blocks are written into: the factors and, in int8, the ranks."""
        return tuple(array for array in self.arrays.values() if array.by_blocks)

    @property
    def slots(self) -> range:
        """Indices of these slots among the slots of the model."""
        return range(self.first_slot, self.first_slot + self.num_slots)

    @functools.cached_property
    def factors(self) -> tuple[int, ...]:
        """Factors that the site holds: 0 for A, 1 for B.

        The other one has no array, because XLA has crashed on empty arrays.
        """
        return tuple(half for half, name in enumerate("ab") if name in self.arrays)

    @property
    def whole(self) -> bool:
        """True if the site holds both factors."""
        return len(self.factors) == 2

    @property
    def out_features(self) -> int:
        """N, the sum of `out_sizes`."""
        return sum(self.out_sizes)

    @property
    def slices(self) -> int:
        """Number n of output slices."""
        return len(self.out_sizes)

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of the arrays: (layers,) of a stack, else ()."""
        return () if self.layers is None else (self.layers,)

    @property
    def entries(self) -> tuple[int, ...]:
        """Sizes ((layers,) (experts,)). A site has one pair of factors for each entry, numbered in C order."""
        return self.stack if self.experts is None else (*self.stack, self.experts)

    @property
    def float_dtype(self) -> str:
        """Dtype of the factors before they are rounded to int8: float32; or `dtype` if that is no int8."""
        return "float32" if self.dtype == "int8" else self.dtype

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: A, B, ranks and extras, on a mesh the sum over all shards."""
        return sum(array.nbytes for array in self.arrays.values()) // self.num_slots

    @property
    def device_nbytes(self) -> int:
        """Bytes of all slots on one device."""
        return sum(array.device_nbytes for array in self.arrays.values())


@dataclass(frozen=True, eq=False)
class Site:
    """One product of a model to which LoRA is added. Compared by identity, so it can be a static attribute.

    Attributes:
      path: canonical dotted path of the layer in the model; ".attend" is appended for the logits use of an embedding.
      aliases: every dotted path that reaches the same layer, `path` first.
      kind: "linear" (delta of a projection), "embedding" (delta of a table lookup) or "head" (replacement of a
        projection by a saved head).
      spec: shapes and dtype of its slot arrays.
      parts: checkpoint name -> (first slice, number of slices) that it fills, for each alias.
      backend: the configured backend.
      prefix: attribute prefix of this site's arrays on the layer.
      doubt: the uncertainty that `manager.verify` must resolve before the site takes an adapter; None if there is none.
      stamped: True if its layer also holds the model's stamps, int32 [(layers,) S], the number of the last write of
        each slot. One site of each model is stamped. A batch carries the stamps that it needs, so a copy of the model
        that missed a write is detected.
      shared: for a product of experts, the sites of A and of B in the slots for adapters whose experts share one
        factor; () if there are no such slots. Each holds one factor, because the two have different rows. The site of
        the shared factor has no experts. Their `parts` are empty, since adapters name the product.
      head: for a linear layer that saved heads can replace, the site of their weights; else None. Its A holds weights,
        its B the biases (one column), and its true rank is the number of outputs, 0 without a head.
      biased: True for a head whose layer has a bias.
      bitwise_base, batch_invariant: the configured options.
      finite: True if the manager refuses adapters with NaN and infinity.
      row_group: the group of items that its rows belong to, "sequences", "last" or "packed" for rows declared as the
        batch's own, or None.
    """

    path: str
    aliases: tuple[str, ...]
    kind: Literal["linear", "embedding", "head"]
    spec: SlotSpec
    parts: Mapping[str, tuple[int, int]] = field(repr=False)
    backend: Backend
    prefix: str = "jlora"
    doubt: Doubt | None = None
    stamped: bool = False
    shared: "tuple[Site, ...]" = field(default=(), repr=False)
    head: "Site | None" = field(default=None, repr=False)
    biased: bool = False
    bitwise_base: bool = False
    batch_invariant: bool = False
    finite: bool = False
    row_group: str | None = None

    @property
    def space(self) -> str:
        """Name of the row space of its rows: its group of items, or "sequences"."""
        return SEQUENCES if self.row_group is None or self.row_group in OF_SEQUENCES else self.row_group

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the layer attributes that hold the arrays of `spec.arrays`."""
        return tuple(f"{self.prefix}_{name}" for name in self.spec.arrays)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: A, B, ranks, extras and stamps."""
        return self.spec.slot_nbytes + (4 * (self.spec.layers or 1) if self.stamped else 0)

    @property
    def shared_slot_nbytes(self) -> int:
        """Bytes of one slot for adapters whose experts share a factor; 0 if there are no such slots."""
        return sum(each.spec.slot_nbytes for each in self.shared)

    @property
    def with_shared(self) -> "tuple[Site, ...]":
        """This site and the sites of its shared slots."""
        return (self, *self.shared)

    @property
    def with_all(self) -> "tuple[Site, ...]":
        """This site, the sites of its shared slots, and the site of its saved heads."""
        return self.with_shared if self.head is None else (*self.with_shared, self.head)

    @property
    def stamps(self) -> str:
        """Name of the layer attribute that holds the stamps."""
        return f"{self.prefix}_stamps"


@dataclass(frozen=True, eq=False)
class ModelSites:
    """The sites of one wrapped model, shared by its layers and its batches. Compared by identity.

    Attributes:
      config: the configuration of the manager.
      sites: the sites that adapters can name. Each holds the sites of its shared slots.
      names: names of all modules of the model that a configuration can use.
      sharding: the sharding of one site. All sites have the same mesh and data axes. None off meshes.
      device: the device chosen for a model off meshes, or None.
      groups: the declared row groups, without those of the batch's own sequences.
      intercepted: True if qwix had quantized the model when it was wrapped.
    """

    config: LoRAConfig
    sites: tuple[Site, ...] = ()
    names: frozenset[str] = field(default=frozenset(), repr=False)
    sharding: KernelSharding | None = None
    device: Device | None = None
    groups: frozenset[str] = frozenset()
    intercepted: bool = False

    @functools.cached_property
    def rows_declared(self) -> bool:
        """True if the rows of every site are declared by `row_groups`."""
        return all(site.row_group is not None for site in self.sites)

    def __deepcopy__(self, memo: object) -> "ModelSites":
        raise LoRAError(
            "a wrapped model cannot be deep-copied: no manager would write the slots of the copy. Copy the model "
            "before it is wrapped"
        )


def is_named(given: str, names: Iterable[str]) -> bool:
    """Return True if `given` is one of the dotted names or a part of one, as in `exclude_modules`."""
    return any(f".{given}." in f".{name}." for name in names)


def allocate(site: Site, device: Device | None = None) -> dict[str, SlotParam]:
    """Return the slot arrays of `site`, keyed by the layer attribute that will hold each.

    All are zeros, but for the `fill` of extras.

    Args:
      site: the site.
      device: placement of the arrays off meshes; None for the default device.
    """
    spec = site.spec
    stamps = (*spec.stack, max(each.spec.slots.stop for each in site.with_shared))
    whole = device if spec.sharding is None else spec.sharding.named()
    allocated = {
        name: _variable(SlotParam if array.name in ("a", "b") else SlotRanks, array, array.sharding or device)
        for name, array in zip(site.attributes, spec.arrays.values(), strict=True)
    }
    if site.stamped:
        allocated[site.stamps] = _variable(SlotRanks, SlotArray("stamps", "S", stamps, "int32"), whole)
    return allocated


def check_room(sites: Sequence[Site], chosen: Device | None = None) -> None:
    """Check that the slot arrays fit in the total memory of each device.

    Without this check a GPU's allocator fails only after ten seconds, and a system that overcommits memory kills the
    process.

    Args:
      sites: all sites of a model.
      chosen: placement of the arrays off meshes, as in `allocate`.

    Raises:
      MemoryError: the arrays need more memory than a device has.
    """
    needed: dict[Device, int] = {}
    for site in sites:
        if site.spec.sharding is None:
            device = chosen_by_default() if chosen is None else chosen
        else:
            mesh = cast("Mesh", site.spec.sharding.mesh)
            device = cast("Device", mesh.local_devices[0])
        needed[device] = needed.get(device, 0) + site.spec.device_nbytes
    for device, nbytes in needed.items():
        limit = device_bytes(device)
        if limit is not None and nbytes > limit:
            raise MemoryError(f"{nbytes:,} bytes on a device that has {limit:,}")


def chosen_by_default() -> Device:
    """Return JAX's default device."""
    chosen = default_device()
    return cast("Device", jax.local_devices(backend=chosen)[0]) if chosen is None or isinstance(chosen, str) else chosen


def _variable(kind: type[SlotParam], array: SlotArray, where: NamedSharding | Device | None) -> SlotParam:
    """Return a variable of empty slots, with the sharding `where`.

    Each shard is created on its own device, so a split array is never whole on one device. The PartitionSpec is stored
    on the variable, as in Flax (`nnx.get_partition_spec`), for code that maps over the mesh.
    """
    filled = jnp.full(array.shape, array.fill, array.dtype, device=where)
    if not isinstance(where, NamedSharding):
        return kind(filled)
    # The array has its sharding already. Flax would reshard it, and does not support meshes with both axis types.
    return kind(filled, out_sharding=where.spec, mesh=where.mesh, eager_sharding=False)


def attach(layer: nnx.Module, site: Site, arrays: Mapping[str, SlotParam]) -> None:
    """Set the site and the slot arrays from `allocate` as attributes of a layer."""
    for name, value in (*arrays.items(), (f"{site.prefix}_site", site)):
        set_attribute(layer, name, value)


def detach(layer: nnx.Module, site: Site) -> None:
    """Remove a site and its slot arrays from a layer. Attributes that are already gone are ignored."""
    for name in (*site.attributes, site.stamps, f"{site.prefix}_site"):
        delete_attribute(layer, name)


def _runs(blocks: Blocks, total: int) -> tuple[tuple[slice, slice], ...]:
    if not blocks:
        return ((slice(0, total), slice(0, total)),)
    ends = itertools.accumulate(count for _, count in blocks)
    return tuple(
        (slice(first, first + count), slice(end - count, end))
        for (first, count), end in zip(blocks, ends, strict=True)
        if first >= 0
    )


# Use Flax's method, because a layer class may override __setattr__ and __delattr__.
set_attribute = nnx.Module.__setattr__


def delete_attribute(layer: nnx.Module, name: str) -> None:
    """Delete an attribute of a layer if it exists, with Flax's own method."""
    if name in vars(layer):
        nnx.Module.__delattr__(layer, name)

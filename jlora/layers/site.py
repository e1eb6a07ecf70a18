"""What a wrapped layer carries: slot arrays, a `Site` that says what they mean, a `SlotSpec` with their shapes."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jlora._compat import Device, default_device
from jlora._memory import device_bytes
from jlora._typing import Backend
from jlora.errors import LoRAError
from jlora.layers.specs import Doubt
from jlora.sharding.rules import KernelSharding

Blocks: TypeAlias = tuple[tuple[int, int], ...]


class SlotParam(nnx.Variable[jax.Array]):
    """Every slot array: the filter for `nnx.split`, donation and sharding. Never an `nnx.Param` of the base model."""


class SlotRanks(SlotParam):
    """The int32 arrays beside the slots, true ranks and stamps, apart so that the others can be differentiated."""


@dataclass(frozen=True)
class SlotSpec:
    """Shapes and dtype of the slot arrays of a site. Sites of equal specs are staged and written together.

    A [(layers,) S, (E,) n, R, K]; B [(layers,) S, (E,) R, N]; ranks [(layers,) S, (E,) n], int32.

    Attributes:
      layers: length of the leading axis when the layer is a stack (`nnx.vmap` + `nnx.scan`), else None.
      num_slots: S.
      in_features: K, for an embedding the number of table rows; 0 where the site holds B alone.
      out_sizes: sizes of the n output slices; their sum is N. All are 0 where the site holds A alone.
      max_rank: R.
      dtype: of A and B, by name: "bfloat16", "float16" or "float32".
      experts: E, where every expert has factors of its own, else None.
      first_slot: which of the model's slots the first of these is.
      sharding: how the base kernel is split over a mesh, which decides where these arrays lie; None off meshes.
      in_blocks, out_blocks: K of A, and N of B, as the layer has them, where that is not as an adapter has them and
        they are split: from left to right (the adapter's first feature or -1 for padding, how many). () for as it has.
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

    @functools.cached_property
    def expert_shards(self) -> int:
        """Shards that have different experts."""
        return 1 if self.sharding is None or self.experts is None else self.sharding.size(self.sharding.experts)

    @functools.cached_property
    def own_shards(self) -> Sequence[int]:
        """Which of `expert_shards` devices of this process have; all where they are not split, or on no devices."""
        if self.sharding is None or self.expert_shards == 1 or not (found := self.sharding.experts_by_process):
            return range(self.expert_shards)
        return found.get(jax.process_index(), ())

    @functools.cached_property
    def most_shards(self) -> int:
        """How many of `expert_shards` the process has that has most of them."""
        if self.sharding is None or self.expert_shards == 1 or not (found := self.sharding.experts_by_process):
            return self.expert_shards
        return max(map(len, found.values()))

    @functools.cached_property
    def own_experts(self) -> tuple[range, ...]:
        """The experts of `own_shards`, in ranges that do not touch."""
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
        """K of A as it is stored."""
        return sum(count for _, count in self.in_blocks) or self.in_features

    @property
    def stored_out(self) -> int:
        """N of B as it is stored."""
        return sum(count for _, count in self.out_blocks) or self.out_features

    @property
    def stored_rank(self) -> int:
        """R of A as it is stored: it may be split."""
        parts = 1 if self.sharding is None else self.sharding.size(self.sharding.a[2])
        return -(-self.max_rank // parts) * parts

    @property
    def in_runs(self) -> tuple[tuple[slice, slice], ...]:
        """(features of the adapter, where they are stored) of A; padding is left out."""
        return _runs(self.in_blocks, self.in_features)

    @property
    def out_runs(self) -> tuple[tuple[slice, slice], ...]:
        """The same of B."""
        return _runs(self.out_blocks, self.out_features)

    @functools.cached_property
    def shardings(self) -> tuple[NamedSharding | None, NamedSharding | None, NamedSharding | None]:
        """Of A, B and the ranks; None off meshes."""
        found = self.sharding
        if found is None:
            return None, None, None
        lead, (experts, *a), (_, *b) = ((),) * (len(self.stack) + 1), found.a, found.b
        own = (experts,) if self.experts is not None else ()
        return found.named(*lead, *own, *a), found.named(*lead, *own, *b), found.named(*lead, *own)

    @functools.cached_property
    def block_shardings(self) -> tuple[NamedSharding | None, NamedSharding | None]:
        """Of what is written into A, [rows, n, step, K], and into B, [rows, step, N]; one row is whole."""
        if (found := self.sharding) is None:
            return None, None
        rows = () if self.experts is None else found.experts
        return found.named(rows, (), (), found.a[-1]), found.named(rows, (), found.b[-1])

    @property
    def slots(self) -> range:
        """Which of the model's slots these are."""
        return range(self.first_slot, self.first_slot + self.num_slots)

    @functools.cached_property
    def factors(self) -> tuple[int, ...]:
        """Which of A (0) and B (1) the site holds. No array is made for the other: XLA has crashed on empty ones."""
        return tuple(j for j, features in enumerate((self.in_features, self.out_features)) if features)

    @property
    def whole(self) -> bool:
        """Whether the site holds both factors."""
        return len(self.factors) == 2

    @property
    def out_features(self) -> int:
        return sum(self.out_sizes)

    @property
    def slices(self) -> int:
        return len(self.out_sizes)

    @property
    def stack(self) -> tuple[int, ...]:
        return () if self.layers is None else (self.layers,)

    @property
    def rows(self) -> tuple[int, ...]:
        """((layers,) (experts,)): a site has a pair of factors for each, numbered in C order."""
        return self.stack if self.experts is None else (*self.stack, self.experts)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of A, B and the ranks."""
        lead = (*self.stack, self.num_slots, *self.rows[len(self.stack) :])
        return (
            (*lead, self.slices, self.stored_rank, self.stored_in),
            (*lead, self.max_rank, self.stored_out),
            (*lead, self.slices),
        )

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: A, B and ranks; on a mesh those of all shards together."""
        values = self.slices * self.stored_rank * self.stored_in + self.max_rank * self.stored_out
        return math.prod(self.rows) * (values * jnp.dtype(self.dtype).itemsize + 4 * self.slices)


@dataclass(frozen=True, eq=False)
class Site:
    """One place where LoRA is added. Compared by identity, so a layer can hold it as a static attribute.

    Attributes:
      path: canonical dotted path of the layer in the model; ".attend" is appended for the logits use of an embedding.
      aliases: every dotted path that reaches the same layer, `path` first.
      kind: "linear" (delta of a projection) or "embedding" (delta of a table lookup).
      spec: shapes and dtype of its slot arrays.
      parts: checkpoint name -> (first slice, number of slices) it fills, for each alias.
      backend: as configured.
      prefix: attribute prefix of this site's arrays on the layer.
      doubt: why it takes no adapter before `manager.verify` has seen it serve one; None where its spec is enough.
      stamped: whether its layer holds the model's stamps too: int32 [(layers,) S], the number of the last write of each
        slot. One site of a model does. A batch says which writes it needs: a copy that missed one is found out.
      shared: of a product of experts, the sites of A and of B in the slots for adapters whose experts share one of the
        two, if there are such slots. Each holds one factor alone, since their rows differ: the site of the one that is
        shared has no experts. They have no `parts`: adapters name the product.
      bitwise_base: as configured.
    """

    path: str
    aliases: tuple[str, ...]
    kind: Literal["linear", "embedding"]
    spec: SlotSpec
    parts: Mapping[str, tuple[int, int]] = field(repr=False)
    backend: Backend
    prefix: str = "jlora"
    doubt: Doubt | None = None
    stamped: bool = False
    shared: "tuple[Site, ...]" = field(default=(), repr=False)
    bitwise_base: bool = False

    @property
    def attributes(self) -> tuple[str, ...]:
        """Names of the layer attributes that hold A, B (`spec.factors` of them) and the ranks."""
        names = f"{self.prefix}_a", f"{self.prefix}_b"
        return *(names[j] for j in self.spec.factors), f"{self.prefix}_ranks"

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: A, B, ranks and stamps."""
        return self.spec.slot_nbytes + (4 * (self.spec.layers or 1) if self.stamped else 0)

    @property
    def shared_slot_nbytes(self) -> int:
        """Bytes of one of the slots for adapters whose experts share a factor; 0 where there are none."""
        return sum(each.spec.slot_nbytes for each in self.shared)

    @property
    def with_shared(self) -> "tuple[Site, ...]":
        """This site, and those of its shared slots."""
        return (self, *self.shared)

    @property
    def stamps(self) -> str:
        """Name of the layer attribute that holds the stamps."""
        return f"{self.prefix}_stamps"


@dataclass(frozen=True, eq=False)
class ModelSites:
    """The sites of one wrapped model. Its layers hold it, and so do its batches; compared by identity.

    Attributes:
      sites: those that adapters can name; each with those of its shared slots.
      names: of all modules of the model, as a configuration may give them.
      sharding: of one of the sites: its mesh and its data axes are those of all; None off meshes.
      device: chosen for the model off meshes, where one was.
    """

    sites: tuple[Site, ...]
    names: frozenset[str] = field(repr=False)
    sharding: KernelSharding | None
    device: Device | None

    def __deepcopy__(self, memo: object) -> "ModelSites":
        raise LoRAError(
            "a wrapped model cannot be deep-copied: no manager would write the slots of the copy. Copy the model "
            "before it is wrapped"
        )


def is_named(given: str, names: Iterable[str]) -> bool:
    """Whether `given` is one of the dotted names, or a part of one: how `exclude_modules` names modules."""
    return any(f".{given}." in f".{name}." for name in names)


def allocate(site: Site, device: Device | None = None) -> dict[str, SlotParam]:
    """Return the zero slot arrays of `site`, by the name of the layer attribute that will hold each.

    `device`: where they are placed off meshes; None for the default.
    """
    *names, ranks = site.attributes
    shapes, shardings = site.spec.shapes, site.spec.shardings
    shape = (*site.spec.stack, max(each.spec.slots.stop for each in site.with_shared))
    shardings = [device if where is None else where for where in shardings]
    of_stamps = device if site.spec.sharding is None else site.spec.sharding.named()
    stamps = {site.stamps: _variable(SlotRanks, shape, "int32", of_stamps)} if site.stamped else {}
    return {
        **{
            name: _variable(SlotParam, shapes[j], site.spec.dtype, shardings[j])
            for name, j in zip(names, site.spec.factors, strict=True)
        },
        ranks: _variable(SlotRanks, shapes[2], "int32", shardings[2]),
        **stamps,
    }


def check_room(sites: Sequence[Site], chosen: Device | None = None) -> None:
    """Raises `MemoryError` where the slot arrays need more than all of the memory that a device has.

    `chosen` is where they are to lie off meshes, as for `allocate`.

    A GPU's allocator would take ten seconds to say so, and a system that promises more memory than it has would kill
    the process.
    """
    needed: dict[Device, int] = {}
    for site in sites:
        spec = site.spec
        for j in (*spec.factors, 2):
            where = spec.shardings[j]
            if where is None:
                device = chosen_by_default() if chosen is None else chosen
            else:
                device = cast("Device", where.mesh.local_devices[0])  # pyright: ignore[reportOptionalSubscript]
            shape = spec.shapes[j] if where is None else where.shard_shape(spec.shapes[j])
            size = jnp.dtype(spec.dtype if j < 2 else "int32").itemsize
            needed[device] = needed.get(device, 0) + size * math.prod(shape)
    for device, nbytes in needed.items():
        limit = device_bytes(device)
        if limit is not None and nbytes > limit:
            raise MemoryError(f"{nbytes:,} bytes on a device that has {limit:,}")


def chosen_by_default() -> Device:
    chosen = default_device()
    return cast("Device", jax.local_devices(backend=chosen)[0]) if chosen is None or isinstance(chosen, str) else chosen


def _variable(
    kind: type[SlotParam], shape: tuple[int, ...], dtype: str, where: NamedSharding | Device | None
) -> SlotParam:
    """Zeros; each shard is made where it belongs, so that no array is ever whole where it is to be split.

    What says how is kept beside it, as Flax does (`nnx.get_partition_spec`), for code that maps over the mesh.
    """
    if not isinstance(where, NamedSharding):
        return kind(jnp.zeros(shape, dtype, device=where))
    # It lies there already: Flax would lay it out again, and knows no mesh with axes of both types.
    zeros = jnp.zeros(shape, dtype, device=where)
    return kind(zeros, out_sharding=where.spec, mesh=where.mesh, eager_sharding=False)


def attach(layer: nnx.Module, site: Site, arrays: Mapping[str, SlotParam]) -> None:
    """Give a layer its site and the slot arrays made by `allocate`."""
    for name, value in (*arrays.items(), (f"{site.prefix}_site", site)):
        set_attribute(layer, name, value)


def detach(layer: nnx.Module, site: Site) -> None:
    """Take a site and its slot arrays off a layer; what is gone already is left alone."""
    for name in (*site.attributes, site.stamps, f"{site.prefix}_site"):
        delete_attribute(layer, name)


def as_brought(stored: np.ndarray, total: int, runs: Sequence[tuple[slice, slice]]) -> np.ndarray:
    """[.., features as they are stored] -> [.., total], as an adapter has them; `runs` as a spec's `in_runs`."""
    found = np.zeros((*stored.shape[:-1], total), stored.dtype)
    for features, place in runs:
        found[..., features] = stored[..., place]
    return found


def _runs(blocks: Blocks, total: int) -> tuple[tuple[slice, slice], ...]:
    if not blocks:
        return ((slice(0, total), slice(0, total)),)
    ends = itertools.accumulate(count for _, count in blocks)
    return tuple(
        (slice(first, first + count), slice(end - count, end))
        for (first, count), end in zip(blocks, ends, strict=True)
        if first >= 0
    )


# Flax's own: a layer class may override __setattr__ and __delattr__.
set_attribute = nnx.Module.__setattr__


def delete_attribute(layer: nnx.Module, name: str) -> None:
    if name in vars(layer):
        nnx.Module.__delattr__(layer, name)

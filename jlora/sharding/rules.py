"""The rules: from where a base kernel lies on a mesh, where the slot arrays of its layer lie.

    kernel [K, N]                       A [.., n, R, K]     B [.., R, N]     what a layer computes
    N over t: column-parallel           whole               N over t         no collective
    K over t: row-parallel              K over t            whole            joins the base's partial sums
    both                                K over its axes     N over its axes  both
    replicated                          whole               whole            nothing
    experts [E, ..] over e              E over e            E over e         rows of other shards' experts are dropped

With `fully_sharded` (S-LoRA, arXiv:2311.03285, section 6) what is whole above is split too: the ranks of A over the
axes of N, and N of B over those of K. Axes that sequences are sharded over split no slot array: each of their shards
may need any adapter. True ranks are split with their experts alone, and stamps are whole everywhere.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jlora.errors import LoRAError

Names = tuple[str, ...]


@dataclass(frozen=True)
class KernelSharding:
    """How a base kernel is split over a mesh, by the axes of the mesh.

    Attributes:
      mesh: of whose devices; of a model that is shapes alone, what is known of it.
      ins, outs: that its K and its N are split over.
      experts: that its experts are split over.
      data: that rows are split over; they split no weights of adapters.
      fully: whether A and B are split further (`LoRAConfig.fully_sharded`).
    """

    mesh: Mesh | AbstractMesh
    ins: Names = ()
    outs: Names = ()
    experts: Names = ()
    data: Names = ()
    fully: bool = False

    def size(self, axes: Names) -> int:
        """Shards that some axes make."""
        return int(np.prod([self.mesh.shape[name] for name in axes], dtype=np.int64))

    @property
    def a(self) -> tuple[Names, Names, Names, Names]:
        """Axes of A's experts, slices, ranks and K."""
        return self.experts, (), self.outs if self.fully else (), self.ins

    @property
    def b(self) -> tuple[Names, Names, Names]:
        """Axes of B's experts, ranks and N."""
        return self.experts, (), (*self.outs, *self.ins) if self.fully else self.outs

    @functools.cached_property
    def experts_by_process(self) -> Mapping[int, tuple[int, ...]]:
        """Process -> the shards of experts that its devices have; {} where they are not split, or on no devices."""
        if isinstance(self.mesh, AbstractMesh) or not self.experts:
            return {}
        devices: np.ndarray = self.mesh.devices
        axes = [self.mesh.axis_names.index(name) for name in self.experts]
        places = np.indices(devices.shape).reshape(devices.ndim, -1)[axes]
        # JAX numbers shards in this order too: those along the last axis follow each other.
        shards = np.asarray(np.ravel_multi_index(tuple(places), [devices.shape[axis] for axis in axes]))
        found: dict[int, set[int]] = {}
        for device, shard in zip(devices.ravel().tolist(), shards.tolist(), strict=True):
            found.setdefault(process_of(device), set()).add(shard)
        return {process: tuple(sorted(own)) for process, own in found.items()}

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """Of an array that all devices have whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def named(self, *axes: Names) -> NamedSharding:
        """Of an array with these axes, one tuple of names each."""
        return NamedSharding(self.mesh, partition(*axes))


def process_of(device: Any) -> int:
    """The process that a device belongs to."""
    return device.process_index


def partition(*axes: Names) -> PartitionSpec:
    """The spec of an array whose axes are split over these axes of a mesh."""
    return PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in axes))


def kernel_sharding(
    where: str,
    sharding: Any,
    axes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    data: Names,
    fully: bool,
) -> KernelSharding | None:
    """How a base parameter is split.

    Args:
      where: the layer and its parameter, for messages.
      sharding: the parameter's; anything but a `NamedSharding` on more than one device is no mesh.
      axes: for K, N and the experts the axes of the parameter, in the order in which they flatten; all others are
        those of a stack of layers.
      sizes: of the parameter's axes.
      data: axes of the mesh that sequences are split over.
      fully: `LoRAConfig.fully_sharded`.

    Raises:
      LoRAError: a stack of layers that is split; an axis that is split in the middle of the features which it flattens
        to.
    """
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    mesh = sharding.mesh
    # An axis of size 1 splits nothing.
    spec = [tuple(name for name in names_of(entry) if mesh.shape[name] > 1) for entry in sharding.spec]
    spec += [()] * (len(sizes) - len(spec))
    found: list[Names] = []
    taken = {axis for group in axes for axis in group}
    for axis, names in enumerate(spec):
        if names and axis not in taken:
            raise LoRAError(
                f"{where} is a stack of layers that is split over {_said(names)}; an adapter is written into all "
                "layers of a stack, so leave that axis whole"
            )
    for i, group in enumerate(axes):
        dropped = data if i < 2 else ()  # tokens may be spread over the axes of experts, which stay where they are
        names = [tuple(name for name in spec[axis] if name not in dropped) for axis in group]
        split = [at for at, own in enumerate(names) if own]
        # What follows an axis that is split would lie in pieces; axes of size 1 before it do no harm.
        if len(split) > 1 or (split and any(sizes[axis] > 1 for axis in group[: split[0]])):
            raise LoRAError(
                f"{where} of shape {tuple(sizes)} is split over {_said(names[split[-1]])} along axis "
                f"{group[split[-1]]}, in the middle of the features {tuple(group)} that make one axis of LoRA's "
                "factors; split the first of these axes"
            )
        found.append(names[split[0]] if split else ())
    ins, outs, *experts = found
    return KernelSharding(mesh, ins, outs, experts[0] if experts else (), data, fully)


def split_axis(group: Sequence[int], sizes: Sequence[int]) -> int:
    """Of the axes of a parameter that flatten to one, the one that is split where they are: the first of any size."""
    return next((axis for axis in group if sizes[axis] > 1), group[0])


def names_of(entry: Any) -> Names:
    """The axes of a mesh in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple[str, ...](entry)


def _said(names: Names) -> str:
    return " and ".join(map(repr, names))

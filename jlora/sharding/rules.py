"""Derive the sharding of a layer's slot arrays from the sharding of its base kernel.

    kernel [K, N]                       A [.., n, R, K]     B [.., R, N]     effect on a layer
    N over t (column-parallel)          replicated          N over t         no collective
    K over t (row-parallel)             K over t            replicated       delta joins the base's partial sums
    both                                K over its axes     N over its axes  both
    replicated                          replicated          replicated       none
    experts [E, ..] over e              E over e            E over e         rows of other shards' experts are dropped

With `fully_sharded` (S-LoRA, arXiv:2311.03285, section 6) the replicated factors of split kernels are split too: the
ranks of A over the axes of N, and N of B over the axes of K. Data axes split no slot array, because each of their
shards may need any adapter. True ranks are split by experts only, and stamps are replicated.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jlora.errors import LoRAError

AxisNames = tuple[str, ...]


@dataclass(frozen=True)
class KernelSharding:
    """The mesh axes that a base kernel is split over.

    Attributes:
      mesh: The mesh; an `AbstractMesh` for a model of shapes alone.
      ins, outs: Mesh axes of K and of N.
      experts: Mesh axes of the experts.
      data: Mesh axes of sequences or rows. They split no slot array.
      fully: True if A and B are split further (`LoRAConfig.fully_sharded`).
    """

    mesh: Mesh | AbstractMesh
    ins: AxisNames = ()
    outs: AxisNames = ()
    experts: AxisNames = ()
    data: AxisNames = ()
    fully: bool = False

    def size(self, axes: AxisNames) -> int:
        """Return the number of shards over these mesh axes."""
        return int(np.prod([self.mesh.shape[name] for name in axes], dtype=np.int64))

    @property
    def a(self) -> tuple[AxisNames, AxisNames, AxisNames, AxisNames]:
        """Mesh axes of A's experts, slices, ranks and K."""
        return self.experts, (), self.outs if self.fully else (), self.ins

    @property
    def b(self) -> tuple[AxisNames, AxisNames, AxisNames]:
        """Mesh axes of B's experts, ranks and N."""
        return self.experts, (), (*self.outs, *self.ins) if self.fully else self.outs

    @functools.cached_property
    def experts_by_process(self) -> Mapping[int, tuple[int, ...]]:
        """Process index -> indices of its expert shards; {} if experts are not split or the mesh is abstract."""
        if isinstance(self.mesh, AbstractMesh) or not self.experts:
            return {}
        devices: np.ndarray = self.mesh.devices
        axes = [self.mesh.axis_names.index(name) for name in self.experts]
        places = np.indices(devices.shape).reshape(devices.ndim, -1)[axes]
        # Row-major, the order in which JAX numbers shards.
        shards = np.asarray(np.ravel_multi_index(tuple(places), [devices.shape[axis] for axis in axes]))
        found: dict[int, set[int]] = {}
        for device, shard in zip(devices.ravel().tolist(), shards.tolist(), strict=True):
            found.setdefault(process_of(device), set()).add(shard)
        return {process: tuple(sorted(own)) for process, own in found.items()}

    @functools.cached_property
    def whole(self) -> NamedSharding:
        """Sharding of a replicated array."""
        return NamedSharding(self.mesh, PartitionSpec())

    def named(self, *axes: AxisNames) -> NamedSharding:
        """Return the sharding of an array, given one tuple of mesh axes for each array axis."""
        return NamedSharding(self.mesh, partition(*axes))


def process_of(device: Any) -> int:
    """Return the index of the process that a device belongs to."""
    return device.process_index


def partition(*axes: AxisNames) -> PartitionSpec:
    """Return the PartitionSpec for one tuple of mesh axes for each array axis."""
    return PartitionSpec(*(names if len(names) > 1 else names[0] if names else None for names in axes))


def kernel_sharding(
    where: str,
    sharding: Any,
    axes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    data: AxisNames,
    fully: bool,
) -> KernelSharding | None:
    """Return how a base parameter is split, or None if its sharding is not on a mesh of several devices.

    Args:
      where: Layer and parameter, for messages.
      sharding: Sharding of the parameter.
      axes: Parameter axes of K, of N and optionally of the experts, each in the order in which they flatten. Any other
        axis is that of a stack of layers.
      sizes: Sizes of the parameter's axes.
      data: Mesh axes that sequences are split over.
      fully: `LoRAConfig.fully_sharded`.

    Raises:
      LoRAError: A stack of layers is split, or a group of axes that flattens to K or N is split at another than its
        first axis.
    """
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    mesh = sharding.mesh
    # An axis of size 1 has no effect.
    spec = [tuple(name for name in names_of(entry) if mesh.shape[name] > 1) for entry in sharding.spec]
    spec += [()] * (len(sizes) - len(spec))
    found: list[AxisNames] = []
    taken = {axis for group in axes for axis in group}
    for axis, names in enumerate(spec):
        if names and axis not in taken:
            raise LoRAError(
                f"{where} is a stack of layers that is split over {_said(names)}; an adapter is written into all "
                "layers of a stack, so leave that axis whole"
            )
    for i, group in enumerate(axes):
        dropped = data if i < 2 else ()  # tokens may share the mesh axes of experts, which stay split
        names = [tuple(name for name in spec[axis] if name not in dropped) for axis in group]
        split = [at for at, own in enumerate(names) if own]
        # Only a split of the first axis gives contiguous shards of the flattened axis. Axes of size 1 do not count.
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
    """Return the axis of a group that a split applies to, that is the first of size above 1."""
    return next((axis for axis in group if sizes[axis] > 1), group[0])


def names_of(entry: Any) -> AxisNames:
    """Return the mesh axes in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return (entry,) if isinstance(entry, str) else tuple[str, ...](entry)


def _said(names: AxisNames) -> str:
    return " and ".join(map(repr, names))

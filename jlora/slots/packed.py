"""The packed form of an adapter: checked against the model, cast, and ready to be written into a slot."""

import copy
import functools
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float

from jlora.adapters import Adapter
from jlora.adapters.variants import described
from jlora.layers.site import Site
from jlora.slots.blocks import Block

SiteSlices: TypeAlias = tuple[Site, int, int, int]  # site, entry, first slice, number of slices


@functools.lru_cache(maxsize=64)
def _one_of(sites: frozenset[Site]) -> frozenset[Site]:
    """Return one object for equal sets, to save memory.

    Most adapters of a deployment have weights for the same sites, and there can be ten thousand adapters.
    """
    return sites


@dataclass(frozen=True)
class Placement:
    """Destination of one module of an adapter in the slots.

    Attributes:
      module: Name of the module in the checkpoint. A site with slots for one factor holds only that factor of it.
      site: The site.
      entry: Entry of the site, which is a layer of a stack, an expert, or 0 if the site has a single entry.
      first: The first output slice.
      count: Number of output slices.
      rank: Rank of the module; the number of outputs of a saved head.
      alpha: `lora_alpha` of PEFT.
      scaling: Scaling of PEFT.
      extras: `ModuleLoRA.vectors`, as float32.
    """

    module: str
    site: Site
    entry: int
    first: int
    count: int
    rank: int
    alpha: float
    scaling: float
    extras: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], compare=False, repr=False)


def largest_rank(placements: Iterable[Placement]) -> int:
    """Return the largest rank of the LoRA modules, 0 if all are saved heads."""
    return max((p.rank for p in placements if p.site.kind != "head"), default=0)


@dataclass(frozen=True, eq=False)
class PackedAdapter:
    """The values that an adapter has in a slot.

    Attributes:
      about: The adapter without its arrays.
      placements: Destinations of its modules.
      ranks: true rank and scale of each output slice of every site, in the order of the slot arrays (`rank_values`).
      rank: The largest rank of a LoRA module.
      blocks: The factors, packed in the layout in which slots are written, on the host or on the device. Experts on
        devices of other processes are zeros, which take no memory.
      extras: name of a variant -> values of a slot (`slot_values`), for the variants of its modules.
      update_program: Program of the last update from device arrays, reused for the same names and shapes.
    """

    about: Adapter
    placements: tuple[Placement, ...]
    ranks: Float[np.ndarray, "scales"]
    rank: int
    blocks: tuple[Block, ...]
    extras: Mapping[str, Float[np.ndarray, "values"]] = field(default_factory=dict[str, np.ndarray])
    update_program: Any = None

    @property
    def name(self) -> str:
        """Name of the adapter."""
        return self.about.name

    @functools.cached_property
    def saved_outputs(self) -> dict[str, int]:
        """Module name -> number of outputs of its saved head."""
        return {p.module: p.rank for p in self.placements if p.site.kind == "head"}

    @functools.cached_property
    def sites(self) -> frozenset[Site]:
        """The sites that it has weights for."""
        return _one_of(frozenset(placement.site for placement in self.placements))

    @functools.cached_property
    def slots(self) -> range:
        """The slots that can hold it, which are those common to all of its sites."""
        of_sites = {site.spec.slots for site in self.sites}
        return range(max((s.start for s in of_sites), default=0), min((s.stop for s in of_sites), default=0))

    def with_blocks(self, blocks: tuple[Block, ...]) -> "PackedAdapter":
        """Return a packed adapter with other blocks for the same modules."""
        new = copy.copy(self)  # in place of `replace`, which drops the cached sets
        vars(new).update(blocks=blocks)
        return new

    @property
    def served_alone(self) -> str | None:
        """Why a sequence takes it with no other adapter and no factor, as the adapter's kind; None if it need not."""
        for variant in described(self.extras):
            return f"a {variant.title} adapter"
        return "an adapter with a saved head" if self.saved_outputs else None

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, ranks, scales and extras, in the process that holds most of them.

        It is equal in all processes of a model, so that all evict the same adapters.
        """
        return sum(each.nbytes for each in (*self.blocks, self.ranks, *self.extras.values()))

    def digest(self) -> str:
        """Return a hash that is equal in all processes of a model that read the same adapter.

        It covers modules, ranks, scalings, invocation tokens and values. Values of experts are left out, because each
        process can have read different experts. Those of `extras` follow from the others and the base weights.
        """
        found = hashlib.sha256(repr(self.about.invocation_tokens).encode())
        for p in self.placements:
            about = (p.module, p.site.path, p.entry, p.first, p.count, p.rank, p.alpha, p.scaling)
            found.update(repr(about).encode())
            for name, array in sorted(p.extras.items()):
                found.update(name.encode() + array.tobytes())
        for block in self.blocks:
            if block.chunk.spec.experts is None:
                for half in (block.a, block.b, *(() if block.quanta is None else (block.quanta,))):
                    found.update(zlib.crc32(np.asarray(half).view(np.uint8).data).to_bytes(4, "little"))
        return found.hexdigest()

"""One version of an adapter as the host keeps it: checked against the model, cast, packed and ready to move."""

import functools
import hashlib
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from jlora.adapters import Adapter
from jlora.config import LoRARequest
from jlora.layers.site import Site
from jlora.manager.blocks import Block


@functools.lru_cache(maxsize=64)
def _one_of(sites: frozenset[Site]) -> frozenset[Site]:
    """The first of equal sets: most adapters of a deployment bring weights for the same sites, and there may be ten
    thousand of them."""
    return sites


@dataclass(frozen=True)
class Placement:
    """Where one module of an adapter goes.

    Attributes:
      module: the checkpoint's name of the module, of which a site that holds one factor alone has that one.
      site, row: the site, and which of its rows: a layer of its stack, an expert (0 where it has one).
      first, count: the output slices covered.
      rank: its own rank.
      alpha, scaling: as in PEFT. The scaling is folded into B.
      shift: A was multiplied by 2**shift, and B by 2**-shift: float16 has few exponents.
    """

    module: str
    site: Site
    row: int
    first: int
    count: int
    rank: int
    alpha: float
    scaling: float
    shift: int = 0


@dataclass(eq=False)
class PackedAdapter:
    """One version of one adapter. Compared by identity.

    Attributes:
      name, version: one content of a name has one version, counted from 0.
      placements: where its modules go.
      blocks: its factors, packed as slots are written; replaced whole, never changed. Where experts are split over
        processes, those of other processes' devices are zeros, which take no memory.
      ranks: int32, the true rank of each output slice of every site, in the pool's order.
      rank: the largest.
      about: the adapter without its arrays, for what else an exported one must say.
      request: what it is loaded from again once it was evicted, if it was loaded from a request.
      key: `Adapter.fingerprint` of the files that it was read from; None where there are none.
      in_place: whether it was loaded to replace what there is: then it is a new version whatever its key.
      on_host: False until the blocks of a device update are copied back.
      copying: whether that is under way; if it fails, they stay where they are, and it in its slot.
      ahead: its blocks on the device already, for the next write of them.
      update_plan: what the last update from device arrays worked out, for the next of the same names and shapes.
      sites: those that it brings weights for.
      slots: those that can hold it: which all of its sites have.
    """

    name: str
    version: int
    placements: tuple[Placement, ...]
    blocks: tuple[Block, ...]
    ranks: Int[np.ndarray, "ranks"]
    rank: int
    about: Adapter | None = None
    request: LoRARequest | None = None
    key: str | None = None
    in_place: bool = False
    on_host: bool = True
    copying: bool = False
    ahead: tuple[Block, ...] | None = None
    update_plan: Any = None
    sites: frozenset[Site] = field(init=False)
    slots: range = field(init=False)

    def __post_init__(self) -> None:
        self.sites = _one_of(frozenset(placement.site for placement in self.placements))
        of_sites = {site.spec.slots for site in self.sites}
        self.slots = range(max((s.start for s in of_sites), default=0), min((s.stop for s in of_sites), default=0))

    @property
    def pinned(self) -> bool:
        """Whether its blocks lie in page-locked memory."""
        return self.on_host and bool(self.blocks) and not isinstance(self.blocks[0].a, np.ndarray)

    @property
    def nbytes(self) -> int:
        """The same in all processes of a model, so that all evict the same: what the one holds that holds most."""
        return sum(block.nbytes for block in self.blocks) + self.ranks.nbytes

    def digest(self) -> str:
        """Return what is the same in all processes of a model that read the same adapter.

        It covers modules, ranks, scalings and values, but not those of experts: each process may have read others.
        """
        found = hashlib.sha256()
        for p in self.placements:
            about = (p.module, p.site.path, p.row, p.first, p.count, p.rank, p.alpha, p.scaling)
            found.update(repr(about).encode())
        for block in self.blocks:
            if block.chunk.spec.experts is None:
                for half in (block.a, block.b):
                    found.update(zlib.crc32(np.asarray(half).view(np.uint8).data).to_bytes(4, "little"))
        return found.hexdigest()

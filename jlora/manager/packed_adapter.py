"""The host copy of one version of an adapter: checked against the model, cast, packed and ready to transfer."""

import functools
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from jlora.adapters import Adapter
from jlora.adapters.extras import EXTRAS
from jlora.config import LoRARequest
from jlora.layers.site import Site
from jlora.manager.blocks import Block


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
      row: Row of the site, which is a layer of a stack, an expert, or 0 if the site has a single row.
      first: The first output slice.
      count: Number of output slices.
      rank: Rank of the module; the number of outputs of a saved head.
      alpha: `lora_alpha` of PEFT.
      scaling: Scaling of PEFT.
      extras: `Extra.name` -> array that the module brings beside A and B, as float32.
    """

    module: str
    site: Site
    row: int
    first: int
    count: int
    rank: int
    alpha: float
    scaling: float
    extras: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray], compare=False, repr=False)


def largest_rank(placements: Iterable[Placement]) -> int:
    """Return the largest rank of the LoRA modules, 0 if all are saved heads."""
    return max((p.rank for p in placements if p.site.kind != "head"), default=0)


@dataclass(eq=False)
class PackedAdapter:
    """One version of one adapter. Compared by identity.

    Attributes:
      name: Name of the adapter.
      version: Version of the weights under this name, counted from 0.
      placements: Destinations of its modules.
      blocks: Its factors, packed in the layout in which slots are written. The tuple is replaced, never mutated.
        Experts on devices of other processes are zeros, which take no memory.
      ranks: (true rank, scale) of each output slice of every site, in the order of the pool (`rank_table`).
      rank: The largest rank of a LoRA module.
      extras: `Extra.name` -> values of a slot (`slot_values`), for the extras that its modules bring.
      about: The adapter without its arrays, for the metadata of an export.
      request: The request from which it is loaded again after an eviction, or None if it was not loaded from one.
      key: `Adapter.fingerprint` of its files, or None if its weights are from memory.
      in_place: True if it was loaded to replace the current weights. It is then a new version whatever its key.
      on_host: False until the blocks of an update from device arrays are copied to the host.
      copying: True during that copy. If the copy fails, the blocks stay on the device and the adapter in its slot.
      ahead: Its blocks if they are already on the device, for the next write.
      update_plan: Plan of the last update from device arrays, reused for the same names and shapes.
      warnings: What the load found about parts without effect (`AdapterInfo.warnings`).
      saved_outputs: Module name -> number of outputs of its saved head.
      sites: The sites that it has weights for.
      slots: The slots that can hold it, which are those common to all of its sites.
    """

    name: str
    version: int
    placements: tuple[Placement, ...]
    blocks: tuple[Block, ...]
    ranks: Float[np.ndarray, "slices 2"]
    rank: int
    extras: Mapping[str, Float[np.ndarray, "values"]] = field(default_factory=dict[str, np.ndarray])
    about: Adapter | None = None
    request: LoRARequest | None = None
    key: str | None = None
    in_place: bool = False
    on_host: bool = True
    copying: bool = False
    ahead: tuple[Block, ...] | None = None
    update_plan: Any = None
    warnings: tuple[str, ...] = ()
    saved_outputs: dict[str, int] = field(init=False)
    sites: frozenset[Site] = field(init=False)
    slots: range = field(init=False)

    def __post_init__(self) -> None:
        self.sites = _one_of(frozenset(placement.site for placement in self.placements))
        self.saved_outputs = {p.module: p.rank for p in self.placements if p.site.kind == "head"}
        of_sites = {site.spec.slots for site in self.sites}
        self.slots = range(max((s.start for s in of_sites), default=0), min((s.stop for s in of_sites), default=0))

    @property
    def invocation_tokens(self) -> tuple[int, ...]:
        """Invocation tokens of an aLoRA adapter; () for others."""
        return () if self.about is None else self.about.invocation_tokens

    @property
    def served_alone(self) -> str | None:
        """Why a sequence takes it with no other adapter and no factor, as the adapter's kind; None if it need not."""
        for extra in EXTRAS:
            if extra.name in self.extras:
                return f"a {extra.title} adapter"
        return "an adapter with a saved head" if self.saved_outputs else None

    @property
    def pinned(self) -> bool:
        """True if its blocks are in page-locked host memory."""
        return self.on_host and bool(self.blocks) and not isinstance(self.blocks[0].a, np.ndarray)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks, ranks, scales and extras, in the process that holds most of them.

        It is equal in all processes of a model, so that all evict the same adapters.
        """
        return sum(part.nbytes for part in (*self.blocks, self.ranks, *self.extras.values()))

    def digest(self) -> str:
        """Return a hash that is equal in all processes of a model that read the same adapter.

        It covers modules, ranks, scalings, invocation tokens and values. Values of experts are left out, because each
        process can have read different experts. Those of `extras` follow from the others and the base weights.
        """
        found = hashlib.sha256(repr(self.invocation_tokens).encode())
        for p in self.placements:
            about = (p.module, p.site.path, p.row, p.first, p.count, p.rank, p.alpha, p.scaling)
            found.update(repr(about).encode())
            for name, array in sorted(p.extras.items()):
                found.update(name.encode() + array.tobytes())
        for block in self.blocks:
            if block.chunk.spec.experts is None:
                for half in (block.a, block.b):
                    found.update(zlib.crc32(np.asarray(half).view(np.uint8).data).to_bytes(4, "little"))
        return found.hexdigest()

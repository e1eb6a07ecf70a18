"""An adapter of a manager: one version of it, with its source, and where its blocks are."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from jlora.adapters import Adapter
from jlora.config import LoRARequest
from jlora.slots.blocks import Block
from jlora.slots.packed import PackedAdapter


@dataclass(eq=False)
class LoadedAdapter:
    """One version of one adapter. Compared by identity.

    `packed`, `request`, `version`, `on_host`, `copying` and `prefetched` change under the state lock.

    Attributes:
      packed: its values. Their blocks are replaced, never mutated.
      request: the request from which it is loaded again after an eviction: that of its load, or of `set_request`; else
        None.
      key: `Adapter.fingerprint` of its files, or None if its weights are from memory.
      commit: commit of the Hugging Face repository that it was read from; None for other sources.
      in_place: True if it was loaded to replace the current weights. It is then a new version whatever its key.
      warnings: sentences about modules without effect (`AdapterInfo.warnings`).
      given: returns the adapter from memory, with whose values training begins, or None once it is gone; None for
        files.
      version: version of the weights under the adapter's name, counted from 0; set when the host cache stores it.
      on_host: False until the blocks of an update from device arrays are copied to the host.
      copying: True during that copy. If the copy fails, the blocks stay on the device and the adapter in its slot.
      prefetched: the blocks if they are already on the device, for the next write.
      name: name of the adapter.
      invocation_tokens: invocation tokens of an aLoRA adapter; () for others.
    """

    packed: PackedAdapter
    request: LoRARequest | None = None
    key: str | None = None
    commit: str | None = None
    in_place: bool = False
    warnings: tuple[str, ...] = ()
    given: Callable[[], Adapter | None] | None = None
    version: int = 0
    on_host: bool = True
    copying: bool = False
    prefetched: tuple[Block, ...] | None = None
    name: str = field(init=False)
    invocation_tokens: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.name, self.invocation_tokens = self.packed.name, self.packed.about.invocation_tokens

    @property
    def nbytes(self) -> int:
        """See `PackedAdapter.nbytes`."""
        return self.packed.nbytes

    @property
    def page_locked(self) -> bool:
        """True if the blocks are in page-locked host memory."""
        blocks = self.packed.blocks
        return self.on_host and bool(blocks) and not isinstance(blocks[0].a, np.ndarray)

    def to_write(self, only: tuple[Block, ...] | None = None) -> PackedAdapter:
        """Return the values for a write of a slot: `only` these blocks, or all, from the device if they are there."""
        return self.packed.with_blocks(only or self.prefetched or self.packed.blocks)

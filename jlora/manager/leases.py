"""Which adapters open batches hold, and handles on one version of an adapter."""

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jlora.layers.forward.batch import Lease, Served
from jlora.manager.packed_adapter import PackedAdapter


@dataclass(frozen=True)
class LeaseInfo:
    """An open lease, as `LoRAManager.leases` shows it.

    Attributes:
      adapters: names of the adapters that it holds.
      age: seconds since it was opened.
      thread: identifier of the thread that opened it.
      where: the stack at which it was opened, with `LoRAConfig.trace_leases`.
    """

    adapters: tuple[str, ...]
    age: float
    thread: int
    where: str | None


class AdapterHandle:
    """One version of an adapter: `prepare` takes it in the place of a name, whatever the name means by then.

    The content stays on the host while the handle is open; it ends when it is closed, or when it is gone.

    Attributes:
      name, version: what it stands for.
    """

    def __init__(self, content: PackedAdapter, on_close: Callable[[], object]):
        self._content: PackedAdapter | None = content
        self._on_close = on_close
        self.name = content.name
        self.version = content.version

    @property
    def content(self) -> PackedAdapter | None:
        """The content; None once the handle is closed."""
        return self._content

    def close(self) -> None:
        """Let the version go. Closing twice is harmless."""
        self._content = None
        self._on_close()

    def __enter__(self) -> "AdapterHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AdapterHandle({self.name!r}, version={self.version})"


class Leases:
    """The open leases and handles, by weak references: one that is collected is closed.

    `add` and `add_handle`, under the manager's lock, drop those that are gone. They put a new set in the place of the
    old one, so the other methods need no lock.
    """

    def __init__(self) -> None:
        self._leases: set[weakref.ref[Lease]] = set()
        self._handles: set[weakref.ref[AdapterHandle]] = set()

    def add(self, lease: Lease) -> None:
        self._leases = {weakref.ref(other) for other in (*self.open(), lease)}

    def add_handle(self, handle: AdapterHandle) -> None:
        self._handles = {ref for ref in self._handles if ref() is not None} | {weakref.ref(handle)}

    def gave(self, handle: AdapterHandle) -> bool:
        """Whether a handle is of this manager."""
        return weakref.ref(handle) in self._handles

    def open(self) -> Iterator[Lease]:
        for ref in self._leases:
            if (lease := ref()) is not None and not lease.closed:
                yield lease

    def leased(self) -> set[Served]:
        """The contents that open batches hold in their slots."""
        return {adapter for lease in self.open() for adapter in lease.adapters}

    def handled(self) -> set[PackedAdapter]:
        """The contents that handles hold on the host."""
        handles = [ref() for ref in self._handles]
        return {handle.content for handle in handles if handle is not None and handle.content is not None}

    def threads(self, content: PackedAdapter | None = None) -> set[int]:
        """The threads that opened a lease (on `content`) which is still open."""
        return {lease.thread for lease in self.open() if content is None or content in lease.adapters}

    def infos(self) -> tuple[LeaseInfo, ...]:
        now = time.monotonic()
        return tuple(
            LeaseInfo(tuple(adapter.name for adapter in lease.adapters), now - lease.opened, lease.thread, lease.where)
            for lease in sorted(self.open(), key=lambda lease: lease.opened)
        )

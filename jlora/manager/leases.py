"""Leases of open batches on adapters, and handles on one version of an adapter."""

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jlora.layers.forward.lease import Lease, Served
from jlora.manager.loaded_adapter import LoadedAdapter


@dataclass(frozen=True)
class LeaseInfo:
    """An open lease, as `LoRAManager.leases` shows it.

    Attributes:
      adapters: names of the adapters that the lease holds.
      age: seconds since the lease was opened.
      thread: identifier of the thread that opened the lease.
      where: stack trace of the call that opened the lease, if the logger "jlora.leases" was enabled for DEBUG.
    """

    adapters: tuple[str, ...]
    age: float
    thread: int
    where: str | None


class AdapterHandle:
    """A handle on one version of an adapter, which `prepare` accepts instead of a name.

    The version stays on the host until the handle is closed or garbage collected, even if the name is replaced.

    Attributes:
      name: name of the adapter.
      version: version number of the adapter.
      fingerprint: `Adapter.fingerprint` of this version; None if it was made or changed in memory.
    """

    def __init__(self, adapter: LoadedAdapter, on_close: Callable[[], object]):
        self._adapter: LoadedAdapter | None = adapter
        self._on_close = on_close
        self.name = adapter.name
        self.version = adapter.version
        self.fingerprint = adapter.packed.about.fingerprint

    @property
    def adapter(self) -> LoadedAdapter | None:
        """The loaded adapter; None once the handle is closed."""
        return self._adapter

    def close(self) -> None:
        """Release the version. Further calls have no effect."""
        self._adapter = None
        self._on_close()

    def __enter__(self) -> "AdapterHandle":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"AdapterHandle({self.name!r}, version={self.version})"


class Leases:
    """The open leases and handles, as weak references. A lease or handle that is garbage collected counts as closed.

    `add` and `hold` are called under the state lock and drop dead references. They replace the whole set, so the
    other methods need no lock.
    """

    def __init__(self) -> None:
        self._leases: set[weakref.ref[Lease]] = set()
        self._handles: set[weakref.ref[AdapterHandle]] = set()

    def add(self, lease: Lease) -> None:
        self._leases = {weakref.ref(other) for other in (*self.open(), lease)}

    def hold(self, adapter: LoadedAdapter, on_close: Callable[[], object]) -> AdapterHandle:
        handle = AdapterHandle(adapter, on_close)
        self._handles = {ref for ref in self._handles if ref() is not None} | {weakref.ref(handle)}
        return handle

    def gave(self, handle: AdapterHandle) -> bool:
        """Return True if this manager created the handle."""
        return weakref.ref(handle) in self._handles

    def open(self) -> Iterator[Lease]:
        for ref in self._leases:
            if (lease := ref()) is not None and not lease.closed:
                yield lease

    def leased(self) -> set[Served]:
        """Return the adapters that open batches hold in slots."""
        return {adapter for lease in self.open() for adapter in lease.adapters}

    def handled(self) -> set[LoadedAdapter]:
        """Return the adapters that open handles hold on the host."""
        handles = [ref() for ref in self._handles]
        return {handle.adapter for handle in handles if handle is not None and handle.adapter is not None}

    def threads(self, adapter: LoadedAdapter | None = None) -> set[int]:
        """Return the threads that opened the leases which are open (on `adapter`, if given)."""
        return {lease.thread for lease in self.open() if adapter is None or adapter in lease.adapters}

    def infos(self) -> tuple[LeaseInfo, ...]:
        now = time.monotonic()
        return tuple(
            LeaseInfo(tuple(adapter.name for adapter in lease.adapters), now - lease.opened, lease.thread, lease.where)
            for lease in sorted(self.open(), key=lambda lease: lease.opened)
        )

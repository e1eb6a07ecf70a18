"""The state of a manager, and the one loop that waits for its changes."""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import jax

from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import AdapterInUseError, AdapterNotFoundError
from jlora.fit.names import SiteIndex
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.manager.host_cache import HostCache
from jlora.manager.leases import Leases
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loads import Deadline, Loads
from jlora.manager.locks import Bell
from jlora.manager.multihost import Peers
from jlora.manager.policy import SlotPolicy
from jlora.manager.report import Histogram, unknown_name
from jlora.slots.arrays import SlotArrays

T = TypeVar("T")

_log = logging.getLogger("jlora")


@dataclass(frozen=True, eq=False)
class KeptBatch:
    """A cached batch, and the conditions under which its arrays are valid.

    Attributes:
      batch: the batch, with a closed lease that holds no adapter.
      arrays: the arrays of the batch.
      slots: adapter -> (slot, write count of the slot), for each adapter of the batch.
      newest: adapters that must still be the newest version of their name. The others were given by handles. The
        handles are not stored here, so that they can be garbage collected.
    """

    batch: LoRABatch
    arrays: tuple[jax.Array, ...]
    slots: dict[LoadedAdapter, tuple[int, int]]
    newest: frozenset[LoadedAdapter]


@dataclass(eq=False)
class Ticket:
    """A position in the queue for slots.

    Attributes:
      deadline: `time.monotonic()` at which the call stops waiting; None if it does not wait.
      reloaded: requests with `load_inplace` that the call has loaded already.
    """

    deadline: float | None
    reloaded: set[LoRARequest] = field(default_factory=set[LoRARequest])

    @property
    def over(self) -> bool:
        """True if the call does not wait for slots, or its deadline has passed."""
        return self.deadline is None or time.monotonic() >= self.deadline


class State:
    """The state of a manager. It is read and changed under `lock`, and slots are written under `lock.writing`.

    Args:
      config: configuration of the manager.
      wrapped: the wrapped model.
      index: index from checkpoint names to the sites of the model.
      resolve: as for `LoRAManager`.
      peers: the processes that have devices of the model, with the state lock.
      limits: largest size of the host cache, and of the blocks moved to the device at a time, in bytes.

    Attributes:
      lock: the state lock, with the step lock. Code under it does not wait, read files, compile or call user code.
      changed: the bell. Its lock is the last, since `batch.close()` rings and waits for no other lock.
      cache: newest version of each name on the host, and the requests of evicted names.
      slot_arrays: the slot arrays, and the adapter in each slot.
      policy: choice of slots and victims.
      leases: open batches and handles.
      loads: running and failed loads.
      queue: calls that wait for slots, in order of arrival.
      kept: arguments of `prepare` -> cached batch, least recently used first.
      counts: counts of `Stats`.
      load_seconds: histogram of the durations of loads.
    """

    def __init__(
        self,
        config: LoRAConfig,
        wrapped: WrappedModel,
        index: SiteIndex,
        resolve: Callable[[LoRARequest], str] | None,
        peers: Peers,
        limits: Sequence[int],
    ):
        memory, staging = limits
        self.config, self.wrapped, self.index, self.resolve = config, wrapped, index, resolve
        self.peers, self.lock, self.changed = peers, peers.lock, Bell()
        self.cache = HostCache(config.max_cpu_loras or config.max_loras, memory)
        self.slot_arrays: SlotArrays[LoadedAdapter] = SlotArrays(wrapped.modules, config.max_loras, staging)
        self.leases = Leases()
        self.counts: Counter[str] = Counter()
        self.policy = SlotPolicy(self.slot_arrays, self.cache, self.leases, self.counts)
        self.loads = Loads()
        self.queue: list[Ticket] = []
        self.kept: OrderedDict[Hashable, KeptBatch] = OrderedDict()
        self.load_seconds = Histogram()

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], T | None], deadline: float | None = None) -> T | None:
        """Call `ready` until it returns a result, after each change, and return the result.

        Locks that the calling thread holds are released between the calls.

        Args:
          ready: a function that returns None to wait.
          deadline: `time.monotonic()` of the last call; None for no limit.

        Returns:
          The result; None at the deadline.
        """
        while True:
            seen = self.changed.rings
            last = deadline is not None and time.monotonic() >= deadline
            if (found := ready()) is not None or last:
                return found
            with self.lock.released():
                self.changed.wait(seen, deadline)

    def is_free(self, adapter: LoadedAdapter, doing: str, deadline: Deadline) -> bool:
        """Return True if no open batch holds an adapter that a call changes, and False if the call must wait.

        Args:
          adapter: the adapter.
          doing: the action, for the error message.
          deadline: limit of the wait.

        Raises:
          AdapterInUseError: an open batch holds the adapter, and the deadline has passed, the batch belongs to the
            calling thread, or the mesh spans several processes, where batches may close at different times.
        """
        if not self.in_batch(adapter):
            return True
        own = deadline.thread is not None and deadline.thread in self.leases.threads(adapter)
        if own or deadline.over or self.peers.several:
            raise in_use(adapter.name, doing)
        return False

    def in_batch(self, adapter: LoadedAdapter) -> bool:
        """Return True if an open batch holds the adapter and no handle does."""
        return adapter in self.leases.leased() and adapter not in self.leases.handled()

    # --- lookup -----------------------------------------------------------------------------------------------------

    def newest(self, name: str) -> LoadedAdapter:
        """Return the newest version of a name in the host cache.

        Raises:
          AdapterNotFoundError: the name is unknown or evicted.
        """
        adapter = self.cache.loaded.get(name)
        if adapter is None:
            raise AdapterNotFoundError(unknown_name(name, self.cache))
        return adapter

    def request_of(self, name: str) -> LoRARequest:
        """Return the request that reloads an evicted name.

        Raises:
          AdapterNotFoundError: no such name was evicted.
        """
        if (known := self.cache.known.get(name)) is None:
            raise AdapterNotFoundError(unknown_name(name, self.cache))
        return known

    def touch(self, name: str) -> bool:
        """Mark a use of a name. Return False if it is not in the host cache."""
        with self.lock:
            if name not in self.cache.loaded:
                return False
            self.cache.loaded.move_to_end(name)
            return True

    # --- changes ----------------------------------------------------------------------------------------------------

    def put(self, adapter: LoadedAdapter, victims: Iterable[str] = (), version: int | None = None) -> None:
        """Evict the victims, and store an adapter in the host cache as a version of its name (None: the next)."""
        for victim in victims:
            self.evict(victim)
        adapter.version = self.cache.version(adapter) if version is None else version
        if self.cache.changed(adapter):
            _log.warning(
                "adapter %r: its files have changed since they were loaded, and it comes back with their content as "
                "version %d",
                adapter.name,
                adapter.version,
            )
        if (warning := self.cache.put(adapter)) is not None:
            _log.warning("%s", warning)

    def evict(self, name: str) -> None:
        """Evict an adapter from the host cache and from its slot."""
        adapter = self.cache.loaded[name]
        self.cache.evict(name)
        self.policy.release(adapter)
        self.counts["host_evictions"] += 1
        _log.info("evicted %r from the host cache", name)

    def forget(self, names: Iterable[str]) -> bool:
        """Remove names from the host cache, from the evicted names and from slots. Return True if any was there."""
        found = False
        for name in names:
            adapter = self.cache.loaded.get(name)
            found |= self.cache.forget(name)
            if adapter is not None:
                self.policy.release(adapter)
        return found


def in_use(name: str, doing: str) -> AdapterInUseError:
    return AdapterInUseError(f"adapter {name!r} is held by an open batch; close it before {doing} the adapter")

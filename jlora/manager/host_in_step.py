"""The host cache where several processes have one: what one of them cannot load, or has not loaded yet, none has.

Each process reads by itself, on its loading threads, and keeps apart what it has read. The call that asks for that lets
it in, once all have it: so caches are the same, and evict the same, whichever process was quicker.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jlora.adapters import Adapter
from jlora.config import LoRARequest
from jlora.errors import AdapterNotFoundError, LoRAUsageError
from jlora.manager.blocks import Block
from jlora.manager.host import Host, in_use
from jlora.manager.loader import Load, Patience
from jlora.manager.packed_adapter import PackedAdapter, Placement, fingerprint
from jlora.manager.processes import Processes
from jlora.manager.report import unknown_name
from jlora.manager.update import updated


class HostInStep(Host):
    """The host cache of one of several processes."""

    def __init__(self, *args: Any, processes: Processes):
        super().__init__(*args)
        self._processes = processes

    def touch(self, name: str) -> bool:
        found = super().touch(name)
        if found:  # if not, it is to be loaded, and the others hear of it
            self._processes.check()
        return found

    def load(self, request: LoRARequest, patience: Patience) -> bool:
        return bool(self.let_in(f"add_adapter({request.name!r})", request, patience, again=True))

    def recall(self, name: str) -> None:
        if name not in self._cache.contents:
            self.let_in(f"the load of {name!r}", name, Patience(None))

    def add(self, adapter: Adapter, replace: bool, patience: Patience) -> bool:
        return bool(self._together(f"add_adapter({adapter.name!r})", lambda: self._in_memory(adapter), patience))

    def _anew(self, request: LoRARequest) -> bool:
        return False  # what was read is kept for the call that lets it in

    def _found(self, name: str) -> bool:
        return name in self._cache.contents  # not a use of it: the order of uses is that of the calls

    def _fingerprint(self, placements: tuple[Placement, ...], blocks: tuple[Block, ...]) -> str:
        return fingerprint(placements, blocks)

    def _arrived(self, load: Load, content: PackedAdapter) -> bool:
        """It is kept until all processes let it in; the oldest go where there are too many."""
        with self._state_lock:
            # Another process could not read it, and nobody waits any more.
            if load.given_up or not self.loader.knows(load):
                return True
            load.content = content
            for old in self.loader.staged()[: -(self._config.max_cpu_loras or 1)]:
                if old.request.name not in self._cache.contents:
                    self._cache.known[old.request.name] = old.request
                self._drop(old)
        return True

    def _drop(self, load: Load) -> None:
        if load.content is not None and not self._cache.newest(load.content):
            self._slots.release(load.content)
        self.loader.abandon(load)

    def wait_for(self, content: PackedAdapter, doing: str, patience: Patience, seen: int) -> None:
        """As `Host.wait_for`, but no longer than others would wait for this process: meanwhile no other thread can make
        a call, and maybe needs one before it closes its batch."""
        if time.monotonic() - patience.since > self._processes.timeout:
            raise in_use(content.name, doing)
        super().wait_for(content, doing, patience, seen)

    def let_in(
        self,
        what: str,
        request: LoRARequest | str,
        patience: Patience,
        *,
        wait: bool = True,
        again: bool = False,
        before: Callable[[], object] | None = None,
    ) -> bool | None:
        """Load an adapter in all processes, and let it in once all have it. See `LoRAManager.add_adapter`.

        Args:
          what: the call, for messages.
          request: what to load; or the name of one that was evicted, or is being loaded.
          patience: how long to wait.
          wait: whether to wait for the load.
          again: whether to try again what failed before.
          before: what to do first; what it raises, all processes raise.

        Returns:
          Whether it was loaded. None where it is still being loaded in some process; only without `wait`.
        """
        loads: list[Load] = []

        def staged() -> PackedAdapter | None:
            if before is not None:
                before()
            while True:
                with self._state_lock:
                    asked = self._request(request)
                    load = self.loader.start(asked, again=again, patience=patience)
                    load.wanted += 1
                loads.append(load)
                if not (wait or load.done):
                    return None
                if self.wait(load, patience.deadline) and load.content is not None:
                    return load.content

        admitted: bool | None = False
        try:
            admitted = self._together(what, staged, patience, wait)
        finally:
            if admitted is not None:  # also what another process failed to read is read anew the next time
                with self._state_lock:
                    for load in loads:
                        self._drop(load)
        return admitted

    def _request(self, request: LoRARequest | str) -> LoRARequest:
        if isinstance(request, LoRARequest):
            return request
        if (known := self._cache.known.get(request)) is not None:
            return known
        if not (loads := self.loader.named(request)):
            raise AdapterNotFoundError(unknown_name(request, self._cache.contents, self._cache.known))
        return loads[0].request

    def give_up(self, name: str | None = None) -> list[Load]:
        staged = [load for load in self.loader.staged() if name in (None, load.request.name)]
        for load in staged:
            self._drop(load)
        return [*staged, *super().give_up(name)]

    def give_up_request(self, request: LoRARequest, *, reading: bool) -> None:
        for load in self.loader.named(request.name):
            if load.request == request and (reading or load.done or load.content is not None):
                self._drop(load)

    def _together(
        self, what: str, stage: Callable[[], PackedAdapter | None], patience: Patience, wait: bool = True
    ) -> bool | None:
        """Admit what `stage` gives, once all processes have it, at the expense of the same others. None: not yet."""
        content: PackedAdapter | None = None
        victims: list[str] = []

        def ready() -> tuple[Any, Any] | None:
            nonlocal content, victims
            if (content := stage()) is None:
                return None
            while True:
                seen = self._changed.rings
                with self._state_lock:
                    old = self._cache.contents.get(content.name)
                    if old is None or not self.held(old):
                        victims = self._cache.victims_for(content, self.busy)
                        return [content.fingerprint, victims], self._cache.version(content)
                if not wait and patience.thread not in self._leases.threads(old):
                    return None
                self.wait_for(old, "replacing", patience, seen)

        with self._processes.together(what, ready) as versions:
            if versions is None:
                return None
            assert content is not None
            with self._state_lock:
                self.put(content, victims, max(versions))
            return True

    def update(self, name: str, arrays: Mapping[str, Any], patience: Patience, step_lock: Any) -> int:
        """See `LoRAManager.update_adapter`. From arrays that each process has on the host."""
        pool = self._slots.pool
        pool.compile()
        self.recall(name)
        found: tuple[PackedAdapter, PackedAdapter, tuple[Block, ...], list[str]] | None = None

        def ready() -> tuple[Any, Any]:
            nonlocal found
            with self._state_lock:
                old = self.newest(name)
            if isinstance(arrays, Mapping) and any(isinstance(array, jax.Array) for array in arrays.values()):
                raise LoRAUsageError(
                    f"adapter {name!r}: a model over several processes takes new weights from the host; give "
                    "update_adapter NumPy arrays, the same in each"
                )
            content, written = updated(old, arrays, pool, allow_nonfinite=self._config.allow_nonfinite)
            content.fingerprint = fingerprint(content.placements, content.blocks)
            self.wait_until_free(name, "updating", patience)
            with self._state_lock:
                victims = self._cache.victims_for(content, self.busy)
                found = old, content, written, victims
                return [content.fingerprint, victims, self._cache.version(content)], None

        with self._processes.together(f"update_adapter({name!r})", ready):
            assert found is not None
            old, content, written, victims = found
            with step_lock, self._state_lock:
                for victim in victims:
                    self.evict(victim)
                content.version = self._cache.version(content)
                self._cache.put(content)
                self._slots.replace(old, content, written)
        return content.version

"""`prepare` where several processes have one model: all bring the same adapters into the same slots, or none does."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from jlora.config import LoRARequest
from jlora.errors import NoFreeSlotError
from jlora.layers.forward.batch import LoRABatch
from jlora.manager.batch_arguments import BatchArguments, Name
from jlora.manager.host_in_step import HostInStep
from jlora.manager.leases import AdapterHandle
from jlora.manager.loader import Patience
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.prepare import Batches, R, over
from jlora.manager.processes import Processes

_TRIES = 8  # a batch that another thread closes is closed a moment later in another process


class BatchesInStep(Batches):
    """Prepares the batches of one of several processes."""

    def __init__(self, *args: Any, host: HostInStep, processes: Processes):
        super().__init__(*args, host=host)
        self._shared = host
        self._processes = processes

    def prepare(self, args: BatchArguments, wait: bool, deadline: float | None) -> tuple[LoRABatch, tuple[bool, ...]]:
        with self._processes.in_turn("prepare"):
            return super().prepare(args, wait, deadline)

    def _again(self, args: BatchArguments) -> LoRABatch | None:
        batch = super()._again(args)
        if batch is not None:
            self._processes.check()
        return batch

    def _new(self, args: BatchArguments, wait: bool, deadline: float | None) -> tuple[LoRABatch, tuple[bool, ...]]:
        reloaded: set[Name] = set()
        while True:
            with self._state_lock:
                known = self._contents(args)
            absent = [
                name
                for name in args.adapters
                if name not in known or (isinstance(name, LoRARequest) and name.load_inplace and name not in reloaded)
            ]
            for name in absent:
                assert not isinstance(name, AdapterHandle)
                reloaded.add(name)
                self._shared.let_in(
                    f"prepare: the load of {name if isinstance(name, str) else name.name!r}",
                    name,
                    Patience(deadline, threading.get_ident()),
                    wait=wait,
                    before=lambda: self._wait_for_room(args, deadline) if wait else None,
                )
            if not (absent and wait):
                break
        with self._state_lock:
            contents = self._contents(args)
        wanted = list(dict.fromkeys(contents.values()))

        def batch(_: list[PackedAdapter]) -> tuple[LoRABatch, tuple[bool, ...]]:
            return self._batch(args, contents, keep=wait)

        return self.bring("prepare", lambda: wanted, batch, partly=not wait, deadline=deadline)

    def _wait_for_room(self, args: BatchArguments, deadline: float | None) -> None:
        while True:
            seen = self._changed.rings
            try:
                with self._state_lock:
                    return self._keep(args)
            except NoFreeSlotError:
                if over(deadline):
                    raise
            self._changed.wait(seen, deadline)

    def bring(
        self,
        what: str,
        wanted: Callable[[], Sequence[PackedAdapter]],
        then: Callable[[list[PackedAdapter]], R],
        *,
        partly: bool = False,
        deadline: float | None = None,
    ) -> R:
        """See `Batches.bring`: into the same slots in all processes. Nothing is said where all are in slots already."""
        self._slots.pool.compile()
        with self._step_lock, self._state_lock:
            self._wrapped.check()
            contents = wanted()
            if all(content in self._slots.pool.table for content in contents):
                self._processes.check()
                return then(self._slots.activate(contents, partly=partly))
        plan = dict[PackedAdapter, int | None]()

        def ready() -> tuple[Any, Any]:
            nonlocal plan
            while True:
                seen = self._changed.rings
                try:
                    with self._step_lock, self._state_lock:
                        plan = self._slots.plan(contents, partly=partly)
                        return [(content.name, content.version, slot) for content, slot in plan.items()], None
                except NoFreeSlotError:
                    if over(deadline):
                        raise
                self._changed.wait(seen, deadline)

        with self._processes.together(what, ready, tries=_TRIES), self._step_lock, self._state_lock:
            return then(self._slots.carry_out(plan, contents))

"""The adapters of an engine in one of several processes: what is done about them, all do in the same turn.

Process 0 decides. Each reads an adapter by itself, apart, and says when it has it; once all have, it is let in by all
in one turn, in which nobody has to wait for a disk.
"""

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from jlora.config import LoRARequest
from jlora.errors import AdapterInUseError, LoadTimeoutError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.manager.manager import LoRAManager
from jlora.serve.lookups import Lookups
from jlora.serve.loras import Loras, as_error, one_less, removed
from jlora.serve.peers import Peers
from jlora.serve.request import EngineClosedError
from jlora.serve.sequence import Sequence
from jlora.serve.turn import Order, Turn, written


@dataclass(eq=False)
class _Load:
    """A load that all processes were told of.

    Attributes:
      call: who waits for it; None where requests do.
      came: which processes have it.
      error: of the first that could not.
    """

    request: LoRARequest
    call: "Future[Any] | None"
    came: set[int] = field(default_factory=set)
    error: LoRAError | None = None


class LorasInStep(Loras):
    """See the module."""

    def __init__(self, manager: LoRAManager, wake: Callable[[], None], peers: Peers, lookups: Lookups | None = None):
        super().__init__(manager, wake, lookups)
        self._peers = peers
        self._turns: Literal["before", "now", "over"] = "before"
        self._numbers = count(1)
        self._asked: deque[tuple[Order, Future[Any]]] = deque()  # calls of other threads that have not been told of
        self._calls: dict[int, Future[Any]] = {}  # that have
        self._under_way: dict[int, _Load] = {}
        self._reading: dict[int, tuple[Future[bool], LoRARequest]] = {}  # in this process

    # --- any thread of process 0 --------------------------------------------------------------------------------

    def start(self, lost: Callable[[int], None]) -> None:
        """From now on calls go through the turns. Before, all processes make the same."""
        self._turns = "now"
        self._peers.meet(self._report, lost)

    def not_wanted(self, name: str) -> None:
        if self._peers.leads:  # where requests are counted
            super().not_wanted(name)

    def _report(self, number: int, process: int, error: LoRAError | None) -> None:
        """A process has read an adapter, or could not."""
        with self._lock:
            load = self._under_way.get(number)
            if load is not None:
                load.came.add(process)
                load.error = load.error or error
        self._wake()

    def close(self) -> None:
        """Whoever waits for an order hears that there will be no more turns."""
        with self._lock:
            self._turns = "over"
            calls = [call for _, call in self._asked] + list(self._calls.values())
            calls += [load.call for load in self._under_way.values() if load.call is not None]
            self._asked.clear()
            self._calls.clear()
        for call in calls:
            _answer(call, EngineClosedError("the engine was closed, or failed, before this was done"))

    def remove(self, name: str) -> None:
        if self._turns == "before":
            super().remove(name)
            return
        with self._lock:
            self._check_turns()
            self._check(name)
            self._going.add(name)
        self._wake()

    def _load(self, request: LoRARequest, timeout: float | None) -> bool:
        if self._turns == "before":
            return super()._load(request, timeout)
        try:
            return self._order(Order("load", request.name, request=request), timeout)
        except LoadTimeoutError:  # the load's own
            raise
        except FutureTimeoutError:
            raise LoadTimeoutError(f"adapter {request.name!r}: loading it took more than {timeout} s") from None

    def _pin(self, name: str) -> None:
        if self._turns == "before":
            super()._pin(name)
            return
        with self._lock:
            self._coming[name] += 1
        try:
            if (request := self._manager.evicted(name)) is not None:  # read apart, not within a turn
                self._load(request, None)
            self._order(Order("pin", name), None)
        finally:
            with self._lock:
                one_less(self._coming, name)
            self._wake()

    def _unpin(self, name: str) -> None:
        if self._turns == "before":
            super()._unpin(name)
        else:
            self._order(Order("unpin", name), None)

    def _order(self, order: Order, timeout: float | None) -> Any:
        call: Future[Any] = Future()
        with self._lock:
            self._check_turns()
            self._asked.append((order, call))
        self._wake()
        try:
            return call.result(timeout)
        finally:
            call.cancel()  # nobody waits any more: the load is given up

    def _check_turns(self) -> None:
        if self._turns == "over":
            raise EngineClosedError("the engine is closed, or has failed")

    def _let_go(self) -> None:
        if self._turns == "before":
            super()._let_go()

    # --- the dispatching thread of process 0 --------------------------------------------------------------------

    def look(self, waiting: Iterable[Sequence]) -> tuple[Order, ...]:
        orders: list[Order] = []
        while self._asked:
            order, call = self._asked.popleft()
            if call.cancelled():
                continue
            if order.request is not None:
                orders += self._begun(order.request, call)
            else:
                number = next(self._numbers)
                self._calls[number] = call
                orders.append(Order(order.kind, order.name, number))
        with self._lock:
            orders += [Order("remove", name) for name in self._going if not (self._waiting[name] or self._coming[name])]
        orders += self._read()
        coming = {*(load.request.name for load in self._under_way.values()), *(order.name for order in orders)}
        loads = sum(load.call is None for load in self._under_way.values())
        for name, request in self.ahead(waiting, coming, loads):
            if request is None:
                orders.append(Order("fail", name, error=removed(name)))
            else:
                orders += self._begun(request, None)
        return tuple(orders)

    def _begun(self, request: LoRARequest, call: "Future[Any] | None") -> list[Order]:
        order = Order("load", request.name, next(self._numbers), request)
        try:
            written(Turn(orders=(order,)))
        except Exception as error:  # a field of it may be anything
            wrong = LoRAUsageError(f"{request!r:.300} cannot be told to the other processes: {error!s:.200}")
            if call is None:
                return [Order("fail", request.name, error=wrong)]
            _answer(call, wrong)
            return []
        with self._lock:
            self._under_way[order.number] = _Load(request, call)
        return [order]

    def _read(self) -> list[Order]:
        """What follows from what the processes have read."""
        orders: list[Order] = []
        with self._lock:
            for number, load in tuple(self._under_way.items()):
                name = load.request.name
                if load.call.cancelled() if load.call is not None else not self._waiting[name]:
                    # Those that asked for it have left: it may hang, and others need its place.
                    orders.append(Order("drop", name, number))
                elif load.error is not None and load.call is not None:
                    _answer(load.call, load.error)
                    orders.append(Order("drop", name, number, error=load.error))
                elif load.error is not None:
                    orders.append(Order("drop", name, number, error=load.error))
                    orders.append(Order("fail", name, error=load.error))
                elif len(load.came) == self._peers.count:
                    if load.call is not None:
                        self._calls[number] = load.call
                    orders.append(Order("admit", name, number, load.request))
                else:
                    continue
                del self._under_way[number]
        return orders

    # --- the dispatching thread of every process ----------------------------------------------------------------

    def carry_out(self, orders: Iterable[Order]) -> dict[str, LoRAError]:
        failed: dict[str, LoRAError] = {}
        for order in orders:
            try:
                result = self._do(order)
            except LoRAError as error:
                call = self._calls.pop(order.number, None)
                if call is not None:
                    _answer(call, error)
                elif order.kind in ("admit", "fail"):
                    if isinstance(error, NoFreeSlotError) and self._held:
                        self.later(order.name)
                    else:
                        failed[order.name] = error
            else:
                if (call := self._calls.pop(order.number, None)) is not None:
                    _answer(call, result)
        return failed

    def _do(self, order: Order) -> Any:
        name, manager = order.name, self._manager
        match order.kind:
            case "load":
                assert order.request is not None
                self._start(order.number, order.request)
            case "admit":
                assert order.request is not None
                try:
                    return manager.add_adapter(order.request)
                finally:  # also what was read of one that was there already
                    self._forget(order.number)
            case "drop":  # if one could not read it, who asks again has a reason: all read it anew
                self._forget(order.number, reading=order.error is not None)
            case "fail":
                assert order.error is not None
                raise order.error
            case "pin":
                manager.pin_adapter(name)
                with self._lock:
                    self._pinned.add(name)
            case "unpin":
                with self._lock:
                    self._pinned.discard(name)
                manager.unpin_adapter(name)
            case "remove":
                try:
                    manager.remove_adapter(name, timeout=0)
                except AdapterInUseError:  # as in the process that leads, which asks again
                    return None
                with self._lock:
                    self._gone(name)
        return None

    def _start(self, number: int, request: LoRARequest) -> None:
        def told(future: "Future[bool]") -> None:
            if not future.cancelled():
                error = future.exception()
                self._peers.tell(number, None if error is None else as_error(request.name, error))

        try:
            future = self._manager.prefetch(request)
        except Exception as error:  # as in `Loras.look`
            self._peers.tell(number, as_error(request.name, error))
            return
        self._reading[number] = future, request
        future.add_done_callback(told)

    def _forget(self, number: int, *, reading: bool = False) -> None:
        """What was read, unless another order is for the same. See `LoRAManager.give_up`."""
        future, request = self._reading.pop(number, (None, None))
        if future is None or request is None:
            return
        future.cancel()
        if all(request != other for _, other in self._reading.values()):
            self._manager.give_up(request, reading=reading)


def _answer(call: "Future[Any]", result: Any) -> None:
    """Unless nobody waits any more, or it was answered."""
    if not call.done() and call.set_running_or_notify_cancel():
        call.set_exception(result) if isinstance(result, LoRAError) else call.set_result(result)

"""Agreement between the managers of one model, where its mesh has devices of several processes (`jax.distributed`).

Each process makes a manager, and all make the same calls in the same order. Files, open batches and failures may still
differ, so whatever changes the host cache or the slots is compared first, through JAX's coordination service: all
processes change the same, or all raise the same error. A process that is interrupted inside of a call, or that is not
reached in time, may have missed a change of the others: all managers refuse further calls then.
"""

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import jax
from flax import nnx

from jlora._compat import Device, coordination
from jlora.errors import LoRAError, LoRAUsageError, error_of

T = TypeVar("T")
D = TypeVar("D")
Lock: TypeAlias = AbstractContextManager[Any]

FREE: Lock = nullcontext()
_LOOK_AGAIN = 0.5  # seconds between looks for a process that gave up
_numbers: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


def itself(value: Any) -> Any:
    return value


def _nothing(_: object) -> None:
    pass


class OneProcess:
    """Coordinate the calls of a model with all devices in this process: there is nothing to agree on.

    Attributes:
      several: whether there is more than one process.
    """

    several = False

    def __init__(self, step_lock: Lock, state_lock: Lock):
        self._step_lock, self._state_lock = step_lock, state_lock

    def turn(self, call: str) -> Lock:
        """Enclose one call of the manager, named for messages; over several processes, one call at a time."""
        return FREE

    def agree(
        self, act: Callable[[], T], same: Callable[[T], Any], own: Callable[[T], Any] = _nothing
    ) -> tuple[T, list[Any]]:
        """Return the result of `act`, which changes nothing, once all processes have the same. Called under no lock.

        Args:
          act: what may fail.
          same: gives what is compared of the result, as a JSON value; None where there is nothing to agree on.
          own: gives what else the other processes need of it, as a JSON value.

        Returns:
          The result, and what `own` gave in each process, in their order.

        Raises:
          LoRAError: `act` failed in some process: class and message of the first. Results differ, calls differ, or some
            process did not come in time.
        """
        result = act()
        return result, [own(result)]

    def commit(
        self,
        decide: Callable[[], D],
        do: Callable[[D], T],
        same: Callable[[D], Any] = itself,
        *,
        writes: bool = False,
    ) -> T:
        """Make a decision and carry it out, both under the manager's lock; over several processes, agree on it between.

        If `do` fails over several processes, none can go on. See `agree`.

        Args:
          writes: whether slots may be written, which takes the lock of the steps, too.
        """
        with self._step_lock if writes else FREE, self._state_lock:
            return do(decide())

    def refuse(self, what: str, instead: str) -> None:
        """Raise LoRAUsageError over several processes."""


class SeveralProcesses:
    """The coordinator of one of several processes. See `OneProcess`.

    Args:
      ids: the processes that have devices of the model.
      timeout: seconds to wait for the others.
      step_lock, state_lock: of the manager, taken in this order.

    Raises:
      LoRAError: `jax.distributed` is not initialized.
    """

    several = True

    def __init__(self, ids: list[int], timeout: float, step_lock: Lock, state_lock: Lock):
        self._ids = ids
        self._timeout = timeout
        self._step_lock, self._state_lock = step_lock, state_lock
        self._me = jax.process_index()
        self._calls = threading.RLock()  # one call after the other, for what follows depends on their order
        self._call = ""
        self._cut: str | None = None  # the call that was cut short, here or elsewhere
        self._rounds = itertools.count()
        self._before: str | None = None  # key of the last message, which another process may not have read yet
        # Counted before anything can fail, so that the next manager has the same name everywhere.
        own = ".".join(map(str, ids))
        self._name = f"jlora/{own}/{next(_numbers[own])}"
        service = coordination()
        if service is None:
            raise LoRAError(
                f"the model lies on devices of processes {ids}, which find each other through "
                "jax.distributed.initialize; call it first"
            )
        self._service = service

    @contextmanager
    def turn(self, call: str) -> Generator[None, None, None]:
        if not self._calls.acquire(timeout=self._timeout):
            raise LoRAError(f"{call}: {self._call} of another thread has not ended within {self._timeout:g} s")
        try:
            self._check()
            self._call = call
            yield
        except BaseException as raised:
            if not isinstance(raised, Exception):  # a Ctrl-C: the others may do what this process has not done
                self._cut_short()
            raise
        finally:
            self._calls.release()

    def agree(
        self, act: Callable[[], T], same: Callable[[T], Any], own: Callable[[T], Any] = _nothing
    ) -> tuple[T, list[Any]]:
        self._check()
        try:
            result = act()
            compared = same(result)
            mine = None if compared is None else {"same": compared, "own": own(result)}
        except Exception as error:
            self._settle({"error": [type(error).__name__, str(error)]}, error)
            raise
        return result, [None] if mine is None else self._settle(mine, None)

    def commit(
        self,
        decide: Callable[[], D],
        do: Callable[[D], T],
        same: Callable[[D], Any] = itself,
        *,
        writes: bool = False,
    ) -> T:
        def decided() -> D:
            with self._step_lock if writes else FREE, self._state_lock:
                return decide()

        # The locks are free while messages are exchanged. Other threads can only close batches meanwhile, for calls
        # take turns, and no decision depends on what is closed later.
        decision, _ = self.agree(decided, same)
        try:
            with self._step_lock if writes else FREE, self._state_lock:
                return do(decision)
        except BaseException:  # a device error, say, which the others do not have
            self._cut_short()
            raise

    def refuse(self, what: str, instead: str) -> None:
        raise LoRAUsageError(f"{what}: the model lies on devices of processes {self._ids}; {instead}")

    def _check(self) -> None:
        """Raise LoRAError if this process or another may have missed a change."""
        if self._cut is not None:
            raise LoRAError(
                f"{self._cut} was cut short in one of the processes of this model; start them again, or unwrap the "
                "model in all of them and make new managers"
            )

    def _cut_short(self) -> None:
        """Refuse all further calls, here and in the other processes."""
        self._cut = self._cut or self._call
        self._service.key_value_set(f"{self._name}/cut/{self._me}", self._cut, allow_overwrite=True)

    def _look_for_cut(self) -> None:
        for _, call in self._service.key_value_dir_get(f"{self._name}/cut/"):
            self._cut = self._cut or call
        self._check()

    def _settle(self, mine: dict[str, Any], cause: Exception | None) -> list[Any]:
        """Exchange messages, and return what `own` gave in each process; or raise what follows, the same in all."""
        call = self._call
        said = self._exchange({"call": call, **mine})
        for i, other in said.items():
            if other["call"] != call:
                raise LoRAError(
                    f"process {self._me} calls {call}, and process {i} {other['call']}: all processes of a model must "
                    "make the same calls in the same order"
                )
        for i, other in said.items():
            if "error" in other:
                name, message = other["error"]
                raise error_of(name, f"{message} (process {i})") from cause
        first, *others = said
        for i in others:
            if said[i]["same"] != said[first]["same"]:
                one, two = _where_they_differ([str(said[first]["same"]), str(said[i]["same"])])
                raise LoRAError(
                    f"{call}: process {first} has {one}, and process {i} {two}. Files must be the same everywhere, "
                    "and batches be closed between the same calls"
                )
        return [message["own"] for message in said.values()]

    def _exchange(self, mine: dict[str, Any]) -> dict[int, Any]:
        """Send a message, and return those of all processes: process -> message."""
        service, round_ = self._service, f"{self._name}/{next(self._rounds)}"
        end = time.monotonic() + self._timeout
        try:
            self._look_for_cut()  # a process that comes too late finds that others gave up
            service.key_value_set(f"{round_}/{self._me}", json.dumps(mine))
            while True:
                found = {int(key.rpartition("/")[2]): text for key, text in service.key_value_dir_get(f"{round_}/")}
                missing = [i for i in self._ids if i not in found]
                if not missing:
                    break
                self._look_for_cut()
                if (left := end - time.monotonic()) <= 0:
                    raise TimeoutError(f"no message of processes {missing}")
                self._wait(f"{round_}/{missing[0]}", min(left, _LOOK_AGAIN))
            if self._before is not None:  # every process has read that one, for all have come to this round
                service.key_value_delete(self._before)
            self._before = f"{round_}/{self._me}"
        except LoRAError:
            raise
        except Exception as error:
            self._cut_short()  # the others may still come, and go on
            raise LoRAError(
                f"{self._call}: not all of processes {self._ids} came within {self._timeout:g} s; all must make the "
                "same calls in the same order. Start them again, or unwrap the model in all of them and make new "
                f"managers ({' '.join(str(error).split())[:300]})"
            ) from error
        return {i: json.loads(found[i]) for i in self._ids}

    def _wait(self, key: str, seconds: float) -> None:
        """Wait for a message, and no longer than `seconds`."""
        try:
            self._service.blocking_key_value_get(key, max(1, round(seconds * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


Coordinator: TypeAlias = OneProcess | SeveralProcesses


def coordinator_of(model: nnx.Module, timeout: float, step_lock: Lock, state_lock: Lock) -> Coordinator:
    """Return the coordinator for the processes that have devices of a model. Raises LoRAError if this one has none."""
    leaves = jax.tree.leaves(nnx.state(model)) if isinstance(model, nnx.Module) else []
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)}
    of_arrays = [cast("set[Device]", sharding.device_set) for sharding in shardings]
    ids = sorted({device.process_index for devices in of_arrays for device in devices})
    if ids and (me := jax.process_index()) not in ids:
        raise LoRAError(
            f"the model lies on devices of processes {ids}, and this is process {me}: only those that have some of its "
            "devices make a manager"
        )
    return SeveralProcesses(ids, timeout, step_lock, state_lock) if len(ids) > 1 else OneProcess(step_lock, state_lock)


def _where_they_differ(texts: list[str]) -> list[str]:
    """Return the beginnings of texts, or the parts where they begin to differ."""
    at = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), 0)
    start = 0 if at < 200 else at - 50
    return [("..." if start else "") + text[start : start + 300] for text in texts]

"""Agreement between the managers of one model, where its mesh has devices of several processes (`jax.distributed`).

Each process creates a manager, and all make the same calls in the same order. Files, open batches and failures may
still differ between processes. Each change of the host cache or the slots is therefore compared first, through JAX's
coordination service. Either all processes make the same change, or all raise the same error. A process that is
interrupted inside a call, or that does not respond in time, may have missed a change. All managers then refuse further
calls. Each call reads first whether that has happened, since some exchange nothing.
"""

import itertools
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import jax
from flax import nnx

from jlora._compat import Device, coordination
from jlora.errors import LoRAError, LoRAUsageError, error_of
from jlora.manager.locks import StateLock

_FREE = nullcontext()
_LOOK_AGAIN = 0.5  # seconds between checks for a process that gave up
_numbers: defaultdict[str, "itertools.count[int]"] = defaultdict(itertools.count)


class Peers:
    """The processes that have devices of a model. With one, all methods return at once, and no message is sent.

    Args:
      ids: indices of the processes.
      timeout: seconds to wait for the other processes.
      lock: the state lock of the manager.

    Attributes:
      several: True if there is more than one process.
      lock: as above.

    Raises:
      LoRAError: there are several processes, and `jax.distributed` is not initialized.
    """

    def __init__(self, ids: list[int], timeout: float, lock: StateLock):
        self.several = len(ids) > 1
        self.lock = lock
        self._ids = ids
        self._timeout = timeout
        self._me = jax.process_index()
        self._calls = threading.RLock()  # one call at a time: messages depend on the order of calls
        self._call = ""
        self._cut: str | None = None  # the call that was cut short, in any process
        self._raised = False  # True if the call has raised the same error in all processes
        if not self.several:
            return
        self._rounds = itertools.count()
        self._before: str | None = None  # key of the last message, which others may not have read yet
        # Count before a failure is possible, so that the next manager has the same name in all processes.
        own = ".".join(map(str, ids))
        self._name = f"jlora/{own}/{next(_numbers[own])}"
        service = coordination()
        if service is None:
            raise LoRAError(
                f"the model lies on devices of processes {ids}, which find each other through "
                "jax.distributed.initialize; call it first"
            )
        self._service = service

    def turn(self, call: str, *, alone: bool = False) -> AbstractContextManager[None]:
        """Return the context of one call of the manager. With several processes, calls run one at a time.

        An error that is raised inside, before the processes have agreed, is raised in all of them.

        Args:
          call: the call, for error messages.
          alone: True for a call in which processes never agree. An error is then raised in this process only.
        """
        return self._turn(call, alone) if self.several else _FREE

    @contextmanager
    def _turn(self, call: str, alone: bool) -> Generator[None, None, None]:
        if not self._calls.acquire(timeout=self._timeout):
            raise LoRAError(f"{call}: {self._call} of another thread has not ended within {self._timeout:g} s")
        try:
            self._call, self._raised = call, True
            self._look_for_cut()
            self._raised = alone
            yield
        except Exception as error:
            if self._cut is None and not self._raised:
                problems = error.problems if isinstance(error, LoRAError) else ()
                self._settle({"error": [type(error).__name__, str(error), problems]}, error)
            raise
        except BaseException:  # such as Ctrl-C: the others may complete the change
            self._cut_short()
            raise
        finally:
            self._calls.release()

    def agree(self, value: Any | Callable[[], Any], own: Any = None) -> list[Any]:
        """Compare a value with those of the other processes. Other threads may take the state lock meanwhile.

        They can only close batches, because calls run one at a time, and a decision stays valid if a batch is closed.

        Args:
          value: a JSON value, or a function that returns it. None sends no message; it must be None in all processes.
          own: a JSON value that may differ.

        Returns:
          The values of `own`, in order of the processes.

        Raises:
          LoRAError: a process has raised an error (with its class and message), values or calls differ, or a process
            did not respond in time.
        """
        if not self.several:
            return [own]
        self._check()
        if (compared := value() if callable(value) else value) is None:
            return [own]
        with self.lock.released():
            return self._settle({"same": compared, "own": own}, None)

    def change(self) -> AbstractContextManager[None]:
        """Return the context of a change that was agreed on. If it fails, all managers refuse further calls."""
        return self._change() if self.several else _FREE

    @contextmanager
    def _change(self) -> Generator[None, None, None]:
        try:
            yield
        except BaseException:  # such as a device error in this process only
            self._cut_short()
            raise

    def refuse(self, what: str, instead: str) -> None:
        """Raise LoRAUsageError if there are several processes."""
        if self.several:
            raise LoRAUsageError(f"{what}: the model lies on devices of processes {self._ids}; {instead}")

    def _check(self) -> None:
        """Raise LoRAError if any process may have missed a change."""
        if self._cut is not None:
            raise LoRAError(
                f"{self._cut} was cut short in one of the processes of this model; start them again, or unwrap the "
                "model in all of them and make new managers"
            )

    def _cut_short(self) -> None:
        """Make the managers of all processes refuse further calls."""
        self._cut = self._cut or self._call
        self._service.key_value_set(f"{self._name}/cut/{self._me}", self._cut, allow_overwrite=True)

    def _look_for_cut(self) -> None:
        """Raise LoRAError if any process has made all refuse further calls, or the service cannot be reached."""
        try:
            found = self._service.key_value_dir_get(f"{self._name}/cut/")
        except Exception as error:
            raise LoRAError(f"{self._call}: jax.distributed cannot be reached: {error!s:.300}") from error
        for _, call in found:
            self._cut = self._cut or call
        self._check()

    def _settle(self, mine: dict[str, Any], cause: Exception | None) -> list[Any]:
        """Exchange messages and return the values of `own` of all processes, or raise the same error in all."""
        call = self._call
        messages = self._exchange({"call": call, **mine})
        self._raised = True  # unless this returns
        for i, other in messages.items():
            if other["call"] != call:
                raise LoRAError(
                    f"process {self._me} calls {call}, and process {i} {other['call']}: all processes of a model must "
                    "make the same calls in the same order"
                )
        for i, other in messages.items():
            if "error" in other:
                name, message, problems = other["error"]
                error = error_of(name, f"{message} (process {i})")
                error.problems = tuple(problems)
                raise error from cause
        first, *others = messages
        for i in others:
            if messages[i]["same"] != messages[first]["same"]:
                one, two = (str(messages[k]["same"]) for k in (first, i))
                start = max(0, next((k for k, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), 0) - 50)
                one, two = (text[start : start + 300] for text in (one, two))
                raise LoRAError(
                    f"{call}: process {first} has {one}, and process {i} {two}. Files must be the same everywhere, "
                    "and batches be closed between the same calls"
                )
        self._raised = False
        return [message["own"] for message in messages.values()]

    def _exchange(self, mine: dict[str, Any]) -> dict[int, Any]:
        """Send a message and return the messages of all processes, as process -> message."""
        service, round_ = self._service, f"{self._name}/{next(self._rounds)}"
        end = time.monotonic() + self._timeout
        try:
            self._look_for_cut()  # a late process finds here that others gave up
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
            if self._before is not None:  # all processes are in this round, so all have read it
                service.key_value_delete(self._before)
            self._before = f"{round_}/{self._me}"
        except LoRAError:
            raise
        except Exception as error:
            self._cut_short()  # the others may still arrive and continue
            raise LoRAError(
                f"{self._call}: not all of processes {self._ids} came within {self._timeout:g} s; all must make the "
                "same calls in the same order. Start them again, or unwrap the model in all of them and make new "
                f"managers ({' '.join(str(error).split())[:300]})"
            ) from error
        return {i: json.loads(found[i]) for i in self._ids}

    def _wait(self, key: str, seconds: float) -> None:
        """Wait for a message, for at most `seconds`."""
        try:
            self._service.blocking_key_value_get(key, max(1, round(seconds * 1000)))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise


def peers_of(model: nnx.Module, timeout: float, lock: StateLock) -> Peers:
    """Return the processes that have devices of a model. See `Peers` for `timeout` and `lock`.

    Raises:
      LoRAError: this process has none of the devices.
    """
    leaves = jax.tree.leaves(nnx.state(model)) if isinstance(model, nnx.Module) else []
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)}
    of_arrays = [cast("set[Device]", sharding.device_set) for sharding in shardings]
    ids = sorted({device.process_index for devices in of_arrays for device in devices})
    if ids and (me := jax.process_index()) not in ids:
        raise LoRAError(
            f"the model lies on devices of processes {ids}, and this is process {me}: only those that have some of its "
            "devices make a manager"
        )
    return Peers(ids, timeout, lock)

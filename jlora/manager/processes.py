"""Several processes with one model: what must be the same in all of them is changed by all or by none.

A model whose mesh has devices of several processes (`jax.distributed`) has a manager in each, and the same calls are
made of each in the same order. Decisions follow from the calls and from what was decided before, so processes need not
talk to make them; but whether an adapter could be read, and which batches are closed, each finds out for itself. So a
call that changes slots or the host cache says first what it is about to do, hears what the others are, and goes on
where all say the same. The messages go through JAX's coordination service: no device is asked, and no collective
waits for them.
"""

import collections
import itertools
import json
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

from jax.sharding import Mesh

import jlora.errors
from jlora._compat import Coordination, coordination
from jlora.errors import LoRAError
from jlora.manager.locks import Lock

_FREE = nullcontext()
_numbers: collections.defaultdict[str, "itertools.count[int]"] = collections.defaultdict(itertools.count)


class Disagreement(LoRAError):
    """Processes were about to do different things. None of them did."""


class Processes:
    """The processes of a mesh.

    Attributes:
      several: whether there is more than this one. If not, no method does anything.
    """

    def __init__(self, mesh: object, timeout: float):
        devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
        self._ids: list[int] = sorted({device.process_index for device in devices})
        self.several = len(self._ids) > 1
        self._timeout = timeout
        # One call after the other: what they decide depends on their order, which is that of all processes.
        self._calls = Lock()
        self._unsure: str | None = None
        self._rounds = itertools.count()
        self._said: list[str] = []  # keys of this process that others may not have read yet
        if self.several:
            own = ".".join(map(str, self._ids))
            self._name = f"jlora/{own}/{next(_numbers[own])}"
            self._service, self._me = coordination()

    def in_turn(self) -> Any:
        """Around calls that may change what must be the same: one after the other."""
        return self._calls() if self.several else _FREE

    @contextmanager
    def together(
        self, what: str, ready: Callable[[], tuple[Any, Any] | None]
    ) -> Generator[list[Any] | None, None, None]:
        """The block runs where all processes are ready for it, and for the same.

        An exception inside of the block leaves this process in doubt of whether it did what the others have done: every
        later call then fails, in all of them.

        Args:
          what: the call, for messages; all must make the same.
          ready: does what may fail and changes nothing; waits for what it must. Returns what must be the same
            everywhere, and what else is of use to the others, as JSON values. None: not now.

        Yields:
          What else each process said, in their order. None where some process is not ready, and nothing is to be done.

        Raises:
          LoRAError: `ready` raised in some process: the class and the message of the first of them. Processes made
            different calls, or one did not come.
          Disagreement: they were about to do different things.
        """
        if not self.several:
            yield [None]
            return
        with self._calls():
            said = self.agree(what, ready)
            if said is None:
                yield None
                return
            self._unsure = what
            yield said
            self._unsure = None

    def agree(self, what: str, ready: Callable[[], tuple[Any, Any] | None]) -> list[Any] | None:
        """See `together`."""
        error: BaseException | None = None
        mine: dict[str, Any] = {"call": what}
        try:
            if self._unsure is not None:
                raise LoRAError(f"{self._unsure} was cut short in one of the processes of this model; start them again")
            if (found := ready()) is not None:
                mine["same"], mine["own"] = json.loads(json.dumps(found))
        except BaseException as raised:  # the others must hear of it
            error = raised
            mine["error"] = type(raised).__name__, str(raised)
        said = self._exchange(what, mine)
        if error is not None and not isinstance(error, Exception):
            raise error
        for i, other in zip(self._ids, said, strict=True):
            if other["call"] != what:
                raise LoRAError(
                    f"process {self._me} calls {what}, and process {i} {other['call']}: all processes of a model must "
                    "make the same calls in the same order"
                )
        for i, other in zip(self._ids, said, strict=True):
            if "error" in other:
                raise _raised(i, *other["error"]) from error
        if not all("same" in other for other in said):
            return None
        for i, other in zip(self._ids, said, strict=True):
            if other["same"] != said[0]["same"]:
                raise Disagreement(
                    f"{what}: process {self._ids[0]} has {str(said[0]['same'])[:300]}, and process {i} "
                    f"{str(other['same'])[:300]}. Files must be the same everywhere, and batches be closed between the "
                    "same calls"
                )
        return [other["own"] for other in said]

    def _exchange(self, what: str, mine: Any) -> list[Any]:
        """What each process says."""
        service: Coordination = self._service
        name = f"{self._name}/{next(self._rounds)}"
        key = f"{name}/{self._me}"
        before, self._said = self._said, [*self._said, key]
        service.key_value_set(key, json.dumps(mine))
        try:
            service.wait_at_barrier(name.replace("/", "-"), round(self._timeout * 1000), self._ids)
        except Exception as error:
            first = re.sub(r"\s+", " ", str(error))[:300]
            raise LoRAError(
                f"{what}: not all of processes {self._ids} came within {self._timeout:g} s; all must make the same "
                f"calls in the same order ({first})"
            ) from error
        # Who has come to this round has read the one before.
        for old in before:
            service.key_value_delete(old)
            self._said.remove(old)
        found = {int(name.rpartition("/")[2]): value for name, value in service.key_value_dir_get(f"{name}/")}
        return [json.loads(found[i]) for i in self._ids]


def _raised(process: int, name: str, message: str) -> LoRAError:
    """The error that every process raises for one that a process told of."""
    cls: Any = getattr(jlora.errors, name, None)
    if isinstance(cls, type) and issubclass(cls, LoRAError):
        return cls(f"{message} (process {process})")
    return LoRAError(f"{name} in process {process}: {message}")

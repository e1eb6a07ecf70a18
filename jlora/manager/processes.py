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
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import jax
from flax import nnx

from jlora._compat import Device, coordination
from jlora.errors import LoRAError, error_of

_numbers: collections.defaultdict[str, "itertools.count[int]"] = collections.defaultdict(itertools.count)


class Disagreement(LoRAError):
    """Processes were about to do different things. None of them did."""


class Processes:
    """The processes of a model.

    Attributes:
      several: whether there is more than this one. If not, no method does anything.
      timeout: seconds that this one waits for the others.
      anew: forgets what processes may have seen differently and can do without: who was used when.

    Raises:
      LoRAError: this process has none of the model's devices; the others cannot be reached.
    """

    def __init__(self, model: nnx.Module, timeout: float):
        self._ids = processes_of(model)
        self.several = len(self._ids) > 1
        self.timeout = timeout
        self.anew: Callable[[], None] = _nothing
        # One call after the other: what they decide depends on their order, which is that of all processes.
        self._calls = threading.RLock()
        self._unsure: str | None = None
        self._told = False  # whether it said so, or heard so
        self._heard = False  # whether the others have heard of the interrupt of this call
        self._rounds = itertools.count()
        self._said: list[str] = []  # keys of this process that others may not have read yet
        self._me = jax.process_index()
        if self._ids and self._me not in self._ids:
            raise LoRAError(
                f"the model lies on devices of processes {self._ids}, and this is process {self._me}: only those that "
                "have some of its devices make a manager"
            )
        if self.several:
            # Counted before anything can fail, so that the next is the same one everywhere.
            own = ".".join(map(str, self._ids))
            self._name = f"jlora/{own}/{next(_numbers[own])}"
            service = coordination()
            if service is None:
                raise LoRAError(
                    f"the model lies on devices of processes {self._ids}, which find each other through "
                    "jax.distributed.initialize; call it first"
                )
            self._service = service

    @contextmanager
    def in_turn(self, what: str) -> Generator[None, None, None]:
        """Around calls that may change what must be the same: one after the other.

        Where one is interrupted, and the others have not heard of it, they may wait for what this process will not say:
        it is in doubt then, too.
        """
        if not self.several:
            yield
            return
        with self._calls:
            self._heard = False
            try:
                yield
            except BaseException as raised:
                if not (self._heard or isinstance(raised, Exception)):
                    self._unsure = self._unsure or what
                raise

    @contextmanager
    def together(
        self, what: str, ready: Callable[[], tuple[Any, Any] | None], *, tries: int = 2
    ) -> Generator[list[Any] | None, None, None]:
        """The block runs where all processes are ready for it, and for the same.

        An exception inside of the block leaves this process in doubt of whether it did what the others have done: every
        later call then fails, in all of them.

        Args:
          what: the call, for messages; all must make the same.
          ready: does what may fail and changes nothing; waits for what it must. Returns what must be the same
            everywhere, and what else is of use to the others, as JSON values. None: not now. Called anew for each try.
          tries: how often to try where they disagree, with `anew` before the last.

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
        with self.in_turn(what):
            yield self._agree_at_last(what, ready, tries)
            self._unsure = None

    def check(self) -> None:
        """Raises LoRAError where this process does not know whether it did what the others have done."""
        if self._unsure is not None:
            # Whoever waits in vain, for a call that this one does not come to any more, finds it.
            self._service.key_value_set(f"{self._name}/cut/{self._me}", self._unsure, allow_overwrite=True)
            raise LoRAError(
                f"{self._unsure} was cut short in one of the processes of this model; start them again, or unwrap the "
                "model in all of them and make new managers"
            )

    def _agree_at_last(self, what: str, ready: Callable[[], tuple[Any, Any] | None], tries: int) -> list[Any] | None:
        for left in reversed(range(tries)):
            try:
                return self._agree(what, ready)
            except Disagreement:  # heard of by all
                if not left:
                    raise
                if left == 1:
                    self.anew()
            time.sleep(0.002)
        raise AssertionError

    def _agree(self, what: str, ready: Callable[[], tuple[Any, Any] | None]) -> list[Any] | None:
        """See `together`. Where it returns a list, the call is in doubt until it is done."""
        if self._told:
            self.check()
        self._told = self._unsure is not None
        name = f"{self._name}/{next(self._rounds)}"  # first: an interrupted call counts, as it does for the others
        error: BaseException | None = None
        mine: dict[str, Any] = {"call": what, "unsure": self._unsure}
        try:
            self.check()
            if (found := ready()) is not None:
                mine["same"], mine["own"] = json.loads(json.dumps(found))
        except BaseException as raised:  # the others must hear of it
            error = raised
            mine["error"] = type(raised).__name__, str(raised)
        before = self._unsure
        said = self._exchange(name, what, mine)
        if error is not None and not isinstance(error, Exception):
            self._heard, self._unsure = True, before
            raise error
        try:
            decided = self._decided(what, said, error)
        except LoRAError:  # in all of them; an interrupt is of this one
            self._unsure = self._unsure if self._told else before
            raise
        if decided is None:
            self._unsure = before
        return decided

    def _decided(self, what: str, said: list[Any], error: BaseException | None) -> list[Any] | None:
        """What follows from what all said: the same in all of them."""
        unsure = next((other["unsure"] for other in said if other["unsure"]), None)
        if unsure:
            self._unsure, self._told = unsure, True
            self.check()
        for i, other in zip(self._ids, said, strict=True):
            if other["call"] != what:
                raise LoRAError(
                    f"process {self._me} calls {what}, and process {i} {other['call']}: all processes of a model must "
                    "make the same calls in the same order"
                )
        for i, other in zip(self._ids, said, strict=True):
            if "error" in other:
                name, message = other["error"]
                raise error_of(name, f"{message} (process {i})") from error
        if not all("same" in other for other in said):
            return None
        for i, other in zip(self._ids, said, strict=True):
            if other["same"] != said[0]["same"]:
                first, second = _where_they_differ(str(said[0]["same"]), str(other["same"]))
                raise Disagreement(
                    f"{what}: process {self._ids[0]} has {first}, and process {i} {second}. Files must be the same "
                    "everywhere, and batches be closed between the same calls"
                )
        return [other["own"] for other in said]

    def _exchange(self, name: str, what: str, mine: Any) -> list[Any]:
        """What each process says. In doubt from when the others may have heard of it."""
        service, before = self._service, self._unsure
        key = f"{name}/{self._me}"
        old, self._said = self._said, [*self._said, key]
        try:
            service.key_value_set(key, json.dumps(mine))
            self._unsure = what
            service.wait_at_barrier(name.replace("/", "-"), round(self.timeout * 1000), self._ids)
        except Exception as error:  # nobody has passed
            self._unsure = before
            for _, cut in service.key_value_dir_get(f"{self._name}/cut/"):
                self._unsure, self._told = cut, True
            self.check()
            first = re.sub(r"\s+", " ", str(error))[:300]
            raise LoRAError(
                f"{what}: not all of processes {self._ids} came within {self.timeout:g} s; all must make the same "
                f"calls in the same order, or unwrap the model and make new managers ({first})"
            ) from error
        # Who has come to this round has read the one before.
        for one in old:
            service.key_value_delete(one)
            self._said.remove(one)
        found = {int(name.rpartition("/")[2]): value for name, value in service.key_value_dir_get(f"{name}/")}
        return [json.loads(found[i]) for i in self._ids]


def processes_of(model: nnx.Module) -> list[int]:
    """The processes that have devices on which some array of the model lies."""
    leaves = jax.tree.leaves(nnx.state(model)) if isinstance(model, nnx.Module) else []
    shardings = {leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)}
    of_arrays = [cast("set[Device]", sharding.device_set) for sharding in shardings]
    return sorted({device.process_index for devices in of_arrays for device in devices})


def _nothing() -> None:
    pass


def _where_they_differ(first: str, second: str) -> tuple[str, str]:
    """What is shown of two texts: the beginning, or where they begin to differ."""
    same = next((i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), 0)
    start = 0 if same < 200 else same - 50
    shown = [("..." if start else "") + text[start : start + 300] for text in (first, second)]
    return shown[0], shown[1]

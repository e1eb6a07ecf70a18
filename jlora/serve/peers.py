"""The processes that serve one model: process 0 takes the requests and decides, the others do as it does.

What process 0 decides on goes to the others before each turn, as a line over a connection of its own to each: so all
dispatch the same steps and change the same adapters, in the same order. Back come the adapters that each has read. They
find each other through the coordination service of `jax.distributed.initialize`, which also carries the secret without
which nobody is let in.
"""

import collections
import hmac
import itertools
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import jax

from jlora._compat import coordination, coordinator_host
from jlora.errors import LoRAError, LoRAUsageError, error_of
from jlora.manager.processes import processes_of
from jlora.serve.request import EngineClosedError
from jlora.serve.turn import Turn, read, written

_numbers: collections.defaultdict[str, "itertools.count[int]"] = collections.defaultdict(itertools.count)

_HELLO = 10.0  # seconds that one who connects has to say who it is, while others wait
_LONGEST_HELLO = 8192  # bytes; the options of an engine are some hundred

Report = Callable[[int, int, LoRAError | None], None]
"""(load, process, error): a process has read an adapter, or could not."""


class Peers(Protocol):
    """This process among those that serve a model.

    Attributes:
      leads: whether it takes the requests.
      count: how many they are.
    """

    leads: bool
    count: int

    def meet(self, report: Report, lost: Callable[[int], None]) -> None:
        """Wait for the others.

        Args:
          report: hears, on any thread, what they and this one have read.
          lost: hears of a process that is gone before this one has closed.

        Raises:
          LoRAError: they did not come in time, or with other options. One that follows hears of that in `share`.
        """
        ...

    def share(self, hear: Callable[[], Turn]) -> Turn:
        """The next turn: what `hear` gives in the process that leads, in all.

        Raises:
          EngineClosedError: another process is gone.
        """
        ...

    def tell(self, load: int, error: LoRAError | None) -> None:
        """This process has read an adapter, or could not."""
        ...

    def close(self) -> None:
        """The others hear no more of this one."""
        ...


class Alone:
    """One process."""

    leads, count = True, 1

    def meet(self, report: Report, lost: Callable[[int], None]) -> None:
        pass

    def share(self, hear: Callable[[], Turn]) -> Turn:
        return hear()

    def tell(self, load: int, error: LoRAError | None) -> None:
        raise AssertionError("what one process has read is there at once")

    def close(self) -> None:
        pass


class Leader:
    """Process 0 of several."""

    leads = True

    def __init__(self, name: str, count: int, timeout: float, options: str):
        self.count = count
        self._name = name
        self._timeout = timeout
        self._options = options
        self._others: dict[int, socket.socket] = {}  # by process
        self._threads: list[threading.Thread] = []  # that hear them
        self._report: Report | None = None
        self._lost: Callable[[int], None] | None = None
        self._closed = False

    def meet(self, report: Report, lost: Callable[[int], None]) -> None:
        self._report, self._lost = report, lost
        secret = secrets.token_hex(32)
        with _server(self.count) as (server, host):
            service = coordination()
            assert service is not None
            service.key_value_set(self._name, json.dumps([host, server.getsockname()[1], secret]))
            deadline = time.monotonic() + self._timeout
            while len(self._others) < self.count - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.001))
                try:
                    one, _ = server.accept()
                except TimeoutError:
                    missing = self.count - 1 - len(self._others)
                    raise LoRAError(
                        f"{missing} of {self.count} processes did not come within {self._timeout:g} s"
                    ) from None
                process, options = _let_in(one, secret, self.count, min(deadline, time.monotonic() + _HELLO))
                if process is None or process in self._others:
                    one.close()
                    continue
                self._others[process] = one
                if options != self._options:
                    raise LoRAError(
                        f"process 0 has an engine with {self._options}, and process {process} one with {options}: all "
                        "must be made with the same arguments"
                    )
            service.key_value_delete(self._name)
        for process, one in self._others.items():
            one.settimeout(self._timeout)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._hear, args=(process, one), name="jlora-serve-peer", daemon=True)
            thread.start()
            self._threads.append(thread)

    def share(self, hear: Callable[[], Turn]) -> Turn:
        turn = hear()
        line = written(turn)
        for process, one in self._others.items():
            try:
                one.sendall(line)
            except OSError as error:
                raise EngineClosedError(f"process {process} of {self.count} is gone ({error})") from error
        return turn

    def tell(self, load: int, error: LoRAError | None) -> None:
        assert self._report is not None
        self._report(load, 0, error)

    def close(self) -> None:
        self._closed = True
        for one in self._others.values():
            _shut(one)
        for thread in self._threads:
            thread.join()

    def _hear(self, process: int, one: socket.socket) -> None:
        """What another process says, until it is gone."""
        report, lost = self._report, self._lost
        assert report is not None
        assert lost is not None
        rest = b""
        while True:
            try:
                data = one.recv(1 << 16)
            except TimeoutError:  # it is the senders'; silence is no fault
                continue
            except OSError:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                load, error = json.loads(line)
                report(load, process, error and error_of(*error))
            if not data:
                break
        if not self._closed:
            lost(process)
        _shut(one)


class Follower:
    """Any other of several processes."""

    leads = False

    def __init__(self, name: str, count: int, timeout: float, options: str):
        self.count = count
        self._name = name
        self._timeout = timeout
        self._options = options
        self._lock = threading.Lock()
        self._leader: socket.socket | None = None
        self._lines: Any = None

    def meet(self, report: Report, lost: Callable[[int], None]) -> None:
        service = coordination()
        assert service is not None
        try:
            host, port, secret = json.loads(service.blocking_key_value_get(self._name, round(self._timeout * 1000)))
            leader = socket.create_connection((host, port), timeout=self._timeout)
        except Exception as error:  # JAX gives no narrower class for the service's
            first = str(error).split("\n")[0][:300]
            raise LoRAError(
                f"process 0 was not there within {self._timeout:g} s, or cannot be reached: {first}"
            ) from None
        self._leader, self._lines = leader, leader.makefile("rb")
        leader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        leader.sendall(json.dumps([jax.process_index(), secret, self._options]).encode() + b"\n")
        leader.settimeout(None)

    def share(self, hear: Callable[[], Turn]) -> Turn:
        try:
            line = self._lines.readline()
        except (OSError, ValueError):
            line = b""
        if not line.endswith(b"\n"):
            raise EngineClosedError("process 0 is gone")
        return read(line)

    def tell(self, load: int, error: LoRAError | None) -> None:
        said = None if error is None else (type(error).__name__, f"{error} (process {jax.process_index()})")
        with self._lock:
            assert self._leader is not None
            with suppress(OSError):  # the next turn says so
                self._leader.sendall(json.dumps([load, said]).encode() + b"\n")

    def close(self) -> None:
        if self._leader is not None:
            _shut(self._leader)
            self._lines.close()  # which keeps the socket open


def peers_of(model: Any, timeout: float, options: str) -> Peers:
    """This process among those with devices on which the model lies.

    Args:
      model: an `nnx.Module`.
      timeout: seconds to wait for the others, and for one that is slow to listen.
      options: what must be the same in all.

    Raises:
      LoRAUsageError: the model lies on a part of the processes only.
    """
    processes = processes_of(model)
    if len(processes) < 2:
        return Alone()
    if processes != list(range(jax.process_count())):
        raise LoRAUsageError(f"an engine serves from all {jax.process_count()} processes; the model is on {processes}")
    name = f"jlora/serve/{next(_numbers['engine'])}"
    return (Leader if jax.process_index() == 0 else Follower)(name, len(processes), timeout, options)


@contextmanager
def _server(backlog: int) -> Generator[tuple[socket.socket, str], None, None]:
    """A port of the address under which the others found this process for JAX, and that address."""
    host = coordinator_host()
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        server = socket.create_server((host, 0), family=family, backlog=backlog)
    except OSError:  # a name of something before this machine
        server = socket.create_server(("", 0), backlog=backlog)
    with server:
        yield server, host


def _let_in(one: socket.socket, secret: str, count: int, deadline: float) -> tuple[int | None, object]:
    """Which process this is, and its options; None for somebody else, or who has not said all by the deadline."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _LONGEST_HELLO:
            one.settimeout(max(deadline - time.monotonic(), 0.001))
            data = one.recv(_LONGEST_HELLO - len(line))
            if not data:
                return None, None
            line += data
        process, said, options = json.loads(line)
        known = isinstance(said, str) and hmac.compare_digest(said.encode(), secret.encode())
        return (process, options) if known and isinstance(process, int) and 0 < process < count else (None, None)
    except (OSError, ValueError, TypeError, RecursionError):
        return None, None


def _shut(one: socket.socket) -> None:
    """Both ways: who waits for it hears of the end."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()

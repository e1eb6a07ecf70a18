"""Resolution of unknown adapter names on separate threads, so that no step or other request waits for a resolver."""

import inspect
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from jlora import LoRARequest
from jlora.errors import AdapterNotFoundError, LoRAError, printable
from jlora.serve.engine.request import EngineBusyError
from jlora.serve.engine.sequence import Sequence

Resolve = Callable[[str], LoRARequest | None]
"""A resolver: the name of an unknown adapter -> the request that loads it, or None if there is none."""

LONGEST_NAME = 256  # characters
_THREADS = 8
_RETRY = 1.0


def check_name(name: str) -> None:
    """Check a name before it is passed to a resolver.

    A name must be printable, at most `LONGEST_NAME` characters long, and not lead out of a folder: it may not be
    absolute or have a part that is empty, "." or "..".

    Raises:
      AdapterNotFoundError: no adapter can have this name.
    """
    parts = re.split(r"[/\\]", name)
    if not name or len(name) > LONGEST_NAME or printable(name) != name:
        why = f"it must be printable, of 1 to {LONGEST_NAME} characters"
    elif os.path.isabs(name) or name.startswith("~") or not {"", ".", ".."}.isdisjoint(parts):
        why = "it is a path that leads elsewhere"
    else:
        return
    raise AdapterNotFoundError(f"no adapter can be called {name!r:.300}: {why}")


class ResolverPool:
    """Calls a resolver for unknown names. Concurrent requests for a name share one call, and results are not cached.

    A call cannot be interrupted. One that hangs occupies one of a few threads until it returns, and other names share
    the rest. Requests end by their own timeouts, or when they are cancelled.

    Args:
      resolve: maps a name to a `LoRARequest`, or to None if there is no such adapter.
      most: number of requests that may wait for the resolver.
      found: called when a name has been resolved. Must not block.
      fail: called with a request and the error that ends it. Must not block.
    """

    def __init__(
        self, resolve: Resolve, most: int, found: Callable[[], None], fail: Callable[[Sequence, LoRAError], None]
    ):
        self._resolve = resolve
        self._most = most
        self._found = found
        self._fail = fail
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Sequence]] = {}  # requests by name, until the resolver returns
        self._line: deque[str] = deque()  # names that no thread has taken
        self._loading: dict[str, LoRARequest] = {}  # results by name, until their adapter is loaded
        self._count = 0  # requests in `_waiting`, including some that have ended
        self._threads = 0

    def add(self, sequence: Sequence) -> None:
        """Resolve the name of a request: set its `request`, or end it with an error.

        Raises:
          EngineBusyError: too many requests wait for the resolver.
          LoRAError: no thread can be started.
        """
        name = sequence.lora
        assert name is not None
        with self._lock:
            sequence.request = self._loading.get(name)
            if sequence.request is not None:
                return
            if self._count >= self._most:
                for others in self._waiting.values():
                    others[:] = [one for one in others if one.waits]
                self._count = sum(map(len, self._waiting.values()))
            if self._count >= self._most:
                raise EngineBusyError(f"{self._count} requests wait for names that are looked up", _RETRY)
            if name in self._waiting:
                self._waiting[name].append(sequence)
                self._count += 1
                return
            if self._threads < _THREADS:
                try:
                    threading.Thread(target=self._work, name="jlora-serve-lookup", daemon=True).start()
                except RuntimeError as error:
                    raise LoRAError(f"adapter {name!r} cannot be looked up: {error}") from error
                self._threads += 1
            self._waiting[name] = [sequence]
            self._count += 1
            self._line.append(name)

    def under_way(self, name: str) -> bool:
        """Return whether the resolver has yet to return. Read a sequence's `request` after this call, not before it."""
        return name in self._waiting

    def forget(self, name: str) -> None:
        """Drop the result for a name after its load has ended or no request waits. Later requests resolve it anew."""
        with self._lock:
            self._loading.pop(name, None)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    self._threads -= 1
                    return
                name = self._line.popleft()
                if not any(one.waits for one in self._waiting[name]):
                    self._count -= len(self._waiting.pop(name))
                    continue
            answer = self._ask(name)
            with self._lock:
                # Deliver errors and set requests before `under_way` becomes False.
                for sequence in self._waiting[name]:
                    if not sequence.waits:  # it may have begun, if the name was added meanwhile
                        continue
                    if isinstance(answer, LoRAError):
                        self._fail(sequence, answer)
                    else:
                        sequence.request = self._loading[name] = answer
                self._count -= len(self._waiting.pop(name))
            self._found()

    def _ask(self, name: str) -> LoRARequest | LoRAError:
        try:
            return _checked(name, self._resolve(name))
        except LoRAError as error:
            return error
        except BaseException as error:  # a resolver may raise anything, and waiting requests need the error
            return LoRAError(f"adapter {name!r}: the resolver failed: {_words(error)}")


def _checked(name: str, answer: Any) -> LoRARequest:
    """Check the result of a resolver.

    Raises:
      LoRAError: the result is no `LoRARequest` for this name.
    """
    if answer is None:
        raise AdapterNotFoundError(f"adapter {name!r} is not loaded, and the resolver knows none of that name")
    if inspect.iscoroutine(answer):
        answer.close()
        raise LoRAError(f"adapter {name!r}: the resolver is a coroutine function; it must be a plain one")
    if not isinstance(answer, LoRARequest):
        raise LoRAError(
            f"adapter {name!r}: the resolver returned {type(answer).__name__}, expected LoRARequest or None"
        )
    if answer.name != name:
        raise LoRAError(f"adapter {name!r}: the resolver returned a request for {answer.name!r:.300}")
    if answer.load_inplace:
        raise LoRAError(f"adapter {name!r}: the resolver returned a request with load_inplace; add_lora replaces")
    return answer


def _words(error: BaseException) -> str:
    kind = type(error).__name__
    try:
        return f"{kind}: {error!s:.500}"
    except BaseException:  # `__str__` of a foreign error may raise too
        return kind

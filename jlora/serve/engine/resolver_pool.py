"""Names that nobody has added: a resolver is asked for them, on threads of its own, and nothing else waits for it."""

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

LONGEST_NAME = 256  # characters
_THREADS = 8
_RETRY = 1.0


def check_name(name: str) -> None:
    """Raises AdapterNotFoundError for a name that no resolver is asked for.

    Those are names that do not print or are too long, and what would be a path out of a folder: absolute, or with an
    empty part, "." or "..".
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
    """Asks a resolver for names: one call a name, whoever else asks meanwhile, and no answer is kept.

    A call cannot be stopped. One that hangs keeps one of a few threads until it returns, and other names wait for the
    rest; requests end by their own timeouts, or as they are cancelled.

    Args:
      resolve: name -> what to load; None where there is no such adapter.
      most: requests that may wait for its answers.
      found: called when there is something to load.
      fail: called with a request, and the error that it ends with. Must not block.
    """

    def __init__(
        self, resolve: Resolve, most: int, found: Callable[[], None], fail: Callable[[Sequence, LoRAError], None]
    ):
        self._resolve = resolve
        self._most = most
        self._found = found
        self._fail = fail
        self._lock = threading.Lock()
        self._waiting: dict[str, list[Sequence]] = {}  # of each name that has no answer yet
        self._line: deque[str] = deque()  # of these, those that no thread has taken
        self._loading: dict[str, LoRARequest] = {}  # answers, until what they say is loaded
        self._count = 0  # of `_waiting`, some of which may have ended
        self._threads = 0

    def add(self, sequence: Sequence) -> None:
        """Have its `request` set, or have it end with an error.

        Raises:
          EngineBusyError: too many wait.
          LoRAError: there are no threads.
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
        """Whether there is no answer yet. Look at `request` of a sequence after this, not before."""
        return name in self._waiting

    def forget(self, name: str) -> None:
        """It is loaded, or could not be, or nobody waits for it: who asks for it from now on asks anew."""
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
                # Errors are out, and requests set, before others can see that there is an answer.
                for sequence in self._waiting[name]:
                    if not sequence.waits:  # it may have begun: the name was added meanwhile
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
        except BaseException as error:  # it is somebody else's code, and those who wait must hear of it
            return LoRAError(f"adapter {name!r}: the resolver failed: {_words(error)}")


def _checked(name: str, answer: Any) -> LoRARequest:
    """What a resolver answered. Raises LoRAError where that is nothing to load, and what the answer itself raises."""
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
    except BaseException:  # its own words are somebody else's code, too
        return kind

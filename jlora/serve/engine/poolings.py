"""The pooling of each adapter of an embedding engine: that of the files of sentence-transformers in its own folder."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jlora import AdapterHandle, AdapterInfo, LoRARequest, local_folder
from jlora._hub import local_folder_of
from jlora.errors import AdapterMismatchError, LoRAError
from jlora.models import ModelError, Pooling, embedding_files, read_pooling

_MOST = 4096  # adapters whose pooling is kept


@dataclass(frozen=True)
class _Known:
    """The pooling of one version of an adapter, or the error of its files; None while they are read."""

    version: int
    found: Pooling | LoRAError | None


class Poolings:
    """The poolings of adapters, read on a thread of their own, since a disk may hang.

    Args:
      base: The model's pooling, also of adapters that bring none.
      wake: Called once a pooling is known. Must not block.
    """

    def __init__(self, base: Pooling, wake: Callable[[], None]):
        self.base = base
        self._wake = wake
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}  # in the order of reading
        self._line: deque[AdapterInfo] = deque()
        self._reading = False

    def ready(self, info: AdapterInfo) -> bool:
        """Return whether the pooling of a loaded adapter is known. Start to read it otherwise."""
        if info.request is None:
            return True
        with self._lock:
            known = self._known.get(info.name)
            if known is None or known.version != info.version:
                self._put(info.name, _Known(info.version, None))
                self._line.append(info)
                if not self._reading:
                    self._reading = True
                    threading.Thread(target=self._read, name="jlora-serve-poolings", daemon=True).start()
                return False
            return known.found is not None

    def loaded(self, info: AdapterInfo, found: Pooling) -> None:
        """Keep the pooling that was read for the load of an adapter."""
        with self._lock:
            self._put(info.name, _Known(info.version, found))

    def of(self, handle: AdapterHandle | None) -> Pooling:
        """Return the pooling of a version of an adapter. Its files are read if `ready` has not returned True for it.

        Raises:
          LoRAError: an error of `read_own_pooling`.
        """
        request = None if handle is None or handle.adapter is None else handle.adapter.request
        if handle is None or request is None:
            return self.base
        with self._lock:
            known = self._known.get(handle.name)
        pooling = known.found if known is not None and known.version == handle.version else None
        pooling = _found(request, self.base) if pooling is None else pooling
        if isinstance(pooling, LoRAError):
            raise pooling
        return pooling

    def _read(self) -> None:
        while True:
            with self._lock:
                if not self._line:
                    self._reading = False
                    return
                info = self._line.popleft()
            assert info.request is not None
            found = _found(info.request, self.base)
            with self._lock:
                self._put(info.name, _Known(info.version, found))
            self._wake()

    def _put(self, name: str, known: _Known) -> None:
        self._known.pop(name, None)
        self._known[name] = known
        if len(self._known) > _MOST:
            del self._known[next(iter(self._known))]


def _found(request: LoRARequest, base: Pooling) -> Pooling | LoRAError:
    try:
        return read_own_pooling(request, base)
    except LoRAError as error:
        return error
    except Exception as error:  # such as an error of the disk
        return LoRAError(f"adapter {request.name!r}: {type(error).__name__}: {error!s:.300}")


def read_own_pooling(request: LoRARequest, base: Pooling) -> Pooling:
    """Return the pooling that an adapter's folder or repository specifies; `base` without such files.

    Raises:
      AdapterMismatchError: it has another default prompt than the model, or modules, a mode or a field that is not
        served.
      LoRAError: it cannot be read.
    """
    folder = local_folder(request)
    if local_folder_of(request.path) is None:
        folder = embedding_files(request.path, folder.name)
    try:
        own = read_pooling(folder)
    except ModelError as error:
        raise AdapterMismatchError(f"adapter {request.name!r}: {error}") from error
    if own is None and (folder / "modules.json").is_file():
        raise AdapterMismatchError(
            f"adapter {request.name!r}: {folder / 'modules.json'} has no Pooling module, and the model embeds texts"
        )
    if own is not None and own.prompt != base.prompt:
        raise AdapterMismatchError(
            f"adapter {request.name!r}: {folder / 'config_sentence_transformers.json'}: the default prompt is "
            f"{own.prompt!r:.80}; expected that of the model, {base.prompt!r:.80}, which precedes every text"
        )
    return own or base

"""Load adapters into the host cache: from requests, on threads of their own, and from memory."""

import logging
import os
import threading
import time
import zlib
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace

import numpy as np

from jlora._memory import page_locked_bytes
from jlora.adapters import Adapter
from jlora.adapters.adapter import open_adapter
from jlora.adapters.files import content_key
from jlora.adapters.resolve import AdapterFolder, adapter_files, resolve
from jlora.config import LoRARequest
from jlora.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoadTimeoutError,
    LoRAError,
)
from jlora.fit.read import pack_exactly, pack_files, pack_in_memory
from jlora.fit.shapes import describe
from jlora.manager.loads import AT_ONCE, Deadline, Load, LoadCancelled
from jlora.manager.state import State, in_use
from jlora.slots.blocks import Block, Row, unpack
from jlora.slots.packed import LifeCycle, PackedAdapter
from jlora.slots.values import check_layers, slot_values

_log = logging.getLogger("jlora")
_READS = 3  # most reads of files that change meanwhile
_QUIET = 0.5  # seconds without a change until both files are taken for those of one adapter


@dataclass(frozen=True)
class Earlier:
    """The last load of an adapter that is loaded again; without values for a new adapter.

    Attributes:
      commit: as in `PackedAdapter`.
      key: the same.
    """

    commit: str | None = None
    key: str | None = None


def load(state: State, request: LoRARequest, deadline: Deadline) -> bool:
    """Load a request and wait for it. Return True if it was loaded, False if the name was in the host cache."""
    while True:
        with state.lock:
            if (error := state.loads.take_error(request, ran_on=True)) is not None:
                raise error
            started = start(state, request, anew=request.load_inplace, deadline=deadline)
        if await_loads(state, [started], deadline.at):
            return started.result


def recall(state: State, name: str) -> PackedAdapter:
    """Return the newest version of a name, reloaded into the host cache if it was evicted.

    Raises:
      AdapterNotFoundError: the name is unknown.
      AdapterUnavailableError: it cannot be loaded again.
    """
    while True:
        with state.lock:
            if (packed := state.cache.loaded.get(name)) is not None:
                return packed
            started = start(state, state.request_of(name))
        await_loads(state, [started], None)


def prefetch(state: State, request: LoRARequest) -> "Future[bool]":
    """See `LoRAManager.prefetch`."""
    with state.lock:
        started = start(state, request, anew=request.load_inplace)
        started.prefetches = True
        future = started.future()
        started.wanted -= 1  # the future keeps it
        return future


def start(state: State, request: LoRARequest, *, anew: bool = False, deadline: Deadline | None = None) -> Load:
    """Return the running load of a request, or start a new one. `wanted` is incremented for the caller.

    Called under the state lock.

    Args:
      state: the state of the manager.
      request: the request to load.
      anew: start a new load even if one is running, which may have read older files.
      deadline: deadline of a new load.
    """
    found = None if anew else state.loads.running(request)
    if found is None:
        found = Load(request, deadline or Deadline(None), state.loads.under_way(request.name))
        threading.Thread(target=_run, args=(state, found), name="jlora-load", daemon=True).start()
        state.loads.add(found)
    found.wanted += 1
    return found


def await_loads(state: State, loads: Sequence[Load], deadline: float | None) -> bool:
    """Wait for loads until a deadline, then decrement `wanted` of each, which `start` has incremented.

    A load that has not finished at the deadline runs on. One that replaces an adapter is abandoned instead, since a
    later call must read the files anew.

    Returns:
      True if all loads have results. False if one was abandoned, and the caller must start it again.

    Raises:
      AdapterInUseError: at the deadline, open batches still held the adapter to replace.
      LoadTimeoutError: at the deadline, a load had not finished.
      Exception: the error of the first load that failed.
    """
    try:
        for one in loads:
            if state.wait(lambda one=one: one.done or None, deadline) is None:
                _time_out(state, loads)
            if one.error is not None and not isinstance(one.error, LoadCancelled):
                with state.lock:
                    state.loads.drop(one)
                raise one.error
        return all(one.error is None for one in loads)
    finally:
        with state.lock:
            for one in loads:
                one.wanted -= 1
        state.changed.ring()


def _time_out(state: State, loads: Sequence[Load]) -> None:
    """Let loads run on, and raise the error of a call that waited for them, unless they have just finished."""
    with state.lock:
        late = [one for one in loads if not one.done]
        for one in late:
            old = state.cache.loaded.get(one.request.name)
            if one.read and one.request.load_inplace and old is not None and state.in_batch(old):
                raise in_use(one.request.name, "replacing")
            if not one.request.load_inplace:
                one.timed_out = time.monotonic()
    if late:
        names = [
            f"{one.request.name!r} from {one.request.path!r}"
            + (" (with load_inplace, so a repeated call starts anew)" if one.request.load_inplace else "")
            for one in late
        ]
        raise LoadTimeoutError(
            f"loading took longer than the timeout: {', '.join(names)}; loads run on, so repeat the call"
        )


def _run(state: State, own: Load) -> None:
    """Run a load after those of the same name, and set its outcome."""
    state.loads.own.load = own
    result, error = False, None
    try:
        for other in own.before:  # loads of one name run in the order of their requests
            state.wait(lambda other=other: other.quiet or None)
        own.before = ()
        result = _load(state, own)
    except BaseException as caught:  # every load needs an outcome, or waiting calls hang
        error = caught
    with state.lock:
        state.loads.finish(own, result, error)
    state.changed.ring()
    own.notify()


def _load(state: State, own: Load) -> bool:
    """Find, read, check and pack an adapter, and admit it to the host cache.

    Returns:
      True if it was loaded, False if it was in the host cache.
    """
    request = own.request
    if not request.load_inplace and state.touch(request.name):
        result = False
    else:
        started = time.monotonic()
        with state.lock:
            known = state.cache.known.get(request.name) == request
            commit, (_, key) = state.cache.commits.get(request.name), state.cache.last.get(request.name, (0, None))
        earlier = Earlier(commit, key) if known else Earlier()
        with _logged(request.name, request.path), _reloading(request) if known else nullcontext():
            packed = agreed(state, _read(state, request, own, earlier))
            own.read = True
            result = admit(state, packed, request.load_inplace, own.deadline, own)
        with state.lock:
            state.load_seconds.add(time.monotonic() - started)
    if own.prefetches:
        with state.lock:
            newest = state.cache.loaded.get(request.name)
        if newest is not None:
            state.slots.stage(newest, state.lock)
    return result


def _read(state: State, request: LoRARequest, own: Load | None, earlier: Earlier) -> PackedAdapter:
    """Find, read and pack an adapter, as a load if `own` is given. Called without locks.

    Files that change during the read are read again. So are files that differ from those of an earlier load and have
    changed lately: one of the two can be new and the other old.

    Raises:
      AdapterFormatError: the files changed during several reads.
    """
    found = _find(state, request, own, earlier.commit)
    for _ in range(_READS):
        before = _stamp(found)
        try:
            read = _read_once(state, request, found, own)
            if earlier.key is None or read.key in earlier.key.split():
                return read
        except (AdapterFormatError, AdapterMismatchError) as error:
            if earlier.key is None and _stamp(found) == before:
                raise
            read = error
        _await_quiet(found)
        if _stamp(found) == before:
            if isinstance(read, PackedAdapter):
                return read
            raise read
    raise AdapterFormatError(
        f"{describe(request.name, request.path)}: its files change again and again while they are read; write an "
        "adapter to a new folder, and load it when it is complete"
    )


def _read_once(state: State, request: LoRARequest, found: AdapterFolder, own: Load | None) -> PackedAdapter:
    with state.loads.reading:
        if own is not None:
            with state.lock:
                state.loads.check_wanted(own)
        packed = pack_files(request, found, state.wrapped, state.index, state.pool, config=state.config)
    return replace(packed, commit=found.commit)


def _stamp(found: AdapterFolder) -> str:
    """Return a string that changes whenever the files do; "" while one is missing."""
    try:
        return content_key(adapter_files(found))
    except (AdapterFormatError, OSError):
        return ""


def _await_quiet(found: AdapterFolder) -> None:
    """Wait until the files have not changed for `_QUIET` seconds, at most once for that time."""
    with suppress(AdapterFormatError, OSError):
        stats = [file.stat() for file in adapter_files(found)]
        age = time.time() - max(max(each.st_mtime, each.st_ctime) for each in stats)
        if 0 <= age < _QUIET:
            time.sleep(_QUIET - age)


def _find(state: State, request: LoRARequest, own: Load | None, commit: str | None = None) -> AdapterFolder:
    """Return the local folder of a request, downloading it if necessary, at this commit if the hub still has it.

    Raises:
      LoadCancelled: the load was abandoned before the download started.
    """
    if state.resolve is None and os.path.exists(os.path.expanduser(request.path)):
        return resolve(request.path, request.name)
    with nullcontext() if own is None else _fetching(state, own):
        path = request.path if state.resolve is None else state.resolve(request)
        if commit is not None:
            with suppress(AdapterNotFoundError):
                return resolve(path, request.name, commit, local_only=request.local_only)
        return resolve(path, request.name, request.revision, local_only=request.local_only)


@contextmanager
def _fetching(state: State, own: Load) -> Generator[None, None, None]:
    """Limit the number of loads that use the network or the `resolve` callback, which may be slow or hang.

    Other loads may read and cast meanwhile. An abandoned or quiet load cannot be stopped, but it does not count.

    Raises:
      LoadCancelled: the load was abandoned while it waited.
    """
    fetching = state.loads.fetching

    def ready() -> bool | None:
        state.loads.check_wanted(own)
        return sum(not other.quiet for other in fetching[: fetching.index(own)]) < AT_ONCE or None

    with state.lock:
        fetching.append(own)
    try:
        with state.lock:
            state.wait(ready)
        yield
    finally:
        with state.lock:
            fetching.remove(own)
        state.changed.ring()


def agreed(state: State, packed: PackedAdapter) -> PackedAdapter:
    """Return an adapter, equal in all processes, with its values of slots, in page-locked memory if there is room."""
    keys = state.peers.agree(lambda: [packed.name, packed.digest()], packed.key)
    packed = with_extras(state, packed)
    key = None if None in keys else " ".join(keys)  # if the files of one process changed, all get a new version
    return replace(packed, key=key, life=LifeCycle(page_locked(state, packed.blocks)))


def with_extras(state: State, packed: PackedAdapter) -> PackedAdapter:
    """Return an adapter with the values of its variants, checked, and equal in all processes."""
    check_layers(packed, state.wrapped)
    if not any(placement.extras for placement in packed.placements):
        return packed
    extras = slot_values(packed, state.wrapped, state.pool.sites)
    state.peers.agree(lambda: [zlib.crc32(array.data) for array in extras.values()])
    return replace(packed, extras=extras)


def page_locked(state: State, blocks: tuple[Block, ...], others: Collection[PackedAdapter] = ()) -> tuple[Block, ...]:
    """Return the blocks in page-locked memory, or unchanged if all would exceed `page_locked_bytes`."""
    if not state.pool.page_locks:
        return blocks
    with state.lock:
        loaded = (*state.cache.loaded.values(), *others)
        taken = sum(packed.nbytes for packed in loaded if packed.life.page_locked)
    fits = taken + sum(block.nbytes for block in blocks) <= page_locked_bytes()
    return state.pool.page_lock(blocks) if fits else blocks


def add(state: State, adapter: Adapter, replaces: bool, deadline: Deadline) -> bool:
    """Pack an adapter from memory and admit it to the host cache."""
    with _logged(adapter.name, None):
        packed = pack_in_memory(adapter, state.wrapped, state.index, state.pool, config=state.config)
        return admit(state, agreed(state, packed), replaces, deadline)


def admit(state: State, packed: PackedAdapter, replaces: bool, deadline: Deadline, own: Load | None = None) -> bool:
    """Add an adapter to the host cache, once no open batch holds the version that it replaces.

    Returns:
      False if the name is in the host cache and `replaces` is False, else True.

    Raises:
      AdapterInUseError: open batches held the old version for too long.
      LoadCancelled: the load was abandoned.
      NoFreeSlotError: the host cache is full of adapters that cannot be evicted.
    """

    def ready() -> bool | None:
        """Return True to admit the adapter, False if its name is there; None while batches hold the old version."""
        state.wrapped.check()
        if own is not None:
            state.loads.check_wanted(own)
        old = state.cache.loaded.get(packed.name)
        if old is None or not replaces:
            return old is None
        return state.is_free(old, "replacing", deadline) or None

    with state.lock:
        if not state.wait(ready, deadline.at):
            state.touch(packed.name)
            return False
        victims = state.cache.victims_for(packed, state.leases.leased())
        state.peers.agree(victims)
        with state.peers.change():
            state.put(packed, victims)
            state.counts["host_loads"] += 1
        return True


def read(state: State, request: LoRARequest, earlier: Earlier) -> PackedAdapter:
    """Read and pack an adapter again, without adding it to the host cache or to page-locked memory."""
    with _logged(request.name, request.path):
        return with_extras(state, _read(state, request, None, earlier))


def exact_factors(state: State, packed: PackedAdapter) -> dict[Row, tuple[np.ndarray, np.ndarray]]:
    """Return row -> (A [n, r, K], B [r, N]) of a loaded adapter, before they were rounded to the slots' dtype.

    They are those of its files or of the arrays given. If these are gone, they are those of the slots, with a warning.
    """
    rows = {(p.site, p.row) for p in packed.placements}
    if all(site.spec.dtype == "float32" for site in packed.sites):
        return unpack(packed.blocks, rows)
    found = read_again(state, packed) if packed.given is None else packed.given()
    if found is None and packed.request is None:
        _log.warning(
            "adapter %r: has no files, and its jlora.Adapter is gone; its values in the dtype of the slots are used",
            packed.name,
        )
    blocks = packed.blocks if found is None else pack_exactly(found, state.wrapped, state.index, state.pool)
    return unpack(blocks, rows)


def read_again(state: State, packed: PackedAdapter) -> Adapter | None:
    """Return a loaded adapter as its files have it; None, with a warning, if they are gone or have changed."""
    if packed.request is None:
        return None
    try:
        with open_adapter(_find(state, packed.request, None, packed.commit)) as opened:
            adapter = opened.read({}, allow_nonfinite=True)
    except (LoRAError, OSError) as error:
        _log.warning(
            "adapter %r: its files are gone or damaged; its values in the dtype of the slots are used: %.500r",
            packed.name,
            str(error),
        )
        return None
    if adapter.fingerprint == packed.key:
        return adapter
    _log.warning(
        "adapter %r: its files have changed since they were loaded; its values in the dtype of the slots are used",
        packed.name,
    )
    return None


def read_folder(state: State, found: AdapterFolder) -> PackedAdapter:
    """Read and pack a folder as an adapter without a request, without adding it to the host cache."""
    with _logged(found.name, str(found.folder)):
        request = LoRARequest(found.name, str(found.folder))
        packed = pack_files(request, found, state.wrapped, state.index, state.pool, config=state.config)
        return with_extras(state, replace(packed, request=None, key=None))


@contextmanager
def _logged(name: str, path: str | None) -> Generator[None, None, None]:
    """Log the end or the failure of a load. Names and messages are escaped, because they come from outside."""
    started = time.monotonic()
    source = "memory" if path is None else repr(path)
    try:
        yield
    except Exception as error:
        what = "gave up" if isinstance(error, LoadCancelled) else "refused"
        seconds = time.monotonic() - started
        _log.info(
            "%s %r from %s after %.3f s: %s %.300r", what, name, source, seconds, type(error).__name__, str(error)
        )
        raise
    _log.info("loaded %r from %s in %.3f s", name, source, time.monotonic() - started)


@contextmanager
def _reloading(request: LoRARequest) -> Generator[None, None, None]:
    """Raise AdapterUnavailableError, with a warning in the log, if an evicted adapter cannot be read again."""
    try:
        yield
    except (AdapterNotFoundError, AdapterFormatError, AdapterMismatchError, OSError) as error:
        _log.warning("adapter %r is unavailable; its files are gone or damaged: %.500r", request.name, str(error))
        raise AdapterUnavailableError(
            f"adapter {request.name!r} was evicted and cannot be loaded again from {request.path!r}: {error}"
        ) from error

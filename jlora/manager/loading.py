"""Load adapters into the host cache: from requests, on threads of their own, and from memory."""

import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

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
    LoRAUsageError,
)
from jlora.fit.fresh import fresh_adapter
from jlora.fit.read import pack_exactly, pack_files, pack_in_memory
from jlora.fit.shapes import describe
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loads import AT_ONCE, Deadline, Load, notify
from jlora.manager.state import State, in_use
from jlora.slots.blocks import Block, Entry, unpack
from jlora.slots.packed import PackedAdapter
from jlora.slots.values import check_layers, slot_values

_log = logging.getLogger("jlora")
_READS = 3  # most reads of files that change meanwhile
_ROUNDED = "adapter %r: %s; its values in the dtype of the slots are used"
_QUIET = 0.5  # seconds without a change until both files are taken for those of one adapter


def load(state: State, request: LoRARequest, deadline: Deadline) -> bool:
    """Load a request and wait for it. Return True if it was loaded, False if the name was in the host cache."""
    with state.lock:
        state.loads.raise_error(request, ran_on=True)
        started = start(state, request, deadline, anew=request.load_inplace)
        await_loads(state, [started], deadline.at)
        return started.outcome is True


def recall(state: State, name: str) -> LoadedAdapter:
    """Return the newest version of a name, reloaded into the host cache if it was evicted.

    Raises:
      AdapterNotFoundError: the name is unknown.
      AdapterUnavailableError: it cannot be loaded again.
    """
    with state.lock:
        while (adapter := state.cache.loaded.get(name)) is None:
            await_loads(state, [start(state, state.request_of(name), Deadline(None))], None)
        return adapter


def prefetch(state: State, request: LoRARequest) -> "Future[bool]":
    """See `LoRAManager.prefetch`."""
    future: Future[bool] = Future()
    with state.lock:
        started = start(state, request, Deadline(None), anew=request.load_inplace)
        started.futures.add(future)
        future.add_done_callback(started.futures.discard)
        started.calls -= 1  # the future keeps it
    return future


def start(state: State, request: LoRARequest, deadline: Deadline, *, anew: bool = False) -> Load:
    """Return the running load of a request, or start a new one. `calls` is incremented for the caller.

    With `anew` a new load is started even if one is running, which may have read older files. Called under the state
    lock.
    """
    queue = state.loads.queues.setdefault(request.name, [])
    shared = [one for one in queue if one.request == request and not one.abandoned and not anew]
    found = shared[-1] if shared else Load(request, deadline)
    if not shared:
        threading.Thread(target=_run, args=(state, found, queue), name="jlora-load", daemon=True).start()
        queue.append(found)
        state.loads.failed.pop(request, None)
    found.calls += 1
    return found


def await_loads(state: State, loads: Sequence[Load], deadline: float | None) -> None:
    """Wait for loads until a deadline, then decrement `calls` of each, which `start` has incremented.

    A load that has not finished at the deadline runs on. One that replaces an adapter is abandoned instead, since a
    later call must read the files anew.

    Raises:
      AdapterInUseError: at the deadline, open batches still held the adapter to replace.
      LoadTimeoutError: at the deadline, a load had not finished.
      Exception: the error of a load that failed.
    """

    def ready() -> bool | None:
        for one in loads:
            if isinstance(one.outcome, BaseException):
                raise one.outcome
        return all(one.outcome is not None for one in loads) or None

    try:
        with state.lock:
            if state.wait(ready, deadline) is None:
                raise _timeout(state, [one for one in loads if one.outcome is None])
    finally:
        with state.lock:
            for one in loads:
                one.calls -= 1
        state.changed.ring()


def _timeout(state: State, late: Sequence[Load]) -> LoRAError:
    """Let loads run on, and return the error of a call that waited for them."""
    for one in late:
        old = state.cache.loaded.get(one.request.name)
        if one.request.load_inplace and old is not None and state.in_batch(old):
            return in_use(one.request.name, "replacing")
        if not one.request.load_inplace:
            one.timed_out = time.monotonic()
    new = " (with load_inplace, so a repeated call starts anew)"
    names = ", ".join(f"{one.request.name!r} from {one.request.path!r}{new * one.request.load_inplace}" for one in late)
    return LoadTimeoutError(f"loading took longer than the timeout: {names}; loads run on, so repeat the call")


def _run(state: State, own: Load, queue: Sequence[Load]) -> None:
    """Run a load in its turn of a queue, and set its outcome."""
    state.loads.own.load = own
    try:
        _await_turn(state, own, queue, 1)
        outcome = _load(state, own)
    except BaseException as error:  # every load needs an outcome, or waiting calls hang
        outcome = error
    with state.lock:
        state.loads.finish(own, outcome)
    state.changed.ring()
    notify([own])


def _await_turn(state: State, own: Load, queue: Sequence[Load], at_once: int) -> None:
    """Wait until fewer than `at_once` earlier loads of a queue run.

    A quiet load does not count, because it may hang and cannot be stopped.

    Raises:
      CancelledError: the load was abandoned while it waited.
    """

    def ready() -> bool | None:
        own.check_wanted()
        return sum(not other.quiet for other in queue[: queue.index(own)]) < at_once or None

    with state.lock:
        state.wait(ready)


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
        commit = key = None
        with state.lock:
            if known := state.cache.known.get(request.name) == request:
                commit, (_, key) = state.cache.commits.get(request.name), state.cache.last.get(request.name, (0, None))
        with _logged(request.name, request.path), _reloading(request) if known else nullcontext():
            adapter = agreed(state, _read(state, own, commit, key))
            result = admit(state, adapter, request.load_inplace, own.deadline, own)
        with state.lock:
            state.load_seconds.add(time.monotonic() - started)
    if own.futures:
        with state.lock:
            newest = state.cache.loaded.get(request.name)
        if newest is not None:
            state.policy.prefetch(newest, state.lock)
    return result


def _read(state: State, own: Load, commit: str | None, key: str | None) -> LoadedAdapter:
    """Find, read and pack an adapter. Called without locks.

    Files that change during the read are read again. So are files that differ from those of an earlier load and have
    changed lately: one of the two can be new and the other old. `commit` and `key` are those of the earlier load, as in
    `LoadedAdapter`.

    Raises:
      AdapterFormatError: the files changed during several reads.
      CancelledError: the load was abandoned before it read.
    """
    request = own.request
    folder = _find(state, request, commit, _fetching(state, own))
    for _ in range(_READS):
        before = _stamp(folder)
        try:
            with state.loads.reading:
                with state.lock:
                    own.check_wanted()
                packed, warnings = pack_files(
                    request, folder, state.wrapped, state.index, state.slot_arrays, config=state.config
                )
            read = LoadedAdapter(
                packed,
                request=replace(request, load_inplace=False),
                key=packed.about.fingerprint,
                commit=folder.commit,
                in_place=request.load_inplace,
                warnings=warnings,
            )
            if key is None or read.key in key.split():
                return read
        except (AdapterFormatError, AdapterMismatchError) as error:
            if key is None and _stamp(folder) == before:
                raise
            read = error
        _await_quiet(folder)
        if _stamp(folder) == before:
            if isinstance(read, LoadedAdapter):
                return read
            raise read
    raise AdapterFormatError(
        f"{describe(request.name, request.path)}: its files change again and again while they are read; write an "
        "adapter to a new folder, and load it when it is complete"
    )


def _stamp(folder: AdapterFolder) -> str:
    """Return a string that changes whenever the files do; "" while one is missing."""
    try:
        return content_key(adapter_files(folder))
    except (AdapterFormatError, OSError):
        return ""


def _await_quiet(folder: AdapterFolder) -> None:
    """Wait until the files have not changed for `_QUIET` seconds, at most once for that time."""
    with suppress(AdapterFormatError, OSError):
        stats = [file.stat() for file in adapter_files(folder)]
        age = time.time() - max(max(each.st_mtime, each.st_ctime) for each in stats)
        if 0 <= age < _QUIET:
            time.sleep(_QUIET - age)


def _find(
    state: State, request: LoRARequest, commit: str | None, fetching: AbstractContextManager[None]
) -> AdapterFolder:
    """Return the local folder of a request, downloading it if necessary, at this commit if the hub still has it.

    The download or the `resolve` callback runs in the context `fetching`.
    """
    if state.resolve is None and os.path.exists(os.path.expanduser(request.path)):
        return resolve(request.path, request.name)
    with fetching:
        path = request.path if state.resolve is None else state.resolve(request)
        if commit is not None:
            with suppress(AdapterNotFoundError):
                return resolve(path, request.name, commit, local_only=request.local_only)
        return resolve(path, request.name, request.revision, local_only=request.local_only)


@contextmanager
def _fetching(state: State, own: Load) -> Generator[None, None, None]:
    """Limit the number of loads that use the network or the `resolve` callback. Others may read and cast meanwhile."""
    fetching = state.loads.fetching
    with state.lock:
        fetching.append(own)
    try:
        _await_turn(state, own, fetching, AT_ONCE)
        yield
    finally:
        with state.lock:
            fetching.remove(own)
        state.changed.ring()


def agreed(state: State, adapter: LoadedAdapter) -> LoadedAdapter:
    """Return an adapter, equal in all processes, with its values of slots, in page-locked memory if there is room."""
    keys = state.peers.agree(lambda: [adapter.name, adapter.packed.digest()], adapter.key)
    packed = with_extras(state, adapter.packed)
    key = None if None in keys else " ".join(keys)  # if the files of one process changed, all get a new version
    return replace(adapter, key=key, packed=packed.with_blocks(page_locked(state, packed.blocks)))


def with_extras(state: State, packed: PackedAdapter) -> PackedAdapter:
    """Return an adapter with the values of its variants, checked, and equal in all processes."""
    check_layers(packed, state.wrapped)
    if not any(placement.extras for placement in packed.placements):
        return packed
    extras = slot_values(packed, state.wrapped, state.slot_arrays.sites)
    state.peers.agree(lambda: [zlib.crc32(array.data) for array in extras.values()])
    return replace(packed, extras=extras)


def page_locked(state: State, blocks: tuple[Block, ...], others: Collection[LoadedAdapter] = ()) -> tuple[Block, ...]:
    """Return the blocks in page-locked memory, or unchanged if all would exceed `page_locked_bytes`."""
    if not state.slot_arrays.page_locks:
        return blocks
    with state.lock:
        loaded = (*state.cache.loaded.values(), *others)
        taken = sum(adapter.nbytes for adapter in loaded if adapter.page_locked)
    fits = taken + sum(block.nbytes for block in blocks) <= page_locked_bytes()
    return state.slot_arrays.page_lock(blocks) if fits else blocks


def add(
    state: State,
    adapter: Adapter,
    replaces: bool,
    deadline: Deadline,
    drawn: Callable[[], Adapter] | None = None,
) -> bool:
    """Pack an adapter from memory and admit it to the host cache. `drawn` draws a new adapter again."""
    with _logged(adapter.name, None):
        packed, warnings = pack_in_memory(
            adapter, state.wrapped, state.index, state.slot_arrays, config=state.config, fresh=drawn is not None
        )
        loaded = LoadedAdapter(packed, warnings=warnings, given=drawn or weakref.ref(adapter))
        return admit(state, agreed(state, loaded), replaces, deadline)


def admit(state: State, adapter: LoadedAdapter, replaces: bool, deadline: Deadline, own: Load | None = None) -> bool:
    """Add an adapter to the host cache, once no open batch holds the version that it replaces.

    Returns:
      False if the name is in the host cache and `replaces` is False, else True.

    Raises:
      AdapterInUseError: open batches held the old version for too long.
      CancelledError: the load was abandoned.
      NoFreeSlotError: the host cache is full of adapters that cannot be evicted.
    """

    def ready() -> bool | None:
        """Return True to admit the adapter, False if its name is there; None while batches hold the old version."""
        state.wrapped.check()
        if own is not None:
            own.check_wanted()
        old = state.cache.loaded.get(adapter.name)
        if old is None or not replaces:
            return old is None
        return state.is_free(old, "replacing", deadline) or None

    with state.lock:
        if not state.wait(ready, deadline.at):
            state.touch(adapter.name)
            return False
        victims = state.cache.victims_for(adapter, state.leases.leased())
        state.peers.agree(victims)
        with state.peers.change():
            state.put(adapter, victims)
            state.counts["host_loads"] += 1
        return True


def read(state: State, request: LoRARequest, commit: str | None, key: str | None) -> LoadedAdapter:
    """Read and pack an adapter again, without adding it to the host cache or to page-locked memory."""
    with _logged(request.name, request.path):
        adapter = _read(state, Load(request, Deadline(None), calls=1), commit, key)
        adapter.packed = with_extras(state, adapter.packed)
        return adapter


def begin_training(
    state: State, name: str, options: Mapping[str, Any]
) -> tuple[PackedAdapter, Callable[[], dict[Entry, tuple[np.ndarray, np.ndarray]]]]:
    """Return an adapter without blocks, and a function that reads or draws its values.

    The function returns entry -> (A [n, r, K], B [r, N]) before their rounding to the slots' dtype. The adapter is the
    newest version of a name, or if the name is unknown and `options` has a rank, a new one (`fresh_adapter`).

    Raises:
      AdapterNotFoundError: the name is unknown, and `options` has no rank.
      LoRAUsageError: the name is known, and `options` has a rank, an alpha or targets.
    """
    with state.lock:
        known = name in state.cache.loaded or name in state.cache.known
    given = [key for key in ("rank", "alpha", "target_modules") if options[key] is not None]
    if known and given:
        raise LoRAUsageError(f"adapter {name!r} exists, with a rank of its own; give no {given[0]}, or another name")
    if known or "rank" not in given:
        try:
            adapter = recall(state, name)
        except AdapterNotFoundError as error:
            raise AdapterNotFoundError(f"{error}; or give rank and alpha, for a new one") from error
        return adapter.packed.with_blocks(()), partial(exact_factors, state, adapter)
    new = partial(fresh_adapter, name, state.wrapped, state.index, **options)
    packed, _ = pack_in_memory(
        new(zeros=True), state.wrapped, state.index, state.slot_arrays, config=state.config, fresh=True
    )

    def drawn() -> dict[Entry, tuple[np.ndarray, np.ndarray]]:
        blocks = pack_exactly(new(), state.wrapped, state.index, state.slot_arrays)
        return unpack(blocks, {(p.site, p.entry) for p in packed.placements})

    return packed.with_blocks(()), drawn


def exact_factors(state: State, adapter: LoadedAdapter) -> dict[Entry, tuple[np.ndarray, np.ndarray]]:
    """Return entry -> (A [n, r, K], B [r, N]) of a loaded adapter, before they were rounded to the slots' dtype.

    They are those of its files or of the arrays given. If these are gone, they are those of the slots, with a warning.
    """
    entries = {(p.site, p.entry) for p in adapter.packed.placements}
    if all(site.spec.dtype == "float32" for site in adapter.packed.sites):
        return unpack(adapter.packed.blocks, entries)
    original = None if adapter.given is None else adapter.given()
    if original is None:
        original = read_again(state, adapter)
    if original is None and adapter.request is None:
        _log.warning(_ROUNDED, adapter.name, "has no files, and its jlora.Adapter is gone")
    blocks = (
        adapter.packed.blocks
        if original is None
        else pack_exactly(original, state.wrapped, state.index, state.slot_arrays)
    )
    return unpack(blocks, entries)


def read_again(state: State, adapter: LoadedAdapter) -> Adapter | None:
    """Return a loaded adapter as its files have it; None, with a warning, if they are gone or have changed."""
    if adapter.request is None:
        return None
    try:
        with open_adapter(_find(state, adapter.request, adapter.commit, nullcontext())) as opened:
            original = opened.read({}, allow_nonfinite=True)
        if adapter.key in (None, original.fingerprint):  # None: the files of `set_request`
            return original
        _log.warning(_ROUNDED, adapter.name, "its files have changed since they were loaded")
    except (LoRAError, OSError) as error:
        _log.warning(_ROUNDED, adapter.name, f"its files are gone or damaged ({str(error)!r:.500})")
    return None


def read_folder(state: State, found: AdapterFolder) -> PackedAdapter:
    """Read and pack a folder, without adding the adapter to the host cache."""
    with _logged(found.name, str(found.folder)):
        request = LoRARequest(found.name, str(found.folder))
        packed, _ = pack_files(request, found, state.wrapped, state.index, state.slot_arrays, config=state.config)
        return with_extras(state, packed)


@contextmanager
def _logged(name: str, path: str | None) -> Generator[None, None, None]:
    """Log the end or the failure of a load. Names and messages are escaped, because they come from outside."""
    started = time.monotonic()
    source = "memory" if path is None else repr(path)
    try:
        yield
    except Exception as error:
        what = "gave up" if isinstance(error, CancelledError) else "refused"
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

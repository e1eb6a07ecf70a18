"""What a manager knows of its adapters, as a folder from which another one goes on warm.

    names.json         names, requests, pins, orders of use and versions (`saved_names`); replaced in one step
    contents/SHA-256/  the weights of one adapter each (`saved_content`); there before a names.json says so

Whoever writes or deletes contents holds contents.lock, and whoever replaces names.json, names.lock. What it says is
taken from the manager under names.lock: so of two saves at a time the one that ends last knows the most.
"""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from jlora._compat import asked_for
from jlora.config import LoRARequest
from jlora.errors import AdapterMismatchError, AdapterNotFoundError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.manager.host import Host
from jlora.manager.host_cache import HostCache
from jlora.manager.locks import StateLock
from jlora.manager.packed_adapter import PackedAdapter
from jlora.manager.saved_content import description, make_folder, read_content, sync, write_content
from jlora.manager.saved_names import Entry, Names, locked, read_names, write_names
from jlora.manager.slot_table import SlotTable

_CONTENTS = "contents"
_OURS = re.compile(r"[0-9a-f]{64}(\..*)?")  # and what Orbax calls a content that is not whole yet


# --- saving -----------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    slots: SlotTable,
    cache: HostCache,
    state_lock: StateLock,
    base: str,
    *,
    weights: bool,
    without: Callable[[], Collection[str]],
) -> None:
    """See `LoRAManager.save`; `base` is the model's `base_digest`."""

    def take() -> tuple[Names, list[PackedAdapter]]:
        left_out = without()
        with state_lock:
            return _taken(slots, cache, base, left_out)

    try:
        make_folder(folder)
        _, contents = take()
        if weights or any(content.request is None for content in contents):
            with locked(folder / "contents.lock"):
                _save_contents(folder, take, None if weights else lambda content: content.request is None)
        else:
            _commit(folder, take, {})
    except OSError as error:
        raise LoRAError(f"{folder}: adapters could not be saved: {error}") from error


def _save_contents(
    folder: Path, take: Callable[[], tuple[Names, list[PackedAdapter]]], only: Callable[[PackedAdapter], bool] | None
) -> None:
    """Save the weights of contents that are not there yet, then names, then delete what no name means any more."""
    before = read_names(folder)
    there = set[str]() if before is None else before.weights
    below = folder / _CONTENTS
    below.mkdir(exist_ok=True)
    sync(folder)
    _clear(below, there)  # what a save left that did not end: nobody has seen that it is whole
    written: dict[str, Entry] = {}
    sound = set[str]()  # of those that have no digest yet, what this save has seen whole: some may be the same
    try:
        _, contents = take()
        for content in contents:
            if content.digest not in there and (only is None or only(content)):
                content.digest = write_content(content, below, sound)
                sound.add(content.digest)
                there.add(content.digest)
            if content.digest in there:
                written[content.name] = _entry(content, False, content.digest)
        _commit(folder, take, written)
    finally:
        after = read_names(folder)
        _clear(below, set() if after is None else after.weights)


def _commit(folder: Path, take: Callable[[], tuple[Names, list[PackedAdapter]]], written: dict[str, Entry]) -> None:
    """Replace names.json by what the manager knows now, with the weights that are there.

    Args:
      folder: where.
      take: gives that, and the contents.
      written: what the weights of adapters were in this save. An adapter that nothing can be loaded from, and that has
        others by now, is saved as it was then.
    """
    with locked(folder / "names.lock"):
        before = read_names(folder)
        there = (set[str]() if before is None else before.weights) | {
            entry.weights for entry in written.values() if entry.weights is not None
        }
        names, contents = take()
        entries: list[Entry] = []
        for entry, content in zip(names.adapters, contents, strict=True):
            if content.digest in there:
                entries.append(replace(entry, weights=content.digest))
            elif content.request is not None:
                entries.append(entry)
            elif content.name in written:
                entries.append(replace(written[content.name], pinned=entry.pinned))
        kept = {entry.name for entry in entries}
        names = replace(names, adapters=tuple(entries), slots=tuple(name for name in names.slots if name in kept))
        write_names(folder, names)


def _taken(
    slots: SlotTable, cache: HostCache, base: str, without: Collection[str]
) -> tuple[Names, list[PackedAdapter]]:
    """What the manager knows now, without weights, and its contents in the same order. Under its lock.

    An interrupt may have left a name among the contents and among those that are known, or a content in two slots.
    """
    contents = [cache.contents[name] for name in cache.contents if name not in without]
    names = Names(
        base=base,
        layers=layers_digest(slots),
        adapters=tuple(_entry(content, cache.contents.pinned(content.name), None) for content in contents),
        slots=tuple(dict.fromkeys(content.name for content in slots.by_use() if cache.newest(content))),
        evicted=tuple(
            request for name, request in cache.known.items() if name not in without and name not in cache.contents
        ),
        # What is saved as removed is another content when it is added again, be it of the same files.
        versions={
            name: (last, key if isinstance(key, str) and name not in without else None)
            for name, (last, key) in cache.last.items()
        },
    )
    return names, contents


def _entry(content: PackedAdapter, pinned: bool, weights: str | None) -> Entry:
    return Entry(content.name, content.version, pinned, content.request, weights)


def _clear(below: Path, keep: Collection[str]) -> None:
    """Delete the contents that are not to be kept. What cannot be deleted is tried again by the next save."""
    for found in list(below.iterdir()) if below.is_dir() else []:
        if found.name not in keep and _OURS.fullmatch(found.name):
            shutil.rmtree(found, ignore_errors=True)


# --- what it was saved beside -----------------------------------------------------------------------------------------


def base_digest(model: nnx.Module, said: Sequence[Any] = ()) -> str:
    """What tells base models apart: of each parameter its path, shape and dtype, and its first two values. And what is
    said of the names of their layers (`SiteIndex.said`)."""
    found = hashlib.sha256(json.dumps(said, default=repr).encode())
    parameters = cast("Any", nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, parameter in sorted(parameters):
        array: Any = parameter.get_value()
        if not isinstance(array, jax.Array):
            continue
        if array.is_deleted():
            raise LoRAError(f"{'.'.join(map(str, path))}: the parameter was donated; give it back to the model first")
        found.update(f"{path} {array.shape} {array.dtype} ".encode())
        first = next((s.data for s in array.addressable_shards if not any(i.start for i in s.index)), None)
        if first is not None and first.size:
            with asked_for():
                few = first[(0,) * (first.ndim - 1)] if first.ndim else first.reshape(1)
                found.update(np.asarray(few[:2]).tobytes())  # so few that every shard has them
    return found.hexdigest()


def layers_digest(slots: SlotTable) -> str:
    """What tells apart managers that make different contents of the same file."""
    return hashlib.sha256(json.dumps([description(site) for site in slots.pool.sites]).encode()).hexdigest()


# --- restoring --------------------------------------------------------------------------------------------------------


def restore(
    folder: Path,
    host: Host,
    slots: SlotTable,
    cache: HostCache,
    locks: tuple[AbstractContextManager[Any], StateLock],
    base: str,
    *,
    weights: bool,
) -> frozenset[str]:
    """See `LoRAManager.restore`; `base` is the model's `base_digest`."""
    step_lock, state_lock = locks
    with state_lock:
        _check_new(cache)
    with locked(folder / "contents.lock", shared=True):
        names = read_names(folder)
        if names is None:
            raise AdapterNotFoundError(f"{folder}: no manager has been saved there")
        if weights and names.base != base:
            raise AdapterMismatchError(
                f"{folder}: was saved beside another base model: its parameters have other names, shapes, dtypes or "
                "values, or name_map or skip are others. restore(path, weights=False) takes the names alone, and loads "
                "their adapters anew"
            )
        contents, left = _read_contents(folder, names, host, slots, cache, weights)
    versions = dict(names.versions)
    if not weights or names.layers != layers_digest(slots):  # there the same file was another content
        versions = {name: (last, None) for name, (last, _) in versions.items()}
    slots.pool.compile()
    with step_lock, state_lock:
        _check_new(cache)
        try:
            cache.last.update(versions)
            # What was served after the save, before a crash say, had versions that nobody knows. Time is past them.
            cache.floor = time.time_ns() // 1000
            for entry in names.adapters:
                if (content := contents.get(entry.name)) is not None:
                    host.put_back(content, entry.pinned)
            kept = (name for name in versions if name not in contents or contents[name].digest)
            cache.last.update({name: versions[name] for name in kept})
            cache.known.update({request.name: request for request in left})
            _fill_slots(names, contents, slots)
            for entry in names.adapters:
                if entry.name in contents:
                    cache.contents.touch(entry.name)
        except BaseException:
            for content in contents.values():
                slots.release(content)
            cache.clear()
            raise
    return frozenset(versions)


def _check_new(cache: HostCache) -> None:
    if cache.last or cache.known:
        raise LoRAUsageError("restore: this manager has had adapters already; restore into a new one")


def _read_contents(
    folder: Path, names: Names, host: Host, slots: SlotTable, cache: HostCache, weights: bool
) -> tuple[dict[str, PackedAdapter], list[LoRARequest]]:
    """The contents that there is room for, first those that must be there and then those used last; and the requests of
    the rest."""
    found: dict[str, PackedAdapter] = {}
    left = list(names.evicted)
    full = False
    must = [entry for entry in names.adapters if entry.pinned or entry.request is None]
    must.sort(key=lambda entry: not entry.pinned)
    for entry in dict.fromkeys([*must, *reversed(names.adapters)]):
        if entry.request is None and not weights:
            raise AdapterMismatchError(
                f"{folder}: adapter {entry.name!r} was loaded from nowhere, so its name alone brings nothing back"
            )
        content = None
        if not full and ((weights and entry.weights is not None) or entry.pinned):
            content = _read_content(folder, entry, host, slots, found, weights)
            full = not cache.has_room([*found.values(), content])
        if content is not None and not full:
            found[entry.name] = content
        elif entry.pinned or entry.request is None:
            what = "is pinned" if entry.pinned else "can be loaded from nowhere else"
            raise NoFreeSlotError(
                f"{folder}: adapter {entry.name!r} {what}, and the host cache has no room for it; raise max_cpu_loras "
                "or max_cpu_bytes"
            )
        else:
            left.append(entry.request)
    return found, left


def _read_content(
    folder: Path, entry: Entry, host: Host, slots: SlotTable, found: dict[str, PackedAdapter], weights: bool
) -> PackedAdapter:
    """The content of an adapter, from what was saved, or else from its request."""
    if not weights or entry.weights is None:
        assert entry.request is not None
        return host.read(entry.request)
    pool = slots.pool
    content = read_content(
        entry.name, folder / _CONTENTS / entry.weights, pool.sites, pool.chunks, allow_nonfinite=host.allow_nonfinite
    )
    content.version, content.request = entry.version, entry.request
    content.blocks = host.pinned(content.blocks, found.values())
    return content


def _fill_slots(names: Names, contents: dict[str, PackedAdapter], slots: SlotTable) -> None:
    """Write those that were in slots, as many as fit, the least recently used first; and all that are pinned."""
    pinned = [contents[entry.name] for entry in names.adapters if entry.pinned]
    by_use = [content for name in names.slots if (content := contents.get(name)) is not None and content not in pinned]
    plan = slots.plan(pinned, partly=True)  # alone: of others, those that few slots can hold would choose first
    for content in pinned:
        if plan[content] is None:
            raise NoFreeSlotError(
                f"adapter {content.name!r} was pinned where it was saved, one of {len(pinned)} that were, and there is "
                "no slot for it; raise max_loras"
            )
    slots.carry_out(plan, pinned)
    plan = slots.plan(by_use[::-1], partly=True)
    slots.carry_out({content: plan[content] for content in by_use}, by_use)

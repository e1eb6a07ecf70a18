"""Save the adapters of a manager to a folder, and restore them into a new manager.

    adapters.json    names, requests, commits, pins, order of use, versions and fingerprints
    weights/SHA-256  PEFT folder of one adapter without a request; the name is the digest of its files
    lock             locked by `save`

Files are replaced atomically and synced. Weights are written before the adapters.json that names them. Adapters with
requests are read from their own files again, and become a new version if the fingerprint of these files has changed.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
from flax import nnx

from jlora._compat import explicit_transfers
from jlora._disk import replace_file, sync
from jlora._typing import is_mapping
from jlora.adapters.checkpoint import open_checkpoint
from jlora.adapters.config_file import CONFIG_FILE, read_config
from jlora.adapters.resolve import WEIGHTS_FILE, AdapterFolder
from jlora.config import LoRARequest
from jlora.errors import (
    AdapterFormatError,
    AdapterMismatchError,
    AdapterNotFoundError,
    LoRAError,
    LoRAUsageError,
    NoFreeSlotError,
)
from jlora.layers.site import Site
from jlora.manager.host_cache import HostCache
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.manager.loading import page_locked, read, read_folder
from jlora.manager.loads import AT_ONCE
from jlora.manager.state import State
from jlora.slots.export import export_blocks

_log = logging.getLogger("jlora")

_FILE, _WEIGHTS, _FORMAT = "adapters.json", "weights", 5


@dataclass(frozen=True)
class _Entry:
    """One saved adapter.

    Attributes:
      name: name of the adapter.
      version: version of the weights.
      fingerprint: fingerprint of the files; None if the weights were not read from files.
      request: the request that loads the adapter again; None if it is saved in `weights`.
      commit: commit of the Hugging Face repository that the adapter was read from; None for other sources.
      weights: name of its folder in `weights`; None if there is a request.
      warnings: `LoadedAdapter.warnings` of an adapter without a request.
      pinned: True if the adapter is pinned.
      cached: True if the adapter is in the host cache, False if it was evicted.
    """

    name: str
    version: int
    fingerprint: str | None
    request: LoRARequest | None
    commit: str | None
    weights: str | None
    warnings: tuple[str, ...]
    pinned: bool
    cached: bool


@dataclass(frozen=True)
class _Snapshot:
    """The contents of adapters.json.

    Attributes:
      base: result of `base_digest`.
      layers: result of `layers_digest`.
      adapters: evicted adapters, then the adapters of the host cache, least recently used first.
      slots: names of the adapters in slots, least recently used first.
      removed: removed name -> its last version.
    """

    base: str
    layers: str
    adapters: tuple[_Entry, ...]
    slots: tuple[str, ...]
    removed: dict[str, int]


# --- saving -----------------------------------------------------------------------------------------------------------


def save(state: State, folder: Path, base: str, without: Collection[str]) -> None:
    """See `LoRAManager.save`. `base` is the `base_digest` of the model."""
    weights = folder / _WEIGHTS
    try:
        made = [one for one in (weights, *weights.parents) if not one.exists()]
        weights.mkdir(parents=True, exist_ok=True)
        for one in made:
            sync(one.parent)
        with open(folder / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released at the latest when the process ends
            with state.lock:
                taken, loaded = _take(state, base, without)
            files = {adapter.name: _save_adapter(adapter, state.slot_arrays.sites, weights) for adapter in loaded}
            adapters = [asdict(replace(entry, weights=files.get(entry.name))) for entry in taken.adapters]
            saved = {**vars(taken), "adapters": adapters}
            text = json.dumps({"format": _FORMAT, "sha256": _digest(saved), "saved": saved}, indent=1)
            replace_file(folder / _FILE, text.encode())
            with suppress(OSError):  # the next save retries the deletion
                for file in list(weights.iterdir()):
                    if file.name not in files.values() and re.fullmatch(r"[0-9a-f]{64}|part", file.name):
                        shutil.rmtree(file, ignore_errors=True)
    except OSError as error:
        raise LoRAError(f"{folder}: adapters could not be saved: {error}") from error


def _take(state: State, base: str, without: Collection[str]) -> tuple[_Snapshot, list[LoadedAdapter]]:
    """Return the current state, and its adapters without requests. Called under the state lock."""
    cache = state.cache
    cached = {name: adapter for name, adapter in cache.loaded.items() if name not in without}
    known = {name: request for name, request in cache.known.items() if name not in without}
    requests = {**known, **{name: adapter.request for name, adapter in cached.items()}}
    entries: list[_Entry] = []
    for name, request in requests.items():
        version, key = cache.last[name]
        commit = cached[name].commit if name in cached else cache.commits.get(name)
        warnings = cached[name].warnings if request is None else ()
        entries.append(_Entry(name, version, key, request, commit, None, warnings, cache.pinned(name), name in cached))
    in_slots = (adapter.name for adapter in state.policy.by_use() if cached.get(adapter.name) is adapter)
    removed = {name: version for name, (version, _) in cache.last.items() if name not in requests}
    taken = _Snapshot(base, layers_digest(state.slot_arrays.sites), tuple(entries), tuple(in_slots), removed)
    return taken, [adapter for adapter in cached.values() if adapter.request is None]


def _save_adapter(adapter: LoadedAdapter, sites: Sequence[Site], weights: Path) -> str:
    """Write an adapter as a PEFT folder in `weights`, and return the name of the folder, the digest of its files.

    Raises:
      LoRAError: PEFT's files cannot hold the adapter, or it would be read as another one.
      OSError: a file cannot be written.
    """
    part = weights / "part"
    shutil.rmtree(part, ignore_errors=True)
    where = f"adapter {adapter.name!r} cannot be saved"
    try:
        exported = export_blocks(adapter.packed, sites)
        exported.save_pretrained(part)
        config = read_config(part / CONFIG_FILE, adapter.name)
        with open_checkpoint(part / WEIGHTS_FILE, adapter.name, config) as opened:
            read = {*opened.modules, *opened.heads}
    except (LoRAError, TypeError, ValueError) as error:
        raise LoRAError(f"{where}: {error}") from error
    if changed := read ^ exported.layers.keys():
        raise LoRAError(f"{where}: PEFT's files cannot hold these names of modules: {sorted(changed)!r:.500}")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        sync(part / name)
    sync(part)
    digest = _folder_digest(part)
    target = weights / digest
    if not _holds(target, digest):
        shutil.rmtree(target, ignore_errors=True)  # it is damaged
        os.replace(part, target)
    sync(weights)
    return digest


def _holds(folder: Path, digest: str) -> bool:
    try:
        return _folder_digest(folder) == digest
    except OSError:
        return False


def _folder_digest(folder: Path) -> str:
    """Return the SHA-256 digest of an adapter's files."""
    found = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with open(folder / name, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


# --- digests ----------------------------------------------------------------------------------------------------------


def base_digest(model: nnx.Module, rules: Sequence[Any] = ()) -> str:
    """Return a SHA-256 digest that distinguishes base models.

    It covers the path, shape, dtype and all values of each parameter, and the rules for layer names
    (`SiteIndex.rules`). Values are summed on the devices that hold them. The digest does not depend on their sharding.

    Raises:
      LoRAError: a parameter was donated.
    """
    found = hashlib.sha256(json.dumps(rules, default=repr).encode())
    sums: list[jax.Array] = []
    parameters = cast("Any", nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, parameter in sorted(parameters):
        for array in jax.tree.leaves(parameter.get_value()):  # several in a quantized parameter of qwix
            if not isinstance(array, jax.Array):
                continue
            if array.is_deleted():
                raise LoRAError(
                    f"{'.'.join(map(str, path))}: the parameter was donated; give it back to the model first"
                )
            found.update(f"{path} {array.shape} {array.dtype} ".encode())
            sums.append(cast("jax.Array", cast("Any", _checksum)(array)))
    with explicit_transfers():
        for total in jax.device_get(sums):
            found.update(total.tobytes())
    return found.hexdigest()


@jax.jit
def _checksum(array: jax.Array) -> jax.Array:
    """Return uint32 [2], two sums over a hash of the bits and the position of each value.

    The order of additions modulo 2^32 does not matter, so the result is the same for any sharding.
    """
    bits = _bits(array)
    sums: list[jax.Array] = []
    for seed in range(2):
        position = jnp.zeros_like(bits)
        for axis, size in enumerate(bits.shape):
            index = jax.lax.iota(jnp.uint32, size) + jnp.uint32(0x9E3779B9 * (2 * axis + seed + 1) % 2**32)
            position += jax.lax.broadcast_in_dim(_mixed(index), bits.shape, (axis,))
        sums.append(jnp.sum(_mixed(bits ^ position), dtype=jnp.uint32))
    return jnp.stack(sums)


def _bits(array: jax.Array) -> jax.Array:
    """Return the bits of each value as uint32, with a last axis of two for values of 64 bits."""
    if jnp.iscomplexobj(array):
        return jnp.stack([_bits(array.real), _bits(array.imag)])
    if array.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = jax.lax.bitcast_convert_type(array, f"uint{jnp.finfo(array.dtype).bits}")
    return array.astype(jnp.uint32)


def _mixed(values: jax.Array) -> jax.Array:
    """Return a hash of each uint32, the last step of MurmurHash3, which maps different values to different ones."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        values = (values ^ (values >> shift)) * jnp.uint32(factor)
    return values ^ (values >> 16)


def layers_digest(sites: Sequence[Site]) -> str:
    """Return a SHA-256 digest of the sites. It differs between managers that pack the same files differently."""
    about = [
        (s.path, s.prefix, s.kind, s.spec.dtype, s.spec.in_features, s.spec.out_sizes, s.spec.entries, dict(s.parts))
        for s in sites
    ]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


# --- restoring --------------------------------------------------------------------------------------------------------


def restore(state: State, folder: Path, base: str) -> frozenset[str]:
    """See `LoRAManager.restore`. `base` is the `base_digest` of the model."""
    cache = state.cache
    with state.lock:
        _check_new(cache)
    saved = _read(folder)
    if saved.base != base:
        raise AdapterMismatchError(
            f"{folder}: was saved beside another base model: its parameters have other names, shapes, dtypes or "
            "values, or name_map or skip are others. Restore it beside that model, or begin with an empty folder"
        )
    same_layers = saved.layers == layers_digest(state.slot_arrays.sites)
    loaded = _load(state, folder, saved, same_layers)
    state.slot_arrays.compile()
    with state.lock.writing:
        _check_new(cache)
        try:
            _fill_cache(state, saved, loaded, same_layers)
            _fill_slots(state, saved, loaded)
            for entry in saved.adapters:
                if entry.name in loaded:
                    cache.loaded.move_to_end(entry.name)
        except BaseException:
            for adapter in loaded.values():
                state.policy.release(adapter)
            cache.clear()
            raise
        return frozenset(cache.last)


def _check_new(cache: HostCache) -> None:
    if cache.last or cache.known:
        raise LoRAUsageError("restore: this manager has had adapters already; restore into a new one")


def _read(folder: Path) -> _Snapshot:
    """Read adapters.json.

    Raises:
      AdapterNotFoundError: the file does not exist.
      AdapterFormatError: the file is damaged.
    """
    file = folder / _FILE
    try:
        found: Any = json.loads(file.read_bytes())
        if found["format"] != _FORMAT:
            raise AdapterFormatError(f"{file}: has format {found['format']!r:.40}; this release reads {_FORMAT}")
        if found["sha256"] != _digest(found["saved"]):
            raise AdapterFormatError(f"{file}: its SHA-256 is not the one that it names; it was changed since")
        saved: _Snapshot = _decoded(_Snapshot, found["saved"], f"{file}: saved")
        for i, entry in enumerate(saved.adapters):
            if entry.request is not None and entry.request.name != entry.name:
                raise AdapterFormatError(f"{file}: adapters[{i}]: its request has another name than {entry.name!r:.80}")
            if entry.request is None and not re.fullmatch(r"[0-9a-f]{64}", entry.weights or ""):
                raise AdapterFormatError(f"{file}: adapters[{i}]: field 'weights' must be a SHA-256 without a request")
        return saved
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterNotFoundError(f"{folder}: no manager has been saved there") from None
    except OSError as error:
        raise AdapterFormatError(f"{file}: cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:  # includes invalid UTF-8
        raise AdapterFormatError(f"{file}: is not a saved manager: {type(error).__name__}: {error!s:.200}") from error


def _decoded(kind: Any, value: Any, where: str) -> Any:
    """Return a JSON value as a dataclass, tuple, dict or scalar of the annotation `kind`.

    Raises:
      AdapterFormatError: The value is of another type, or an object does not have exactly the fields of the dataclass.
    """
    if get_origin(kind) is UnionType:
        kind = NoneType if value is None else get_args(kind)[0]
    if is_dataclass(kind):
        kinds = get_type_hints(kind)
        if not is_mapping(value) or {*value} != {*kinds}:
            names: Any = [*value] if is_mapping(value) else value
            raise AdapterFormatError(f"{where} must have the fields {[*kinds]}, found {names!r:.200}")
        return cast("Any", kind)(**{name: _decoded(kinds[name], one, f"{where}.{name}") for name, one in value.items()})
    expected: Any = {tuple: list}.get(get_origin(kind), get_origin(kind) or kind)
    if type(value) is not expected:  # a bool is an int for isinstance
        raise AdapterFormatError(f"{where} must be a JSON {expected.__name__}, found {value!r:.80}")
    values = cast("Any", value)
    if expected is list:
        return tuple(_decoded(get_args(kind)[0], one, f"{where}[{i}]") for i, one in enumerate(values))
    if expected is dict:
        return {name: _decoded(get_args(kind)[1], one, f"{where}[{name!r:.80}]") for name, one in values.items()}
    return values


def _read_weights(state: State, folder: Path, entry: _Entry, same_layers: bool) -> LoadedAdapter:
    """Read a saved adapter without a request, and pack it into the blocks of this manager."""
    path = folder / _WEIGHTS / (entry.weights or "")
    where = f"adapter {entry.name!r}: {path}"
    if not same_layers:
        raise AdapterMismatchError(
            f"{where}: it came from memory into a manager with other layers or slot dtypes, and no request loads it "
            "again; restore with the same LoRAConfig and packed_modules, or remove the adapter there and save again"
        )
    try:
        digest = _folder_digest(path)
    except OSError as error:
        raise AdapterFormatError(f"{where}: cannot be read: {error}") from error
    if digest != entry.weights:
        raise AdapterFormatError(f"{where}: its SHA-256 is not the one that it is named by; it was changed since")
    return LoadedAdapter(read_folder(state, AdapterFolder(path, entry.name)), warnings=entry.warnings)


def _load(state: State, folder: Path, saved: _Snapshot, same_layers: bool) -> dict[str, LoadedAdapter]:
    """Load adapters until the host cache is full: adapters without requests, pinned ones, then the most recently used.

    An adapter that cannot be loaded from its request is left out. Its error is raised when it is used.

    Returns:
      name -> adapter.

    Raises:
      NoFreeSlotError: there is no room for a pinned adapter or for an adapter without a request.
    """

    def read_one(entry: _Entry) -> LoadedAdapter | None:
        if entry.request is None:
            return _read_weights(state, folder, entry, same_layers)
        try:
            return read(state, entry.request, entry.commit, entry.fingerprint)
        except Exception as error:
            _log.warning("restore: %r is loaded when it is used: %.500r", entry.name, error)
            return None

    wanted = [entry for entry in reversed(saved.adapters) if entry.cached or entry.pinned]
    wanted.sort(key=lambda entry: (entry.request is not None, not entry.pinned))
    loaded: dict[str, LoadedAdapter] = {}
    nbytes = 0
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="jlora-restore") as threads:
        for start in range(0, len(wanted), AT_ONCE):
            some = wanted[start : start + AT_ONCE]
            for entry, adapter in zip(some, threads.map(read_one, some), strict=True):
                if adapter is None:
                    continue
                nbytes += adapter.nbytes
                if state.cache.has_room(len(loaded) + 1, nbytes):
                    blocks = page_locked(state, adapter.packed.blocks, loaded.values())
                    adapter.packed = adapter.packed.with_blocks(blocks)
                    loaded[entry.name] = adapter
                elif entry.pinned or entry.request is None:
                    raise NoFreeSlotError(
                        f"{folder}: the host cache has no room for adapter {entry.name!r}, which is pinned or came "
                        "from memory; raise max_cpu_loras or max_cpu_bytes"
                    )
                else:
                    return loaded
    return loaded


def _fill_cache(state: State, saved: _Snapshot, loaded: Mapping[str, LoadedAdapter], same_layers: bool) -> None:
    """Add the loaded adapters to the host cache, and the requests and versions of all names."""
    cache = state.cache
    # Versions served after the save, such as before a crash, are unknown, but all are below the clock.
    cache.floor = time.time_ns() // 1000
    cache.last.update({name: (version, None) for name, version in saved.removed.items()})
    for entry in saved.adapters:
        cache.last[entry.name] = (entry.version, entry.fingerprint if same_layers else None)
        if entry.pinned:
            cache.pin_when_loaded.add(entry.name)
        adapter = loaded.get(entry.name)
        if adapter is not None:
            state.put(adapter, version=entry.version if entry.request is None else None)
            state.counts["host_loads"] += 1
        elif entry.request is not None:
            cache.known[entry.name] = entry.request
            if entry.commit is not None:
                cache.commits[entry.name] = entry.commit


def _fill_slots(state: State, saved: _Snapshot, loaded: Mapping[str, LoadedAdapter]) -> None:
    """Write all pinned adapters into slots, then as many others as fit, from the most recently used one on."""
    policy = state.policy
    fit = [loaded[entry.name] for entry in saved.adapters if entry.pinned and entry.name in loaded]
    chosen = policy.choose(fit)
    for name in reversed(saved.slots):
        if name in loaded and loaded[name] not in fit:
            with contextlib.suppress(NoFreeSlotError):
                chosen = policy.choose([*fit, loaded[name]])
                fit.append(loaded[name])
    policy.carry_out(chosen, fit)


# --- files ------------------------------------------------------------------------------------------------------------


def _digest(saved: Any) -> str:
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()

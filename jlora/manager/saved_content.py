"""One content as a folder that Orbax writes and reads: its factors without padding, and what else it is.

The folder is named by the SHA-256 of what is in it, and appears whole or not at all. It says nothing of how this
manager cuts slots into blocks, so it can be read by one with other slots, another mesh or a larger `max_lora_rank`.
"""

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jlora.adapters import Adapter
from jlora.adapters.checkpoint import all_finite
from jlora.errors import AdapterFormatError, AdapterMismatchError, LoRAError
from jlora.layers.site import Site, SlotSpec
from jlora.manager.blocks import Chunk, Row, pack, unpack
from jlora.manager.fit import too_large_rank
from jlora.manager.packed_adapter import PackedAdapter, Placement
from jlora.manager.packing import rank_vector

_ABOUT = ("base_model_name", "use_rslora", "fan_in_fan_out", "task_type", "peft_fields", "unchecked", "content")
_ARRAY = "adapter"
_TRAILER = 8  # bytes: how many those of `about` before them are


def write_content(content: PackedAdapter, folder: Path, sound: Collection[str] = ()) -> str:
    """Write a content into `folder` under the name that its digest gives it, which is returned.

    What is there under that name stays, unless it was damaged since. That of `sound` is not looked at.

    Raises:
      OSError, LoRAError: it could not be written; what there is of it is not under that name.
    """
    sites = list(dict.fromkeys(placement.site for placement in content.placements))
    ranks = _ranks(content.placements)
    total = sum(sum(_sizes(site.spec, ranks[site, row])) for site, row in ranks)
    packed = np.empty(total, np.uint8)
    at = 0
    for site in sites:
        rows = [key for key in ranks if key[0] is site]
        factors = unpack(content.blocks, set(rows))
        for row in rows:
            rank = ranks[row]
            for half in (factors[row][0][:, :rank], factors[row][1][:rank]):
                packed[at : at + half.nbytes] = np.ascontiguousarray(half).reshape(-1).view(np.uint8)
                at += half.nbytes
    said = {
        "adapter": {} if content.about is None else {key: getattr(content.about, key) for key in _ABOUT},
        "sites": [description(site) for site in sites],
        "placements": [
            [p.module, sites.index(p.site), p.row, p.first, p.count, p.rank, p.alpha, p.scaling, p.shift]
            for p in content.placements
        ],
    }
    try:
        about = np.frombuffer(json.dumps(said, default=_plain).encode(), np.uint8)
    except (TypeError, ValueError) as error:
        raise LoRAError(f"adapter {content.name!r} cannot be saved: its fields are not JSON: {error}") from error
    # One array: of several, the others would still be on their way where one fails.
    whole = np.concatenate([packed, about, np.frombuffer(len(about).to_bytes(_TRAILER, "little"), np.uint8)])
    digest = hashlib.sha256(whole.data).hexdigest()
    if digest not in sound and (folder / digest).is_dir() and not _is_sound(folder / digest):
        shutil.rmtree(folder / digest)
    if not (folder / digest).is_dir():
        with _orbax(folder / digest, f"adapter {content.name!r} could not be saved") as checkpointer:
            checkpointer.save(folder / digest, {_ARRAY: whole})
        _sync_all(folder / digest)
    return digest


def read_content(
    name: str, folder: Path, sites: Sequence[Site], chunks: Sequence[Chunk], *, allow_nonfinite: bool
) -> PackedAdapter:
    """The content that a folder holds, as version 0 of a name, in the blocks of this manager.

    Raises:
      AdapterFormatError: the folder does not hold what its name promises.
      AdapterMismatchError: these sites cannot serve it.
    """
    where = f"adapter {name!r}: {folder}"
    whole = _read(where, folder)
    end = len(whole) - _TRAILER
    start = end - int.from_bytes(bytes(whole[end:]), "little")
    about, packed = whole[start:end], whole[:start]
    try:
        said = json.loads(bytes(about))
        own = _sites(where, said["sites"], sites)
        placements = tuple(_placement(where, own, fields) for fields in said["placements"])
        largest = max(placement.rank for placement in placements)
        ranks = _ranks(placements)
        factors: dict[Row, tuple[np.ndarray, np.ndarray]] = {}
        at = 0
        for row in (row for site in own for row in ranks if row[0] is site):
            spec, rank = row[0].spec, ranks[row]
            of_a, of_b = _sizes(spec, rank)
            a, b = (packed[at : at + of_a], packed[at + of_a : at + of_a + of_b])
            dtype = np.dtype(spec.dtype)
            factors[row] = (
                a.view(dtype).reshape(spec.slices, rank, spec.in_features),
                b.view(dtype).reshape(rank, spec.out_features),
            )
            at += of_a + of_b
        if at != len(packed):
            raise ValueError(f"{len(packed)} bytes of factors, and not {at}")
        fields: dict[str, Any] = said["adapter"]
        fields["unchecked"] = tuple(fields.get("unchecked", ()))
        adapter = Adapter(name=name, modules={}, **fields)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise AdapterFormatError(f"{where}: is not a saved adapter: {type(error).__name__}: {error}") from error
    if not allow_nonfinite and not all(all_finite(half) for pair in factors.values() for half in pair):
        raise AdapterFormatError(f"{where}: holds NaN or infinity (LoRAConfig.allow_nonfinite lets them through)")
    return PackedAdapter(
        name=name,
        version=0,
        placements=placements,
        blocks=pack(chunks, factors),
        ranks=rank_vector(tuple(sites), placements),
        rank=largest,
        about=adapter,
        digest=folder.name,
    )


def _read(where: str, folder: Path) -> np.ndarray:
    """The bytes that a folder holds. Raises AdapterFormatError where they are not those that it is named by."""
    with _orbax(folder, where, AdapterFormatError) as checkpointer:
        found = checkpointer.metadata(folder).item_metadata.tree
        if {key: (len(leaf.shape), leaf.dtype) for key, leaf in found.items()} != {_ARRAY: (1, np.uint8)}:
            raise AdapterFormatError(f"{where}: holds other arrays than a saved adapter's")
        if (size := found[_ARRAY].shape[0]) > _bytes_below(folder):  # a missing piece would be read as zeros
            raise AdapterFormatError(f"{where}: is cut off: {size} bytes are promised")
        whole: np.ndarray = checkpointer.restore(folder)[_ARRAY]
    if hashlib.sha256(whole.data).hexdigest() != folder.name:
        raise AdapterFormatError(f"{where}: its SHA-256 is not the one that it is named by; it was changed since")
    return whole


def _is_sound(folder: Path) -> bool:
    try:
        _read("", folder)
    except AdapterFormatError:
        return False
    return True


def _ranks(placements: Sequence[Placement]) -> dict[Row, int]:
    ranks: dict[Row, int] = {}
    for p in placements:
        ranks[p.site, p.row] = max(ranks.get((p.site, p.row), 0), p.rank)
    return ranks


def _sizes(spec: SlotSpec, rank: int) -> tuple[int, int]:
    """Bytes of A and B of a row."""
    size = np.dtype(spec.dtype).itemsize
    return spec.slices * rank * spec.in_features * size, rank * spec.out_features * size


def description(site: Site) -> dict[str, Any]:
    """What a site must be like to take the factors of this one, and to be meant by the same names."""
    spec = site.spec
    return {
        "path": site.path,
        "prefix": site.prefix,
        "kind": site.kind,
        "dtype": spec.dtype,
        "in_features": spec.in_features,
        "out_sizes": list(spec.out_sizes),
        "rows": list(spec.rows),
        "parts": {name: list(place) for name, place in site.parts.items()},
    }


def _sites(where: str, described: Sequence[Mapping[str, Any]], sites: Sequence[Site]) -> list[Site]:
    """The sites that are described. Raises AdapterMismatchError, which says what differs."""
    known = {(site.path, site.prefix): site for site in sites}
    found: list[Site] = []
    for one in described:
        site = known.get((one["path"], one["prefix"]))
        if site is None:
            raise AdapterMismatchError(f"{where}: it has weights for {one['path']!r}, which this manager does not wrap")
        for key, own in description(site).items():
            if one[key] != own:
                raise AdapterMismatchError(
                    f"{where}: {site.path!r} has {key} {own!r} here, and had {one[key]!r} where it was saved"
                )
        found.append(site)
    return found


def _placement(where: str, sites: Sequence[Site], fields: list[Any]) -> Placement:
    module, at, row, first, count, rank, alpha, scaling, shift = fields
    if not all(isinstance(n, int) and n >= 0 for n in (at, row, first, count, rank)) or not isinstance(shift, int):
        raise ValueError(f"a placement {fields!r:.200}")
    site = sites[cast("int", at)]
    spec = site.spec
    if not (isinstance(module, str) and row < math.prod(spec.rows) and rank and first + count <= spec.slices and count):
        raise ValueError(f"a placement {fields!r:.200}")
    if rank > spec.max_rank:
        raise AdapterMismatchError(f"{where}: {too_large_rank({module: rank}, spec.max_rank)}")
    return Placement(module, site, row, first, count, rank, float(alpha), float(scaling), shift)


def _plain(value: Any) -> Any:
    """JSON of what NumPy and others have in the place of numbers and dictionaries."""
    if isinstance(value, np.generic):
        return cast("Any", value).item()
    if isinstance(value, Mapping):
        return dict(cast("Mapping[str, Any]", value))
    raise TypeError(f"{type(value).__name__} {value!r:.100}")


@contextmanager
def _orbax(folder: Path, where: str, kind: type[LoRAError] = LoRAError) -> Generator[Any, None, None]:
    """A checkpointer for a folder of this process alone; whatever goes wrong in it is a LoRAError that says where."""
    # Here, because it is slow to import and most programs never save.
    import orbax.checkpoint as orbax  # pyright: ignore[reportMissingTypeStubs]

    ocp: Any = orbax
    own = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})
    # One file an array, as it is: weights do not compress.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, multiprocessing_options=alone)
    logger = logging.getLogger("absl")
    logger.addFilter(_is_news)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            yield checkpointer
    except LoRAError:
        raise
    except Exception as error:  # Orbax and TensorStore raise what they like
        reason = (str(error).strip().splitlines() or [""])[0]
        raise kind(f"{where}: {folder}: {type(error).__name__}: {reason:.500}") from error
    finally:
        logger.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "Skipping merge of OCDBT" not in record.getMessage()  # Orbax warns of it wherever OCDBT is off


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _sync_all(folder: Path) -> None:
    """See that a folder is on the disk, and what is in it."""
    for at, _, files in os.walk(folder, topdown=False):
        for file in files:
            sync(Path(at, file))
        sync(Path(at))
    sync(folder.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, and see that they are on the disk. Raises OSError."""
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in made:
        sync(one.parent)


def sync(path: Path) -> None:
    """See that a file, or what a folder lists, is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)

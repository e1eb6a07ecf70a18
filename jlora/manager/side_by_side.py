"""Modules whose factors lie evenly in memory, as those of a file's experts often do, are written as one."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jlora.adapters.lora import ExpertsLoRA, ModuleLoRA
from jlora.manager.names import Place

_TOGETHER = 1 << 24  # bytes of the modules that are written together: more is shared out among threads


class _Last(NamedTuple):
    """The last module of a group: its row, where its A and B begin, and how far from those of the one before."""

    group: list[str]
    row: int
    at: tuple[int, int]
    apart: tuple[int, int] | None


def evenly_spaced(modules: Mapping[str, ModuleLoRA | ExpertsLoRA], placed: Mapping[str, Place]) -> list[list[str]]:
    """Names of modules that are written together: those of rows that follow each other, of one rank and scaling, whose
    factors lie equally far apart in one array, as those of a file's experts often do. There may be tens of thousands.

    The groups come in the order in which the adapter has the first of each: nearly that of the file.
    """
    groups: list[list[str]] = []
    last: dict[Any, _Last] = {}  # of each group that may grow
    for name in sorted(placed, key=lambda name: placed[name][1]):  # stable
        module, (site, row, first, count) = modules[name], placed[name]
        if not isinstance(module, ModuleLoRA) or not site.spec.rows or module.a.base is None or module.b.base is None:
            groups.append([name])
            continue
        a, b = module.a, module.b
        alike = (a.shape, a.dtype, b.dtype, a.strides, b.strides, id(a.base), id(b.base))
        key = site, first, count, module.alpha, module.scaling, *alike
        at = _address(a), _address(b)
        before = last.get(key)
        apart = None if before is None else (at[0] - before.at[0], at[1] - before.at[1])
        if (
            before is not None
            and row == before.row + 1
            and before.apart in (None, apart)
            and len(before.group) < _TOGETHER // (a.nbytes + b.nbytes)
        ):
            group = before.group
        else:
            groups.append(group := [])
            apart = None
        group.append(name)
        last[key] = _Last(group, row, at, apart)
    order = {name: i for i, name in enumerate(placed)}
    return sorted(groups, key=lambda names: order[names[0]])


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def side_by_side(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Equal arrays that lie evenly in memory, as one with an axis more: no copy. It reads what is theirs alone, and
    only while they are there."""
    first, *others = arrays
    if not others:
        return first[None]
    apart = _address(others[0]) - _address(first)
    return np.lib.stride_tricks.as_strided(first, (len(arrays), *first.shape), (apart, *first.strides), writeable=False)

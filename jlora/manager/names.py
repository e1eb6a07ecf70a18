"""Checkpoint name -> the slices of the site that it fills, for one wrapped model."""

import functools
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from jlora.errors import LoRAUsageError
from jlora.layers.site import Site, SlotSpec
from jlora.layers.specs import own_attribute
from jlora.layers.wrap.select import Nearest
from jlora.layers.wrap.wrapped import WrappedModel

Place: TypeAlias = tuple[Site, int, int, int]  # site, row, first slice, slices
NameMap: TypeAlias = Mapping[str, str]
NameRules: TypeAlias = tuple[tuple[re.Pattern[str], str], ...]


def name_rules(name_map: NameMap | None) -> NameRules:
    """The rules of a name map, compiled. Raises `LoRAUsageError` for one that is no expression and replacement."""
    rules: list[tuple[re.Pattern[str], str]] = []
    for pattern, replacement in (name_map or {}).items():
        try:
            rule = re.compile(pattern)
            rule.sub(replacement, "")  # reads the replacement too
        except (re.error, IndexError, TypeError) as error:
            raise LoRAUsageError(
                f"name_map: {pattern!r} -> {replacement!r} is not a regular expression and its replacement: {error}"
            ) from None
        rules.append((rule, replacement))
    return tuple(rules)


class SiteIndex:
    """Checkpoint name -> site, for one wrapped model."""

    def __init__(self, wrapped: WrappedModel, rules: NameRules):
        self._wrapped = wrapped
        self._rules = rules
        self._sites: dict[tuple[str, str], list[Site]] = {}
        for site in wrapped.modules:
            for name in site.parts:
                self._sites.setdefault((site.kind, name), []).append(site)
        rows = {len(site.spec.rows) for site in wrapped.modules}
        self._indices = {False: sorted(rows), True: sorted({max(0, count - 1) for count in rows})}
        # Adapters come with tens of thousands of names, and the next one with the same.
        self._hits = functools.lru_cache(maxsize=1 << 15)(self._search)
        self._left_out = frozenset(wrapped.others)
        self._nearest: dict[tuple[str, bool], Nearest] = {}
        self._aliases: Mapping[str, str] = own_attribute(wrapped.model, "module_aliases", {})

    @property
    def said(self) -> list[Any]:
        """What the user and the model say of names; the rest follows from the sites."""
        rules = [(rule.pattern, rule.flags, replacement) for rule, replacement in self._rules]
        return [rules, [rule.pattern for rule in self._wrapped.skip], sorted(self._aliases.items())]

    def model_name(self, name: str) -> str:
        """The checkpoint name with the first rule of the name map that matches applied, and the model's own aliases."""
        for pattern, replacement in self._rules:
            if pattern.search(name):
                name = pattern.sub(replacement, name)
                break
        return ".".join(self._aliases.get(part, part) for part in name.split(".")) if self._aliases else name

    def skips(self, name: str) -> bool:
        """Whether the checkpoint's module `name` is one that this process lacks on purpose; it is counted then."""
        return self._wrapped.skips(name)

    def find(self, kind: str, name: str) -> Place | str:
        """What a checkpoint name fills, or why there is nothing.

        The name of weights of the kind "experts" is that of all experts; the row is then that of the first.
        """
        hits = self._hits(kind, name)
        if len(hits) == 1:
            site = hits[0][0]
            if (reason := self._wrapped.unserved.reasons.get(site.path)) is not None:
                return f"{site.path!r} takes no adapter yet: {reason}"
            return hits[0]
        if hits:
            places = ", ".join(repr(site.path) for site, *_ in hits)
            return f"it could belong to any of {places}; name one of them with name_map"
        return self._reason(kind, self.model_name(name))

    def _search(self, kind: str, name: str) -> list[Place]:
        """What a name can mean."""
        hits: list[Place] = []
        all_experts = kind == "experts"
        # A stack of layers is one module, and so are experts: checkpoint names have integer components that paths lack.
        for numbers, short in _without_numbers(self.model_name(name), self._indices[all_experts]):
            for site in self._sites.get(("linear" if all_experts else kind, short), ()):
                if (row := _row(site.spec, numbers, all_experts)) is not None:
                    hits.append((site, row, *site.parts[short]))
        return hits

    def _reason(self, kind: str, name: str) -> str:
        for alias in (name, f"{name}.attend", *(short for _, short in _without_numbers(name))):
            if alias in self._wrapped.unwrapped:
                return f"{name!r} is not wrapped: {self._wrapped.unwrapped[alias]}"
        other = "embedding" if kind == "linear" else "linear"
        if (other, name) in self._sites:
            return f"{name!r} takes {other} weights, and these are {kind} weights"
        for _, short in _without_numbers(name):
            if sites := self._sites.get(("linear" if kind == "experts" else kind, short)):
                return _misnumbered(name, sites[0].spec, kind == "experts")
        if (above := self._above(name)) is not None:
            return f"the model has no module {name!r}: {above!r} is not wrapped: {self._wrapped.unwrapped[above]}"
        return (
            f"the model has no module {name!r} (name_map can map the checkpoint's names to the model's paths, and skip "
            f"pass over parts that this process lacks){self._hint(kind, name)}"
        )

    def _above(self, name: str) -> str | None:
        """The layer that is not wrapped and that a name leads through, with or without its numbers."""
        parts = name[:500].split(".")
        for path in (parts, [part for part in parts if not _is_index(part)]):
            for end in range(len(path) - 1, 0, -1):
                if (above := ".".join(path[:end])) in self._left_out:
                    return above
        return None

    def _hint(self, kind: str, name: str) -> str:
        """The nearest of the names that are taken, and of the layers that are not wrapped."""
        of_experts = kind == "experts" or "experts" in name.split(".")
        for key in ((kind, True), (kind, False)) if of_experts else ((kind, False),):
            if key not in self._nearest:
                self._nearest[key] = Nearest(self._known(*key))
            if (near := self._nearest[key].find(name)) is None:
                continue
            reason = self._wrapped.unwrapped.get(near)
            return f"; the nearest is {near!r}" + (f", which is not wrapped: {reason}" if reason else "")
        return ""

    def _known(self, kind: str, of_experts: bool) -> Iterator[str]:
        """The names that weights of a kind can have; one expert's with its number. All, or those of experts alone."""
        for (other, name), sites in self._sites.items():
            if other != ("linear" if kind == "experts" else kind):
                continue
            if sites[0].spec.experts is None:
                if not of_experts and kind != "experts":
                    yield name
                continue
            parent, _, last = name.rpartition(".")
            yield name if kind == "experts" else f"{parent}.0.{last}"
        if not of_experts:
            yield from self._left_out


def _without_numbers(name: str, counts: Collection[int] = range(3)) -> Iterator[tuple[tuple[int, ...], str]]:
    """Some of a name's integer components, as many as `counts` says, and the name without them."""
    parts = name.split(".")
    places = [i for i, part in enumerate(parts) if _is_index(part)]
    for count in counts:
        for out in itertools.combinations(places, count):
            kept = parts.copy()
            for i in reversed(out):
                del kept[i]
            yield tuple([int(parts[i]) for i in out]), ".".join(kept)


def _row(spec: SlotSpec, numbers: tuple[int, ...], all_experts: bool) -> int | None:
    """The row that the numbers of a name mean; the first expert's for `all_experts`. None where they mean none."""
    if all_experts:
        if spec.experts is None:
            return None
        numbers = (*numbers, 0)
    if len(numbers) != len(spec.rows) or any(i >= size for i, size in zip(numbers, spec.rows, strict=True)):
        return None
    row = 0
    for i, size in zip(numbers, spec.rows, strict=True):
        row = row * size + i
    return row


def _misnumbered(name: str, spec: SlotSpec, all_experts: bool) -> str:
    if all_experts and spec.experts is None:
        return f"{name!r} has no experts, and these are weights of experts"
    sizes = [] if spec.layers is None else [f"a stack of {spec.layers} layers"]
    sizes += [] if spec.experts is None else [f"{spec.experts} experts"]
    indices = [] if spec.layers is None else ["layer"]
    indices += [] if spec.experts is None or all_experts else ["expert"]
    if not indices:
        return f"{name!r} names one of {spec.experts} experts, and these are weights of all of them"
    return f"{name!r} is {' of '.join(sizes)}, and the name has no {' and '.join(indices)} index below that"


def _is_index(part: str) -> bool:
    """Canonical ASCII decimals alone: "01" and other scripts' digits name no layer."""
    return part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0") and len(part) < 10

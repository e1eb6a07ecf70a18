"""Checkpoint name -> the slices of the site that it fills, for one wrapped model."""

import re
from collections.abc import Mapping
from typing import TypeAlias

from jlora.errors import LoRAUsageError
from jlora.layers.select import Nearest
from jlora.layers.site import Site
from jlora.layers.wrap import WrappedModel

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
        self._nearest: dict[str, Nearest] = {}

    def model_name(self, name: str) -> str:
        """The checkpoint name with the first rule of the name map that matches applied."""
        for pattern, replacement in self._rules:
            if pattern.search(name):
                return pattern.sub(replacement, name)
        return name

    def skips(self, name: str) -> bool:
        """Whether the checkpoint's module `name` is one that this process lacks on purpose; it is counted then."""
        return self._wrapped.skips(name)

    def find(self, kind: str, name: str) -> tuple[Site, int, int, int] | str:
        """(site, layer, first slice, slices) that a checkpoint name fills, or why there is none."""
        mapped = self.model_name(name)
        hits = [(site, 0, mapped) for site in self._sites.get((kind, mapped), ()) if site.spec.layers is None]
        # A stack of layers is one module, so its checkpoint names have one integer component more than its path.
        parts = mapped.split(".")
        for i, part in enumerate(parts):
            if _is_index(part):
                short = ".".join(parts[:i] + parts[i + 1 :])
                for site in self._sites.get((kind, short), ()):
                    if site.spec.layers is not None and int(part) < site.spec.layers:
                        hits.append((site, int(part), short))
        if len(hits) == 1:
            site, layer, key = hits[0]
            if site.inferred is not None and site.provisional:
                return f"{site.path!r} takes no adapter yet: {site.inferred.reason}"
            return site, layer, *site.parts[key]
        if hits:
            places = ", ".join(repr(site.path) for site, _, _ in hits)
            return f"it could belong to any of {places}; name one of them with name_map"
        return self._reason(kind, mapped)

    def _reason(self, kind: str, name: str) -> str:
        for alias in (name, f"{name}.attend"):
            if alias in self._wrapped.unwrapped:
                return f"{name!r} is not wrapped: {self._wrapped.unwrapped[alias]}"
        other = "embedding" if kind == "linear" else "linear"
        if (other, name) in self._sites:
            return f"{name!r} takes {other} weights, and these are {kind} weights"
        if stacked := self._sites.get((kind, name)):
            return f"{name!r} is a stack of {stacked[0].spec.layers} layers, and the name has no layer index below that"
        return (
            f"the model has no module {name!r} (name_map can map the checkpoint's names to the model's paths, and skip "
            f"pass over parts that this process lacks){self._hint(kind, name)}"
        )

    def _hint(self, kind: str, name: str) -> str:
        if kind not in self._nearest:
            self._nearest[kind] = Nearest(known for other, known in self._sites if other == kind)
        return self._nearest[kind].hint(name)


def _is_index(part: str) -> bool:
    """Canonical ASCII decimals alone: "01" and other scripts' digits name no layer."""
    return part.isascii() and part.isdecimal() and (part == "0" or part[0] != "0") and len(part) < 10

"""Lookup of checkpoint names in a wrapped model: the site, entry and slices that each name fills."""

import functools
import itertools
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from jlora.adapters.wrapped_names import readings
from jlora.config import LoRAConfig
from jlora.errors import AdapterMismatchError, LoRAUsageError, nearest
from jlora.layers.site import Site, SlotSpec
from jlora.layers.specs import own_attribute
from jlora.layers.wrap.wrapped import WrappedModel
from jlora.slots.packed import SiteSlices


def name_rules(name_map: Mapping[str, str] | None) -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return the compiled rules of a name map.

    Raises:
      LoRAUsageError: A rule is not a valid regular expression and replacement.
    """
    rules: list[tuple[re.Pattern[str], str]] = []
    for pattern, replacement in (name_map or {}).items():
        try:
            rule = re.compile(pattern)
            rule.sub(replacement, "")  # validates the replacement too
        except (re.error, IndexError, TypeError) as error:
            raise LoRAUsageError(
                f"name_map: {pattern!r} -> {replacement!r} is not a regular expression and its replacement: {error}"
            ) from None
        rules.append((rule, replacement))
    return tuple(rules)


# PEFT's task types whose adapters are trained on a model that may lack, or be, the causal model's trunk `model`.
_TRUNK_TASKS = ("FEATURE_EXTRACTION", "SEQ_CLS")
_TRUNK = "model."


class SiteIndex:
    """Index from checkpoint names to the sites of one wrapped model.

    Args:
      wrapped: The wrapped model.
      rules: The compiled rules of the name map.
      reading: "" to read names as they are, "add" to add the trunk's name `model.` in front of the names of LoRA
        modules that lack it, or "remove" to remove it.
    """

    def __init__(self, wrapped: WrappedModel, rules: Sequence[tuple[re.Pattern[str], str]], reading: str = ""):
        self._wrapped = wrapped
        self._rules = rules
        self._reading = reading
        self._sites: dict[tuple[str, str], list[Site]] = {}
        for site in wrapped.modules:
            for name in site.parts:
                self._sites.setdefault((site.kind, name), []).append(site)
        depths = {len(site.spec.entries) for site in wrapped.modules}
        self._indices = {False: sorted(depths), True: sorted({max(0, count - 1) for count in depths})}
        # Adapters have up to tens of thousands of names, and most adapters have the same ones.
        self._hits = functools.lru_cache(maxsize=1 << 15)(self._search)
        self._left_out = frozenset(wrapped.others)
        self._aliases: Mapping[str, str] = own_attribute(wrapped.model, "module_aliases", {})

    @property
    def rules(self) -> list[Any]:
        """Name rules, skip patterns and model aliases: everything that affects names besides the sites."""
        rules = [(rule.pattern, rule.flags, replacement) for rule, replacement in self._rules]
        return [rules, [rule.pattern for rule in self._wrapped.skip], sorted(self._aliases.items())]

    def model_name(self, name: str) -> str:
        """Return a checkpoint name after the first matching rule of the name map and the model's aliases."""
        for pattern, replacement in self._rules:
            if pattern.search(name):
                name = pattern.sub(replacement, name)
                break
        if not self._aliases:
            return name
        return ".".join(filter(None, (self._aliases.get(key, key) for key in name.split("."))))

    def read_as(self, where: str, names: Collection[tuple[str, str]], task_type: str | None) -> "SiteIndex":
        """Return the index that finds all names of an adapter.

        Names of adapters for feature extraction and sequence classification may have the trunk's name `model.` in front
        or lack it. They are read as they are, with it, or without it, whichever fits all of them. So are those of an
        adapter without a task type, if they do not fit as they are. Other adapters have one reading. If no reading
        fits, names are read as they are, and `find` returns the reasons.

        Args:
          where: Description of the adapter, for messages.
          names: (kind, name) of all modules of the adapter.
          task_type: PEFT's task type; None if absent.

        Raises:
          AdapterMismatchError: Several readings fit, and refer to different layers.
        """
        if task_type not in (*_TRUNK_TASKS, None):
            return self
        fitting: dict[Hashable, SiteIndex] = {}
        for index in (self, *self._other_readings):
            slices = tuple(tuple(index._hits(kind, name)) for kind, name in names if not index.skips(name))
            if all(slices):
                fitting.setdefault(slices, index)
                if task_type is None and index is self:
                    return self
        if len(fitting) > 1:
            name = next(name for _, name in names)
            raise AdapterMismatchError(
                f"{where}: task type {task_type or 'null'}: its names, such as {name!r}, fit the model both with and "
                f"without {_TRUNK!r} in front; say which with name_map"
            )
        return next(iter(fitting.values()), self)

    @functools.cached_property
    def _other_readings(self) -> tuple["SiteIndex", ...]:
        return tuple(SiteIndex(self._wrapped, self._rules, reading) for reading in ("add", "remove"))

    def _read(self, kind: str, name: str) -> str:
        """Return a checkpoint name as it is read here, in the names of the model."""
        if self._reading == "add" and kind != "head" and not name.startswith(_TRUNK):
            name = _TRUNK + name
        elif self._reading == "remove" and kind != "head":
            name = name.removeprefix(_TRUNK)
        return self.model_name(name)

    def skips(self, name: str) -> bool:
        """Return whether the module `name` matches a skip pattern, and count it if so."""
        return any(self._wrapped.skips(reading) for reading in readings(name))

    def find(self, kind: str, name: str, *, hint: bool = False) -> SiteSlices | str:
        """Return the slices that a checkpoint name fills, or a message why there are none.

        With `hint`, the message about a module that the model lacks has the nearest known name, at some milliseconds.

        For the kind "experts", the name is that of all experts, and the entry is that of the first one. Those of a
        saved head for which no room is configured are of its linear layer.
        """
        hits = self._hits(kind, name)
        if len(hits) == 1:
            site = hits[0][0]
            if (reason := self._wrapped.unserved.reasons.get(site.path)) is not None:
                return f"{site.path!r} takes no adapter yet: {reason}"
            return hits[0]
        if hits:
            paths = ", ".join(repr(site.path) for site, *_ in hits)
            return f"it could belong to any of {paths}; name one of them with name_map"
        if kind == "head" and (linear := self._replaceable(name)) is not None:
            return linear, 0, 0, 1
        return self._reason(kind, self._read(kind, readings(name)[-1]), hint)

    @property
    def config(self) -> LoRAConfig:
        """The configuration of the manager."""
        return self._wrapped.sites.config

    def _replaceable(self, name: str) -> Site | None:
        """Return the linear site that a saved head of this name could replace, or None."""
        name = self._read("head", name)
        sites = self._sites.get(("linear", name), ())
        return sites[0] if len(sites) == 1 and name not in self._wrapped.headless else None

    def _search(self, kind: str, name: str) -> list[SiteSlices]:
        """Return all slices that a checkpoint name can refer to. Prefixes of wrappers count if the model has them."""
        found = (self._matches(kind, reading) for reading in readings(name))
        return next((slices for slices in found if slices), list[SiteSlices]())

    def _matches(self, kind: str, name: str) -> list[SiteSlices]:
        hits: list[SiteSlices] = []
        all_experts = kind == "experts"
        # Stacked layers or experts are one module, so checkpoint names have integer keys that paths lack.
        for numbers, short in _without_numbers(self._read(kind, name), self._indices[all_experts]):
            for site in self._sites.get(("linear" if all_experts else kind, short), ()):
                if (entry := _entry(site.spec, numbers, all_experts)) is not None:
                    hits.append((site, entry, *site.parts[short]))
        return hits

    def _reason(self, kind: str, name: str, hint: bool) -> str:
        """Return the message why a name fills no slices."""
        if kind == "head":
            for _, short in _without_numbers(name):
                if short in self._wrapped.headless:
                    reason = self._wrapped.headless[short]
                    return f"a fully trained {name!r} (modules_to_save) cannot be served: {reason}"
            kind = "linear"
        reasons = self._wrapped.unwrapped
        for alias in (name, f"{name}.attend", *(short for _, short in _without_numbers(name))):
            if alias in reasons:
                return f"{name!r} is not wrapped: {reasons[alias]}"
        other = "embedding" if kind == "linear" else "linear"
        if (other, name) in self._sites:
            return f"{name!r} takes {other} weights, and these are {kind} weights"
        own = "linear" if kind == "experts" else kind
        for _, short in _without_numbers(name):
            if sites := self._sites.get((own, short)):
                return _misnumbered(name, sites[0].spec, kind == "experts")
        keys = name[:500].split(".")
        for path in (keys, [key for key in keys if not _is_index(key)]):
            for above in (".".join(path[:end]) for end in range(len(path) - 1, 0, -1)):
                if above in self._left_out:
                    return f"the model has no module {name!r}: {above!r} is not wrapped: {reasons[above]}"
        known: dict[str, str] = {}
        if hint:
            known |= dict.fromkeys((site for of, site in self._sites if of == own), "")
            known |= {path: f", which is not wrapped: {reasons[path]}" for path in self._wrapped.others}
        return (
            f"the model has no module {name!r} (name_map can map the checkpoint's names to the model's paths, and skip "
            "pass over a module that this process lacks, or that has no effect, such as keys and values which another "
            f"layer computes){nearest(name, known)}"
        )


def _without_numbers(name: str, counts: Collection[int] = range(3)) -> Iterator[tuple[tuple[int, ...], str]]:
    """Yield (removed integer keys, name without them) for each way to remove `counts` of them."""
    keys = name.split(".")
    at = [i for i, key in enumerate(keys) if _is_index(key)]
    for count in counts:
        for out in itertools.combinations(at, count):
            kept = keys.copy()
            for i in reversed(out):
                del kept[i]
            yield tuple([int(keys[i]) for i in out]), ".".join(kept)


def _entry(spec: SlotSpec, numbers: tuple[int, ...], all_experts: bool) -> int | None:
    """Return the entry that the indices of a name refer to, or None if they do not fit the spec.

    If `all_experts` is True, the name has no expert index, and the entry is that of the first expert.
    """
    if all_experts:
        if spec.experts is None:
            return None
        numbers = (*numbers, 0)
    if len(numbers) != len(spec.entries) or any(i >= size for i, size in zip(numbers, spec.entries, strict=True)):
        return None
    entry = 0
    for i, size in zip(numbers, spec.entries, strict=True):
        entry = entry * size + i
    return entry


def _misnumbered(name: str, spec: SlotSpec, all_experts: bool) -> str:
    """Return the message for a name whose indices do not fit the stack and experts of its site."""
    if all_experts and spec.experts is None:
        return f"{name!r} has no experts, and these are weights of experts"
    sizes = [] if spec.layers is None else [f"a stack of {spec.layers} layers"]
    sizes += [] if spec.experts is None else [f"{spec.experts} experts"]
    indices = [] if spec.layers is None else ["layer"]
    indices += [] if spec.experts is None or all_experts else ["expert"]
    if not indices:
        return f"{name!r} names one of {spec.experts} experts, and these are weights of all of them"
    return f"{name!r} is {' of '.join(sizes)}, and the name has no {' and '.join(indices)} index below that"


def _is_index(key: str) -> bool:
    """Return whether a key is a canonical ASCII decimal. "01" and digits of other scripts are not indices."""
    return key.isascii() and key.isdecimal() and (key == "0" or key[0] != "0") and len(key) < 10

"""The checked arguments of `prepare`, and `Mix`, which describes the adapters of one sequence."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np

from jlora.config import LoRAConfig, LoRARequest
from jlora.errors import LoRAUsageError
from jlora.layers.forward.batch_shape import BatchShape
from jlora.manager.leases import AdapterHandle
from jlora.manager.loaded_adapter import LoadedAdapter
from jlora.slots.casting import fits_float32

Name = str | LoRARequest | AdapterHandle


@dataclass(frozen=True, eq=False, init=False)
class Mix:
    """Adapters of one sequence with factors: the weighted sum of their deltas. The factor 0 adds nothing.

    k adapters need `LoRAConfig(max_adapters_per_sequence=k)`, and one with a factor needs 1. The sum equals PEFT's
    `add_weighted_adapter` with `combination_type="cat"`, where each adapter keeps its own scaling. The deltas are
    summed in float32, in the order of the weights.

    Attributes:
      terms: (name, request or handle of an adapter, its weight rounded to float32), for weights other than 0.

    Raises:
      LoRAUsageError: `weights` is not a mapping of adapters to finite numbers, or it is empty.

    Example:
      >>> batch = manager.prepare([jlora.Mix({"sql": 0.7, "style": 0.3}), jlora.Mix({"chat": 0.5}), None])
    """

    terms: tuple[tuple[Name, float], ...]

    def __init__(self, weights: Mapping[Name, float]):
        if not isinstance(weights, Mapping) or not weights:
            raise LoRAUsageError(f"Mix takes a mapping of adapters to weights, and at least one, got {weights!r:.100}")
        for name, weight in weights.items():
            _check_term(name, weight)
        rounded = {name: _rounded(weight) for name, weight in weights.items()}
        object.__setattr__(self, "terms", tuple((name, weight) for name, weight in rounded.items() if weight))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mix) and self.terms == other.terms

    def __hash__(self) -> int:
        return hash(self.terms)


def _rounded(factor: float) -> float:
    """Return the float32 that a batch holds for a factor, so that equal factors have equal keys."""
    return float(np.float32(factor))


def _check_term(adapter: object, scale: object) -> None:
    if not isinstance(adapter, Name):
        raise LoRAUsageError(f"Mix takes adapter names, LoRARequests and handles, got {adapter!r:.100}")
    number = isinstance(scale, int | float | np.integer | np.floating) and not isinstance(scale, bool)
    if not number or not fits_float32(cast("float", scale)):
        raise LoRAUsageError(f"Mix: the factor of {adapter!r:.100} must be a finite float32, got {scale!r:.100}")


Given = Name | Mix


def given(terms: Sequence[tuple[Name, float]]) -> Given | None:
    """Return the entry of `prepare` for a sequence with these adapters and factors; None for the base model."""
    if len(terms) == 1 and terms[0][1] == 1:
        return terms[0][0]
    return Mix(dict(terms)) if terms else None


@dataclass(frozen=True)
class BatchArguments:
    """The checked arguments of `prepare`.

    Attributes:
      names: the adapter of each sequence, or its adapters; None for the base model.
      shape: shape of the batch.
    """

    names: tuple[Given | None, ...]
    shape: BatchShape

    @cached_property
    def terms(self) -> dict[Given | None, tuple[tuple[Name, float], ...]]:
        """The adapters of each distinct entry of `names` and their factors."""
        return {
            name: () if name is None else name.terms if isinstance(name, Mix) else ((name, 1.0),)
            for name in dict.fromkeys(self.names)
        }

    @cached_property
    def adapters(self) -> tuple[Name, ...]:
        """The distinct adapters, in the order of their first sequences."""
        return tuple(dict.fromkeys(name for terms in self.terms.values() for name, _ in terms))

    @cached_property
    def key(self) -> Hashable:
        """A hashable key of the arguments. It refers to adapters, not to handles, so that handles can be collected."""
        # Most names are strings, and a `prepare` of a cached batch takes 30 us in all.
        return tuple([name if type(name) is str else _key(name) for name in self.names]), self.shape


def _key(name: Given | None) -> Hashable:
    # Another thread may have closed a handle. Its adapter is then None, which must not become the base model.
    if isinstance(name, AdapterHandle):
        return name.adapter or name
    if isinstance(name, Mix):
        return Mix, tuple((_key(adapter), scale) for adapter, scale in name.terms)
    return name


def checked_names(names: Sequence[Given | None], config: LoRAConfig) -> tuple[Given | None, ...]:
    """Return the `names` of `prepare`.

    Raises:
      LoRAUsageError: they have the wrong type, or `config` does not serve them.
    """
    # Sets have no order, generators cannot be read twice, and a string would be split into letters.
    if isinstance(names, str | bytes) or not isinstance(names, Sequence | np.ndarray):
        raise LoRAUsageError(f"prepare takes one name a sequence in a list, got {type(names).__name__} {names!r:.100}")
    for name in names:
        if name is None or type(name) is str:
            continue
        if isinstance(name, Mix):
            _check_served(name, config)
        elif not isinstance(name, Name):
            raise LoRAUsageError(f"prepare takes adapter names, LoRARequests, handles, Mix and None, got {name!r:.100}")
        if isinstance(name, AdapterHandle) and name.adapter is None:
            raise LoRAUsageError(f"prepare: {name!r} is closed")
    return tuple(names)


def _check_served(name: Mix, config: LoRAConfig) -> None:
    count, most = len(name.terms), config.max_adapters_per_sequence
    if count > (most or 1) or (most is None and any(scale != 1 for _, scale in name.terms)):
        raise LoRAUsageError(
            f"prepare: {name!r:.200} needs LoRAConfig(max_adapters_per_sequence={count}) or more, found {most}"
        )
    for given, _ in name.terms:
        if isinstance(given, AdapterHandle) and given.adapter is None:
            raise LoRAUsageError(f"prepare: {given!r} is closed")


def check_adapters(args: BatchArguments, loaded: Mapping[Name, LoadedAdapter]) -> None:
    """Check that the adapters of each sequence may be served together, and with their factors.

    Raises:
      LoRAUsageError: a DoRA adapter, or one with a saved head, has a factor or another adapter beside it; a sequence
        has aLoRA adapters with different invocation tokens; an item of a row group belongs to a sequence with one.
    """
    called: set[Given | None] = set()
    for given, terms in args.terms.items():
        tokens: dict[tuple[int, ...], str] = {}
        for name, scale in terms:
            if (adapter := loaded.get(name)) is None:
                continue
            if (len(terms) > 1 or scale != 1) and (kind := adapter.packed.served_alone) is not None:
                raise LoRAUsageError(
                    f"prepare: {adapter.name!r} is {kind}, which is served alone and with the factor 1, and "
                    f"the sequence takes {len(terms)} adapters with the factors {[scale for _, scale in terms]}"
                )
            if adapter.invocation_tokens:
                tokens[adapter.invocation_tokens] = adapter.name
        if len(tokens) > 1:
            names = ", ".join(map(repr, tokens.values()))
            raise LoRAUsageError(f"prepare: {names} of one Mix are aLoRA adapters with different invocation tokens")
        if tokens:
            called.add(given)
    for group, items in args.shape.items.items() if called else ():
        for item, owner in enumerate(items.owners):
            if owner is not None and args.names[owner] in called:
                raise LoRAUsageError(
                    f"prepare: item {item} of group {group!r} belongs to sequence {owner}, which has an aLoRA "
                    "adapter, and that one changes only rows after its invocation tokens; give None as the sequence of "
                    "that item"
                )

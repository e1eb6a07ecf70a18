"""Select the layers to wrap, their checkpoint names, and the tables of tied heads."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jlora._typing import is_mapping
from jlora.config import LoRAConfig
from jlora.errors import LoRAUsageError, nearest
from jlora.layers.site import is_named
from jlora.layers.specs import EmbedSpec, own_attribute
from jlora.layers.wrap.discover import ModuleInfo

# Either "qkv_proj": ("q_proj", "k_proj", "v_proj"), or a mapping from each name to the size or sizes of its slices.
PackedModules: TypeAlias = Mapping[str, Sequence[str] | Mapping[str, int | Sequence[int]]]

# Matched against the last component of a table's path. Checkpoints do not tie their logits to such tables.
_POSITIONS = re.compile(r"^wpe$|(^|_)(pos|rel)(_|$)|position|relative")
_KINDS = re.compile(r"(^|_)(type|segment)(_|$)|token_type")


def exclusion(config: LoRAConfig, names: Sequence[str]) -> str | None:
    """Return the reason why `exclude_modules` leaves out the layer with these names, or None if it does not."""
    excluded = [given for given in config.exclude_modules or () if is_named(given, names)]
    return f"it is among the configured exclude_modules ({', '.join(excluded)})" if excluded else None


def not_selected(config: LoRAConfig, names: Sequence[str]) -> str | None:
    """Return the reason why the configuration leaves out a layer with these names, or None if it selects the layer."""
    if config.target_modules is not None and matching(config.target_modules, names) is None:
        return exclusion(config, names) or "it is not among the configured target_modules"
    return exclusion(config, names)


def check_names(
    config: LoRAConfig,
    row_groups: Mapping[str, str],
    model_name: str,
    selected: Collection[str],
    refused: Sequence[tuple[Sequence[str], str]],
    known: Iterable[str],
) -> None:
    """Check that every configured name matches a layer of the model.

    Args:
      config: the configuration.
      row_groups: name of a module -> its row group.
      model_name: class of the model, for messages.
      selected: names of the wrapped and of the excluded layers.
      refused: names of a layer that cannot be wrapped, and the layer with the reason.
      known: names that a message may suggest.

    Raises:
      LoRAUsageError: a name matches no layer, or a target matches only layers that cannot be wrapped.
    """
    every = {*selected, *(name for names, _ in refused for name in names)}
    targets = [name for name in config.target_modules or () if matching([name], selected) is None]
    for name in targets:
        if (reason := next((why for names, why in refused if matching([name], names)), None)) is not None:
            raise LoRAUsageError(f"target_modules {[name]} match {reason}")
    ranks = () if isinstance(config.max_lora_rank, int) else config.max_lora_rank
    given = {
        "exclude_modules": config.exclude_modules or (),
        "max_lora_rank": [name for name in ranks if name != "*"],
        "row_groups": [name for name in row_groups if name != "*"],
    }
    missing = {label: [name for name in names if not is_named(name, every)] for label, names in given.items()}
    for label, names in {"target_modules": targets, **missing}.items():
        if names:
            raise LoRAUsageError(f"{label} {names} match no layer of {model_name}{nearest(names[0], known)}")


def matching(given: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the longest given name that is one of `names` or a suffix of one that begins after a dot, or None."""
    names = tuple(names)
    return max((g for g in given if any(f".{n}".endswith(f".{g}") for n in names)), key=len, default=None)


def longest(given: Collection[str], names: Iterable[str]) -> str | None:
    """Return the longest given name that is one of `names` or a part of one; else "*" if it is given, else None."""
    names = tuple(names)
    return max((each for each in given if is_named(each, names)), key=len, default="*" if "*" in given else None)


def largest_rank(config: LoRAConfig, names: Iterable[str]) -> int:
    """Return the largest rank of the slots of a layer. The longest matching name in `max_lora_rank` wins."""
    ranks = config.max_lora_rank
    return ranks if isinstance(ranks, int) else ranks[longest(ranks, names) or "*"]


@dataclass(frozen=True)
class Heads:
    """Embeddings that serve the logits of a tied head, each identified by the `id` of its module.

    Attributes:
      reasons: id -> the reason why `attend` of that embedding gets no site.
      lm_head: ids of the embeddings that also take weights named "lm_head". It is the one with the largest vocabulary.
        If several have that size, an adapter must select one by its path.
      known: ids of the embeddings that compute the logits according to the model, its configuration or the user.
    """

    reasons: Mapping[int, str]
    lm_head: frozenset[int]
    known: frozenset[int]


def tied_heads(model: object, modules: Sequence[ModuleInfo], targets: Collection[str]) -> Heads:
    """Find the tied heads among the modules of a model, of which `targets` may name some."""
    heads = {id(f.module) for f in modules if any(alias.rpartition(".")[2] == "lm_head" for alias in f.aliases)}
    reasons: dict[int, str] = {}
    known: set[int] = set()
    vocabularies: dict[int, int] = {}
    for f in modules:
        if not isinstance(f.spec, EmbedSpec):
            continue
        if f.spec.attend is None:
            if "attend" in f.reasons:
                reasons[id(f.module)] = f.reasons["attend"]
        elif not heads <= {id(f.module)}:
            reasons[id(f.module)] = "the model's lm_head is a layer of its own"
        elif is_position_table(f.aliases) or any(_KINDS.search(_last(alias)) for alias in f.aliases):
            reasons[id(f.module)] = "by its name it is a table of positions, which is no tied head"
        else:
            vocabularies[id(f.module)] = f.spec.vocab
            if _says_tied(f.module) or matching(targets, [f"{alias}.attend" for alias in f.aliases]):
                known.add(id(f.module))
    largest = max(vocabularies.values(), default=0)
    lm_head = frozenset(key for key, vocab in vocabularies.items() if vocab == largest)
    if len(lm_head) == 1 and (heads or _says_tied(model) or matching(targets, ["lm_head"])):
        known |= lm_head
    return Heads(reasons, lm_head, frozenset(known))


def is_position_table(aliases: Iterable[str]) -> bool:
    """Return True if the name of a table marks it as a table of positions."""
    return any(_POSITIONS.search(_last(alias)) for alias in aliases)


def _last(alias: str) -> str:
    return alias.rpartition(".")[2].lower()


def _says_tied(model: object) -> bool:
    """Return True if the model or table, or its configuration, declares that logits are computed with an embedding."""
    config: object = own_attribute(model, "config")
    declared = config.get("tie_word_embeddings") if is_mapping(config) else own_attribute(config, "tie_word_embeddings")
    return own_attribute(model, "tie_word_embeddings") is True or declared is True


def packed_modules_of(model: Any, given: PackedModules | None) -> PackedModules:
    """Return the given packed modules, else the model's own `packed_modules` attribute, else {}."""
    return own_attribute(model, "packed_modules", {}) if given is None else given


def part_names(aliases: tuple[str, ...], packed: PackedModules) -> tuple[str, ...]:
    """Return the checkpoint names of the parts of a merged layer, one set for each of its aliases."""
    entry = _entry(aliases, packed)
    return tuple(_sibling(alias, name) for alias in aliases for name in entry or ())


def slices(
    layer: Any, aliases: tuple[str, ...], out_features: int, packed: PackedModules
) -> tuple[tuple[int, ...], dict[str, tuple[int, int]]]:
    """Return the output slices of a layer, and the checkpoint names that fill them.

    Returns:
      The sizes of the slices, and a mapping from each name to (first slice, number of slices).

    Raises:
      LoRAUsageError: the sizes of the parts do not add up to the layer's outputs.
    """
    sizes: tuple[int, ...] = tuple(own_attribute(layer, "output_sizes", None) or (out_features,))
    names: dict[str, tuple[int, int]] = {}
    entry = _entry(aliases, packed)
    if isinstance(entry, Mapping):
        covered = {name: (size,) if isinstance(size, int) else tuple(size) for name, size in entry.items()}
        sizes = tuple(size for own in covered.values() for size in own)
    elif entry is not None:
        if len(sizes) == 1 and out_features % len(entry) == 0:
            sizes = (out_features // len(entry),) * len(entry)
        if len(sizes) != len(entry):
            raise LoRAUsageError(
                f"packed_modules names {len(entry)} parts {tuple(entry)}, but the layer has output_sizes {sizes}; give "
                "the sizes: {name: size, ...}"
            )
        covered = {name: (size,) for name, size in zip(entry, sizes, strict=True)}
    else:
        covered = {}
    if sum(sizes) != out_features:
        raise LoRAUsageError(f"output slices {sizes} sum to {sum(sizes)}, but the layer has {out_features} outputs")
    for alias in aliases:
        names[alias] = (0, len(sizes))
        start = 0
        for name, own in covered.items():
            names[_sibling(alias, name)] = (start, len(own))
            start += len(own)
    return sizes, names


def _entry(aliases: tuple[str, ...], packed: PackedModules) -> Sequence[str] | Mapping[str, int | Sequence[int]] | None:
    """Return the entry of `packed_modules` for a layer, matched by the end of its paths as `target_modules` are."""
    found = matching(packed, aliases)
    return None if found is None else packed[found]


def _sibling(alias: str, name: str) -> str:
    parent = alias.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name

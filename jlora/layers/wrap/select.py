"""Which of the layers found are wrapped, which checkpoint names each one takes, and which table is a tied head."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jlora._typing import is_mapping
from jlora.config import LoRAConfig
from jlora.errors import LoRAUsageError
from jlora.layers.site import is_named
from jlora.layers.specs import EmbedSpec, own_attribute
from jlora.layers.wrap.discover import Found

# "qkv_proj": ("q_proj", "k_proj", "v_proj"), or name -> size(s) of the slice(s) it covers.
PackedModules: TypeAlias = Mapping[str, Sequence[str] | Mapping[str, int | Sequence[int]]]

# By the last component of a table's path. No checkpoint ties its logits to one of these.
_POSITIONS = re.compile(r"^wpe$|(^|_)(pos|rel)(_|$)|position|relative")
_KINDS = re.compile(r"(^|_)(type|segment)(_|$)|token_type")


class Selection:
    """`target_modules`, `exclude_modules` and `max_lora_rank` of a config, and which of their names match something."""

    def __init__(self, config: LoRAConfig):
        self.targets, self.excluded = config.target_modules, config.exclude_modules or ()
        self._ranks = config.max_lora_rank
        self._matched: set[str] = set()
        self._refused: dict[str, str] = {}  # target -> why a layer that it names cannot be wrapped
        self._known: list[str] = []

    def why_not(self, names: Sequence[str]) -> str | None:
        """None if the layer of these names is to be wrapped, else the reason."""
        self._known += names
        self.max_rank(names)
        if (reason := self.exclusion(names)) is not None:
            self.leave_out(names)
            return reason
        if self.targets is not None and not self.hits(names):
            return "it is not among the configured target_modules"
        return None

    def exclusion(self, names: Sequence[str]) -> str | None:
        """Why the layer of these names is left out, whatever it is; None if no exclusion names it."""
        if excluded := self._exclusions(names):
            return f"it is among the configured exclude_modules ({', '.join(excluded)})"
        return None

    def leave_out(self, names: Sequence[str]) -> None:
        """Take note of every configured name that means a layer which is left out."""
        self._matched.update(self._exclusions(names))
        self._matched.update(self.hits(names))
        self.max_rank(names)

    def serve(self, names: Iterable[str]) -> None:
        """Take note of the targets that mean a layer which is wrapped."""
        self._matched.update(self.hits(names))

    def refuse(self, names: Sequence[str], what: str, reason: str) -> None:
        """Take note of the names that mean a layer which cannot be wrapped; `what` says which it is."""
        self.max_rank(names)
        for target in self.hits(names):
            self._refused.setdefault(target, f"match {what}, but {reason}")

    def _exclusions(self, names: Sequence[str]) -> list[str]:
        """The exclusions that name this layer, or a module that it is in."""
        return [e for e in self.excluded if is_named(e, names)]

    def hits(self, names: Iterable[str]) -> list[str]:
        """The targets that name this layer, by a full path or a suffix that starts at a dot."""
        return [t for t in self.targets or () if any(n == t or n.endswith("." + t) for n in names)]

    def max_rank(self, names: Iterable[str]) -> int:
        """The rank of the slots of the layer of these names: the longest name of `max_lora_rank` decides."""
        if isinstance(self._ranks, int):
            return self._ranks
        names = tuple(names)
        hits = [given for given in self._ranks if is_named(given, names)]
        self._matched.update(hits)
        return self._ranks[max(hits, key=len, default="*")]

    def finish(self, model_name: str) -> None:
        """Raises for names that matched nothing, and for targets that matched nothing which can be wrapped."""
        ranks = () if isinstance(self._ranks, int) else tuple(name for name in self._ranks if name != "*")
        given = ("target_modules", self.targets or ()), ("exclude_modules", self.excluded), ("max_lora_rank", ranks)
        for label, wanted in given:
            missing = [name for name in wanted if name not in self._matched]
            for name in missing:
                if label == "target_modules" and name in self._refused:
                    raise LoRAUsageError(f"{label} {[name]} {self._refused[name]}")
            if missing:
                near = Nearest(self._known).hint(missing[0])
                raise LoRAUsageError(f"{label} {missing} match no layer of {model_name}{near}")


@dataclass(frozen=True)
class Heads:
    """Which embeddings serve the logits of a tied head, each by the id of its module.

    Attributes:
      reasons: those whose `attend` gets no site -> why.
      lm_head: those that also take weights under the name "lm_head": the one of the largest vocabulary, or several of
        the same size, among which an adapter must then choose by path.
      known: those of which the model, its configuration or the user says that the logits are computed with them.
    """

    reasons: Mapping[int, str]
    lm_head: frozenset[int]
    known: frozenset[int]


def tied_heads(model: object, found: Sequence[Found], selection: Selection) -> Heads:
    """Find the tied heads among the modules of a model."""
    heads = {id(f.module) for f in found if any(alias.rpartition(".")[2] == "lm_head" for alias in f.aliases)}
    reasons: dict[int, str] = {}
    known: set[int] = set()
    vocabularies: dict[int, int] = {}
    for f in found:
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
            if _says_tied(f.module) or selection.hits([f"{alias}.attend" for alias in f.aliases]):
                known.add(id(f.module))
    largest = max(vocabularies.values(), default=0)
    lm_head = frozenset(key for key, vocab in vocabularies.items() if vocab == largest)
    if len(lm_head) == 1 and (heads or _says_tied(model) or selection.hits(["lm_head"])):
        known |= lm_head
    return Heads(reasons, lm_head, frozenset(known))


def is_position_table(aliases: Iterable[str]) -> bool:
    """Whether a table is one of positions, by its name."""
    return any(_POSITIONS.search(_last(alias)) for alias in aliases)


def _last(alias: str) -> str:
    return alias.rpartition(".")[2].lower()


def _says_tied(model: object) -> bool:
    """Whether a model or a table, or its configuration, says that logits are computed with an embedding."""
    config: object = own_attribute(model, "config")
    said = config.get("tie_word_embeddings") if is_mapping(config) else own_attribute(config, "tie_word_embeddings")
    return own_attribute(model, "tie_word_embeddings") is True or said is True


def packed_modules_of(model: Any, given: PackedModules | None) -> PackedModules:
    return own_attribute(model, "packed_modules", {}) if given is None else given


def part_names(aliases: tuple[str, ...], packed: PackedModules) -> tuple[str, ...]:
    """The checkpoint names of the parts of a merged layer, below the parents of all its aliases."""
    entry = _entry(aliases, packed)
    return tuple(_sibling(alias, name) for alias in aliases for name in entry or ())


def slices(
    layer: Any, aliases: tuple[str, ...], out_features: int, packed: PackedModules
) -> tuple[tuple[int, ...], dict[str, tuple[int, int]]]:
    """Output slices of a layer, and the checkpoint names that fill them.

    Raises:
      LoRAUsageError: parts that do not add up to the layer.
    """
    sizes: tuple[int, ...] = tuple(own_attribute(layer, "output_sizes", None) or (out_features,))
    names: dict[str, tuple[int, int]] = {}
    entry = _entry(aliases, packed)
    if isinstance(entry, Mapping):
        covered = {name: (size,) if isinstance(size, int) else tuple(size) for name, size in entry.items()}
        sizes = tuple(size for group in covered.values() for size in group)
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
        for name, group in covered.items():
            names[_sibling(alias, name)] = (start, len(group))
            start += len(group)
    return sizes, names


def _entry(aliases: tuple[str, ...], packed: PackedModules) -> Sequence[str] | Mapping[str, int | Sequence[int]] | None:
    """What `packed_modules` says of a layer, by the last component of its paths."""
    return next((packed[last] for last in (alias.rpartition(".")[2] for alias in aliases) if last in packed), None)


def _sibling(alias: str, name: str) -> str:
    parent = alias.rpartition(".")[0]
    return f"{parent}.{name}" if parent else name


class Nearest:
    """Hints for messages about names that a model does not have.

    Names that differ in their numbers alone are compared once, so 10,000 layers of one model are as cheap as 20, and
    only so many different questions are answered: an adapter may bring any number of unknown names.
    """

    _MOST = 1000

    def __init__(self, known: Iterable[str]):
        self._alike: dict[str, dict[tuple[str, ...], str]] = {}  # pattern -> numbers -> name
        for name in known:
            self._alike.setdefault(_numbers_out(name), {})[tuple(_NUMBERS.findall(name))] = name
        self._answers: dict[str, str | None] = {}

    def hint(self, name: str) -> str:
        """ "; the nearest is 'layers.3.q_proj'", or nothing where none is near."""
        found = self.find(name)
        return "" if found is None else f"; the nearest is {found!r}"

    def find(self, name: str) -> str | None:
        """The known name that is nearest, with the numbers of `name` where there is one; None where none is near."""
        pattern = _numbers_out(name[:500])
        if pattern not in self._answers:
            if len(self._answers) == self._MOST:
                return None
            close = difflib.get_close_matches(pattern, list(self._alike)[: self._MOST], n=1, cutoff=0.4)
            self._answers[pattern] = close[0] if close else None
        found = self._answers[pattern]
        if found is None:
            return None
        alike = self._alike[found]
        return alike.get(tuple(_NUMBERS.findall(name)), next(iter(alike.values())))


_NUMBERS = re.compile(r"[0-9]+")


def _numbers_out(name: str) -> str:
    return _NUMBERS.sub("#", name)

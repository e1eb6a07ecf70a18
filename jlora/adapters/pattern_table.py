"""`rank_pattern` and `alpha_pattern`: which of many keys, in the order of the file, is the first to match a module.

PEFT asks for each module and key in turn whether `re.match(rf"(.*\\.)?({key})$", module)`. Here keys that are names, a
leading `^`, escapes, and dots that strictly speaking mean "any character" among them, are looked up by the dotted
suffixes of the module. The others are regular expressions, joined by the hundred: a module asks one joined expression
whether any of them matches before it looks for the first that does.
"""

import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import re2

from jlora.adapters.messages import shown
from jlora.adapters.patterns import (
    ASCII_ONLY,
    SINGLE,
    check_syntax,
    compile_pattern,
    options,
    refuse_beyond_ascii,
    translated,
)
from jlora.errors import AdapterMismatchError, LoRAError

T = TypeVar("T")

# Letters, digits, dots: what nearly every file has, told apart at a stroke.
_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*")
# ^? name $?; a name is of characters that stand for themselves, dots, and escaped punctuation.
_LITERALS = r"[^\0\\^$.*+?{}()\[\]|]*+"
_NAME = re.compile(rf"(\^?)({_LITERALS}(?:(?:\.|\\[^\w\x80-\U0010ffff]|\\_){_LITERALS})*+)\$?", re.ASCII)
_ESCAPED = re.compile(r"\\(.)|\.", re.DOTALL)
_ANY = "\0"  # stands for an unescaped dot while escapes are taken away; a key that holds it itself is no name

_JOINED_KEYS, _JOINED_LENGTH = 256, 16_384
_JOINED = options(1 << 22)
# A hostile file can still ask for very many expressions times very many names.
_MAX_SECONDS = 20.0


@dataclass(frozen=True)
class _Name:
    """A key that is a name, without its escapes; `dots` are the places of those dots that match anything."""

    place: int
    text: str
    dots: tuple[int, ...]
    whole: bool  # began with ^


@dataclass(frozen=True)
class _Joined:
    """Some hundred regular expressions, by their places in the file, and one that matches where any of them does."""

    places: list[int]
    regexp: Any
    ascii_only: str  # the first of them that is served for ASCII names only


@dataclass(frozen=True)
class PatternTable(Generic[T]):
    """Keys and values in file order, sorted for lookup; `pattern_table` makes it.

    Attributes:
      keys, values: as in the file.
      where: adapter, file and field, for messages.
      plain: places of keys of letters, digits and dots.
      names: other keys that are names.
      joined: the regular expressions, in file order.
    """

    keys: tuple[str, ...]
    values: tuple[T, ...]
    where: str = field(compare=False)
    plain: Sequence[int] = field(compare=False, repr=False)
    names: tuple[_Name, ...] = field(compare=False, repr=False)
    joined: tuple[_Joined, ...] = field(compare=False, repr=False)

    def lookup(self, modules: Iterable[str], default: T) -> dict[str, T]:
        """module -> the value of the first key that matches, or `default`.

        Raises:
          AdapterMismatchError: an expression whose classes are not served for one of the names, or too much to match.
        """
        if len(self.plain) == len(self.keys) and not any("." in key for key in self.keys):
            # Most files: keys without a dot can match the last part of a name alone.
            of_last = dict(zip(self.keys, self.values, strict=True))
            return {module: of_last.get(module.rpartition(".")[2], default) for module in modules}
        until = time.monotonic() + _MAX_SECONDS
        values = [*self.values, default]
        suffixes = {module: _suffixes(module) for module in modules}
        index = _Index.of(self, {suffix for found in suffixes.values() for suffix in found})
        return {module: values[self._first(found, index, until)] for module, found in suffixes.items()}

    def _first(self, suffixes: list[str], index: "_Index", until: float) -> int:
        """Place of the first key that matches the first of `suffixes`, the module; the number of keys if none does."""
        module = suffixes[0]
        best = min([*index.whole.places(module), *(p for s in suffixes for p in index.any.places(s)), len(self.keys)])
        _in_time(until, self.where)
        for joined in self.joined:
            if joined.places[0] > best:
                break
            _in_time(until, self.where)
            refuse_beyond_ascii(joined.ascii_only, module, self.where)
            if joined.regexp.fullmatch(module) is not None:
                return min(best, self._first_of(joined.places, module))
        return best

    def _first_of(self, places: list[int], module: str) -> int:
        """The first of joined expressions that matches, where one does, by halving."""
        while len(places) > 1:
            half = len(places) // 2
            regexp = re2.compile(_join(self.keys[place] for place in places[:half]), _JOINED)
            places = places[:half] if regexp.fullmatch(module) is not None else places[half:]
        return places[0]


@dataclass
class _Places:
    """Keys that are names, by the text that they match."""

    literal: dict[str, int] = field(default_factory=dict[str, int])
    # length -> places of the wildcards -> text, with dots there -> place of the first such key
    wild: dict[int, dict[tuple[int, ...], dict[str, int]]] = field(
        default_factory=dict[int, dict[tuple[int, ...], dict[str, int]]]
    )

    def add(self, text: str, dots: tuple[int, ...], place: int) -> None:
        keys = self.wild.setdefault(len(text), {}).setdefault(dots, {}) if dots else self.literal
        keys[text] = min(place, keys.get(text, place))

    def places(self, text: str) -> Iterator[int]:
        """Places of the keys that match the whole text."""
        if (place := self.literal.get(text)) is not None:
            yield place
        for dots, keys in self.wild.get(len(text), {}).items():
            characters = list(text)
            for at in dots:
                characters[at] = "."
            if (place := keys.get("".join(characters))) is not None:
                yield place


@dataclass
class _Index:
    """The names of a table that could match any of some texts: a whole module (`whole`), or also a suffix (`any`)."""

    whole: _Places
    any: _Places

    @classmethod
    def of(cls, table: PatternTable[Any], texts: Collection[str]) -> "_Index":
        found = cls(_Places(), _Places())
        # A key's dots match the dots of a text and perhaps more. With as many of them the two must be equal.
        fewest: dict[int, int] = {}
        for text in texts:
            fewest[len(text)] = min(text.count("."), fewest.get(len(text), len(text)))
        keys, literal = table.keys, found.any.literal
        for place in table.plain:
            key = keys[place]
            if key in texts:
                literal[key] = place
            if (dots := fewest.get(len(key))) is not None and key.count(".") > dots:
                found.any.add(key, _dots(key), place)
        for name in table.names:
            if len(name.text) in fewest:
                (found.whole if name.whole else found.any).add(name.text, name.dots, name.place)
        return found


def pattern_table(entries: Mapping[str, T], where: str) -> PatternTable[T]:
    """Sorts the keys of a `rank_pattern` or `alpha_pattern` for lookup.

    Args:
      entries: key -> value, in the order of the file.
      where: adapter, file and field, for messages.

    Raises:
      AdapterFormatError: a key that is no regular expression.
      AdapterMismatchError: one that is not served (`compile_pattern`).
    """
    keys, names, expressions = tuple(entries), list[_Name](), list[int]()
    plain: Sequence[int] = range(len(keys))
    if not _PLAIN.fullmatch("".join(keys)):
        plain = [place for place in plain if _PLAIN.fullmatch(keys[place])]
        for place in sorted(set(range(len(keys))).difference(plain)):
            if (found := _NAME.fullmatch(keys[place])) is not None:
                names.append(_name(place, found[2], found[1] == "^"))
            else:
                expressions.append(place)
    joined, until = list[_Joined](), time.monotonic() + _MAX_SECONDS
    for places in _batches(expressions, keys):
        _in_time(until, where)
        joined += _compiled(places, keys, where)
    return PatternTable(keys, tuple(entries.values()), where, plain, tuple(names), tuple(joined))


def _in_time(until: float, where: str) -> None:
    if time.monotonic() > until:
        raise AdapterMismatchError(f"{where}: its keys take over {_MAX_SECONDS:.0f} s to match; write plain names")


def _suffixes(module: str) -> list[str]:
    """The module's name, and what follows each of its dots."""
    return [module, *(module[at + 1 :] for at in _dots(module))]


def _dots(text: str) -> tuple[int, ...]:
    return tuple(at for at, character in enumerate(text) if character == ".")


def _name(place: int, text: str, whole: bool) -> _Name:
    if "\\" not in text:
        return _Name(place, text, _dots(text), whole)
    text = _ESCAPED.sub(lambda found: found[1] or _ANY, text)
    return _Name(place, text.replace(_ANY, "."), tuple(i for i, c in enumerate(text) if c == _ANY), whole)


def _batches(places: list[int], keys: tuple[str, ...]) -> Iterator[list[int]]:
    batch, length = list[int](), 0
    for place in places:
        if batch and (len(batch) == _JOINED_KEYS or length + len(keys[place]) > _JOINED_LENGTH):
            yield batch
            batch, length = [], 0
        batch.append(place)
        length += len(keys[place])
    if batch:
        yield batch


def _compiled(places: list[int], keys: tuple[str, ...], where: str) -> Iterator[_Joined]:
    """The places joined, once each of them is known to be an expression by itself."""
    parsed = re2.Set.FullMatchSet(SINGLE)
    for place in places:
        key = keys[place]
        try:
            check_syntax(key, where)
            parsed.Add(translated(key))  # parses and no more: a fifth of what compiling each would take
        except (re2.error, LoRAError):
            compile_pattern(key, f"{where}, key {shown(key)}")  # raises the same, with the reason and the place
            raise
    yield from _halved(places, keys, where)


def _halved(places: list[int], keys: tuple[str, ...], where: str) -> Iterator[_Joined]:
    """The places joined, in halves where all of them are too large."""
    if len(places) == 1:
        compile_pattern(keys[places[0]], f"{where}, key {shown(keys[places[0]])}")
    try:
        regexp = re2.compile(_join(keys[place] for place in places), _JOINED)
    except re2.error:
        half = len(places) // 2
        yield from _halved(places[:half], keys, where)
        yield from _halved(places[half:], keys, where)
    else:
        yield _Joined(places, regexp, next((keys[p] for p in places if ASCII_ONLY.search(keys[p])), ""))


def _join(keys: Iterable[str]) -> str:
    return rf"(?:.*\.)?(?:{'|'.join(map(translated, keys))})"

"""`rank_pattern` and `alpha_pattern`: the value of the first key, in the order of the file, that matches a module.

PEFT tries `re.match(rf"(.*\\.)?({key})$", module)` for each module and key in turn. Here keys that are names are looked
up in dicts by the dotted suffixes of the module. Other regular expressions are tried one by one, and limited in number.
"""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jlora.adapters.escaping import shown
from jlora.adapters.patterns import Pattern, compile_pattern
from jlora.errors import AdapterMismatchError

T = TypeVar("T")

# ^? name $?; a name is of characters that stand for themselves, dots, and escaped punctuation.
_NAME = re.compile(r"(\^?)((?:[^\\^$.*+?{}()\[\]|]|\.|\\[^\w\x80-\U0010ffff]|\\_)*+)\$?", re.ASCII)
_DOT = re.compile(r"\.")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

_MAX_EXPRESSIONS = 1024
# A hostile file can still bring slow expressions and very many modules.
_MAX_SECONDS = 20.0

# (whether it began with ^, length) -> places of the dots that match any character -> name -> index of its first key
_Names = dict[tuple[bool, int], dict[tuple[int, ...], dict[str, int]]]


@dataclass(frozen=True)
class PatternTable(Generic[T]):
    """Keys and values in file order, sorted for lookup; `pattern_table` makes it.

    Attributes:
      keys, values: as in the file.
      where: adapter, file and field, for messages.
      names: the keys that are names, without their escapes.
      expressions: index and regular expression of the other keys, in file order.
    """

    keys: tuple[str, ...]
    values: tuple[T, ...]
    where: str = field(compare=False)
    names: _Names = field(compare=False, repr=False)
    expressions: tuple[tuple[int, Pattern], ...] = field(compare=False, repr=False)

    def lookup(self, modules: Iterable[str], default: T) -> dict[str, T]:
        """Return, for each module, the value of the first key that matches, or `default`.

        Raises:
          AdapterMismatchError: an expression whose classes are not served for one of the names, or too much to match.
        """
        if not self.keys:
            return dict.fromkeys(modules, default)
        until = time.monotonic() + _MAX_SECONDS
        values = [*self.values, default]
        return {module: values[self._first(module, until)] for module in modules}

    def _first(self, module: str, until: float) -> int:
        """Return the index of the first key that matches, or the number of keys."""
        _in_time(until, self.where)
        texts = [(True, module), (False, module), *((False, module[at + 1 :]) for at in _dots(module))]
        found = [self._places(whole, text) for whole, text in texts if (whole, len(text)) in self.names]
        first = min(itertools.chain(*found), default=len(self.keys))
        for place, expression in self.expressions:
            if place > first:
                break
            if expression.fullmatch(module):
                return place
        return first

    def _places(self, whole: bool, text: str) -> Iterator[int]:
        """Yield the indices of the names that match the text: of those that began with ^, or of the others."""
        for dots, names in self.names[whole, len(text)].items():
            if not dots:
                found = names.get(text)
            elif len(dots) > text.count("."):  # else it matches if it is equal
                characters = list(text)
                for at in dots:
                    characters[at] = "."
                found = names.get("".join(characters))
            else:
                continue
            if found is not None:
                yield found


def pattern_table(entries: Mapping[str, T], where: str) -> PatternTable[T]:
    """Sort the keys of a `rank_pattern` or `alpha_pattern` for lookup.

    Args:
      entries: key -> value, in the order of the file.
      where: adapter, file and field, for messages.

    Raises:
      AdapterFormatError: a key that is no regular expression.
      AdapterMismatchError: one that is not served (`compile_pattern`); over 1,024 that are not names.
    """
    names, expressions = _Names(), list[tuple[int, Pattern]]()
    until = time.monotonic() + _MAX_SECONDS
    for place, key in enumerate(entries):
        if (name := _name(key)) is not None:
            whole, text, dots = name
            for wild in {(), dots}:
                names.setdefault((whole, len(text)), {}).setdefault(wild, {}).setdefault(text, place)
            continue
        if len(expressions) == _MAX_EXPRESSIONS:
            raise AdapterMismatchError(
                f"{where}, key {shown(key)}: over {_MAX_EXPRESSIONS} keys are regular expressions; write plain names "
                "such as 'layers.0.mlp.up_proj', of which there may be any number"
            )
        _in_time(until, where)
        expressions.append((place, compile_pattern(key, f"{where}, key {shown(key)}", suffix=True)))
    return PatternTable(tuple(entries), tuple(entries.values()), where, names, tuple(expressions))


def _in_time(until: float, where: str) -> None:
    if time.monotonic() > until:
        raise AdapterMismatchError(f"{where}: its keys take over {_MAX_SECONDS:.0f} s to match; write plain names")


def _name(key: str) -> tuple[bool, str, tuple[int, ...]] | None:
    """Return of a key that is a name: whether it begins with ^, the name, and its dots if they match any character.

    Where some dots are escaped and others are not, the key counts as an expression.
    """
    if (found := _NAME.fullmatch(key)) is None:
        return None
    text = found[2]
    wild = "." in _ESCAPED.sub("", text)
    if wild and r"\." in text:
        return None
    text = _ESCAPED.sub(r"\1", text)
    return found[1] == "^", text, _dots(text) if wild else ()


def _dots(text: str) -> tuple[int, ...]:
    return tuple(found.start() for found in _DOT.finditer(text))

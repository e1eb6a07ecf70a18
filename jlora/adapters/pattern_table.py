r"""Look up `rank_pattern` and `alpha_pattern`, where the first key in file order that matches a module decides.

PEFT tries `re.match(rf"(.*\.)?({key})$", module)` for each module and each key. Here, keys that are plain names are
looked up in dicts by the module's dotted suffixes. Other regular expressions are limited in number and tried in order.
"""

import itertools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from jlora.adapters.patterns import Pattern, compile_pattern
from jlora.adapters.wrapped_names import readings
from jlora.errors import AdapterMismatchError, shown

T = TypeVar("T")

# ^? name $?, where a name consists of literal characters, dots and escaped punctuation.
_NAME = re.compile(r"(\^?)((?:[^\\^$.*+?{}()\[\]|]|\.|\\[^\w\x80-\U0010ffff]|\\_)*+)\$?", re.ASCII)
_DOT = re.compile(r"\.")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)

_MAX_EXPRESSIONS = 1024
# Bounds the time of hostile files with slow expressions and many modules.
_MAX_SECONDS = 20.0

# (starts with ^, length) -> positions of dots that match any character -> name -> index of its first key
_Names = dict[tuple[bool, int], dict[tuple[int, ...], dict[str, int]]]


@dataclass(frozen=True)
class PatternTable(Generic[T]):
    """The keys and values of a pattern field, indexed for lookup. Made by `pattern_table`.

    Attributes:
      keys, values: Keys and values in file order.
      where: Adapter, file and field, for messages.
      names: Keys that are plain names, without escapes.
      expressions: Index and regular expression of each other key, in file order.
    """

    keys: tuple[str, ...]
    values: tuple[T, ...]
    where: str = field(compare=False)
    names: _Names = field(compare=False, repr=False)
    expressions: tuple[tuple[int, Pattern], ...] = field(compare=False, repr=False)

    def lookup(self, modules: Iterable[str], default: T) -> dict[str, T]:
        """Return module name -> value of the first key that matches, or `default`.

        A name with prefixes of wrappers that no key matches is looked up without them.

        Raises:
          AdapterMismatchError: An expression with character classes meets a name beyond ASCII, or matching takes over
            20 s.
        """
        values = [*self.values, default]
        return {module: values[place] for module, place in self._deciding(modules).items()}

    def unused(self, modules: Iterable[str]) -> list[str]:
        """Return the keys that decide the value of none of the modules. Raises as `lookup` does."""
        used = set(self._deciding(modules).values())
        return [key for place, key in enumerate(self.keys) if place not in used]

    def _deciding(self, modules: Iterable[str]) -> dict[str, int]:
        """Return module name -> index of the first key that matches, or the number of keys."""
        none = len(self.keys)
        if not none:
            return dict.fromkeys(modules, none)
        until = time.monotonic() + _MAX_SECONDS
        return {
            module: next((at for each in readings(module) if (at := self._first(each, until)) < none), none)
            for module in modules
        }

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
        """Yield the indices of the names that match the text; `whole` selects the names that start with ^."""
        for dots, names in self.names[whole, len(text)].items():
            if not dots:
                found = names.get(text)
            elif len(dots) > text.count("."):  # otherwise only an equal name matches, and () has found it
                characters = list(text)
                for at in dots:
                    characters[at] = "."
                found = names.get("".join(characters))
            else:
                continue
            if found is not None:
                yield found


def pattern_table(entries: Mapping[str, T], where: str) -> PatternTable[T]:
    """Index the keys of a `rank_pattern` or `alpha_pattern` for lookup.

    Args:
      entries: Key -> value, in file order.
      where: Adapter, file and field, for messages.

    Raises:
      AdapterFormatError: A key is not a regular expression.
      AdapterMismatchError: `compile_pattern` does not serve a key, or more than 1,024 keys are not plain names.
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
    """Return (starts with ^, name, positions of dots that match any character) for a key that is a plain name.

    A key with both escaped and unescaped dots counts as an expression, for which the result is None.
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

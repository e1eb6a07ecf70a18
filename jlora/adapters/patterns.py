"""Regular expressions from adapter files, matched in polynomial time.

PEFT's `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern` may hold regular expressions. They come
from a file somebody else wrote, and Python's backtracking matcher can be made to run for ever by a twenty-character
pattern. Only a yes or no is needed here, so a pattern is matched by the set of positions it can reach, which never
backtracks. Greedy and lazy repeats then mean the same; look-behind, back-references and flags are refused.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from re import _constants as sre  # pyright: ignore[reportAttributeAccessIssue]
from re import _parser  # pyright: ignore[reportAttributeAccessIssue]
from typing import Any

from jlora.errors import AdapterFormatError, AdapterMismatchError

_MAX_LENGTH = 8192

_CATEGORIES = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


@dataclass(frozen=True)
class Pattern:
    """A parsed regular expression; `compile_pattern` makes it."""

    source: str
    tree: Any = field(compare=False, repr=False)

    def fullmatch(self, name: str) -> bool:
        """Whether `re.fullmatch(source, name)` would find a match."""
        return len(name) in _reach(self.tree, name, {0})


def compile_pattern(source: str, where: str) -> Pattern:
    """Parses a regular expression.

    Args:
      source: the expression, in the syntax of Python's `re`.
      where: adapter, file and field, for the message of an error.

    Raises:
      AdapterFormatError: not a regular expression.
      AdapterMismatchError: one that is too long, or uses look-behind, back-references, flags or atomic groups.
    """
    if len(source) > _MAX_LENGTH:
        raise AdapterMismatchError(f"{where}: regular expression of {len(source)} characters; at most {_MAX_LENGTH}")
    try:
        tree = _parser.parse(source)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        raise AdapterFormatError(f"{where}: {source!r} is not a regular expression: {error}") from error
    if tree.state.flags != re.UNICODE or not _supported(tree):
        raise AdapterMismatchError(
            f"{where}: {source!r} uses a flag, look-behind, back-reference or atomic group, which are not served; "
            "write it with plain groups, alternatives and repeats"
        )
    return Pattern(source, tree)


def _children(op, argument) -> list:
    if op is sre.BRANCH:
        return argument[1]
    if op is sre.SUBPATTERN:
        return [argument[3]]
    if op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        return [argument[2]]
    if op in (sre.ASSERT, sre.ASSERT_NOT):
        return [argument[1]]
    return []


def _supported(tree) -> bool:
    for op, argument in tree:
        if op in (sre.GROUPREF, sre.GROUPREF_EXISTS, sre.ATOMIC_GROUP, sre.POSSESSIVE_REPEAT):
            return False
        if op in (sre.ASSERT, sre.ASSERT_NOT) and argument[0] < 0:
            return False
        if op is sre.SUBPATTERN and (argument[1] or argument[2]):
            return False
        if not all(_supported(child) for child in _children(op, argument)):
            return False
    return True


def _reach(tree, text: str, starts: set[int]) -> set[int]:
    """Positions at which a match of `tree` can end, having begun at any of `starts`."""
    for op, argument in tree:
        if not starts:
            break
        if op is sre.BRANCH:
            starts = set().union(*(_reach(branch, text, starts) for branch in argument[1]))
        elif op is sre.SUBPATTERN:
            starts = _reach(argument[3], text, starts)
        elif op in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, body = argument
            starts = _repeat(low, high, body, text, starts)
        elif op in (sre.ASSERT, sre.ASSERT_NOT):
            starts = {i for i in starts if bool(_reach(argument[1], text, {i})) == (op is sre.ASSERT)}
        elif op is sre.AT:
            starts = {i for i in starts if _at(argument, text, i)}
        else:
            starts = {i + 1 for i in starts if i < len(text) and _takes(op, argument, text[i])}
    return starts


def _repeat(low: int, high: int, body, text: str, starts: set[int]) -> set[int]:
    # A body that consumes empties `starts` within len(text) rounds; one that may not consume only adds positions and
    # so comes to rest. Either way the counts of the pattern, which may be huge, do not bound the work: the text does.
    for _ in range(low):
        after = _reach(body, text, starts)
        if after == starts:
            break
        starts = after
    reached = frontier = starts
    for _ in range(high - low):
        frontier = _reach(body, text, frontier) - reached
        if not frontier:
            break
        reached = reached | frontier
    return reached


def _word(text: str, i: int) -> bool:
    return 0 <= i < len(text) and _CATEGORIES[sre.CATEGORY_WORD](text[i])


def _at(where, text: str, i: int) -> bool:
    if where in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
        return i == 0
    if where is sre.AT_END:
        return i == len(text) or text[i:] == "\n"
    if where is sre.AT_END_STRING:
        return i == len(text)
    return (_word(text, i - 1) != _word(text, i)) == (where is sre.AT_BOUNDARY)


def _takes(op, argument, char: str) -> bool:
    if op is sre.LITERAL:
        return ord(char) == argument
    if op is sre.NOT_LITERAL:
        return ord(char) != argument
    if op is sre.ANY:
        return char != "\n"
    if op is sre.IN:
        return _in_class(argument, char)
    return False  # sre.FAILURE, an empty class


def _in_class(items: Iterable, char: str) -> bool:
    negate = found = False
    for op, argument in items:
        if op is sre.NEGATE:
            negate = True
        elif op is sre.LITERAL:
            found |= ord(char) == argument
        elif op is sre.RANGE:
            found |= argument[0] <= ord(char) <= argument[1]
        elif op is sre.CATEGORY:
            found |= _CATEGORIES[argument](char)
    return found != negate

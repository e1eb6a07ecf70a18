"""Regular expressions from adapter files, matched in time linear in expression and name.

PEFT's `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern` may hold regular expressions. They come
from a file somebody else wrote, and Python's backtracking matcher can be made to run for ever by a twenty-character
expression. RE2 cannot. What it is given is written in the part of Python's syntax that means the same to both, so an
expression that is taken here matches as `re.fullmatch` does; look-around, back-references and flags are not taken.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import re2

from jlora.adapters.messages import printable, shown
from jlora.errors import AdapterFormatError, AdapterMismatchError

_MAX_LENGTH = 8192

# One item of a set, [...]. Pairs such as && and || are left out: Python announces that they will change their meaning.
_CHAR = r"(?:[^\\\[\]\-&|~]|\|(?!\|)|\\[^\w\x80-\U0010ffff]|\\[nrtfva_]|\\x[0-9A-Fa-f]{2})"
_ITEM = rf"(?:{_CHAR}(?:-{_CHAR})?|\\[dDwWsS])"
_COUNT = r"(?:0|[1-9][0-9]{0,3})"
# Possessive repeats: no way of reading an expression is tried twice.
_SERVED = re.compile(
    rf"""(?ax)(?:
      (?: [^\\^$*+?{{()\[|]++                     # characters, the dot among them
        | \\[^\w\x80-\U0010ffff] | \\[nrtfva_] | \\x[0-9A-Fa-f]{{2}} | \\[dDwWsS]
        | \[\^?(?:-{_ITEM}*+|{_ITEM}++)-?\]
        | \)
      ) (?:(?:[*+?]|\{{{_COUNT}(?:,{_COUNT}?)?\}})\??)?
      | [\^$] | \\[bBAZ]                          # what takes no character cannot be repeated
      | \((?!\?) | \(\?: | \(\?P<[A-Za-z_]\w*>
      | \|
    )*+"""
)
_END = re.compile(r"\\(.)", re.DOTALL)
_GROUP_NAME = re.compile(r"\(\?P<(\w+)>", re.ASCII)
# These differ between the two beyond ASCII.
ASCII_ONLY = re.compile(r"\\[dDwWsSbB]")

# RE2's words for what is no regular expression to anybody. A set with "[:" in it is one to Python.
_MALFORMED = ("missing )", "unexpected )", "trailing \\", "no argument for repetition operator")
_MALFORMED_SET = ("missing ]", "invalid character class range")


def options(max_mem: int) -> re2.Options:
    """RE2 without capturing, silent, within `max_mem` bytes for each expression (program and matching)."""
    found = re2.Options()
    found.log_errors = False
    found.never_capture = True
    found.max_mem = max_mem
    return found


# A program of about 10,000 instructions.
SINGLE = options(1 << 18)


@dataclass(frozen=True)
class Pattern:
    """A regular expression that names are matched against; `compile_pattern` makes it.

    Attributes:
      source: as it was written.
      where: adapter, file and field, for messages.
    """

    source: str
    where: str
    regexp: Any = field(compare=False, repr=False)

    def fullmatch(self, name: str) -> bool:
        """Whether `re.fullmatch(source, name)` would find a match, for a name without line ends.

        Raises:
          AdapterMismatchError: a name beyond ASCII, and an expression whose classes differ there.
        """
        refuse_beyond_ascii(self.source, name, self.where)
        return self.regexp.fullmatch(name) is not None


def compile_pattern(source: str, where: str) -> Pattern:
    """Checks a regular expression.

    Args:
      source: the expression, in the syntax of Python's `re`.
      where: adapter, file and field, for the message of an error.

    Raises:
      AdapterFormatError: not a regular expression.
      AdapterMismatchError: one that is too long or too large, or uses look-around, back-references, flags, or atomic
        groups, or syntax that RE2 reads otherwise.
    """
    check_syntax(source, where)
    try:
        return Pattern(source, where, re2.compile(translated(source), SINGLE))
    except re2.error as error:
        raise refusal(source, where, error) from None


def check_syntax(source: str, where: str) -> None:
    """Refuses what RE2 would read otherwise than Python; RE2 itself refuses the rest, such as unbalanced groups."""
    if len(source) > _MAX_LENGTH:
        raise AdapterMismatchError(f"{where}: regular expression of {len(source)} characters; at most {_MAX_LENGTH}")
    if not _SERVED.fullmatch(source):
        try:
            re2.compile(source, SINGLE)
        except re2.error as error:
            raise refusal(source, where, error) from None
        raise refusal(source, where, None)
    names = _GROUP_NAME.findall(source) if "(?P<" in source else ()
    if len(set(names)) != len(names):
        raise AdapterFormatError(f"{where}: {shown(source)} is not a regular expression: a group's name is used twice")


def translated(source: str) -> str:
    """A checked expression in RE2's syntax."""
    return _END.sub(lambda found: r"\z" if found[1] == "Z" else found[0], source) if r"\Z" in source else source


def refuse_beyond_ascii(source: str, name: str, where: str) -> None:
    if not name.isascii() and ASCII_ONLY.search(source):
        raise AdapterMismatchError(
            f"{where}: {shown(source)} uses classes such as \\d or \\w, which are served for ASCII names only; module "
            f"{shown(name)} has other letters. Write the characters out"
        )


def refusal(source: str, where: str, error: Exception | None) -> AdapterFormatError | AdapterMismatchError:
    """What to raise for an expression that RE2 did not take (`error`), or took in another sense than Python (None)."""
    words = "" if error is None or not error.args else error.args[0]
    words = words.decode("utf-8", "replace") if isinstance(words, bytes) else str(words)
    what = f"{where}: {shown(source)}"
    if words.startswith(_MALFORMED) or (words.startswith(_MALFORMED_SET) and "[:" not in source):
        return AdapterFormatError(f"{what} is not a regular expression: {printable(words)[:200]}")
    counts = re.search(r"\{(\d+),(\d+)\}", words) if words.startswith("invalid repetition size") else None
    if counts is not None and int(counts[1]) > int(counts[2]):
        return AdapterFormatError(f"{what} is not a regular expression: {printable(words)[:200]}")
    if words.startswith(("pattern too large", "invalid repetition size")):
        return AdapterMismatchError(f"{what} is too large a regular expression; write fewer or smaller repeats")
    cause = f" ({printable(words)[:200]})" if words else ""
    return AdapterMismatchError(
        f"{what} uses a flag, look-around, back-reference, atomic group or other syntax that is not served{cause}; "
        "write it with plain groups, alternatives and repeats"
    )

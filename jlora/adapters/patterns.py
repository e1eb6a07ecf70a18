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

from jlora.adapters.escaping import printable, shown
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
_ASCII_ONLY = re.compile(r"\\[dDwWsSbB]")

# RE2's words for what is no regular expression to anybody. A set with "[:" in it is one to Python.
_MALFORMED = ("missing )", "unexpected )", "trailing \\", "no argument for repetition operator")
_MALFORMED_SET = ("missing ]", "invalid character class range")


def _options(max_mem: int) -> re2.Options:
    """RE2 without capturing, silent, within `max_mem` bytes for each expression (program and matching)."""
    found = re2.Options()
    found.log_errors = False
    found.never_capture = True
    found.max_mem = max_mem
    return found


# A program of about 10,000 instructions; and with room for a prefix.
_OPTIONS, _PREFIXED = _options(1 << 18), _options(1 << 19)


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
        """Return whether `re.fullmatch(source, name)` would find a match, for a name without line ends.

        Raises:
          AdapterMismatchError: a name beyond ASCII, and an expression whose classes differ there.
        """
        if not name.isascii() and _ASCII_ONLY.search(self.source):
            raise AdapterMismatchError(
                f"{self.where}: {shown(self.source)} uses classes such as \\d or \\w, which are served for ASCII names "
                f"only; module {shown(name)} has other letters. Write the characters out"
            )
        return self.regexp.fullmatch(name) is not None


def compile_pattern(source: str, where: str, *, suffix: bool = False) -> Pattern:
    """Check and compile a regular expression.

    Args:
      source: the expression, in the syntax of Python's `re`.
      where: adapter, file and field, for the message of an error.
      suffix: match what `re.fullmatch(rf"(.*\\.)?({source})", name)` matches, as PEFT does with keys.

    Raises:
      AdapterFormatError: not a regular expression.
      AdapterMismatchError: one that is too long or too large, or uses look-around, back-references, flags, or atomic
        groups, or syntax that RE2 reads otherwise.
    """
    if len(source) > _MAX_LENGTH:
        raise AdapterMismatchError(f"{where}: regular expression of {len(source)} characters; at most {_MAX_LENGTH}")
    # What RE2 would read otherwise than Python is refused here; RE2 itself refuses the rest, such as unbalanced groups.
    served = _SERVED.fullmatch(source) is not None
    translated = _END.sub(lambda found: r"\z" if found[1] == "Z" else found[0], source) if served else source
    try:
        regexp = re2.compile(translated, _OPTIONS)
        if served and suffix:
            regexp = re2.compile(rf"(?:.*\.)?(?:{translated})", _PREFIXED)
    except re2.error as error:
        raise _refusal(source, where, error) from None
    if not served:
        raise _refusal(source, where, None)
    names = _GROUP_NAME.findall(source)
    if len(set(names)) != len(names):
        raise AdapterFormatError(f"{where}: {shown(source)} is not a regular expression: a group's name is used twice")
    return Pattern(source, where, regexp)


def _refusal(source: str, where: str, error: Exception | None) -> AdapterFormatError | AdapterMismatchError:
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

"""Match regular expressions from adapter files in time linear in the expression and the name.

PEFT's `target_modules`, `exclude_modules`, `rank_pattern` and `alpha_pattern` may hold regular expressions from
untrusted files. Python's backtracking matcher can run forever on an expression of twenty characters; RE2 cannot. Only
syntax with the same meaning in Python and RE2 is accepted, so an accepted expression matches as `re.fullmatch` does.
Look-around, back-references and flags are refused.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import re2

from jlora.errors import AdapterFormatError, AdapterMismatchError, printable, shown

_MAX_LENGTH = 8192

# One item of a set, [...]. Pairs such as && and || are left out, because Python warns that their meaning will change.
_CHAR = r"(?:[^\\\[\]\-&|~]|\|(?!\|)|\\[^\w\x80-\U0010ffff]|\\[nrtfva_]|\\x[0-9A-Fa-f]{2})"
_ITEM = rf"(?:{_CHAR}(?:-{_CHAR})?|\\[dDwWsS])"
_COUNT = r"(?:0|[1-9][0-9]{0,3})"
# Repeats are possessive, so this match never backtracks.
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
# Python and RE2 differ on these beyond ASCII.
_ASCII_ONLY = re.compile(r"\\[dDwWsSbB]")

# RE2's messages for expressions that are malformed in Python too, except for sets with "[:", which Python accepts.
_MALFORMED = ("missing )", "unexpected )", "trailing \\", "no argument for repetition operator")
_MALFORMED_SET = ("missing ]", "invalid character class range")


def _options(max_mem: int) -> re2.Options:
    """Return RE2 options without captures and logging, limited to `max_mem` bytes (program and matching)."""
    found = re2.Options()
    found.log_errors = False
    found.never_capture = True
    found.max_mem = max_mem
    return found


# Limits of about 10,000 instructions, and with room for a prefix.
_OPTIONS, _PREFIXED = _options(1 << 18), _options(1 << 19)


@dataclass(frozen=True)
class Pattern:
    """A compiled regular expression. Made by `compile_pattern`.

    Attributes:
      source: The expression in the file.
      where: Adapter, file and field, for messages.
      regexp: The compiled RE2 expression.
    """

    source: str
    where: str
    regexp: Any = field(compare=False, repr=False)

    def fullmatch(self, name: str) -> bool:
        """Return True if `re.fullmatch(source, name)` would match, for a name without line ends.

        Raises:
          AdapterMismatchError: The name is not ASCII and the expression uses character classes or word boundaries.
        """
        if not name.isascii() and _ASCII_ONLY.search(self.source):
            raise AdapterMismatchError(
                f"{self.where}: {shown(self.source)} uses classes such as \\d or \\w, which are served for ASCII names "
                f"only; module {shown(name)} has other letters. Write the characters out"
            )
        return self.regexp.fullmatch(name) is not None


def compile_pattern(source: str, where: str, *, suffix: bool = False) -> Pattern:
    r"""Check and compile a regular expression.

    Args:
      source: The expression in the syntax of Python's `re`.
      where: Adapter, file and field, for messages.
      suffix: Match like `re.fullmatch(rf"(.*\.)?({source})", name)`, as PEFT does with keys.

    Raises:
      AdapterFormatError: `source` is not a regular expression.
      AdapterMismatchError: `source` is too long or too large, or uses look-around, back-references, flags, atomic
        groups, or syntax with another meaning in RE2.
    """
    if len(source) > _MAX_LENGTH:
        raise AdapterMismatchError(f"{where}: regular expression of {len(source)} characters; at most {_MAX_LENGTH}")
    # `_SERVED` excludes syntax that differs between RE2 and Python. RE2 refuses the rest, such as unbalanced groups.
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
    """Return the error for an expression that RE2 refused (`error`) or that differs from Python's meaning (None)."""
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

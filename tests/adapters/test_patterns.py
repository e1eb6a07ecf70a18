"""Accepted regular expressions match as Python's `re` does, in bounded time."""

import contextlib
import itertools
import re
import string

import pytest

from jlora.adapters.patterns import compile_pattern
from jlora.errors import AdapterFormatError, AdapterMismatchError


@pytest.mark.parametrize(
    "escape", [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789", *string.punctuation]
)
@pytest.mark.parametrize("within", ["{}", "[{}]", "[^{}x]", "{}+a"])
def test_every_escape(within, escape):
    pattern = within.format("\\" + escape)
    try:
        ours = compile_pattern(pattern, "here")
    except (AdapterFormatError, AdapterMismatchError):
        assert escape.isalnum() or escape == "\\"
        return
    for text in (*map(chr, range(32, 127)), "aa", "a.", ".a", "\\"):
        assert ours.fullmatch(text) == bool(re.fullmatch(pattern, text)), text


EVERY_OPERATOR = ["a+b", "a*b", "a?b", "a{2}b", "a{2,}b", "a{1,2}b", "a{0,2}?b", "(ab)+", "(a|ab)(b|c)", "(a*)+b"]
EVERY_OPERATOR += ["(a|b)*c", "[^a]b", "[^ab]c", r"[^\w.]?a", "[a-b]+c", r"\w\.c", r"a\b.*", r"a\B.*", "^a$", "(|a)b"]
EVERY_OPERATOR += [
    "a*?b",
    "a+?b",
    "a??b",
    "(a{0})b",
    "[-a]b",
    "[a-]b",
    r"[\w-]+",
    r"[^\W\d]",
    r"[a.]\x61",
    "]|}",
    "(?:a|b)c",
]
EVERY_OPERATOR += ["((a|b){2})+", r"(.*\.)?(b)$", "(?P<x>a)b", r"\Aa\Z|\\Z", "a|", "()*a", "(^)*a", "[a|b]c"]


@pytest.mark.parametrize("pattern", EVERY_OPERATOR)
def test_agrees_with_re_on_every_short_text(pattern):
    compiled = compile_pattern(pattern, "here")
    for length in range(1, 6):
        for text in map("".join, itertools.product("abc.", repeat=length)):
            assert compiled.fullmatch(text) == bool(re.fullmatch(pattern, text)), text


# 51 characters each. Sets of positions, which never backtrack either, took 14 s for one module, and for ever.
NESTED = "(" * 16 + "a+" + ")+" * 16 + "b"
LOOKING = "(?=.*" * 8 + "b" + ")" * 8 + ".*"


@pytest.mark.parametrize(
    "pattern",
    [
        *("(a+)+$", "(a|a)*b", "(a|aa)+b", "((a*)*)*b", NESTED, LOOKING),
        *("a?" * 60, "(?:a?){1000}", "(.*a.{200})*b", "((a{1000}){1000}){1000000}b"),
        *("(a|b?)" * 1000, "((a{1,10}){1,10}){1,10}" * 300, "(" * 8000, "(?:" * 2700, "[a-z]" * 1600),
    ],
)
@pytest.mark.timeout(60)
def test_hostile_patterns_are_matched_or_refused_in_bounded_time(pattern):
    """Plain `re` takes years for most of these."""
    with contextlib.suppress(AdapterFormatError, AdapterMismatchError):
        assert compile_pattern(pattern, "here").fullmatch("a" * 500 + "c") is False


@pytest.mark.parametrize("pattern", ["(a", "a)", "[a", "[", "*a", "a|*", "a\\", "[b-a]", "(?P<x>a)(?P<x>b)"])
def test_not_a_pattern(pattern):
    with pytest.raises(AdapterFormatError, match="is not a regular expression") as raised:
        compile_pattern(pattern, "here")
    assert str(raised.value).startswith(f"here: {pattern!r}")


REFUSED_SYNTAX = [
    r"(a)\1",
    "(?<=a)b",
    "(?i)a",
    "(?>a)",
    "a++",
    "(?i:a)",
    "^(?!.*vision)",
    "(?=a)a",
    "[[:alpha:]]",
    "[a&&b]",
]
REFUSED_SYNTAX += [r"\z", r"\pL", "a{,3}", "(?s).", "(?P<n>a)(?P=n)", "(?#c)a"]
TOO_LARGE = ["a{1001}", "((a{100}){100}){100}", "(.{100}){9}" * 3]


@pytest.mark.parametrize("pattern", [*REFUSED_SYNTAX, *TOO_LARGE])
def test_refused_patterns(pattern, capfd):
    with pytest.raises(AdapterMismatchError, match="not served" if pattern in REFUSED_SYNTAX else "here: "):
        compile_pattern(pattern, "here")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("pattern", [r"\d+", r"\w+", r".\b", r"[\W]+", r"\S"])
def test_classes_and_names_beyond_ascii(pattern):
    """Skip these names, because RE2's classes are ASCII and Python's are not."""
    for name in ("\u0661", "é"):
        with pytest.raises(AdapterMismatchError, match="for ASCII names only"):
            compile_pattern(pattern, "here").fullmatch(name)

"""Accepted regular expressions match as Python's `re` does, in bounded time."""

import contextlib
import itertools
import re
import string
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlora.adapters.patterns import compile_pattern
from jlora.errors import AdapterFormatError, AdapterMismatchError

# Syntax that is accepted, and next to each the syntax that is refused.
ATOMS = ["a", "b", "1", "_", "-", ".", r"\.", r"\-", r"\_", "[ab]", "[^a]", "[a-c1]", "[a|b]", "[-a]", "[a-]", r"[\w-]"]
ATOMS += [r"\d", r"\w", r"\W", r"\D", r"\s", r"[^\W\d]", r"[\d.]", r"\x61", r"\t", "]", "}"]
ASSERTIONS = [r"\b", r"\B", "^", "$", r"\A", r"\Z"]
REFUSED = ["(?=a)", "(?!b)", "(?<=a)", "(?i:a)", "(?>a)", "(?#c)", r"\1", r"\0", r"\z", r"\pL", r"\Q", r"\u0061", r"\C"]
REFUSED += ["[]a]", "[[]", "[[:alpha:]]", "[a&&b]", "[a--]", "[~~a]", r"[a-\d]", r"[\b]", "{", "{,2}", "é"]
REPEATS = ["", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,3}", "{0,2}?", "{2,}", "{0}"]
BAD_REPEATS = ["**", "*+", "{2}{2}", "{,2}", "{3,2}", "{01}", "{1001}"]


def extend(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


LEAVES = st.one_of(
    st.tuples(st.sampled_from(ATOMS), st.sampled_from(REPEATS)).map("".join), st.sampled_from(ASSERTIONS)
)
SERVED = st.recursive(LEAVES, extend, max_leaves=6)
TEXTS = st.text("abc1._-", min_size=1, max_size=8)


def is_python(pattern):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as of sets that will change their meaning
        try:
            re.compile(pattern)
        except re.error:
            return False
    return True


@settings(max_examples=20 * settings().max_examples)
@given(
    st.lists(st.one_of(SERVED, st.sampled_from([*REFUSED, *BAD_REPEATS, *"()[]{}|*+?\\^$-.0a,:"])), max_size=8), TEXTS
)
def test_accepted_patterns_agree_with_re_and_malformed_ones_are_refused(pieces, text):
    pattern = "".join(pieces)
    try:
        ours = compile_pattern(pattern, "here")
    except AdapterMismatchError:
        return
    except AdapterFormatError:
        assert not is_python(pattern)
        return
    assert ours.fullmatch(text) == bool(re.fullmatch(pattern, text))


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


def test_messages_are_escaped_and_cut():
    with pytest.raises(AdapterFormatError) as raised:
        compile_pattern("\x1b[31m(\n" + "a" * 1000, "here")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 600

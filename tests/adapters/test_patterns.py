"""The position-set matcher against Python's own `re`."""

import itertools
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jlora.adapters.patterns import compile_pattern
from jlora.errors import AdapterFormatError, AdapterMismatchError

ATOMS = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", r"\W", "[a-c1]", "1", r"\b", "^", "$", "(?=a)", "(?!b)"]
REPEATS = ["", "", "*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}?"]


def extend(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(REPEATS)).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


@settings(max_examples=400)
@given(st.recursive(st.sampled_from(ATOMS), extend, max_leaves=6), st.text("ab1.", min_size=1, max_size=6))
def test_agrees_with_re(pattern, text):
    assert compile_pattern(pattern, "here").fullmatch(text) == bool(re.fullmatch(pattern, text))


EVERY_OPERATOR = [
    "a+b",
    "a*b",
    "a?b",
    "a{2}b",
    "a{2,}b",
    "a{1,2}b",
    "a{0,2}?b",
    "(ab)+",
    "(a|ab)(b|c)",
    "(a*)+b",
    "(a|b)*c",
]
EVERY_OPERATOR += [
    "[^a]b",
    "[^ab]c",
    r"[^\w.]?a",
    "[a-b]+c",
    r"\w\.c",
    r"a\b.*",
    r"a\B.*",
    "^a$",
    "a(?=b).*",
    "a(?!b).*",
    "(|a)b",
    "((a|b){2})+",
    r"(.*\.)?(b)$",
]


@pytest.mark.parametrize("pattern", EVERY_OPERATOR)
def test_agrees_with_re_on_every_short_text(pattern):
    compiled = compile_pattern(pattern, "here")
    for length in range(1, 6):
        for text in map("".join, itertools.product("abc.", repeat=length)):
            assert compiled.fullmatch(text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        (r"model\.layers\.\d+\.self_attn\.(q|v)_proj", "model.layers.12.self_attn.v_proj", True),
        (r"model\.layers\.\d+\.self_attn\.(q|v)_proj", "model.layers.12.self_attn.o_proj", False),
        (r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$", "decoder.block.0.SelfAttention.q", True),
        (r"(?:.*?(?:language|text).*?(?:attn|mlp).*?(?:q_proj).*?)|(?:\blm\.x)", "a.text.0.mlp.q_proj", True),
    ],
)
def test_patterns_as_people_write_them(pattern, name, expected):
    assert compile_pattern(pattern, "here").fullmatch(name) is expected


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(a|aa)+b", "((a*)*)*b", "((a{1000}){1000}){1000000}b", "a?" * 60]
)
def test_never_runs_away(pattern):
    start = time.perf_counter()
    assert compile_pattern(pattern, "here").fullmatch("a" * 300 + "c") is False
    assert time.perf_counter() - start < 5


def test_not_a_pattern():
    with pytest.raises(AdapterFormatError, match=r"here: '\(a' is not a regular expression"):
        compile_pattern("(a", "here")


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?<=a)b", "(?i)a", "(?>a)", "a++", "(?i:a)"])
def test_refused_syntax(pattern):
    with pytest.raises(AdapterMismatchError, match="not served"):
        compile_pattern(pattern, "here")


def test_too_long():
    with pytest.raises(AdapterMismatchError, match="8193 characters"):
        compile_pattern("a" * 8193, "here")

"""The first key in file order that matches, against PEFT's rule written with plain `re`."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jlora.adapters import pattern_table as source
from jlora.adapters.pattern_table import pattern_table
from jlora.errors import AdapterFormatError, AdapterMismatchError

LAYERS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
MODULES = [f"model.layers.{i}.{name}" for i in range(32) for name in LAYERS]


def by_peft(keys, module):
    """`peft.utils.other.get_pattern_key`."""
    return next((i for i, key in enumerate(keys) if re.match(rf"(.*\.)?({key})$", module)), -1)


def lookup(keys, modules, where="here"):
    return pattern_table({key: i for i, key in enumerate(keys)}, where).lookup(modules, -1)


# Few letters, so that keys hide one another, dots stand for letters, and suffixes meet.
NAMES = st.text("ab.", min_size=1, max_size=7).filter(lambda name: all(name.split(".")))
KEYS = st.one_of(
    st.text("ab.", max_size=6),
    NAMES.map(re.escape),
    NAMES.map(lambda name: "^" + re.escape(name)),
    NAMES.map(lambda name: "^" + name),
    st.lists(st.sampled_from(["a", "b", ".", r"\.", "^", "$", r"\_", "_", r"\-"]), max_size=6).map("".join),
    st.lists(
        st.sampled_from(["a", r"\.", ".", "[ab]", "a*", "(a|b)", r"\w", "^", "$", "(b.)?", "a|b"]), max_size=5
    ).map("".join),
)


@settings(max_examples=20 * settings().max_examples)
@given(st.lists(KEYS, max_size=8, unique=True), st.lists(NAMES, min_size=1, max_size=6, unique=True))
@example([r"a\_b", "a_b"], ["a_b"])  # the same name, escaped and not, in either order
@example(["a_b", r"a\_b"], ["a_b"])
@example(["a", "[ab]", "b"], ["a", "b"])  # a name before an expression and after it
@example(["a.b", "aab"], ["x.aab", "aab", "a.b"])
@example([r"a\..b", "a..b"], ["a.ab", "aaab"])
def test_agrees_with_peft(keys, modules):
    assert lookup(keys, modules) == {module: by_peft(keys, module) for module in modules}


@pytest.mark.parametrize(
    ("key", "error", "words"),
    [
        ("(", AdapterFormatError, "not a regular expression"),
        ("a)|(b", AdapterFormatError, "not a regular expression"),  # balanced only with another's brackets around it
        ("(?!a)", AdapterMismatchError, "not served"),
        (r"(a)\1", AdapterMismatchError, "not served"),
        ("(.{100}){90}", AdapterMismatchError, "too large"),
    ],
)
def test_refused_by_name(key, error, words):
    keys = ["q[0]", "q", key, "z+"]
    with pytest.raises(error, match=words) as raised:
        lookup(keys, ["q"])
    assert str(raised.value).startswith(f"here, key {key!r}")


def test_classes_beyond_ascii():
    with pytest.raises(AdapterMismatchError, match=r"^here, key '\\\\w\+': .* uses classes.*'é'"):
        lookup(["[q]", r"\w+"], ["é"])
    assert lookup([r"[q]", "é"], ["é", "x.é"]) == {"é": 1, "x.é": 1}


def test_keys_that_take_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(source, "_MAX_SECONDS", -1.0)
    with pytest.raises(AdapterMismatchError, match="here: its keys take over"):
        lookup(["q[a]"], ["q"])


def test_expressions_are_limited_and_names_are_not():
    names = [name for i in range(3000) for name in (f"layers.{i}.mlp", rf"^layers\.{i}\.mlp$", rf"a\_{i}")]
    expressions = [rf"layers\.({i}|7{i})\.up" for i in range(1024)]
    assert lookup([*names, *expressions], ["m.layers.2999.mlp", "layers.71023.up"]) == {
        "m.layers.2999.mlp": len(names) - 3,
        "layers.71023.up": len(names) + 1023,
    }
    with pytest.raises(AdapterMismatchError, match=r"^here, key 'one\[more\]': over 1024 keys are regular expressions"):
        lookup([*expressions, *names, "one[more]"], ["q"])


def test_keys_for_every_projection_of_all_experts_stay_within_the_time_limit():
    """`lookup` raises after 20 s, which a search of every key for every module would take."""
    modules = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}"
        for layer in range(58)
        for expert in range(256)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    found = lookup([f"^{re.escape(module)}" for module in modules], modules)
    assert list(found.values()) == list(range(44_544))

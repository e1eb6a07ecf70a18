"""Errors that come from another process, as a name and a message."""

import itertools

import pytest

from jlora import errors


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_the_error_of_another_process_is_of_its_own_class(name):
    error = errors.error_of(name, "adapter 'a' is gone")
    assert (type(error), str(error)) == (vars(errors)[name], "adapter 'a' is gone")


@pytest.mark.parametrize("name", ["ValueError", "EngineClosedError", "error_of", "__name__", ""])
def test_another_process_may_raise_a_foreign_error(name):
    error = errors.error_of(name, "on fire")
    assert (type(error), str(error)) == (errors.LoRAError, f"{name}: on fire")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.77.mlp.j", "; the nearest is 'layers.77.mlp.j'"),
        ("layers.1007.mlp.a", "; the nearest is 'layers.107.mlp.a'"),
        ("?", ""),
        ("x" * 100_000, ""),
    ],
)
def test_the_nearest_of_ten_thousand_names(name, found):
    """Layers that differ in their numbers count once, so that those of the first 1,000 are compared as well."""
    assert errors.nearest(name, [f"layers.{i}.mlp.{letter}" for i in range(1000) for letter in "abcdefghij"]) == found


def test_a_search_compares_the_last_thousand_names():
    names = ["".join(letters) for letters in itertools.product("abcdefghij", repeat=4)]
    assert errors.nearest("jjaa", names) == "; the nearest is 'jjaa'"
    assert errors.nearest("aaaa", names) == "; the nearest is 'jaaa'"

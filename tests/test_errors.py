"""Errors that come from another process, as a name and a message."""

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

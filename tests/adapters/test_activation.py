"""`active_from`: the first row on which an activated LoRA acts."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jlora import LoRAUsageError, active_from


def slow(tokens, invocation, start):
    """Look at each place of the prompt in turn."""
    if not invocation:
        return 0
    first = None
    for i in range(len(tokens) - len(invocation) + 1):
        if tokens[i : i + len(invocation)] == invocation:
            first = i
    return 2**31 - 1 if first is None else max(0, first - start)


@given(
    tokens=st.lists(st.integers(0, 2), max_size=24) | st.just([0] * 1000),
    invocation=st.lists(st.integers(0, 2), max_size=4),
    start=st.integers(0, 24),
    dtype=st.sampled_from([None, np.int32, np.int64, np.uint16]),
)
@example(tokens=[1, 2, 1], invocation=[1, 2], start=2, dtype=None)
def test_equals_a_search_place_by_place(tokens, invocation, start, dtype):
    start = min(start, len(tokens))
    prompt = tokens if dtype is None else np.array(tokens, dtype)
    assert active_from(prompt, invocation, start=start) == slow(tokens, invocation, start)


def test_wrong_arguments():
    for start in (-1, 4, True, 1.0, None):
        for invocation in ([], [1]):
            with pytest.raises(LoRAUsageError, match="start must be an int from 0 to 3"):
                active_from([1, 2, 3], invocation, start=start)
    for odd in (None, 3, "abc", [1.5], [True], [[1, 2]], [2**70], np.ones(3)):
        with pytest.raises(LoRAUsageError, match="active_from: tokens must be a sequence of ints"):
            active_from(odd, [1])
        with pytest.raises(LoRAUsageError, match="active_from: invocation_tokens must be a sequence of ints"):
            active_from([1], odd)

"""`on_threads`: what a loop would give and raise, by several threads, none of which is left at work."""

import threading
import time

import pytest

from jlora import _threads
from jlora._threads import on_threads

LARGE = 200 << 20


class Wrong(Exception):
    pass


@pytest.mark.parametrize("nbytes", [0, LARGE])
@pytest.mark.parametrize("count", [0, 1, 5, 100])
def test_the_results_in_their_order(nbytes, count):
    def act(item):
        time.sleep(0.002 * (item % 3) if count < 50 else 0)
        return None if item == 2 else [item]

    assert on_threads(act, range(count), nbytes) == [None if i == 2 else [i] for i in range(count)]


def test_several_threads_where_it_is_worthwhile():
    together = threading.Barrier(_threads._MOST)
    assert on_threads(lambda item: together.wait(20) >= 0, range(_threads._MOST), LARGE) == [True] * 4
    assert on_threads(lambda item: threading.get_ident(), range(3), 0) == [threading.get_ident()] * 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jlora-work")]


@pytest.mark.parametrize("nbytes", [0, LARGE])
def test_the_first_in_order_is_raised_and_the_rest_is_not_begun(nbytes):
    begun = []

    def act(item):
        begun.append(item)
        time.sleep(0.02 if item == 2 else 0.001)
        if item >= 2:
            raise Wrong(item)

    with pytest.raises(Wrong) as found:
        on_threads(act, range(1000), nbytes)
    assert found.value.args == (2,)
    assert len(begun) < 500

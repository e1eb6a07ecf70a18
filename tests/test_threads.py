"""`on_threads` returns and raises as a loop does, on several threads. It and `elapsed` leave no thread running."""

import threading
import time

import pytest

from jlora import _threads
from jlora._threads import elapsed, on_threads

LARGE = 200 << 20


class Wrong(Exception):
    pass


def test_results_are_in_order_and_of_several_threads_from_128_mib_on():
    def act(item):
        time.sleep(0.002 * (item % 3))
        return None if item == 2 else [item]

    for count, nbytes in ((0, 0), (1, LARGE), (20, 0), (20, LARGE)):
        assert on_threads(act, range(count), nbytes) == [None if i == 2 else [i] for i in range(count)]
    together = threading.Barrier(4)
    assert on_threads(lambda item: together.wait(20) >= 0, range(4), LARGE) == [True] * 4
    assert on_threads(lambda item: threading.get_ident(), range(3), 0) == [threading.get_ident()] * 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jlora-work")]


@pytest.mark.parametrize("nbytes", [0, LARGE])
def test_the_first_error_in_order_is_raised_and_later_items_do_not_start(nbytes):
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


def test_elapsed_seconds_are_reported_until_the_work_ends(monkeypatch):
    monkeypatch.setattr(_threads, "_REPORT_EVERY", 0.01)
    reports, three = [], threading.Event()

    def report(seconds):
        reports.append(seconds)
        if len(reports) >= 3:
            three.set()

    with elapsed(report):
        assert three.wait(20)
    count = len(reports)
    assert reports == sorted(reports)
    assert reports[0] >= 0.01
    time.sleep(0.05)
    assert len(reports) == count
    assert not any(thread.name == "jlora-elapsed" for thread in threading.enumerate())

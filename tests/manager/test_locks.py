"""Guards of `with` blocks: whatever is raised, and whoever keeps the traceback, nothing stays taken."""

import sys
import threading
from types import FrameType
from typing import Any

import jax
import pytest

from jlora.manager import locks


def free(lock: locks.Lock) -> bool:
    """Whether another thread can take it."""
    found: list[bool] = []

    def look() -> None:
        if lock._lock.acquire(blocking=False):
            lock._lock.release()
            found.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return bool(found)


def test_a_lock_is_held_inside_alone() -> None:
    lock = locks.Lock()
    with lock(), lock():
        assert not free(lock)
    assert free(lock)
    with pytest.raises(ValueError, match="inside"), lock():
        raise ValueError("inside")
    assert free(lock)


def test_a_guard_that_goes_gives_back_what_it_took() -> None:
    lock = locks.Lock()
    guard = lock()
    guard.__enter__()
    assert not free(lock)
    del guard
    assert free(lock)


@pytest.mark.parametrize("what", ["line", "call", "return"])
def test_a_kept_traceback_keeps_no_lock_and_no_setting(what: str) -> None:
    """Also where the exception came on the way in or out, in the code of the guard itself."""
    lock, device = locks.Lock(), jax.devices()[-1]

    def work() -> None:
        with lock():
            pass
        with locks.within(jax.default_device(device)):
            pass

    def interrupted(at: int) -> tuple[int, BaseException | None]:
        seen = 0

        def trace(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal seen
            if frame.f_code is work.__code__ or frame.f_code.co_filename == locks.__file__:
                seen += event == what
                if event == what and seen == at:
                    raise KeyboardInterrupt
                return trace
            return None

        sys.settrace(trace)
        try:
            work()
        except KeyboardInterrupt as error:
            return seen, error
        finally:
            sys.settrace(None)
        return seen, None

    total, _ = interrupted(0)
    assert total > 2
    for at in range(1, total + 1):
        _, kept = interrupted(at)
        assert kept is not None
        assert free(lock), (what, at)
        assert jax.config.jax_default_device is None, (what, at)


def test_turns_are_given_back() -> None:
    turns = locks.Turns(1)
    for _ in range(3):
        with pytest.raises(ValueError, match="inside"), turns():
            raise ValueError("inside")

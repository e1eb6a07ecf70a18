"""The state's lock defers SIGINT in the main thread, and the bell wakes waiting threads."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jlora.manager.locks import StateLock

pytestmark = pytest.mark.usefixtures("python_handles_sigint")


def test_sigint_is_raised_when_the_lock_is_free_again():
    lock, done = StateLock(), []

    def work() -> None:
        with lock:
            with lock:
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.__enter__).result(5) is None


def test_other_handlers_are_left_alone():
    heard = []

    def own(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(signal.SIGINT, own)
    with StateLock():
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_thread_releases_all_of_its_locks_for_a_while():
    lock, other = StateLock(), ThreadPoolExecutor(1)

    def taken() -> bool:
        """Return True if another thread can take both locks at once."""

        def take() -> bool:
            found = lock.step.acquire(timeout=0.1)
            if found:
                lock.step.release()
            return found

        return other.submit(take).result(5)

    with lock.writing, lock, lock.writing:
        assert not taken()
        with lock.released():
            assert taken()
            with lock:  # as a call on this thread
                pass
            other.submit(lock.__enter__).result(5)
            other.submit(lock.__exit__).result(5)
        assert not taken()
    assert taken()
    with lock.released():  # it holds none
        assert taken()
    other.shutdown()


@pytest.mark.parametrize("writes", [False, True])
def test_a_wait_for_released_locks_is_interrupted(writes):
    lock, held, go_on = StateLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.writing:
            held.set()
            assert go_on.wait(20)

    holder = threading.Thread(target=hold)

    def work() -> None:
        with lock.writing if writes else lock, lock:
            with lock.released():
                holder.start()
                assert held.wait(20)
                threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
            pytest.fail("the lock is held by another thread")

    with pytest.raises(KeyboardInterrupt):
        work()
    go_on.set()
    holder.join(20)
    with ThreadPoolExecutor(1) as other:
        other.submit(lock.writing.__enter__).result(5)
        other.submit(lock.writing.__exit__).result(5)
    with lock.writing, lock:
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

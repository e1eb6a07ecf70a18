"""One compiled world for all tests that only use it: two slots, four adapters on the host."""

import signal
from collections.abc import Iterator

# Users have one backend, which their manager imports; here tests of several share a process. JAX 0.11 and 0.12 trace
# anew what was traced before this import, and a test that counts traces would fail for an import in another.
import jax.experimental.pallas.tpu  # noqa: F401
import pytest

from tests.manager.tiny import World, make_world


@pytest.fixture
def python_handles_sigint() -> Iterator[None]:
    """Python's own handler; a shell starts background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared_world() -> World:
    world = make_world()
    world.serve([None, None, None])  # threads that took the first step together would each trace it
    return world


@pytest.fixture
def world(shared_world) -> World:
    """The shared world, empty. Its step is never compiled again, whatever a test does."""
    shared_world.reset()
    yield shared_world
    shared_world.reset()  # refused, and so a failure, if the test left a batch open
    assert len(shared_world.traces) <= 1

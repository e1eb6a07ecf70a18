"""One compiled world, which tests share: two slots, and room for four adapters on the host."""

import signal
from collections.abc import Iterator

# A user's process has one backend, which the manager imports; here one process tests several. JAX 0.11 and 0.12 trace
# functions again after this import, so tests that count traces would fail after an import in another test.
import jax
import jax.experimental.pallas.tpu
import pytest

import jlora
from jlora.pallas.triton import write as triton_write
from jlora.slots import arrays, programs
from tests.compiled import compiled_programs
from tests.manager.tiny import World, make_world


@pytest.fixture
def python_handles_sigint() -> Iterator[None]:
    """Install Python's own handler, because a shell starts background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shared_world() -> World:
    world = make_world()
    world.serve([None, None, None])  # if threads took the first step together, each would trace it
    return world


@pytest.fixture
def world(shared_world) -> World:
    """The shared world, empty. Its step must not be compiled again."""
    shared_world.reset()
    if not compiled_programs(shared_world.forward):  # dropped between two modules (tests/conftest.py)
        shared_world.traces.clear()
        shared_world.serve([None, None, None])
    yield shared_world
    shared_world.reset()  # raises if the test left a batch open
    assert len(shared_world.traces) <= 1


@pytest.fixture
def moved(monkeypatch) -> list:
    """Return the list that gets every array that is moved to a device, by the two calls that jlora uses for it."""
    found = []
    for owner, name in ((jax, "device_put"), (jlora.layers.forward.row_space, "to_device")):
        put = getattr(owner, name)

        def spy(x, *args, put=put, **kwargs):
            found.extend(jax.tree.leaves(x))
            return put(x, *args, **kwargs)

        monkeypatch.setattr(owner, name, spy)
    return found


WRITES = ("each", "joined", "kernel")


@pytest.fixture(params=WRITES)
def write_programs(request, monkeypatch) -> Iterator[str]:
    """Write slots as on CPU ("each"), as on TPU ("joined"), or as on GPU ("kernel"), interpreted on CPU.

    On an accelerator one program writes all chunks, and on GPUs it is a Triton kernel.
    """
    ran, kernel = [], triton_write.write_rows
    monkeypatch.setattr(arrays, "_joins", lambda device: request.param != "each")
    if request.param == "kernel":
        monkeypatch.setattr(programs, "takes_kernels", lambda device: True)
        monkeypatch.setattr(triton_write, "write_rows", lambda *args: (ran.append(1), kernel(*args, interpret=True))[1])
        programs.compiled_write.cache_clear()
    yield request.param
    if request.param == "kernel":
        programs.compiled_write.cache_clear()
    assert bool(ran) == (request.param == "kernel")

"""One engine over the demo model for all tests, since compiling it takes seconds; and what makes its steps wait."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

import jlora
from jlora.cli.demo import DEMO
from jlora.cli.loading import load_model, load_tokenizer
from jlora.serve import Engine, EngineOptions
from tests.records import evicted

ADAPTERS: dict[str, Path] = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
ROWS, SLOTS, RANK = 4, 2, 32


def request_of(name: str, source: str | None = None, **options: Any) -> jlora.LoRARequest:
    return jlora.LoRARequest(name, str(ADAPTERS[source or name]), **options)


class World:
    """An engine, and its parts."""

    def __init__(self, **options: Any):
        self.model = load_model(DEMO / "model", "float32")
        self.tokenizer = load_tokenizer(DEMO / "model" / "tokenizer.json")
        config = jlora.LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=6)
        self.manager = jlora.LoRAManager(self.model, config)
        sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": 32, "max_waiting": 64, "max_wait_ratio": 8, **options}
        self.engine = Engine(self.model, self.manager, tokenizer=self.tokenizer, options=EngineOptions(**sizes))
        for name in ADAPTERS:
            self.engine.add_lora(request_of(name))

    @contextlib.contextmanager
    def paused(self) -> Iterator[threading.Event]:
        """No decode steps before the event; prompts are taken all the same."""
        go, dispatcher = threading.Event(), self.engine._dispatcher
        decode = dispatcher._decode
        dispatcher._decode = lambda: go.is_set() and decode()
        try:
            yield go
        finally:
            go.set()
            del dispatcher._decode

    def wait_idle(self) -> None:
        """Until nothing is held any more: the last turn of the dispatching thread is over."""
        for _ in range(1000):
            loras = self.engine._loras
            if not self.engine._open and not self.manager.leases() and not loras._held and not loras._waiting:
                return
            threading.Event().wait(0.01)
        raise AssertionError("the engine does not come to rest")


@pytest.fixture(scope="session")
def started() -> Iterator[World]:
    world = World()
    world.engine.start()
    world.compiled = world.engine._steps.compiled()
    yield world
    assert world.engine.close(60)


@pytest.fixture
def world(started: World) -> Iterator[World]:
    """The engine with the demo's four adapters, at rest. Whatever a test does, nothing compiles and nothing is left."""
    for name in evicted(started.manager):
        started.manager.prepare([name]).close()
    yield started
    started.wait_idle()
    for name in set(started.engine.list_loras()) - set(ADAPTERS):
        started.engine.remove_lora(name)
    for name in set(ADAPTERS) - set(started.engine.list_loras()):
        started.engine.add_lora(request_of(name))
    assert started.engine._steps.compiled() == started.compiled
    assert not started.engine._loras._waiting

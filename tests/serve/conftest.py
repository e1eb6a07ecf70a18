"""Fixtures: one engine over the demo model for the whole session, since compiling it takes seconds."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

import jlora
from jlora.cli.demo import DEMO
from jlora.cli.loading import load_model, load_tokenizer
from jlora.serve import Engine, EngineOptions, SamplingParams
from jlora.serve.engine.detokenizer import Detokenizer
from jlora.serve.engine.generation import Generation
from jlora.serve.engine.sequence import Sequence
from tests.records import evicted
from tests.serve.client import until

ADAPTERS: dict[str, Path] = {path.name: path for path in sorted((DEMO / "adapters").iterdir())}
ROWS, SLOTS, RANK = 4, 2, 32


def request_of(name: str, source: str | None = None, **options: Any) -> jlora.LoRARequest:
    return jlora.LoRARequest(name, str(ADAPTERS[source or name]), **options)


def sequence_of(lora: str | None, request: jlora.LoRARequest | None = None) -> Sequence:
    """Return a request of one token for an adapter, as an engine's parts pass it on."""
    params, answer = SamplingParams(temperature=0), Generation([0], lambda: None)
    return Sequence([1], params, 0, 1, frozenset(), lora, request, None, answer, Detokenizer(None))


def compilations(engine: Engine) -> int:
    """Return the number of compiled variants of an engine's steps. No public call counts them."""
    return engine._steps.compiled()


class Around:
    """Pass every access on to a manager, except for attributes that a test has set.

    The engine gets this object as its manager, so a test can make a load hang or a step fail.
    """

    def __init__(self, manager: jlora.LoRAManager):
        self.__dict__["manager"] = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def restore(self) -> None:
        """Pass every access on again."""
        for name in set(self.__dict__) - {"manager"}:
            delattr(self, name)


class World:
    """An engine over the demo model with its parts.

    Attributes:
      around: the manager as the engine sees it; see `Around`.
      resolve: the engine's resolver, name -> request. A test may replace it.
    """

    def __init__(self) -> None:
        self.model = load_model(DEMO / "model", "float32")
        self.tokenizer = load_tokenizer(DEMO / "model" / "tokenizer.json")
        config = jlora.LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK, max_cpu_loras=6)
        self.manager = jlora.LoRAManager(self.model, config)
        options = EngineOptions(max_num_seqs=ROWS, max_num_batched_tokens=32, max_waiting=64, max_wait_ratio=8)
        self.around, self.resolve = Around(self.manager), _nothing
        self.engine = Engine(
            self.model, self.around, tokenizer=self.tokenizer, options=options, resolve=lambda name: self.resolve(name)
        )
        for name in ADAPTERS:
            self.engine.add_lora(request_of(name))

    @contextlib.contextmanager
    def paused(self) -> Iterator[threading.Event]:
        """Run no decode step before the event is set, while prompts are still prefilled.

        No public call can do this: a blocked step would block prefills, timeouts and cancellations too.
        """
        go, dispatcher = threading.Event(), self.engine._dispatcher
        decode = dispatcher._decode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatcher, "_decode", lambda: go.is_set() and decode())
            try:
                yield go
            finally:
                go.set()

    def wait_idle(self) -> None:
        """Wait until no request is under way, no removal is pending and every lease is released."""

        def idle() -> bool:
            stats = self.engine.stats()
            under_way = stats.running or stats.waiting or self.engine.unloading_loras()
            return not under_way and not self.manager.leases()

        until(idle)

    def restore(self) -> None:
        """Wait until the engine is idle, and load the demo's four adapters and no others."""
        self.around.restore()
        self.resolve = _nothing
        self.wait_idle()
        for name in set(self.engine.list_loras()) - set(ADAPTERS):
            self.engine.remove_lora(name)
        for name in set(ADAPTERS) - set(self.engine.list_loras()):
            self.engine.add_lora(request_of(name))


def _nothing(name: str) -> None:
    """Resolve no name."""


@pytest.fixture(scope="session")
def worlds() -> Iterator[list[World]]:
    """Return the engines that are open: none or one."""
    found: list[World] = []
    yield found
    assert all(world.engine.close(60) for world in found)


@pytest.fixture(scope="module")
def started(worlds: list[World]) -> World:
    """One engine for the session, and another once its compiled programs were dropped (tests/conftest.py)."""
    if not worlds or not compilations(worlds[-1].engine):
        assert all(world.engine.close(60) for world in worlds)
        worlds[:] = [World()]
        worlds[-1].engine.start()
    return worlds[-1]


@pytest.fixture
def world(started: World) -> Iterator[World]:
    """The session's engine, idle, with the demo's four adapters in host memory. Nothing compiles during the test."""
    for name in evicted(started.manager):
        started.manager.prepare([name]).close()
    before = compilations(started.engine)
    yield started
    started.restore()
    assert compilations(started.engine) == before


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of adapters without weights, and of what is none. Its links stay inside, leave it, or have no end."""
    root = tmp_path / "adapters"
    for folder in (root / "one", root / "two", root / "team" / "three", tmp_path / "outside"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").touch()
    (root / "empty").mkdir()
    (root / "file").touch()
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "inner").symlink_to(root / "one")
    return root


class Disk:
    """The reads of files below `folder`, through the `os.preadv` that loads call.

    Attributes:
      folder: absolute path; None for no folder.
      reads: number of reads so far.
      fails: the read that raises OSError, counted from 1; 0 for none.
      go: reads block while it is cleared.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.reads, self.fails = 0, 0
        self.go = threading.Event()
        self.go.set()
        self._read = os.preadv

    def preadv(self, fd: int, buffers: Any, offset: int) -> int:
        if self.folder is not None and os.readlink(f"/proc/self/fd/{fd}").startswith(str(self.folder)):
            self.reads += 1
            assert self.go.wait(60)
            if self.reads == self.fails:
                raise OSError(5, "Input/output error")
        return self._read(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """A disk that can block or fail. No public parameter passes one in, so `os.preadv` is replaced."""
    made = Disk()
    monkeypatch.setattr(os, "preadv", made.preadv)
    yield made
    made.go.set()

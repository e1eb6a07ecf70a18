"""The adapters of an engine: loads of waiting requests in a host cache whose places are few."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import jlora
from jlora.serve.engine.loras import Loras
from tests.manager.tiny import MAX_RANK, MODULES, make_adapter, make_world
from tests.records import on_host
from tests.serve.client import until
from tests.serve.conftest import Around, sequence_of

LOOKS = 30


def made(name: str) -> jlora.Adapter:
    """Return an adapter; all have one size."""
    return make_adapter(name, rank=MAX_RANK, modules=list(MODULES))


class Desk:
    """The adapters of an engine without its thread, over a manager with one slot.

    Attributes:
      loads: one future for each load that was started.
      batches, running: batches and versions of the sequences that have begun.
    """

    def __init__(self, folder: Path, **sizes: int):
        self.folder = folder
        self.manager = make_world(max_loras=1, **sizes).manager
        self.loads: list[Future[bool]] = []
        self.batches: list[jlora.LoRABatch] = []
        self.running: set[Any] = set()
        around = Around(self.manager)
        around.prefetch = self.prefetch
        self.loras = Loras(around, lambda: None)  # type: ignore[arg-type]

    def prefetch(self, request: Any) -> "Future[bool]":
        self.loads.append(self.manager.prefetch(request))
        return self.loads[-1]

    def request(self, name: str) -> jlora.LoRARequest:
        made(name).save_pretrained(self.folder / name)
        return jlora.LoRARequest(name, str(self.folder / name))

    def begin(self, name: str) -> None:
        """Begin a sequence with an adapter on disk."""
        self.manager.add_adapter(self.request(name))
        self.batches.append(self.manager.prepare([name]))
        self.running.add((name, self.batches[-1].versions[0]))

    def look(self, *names: str) -> dict[str, jlora.LoRAError]:
        """Look many times, each after all loads have ended. Return the errors."""
        waiting = {sequence_of(name, self.request(name)): name for name in names}
        failed: dict[str, jlora.LoRAError] = {}
        for one in waiting:
            self.loras.wanted([one])
        for _ in range(LOOKS):
            left = {one: name for one, name in waiting.items() if name not in failed}
            failed |= self.loras.look(left, frozenset(self.running))
            for load in self.loads:
                load.exception(30)
        for one in waiting:
            self.loras.not_wanted(one)
        return failed


def test_only_places_that_can_be_evicted_are_loaded_into(tmp_path):
    """Otherwise the adapters of waiting requests evict each other as fast as they are loaded."""
    desk = Desk(tmp_path, max_cpu_loras=4)
    desk.manager.add_adapter(made("memory"))
    desk.manager.add_adapter(desk.request("pinned"))
    desk.begin("running")
    desk.manager.remove_adapter("pinned")
    desk.manager.add_adapter(made("updated"))
    assert desk.look("a", "b", "c") == {}
    assert len(desk.loads) == 1
    assert on_host(desk.manager)[-1] == "a"


def test_loads_too_large_for_the_cache_end(tmp_path):
    """Sizes are known after a load, so each is loaded once, and then the first that waits."""
    desk = Desk(tmp_path, max_cpu_loras=8)
    desk.manager.add_adapter(made("memory"))
    size = desk.manager.stats().host_bytes
    desk = Desk(tmp_path, max_cpu_loras=8, max_cpu_bytes=3 * size)
    desk.manager.add_adapter(made("memory"))
    desk.begin("running")
    assert desk.look("a", "b", "c") == {}
    assert len(desk.loads) <= 4
    assert "a" in on_host(desk.manager)
    desk.batches[0].close()
    desk.running.clear()
    assert desk.look("b", "c") == {}
    assert "b" in on_host(desk.manager)


def test_load_without_room_is_retried_while_others_run(tmp_path):
    """And once more if one has ended since it began."""

    class Pending(Desk):
        def prefetch(self, request):
            self.loads.append(Future())
            return self.loads[-1]

    desk = Pending(tmp_path, max_cpu_loras=2)
    waiting, running = {sequence_of("late", desk.request("late")): "late"}, frozenset({("other", 1)})
    for one in waiting:
        desk.loras.wanted([one])

    def loads_again(count):
        assert desk.loras.look(waiting, running) == {}
        return len(desk.loads) == count

    for count in (1, 2, 3):
        until(lambda count=count: loads_again(count))
        desk.loads[-1].set_exception(jlora.NoFreeSlotError("full"))
        running = running if count == 1 else frozenset()
    assert list(desk.loras.look(waiting, running)) == ["late"]  # no sequence is left that could make room
    assert len(desk.loads) == 3


@pytest.mark.parametrize("running", [False, True])
def test_request_without_a_place_is_refused(tmp_path, running):
    """No sequence that ends makes a place, unless it runs with an adapter that can be evicted."""
    desk = Desk(tmp_path, max_cpu_loras=2)
    desk.manager.add_adapter(made("memory"))
    if running:
        desk.begin("running")
        assert desk.look("a") == {}
        assert desk.loads == []  # it waits
        desk.manager.pin_adapter("running")
    else:
        desk.manager.add_adapter(made("more"))
    failed = desk.look("a")
    assert list(failed) == ["a"]
    with pytest.raises(jlora.NoFreeSlotError, match="raise max_cpu_loras"):
        raise failed["a"]

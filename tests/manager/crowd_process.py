"""Measure seconds of queries and evictions with some adapters on the host, and print them as JSON.

It runs in its own process, because the annotation checks of the tests cost more than the measured calls.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable

import jlora
from tests.manager.tiny import make_adapter, make_world
from tests.records import on_host

EVICTED = 150  # in each of five rounds


def crowd(count: int) -> jlora.LoRAManager:
    """Return a manager with adapters of one content. Those to evict are from disk, and the others from memory."""
    manager = make_world(max_loras=2, max_cpu_loras=count).manager
    one = make_adapter("one", rank=1, modules=["layers.0.o_proj"])
    with tempfile.TemporaryDirectory() as folder:
        one.save_pretrained(folder)
        for i in range(count):
            name = f"tenant-{i:05d}"
            on_disk = i < 6 * EVICTED
            manager.add_adapter(
                jlora.LoRARequest(name, folder) if on_disk else jlora.Adapter(name=name, modules=one.modules)
            )
    return manager


def seconds(call: Callable[[], object]) -> float:
    """The least of five runs, in processor time: the machine may do something else meanwhile."""
    taken = []
    for _ in range(5):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return min(taken)


def evict(manager: jlora.LoRAManager) -> None:
    for _ in range(EVICTED):
        assert manager.remove_oldest_adapter()


def measured(count: int) -> dict[str, float]:
    manager = crowd(count)
    assert len(manager.list_adapters()) == count
    found = {"list_adapters": seconds(manager.list_adapters), "stats": seconds(manager.stats)}
    with manager.prepare(["tenant-00007", "tenant-00008"]):  # two that are passed over each time
        manager.pin_adapter("tenant-00007")
        found["evict"] = seconds(lambda: evict(manager))
    left = set(on_host(manager))
    assert len(left) == count - 5 * EVICTED
    assert {"tenant-00007", "tenant-00008"} < left
    assert f"tenant-{5 * EVICTED + 1:05d}" not in left
    assert f"tenant-{5 * EVICTED + 2:05d}" in left
    return found


if __name__ == "__main__":
    print(json.dumps([measured(int(count)) for count in sys.argv[1:]]))

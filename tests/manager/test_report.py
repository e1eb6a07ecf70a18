"""Messages about names, the log, and the cost of queries with many adapters."""

import dataclasses
import logging
import os
import time

import jax
import pytest

import jlora
from tests.manager.tiny import make_adapter, make_world, same
from tests.records import evict


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_calls")  # the checks of annotations cost more than the measured calls
def test_queries_are_linear_and_evictions_as_quick_with_ten_times_the_adapters(tmp_path):
    one = make_adapter("one", rank=1, modules=["layers.0.o_proj"])
    one.save_pretrained(tmp_path)

    def seconds(call):
        """The least of five runs, in processor time: the machine may do something else meanwhile."""
        taken = []
        for _ in range(5):
            started = time.process_time()
            call()
            taken.append(time.process_time() - started)
        return min(taken)

    def measured(count):
        manager = make_world(max_loras=2, max_cpu_loras=count).manager
        for i in range(count):
            name = f"tenant-{i:05d}"
            manager.add_adapter(jlora.LoRARequest(name, tmp_path) if i < 500 else dataclasses.replace(one, name=name))
        with manager.prepare(["tenant-00007", "tenant-00008"]):  # two that are passed over each time
            evicted = seconds(lambda: [evict(manager) for _ in range(90)])
        return seconds(manager.list_adapters), seconds(manager.stats), evicted

    few, many = measured(600), measured(6000)
    assert many[0] < 40 * few[0]
    assert many[1] < 40 * few[1]
    assert many[2] < 3 * few[2]


@pytest.mark.usefixtures("unchecked_calls")
def test_error_for_an_unknown_name_is_short_and_has_the_nearest_name():
    manager = make_world(max_loras=1, max_cpu_loras=40).manager
    for i in range(40):
        manager.add_adapter(make_adapter(f"tenant-{i:05d}", rank=1, modules=["embed"]))
    for name in ("tenant-35", "nobody", "", "x" * 5000, "line\nbreak\x1b[31m"):
        for call in (lambda name: manager.prepare([name]), manager.hold, manager.pin_adapter, manager.export_adapter):
            with pytest.raises(jlora.AdapterNotFoundError) as caught:
                call(name)
            message = str(caught.value)
            assert len(message) < 500
            assert message.isprintable()
            assert repr(name[:200]) in message
            assert message.endswith("; the nearest is 'tenant-00035'") == (name == "tenant-35")


def test_a_prepare_inside_jit_raises_and_keeps_nothing(world):
    world.load("a", "b")
    world.serve(["a", None, None])
    before, stats = world.held(), world.manager.stats()
    request = jlora.LoRARequest("c", "nowhere")
    m = world.manager
    for call in (
        lambda: m.prepare(["b", None, None]),
        lambda: m.prepare(["a", None, None]),  # kept from before
        lambda: m.prepare([request], timeout=0),
        lambda: m.add_adapter(make_adapter("c")),
        lambda: m.prefetch(request),
        lambda: m.pin_adapter("b"),
        m.warmup,
    ):
        with pytest.raises(jlora.LoRAUsageError, match=r"inside jax.jit.*Call it outside"):
            jax.jit(lambda x, call=call: (call(), x)[1])(1.0)
        with pytest.raises(jlora.LoRAUsageError):
            jax.lax.scan(lambda c, _, call=call: (call(), (c, c))[1], 0.0, None, length=2)
    assert same(before, world.held())
    assert m.stats() == stats

    def loss(x):  # jax.grad runs the code that it differentiates. Only cached traces are refused.
        with m.prepare(["b", "a", None]) as batch:
            world.check(world.logits(batch), [make_adapter("b"), make_adapter("a"), None])
        return x * 2

    assert jax.grad(loss)(1.0) == 2.0


def test_log_has_loads_writes_and_evictions_with_escaped_names(tmp_path, caplog):
    world = make_world(max_loras=1, max_cpu_loras=2)
    name = "one\nERROR forged\x1b[2J"
    make_adapter("a", modules=["embed", "layers.1.o_proj"]).save_pretrained(tmp_path)
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    with caplog.at_level(logging.INFO, "jlora"):
        world.manager.add_adapter(jlora.LoRARequest(name, tmp_path))
        world.manager.add_adapter(make_adapter("two"))
        world.manager.prepare([name]).close()
        world.manager.prepare(["two"]).close()
        world.manager.add_adapter(make_adapter("three"))
        with pytest.raises(jlora.AdapterNotFoundError):
            world.manager.add_adapter(jlora.LoRARequest("lost\n", tmp_path / "nowhere"))
        world.manager.remove_adapter("two")
    records = [record for record in caplog.records if record.name == "jlora"]
    (warning,) = [record.getMessage() for record in records if record.levelname != "INFO"]
    assert warning.startswith("2 of the 2 places of the host cache are taken")
    messages = "\n".join(["", *(record.getMessage() for record in records)])
    assert all(line.isprintable() for line in messages.split("\n"))
    for fragment in (
        f"loaded {name!r} from {str(tmp_path)!r} in ",
        f"wrote {name!r} (version 0) into slot 0 in ",
        f"evicted {name!r} from slot 0",
        f"evicted {name!r} from the host cache",
        "refused 'lost\\n' from ",
        "removed 'two'",
    ):
        assert f"\n{fragment}" in messages
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "jlora"):
        world.manager.prepare([name]).close()
    debug = {record.getMessage() for record in caplog.records if record.levelname == "DEBUG" and record.name == "jlora"}
    assert {"slot 0: filled 'embed'", "slot 0: cleared 'layers.0.o_proj'"} < debug
    assert len(debug) == 2 + 2 * 2


def test_update_adapter_names_the_tensors_that_it_takes(world):
    adapter = make_adapter("a", rank=2, modules=["embed", "layers.0.q_proj", "layers.1.o_proj"])
    world.manager.add_adapter(adapter)
    q = adapter.modules["layers.0.q_proj"]
    for name in ("layers.0.q_proj", "layers.0.q_proj.weight", "layers.0.qproj.lora_A.weight", "q_proj.lora_B.weight"):
        with pytest.raises(jlora.AdapterMismatchError, match=r"MODULE\.lora_A\.weight .*layers\.0\.q_proj"):
            world.manager.update_adapter("a", {name: q.a})
    with pytest.raises(jlora.LoRAUsageError, match=r"MODULE\.lora_A\.weight .*layers\.0\.q_proj"):
        world.manager.update_adapter("a", {})
    for prefix in ("", "base_model.model."):
        world.manager.update_adapter("a", {f"{prefix}layers.0.q_proj.lora_A.weight": q.a})

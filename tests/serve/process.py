"""One of two processes that serve a model: `python -m tests.serve.process NUMBER PORT FOLDER`.

Process 0 runs every scenario of this file, in order, on one engine over both; process 1 follows. Each writes what it
found, and how its manager was left, to FOLDER/NUMBER.json. A folder of an adapter may be another, missing or slow in
process 1. Right answers are those that the demo's adapters were trained for.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"

import jax
import pytest
from jax.sharding import AxisType

import jlora
from jlora.cli.demo import DEMO
from jlora.cli.loading import load_tokenizer
from jlora.errors import AdapterNotFoundError, LoadTimeoutError, LoRAUsageError, NoFreeSlotError
from jlora.models import from_pretrained
from jlora.serve import Engine, EngineOptions, SamplingParams
from jlora.serve.request import AdapterExistsError, EngineClosedError, RequestTimeoutError

RIGHT = {"sort": "aelnpt", "reverse": "tenalp", "shift": "qmbofu", "swap": "lpnate", None: "planet"}
GREEDY = SamplingParams(temperature=0)
LONG = SamplingParams(temperature=0, ignore_eos=True)


class World:
    """The engine of this process."""

    def __init__(self, me: int, folder: Path):
        self.me, self.folder = me, folder
        mesh = jax.make_mesh((2,), ("tensor",), axis_types=(AxisType.Auto,))
        model = from_pretrained(DEMO / "model", mesh=mesh)
        config = jlora.LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=3, process_timeout=60)
        self.manager = jlora.LoRAManager(model, config, resolve=self.resolve)
        tokenizer = load_tokenizer(DEMO / "model" / "tokenizer.json")
        options = EngineOptions(max_num_seqs=3, max_model_len=48, max_num_batched_tokens=32)
        self.engine = Engine(model, self.manager, tokenizer=tokenizer, options=options)

    def resolve(self, request: jlora.LoRARequest) -> str:
        if self.me == 1:
            if request.name.startswith("lame"):
                time.sleep(0.1)  # process 0 has read it
                return str(self.folder / "nowhere")
            if request.name == "false":
                return str(DEMO / "adapters" / "swap")
            if request.name.startswith("slow"):
                gate = self.folder / request.name
                while not gate.exists():
                    time.sleep(0.01)
        if request.name == "mended":
            return str(self.folder / f"mended{self.me}")
        return request.path

    def request(self, name: str, source: str, **options: bool) -> jlora.LoRARequest:
        return jlora.LoRARequest(name, str(DEMO / "adapters" / source), **options)

    def answer(self, lora: str | jlora.LoRARequest | None, params: SamplingParams = GREEDY) -> str:
        return self.engine.submit("planet=", params, lora=lora).result(60).text


SCENARIOS: list[Callable[[World], None]] = []


def scenario(function: Callable[[World], None]) -> Callable[[World], None]:
    SCENARIOS.append(function)
    return function


@scenario
def mixed(world: World) -> None:
    """Five kinds of requests on two slots and a host cache of three."""
    for name in ("shift", "reverse"):
        world.engine.add_lora(world.request(name, name))
    names = [*RIGHT] * 5
    asked = [world.engine.submit("planet=", GREEDY, lora=name) for name in names]
    assert [one.result(60).text for one in asked] == [RIGHT[name] for name in names]
    stats = world.manager.stats()
    assert stats.host_evictions > 0, stats
    assert stats.slot_evictions > 0, stats
    assert stats.compilations == 1, stats


@scenario
def sampled(world: World) -> None:
    """A seed says all, whoever shares the batch."""
    params = SamplingParams(temperature=2.0, seed=7, logprobs=1, max_tokens=6)
    alone = world.engine.submit("planet=", params, lora="sort").result(60)
    others = [world.engine.submit("planet=", GREEDY, lora=name) for name in ("swap", None)]
    among = world.engine.submit("planet=", params, lora="sort").result(60)
    assert alone.tokens == among.tokens
    assert [one.logprob for one in among.logprobs] == pytest.approx([one.logprob for one in alone.logprobs], abs=1e-5)
    assert [one.result(60).text for one in others] == [RIGHT["swap"], RIGHT[None]]


@scenario
def ends(world: World) -> None:
    """Stop strings, cancelling and deadlines are decided by process 0, and hold for all."""
    assert world.answer("sort", SamplingParams(temperature=0, stop=("np",))) == "ael"
    running = world.engine.submit("planet=", LONG, lora="sort")
    next(iter(running))
    running.cancel()
    late = world.engine.submit("planet=", LONG, lora="sort", timeout=0.001)
    with pytest.raises(RequestTimeoutError):
        late.result(60)
    assert world.answer("sort") == RIGHT["sort"]


@scenario
def one_cannot_read(world: World) -> None:
    """What one process cannot read, none has."""
    before = set(world.engine.list_loras())
    with pytest.raises(AdapterNotFoundError, match=r"'lame'.*\(process 1\)"):
        world.engine.add_lora(world.request("lame", "sort"))
    with pytest.raises(AdapterNotFoundError, match=r"'lame'.*\(process 1\)"):
        world.answer(world.request("lame", "sort"))
    with pytest.raises(jlora.LoRAError, match="Files must be the same everywhere"):
        world.engine.add_lora(world.request("false", "sort"))
    assert set(world.engine.list_loras()) == before
    with pytest.raises(AdapterExistsError):
        world.engine.add_lora(world.request("sort", "sort"))


@scenario
def what_one_cannot_read_leaves_nothing(world: World) -> None:
    """More of it than the host keeps; and what is mended is read anew."""
    before = world.engine.list_loras().keys(), world.manager.list_evicted()
    for i in range(5):
        with pytest.raises(AdapterNotFoundError, match=r"\(process 1\)"):
            world.engine.add_lora(world.request(f"lame{i}", "sort"))
    assert (world.engine.list_loras().keys(), world.manager.list_evicted()) == before
    (world.folder / "mended0").symlink_to(DEMO / "adapters" / "sort")
    with pytest.raises(AdapterNotFoundError, match=r"\(process 1\)"):
        world.engine.add_lora(world.request("mended", "sort"))
    (world.folder / "mended0").unlink()
    for process in range(2):
        (world.folder / f"mended{process}").symlink_to(DEMO / "adapters" / "reverse")
    world.engine.add_lora(world.request("mended", "sort"))
    assert world.answer("mended") == RIGHT["reverse"]
    world.engine.remove_lora("mended")


@scenario
def one_is_slow(world: World) -> None:
    """While a process reads, nobody waits but those who asked for that."""
    with pytest.raises(LoadTimeoutError):
        world.engine.add_lora(world.request("slow", "swap"), timeout=0.2)
    assert "slow" not in world.engine.list_loras()
    waiting = world.engine.submit("planet=", GREEDY, lora=world.request("slow2", "reverse"))
    assert world.answer("sort") == RIGHT["sort"]
    added: list[BaseException | None] = []

    def add() -> None:
        try:
            world.engine.add_lora(world.request("slow3", "shift"))
            added.append(None)
        except BaseException as error:
            added.append(error)

    adding = threading.Thread(target=add)
    adding.start()
    assert world.answer("sort") == RIGHT["sort"]
    assert not added
    for name in ("slow", "slow2", "slow3"):
        (world.folder / name).touch()
    assert waiting.result(60).text == RIGHT["reverse"]
    adding.join(60)
    assert added == [None]
    assert world.answer("slow3") == RIGHT["shift"]
    world.engine.add_lora(world.request("slow", "swap"))
    assert world.answer("slow") == RIGHT["swap"]
    for name in ("slow", "slow2", "slow3"):
        world.engine.remove_lora(name)


@scenario
def generations(world: World) -> None:
    """Who runs goes on with the weights that it began with, replaced or removed."""
    world.engine.add_lora(world.request("guest", "sort"))
    running = world.engine.submit("planet=", LONG, lora="guest")
    pieces = iter(running)
    text = next(pieces).text
    world.engine.add_lora(world.request("guest", "reverse", load_inplace=True))
    assert world.answer("guest") == RIGHT["reverse"]
    world.engine.remove_lora("guest")
    with pytest.raises(AdapterNotFoundError):
        world.engine.submit("planet=", GREEDY, lora="guest")
    text += "".join(piece.text for piece in pieces)
    assert text.startswith(RIGHT["sort"])
    assert "guest" not in world.engine.list_loras()


@scenario
def replaced_whenever_requests_end(world: World) -> None:
    """Beside others that go on."""
    world.engine.add_lora(world.request("guest", "sort"))
    stop = threading.Event()

    def ask(lora: str | None, params: SamplingParams) -> None:
        while not stop.is_set():
            world.answer(lora, params)

    with ThreadPoolExecutor() as pool:
        short = SamplingParams(temperature=0, max_tokens=1)
        asking = [pool.submit(ask, *one) for one in (("guest", short), (None, LONG))]
        try:
            for _ in range(20):
                world.engine.add_lora(world.request("guest", "sort", load_inplace=True))
        finally:
            stop.set()
        for one in asking:
            one.result(60)
    assert world.answer("guest") == RIGHT["sort"]
    world.engine.remove_lora("guest")


@scenario
def pins(world: World) -> None:
    for name in ("sort", "swap"):
        world.engine.pin_lora(name)
    assert world.engine.list_loras()["sort"].pinned
    with pytest.raises(NoFreeSlotError):
        world.answer("shift")
    with pytest.raises(NoFreeSlotError):
        world.engine.pin_lora("shift")
    world.engine.unpin_lora("sort")
    assert world.answer("shift") == RIGHT["shift"]
    world.engine.unpin_lora("swap")
    with pytest.raises(AdapterNotFoundError):
        world.engine.pin_lora("nobody")


@scenario
def pins_of_what_is_read_slowly(world: World) -> None:
    gate = world.folder / "slow4"
    gate.touch()
    world.engine.add_lora(world.request("slow4", "sort"))
    for name in ("shift", "swap", "reverse"):
        assert world.answer(name) == RIGHT[name]
    assert world.manager.level("slow4") == "evicted"
    gate.unlink()
    with ThreadPoolExecutor() as pool:
        pinning = pool.submit(world.engine.pin_lora, "slow4")
        assert world.answer("swap") == RIGHT["swap"]
        assert not pinning.done()
        gate.touch()
        pinning.result(60)
    assert world.manager.list_adapters()["slow4"].pinned
    world.engine.remove_lora("slow4")


@scenario
def many_threads(world: World) -> None:
    """Requests, loads and unloads from eight threads at once."""
    wrong: list[object] = []

    def work(number: int) -> None:
        own = f"own{number}"
        try:
            for turn in range(3):
                source = [*RIGHT][(number + turn) % 4]
                world.engine.add_lora(world.request(own, source))
                if (text := world.answer(own)) != RIGHT[source]:
                    wrong.append((own, source, text))
                world.engine.remove_lora(own)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong, wrong


def lead(world: World) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in SCENARIOS:
        try:
            one(world)
            found[one.__name__] = ""
        except BaseException:
            found[one.__name__] = traceback.format_exc()
    assert world.engine.close(30)
    for call in (lambda: world.answer("sort"), lambda: world.engine.add_lora(world.request("x", "sort"))):
        with pytest.raises(EngineClosedError):
            call()
    return found


def follow(world: World) -> dict[str, str]:
    for call in (lambda: world.answer("sort"), lambda: world.engine.add_lora(world.request("x", "sort"))):
        with pytest.raises(LoRAUsageError, match="process 0 takes the requests"):
            call()
    world.engine.follow()
    return {}


def left(world: World) -> dict[str, object]:
    """What must be the same in both, and nothing held."""
    adapters = {name: (info.rank, info.slot, info.pinned) for name, info in world.manager.list_adapters().items()}
    return {
        "adapters": adapters,
        "slots": world.manager.slot_names,
        "evicted": sorted(world.manager.list_evicted()),
        "leases": len(world.manager.leases()),
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("jlora-serve")),
    }


def main() -> None:
    me, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, me)
    world = World(me, folder)
    for name in ("sort", "swap"):  # in both: before the start nobody is told
        world.engine.add_lora(world.request(name, name))
    world.engine.start()
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    found = (lead if me == 0 else follow)(world)
    assert not compiled
    (folder / f"{me}.json").write_text(json.dumps({"scenarios": found, "left": left(world)}))


if __name__ == "__main__":
    main()

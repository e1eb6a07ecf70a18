"""Compare a server of thousands of adapters with one that has as many adapters as slots, under the same load.

    python -m benchmarks.serve_zipf [--minutes 10] [--adapters 2000] [--against 64] [--http] [--out results.json]

The model is the demo's. All adapters are different, and their right answers are known (`benchmarks.tenants`). Both
servers have the same slots, host cache and number of requests in flight. A new request starts when another ends, and
there are more requests in flight than rows, so no row is ever empty. The servers run in alternating turns of `--slice`
seconds, so that other load on the machine affects both; `--minutes` is the time of each server. Adapters are chosen by
a Zipf law, in random order of popularity. Every answer of `--tokens` tokens is compared with the answer of the demo's
adapter to the same prompt alone.

By default requests go through `Engine.submit`, with both engines in this process. With `--http` each server is a `jlora
serve` process, and answers are streamed. Times are measured from the submission. With more requests than rows, most of
the time to the first token is waiting.

Requests that end between two readings of the clock under full load are counted, without the first `--ramp` seconds of
each turn. A request is a slot hit if it causes no write into a slot, and a host hit if it causes no read from disk;
both rates are of all requests. `processor_ms_per_request` is the time of the server's process on all cores, which
depends least on other load on the machine; with both engines in this process it includes the client. The results are
also written on an interrupt (Ctrl-C), with a plot if matplotlib is installed. The exit status is 1 if an answer was
wrong.
"""

import argparse
import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import jlora
from benchmarks.stream_client import Connection
from benchmarks.tenants import DEMO, RANK, Tenant, demo_prompts, right_answers, write_tenants
from benchmarks.timing import machine, processor_seconds
from jlora.cli.loading import load_model, load_tokenizer
from jlora.models import Decoder
from jlora.serve import Engine, EngineOptions, SamplingParams

_CONTEXT = 64
_COUNTED = ("slot_hits", "slot_loads", "host_loads")


@dataclass
class Done:
    """One finished request.

    Attributes:
      tenant, prompt: Indices of the adapter and the prompt.
      asked, first, ended: Times of the submission, the first token and the end.
      wrong: Description of the error or of the wrong answer, else None.
    """

    tenant: int
    prompt: int
    asked: float
    first: float = 0.0
    ended: float = 0.0
    wrong: str | None = None


Told = Callable[[Done], None]


class Server(Protocol):
    """A server under test, in process `pid`."""

    pid: int

    def ask(self, tenant: int, prompt: int, told: Told) -> None:
        """Submit a request. `told` is called once, on any thread."""
        ...

    def counts(self) -> dict[str, int]:
        """Return the counters `_COUNTED` since the start."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Load:
    """The requests of a server and their right answers."""

    tenants: list[Tenant]
    prompts: list[str]
    tokens: dict[tuple[str, int], tuple[int, ...]]  # (function, prompt) -> answer
    texts: dict[tuple[str, int], str]
    length: int

    def key(self, tenant: int, prompt: int) -> tuple[str, int]:
        return self.tenants[tenant].function, prompt


class InProcess:
    """An engine in this process."""

    def __init__(self, load: Load, model: Decoder, args: argparse.Namespace):
        self._load, self.pid = load, os.getpid()
        config = jlora.LoRAConfig(max_loras=args.slots, max_lora_rank=RANK, max_cpu_loras=args.max_cpu_loras)
        self._manager = jlora.LoRAManager(model, config)
        tokenizer = load_tokenizer(DEMO / "model" / "tokenizer.json")
        options = EngineOptions(max_num_seqs=args.rows, max_model_len=_CONTEXT, max_waiting=args.in_flight)
        self._engine = Engine(model, self._manager, tokenizer=tokenizer, options=options)
        self._params = SamplingParams(temperature=0, max_tokens=load.length, ignore_eos=True)
        self._prompts = [tokenizer.encode(prompt).ids for prompt in load.prompts]
        for tenant in load.tenants:
            self._engine.add_lora(jlora.LoRARequest(tenant.name, str(tenant.folder)))
        self._engine.start()

    def ask(self, tenant: int, prompt: int, told: Told) -> None:
        done, tokens, texts = Done(tenant, prompt, time.perf_counter()), list[int](), list[str]()
        key = self._load.key(tenant, prompt)

        def hear(event: Any) -> None:
            if isinstance(event, Exception):
                done.wrong = repr(event)
            else:
                tokens.extend(event.tokens)
                texts.append(event.text)
                if not done.first:
                    done.first = time.perf_counter()
                if event.finish_reason is None:
                    return
                if tuple(tokens) != self._load.tokens[key] or "".join(texts) != self._load.texts[key]:
                    done.wrong = f"tokens {tokens}, text {''.join(texts)!r}"
            done.ended = time.perf_counter()
            told(done)

        self._engine.submit(self._prompts[prompt], self._params, lora=self._load.tenants[tenant].name).listen(hear)

    def counts(self) -> dict[str, int]:
        stats = self._manager.stats()
        return {name: getattr(stats, name) for name in _COUNTED}

    def close(self) -> None:
        self._engine.close(30)


class OverHTTP:
    """A `jlora serve` process, with its client in a thread of this process."""

    def __init__(self, load: Load, log: Path, args: argparse.Namespace):
        self._load = load
        command = [
            *(sys.executable, "-m", "jlora", "serve", str(DEMO / "model"), "--dtype", "float32", "--port", "0"),
            *("--max-loras", args.slots, "--max-lora-rank", RANK, "--max-cpu-loras", args.max_cpu_loras),
            *("--max-num-seqs", args.rows, "--max-waiting", args.in_flight, "--lora-modules"),
            *(f"{tenant.name}={tenant.folder}" for tenant in load.tenants),
        ]
        with log.open("w") as errors:  # its own session, so that Ctrl-C reaches this process only
            self._process = subprocess.Popen(
                list(map(str, command)), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        try:
            found = re.search(r"http://([\w.]+):(\d+)", self._process.stdout.readline())
            if not found:
                raise SystemExit(f"the server does not start: {log.read_text()[-2000:]}")
        except BaseException:  # no other code can end it yet
            self._process.kill()
            raise
        self._url, self._address = found[0], (found[1], int(found[2]))
        self._free: list[Connection] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def ask(self, tenant: int, prompt: int, told: Told) -> None:
        asyncio.run_coroutine_threadsafe(self._ask(Done(tenant, prompt, time.perf_counter()), told), self._loop)

    async def _ask(self, done: Done, told: Told) -> None:
        body = {
            "model": self._load.tenants[done.tenant].name,
            "prompt": self._load.prompts[done.prompt],
            "max_tokens": self._load.length,
            "temperature": 0,
            "ignore_eos": True,
        }
        try:
            connection = self._free.pop() if self._free else await Connection.open(*self._address)
            answer = await connection.stream(body)
            self._free.append(connection)
            done.asked, done.first, done.ended = answer.asked, answer.asked + answer.first, answer.parts[-1][0]
            if answer.text != self._load.texts[self._load.key(done.tenant, done.prompt)]:
                done.wrong = f"text {answer.text!r}"
        except Exception as error:  # count every kind of error
            done.ended, done.wrong = time.perf_counter(), repr(error)
        told(done)

    def counts(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self._url}/metrics") as answer:
            text = answer.read().decode()
        return {name: int(float(re.search(rf"^jlora:{name}_total (\S+)$", text, re.M)[1])) for name in _COUNTED}  # pyright: ignore[reportOptionalSubscript]

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._loop.call_soon_threadsafe(self._loop.stop)


def _resident(pid: int) -> float:
    """Return the resident memory of a process in MB."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024  # pyright: ignore[reportOptionalSubscript]


@dataclass
class Arm:
    """One server and its measurements."""

    name: str
    server: Server
    load: Load
    shares: np.ndarray  # cumulative shares of the requests by tenant
    seconds: float = 0.0  # counted time
    processor: float = 0.0  # seconds of its process on all cores in that time
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)  # requests a second of each turn
    wrong: list[str] = field(default_factory=list)
    answers: int = 0  # number of compared answers
    counted: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, float]] = field(default_factory=list)  # (seconds since the start, MB)

    def turn(self, seconds: float, ramp: float, in_flight: int, rng: np.random.Generator, started: float) -> None:
        """Keep `in_flight` requests in flight for some seconds, then wait for the last of them."""
        done: queue.SimpleQueue[Done] = queue.SimpleQueue()

        def ask() -> None:
            tenant = int(np.searchsorted(self.shares, rng.random(), side="right"))
            self.server.ask(tenant, int(rng.integers(len(self.load.prompts))), done.put)

        for _ in range(in_flight):
            ask()
        begin, under_way = time.perf_counter(), in_flight
        full: list[tuple[float, float, dict[str, int]]] = []  # (time, processor, counts) at start and end of counting
        ended: list[Done] = []
        while under_way:
            one = done.get(timeout=120)
            under_way -= 1
            now = time.perf_counter()
            self.answers += 1
            if one.wrong is not None:
                tenant, prompt = self.load.tenants[one.tenant], self.load.prompts[one.prompt]
                self.wrong.append(f"{tenant.name} ({tenant.function}), {prompt!r}: {one.wrong}")
            if len(full) == 1:
                ended.append(one)
            if len(full) < 2 and now - begin >= (ramp, ramp + seconds)[len(full)]:
                full.append((now, processor_seconds(self.server.pid), self.server.counts()))
                self.memory.append((round(now - started, 1), round(_resident(self.server.pid), 1)))
            if len(full) < 2:
                ask()
                under_way += 1
        (start, busy, before), (end, still, after) = full
        self.seconds, self.processor = self.seconds + end - start, self.processor + still - busy
        self.rates.append(len(ended) / (end - start))
        right = [one for one in ended if one.wrong is None]
        self.first += [one.first - one.asked for one in right]
        self.whole += [one.ended - one.asked for one in right]
        self.counted.update({name: after[name] - before[name] for name in after})

    def forget(self) -> None:
        """Reset all measurements except the wrong answers."""
        self.seconds, self.processor, self.first, self.whole, self.rates, self.memory = 0.0, 0.0, [], [], [], []
        self.counted.clear()

    def figures(self) -> dict[str, Any]:
        """Return the figures of all turns so far."""
        count = self.counted
        return {
            "adapters": len(self.load.tenants),
            "seconds": round(self.seconds, 1),
            "requests": len(self.whole),
            "requests_per_second": round(len(self.whole) / self.seconds, 2),
            "tokens_per_second": round(len(self.whole) * self.load.length / self.seconds, 1),
            "requests_per_second_by_turn": [round(rate, 1) for rate in self.rates],
            "processor_ms_per_request": round(self.processor / len(self.whole) * 1e3, 2),
            "slot_hit_rate": round(1 - count["slot_loads"] / len(self.whole), 4),
            "host_hit_rate": round(1 - count["host_loads"] / len(self.whole), 4),
            **{f"{name}_per_second": round(count[name] / self.seconds, 2) for name in _COUNTED[1:]},
            "first_token_seconds": _percentiles(self.first),
            "request_seconds": _percentiles(self.whole),
            "answers_compared": self.answers,
            "wrong": len(self.wrong),
            "described": self.wrong[:10],
            "resident_mb": self.memory,
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 4) for p in (1, 25, 50, 75, 90, 99)}


def zipf_shares(count: int, power: float, rng: np.random.Generator) -> np.ndarray:
    """Return the cumulative shares of `count` adapters in random order of popularity."""
    shares = 1 / np.arange(1, count + 1) ** power
    return np.cumsum(rng.permutation(shares)) / shares.sum()


def report(arms: list[Arm], args: argparse.Namespace) -> dict[str, Any]:
    many, few = arms
    third = max(1, len(many.memory) // 3)
    early, late = (float(np.median([mb for _, mb in part])) for part in (many.memory[:third], many.memory[-third:]))
    return {
        **machine(),
        "jlora": jlora.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "command": f"python -m benchmarks.serve_zipf {' '.join(sys.argv[1:])}".strip(),
        "through": "HTTP, streamed" if args.http else "Engine.submit",
        **{name: vars(args)[name] for name in ("zipf", "slots", "max_cpu_loras", "rows", "in_flight", "tokens")},
        "throughput_of_many_over_few": round(_rate(many) / _rate(few), 4),
        "median_of_turns": round(float(np.median([m / f for m, f in zip(many.rates, few.rates, strict=False)])), 4),
        "wrong": len(many.wrong) + len(few.wrong),
        "resident_mb_first_and_last_third": [round(early, 1), round(late, 1)],
        "arms": {arm.name: arm.figures() for arm in arms},
    }


def _rate(arm: Arm) -> float:
    return len(arm.whole) / arm.seconds


def plot(arms: list[Arm], found: dict[str, Any], path: Path) -> None:
    """Plot requests per second by turn, seconds by share of requests and memory over time, given matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("# no plot: matplotlib is not installed", flush=True)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rates, times, memory) = plt.subplots(1, 3, figsize=(13, 3.6))
    for arm, color in zip(arms, ("tab:red", "tab:blue"), strict=True):
        label = f"{len(arm.load.tenants):,} adapters"
        rates.plot(range(1, len(arm.rates) + 1), arm.rates, "o-", color=color, label=label)
        for values, style, what in ((arm.first, "--", "first token"), (arm.whole, "-", "whole answer")):
            shares = np.linspace(0, 100, 401)
            times.plot(np.percentile(values, shares), shares, style, color=color, label=f"{label}, {what}")
        memory.plot([at / 60 for at, _ in arm.memory], [mb for _, mb in arm.memory], color=color, label=label)
    most = max(max(arm.rates) for arm in arms), max(mb for arm in arms for _, mb in arm.memory)
    rates.set(xlabel="turn", ylabel="requests a second", ylim=(0, 1.1 * most[0]))
    times.set(xlabel="seconds from submission", ylabel="% of requests", xscale="log")
    memory.set(xlabel="minutes", ylabel="resident MB", ylim=(0, 1.1 * most[1]))
    for axes in (rates, times, memory):
        axes.legend(fontsize=6)
    title = f"{found['slots']} slots, host cache {found['max_cpu_loras']}, zipf {found['zipf']}, {found['through']}"
    figure.suptitle(
        f"{title}; {found['device']}, {found['cores']} cores, JAX {found['jax']}, {found['date']}", fontsize=9
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes for each server")
    parser.add_argument("--slice", type=float, default=60.0, help="length of a turn in seconds")
    parser.add_argument("--ramp", type=float, default=3.0, help="seconds at the start of a turn that are not counted")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds of a first turn that is not counted")
    parser.add_argument("--adapters", type=int, default=2000)
    parser.add_argument("--against", type=int, default=64)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--max-cpu-loras", type=int, default=512)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--in-flight", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--http", action="store_true")
    parser.add_argument("--folder", type=Path, help="folder of the adapters, written if missing (310 KB each)")
    parser.add_argument("--out", type=Path, help="JSON file; the plot is written beside it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run(args, args.folder or Path(folder), Path(folder)))


def run(args: argparse.Namespace, folder: Path, logs: Path) -> int:
    tenants = write_tenants(folder, max(args.adapters, args.against))
    print(f"# {len(tenants)} adapters written", flush=True)
    tokenizer = load_tokenizer(DEMO / "model" / "tokenizer.json")
    prompts = demo_prompts(args.prompts)

    def fresh() -> Decoder:
        return load_model(DEMO / "model", "float32")

    model = fresh()
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=RANK))
    tokens = right_answers(model, manager, [tokenizer.encode(prompt).ids for prompt in prompts], args.tokens)
    texts = {key: tokenizer.decode(answer) for key, answer in tokens.items()}
    print(f"# {len(tokens)} right answers known", flush=True)
    arms: list[Arm] = []
    started, status = time.perf_counter(), 1
    try:
        for name, count in (("many", args.adapters), ("few", args.against)):
            load = Load(tenants[:count], prompts, tokens, texts, args.tokens)
            server = OverHTTP(load, logs / f"{name}.log", args) if args.http else InProcess(load, fresh(), args)
            shares = zipf_shares(count, args.zipf, np.random.default_rng(args.seed))
            arms.append(Arm(name, server, load, shares))
            print(f"# {name}: {count} adapters are registered, and it serves", flush=True)
        rng = np.random.default_rng(args.seed + 1)
        act = partial(Arm.turn, in_flight=args.in_flight, rng=rng, started=started)
        for arm in arms:
            act(arm, args.warm, ramp=0.0)
            arm.forget()
        left = args.minutes * 60
        while left > 0:
            for arm in arms:
                act(arm, min(args.slice, left), ramp=args.ramp)
            left -= args.slice
            many, few = (arm.rates[-1] for arm in arms)
            wrong = sum(len(arm.wrong) for arm in arms)
            print(
                f"# {(time.perf_counter() - started) / 60:.1f} min: {many:.1f} and {few:.1f} requests a second "
                f"({many / few:.2f}), {wrong} wrong, {arms[0].memory[-1][1]:.0f} MB",
                flush=True,
            )
        status = 0
    except KeyboardInterrupt:
        print("# interrupted: what there is so far", flush=True)
    finally:
        if len(arms) == 2 and all(arm.rates for arm in arms):
            found = report(arms, args)
            text = json.dumps(found, indent=1)
            print(text if args.out is None else f"# written to {args.out}", flush=True)
            if args.out:
                args.out.write_text(text + "\n")
                plot(arms, found, args.out.with_suffix(".png"))
            status = status or int(found["wrong"] > 0)
        for arm in arms:
            arm.server.close()
    return status


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # clean up as for Ctrl-C
    main()

"""Measure tokens per second over HTTP with and without adapters, and the time to the first token of adapters.

    python -m benchmarks.serve_http [--out results.json] [--layers 32] [--batches 8 64] [--in-use 8 32] [--context 1000]
    python -m benchmarks.serve_http --shape tiny          sizes for a CPU, to try the benchmark

Needs starlette, uvicorn, jinja2 and tokenizers (extra `serve`). The server is that of `jlora serve`, in
its own process, with random bf16 weights of Llama-3-8B's shape. The client is this process, which never uses the
device. Answers are streamed. The text of each token has one mark, so tokens can be counted in any chunks.

For each batch size, the bare loop of `benchmarks.serve_decode` is measured first. Then a server with as many rows
decodes for the base model in all of them. Its tokens are counted between the first token of the last sequence and the
last token of the first sequence to end. `server_us_per_token` and `client_us_per_token` are the processor time of the
two processes from the first request to the last answer.

At the last of these servers the rows also decode for adapters in slots, `--in-use` of them, in alternation with the
base model. `of_the_base` is the share of the base model's tokens per second in the same run.

Then, at this server, the time to the first token is measured in milliseconds for one short prompt after
another, with adapters of rank 16 on all seven projections of every layer (84 MB each at 32 layers):

  base        no adapter
  resident    the adapter is in a slot
  host        the adapter is in the host cache and in no slot
  cold        the adapter is registered, and is read from its file, which is in the page cache
  cold disk   as cold, after a request to the kernel to drop the file (`posix_fadvise`), which it may ignore

With `--beside N`, N sequences of the base model decode at the same time.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from flax import nnx

import jlora
from benchmarks.decode_step import llama_3_8b
from benchmarks.serve_decode import bare_loop, extent_of
from benchmarks.stream_client import Answer, Connection
from benchmarks.timing import machine, processor_seconds
from jlora.models import Decoder, DecoderConfig
from jlora.serve import Engine, EngineOptions
from jlora.serve.http.lora import load
from jlora.serve.http.server import listen, serve
from jlora.serve.http.service import Service

_MARK = b"~"  # occurs once in the text of every token
_BASE = "base"


# --- the server's process ---------------------------------------------------------------------------------------------


def make_config(args: argparse.Namespace) -> DecoderConfig:
    config = dataclasses.replace(llama_3_8b(args.layers), max_position_embeddings=extent_of(args.context))
    if args.shape == "tiny":
        sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        config = dataclasses.replace(config, **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return config


def make_tokenizer(size: int) -> Any:
    """Return a tokenizer that writes token i as one mark and its number."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"{_MARK.decode()}{i}": i for i in range(size)}, unk_token=f"{_MARK.decode()}0"))


def server(args: argparse.Namespace, folder: Path, tell: Any) -> None:
    """Run one server for each batch size in turn; send ("about", ...), ("bare", ...), ("ready", ...) to `tell`."""
    config = make_config(args)
    model = Decoder(config, dtype=jnp.float32 if args.shape == "tiny" else jnp.bfloat16, rngs=nnx.Rngs(0))
    tell.send(("about", machine()))
    for batch in args.batches:
        tell.send(("bare", bare_loop(model, batch, args.context, args.steps)))
    sizes = jlora.LoRAConfig(max_loras=args.slots, max_lora_rank=args.rank, max_cpu_loras=args.max_cpu_loras)
    manager, tokenizer = jlora.LoRAManager(model, sizes), make_tokenizer(config.vocab_size)
    for batch in args.batches:
        options = EngineOptions(max_num_seqs=batch, max_num_batched_tokens=args.chunk)
        engine = Engine(model, manager, tokenizer=tokenizer, options=options)
        service = Service(engine, manager, tokenizer, (_BASE,), _BASE, engine.max_model_len)
        for path in sorted(folder.iterdir()) if batch == args.batches[-1] else ():
            load(service, path.name, lambda path=path: jlora.LoRARequest(path.name, str(path)), str(path))
        bound, started = listen("127.0.0.1", 0), time.perf_counter()

        def ready(port: int = bound.getsockname()[1], started: float = started) -> None:
            tell.send(("ready", (port, round(time.perf_counter() - started, 1))))

        serve(service, bound, drain_seconds=5.0, ready=ready)


# --- the client's -----------------------------------------------------------------------------------------------------


def write_adapters(folder: Path, config: DecoderConfig, count: int, rank: int) -> None:
    """Write adapters that differ in one value. Their bytes cannot be shared, and they are fast to make."""
    rng, tensors = np.random.default_rng(0), {}
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        **{f"self_attn.{name}": shape for name, shape in
           {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}.items()},
        **{f"mlp.{name}": shape for name, shape in
           {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}.items()},
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        for name, (fan_in, fan_out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            a = rng.standard_normal((rank, fan_in), np.float32) * fan_in**-0.5
            tensors[f"{prefix}.lora_A.weight"] = a.astype(ml_dtypes.bfloat16)
            b = rng.standard_normal((fan_out, rank), np.float32) * 0.01
            tensors[f"{prefix}.lora_B.weight"] = b.astype(ml_dtypes.bfloat16)
    first = next(iter(tensors.values()))
    says = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "fan_in_fan_out": False}
    for i in range(count):
        own = folder / f"adapter{i:03d}"
        own.mkdir()
        first[0, 0] = i / 64
        safetensors.numpy.save_file(tensors, own / "adapter_model.safetensors")
        names = [name.rpartition(".")[2] for name in shapes]
        (own / "adapter_config.json").write_text(json.dumps({**says, "target_modules": names}))


def forget(file: Path) -> None:
    """Request the kernel to drop the cached pages of a file."""
    opened = os.open(file, os.O_RDONLY)
    try:
        os.fsync(opened)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(opened)


@dataclasses.dataclass(frozen=True)
class Client:
    """Requests to one server at `port` with process `pid`."""

    pid: int
    port: int
    vocab: int

    async def stream(self, prompt: list[int], tokens: int, model: str = _BASE, at: Connection | None = None) -> Answer:
        connection = at or await Connection.open("127.0.0.1", self.port)
        try:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            return await connection.stream(body)
        finally:
            if at is None:
                connection.close()

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return np.random.default_rng(count).integers(10, min(self.vocab, 1000), (count, length)).tolist()

    async def throughput(
        self, batch: int, context: int, chunk: int, window: int, names: Sequence[str] = (_BASE,)
    ) -> dict[str, Any]:
        """Return tokens per second while all rows decode, each for one of the names in turn."""
        lead = batch * -(-context // chunk)  # steps until the last prompt is prefilled
        length = context - lead - window
        if length < 1:
            raise SystemExit(f"a context of {context} is too short: all prompts take {lead} steps, {window} are timed")
        before = processor_seconds(self.pid), time.process_time(), time.perf_counter()
        prompts = enumerate(self.prompts(batch, length))
        asked = (self.stream(prompt, lead + window, names[i % len(names)]) for i, prompt in prompts)
        answers = await asyncio.gather(*asked)
        after = processor_seconds(self.pid), time.process_time(), time.perf_counter()
        counts = [[(at, data.count(_MARK)) for at, data in answer.parts] for answer in answers]
        if any(sum(count for _, count in of_one) != lead + window for of_one in counts):
            raise SystemExit("an answer is not as long as it was asked to be")
        begun = max(answer.asked + answer.first for answer in answers)
        ended = min(answer.parts[-1][0] for answer in answers)
        tokens = sum(count for of_one in counts for at, count in of_one if begun < at <= ended)
        events = sum(count > 0 for of_one in counts for at, count in of_one if begun < at <= ended)
        every = batch * (lead + window)
        return {
            "tokens_per_second": round(tokens / (ended - begun), 1),
            "ms": round((ended - begun) * batch / tokens * 1e3, 3),
            "tokens_per_event": round(tokens / events, 3),
            "seconds_until_all_decode": round(begun - before[2], 2),
            "server_us_per_token": round((after[0] - before[0]) / every * 1e6, 1),
            "client_us_per_token": round((after[1] - before[1]) / every * 1e6, 1),
        }

    async def first_tokens(
        self, names: Iterable[str | None], length: int, before: Callable[[str], None] = lambda name: None
    ) -> dict[str, float]:
        """Return milliseconds to the first token, for one request after the other."""
        connection, times = await Connection.open("127.0.0.1", self.port), list[float]()
        (prompt,) = self.prompts(1, length)
        for name in names:
            if name is not None:
                before(name)
            times.append((await self.stream(prompt, 2, name or _BASE, connection)).first * 1e3)
            await asyncio.sleep(0.02)  # let the engine become idle
        connection.close()
        return {
            "requests": len(times),
            **{
                name: round(float(np.percentile(times, p)), 2) for name, p in (("median", 50), ("p10", 10), ("p90", 90))
            },
        }

    async def ladder(self, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Return the figures of each level, in an order in which every request finds its adapter at that level."""
        (prompt,) = self.prompts(1, 32)
        names = sorted(path.name for path in folder.iterdir())
        # The `max_cpu_loras` adapters that were read last are on the host, and the last used of these are in slots.
        # Requests in turn for more adapters than fit therefore always miss.
        on_host = names[-args.max_cpu_loras :]
        turns = itertools.cycle(names)

        async def others() -> None:
            while True:
                await self.stream(prompt, extent_of(args.context) - 64)

        beside = [asyncio.ensure_future(others()) for _ in range(args.beside)]
        await asyncio.sleep(1.0 if beside else 0.0)
        try:
            found: dict[str, Any] = {"base": await self.first_tokens([None] * args.requests, 32)}
            file = "adapter_model.safetensors"
            found["cold disk"] = await self.first_tokens(
                itertools.islice(turns, args.requests), 32, lambda name: forget(folder / name / file)
            )
            for name in names:
                (folder / name / file).read_bytes()
            found["cold"] = await self.first_tokens(itertools.islice(turns, args.requests), 32)
            await self.first_tokens([*names, *on_host], 2)
            found["host"] = await self.first_tokens(itertools.islice(itertools.cycle(on_host), args.requests), 32)
            found["resident"] = await self.first_tokens([names[-1]] * (args.requests + 1), 32)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
        return found


def expect(told: Any, process: Any, what: str) -> Any:
    """Return the value of the server's next message, which must be of the given kind."""
    while not told.poll(1.0):
        if not process.is_alive():
            raise SystemExit("the server has ended")
    try:
        kind, value = told.recv()
    except EOFError:
        raise SystemExit("the server has ended") from None
    if kind != what:
        raise SystemExit(f"the server says {kind}, and {what} was to come")
    return value


def streamed(client: Client, args: argparse.Namespace, batch: int, kinds: dict[int, list[str]]) -> list[dict[str, Any]]:
    """Return a row for each kind of traffic: number of adapters -> names of the model. The first is the base."""

    def once(names: list[str], window: int) -> dict[str, Any]:
        return asyncio.run(client.throughput(batch, args.context, args.chunk, window, names))

    for names in kinds.values():
        once(names, min(args.window, 20))  # warm-up: compiled steps, adapters in slots
    runs: dict[int, list[dict[str, Any]]] = {adapters: [] for adapters in kinds}
    for _ in range(args.repeats):
        for adapters, names in kinds.items():
            runs[adapters].append(once(names, args.window))
    rows = []
    for adapters, of_one in runs.items():
        row = {"what": "HTTP, streamed", "batch": batch, "adapters": adapters}
        row |= {name: round(statistics.median(run[name] for run in of_one), 3) for name in of_one[0]}
        row["tokens_per_second_of_each_run"] = [run["tokens_per_second"] for run in of_one]
        row["of_the_base"] = round(row["tokens_per_second"] / (rows or [row])[0]["tokens_per_second"], 3)
        rows.append(row)
    return rows


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    config = make_config(args)
    start = time.perf_counter()
    write_adapters(folder, config, args.adapters, args.rank)
    size = sum(file.stat().st_size for file in (folder / "adapter000").iterdir())
    on_disk = sorted(path.name for path in folder.iterdir())
    print(
        f"# {args.adapters} adapters of {size / 1e6:.1f} MB written in {time.perf_counter() - start:.1f} s", flush=True
    )
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(target=server, args=(args, folder, tell), daemon=True)
    process.start()
    tell.close()
    assert process.pid is not None
    try:
        found: dict[str, Any] = {
            **expect(told, process, "about"),
            "layers": config.num_hidden_layers, "hidden_size": config.hidden_size, "context": args.context,
            "rank": args.rank, "slots": args.slots, "max_cpu_loras": args.max_cpu_loras, "adapter_bytes": size,
            "beside": args.beside, "rows": [],
        }  # fmt: skip
        bare = {batch: expect(told, process, "bare") for batch in args.batches}
        for row in bare.values():
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
        for batch in args.batches:
            port, warm = expect(told, process, "ready")
            print(f"# a server of {batch} rows answers after {warm} s", flush=True)
            client = Client(process.pid, port, config.vocab_size)
            last = batch == args.batches[-1]
            # The last adapters are on the host, where the ladder expects them afterwards.
            names = {n: on_disk[-n:] for n in args.in_use} if last else {}
            for row in streamed(client, args, batch, {0: [_BASE], **names}):
                row["of_the_bare_loop"] = round(row["tokens_per_second"] / bare[batch]["tokens_per_second"], 3)
                found["rows"].append(row)
                print(json.dumps(row), flush=True)
            if last:
                found["first_token_ms"] = asyncio.run(client.ladder(args, folder))
                print(json.dumps(found["first_token_ms"]), flush=True)
            os.kill(process.pid, signal.SIGTERM)  # drains this server before the next one starts
        process.join(60)
        return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shape", choices=("llama-3-8b", "tiny"), default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--window", type=int, default=150)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--in-use", type=int, nargs="*", default=[8, 32], help="numbers of adapters of the last batch")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--max-cpu-loras", type=int, default=48)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--requests", type=int, default=32, help="number of requests of each kind")
    parser.add_argument("--beside", type=int, default=0)
    args = parser.parse_args()
    if not args.slots < args.max_cpu_loras < args.adapters:
        parser.error("there must be more adapters than the host holds, and more there than in slots")
    if not all(0 < n <= min(args.slots, args.batches[-1]) for n in args.in_use):
        parser.error("--in-use takes numbers from 1 to those of slots and of the last batch")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

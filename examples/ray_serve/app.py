"""Many replicas of one model under Ray Serve, each with some of the adapters: a request goes where its adapter is.

    pip install ".[ray]"
    serve run examples.ray_serve.app:build model=jlora/demo/model adapters=jlora/demo/adapters max_lora_rank=32

`model` of a request is the base model's name or the name of a folder below `adapters`; README.md beside this file has
more. A replica is an engine of jlora, without its HTTP server. Ray Serve's model multiplexing is what knows where an
adapter is: `Replica` loads one where Ray asks for it, and Ray has it unloaded when the replica holds too many.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from tokenizers import Tokenizer

import jlora
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError
from jlora.models import from_pretrained
from jlora.serve import (
    Engine,
    EngineBusyError,
    EngineClosedError,
    EngineOptions,
    Generation,
    RequestTimeoutError,
    SamplingParams,
)

_STATUS = {
    AdapterNotFoundError: 404,
    EngineBusyError: 429,
    EngineClosedError: 503,
    RequestTimeoutError: 504,
    LoRAUsageError: 400,
}


class Options(BaseModel, extra="forbid"):
    """What `serve run` is given as NAME=VALUE.

    Attributes:
      model: a Hugging Face checkpoint folder with tokenizer.json.
      adapters: a folder, in which each adapter is a folder of its own, under its name.
      name: what requests call the base model.
      replicas: how many; each takes `gpus` (0: it runs on the CPU).
      held: adapters that a replica keeps; one more, and that used least recently is unloaded.
      max_loras, max_lora_rank, max_num_seqs, max_model_len: as in `jlora serve`, of each replica.
      multiplexed: whether a request goes where its adapter is; else to any replica.
    """

    model: str
    adapters: str
    name: str = "base"
    replicas: int = 2
    gpus: float = 0
    held: int = 64
    max_loras: int = 8
    max_lora_rank: int = 16
    max_num_seqs: int = 16
    max_model_len: int | None = None
    multiplexed: bool = True


class Completion(BaseModel, extra="forbid"):
    """The fields of OpenAI's completions that are served here; any other is refused."""

    model: str
    prompt: str
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: list[str] = []
    stream: bool = False


class Loaded:
    """What Ray holds for an adapter. It calls `__del__` to have it unloaded; Python does so once more."""

    def __init__(self, engine: Engine, name: str):
        self._engine, self._name = engine, name

    def __del__(self):
        # By then an adapter of that name may have been loaded anew, and that one stays.
        engine, self._engine = self._engine, None
        if engine is not None:
            with suppress(LoRAError):
                engine.remove_lora(self._name)


@serve.deployment(max_ongoing_requests=1024)  # the engine has a queue of its own
class Replica:
    """One engine, and the adapters that Ray keeps in it."""

    def __init__(self, options: Options):
        model = from_pretrained(options.model)
        manager = jlora.LoRAManager(
            model,
            jlora.LoRAConfig(
                max_loras=options.max_loras,
                max_lora_rank=options.max_lora_rank,
                # Those that were unloaded stay until their last request has ended.
                max_cpu_loras=options.held + options.max_num_seqs,
            ),
        )
        self._engine = Engine(
            model,
            manager,
            tokenizer=Tokenizer.from_file(str(Path(options.model) / "tokenizer.json")),
            options=EngineOptions(max_num_seqs=options.max_num_seqs, max_model_len=options.max_model_len),
        )
        self._engine.start()  # Ray sends requests once this has returned
        self._manager, self._options = manager, options

        @serve.multiplexed(max_num_models_per_replica=options.held)
        async def adapter(name: str) -> Loaded:
            """For a name that this replica lacks. Ray calls it for one at a time, after it has had another unloaded."""
            request = jlora.LoRARequest(name, str(Path(options.adapters) / name))
            await asyncio.to_thread(self._engine.add_lora, request)
            return Loaded(self._engine, name)

        self._adapter = adapter

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica that raises."""
        if not self._engine.ready:
            raise RuntimeError("the engine has failed")

    def loads(self) -> int:
        """How many adapters were read from the disk so far."""
        return self._manager.stats().host_loads

    async def complete(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The pieces of an answer, all in one unless it is streamed; or {"status", "message"}."""
        params = SamplingParams(
            **{key: asked[key] for key in ("max_tokens", "temperature", "top_p", "seed")}, stop=tuple(asked["stop"])
        )
        try:
            generation = await self._submit(asked["model"], asked["prompt"], params)
            text, tokens = "", 0
            async for piece in _pieces(generation):
                text, tokens = text + piece.text, tokens + len(piece.tokens)
                if asked["stream"] or piece.finish_reason is not None:
                    yield {"text": text, "finish_reason": piece.finish_reason, "tokens": tokens,
                           "prompt_tokens": generation.prompt_tokens}  # fmt: skip
                    text = ""
        except LoRAError as error:
            status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
            yield {"status": status, "message": str(error)}

    async def _submit(self, name: str, prompt: str, params: SamplingParams) -> Generation:
        if name == self._options.name:
            return self._engine.submit(prompt, params)
        while True:
            # Looked up here, for Ray unloads an adapter before it finds that another cannot be loaded.
            if name not in await asyncio.to_thread(os.listdir, self._options.adapters):
                raise AdapterNotFoundError(f"there is no adapter {name!r}")
            # A task of its own: where the client leaves, Ray still has to hear that it is loaded.
            await asyncio.shield(asyncio.create_task(self._adapter(name)))
            with suppress(AdapterNotFoundError):  # unloaded again meanwhile
                return self._engine.submit(prompt, params, lora=name)


async def _pieces(generation: Generation) -> AsyncIterator[Any]:
    """What an engine's thread tells, on this event loop. Raises the error that the answer ended with."""
    loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()
    generation.listen(lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
    try:
        while True:
            event = await events.get()
            if isinstance(event, LoRAError):
                raise event
            yield event
            if event.finish_reason is not None:
                return
    finally:
        generation.cancel()  # the client left


def _choices(piece: dict[str, Any]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece["text"], "logprobs": None, "finish_reason": piece["finish_reason"]}]}


def _error(piece: dict[str, Any]) -> dict[str, Any]:
    return {"error": {"message": piece["message"], "type": None, "param": None, "code": piece["status"]}}


async def _events(head: dict[str, Any], first: dict[str, Any], rest: AsyncIterator[Any]) -> AsyncIterator[str]:
    """Server-sent events."""

    def event(piece: dict[str, Any]) -> str:
        body = _error(piece) if "status" in piece else {**head, **_choices(piece)}  # too late for a status
        return f"data: {json.dumps(body)}\n\n"

    yield event(first)
    async for piece in rest:
        yield event(piece)
    yield "data: [DONE]\n\n"


app = FastAPI()  # Ray copies here what it uses: functions of this module must stand above


# It only passes requests on, so it takes none of the CPUs that Ray counts: each replica takes one.
@serve.deployment(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 0})
@serve.ingress(app)
class Ingress:
    """Reads which adapter a request is for, and sends it to a replica that has it."""

    def __init__(self, replicas: DeploymentHandle, options: Options):
        self._replicas, self._options = replicas.options(method_name="complete", stream=True), options

    @app.post("/v1/completions")
    async def completions(self, asked: Completion) -> Response:
        replicas = self._replicas
        if self._options.multiplexed and asked.model != self._options.name:
            replicas = replicas.options(multiplexed_model_id=asked.model)
        pieces = replicas.remote(asked.model_dump())
        first = await anext(pieces)
        if "status" in first:
            return JSONResponse(_error(first), first["status"])
        head = {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": int(time.time()),
                "model": asked.model}  # fmt: skip
        if asked.stream:
            return StreamingResponse(_events(head, first, pieces), media_type="text/event-stream")
        used = {"prompt_tokens": first["prompt_tokens"], "completion_tokens": first["tokens"],
                "total_tokens": first["prompt_tokens"] + first["tokens"]}  # fmt: skip
        return JSONResponse({**head, **_choices(first), "usage": used})


def build(options: Options) -> serve.Application:
    """The application that `serve run` starts."""
    replicas = Replica.options(num_replicas=options.replicas, ray_actor_options={"num_gpus": options.gpus})
    return Ingress.bind(replicas.bind(options), options)

"""The ASGI application of the Tinker protocol: its routes, and what each passes on to the other modules."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from tinker import types

from jlora import LoRAManager, LoRARequest
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError
from jlora.serve import EngineBusyError, Piece
from jlora.serve.http.body import media_type, receive_body
from jlora.serve.http.errors import NOT_FOUND, ApiError, bad_request
from jlora.serve.http.service import Service
from jlora.tinker import checkpoints as disk
from jlora.tinker import wire
from jlora.tinker.checkpoints import Checkpoint, Checkpoints
from jlora.tinker.sessions import Answer, Future, Limits, Run, Session, Sessions
from jlora.tinker.training import Computation, Job, Model, Training, fresh_optimizer

_API, _JSON, _PROTOBUF = "/api/v1", "application/json", "application/x-protobuf"
_KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
_WRITES = 4  # checkpoints that are written at a time; others wait
_SWEEP_SECONDS = 15.0
_log = logging.getLogger("jlora.serve")


@dataclass(frozen=True)
class Targets:
    """Modules of the model's attention, of its MLPs and of its output layer."""

    attn: Collection[str]
    mlp: Collection[str]
    unembed: Collection[str]

    def of(self, run: disk.Run) -> Collection[str] | None:
        """Return the modules of a run's adapter; None for all. Raises LoRAUsageError if there are none."""
        chosen = {"attn": run.train_attn, "mlp": run.train_mlp, "unembed": run.train_unembed}
        if all(chosen.values()):
            return None
        found = [name for part, wanted in chosen.items() if wanted for name in getattr(self, part)]
        if not found:
            raise LoRAUsageError("lora_config trains no layer of the model; set train_attn, train_mlp or train_unembed")
        return found


def targets_of(manager: LoRAManager, packed: Mapping[str, Sequence[str]]) -> Targets:
    """Return the modules of a model's layers that serve adapters. `packed` is its `packed_modules`."""
    found: dict[str, dict[str, None]] = {"attn": {}, "mlp": {}, "unembed": {}}
    for layer in manager.layers():
        if layer.wrapped and layer.reason is None and layer.kind != "embedding":
            path = next((name for name in (layer.path, *layer.aliases) if "lm_head" in name), layer.path)
            part = "unembed" if "lm_head" in path else "attn" if "self_attn" in path else "mlp"
            last = path.rpartition(".")[2]
            found[part] |= dict.fromkeys(packed.get(last, (last,)))
    return Targets(**found)


class Tinker:
    """A server of the protocol. Its methods are of the event loop.

    Args:
      service: the engine, the names of the base model, keys, and the phase of the server.
      training: the training thread, started.
      checkpoints: runs and checkpoints on disk.
      targets: modules of the model.
      vocab: number of its tokens.
      tokenizer: folder or repository of the tokenizer, for clients.
      limits: limits.
    """

    def __init__(
        self,
        service: Service,
        training: Training,
        checkpoints: Checkpoints,
        targets: Targets,
        vocab: int,
        tokenizer: str,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ):
        self.service, self.training, self.checkpoints = service, training, checkpoints
        self.targets, self.vocab, self.tokenizer, self.limits = targets, vocab, tokenizer, limits
        self.sessions = Sessions(limits, training.submit)
        self._secret = secrets.token_bytes(32)
        self._writes = asyncio.Semaphore(_WRITES)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- requests of models -------------------------------------------------------------------------------------------

    def take(
        self,
        run_id: str,
        seq_id: int | None,
        size: int,
        work: Callable[[Run], Computation | Callable[[], Any]],
        answer: Callable[[Any], Awaitable[Answer]],
    ) -> Response:
        """Queue a request of a model, and return where its answer will be. Raises ApiError.

        Args:
          run_id: the model's id.
          seq_id: its position.
          size: bytes of the request.
          work: returns what the training thread has to do.
          answer: returns the answer, of the result.
        """
        future = self.sessions.take(run_id, seq_id, size, partial(self._job, work=work, answer=answer))
        return _reply(future, model_id=run_id)

    def _job(self, run: Run, future: Future, *, work: Callable[[Run], Any], answer: Callable[[Any], Any]) -> Job:
        loop = asyncio.get_running_loop()

        def finish(found: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._answer, future, found, answer)

        return Job(work(run), finish)

    def _answer(self, future: Future, found: Any, answer: Callable[[Any], Awaitable[Answer]]) -> None:
        async def finish() -> None:
            try:
                result = found if isinstance(found, Exception) else await answer(found)
            except Exception as error:
                if not isinstance(error, LoRAUsageError):
                    _log.exception("a request failed")
                result = error
            self.sessions.finish(future, result)

        task = asyncio.get_running_loop().create_task(finish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def create(
        self, session: Session, number: int, run: Callable[[str], tuple[disk.Run, Any]], answer: Any
    ) -> Response:
        """Create the model of a number. `run` returns its record and state, and may raise LoRAUsageError."""
        future = self.sessions.known(f"{session.id}:train:{number}:0")
        if future is not None:
            return _reply(future, model_id=future.id.removesuffix(":0"))
        future = self.sessions.future(f"{session.id}:train:{number}:0", 0)
        id, made = future.id.removesuffix(":0"), None

        async def finish(found: Any) -> Answer:
            return answer(id)

        def work(own: Run) -> Callable[[], None]:
            def create() -> None:
                self.training.create(own.model, load())
                self.checkpoints.add_run(record)

            return create

        try:
            record, load = run(id)
            model = Model(id, record.rank, record.seed, self.targets.of(record))
            _, made = self.sessions.add_run(session, number, lambda _: model)
            if made is None:
                raise LoRAUsageError(f"the model {id} exists")
            job = self._job(made, future, work=work, answer=finish)
        except LoRAError as error:
            self.sessions.finish(future, error)
            return _reply(future, model_id=id)

        def created(found: Any) -> None:
            if isinstance(found, Exception):
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(session.runs.pop, id, None)
            job.finish(found)

        loop = asyncio.get_running_loop()
        self.training.submit(model, Job(job.work, created))
        return _reply(future, model_id=id)

    async def write(self, found: Any, run_id: str, kind: disk.Kind, name: str, **options: Any) -> Checkpoint:
        """Write the adapter and the state that were found as a checkpoint. Raises LoRAUsageError, OSError."""
        adapter, state = found
        async with self._writes:
            return await self.service.load(
                partial(self.checkpoints.write, run_id, kind, name, adapter, state, **options)
            )

    async def end(self, session: Session) -> None:
        """End a session: its models, and their sampling states without a name."""
        self.sessions.close(session)
        for id, run in session.runs.items():
            await self.unload(id, run)

    async def unload(self, id: str, run: Run) -> None:
        """End a model after its requests that were passed on."""
        done, loop = asyncio.Event(), asyncio.get_running_loop()
        finish = partial(loop.call_soon_threadsafe, done.set)
        self.training.submit(run.model, Job(partial(self.training.end, run.model), lambda _: finish()))
        await done.wait()
        for each in await self.service.load(partial(self.checkpoints.end_run, id)):
            self.forget(each)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Let the engine forget the adapter of a checkpoint that is deleted."""
        with contextlib.suppress(AdapterNotFoundError):
            self.service.engine.remove_lora(checkpoint.token)

    async def sweep(self) -> None:
        """End silent sessions and delete expired checkpoints, for as long as the server runs."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self.limits.session_seconds / 4))
            try:
                for session in self.sessions.silent():
                    _log.info("session %s ended: no heartbeat for %g seconds", session.id, self.limits.session_seconds)
                    await self.end(session)
                for each in self.checkpoints.expired():
                    await self.service.load(partial(self.checkpoints.delete, each))
                    self.forget(each)
            except Exception:
                _log.exception("sessions could not be ended")

    # --- downloads ----------------------------------------------------------------------------------------------------

    def sign(self, token: str, file: str, expires: int) -> str:
        """Return the signature of a URL."""
        return hmac.new(self._secret, f"{token}/{file}/{expires}".encode(), hashlib.sha256).hexdigest()


def build_app(tinker: Tinker) -> Starlette:
    """Return the application. All routes need a key but `healthz` and the signed downloads."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.get_running_loop().create_task(tinker.sweep())
        try:
            yield
        finally:
            sweeper.cancel()

    post, get = partial(_route, tinker, "POST"), partial(_route, tinker, "GET")
    checkpoint = "/training_runs/{run}/checkpoints/{kind}/{name}"
    routes = [
        _route(tinker, "GET", "/healthz", healthz, key=False),
        post("/client/config", client_config),
        post("/client/dynamic_config", client_config),
        get("/get_server_capabilities", capabilities),
        post("/create_session", create_session),
        post("/session_heartbeat", session_heartbeat),
        post("/sessions/{id}/finish", finish_session),
        post("/create_model", create_model),
        post("/load_weights", load_weights),
        post("/get_info", get_info),
        post("/unload_model", unload_model),
        post("/forward_backward", forward_backward),
        post("/optim_step", optim_step),
        post("/save_weights", save_weights),
        post("/save_weights_for_sampler", save_weights_for_sampler),
        post("/save_weights_external", save_weights_external),
        post("/create_sampling_session", create_sampling_session),
        get("/samplers/{id}", get_sampler),
        post("/asample", asample),
        post("/retrieve_future", retrieve_future),
        post("/telemetry", telemetry),
        post("/weights_info", weights_info),
        get("/training_runs", training_runs),
        get("/training_runs/{run}", training_run),
        get("/training_runs/{run}/checkpoints", list_checkpoints),
        get("/checkpoints", list_checkpoints),
        get(checkpoint + "/external_weights_urls", external_weights_urls),
        _route(tinker, "DELETE", checkpoint, delete_checkpoint),
        _route(tinker, "GET", "/download/{token}/{file}", download, key=False),
    ]

    async def unknown(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        path = f"{request.method} {request.url.path}"[:200]
        return _failure(ApiError(status, NOT_FOUND, f"{path} is not a call of this server (docs/tinker.md)"))

    return Starlette(routes=routes, exception_handlers={HTTPException: unknown}, lifespan=lifespan)


def _route(
    tinker: Tinker,
    method: str,
    path: str,
    endpoint: Callable[[Tinker, Request], Awaitable[Response | BaseModel | dict[str, Any]]],
    *,
    key: bool = True,
) -> Route:
    async def answer(request: Request) -> Response:
        try:
            if key:
                given = request.headers.get("x-api-key", "")
                if not tinker.service.keys.admit(f"Bearer {given}", admin=False):
                    raise ApiError(401, "AuthenticationError", "a key is needed: X-API-Key: tml-...")
                tinker.service.check_ready()
            found = await endpoint(tinker, request)
        except ApiError as error:
            return _failure(error)
        except LoRAUsageError as error:
            return _failure(bad_request(str(error)))
        except ClientDisconnect:
            return Response(status_code=400)
        except Exception as error:
            _log.exception("a request failed", exc_info=error)
            return _failure(ApiError(500, "InternalServerError", "an unforeseen error; the server's log has it"))
        if isinstance(found, BaseModel):
            found = found.model_dump(mode="json")
        return found if isinstance(found, Response) else JSONResponse(found)

    return Route(_API + path, answer, methods=[method])


def _failure(error: ApiError) -> Response:
    headers = error.headers() | ({"connection": "close"} if error.status in (401, 408, 413) else {})
    return JSONResponse(error.body(), error.status, headers)


def _reply(future: Future, **more: Any) -> Response:
    return JSONResponse({"request_id": future.id, **more, **future.about})


async def _read(tinker: Tinker, request: Request, media: str = _JSON) -> bytearray:
    """Return the body of a request. Raises ApiError: 400 for another type or an encoding such as zstd, 408, 413."""
    if media_type(request) != media:
        raise bad_request(f"the content type must be {media}, got {media_type(request)[:80] or 'none'!r}")
    if (encoding := request.headers.get("content-encoding", "identity").strip().lower()) != "identity":
        raise bad_request(f"the content encoding {encoding[:80]!r} is not implemented; send the body as it is")
    limits = tinker.service.limits
    return await receive_body(request, limits.body_bytes, limits.body_seconds)


def _metadata(tinker: Tinker, given: dict[str, Any] | None) -> dict[str, Any]:
    if len(json.dumps(given or {})) > tinker.limits.metadata_bytes:
        raise LoRAUsageError(f"user_metadata has more than {tinker.limits.metadata_bytes} bytes")
    return given or {}


def _check_base(tinker: Tinker, name: str | None) -> None:
    if name is not None and name not in tinker.service.names:
        raise LoRAUsageError(f"base_model {name!r:.200} is not served; expected {tinker.service.names[0]!r}")


def _ttl(seconds: int | None) -> int | None:
    if seconds is not None and not 1 <= seconds <= 10**9:
        raise LoRAUsageError(f"ttl_seconds must be from 1 to {10**9}, got {seconds}")
    return seconds


# --- the server and its sessions --------------------------------------------------------------------------------------


async def healthz(tinker: Tinker, request: Request) -> types.HealthResponse:
    tinker.service.check_ready()
    if not tinker.training.alive:
        raise ApiError(503, "ServiceUnavailableError", "the training thread has ended")
    return types.HealthResponse(status="ok")


async def client_config(tinker: Tinker, request: Request) -> dict[str, Any]:
    await _read(tinker, request)
    return {}  # every flag has its default


async def capabilities(tinker: Tinker, request: Request) -> types.GetServerCapabilitiesResponse:
    longest = min(tinker.training.longest, tinker.service.max_model_len)
    models = [
        types.SupportedModel(model_name=name, max_context_length=longest, trainable=True, sampleable=True)
        for name in tinker.service.names
    ]
    return types.GetServerCapabilitiesResponse(supported_models=models)


async def create_session(tinker: Tinker, request: Request) -> types.CreateSessionResponse:
    message = wire.parse(types.CreateSessionRequest, await _read(tinker, request))
    session = tinker.sessions.open(_metadata(tinker, message.user_metadata))
    return types.CreateSessionResponse(session_id=session.id)


async def session_heartbeat(tinker: Tinker, request: Request) -> dict[str, Any]:
    message = wire.parse(types.SessionHeartbeatRequest, await _read(tinker, request))
    tinker.sessions.session(message.session_id)
    return {"type": "session_heartbeat"}


async def finish_session(tinker: Tinker, request: Request) -> dict[str, Any]:
    await tinker.end(tinker.sessions.session(request.path_params["id"]))
    return {}


async def telemetry(tinker: Tinker, request: Request) -> types.TelemetryResponse:
    await _read(tinker, request)
    return types.TelemetryResponse(status="accepted")


async def retrieve_future(tinker: Tinker, request: Request) -> Response:
    message = wire.parse(types.FutureRetrieveRequest, await _read(tinker, request))
    answer = await tinker.sessions.wait(message.request_id)
    if answer is None:
        body = {"type": "try_again", "request_id": message.request_id, "queue_state": "active"}
        return JSONResponse(body, 408)
    return Response(answer, media_type=_PROTOBUF) if isinstance(answer, bytes) else JSONResponse(answer)


# --- models -----------------------------------------------------------------------------------------------------------


async def create_model(tinker: Tinker, request: Request) -> Response:
    message = wire.parse(types.CreateModelRequest, await _read(tinker, request))

    def run(id: str) -> tuple[disk.Run, Callable[[], None]]:
        _check_base(tinker, message.base_model)
        wire.check_adam(message.optimizer_config)
        if message.lora_config is None:
            raise LoRAUsageError("lora_config is missing; only LoRA adapters are trained")
        options = message.lora_config.model_dump()
        seed = secrets.randbelow(2**31) if options["seed"] is None else options["seed"]
        if not 0 <= seed < 2**63:
            raise LoRAUsageError(f"lora_config.seed must be from 0 to 2**63 - 1, got {seed}")
        metadata = _metadata(tinker, message.user_metadata)
        return disk.Run(id, **options | {"seed": seed}, metadata=metadata), lambda: None

    session = tinker.sessions.session(message.session_id)
    return tinker.create(session, message.model_seq_id, run, lambda id: {"type": "create_model", "model_id": id})


async def load_weights(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.LoadWeightsRequest, body)

    def find() -> Checkpoint:
        wire.check_adam(message.optimizer_config)
        if message.weights_access_token is not None:
            raise LoRAUsageError("weights_access_token is not implemented; all keys have the same checkpoints")
        return tinker.checkpoints.at(message.path)

    def read() -> dict[str, Any]:
        state = tinker.checkpoints.state(find())
        return state if message.optimizer else fresh_optimizer(state)

    def answer(id: str) -> dict[str, Any]:
        return {"type": "load_weights", "path": message.path, "model_id": id}

    if message.session_id is not None and message.model_seq_id is not None and message.model_id is None:

        def run(id: str) -> tuple[disk.Run, Callable[[], dict[str, Any]]]:
            _check_base(tinker, message.base_model)
            old = tinker.checkpoints.run(find().run)
            options = {"train_attn": old.train_attn, "train_mlp": old.train_mlp, "train_unembed": old.train_unembed}
            metadata = _metadata(tinker, message.user_metadata)
            return disk.Run(id, old.rank, old.seed, **options, metadata=metadata), read

        return tinker.create(tinker.sessions.session(message.session_id), message.model_seq_id, run, answer)
    if message.model_id is None or message.session_id is not None:
        raise bad_request("load_weights needs model_id and seq_id, or session_id and model_seq_id")

    async def loaded(found: None) -> Answer:
        return answer(message.model_id or "")

    def work(run: Run) -> Callable[[], None]:
        return lambda: tinker.training.load(run.model, read())

    return tinker.take(message.model_id, message.seq_id, len(body), work, loaded)


async def get_info(tinker: Tinker, request: Request) -> types.GetInfoResponse:
    message = wire.parse(types.GetInfoRequest, await _read(tinker, request))
    run, name = tinker.sessions.run(message.model_id), tinker.service.names[0]
    data = types.ModelData(arch="transformer", model_name=name, tokenizer_id=tinker.tokenizer)
    return types.GetInfoResponse(
        type="get_info",
        model_id=message.model_id,
        model_data=data,
        model_name=name,
        is_lora=True,
        lora_rank=run.model.rank,
    )


async def unload_model(tinker: Tinker, request: Request) -> Response:
    message = wire.parse(types.UnloadModelRequest, await _read(tinker, request))
    session, run = tinker.sessions.session(message.model_id), tinker.sessions.run(message.model_id)
    del session.runs[message.model_id]
    await tinker.unload(message.model_id, run)
    future = tinker.sessions.future(f"{message.model_id}:unload", 0)
    tinker.sessions.finish(future, {"type": "unload_model", "model_id": message.model_id})
    return _reply(future, model_id=message.model_id)


async def forward_backward(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request, _PROTOBUF)
    message = wire.parse_forward_backward(body)

    def work(run: Run) -> Computation | Callable[[], None]:
        try:
            return wire.computation(
                message, longest=tinker.training.longest, vocab=tinker.vocab, most=tinker.limits.datums
            )
        except LoRAUsageError as error:
            return partial(tinker.training.refuse, run.model, error, forward_only=message.forward_only)

    async def answer(found: Computation) -> Answer:
        return wire.forward_backward_output(found)

    return tinker.take(message.model_id, message.seq_id, len(body), work, answer)


async def optim_step(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.OptimStepRequest, body)

    def work(run: Run) -> Callable[[], float]:
        return lambda: tinker.training.optim_step(run.model, wire.adam_numbers(message))

    async def answer(norm: float) -> Answer:
        return {"metrics": {"grad_norm:mean": norm}}

    return tinker.take(message.model_id, message.seq_id, len(body), work, answer)


# --- checkpoints ------------------------------------------------------------------------------------------------------


async def save_weights(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.SaveWeightsRequest, body)
    id, name = message.model_id, message.path or f"step-{message.seq_id}"

    def work(run: Run) -> Callable[[], Any]:
        def found() -> Any:
            tinker.checkpoints.check_name(id, "weights", name, message.overwrite)
            state = tinker.training.state(run.model)
            kept = {key: state[key] for key in ("factors", "optimizer", "ranks")}
            return tinker.training.adapter(run.model), kept

        return found

    async def answer(found: Any) -> Answer:
        options = {"ttl": _ttl(message.ttl_seconds), "overwrite": message.overwrite}
        metadata = _metadata(tinker, message.user_metadata)
        made = await tinker.write(found, id, "weights", name, **options, metadata=metadata)
        return {"type": "save_weights", "path": made.path}

    return tinker.take(id, message.seq_id, len(body), work, answer)


async def save_weights_for_sampler(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.SaveWeightsForSamplerRequest, body)
    id, named = message.model_id, message.path is not None
    kind: disk.Kind = "sampler_weights" if named else "snapshot"
    name = message.path or f"seq-{message.seq_id}"
    run = tinker.sessions.run(id)

    def work(run: Run) -> Callable[[], Any]:
        def found() -> Any:
            if message.kind != "snapshot":
                raise LoRAUsageError(f"kind {message.kind!r} is not implemented; expected 'snapshot'")
            tinker.checkpoints.check_name(id, kind, name)
            return tinker.training.adapter(run.model), None

        return found

    async def answer(found: Any) -> Answer:
        metadata, ttl = _metadata(tinker, message.user_metadata), _ttl(message.ttl_seconds)
        made = await tinker.write(found, id, kind, name, ttl=ttl, metadata=metadata)
        tinker.service.manager.prefetch(LoRARequest(made.token, str(tinker.checkpoints.folder(made))))
        sampler = None
        if message.sampling_session_seq_id is not None:
            session = tinker.sessions.session(id)
            sampler = tinker.sessions.add_sampler(session, message.sampling_session_seq_id, made)
        if not named:
            run.snapshots.append(made)
            for old in run.snapshots[: -tinker.limits.snapshots]:
                run.snapshots.remove(old)
                await tinker.service.load(partial(tinker.checkpoints.delete, old))
                tinker.forget(old)
        path = made.path if named else None
        return {"type": "save_weights_for_sampler", "path": path, "sampling_session_id": sampler}

    return tinker.take(id, message.seq_id, len(body), work, answer)


async def save_weights_external(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.SaveWeightsExternalRequest, body)

    def work(run: Run) -> Callable[[], Any]:
        def found() -> Any:
            if message.age_encryption_recipients:
                raise LoRAUsageError("age_encryption_recipients is not implemented; leave it out")
            tinker.checkpoints.check_name(message.model_id, "external_weights", message.path)
            return tinker.training.adapter(run.model), None

        return found

    async def answer(found: Any) -> Answer:
        ttl = _ttl(message.ttl_seconds)
        made = await tinker.write(found, message.model_id, "external_weights", message.path, ttl=ttl)
        return {"type": "save_weights_external", "path": made.path, "size_bytes": made.size}

    return tinker.take(message.model_id, message.seq_id, len(body), work, answer)


def _checkpoint(found: Checkpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{found.kind}/{found.name}",
        checkpoint_type=_KINDS[found.kind],  # pyright: ignore[reportArgumentType]
        time=datetime.fromtimestamp(found.created, UTC),
        tinker_path=found.path,
        size_bytes=found.size,
        user_metadata=dict(found.metadata or {}) or None,
        expires_at=None if found.expires is None else datetime.fromtimestamp(found.expires, UTC),
    )


def _training_run(tinker: Tinker, run: disk.Run) -> types.TrainingRun:
    own = tinker.checkpoints.named(run.id)
    live = [session.runs[run.id].used for session in tinker.sessions.all() if run.id in session.runs]
    last = {kind: next((_checkpoint(each) for each in own if each.kind == kind), None) for kind in _KINDS}
    used = max([run.created, *live, *(each.created for each in own)])
    return types.TrainingRun(
        training_run_id=run.id,
        base_model=tinker.service.names[0],
        model_owner="jlora",
        is_lora=True,
        lora_rank=run.rank,
        last_request_time=datetime.fromtimestamp(used, UTC),
        last_checkpoint=last["weights"],
        last_sampler_checkpoint=last["sampler_weights"],
        user_metadata={key: str(value) for key, value in run.metadata.items()} or None,
    )


def _page(request: Request, default: int) -> tuple[int, int]:
    try:
        limit, offset = (
            int(request.query_params.get(key, value)) for key, value in (("limit", default), ("offset", 0))
        )
    except ValueError:
        raise bad_request("limit and offset must be whole numbers") from None
    return max(0, min(limit, 1000)), max(0, offset)


async def training_runs(tinker: Tinker, request: Request) -> types.TrainingRunsResponse:
    (limit, offset), runs = _page(request, 20), tinker.checkpoints.runs()
    shown = [_training_run(tinker, run) for run in runs[offset : offset + limit]]
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(runs))
    return types.TrainingRunsResponse(training_runs=shown, cursor=cursor)


async def training_run(tinker: Tinker, request: Request) -> types.TrainingRun:
    return _training_run(tinker, tinker.checkpoints.run(request.path_params["run"]))


async def list_checkpoints(tinker: Tinker, request: Request) -> types.CheckpointsListResponse:
    if (run := request.path_params.get("run")) is not None:
        own = tinker.checkpoints.named(tinker.checkpoints.run(run).id)
        return types.CheckpointsListResponse(checkpoints=list(map(_checkpoint, own)))
    (limit, offset), own = _page(request, 100), tinker.checkpoints.named()
    cursor = types.Cursor(offset=offset, limit=limit, total_count=len(own))
    return types.CheckpointsListResponse(
        checkpoints=list(map(_checkpoint, own[offset : offset + limit])), cursor=cursor
    )


async def delete_checkpoint(tinker: Tinker, request: Request) -> dict[str, Any]:
    found = _of_path(tinker, request)
    await tinker.service.load(partial(tinker.checkpoints.delete, found))
    tinker.forget(found)
    return {}


def _of_path(tinker: Tinker, request: Request) -> Checkpoint:
    params = request.path_params
    if params["kind"] not in _KINDS:
        raise ApiError(404, NOT_FOUND, f"a checkpoint is of {', '.join(_KINDS)}, got {params['kind']!r:.80}")
    try:
        return tinker.checkpoints.get(params["run"], params["kind"], params["name"])
    except LoRAUsageError as error:
        raise ApiError(404, NOT_FOUND, str(error)) from None


async def external_weights_urls(tinker: Tinker, request: Request) -> types.ExternalWeightsUrlsResponse:
    found, expires = _of_path(tinker, request), int(time.time() + tinker.limits.url_seconds)
    urls = {
        name: f"{request.base_url}{_API[1:]}/download/{found.token}/{name}?expires={expires}"
        f"&signature={tinker.sign(found.token, name, expires)}"
        for name in tinker.checkpoints.files(found)
    }
    return types.ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, UTC))


async def download(tinker: Tinker, request: Request) -> Response:
    token, file = request.path_params["token"], request.path_params["file"]
    expires, signature = request.query_params.get("expires", ""), request.query_params.get("signature", "")
    known = expires.isascii() and expires.isdigit() and len(expires) < 12
    if not known or not hmac.compare_digest(tinker.sign(token, file, int(expires)).encode(), signature.encode()):
        raise ApiError(403, "PermissionDeniedError", "the signature of the URL is wrong")
    if int(expires) < time.time():
        raise ApiError(403, "PermissionDeniedError", "the URL has expired")
    found = next((each for each in tinker.checkpoints.named() if each.token == token), None)
    if found is None:
        raise ApiError(404, NOT_FOUND, "the checkpoint does not exist")
    return FileResponse(tinker.checkpoints.files(found)[file], filename=file)


async def weights_info(tinker: Tinker, request: Request) -> types.WeightsInfoResponse:
    path = json.loads(await _read(tinker, request)).get("tinker_path")
    run = tinker.checkpoints.run(tinker.checkpoints.at(str(path)).run)
    options = {"train_attn": run.train_attn, "train_mlp": run.train_mlp, "train_unembed": run.train_unembed}
    return types.WeightsInfoResponse(base_model=tinker.service.names[0], is_lora=True, lora_rank=run.rank, **options)


# --- sampling ---------------------------------------------------------------------------------------------------------


async def create_sampling_session(tinker: Tinker, request: Request) -> types.CreateSamplingSessionResponse:
    message = wire.parse(types.CreateSamplingSessionRequest, await _read(tinker, request))
    session = tinker.sessions.session(message.session_id)
    source = _source(tinker, message.model_path, message.base_model)
    id = tinker.sessions.add_sampler(session, message.sampling_session_seq_id, source)
    return types.CreateSamplingSessionResponse(sampling_session_id=id)


def _source(tinker: Tinker, path: str | None, base: str | None) -> Checkpoint | None:
    _check_base(tinker, base)
    if path is None and base is None:
        raise LoRAUsageError("model_path and base_model are missing; give one of them")
    return None if path is None else tinker.checkpoints.at(path)


def _sampler(tinker: Tinker, id: str) -> Checkpoint | None:
    samplers = tinker.sessions.session(id).samplers
    if id not in samplers:
        raise ApiError(410, "GoneError", f"the sampler {id[:120]!r} is unknown, or has ended")
    return samplers[id]


async def get_sampler(tinker: Tinker, request: Request) -> types.GetSamplerResponse:
    id = request.path_params["id"]
    source = _sampler(tinker, id)
    path = None if source is None or source.kind == "snapshot" else source.path
    return types.GetSamplerResponse(sampler_id=id, base_model=tinker.service.names[0], model_path=path)


async def asample(tinker: Tinker, request: Request) -> Response:
    body = await _read(tinker, request)
    message = wire.parse(types.SampleRequest, body)
    if message.sampling_session_id is not None:
        sampler = message.sampling_session_id
        source, id = _sampler(tinker, sampler), f"{sampler}:{message.seq_id}"
    else:
        source, id = _source(tinker, message.model_path, message.base_model), f"sample:{secrets.token_hex(16)}"
    if (future := tinker.sessions.known(id)) is not None:
        return _reply(future)
    future = tinker.sessions.future(id, len(body))
    future.about["sample_sequence_ids"] = [f"{id}:{i}" for i in range(min(message.num_samples, tinker.limits.samples))]
    try:
        params = wire.sampling_params(message, tinker.limits.samples)
        lora = None
        if source is not None:
            tinker.checkpoints.get(source.run, source.kind, source.name)  # it may be deleted
            lora = LoRARequest(source.token, str(tinker.checkpoints.folder(source)))
        prompt = wire.prompt_tokens(message.prompt)
        running = tinker.service.engine.submit_all([prompt] * len(params), params, lora=lora)
    except EngineBusyError as error:
        tinker.sessions.discard(future)
        raise ApiError(429, "TooManyRequestsError", str(error), retry_after=error.retry_after) from None
    except LoRAError as error:
        tinker.sessions.finish(future, error)
        return _reply(future)
    pieces: list[list[Piece]] = [[] for _ in running]

    def heard(i: int, event: Piece | LoRAError) -> None:
        if isinstance(event, LoRAError):
            tinker.sessions.finish(future, event)
        else:
            pieces[i].append(event)
            if all(own and own[-1].finish_reason for own in pieces):
                tinker.sessions.finish(future, wire.sample_response(pieces, message.topk_sample_logprobs))

    bridge = tinker.service.bridge()
    for i, generation in enumerate(running):
        generation.listen(partial(bridge.post, partial(heard, i)))
    return _reply(future)

"""The ASGI application of the Tinker protocol: its routes, and what each passes on to the other modules."""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from tinker import types

from jlora import Adapter, LoRARequest
from jlora.errors import AdapterNotFoundError, LoRAError, LoRAUsageError, NoFreeSlotError
from jlora.serve import EngineBusyError, Piece
from jlora.serve.http.app import Outermost
from jlora.serve.http.body import read_body
from jlora.serve.http.errors import NOT_FOUND, ApiError, bad_request
from jlora.serve.http.service import Service
from jlora.tinker import wire
from jlora.tinker.checkpoints import KINDS, SNAPSHOT, Checkpoint, Checkpoints, Record
from jlora.tinker.sessions import Future, Limits, Run, Session, Sessions, gone
from jlora.tinker.training import Computation, Job, Model, Training, Update, fresh_optimizer

_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PARTS = ("attn", "mlp", "unembed")
_TYPES = dict(zip(KINDS, ("training", "sampler", "external"), strict=True))
_WRITES = 4  # checkpoints that are written at a time; others wait
_SWEEP_SECONDS = 15.0
_QUIET = ("healthz", "retrieve_future", "session_heartbeat", "telemetry")  # polled, so not logged
_log = logging.getLogger("jlora.serve")

Work = Computation | Update | Callable[[], Any]


@dataclass(frozen=True)
class Call:
    """A request: its message, and the bytes of its body."""

    request: Request
    message: Any
    size: int


@dataclass
class Tinker:
    """A server of the protocol. All methods run on its event loop, and those with a `Call` are its endpoints.

    Attributes:
      service: the engine, the name of the base model, keys, and the phase of the server.
      training: the training thread.
      checkpoints: runs and checkpoints on disk.
      targets: names of the modules that serve adapters, of "attn", "mlp" and "unembed".
      vocab: number of tokens of the model.
      tokenizer: folder of the tokenizer, for clients.
      limits: limits.
    """

    service: Service
    training: Training
    checkpoints: Checkpoints
    targets: Mapping[str, Collection[str]]
    vocab: int
    tokenizer: str
    limits: Limits

    def __post_init__(self):
        self.sessions, self.base = Sessions(self.limits, self.training.submit), self.service.names[0]
        self._secret, self._writes = secrets.token_bytes(32), asyncio.Semaphore(_WRITES)
        self._tasks: set[asyncio.Task[None]] = set()

    # --- the server and its sessions ----------------------------------------------------------------------------------

    async def healthz(self, call: Call) -> Any:
        self.service.check_ready()
        if not self.training.alive:
            raise ApiError(503, "ServiceUnavailableError", "the training thread has ended")
        return types.HealthResponse(status="ok")

    async def client_config(self, call: Call) -> Any:
        return {}  # every flag has its default

    async def capabilities(self, call: Call) -> Any:
        longest = min(self.training.longest, self.service.max_model_len)
        model = types.SupportedModel(model_name=self.base, max_context_length=longest, trainable=True, sampleable=True)
        return types.GetServerCapabilitiesResponse(supported_models=[model])

    async def create_session(self, call: Call) -> Any:
        self._metadata(call.message)
        return types.CreateSessionResponse(session_id=self.sessions.begin().id)

    async def session_heartbeat(self, call: Call) -> Any:
        self.sessions.session(call.message.session_id)
        return {"type": "session_heartbeat"}

    async def finish_session(self, call: Call) -> Any:
        await self._end(self.sessions.session(call.request.path_params["id"]))
        return {}

    async def telemetry(self, call: Call) -> Any:
        return types.TelemetryResponse(status="accepted")

    async def retrieve_future(self, call: Call) -> Any:
        id = call.message.request_id
        if (answer := await self.sessions.wait(id)) is None:
            return JSONResponse({"type": "try_again", "request_id": id, "queue_state": "active"}, 408)
        return Response(answer, media_type=wire.PROTOBUF) if isinstance(answer, bytes) else answer

    def start(self) -> None:
        """End silent sessions and delete expired checkpoints from now on, until the event loop ends."""
        self._run(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self.limits.session_seconds / 4))
            try:
                for session in self.sessions.silent():
                    _log.info("session %s ended: no heartbeat for %g s", session.id, self.limits.session_seconds)
                    await self._end(session)
                for each in self.checkpoints.expired():
                    await self._delete(each)
            except Exception:  # such as a full disk; the next turn tries again
                _log.exception("sessions and checkpoints could not be ended")

    async def _end(self, session: Session) -> None:
        self.sessions.close(session)
        for id, run in session.runs.items():
            await self._unload(id, run)

    # --- models -------------------------------------------------------------------------------------------------------

    async def create_model(self, call: Call) -> Any:
        def lora() -> dict[str, Any]:
            if call.message.lora_config is None:
                raise LoRAUsageError("lora_config is missing; only LoRA adapters are trained")
            return call.message.lora_config.model_dump()

        return self._create(call.message, {"type": "create_model"}, lora)

    async def load_weights(self, call: Call) -> Any:
        message: types.LoadWeightsRequest = call.message
        answer = {"type": "load_weights", "path": message.path}

        def state() -> dict[str, Any]:
            if message.weights_access_token is not None:
                raise LoRAUsageError("weights_access_token is not implemented; all keys have the same checkpoints")
            wire.check_adam(message.optimizer_config)
            state = self.checkpoints.state(self.checkpoints.at(message.path))
            return state if message.optimizer else fresh_optimizer(state)

        if message.session_id is not None and message.model_id is None:
            return self._create(message, answer, lambda: self._lora_of(message.path), state)
        if message.model_id is None or message.session_id is not None:
            raise bad_request("load_weights needs model_id and seq_id, or session_id and model_seq_id")
        answer["model_id"] = message.model_id
        return self._take(call, lambda run: lambda: self.training.load(run.model, state()), lambda _: answer)

    async def get_info(self, call: Call) -> Any:
        run = self.sessions.run(call.message.model_id)
        data = types.ModelData(model_name=self.base, tokenizer_id=self.tokenizer)
        about: dict[str, Any] = {"model_name": self.base, "is_lora": True, "lora_rank": run.model.rank}
        return types.GetInfoResponse(type="get_info", model_id=call.message.model_id, model_data=data, **about)

    async def forward_backward(self, call: Call) -> Any:
        longest, most = self.training.longest, self.limits.datums

        def work(run: Run) -> Work:
            try:
                return wire.computation(call.message, longest=longest, vocab=self.vocab, most=most)
            except LoRAUsageError as error:
                return partial(self.training.refuse, run.model, error, forward_only=call.message.forward_only)

        return self._take(call, work, wire.forward_backward_output)

    async def optim_step(self, call: Call) -> Any:
        def work(run: Run) -> Work:
            try:
                return Update(wire.adam_numbers(call.message))
            except LoRAUsageError as error:
                return partial(self.training.refuse, run.model, error, forward_only=True)

        return self._take(call, work, lambda norm: {"metrics": {"grad_norm:mean": norm}})

    async def unload_model(self, call: Call) -> Any:
        id = call.message.model_id
        run, future = self.sessions.run(id), self.sessions.future(f"{id}:unload", 0)
        del self.sessions.session(id).runs[id]
        await self._unload(id, run)
        self.sessions.finish(future, {"type": "unload_model", "model_id": id})
        return _reply(future, model_id=id)

    def _create(
        self,
        message: Any,
        answer: dict[str, Any],
        lora: Callable[[], Mapping[str, Any]],
        state: Callable[[], Any] = lambda: None,
    ) -> Response:
        """Create a model with these options of its adapter, from a state."""
        session, number = self.sessions.session(message.session_id), message.model_seq_id
        if number is None or not 0 <= number < 10**9:
            raise bad_request(f"model_seq_id must be from 0 to 999999999, got {number}", "model_seq_id")
        id = f"{session.id}:train:{number}"
        if (future := self.sessions.known(f"{id}:0")) is not None:
            return _reply(future, model_id=id)
        future = self.sessions.future(f"{id}:0", 0)
        try:
            self._check_base(message.base_model)
            wire.check_adam(message.optimizer_config)
            options = dict(lora())
            if options["seed"] is None:
                options["seed"] = secrets.randbelow(2**31)
            run = Record(id, options, self._metadata(message))
            model = Model(id, options["rank"], options["seed"], self._targets(options))
            self.sessions.add_run(session, id, model)
        except LoRAError as error:
            self.sessions.finish(future, error)
            return _reply(future, model_id=id)

        def create() -> None:
            self.training.create(model, state())
            self.checkpoints.add_run(run)

        failed = partial(session.runs.pop, id, None)
        self.training.submit(model, Job(create, self._finish(future, lambda _: {**answer, "model_id": id}, failed)))
        return _reply(future, model_id=id)

    def _take(self, call: Call, work: Callable[[Run], Work], answer: Callable[[Any], Any]) -> Response:
        """Queue a request of a model. `answer` makes its answer, at once or later, of the result of its `work`."""
        message = call.message

        def make(run: Run, future: Future) -> Job:
            return Job(work(run), self._finish(future, answer))

        return _reply(self.sessions.take(message.model_id, message.seq_id, call.size, make), model_id=message.model_id)

    def _finish(
        self, future: Future, answer: Callable[[Any], Any], failed: Callable[[], object] = lambda: None
    ) -> Callable[[Any], None]:
        """Return the call of the training thread that passes a result or an error on to this loop."""

        async def finish(found: Any) -> None:
            try:
                result: Any = found if isinstance(found, Exception) else answer(found)
                while isinstance(result, Awaitable):
                    result = await result
            except Exception as error:  # the client gets it as the answer, else it would wait for ever
                if not isinstance(error, LoRAUsageError):
                    _log.exception("a request failed")
                result = error
            if isinstance(result, Exception):
                failed()
            self.sessions.finish(future, result)

        return partial(self.service.bridge().post, lambda found: self._run(finish(found)))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the loop keeps no reference
        task.add_done_callback(self._tasks.discard)

    async def _unload(self, id: str, run: Run) -> None:
        """End a model after its requests that were passed on, and its sampling weights without a name."""
        done = asyncio.Event()
        finish = partial(self.service.bridge().post, lambda _: done.set())
        self.training.submit(run.model, Job(partial(self.training.end, run.model), finish))
        await done.wait()
        for each in await self.service.load(partial(self.checkpoints.end_run, id)):
            await self._delete(each)

    def _targets(self, lora: Mapping[str, Any]) -> Collection[str] | None:
        if all(lora[f"train_{part}"] for part in _PARTS):
            return None
        found = [name for part in _PARTS if lora[f"train_{part}"] for name in self.targets[part]]
        if not found:
            raise LoRAUsageError("lora_config trains no layer of the model; set train_attn, train_mlp or train_unembed")
        return found

    def _check_base(self, name: str | None) -> None:
        if name not in (None, self.base):
            raise LoRAUsageError(f"base_model {name!r:.200} is not served; expected {self.base!r}")

    def _metadata(self, message: Any) -> dict[str, Any]:
        found = getattr(message, "user_metadata", None) or {}
        if len(json.dumps(found)) > self.limits.metadata_bytes:
            raise LoRAUsageError(f"user_metadata has more than {self.limits.metadata_bytes} bytes")
        return found

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def save_weights(self, call: Call) -> Any:
        return self._save(call, "weights", lambda made: {"type": "save_weights", "path": made.path})

    async def save_weights_external(self, call: Call) -> Any:
        def answer(made: Checkpoint) -> dict[str, Any]:
            return {"type": "save_weights_external", "path": made.path, "size_bytes": made.size}

        return self._save(call, "external_weights", answer)

    async def save_weights_for_sampler(self, call: Call) -> Any:
        message: types.SaveWeightsForSamplerRequest = call.message
        run, number = self.sessions.run(message.model_id), message.sampling_session_seq_id

        async def answer(made: Checkpoint) -> dict[str, Any]:
            self.service.manager.prefetch(LoRARequest(made.token, str(self.checkpoints.folder(made))))
            sampler = None
            if number is not None:
                sampler = self.sessions.add_sampler(self.sessions.session(message.model_id), number, made)
            if made.kind == SNAPSHOT:
                run.snapshots.append(made)
                while len(run.snapshots) > self.limits.snapshots:
                    await self._delete(run.snapshots.pop(0))
            path = None if made.kind == SNAPSHOT else made.path
            return {"type": "save_weights_for_sampler", "path": path, "sampling_session_id": sampler}

        return self._save(call, SNAPSHOT if message.path is None else "sampler_weights", answer)

    def _save(self, call: Call, kind: str, answer: Callable[[Checkpoint], Any]) -> Response:
        """Save the weights of a model. The training thread copies them, and others fetch, pack and write them."""
        message: Any = call.message
        named = message.model_id, kind, f"seq-{message.seq_id}" if message.path is None else message.path

        def copy(run: Run) -> Callable[[], tuple[Adapter, Any]]:
            wire.check_save(message)
            self.checkpoints.check_name(*named)
            return self.training.snapshot(run.model, in_slot_dtype=kind == SNAPSHOT, with_state=kind == "weights")

        async def save(fetch: Callable[[], tuple[Adapter, Any]]) -> Any:
            found, metadata = await self.service.load(fetch), self._metadata(message)
            begun = self.checkpoints.begin(*named, *found, ttl=message.ttl_seconds, metadata=metadata)
            ready: asyncio.Future[Checkpoint] = asyncio.get_running_loop().create_future()
            self._run(self._write(begun, *found, ready))
            return answer(await ready)

        return self._take(call, lambda run: partial(copy, run), save)

    async def _write(
        self, begun: Checkpoint, adapter: Adapter, state: Any, ready: "asyncio.Future[Checkpoint]"
    ) -> None:
        """Write a checkpoint, which is `ready` then; a snapshot once the manager has it. One that fails is deleted."""
        manager, adapter = self.service.manager, replace(adapter, name=begun.token)
        try:
            async with self._writes:
                # Until it is written, a snapshot keeps its place in the host cache. Others must find a place meanwhile.
                if begun.kind == SNAPSHOT and (manager.config.max_cpu_loras or 0) > _WRITES:
                    with contextlib.suppress(NoFreeSlotError):  # it is loaded from its folder, once there is room
                        await self.service.load(partial(manager.add_adapter, adapter))
                        ready.set_result(begun)
                made = await self.service.load(partial(self.checkpoints.write, begun, adapter, state))
                if ready.done():
                    manager.set_request(adapter, LoRARequest(adapter.name, str(self.checkpoints.folder(made))))
                else:
                    ready.set_result(made)
        except Exception as error:  # the client gets it as the answer, or by its next sample
            if not ready.done():
                ready.set_exception(error)
            elif not isinstance(error, LoRAUsageError | AdapterNotFoundError):  # it was deleted
                _log.exception("%s could not be written, and is deleted", begun.path)
            await self._delete(begun)

    async def list_runs(self, call: Call) -> Any:
        runs, cursor = _page(call.request, self.checkpoints.runs())
        return types.TrainingRunsResponse(training_runs=[self._shown(run) for run in runs], cursor=cursor)

    async def show_run(self, call: Call) -> Any:
        return self._shown(self.checkpoints.run(call.request.path_params["run"]))

    def _shown(self, run: Record) -> types.TrainingRun:
        own = self.checkpoints.of(run.id)
        live = [session.runs[run.id].used for session in self.sessions.open.values() if run.id in session.runs]
        last = {kind: next((_shown(each) for each in own if each.kind == kind), None) for kind in KINDS}
        return types.TrainingRun(
            training_run_id=run.id,
            base_model=self.base,
            model_owner="jlora",
            is_lora=True,
            lora_rank=run.lora["rank"],
            last_request_time=_time(max([run.created, *live, *(each.created for each in own)])),
            last_checkpoint=last["weights"],
            last_sampler_checkpoint=last["sampler_weights"],
            user_metadata={key: str(value) for key, value in run.metadata.items()} or None,
        )

    async def list_checkpoints(self, call: Call) -> Any:
        run = call.request.path_params.get("run")
        own = self.checkpoints.of(None if run is None else self.checkpoints.run(run).id)
        own, cursor = _page(call.request, own)
        return types.CheckpointsListResponse(checkpoints=[_shown(each) for each in own], cursor=cursor)

    async def delete_checkpoint(self, call: Call) -> Any:
        await self._delete(self._named(call))
        return {}

    async def weights_info(self, call: Call) -> Any:
        lora = self._lora_of(str(call.message.get("tinker_path")))
        options = {f"train_{part}": lora[f"train_{part}"] for part in _PARTS}
        return types.WeightsInfoResponse(base_model=self.base, is_lora=True, lora_rank=lora["rank"], **options)

    async def weights_urls(self, call: Call) -> Any:
        found, expires = self._named(call), int(time.time() + self.limits.url_seconds)
        start = f"{call.request.base_url}api/v1/download/{found.token}"
        urls = {
            file: f"{start}/{file}?expires={expires}&signature={self._signed(found.token, file, expires)}"
            for file in _FILES
        }
        return types.ExternalWeightsUrlsResponse(urls=urls, expires=_time(expires))

    async def download(self, call: Call) -> Any:
        query, path = call.request.query_params, call.request.path_params
        token, file, expires = path["token"], path["file"], query.get("expires", "")[:20]
        signed = self._signed(token, file, expires).encode()
        if not hmac.compare_digest(signed, query.get("signature", "").encode()) or int(expires) < time.time():
            raise ApiError(403, "PermissionDeniedError", "the URL has expired, or its signature is wrong")
        if not (found := [each for each in self.checkpoints.of() if each.token == token]):
            raise ApiError(404, NOT_FOUND, "the checkpoint does not exist")
        return FileResponse(self.checkpoints.folder(found[0]) / file, filename=file)

    def _signed(self, token: str, file: str, expires: int | str) -> str:
        return hmac.new(self._secret, f"{token}/{file}/{expires}".encode(), hashlib.sha256).hexdigest()

    def _named(self, call: Call) -> Checkpoint:
        path = call.request.path_params
        return self.checkpoints.at(f"tinker://{path['run']}/{path['kind']}/{path['name']}")

    def _lora_of(self, path: str) -> Mapping[str, Any]:
        return self.checkpoints.run(self.checkpoints.at(path).run).lora

    async def _delete(self, checkpoint: Checkpoint) -> None:
        try:
            await self.service.load(partial(self.checkpoints.delete, checkpoint))
        finally:
            with contextlib.suppress(AdapterNotFoundError):
                self.service.engine.remove_lora(checkpoint.token)

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, call: Call) -> Any:
        message: types.CreateSamplingSessionRequest = call.message
        session = self.sessions.session(message.session_id)
        self._check_base(message.base_model)
        if message.model_path is None and message.base_model is None:
            raise bad_request("model_path and base_model are missing; give one of them")
        source = None if message.model_path is None else self.checkpoints.at(message.model_path)
        id = self.sessions.add_sampler(session, message.sampling_session_seq_id, source)
        return types.CreateSamplingSessionResponse(sampling_session_id=id)

    async def show_sampler(self, call: Call) -> Any:
        source = self._sampler(id := call.request.path_params["id"])
        path = None if source is None or source.kind == SNAPSHOT else source.path
        return types.GetSamplerResponse(sampler_id=id, base_model=self.base, model_path=path)

    def _sampler(self, id: str) -> Checkpoint | None:
        if id not in (samplers := self.sessions.session(id).samplers):
            raise gone(id)
        return samplers[id]

    async def asample(self, call: Call) -> Any:
        message: types.SampleRequest = call.message
        if message.sampling_session_id is None or message.seq_id is None:
            raise bad_request("sampling_session_id and seq_id are missing; begin with create_sampling_session")
        source, id = self._sampler(message.sampling_session_id), f"{message.sampling_session_id}:{message.seq_id}"
        if (future := self.sessions.known(id)) is not None:
            return _reply(future)
        future, lora = self.sessions.future(id, call.size), None
        try:
            params, prompt = wire.sampling_params(message, self.limits.samples), wire.prompt_tokens(message.prompt)
            future.about["sample_sequence_ids"] = [f"{id}:{i}" for i in range(len(params))]
            if source is not None:
                self.checkpoints.get(source.run, source.kind, source.name)  # it may be deleted
                lora = LoRARequest(source.token, str(self.checkpoints.folder(source)))
            running = self.service.engine.submit_all([prompt] * len(params), params, lora=lora)
        except EngineBusyError as error:
            self.sessions.forget(future)
            raise ApiError(429, "TooManyRequestsError", str(error), retry_after=error.retry_after) from None
        except LoRAError as error:
            self.sessions.finish(future, error)
            return _reply(future)
        pieces: list[list[Piece]] = [[] for _ in running]

        def heard(i: int, event: Piece | LoRAError) -> None:
            if isinstance(event, LoRAError):
                self.sessions.finish(future, event)
                return
            pieces[i].append(event)
            if event.finish_reason and all(own and own[-1].finish_reason for own in pieces):
                self.sessions.finish(future, wire.sample_response(pieces, message))

        bridge = self.service.bridge()
        for i, generation in enumerate(running):
            generation.listen(partial(bridge.post, partial(heard, i)))
        return _reply(future)


def build_app(tinker: Tinker) -> ASGIApp:
    """Return the application. All routes need a key but `healthz` and the downloads, whose URLs are signed."""
    post, get = partial(_route, tinker, "POST"), partial(_route, tinker, "GET")
    run, named = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
    routes = [
        get("/healthz", tinker.healthz, key=False),
        get("/get_server_capabilities", tinker.capabilities),
        post("/client/config", tinker.client_config, dict),
        post("/client/dynamic_config", tinker.client_config, dict),
        post("/create_session", tinker.create_session, types.CreateSessionRequest),
        post("/session_heartbeat", tinker.session_heartbeat, types.SessionHeartbeatRequest),
        post("/sessions/{id}/finish", tinker.finish_session, dict),
        post("/create_model", tinker.create_model, types.CreateModelRequest),
        post("/load_weights", tinker.load_weights, types.LoadWeightsRequest),
        post("/get_info", tinker.get_info, types.GetInfoRequest),
        post("/unload_model", tinker.unload_model, types.UnloadModelRequest),
        post("/forward_backward", tinker.forward_backward, wire.ForwardBackwardRequest),
        post("/optim_step", tinker.optim_step, types.OptimStepRequest),
        post("/save_weights", tinker.save_weights, types.SaveWeightsRequest),
        post("/save_weights_for_sampler", tinker.save_weights_for_sampler, types.SaveWeightsForSamplerRequest),
        post("/save_weights_external", tinker.save_weights_external, types.SaveWeightsExternalRequest),
        post("/create_sampling_session", tinker.create_sampling_session, types.CreateSamplingSessionRequest),
        get("/samplers/{id}", tinker.show_sampler),
        post("/asample", tinker.asample, types.SampleRequest),
        post("/retrieve_future", tinker.retrieve_future, types.FutureRetrieveRequest),
        post("/telemetry", tinker.telemetry, dict),
        post("/weights_info", tinker.weights_info, dict),
        get("/training_runs", tinker.list_runs),
        get(run, tinker.show_run),
        get(run + "/checkpoints", tinker.list_checkpoints),
        get("/checkpoints", tinker.list_checkpoints),
        get(named + "/external_weights_urls", tinker.weights_urls),
        _route(tinker, "DELETE", named, tinker.delete_checkpoint),
        get("/download/{token}/{file}", tinker.download, key=False),
    ]

    return Outermost(routes, [f"/api/v1/{path}" for path in _QUIET])


def _route(tinker: Tinker, method: str, path: str, endpoint: Any, kind: Any = None, *, key: bool = True) -> Route:
    """Return a route: the check of the key, and the message of type `kind`."""

    async def answer(request: Request) -> Response:
        if key:
            if not tinker.service.keys.admit(f"Bearer {request.headers.get('x-api-key', '')}", admin=False):
                raise ApiError(401, "AuthenticationError", "a key is needed: X-API-Key: tml-...")
            tinker.service.check_ready()
        body, message = bytearray(), None
        if kind is not None:
            media = wire.PROTOBUF if kind is wire.ForwardBackwardRequest else "application/json"
            body = await read_body(request, tinker.service.limits, expected=media)
            message = wire.parse(kind, body)
        try:
            found = await endpoint(Call(request, message, len(body)))
        except LoRAUsageError as error:
            raise bad_request(str(error)) from None
        found = found.model_dump(mode="json") if isinstance(found, BaseModel) else found
        return found if isinstance(found, Response) else JSONResponse(found)

    return Route(f"/api/v1{path}", answer, methods=[method])


def _reply(future: Future, **more: Any) -> Response:
    return JSONResponse({"request_id": future.id, **more, **future.about})


def _page(request: Request, found: list[Any]) -> tuple[list[Any], types.Cursor]:
    """Return the part of a list that a request is for."""
    try:
        limit, offset = (int(request.query_params.get(key, given)) for key, given in (("limit", 100), ("offset", 0)))
    except ValueError:
        raise bad_request("limit and offset must be whole numbers") from None
    limit, offset = max(0, min(limit, 1000)), max(0, offset)
    return found[offset : offset + limit], types.Cursor(offset=offset, limit=limit, total_count=len(found))


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _shown(found: Checkpoint) -> types.Checkpoint:
    return types.Checkpoint(
        checkpoint_id=f"{found.kind}/{found.name}",
        checkpoint_type=_TYPES[found.kind],  # pyright: ignore[reportArgumentType]
        time=_time(found.created),
        tinker_path=found.path,
        size_bytes=found.size,
        user_metadata=dict(found.metadata or {}) or None,
        expires_at=None if found.expires is None else _time(found.expires),
    )

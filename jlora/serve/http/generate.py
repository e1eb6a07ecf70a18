"""Completions and embeddings: submit to the engine, receive events on the event loop, cancel on a disconnect."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jlora.errors import LoRAError
from jlora.serve.engine.generation import Event, Generation
from jlora.serve.engine.request import Piece, SamplingParams
from jlora.serve.http.body import Json, Limits, parse_body, read_body
from jlora.serve.http.errors import UNAVAILABLE, ApiError, bad_request, of_generation
from jlora.serve.http.protocol import ApiRequest, read_chat, read_completion, read_embeddings
from jlora.serve.http.responses import Choice, ResponseWriter, embeddings_body, to_event, usage_of
from jlora.serve.http.service import LoopBridge, Service

Read = Callable[[dict[str, Json], Limits], ApiRequest]
Pieces = list[tuple[int, Piece]]  # (index of the completion, its next part)


async def completions(service: Service, request: Request) -> Response:
    """`POST /v1/completions`."""
    return await _answer(service, request, read_completion)


async def chat_completions(service: Service, request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    return await _answer(service, request, read_chat)


async def embeddings(service: Service, request: Request) -> Response:
    """`POST /v1/embeddings`."""
    return await _answer(service, request, read_embeddings)


async def _answer(service: Service, request: Request, read: Read) -> Response:
    note: dict[str, Any] = request.scope["jlora.note"]
    started = time.monotonic()
    body = await read_body(request, service.limits)
    # On a thread, since reading megabytes of JSON would stall other streams.
    api_request = await service.work(lambda: read(parse_body(body), service.limits))
    note |= {"model": api_request.model, "stream": api_request.stream}
    try:
        generations = await service.work(partial(_submit, service, api_request))
        run = Run(api_request, generations, service.bridge(), request.receive, note)
        try:
            # Streams also wait for the first part, so that earlier failures have a status of their own.
            pieces = await run.next()
            note["first_seconds"] = round(time.monotonic() - started, 4)
            writer = ResponseWriter(api_request, service.texts, _fingerprint(service, api_request.model, generations))
            if api_request.stream:
                return _EventStream(run, writer, pieces)
            while pieces is not None:
                pieces = await run.next()
        except BaseException:
            run.end()
            raise
    except LoRAError as error:
        raise of_generation(error, api_request.model) from None
    run.end()
    if api_request.encoding is None:
        whole = partial(writer.whole, run.choices, run.usage())
        return await service.work(lambda: JSONResponse(whole(), headers=writer.headers))
    if any(choice.embedding is None for choice in run.choices):
        raise ApiError(503, UNAVAILABLE, "a pause has aborted the request; send it again", retry_after=1)
    write = partial(embeddings_body, api_request.model, run.choices, run.usage(), api_request.encoding)
    return Response(await service.work(write), media_type="application/json", headers=writer.headers)


def _fingerprint(service: Service, model: str, generations: Sequence[Generation]) -> str:
    """Return the text that names the weights of a request: model, adapter, its version and a digest of its files."""
    named: dict[str, Any] = {"model": service.names[0]} | ({} if model in service.names else {"adapter": model})
    for handle in [one.handle for one in generations if one.handle is not None][:1]:
        named |= {"version": handle.version, "digest": (handle.fingerprint or "")[:16]}
    return urlencode(named, safe="/", errors="backslashreplace")


def _submit(service: Service, api_request: ApiRequest) -> list[Generation]:
    """Submit all sequences of a request."""
    embed = api_request.encoding is not None
    if service.engine.embeds != embed:
        able = "generates text and cannot embed: its folder has no modules.json with a Pooling module"
        able = able if embed else "embeds texts (/v1/embeddings) and cannot generate"
        raise bad_request(f"model {service.names[0]!r} {able}", "model")
    prompts = api_request.prompts or (_rendered(service, api_request),)
    lora = None if api_request.model in service.names else api_request.model
    # Encoded once for all `n` completions. A chat template writes the special tokens itself.
    encoded = (_encode(service, one, special=not api_request.chat) if isinstance(one, str) else one for one in prompts)
    if embed:
        dimensions, timeout = api_request.dimensions, api_request.timeout
        return service.engine.embed(list(encoded), dimensions=dimensions, lora=lora, timeout=timeout)
    asked = [(tokens, _with_seed(api_request.params, i)) for tokens in encoded for i in range(api_request.n)]
    tokens, params = zip(*asked, strict=True)
    return service.engine.submit_all(tokens, params, lora=lora, timeout=api_request.timeout)


def _rendered(service: Service, api_request: ApiRequest) -> str:
    if service.chat is None:
        message = "the model has no chat template: ask /v1/completions, or start the server with --chat-template"
        raise bad_request(message)
    return service.chat.render(api_request.messages, api_request.template)


def _encode(service: Service, text: str, *, special: bool) -> list[int]:
    """Tokenize a text. Refuse one that cannot fit first, since tokenizing megabytes takes seconds."""
    most = service.max_model_len * service.texts.longest
    if len(text) > most:
        message = f"the prompt has {len(text)} characters; {service.max_model_len} tokens have {most} at most"
        raise bad_request(message)
    return service.engine.encode(text, special=special)


def _with_seed(params: SamplingParams, i: int) -> SamplingParams:
    """Return the parameters of the i-th completion: consecutive seeds, wrapping around after 2**63 - 1."""
    return params if params.seed is None else replace(params, seed=(params.seed + i + 2**63) % 2**64 - 2**63)


class Run:
    """The generations of one request. Used on the event loop, except for the callbacks of `listen`.

    Args:
      api_request: The request.
      generations: Its generations, `api_request.n` for each prompt.
      bridge: Forwards their events to the event loop.
      receive: Of the request, after its body was read. Only a disconnect can follow.
      note: Fields of the request's log line.
    """

    def __init__(
        self,
        api_request: ApiRequest,
        generations: Sequence[Generation],
        bridge: LoopBridge,
        receive: Receive,
        note: dict[str, Any],
    ):
        self.api_request = api_request
        self.choices = [Choice(generation.prompt) for generation in generations]
        self._generations = generations
        self._note = note
        self._events: dict[int, list[Event]] = {}
        self._wake = asyncio.Event()
        self._gone = False
        self._left = len(generations)
        self._failure: LoRAError | None = None
        self._watch = asyncio.ensure_future(self._until_gone(receive))
        for index, generation in enumerate(generations):
            generation.listen(partial(bridge.post, partial(self._put, index)))

    def _put(self, index: int, event: Event) -> None:
        self._events.setdefault(index, []).append(event)
        self._wake.set()

    async def _until_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._wake.set()

    async def next(self) -> Pieces | None:
        """Wait for new pieces, with those of one completion merged; None once all have ended.

        Raises:
          ClientDisconnect: the client disconnected.
          LoRAError: the error of a generation, after all earlier pieces.
        """
        if self._failure is not None:
            raise self._failure
        if not self._left:
            return None
        await self._wake.wait()
        self._wake.clear()
        if self._gone:
            raise ClientDisconnect
        events, self._events = self._events, {}
        found: Pieces = []
        for index, of_one in events.items():
            pieces: list[Piece] = []
            for event in of_one:
                if isinstance(event, LoRAError):
                    self._failure = self._failure or event
                else:
                    pieces.append(event)
            if not pieces:
                continue
            piece = pieces[0] if len(pieces) == 1 else _together(pieces)
            self.choices[index].add(piece)
            self._left -= piece.finish_reason is not None
            found.append((index, piece))
        if self._failure is not None and not found:
            raise self._failure
        return found

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, with each prompt once."""
        firsts = self._generations[:: self.api_request.n]
        prompts, cached = sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts)
        return usage_of(prompts, sum(len(choice.tokens) for choice in self.choices), cached)

    def usage_so_far(self, index: int) -> dict[str, Any] | None:
        """Return the token counts of one completion so far, if events carry them."""
        if not self.api_request.continuous_usage:
            return None
        own = self._generations[index]
        return usage_of(own.prompt_tokens, len(self.choices[index].tokens), own.cached_tokens)

    def end(self) -> None:
        """Cancel the generations that have not ended, and complete the log line."""
        self._watch.cancel()
        for generation, choice in zip(self._generations, self.choices, strict=True):
            if choice.finish_reason is None:
                generation.cancel()
        usage = self.usage()
        self._note["prompt_tokens"] = usage["prompt_tokens"]
        if self.api_request.encoding is not None:
            self._note["inputs"] = len(self.choices)
            return
        self._note["tokens"] = usage["completion_tokens"]
        self._note["finish"] = [choice.finish_reason for choice in self.choices]


def _together(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        tuple(one for piece in pieces for one in piece.logprobs),
        pieces[-1].finish_reason,
        prompt_logprobs=pieces[0].prompt_logprobs,
    )


class _EventStream(Response):
    """Server-sent events, until all completions have ended or the client disconnects."""

    def __init__(self, run: Run, writer: ResponseWriter, first: Pieces | None):
        self._run, self._writer, self._first = run, writer, first
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **writer.headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        run, writer, pieces = self._run, self._writer, self._first
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while pieces is not None:
                    events = b"".join(
                        [
                            writer.events(index, run.choices[index], piece, run.usage_so_far(index))
                            for index, piece in pieces
                        ]
                    )
                    if events:
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                    pieces = await run.next()
                last = writer.usage_event(run.usage()) if run.api_request.include_usage else b""
            except LoRAError as error:  # the status is sent already
                failure = of_generation(error, run.api_request.model)
                scope["jlora.note"]["error"] = failure.message
                last = to_event(failure.body())
            await send({"type": "http.response.body", "body": last + b"data: [DONE]\n\n", "more_body": False})
        finally:
            run.end()

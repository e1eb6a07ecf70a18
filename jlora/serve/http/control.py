"""vLLM's endpoints for trainers: pause and resume the engine, and read the sizes of the server."""

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jlora.errors import LoRAError
from jlora.serve.http.body import RequestFields, receive_body
from jlora.serve.http.errors import bad_request, of_generation
from jlora.serve.http.log import log_event
from jlora.serve.http.service import Service


async def pause(service: Service, request: Request) -> Response:
    """Handle `POST /pause?mode=abort|wait|keep`. Returns once the engine is paused."""
    body = await receive_body(request, service.limits.body_bytes, service.limits.body_seconds)
    if bytes(body).strip() not in (b"", b"{}"):
        raise bad_request("the body must be empty, since the mode is in the query: /pause?mode=keep")
    fields = RequestFields(dict(request.query_params))
    mode = fields.take("mode") or "abort"
    fields.ignore(("clear_cache",))  # versions of adapters share nothing in the cache
    fields.finish()
    return await _run(service, partial(service.engine.pause, mode), "paused")


async def resume(service: Service, request: Request) -> Response:
    """Handle `POST /resume`."""
    RequestFields(dict(request.query_params)).finish()
    return await _run(service, service.engine.resume, "resumed")


async def _run(service: Service, change: Callable[[], None], status: str) -> Response:
    try:
        await service.load(change)
    except LoRAError as error:
        raise of_generation(error, "") from None
    log_event(status)
    return JSONResponse({"status": status})


async def is_paused(service: Service, request: Request) -> Response:
    """Handle `GET /is_paused`."""
    return JSONResponse({"is_paused": service.engine.paused})


async def server_info(service: Service, request: Request) -> Response:
    """Handle `GET /server_info`: the fields of vLLM's configuration that trainers read."""
    fields = RequestFields(dict(request.query_params))
    fields.only("config_format", "json")
    fields.finish()
    config, rank = service.manager.config, service.manager.config.max_lora_rank
    ranks = [rank] if isinstance(rank, int) else rank.values()
    info = {
        "model_config": {"dtype": f"torch.{service.dtype}", "max_model_len": service.max_model_len},
        "lora_config": {"max_lora_rank": max(ranks), "max_loras": config.max_loras},
        "parallel_config": {"data_parallel_size": 1},  # a loaded adapter reaches all devices of this process
    }
    return JSONResponse({"vllm_config": info})

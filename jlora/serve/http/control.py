"""vLLM's endpoints for trainers: pause and resume the engine, and the sizes of the server."""

from functools import partial
from typing import get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jlora.errors import LoRAError
from jlora.serve import EngineClosedError, PauseMode
from jlora.serve.http.body import RequestFields
from jlora.serve.http.errors import UNAVAILABLE, ApiError
from jlora.serve.http.log import log_event
from jlora.serve.http.service import Service


async def pause(service: Service, request: Request) -> Response:
    """Handle `POST /pause?mode=abort|wait|keep`. Returns once the engine is paused."""
    fields = RequestFields(dict(request.query_params))
    mode = fields.take("mode") or "abort"
    if mode not in get_args(PauseMode):
        raise fields.fail("mode", "'abort', 'wait' or 'keep'")
    fields.ignore(("clear_cache",))  # versions of adapters share nothing in the cache
    fields.finish()
    try:
        await service.load(partial(service.engine.pause, mode))
    except EngineClosedError as error:
        raise ApiError(503, UNAVAILABLE, str(error), retry_after=1) from None
    except LoRAError as error:
        raise ApiError(409, "ConflictError", str(error)) from None
    log_event("paused", mode=mode)
    return JSONResponse({"status": "paused"})


async def resume(service: Service, request: Request) -> Response:
    """Handle `POST /resume`."""
    RequestFields(dict(request.query_params)).finish()
    try:
        service.engine.resume()
    except EngineClosedError as error:
        raise ApiError(503, UNAVAILABLE, str(error), retry_after=1) from None
    log_event("resumed")
    return JSONResponse({"status": "resumed"})


async def is_paused(service: Service, request: Request) -> Response:
    """Handle `GET /is_paused`."""
    return JSONResponse({"is_paused": service.engine.paused})


async def server_info(service: Service, request: Request) -> Response:
    """Handle `GET /server_info`: the fields of vLLM's configuration that trainers read."""
    fields = RequestFields(dict(request.query_params))
    if fields.take("config_format") not in (None, "json"):
        raise fields.fail("config_format", "'json'")
    fields.finish()
    config = service.manager.config
    rank = config.max_lora_rank
    lora = {
        "max_lora_rank": rank if isinstance(rank, int) else max(rank.values()),
        "max_loras": config.max_loras,
        "max_cpu_loras": config.max_cpu_loras,
    }
    model = {"model": service.root, "dtype": f"torch.{service.dtype}", "max_model_len": service.max_model_len}
    # One process serves all devices, so an adapter that is loaded reaches each of them.
    parallel = {"data_parallel_size": 1}
    return JSONResponse({"vllm_config": {"model_config": model, "lora_config": lora, "parallel_config": parallel}})

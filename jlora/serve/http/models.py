"""`/v1/models`: the base model under each of its names, and every adapter that requests may name."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jlora.serve.http.errors import no_such_model
from jlora.serve.http.service import Service


async def list_models(service: Service, request: Request) -> Response:
    """Handle `GET /v1/models`."""
    # On a thread, since listing thousands takes milliseconds and routers poll often.
    return await service.work(lambda: JSONResponse({"object": "list", "data": list(_cards(service).values())}))


async def show_model(service: Service, request: Request) -> Response:
    """Handle `GET /v1/models/NAME`."""
    name: str = request.path_params["name"]
    card = (await service.work(lambda: _cards(service))).get(name)
    if card is None:
        raise no_such_model(name)
    return JSONResponse(card)


def _cards(service: Service) -> dict[str, dict[str, Any]]:
    base, created = service.names[0], int(service.started)
    cards = {name: _card(service, name, created, service.root, None) for name in service.names}
    for name, known in service.engine.list_loras().items():
        cards[name] = _card(service, name, known.created, known.path, known.parent or base)
    return cards


def _card(service: Service, name: str, created: int, root: str, parent: str | None) -> dict[str, Any]:
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "jlora",
        "root": root,
        "parent": parent,
        "max_model_len": service.max_model_len,
        "permission": [permission],
    }

"""Adapters in the body of `POST /v1/load_lora_adapter` of vLLM: an endpoint plugin, with the form of `jlora serve`."""

import os
import re
import secrets
from typing import Any

import jlora


class Upload:
    """vLLM's `EndpointPlugin`. It is loaded only if `VLLM_PLUGINS` names it, and needs `jlora_vllm_jax` beside it."""

    name = "jlora_vllm_jax_upload"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Take the requests whose body is a form. vLLM's own route keeps those with JSON."""
        from starlette.routing import Match, Route

        class FormRoute(Route):
            def matches(self, scope: Any) -> Any:
                form = (b"content-type", b"multipart/form-data") in [(k, v[:19]) for k, v in scope.get("headers", ())]
                return super().matches(scope) if form else (Match.NONE, {})

        app.router.routes.insert(0, FormRoute("/v1/load_lora_adapter", self._load, methods=["POST"]))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Keep vLLM's engine, and its list of adapters. Raise `LoRAError` without `jlora_vllm_jax`."""
        if "jlora_vllm_jax" not in os.environ.get("VLLM_PLUGINS", "").split(","):
            raise jlora.LoRAError(f"VLLM_PLUGINS names {self.name} alone; it needs jlora_vllm_jax too")
        self._engine, self._models = engine_client, state.openai_serving_models

    async def _load(self, request: Any) -> Any:
        """Hand the bytes to all workers, and then load them as vLLM loads a folder, under a path of their own."""
        from starlette.responses import JSONResponse, PlainTextResponse
        from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest  # type: ignore[import-not-found]

        form = {"adapter_model": b"", "adapter_config": b"", "lora_name": b"", "load_inplace": b""}
        form |= _parts(await request.body(), request.headers["content-type"])
        name, path = form["lora_name"].decode(errors="replace"), f"upload:{secrets.token_hex(16)}"
        try:
            files = form["adapter_model"], form["adapter_config"]
            answers = await self._engine.collective_rpc("jlora_upload", args=(path, *files))
            if errors := [answer for answer in answers if answer is not None]:
                return JSONResponse({"error": {"message": errors[0], "type": "InvalidUserInput", "code": 400}}, 400)
            fields = LoadLoRAAdapterRequest(
                lora_name=name, lora_path=path, load_inplace=form["load_inplace"] == b"true"
            )
            found = await self._models.load_lora_adapter(fields)
        finally:
            await self._engine.collective_rpc("jlora_upload", args=(path,))
        return (
            PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found.model_dump(), found.error.code)
        )


def _parts(body: bytes, content_type: str) -> dict[str, bytes]:
    """Return the parts of a form (RFC 7578) by name."""
    boundary = b"\r\n--" + content_type.partition("boundary=")[2].partition(";")[0].strip('" ').encode()
    parts = [part.partition(b"\r\n\r\n") for part in (b"\r\n" + body).split(boundary)[1:-1]]
    names = [re.search(rb'\bname="(\w+)"', head) for head, _, _ in parts]
    return {name[1].decode(): value for name, (_, _, value) in zip(names, parts, strict=True) if name}

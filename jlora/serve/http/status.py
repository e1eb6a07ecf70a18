"""The status page: adapters, requests under way and latencies. Reads `/status.json`."""

import base64
import hashlib
import heapq
import re
import time
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jlora import HistogramCounts
from jlora.serve.http.responses import displayed
from jlora.serve.http.service import Service

_MOST = 200  # adapters shown


async def status_json(service: Service, request: Request) -> Response:
    """Handle `GET /status.json`."""
    return JSONResponse(await service.work(lambda: _status(service)))


async def status_page(service: Service, request: Request) -> Response:
    """Handle `GET /` and `GET /status`."""
    html, policy = _page()
    return Response(html, headers={"content-type": "text/html; charset=utf-8", "content-security-policy": policy})


@cache
def _page() -> tuple[bytes, str]:
    """Return the page, and its content security policy: its own script and style, and requests to its own server."""
    html = Path(__file__).with_name("status.html").read_bytes()
    allowed = {
        tag: base64.b64encode(
            hashlib.sha256(re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), html, re.S)[0]).digest()
        ).decode()
        for tag in (b"script", b"style")
    }
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src 'sha256-{allowed[b'script']}'; "
        f"style-src 'sha256-{allowed[b'style']}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _status(service: Service) -> dict[str, Any]:
    stats, manager = service.engine.stats(), service.manager.stats()
    listed = service.manager.list_adapters()
    loaded = {name: info for name, info in listed.items() if info.level != "evicted"}
    slots: list[str | None] = [None] * service.manager.config.max_loras
    for info in loaded.values():
        if info.slot is not None:
            slots[info.slot] = info.name
    known = service.engine.list_loras()
    # Adapters in memory first, then the busiest.
    names = heapq.nlargest(_MOST, {**known, **loaded}, key=lambda name: (name in loaded, stats.by_lora.get(name, 0)))
    adapters = [
        {
            "name": name,
            "requests": stats.by_lora.get(name, 0),
            "running": stats.running_by_lora.get(name, 0),
            "waiting": stats.waiting_by_lora.get(name, 0),
            "path": displayed(known[name].path) if name in known else None,
            **({key: getattr(loaded[name], key) for key in ("slot", "rank", "pinned")} if name in loaded else {}),
            "level": loaded[name].level if name in loaded else None,
        }
        for name in names
    ]
    return {
        "model": service.names[0],
        "state": service.condition,
        "progress": service.progress,
        "step_seconds": service.step_seconds,
        "seconds": round(time.time() - service.started),
        "running": stats.running,
        "waiting": stats.waiting,
        "cache_usage": stats.cache_usage,
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "finished": dict(stats.finished),
        "failed_steps": stats.failed_steps,
        "slots": slots,
        "registered": len(known),
        "adapters": adapters,
        "manager": asdict(manager),
        "latency": {
            "first token": _quantiles(stats.time_to_first_token),
            "each further token": _quantiles(stats.inter_token_latency),
            "whole request": _quantiles(stats.request_seconds),
            "queue": _quantiles(stats.queue_seconds),
            "queue, of adapters in no slot": _quantiles(stats.adapter_wait_seconds),
            "load": _quantiles(manager.load_seconds),
            "slot write": _quantiles(manager.swap_seconds),
        },
    }


def _quantiles(histogram: HistogramCounts) -> dict[str, float | None]:
    """Return upper bounds of p50 and p99, in the histogram's unit; None without values, or above the highest bound."""
    bounds, counts, _ = histogram
    found: dict[str, float | None] = {}
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        wanted, so_far = share * sum(counts), 0
        found[name] = None
        for bound, count in zip(bounds, counts, strict=False):
            so_far += count
            if sum(counts) and so_far >= wanted:
                found[name] = bound
                break
    return found

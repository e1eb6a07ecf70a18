"""`/metrics` in Prometheus' text format, with the names that routers scrape.

The number of series is bounded. Only adapters in memory have series of their own, at most `_MOST`: slots first, then
the host cache by last use. The others are counted together.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from starlette.requests import Request
from starlette.responses import Response

from jlora import HistogramCounts
from jlora.errors import printable
from jlora.serve.http.service import Service

_MOST = 1000
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Field of the manager's stats -> name of the metric.
_COUNTERS = {
    "host_loads": "jlora:host_loads_total",
    "host_evictions": "jlora:host_evictions_total",
    "slot_loads": "jlora:slot_loads_total",
    "slot_evictions": "jlora:slot_evictions_total",
    "slot_hits": "jlora:slot_hits_total",
}
_LEVELS = {"slot": "gpu", "host": "cpu"}  # level of the manager -> its name in vLLM, on any accelerator
_TRANSITIONS = {"load_seconds": "load", "swap_seconds": "activate"}  # of an adapter: to the host, and to a slot

Labels = Mapping[str, str]
Samples = Sequence[tuple[Labels, float]]


async def metrics(service: Service, request: Request) -> Response:
    """Handle `GET /metrics`."""
    text = await service.work(lambda: "".join(_lines(service)))
    return Response(text, headers={"content-type": _TYPE})


def _lines(service: Service) -> Iterator[str]:
    stats, manager = service.engine.stats(), service.manager.stats()
    model = {"model_name": service.names[0]}
    running, waiting = stats.running_by_lora, stats.waiting_by_lora
    config = service.manager.config
    info = {
        "max_lora": str(config.max_loras),
        "running_lora_adapters": _names(running),
        "waiting_lora_adapters": _names(waiting),
    }
    yield from _family("vllm:lora_requests_info", "gauge", [(info, time.time())])
    yield from _family("vllm:num_requests_running", "gauge", [(model, stats.running)])
    yield from _family("vllm:num_requests_waiting", "gauge", [(model, stats.waiting)])
    yield from _family("vllm:kv_cache_usage_perc", "gauge", [(model, stats.cache_usage)])
    # A row counts as one block, which holds one sequence of any length. Its beginning is copied, never shared.
    blocks = {
        "block_size": str(service.max_model_len),
        "num_gpu_blocks": str(service.engine.options.max_num_seqs),
        "enable_prefix_caching": str(service.engine.options.enable_prefix_caching),
    }
    yield from _family("vllm:cache_config_info", "gauge", [(blocks, 1)])
    yield from _family("vllm:prompt_tokens_total", "counter", [(model, stats.prompt_tokens)])
    queries = stats.prefilled_tokens + stats.cached_tokens
    yield from _family("vllm:prefix_cache_queries_total", "counter", [(model, queries)])
    yield from _family("vllm:prefix_cache_hits_total", "counter", [(model, stats.cached_tokens)])
    yield from _family("vllm:generation_tokens_total", "counter", [(model, stats.generated_tokens)])
    finished = [({**model, "finished_reason": reason}, count) for reason, count in sorted(stats.finished.items())]
    yield from _family("vllm:request_success_total", "counter", finished)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", stats.time_to_first_token),
        ("vllm:inter_token_latency_seconds", stats.inter_token_latency),
        ("vllm:request_time_per_output_token_seconds", stats.request_time_per_output_token),
        ("vllm:e2e_request_latency_seconds", stats.request_seconds),
        ("vllm:request_queue_time_seconds", stats.queue_seconds),
        ("jlora:adapter_wait_seconds", stats.adapter_wait_seconds),
    ):
        yield from _histogram(name, [(model, histogram)])

    # The manager lists the least recently used first.
    order = [*reversed(service.manager.list_adapters().values())]
    in_slots = [info for info in order if info.level == "slot"]
    on_host = [info for info in order if info.level == "host"]
    resident = [
        (
            {
                "adapter_name": info.name,
                "level": _LEVELS[info.level],
                "pinned": str(info.pinned).lower(),
                "rank": str(info.rank),
            },
            1.0,
        )
        for info in [*in_slots, *on_host][:_MOST]
    ]
    yield from _family("vllm:lora_adapter_loaded", "gauge", resident)
    yield from _family("vllm:num_gpu_loaded_lora_adapters", "gauge", [(model, len(in_slots))])
    yield from _family("vllm:max_gpu_lora_adapters", "gauge", [(model, config.max_loras)])
    used = [({"adapter_name": info.name}, float(stats.by_lora.get(info.name, 0))) for info in in_slots[:_MOST]]
    yield from _family("jlora:adapter_requests_total", "counter", used)
    yield from _family("jlora:unloaded_adapter_requests_total", "counter", [({}, stats.by_unloaded)])

    yield from _family("jlora:adapters_registered", "gauge", [({}, len(service.engine.list_loras()))])
    yield from _family("jlora:failed_steps_total", "counter", [({}, stats.failed_steps)])
    transitions = [({**model, "transition": kind}, getattr(manager, name)) for name, kind in _TRANSITIONS.items()]
    yield from _histogram("vllm:lora_adapter_load_seconds", transitions)
    for field in fields(manager):
        if field.name in _TRANSITIONS:
            continue
        name = _COUNTERS.get(field.name, f"jlora:{field.name}")
        yield from _family(
            name, "counter" if name in _COUNTERS.values() else "gauge", [({}, getattr(manager, field.name))]
        )


def _names(counts: Mapping[str, int]) -> str:
    r"""Return the names joined with commas. A comma in a name becomes `\x2c`."""
    return ",".join(name.replace(",", r"\x2c") for name in sorted(counts))


def _family(name: str, kind: str, samples: Samples) -> Iterator[str]:
    yield f"# TYPE {name} {kind}\n"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {_number(value)}\n"


def _histogram(name: str, series: Sequence[tuple[Labels, HistogramCounts]]) -> Iterator[str]:
    """Yield the lines of histograms of one name. Their counts are per interval; the format requires cumulative ones."""
    yield f"# TYPE {name} histogram\n"
    for labels, (bounds, counts, total) in series:
        so_far = 0
        for bound, count in zip(bounds, counts, strict=False):
            so_far += count
            yield f"{name}_bucket{_labels({**labels, 'le': _number(bound)})} {so_far}\n"
        everything = sum(counts)
        yield f"{name}_bucket{_labels({**labels, 'le': '+Inf'})} {everything}\n"
        yield f"{name}_sum{_labels(labels)} {_number(total)}\n"
        yield f"{name}_count{_labels(labels)} {everything}\n"


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    value = printable(value).encode("utf-8", "backslashreplace").decode()
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(value)

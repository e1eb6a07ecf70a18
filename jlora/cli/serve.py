"""`jlora serve`: serve a model and its adapters over HTTP."""

import argparse
import importlib.util
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jlora import LoRAConfig, LoRAManager, LoRARequest, Survey
from jlora.cli.budget import Budget, budget, skeleton, stored_dtype
from jlora.cli.generate import device_errors
from jlora.cli.loading import check_last_token, load_model, load_tokenizer
from jlora.cli.text import one_line, patterns, utf8
from jlora.errors import LoRAError, LoRAUsageError, printable
from jlora.models import DecoderConfig, model_folder, quantized_config, read_config
from jlora.serve import Engine, EngineOptions, Resolve
from jlora.serve.engine.poolings import read_own_pooling
from jlora.serve.engine.resolvers import in_order, of_folder, of_function, of_hub

_KEY, _ADMIN_KEY = "JLORA_API_KEY", "JLORA_ADMIN_API_KEY"


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal. Arguments, memory and adapters are checked before the model is loaded."""
    for package in ("jinja2", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise LoRAError(f'{package} is not installed: pip install "jlora[serve]"')
    from jlora.serve.http.lora import load
    from jlora.serve.http.server import address, listen, serve
    from jlora.serve.http.service import Keys, Limits, Service
    from jlora.serve.http.sources import AllowedSources
    from jlora.serve.http.state import StateFolder
    from jlora.serve.http.template import load_template

    modules = [_module(text) for text in args.lora_modules]
    names = tuple(utf8(name) for name in args.served_model_name or [args.model])
    _check_names(modules, names, args.model)
    root = None if args.lora_root is None else Path(args.lora_root).expanduser()
    if root is not None and not root.is_dir():
        raise LoRAUsageError(f"--lora-root {root} is not a folder")
    name_map = _name_map(args.name_map)
    patterns("--skip-modules", args.skip_modules)
    resolve = _resolver(args.lora_resolver, root, args.lora_hub_repos)
    keys = Keys(given_keys(args.api_key, _KEY), given_keys(args.admin_api_key, _ADMIN_KEY))
    if args.compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(args.compilation_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    folder = model_folder(args.model, args.revision)
    config = quantized_config(read_config(folder / "config.json"), args.quantization)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    chat = load_template(folder, None if args.chat_template is None else Path(args.chat_template).expanduser())
    if config.pooling is not None:
        check_last_token(folder, tokenizer)
    sizes = _mesh_sizes(args, config)
    dtype = args.dtype
    if dtype == "auto":  # a CPU has no 16-bit arithmetic
        dtype = "float32" if jax.default_backend() == "cpu" else stored_dtype(folder)
    max_model_len = args.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise LoRAUsageError(
            f"--max-model-len {max_model_len} is more than the {config.max_position_embeddings} positions of the model"
        )
    lora = LoRAConfig(
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        expert_slots=dict(args.expert_slots),
        max_cpu_loras=args.max_cpu_loras,
        target_modules=args.lora_target_modules,
        exclude_modules=args.exclude_modules,
        data_axes=["data"] if sizes["data"] > 1 else [],
        dtype=None if args.lora_dtype == "auto" else args.lora_dtype,
        activated=args.activated_loras,
        variants=args.lora_variants,
        saved_heads=dict(args.saved_heads),
        fully_sharded=args.fully_sharded_loras,
        bitwise_base=args.bitwise_base,
    )

    def budget_on(sizes: Mapping[str, int]) -> Budget:
        return budget(
            config,
            lora,
            dtype=dtype,
            mesh=_mesh(sizes),
            sequences=args.max_num_seqs,
            max_model_len=max_model_len,
            batched_tokens=args.max_num_batched_tokens,
            share=args.gpu_memory_utilization,
        )

    needs = _budget(budget_on, sizes)
    needs.check()
    mesh = _mesh(sizes)
    state = None if args.lora_state is None else StateFolder(Path(args.lora_state).expanduser())

    survey = Survey(skeleton(config, dtype, mesh), lora, name_map=name_map, skip=args.skip_modules)
    if state is None or not state.saved:  # saved adapters do not depend on the folders
        for request, _ in modules:
            survey.check(request)
            if config.pooling is not None:
                read_own_pooling(request, config.pooling)

    try:
        bound = listen(args.host, args.port)  # before minutes of loading, because the port may be in use
    except OSError as error:
        raise LoRAError(f"--host {args.host} --port {args.port}: {error.strerror or error}") from error

    log_to_stderr()
    logging.getLogger("jlora.serve").info("memory of each device: %s", needs.text())
    with device_errors():
        model = load_model(folder, dtype, mesh, args.quantization)
        manager = LoRAManager(model, lora, name_map=name_map, skip=args.skip_modules)
    options = EngineOptions(
        max_num_seqs=needs.sequences,
        max_model_len=max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_waiting=args.max_waiting,
        logprobs_mode=args.logprobs_mode,
        enable_prefix_caching=args.enable_prefix_caching,
        request_timeout=args.request_timeout,
    )
    known = frozenset[str]() if state is None else state.restore(manager)
    engine = Engine(model, manager, tokenizer=tokenizer, options=options, resolve=resolve)
    if clash := sorted(set(names) & engine.list_loras().keys()):
        raise LoRAError(f"--lora-state: an adapter has a name of the base model: {clash[0]!r}")
    service = Service(
        engine=engine,
        manager=manager,
        tokenizer=tokenizer,
        names=names,
        root=str(args.model),
        max_model_len=max_model_len,
        sources=AllowedSources(root, tuple(args.lora_hub_repos)),
        saved=state,
        chat=chat,
        keys=keys,
        limits=Limits(upload_bytes=args.max_upload_bytes),
        administration=bool(given_keys(args.admin_api_key, _ADMIN_KEY)),
        dtype=dtype,
    )
    for request, base in modules:
        if request.name in known:  # the saved state takes precedence over the flag, even if it records an unload
            logging.getLogger("jlora.serve").info("--lora-modules: %r is as --lora-state has it", request.name)
        else:
            parent = base if base in names else None
            load(service, request.name, lambda request=request: request, request.path, parent=parent)

    def ready() -> None:
        print(f"jlora serves {printable(names[0])} at {address(bound)}", flush=True)

    with device_errors():
        return serve(service, bound, drain_seconds=args.drain_timeout, log_level=args.uvicorn_log_level, ready=ready)


def _resolver(given: list[str], root: Path | None, repos: list[str]) -> Resolve | None:
    """Return a resolver that tries those of `--lora-resolver` in order, or None if there are none."""
    found: list[Resolve] = []
    for where in given:
        if where == "folder":
            if root is None:
                raise LoRAUsageError("--lora-resolver folder: say where it is with --lora-root")
            found.append(of_folder(root))
        elif where == "hub":
            if not repos:
                raise LoRAUsageError("--lora-resolver hub: say which repositories may be loaded with --lora-hub-repos")
            found.append(of_hub(repos))
        else:
            try:
                found.append(of_function(where))
            except LoRAUsageError as error:
                raise LoRAUsageError(f"--lora-resolver: {error}") from error
    return in_order(found) if found else None


def _module(text: str) -> tuple[LoRARequest, str | None]:
    """Parse NAME=PATH, or vLLM's JSON {"name", "path", "base_model_name"}, into a request and its base model."""
    base: Any = None
    if text.startswith("{"):
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LoRAUsageError(f"--lora-modules {text!r:.200} is not JSON: {one_line(error)}") from None
        unknown = sorted(found.keys() - {"name", "path", "base_model_name"})
        if unknown:
            raise LoRAUsageError(f"--lora-modules {text!r:.200}: {unknown[0]!r} is not a field of an adapter")
        name, path, base = found.get("name"), found.get("path"), found.get("base_model_name")
    else:
        name, _, path = text.partition("=")
    if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
        raise LoRAUsageError(f'expected --lora-modules NAME=PATH or {{"name": ..., "path": ...}}, got {text!r:.200}')
    name = utf8(name)
    if printable(name) != name:
        raise LoRAUsageError(f"--lora-modules: the name {name!r:.200} has characters that do not print")
    if base is not None and not isinstance(base, str):
        raise LoRAUsageError(f"--lora-modules {text!r:.200}: base_model_name must be a string")
    return LoRARequest(name, path), base or None


def _check_names(modules: list[tuple[LoRARequest, str | None]], names: tuple[str, ...], model: str) -> None:
    seen = set(names)
    if len(seen) != len(names):
        raise LoRAUsageError("--served-model-name: the same name is given twice")
    for request, base in modules:
        if base not in (None, model, *names):
            raise LoRAUsageError(
                f"--lora-modules: {request.name!r} has base_model_name {base!r:.200}, and the model that is served is "
                + " or ".join(map(repr, names))
            )
        if request.name in seen:
            raise LoRAUsageError(f"--lora-modules: {request.name!r} is given twice, or is a name of the base model")
        seen.add(request.name)


def given_keys(given: list[str] | None, variable: str) -> list[str]:
    """Return the keys of a flag, else of the environment, which other users of the machine cannot see."""
    if given is None:
        key = os.environ.get(variable, "")
        return [key] if key else []
    if not all(given):  # an unset shell variable must not leave the server open
        raise LoRAUsageError("an empty key; leave --api-key and --admin-api-key out where there is to be none")
    return given


def _name_map(text: str | None) -> dict[str, str] | None:
    """Parse the JSON object of `--name-map`: regular expression -> replacement."""
    if text is None:
        return None
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoRAUsageError(f"--name-map {text!r:.200} is not JSON: {one_line(error)}") from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise LoRAUsageError(f'--name-map: expected {{"regex": "replacement", ...}}, got {text!r:.200}')
    patterns("--name-map", list(found))
    return found


def _mesh_sizes(args: argparse.Namespace, config: DecoderConfig) -> dict[str, int]:
    """Return mesh axis -> number of its shards."""
    sizes = {
        "data": args.data_parallel_size,
        "expert": args.expert_parallel_size,
        "tensor": args.tensor_parallel_size,
    }
    if args.enable_expert_parallel:
        if sizes["expert"] > 1:
            raise LoRAUsageError(
                "--enable-expert-parallel splits experts over --tensor-parallel-size; leave it out beside "
                "--expert-parallel-size"
            )
        sizes |= {"expert": sizes["tensor"], "tensor": 1}
    if config.moe is None and (args.enable_expert_parallel or sizes["expert"] > 1):
        flag = "--enable-expert-parallel" if args.enable_expert_parallel else "--expert-parallel-size"
        raise LoRAUsageError(f"{flag}: the model has no experts")
    devices, count = len(jax.devices()), math.prod(sizes.values())
    if count > devices:
        raise LoRAUsageError(f"{_flags(sizes)} needs {count} devices: there are {devices} in all")
    if args.max_num_seqs is not None and args.max_num_seqs % sizes["data"]:
        raise LoRAUsageError(
            f"--max-num-seqs {args.max_num_seqs} must be a multiple of --data-parallel-size {sizes['data']}"
        )
    return sizes


def _flags(sizes: Mapping[str, int]) -> str:
    return " ".join(f"--{axis}-parallel-size {count}" for axis, count in sizes.items() if count > 1)


def _mesh(sizes: Mapping[str, int]) -> jax.sharding.Mesh | None:
    axes = {axis: count for axis, count in sizes.items() if count > 1}
    if not axes:
        return None
    kinds = (jax.sharding.AxisType.Auto,) * len(axes)
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)


def _budget(budget_on: Callable[[Mapping[str, int]], Budget], sizes: Mapping[str, int]) -> Budget:
    """Return `budget_on(sizes)`. If the model cannot be split so, raise `LoRAUsageError` with the flags."""
    try:
        return budget_on(sizes)
    except LoRAError as error:
        if math.prod(sizes.values()) == 1:
            raise
        raise LoRAUsageError(f"{_flags(sizes)}: {error}") from None


class _Formatter(logging.Formatter):
    """A formatter that escapes messages, with one line for a record and an indented line for each line after it."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        """Return the escaped text of a record."""
        first, *rest = super().format(record).split("\n")
        return "\n".join([printable(first), *(f"    {printable(line)}" for line in rest)])


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for tokamax's warnings about untuned shapes. It has rules for these, so no action is needed."""
    return not record.getMessage().startswith("Autotuning cache miss")


def log_to_stderr() -> None:
    logging.getLogger("absl").addFilter(_is_news)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"))
    for name in ("jlora", "uvicorn"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("jlora.serve").setLevel(logging.INFO)

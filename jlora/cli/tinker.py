"""`jlora tinker`: train and sample adapters through the Tinker protocol."""

import argparse
import importlib.util
import ipaddress
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from jlora import LoRAConfig, LoRAManager
from jlora.cli.budget import budget, stored_dtype
from jlora.cli.generate import device_errors
from jlora.cli.loading import load_model, load_tokenizer
from jlora.cli.serve import given_keys, log_to_stderr
from jlora.cli.text import utf8
from jlora.errors import LoRAError, LoRAUsageError, printable
from jlora.models import DecoderConfig, model_folder, quantized_config, read_config
from jlora.serve import Engine, EngineOptions

KEY = "TINKER_API_KEY"
_STEP_TOKENS = 2048  # of a step, by default


def run_tinker(args: argparse.Namespace) -> int:
    """Serve until a signal. Arguments are checked before the model is loaded."""
    for package in ("starlette", "uvicorn", "tinker"):
        if importlib.util.find_spec(package) is None:
            raise LoRAError(f'{package} is not installed: pip install "jlora[tinker]"')
    from jlora.serve.http.body import Limits as BodyLimits
    from jlora.serve.http.server import address, listen, serve
    from jlora.serve.http.service import Keys, Service
    from jlora.tinker.app import Tinker, build_app
    from jlora.tinker.checkpoints import Checkpoints
    from jlora.tinker.sessions import Limits
    from jlora.tinker.training import Training

    keys = given_keys(args.api_key, KEY)
    if not all(key.startswith("tml-") for key in keys):
        raise LoRAUsageError("--api-key: expected keys that begin with 'tml-', as the SDK does")
    if not keys and not is_local(args.host):
        raise LoRAUsageError(
            f"--host {args.host}: others could train and read checkpoints; give a key with --api-key or {KEY}"
        )
    if args.compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", os.path.expanduser(args.compilation_cache_dir))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    folder = model_folder(args.model, args.revision)
    config = quantized_config(read_config(folder / "config.json"), args.quantization)
    if config.pooling is not None or config.num_labels:
        raise LoRAUsageError(f"{args.model}: it generates no text; expected a causal language model")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    longest = args.max_model_len or config.max_position_embeddings
    if longest > config.max_position_embeddings:
        raise LoRAUsageError(
            f"--max-model-len {longest} is more than the {config.max_position_embeddings} positions of the model"
        )
    shapes = train_shapes(args.train_shapes, longest)
    dtype = args.dtype
    if dtype == "auto":  # a CPU has no 16-bit arithmetic
        dtype = "float32" if jax.default_backend() == "cpu" else stored_dtype(folder)
    lora = LoRAConfig(
        max_loras=args.max_loras,
        max_lora_rank=args.max_lora_rank,
        max_cpu_loras=args.max_cpu_loras,
    )
    sequences = _sequences(args, config, lora, dtype, longest)
    checkpoints = Checkpoints(Path(args.checkpoints).expanduser(), args.max_checkpoint_bytes)
    try:
        bound = listen(args.host, args.port)  # before minutes of loading, because the port may be in use
    except OSError as error:
        raise LoRAError(f"--host {args.host} --port {args.port}: {error.strerror or error}") from error

    log_to_stderr()
    with device_errors():
        model = load_model(folder, dtype, None, args.quantization)
        manager = LoRAManager(model, lora)
        training = Training(manager, shapes, capacity=args.train_capacity, max_rank=args.max_lora_rank)
        training.start()
    options = EngineOptions(
        max_num_seqs=sequences,
        max_model_len=longest,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_waiting=args.max_waiting,
    )
    engine = Engine(model, manager, tokenizer=tokenizer, options=options)
    names = (utf8(args.served_model_name or args.model),)
    service = Service(
        engine=engine,
        manager=manager,
        tokenizer=tokenizer,
        names=names,
        root=str(args.model),
        max_model_len=longest,
        keys=Keys(keys),
        dtype=dtype,
        limits=BodyLimits(body_bytes=args.max_request_bytes, body_seconds=60.0),
    )
    limits = Limits(models=args.max_models, session_seconds=args.session_timeout, gap_seconds=args.gap_timeout)
    targets = target_modules(manager, model.packed_modules)
    tinker = Tinker(service, training, checkpoints, targets, config.vocab_size, str(folder.resolve()), limits)

    def ready() -> None:
        tinker.start()
        print(f"jlora trains {printable(names[0])} at {address(bound)}", flush=True)

    try:
        with device_errors():
            return serve(
                service,
                bound,
                drain_seconds=args.drain_timeout,
                log_level=args.uvicorn_log_level,
                ready=ready,
                app=build_app(tinker),
            )
    finally:
        training.close()
        checkpoints.close()


def target_modules(manager: LoRAManager, packed: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the modules that serve adapters: of "attn", "mlp" and "unembed". `packed` is the model's attribute."""
    found: dict[str, dict[str, None]] = {"attn": {}, "mlp": {}, "unembed": {}}
    for layer in manager.layers():
        if layer.wrapped and layer.reason is None and layer.kind != "embedding":
            path = next((name for name in layer.aliases if "lm_head" in name), layer.path)
            part = "unembed" if "lm_head" in path else "attn" if "self_attn" in path else "mlp"
            last = path.rpartition(".")[2]
            found[part] |= dict.fromkeys(packed.get(last, (last,)))
    return {part: list(names) for part, names in found.items()}


def is_local(host: str) -> bool:
    """Return whether an address is of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def train_shapes(given: Sequence[tuple[int, int]] | None, longest: int) -> list[tuple[int, int]]:
    """Return (sequences, tokens of each) of the training steps. Raises LoRAUsageError.

    By default these are lengths that double from 128 up to `longest`, each with 2,048 tokens or one sequence.
    """
    if given is None:
        lengths = [length for length in (128 * 2**i for i in range(32)) if length < longest]
        return [(max(1, _STEP_TOKENS // length), length) for length in (*lengths, longest)]
    if wrong := [length for _, length in given if length > longest]:
        raise LoRAUsageError(f"--train-shapes: {wrong[0]} tokens are more than the {longest} positions of the model")
    if len({length for _, length in given}) < len(given):
        raise LoRAUsageError("--train-shapes: a length is given twice; expected one number of sequences for each")
    return list(given)


def _sequences(args: argparse.Namespace, config: DecoderConfig, lora: LoRAConfig, dtype: str, longest: int) -> int:
    """Return the sequences that are sampled at a time, and check the memory that sampling needs."""
    needs = budget(
        config,
        lora,
        dtype=dtype,
        mesh=None,
        sequences=args.max_num_seqs,
        max_model_len=longest,
        batched_tokens=args.max_num_batched_tokens,
        share=args.gpu_memory_utilization,
    )
    needs.check()
    logging.getLogger("jlora.serve").info("memory of sampling: %s", needs.text())
    return needs.sequences

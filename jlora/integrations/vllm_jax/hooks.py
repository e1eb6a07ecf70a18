"""The functions of tpu-inference and vLLM that the plugin replaces, each checked by its signature first.

docs/upstream.md has the hook of tpu-inference that would replace all but the last two of them.
"""

import dataclasses
import functools
import inspect
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax

import jlora
from jlora.integrations.vllm_jax.worker import WorkerLoRAs, lora_manager

Function = Callable[..., Any]
_Known = dict[int, tuple[int, tuple[int, ...]]]  # vLLM's number of an adapter -> reloads, invocation tokens
_RELEASES = "tpu-inference 0.32 and vLLM 0.32 or 0.33"


def install() -> None:
    """Replace the functions, all or none.

    Raises:
      LoRAError: one of them is missing or has other parameters.
    """
    from tpu_inference.models.common import interface, model_loader  # type: ignore[import-not-found]
    from tpu_inference.runner.lora_utils import LoraUtils  # type: ignore[import-not-found]
    from tpu_inference.worker.tpu_worker import TPUWorker  # type: ignore[import-not-found]
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]
    from vllm.v1.engine.core import EngineCore  # type: ignore[import-not-found]
    from vllm.v1.executor.abstract import Executor  # type: ignore[import-not-found]

    of_step = "num_scheduled_tokens_per_req total_num_scheduled_tokens padded_total_num_scheduled_tokens"
    blocks = "request start_token_idx end_token_idx start_mm_idx"
    known: _Known = defaultdict(lambda: (0, ()))
    of_device = "self tpu_process_bounds tpu_chips_per_process_bounds tpu_visible_chips"
    hooks: list[tuple[Any, str, str, Callable[[Function], Function]]] = [
        (TPUWorker, "init_device", of_device, _join_hosts),
        (model_loader, "_get_nnx_model", "model_class vllm_config rng mesh pooler is_draft_model", _wrap_model),
        (model_loader, "get_flax_model", "vllm_config rng mesh is_draft_model", _serve_model),
        (LoraUtils, "set_active_loras", f"self {of_step}", _start_step),
        (LoraUtils, "extract_lora_metadata", "self", _step_batch),
        (TPUWorker, "add_lora", "self lora_request", _return_errors),
        (Executor, "add_lora", "self lora_request", _raise_errors),
        (EngineCore, "add_lora", "self lora_request", functools.partial(_note_loads, known)),
        (kv_cache_utils, "_gen_lora_extra_hash_keys", "request", lambda theirs: theirs),  # which the next one calls
        (kv_cache_utils, "generate_block_hash_extra_keys", blocks, functools.partial(_block_keys, known)),
    ]
    moved = [found for owner, name, parameters, _ in hooks if (found := drift(owner, name, parameters))]
    interfaces = interface.ModelInterface, interface.MultiModalInterface
    fields = {field.name for cls in interfaces for field in dataclasses.fields(cls)}
    read = {"compute_logits_fn", "state_leaves", "lora_manager", "model", "multimodal_fns", "embed_input_ids_fn"}
    if missing := read - fields:
        moved.append(f"{interface.__name__}.ModelInterface has no {', '.join(sorted(missing))}")
    if moved:
        raise _drift("; ".join(moved))
    for owner, name, _, make in hooks:
        theirs = getattr(owner, name)
        setattr(owner, name, functools.wraps(theirs)(make(theirs)))
    TPUWorker.jlora_upload = _upload


def drift(owner: Any, name: str, parameters: str) -> str | None:
    """Return how a function of a module or class differs from one with these parameters, separated by spaces."""
    label = f"{owner.__module__}.{owner.__name__}" if inspect.isclass(owner) else owner.__name__
    function = getattr(owner, name, None)
    if function is None:
        return f"{label}.{name} does not exist"
    found = list(inspect.signature(function).parameters)
    if found != parameters.split():
        return f"{label}.{name} takes ({', '.join(found)}), not ({', '.join(parameters.split())})"
    return None


def _drift(moved: str) -> jlora.LoRAError:
    return jlora.LoRAError(
        f"{moved}: jlora's plugin for vLLM JAX fits {_RELEASES}. Install one of them, or report it (docs/vllm.md). "
        "VLLM_PLUGINS, the list of the plugins to load, starts vLLM without this one if jlora_vllm_jax is not in it"
    )


def _join_hosts(theirs: Function) -> Function:
    """Start JAX's coordination service between the hosts of a slice before a worker looks for its devices.

    Managers agree through it. vLLM's Ray executors start none: the devices of other hosts come from the TPU runtime
    alone. JAX finds the hosts by itself. If it does not, the manager of a model on several hosts refuses to start; a
    model on one host, or on torchax, needs no service.
    """

    def init_device(self: Any, *args: Any, **kwargs: Any) -> None:
        config = self.vllm_config
        hosts = os.environ.get("TPU_MULTIHOST_BACKEND") == "ray" and config.parallel_config.pipeline_parallel_size == 1
        if config.lora_config is not None and hosts and not jax.distributed.is_initialized():
            try:
                jax.distributed.initialize()
            except (ValueError, RuntimeError, OSError) as error:
                _logger().warning("jax.distributed.initialize() does not find the hosts: %s", error)
        theirs(self, *args, **kwargs)

    return init_device


def _wrap_model(theirs: Function) -> Function:
    """Wrap a model for LoRA after it was made, and before it is split into graph and state."""

    def get_nnx_model(
        model_class: Any, vllm_config: Any, rng: Any, mesh: Any, pooler: Any = None, is_draft_model: bool = False
    ) -> Any:
        model = theirs(model_class, vllm_config, rng, mesh, pooler=pooler, is_draft_model=is_draft_model)
        if vllm_config.lora_config is not None and not is_draft_model:
            manager = lora_manager(model, vllm_config, mesh)
            take_metadata(model, WorkerLoRAs(manager, vllm_config.scheduler_config.max_num_seqs))
        return model

    return get_nnx_model


def _serve_model(theirs: Function) -> Function:
    """Give the runner a LoRA manager, and logits that serve adapters."""

    def get_flax_model(vllm_config: Any, rng: Any, mesh: Any, is_draft_model: bool = False) -> Any:
        interface = theirs(vllm_config, rng, mesh, is_draft_model)
        loras: WorkerLoRAs | None = getattr(type(interface.model), "jlora_loras", None)
        if loras is None:
            return interface
        loras.bind(interface.state_leaves)
        images = interface.multimodal_fns
        images = dataclasses.replace(images, embed_input_ids_fn=_embeddings(images.embed_input_ids_fn, loras))
        logits = _Logits(interface.compute_logits_fn, loras)
        return dataclasses.replace(interface, lora_manager=loras, compute_logits_fn=logits, multimodal_fns=images)

    return get_flax_model


def take_metadata(model: Any, loras: WorkerLoRAs) -> None:
    """Make a model serve the LoRA metadata of its calls, and of its logits and embeddings that beside an argument.

    Raises:
      LoRAError: the calls of the model get no LoRA metadata.
    """
    cls: Any = type(model)
    parameters = list(inspect.signature(cls.__call__).parameters)
    if "_lora_metadata" not in parameters:
        raise _drift(f"{cls.__name__}.__call__ has no parameter _lora_metadata")
    place = parameters.index("_lora_metadata") - 1

    def call(self: Any, caches: Any, input_ids: Any, attention: Any, embeddings: Any, *rest: Any) -> Any:
        args = (caches, input_ids, attention, embeddings, *rest)
        with loras.scope(args[place], embedded=embeddings is not None):
            return cls.__call__(self, *args)

    def compute_logits(self: Any, hidden_states: Any) -> Any:
        hidden_states, metadata = hidden_states
        with loras.scope(metadata):
            return cls.compute_logits(self, hidden_states)

    def embed_input_ids(self: Any, input_ids: Any, embeddings: Any = None, *, is_multimodal: Any = None) -> Any:
        if not isinstance(is_multimodal, tuple):  # inside a call
            return cls.embed_input_ids(self, input_ids, embeddings, is_multimodal=is_multimodal)
        is_multimodal, metadata = is_multimodal
        with loras.scope(metadata):
            return cls.embed_input_ids(self, input_ids, embeddings, is_multimodal=is_multimodal)

    body: dict[str, Any] = {"__call__": call, "compute_logits": compute_logits, "embed_input_ids": embed_input_ids}
    body |= {"jlora_loras": loras, "__module__": cls.__module__}
    object.__setattr__(model, "__class__", type(cls)(f"{cls.__name__}WithLoRA", (cls,), body))


class _Logits:
    """tpu-inference's jitted logits, which drop the metadata: it goes beside the hidden states, a pytree for them."""

    def __init__(self, theirs: Any, loras: WorkerLoRAs):
        self._theirs, self._loras = theirs, loras

    def __call__(self, leaves: Any, hidden: Any, lora_metadata: Any = None) -> Any:
        return self._theirs(leaves, (hidden, self._loras.metadata(hidden.shape[0])), None)

    def lower(self, leaves: Any, hidden: Any, lora_metadata: Any = None) -> Any:
        return self._theirs.lower(leaves, (hidden, self._loras.metadata(hidden.shape[0])), None)


def _embeddings(theirs: Function, loras: WorkerLoRAs) -> Function:
    """Hand the metadata of embeddings to tpu-inference's jitted function beside an argument, a pytree for it."""

    def embed_input_ids(leaves: Any, input_ids: Any, embeddings: Any = None, is_multimodal: Any = None) -> Any:
        metadata = loras.embedding_metadata(input_ids.shape[0])
        return theirs(leaves, input_ids, embeddings, is_multimodal=(is_multimodal, metadata))

    return embed_input_ids


def _start_step(theirs: Function) -> Function:
    """Prepare the batch of a step, and put the current slots into its state."""

    def set_active_loras(self: Any, counts: Any, total: int, padded_total: int) -> None:
        loras = self.runner.lora_manager
        if not isinstance(loras, WorkerLoRAs):  # a torchax model, with vLLM's own LoRA
            _log_torchax()
            theirs(self, counts, total, padded_total)
        else:
            self.runner.state_leaves = loras.start_step(self.runner, counts, padded_total)

    return set_active_loras


def _step_batch(theirs: Function) -> Function:
    """Return the batch of a step as its LoRA metadata."""

    def extract_lora_metadata(self: Any) -> Any:
        loras = self.runner.lora_manager
        return loras.metadata() if isinstance(loras, WorkerLoRAs) else theirs(self)

    return extract_lora_metadata


def _return_errors(theirs: Function) -> Function:
    """Return the message of a failed load from a worker to the engine.

    vLLM's executors of several workers stop at the first that raises. The answers of the others stay in their queues,
    where the next call takes them for its own, and the engine dies.
    """

    def add_lora(self: Any, lora_request: Any) -> bool | str:
        try:
            return theirs(self, lora_request)
        except Exception as error:
            _logger().warning("adapter %s is not loaded: %s", lora_request.lora_name, error)
            return str(error)

    return add_lora


def _upload(self: Any, *args: Any) -> str | None:
    """Keep an adapter without files in a worker, or drop it. Return the message of an error, as `_return_errors`."""
    loras = self.model_runner.lora_manager
    if not isinstance(loras, WorkerLoRAs):
        return "an upload needs --enable-lora and a JAX model, and this one keeps vLLM's own LoRA or has none"
    try:
        return loras.upload(*args)
    except Exception as error:  # any, since one that is raised in a worker ends the engine
        return str(error)


def _raise_errors(theirs: Function) -> Function:
    """Raise the first error that workers returned for a load."""

    def add_lora(self: Any, lora_request: Any) -> Any:
        answers = self.collective_rpc("add_lora", args=(lora_request,))
        if errors := [answer for answer in answers if isinstance(answer, str)]:
            raise jlora.LoRAError(errors[0])
        return all(answers) and answers[0]

    return add_lora


def _note_loads(known: _Known, theirs: Function) -> Function:
    """Count the in-place reloads of each adapter in the engine, and keep the invocation tokens from its workers."""

    def add_lora(self: Any, lora_request: Any) -> bool:
        added = theirs(self, lora_request)
        reloads, _ = known[lora_request.lora_int_id]
        called = () if isinstance(added, bool) else tuple(added)
        known[lora_request.lora_int_id] = reloads + lora_request.load_inplace, called
        return bool(added)

    return add_lora


def _block_keys(known: _Known, theirs: Function) -> Function:
    """Add id and version of an adapter to the keys of a block: other weights never hit the blocks of earlier ones.

    The blocks before the invocation of an aLoRA adapter are the base model's. In the keys of the others is its first
    token, which depends on later blocks too.
    """
    from vllm.v1.core import kv_cache_utils  # type: ignore[import-not-found]

    def generate_block_hash_extra_keys(request: Any, start: int, end: int, image: int) -> Any:
        keys, image = theirs(request, start, end, image)
        if request.lora_request:
            number, prompt = request.lora_request.lora_int_id, request.prompt_token_ids or ()
            reloads, called = known[number]
            if getattr(request, "jlora_prompt", None) != len(prompt):  # it grows in streaming sessions
                request.jlora_prompt, request.jlora_first = len(prompt), jlora.active_from(prompt, called)
            own = kv_cache_utils._gen_lora_extra_hash_keys(request)
            if end <= request.jlora_first:
                keys = tuple(key for key in keys if key not in own) or None
            else:
                keys = (*keys, ("jlora", number, reloads, request.jlora_first))
        return keys, image

    return generate_block_hash_extra_keys


@functools.cache
def _log_torchax() -> None:
    _logger().info("jlora serves JAX models; this one runs on torchax and keeps vLLM's own LoRA")


def _logger() -> Any:
    """Return a logger under that of vLLM, which alone has a handler."""
    from vllm.logger import init_logger  # type: ignore[import-not-found]

    return init_logger(f"vllm.{__name__}")

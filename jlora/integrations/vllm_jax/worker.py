"""vLLM's LoRA protocol of a worker, over one `jlora.LoRAManager`."""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax
from flax import nnx

import jlora
from jlora.integrations.vllm_jax.drift import drift
from jlora.integrations.vllm_jax.layers import PACKED_MODULES, describe_layers

Adapters: TypeAlias = Sequence[str | jlora.LoRARequest | None]


def lora_manager(model: nnx.Module, vllm_config: Any, mesh: Any) -> jlora.LoRAManager:
    """Wrap a JAX model of tpu-inference and return its manager.

    Args:
      model: the model, with its weights.
      vllm_config: vLLM's configuration. `additional_config["jlora"]` has options of `jlora.LoRAConfig` beside those of
        `lora_config`.
      mesh: the mesh of the model.

    Raises:
      LoRAError: the model or the configuration cannot serve LoRA.
    """
    additional = vllm_config.additional_config or {}
    refusals = {
        "multimodal models": getattr(vllm_config.model_config, "is_multimodal_model", False),
        "pipeline parallelism": vllm_config.parallel_config.pipeline_parallel_size > 1,
        "prefill context parallelism": mesh.shape.get("pcp", 1) > 1,
        "additional_config enable_continue_decode": additional.get("enable_continue_decode", False),
    }
    if refused := [name for name, found in refusals.items() if found]:
        raise jlora.LoRAError(
            f"jlora does not serve LoRA with {' or '.join(refused)} on the JAX models of vLLM (docs/vllm.md); change "
            "that, leave --enable-lora out, or set MODEL_IMPL_TYPE=vllm for the PyTorch model with vLLM's own LoRA"
        )
    theirs = vllm_config.lora_config
    dtype = str(theirs.lora_dtype).rpartition(".")[2]
    options: dict[str, Any] = {
        "max_loras": theirs.max_loras,
        "max_lora_rank": theirs.max_lora_rank,
        "max_cpu_loras": theirs.max_cpu_loras,
        "fully_sharded": theirs.fully_sharded_loras,
        "dtype": None if dtype in ("auto", "None") else dtype,
        "target_modules": theirs.target_modules,
    }
    describe_layers(model, vllm_config, mesh)
    # Llama's table has a name of its own.
    name_map = {r"^model\.embed_tokens$": "model.embed"} if hasattr(getattr(model, "model", None), "embed") else None
    config = jlora.LoRAConfig(**(options | additional.get("jlora", {})))
    return jlora.LoRAManager(model, config, packed_modules=PACKED_MODULES, name_map=name_map)


class WorkerLoRAs:
    """The adapters of one worker: the `lora_manager` of the runner.

    An adapter is named after vLLM's name and number of it. A name that is loaded again after an unload has another
    number.

    Attributes:
      manager: the manager of the model.
      batch: the batch of the current step; None before the first.
      heads: paths of the wrapped layers that run with the logits, and not with the model's own call.
    """

    def __init__(self, manager: jlora.LoRAManager, max_requests: int):
        """Make the model of a manager take batches as its LoRA metadata.

        Args:
          manager: the manager.
          max_requests: the most requests of a step. Every step has a batch of as many, to compile for its rows alone.
        """
        self.manager = manager
        self.batch: jlora.LoRABatch | None = None
        self.heads = tuple(
            layer.path
            for layer in manager.layers()
            if layer.reason is None and (layer.path.endswith(".attend") or layer.path.rpartition(".")[2] == "lm_head")
        )
        self._max_requests = max_requests
        self._names: dict[int, str] = {}  # vLLM's number -> name in the manager
        self._row_adapters: Adapters = ()  # of the requests of the step
        self._open: list[jlora.LoRABatch] = []
        self._all_rows = False  # the step computes logits of every token
        self._places: list[int] = []  # of the slot arrays among the leaves of the runner's state
        self._current: tuple[Any, Any] = None, None  # slots, and the leaves with them
        _take_batches(manager.model, self)

    @staticmethod
    def of(model: Any) -> "WorkerLoRAs | None":
        """Return the adapters of a model, or None if it has none."""
        return getattr(type(model), "jlora_loras", None)

    def join(self, interface: Any) -> Any:
        """Return tpu-inference's `ModelInterface` of the model with these adapters."""
        places = {id(leaf): i for i, leaf in enumerate(interface.state_leaves)}
        self._places = [places[id(array)] for array in jax.tree.leaves(self.manager.slots)]
        logits = _Logits(interface.compute_logits_fn, self) if self.heads else interface.compute_logits_fn
        return dataclasses.replace(interface, lora_manager=self, compute_logits_fn=logits)

    # --- steps --------------------------------------------------------------------------------------------------

    def start_step(self, runner: Any, counts: Sequence[int], padded_total: int) -> Any:
        """Prepare the batch of a step, loading adapters that were evicted or never added.

        Args:
          runner: the runner, whose input batch has the requests of the step.
          counts: number of tokens of each request.
          padded_total: number of rows of the step.

        Returns:
          The leaves of the runner's state, with the current slots.

        Raises:
          LoRAError: as `jlora.LoRAManager.prepare`.
        """
        # With counts of 0, vLLM makes no tuple of the adapter of each token.
        numbers, _, requests = runner.input_batch.make_lora_inputs([0] * len(counts))
        known = {request.lora_int_id: self._names.get(request.lora_int_id) or _own(request) for request in requests}
        adapters = [known[int(number)] if number else None for number in numbers]
        self._all_rows = bool(runner.input_batch.num_prompt_logprobs)
        self._prepare(adapters, counts, padded_total)
        self._names.update((request.lora_int_id, _own(request).name) for request in requests)
        slots = self.manager.slots
        if self._current[0] is not slots or self._current[1] is not runner.state_leaves:
            leaves = list(runner.state_leaves)
            for place, array in zip(self._places, jax.tree.leaves(slots), strict=True):
                leaves[place] = array
            self._current = slots, tuple(leaves)
        return self._current[1]

    def logits_batch(self, rows: int) -> jlora.LoRABatch:
        """Return the batch of the rows of logits: one for each request and padding, or all rows of the step."""
        if self._all_rows and self.batch is not None:
            return self.batch
        batch = self.manager.prepare([*self._row_adapters, *[None] * (rows - len(self._row_adapters))])
        self._open.append(batch)
        return batch

    def _prepare(self, adapters: "Adapters", counts: Sequence[int], rows: int) -> None:
        self._close()
        rest = self._max_requests - len(adapters)
        counts = [*map(int, counts), *[0] * rest]
        self.batch = self.manager.prepare([*adapters, *[None] * rest], counts, pad_to=rows)
        self._open.append(self.batch)
        self._row_adapters = adapters

    def _close(self) -> None:
        """End the leases of the last step, which has been dispatched."""
        for batch in self._open:
            batch.close()
        self._open = []

    # --- vLLM's protocol ----------------------------------------------------------------------------------------

    def set_active_adapters(self, requests: Iterable[Any], mapping: Any) -> None:
        """Prepare a step of the base model alone, with the rows of `mapping`; vLLM compiles steps with it."""
        self._all_rows = False
        self._prepare((), (), len(mapping.index_mapping))

    def add_adapter(self, request: Any) -> bool:
        """Load an adapter, or with `load_inplace` replace it.

        Raises:
          LoRAAdapterNotFoundError: vLLM's own, if there is no such folder or repository.
          LoRAError: as `jlora.LoRAManager.add_adapter`. The adapter that was loaded before is kept.
        """
        self._close()  # a reload waits for batches with the earlier weights
        own = _own(request)
        try:
            self.manager.add_adapter(own)
        except jlora.AdapterNotFoundError as error:
            from vllm.exceptions import LoRAAdapterNotFoundError  # type: ignore[import-not-found]

            raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from error
        self._names[request.lora_int_id] = own.name
        return True

    def remove_adapter(self, adapter_id: int) -> bool:
        """Remove an adapter from the host cache and its slot; False if it is not loaded."""
        self._close()
        name = self._names.pop(adapter_id, None)
        return name is not None and self.manager.remove_adapter(name)

    def pin_adapter(self, adapter_id: int) -> bool:
        """Keep an adapter in a slot."""
        self._close()
        if adapter_id not in self._names:
            raise jlora.AdapterNotFoundError(f"no adapter with the number {adapter_id} is loaded")
        return self.manager.pin_adapter(self._names[adapter_id])

    def list_adapters(self) -> set[int]:
        """Return the numbers of the adapters in the host cache."""
        loaded = self.manager.list_adapters()
        return {number for number, name in self._names.items() if name in loaded}

    def remove_all_adapters(self) -> None:
        """Remove all adapters."""
        self._close()
        self.manager.remove_all_adapters()
        self._names.clear()

    def dummy_lora_cache(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: empty slots compile the same steps as filled ones."""
        return contextlib.nullcontext()

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        """Do nothing, as `dummy_lora_cache`."""
        return True

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """Return the default."""
        return default_rank


class _Logits:
    """tpu-inference's jitted logits, with the batch beside the hidden states, which are a pytree for it."""

    def __init__(self, theirs: Any, loras: WorkerLoRAs):
        self._theirs, self._loras = theirs, loras

    def __call__(self, leaves: Any, hidden: Any, lora_metadata: Any = None) -> Any:
        return self._theirs(leaves, (hidden, self._loras.logits_batch(hidden.shape[0])), None)

    def lower(self, leaves: Any, hidden: Any, lora_metadata: Any = None) -> Any:
        return self._theirs.lower(leaves, (hidden, self._loras.logits_batch(hidden.shape[0])), None)


def _own(request: Any) -> jlora.LoRARequest:
    """Return vLLM's request as one of jlora."""
    name = f"{request.lora_name}@{request.lora_int_id}"
    return jlora.LoRARequest(name, path=request.lora_path, load_inplace=request.load_inplace)


def _take_batches(model: nnx.Module, loras: WorkerLoRAs) -> None:
    """Make a model serve the batch that its calls get as LoRA metadata, and its logits one beside the hidden states.

    Raises:
      LoRAError: the calls of the model get no LoRA metadata.
    """
    cls: Any = type(model)
    parameters = list(inspect.signature(cls.__call__).parameters)
    if "_lora_metadata" not in parameters:
        raise drift(f"{cls.__name__}.__call__", "has no parameter _lora_metadata")
    place = parameters.index("_lora_metadata") - 1

    def call(self: Any, *args: Any) -> Any:
        if not isinstance(batch := args[place], jlora.LoRABatch):
            raise jlora.LoRAError(f"{cls.__name__} serves LoRA, and a step of it got no batch as its LoRA metadata")
        with jlora.use(batch, without=loras.heads):
            return cls.__call__(self, *args)

    def compute_logits(self: Any, hidden_states: Any) -> Any:
        if not loras.heads:
            return cls.compute_logits(self, hidden_states)
        hidden_states, batch = hidden_states
        with jlora.use(batch, without=["*"]):
            return cls.compute_logits(self, hidden_states)

    body = {"__call__": call, "compute_logits": compute_logits, "jlora_loras": loras, "__module__": cls.__module__}
    object.__setattr__(model, "__class__", type(cls)(f"{cls.__name__}WithLoRA", (cls,), body))

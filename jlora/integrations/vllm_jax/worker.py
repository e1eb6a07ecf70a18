"""vLLM's LoRA protocol of a worker, over one `jlora.LoRAManager`."""

import contextlib
import dataclasses
import json
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
from flax import nnx

import jlora
from jlora.integrations.vllm_jax.layers import PACKED_MODULES, describe_layers, language_model

Adapters: TypeAlias = Sequence[str | jlora.LoRARequest | None]


def lora_manager(model: nnx.Module, vllm_config: Any, mesh: Any) -> jlora.LoRAManager:
    """Wrap a JAX model of tpu-inference and return its manager.

    Args:
      model: The model, with its weights.
      vllm_config: vLLM's configuration. `additional_config["jlora"]` has options of `jlora.LoRAConfig` beside those of
        `lora_config`.
      mesh: The mesh of the model.

    Raises:
      LoRAError: the model or the configuration cannot serve LoRA.
    """
    additional = vllm_config.additional_config or {}
    refusals = {
        "--enable-tower-connector-lora": getattr(vllm_config.lora_config, "enable_tower_connector_lora", False),
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
    table, towers = language_model(model)
    options |= additional.get("jlora", {})
    options["exclude_modules"] = [*towers, *(options.get("exclude_modules") or ())] or None
    # Adapters have names of a model for text, or of one with towers in old or new spelling. Llama's table is `embed`.
    text, trunk = r"^(?:model\.|language_model\.)+", table[: table.rfind(".") + 1]
    name_map = {rf"{text}embed_tokens$": table, rf"{text}(?=layers\.|embed_tokens|per_layer)": trunk}
    name_map |= {rf"^model\.(?={tower}\b)": "" for tower in towers}
    config = jlora.LoRAConfig(**options)
    # With prompt logprobs the heads too get all rows of a step. A batch of logits alone has no token counts.
    groups = {"*": "packed"}
    return jlora.LoRAManager(model, config, packed_modules=PACKED_MODULES, name_map=name_map, row_groups=groups)


class WorkerLoRAs:
    """The adapters of one worker: the `lora_manager` of the runner.

    An adapter is named after vLLM's name and number of it. A name that is loaded again after an unload has another
    number.

    Attributes:
      manager: The manager of the model.
      heads: Paths of the wrapped layers that run with the logits, and not with the model's own call.
      tables: Paths of the wrapped layers that do not run in that call if it gets embeddings, of images among others.
    """

    def __init__(self, manager: jlora.LoRAManager, max_requests: int):
        """Serve a manager's model.

        Args:
          manager: The manager.
          max_requests: The most requests of a step. Every step has a batch of as many, to compile for its rows alone.
        """
        self.manager = manager
        self.heads = tuple(
            layer.path
            for layer in manager.layers()
            if layer.reason is None and (layer.path.endswith(".attend") or layer.path.rpartition(".")[2] == "lm_head")
        )
        paths = [layer.path for layer in manager.layers()]
        self.tables = tuple(path for path in paths if path.rpartition(".")[2] in ("embed_tokens", "embed"))
        self._max_requests = max_requests
        self._uploaded: dict[str, jlora.Adapter] = {}  # path -> adapter without files
        self._calls: dict[int, tuple[int, ...]] = {}  # vLLM's number -> invocation tokens of an aLoRA adapter
        self._names: dict[int, str] = {}  # vLLM's number -> name in the manager
        self._row_adapters: Adapters = ()  # of the requests of the step
        self._row_first: Sequence[int] = ()  # 0 for each of them whose last row its adapter changes
        self._rows = 0  # of the step
        self._step: jlora.LoRABatch | None = None
        self._open: list[jlora.LoRABatch] = []  # the batch of the step and those of its logits, or of a warm-up
        self._all_rows = False  # the step computes logits of every token
        self._places: list[int] = []  # of the slot arrays among the leaves of the runner's state
        self._current: tuple[Any, Any] = None, None  # slots, and the leaves with them

    def bind(self, state_leaves: Sequence[Any]) -> None:
        """Find the slot arrays among the leaves of the model's state."""
        places = {id(leaf): i for i, leaf in enumerate(state_leaves)}
        self._places = [places[id(array)] for array in jax.tree.leaves(self.manager.slots)]

    @contextlib.contextmanager
    def scope(self, metadata: Any, *, embedded: bool = False) -> Generator[None]:
        """Serve the batch of a step (`embedded`: of rows that are embeddings) or of its logits in layers inside.

        Raises:
          LoRAError: the metadata is not what `metadata` returned, or as `jlora.use`.
        """
        if not isinstance(metadata, dict) or len(metadata) != 1:
            raise jlora.LoRAError("a step of a model with LoRA got no LoRA metadata, so it would serve the base model")
        ((kind, batch),) = metadata.items()
        without = (*self.heads, *(self.tables if embedded else ())) if kind == "step" else ["*"]
        with jlora.use(batch, without=without):
            yield

    # --- steps --------------------------------------------------------------------------------------------------

    def start_step(self, runner: Any, counts: Sequence[int], padded_total: int) -> Any:
        """Prepare the batch of a step, loading adapters that were evicted or never added.

        Args:
          runner: The runner, whose input batch has the requests of the step.
          counts: Number of tokens of each request.
          padded_total: Number of rows of the step.

        Returns:
          The leaves of the runner's state, with the current slots.

        Raises:
          LoRAError: as `jlora.LoRAManager.prepare`.
        """
        # With counts of 0, vLLM makes no tuple of the adapter of each token.
        numbers, _, requests = runner.input_batch.make_lora_inputs([0] * len(counts))
        first = self._first_rows(runner, numbers, requests) if self.manager.config.activated else ()
        known = {request.lora_int_id: self._names.get(request.lora_int_id) or _own(request) for request in requests}
        adapters = [known[int(number)] if number else None for number in numbers]
        self._all_rows = bool(runner.input_batch.num_prompt_logprobs)
        self._close()
        self._prepare(adapters, counts, padded_total, first)
        self._names.update((request.lora_int_id, _own(request).name) for request in requests)
        slots = self.manager.slots
        if self._current[0] is not slots or self._current[1] is not runner.state_leaves:
            leaves = list(runner.state_leaves)
            for place, array in zip(self._places, jax.tree.leaves(slots), strict=True):
                leaves[place] = array
            self._current = slots, tuple(leaves)
        return self._current[1]

    def metadata(self, logits_rows: int | None = None) -> dict[str, jlora.LoRABatch]:
        """Return the LoRA metadata of the step, an argument of its jitted functions.

        Args:
          logits_rows: None for the model; for the logits, their rows: one for each request and padding, or every row
            of the step.
        """
        if self._step is None:
            raise jlora.LoRAError("a step of a model with LoRA was not prepared, so it would serve the base model")
        if logits_rows is None or self._all_rows:
            return {"step" if logits_rows is None else "logits": self._step}
        return {"logits": self._batch(self._row_adapters, self._row_first, logits_rows, length=1)}

    def embedding_metadata(self, rows: int) -> dict[str, jlora.LoRABatch]:
        """Return the LoRA metadata of the embeddings of a step with this number of rows."""
        if rows != self._rows and not self._row_adapters:  # a warm-up, which prepares no step for them
            self._prepare((), (), rows)
        return {"embeddings": self.metadata()["step"]}

    def _first_rows(self, runner: Any, numbers: Sequence[int], requests: Iterable[Any]) -> list[int]:
        """Return the first row of each request of a step on which its adapter acts."""
        for request in requests:
            if request.lora_int_id not in self._calls:
                self._load(request)
        found = [0] * len(numbers)
        for i, number in enumerate(map(int, numbers)):
            if number and self._calls[number]:
                state = runner.requests[runner.input_batch.req_ids[i]]
                if not hasattr(state, "jlora_first"):
                    state.jlora_first = jlora.active_from(state.prompt_token_ids, self._calls[number])
                found[i] = max(0, state.jlora_first - int(runner.input_batch.num_computed_tokens_cpu[i]))
        return found

    def _prepare(self, adapters: "Adapters", counts: Sequence[int], rows: int, first: Sequence[int] = ()) -> None:
        lengths = [*map(int, counts), *[0] * (self._max_requests - len(adapters))]
        self._step = self._batch(adapters, first, self._max_requests, token_counts=lengths, pad_to=rows)
        self._row_adapters, self._rows = adapters, rows
        self._row_first = [0 if row < n else jlora.NOWHERE for row, n in zip(first, counts, strict=False)]

    def _batch(self, adapters: "Adapters", first: Sequence[int], size: int, **shape: Any) -> jlora.LoRABatch:
        """Open a batch of `size` sequences. Those after `adapters` have none."""
        if self.manager.config.activated:
            shape["active_from"] = [*first, *[0] * (size - len(first))]
        self._open.append(self.manager.prepare([*adapters, *[None] * (size - len(adapters))], **shape))
        return self._open[-1]

    def _close(self) -> None:
        """End the leases of the last step, which has been dispatched, or of a warm-up."""
        for batch in self._open:
            batch.close()
        self._open, self._step = [], None

    # --- vLLM's protocol ----------------------------------------------------------------------------------------

    def set_active_adapters(self, requests: Iterable[Any], mapping: Any) -> None:
        """Prepare a step of the base model alone, with the rows of `mapping`.

        vLLM compiles steps with it, in a second pass over all sizes, so these batches stay open until the first step.
        """
        self._all_rows = False
        self._prepare((), (), len(mapping.index_mapping))

    def add_adapter(self, request: Any) -> bool | tuple[int, ...]:
        """Load an adapter, or with `load_inplace` replace it. Return the invocation tokens of an aLoRA adapter or True.

        Raises:
          LoRAAdapterNotFoundError: vLLM's own, if there is no such folder or repository.
          LoRAError: as `jlora.LoRAManager.add_adapter`, or other invocation tokens. The earlier adapter is kept.
        """
        self._close()  # a reload waits for batches with the earlier weights
        return self._load(request) or True

    def _load(self, request: Any) -> tuple[int, ...]:
        """Load an adapter and return its invocation tokens, which never change for one of vLLM's numbers."""
        own, number, uploaded = _own(request), request.lora_int_id, self._uploaded.get(request.lora_path)
        try:
            called = _called(own, uploaded) if self.manager.config.activated and number in self._calls else None
            if called is not None and called != self._calls[number]:
                raise jlora.AdapterMismatchError(
                    f"adapter {request.lora_name!r}: its alora_invocation_tokens were {[*self._calls[number]]} and are "
                    f"{[*called]}, and the prefix cache has blocks by the former; unload it first"
                )
            adapter = own if uploaded is None else dataclasses.replace(uploaded, name=own.name)
            self.manager.add_adapter(adapter, load_inplace=own.load_inplace)
        except (jlora.AdapterAccessError, jlora.AdapterUnavailableError):  # it may exist
            raise
        except jlora.AdapterNotFoundError as error:
            from vllm.exceptions import LoRAAdapterNotFoundError  # type: ignore[import-not-found]

            raise LoRAAdapterNotFoundError(request.lora_name, request.lora_path) from error
        self._names[number] = own.name
        info = self.manager.list_adapters([own.name])[own.name]
        return self._calls.setdefault(number, info.invocation_tokens or ())

    def upload(self, path: str, weights: bytes | None = None, config: bytes = b"") -> None:
        """Keep an adapter without files until it is loaded by this path, or drop it. Raises as `Adapter.from_bytes`."""
        self._uploaded.pop(path, None)
        if weights is not None:
            nonfinite = self.manager.config.allow_nonfinite
            self._uploaded[path] = jlora.Adapter.from_bytes(weights, config, name=path, allow_nonfinite=nonfinite)

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
        self.manager.pin_adapter(self._names[adapter_id])
        return True

    def list_adapters(self) -> set[int]:
        """Return the numbers of the adapters in the host cache."""
        loaded = self.manager.list_adapters()
        return {number for number, name in self._names.items() if name in loaded}

    def remove_all_adapters(self) -> None:
        """Remove all adapters. vLLM also calls it at the end of a warm-up."""
        if self._names:
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


def _own(request: Any) -> jlora.LoRARequest:
    """Return vLLM's request as one of jlora."""
    name = f"{request.lora_name}@{request.lora_int_id}"
    return jlora.LoRARequest(name, path=request.lora_path, load_inplace=request.load_inplace)


def _called(request: jlora.LoRARequest, uploaded: jlora.Adapter | None) -> tuple[int, ...] | None:
    """Return the invocation tokens of an adapter that is not loaded yet; None if its load will fail."""
    if uploaded is not None:
        return uploaded.invocation_tokens
    with contextlib.suppress(ValueError, TypeError, AttributeError, OSError):
        config = json.loads(Path(jlora.local_folder(request), "adapter_config.json").read_bytes())
        return tuple(config.get("alora_invocation_tokens") or ())
    return None

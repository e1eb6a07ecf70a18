"""Adapters of Tunix's trainers, its models with adapters, and rollouts with an adapter for each prompt."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

import jlora
from jlora.integrations import qwix

# Layer paths of Tunix's models -> module names of Hugging Face checkpoints, as `jlora.integrations.qwix` takes them.
NAMES: dict[str, str | tuple[str, ...]] = {
    r"(layers\.\d+)\.attn\.([qkvo]_proj)": r"model.\1.self_attn.\2",
    r"(layers\.\d+)\.attn\.q_einsum": r"model.\1.self_attn.q_proj",
    r"(layers\.\d+)\.attn\.kv_einsum": (r"model.\1.self_attn.k_proj", r"model.\1.self_attn.v_proj"),
    r"(layers\.\d+)\.attn\.qkv_einsum": tuple(rf"model.\1.self_attn.{x}_proj" for x in "qkv"),
    r"(layers\.\d+)\.attn\.attn_vec_einsum": r"model.\1.self_attn.o_proj",
    r"(layers\.\d+\.mlp\.\w+)": r"model.\1",
}

PACKED_MODULES = {"kv_einsum": ("k_proj", "v_proj"), "qkv_einsum": ("q_proj", "k_proj", "v_proj")}


def lora_manager(model: nnx.Module, config: jlora.LoRAConfig, **options: Any) -> jlora.LoRAManager:
    """Wrap a model of Tunix (Gemma 1 to 3, Llama 3, Qwen 2 and 3) and return its manager.

    Adapters have the module names of Hugging Face checkpoints. The parameters keep their paths, so the model trains,
    samples and is saved as before.

    Args:
      model: The model, without LoRA parameters of qwix.
      config: As for `jlora.LoRAManager`.
      **options: Other arguments of `jlora.LoRAManager`.

    Raises:
      LoRAUsageError: the model has LoRA parameters of qwix.
      LoRAError: as `jlora.LoRAManager`.
    """
    if jax.tree.leaves(nnx.state(model, nnx.LoRAParam)):
        raise jlora.LoRAUsageError(
            "the model has LoRA parameters of qwix; wrap the base model, and serve them as an adapter: "
            "jlora.integrations.qwix.export"
        )
    for layer in {type(module): module for _, module in nnx.iter_modules(model)}.values():
        if type(layer).__module__.startswith("tunix."):
            if type(layer).__name__ == "Einsum":
                jlora.register_layer(type(layer), _einsum)
            elif type(layer).__name__ == "Embedder":
                jlora.register_layer(type(layer), _embedder)
    merged = {path[-1] for path, _ in nnx.iter_modules(model) if path}
    layer = r"^model\.(?:language_model\.)?(layers\.\d+)\."
    name_map = {
        layer + r"self_attn\.o_proj$": r"\1.attn." + ("attn_vec_einsum" if "attn_vec_einsum" in merged else "o_proj"),
        layer + r"self_attn\.q_proj$": r"\1.attn." + ("q_einsum" if "q_einsum" in merged else "q_proj"),
        layer + r"self_attn\.": r"\1.attn.",
        layer: r"\1.",
        r"^model\.(?:language_model\.)?embed_tokens$": "embedder",
    }
    defaults: dict[str, Any] = {"packed_modules": PACKED_MODULES, "name_map": name_map}
    return jlora.LoRAManager(model, config, **(defaults | options))


def push(
    model: Any,
    to: str | jlora.LoRAManager,
    name: str,
    *,
    alpha: float,
    admin_key: str | None = None,
    names: qwix.Names = NAMES,
    base_model_name: str | None = None,
    timeout: float = 600.0,
) -> None:
    """Load the LoRA parameters of a trainer's model as an adapter, in place of one of that name and without files.

    Args:
      model: The model of the trainer, or its `nnx.state`.
      to: The address of a running `jlora serve`, or a manager of this process.
      name: Name of the adapter.
      alpha: Alpha of the qwix rule. The parameters do not contain it.
      admin_key: A key of `jlora serve --admin-api-key`, for an address.
      names: Paths of layers -> module names of the checkpoint, as in `jlora.integrations.qwix.factors`.
      base_model_name: `base_model_name_or_path` of the adapter.
      timeout: Seconds to wait for the server, or for open batches of the manager.

    Raises:
      LoRAUsageError: as in `jlora.integrations.qwix.factors`, or `admin_key` is missing.
      LoRAError: as in `jlora.serve.push` and `LoRAManager.add_adapter`. What was served stays as it was.
    """
    adapter = _adapter(name, model, alpha, names, base_model_name)
    if isinstance(to, jlora.LoRAManager):
        to.add_adapter(adapter, load_inplace=True, timeout=timeout)
        return
    if admin_key is None:
        raise jlora.LoRAUsageError(f"adapter {name!r}: a push to {to} needs admin_key, a key of --admin-api-key")
    from jlora import serve  # the engine, which a push to a manager does not need

    serve.push(to, adapter, admin_key=admin_key, timeout=timeout)


def from_orbax(
    path: str | Path,
    *,
    alpha: float | None = None,
    name: str | None = None,
    names: qwix.Names = NAMES,
    base_model_name: str | None = None,
) -> jlora.Adapter:
    """Load the LoRA parameters of a checkpoint of Tunix's trainers, `nnx.state(model, nnx.LoRAParam)` written by Orbax.

    Args:
      path: Folder of a trainer's checkpoints, of which the last is read, of one step, or of its `model_params`.
      alpha: Alpha of the qwix rule. None reads `alpha` of the step's custom metadata, where a trainer may keep it.
      name: Name of the adapter; None for the last part of `path`.
      names: Paths of layers -> module names of the checkpoint, as in `jlora.integrations.qwix.factors`.
      base_model_name: `base_model_name_or_path` of the adapter.

    Raises:
      AdapterNotFoundError: there is no checkpoint at `path`.
      AdapterMismatchError: it has parameters other than those of qwix's LoRA. The message has their paths.
      LoRAUsageError: `alpha` is missing, or is not that of the checkpoint; or as in `jlora.integrations.qwix.factors`.
      LoRAError: Orbax is not installed. Its own errors are passed on.
    """
    root = Path(path).expanduser().absolute()
    name = root.name if name is None else name
    where = f"adapter {name!r}: {root}"
    steps = [each for each in root.glob("*") if each.name.isdigit()]
    step = max(steps, key=lambda each: int(each.name), default=root)
    folder = step / "model_params" if (step / "model_params").is_dir() else step
    if not (folder / "_METADATA").is_file():
        found = sorted(each.name for each in root.glob("*"))[:10] if root.is_dir() else "no folder"
        raise jlora.AdapterNotFoundError(
            f"{where}: holds no checkpoint of Orbax; expected a folder of numbered steps, of one step or of its "
            f"model_params, found {found}"
        )
    stored = _stored_alpha(folder.parent if folder.name == "model_params" else folder, where)
    if alpha is None and stored is None:
        raise jlora.LoRAUsageError(f"{where}: the checkpoint does not hold alpha; give alpha= of the qwix rule")
    if alpha is not None and stored not in (None, alpha):
        raise jlora.LoRAUsageError(f"{where}: alpha={alpha} is given, and the checkpoint was saved with {stored}")
    state = _restored(folder, where)
    return _adapter(name, state, cast(float, stored if alpha is None else alpha), names, base_model_name)


def _adapter(name: str, model: Any, alpha: float, names: qwix.Names, base_model_name: str | None) -> jlora.Adapter:
    factors = jax.device_get(qwix.factors(model, names))
    return jlora.Adapter.from_arrays(name, factors, alpha=alpha, base_model_name=base_model_name)


def _stored_alpha(step: Path, where: str) -> float | None:
    """Return `alpha` of the custom metadata of a step; None if it has none."""
    file = step / "_CHECKPOINT_METADATA"
    try:
        found: Any = json.loads(file.read_text())["custom_metadata"]["alpha"] if file.is_file() else None
    except (LookupError, TypeError):
        return None
    except (OSError, ValueError) as error:
        raise jlora.LoRAError(f"{where}: {file.name} cannot be read: {error}") from error
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        raise jlora.LoRAError(f"{where}: alpha of {file.name} must be a number, found {found!r:.80}")
    return found


def _restored(folder: Path, where: str) -> dict[str, Any]:
    """Return the parameters of a checkpoint as NumPy arrays, in nested dicts."""
    try:
        import orbax.checkpoint as ocp  # type: ignore[import-untyped]
    except ImportError as error:
        raise jlora.LoRAError(f'{where}: orbax-checkpoint is not installed: pip install "jlora[train]"') from error
    orbax = cast(Any, ocp)
    with orbax.Checkpointer(orbax.PyTreeCheckpointHandler()) as reader:
        tree: Any = reader.metadata(folder).item_metadata.tree
        leaves = cast("list[tuple[Any, Any]]", jax.tree_util.tree_leaves_with_path(tree))
        paths = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in leaves]
        if others := [path for path in paths if not path.endswith(qwix.SUFFIXES)]:
            raise jlora.AdapterMismatchError(
                f"{where}: holds {len(others)} parameters that are not those of qwix's LoRA (*_lora_a, *_lora_b), such "
                f"as {', '.join(others[:5])}; expected a checkpoint of nnx.state(model, nnx.LoRAParam)"
            )
        on_no_device = [orbax.RestoreArgs(restore_type=np.ndarray)] * len(leaves)
        how: Any = jax.tree.unflatten(cast(Any, jax.tree.structure(tree)), on_no_device)
        return _values(reader.restore(folder, args=orbax.args.PyTreeRestore(restore_args=how)))


def _values(state: Any) -> Any:
    """Return nested dicts with arrays in place of {"value": array}, as Orbax stores variables of Flax."""
    if not isinstance(state, Mapping):
        return state
    found = {name: _values(value) for name, value in cast("Mapping[str, Any]", state).items()}
    return found["value"] if found.keys() == {"value"} else found


class Rollout:
    """Tunix's `Sampler`, with an adapter for each prompt.

    There is one sampler for each number of prompts. Its programs are compiled for each padded length, as Tunix does,
    and not for each mix of adapters or each new version of one.

    Example:
      >>> rollout = Rollout(manager, tokenizer, CacheConfig(cache_size=512, ...))
      >>> rollout(["1 + 1 =", "1 + 1 ="], ["sql", None], max_generation_steps=32).text
    """

    def __init__(self, manager: jlora.LoRAManager, tokenizer: Any, cache_config: Any, **options: Any):
        """Make the sampler.

        Args:
          manager: The manager of a model of Tunix.
          tokenizer: As for `tunix.generate.sampler.Sampler`.
          cache_config: The same.
          **options: Its other arguments.
        """
        # No extra installs Tunix, so type checkers do not find it.
        from tunix.generate import sampler  # type: ignore[import-not-found]

        self.manager = manager
        make = cast(Callable[..., Any], sampler.Sampler)
        self._make = functools.partial(make, tokenizer=tokenizer, cache_config=cache_config, **options)
        self._samplers: dict[int, Any] = {}  # number of prompts -> Sampler

    def __call__(self, prompts: Sequence[str], names: Sequence[Any], max_generation_steps: int, **options: Any) -> Any:
        """Sample one completion for each prompt.

        Args:
          prompts: B prompts.
          names: B names of adapters, None for the base model, as `LoRAManager.prepare` takes them.
          max_generation_steps: The most tokens of a completion.
          **options: Other arguments of the sampler's call, except `beam_size`.

        Returns:
          Tunix's `SamplerOutput`.

        Raises:
          LoRAUsageError: there are not as many names as prompts, or `beam_size` is given.
          AdapterNotFoundError: a name was not added.
        """
        if isinstance(prompts, str) or len(prompts) != len(names):
            raise jlora.LoRAUsageError(f"expected one name for each of {len(prompts)} prompts, found {len(names)}")
        if options.get("beam_size") is not None:
            raise jlora.LoRAUsageError("beam_size: beams are not rows of the prompts, so they cannot have adapters")
        with self.manager.prepare(list(names)) as batch:
            step = _step(self.manager.model, batch)
            if len(prompts) not in self._samplers:
                self._samplers[len(prompts)] = self._make(step)
            sampler = self._samplers[len(prompts)]
            sampler.transformer_state = nnx.variables(step)
            return sampler(list(prompts), max_generation_steps, **options)


class _Step(nnx.Module):
    """A model and the batch that its calls serve, both arguments of the sampler's jitted functions."""

    def __init__(self, model: nnx.Module, batch: jlora.LoRABatch):
        self.model = model
        # One Variable for each array, as the sampler compares shapes and dtypes. Its cache has the dtype of the first
        # Variable by name, so this name follows `model`.
        arrays, self.structure = jax.tree.flatten(batch)
        self.rows = nnx.List([nnx.Variable(array) for array in arrays])

    @property
    def batch(self) -> jlora.LoRABatch:
        # Flax declares the items of an `nnx.List` as unknown.
        return jax.tree.unflatten(self.structure, [row[...] for row in self.rows])  # type: ignore[index]

    def __getattr__(self, name: str) -> Any:
        # The sampler reads `config`, `num_embed`, `init_cache` and the like of its model.
        if name.startswith("_") or name in ("model", "rows", "structure"):
            raise AttributeError(name)
        return getattr(self.model, name)


def _step(model: nnx.Module, batch: jlora.LoRABatch) -> _Step:
    """Return a `_Step` whose call has the signature of the model's, which the sampler inspects."""
    return _step_class(type(model))(model, batch)


@functools.cache
def _step_class(model: type[nnx.Module]) -> type[_Step]:
    @functools.wraps(model.__call__)
    def call(self: _Step, *args: Any, **kwargs: Any) -> Any:
        with jlora.use(self.batch):
            return cast(Any, self.model)(*args, **kwargs)

    return type(f"{model.__name__}Step", (_Step,), {"__call__": call})


def _einsum(layer: Any) -> jlora.LinearSpec:
    return jlora.einsum_spec(layer.einsum_str, layer.w.shape, dtype=getattr(layer, "dtype", None))


def _embedder(layer: Any) -> jlora.EmbedSpec:
    vocab, features = layer.input_embedding.shape
    # Gemma's embedders, which have no dtype of their own but a width, scale the rows that they look up.
    scale = math.sqrt(features) if hasattr(layer, "embed_dim") else 1.0
    return jlora.EmbedSpec(vocab, features, "input_embedding", "encode", "decode", scale=scale)

"""Tunix's models with adapters, and rollouts of its `Sampler` with an adapter for each prompt."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from flax import nnx

import jlora

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
      model: the model, without LoRA parameters of qwix.
      config: as for `jlora.LoRAManager`.
      **options: other arguments of `jlora.LoRAManager`.

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
          manager: the manager of a model of Tunix.
          tokenizer: as for `tunix.generate.sampler.Sampler`.
          cache_config: the same.
          **options: its other arguments.
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
          max_generation_steps: the most tokens of a completion.
          **options: other arguments of the sampler's call, except `beam_size`.

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

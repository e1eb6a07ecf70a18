"""Compute the memory that a server needs on each device, before any is allocated."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jlora import LoRAConfig, Survey
from jlora._memory import device_bytes, staging_bytes
from jlora.cli.text import size
from jlora.errors import LoRAUsageError
from jlora.models import Decoder, DecoderConfig

MOST_SEQUENCES = 64  # by default
_FLAGS = {
    "weights": "--dtype (a smaller one), --quantization or --tensor-parallel-size (more devices)",
    "slots": "--max-loras or --max-lora-rank",
    "cache": "--max-num-seqs or --max-model-len",
    "steps": "--max-num-batched-tokens or --max-num-seqs",
}


@dataclass(frozen=True)
class Budget:
    """Memory of a server on each device, in bytes.

    Attributes:
      weights, slots, staging: Bytes of the model, of all slots, and at most of adapters in transfer to slots.
      cache: Bytes of the keys and values of one sequence of full length, divided by the size of the data axis.
      steps: Approximate bytes of a step's temporaries: logits, the largest layer's activations, one sequence's cache,
        the largest quantized kernel converted to the model's dtype.
      memory: Bytes available; None if unknown.
      sequences: Number of sequences in the cache.
    """

    weights: int
    slots: int
    staging: int
    cache: int
    steps: int
    memory: int | None
    sequences: int

    @property
    def parts(self) -> dict[str, int]:
        """Kind of memory -> bytes."""
        return {
            "weights": self.weights,
            "slots": self.slots,
            "cache": self.cache * self.sequences,
            "steps": self.steps,
            "staging": self.staging,
        }

    def text(self) -> str:
        """Return one line of text with each part, their sum and the available memory."""
        parts = {**self.parts, "in all": sum(self.parts.values())}
        if self.memory is not None:
            parts["there is"] = self.memory
        return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts.items())

    def check(self) -> None:
        """Raise `LoRAUsageError`, which names the flag to change, if the device has too little memory."""
        if self.memory is None or sum(self.parts.values()) <= self.memory:
            return
        # The first part that would suffice if cut to a quarter, else the largest.
        over = sum(self.parts.values()) - self.memory
        largest = sorted(_FLAGS, key=lambda name: -self.parts[name])
        order = ["cache", "slots", *largest]
        worst = next((name for name in order if self.parts[name] * 3 // 4 >= over), largest[0])
        fix = f"lower {_FLAGS[worst]}"
        if self.staging >= self.memory:  # of a size that no flag lowers
            fix = "raise --gpu-memory-utilization, since staging alone exceeds the memory"
        raise LoRAUsageError(f"this does not fit into a device's memory: {self.text()}; {fix}")


def budget(
    config: DecoderConfig,
    lora: LoRAConfig,
    *,
    dtype: Any,
    mesh: jax.sharding.Mesh | None,
    sequences: int | None,
    max_model_len: int,
    batched_tokens: int,
    share: float,
) -> Budget:
    """Compute the memory of a server of this model from shapes.

    Args:
      config: Configuration of the model.
      lora: Configuration of the slots.
      dtype: Dtype of the model.
      mesh: Mesh of the model, or None.
      sequences: Number of sequences that decode together. None chooses the largest number that fits, at most 64: a
        power of two for each shard of the data axis.
      max_model_len: Largest number of positions of a sequence.
      batched_tokens: Largest number of tokens of a prefill step.
      share: Fraction of the device's memory to use, from 0 to 1.

    Returns:
      The budget, which may exceed the memory; see `Budget.check`.
    """
    model = skeleton(config, dtype, mesh)
    weights = sum(_on_one_device(leaf.shape, leaf.sharding, leaf.dtype.itemsize) for leaf in _leaves(model))
    slots = Survey(model, lora).device_slot_bytes
    shards, data = (1, 1) if mesh is None else (mesh.shape.get(axis, 1) for axis in ("tensor", "data"))
    heads = math.ceil(config.num_key_value_heads / shards)
    itemsize = jax.numpy.dtype(dtype).itemsize
    chunk = min(batched_tokens, max_model_len)
    capacity = math.ceil(max_model_len / chunk) * chunk
    vocab = config.vocab_size
    if config.pooling is not None:  # embeddings take no cache and no logits, and a prompt is one step
        chunk, capacity, vocab = max(batched_tokens, max_model_len), 0, 0
    one = 2 * config.num_hidden_layers * heads * config.head_dim * itemsize * capacity
    wide = max(2 * config.intermediate_size, config.hidden_size * 4) // shards
    converted = max(
        (_on_one_device(leaf.shape, leaf.sharding, itemsize) for leaf in _leaves(model) if leaf.dtype.itemsize == 1),
        default=0,
    )
    memory = device_bytes(jax.local_devices()[0])
    memory = None if memory is None else int(memory * share)

    def of(count: int) -> Budget:
        # Four float32 arrays of logits' size (logits, those kept of prompts, softmax, sort order), the activations of a
        # layer, a copy of the cache row that a prompt is written to, and a kernel that the product does not convert.
        steps = 4 * 4 * count * vocab + 4 * max(count, chunk) * wide + one + converted
        return Budget(weights, slots, staging_bytes(), math.ceil(one / data), steps, memory, count)

    if sequences is not None:
        return of(sequences)
    count = 2 ** (max(1, MOST_SEQUENCES // data).bit_length() - 1)
    while count > 1 and memory is not None and sum(of(data * count).parts.values()) > memory:
        count //= 2
    return of(data * count)


def skeleton(config: DecoderConfig, dtype: Any, mesh: jax.sharding.Mesh | None) -> Decoder:
    """Return a model of shapes alone. Raise `ModelError` if the mesh cannot split it evenly."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0), mesh=mesh))


def _leaves(model: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def _on_one_device(shape: tuple[int, ...], sharding: Any, itemsize: int) -> int:
    """Return the bytes of one shard of an array."""
    return math.prod(shape if sharding is None else sharding.shard_shape(shape)) * itemsize


def stored_dtype(folder: Path) -> str:
    """Return the dtype in a checkpoint's config.json, which may be in its text_config, or "float32"."""
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return "float32"  # the error is raised when the model is read
    parts = [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)] if isinstance(raw, dict) else []
    found = [part.get(name) for part in parts for name in ("dtype", "torch_dtype")]
    return next((dtype for dtype in found if dtype in ("float32", "bfloat16", "float16")), "float32")

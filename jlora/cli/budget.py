"""What a server will take of each device's memory, added up before any of it is taken."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from jlora import LoRAConfig, Survey
from jlora.cli.text import size
from jlora.errors import LoRAUsageError
from jlora.models import Decoder, DecoderConfig

MOST_SEQUENCES = 64  # by default
_FLAGS = {
    "weights": "--dtype (a smaller one) or --tensor-parallel-size (more devices)",
    "slots": "--max-loras or --max-lora-rank",
    "cache": "--max-num-seqs or --max-model-len",
    "steps": "--max-num-batched-tokens or --max-num-seqs",
    "staging": "--max-lora-rank",
}


@dataclass(frozen=True)
class Budget:
    """Bytes on each device.

    Attributes:
      weights, slots, staging: of the model, of all slots, and the most that adapters on their way to slots take.
      cache: keys and values of a whole sequence; times `sequences`.
      steps: about what a step needs beside: logits, the largest layer's activations, a sequence's part of the cache.
      memory: what there is; None where nobody knows.
    """

    weights: int
    slots: int
    staging: int
    cache: int
    steps: int
    memory: int | None
    sequences: int

    @property
    def rows(self) -> dict[str, int]:
        return {
            "weights": self.weights,
            "slots": self.slots,
            "cache": self.cache * self.sequences,
            "steps": self.steps,
            "staging": self.staging,
        }

    def table(self) -> str:
        """Each row, their sum and what there is, for people."""
        rows = {**self.rows, "in all": sum(self.rows.values())}
        if self.memory is not None:
            rows["there is"] = self.memory
        return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in rows.items())

    def check(self) -> None:
        """Raises `LoRAUsageError` where the device has less; it says which flag to lower."""
        if self.memory is None or sum(self.rows.values()) <= self.memory:
            return
        # The first that would be enough by itself at a quarter; else the largest.
        over = sum(self.rows.values()) - self.memory
        largest = sorted(self.rows, key=lambda name: -self.rows[name])
        order = ["cache", "slots", *largest]
        worst = next((name for name in order if self.rows[name] * 3 // 4 >= over), largest[0])
        raise LoRAUsageError(f"this does not fit into a device's memory: {self.table()}; lower {_FLAGS[worst]}")


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
    """What a server of this model will take, by shapes alone.

    Args:
      config, lora, dtype, mesh: of the model and its slots.
      sequences: that decode together; None for as many as fit, 64 at most, a power of two.
      max_model_len: positions of each.
      batched_tokens: of a prefill step.
      share: of the device's memory that may be used, 0 to 1.

    Returns:
      The budget. It may be too large: see `Budget.check`.
    """
    model = skeleton(config, dtype, mesh)
    weights = sum(_on_one_device(leaf.shape, leaf.sharding, leaf.dtype.itemsize) for leaf in _leaves(model))
    slots = Survey(model, lora).device_slot_bytes
    shards = 1 if mesh is None else mesh.shape.get("tensor", 1)
    heads = math.ceil(config.num_key_value_heads / shards)
    itemsize = jax.numpy.dtype(dtype).itemsize
    chunk = min(batched_tokens, max_model_len)
    capacity = math.ceil(max_model_len / chunk) * chunk
    one = 2 * config.num_hidden_layers * heads * config.head_dim * itemsize * capacity
    wide = max(2 * config.intermediate_size, config.hidden_size * 4) // shards
    memory = device_bytes(jax.local_devices()[0])
    memory = None if memory is None else int(memory * share)

    def of(count: int) -> Budget:
        # Logits in float32, three of them at a time (themselves, their softmax, their order); activations of a layer;
        # the row of the cache that a prompt is written to, which is taken out of it and put back.
        steps = 3 * 4 * count * config.vocab_size + 4 * max(count, chunk) * wide + one
        return Budget(weights, slots, lora.max_staging_bytes, one, steps, memory, count)

    if sequences is not None:
        return of(sequences)
    count = MOST_SEQUENCES
    while count > 1 and memory is not None and sum(of(count).rows.values()) > memory:
        count //= 2
    return of(count)


def skeleton(config: DecoderConfig, dtype: Any, mesh: jax.sharding.Mesh | None) -> Decoder:
    """A model whose parameters are shapes alone. Raises `ModelError` where the mesh cannot share it evenly."""
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0), mesh=mesh))


def machine_bytes() -> int:
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def device_bytes(device: Any) -> int | None:
    """Bytes that JAX may use of a device, where it says so; of a CPU, all of the machine's."""
    return machine_bytes() if device.platform == "cpu" else (device.memory_stats() or {}).get("bytes_limit")


def _leaves(model: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(model, nnx.Param))


def _on_one_device(shape: tuple[int, ...], sharding: Any, itemsize: int) -> int:
    """Bytes that a device holds of an array."""
    return math.prod(shape if sharding is None else sharding.shard_shape(shape)) * itemsize


def stored_dtype(folder: Path) -> str:
    """What a checkpoint says its weights are, or float32."""
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return "float32"  # reading the model says what is wrong
    found = raw.get("dtype") or raw.get("torch_dtype") if isinstance(raw, dict) else None
    return found if found in ("float32", "bfloat16", "float16") else "float32"

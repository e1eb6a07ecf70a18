"""Let vLLM's TPU plugin run on CPUs: an entry point of `vllm.general_plugins`, loaded beside jlora's.

These functions of tpu-inference 0.32 read or need a TPU. Each is replaced by one that does the same on any device:

- `utils.make_optimized_mesh` sorts the devices by their coordinates on the torus (`x.coords`).
- `distributed.utils.get_device_topology_order_id` orders hosts by those coordinates.
- `utils.hbm_usage_bytes` reads the memory of the device, or knows it from the name of the TPU.
- `utils.general_device_put` puts arrays on devices that copy; CPUs share the memory of the runner's buffers, which the
  next step overwrites.
- `layers.common.utils.cpu_mesh` takes the first CPU device, which is the first host's where CPUs are the slice.
- `compiler_options` has flags that only the compiler for TPUs knows (`xla_tpu_*`).
- `ragged_paged_attention` is a Pallas kernel of Mosaic. `attention` below reads and writes the same paged cache.
- `sharded_flash_attention` makes one too, which `tower_attention` stands for.

All else is theirs: platform, configuration, executors, workers, scheduler, block tables, input batch, sampler, model.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tpu_inference.models.common import compiler_options

# Decorators call these. vLLM imports the modules of all plugins before it calls the first, so this comes before them.
compiler_options.get_step_fn_compiler_options = dict
compiler_options.get_sampling_compiler_options = dict
MEMORY = 1 << 30  # bytes that a device is taken to have


def attention(
    queries: jax.Array,  # tokens, heads, head_dim
    keys: jax.Array,  # tokens, key heads, head_dim
    values: jax.Array,
    cache: jax.Array,  # pages, page size, 2 key heads / packing, packing, padded head_dim
    lengths: jax.Array,  # tokens of a sequence with those of this step
    pages: jax.Array,  # sequence x page, flat
    starts: jax.Array,  # first query token of each sequence, and the end of the last
    distribution: jax.Array,  # the last of three is the number of sequences
    *,
    sm_scale: float = 1.0,
    **others: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention over a paged cache, as `ragged_paged_attention` does, in plain JAX."""
    if used := {name for name, value in others.items() if value not in (None, True)}:
        raise NotImplementedError(f"attention without TPU has no {used}")
    tokens, heads, size = queries.shape
    key_heads = keys.shape[1]
    count, page_size = cache.shape[:2]
    table = pages.reshape(lengths.shape[0], -1)
    starts = jnp.where(jnp.arange(starts.shape[0]) <= distribution[2], starts, tokens)  # the rest is undefined
    token = jnp.arange(tokens)
    sequence = jnp.minimum(jnp.searchsorted(starts[1:], token, side="right"), lengths.shape[0] - 1)
    real = token < starts[distribution[2]]
    position = lengths[sequence] - (starts[sequence + 1] - token)
    page = jnp.where(real, table[sequence, jnp.maximum(position, 0) // page_size], count)
    flat = cache.reshape(count, page_size, -1, cache.shape[-1])
    new = jnp.concatenate([keys, values], 1).astype(cache.dtype)
    flat = flat.at[page, position % page_size, : 2 * key_heads, :size].set(new, mode="drop")
    old = flat[table].reshape(*table.shape[:1], -1, *flat.shape[2:])[sequence, :, : 2 * key_heads, :size]
    k, v = (jnp.repeat(part, heads // key_heads, 2) for part in jnp.split(old.astype(jnp.float32), 2, 2))
    scores = jnp.einsum("thd,tlhd->thl", queries.astype(jnp.float32), k) * sm_scale
    seen = (jnp.arange(k.shape[1]) <= position[:, None]) & real[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30))
    out = jnp.where(real[:, None, None], jnp.einsum("thl,tlhd->thd", weights, v), 0)
    return out.astype(queries.dtype), flat.reshape(cache.shape)


def tower_attention(*, sm_scale: float = 1.0, **_: Any) -> Any:
    """Return attention between the rows of each segment, for towers."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: Any) -> jax.Array:
        seen = (segments.q[:, :, None] == segments.kv[:, None])[:, None]
        scores = jnp.where(seen, jnp.einsum("bnth,bnsh->bnts", q, k) * sm_scale, -1e30)
        return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), v)

    return attend


def mesh(axis_shapes: Any, axis_names: Any, *, devices: Any = None) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(devices).reshape(axis_shapes), axis_names)


def host_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.local_devices()[:1]), ("cpu",))


def memory(devices: Any) -> list[tuple[int, int]]:
    return [(0, MEMORY) for _ in devices]


def register() -> None:
    """Replace the functions, in each process that vLLM starts."""
    from tpu_inference import utils
    from tpu_inference.layers.common import attention_interface
    from tpu_inference.layers.common import utils as common_utils
    from tpu_inference.runner import tpu_runner
    from tpu_inference.worker import tpu_worker

    put = utils.general_device_put

    def put_copy(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        copy = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, tensors)
        return put(copy, *args, **kwargs)

    for module, name, instead in [
        (utils, "make_optimized_mesh", mesh),
        (tpu_runner, "make_optimized_mesh", mesh),
        (tpu_worker, "get_device_topology_order_id", lambda local, devices: jax.process_index()),
        (common_utils, "cpu_mesh", host_mesh),
        (utils, "hbm_usage_bytes", memory),
        (utils, "general_device_put", put_copy),
        (attention_interface, "ragged_paged_attention", attention),
        (attention_interface, "sharded_flash_attention", tower_attention),
    ]:
        getattr(module, name)  # an error names it where tpu-inference has changed
        setattr(module, name, instead)

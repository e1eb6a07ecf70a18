"""The experts of a layer on a mesh: one `shard_map`, in which each shard multiplies the rows of its own experts.

`all_gather`   a shard sees all tokens of its part of "data", and the results of all shards are summed

    tokens [T, H] --rows of own experts--> products --weights, sum--> [T, H] --add over expert, tensor--> [T, H]

`all_to_all`   tokens are sharded over "expert" as well

    tokens [S, H] --pack by shard--> [shards, S, H] --all to all--> products --weights, sum--> [shards, S, H]
       --all to all--> [shards, S, H] --add up, also over tensor--> [S, H]

With `all_to_all` a token is sent once to each shard that has experts of it, with its choices, and the sum over those
experts is sent back. A shard receives from another one at most all of the other's tokens. The buffers have that size,
so no token is ever dropped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jlora.models.partition import Dispatch, Partition
from jlora.models.routing import Routing


def on_mesh(
    experts: nnx.Module,
    partition: Partition,
    dispatch: Dispatch,
    tokens: Float[Array, "T H"],
    routing: Routing,
    num_experts: int,
    length: int | None,
) -> Float[Array, "T H"]:
    """Return the output of a layer of experts for the tokens, which its method `routed` computes on each shard.

    `length` is the number of tokens of a sequence, which is never split over shards, or None for packed tokens.
    """
    graph, state = nnx.split(experts)
    specs = jax.tree.map(_spec, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    origin = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    spread = dispatch == "all_to_all" and partition.size("expert") > 1
    if spread:
        axes = tuple(name for name in ("data", "expert") if partition.size(name) > 1)
        missing = -len(tokens) % (partition.size("data") * partition.size("expert"))
    else:
        axes, missing = partition.dividing(len(tokens) // (length or 1), ("data",)), 0

    def block(state: Any, tokens: jax.Array, routing: Routing, origin: jax.Array) -> jax.Array:
        layer: Any = nnx.merge(graph, state)
        if spread:
            return _exchanged(layer, partition, tokens, routing, num_experts, length, origin)
        out = layer.routed(tokens, _local(partition, routing, num_experts), length, origin[:, 0])
        return _add_up(partition, out, "expert", "tensor")

    def filled(array: jax.Array, value: int = 0) -> jax.Array:
        return jnp.pad(array, ((0, missing), (0, 0)), constant_values=value) if missing else array

    rows = P(axes or None, None)
    out = jax.shard_map(
        block, mesh=partition.mesh, in_specs=(specs, rows, rows, rows), out_specs=rows, check_vma=False
    )(
        state,
        filled(tokens),
        # Padding tokens go to an expert that no shard has
        Routing(filled(routing.experts, num_experts), filled(routing.weights)),
        filled(origin, -1),
    )
    return out[: len(tokens)]


def spread_over(dispatch: Dispatch) -> tuple[str, ...]:
    """Return the mesh axes over which sequences are sharded."""
    return ("data", "expert") if dispatch == "all_to_all" else ("data",)


def by_tokens(
    partition: Partition,
    dispatch: Dispatch,
    route: Callable[[Float[Array, "T E"]], Routing],
    logits: Float[Array, "T E"],
    length: int | None,
) -> Routing:
    """Return `route(logits)`, computed for each token on its own device.

    Without the `shard_map` the compiler would gather all tokens on every device.
    """
    if partition.mesh is None:
        return route(logits)
    rows = P(partition.dividing(len(logits) // (length or 1), spread_over(dispatch)) or None, None)
    return jax.shard_map(route, mesh=partition.mesh, in_specs=rows, out_specs=rows, check_vma=False)(logits)


def _spec(variable: Any) -> P:
    """Return the mesh axes of a variable from its metadata, else from its array."""
    spec = variable.get_metadata("out_sharding", None)
    if spec is None:
        spec = getattr(getattr(variable.get_value(), "sharding", None), "spec", ())
    return P(*getattr(spec, "spec", spec))


def _local(partition: Partition, routing: Routing, num_experts: int) -> Routing:
    """Count the experts from this shard's first one. Experts of other shards are out of its range."""
    first = num_experts // partition.size("expert") * _index(partition, "expert")
    return routing._replace(experts=routing.experts - first)


def _exchanged(
    layer: Any,
    partition: Partition,
    tokens: Float[Array, "S H"],
    routing: Routing,
    num_experts: int,
    length: int | None,
    origin: Int[Array, "S 1"],
) -> Float[Array, "S H"]:
    shards, k, dtype = partition.size("expert"), routing.experts.shape[1], tokens.dtype
    owner = routing.experts // (num_experts // shards)
    needed: Bool[Array, "S shards"] = jnp.any(owner[:, :, None] == jnp.arange(shards)[None, None, :], axis=1)
    # The place of each token among those for a shard; a token that is not sent there gets a place past the buffer.
    place = jnp.where(needed, jnp.cumsum(needed, axis=0) - 1, len(tokens))

    def travel(array: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(array, "expert", split_axis=0, concat_axis=0)

    def packed(array: jax.Array, fill: int = 0) -> jax.Array:
        empty = jnp.full((shards, *array.shape), fill, array.dtype)
        return empty.at[jnp.arange(shards)[None, :], place].set(array[:, None], mode="drop")

    # Sent with each token, as one array of integers: its experts, the bits of its weights, its index in the batch.
    bits = jax.lax.bitcast_convert_type(routing.weights.astype(jnp.float32), jnp.int32)
    with_it = [routing.experts.astype(jnp.int32), bits, origin]
    came = travel(packed(tokens)).reshape(-1, tokens.shape[1])
    # An empty place is routed to an expert that no shard has
    received = travel(packed(jnp.concatenate(with_it, axis=1), fill=num_experts)).reshape(len(came), -1)
    weights = jax.lax.bitcast_convert_type(received[:, k : 2 * k], jnp.float32).astype(routing.weights.dtype)
    mine = _local(partition, Routing(received[:, :k], weights), num_experts)
    origin = received[:, 2 * k]
    out = layer.routed(came, mine, length, jnp.where(received[:, 0] < num_experts, origin, -1))
    back = travel(out.reshape(shards, *tokens.shape))
    total = jnp.zeros(tokens.shape, jnp.float32)
    for shard in range(shards):
        total = total + back[shard].at[place[:, shard]].get(mode="fill", fill_value=0).astype(jnp.float32)
    return _add_up(partition, total.astype(dtype), "tensor")


def _index(partition: Partition, axis: str) -> Int[Array, ""] | int:
    return jax.lax.axis_index(axis) if partition.size(axis) > 1 else 0


def first_of_tensor(partition: Partition, bias: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Return a bias for partial sums over "tensor": the bias on the first shard, zeros on the others."""
    return bias if partition.size("tensor") == 1 else jnp.where(jax.lax.axis_index("tensor") == 0, bias, 0)


def _add_up(partition: Partition, x: jax.Array, *axes: str) -> jax.Array:
    axes = tuple(axis for axis in axes if partition.size(axis) > 1)
    return jax.lax.psum(x, axes) if axes else x

"""Mixture of experts: a router, tokens sorted by expert, two grouped products, and the weighted sum.

    x [.., H] --router--> k experts and weights a token --sort--> rows [M = T * k, H] by expert
      --gate_up--> [M, 2I] --activation--> [M, I] --down--> [M, H] --weights, sum over each token's k rows--> [.., H]

On a mesh, the experts are sharded over "expert" and their inner features over "tensor"
(`jlora.models.expert_parallel`). Each shard runs all of these steps with its own experts.

This module does not depend on adapters. A wrapper of `Experts` overrides its two products, `gate_up` and `down`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jlora._typing import DType
from jlora.models.config import MoEConfig, Quantization
from jlora.models.expert_parallel import by_tokens, first_of_tensor, on_mesh
from jlora.models.grouped import grouped_matmul
from jlora.models.partition import ONE_DEVICE, Blocks, Dispatch, Partition, merged
from jlora.models.parts import MLP, linear
from jlora.models.quantized import dequantize, quantized_params
from jlora.models.routing import Routing, softmax_top_k, top_k_softmax


class ExpertRows(NamedTuple):
    """The rows of an expert product: M = T * k copies of T tokens, sorted by expert and then by token.

    Attributes:
      token: [M] token of each row, as an index into the tokens given to `gate_up`. These are the flattened batch, or on
        a mesh this shard's part of it.
      expert: [M] expert of each row, ascending. On a mesh it is numbered from this shard's first expert on. Rows whose
        expert is on another shard come last with a number of at least E, the experts of this shard; their values are
        not used.
      counts: [E] number of rows of each expert.
      length: L if the input is [B, L, H], None if it is packed rows [T, H].
      origin: [T] on a mesh, index in the whole batch of each token given to `gate_up`; -1 for none.
    """

    token: Int[Array, "M"]
    expert: Int[Array, "M"]
    counts: Int[Array, "E"]
    length: int | None
    origin: Int[Array, "T"] | None = None


def dispatch(
    experts: Int[Array, "T k"], num_experts: int, length: int | None = None
) -> tuple[ExpertRows, Int[Array, "T k"]]:
    """Sort the (token, expert) pairs stably by expert, and return the rows and the row of each pair."""
    flat = experts.astype(jnp.int32).reshape(-1)
    pairs = jnp.arange(flat.shape[0], dtype=jnp.int32)
    expert, order = jax.lax.sort((flat, pairs), num_keys=1, is_stable=True)
    counts = jnp.sum(flat[:, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, :], axis=0, dtype=jnp.int32)
    places = jnp.zeros_like(pairs).at[order].set(pairs, unique_indices=True)
    return ExpertRows(order // experts.shape[1], expert, counts, length), places.reshape(experts.shape)


def combine(rows: Float[Array, "M H"], places: Int[Array, "T k"], weights: Float[Array, "T k"]) -> Float[Array, "T H"]:
    """Sum each token's k rows with their weights, in order and in float32, independently of other tokens."""
    total = jnp.zeros((places.shape[0], rows.shape[1]), jnp.float32)
    for i in range(places.shape[1]):
        total = total + rows[places[:, i]].astype(jnp.float32) * weights[:, i, None]
    return total.astype(rows.dtype)


def gated_silu(gate: Float[Array, "M I"], up: Float[Array, "M I"]) -> Float[Array, "M I"]:
    """Compute SiLU of the gate times the other half (arXiv:2002.05202)."""
    return jax.nn.silu(gate) * up


@dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation of gpt-oss, (up + 1) * gate * sigmoid(alpha * gate).

    Both inputs are clamped to `limit` first, the gate from above only.
    """

    alpha: float
    limit: float

    def __call__(self, gate: Float[Array, "M I"], up: Float[Array, "M I"]) -> Float[Array, "M I"]:
        """Apply the activation to gate and up, both [M, I]."""
        gate = jnp.minimum(gate, self.limit)
        up = jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


class Experts(nnx.Module):
    """E gated MLPs, each applied to the rows that are routed to it.

    Attributes:
      gate_up_proj: [E, H, 2 * I], all columns of the gate first; `gate_up_proj_bias` [E, 2 * I] with `bias`.
      down_proj: [E, I, H]; `down_proj_bias` [E, H] with `bias`.
      gate_up_proj_scale, down_proj_scale: With `quantization`, the scales of the two, as in `QuantizedLinear`.
      dtype: dtype of the activations.
      alternating: Products whose columns of gate and up alternate in checkpoint tensors of all experts.
      output_blocks: Order of the columns of `gate_up_proj`, only if a mesh needs another than the checkpoint's
        (`partition.Blocks`).
    """

    gate_up_proj: nnx.Param[jax.Array]
    down_proj: nnx.Param[jax.Array]
    # Method of each product -> its parameter [E, in, out].
    grouped_products = {"gate_up": "gate_up_proj", "down": "down_proj"}  # noqa: RUF012 - a constant
    # Products whose input is all tokens, from which they gather their rows.
    gathers = ("gate_up",)

    def __init__(
        self,
        features: int,
        inner: int,
        num_experts: int,
        *,
        activation: Callable[..., jax.Array] = gated_silu,
        alternating: Sequence[str] = (),
        bias: bool = False,
        dtype: DType,
        rngs: nnx.Rngs,
        partition: Partition = ONE_DEVICE,
        dispatch: Dispatch = "all_gather",
        quantization: Quantization | None = None,
    ):
        """Create the parameters. `activation` takes gate and up [M, I], and must be hashable by value."""

        def draw(name: str, inputs: int, outputs: int, *axes: str | None, blocks: Blocks | None = None) -> None:
            drawn = partition.draw(("expert", *axes), blocks)(rngs.params(), (num_experts, inputs, outputs), dtype)
            if quantization is None:
                setattr(self, name, nnx.Param(drawn, **partition.metadata("expert", *axes)))
                return
            kernel, scale = quantized_params(drawn, quantization, partition, ("expert", *axes))
            setattr(self, name, kernel)
            setattr(self, f"{name}_scale", scale)

        def zeros(size: int, axis: str | None) -> nnx.Param[jax.Array]:
            values = jnp.zeros((num_experts, size), dtype, device=partition.sharding("expert", axis))
            return nnx.Param(values, **partition.metadata("expert", axis))

        blocks = merged([(inner, 1), (inner, 1)], partition.size("tensor"))
        draw("gate_up_proj", features, 2 * inner, None, "tensor", blocks=blocks)
        draw("down_proj", inner, features, "tensor", None)
        if bias:
            self.gate_up_proj_bias = zeros(2 * inner, "tensor")
            self.down_proj_bias = zeros(features, None)
        if blocks is not None:
            self.output_blocks = blocks
        self.num_experts = num_experts
        self.dtype = jnp.dtype(dtype)
        self.quantized = quantization is not None
        self.activation = activation
        self.alternating = tuple(alternating)
        self.bias = bias
        self.partition = partition
        self.dispatch: Dispatch = dispatch

    def gate_up(self, x: Float[Array, "T H"], rows: ExpertRows) -> Float[Array, "M F"]:
        """Compute the first product of every row from its token, plus the bias. F = 2 * I."""
        out = grouped_matmul(x[rows.token], self.matrices("gate_up_proj"), rows.counts)
        return out + self.gate_up_proj_bias[...][rows.expert] if self.bias else out

    def down(self, h: Float[Array, "M I"], rows: ExpertRows) -> Float[Array, "M H"]:
        """Compute the second product of every row, plus the bias."""
        out = grouped_matmul(h, self.matrices("down_proj"), rows.counts)
        return out + first_of_tensor(self.partition, self.down_proj_bias[...][rows.expert]) if self.bias else out

    def matrices(self, name: str) -> Float[Array, "E K N"]:
        """Return the parameter of a product as the product reads it, in the dtype of the activations."""
        if not self.quantized:
            return getattr(self, name)[...]
        return self.dequantized(name).astype(self.dtype)

    def dequantized(self, name: str) -> Float[Array, "E K N"]:
        """Return a quantized parameter in float32."""
        return dequantize(getattr(self, name)[...], getattr(self, f"{name}_scale")[...])

    def __call__(self, x: Float[Array, "*rows H"], routing: Routing) -> Float[Array, "*rows H"]:
        """Compute the weighted sum of each token's experts; `x` is [B, L, H] or packed [T, H]."""
        tokens = x.reshape(-1, x.shape[-1])
        length = x.shape[1] if x.ndim == 3 else None
        if self.partition.mesh is not None:
            out = on_mesh(self, self.partition, self.dispatch, tokens, routing, self.num_experts, length)
            return out.reshape(x.shape)
        return self.routed(tokens, routing, length).reshape(x.shape)

    def routed(
        self, tokens: Float[Array, "T H"], routing: Routing, length: int | None, origin: Int[Array, "T"] | None = None
    ) -> Float[Array, "T H"]:
        """Compute the weighted sum of each token's experts among those of this shard."""
        here = self.gate_up_proj.shape[0]
        some = here < self.num_experts
        experts = routing.experts
        if some:
            experts = jnp.where((experts >= 0) & (experts < here), experts, here)
        rows, places = dispatch(experts, here, length)
        rows = rows._replace(origin=origin)
        used = rows.expert < here if some else None
        h = self.activation(*jnp.split(_only(used, self.gate_up(tokens, rows)), 2, axis=1))
        return combine(_only(used, self.down(h, rows)), places, routing.weights)


def _only(used: Bool[Array, "M"] | None, rows: Float[Array, "M N"]) -> Float[Array, "M N"]:
    """Zero the rows that belong to no group of a grouped product, whose values are undefined."""
    return rows if used is None else jnp.where(used[:, None], rows, 0)


class MoE(nnx.Module):
    """The expert layer of a decoder: router, experts, and in some families a shared expert for every token."""

    def __init__(
        self,
        features: int,
        config: MoEConfig,
        *,
        dtype: DType,
        rngs: nnx.Rngs,
        partition: Partition = ONE_DEVICE,
        dispatch: Dispatch = "all_gather",
        quantization: Quantization | None = None,
    ):
        limit = config.swiglu_limit
        # float32, because logits rounded to bfloat16 would choose other experts near ties.
        router = linear(
            features,
            config.num_experts,
            bias=config.router_bias,
            dtype=jnp.float32,
            param_dtype=dtype,
            rngs=rngs,
            partition=partition,
        )
        setattr(self, config.router_name, router)
        self.experts = Experts(
            features,
            config.intermediate_size,
            config.num_experts,
            activation=gated_silu if limit is None else ClampedSwiGLU(config.swiglu_alpha, limit),
            alternating=("gate_up",) if config.interleaved else (),
            bias=config.expert_bias,
            dtype=dtype,
            rngs=rngs,
            partition=partition,
            dispatch=dispatch,
            quantization=quantization,
        )
        if config.shared_size:
            self.shared_expert = MLP(
                features,
                config.shared_size,
                dtype=dtype,
                rngs=rngs,
                partition=partition,
                quantization=quantization,
            )
            self.shared_expert_gate = linear(features, 1, bias=False, dtype=dtype, rngs=rngs, partition=partition)
        self.config = config

    def __call__(self, x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
        """Return the output of the routed experts, plus the gated shared expert if there is one."""
        config = self.config
        # The router gets the rows in their original shape, as every other projection does.
        logits = getattr(self, config.router_name)(x).reshape(-1, config.num_experts)
        if config.router == "softmax":
            route = partial(softmax_top_k, k=config.experts_per_token, renormalize=config.renormalize)
        else:
            route = partial(top_k_softmax, k=config.experts_per_token)
        length = x.shape[1] if x.ndim == 3 else None
        out = self.experts(x, by_tokens(self.experts.partition, self.experts.dispatch, route, logits, length))
        if config.shared_size:
            gate = jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32))
            out = out + gate.astype(x.dtype) * self.shared_expert(x)
        return out

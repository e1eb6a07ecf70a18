"""Models of experts in the styles of four code bases, and a NumPy reference that loops over tokens and experts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jlora

EXPERTS, HIDDEN, INNER, CHOSEN, LAYERS = 5, 8, 6, 2, 2


def draw(rngs, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape) * shape[-2] ** -0.5)


def route(logits):
    """Return the two best experts of each token and their renormalised weights, [T, 2]."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), CHOSEN)
    return experts, weights / weights.sum(-1, keepdims=True)


def sort_pairs(experts):
    """Return the order of the pairs by expert, the token and expert of each sorted row, and the rows of each expert."""
    flat = experts.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = (flat[:, None] == jnp.arange(EXPERTS, dtype=jnp.int32)[None, :]).sum(0, dtype=jnp.int32)
    return order, order // CHOSEN, flat[order], counts


def weighted_sum(rows, order, weights):
    """Return the weighted sum of each token's rows, in the order of the tokens."""
    rows = jnp.zeros_like(rows).at[order].set(rows)
    return (rows.reshape(*weights.shape, -1) * weights[..., None]).sum(1)


def gated(hidden):
    gate, up = jnp.split(hidden, 2, axis=-1)
    return jax.nn.silu(gate) * up


class Rows(NamedTuple):
    token: jax.Array
    expert: jax.Array
    counts: jax.Array
    length: int | None


class Seams(nnx.Module):
    """Experts that declare two methods as their grouped products."""

    grouped_products = {"gate_up": "wi", "down": "wo"}
    gated = True
    interleaved = False

    def __init__(self, rngs):
        self.wi, self.wo = draw(rngs, EXPERTS, HIDDEN, 2 * INNER), draw(rngs, EXPERTS, INNER, HIDDEN)

    def gate_up(self, x, rows):
        return jax.lax.ragged_dot(x, self.wi[...], rows.counts)

    def down(self, x, rows):
        return jax.lax.ragged_dot(x, self.wo[...], rows.counts)

    def __call__(self, x, logits):
        experts, weights = route(logits.reshape(-1, EXPERTS))
        order, token, expert, counts = sort_pairs(experts)
        rows = Rows(token, expert, counts, x.shape[1] if x.ndim == 3 else None)
        hidden = gated(self.gate_up(x.reshape(-1, HIDDEN)[token], rows))
        return weighted_sum(self.down(hidden, rows), order, weights).reshape(x.shape)


class Gathering(Seams):
    """Experts with a first product that takes all tokens and gathers its rows."""

    gathers = ("gate_up",)

    def gate_up(self, x, rows):
        return super().gate_up(x[rows.token], rows)

    def __call__(self, x, logits):
        experts, weights = route(logits.reshape(-1, EXPERTS))
        order, token, expert, counts = sort_pairs(experts)
        rows = Rows(token, expert, counts, x.shape[1] if x.ndim == 3 else None)
        hidden = gated(self.gate_up(x.reshape(-1, HIDDEN), rows))
        return weighted_sum(self.down(hidden, rows), order, weights).reshape(x.shape)


class Interleaved(Seams):
    """Experts with alternating columns of gate and up."""

    interleaved = True

    def __init__(self, rngs):
        super().__init__(rngs)
        wi = self.wi[...]
        self.wi.set_value(jnp.stack(jnp.split(wi, 2, axis=-1), axis=-1).reshape(wi.shape))

    def __call__(self, x, logits):
        experts, weights = route(logits.reshape(-1, EXPERTS))
        order, token, expert, counts = sort_pairs(experts)
        rows = Rows(token, expert, counts, x.shape[1] if x.ndim == 3 else None)
        both = self.gate_up(x.reshape(-1, HIDDEN)[token], rows)
        hidden = jax.nn.silu(both[:, 0::2]) * both[:, 1::2]
        return weighted_sum(self.down(hidden, rows), order, weights).reshape(x.shape)


class Alternating(Seams):
    """Experts with columns of gate and up that alternate in checkpoints only."""

    alternating = ("gate_up",)


class Ragged(nnx.Module):
    """Bare weights and `ragged_dot` over sorted tokens in one method, with two calls of `expert_delta`."""

    def __init__(self, rngs):
        self.w13, self.w2 = draw(rngs, EXPERTS, HIDDEN, 2 * INNER), draw(rngs, EXPERTS, INNER, HIDDEN)

    def __call__(self, x, logits):
        experts, weights = route(logits.reshape(-1, EXPERTS))
        order, token, expert, counts = sort_pairs(experts)
        rows = jlora.RowMap(token, of="tokens", length=x.shape[1] if x.ndim == 3 else None, expert=expert)
        tokens = x.reshape(-1, HIDDEN)[token]
        hidden = jax.lax.ragged_dot(tokens, self.w13[...], counts)
        hidden = gated(jlora.expert_delta(self, "gate_up", tokens, hidden, rows))
        out = jax.lax.ragged_dot(hidden, self.w2[...], counts)
        out = jlora.expert_delta(self, "down", hidden, out, rows)
        return weighted_sum(out, order, weights).reshape(x.shape)


jlora.register_layer(
    Ragged,
    lambda layer: jlora.ExpertsSpec(
        EXPERTS,
        {
            "gate_up": jlora.LinearSpec(HIDDEN, 2 * INNER, param="w13"),
            "down": jlora.LinearSpec(INNER, HIDDEN, param="w2"),
        },
    ),
)


class OneHot(nnx.Module):
    """A dense one-hot dispatch with a capacity of [E, C] places. Tokens above the capacity are dropped.

    Kernels are [E, out, in]. Gate and up are separate products.
    """

    capacity = 9

    def __init__(self, rngs):
        self.wi_0, self.wi_1 = draw(rngs, EXPERTS, INNER, HIDDEN), draw(rngs, EXPERTS, INNER, HIDDEN)
        self.wo = draw(rngs, EXPERTS, HIDDEN, INNER)

    def gate(self, x, token):
        return jnp.einsum("ech,emh->ecm", x, self.wi_0[...])

    def up(self, x, token):
        return jnp.einsum("ech,emh->ecm", x, self.wi_1[...])

    def down(self, x, token):
        return jnp.einsum("ecm,ehm->ech", x, self.wo[...])

    def __call__(self, x, logits):
        tokens = x.reshape(-1, HIDDEN)
        experts, weights = route(logits.reshape(-1, EXPERTS))
        flat = experts.reshape(-1)
        chosen = (flat[:, None] == jnp.arange(EXPERTS)[None, :]).astype(jnp.int32)
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(1) - 1  # the rank of each pair within its expert
        pairs = jnp.arange(len(flat)) // CHOSEN
        inside = jnp.where(place < self.capacity, place, self.capacity)
        token = jnp.full((EXPERTS, self.capacity), -1).at[flat, inside].set(pairs, mode="drop")
        dispatched = jnp.where((token >= 0)[..., None], tokens[token.clip(0)], 0)
        length = x.shape[1] if x.ndim == 3 else None
        hidden = jax.nn.silu(self.gate(dispatched, (token, length))) * self.up(dispatched, (token, length))
        out = self.down(hidden, (token, length))
        kept = (place < self.capacity)[:, None]
        rows = jnp.where(kept, out[flat, inside.clip(0, self.capacity - 1)], 0)
        return (rows.reshape(*weights.shape, -1) * weights[..., None]).sum(1).reshape(x.shape)


class Roomy(OneHot):
    """`OneHot` with a place for every token, so that a result does not depend on the other rows of the batch."""

    capacity = 21


def _one_hot_rows(layer, name, x, where):
    token, length = where
    expert = jnp.broadcast_to(jnp.arange(EXPERTS)[:, None], token.shape)
    return jlora.RowMap(token.reshape(-1), of="tokens", length=length, expert=expert.reshape(-1))


jlora.register_layer(
    OneHot,
    lambda layer: jlora.ExpertsSpec(
        EXPERTS,
        {
            "gate": jlora.LinearSpec(HIDDEN, INNER, param="wi_0", in_axes=(1,), out_axes=(0,)),
            "up": jlora.LinearSpec(HIDDEN, INNER, param="wi_1", in_axes=(1,), out_axes=(0,)),
            "down": jlora.LinearSpec(INNER, HIDDEN, param="wo", in_axes=(1,), out_axes=(0,)),
        },
        rows=_one_hot_rows,
        names={"gate": [["gate_proj"]], "up": [["up_proj"]], "down": [["down_proj"]]},
    ),
)


class Block(nnx.Module):
    def __init__(self, cls, rngs):
        self.gate = nnx.Linear(HIDDEN, EXPERTS, use_bias=False, rngs=rngs)
        self.experts = cls(rngs)

    def __call__(self, x):
        return x + self.experts(x, self.gate(x))


class Model(nnx.Module):
    def __init__(self, cls, rngs):
        self.layers = nnx.List([Block(cls, rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(nnx.Module):
    """`Model` with stacked layers under `nnx.scan`."""

    def __init__(self, cls, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(cls, rngs)

        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.StateAxes({jlora.SlotParam: 0, ...: 0}), nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return layer(x)

        return run(self.layers, x)


def kernels(model, layer):
    """Return router [H, E], gate [E, H, I], up [E, H, I] and down [E, I, H] of one layer in float64."""

    def read(param):
        value = np.asarray(param[...], np.float64)
        return value[layer] if isinstance(model, Scanned) else value

    block = model.layers if isinstance(model, Scanned) else model.layers[layer]
    experts = block.experts
    router = read(block.gate.kernel)
    if isinstance(experts, OneHot):
        return router, *(read(p).swapaxes(1, 2) for p in (experts.wi_0, experts.wi_1, experts.wo))
    wi, wo = (experts.w13, experts.w2) if isinstance(experts, Ragged) else (experts.wi, experts.wo)
    wi = read(wi)
    if isinstance(experts, Interleaved):
        return router, wi[..., 0::2], wi[..., 1::2], read(wo)
    return router, wi[..., :INNER], wi[..., INNER:], read(wo)


def reference(model, x, adapters):
    """Compute the forward of x [T, H] with the merged weights of adapters[t] (or None) for token t."""
    x = np.array(x, np.float64)
    experts = model.layers.experts if isinstance(model, Scanned) else model.layers[0].experts
    capacity = getattr(experts, "capacity", len(x) * CHOSEN)
    for layer in range(LAYERS):
        router, gate, up, down = kernels(model, layer)
        added, used = np.zeros_like(x), np.zeros(EXPERTS, int)
        for t, adapter in enumerate(adapters):

            def delta(name, adapter=adapter, layer=layer):
                module = None if adapter is None else adapter.modules.get(f"layers.{layer}.{name}")
                if module is None:
                    return 0.0
                return module.scaling * (module.b.astype(np.float64) @ module.a.astype(np.float64)).T

            logits = x[t] @ (router + delta("gate"))
            weights = np.exp(logits - logits.max())
            best = np.argsort(-weights, kind="stable")[:CHOSEN]
            for e, weight in zip(best, weights[best] / weights[best].sum(), strict=True):
                used[e] += 1
                if used[e] > capacity:
                    continue
                g = x[t] @ (gate[e] + delta(f"experts.{e}.gate_proj"))
                u = x[t] @ (up[e] + delta(f"experts.{e}.up_proj"))
                added[t] += weight * ((g / (1 + np.exp(-g)) * u) @ (down[e] + delta(f"experts.{e}.down_proj")))
        x = x + added
    return x

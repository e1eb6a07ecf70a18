"""Experts with all products in one method, as other libraries write them, against a NumPy loop over merged experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from tests.layers import merging
from tests.layers.expert_models import CHOSEN, draw, route, weighted_sum
from tests.layers.merging import assert_close, serve

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("registered")]

E, D, F = 3, 8, 6  # experts, features, inner features


def sort_pairs(experts):
    """Return the order of the pairs by expert, the token of each sorted row, and the rows of each expert."""
    order = jnp.argsort(experts.reshape(-1), stable=True)
    return order, order // CHOSEN, jnp.bincount(experts.reshape(-1), length=E)


class Gated(nnx.Module):
    """The router and the three stacks of kernels, [E, D, F] and [E, F, D], that most libraries have."""

    names = ("wi_0", "wi_1", "wo")

    def __init__(self, rngs):
        self.gate = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        for name, shape in zip(self.names, ((E, D, F), (E, D, F), (E, F, D)), strict=True):
            setattr(self, name, draw(rngs, *shape))

    def kernels(self):
        return [np.asarray(vars(self)[name][...], np.float64) for name in self.names]


class MaxText(Gated):
    """The dense product of MaxText: einsums over all experts, and weights of zero for those not chosen."""

    def __call__(self, inputs):
        experts, top = route(self.gate(inputs))
        weights = (jax.nn.one_hot(experts, E) * top[..., None]).sum(-2)
        kernels = [jnp.asarray(each[...], jnp.float32) for each in (self.wi_0, self.wi_1, self.wo)]
        up = [jax.ad_checkpoint.checkpoint_name(self.spread(inputs, kernel), "mlpwi") for kernel in kernels[:2]]
        rows = jnp.einsum("BSEH,EHM -> BSEM", jax.nn.silu(up[0]) * up[1], kernels[2])
        return jnp.einsum("BSEM,BSE -> BSM", rows, weights)

    def spread(self, inputs, kernel):
        return jnp.einsum("BSM,EMH -> BSEH", inputs, kernel)


class Merged(MaxText):
    """One matrix of all experts, and experts first in the second product."""

    def __call__(self, inputs):
        experts, top = route(self.gate(inputs))
        weights = (jax.nn.one_hot(experts, E) * top[..., None]).sum(-2)
        gate, up = (
            (inputs @ jnp.moveaxis(each[...], 0, 1).reshape(D, E * F)).reshape(*inputs.shape[:2], E, F)
            for each in (self.wi_0, self.wi_1)
        )
        rows = jax.lax.dot_general(jax.nn.silu(gate) * up, self.wo[...], (((3,), (1,)), ((2,), (0,))))
        return jnp.einsum("EBSM,BSE -> BSM", rows, weights)


class Tunix(Gated):
    """The loop over experts of Tunix, each of which computes all tokens."""

    names = ("gate_proj", "up_proj", "down_proj")

    def __call__(self, x):
        experts, top = route(self.gate(x))
        mask = jnp.swapaxes(jax.nn.one_hot(experts, E), -1, -2)  # [B, T, E, chosen]
        dispatched = jnp.einsum("BTID,BTEK->BTED", x[:, :, None, :], mask)
        outputs = []
        for i in range(E):
            gate, up, down = (jnp.astype(vars(self)[name][...][i], jnp.float32) for name in self.names)
            one = dispatched[:, :, i, :]
            hidden = nnx.silu(jnp.einsum("BTD,DF->BTF", one, gate)) * jnp.einsum("BTD,DF->BTF", one, up)
            outputs.append(jnp.einsum("BTF,FD->BTD", hidden, down))
        weights = mask * jnp.tile(top[:, :, None, :], (1, 1, E, 1))
        return jnp.einsum("BTED,BTEK->BTD", jnp.stack(outputs, axis=2), weights)


class Sglang(Gated):
    """Experts of sglang-jax: rows sorted by expert, `ragged_dot`, and the choice as arguments."""

    def __call__(self, hidden_states):
        experts, top = route(self.gate(hidden_states))
        return self.experts(hidden_states, top.reshape(-1, CHOSEN), topk_ids=experts.reshape(-1, CHOSEN))

    def experts(self, hidden_states, topk_weights, *, topk_ids):
        order, token, counts = sort_pairs(topk_ids)
        x = hidden_states.reshape(-1, D)[token]
        gate, up = (jax.lax.ragged_dot(x, each[...], counts) for each in (self.wi_0, self.wi_1))
        rows = jax.lax.ragged_dot(jax.nn.silu(gate) * up, self.wo[...], counts)
        return weighted_sum(rows, order, topk_weights).reshape(hidden_states.shape)


class Gemma4(Gated):
    """Experts of Gemma 4 in Tunix: gate and up in one kernel [E, 2, F, D], transposed for `ragged_dot`."""

    names = ("gating_einsum", "linear")

    def __init__(self, rngs):
        self.gate = nnx.Linear(D, E, use_bias=False, rngs=rngs)
        self.gating_einsum, self.linear = draw(rngs, E, 2, F, D), draw(rngs, E, F, D)

    def kernels(self):
        gating, linear = super().kernels()
        return gating[:, 0].swapaxes(1, 2), gating[:, 1].swapaxes(1, 2), linear

    def __call__(self, x):
        experts, top = route(self.gate(x))
        order, token, counts = sort_pairs(experts.reshape(-1, CHOSEN))
        kernel = jnp.transpose(self.gating_einsum[...], (0, 3, 1, 2)).reshape(E, D, 2 * F)
        hidden = jax.lax.ragged_dot(x.reshape(-1, D)[token], kernel, group_sizes=counts)
        hidden = hidden.reshape(-1, 2, F)
        rows = jax.lax.ragged_dot(jax.nn.silu(hidden[:, 0]) * hidden[:, 1], self.linear[...], group_sizes=counts)
        return weighted_sum(rows, order, top.reshape(-1, CHOSEN)).reshape(x.shape)


def sorted_rows(layer, product, x, inputs, *_, topk_ids=None):
    """Return the token of each row, computed from the arguments as the method does."""
    experts = route(layer.gate(inputs))[0] if topk_ids is None else topk_ids
    _, token, _ = sort_pairs(experts.reshape(-1, CHOSEN))
    length = inputs.shape[1] if inputs.ndim == 3 else None
    return jlora.RowMap(token, of="tokens", length=length)


def describe(layer, rows=None, method="__call__"):
    products = {
        name: jlora.LinearSpec(*sizes, param)
        for name, sizes, param in zip(("gate", "up", "down"), ((D, F), (D, F), (F, D)), layer.names, strict=True)
    }
    names = {"gate": [["gate_proj"]], "up": [["up_proj"]], "down": [["down_proj"]]}
    return jlora.ExpertsSpec(E, products, rows, names, method=method)


def describe_gemma(layer):
    up = jlora.LinearSpec(D, 2 * F, "gating_einsum", in_axes=(2,), out_axes=(0, 1))
    products = {"gate_up": up, "down": jlora.LinearSpec(F, D, "linear")}
    return jlora.ExpertsSpec(E, products, sorted_rows, method="__call__")


SPECS = {
    MaxText: describe,
    Merged: describe,
    Tunix: describe,
    Sglang: functools.partial(describe, rows=sorted_rows, method="experts"),
    Gemma4: describe_gemma,
}


class Model(nnx.Module):
    def __init__(self, cls):
        self.mlp = cls(nnx.Rngs(0))

    def __call__(self, x):
        return x + self.mlp(x)


def make_manager(model, adapters=(), **options):
    """Return a manager for adapters with names of checkpoints, in which the experts are a module below the layer."""
    return merging.make_manager(model, adapters, name_map={r"^mlp\.experts\.": "mlp."}, **options)


def make_adapter(name, seed, experts=range(E), projections=("gate_proj", "up_proj", "down_proj")):
    rng = np.random.default_rng(seed)
    sizes = {"gate_proj": (D, F), "up_proj": (D, F), "down_proj": (F, D)}

    def pair(k, n):
        return rng.normal(size=(2, k)).astype(np.float32) * 0.5, rng.normal(size=(n, 2)).astype(np.float32) * 0.5

    arrays = {f"mlp.experts.{e}.{p}": pair(*sizes[p]) for e in experts for p in projections}
    return jlora.Adapter.from_arrays(name, arrays | {"mlp.gate": pair(D, E)}, alpha=3)


ADAPTERS = {
    "all": make_adapter("all", 1),
    "some": make_adapter("some", 2, experts=(0, 2)),
    "down": make_adapter("down", 3, projections=("down_proj",)),
}


def expected(model, x, names):
    """Return the rows x [B, T, D] of a model with merged experts, in float64."""
    x = np.asarray(x, np.float64)
    out = x.copy()
    for b, t in np.ndindex(*x.shape[:2]):
        modules = {} if names[b] is None else ADAPTERS[names[b]].modules

        def merged(name, weight, modules=modules):
            module = modules.get(name)
            if module is None:
                return weight
            return weight + module.scaling * (module.b.astype(np.float64) @ module.a.astype(np.float64)).T

        logits = x[b, t] @ merged("mlp.gate", np.asarray(model.mlp.gate.kernel[...], np.float64))
        best = np.argsort(-logits, kind="stable")[:CHOSEN]
        weights = np.exp(logits[best] - logits.max())
        for e, weight in zip(best, weights / weights.sum(), strict=True):
            gate, up, down = (
                merged(f"mlp.experts.{e}.{name}", stack[e])
                for name, stack in zip(("gate_proj", "up_proj", "down_proj"), model.mlp.kernels(), strict=True)
            )
            hidden = x[b, t] @ gate
            out[b, t] += weight * ((hidden / (1 + np.exp(-hidden)) * (x[b, t] @ up)) @ down)
    return out


@pytest.mark.parametrize(
    "cls", [Sglang, *(pytest.param(cls, marks=pytest.mark.slow) for cls in SPECS if cls != Sglang)]
)
def test_each_row_has_its_own_experts(cls):
    """Rows without an adapter are those of the base, swaps do not retrace, and `verify` checks all products."""
    jlora.register_layer(cls, SPECS[cls])
    model = Model(cls)
    manager = make_manager(model, ADAPTERS.values(), max_loras=2)
    x = jax.random.normal(jax.random.key(1), (5, 3, D))

    @manager.jit
    def step(model, x, batch):
        with jlora.use(batch):
            return model(x)

    for names in (["all", None, "some", "all", None], ["down", "some", None, None, "some"]):
        with manager.prepare(names) as batch:
            found = step(model, x, batch)
        assert_close(found, expected(model, x, names))
        assert np.abs(found - expected(model, x, [None] * 5))[[name is not None for name in names]].max() > 1e-2
    assert manager.stats().compilations == 1
    params = [f"mlp.{name}" for name in cls.names]
    assert set(manager.verify(serve, x).checked) == {"mlp.gate", *params}


@pytest.mark.parametrize("cls", [MaxText, pytest.param(Sglang, marks=pytest.mark.slow)])
def test_factors_that_experts_share(cls):
    """Slots of one A for all experts, and of one B, beside slots of all factors."""
    jlora.register_layer(cls, SPECS[cls])
    rng = np.random.default_rng(0)
    shapes = {"gate_proj": (1, E, D, F), "up_proj": (1, E, D, F), "down_proj": (E, 1, F, D)}
    modules = {
        f"mlp.experts.{name}": jlora.ExpertsLoRA(
            a=rng.normal(size=(of_a, 2, k)).astype(np.float32) * 0.5,
            b=rng.normal(size=(of_b, n, 2)).astype(np.float32) * 0.5,
            alpha=2,
            scaling=1.0,
        )
        for name, (of_a, of_b, k, n) in shapes.items()
    }
    shared = jlora.Adapter(name="shared", modules=modules)
    x, names = jax.random.normal(jax.random.key(1), (3, 2, D)), ["shared", None, "all"]
    outputs = []
    for slots in ({}, {"expert_slots": {"per_expert": 1, "shared": 1}}):
        manager = make_manager(model := Model(cls), [shared, ADAPTERS["all"]], max_loras=2, **slots)
        with manager.prepare(names) as batch:
            outputs.append(serve(model, x, batch))
    assert_close(outputs[0], outputs[1])
    assert_close(outputs[0][1:], expected(model, x[1:], names[1:]))


@pytest.mark.parametrize("cls", [Tunix, Merged])
def test_rows_of_sequences_that_are_partly_active(cls):
    """The axes of rows beside the experts are those of a layer: positions count."""
    jlora.register_layer(cls, SPECS[cls])
    manager = make_manager(model := Model(cls), ADAPTERS.values(), activated=True)
    x = jax.random.normal(jax.random.key(1), (3, 4, D))
    with manager.prepare(["all", "some", None], active_from=[1, 3, 0], length=4) as batch:
        found = np.asarray(serve(model, x, batch))
    active = np.arange(4)[None] >= np.array([1, 3, 4])[:, None]
    full = np.where(active[..., None], expected(model, x, ["all", "some", None]), expected(model, x, [None] * 3))
    assert_close(found, full)


@pytest.mark.parametrize("cls", [Sglang, Gemma4])
def test_sorted_rows_without_their_tokens_are_refused(cls):
    def without_rows(layer):
        spec = SPECS[cls](layer)
        return jlora.ExpertsSpec(E, spec.products, None, spec.names, method=spec.method)

    jlora.register_layer(cls, without_rows)
    manager = make_manager(model := Model(cls))
    with (
        manager.prepare([None] * 3) as batch,
        pytest.raises(LoRAError, match=rf"mlp\.{cls.names[0]}: ragged_dot .* `rows`"),
    ):
        serve(model, jnp.ones((3, 2, D)), batch)


@pytest.mark.parametrize("found", [None, jlora.RowMap(np.arange(5), of="tokens", length=2)])
def test_rows_that_are_not_those_of_the_product_are_refused(found):
    rows = lambda layer, product, x, *args, **kwargs: found  # noqa: E731
    jlora.register_layer(Sglang, lambda layer: describe(layer, rows, "experts"))
    manager = make_manager(model := Model(Sglang))
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAUsageError, match=r"mlp.wi_0: .* of \[12\] rows"):
        serve(model, jnp.ones((3, 2, D)), batch)


class InShards(Sglang):
    """`Sglang` inside a `jax.shard_map`, as it is."""

    def experts(self, hidden_states, topk_weights, *, topk_ids):
        mesh, whole = jax.make_mesh((1,), ("expert",)), jax.sharding.PartitionSpec()

        def local(x, wi, topk_ids):
            _, token, counts = sort_pairs(topk_ids)
            return jax.lax.ragged_dot(x.reshape(-1, D)[token], wi, counts)

        return jax.shard_map(local, mesh=mesh, in_specs=(whole,) * 3, out_specs=whole)(
            hidden_states, self.wi_0[...], topk_ids
        )


class OneAfterAnother(Tunix):
    """`lax.scan` over experts."""

    def __call__(self, x):
        return jax.lax.scan(lambda x, w: (x + (x @ w.T) @ w, None), x, self.down_proj[...])[0]


class Summed(MaxText):
    """The weighted sum over experts within the product."""

    def __call__(self, inputs):
        return jnp.einsum("BSEH,EHM->BSM", jnp.ones((*inputs.shape[:2], E, F)), self.wo[...])


@pytest.mark.parametrize(
    ("cls", "name"),
    [(InShards, "wi_0: 'shard_map'"), (OneAfterAnother, "down_proj: 'scan'"), (Summed, "wo: 'dot_general'")],
)
def test_products_that_show_no_experts_are_refused_by_name(cls, name):
    jlora.register_layer(cls, SPECS[cls.__base__])
    manager = make_manager(model := Model(cls))
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=rf"mlp\.{name}"):
        serve(model, jnp.ones((3, 2, D)), batch)

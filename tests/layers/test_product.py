"""Layers whose spec gives their product: on a mesh, LoRA of a row-parallel kernel adds no reduction."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jlora
from tests.oracle import merged_weight

RANK = 4


class Rows(nnx.Module):
    """`x @ w + bias` with a call of its own, which jlora cannot follow unless its spec gives the product."""

    def __init__(self, equation, shape, out, rngs):
        self.equation = equation
        self.w = nnx.Param(jax.random.normal(rngs.params(), shape))
        self.bias = nnx.Param(jax.random.normal(rngs.params(), out))

    def __call__(self, x):
        y = jnp.einsum(self.equation, x, self.w[...])
        return y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - self.bias.ndim)))


class Model(nnx.Module):
    def __init__(self, *args):
        self.proj = Rows(*args, nnx.Rngs(0))

    def __call__(self, x):
        return self.proj(x)


def describe(given):
    def spec(layer):
        product = (lambda x, w: jnp.einsum(layer.equation, x, w)) if given else None
        if layer.w.ndim == 2:
            return jlora.LinearSpec(*layer.w.shape, param="w", product=product)
        return jlora.einsum_spec(layer.equation, layer.w.shape, param="w", product=product)

    return spec


CASES = {
    "linear": ("td,dn->tn", (8, 6), (6,), ("model", None)),
    "heads_last": ("tnh,dnh->td", (6, 4, 2), (6,), (None, "model", None)),
}


@pytest.mark.parametrize(("case", "given"), [("linear", True), ("heads_last", True), ("heads_last", False)])
def test_given_product_shares_one_reduction(case, given):
    equation, shape, out, split = CASES[case]
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    jlora.register_layer(Rows, describe(given))
    model = Model(equation, shape, out)
    kernel = np.array(model.proj.w[...])
    model.proj.w[...] = jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*split)))
    model.proj.bias[...] = jax.device_put(model.proj.bias[...], NamedSharding(mesh, PartitionSpec()))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=RANK))
    rng = np.random.default_rng(0)
    flat = kernel.transpose(1, 2, 0).reshape(8, 6) if case == "heads_last" else kernel.reshape(8, 6)
    a, b = rng.normal(size=(RANK, 8)).astype("float32"), rng.normal(size=(6, RANK)).astype("float32")
    manager.add_adapter(jlora.Adapter.from_arrays("a", {"proj": (a, b)}, alpha=2 * RANK))
    x = rng.normal(size=(5, 8)).astype("float32")
    given_x = jnp.asarray(x.reshape(5, *([4, 2] if len(shape) == 3 else [8])))

    @jax.jit
    def step(slots, rest, x, batch):
        with jlora.use(batch):
            return nnx.merge(graph, slots, rest)(x)

    graph, _, rest = nnx.split(model, jlora.SlotParam, ...)
    with jax.set_mesh(mesh), manager.prepare(["a", None], [3, 2]) as batch:
        args = manager.slots, rest, given_x, batch
        text = step.lower(*args).compile().as_text()
        reduced = [value for values in re.findall(r" all-reduce\(([^)]*)\)", text) for value in values.split(",")]
        got = np.asarray(step(*args))
    weights = np.stack([merged_weight(flat.T, a, b, 2.0).T, flat])[[0, 0, 0, 1, 1]]
    want = np.einsum("tk,tkn->tn", x, weights) + np.asarray(model.proj.bias[...])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    assert len(reduced) == (1 if given else 2)


def test_product_without_kernel_is_refused():
    with pytest.raises(jlora.LoRAUsageError, match="param is None"):
        jlora.LinearSpec(4, 4, param=None, product=jnp.dot)

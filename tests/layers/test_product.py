"""Layers whose spec gives their product: on a mesh, LoRA of a row-parallel kernel adds no reduction."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import Target, assert_close, expected_rows, make_adapter, make_manager, merge, normal, serve

NAMES = ["one", None, "one"]


class Rows(nnx.Module):
    """`x @ w + bias` with a call of its own, which jlora cannot follow unless its spec gives the product."""

    def __init__(self, equation, *shape):
        self.equation = equation
        self.w, self.bias = nnx.Param(jnp.asarray(normal(*shape))), nnx.Param(jnp.asarray(normal(6)))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...]) + self.bias[...][None, None]


class Model(nnx.Module):
    def __init__(self, *args):
        self.proj = Rows(*args)

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
    "linear": (("bld,dn->bln", 8, 6), P("model", None), np.transpose),
    "heads_last": (("blnh,dnh->bld", 6, 4, 2), P(None, "model", None), lambda delta: delta),
}


@pytest.mark.parametrize(("case", "given"), [("linear", True), ("heads_last", True), ("heads_last", False)])
def test_given_product_shares_one_reduction(registered, case, given):
    args, split, into = CASES[case]
    jlora.register_layer(Rows, describe(given))
    model, targets, x = Model(*args), [Target("proj", 8, 6, "proj.w", into)], normal(3, 2, 8)
    x = x.reshape(3, 2, 4, 2) if case == "heads_last" else x
    adapter = make_adapter("one", targets, 4)
    twins = {"one": merge(model, targets, adapter), None: nnx.clone(model)}
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    for param, spec in ((model.proj.w, split), (model.proj.bias, P())):
        param[...] = jax.device_put(param[...], NamedSharding(mesh, spec))
    manager = make_manager(model, [adapter])
    with jax.set_mesh(mesh), manager.prepare(NAMES) as batch:
        text = serve.lower(model, x, batch).compile().as_text()
        found = serve(model, x, batch)
    assert_close(found, expected_rows(twins, NAMES, x))
    reduced = [value for values in re.findall(r" all-reduce\(([^)]*)\)", text) for value in values.split(",")]
    assert len(reduced) == (1 if given else 2)


def test_product_without_kernel_is_refused():
    with pytest.raises(jlora.LoRAUsageError, match="param is None"):
        jlora.LinearSpec(4, 4, param=None, product=jnp.dot)

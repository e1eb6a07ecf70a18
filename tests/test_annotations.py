"""Annotations are checked while tests run, shapes included."""

import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

import jlora
from jlora import ops


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: jlora.Adapter.from_pretrained(7), "path"),
        (lambda: jlora.LinearSpec("3", 4), "in_features"),
        (lambda: jlora.LoRAManager(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), None), "config"),
        (lambda: ops.make_plan(jnp.zeros((2, 2), jnp.int32), num_groups=1), "group_ids"),
    ],
    ids=["adapters", "layers", "manager", "ops"],
)
def test_a_wrong_shape_or_kind_is_caught_in_each_package(call, argument):
    with pytest.raises(jaxtyping.TypeCheckError, match=f"'{argument}'"):
        call()

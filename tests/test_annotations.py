"""Annotations are checked while tests run, shapes included."""

import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

import jlora
from jlora import ops


def test_a_wrong_shape_or_kind_is_caught():
    with pytest.raises(jaxtyping.TypeCheckError, match="group_ids"):
        ops.make_plan(jnp.zeros((2, 2), jnp.int32), num_groups=1)
    plan = ops.make_plan(jnp.zeros(3, jnp.int32), num_groups=1)
    with pytest.raises(jaxtyping.TypeCheckError, match="'b'"):
        ops.add_lora(jnp.zeros((3, 6)), jnp.zeros((3, 5)), jnp.zeros((1, 1, 4, 5)), jnp.zeros((1, 3, 6)), plan)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: jlora.Adapter.from_pretrained(7), "path"),
        (lambda: jlora.LinearSpec("3", 4), "in_features"),
        (lambda: jlora.LoRAManager(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), None), "config"),
    ],
    ids=["adapters", "layers", "manager"],
)
def test_no_package_is_left_out(call, argument):
    with pytest.raises(jaxtyping.TypeCheckError, match=f"'{argument}'"):
        call()

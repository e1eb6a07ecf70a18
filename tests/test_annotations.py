"""Annotations are checked while tests run, shapes included, except for plans that JAX transforms."""

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import pytest
from flax import nnx

import jlora
from jlora import ops
from jlora.errors import LoRAError


def test_a_wrong_shape_or_kind_is_caught():
    with pytest.raises(jaxtyping.TypeCheckError, match="group_ids"):
        ops.make_plan(jnp.zeros((2, 2), jnp.int32), num_groups=1)
    plan = ops.make_plan(jnp.zeros(3, jnp.int32), num_groups=1)
    a, b = jnp.zeros((1, 1, 4, 5)), jnp.zeros((1, 4, 6))
    with pytest.raises(jaxtyping.TypeCheckError, match="base"):
        ops.add_lora([[0.0]], jnp.zeros((3, 5)), a, b, plan)
    with pytest.raises(jaxtyping.TypeCheckError, match="'b'"):
        ops.add_lora(jnp.zeros((3, 6)), jnp.zeros((3, 5)), a, jnp.zeros((1, 3, 6)), plan)
    with pytest.raises(jaxtyping.TypeCheckError, match="tile_start"):
        ops.Plan(*[jnp.zeros(3, jnp.int32)] * 3, *[jnp.zeros(2, jnp.int32)] * 1, *[jnp.zeros(3, jnp.int32)] * 2,
                 jnp.zeros(1, jnp.int32), 1, 1)  # fmt: skip


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


@pytest.mark.usefixtures("unchecked_calls")
def test_they_can_be_put_aside():
    with pytest.raises(LoRAError, match="vector of integers"):
        ops.make_plan(jnp.zeros((2, 2), jnp.int32), num_groups=1)


def test_a_plan_is_a_tree_of_anything():
    plan = ops.make_plan(jnp.zeros(3, jnp.int32), num_groups=2)
    shapes = jax.tree.map(lambda leaf: leaf.shape, plan)
    assert (shapes.row_order, shapes.num_groups) == ((3,), 2)
    chex.assert_shape(jax.eval_shape(lambda p: p, plan).row_order, (3,))
    stacked = jax.vmap(lambda ids: ops.make_plan(ids, num_groups=2))(jnp.zeros((4, 3), jnp.int32))
    chex.assert_shape(stacked.row_order, (4, 3))
    assert jax.jit(lambda p: p)(plan).tile_m == plan.tile_m
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(plan)[0]]
    assert keys[:2] == [".row_order", ".row_slot"]
    assert len(keys) == 7

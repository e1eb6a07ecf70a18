"""Which kernels search factors for NaN: those of a manager that accepts it, and those of a step of training."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jlora
from tests.pallas.lowering import lowered_text


def step_text(*, allow_nonfinite, trains):
    """Return the lowered text of a step for TPUs, or of the gradient of its slots."""
    model = nnx.Sequential(nnx.Linear(256, 128, rngs=nnx.Rngs(0)))
    options = {"backend": "mosaic_tpu", "allow_nonfinite": allow_nonfinite}
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=4, max_lora_rank=16, **options))
    graph, slots, ranks, rest = nnx.split(
        model, nnx.All(jlora.SlotParam, nnx.Not(jlora.SlotRanks)), jlora.SlotRanks, ...
    )

    def step(slots, ranks, rest, x, batch):
        with jlora.use(batch):
            return nnx.merge(graph, slots, ranks, rest)(x).sum()

    with manager.prepare([None] * 16) as batch:
        given = slots, ranks, rest, jnp.zeros((16, 256)), batch
        return lowered_text(jax.grad(step) if trains else step, given, "tpu")


@pytest.mark.parametrize("trains", [False, True])
def test_factors_are_searched_unless_the_manager_refuses_nan(trains):
    refuses, accepts = (step_text(allow_nonfinite=value, trains=trains) for value in (False, True))
    assert refuses.count("tpu_custom_call") == accepts.count("tpu_custom_call") > 0
    if trains:
        assert refuses == accepts
    else:
        assert len(refuses) < 0.95 * len(accepts)

"""Dispatch, and the derivatives of the functions against float64."""

import re
import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from jlora.errors import LoRAError
from jlora.pallas import api
from tests.pallas.lowering import for_gpu, lowered_text
from tests.pallas.scales import with_scales
from tests.pallas.test_xla import problem


def lowered(backend, platform, dtype=jnp.bfloat16, rank=8):
    base, x, a, b, ids, ranks = problem(0, 16, 128, [128], rank, 4, dtype=dtype)

    def run(base, x, a, b, ids, ranks):
        plan = api.make_plan(ids, num_groups=4, tile_m=16)
        return api.add_lora(base, x, a, b, plan, ranks=with_scales(ranks), backend=backend)

    return lowered_text(run, (base, x, a, b, ids, ranks), platform)


@pytest.mark.parametrize(
    ("backend", "platform", "kernel"),
    [
        ("auto", "cpu", None), ("xla", "cpu", None), ("xla", "cuda", None),
        ("triton", "cuda", "triton"), ("mosaic_tpu", "tpu", "tpu_custom_call"),
    ],
)  # fmt: skip
def test_the_program_shows_which_backend_runs(backend, platform, kernel):
    text = lowered(backend, platform)
    for name in ("triton", "tpu_custom_call"):
        assert (name in text) == (name == kernel)


@pytest.mark.parametrize(
    ("where", "platform", "kernel"), [("gpu", "cuda", "triton"), ("tpu", "tpu", "tpu_custom_call")]
)
def test_auto_follows_the_platform(default_device, where, platform, kernel):
    default_device(platform=where)
    assert kernel in lowered("auto", platform)


def test_auto_falls_back_to_xla_and_a_named_backend_raises(default_device):
    default_device()
    assert "triton" not in lowered("auto", "cuda", rank=600)
    with pytest.raises(LoRAError, match=r"add_lora: backend 'triton' takes ranks up to 512, but R is 600"):
        lowered("triton", "cuda", rank=600)


def test_auto_logs_each_reason_and_shape_once(default_device, caplog):
    default_device()
    for rank in (601, 602, 601, 601):
        lowered("auto", "cuda", rank=rank)
    records = [record for record in caplog.records if record.name == "jlora"]
    assert len(records) == 2
    text = records[0].getMessage()
    for part in ("add_lora: backend 'auto' takes 'xla' for x bfloat16[16, 128]", "a bfloat16[4, 1, 601, 128]", "512"):
        assert part in text
    lowered("auto", "cuda", rank=16)
    assert len([record for record in caplog.records if record.name == "jlora"]) == 2


def test_unsupported_reason_names_a_gpu_that_is_too_old(default_device):
    default_device("Tesla T4")
    struct = jax.ShapeDtypeStruct
    args = [struct(s, jnp.float32) for s in ((64, 8), (64, 16), (2, 1, 8, 16), (2, 8, 8))]
    assert "compute capability 8.0 or newer, which tesla_t4 is not" in api.unsupported_reason(
        "triton", *args, slice_sizes=(8,)
    )


def test_ops_is_a_module_of_its_own():
    script = "import jlora.ops as o, jlora; assert jlora.ops is o; print(*sorted(o.__all__))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    names = ["Plan", "add_lora", "expand", "make_plan", "plan_experts", "shrink", "unsupported_reason"]
    assert run.stdout.split() == names, run.stderr


def test_a_named_backend_is_never_replaced():
    """On a CPU the GPU kernels cannot run: that is an error of the platform, not a reason to run something else."""
    with pytest.raises(Exception, match=r"(?i)gpu|cpu|interpret"):
        lowered("triton", "cpu")


@pytest.mark.usefixtures("unchecked_calls")
def test_unknown_backend():
    with pytest.raises(LoRAError, match="backend must be"):
        lowered("cuda", "cpu")


SAVE = jax.checkpoint_policies.save_only_these_names("lora_h")


@pytest.mark.parametrize(("policy", "shrinks"), [(None, 2), (SAVE, 1)])
def test_checkpoints_keep_h_or_compute_it_again(policy, shrinks):
    """The loss needs the value of the forward pass, and its gradient for a sum needs no expand again."""
    struct, groups = jax.ShapeDtypeStruct, 4
    shapes = (16, 128), (16, 128), (groups, 1, 8, 128), (groups, 8, 128)

    def run(ids, *operands):
        plan = api.make_plan(ids, num_groups=groups, tile_m=16)

        def loss(base, x, a, b):
            return api.add_lora(base, x, a, b, plan, backend="triton").sum()

        return jax.value_and_grad(jax.checkpoint(loss, policy=policy), argnums=(1, 2, 3))(*operands)

    args = struct((16,), jnp.int32), *(struct(shape, jnp.bfloat16) for shape in shapes)
    with for_gpu():
        text = jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = Counter(re.findall(r"call @(_\w+?)(?:_\d+)?\(", text))
    assert (calls["_shrink"], calls["_expand"]) == (shrinks, 1)

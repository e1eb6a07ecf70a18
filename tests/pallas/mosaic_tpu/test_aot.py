"""The TPU kernel through the compilers of real chips: a covering part of what `benchmarks/aot_tpu.py` does."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jlora
from benchmarks.aot_tpu import VMEM_MIB, compile_add_lora, compile_experts, experts_layers, good, operand_of
from benchmarks.moe_specs import MODELS, Experts
from benchmarks.specs import PROJECTIONS
from jlora import ops

# The figures are those of optimised programs.
pytestmark = pytest.mark.usefixtures("as_users_compile", "without_cache")
slow = pytest.mark.slow


def of_llama(name):
    return PROJECTIONS[name].k, PROJECTIONS[name].slices


# Every chip, projection and rank of Llama-3-8B occurs, and sizes of other models: chip, tokens, K, slices,
# rank, groups, dtype. `make test` compiles for one chip of the four.
MATRIX = [
    ("v5e", 1, *of_llama("qkv"), 8, 64, "bfloat16"),
    *(
        pytest.param(*case, marks=slow)
        for case in (
            ("v5e", 40, 2880, (2880, 2880), 32, 16, "bfloat16"),
            ("v5e", 2048, *of_llama("down"), 64, 64, "bfloat16"),
            ("v5p", 256, *of_llama("qkv"), 128, 64, "bfloat16"),
            ("v6e", 32, *of_llama("down"), 128, 64, "bfloat16"),
            ("tpu7x", 64, *of_llama("qkv"), 16, 64, "bfloat16"),
            ("v6e", 300, 11008, (4096,), 4, 16, "bfloat16"),
            ("tpu7x", 9, 14336, (4096,), 512, 8, "bfloat16"),
            ("tpu7x", 16, 4096, (32001,), 64, 8, "bfloat16"),  # a vocabulary, whose last columns are copied apart
            ("v5p", 33, 1408, (2048,), 24, 9, "float32"),
        )
    ),
]


def check(chip, facts):
    assert 0 < facts["vmem_bytes"] <= VMEM_MIB[chip] << 20
    assert facts["in_place"]
    assert facts["weights_in_place"]


@pytest.mark.parametrize(("chip", "tokens", "k", "slices", "rank", "groups", "dtype"), MATRIX)
def test_compiles(chip, tokens, k, slices, rank, groups, dtype):
    check(chip, compile_add_lora(chip, tokens, k, slices, rank, groups=groups, dtype=dtype))


def test_compiles_odd_sizes():
    """XLA gives arrays this small layouts of its own choice, so copies before the kernel are not its fault."""
    assert compile_add_lora("v5p", 300, 77, (45, 13), 5, groups=9, dtype="float32")["vmem_bytes"] < 4 << 20


@pytest.mark.parametrize(
    ("chip", "tokens", "k", "slices", "rank", "groups", "dtype"),
    [
        ("v5e", 64, 4096, (4096, 1024, 1024), 16, 64, "bfloat16"),
        pytest.param("v6e", 2048, 14336, (4096,), 64, 64, "bfloat16", marks=slow),
        pytest.param("tpu7x", 64, 4096, (14336, 14336), 128, 64, "bfloat16", marks=slow),
        pytest.param("tpu7x", 16, 4096, (32001,), 64, 8, "bfloat16", marks=slow),
        pytest.param("v5p", 33, 1408, (2048,), 24, 9, "float32", marks=slow),
    ],
)
def test_compiles_int8_and_scales_of_rows(chip, tokens, k, slices, rank, groups, dtype):
    options = {"groups": groups, "dtype": dtype, "int8": True, "row_scales": True}
    check(chip, compile_add_lora(chip, tokens, k, slices, rank, **options))


def test_compiles_rank_one():
    """A shard may hold one rank. XLA chooses its own layouts for factors this narrow."""
    facts = compile_add_lora("v5e", 64, 4096, (4096, 1024, 1024), 1, groups=8)
    assert facts["in_place"]
    assert 0 < facts["vmem_bytes"] < 8 << 20


@pytest.mark.slow
def test_compiles_gradients():
    """The shrink of the forward pass, one kernel for each slice of b, and one for a."""
    shapes = (512, 1024), (512, 4096), (8, 1, 16, 4096), (8, 16, 1024)
    operands = [operand_of("v5e", shape, "bfloat16") for shape in shapes]

    def run(dout, x, a, b, ids):
        plan = ops.make_plan(ids, num_groups=8, backend="mosaic_tpu")
        call = partial(ops.add_lora, dout, plan=plan, backend="mosaic_tpu")
        return jax.vjp(call, x, a, b)[1](dout)

    text = jax.jit(run).lower(*operands, operand_of("v5e", (512,), "int32")).compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 3


QWEN3, GPT_OSS = (MODELS[name] for name in ("qwen3-30b-a3b", "gpt-oss-20b"))
# Chip, model, tokens, rank: 64 slots of every expert. `benchmarks/aot_tpu.py --experts` has the rest.
EXPERTS = [pytest.param("v5e", QWEN3, 2048, 64, marks=pytest.mark.nightly), ("v5p", GPT_OSS, 64, 16)]


def experts_facts(chip, model, tokens, rank):
    layers = experts_layers(chip, model, rank)
    return {"chip": chip, "layers": layers} | compile_experts(chip, model, tokens, rank, layers=layers)


@slow
@pytest.mark.parametrize(("chip", "model", "tokens", "rank"), EXPERTS)
def test_compiles_experts_by_default(chip, model, tokens, rank, default_device):
    default_device("TPU", "tpu")
    facts = experts_facts(chip, model, tokens, rank)
    assert good(facts), facts
    # Temporary arrays have the size of the rows. With few rows they are smaller than the factors of the slots.
    rows_bytes = 2 * tokens * model.top_k * (3 * model.intermediate + model.hidden)
    assert facts["temp_bytes"] < 5 * rows_bytes + (32 << 20)


@slow
def test_compiles_experts_in_int8(default_device):
    default_device("TPU", "tpu")
    facts = {"chip": "tpu7x", "layers": 1} | compile_experts("tpu7x", QWEN3, 64, 16, layers=1, int8=True)
    assert good(facts), facts


@slow
@pytest.mark.nightly
@pytest.mark.xfail(
    strict=True,
    reason="K = 2880 is no multiple of 128 and E = 128 is: XLA lays the experts out innermost and copies them",
)
def test_as_many_experts_as_lanes_are_not_copied(default_device):
    default_device("TPU", "tpu")
    assert good(experts_facts("v5p", Experts("gpt-oss-120b", 2880, 2880, 128, 4), 64, 16))


OPTIONS = {"use_bias": False, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


def stack(layers):
    """Return layers of one size, so that all of them need the same schedule."""
    return nnx.Sequential(*[nnx.Linear(512, 512, **OPTIONS, rngs=nnx.Rngs(0)) for _ in range(layers)])


class Scanned(nnx.Module):
    """The same layers under `nnx.scan`."""

    def __init__(self, layers):
        self.layer = nnx.vmap(lambda rngs: nnx.Linear(512, 512, **OPTIONS, rngs=rngs))(nnx.Rngs(0).split(layers))

    def __call__(self, x):
        axes = nnx.StateAxes({jlora.SlotParam: 0, nnx.Param: 0, ...: None})
        run = nnx.scan(lambda layer, x: jax.nn.relu(layer(x)), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
        return run(self.layer, x)


def compiled_step(model):
    """Return the text of a step of 64 tokens, compiled for a v5e."""
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=8, max_lora_rank=16, backend="mosaic_tpu"))
    graph, state = nnx.split(model)

    def step(state, x, batch):
        with jlora.use(batch):
            return nnx.merge(graph, state)(x)

    with manager.prepare([None] * 64) as batch:
        given = state, jnp.zeros((64, 512), jnp.bfloat16), batch
        operands = jax.tree.map(lambda leaf: operand_of("v5e", leaf.shape, leaf.dtype), given)
        return jax.jit(step).lower(*operands).compile().as_text()


@slow
def test_schedule_is_made_once_a_step():
    """XLA merges the schedules of layers of one size. Reductions and running sums occur nowhere else in this step."""
    one, three = (Counter(re.findall(r"= \S+ ([\w-]+)\(", compiled_step(stack(layers)))) for layers in (1, 3))
    for name in ("reduce", "reduce-window"):
        assert one[name] == three[name] > 0
    assert three["custom-call"] > one["custom-call"]
    assert three["fusion"] - one["fusion"] <= 8  # product and scales of two layers


@slow
def test_schedule_is_made_before_a_loop_over_layers():
    loop, entry = compiled_step(Scanned(3)).split("\nENTRY")
    assert "tpu_custom_call" in loop
    assert "tpu_custom_call" not in entry
    for name in ("sort", "reduce-window"):
        assert f" {name}(" in entry
        assert f" {name}(" not in loop

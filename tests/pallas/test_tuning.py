"""`LoRAManager.tune` and `Survey.tune`: the shapes of a model, the refusals, and the tiles of the next step."""

import jax.numpy as jnp
import pytest
from flax import nnx

import jlora
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.tuning import tune
from jlora.layers.wrap.apply import survey
from jlora.models import Decoder, DecoderConfig, MoEConfig
from jlora.pallas.gpus import H200
from jlora.pallas.search import Task
from jlora.pallas.tables import Key, gpu_tiles, own_table, product_tiles, read_table
from tests.pallas.test_search import Costs

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
MIXTURE = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=24, layers=(False, True))
LORA = jlora.LoRAConfig(
    max_loras=3, max_lora_rank=8, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
)
DENSE = {(32, 128), (64, 32), (32, 96), (48, 32)}  # K, N


def shapes_of(config=CONFIG, dtype=jnp.bfloat16):
    return nnx.eval_shape(lambda: Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)))


def modules(model, lora=LORA):
    return survey(model, lora).modules


def keys(measure) -> set:
    return {(key.op, key.rows, key.k, key.n) for key in (task.key for task in measure.tasks)}


@pytest.fixture
def on_gpu(default_device):
    default_device("NVIDIA H200")


def test_each_shape_is_tuned_once_for_each_number_of_tokens(on_gpu):
    measure = Costs()
    path = tune(modules(shapes_of()), tokens=[64, 200], measure=measure)
    assert path == own_table("nvidia_h200")
    assert keys(measure) == {
        *(("add_lora", rows, *shape) for rows in (64, 256) for shape in DENSE),
        *(("linear_lora", 64, *shape) for shape in DENSE),
    }
    table = read_table(path)
    assert table.keys() == {task.key for task in measure.tasks}
    assert {key.rank for key in table} == {8}
    for task in measure.tasks:  # the tiles of the next trace
        choose = product_tiles if task.op == "linear_lora" else gpu_tiles
        assert choose(task.problem, H200) == table[task.key]


def test_slices_and_dtypes_are_those_of_the_layers(on_gpu):
    measure = Costs()
    tune(modules(shapes_of(dtype=jnp.float32)), tokens=[8], measure=measure)
    found = {task.shape.k: task.shape for task in measure.tasks if task.shape.n == 128}
    assert found[32].slices == (64, 32, 32)
    assert {task.op for task in measure.tasks} == {"add_lora"}  # one kernel computes 16-bit products only
    assert {(task.shape.dtype, task.shape.slot_dtype, task.shape.slots) for task in measure.tasks} == {
        ("float32", "float32", 3)
    }
    mixed = Costs()
    lora = jlora.LoRAConfig(max_loras=100, max_lora_rank=8, dtype="bfloat16", target_modules=["o_proj"])
    tune(modules(shapes_of(dtype=jnp.float32), lora), tokens=[8], measure=mixed, again=True)
    ((task),) = mixed.tasks
    assert (task.shape.dtype, task.shape.slot_dtype, task.shape.slots) == ("float32", "bfloat16", 64)


@pytest.mark.parametrize("option", [{"bitwise_base": True}, {"batch_invariant": True}])
def test_products_that_a_configuration_keeps_apart_are_not_tuned(on_gpu, option):
    lora = jlora.LoRAConfig(max_loras=3, max_lora_rank=8, target_modules=["o_proj"], **option)
    measure = Costs()
    tune(modules(shapes_of(), lora), tokens=[8], measure=measure)
    assert keys(measure) == {("add_lora", 8, 64, 32)}


def test_experts_have_a_row_for_each_of_a_tokens(on_gpu):
    config = DecoderConfig(**{**vars(CONFIG), "moe": MIXTURE})
    with pytest.raises(LoRAUsageError, match="pass experts_per_token"):
        tune(modules(shapes_of(config)), tokens=[8], measure=Costs())
    measure = Costs()
    tune(modules(shapes_of(config)), tokens=[8], experts_per_token=2, measure=measure)
    assert {key for key in keys(measure) if key[0] == "add_lora_experts"} == {
        ("add_lora_experts", 16, 32, 48), ("add_lora_experts", 16, 24, 32),
    }  # fmt: skip
    assert {task.shape.experts for task in measure.tasks} == {1, 4}


def test_manager_and_survey_find_what_was_tuned(on_gpu):
    """Neither of them measures, because the table has all entries of this model."""
    tune(modules(shapes_of()), tokens=[64, 8], measure=Costs())
    steps = []
    manager = jlora.LoRAManager(Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)), LORA)
    for tuner in (manager, jlora.Survey(shapes_of(), LORA)):
        assert tuner.tune(tokens=[64, 8], progress=steps.append) == own_table("nvidia_h200")
    assert steps == []


def test_progress_has_the_shape_and_both_times(on_gpu):
    steps = []
    lora = jlora.LoRAConfig(max_loras=3, max_lora_rank=8, target_modules=["o_proj"])
    tune(modules(shapes_of(), lora), tokens=[8], measure=Costs(), progress=steps.append)
    first, second = steps
    assert isinstance(first, jlora.TuneProgress)
    assert (first.done, first.total, first.op, first.rows, first.k, first.n, first.rank) == (
        1,
        2,
        "add_lora",
        8,
        64,
        32,
        8,
    )
    assert first.us <= first.before_us
    assert not first.together
    assert (second.done, second.op, second.together) == (2, "linear_lora", True)


@pytest.mark.parametrize(
    ("device", "options", "lora", "message"),
    [
        (
            ("cpu", "cpu"),
            {},
            {},
            "computations run on 'cpu' with XLA's path, which has no tiles; tiles are tuned on an NVI",
        ),
        (("TPU v5e", "tpu"), {}, {}, "computations run on 'tpu' with kernels whose tiles follow from the shapes"),
        (("Tesla T4", "gpu"), {}, {}, "needs an NVIDIA GPU of compute capability 8.0 or newer, which tesla_t4 is not"),
        (("NVIDIA H200", "gpu"), {}, {"backend": "xla"}, r"LoRAConfig\(backend='xla'\) chooses no tiles"),
        (("NVIDIA H200", "gpu"), {"tokens": []}, {}, r"tokens must be positive numbers of tokens of a step, got \[\]"),
        (("NVIDIA H200", "gpu"), {"tokens": [8, 0]}, {}, r"tokens must be positive .* got \[8, 0\]"),
        (("NVIDIA H200", "gpu"), {"seconds": 0}, {}, "seconds must be positive, got 0"),
    ],
)
def test_refusals_name_the_reason(default_device, unchecked_calls, device, options, lora, message):
    default_device(*device)
    lora = jlora.LoRAConfig(max_loras=1, max_lora_rank=8, target_modules=["o_proj"], **lora)
    with pytest.raises(LoRAUsageError, match=message):
        jlora.Survey(shapes_of(), lora).tune(**options)


def test_a_malformed_given_table_stops_the_search(on_gpu, tuned_folder):
    (tuned_folder / "nvidia_h200.json").write_text("[7]")
    with pytest.raises(LoRAError, match=r"nvidia_h200\.json: entry 0"):
        tune(modules(shapes_of()), tokens=[8], measure=Costs())
    assert (tuned_folder / "nvidia_h200.json").read_text() == "[7]"


def test_shards_have_a_part_of_the_features(on_gpu):
    """On a mesh, shapes are those of one device, and the layer's own product stays apart."""
    import jax

    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    model = nnx.eval_shape(lambda: Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), mesh=mesh))
    measure = Costs()
    tune(modules(model), tokens=[8], measure=measure)
    assert keys(measure) == {("add_lora", 8, *shape) for shape in ((32, 64), (32, 32), (32, 48), (24, 32))}
    qkv = next(task.shape for task in measure.tasks if task.shape.n == 64)
    assert qkv.slices == (32, 16, 16)
    assert Key("add_lora", "bfloat16", 8, 32, 64, 8) == Task("add_lora", qkv, 8).key

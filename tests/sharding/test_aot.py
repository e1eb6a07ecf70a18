"""Steps on meshes of TPUs, by the compilers of real chips: a part of `benchmarks/aot.py`, and small shapes."""

import pytest

from benchmarks import aot
from jlora.models import DecoderConfig
from jlora.models.config import MoEConfig

pytestmark = [pytest.mark.mesh, pytest.mark.usefixtures("as_users_compile", "without_cache", "on_tpu")]
slow, nightly = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.nightly]


def small(layers: int, moe: MoEConfig | None = None) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        moe=moe,
    )


def small_moe(layers: int) -> DecoderConfig:
    return small(layers, MoEConfig(num_experts=8, experts_per_token=2, intermediate_size=512, layers=(True,) * layers))


@pytest.fixture
def on_tpu(monkeypatch):
    """Choose the backends of a TPU, and add small shapes to those of real models."""
    monkeypatch.setattr("jlora.pallas.gpus.platform", lambda: "tpu")
    monkeypatch.setitem(aot.SHAPES, "small", (small, 2, 8))
    monkeypatch.setitem(aot.SHAPES, "small-moe", (small_moe, 2, 8))


@pytest.mark.parametrize(
    ("chip", "model", "kind", "mesh", "step", "dispatch"),
    [
        ("v6e", "small", "decoder", {"tensor": 8}, "decode", "all_gather"),
        *(
            pytest.param(*case, marks=marks)
            for marks, *case in (
                (nightly, "v6e", "small-moe", "decoder", {"expert": 4, "tensor": 2}, "decode", "all_to_all"),
                (slow, "v6e", "small", "nnx.Linear", {"data": 2, "tensor": 4}, "prefill", "all_gather"),
                (nightly, "v5e", "llama-3-8b", "decoder", {"tensor": 16}, "decode", "all_gather"),
                (nightly, "v6e", "qwen3-30b-a3b", "decoder", {"expert": 8}, "decode", "all_to_all"),
            )
        ),
    ],
)
def test_no_collective_is_added(chip, model, kind, mesh, step, dispatch):
    # Small models have two layers, which shows collectives between them; one layer of a real model is enough.
    row = aot.compare(aot.Case(chip, model, kind, mesh, step, dispatch), layers=2 if model.startswith("small") else 1)
    assert row["base"], "a program without collectives shows nothing"
    assert row["more"] == row["fewer"] == {}, row["other"]
    check_memory(row)


@pytest.mark.parametrize(
    ("model", "kind", "mesh", "fully", "more"),
    [
        ("small", "opaque", {"tensor": 8}, False, {"all-reduce": 2}),
        *(
            pytest.param(*case, marks=slow)
            for case in (
                ("small", "decoder", {"tensor": 8}, True, {"all-gather": 4, "all-reduce": 4}),
                ("small", "opaque", {"tensor": 8}, True, {"all-gather": 4, "all-reduce": 2}),
            )
        ),
    ],
)
def test_added_collectives_are_of_rank_size(model, kind, mesh, fully, more):
    """Added collectives have the size of the rank, except for an opaque row-parallel layer with B split."""
    row = aot.compare(aot.Case("v6e", model, kind, mesh, "decode", fully=fully))
    assert row["more"] == more
    hidden, rank_size = 64 * 512, 64 * 2 * 3 * aot.RANK  # rows of two experts, three slices
    sizes = [int(said.split()[-1]) for said in row["other"]]
    assert all(size <= rank_size or (kind == "opaque" and fully and size == hidden) for size in sizes), row["other"]
    check_memory(row)


def check_memory(row):
    assert row["whole"] == (), "arrays of slots that should be split"
    assert row["slot_bytes_of_a_device"] == row["slot_bytes_by_rule"] < row["slot_bytes_of_one_device"]
    # The bytes of the program's arguments. Stamps and padding of small arrays add to them.
    assert row["slot_bytes_of_a_device"] <= row["argument_bytes_more"] < 1.01 * row["slot_bytes_of_a_device"] + 2**17
    assert row["kernels"] > 0
    assert row["good"]


def test_collectives_are_found_in_every_form():
    text = """
  %a = bf16[64,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%x), channel_id=1
  %b = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), channel_id=2
  %c = (f32[1,8]{1,0}, f32[4,8]{1,0}) all-gather-start(%x), channel_id=3
  %d = f32[4,8]{1,0} all-gather-done(%c)
  %e = f32[] all-reduce(%all-reduce.7), channel_id=1
  %f = f32[8] fusion(%all-reduce.7), kind=kLoop
  %g = f32[3,64,16]{1,0,2:T(4,128)} all-gather(%p.1), channel_id=1, frontend_attributes={chain_id="0"}
  %h = f32[3,64,16]{1,0,2:T(4,128)S(1)} all-gather(%p.2), channel_id=1, frontend_attributes={chain_id="0"}
  %i = f32[3,64,16]{1,0,2:T(4,128)} all-gather(%p.3), channel_id=1, frontend_attributes={chain_id="1"}
"""
    assert aot.collectives_of(text) == {
        ("all-reduce", "bf16", 64 * 4096): 1,
        ("all-reduce", "f32", 10): 1,
        ("all-gather", "f32", 32): 1,
        ("all-reduce", "f32", 1): 1,
        ("all-gather", "f32", 3 * 64 * 16): 2,
    }

"""Experts on meshes of virtual devices: both dispatches, parts of each device, and variables of wrappers."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jlora.models import Decoder, ModelError, from_pretrained
from tests.models import goldens
from tests.models.test_checkpoint import edit
from tests.models.test_decoder import EXPERTS, TINY
from tests.models.test_layouts import configure, fuse, pack
from tests.models.test_mesh import collectives, forward, in_chunks, label, make_mesh, numbers

pytestmark = pytest.mark.mesh

CASES = [
    ("mixtral-window", "all_gather", {"data": 2, "expert": 2, "tensor": 2}),
    ("gpt-oss-square", "all_to_all", {"expert": 2, "tensor": 2}),
    pytest.param("qwen3-moe-mlp-layer", "all_to_all", {"data": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param("qwen2-moe-shared", "all_to_all", {"expert": 4}, marks=pytest.mark.slow),
    pytest.param("gpt-oss-square", "all_gather", {"tensor": 4}, marks=pytest.mark.slow),
]


@pytest.mark.device
@pytest.mark.parametrize(("name", "dispatch", "axes"), CASES, ids=label)
def test_logits_equal_one_device(golden, name, dispatch, axes):
    one, many = golden(name), from_pretrained(goldens.FOLDER / name, mesh=make_mesh(axes), dispatch=dispatch)
    tokens = goldens.expected(name)["tokens"]
    tokens = np.concatenate([tokens[:, :7], tokens[:, 20:27]])
    got = forward(many, tokens)
    assert goldens.relative_error(got, forward(one, tokens)) < 1e-5
    spread = axes.get("data", 1) * (axes.get("expert", 1) if dispatch == "all_to_all" else 1)
    for array in (got, *jax.tree.leaves(many.init_cache(4, 12))):
        assert array.sharding.shard_shape(array.shape)[0] == 4 // spread
    # A step of one token for each of 3 sequences is shared out among no devices, and padded.
    chunks, _ = in_chunks(many, tokens[:3])
    assert goldens.relative_error(chunks, in_chunks(one, tokens[:3])[0]) < 1e-5


@pytest.fixture
def stored(tmp_path, rng):
    """Return a function from name and layout to a checkpoint folder with the experts in that layout."""

    def make(name, layout):
        folder = shutil.copytree(goldens.FOLDER / name, tmp_path / name)
        if layout == "fused":
            edit(folder, fuse)
        if layout == "mxfp4":
            configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
            edit(folder, lambda tensors: pack(tensors, rng) and None)
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "layout"), [("mixtral-window", "fused"), ("qwen2-moe-shared", "one by one"), ("gpt-oss-square", "mxfp4")]
)
def test_every_device_holds_and_reads_its_part(stored, counts, name, layout):
    folder, axes = stored(name, layout), {"data": 2, "expert": 2, "tensor": 2}
    whole = numbers(from_pretrained(folder))
    counts.clear()
    mesh = make_mesh(axes)
    model = from_pretrained(folder, mesh=mesh)
    found = {path: param for path, param in numbers(model).items() if ".experts." in path}
    assert len(found) == (8 if name.startswith("gpt") else 4)
    for path, param in found.items():
        parts = 2 if path.endswith("down_proj_bias") else 4  # of experts, and of the columns or rows of each
        value = param.get_value()
        assert np.prod(value.sharding.shard_shape(value.shape)) * parts == whole[path].get_value().size, path
    for tensor, times in counts.items():
        # 32 values share a scale, and both shards of 16 read it.
        copies = 2 if tensor.endswith(("down_proj_blocks", "down_proj_scales")) else 1
        np.testing.assert_array_equal(times, copies, err_msg=tensor)


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("dispatch", "axes", "want"),
    [
        ("all_gather", {"expert": 2, "tensor": 2}, {"all-reduce": 2 * 2 + 1}),
        ("all_to_all", {"data": 2, "expert": 2}, {"all-to-all": 2 * 3}),
    ],
    ids=label,
)
def test_collectives(golden, dispatch, axes, want):
    """A block of experts has one reduction, or three exchanges: tokens, their weights, and results."""
    model = from_pretrained(goldens.FOLDER / "mixtral-window", mesh=make_mesh(axes), dispatch=dispatch)
    tokens = np.zeros((4, 6), np.int32)
    assert collectives(forward.lower(model, tokens).compile()) == want


@pytest.mark.parametrize(
    ("axes", "fields", "message"),
    [
        ({"expert": 2}, {}, r"moe.num_experts \(5\) must be a multiple of mesh axis 'expert', which has 2 shards"),
        ({"tensor": 4}, {}, r"moe.intermediate_size \(10\) must be a multiple of mesh axis 'tensor', which has 4"),
        ({"expert": 1}, {"dispatch": "broadcast"}, "dispatch must be one of .* got 'broadcast'"),
    ],
)
def test_meshes_and_dispatches_that_do_not_fit_are_refused(axes, fields, message):
    with pytest.raises(ModelError, match=message):
        Decoder(dataclasses.replace(TINY, moe=EXPERTS), rngs=nnx.Rngs(0), mesh=make_mesh(axes), **fields)

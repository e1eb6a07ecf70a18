"""The decoder on meshes of virtual devices: values, layouts, reads of files, and collectives."""

import collections
import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jlora.models import Decoder, DecoderConfig, ModelError, from_pretrained, generate
from tests.layers.mesh_models import some_devices
from tests.models import checkpoints, goldens
from tests.two_processes import run_two

pytestmark = pytest.mark.mesh

PLACES = [
    ("llama", {"data": 2, "tensor": 2}),
    ("mistral", {"tensor": 8}),
    ("gemma3", {"tensor": 4}),
    pytest.param("qwen3-tied", {"tensor": 4}, marks=pytest.mark.slow),
    pytest.param("mistral", {"data": 2, "expert": 2}, marks=pytest.mark.slow),
    pytest.param("llama", {"tensor": 1}, marks=pytest.mark.slow),
]
SPLIT = ("kernel", "embedding", "qkv_proj.bias", "gate_up_proj.bias")  # over "tensor"
TINY = DecoderConfig(**checkpoints.SIZES)
TOKENS = np.random.default_rng(0).integers(0, 64, (4, 7)).astype(np.int32)


def make_mesh(axes):
    devices = some_devices(int(np.prod(list(axes.values()))))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


def label(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a function from a name to the folder, its tensors, and the model on one device."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}

    def get(name):
        if name not in made:
            tensors = checkpoints.write(root / name, checkpoints.DENSE[name])
            made[name] = root / name, tensors, from_pretrained(root / name)
        return made[name]

    return get


@jax.jit
def forward(model, tokens):
    return model(tokens)


@jax.jit
def extend(model, *args):
    return model.extend(*args)


def in_chunks(model, tokens):
    """Return the logits after each chunk of 4, 1, 1, ... tokens through the cache, and the cache."""
    cache, found, start = model.init_cache(len(tokens), 12), [], 0
    for size in (4, 1, 1):
        positions = np.tile(np.arange(start, start + size), (len(tokens), 1))
        chunk = tokens[:, start : start + size]
        logits, cache = extend(model, chunk, positions, cache, np.full(len(tokens), size - 1))
        found.append(np.asarray(logits))
        start += size
    return np.stack(found), cache


@pytest.mark.device
@pytest.mark.parametrize(("name", "axes"), PLACES, ids=label)
def test_logits_equal_one_device(folders, name, axes):
    folder, _, one = folders(name)
    many = from_pretrained(folder, mesh=make_mesh(axes))
    want = forward(one, TOKENS)
    got = forward(many, TOKENS)
    assert got.shape == (*TOKENS.shape, one.config.vocab_size)
    assert got.sharding.shard_shape(got.shape)[0] == 4 // axes.get("data", 1)
    assert goldens.relative_error(got, want) < 1e-5
    for path, param in numbers(many).items():
        value = param.get_value()
        shards = axes.get("tensor", 1) if path.endswith(SPLIT) else 1
        assert np.prod(value.sharding.shard_shape(value.shape)) * shards == value.size, path
    chunks, cache = in_chunks(many, TOKENS)
    assert goldens.relative_error(chunks, in_chunks(one, TOKENS)[0]) < 1e-5
    for array in jax.tree.leaves([cache, many.init_cache(4, 12)]):
        sequences, _, heads, _ = array.sharding.shard_shape(array.shape)
        assert sequences == 4 // axes.get("data", 1)
        assert heads == max(1, one.config.num_key_value_heads // axes.get("tensor", 1))


@pytest.mark.device
def test_answers_equal_one_device(folders):
    folder, _, one = folders("qwen3-tied")
    many = from_pretrained(folder, mesh=make_mesh({"data": 2, "tensor": 2}))
    prompts = [row[:n].tolist() for row, n in zip(TOKENS, (3, 7, 1, 5), strict=True)]
    options = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 20}
    assert generate(many, prompts, **options) == generate(one, prompts, **options)


def numbers(model):
    return {".".join(map(str, path)): param for path, param in nnx.to_flat_state(nnx.state(model))}


def collectives(compiled):
    """Count the collectives of a program by kind."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    return collections.Counter(re.findall(rf"= [^=\n]*? ({kinds})(?:-start)?\(", compiled.as_text()))


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("fields", "axes", "more"),
    [
        ({"num_key_value_heads": 2, "vocab_size": 61, "tie_word_embeddings": True}, {"tensor": 4}, {"all-gather": 1}),
        ({"sinks": True, "qk_norm": True, "sliding_windows": (3, None)}, {"data": 2, "tensor": 2}, {}),
    ],
    ids=["copies and padding", "gpt-oss"],
)
def test_two_reductions_a_layer(fields, axes, more):
    """Each layer has two reductions, and the lookup one. A split vocabulary is gathered before its padding is cut."""
    model = Decoder(dataclasses.replace(TINY, **fields), rngs=nnx.Rngs(0), mesh=make_mesh(axes))
    want = collections.Counter({"all-reduce": 2 * 2 + 1} | more)
    assert collectives(forward.lower(model, TOKENS).compile()) == want
    positions = np.tile(np.arange(7), (4, 1))
    cached = extend.lower(model, TOKENS, positions, model.init_cache(4, 12), np.full(4, 6)).compile()
    assert collectives(cached) == want


@pytest.mark.parametrize(
    ("name", "axes", "copies"),
    [("mistral", None, 1), ("mistral", {"expert": 2, "tensor": 4}, 1), ("qwen3-tied", {"tensor": 8}, 4)],
)
def test_each_byte_is_read_once(folders, counts, name, axes, copies):
    """Key heads are read once for each shard that holds a copy."""
    folder, tensors, _ = folders(name)
    counts.clear()
    from_pretrained(folder, mesh=axes and make_mesh(axes))
    assert counts.keys() == tensors.keys()
    for tensor, times in counts.items():
        want = copies if ".k_proj" in tensor or ".v_proj" in tensor else 1
        np.testing.assert_array_equal(times, want, err_msg=tensor)


@pytest.mark.slow
def test_two_processes(folders, tmp_path):
    """Two processes of four devices give the answers of one device, and each reads the parts of its own devices."""
    folder, tensors, one = folders("mistral")
    results = [tmp_path / f"{i}.npz" for i in range(2)]
    run_two("tests.models.mesh_process", lambda i: (folder, results[i]), timeout=200)
    prompts = TOKENS.tolist()
    answers = generate(one, prompts, max_new_tokens=6)
    sampled = generate(one, prompts, max_new_tokens=6, temperature=1.0, top_k=20)
    found = [np.load(result) for result in results]
    for mine in found:
        assert goldens.relative_error(mine["logits"], forward(one, TOKENS)) < 1e-5
        assert mine["answers"].tolist() == answers
        assert mine["sampled"].tolist() == sampled
        assert "the model lies on devices of several" in mine["refusal"].item()
    for name in tensors:
        mine, theirs = (times[name] for times in found)
        copies = 2 if "norm" in name or ".k_proj" in name or ".v_proj" in name else 1  # of 4 key heads on 8 devices
        np.testing.assert_array_equal(mine + theirs, copies, err_msg=name)
        assert (mine * theirs).any() == ("norm" in name), name  # which is on every device


@pytest.mark.parametrize(
    ("mesh", "fields", "message"),
    [
        (object(), {}, "mesh must be a jax.sharding.Mesh or None, got object"),
        ({"model": 2}, {}, "mesh has an axis 'model'; the decoder knows"),
        ({"tensor": 3}, {}, r"num_attention_heads \(8\) must be a multiple of mesh axis 'tensor', which has 3 shards"),
        ({"tensor": 4}, {"intermediate_size": 42}, r"intermediate_size \(42\) must be .* 'tensor', which has 4 shards"),
        (
            {"tensor": 4},
            {"num_attention_heads": 12, "num_key_value_heads": 6},
            r"num_key_value_heads \(6\) must be a multiple or a divisor of mesh axis 'tensor', which has 4 shards",
        ),
    ],
)
def test_meshes_that_do_not_fit(mesh, fields, message):
    mesh = make_mesh(mesh) if isinstance(mesh, dict) else mesh
    with pytest.raises(ModelError, match=message):
        Decoder(dataclasses.replace(TINY, **fields), rngs=nnx.Rngs(0), mesh=mesh)


def test_explicit_axes_are_refused(folders):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ModelError, match="mesh axis 'tensor' is Explicit"):
        from_pretrained(folders("llama")[0], mesh=mesh)

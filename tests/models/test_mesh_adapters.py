"""Adapters on meshes of the decoder, compared with one device and with weights merged into a checkpoint."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import jlora
from jlora.adapters import ModuleLoRA
from jlora.models import from_pretrained, generate
from tests.layers.merging import serve
from tests.models import checkpoints, goldens
from tests.models.test_mesh import forward, make_mesh
from tests.parity import expert_files

pytestmark = pytest.mark.mesh

TOLERANCE = 1e-4  # of the largest logit
slow = pytest.mark.slow


def close(found, expected, what):
    assert goldens.relative_error(found, expected) < TOLERANCE, what


# --- Vocabularies that the shards do not divide -----------------------------------------------------------------------

VOCABULARIES = [
    (151, 2, True),
    (50_257, 4, False),
    pytest.param(32_001, 8, True, marks=slow),
    pytest.param(151, 8, False, marks=slow),
]
HIDDEN, SCALING = 16, 0.5


def of_vocabulary(vocab, rank, tables):
    """Return an adapter of some of the tables."""
    rng = np.random.default_rng(rank)
    modules = {}
    for name, kind in (("model.embed_tokens", "embedding"), ("lm_head", "linear")):
        k, n = (vocab, HIDDEN) if kind == "embedding" else (HIDDEN, vocab)
        if name in tables:
            a, b = rng.normal(size=(rank, k)) * 0.2, rng.normal(size=(n, rank))
            modules[name] = ModuleLoRA(
                a=a.astype(np.float32), b=b.astype(np.float32), kind=kind, alpha=SCALING * rank, scaling=SCALING
            )
    return jlora.Adapter(name=f"rank {rank}", modules=modules)


@pytest.mark.parametrize(("vocab", "shards", "tied"), VOCABULARIES)
def test_vocabularies_that_the_shards_do_not_divide(tmp_path, vocab, shards, tied):
    """A shard with padding at the end of its part of a table is one piece like the others."""
    fields = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": HIDDEN, "intermediate_size": 16,
        "num_hidden_layers": 1, "head_dim": 2,
    }  # fmt: skip
    tensors = checkpoints.write(tmp_path / "base", fields | {"tie_word_embeddings": tied})
    both = ("model.embed_tokens", "lm_head")
    adapters = [of_vocabulary(vocab, 3, both), of_vocabulary(vocab, 2, both[1:]), of_vocabulary(vocab, 1, both[:1])]
    names = [None, *(adapter.name for adapter in adapters)]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (4, 5)).astype(np.int32)
    tokens[:, 2], tokens[:, 3] = vocab - 1, -(-vocab // shards) * (shards - 1) - 1  # beside the padding, and a boundary
    prompts = tokens.tolist()

    want, answers = [], []
    for i, adapter in enumerate([None, *adapters]):
        merged = {"lm_head.weight": tensors["model.embed_tokens.weight"]} | tensors
        for name, module in adapter.modules.items() if adapter else ():
            delta = SCALING * module.b @ module.a
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + (delta.T if module.kind == "embedding" else delta)
        checkpoints.write(tmp_path / f"{i}", fields)
        save_file(
            {name: np.ascontiguousarray(array) for name, array in merged.items()}, tmp_path / f"{i}/model.safetensors"
        )
        one = from_pretrained(tmp_path / f"{i}")
        want.append(np.asarray(forward(one, tokens))[i])
        answers.append(generate(one, prompts, max_new_tokens=3)[i])

    model = from_pretrained(tmp_path / "base", mesh=make_mesh({"tensor": shards}))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=3, max_lora_rank=4))
    for adapter in adapters:
        manager.add_adapter(adapter)
    with manager.prepare(names) as batch:
        found = np.asarray(serve(model, tokens, batch))
        assert found.shape == (4, 5, vocab)
        for row, expected, name in zip(found, want, names, strict=True):
            close(row, expected, name)
        assert generate(model, prompts, batch=batch, max_new_tokens=3) == answers
    for adapter in adapters:
        again = manager.export_adapter(adapter.name)
        for name, module in adapter.modules.items():
            np.testing.assert_array_equal(again.modules[name].a, module.a)
            np.testing.assert_array_equal(again.modules[name].b, module.b)


# --- gpt-oss, whose gates and ups alternate in checkpoints ------------------------------------------------------------


def test_adapters_of_gpt_oss_equal_one_device(tmp_path):
    """Gates and ups alternate in its checkpoints, and a mesh orders the columns of its experts anew."""
    folder, shapes = goldens.FOLDER / "gpt-oss-square", expert_files.Shapes("gpt-oss", 32, 32)
    adapters = {"each": shapes.each("each", 4), "fused": shapes.fused("fused", 3)}
    paths = {name: adapter.save(tmp_path / name) for name, adapter in adapters.items()}
    tokens, new = goldens.expected("gpt-oss-square")["tokens"][[0, 0, 0], :8], shapes.each("new", 2).tensors

    def served(mesh):
        model = from_pretrained(folder, mesh=mesh)
        manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=16))
        for name, path in paths.items():
            manager.add_adapter(jlora.LoRARequest(name, path))
        found = []
        for _ in range(2):
            with manager.prepare([None, *paths]) as batch:
                found.append(np.asarray(serve(model, tokens, batch)))
            manager.update_adapter("fused", new)
        return found

    one, many = served(None), served(make_mesh({"expert": 2, "tensor": 2}))
    changes = [goldens.relative_error(row, one[0][0]) for row in (one[0][1], one[0][2])]
    changes.append(goldens.relative_error(one[1][2], one[0][2]))
    assert min(changes) > 0.02
    for found, want in zip(many, one, strict=True):
        close(found, want, "gpt-oss")

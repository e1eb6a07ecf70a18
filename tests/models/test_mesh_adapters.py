"""Adapters on meshes of the decoder, compared with one device and with weights merged into a checkpoint."""

import functools
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jlora
from jlora.adapters import ModuleLoRA
from jlora.models import from_pretrained, generate
from tests.models import checkpoints, goldens
from tests.models.test_mesh import forward, label, make_mesh
from tests.parity import expert_files

pytestmark = pytest.mark.mesh

TOLERANCE = 1e-4  # of the largest logit
slow = pytest.mark.slow


@jax.jit
def adapted(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


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
        found = np.asarray(adapted(model, tokens, batch))
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

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


class GptOss:
    """A checkpoint of gpt-oss, an adapter in every format, and the logits of each by weights merged."""

    def __init__(self, folder, inner):
        self.folder = folder
        golden = goldens.FOLDER / "gpt-oss-square"
        self.config = json.loads((golden / "config.json").read_text()) | {"intermediate_size": inner}
        self.tensors = load_file(golden / "model.safetensors")
        hidden, experts = self.config["hidden_size"], self.config["num_local_experts"]
        rng = np.random.default_rng(inner)
        for name in [name for name in self.tensors if ".experts." in name]:
            shape = {
                "gate_up_proj": (experts, hidden, 2 * inner),
                "gate_up_proj_bias": (experts, 2 * inner),
                "down_proj": (experts, inner, hidden),
                "down_proj_bias": (experts, hidden),
            }[name.rpartition(".")[2]]
            self.tensors[name] = (rng.normal(size=shape) * shape[1] ** -0.5).astype(np.float32)
        self.base = self.write("base", {})
        self.shapes = expert_files.Shapes("gpt-oss", hidden, inner)
        unsloth = self.shapes.fused("unsloth", 5, grouped=True)
        del unsloth.fields["lora_B_layout"]
        detail = {"lora_B_layout": "grouped_by_expert", "num_experts": experts}
        unsloth.fields["unsloth_fused_expert_lora"] = {"parameters": {"gate_up_proj": detail, "down_proj": detail}}
        self.adapters = self.shapes.adapters() | {"Unsloth's": unsloth, "Tinker's": self.tinker(4)}
        self.paths = {name: self.adapters[name].save(folder / f"adapter-{name}") for name in self.adapters}
        self.names = [None, *self.adapters]
        self.tokens = rng.integers(0, 64, (len(self.names), 8)).astype(np.int32)
        of_each = [self.truth(name) for name in self.names]
        self.of_base = of_each[0]
        self.truths = np.stack([logits[i] for i, logits in enumerate(of_each)])

    def tinker(self, rank):
        """Experts with three axes, and attention by the name `attn`."""
        adapter = self.shapes.stacked("tinker", rank, shared=True)
        for layer in (0, 1):
            for name in ATTENTION:
                n, k = self.tensors[f"model.layers.{layer}.self_attn.{name}.weight"].shape
                rng = np.random.default_rng(zlib.crc32(f"{layer} {name}".encode()))
                a, b = rng.normal(size=(rank, k)) * k**-0.5, rng.normal(size=(n, rank)) * 0.2
                adapter.put(f"model.layers.{layer}.attn.{name}", a, b)
                adapter.deltas[layer, 0, name] = expert_files.ALPHA / rank * b @ a
        return adapter

    def write(self, name, deltas):
        """A checkpoint with deltas [out, in] added, in the checkpoint's own order."""
        tensors = {key: array.copy() for key, array in self.tensors.items()}
        for (layer, e, part), delta in deltas.items():
            block = f"model.layers.{layer}"
            if part in ATTENTION:
                tensors[f"{block}.self_attn.{part}.weight"] += delta.astype(np.float32)
            elif part == "router":
                tensors[f"{block}.mlp.router.weight"] += delta.astype(np.float32)
            else:
                stored = tensors[f"{block}.mlp.experts.{'down' if part == 'down' else 'gate_up'}_proj"][e]
                columns = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}.get(part, slice(None))
                stored[:, columns] += delta.T.astype(np.float32)
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(tensors, folder / "model.safetensors")
        return folder

    @functools.cached_property
    def of_one_device(self):
        """The logits of each adapter in its row, served without a mesh."""
        return self.logits(self.served(), self.names)

    def truth(self, name):
        """Logits of all rows with the weights of one adapter merged."""
        deltas = {} if name is None else self.adapters[name].deltas
        return self.merged(f"merged {name}", deltas)

    def merged(self, name, deltas):
        return np.asarray(forward(from_pretrained(self.write(name, deltas)), self.tokens))

    def served(self, axes=None, names=None, **config):
        """A manager of the checkpoint on a mesh, with all adapters or some."""
        names = self.names[1:] if names is None else names
        model = from_pretrained(self.base, mesh=axes and make_mesh(axes))
        manager = jlora.LoRAManager(
            model, jlora.LoRAConfig(**{"max_loras": len(names), "max_lora_rank": 32, "max_cpu_loras": 20} | config)
        )
        for name in names:
            manager.add_adapter(jlora.LoRARequest(name, self.paths[name]))
        return manager

    def logits(self, manager, names):
        with manager.prepare(names) as batch:
            return np.asarray(adapted(manager.model, self.tokens, batch))


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """`gpt_oss(inner)` -> the checkpoint with experts of that size, and its adapters."""
    made = {}

    def get(inner):
        if inner not in made:
            made[inner] = GptOss(tmp_path_factory.mktemp(f"gpt-oss-{inner}"), inner)
        return made[inner]

    return get


@pytest.mark.parametrize(
    ("inner", "axes", "shared"),
    [(32, {"expert": 2, "tensor": 2}, 2), pytest.param(512, {"tensor": 4}, 0, marks=slow)],
    ids=label,
)
def test_every_format_of_gpt_oss(gpt_oss, inner, axes, shared):
    """Against merged weights, and against one device. `shared`: slots for adapters whose experts share a factor."""
    world = gpt_oss(inner)
    manager = world.served(
        axes, max_loras=len(world.names) + shared, expert_slots={"shared": shared} if shared else None
    )
    assert not [layer.path for layer in manager.layers() if ".experts" in layer.path and layer.reason]
    found = world.logits(manager, world.names)
    for i, name in enumerate(world.names):
        if name is not None:
            assert goldens.relative_error(world.truths[i], world.of_base[i]) > 0.02, (
                name
            )  # otherwise the comparison is empty
        close(found[i], world.truths[i], name)
        close(found[i], world.of_one_device[i], name)


def test_updates_of_gpt_oss(gpt_oss):
    """Of an adapter whose file has gate and up in one; the new weights come expert by expert."""
    world = gpt_oss(32)
    manager = world.served({"tensor": 2}, ["fused"])
    new = world.shapes.each("new", 4)
    rows = ["fused"] * len(world.names)
    world.logits(manager, rows)
    manager.update_adapter("fused", {name: jnp.asarray(array) for name, array in new.tensors.items()})
    close(world.logits(manager, rows), world.merged("updated", new.deltas), "fused")

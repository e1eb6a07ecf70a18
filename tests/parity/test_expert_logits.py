"""Adapters of experts in every format, in mixed batches, against transformers with the same weights merged.

PEFT 0.21 on transformers 5 is wrong on some 2D files, so the expected values are computed expert by expert. If PEFT can
write and run an adapter of experts (`target_parameters`), it is compared with PEFT itself.
"""

import copy
import functools
import zlib

import jax
import numpy as np
import peft
import pytest
import torch
import transformers

import jlora
import jlora.models
from tests.compiled import compiled_programs
from tests.models.families import build
from tests.parity import expert_files
from tests.parity.cases import VOCAB, logits

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4  # of the largest logit
LENGTH = 12


class World:
    def __init__(self, name, folder):
        model_type, fields = expert_files.MODELS[name]
        self.folder = folder
        self.theirs = build(torch, transformers, model_type, zlib.crc32(name.encode()) % 1000, **fields)
        self.theirs.save_pretrained(folder / "base")
        config = self.theirs.config
        inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        self.shapes = expert_files.Shapes(name, config.hidden_size, inner)
        self.adapters = self.shapes.adapters()
        self.tokens = np.random.default_rng(len(name)).integers(0, VOCAB, (4, LENGTH)).astype(np.int32)
        model = jlora.models.from_pretrained(folder / "base")
        sizes = jlora.LoRAConfig(max_loras=4, max_lora_rank=32, max_cpu_loras=16)
        self.manager = jlora.LoRAManager(model, sizes)

        @jax.jit
        def forward(model, tokens, batch):
            with jlora.use(batch):
                return model(tokens)

        self.forward = forward

    @functools.cache  # noqa: B019 - as long-lived as the module's fixture
    def truth(self, name):
        model = copy.deepcopy(self.theirs)
        if name is not None:
            expert_files.merge(torch, model, self.shapes, self.adapters[name])
        return logits(torch, model, self.tokens)

    def load(self, name):
        if name not in self.manager.list_adapters():
            path = self.adapters[name].save(self.folder / name.replace(" ", "-"))
            self.manager.add_adapter(jlora.LoRARequest(name, path))

    def serve(self, names):
        with self.manager.prepare(names) as batch:
            return np.asarray(self.forward(self.manager.model, self.tokens, batch))


@pytest.fixture(scope="module", params=["mixtral", "qwen3-moe", "gpt-oss"])
def world(request, tmp_path_factory):
    return World(request.param, tmp_path_factory.mktemp(request.param))


def assert_close(found, expected, what):
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE, (what, error)


def test_every_format_in_mixed_batches(world):
    names = [None, *world.adapters]
    base = world.truth(None)
    for i, name in enumerate(names):
        rows = [name, names[i - 1], None, names[i - 2]]
        for other in {*rows} - {None}:
            world.load(other)
            assert np.abs(world.truth(other) - base).max() > 0.02 * np.abs(base).max()  # so the comparison may fail
        found = world.serve(rows)
        for row, other in enumerate(rows):
            assert_close(found[row], world.truth(other)[row], (rows, row))
    assert compiled_programs(world.forward) == 1
    assert world.manager.stats().compilations == 1
    world.load("fused")
    world.serve(["fused"] * 4)
    world.manager.export_adapter("fused").save_pretrained(world.folder / "again")  # in the 2D format
    world.manager.add_adapter(jlora.LoRARequest("again", str(world.folder / "again")))
    assert_close(world.serve(["again", None, "again", None])[0], world.truth("fused")[0], "again")


def test_adapters_of_peft_equal_its_logits(world):
    torch.manual_seed(3)
    targets = {"target_modules": ["q_proj", "v_proj"]}
    targets |= {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    config = peft.LoraConfig(r=4, lora_alpha=8, **targets, init_lora_weights=False, task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(copy.deepcopy(world.theirs), config).eval()
    theirs.save_pretrained(world.folder / "peft", save_embedding_layers=False)
    expected = logits(torch, theirs, world.tokens)
    assert np.abs(expected - world.truth(None)).max() > 0.02 * np.abs(expected).max()
    world.manager.add_adapter(jlora.LoRARequest("peft", str(world.folder / "peft")))
    found = world.serve([None, "peft", "peft", None])
    for row, name in enumerate((None, "peft", "peft", None)):
        assert_close(found[row], (world.truth(None) if name is None else expected)[row], row)


@pytest.mark.parametrize(("name", "part"), [("qwen3-moe", "gate_up"), ("gpt-oss-square", "down")])
def test_a_square_parameter_alone_is_refused(name, part, tmp_path):
    shapes = expert_files.Shapes(name, 32, {"gate_up": 16, "down": 32}[part])
    path = shapes.fused("alone", 2, parts=(part,)).save(tmp_path / "alone")
    model_type, fields = expert_files.MODELS[name]
    build(torch, transformers, model_type, 0, **fields).save_pretrained(tmp_path / "base")
    model = jlora.models.from_pretrained(tmp_path / "base")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=4))
    with pytest.raises(jlora.AdapterMismatchError, match="in and out are both 32"):
        manager.add_adapter(jlora.LoRARequest("alone", path))

"""Base, plain, scaled, mixed, activated and DoRA rows in one batch against PEFT, in one compiled forward."""

import copy
import functools

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import jlora
import jlora.models
from jlora import Mix, Scaled
from tests.compiled import compiled_programs
from tests.parity import cases

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)  # the matrices are tiny, and other workers want the cores

TOLERANCE = 1e-4  # of the largest logit
ROWS, LENGTH = 6, 14
INVOCATION = [5, 9]
ADAPTERS = {
    "first": {"r": 4, "lora_alpha": 12, "target_modules": cases.ALL},
    "second": {"r": 9, "lora_alpha": 5, "target_modules": cases.ATTENTION, "alpha_pattern": {"q_proj": 31}},
    "third": {"r": 2, "target_modules": ["up_proj", "down_proj", "lm_head"]},
    "activated": {"r": 6, "target_modules": cases.ALL, "alora_invocation_tokens": INVOCATION},
    "dora": {"r": 5, "lora_alpha": 7, "target_modules": cases.ALL, "use_dora": True},
    "dora of some": {"r": 3, "use_rslora": True, "target_modules": ["v_proj", "up_proj"], "use_dora": True},
}
ENTRIES = [
    None,
    "first",
    "second",
    "third",
    "activated",
    "dora",
    "dora of some",
    Scaled("first", 0.5),
    Scaled("third", -1.5),
    Scaled("activated", 2),
    Mix({"first": 0.7, "second": 0.3}),
    Mix({"third": 1.5, "first": -0.5, "second": 0.25}),
]


class World:
    """One base model in both frameworks, its adapters, and PEFT's logits of each entry of a batch."""

    def __init__(self, name: str, folder):
        self.folder = folder
        self.theirs = cases.base_model(torch, transformers, name)
        self.theirs.save_pretrained(folder / "base")
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(10, cases.VOCAB, (ROWS, LENGTH)).astype(np.int32)
        for row, start in enumerate((0, 3, 7, 12)):  # the other rows never invoke
            self.tokens[row, start : start + 2] = INVOCATION
        self.tokens[1, 6:8] = INVOCATION  # the last occurrence counts
        for adapter, fields in ADAPTERS.items():
            model = cases.peft_model(torch, peft, self.theirs, adapter, fields)
            self._vary_magnitudes(model)
            cases.save_adapter(torch, model, adapter, folder)

    @staticmethod
    def _vary_magnitudes(model) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_magnitude_vector" in key:
                    parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))

    def path(self, adapter: str) -> str:
        return str(self.folder / adapter.replace(" ", "-"))

    @functools.cache  # noqa: B019 - as long-lived as the module's fixture
    def logits(self, entry) -> np.ndarray:
        """PEFT's float32 logits [ROWS, LENGTH, V] of every sequence with one entry."""
        return cases.logits(torch, self.peft_model(entry), self.tokens)

    def peft_model(self, entry):
        if entry is None:
            return self.theirs
        if isinstance(entry, str):
            return peft.PeftModel.from_pretrained(copy.deepcopy(self.theirs), self.path(entry)).eval()
        if isinstance(entry, Scaled):
            model = self.peft_model(entry.adapter)
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.scaling["default"] *= entry.scale
            return model
        (first, _), *others = entry.terms
        model = peft.PeftModel.from_pretrained(copy.deepcopy(self.theirs), self.path(first), adapter_name=first)
        for name, _ in others:
            model.load_adapter(self.path(name), adapter_name=name)
        names, weights = zip(*entry.terms, strict=True)
        model.add_weighted_adapter(list(names), list(weights), "mix", combination_type="cat")
        model.set_adapter("mix")
        return model.eval()

    def served(self, mesh=None, **config) -> jlora.LoRAManager:
        switches = {"max_adapters_per_sequence": 3, "activated": True, "dora": True}
        sizes = {"max_loras": len(ADAPTERS), "max_lora_rank": 16}
        model = jlora.models.from_pretrained(self.folder / "base", mesh=mesh)
        manager = jlora.LoRAManager(model, jlora.LoRAConfig(**sizes, **switches, **config))
        for adapter in ADAPTERS:
            manager.add_adapter(jlora.LoRARequest(adapter, self.path(adapter)))
        return manager


@pytest.fixture(scope="module", params=["llama-biases-llama3", "qwen2-tied", "qwen3"])
def world(request, tmp_path_factory) -> World:
    return World(request.param, tmp_path_factory.mktemp(request.param))


@jax.jit
def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def first_rows(world, entries, tokens):
    """Return the first active row of each sequence."""
    invocation = {"activated": INVOCATION}
    names = [entry.adapter if isinstance(entry, Scaled) else entry for entry in entries]
    return [
        jlora.active_from(row, invocation.get(name, []) if isinstance(name, str) else [])
        for name, row in zip(names, tokens, strict=True)
    ]


def assert_close(got, want, what):
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), what


def check_random_batches(world, manager, count):
    rng = np.random.default_rng(2)
    served, before = set(), compiled_programs(forward)
    with manager.prepare([None] * ROWS, active_from=[0] * ROWS, length=LENGTH) as batch:
        base = np.asarray(forward(manager.model, world.tokens, batch))
    for step in range(count):
        entries = [ENTRIES[i] for i in rng.integers(0, len(ENTRIES), ROWS)]
        first = first_rows(world, entries, world.tokens)
        with manager.prepare(entries, active_from=first, length=LENGTH) as batch:
            got = np.asarray(forward(manager.model, world.tokens, batch))
        for i, entry in enumerate(entries):
            assert_close(got[i], world.logits(entry)[i], (step, i, entry))
            if entry == "activated":
                start = min(LENGTH, first_rows(world, [entry], [world.tokens[i]])[0])
                assert (got[i, :start] == base[i, :start]).all()
        served.update(entries)
    assert served == set(ENTRIES)
    assert compiled_programs(forward) == before + 1
    assert manager.stats().compilations == 1


def test_random_batches_of_all_kinds(world):
    check_random_batches(world, world.served(), 200)


def test_every_entry_changes_the_logits(world):
    """No entry is so close to the base that the comparison above would pass without it."""
    base = world.logits(None)
    for entry in ENTRIES[1:]:
        rows = range(4) if "activated" in (entry, getattr(entry, "adapter", None)) else range(ROWS)
        for i in rows:
            assert np.abs(world.logits(entry)[i] - base[i]).max() > 100 * TOLERANCE * np.abs(base).max(), entry


def test_greedy_answers_of_activated_adapters(world):
    manager = world.served()
    prompts = [row[: 6 + i].tolist() for i, row in enumerate(world.tokens)]
    names = ["activated", "activated", "dora", "activated", None, "activated"]
    with manager.prepare(names) as batch:
        answers = jlora.models.generate(manager.model, prompts, batch=batch, max_new_tokens=6)
    for name, prompt, answer in zip(names, prompts, answers, strict=True):
        assert answer == cases.greedy(torch, world.peft_model(name), prompt, 6), (name, prompt)

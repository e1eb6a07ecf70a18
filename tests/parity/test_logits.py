"""Mixed batches against PEFT: base, plain, scaled, mixed, activated and DoRA rows, through files that PEFT wrote."""

import copy
import functools

import chex
import jax
import numpy as np
import peft
import pytest
import torch
import transformers

import jlora
import jlora.models
from jlora import Mix
from tests.compiled import compiled_programs
from tests.models.test_mesh import make_mesh
from tests.parity import cases

# transformers and PEFT warn of their own deprecations, and when they save more than LoRA.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

TOLERANCE = 1e-4  # of the largest logit
ROWS, LENGTH = 6, 16
INVOCATION = [5, 9]
OTHERS = {
    "activated": {"r": 6, "target_modules": cases.ALL, "alora_invocation_tokens": INVOCATION},
    "dora": {"r": 5, "lora_alpha": 7, "target_modules": cases.ALL, "use_dora": True},
    "dora of some": {"r": 3, "use_rslora": True, "target_modules": ["v_proj", "up_proj"], "use_dora": True},
}
ENTRIES = [
    *(None, *OTHERS, Mix({"rslora": 0.5}), Mix({"rank 1": -1.5}), Mix({"activated": 2})),
    Mix({"rank 1": 0.7, "alpha pattern": 0.3}),
    Mix({"head": 1.5, "rank 64 everywhere": -0.5, "alpha pattern": 0.25}),
]


class World:
    """One base model in both frameworks, its adapters in PEFT's folders, and PEFT's logits of each entry of a batch."""

    def __init__(self, name: str, folder):
        self.folder = folder
        self.theirs = cases.base_model(torch, transformers, name)
        self.theirs.save_pretrained(folder / "base")
        self.tokens = np.random.default_rng(0).integers(10, cases.VOCAB, (ROWS, LENGTH)).astype(np.int32)
        for row, start in enumerate((0, 3, 7, 14)):  # the other rows never invoke
            self.tokens[row, start : start + 2] = INVOCATION
        self.tokens[1, 6:8] = INVOCATION  # the last occurrence counts
        self.fields = cases.adapters_of(name) | OTHERS
        self.entries = [*ENTRIES, *cases.adapters_of(name)]

    @functools.cache  # noqa: B019 - as long-lived as the module's fixture
    def path(self, adapter: str) -> str:
        model = cases.peft_model(torch, peft, self.theirs, adapter, self.fields[adapter])
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_magnitude_vector" in key:
                    parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
        return str(cases.save_adapter(torch, model, adapter, self.folder))

    @functools.cache  # noqa: B019 - as long-lived as the fixture, too
    def logits(self, entry) -> np.ndarray:
        """Return PEFT's float32 logits [ROWS, LENGTH, V] of every sequence with one entry."""
        return cases.logits(torch, self.peft_model(entry), self.tokens)

    def peft_model(self, entry):
        if entry is None:
            return self.theirs
        if isinstance(entry, str):
            return peft.PeftModel.from_pretrained(copy.deepcopy(self.theirs), self.path(entry)).eval()
        (first, scale), *others = entry.terms
        if not others:
            model = self.peft_model(first)
            for module in model.modules():
                if isinstance(module, peft.tuners.lora.LoraLayer):
                    module.scaling["default"] *= scale
            return model
        model = peft.PeftModel.from_pretrained(copy.deepcopy(self.theirs), self.path(first), adapter_name=first)
        for name, _ in others:
            model.load_adapter(self.path(name), adapter_name=name)
        names, weights = zip(*entry.terms, strict=True)
        model.add_weighted_adapter(list(names), list(weights), "mix", combination_type="cat")
        model.set_adapter("mix")
        return model.eval()

    def request(self, adapter: str, **fields) -> jlora.LoRARequest:
        return jlora.LoRARequest(adapter, self.path(adapter), **fields)

    def served(self, mesh=None, **config) -> jlora.LoRAManager:
        sizes = {"max_loras": 6, "max_lora_rank": cases.MAX_RANK, "max_cpu_loras": 10, "max_adapters_per_sequence": 3}
        model = jlora.models.from_pretrained(self.folder / "base", mesh=mesh)
        return jlora.LoRAManager(model, jlora.LoRAConfig(**sizes | config, activated=True, variants=["dora"]))


@pytest.fixture(scope="module", params=cases.MODELS)
def world(request, tmp_path_factory) -> World:
    return World(request.param, tmp_path_factory.mktemp(request.param))


def forward_traced_once():
    """Return a jitted forward that may be traced for one shape, and once."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def forward(model, tokens, batch):
        with jlora.use(batch):
            return model(tokens)

    return forward


def assert_close(got, want, what):
    got = np.asarray(got)
    chex.assert_equal_shape([got, want])
    chex.assert_tree_all_finite(got)
    assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), what


def names_of(entry) -> list[str]:
    """Return the adapters of an entry of a batch."""
    terms = getattr(entry, "terms", ((getattr(entry, "adapter", entry), 1),))
    return [name for name, _ in terms if name is not None]


def first_row(entry, row) -> int:
    """Return the first active row of a sequence."""
    return jlora.active_from(row, INVOCATION if "activated" in names_of(entry) else [])


def check_random_batches(world, manager, count):
    """Every entry in turn, with random company of few adapters."""
    rng, forward = np.random.default_rng(2), forward_traced_once()
    with manager.prepare([None] * ROWS, active_from=[0] * ROWS, length=LENGTH) as batch:
        base = np.asarray(forward(manager.model, world.tokens, batch))
    for step in range(count):
        entries = [world.entries[step % len(world.entries)]]
        while len(entries) < ROWS:
            one = world.entries[rng.integers(len(world.entries))]
            names = {name for entry in (*entries, one) for name in names_of(entry)}
            entries.append(one if len(names) <= 5 else None)
        for name in dict.fromkeys(name for entry in entries for name in names_of(entry)):
            manager.add_adapter(world.request(name))
        rng.shuffle(entries)
        first = [first_row(entry, row) for entry, row in zip(entries, world.tokens, strict=True)]
        with manager.prepare(entries, active_from=first, length=LENGTH) as batch:
            got = np.asarray(forward(manager.model, world.tokens, batch))
        for i, entry in enumerate(entries):
            assert_close(got[i], world.logits(entry)[i], (step, i, entry))
            if entry == "activated":
                start = min(LENGTH, first[i])
                assert (got[i, :start] == base[i, :start]).all()
    assert compiled_programs(forward) == 1
    assert manager.stats().compilations == 1


def test_random_batches_of_every_adapter(world):
    manager = world.served()
    check_random_batches(world, manager, 2 * len(world.entries))
    stats = manager.stats()
    assert stats.slot_evictions > len(world.fields)
    assert stats.host_evictions > len(world.fields) // 2
    # No entry is so close to the base that the comparison would pass without it.
    base = world.logits(None)
    for entry in world.entries[1:]:
        for i in range(4 if "activated" in names_of(entry) else ROWS):
            assert np.abs(world.logits(entry)[i] - base[i]).max() > 100 * TOLERANCE * np.abs(base).max(), entry


@pytest.mark.mesh
@pytest.mark.usefixtures("quickly_compiled")
@pytest.mark.parametrize("world", ["llama-biases-llama3"], indirect=True)
def test_random_batches_on_a_mesh(world):
    manager = world.served(make_mesh({"data": 2, "tensor": 2}), data_axes=["data"], fully_sharded=True)
    check_random_batches(world, manager, 12)


@pytest.mark.parametrize("world", ["llama-biases-llama3", "qwen3-tied-window"], indirect=True)
def test_greedy_answers(world):
    """Prompts of unlike lengths through the cache: prefill [B, L], decode [B, 1], logits of one row a sequence."""
    adapters = ["activated", "activated", "dora", None, "embedding and head", "drawn 0"]
    manager = world.served()
    for name in dict.fromkeys(adapters):
        if name is not None:
            manager.add_adapter(world.request(name))
    prompts = [row[: 6 + 2 * i].tolist() for i, row in enumerate(world.tokens)]
    with manager.prepare(adapters) as batch:
        answers = jlora.models.generate(manager.model, prompts, batch=batch, max_new_tokens=6)
    for name, prompt, answer in zip(adapters, prompts, answers, strict=True):
        assert answer == cases.greedy(torch, world.peft_model(name), prompt, 6), (name, prompt)

"""Mixed batches against PEFT itself: every adapter through files that PEFT wrote, every logit compared."""

import functools

import chex
import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import jlora
import jlora.models
from tests.compiled import compiled_programs
from tests.parity import cases

# transformers and PEFT warn of their own deprecations, and when they save more than LoRA.
pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

torch.set_num_threads(1)  # the matrices are tiny, and other workers want the cores

TOLERANCE = 1e-4  # of the largest logit
ROWS, LENGTH = 6, 20
SLOTS, HOST = 4, 10


class World:
    """One base model in both frameworks, and its adapters: PEFT's folders and PEFT's logits, each made on first use."""

    def __init__(self, name: str, folder):
        self.name, self.folder = name, folder
        self.theirs = cases.base_model(torch, transformers, name)
        self.theirs.save_pretrained(folder / "base")
        self.tokens = np.random.default_rng(len(name)).integers(0, cases.VOCAB, (ROWS, LENGTH)).astype(np.int32)
        self.fields = cases.adapters_of(name)

    @functools.cache  # noqa: B019 - as long-lived as the module's fixture
    def peft_model(self, adapter: str):
        return cases.peft_model(torch, peft, self.theirs, adapter, self.fields[adapter])

    @functools.cache  # noqa: B019 - as long-lived as the fixture, too
    def path(self, adapter: str) -> str:
        return str(cases.save_adapter(torch, self.peft_model(adapter), adapter, self.folder))

    @functools.cache  # noqa: B019 - as long-lived as the fixture, too
    def logits(self, adapter: str | None) -> np.ndarray:
        """PEFT's float32 logits [ROWS, LENGTH, V] of every sequence with one adapter."""
        model = self.theirs if adapter is None else self.peft_model(adapter)
        return cases.logits(torch, model, self.tokens)

    def request(self, adapter: str, **fields) -> jlora.LoRARequest:
        return jlora.LoRARequest(adapter, self.path(adapter), **fields)

    def served(self, slots: int = SLOTS, host: int | None = HOST) -> jlora.LoRAManager:
        model = jlora.models.from_pretrained(self.folder / "base")
        config = jlora.LoRAConfig(max_loras=slots, max_lora_rank=cases.MAX_RANK, max_cpu_loras=host)
        return jlora.LoRAManager(model, config)


@pytest.fixture(scope="module", params=cases.MODELS)
def world(request, tmp_path_factory) -> World:
    return World(request.param, tmp_path_factory.mktemp(request.param))


def forward_traced_once():
    """A jitted forward that may be traced for one shape, and once."""

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


def test_mixed_batches_of_every_adapter(world):
    manager = world.served()
    forward = forward_traced_once()
    names = list(world.fields)
    assert len(names) >= 16
    rng = np.random.default_rng(1)
    served = set()
    ranks = set()
    for step in range(40):
        # Every adapter in turn, with random company; now and then the base model alone, or one adapter for all.
        company = rng.choice(names, rng.integers(0, SLOTS), replace=False).tolist()
        present = [names[step % len(names)], *company][:SLOTS] if step % 10 else []
        rows = [present[i] if present and (i := rng.integers(-1, len(present))) >= 0 else None for _ in range(ROWS)]
        for name in dict.fromkeys(name for name in rows if name is not None):
            manager.add_adapter(world.request(name))
            ranks.add(manager.list_adapters()[name].rank)
        with manager.prepare(rows) as batch:
            got = forward(manager.model, world.tokens, batch)
        for i, name in enumerate(rows):
            assert_close(got[i], world.logits(name)[i], (step, name))
        served.update(rows)
    assert served == {*names, None}
    assert {1, cases.MAX_RANK} <= ranks
    assert compiled_programs(forward) == 1
    stats = manager.stats()
    assert stats.compilations == 1
    assert stats.slot_evictions > len(names)
    assert stats.host_evictions > len(names) // 2


def test_every_adapter_changes_the_logits(world):
    """No adapter is so small that the comparison above would pass without it."""
    base = world.logits(None)
    for name in world.fields:
        for i in range(ROWS):
            assert np.abs(world.logits(name)[i] - base[i]).max() > 100 * TOLERANCE * np.abs(base).max(), name


def test_replaced_in_its_slot(world):
    """`load_inplace` between steps: other weights, another rank and other modules under the same name."""
    manager = world.served(slots=2, host=2)
    forward = forward_traced_once()
    kept = "rslora"
    manager.add_adapter(world.request(kept))
    for successor in ("rank 64 everywhere", "head", "rank 1", "embedding"):
        manager.add_adapter(jlora.LoRARequest("live", world.path(successor), load_inplace=True))
        with manager.prepare(["live", kept, None, "live", kept, "live"]) as batch:
            got = forward(manager.model, world.tokens, batch)
        for i, name in enumerate([successor, kept, None, successor, kept, successor]):
            assert_close(got[i], world.logits(name)[i], (successor, name))
    assert manager.stats().slot_evictions == 0


def test_greedy_answers(world):
    """Prompts of unlike lengths through the cache: prefill [B, L], decode [B, 1], logits of one row a sequence."""
    adapters = [None, "all-linear", "embedding and head", "both patterns with rslora", "drawn 0"]
    manager = world.served(slots=4)
    for name in adapters[1:]:
        manager.add_adapter(world.request(name))
    prompts = [world.tokens[i % ROWS, : 2 + 3 * i].tolist() for i in range(len(adapters))]
    with manager.prepare(adapters) as batch:
        answers = jlora.models.generate(manager.model, prompts, batch=batch, max_new_tokens=12)
    for name, prompt, answer in zip(adapters, prompts, answers, strict=True):
        model = world.theirs if name is None else world.peft_model(name)
        assert answer == cases.greedy(torch, model, prompt, 12), name

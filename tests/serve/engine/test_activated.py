"""Activated LoRA and DoRA in the engine: answers of `jlora.models.generate`, however prompts are split into chunks."""

import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.models import Decoder, DecoderConfig, generate
from jlora.models.generation import compiled_variants
from jlora.serve import Engine, EngineOptions, SamplingParams
from tests.models.checkpoints import SIZES
from tests.serve.conftest import compilations

CHUNK, ROWS, LIMIT = 16, 4, 5
INVOCATION = (9, 20, 3)
CONFIG = DecoderConfig(**(SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}))
GREEDY = SamplingParams(temperature=0, max_tokens=LIMIT, ignore_eos=True)


def made(name, rank, **fields):
    """Return an adapter whose deltas are as large as the weights; with magnitudes if its name is "dora"."""
    rng, modules = np.random.default_rng(rank), {}
    for layer in range(CONFIG.num_hidden_layers):
        for module, k, n in (("self_attn.q_proj", 32, 32), ("self_attn.v_proj", 32, 16), ("mlp.down_proj", 48, 32)):
            a, b = rng.normal(size=(rank, k)) * k**-0.5, rng.normal(size=(n, rank))
            vectors = {"dora": rng.uniform(0.5, 2, n).astype(np.float32)} if name == "dora" else {}
            modules[f"model.layers.{layer}.{module}"] = jlora.ModuleLoRA(
                a=a.astype(np.float32), b=b.astype(np.float32), alpha=rank, scaling=1.0, vectors=vectors
            )
    return jlora.Adapter(name=name, modules=modules, **fields)


def managed(**config):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    return jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=4, max_lora_rank=4, **config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder of each adapter by its name."""
    root, calls = tmp_path_factory.mktemp("adapters"), {"invocation_tokens": INVOCATION}
    for adapter in (made("called", 4, **calls), made("other", 3, **calls), made("dora", 2), made("plain", 1)):
        adapter.save_pretrained(root / adapter.name)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture(scope="module")
def oracle(folders):
    """A function that generates the answers of a batch with `jlora.models.generate`."""
    manager = managed(activated=True, variants=["dora"])
    for name, path in folders.items():
        manager.add_adapter(jlora.LoRARequest(name, str(path)))

    def answers(names, prompts):
        with manager.prepare(names) as batch:
            return generate(manager.model, prompts, batch=batch, max_new_tokens=LIMIT)

    return answers


@pytest.fixture(scope="module")
def engine(folders):
    manager = managed(activated=True, variants=["dora"])
    options = EngineOptions(max_num_seqs=ROWS, max_num_batched_tokens=CHUNK, max_model_len=32)
    engine = Engine(manager.model, manager, options=options)
    for name, path in folders.items():
        engine.add_lora(jlora.LoRARequest(name, str(path)))
    engine.start()
    yield engine
    assert engine.close(60)


def prompt_of(length, *places, seed=0):
    """Return a prompt with the invocation tokens at some places."""
    prompt = np.random.default_rng([length, seed]).integers(30, 60, length)
    for place in places:
        prompt[place : place + len(INVOCATION)] = INVOCATION
    return prompt.tolist()


PROMPTS = {
    "in the first chunk": prompt_of(20, 2),
    "split over two chunks": prompt_of(21, 14),
    "split after one token": prompt_of(24, 15),
    "at the end": prompt_of(19, 16),
    "the whole prompt": list(INVOCATION),
    "twice": prompt_of(26, 3, 17),
    "twice, the last one split": prompt_of(27, 1, 14),
    "nowhere": prompt_of(22),
    "a part of it": [*prompt_of(20), *INVOCATION[:2]],
}


def check(engine, oracle, pairs):
    names, prompts = zip(*pairs, strict=True)
    want = [answer for i in range(0, len(pairs), 4) for answer in oracle(names[i : i + 4], prompts[i : i + 4])]
    under_way = [engine.submit(prompt, GREEDY, lora=name) for name, prompt in pairs]
    found = [list(one.result(60).tokens) for one in under_way]
    assert found == want
    return found


@pytest.mark.slow
def test_prompts_in_chunks(engine, oracle):
    compiled = compilations(engine)
    cases = [("called", prompt) for prompt in PROMPTS.values()]
    cases += [(None, PROMPTS["in the first chunk"])]
    found = dict(zip(PROMPTS, check(engine, oracle, cases), strict=False))
    for where in ("nowhere", "a part of it"):
        base = check(engine, oracle, [(None, PROMPTS[where])] * 4)
        assert base[0] == found[where]
    assert compilations(engine) == compiled


def test_beside_other_requests(engine, oracle):
    rng = np.random.default_rng(1)
    names, prompts = [None, "plain", "dora", "called", "other"], list(PROMPTS.values())
    drawn = [(names[rng.integers(5)], prompts[rng.integers(len(prompts))]) for _ in range(24)]
    check(engine, oracle, drawn)
    # The comparison would fail for a request that is served without its adapter, or with it everywhere.
    prompt = PROMPTS["twice"]
    found = oracle(["called", "plain", "dora", None], [prompt] * 4) + oracle(["other", *[None] * 3], [prompt] * 4)[:1]
    assert len({tuple(answer) for answer in found}) == 5


@pytest.mark.slow
def test_first_rows_of_generate(folders):
    """First rows are counted in each prompt, which is padded; one past it acts on no row of that padding."""
    manager = managed(activated=True)
    manager.add_adapter(jlora.LoRARequest("called", str(folders["called"])))
    prompts = [PROMPTS["at the end"], PROMPTS["nowhere"]]

    def answers(names, **options):
        with manager.prepare(names, **options) as batch:
            return generate(manager.model, prompts, batch=batch, max_new_tokens=LIMIT)

    found, compiled = answers(["called"] * 2), compiled_variants()
    assert answers(["called"] * 2, active_from=[16, 22], length=22) == found
    base = answers([None] * 2)
    assert found[0] != base[0]
    assert found[1] == base[1] == answers(["called"] * 2, active_from=[0, 25], length=32)[1]
    assert compiled_variants() == compiled
    # The default configuration refuses such adapters.
    plain = managed()
    for name, flag in (
        ("called", r"activated=True\) .*--activated-loras"),
        ("dora", r"variants=\['dora'\]\) .*--lora-variants dora"),
    ):
        with pytest.raises(jlora.AdapterMismatchError, match=rf"{name!r}.*{flag}"):
            plain.add_adapter(jlora.LoRARequest(name, str(folders[name])))


@pytest.mark.slow
def test_prefixes_are_shared_up_to_the_same_first_token(folders, oracle):
    """A prefix is that of the base model before the invocation, and may be reused by the same adapter alone."""
    manager = managed(activated=True, variants=["dora"])
    options = EngineOptions(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=64, enable_prefix_caching=True)
    engine = Engine(manager.model, manager, options=options)
    for name, path in folders.items():
        engine.add_lora(jlora.LoRARequest(name, str(path)))
    engine.start()
    plain, called = prompt_of(20), prompt_of(20, 2)
    (answer,) = oracle(["called"], [plain])
    for name, prompt, cached in (
        ("called", plain, 0),
        ("called", [*plain, *answer[:2], 30], 22),  # never active
        ("called", [*plain, *INVOCATION, 31], 0),  # active from another token on
        ("called", [*plain, *INVOCATION, 31, 32], 24),
        ("called", called, 0),
        ("called", [*called, 33], 20),
        ("called", [*called, 33, *INVOCATION], 0),
        ("other", [*called, 33], 0),
        (None, [*plain, 34], 0),
        ("plain", [*plain, 34], 0),
    ):
        generation = engine.submit(prompt, GREEDY, lora=name)
        assert [list(generation.result(60).tokens)] == oracle([name], [prompt])
        assert generation.cached_tokens == cached
    assert engine.close(60)

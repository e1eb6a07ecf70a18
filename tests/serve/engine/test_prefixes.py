"""Prefix caching: prompts that continue from a row of the cache agree with an engine that computes them whole."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.cli.demo import DEMO
from jlora.cli.loading import load_model
from jlora.serve import Engine, EngineOptions, SamplingParams
from tests.serve.client import until
from tests.serve.conftest import ADAPTERS, compilations, request_of
from tests.serve.engine.test_forks import DRAWN, LETTERS, PROMPT, counted, sixteen
from tests.serve.engine.test_own_model import Recurrent, adapter, numpy_greedy

ROWS, CHUNK = 3, 8
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)
BASE = "abcdefghijklmnopqrstuvwx"


def make_engine(caching=True, **options):
    model = load_model(DEMO / "model", "float32")
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=32, max_cpu_loras=6))
    sizes = {"max_num_seqs": ROWS, "max_num_batched_tokens": CHUNK, "enable_prefix_caching": caching, **options}
    return Engine(model, manager, options=EngineOptions(**sizes))


@pytest.fixture(scope="module")
def started_engine():
    engine = make_engine()
    engine.start()
    yield engine
    assert engine.close(60)


@pytest.fixture
def engine(started_engine):
    """An engine whose rows hold nothing of an earlier test, since its adapters are of new versions."""
    for name, path in ADAPTERS.items():
        started_engine.add_lora(jlora.LoRARequest(name, str(path)), load_inplace=name in started_engine.list_loras())
    before = compilations(started_engine)
    yield started_engine
    until(lambda: not started_engine.stats().running)
    assert compilations(started_engine) == before


def ids(world, text):
    return world.engine.encode(text)


def same(found, want):
    """Compare greedy answers: equal tokens, and log probabilities that agree to rounding."""
    assert found.tokens == want.tokens
    for one, other in zip(found.logprobs, want.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        values = [[value for _, value in each.top] for each in (one, other)]
        np.testing.assert_allclose(*values, atol=1e-4)


def ask(engine, prompt, lora="sort", params=GREEDY):
    """Return the completion of a prompt, and the number of tokens that were copied for it."""
    generation = engine.submit(prompt, params, lora=lora)
    return generation.result(60), generation.cached_tokens


@pytest.mark.slow
def test_a_prompt_continues_from_a_row(world, engine):
    start = ids(world, BASE)
    asked = [
        ("sort", start, 0),
        ("sort", [*start, *ids(world, "lm=")[1:]], len(start)),  # continues it
        ("sort", [*start[:20], *ids(world, "zyx=")[1:]], 20),  # shares a part
        ("sort", start, len(start) - 1),  # inside of a longer one, so its last token is computed
        ("sort", start, len(start)),  # equal
        ("sort", start[:-3], len(start) - 4),
        ("swap", [*start, 9], 0),  # of another adapter
        (None, [*start, 9], 0),
        ("sort", [start[1], *start], 0),
        ("sort", start[:CHUNK], 0),  # one chunk in any case
    ]
    for name, prompt, cached in asked:
        found, copied = ask(engine, prompt, name)
        assert copied == cached
        same(found, world.engine.submit(prompt, GREEDY, lora=name).result(60))


@pytest.mark.slow
def test_forks_have_the_bits_of_the_first(world, engine):
    """Also when prefixes are reused: whole prompts are copied with the logits after them."""
    prompt = ids(world, PROMPT)
    group = engine.submit_all([prompt] * 16, sixteen(), lora="sort")
    found = [one.result(60) for one in group]
    assert [one.cached_tokens for one in group] == [0] + [len(prompt)] * 15
    for one, params in zip(found, sixteen(), strict=True):
        assert ask(engine, prompt, params=params) == (one, len(prompt))


def conversation(world, engine, lora, turns=8):
    """Return the answers of a conversation, each prompt of which holds all that came before it."""
    context, answers = ids(world, "ab="), []
    for turn in range(turns):
        answers.append(engine.submit(context, dataclasses.replace(GREEDY, max_tokens=3), lora=lora).result(60))
        context = [*context, *answers[-1].tokens, *ids(world, LETTERS[turn : turn + 2] + "=")[1:]]
    return answers


@pytest.mark.slow
def test_eight_turns_compute_each_token_once(world, engine):
    whole, without = counted(world.engine, lambda: conversation(world, world.engine, "reverse"))
    found, counts = counted(engine, lambda: conversation(world, engine, "reverse"))
    for one, other in zip(found, whole, strict=True):
        same(one, other)
    lengths = [4 + 6 * turn for turn in range(8)]
    assert without == (sum(lengths), 0) == (200, 0)
    assert counts == (4 + 7 * 4, 200 - 4 - 7 * 4)  # the last token of each answer, and three new ones


@pytest.mark.slow
def test_steps_of_others_do_not_reach_a_prefix(world, engine):
    """Free rows are written at each step. A prompt that continues from one later has the bits of one that did at once.

    The row is filled to the last position, too.
    """
    start, rest = ids(world, BASE), ids(world, "pq=")[1:]
    for limit in (2, 64 - len(start)):
        founds = []
        for steps in (0, 30):
            version = jlora.LoRARequest("new", str(ADAPTERS["sort"]))
            engine.add_lora(version, load_inplace="new" in engine.list_loras())
            done, copied = ask(engine, start, "new", dataclasses.replace(GREEDY, max_tokens=limit))
            assert copied == 0
            if steps:
                ask(engine, ids(world, "other="), None, dataclasses.replace(GREEDY, max_tokens=steps))
            prompt = [*start, *done.tokens, *rest][: 64 - 4]
            founds.append(ask(engine, prompt, "new"))
        assert founds[0] == founds[1]
        assert founds[0][1] >= min(len(start) + limit - 1, 60 - CHUNK)
        same(founds[0][0], world.engine.submit(prompt, GREEDY, lora="sort").result(60))
    engine.remove_lora("new")


@pytest.mark.slow
def test_a_running_row_is_a_source(world, engine):
    start = ids(world, BASE)
    running = engine.submit(start, dataclasses.replace(GREEDY, max_tokens=39), lora="sort")
    pieces = iter(running)
    next(pieces)
    found, copied = ask(engine, [*start, 7, 8], "sort", GREEDY)
    assert copied == len(start)
    same(found, world.engine.submit([*start, 7, 8], GREEDY, lora="sort").result(60))
    tokens = [token for piece in pieces for token in piece.tokens]
    alone = dataclasses.replace(GREEDY, max_tokens=39)
    assert tokens == list(world.engine.submit(start, alone, lora="sort").result(60).tokens[1:])


@pytest.mark.slow
def test_rows_that_are_continued_outlast_others(world, engine):
    """Conversations as many as rows continue in their own; a copy takes the row that was used least recently."""
    starts = [ids(world, letter * 24 + "=")[1:] for letter in LETTERS[:ROWS]]
    for start in starts:
        assert ask(engine, start)[1] == 0
    for turn in (1, 2):
        for start in starts:
            start += [*range(4, 4 + turn)]
            assert ask(engine, start)[1] >= 25
    branch = [*starts[2][:20], 9, 9, 9]  # loses the first, and leaves its own source
    assert ask(engine, branch)[1] == 20
    assert [ask(engine, [*starts[i], 3])[1] > 20 for i in (2, 1, 0)] == [True, True, False]


@pytest.mark.slow
def test_a_new_version_shares_nothing(world, engine):
    start = ids(world, BASE)
    assert ask(engine, start)[1] == 0
    running = engine.submit(start, dataclasses.replace(GREEDY, max_tokens=30), lora="sort")
    next(iter(running))
    engine.add_lora(request_of("sort", "reverse"), load_inplace=True)
    found, copied = ask(engine, [*start, 5])
    assert copied == 0
    same(found, world.engine.submit([*start, 5], GREEDY, lora="reverse").result(60))
    assert ask(engine, [*start, 5, 6])[1] > len(start)


def test_conversations_continue_in_their_rows():
    """Two conversations in turn, of a model with another cache, compared with whole passes in float64."""
    model, lora = Recurrent(nnx.Rngs(0)), adapter("a", 0)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2))
    manager.add_adapter(lora)
    options = EngineOptions(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, enable_prefix_caching=True)
    engine, rest = Engine(model, manager, options=options), [9, 2, 6, 5]
    contexts = {"a": [3, 1, 4, 1, 5, *rest], None: [3, 1, 4, 1, 6, *rest]}  # in two chunks
    engine.start()
    for turn in range(4):
        for name, context in contexts.items():
            generation = engine.submit(context, GREEDY, lora=name)
            answer = list(generation.result(60).tokens)
            want = numpy_greedy(model, None if name is None else lora, context, 4)
            assert answer[: len(want)] == want
            assert generation.cached_tokens == (len(context) - 2 if turn else 0)
            context += [*answer, 7]
    assert engine.close(60)


def test_option_is_checked():
    with pytest.raises(jlora.LoRAUsageError, match="enable_prefix_caching must be True or False, got 'yes'"):
        make_engine("yes")


@pytest.mark.slow
def test_short_chunks_after_a_copy(world):
    """With larger chunks, the rest of a prompt is computed in the smaller size, and nothing compiles while serving."""
    engine = make_engine(max_num_batched_tokens=128, max_model_len=64)
    engine.start()
    before = compilations(engine)
    for length in range(34, 64, 3):
        prompt = ids(world, (BASE * 3)[: length - 1])
        same(ask(engine, prompt[:60], None)[0], world.engine.submit(prompt[:60], GREEDY).result(60))
    assert compilations(engine) == before
    assert engine.close(60)


@pytest.mark.slow
def test_soak_of_reloads_forks_and_reuse(world, engine, rng):
    """Random conversations, groups and reloads. Forks equal each other in every bit, all agree with whole prompts."""
    names, contexts, sources, cached = ["sort", "reverse", None], {}, {"sort": "sort", "reverse": "reverse"}, 0
    for _ in range(80):
        name = names[rng.integers(len(names))]
        if name is not None and rng.random() < 0.15:
            sources[name] = list(ADAPTERS)[rng.integers(len(ADAPTERS))]
            engine.add_lora(request_of(name, sources[name]), load_inplace=True)
        kept = contexts.get(name, [])
        context = kept if 0 < len(kept) < 45 and rng.random() < 0.7 else [0]
        context = [*context, *rng.integers(3, 29, rng.integers(3, 12)).tolist()]
        n = int(rng.integers(1, 5))
        seeds = rng.integers(0, 2, n).tolist()
        params = [GREEDY, *(dataclasses.replace(DRAWN, max_tokens=3, seed=seed) for seed in seeds)]
        group = engine.submit_all([context] * (n + 1), params, lora=name)
        if n == 4:
            group[2].cancel()
        found = [one.result(60) for one in group]
        by_seed = {}
        for one, seed in zip(found[1:], seeds, strict=True):
            if one.finish_reason != "abort":
                assert by_seed.setdefault(seed, one) == one
        source = None if name is None else sources[name]
        want = world.engine.submit(context, GREEDY, lora=source).result(60)
        for ours, theirs in zip(found[0].logprobs, want.logprobs, strict=True):
            if ours.token != theirs.token:  # two tokens were equally likely but for rounding
                assert abs(theirs.top[0][1] - theirs.top[1][1]) < 1e-3
                break
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        contexts[name] = [*context, *found[0].tokens]
        cached += group[0].cached_tokens
    assert cached > 300
    assert engine.stats().failed_steps == 0

"""Several answers of a prompt, and equal prompts that wait: computed once, with the bits of a request alone."""

import dataclasses

import jax
import pytest
from flax import nnx

import jlora
from jlora.models import Decoder
from jlora.serve import Engine, EngineOptions, SamplingParams
from tests.models.test_mesh import TINY, make_mesh
from tests.serve.client import until
from tests.serve.conftest import ROWS, request_of

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT = LETTERS + "zyxwvutsrqp="  # in two chunks
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5)
DRAWN = SamplingParams(temperature=2.0, max_tokens=6, ignore_eos=True, logprobs=3)
BUSY = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)


def counted(engine, act):
    """Return the result of `act`, and the tokens of prompts that were computed and copied meanwhile."""
    before = engine.stats()
    found = act()
    after = engine.stats()
    return found, (after.prefilled_tokens - before.prefilled_tokens, after.cached_tokens - before.cached_tokens)


def sixteen():
    """Return the parameters of a group: greedy and drawn, of several seeds, limits, lengths and ends."""
    drawn = [dataclasses.replace(DRAWN, seed=seed, max_tokens=4 + seed % 3) for seed in range(10)]
    limited = [dataclasses.replace(DRAWN, seed=seed, top_k=4, top_p=0.9, logprobs=None) for seed in (1, 2)]
    ends = [dataclasses.replace(GREEDY, ignore_eos=False, logprobs=None), dataclasses.replace(GREEDY, max_tokens=1)]
    return [GREEDY, *drawn, *limited, *ends, dataclasses.replace(DRAWN, seed=3, max_tokens=20)]


def test_sixteen_answers_equal_each_alone_in_every_bit(world):
    """There are four rows, so most answers begin when others have ended. Three groups wait together for two slots."""
    engine, prompt, names = world.engine, world.engine.encode(PROMPT), ("sort", None, "swap")
    alone = {
        name: counted(engine, lambda name=name: [engine.submit(prompt, one, lora=name).result(60) for one in sixteen()])
        for name in names
    }
    assert {counts for _, counts in alone.values()} == {(16 * len(prompt), 0)}

    def together():
        groups = {name: engine.submit_all([prompt] * 16, sixteen(), lora=name) for name in names}
        return {name: ([one.result(60) for one in group], group) for name, group in groups.items()}

    found, counts = counted(engine, together)
    assert {name: answers for name, (answers, _) in found.items()} == {name: one for name, (one, _) in alone.items()}
    assert counts == (3 * len(prompt), 3 * 15 * len(prompt))
    for _, group in found.values():
        assert [one.cached_tokens for one in group] == [0] + [len(prompt)] * 15
    assert len({one.tokens for answers, _ in found.values() for one in answers}) > 20


def test_cancelled_siblings_leave_the_others_as_they_are(world):
    engine, prompt, params = world.engine, world.engine.encode(PROMPT), sixteen()[:9]
    alone = [engine.submit(prompt, one, lora="sort").result(60) for one in params]
    with world.paused() as go:
        group = engine.submit_all([prompt] * 9, params, lora="sort")
        until(lambda: engine.stats().running == ROWS)
        cancelled = [0, 2, 5]  # the one that was computed, a copy, and one that waits
        for i in cancelled:
            group[i].cancel()
        for i in cancelled:
            assert group[i].result(60).finish_reason == "abort"
        go.set()
        rest = [i for i in range(9) if i not in cancelled]
        assert [group[i].result(60) for i in rest] == [alone[i] for i in rest]
    assert [one.cached_tokens for one in group] == [0, *[len(prompt)] * 4, 0, *[len(prompt)] * 3]


def test_equal_prompts_that_wait_are_computed_once(world):
    engine, prompt = world.engine, world.engine.encode(PROMPT)
    asked = [("sort", prompt), ("sort", [*prompt, 5]), (None, prompt), ("sort", prompt), ("swap", prompt)]
    alone = [engine.submit(tokens, GREEDY, lora=name).result(60) for name, tokens in asked]

    def together():
        with world.paused() as go:
            busy = [engine.submit(f"{letter}=", BUSY) for letter in LETTERS[:ROWS]]
            until(lambda: engine.stats().running == ROWS)
            waiting = [engine.submit(tokens, GREEDY, lora=name) for name, tokens in asked]
            go.set()
            assert [one.result(60) for one in waiting] == alone
            assert {one.result(60).finish_reason for one in busy} == {"length"}
        return waiting

    waiting, counts = counted(engine, together)
    assert [one.cached_tokens for one in waiting] == [0, 0, 0, len(prompt), 0]
    assert counts == (4 * 3 + 4 * len(prompt) + 1, len(prompt))
    late = engine.submit(prompt, GREEDY, lora="sort")  # it has not waited, and prefix caching is off
    assert late.result(60) == alone[0]
    assert late.cached_tokens == 0


def test_requests_beside_a_group_are_not_passed_over(world):
    """An answer of a group has no precedence over a request that came before it, and blocks none that comes later."""
    engine, prompt = world.engine, world.engine.encode(PROMPT)
    order = []

    def listen(name, generation):
        generation.listen(lambda piece: order.append(name) if piece.finish_reason else None)
        return generation

    with world.paused() as go:
        for generation in engine.submit_all([prompt] * 3, [GREEDY] * 3):
            listen("first", generation)
        listen("between", engine.submit("noise=", GREEDY))
        for generation in engine.submit_all([prompt] * 9, [GREEDY] * 9):
            listen("second", generation)
        listen("last", engine.submit("planet=", GREEDY))
        until(lambda: engine.stats().running == ROWS)
        go.set()
        until(lambda: len(order) == 14)
    assert sorted(order[:4]) == ["between", "first", "first", "first"]
    assert order[4:12] == ["second"] * 8
    assert sorted(order[12:]) == ["last", "second"]


def test_versions_do_not_share_a_prompt(world):
    """Requests of a version that is replaced while they run, and of the version that replaces it."""
    engine, prompt, params, name = world.engine, world.engine.encode(PROMPT), [GREEDY] * 6, "new"
    engine.add_lora(request_of(name, "sort"))
    with world.paused() as go:
        old = engine.submit_all([prompt] * 6, params, lora=name)
        until(lambda: engine.stats().running == ROWS)
        engine.add_lora(request_of(name, "reverse"), load_inplace=True)
        new = engine.submit_all([prompt] * 3, params[:3], lora=name)
        go.set()
        found = [[one.result(60) for one in group] for group in (old, new)]
    assert [len(set(answers)) for answers in found] == [1, 1]
    assert found[0][0] != found[1][0] == engine.submit(prompt, GREEDY, lora="reverse").result(60)
    assert [one.cached_tokens for one in new] == [0, len(prompt), len(prompt)]


@pytest.mark.slow
def test_rows_of_a_mesh_are_copied(rng):
    """Sequences are split over an axis, and heads over another. Rows are copied between the devices that hold them."""
    model = Decoder(TINY, mesh=make_mesh({"data": 2, "tensor": 2}), rngs=nnx.Rngs(0))
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4))
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32, enable_prefix_caching=True)
    engine, prompt = Engine(model, manager, options=options), rng.integers(2, 60, 19).tolist()
    engine.start()
    events = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: events.append(event))
    (alone, *_), counts = counted(engine, lambda: [engine.submit(prompt, GREEDY).result(60)])
    assert counts == (19, 0)
    assert {one.result(60) for one in engine.submit_all([prompt] * 7, [GREEDY] * 7)} == {alone}
    longer = engine.submit([*prompt, 5, 6], GREEDY)
    assert longer.result(60).logprobs
    assert longer.cached_tokens == 19
    assert "/jax/core/compile/backend_compile_duration" not in events
    assert engine.close(60)

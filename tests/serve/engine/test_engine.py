"""The engine over the demo model, compared with `jlora.models.generate` under various loads."""

import dataclasses
import shutil
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer, models

import jlora
from jlora.cli.demo import DEMO, DENSE, demo_requests
from jlora.cli.generate import Request, encode
from jlora.cli.loading import load_model
from jlora.models import generate
from jlora.serve import (
    AdapterExistsError,
    Engine,
    EngineBusyError,
    EngineClosedError,
    EngineOptions,
    RequestTimeoutError,
    SamplingParams,
    StepFailedError,
)
from tests.records import evict, evicted, slot_names
from tests.serve.client import until
from tests.serve.conftest import ADAPTERS, ROWS, request_of

GREEDY = SamplingParams(temperature=0, max_tokens=10)
LONG = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
WORD = "planet="
MEASURED = ("inter_token_latency", "request_time_per_output_token")


class Oracle:
    """Whole forward passes without a cache, on its own model and manager, with a slot for every adapter."""

    rows, length = 8, 64

    def __init__(self, tokenizer):
        self.model = load_model(DEMO / "model", "float32")
        self.tokenizer = tokenizer
        self.manager = jlora.LoRAManager(self.model, jlora.LoRAConfig(max_loras=4, max_lora_rank=32))
        for name, path in ADAPTERS.items():
            self.manager.add_adapter(jlora.LoRARequest(name, str(path)))

        @jax.jit
        def forward(model, tokens, batch):
            with jlora.use(batch):
                return model(tokens)

        self.forward = forward
        self.known = {}

    def logits(self, adapters, tokens):
        """Return the logits [rows, length, V] for lists of token ids, one adapter each."""
        padded = np.zeros((self.rows, self.length), np.int32)
        for row, one in zip(padded, tokens, strict=False):
            row[: len(one)] = one
        with self.manager.prepare([*adapters, *[None] * (self.rows - len(adapters))]) as batch:
            return np.asarray(self.forward(self.model, padded, batch))

    def __call__(self, requests, limit=10):
        """Return greedy answers, as token ids."""
        ends = self.model.config.eos_token_ids
        new = list(dict.fromkeys(one for one in requests if (one.adapter, one.prompt) not in self.known))
        for start in range(0, len(new), self.rows):
            some = new[start : start + self.rows]
            prompts = encode(self.tokenizer, some)
            rows = [list(prompt) for prompt in prompts]
            for _ in range(limit):
                logits = self.logits([request.adapter for request in some], rows)
                for row, prompt, scores in zip(rows, prompts, logits, strict=False):
                    if len(row) == len(prompt) or row[-1] not in ends:
                        row.append(int(scores[len(row) - 1].argmax()))
            for request, row, prompt in zip(some, rows, prompts, strict=True):
                self.known[request.adapter, request.prompt] = row[len(prompt) :]
        return [self.known[request.adapter, request.prompt] for request in requests]

    def generate(self, requests, **options):
        """Return the answers of `jlora.models.generate`, with a batch of fixed size."""
        padded = [*requests, *[Request(None, "=")] * (self.rows - len(requests))]
        with self.manager.prepare([request.adapter for request in padded]) as batch:
            prompts = encode(self.tokenizer, padded)
            return generate(self.model, prompts, batch=batch, **options)[: len(requests)]


@pytest.fixture(scope="module")
def oracle(started):
    return Oracle(started.tokenizer)


def answers(world, requests, params=GREEDY):
    generations = []
    for i, request in enumerate(requests):
        one = params[i] if isinstance(params, list) else params
        generations.append(world.engine.submit(request.prompt, one, lora=request.adapter))
    return [generation.result(60) for generation in generations]


@pytest.mark.slow
def test_engine_works_under_a_transfer_guard(world):
    requests = [Request(name, WORD) for name in (None, *ADAPTERS)]
    before = answers(world, requests)
    world.engine.remove_lora("sort")
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        world.engine.add_lora(request_of("sort"))
        found = answers(world, requests)
        sampled = world.engine.submit(WORD, SamplingParams(temperature=1, max_tokens=4), lora="sort").result(60)
    finally:
        jax.config.update("jax_transfer_guard", None)
    assert [one.tokens for one in found] == [one.tokens for one in before]
    assert sampled.tokens


def test_answers_equal_whole_forwards_for_four_adapters_and_the_base(world, oracle):
    requests = demo_requests(DENSE)[:16]
    assert {request.adapter for request in requests} == {None, *ADAPTERS}
    before = world.engine.stats()
    found = answers(world, requests)
    want = oracle(requests)
    assert [list(one.tokens) for one in found] == want
    assert [one.text for one in found] == [world.tokenizer.decode(tokens) for tokens in want]
    assert sum(one.text == request.answer for one, request in zip(found, requests, strict=True)) >= 15
    assert {one.finish_reason for one in found} == {"stop"}
    assert [one.prompt_tokens for one in found] == [len(request.prompt) + 1 for request in requests]
    after = world.engine.stats()
    assert after.generated_tokens - before.generated_tokens == sum(len(one.tokens) for one in found)
    assert after.prompt_tokens - before.prompt_tokens == sum(one.prompt_tokens for one in found)
    assert after.finished["stop"] - before.finished.get("stop", 0) == 16
    for name in ("time_to_first_token", "request_seconds", "queue_seconds", "request_time_per_output_token"):
        assert sum(getattr(after, name)[1]) - sum(getattr(before, name)[1]) == 16
    gaps = sum(after.inter_token_latency[1]) - sum(before.inter_token_latency[1])
    assert gaps == sum(len(one.tokens) - 1 for one in found)
    assert (after.running, after.waiting, after.cache_usage) == (0, 0, 0.0)
    long = [Request("reverse", "abcdefghijklmnopqrstuvwxyz" * 2 + "="), Request(None, "a" * 31 + "=")]  # in two chunks
    assert [list(one.tokens) for one in answers(world, long)] == oracle(long)


@pytest.mark.slow
def test_seed_determines_the_answer_in_any_batch(world, oracle):
    options = {"temperature": 3.0, "seed": 11, "top_k": 5, "top_p": 0.9}
    params, request = SamplingParams(max_tokens=12, ignore_eos=True, **options), Request("shift", WORD)
    noise = [
        SamplingParams(temperature=2.0, top_k=2, max_tokens=9),
        SamplingParams(temperature=0.5, top_p=0.5, logprobs=3, max_tokens=7),
        GREEDY,
    ]
    others = [Request(name, "noise=") for name in ("sort", None, "swap")]
    found = answers(world, [request, *others, request], [params, *noise, params])
    assert found[0].tokens == found[-1].tokens == answers(world, [request], params)[0].tokens
    assert list(found[0].tokens) == oracle.generate([request], max_new_tokens=12, **options)[0]


def test_all_64_bits_of_a_seed_count(world):
    seeds = [1, 1 + 2**32, -1, 2**63 - 1]
    free = SamplingParams(temperature=5.0, max_tokens=20, ignore_eos=True)
    params, requests = [dataclasses.replace(free, seed=seed) for seed in seeds], [Request(None, WORD)] * 4
    found = answers(world, requests, params)
    assert found == answers(world, requests, params)
    for each in (found, answers(world, requests, free)):
        assert len({one.tokens for one in each}) == 4


def test_answer_is_bitwise_independent_of_the_batch(world):
    params = SamplingParams(temperature=0, logprobs=5, max_tokens=8, ignore_eos=True)
    request = Request("sort", "zebra=")
    alone = answers(world, [request], params)[0]
    crowd = [Request(name, prompt + "=") for name in ("sort", "swap", None) for prompt in ("ab", "abcdefghijk" * 4)]
    long = [dataclasses.replace(LONG, max_tokens=15)] * 6
    assert answers(world, [*crowd, request, *crowd], [*long, params, *long])[6] == alone  # logprobs, too


def test_logprobs_are_of_the_unmodified_distribution(world, oracle):
    params = SamplingParams(temperature=2.0, top_k=4, seed=5, logprobs=3, max_tokens=6, ignore_eos=True)
    found = answers(world, [Request("shift", WORD)], params)[0]
    prompt = encode(world.tokenizer, [Request("shift", WORD)])[0]
    logits = oracle.logits(["shift"], [[*prompt, *found.tokens]])[0, len(prompt) - 1 : len(prompt) + 5]
    logits = logits.astype(np.float64)
    want = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert len(found.logprobs) == 6
    decoded = [len(world.tokenizer.decode(found.tokens[:i])) for i in range(6)]
    assert [one.offset for one in found.logprobs] == decoded
    for row, token, one in zip(want, found.tokens, found.logprobs, strict=True):
        assert one.token == token
        assert one.logprob == pytest.approx(row[token], abs=1e-4)
        best = np.argsort(-row, kind="stable")[:3]
        assert [token for token, _ in one.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in one.top], row[best], atol=1e-4)
    none = answers(world, [Request("shift", WORD)], GREEDY)[0]
    assert none.logprobs == ()


def test_finish_reasons_and_stop_strings(world, oracle):
    request = Request(None, "abcdefgh=")  # the base copies
    (whole,) = oracle([request])
    text = world.tokenizer.decode(whole)
    assert text == "abcdefgh"
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, stop=("de", "zzz")),
        SamplingParams(temperature=0, stop_token_ids=(whole[4],)),
        SamplingParams(temperature=0, stop=("hx",)),
    ]
    found = answers(world, [request] * 4, params)
    assert [(one.text, one.finish_reason) for one in found] == [
        ("abc", "length"), ("abc", "stop"), ("abcde", "stop"), ("abcdefgh", "stop"),
    ]  # fmt: skip
    assert [list(one.tokens) for one in found] == [whole[:3], whole[:5], whole[:5], whole]
    before = world.engine.stats()
    filled = answers(world, [request], SamplingParams(temperature=0, ignore_eos=True))[0]  # all of the context
    after = world.engine.stats()
    gaps, mean = (getattr(after, name)[2] - getattr(before, name)[2] for name in MEASURED)
    assert mean == pytest.approx(gaps / (len(filled.tokens) - 1))
    assert (len(filled.tokens), filled.finish_reason) == (64 - len(request.prompt) - 1, "length")
    prompt = encode(world.tokenizer, [request])[0]
    scores = oracle.logits([None], [[*prompt, *filled.tokens]])[0]
    assert scores[len(prompt) - 1 : -1].argmax(axis=1).tolist() == list(filled.tokens)


def test_pieces_make_up_the_answer(world):
    whole = answers(world, [Request("reverse", WORD)])[0]
    pieces, done = [], threading.Event()

    def hear(event):
        pieces.append(event)
        if event.finish_reason is not None:
            done.set()

    generation = world.engine.submit(WORD, GREEDY, lora="reverse")
    generation.listen(hear)
    assert done.wait(60)
    assert [*world.engine.submit(WORD, GREEDY, lora="reverse")] == pieces
    assert "".join(piece.text for piece in pieces) == whole.text
    assert sum((piece.tokens for piece in pieces), ()) == whole.tokens
    assert [piece.finish_reason for piece in pieces] == [None] * (len(whole.tokens) - 1) + ["stop"]
    with pytest.raises(jlora.LoRAUsageError, match="one consumer"):
        generation.result()


def test_cancel_ends_running_and_waiting_requests(world):
    with world.paused() as go:
        running = [world.engine.submit(WORD, LONG, lora="sort") for _ in range(ROWS)]
        waiting = world.engine.submit(WORD, GREEDY, lora="sort")
        until(lambda: world.engine.stats().running == ROWS)
        assert world.engine.stats().waiting == 1
        waiting.cancel()  # before there is a row for it
        assert waiting.result(60) == type(waiting.result())("", (), (), "abort", len(WORD) + 1)
        running[0].cancel()
        go.set()
        assert running[0].result(60).finish_reason == "abort"
        assert len(running[0].result().tokens) < 40
        assert [one.result(60).finish_reason for one in running[1:]] == ["length"] * 3
    running[1].cancel()  # too late, and harmless
    assert running[1].result().finish_reason == "length"


def test_timeout_ends_only_its_own_request(world):
    with world.paused() as go:
        late = [world.engine.submit(WORD, LONG, timeout=0.2) for _ in range(2)]
        other = world.engine.submit(WORD, GREEDY)
        time.sleep(0.3)
        go.set()
        for one in late:
            with pytest.raises(RequestTimeoutError, match=r"longer than 0\.2"):
                one.result(60)
        assert other.result(60).finish_reason == "stop"
    slow = world.engine.submit(WORD, LONG)
    with pytest.raises(RequestTimeoutError, match="goes on"):
        slow.result(0)
    assert len(slow.result(60).tokens) == 40


class Unread(list):
    """A prompt that may not be iterated, as if it had millions of tokens."""

    def __iter__(self):
        raise AssertionError("the length is enough to refuse it")


def test_wrong_parameters_are_refused_by_name(world):
    submit, wrong = world.engine.submit, jlora.LoRAUsageError
    for name, value in (
        *(("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("top_k", -1), ("logprobs", 21), ("stop", "x")),
        ("seed", 2**64),
    ):
        with pytest.raises(wrong, match=name):
            submit(WORD, SamplingParams(**{name: value}))
    with pytest.raises(wrong, match="max_model_len=64"):
        submit(WORD, SamplingParams(max_tokens=60))
    wrong_prompts = ([], "no tokens"), ([1.5], "0 to 31"), ([99], "0 to 31"), (Unread([1] * 64), "max_model_len=64")
    for prompt, word in wrong_prompts:
        with pytest.raises(wrong, match=word):
            submit(prompt)
    with pytest.raises(wrong, match="load_inplace"):
        submit(WORD, lora=request_of("sort", load_inplace=True))
    assert world.engine.stats().running == world.engine.stats().waiting == 0


def test_submit_tokenizes_as_encode_does(world):
    engine, tokenizer = world.engine, world.tokenizer
    assert engine.encode(WORD) == tokenizer.encode(WORD).ids != engine.encode(WORD, special=False)
    given = [engine.submit(prompt, GREEDY, lora="sort") for prompt in (WORD, engine.encode(WORD))]
    assert len({one.result(60) for one in given}) == 1
    words = Tokenizer(models.WordLevel({"plan": 0}, "<unk>"))  # has no <unk>
    other = Engine(world.model, world.manager, tokenizer=words, options=world.engine.options)
    with pytest.raises(jlora.LoRAUsageError, match="'planet=' cannot be tokenized"):
        other.submit(WORD)


def test_full_queue_refuses_requests_with_retry_after(world):
    with world.paused() as go:
        taken = [world.engine.submit(WORD, GREEDY) for _ in range(ROWS)]
        until(lambda: world.engine.stats().running == ROWS)
        taken += [world.engine.submit(WORD, GREEDY, lora=lora) for lora in ("sort", "sort", request_of("new", "swap"))]
        assert world.engine.stats().waiting_by_lora == {"sort": 2, "new": 1}
        taken += [world.engine.submit(WORD, GREEDY) for _ in range(61)]
        with pytest.raises(EngineBusyError, match="64 requests wait") as caught:
            world.engine.submit(WORD, GREEDY)
        assert 0 < caught.value.retry_after <= 60
        go.set()
        assert {one.result(60).finish_reason for one in taken} == {"stop"}


@pytest.mark.parametrize("how", ["replaced", "unloaded"])
def test_a_request_of_many_answers_has_one_version(world, oracle, how):
    """Also those that begin after the adapter was replaced or unloaded."""
    (sort,), (swap,) = oracle([Request("sort", WORD)]), oracle([Request("swap", WORD)])
    world.engine.add_lora(request_of("mine", "sort"))
    with world.paused() as go:
        found = world.engine.submit_all([WORD] * (2 * ROWS), [GREEDY] * (2 * ROWS), lora="mine")
        until(lambda: world.engine.stats().running == ROWS)
        if how == "replaced":
            world.engine.add_lora(request_of("mine", "swap"), load_inplace=True)
            later = world.engine.submit(WORD, GREEDY, lora="mine")
        else:
            world.engine.remove_lora("mine")
        go.set()
        assert [list(one.result(60).tokens) for one in found] == [sort] * (2 * ROWS)
    if how == "replaced":
        assert list(later.result(60).tokens) == swap
    until(lambda: not world.manager.leases())
    if how == "unloaded":
        assert "mine" not in world.manager.list_adapters()


def test_a_request_of_many_answers_is_refused_or_queued_whole(world):
    with world.paused() as go:
        many = world.engine.submit_all([WORD] * 70, [GREEDY] * 70)  # the queue has room for 64
        with pytest.raises(EngineBusyError):
            world.engine.submit_all([WORD] * 2, [GREEDY] * 2)
        go.set()
        assert {one.result(60).finish_reason for one in many} == {"stop"}
    before = world.engine.stats()
    for prompts, params, error in (
        ([WORD, ""], [GREEDY, dataclasses.replace(GREEDY, top_p=2.0)], "top_p"),
        ([WORD, [99]], [GREEDY] * 2, "token ids from 0 to 31"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=error):
            world.engine.submit_all(prompts, params, lora="sort")
    assert world.engine.stats() == before
    assert world.engine.submit_all([], []) == []


def test_unloading_refuses_new_requests_and_serves_earlier_ones(world, oracle):
    want = oracle([Request("sort", WORD)])
    with world.paused() as go:
        running = world.engine.submit(WORD, GREEDY, lora="sort")
        until(lambda: world.engine.stats().running == 1)
        fill = [world.engine.submit(WORD, GREEDY) for _ in range(ROWS - 1)]
        until(lambda: world.engine.stats().running == ROWS)
        waiting = world.engine.submit(WORD, GREEDY, lora="sort")
        world.engine.remove_lora("sort")  # returns while the steps are paused
        assert "sort" not in world.engine.list_loras()
        for call in (lambda: world.engine.submit(WORD, lora="sort"), lambda: world.engine.remove_lora("sort")):
            with pytest.raises(jlora.AdapterNotFoundError, match="sort"):
                call()
        go.set()
        assert [list(one.result(60).tokens) for one in (running, waiting)] == want * 2
        assert all(one.result(60).finish_reason == "stop" for one in fill)
    world.wait_idle()
    assert "sort" not in slot_names(world.manager)
    assert not world.manager.list_adapters(["sort"])


@pytest.mark.parametrize("how", ["in place", "unloaded"])
def test_running_sequences_keep_their_version_during_a_load_of_their_name(world, oracle, how):
    with world.paused() as go:
        old = world.engine.submit(WORD, GREEDY, lora="sort")
        until(lambda: world.engine.stats().running == 1)
        with pytest.raises(AdapterExistsError, match="load_inplace"):
            world.engine.add_lora(request_of("sort", "shift"))
        if how == "unloaded":
            world.engine.remove_lora("sort")
        world.engine.add_lora(request_of("sort", "shift", load_inplace=how == "in place"), timeout=10)
        new = world.engine.submit(WORD, GREEDY, lora="sort")
        go.set()
        assert [list(old.result(60).tokens)] == oracle([Request("sort", WORD)])
        assert [list(new.result(60).tokens)] == oracle([Request("shift", WORD)])
    world.wait_idle()
    world.engine.add_lora(request_of("sort", load_inplace=True))


def test_bad_adapter_of_a_request_ends_only_its_own_requests(world, oracle, tmp_path):
    good = world.engine.submit(WORD, GREEDY, lora=request_of("guest", "swap"))
    bad = [world.engine.submit(WORD, GREEDY, lora=jlora.LoRARequest("bad", str(tmp_path))) for _ in range(2)]
    other = world.engine.submit(WORD, GREEDY, lora="shift")
    for one in bad:
        with pytest.raises(jlora.LoRAError, match="bad"):
            one.result(60)
    assert [list(good.result(60).tokens)] == oracle([Request("swap", WORD)])
    assert [list(other.result(60).tokens)] == oracle([Request("shift", WORD)])
    assert "guest" in world.engine.list_loras()
    assert "bad" not in world.engine.list_loras()
    with pytest.raises(jlora.LoRAError):
        world.engine.add_lora(jlora.LoRARequest("bad", str(tmp_path)))


def test_evicted_adapter_whose_folder_is_gone(world, tmp_path, caplog):
    shutil.copytree(ADAPTERS["sort"], tmp_path / "guest")
    world.engine.add_lora(jlora.LoRARequest("guest", str(tmp_path / "guest")))
    while "guest" not in evicted(world.manager):
        assert evict(world.manager)
    (tmp_path / "guest").rename(tmp_path / "away")
    with pytest.raises(jlora.AdapterUnavailableError, match=str(tmp_path / "guest")):
        world.engine.submit(WORD, GREEDY, lora="guest").result(60)
    assert [r.levelname for r in caplog.records if "guest" in r.getMessage()].count("WARNING") == 1
    assert "guest" in world.engine.list_loras()
    (tmp_path / "away").rename(tmp_path / "guest")
    assert world.engine.submit(WORD, GREEDY, lora="guest").result(60).text == "aelnpt"


def test_loads_that_hang_or_cannot_start_leave_room_for_others(world):
    hung, prefetch = [], world.manager.prefetch

    def hang(request):
        if request.name == "unlucky":
            raise RuntimeError("can't start new thread")
        if request.name.startswith("hang"):
            hung.append(Future())
            return hung[-1]
        return prefetch(request)

    world.around.prefetch = hang
    late = [world.engine.submit(WORD, GREEDY, lora=request_of(f"hang{i}", "sort"), timeout=0.3) for i in range(4)]
    unlucky = world.engine.submit(WORD, GREEDY, lora=request_of("unlucky", "swap"))
    with pytest.raises(jlora.LoRAError, match=r"'unlucky'.*can't start new thread"):
        unlucky.result(60)
    until(lambda: len(hung) == 4)
    for one in late:
        with pytest.raises(RequestTimeoutError):
            one.result(60)
    assert world.engine.submit(WORD, GREEDY, lora=request_of("guest", "swap")).result(60).text == "lpnate"
    assert all(load.cancelled() for load in hung)


def test_load_of_an_unloaded_adapter_does_not_bring_it_back(world, disk):
    assert evict(world.manager)
    (name,) = evicted(world.manager)
    disk.folder = ADAPTERS[name]
    disk.go.clear()
    request = world.engine.submit(WORD, GREEDY, lora=name)
    until(lambda: disk.reads)
    world.engine.remove_lora(name)
    request.cancel()
    assert request.result(60).finish_reason == "abort"
    disk.go.set()
    world.wait_idle()
    assert not world.manager.list_adapters([name])
    world.engine.add_lora(request_of(name))  # queued behind the cancelled load of this name
    assert world.engine.submit(WORD, GREEDY, lora=name).result(60).finish_reason == "stop"


def test_stats_count_loads_swaps_and_waits(world):
    for name in ("0", "1", "2", "3"):
        world.engine.add_lora(request_of(name, "sort"))  # the host has room for 6, so two are evicted
    before, counts = world.engine.stats(), world.manager.stats()
    names = ["0", "0", *evicted(world.manager)]
    assert len(names) == 4
    for name in names:
        answers(world, [Request(name, WORD)])
    world.wait_idle()
    after, later = world.engine.stats(), world.manager.stats()
    assert (later.host_loads - counts.host_loads, later.slot_loads - counts.slot_loads) == (2, 3)
    for one, other, name, count in (
        (counts, later, "load_seconds", 2),
        (counts, later, "swap_seconds", 3),
        (before, after, "queue_seconds", 4),
        (before, after, "adapter_wait_seconds", 3),  # the second found it there
    ):
        assert sum(getattr(other, name)[1]) - sum(getattr(one, name)[1]) == count
        assert getattr(other, name)[2] > getattr(one, name)[2]
    assert (later.leased, later.open_leases) == (0, 0)
    with world.manager.prepare(["0"]), world.manager.prepare([None]):
        assert (world.manager.stats().leased, world.manager.stats().open_leases) == (1, 2)
    # Unloaded adapters share one counter.
    unloaded = world.engine.stats().by_unloaded
    assert after.by_lora["0"] - before.by_lora.get("0", 0) == 2
    count = world.engine.stats().by_lora["0"]
    world.engine.remove_lora("0")
    assert "0" not in world.engine.stats().by_lora
    assert world.engine.stats().by_unloaded == unloaded + count


def test_listed_fields_of_an_adapter_outlive_eviction(world):
    engine, manager = world.engine, world.manager
    began = int(time.time())
    engine.add_lora(request_of("guest", "sort"), path="shown", parent="base")
    manager.add_adapter(request_of("beside", "sort"))
    found = engine.list_loras()
    assert (found["guest"].path, found["guest"].parent, found["guest"].info.name) == ("shown", "base", "guest")
    assert (found["beside"].path, found["beside"].parent) == (request_of("sort").path, None)
    assert began <= found["guest"].created <= found["beside"].created <= time.time()
    while "guest" not in evicted(manager):
        assert evict(manager)
    listed = engine.list_loras()["guest"]
    assert listed == dataclasses.replace(found["guest"], info=listed.info)
    assert (listed.info.level, listed.info.request) == ("evicted", request_of("guest", "sort"))
    engine.remove_lora("guest")
    assert "guest" not in engine.list_loras()
    engine.add_lora(request_of("guest", "sort"))
    assert engine.list_loras()["guest"].path == request_of("sort").path


def test_pinned_adapters_stay_in_their_slot(world):
    world.engine.pin_lora("swap")
    answers(world, [Request(name, WORD) for name in ("sort", "shift", "reverse")])
    assert "swap" in slot_names(world.manager)
    assert world.engine.list_loras()["swap"].info.pinned
    world.engine.unpin_lora("swap")
    assert not world.engine.list_loras()["swap"].info.pinned
    with pytest.raises(jlora.AdapterNotFoundError):
        world.engine.pin_lora("unknown")
    world.wait_idle()
    for name in ("swap", "sort"):
        world.engine.pin_lora(name)
    with pytest.raises(jlora.NoFreeSlotError):
        world.engine.submit(WORD, GREEDY, lora="shift").result(60)
    assert answers(world, [Request("swap", WORD)])[0].finish_reason == "stop"
    for name in ("swap", "sort"):
        world.engine.unpin_lora(name)


@pytest.mark.parametrize(("step", "lost"), [("prefill", False), ("decode", True)])
def test_failed_step_ends_its_requests_and_later_ones_are_served(world, oracle, monkeypatch, step, lost):
    """The step fails before it runs, or after its inputs were donated, which loses the cache."""
    failed, steps = world.engine.stats().failed_steps, world.engine._steps
    working = getattr(steps, f"_{step}")

    def failing(*args, **kwargs):
        monkeypatch.undo()
        if lost:
            working(*args, **kwargs)
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(steps, f"_{step}", failing)
    hit = world.engine.submit(WORD, GREEDY, lora="sort")
    with pytest.raises(StepFailedError, match="on fire"):
        hit.result(60)
    assert world.engine.stats().failed_steps == failed + 1
    requests = [Request(name, WORD) for name in (*ADAPTERS, None)]
    assert [list(one.tokens) for one in answers(world, requests)] == oracle(requests)


def overflowing(folder):
    """Write an adapter with finite weights whose products overflow."""
    shutil.copytree(ADAPTERS["sort"], folder)
    file = folder / "adapter_model.safetensors"
    arrays = {name: array.astype(np.float32) for name, array in safetensors.numpy.load_file(file).items()}
    arrays = {name: array * np.float32(1e37) if "lora_B" in name else array for name, array in arrays.items()}
    assert all(np.isfinite(array).all() for array in arrays.values())
    safetensors.numpy.save_file(arrays, file)
    return folder


@pytest.mark.slow
def test_overflowing_requests_change_no_other_answer(world, oracle, tmp_path):
    """Prompts of two chunks fill rows of the cache with NaN. Later requests reuse parts of these rows."""
    bad = Request("bad", "ab=" * 15)
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=1)
    known = demo_requests(DENSE)[:10]

    def run(requests):
        """Return the answers to all but `bad`, which fails."""
        asked = [(one, world.engine.submit(one.prompt, params, lora=one.adapter)) for one in requests]
        for request, generation in asked:
            if request == bad:
                with pytest.raises(StepFailedError, match="NaN"):
                    generation.result(60)
        return [generation.result(60) for request, generation in asked if request != bad]

    want = run(known)
    assert [list(one.tokens) for one in want] == oracle(known)
    world.engine.add_lora(jlora.LoRARequest("bad", str(overflowing(tmp_path / "bad"))))
    mixed = [bad if i % 5 == 2 else known[i % len(known)] for i in range(20)]
    right = dict(zip(known, want, strict=True))
    assert run(mixed) == [right[request] for request in mixed if request != bad]  # log probabilities to the bit
    run([bad] * ROWS)
    world.engine.remove_lora("bad")
    assert run(known) == want


@pytest.mark.slow
def test_raising_listener_affects_no_other_request(world, caplog):
    generation = world.engine.submit(WORD, GREEDY)
    generation.listen(lambda event: 1 / 0)
    assert answers(world, [Request("sort", WORD)])[0].finish_reason == "stop"
    assert "listener" in caplog.text


def test_kept_requests_go_on_with_their_version_and_their_tokens(world, oracle):
    (sort,), (swap,) = oracle([Request("sort", WORD)]), oracle([Request("swap", WORD)])
    engine = world.engine
    engine.add_lora(request_of("mine", "sort"))
    for _ in range(2):
        with world.paused() as go:  # before the first decode step
            before = engine.stats().generated_tokens
            kept = engine.submit(WORD, GREEDY, lora="mine")
            late = engine.submit(WORD, GREEDY, timeout=0.3)
            until(lambda before=before: engine.stats().generated_tokens == before + 2)
            engine.pause("keep")
            engine.pause("keep")  # twice
            go.set()
            assert engine.paused
            assert engine.ready
            engine.add_lora(request_of("mine", "swap"), load_inplace=True)
            engine.add_lora(request_of("other", "reverse"))
            engine.remove_lora("other")
            later = engine.submit(WORD, GREEDY, lora="mine")
            with pytest.raises(RequestTimeoutError, match=r"longer than 0\.1"):
                engine.submit(WORD, GREEDY, timeout=0.1).result(60)
            with pytest.raises(RequestTimeoutError, match=r"longer than 0\.3"):
                late.result(60)  # frozen
            cancelled = engine.submit(WORD, GREEDY)
            cancelled.cancel()
            assert cancelled.result(60).finish_reason == "abort"
            stats = engine.stats()
            assert (stats.running, stats.waiting, stats.generated_tokens) == (1, 1, before + 2)
            engine.resume()
            engine.resume()  # without a pause
            assert not engine.paused
            assert [list(one.result(60).tokens) for one in (kept, later)] == [sort, swap]
        engine.add_lora(request_of("mine", "sort"), load_inplace=True)
    whole = engine.submit(WORD, LONG, lora="mine").result(60)
    often = engine.submit(WORD, dataclasses.replace(LONG, logprobs=2), lora="mine")
    for _ in range(20):
        engine.pause("keep")
        engine.resume()
    assert often.result(60).tokens == whole.tokens


def test_abort_and_wait_end_the_requests_that_have_begun(world, oracle):
    (sort,) = oracle([Request("sort", WORD)])
    engine = world.engine
    with world.paused() as go:
        running = [engine.submit(WORD, LONG, lora="sort") for _ in range(ROWS)]
        waiting = engine.submit(WORD, GREEDY, lora="sort")
        until(lambda: engine.stats().running == ROWS)
        engine.pause("abort")
        assert [one.result(60).finish_reason for one in (*running, waiting)] == ["abort"] * (ROWS + 1)
        assert {len(one.result().tokens) for one in running} <= {0, 1}
        later = engine.submit(WORD, GREEDY, lora="sort")
        go.set()
        assert not world.manager.leases()
        engine.resume()
        assert list(later.result(60).tokens) == sort
    with world.paused() as go:
        running = [engine.submit(WORD, LONG, lora="sort") for _ in range(ROWS)]
        waiting = engine.submit(WORD, GREEDY, lora="sort")
        until(lambda: engine.stats().running == ROWS)
        pausing = threading.Thread(target=engine.pause, args=("wait",))
        pausing.start()
        until(lambda: engine.paused)
        assert pausing.is_alive()
        go.set()
        pausing.join(60)
        assert [len(one.result(60).tokens) for one in running] == [40] * ROWS
        until(lambda: (engine.stats().running, engine.stats().waiting) == (0, 1))
        engine.pause("keep")
        engine.resume()
        assert list(waiting.result(60).tokens) == sort


def test_pause_that_is_not_reached_raises(world):
    engine = world.engine
    with pytest.raises(jlora.LoRAUsageError, match="abort, wait, keep, got 'stop'"):
        engine.pause("stop")
    assert not engine.paused
    for end in (engine.resume, lambda: engine.pause("abort")):
        with world.paused() as go, ThreadPoolExecutor(1) as pool:
            running = engine.submit(WORD, LONG)
            until(lambda: engine.stats().running == 1)
            pausing = pool.submit(engine.pause, "wait")
            until(lambda: engine.paused)
            end()
            with pytest.raises(jlora.LoRAError, match=r"'wait'.* was ended"):
                pausing.result(60)
            go.set()
            engine.resume()
            running.result(60)


@pytest.mark.slow
def test_close_ends_a_pause(world):
    engine = Engine(world.model, world.manager, tokenizer=world.tokenizer, options=EngineOptions(max_num_seqs=2))
    with pytest.raises(EngineClosedError, match="it is new"):
        engine.pause("keep")
    engine.start()
    engine.pause("keep")
    kept = engine.submit(WORD, GREEDY)
    assert engine.close(60)
    assert kept.result(0).finish_reason == "stop"
    engine.resume()
    with pytest.raises(EngineClosedError, match="it is closed"):
        engine.pause("keep")

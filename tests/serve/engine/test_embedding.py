"""Embeddings in the engine: any adapters in one step, against models with merged weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")

import jax
import jax.numpy as jnp

import jlora
from jlora.errors import AdapterNotFoundError, LoRAUsageError
from jlora.models import from_pretrained
from jlora.serve import Engine, EngineBusyError, EngineOptions, RequestTimeoutError, StepFailedError
from tests.models import checkpoints
from tests.models.test_checkpoint import edit
from tests.serve.client import until
from tests.serve.conftest import compilations
from tests.serve.embedding import tokenizer, write_modules

NAMES = ("a", "b", "c", "called")
CALL = (7, 9)
LENGTHS = (1, 3, 33, 40, 64, 5, 17, 30)


def lora_of(name):
    """Return the factors of an adapter: layer -> (a, b)."""
    rng = np.random.default_rng(NAMES.index(name))
    shapes = {"self_attn.v_proj": (32, 32), "mlp.down_proj": (32, 48)}
    return {
        f"model.layers.{layer}.{module}": (rng.normal(size=(2, k)) * k**-0.5, 2 * rng.normal(size=(n, 2)))
        for layer in range(2)
        for module, (n, k) in shapes.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("embedding")
    checkpoints.write(root, checkpoints.DENSE["mistral"])
    prompts = {"prompts": {"d": "in: "}, "default_prompt_name": "d"}
    write_modules(root, "mean", prompts=prompts)
    return root


@pytest.fixture(scope="module")
def models(folder, tmp_path_factory):
    """Models by the name of the adapter that their weights have."""
    models = {None: from_pretrained(folder)}
    for name in NAMES:
        merged = tmp_path_factory.mktemp(name)
        checkpoints.write(merged, checkpoints.DENSE["mistral"])
        write_modules(merged, "mean")
        deltas = {f"{path}.weight": (b @ a).astype(np.float32) for path, (a, b) in lora_of(name).items()}
        edit(merged, lambda tensors, d=deltas: tensors.update({n: tensors[n] + delta for n, delta in d.items()}))
        models[name] = from_pretrained(merged)
    return models


@pytest.fixture(scope="module")
def oracle(models):
    """A function that computes the embedding of one prompt with a model whose weights have the adapter."""
    step = jax.jit(lambda model, ids, length: model.pooled(ids[None], length[None])[0])

    def embedding(name, ids):
        return np.asarray(step(models[name], jnp.asarray(np.resize(ids, 80)), jnp.asarray(len(ids))))

    return embedding


def adapter_of(name, **fields):
    factors = {path: [each.astype(np.float32) for each in pair] for path, pair in lora_of(name).items()}
    modules = {path: jlora.ModuleLoRA(a=a, b=b, alpha=2, scaling=1.0) for path, (a, b) in factors.items()}
    return jlora.Adapter(name=name, modules=modules, **fields)


@pytest.fixture(scope="module")
def engine(folder):
    """Two slots for four adapters, one of them activated; steps of at most 128 tokens."""
    model = from_pretrained(folder)
    config = jlora.LoRAConfig(max_loras=2, max_lora_rank=2, max_cpu_loras=8, activated=True, allow_nonfinite=True)
    manager = jlora.LoRAManager(model, config)
    for name in NAMES:
        manager.add_adapter(adapter_of(name, **({"invocation_tokens": CALL} if name == "called" else {})))
    options = EngineOptions(max_num_seqs=3, max_num_batched_tokens=128, max_waiting=8)
    engine = Engine(model, manager, tokenizer=tokenizer(), options=options)
    engine.start()
    yield engine
    assert engine.close(60)


def prompt_of(length, seed=0):
    return np.random.default_rng([length, seed]).integers(30, 100, length).tolist()


def results(generations):
    return [one.result(60).embedding for one in generations]


def test_mixed_adapters_and_lengths(engine, oracle):
    before, compiled = engine.stats(), compilations(engine)
    assert compiled == 2 * 4  # 1 or 3 prompts of 32 tokens, 1 or 2 of 64; with and without adapters
    names = [None, "a", "b", "c"]
    prompts = {name: [prompt_of(length, i) for length in LENGTHS] for i, name in enumerate(names)}
    under_way = []
    for name in names:
        until(lambda: engine.stats().waiting < 8)
        under_way.append((name, engine.embed(prompts[name], lora=name)))
    for name, generations in under_way:
        for prompt, found in zip(prompts[name], results(generations), strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, oracle(name, prompt), atol=2e-6)
    assert compilations(engine) == compiled
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.generated_tokens, stats.failed_steps) == (0, 0, 0, 0)
    assert stats.by_lora["a"] - before.by_lora.get("a", 0) == len(LENGTHS)
    until(lambda: not engine._manager.leases())
    (generation,) = engine.embed(["planet"], lora="b")  # with the default prompt
    found, ids = generation.result(60), tokenizer().encode("in: planet").ids
    np.testing.assert_allclose(found.embedding, oracle("b", ids), atol=2e-6)
    assert (found.text, found.tokens, found.finish_reason, found.prompt_tokens) == ("", (), "stop", len(ids))
    (late,) = engine.embed([[1]], timeout=1e-9)
    with pytest.raises(RequestTimeoutError):
        late.result(60)


def test_activated_adapters(engine, oracle):
    called, plain = [*CALL, *prompt_of(9)], prompt_of(11)
    ours = results(engine.embed([called, plain, [*plain, *CALL]], lora="called"))
    np.testing.assert_allclose(ours[0], oracle("called", called), atol=2e-6)
    np.testing.assert_allclose(ours[1], oracle(None, plain), atol=2e-6)
    last = [oracle(name, [*plain, *CALL]) for name in (None, "called")]
    assert min(np.abs(ours[2] - each).max() for each in last) > 1e-4


def test_dimensions(engine, oracle):
    prompt = prompt_of(8)
    whole = oracle("a", prompt)
    for count in (1, 5, 32):
        (found,) = results(engine.embed([prompt], dimensions=count, lora="a"))
        np.testing.assert_allclose(found, whole[:count] / np.linalg.norm(whole[:count]), atol=2e-6)
    for count in (0, 33):
        with pytest.raises(LoRAUsageError, match=f"dimensions must be from 1 to 32, the model's width, got {count}"):
            engine.embed([prompt], dimensions=count)


def test_refused_prompts(engine):
    for prompts, message in (
        ([[1], prompt_of(65)], "input 1: the prompt has 65 tokens; it must fit max_model_len=64"),
        ([[1], "a" * 64], "input 1: the prompt has 69 tokens; it must"),
        ([[]], "input 0: the prompt has no tokens"),
        ([[101]], "input 0: the prompt must hold token ids from 0 to 100"),
    ):
        with pytest.raises(LoRAUsageError, match=message):
            engine.embed(prompts)
    with pytest.raises(AdapterNotFoundError):
        engine.embed([[1]] * 3, lora="unknown")
    with pytest.raises(LoRAUsageError, match="cannot generate; use embed"):
        engine.submit([1])
    assert engine.stats().waiting == 0


def test_a_request_of_many_prompts_is_admitted_whole(engine, oracle):
    prompts = [prompt_of(60, i) for i in range(200)]
    generations = engine.embed(prompts, lora="a")
    with pytest.raises(EngineBusyError):
        engine.embed([[1]])
    for one in generations[100:]:
        one.cancel()
    late = [one.result(60) for one in generations]
    for i in (0, 99):
        np.testing.assert_allclose(late[i].embedding, oracle("a", prompts[i]), atol=2e-6)
    assert {one.finish_reason for one in late[:100]} == {"stop"}
    assert late[199].finish_reason == "abort"
    assert late[199].embedding is None
    until(lambda: not engine._manager.leases())


def test_a_request_has_one_version_of_its_adapter(engine, oracle):
    prompt = prompt_of(60)
    a, b = (oracle(name, prompt) for name in "ab")
    assert np.abs(a - b).max() > 1e-2
    engine.add_lora(replace(adapter_of("a"), name="mine"))
    generations = engine.embed([prompt] * 400, lora="mine")
    assert generations[0].result(60).finish_reason == "stop"
    engine.add_lora(replace(adapter_of("b"), name="mine"), load_inplace=True)
    assert engine.stats().waiting  # so the adapter was replaced during the request
    for found in results(generations):
        np.testing.assert_allclose(found, a, atol=2e-6)
    (found,) = results(engine.embed([prompt], lora="mine"))
    np.testing.assert_allclose(found, b, atol=2e-6)
    engine.remove_lora("mine")


POOLINGS = {
    "cls": lambda n: [1] + [0] * (n - 1),
    "lasttoken": lambda n: [0] * (n - 1) + [1],
    "mean": lambda n: [1 / n] * n,
    "mean_sqrt_len_tokens": lambda n: [n**-0.5] * n,
    "weightedmean": lambda n: [2 * i / (n * (n + 1)) for i in range(1, n + 1)],
}
PROMPTS = {"prompts": {"d": "in: "}, "default_prompt_name": "d"}


@pytest.fixture(scope="module")
def hidden_of(models):
    """A function that computes the float64 hidden states [L, E] of a prompt with the weights of adapter a merged."""
    step = jax.jit(lambda model, ids: model(ids[None])[0])
    return lambda ids: np.asarray(step(models["a"], np.resize(ids, 80))[: len(ids)], np.float64)


@pytest.fixture
def folder_of(tmp_path, engine):
    """A function that writes adapter a with files of sentence-transformers, and returns its request."""
    made = []

    def write(name, *args, **options):
        adapter_of("a").save_pretrained(tmp_path / name)
        write_modules(tmp_path / name, *args, **({"prompts": PROMPTS} | options))
        made.append(name)
        return jlora.LoRARequest(name, str(tmp_path / name))

    yield write
    for name in set(made) & engine.list_loras().keys():
        engine.remove_lora(name)


@pytest.mark.parametrize("how", ["add_lora", "a request", "the manager"])
def test_adapters_bring_their_own_pooling(engine, oracle, hidden_of, folder_of, how):
    """Each text has that of its adapter, also in one step. The base and adapters without files have the model's."""
    kinds = [(mode, normalize) for mode in POOLINGS for normalize in (False, True)]
    requests = {kind: folder_of("-".join(map(str, kind)), kind[0], normalize=kind[1]) for kind in kinds}
    for request in requests.values():
        if how == "add_lora":
            engine.add_lora(request)
        elif how == "the manager":
            engine._manager.add_adapter(request)
    prompts, found = [prompt_of(9), prompt_of(30)], {}
    with_request = how == "a request"
    for kind, request in requests.items():
        until(lambda: engine.stats().waiting < 8)
        found[kind] = engine.embed(prompts, lora=request if with_request else request.name)
    until(lambda: engine.stats().waiting == 0)
    plain = [engine.embed(prompts[:1], lora=name) for name in (None, "a")]
    for (mode, normalize), generations in found.items():
        for prompt, result in zip(prompts, results(generations), strict=True):
            want = np.asarray(POOLINGS[mode](len(prompt))) @ hidden_of(prompt)
            np.testing.assert_allclose(result, want / np.linalg.norm(want) if normalize else want, atol=1e-5)
    for name, generations in zip((None, "a"), plain, strict=True):
        np.testing.assert_allclose(*results(generations), oracle(name, prompts[0]), atol=2e-6)
    (cut,) = results(engine.embed(prompts[:1], lora="cls-False", dimensions=4))
    np.testing.assert_allclose(cut, hidden_of(prompts[0])[0, :4], atol=1e-5)


def test_a_longest_text_of_an_adapter(engine, folder_of):
    engine.add_lora(folder_of("short", "mean", settings={"max_seq_length": 10}))
    short, long = engine.embed([prompt_of(10), prompt_of(11)], lora="short")
    assert short.result(60).finish_reason == "stop"
    with pytest.raises(LoRAUsageError, match="has 11 tokens; it must fit max_seq_length=10 of adapter 'short'"):
        long.result(60)


@pytest.mark.parametrize("how", ["add_lora", "a request", "the manager"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "max"}, "1_Pooling/config.json: pooling_mode must be one of .* got 'max'"),
        ({"modules": ["Transformer", "Pooling", "Dense"]}, "modules must be .* got Transformer, Pooling, Dense"),
        ({"modules": ["Transformer", "SpladePooling"]}, "modules.json has no Pooling module"),
        ({"prompts": {}}, "the default prompt is ''; expected that of the model, 'in: '"),
        ({"settings": {"do_lower_case": True}}, "do_lower_case must be false"),
    ],
)
def test_files_that_are_not_served_are_refused_by_name(engine, folder_of, how, changes, words):
    modules = changes.get("modules")
    request = folder_of("odd", **{name: value for name, value in changes.items() if name != "modules"})
    if modules is not None:
        entries = [{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"} for kind in modules]
        (Path(request.path) / "modules.json").write_text(json.dumps(entries))
    if how == "add_lora":
        with pytest.raises(jlora.AdapterMismatchError, match=f"adapter 'odd': .*{words}"):
            engine.add_lora(request)
        assert "odd" not in engine.list_loras()
        return
    if how == "the manager":
        engine._manager.add_adapter(request)
    (failed,) = engine.embed([prompt_of(6)], lora=request)
    with pytest.raises(jlora.AdapterMismatchError, match=f"adapter 'odd': .*{words}"):
        failed.result(60)
    assert engine.embed([prompt_of(6)], lora="a")[0].result(60).finish_reason == "stop"


def test_a_refused_replacement_changes_nothing(engine, hidden_of, folder_of):
    engine.add_lora(folder_of("mine", "cls", normalize=False))
    with pytest.raises(jlora.AdapterMismatchError, match=r"adapter 'mine': .*pooling_mode"):
        engine.add_lora(folder_of("mine", "max"), load_inplace=True)
    (found,) = results(engine.embed([prompt_of(6)], lora="mine"))
    np.testing.assert_allclose(found, hidden_of(prompt_of(6))[0], atol=1e-5)


def test_an_adapter_of_nan_fails_alone(engine, oracle):
    bad = adapter_of("a")
    bad.modules["model.layers.0.mlp.down_proj"].a[0, 0] = np.nan
    engine._manager.add_adapter(jlora.Adapter(name="nan", modules=bad.modules))
    broken, fine = engine.embed([prompt_of(6)], lora="nan"), engine.embed([prompt_of(6)], lora="b")
    with pytest.raises(StepFailedError, match="not finite numbers"):
        broken[0].result(60)
    np.testing.assert_allclose(fine[0].result(60).embedding, oracle("b", prompt_of(6)), atol=2e-6)

"""The unmodified SDK, offline, against a server process."""

import math
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

tinker = pytest.importorskip("tinker")
from tinker import types
from tinker.types import RequestErrorCategory

import jlora
from tests.tinker.server import ROOT, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    # The SDK leaves sockets open.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "tml-test"
PROMPT = [1, 4, 5, 6, 3]


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    found = Server(tmp_path_factory.mktemp("tinker"), "--api-key", KEY, "--gap-timeout", "2")
    yield found
    assert found.end() == 0


@pytest.fixture
def service(server):
    found = client(server)
    yield found
    found.close("success").result()


def client(server: Server, key: str = KEY) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=key)


def datum(tokens: list[int], **inputs: Any) -> Any:
    given = {"target_tokens": tokens[1:], **inputs}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


def trained(service: Any, server: Server, **options: Any) -> Any:
    return service.create_lora_training_client(base_model=server.base, **{"rank": 4, "seed": 1} | options).result()


def move(trainer: Any, *data: Any, rate: float = 1e-2) -> float:
    computed = trainer.forward_backward(list(data), "cross_entropy")
    step = trainer.optim_step(types.AdamParams(learning_rate=rate))
    assert step.result().metrics["grad_norm:mean"] > 0
    return computed.result().metrics["loss:sum"]


def loss(trainer: Any, *data: Any) -> float:
    return trainer.forward(list(data), "cross_entropy").result().metrics["loss:sum"]


def sampled(sampler: Any, prompt: list[int] = PROMPT, samples: int = 1, **params: Any) -> Any:
    topk = params.pop("topk", 0)
    return sampler.sample(
        types.ModelInput.from_ints(prompt), samples, types.SamplingParams(**params), topk_sample_logprobs=topk
    ).result()


def current(trainer: Any) -> Any:
    found = trainer.save_weights_and_get_sampling_client()
    return found.result() if hasattr(found, "result") else found


def failure(future: Any) -> Any:
    with pytest.raises(tinker.RequestFailedError) as error:
        future.result()
    return error.value


def folders_of(server: Server, model: str, *also: str) -> list[Path]:
    """Return what the folder of checkpoints has of a model, by its name, or by these ends of names."""
    found = Path(server.process.args[server.process.args.index("--checkpoints") + 1]).iterdir()
    return [path for path in found if path.name == model.replace(":", "-") or path.name.endswith((*also, "\0"))]


@contextmanager
def no_folder(path: Path) -> Iterator[None]:
    """A file in its place, so that nothing can be written to it."""
    away = path.rename(path.with_name("away"))
    path.touch()
    try:
        yield
    finally:
        path.unlink()
        away.rename(path)


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


DATA = [datum([1, 4, 9, 6, 7, 3, 5, 6, 7, 2]), datum([1, 8, 3, 2])]


def test_capabilities_name_the_model(service, server):
    (model,) = service.get_server_capabilities().supported_models
    assert (model.model_name, model.max_context_length) == (server.base, 64)
    assert trained(service, server).get_info().model_data.tokenizer_id.endswith("demo/model")


def test_weights_scale_the_loss_of_each_token(service, server):
    trainer, tokens = trained(service, server), [1, 4, 9, 6, 7]
    logprobs = trainer.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert math.isclose(loss(trainer, datum(tokens)), -sum(logprobs), rel_tol=1e-5)
    assert loss(trainer, datum(tokens, weights=[0.0] * 4)) == 0
    weighted = datum(tokens, weights=[0.0, 1.0, 0.5, -1.0])
    assert math.isclose(loss(trainer, weighted), -np.dot([0, 1, 0.5, -1], logprobs), rel_tol=1e-4)


def test_a_training_life(service, server):
    trainer = trained(service, server)
    losses = [move(trainer, *DATA) for _ in range(4)]
    assert losses[-1] < 0.8 * losses[0]
    path = trainer.save_state("step-4").result().path
    assert path == f"tinker://{trainer.model_id}/weights/step-4"
    whole = service.create_training_client_from_state_with_optimizer(path).result()
    weights = service.create_training_client_from_state(path).result()
    assert loss(trainer, *DATA) == loss(whole, *DATA) == loss(weights, *DATA)
    for each in (trainer, whole, weights):
        move(each, *DATA)
    assert loss(trainer, *DATA) == loss(whole, *DATA) != loss(weights, *DATA)
    assert "comes before all else" in str(failure(trainer.load_state(path)))
    fresh = trained(service, server, seed=9)
    assert fresh.load_state(path).result().path == path
    assert "exists; expected a new name" in str(failure(trainer.save_state("step-4")))


def test_a_custom_loss_equals_the_one_that_is_built_in(service, server):
    torch = pytest.importorskip("torch")
    one, other = (trained(service, server) for _ in range(2))

    def custom(data: Any, logprobs: Any) -> Any:
        return sum(-each.sum() for each in logprobs), {"custom/x:sum": 2.0}

    for _ in range(2):
        computed = one.forward_backward_custom(DATA, custom)
        one.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        assert math.isclose(computed.result().metrics["loss:sum"], move(other, *DATA), rel_tol=1e-5)
    assert math.isclose(loss(one, *DATA), loss(other, *DATA), rel_tol=1e-5)
    assert torch

    def wrong(data: Any, logprobs: Any) -> Any:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        one.forward_backward_custom(DATA, wrong).result()


def test_losses_of_policies_and_those_refused(service, server):
    trainer, tokens = trained(service, server), [1, 4, 9, 6, 7]
    logprobs = trainer.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    advantages = [0.0, 1.0, -1.0, 2.0]
    policy = datum(tokens, logprobs=[x - 0.5 for x in logprobs], advantages=advantages)
    ratio = math.exp(0.5)
    low = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    expected = {
        "importance_sampling": -ratio * sum(advantages),
        "ppo": -sum(min(ratio * a, 1.1 * a) for a in advantages),
        "cispo": -sum(1.1 * a * x for a, x in zip(advantages, logprobs, strict=True)),
    }
    for name, value in expected.items():
        config = None if name == "importance_sampling" else low
        found = trainer.forward_backward([policy], name, config).result().metrics["loss:sum"]
        assert math.isclose(found, value, rel_tol=1e-4), name
    trainer.optim_step(types.AdamParams()).result()
    for name in ("dro", "gspo", "stable_reinforce"):
        error = failure(trainer.forward([policy], name))
        assert repr(name) in str(error)
        assert error.category is RequestErrorCategory.User


def test_samples_have_the_logprobs_of_forward(service, server):
    trainer = trained(service, server)
    for _ in range(3):
        move(trainer, *DATA)
    found = sampled(current(trainer), samples=3, max_tokens=8, seed=3, stop=[], topk=2)
    differences = []
    for each in found.sequences:
        assert each.stop_reason == "length"
        assert len(each.tokens) == len(each.logprobs) == len(each.topk_logprobs) == 8
        assert all(
            max(value for _, value in top) >= own for top, own in zip(each.topk_logprobs, each.logprobs, strict=True)
        )
        forward = trainer.forward([datum([*PROMPT, *each.tokens])], "cross_entropy").result()
        own = np.array(forward.loss_fn_outputs[0]["logprobs"].data)[len(PROMPT) - 1 :]
        differences.append(np.abs(own - np.array(each.logprobs)))
    assert np.mean(differences) < 1e-5
    assert len({tuple(each.tokens) for each in found.sequences}) > 1
    again = sampled(current(trainer), samples=3, max_tokens=8, seed=3, stop=[], topk=2)
    assert [each.tokens for each in again.sequences] == [each.tokens for each in found.sequences]


def test_logprobs_of_a_prompt_are_those_of_forward(service, server):
    trainer, tokens = trained(service, server), [1, 4, 9, 6, 7, 3, 5]
    move(trainer, *DATA)
    forward = trainer.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = current(trainer)
    first, *others = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert first is None
    assert np.abs(np.array(others) - np.array(forward)).mean() < 1e-5
    params = types.SamplingParams(max_tokens=2)
    found = sampler.sample(
        types.ModelInput.from_ints(tokens), 2, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert found.prompt_logprobs[1:] == others
    assert [len(top or ()) for top in found.topk_prompt_logprobs] == [0, 3, 3, 3, 3, 3, 3]
    for top, own in zip(found.topk_prompt_logprobs[1:], others, strict=True):
        assert top[0][1] >= own
        assert top[0][1] >= top[1][1] >= top[2][1]


def test_sampling_from_the_base_and_stops(service, server):
    base = service.create_sampling_client(base_model=server.base)
    base = base.result() if hasattr(base, "result") else base
    (greedy,) = sampled(base, temperature=0, max_tokens=8, stop=[]).sequences
    assert len(greedy.tokens) == 8
    stop = greedy.tokens[2]
    first = greedy.tokens.index(stop)
    (cut,) = sampled(base, temperature=0, max_tokens=8, stop=[stop]).sequences
    assert cut.tokens == greedy.tokens[: first + 1]  # the stop too
    assert cut.stop_reason == "stop"
    (ended,) = sampled(base, temperature=0, max_tokens=8).sequences  # EOS is token 2
    assert ended.tokens == greedy.tokens[: greedy.tokens.index(2) + 1 if 2 in greedy.tokens else 8]
    error = failure(base.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(), prompt_alt_tokens_k=2))
    assert "prompt_alt_tokens_k is not implemented" in str(error)
    assert error.category is RequestErrorCategory.User


def test_a_sampler_keeps_its_weights(service, server):
    trainer = trained(service, server)
    move(trainer, *DATA)
    before = current(trainer)
    first = sampled(before, temperature=0, max_tokens=6, stop=[]).sequences[0]
    for _ in range(4):
        move(trainer, *DATA, rate=5e-2)
    after = sampled(current(trainer), temperature=0, max_tokens=6, stop=[]).sequences[0]
    again = sampled(before, temperature=0, max_tokens=6, stop=[]).sequences[0]
    assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
    assert after.logprobs != first.logprobs


def test_samplers_beyond_the_host_cache_are_loaded_again(service, server):
    """More than its 8 places; each is sampled from at once, while its folder is written."""
    trainer, samplers, before = trained(service, server), [], []
    for _ in range(10):
        move(trainer, *DATA)
        samplers.append(current(trainer))
        before.append(sampled(samplers[-1], temperature=0, max_tokens=4, stop=[]).sequences[0].logprobs)
    again = [sampled(each, temperature=0, max_tokens=4, stop=[]).sequences[0].logprobs for each in samplers]
    assert again == before


def test_models_that_end_while_their_samplers_are_written_leave_nothing(service, server):
    """If some kept their places in the host cache, the last would find none."""
    ended = []
    for i in range(5):
        model = trained(service, server).model_id
        for seq_id in (1, 2):
            number = {"seq_id": seq_id, "sampling_session_seq_id": 100 * seq_id + i}
            assert post(server, "save_weights_for_sampler", model_id=model, **number).status_code == 200
        post(server, "unload_model", model_id=model)
        ended.append(model)
    last = current(trained(service, server))
    assert sampled(last, max_tokens=3, stop=[]).sequences[0].tokens
    until(lambda: not [path for model in ended for path in folders_of(server, model, ".part")])


def test_a_sampler_that_cannot_be_written_ends(service, server):
    trainer = trained(service, server)
    (folder,) = folders_of(server, trainer.model_id)
    with no_folder(folder):
        sampler = current(trainer)
        until(lambda: any("could not be written, and is deleted" in line for line in server.log))
    until(lambda: not folders_of(server, "", ".part"))
    error = failure(sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams()))
    assert "does not exist" in str(error)
    assert sampled(current(trainer), max_tokens=3, stop=[]).sequences[0].tokens


def test_checkpoints_are_listed_downloaded_and_deleted(service, server, tmp_path):
    trainer, rest = trained(service, server), service.create_rest_client()
    move(trainer, *DATA)
    path = trainer.save_weights_for_sampler("sampler").result().path
    external = trainer.save_weights_external("external").result().path
    trainer.save_state("state", ttl_seconds=3600, user_metadata={"step": "1"}).result()
    found = {each.checkpoint_id: each for each in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    assert found.keys() == {"weights/state", "sampler_weights/sampler", "external_weights/external"}
    assert found["weights/state"].user_metadata == {"step": "1"}
    assert found["weights/state"].expires_at is not None
    assert rest.get_training_run(trainer.model_id).result().last_sampler_checkpoint.tinker_path == path
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    urls = rest.get_external_weights_urls(external).result().urls
    for name, url in urls.items():
        with urllib.request.urlopen(url) as response:
            (tmp_path / name).write_bytes(response.read())
    assert jlora.Adapter.from_pretrained(tmp_path).rank == 4
    wrong = urls["adapter_config.json"].replace("expires=", "expires=9")
    assert httpx.get(wrong).status_code == 403
    sampler = service.create_sampling_client(model_path=path)
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    assert sampled(sampler, max_tokens=3, stop=[]).sequences[0].tokens
    rest.delete_checkpoint(trainer.model_id, "sampler_weights/sampler").result()
    assert "does not exist" in str(
        failure(sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams()))
    )
    assert len(rest.list_checkpoints(trainer.model_id).result().checkpoints) == 2
    assert all(httpx.get(url).status_code == 200 for url in urls.values())


def test_wrong_requests_are_of_the_user(service, server):
    trainer = trained(service, server)
    for wrong, message in (
        (datum([1, 99, 3]), "needs token ids from 0 to 31, got"),
        (datum(list(range(1, 31)) * 3), "expected 1 to 64"),
        (datum([1, 2, 3], weights=[1.0]), "weights has 1 values; expected 2"),
        (datum([1, 2, 3], advantages=[1.0, 1.0]), "no input 'advantages'"),
    ):
        error = failure(trainer.forward([wrong], "cross_entropy"))
        assert message in str(error)
        assert error.category is RequestErrorCategory.User
    error = failure(trainer.forward_backward([datum([1, 99, 3])], "cross_entropy"))
    assert "99" in str(error)
    assert "one failed: data[0]" in str(failure(trainer.optim_step(types.AdamParams())))
    assert "there was none" in str(failure(trainer.optim_step(types.AdamParams())))
    move(trainer, *DATA)  # it goes on
    with pytest.raises(tinker.RequestFailedError, match="is not served") as error:
        service.create_lora_training_client(base_model="another").result()
    assert error.value.category is RequestErrorCategory.User
    with pytest.raises(tinker.RequestFailedError, match="a rank from 1 to 8"):
        trained(service, server, rank=9)
    attention = trained(service, server, train_mlp=False, train_unembed=False)
    move(attention, *DATA)
    with pytest.raises(tinker.AuthenticationError):
        client(server, "tml-another").get_server_capabilities()


def test_an_error_of_the_server_is_of_the_server(service, server):
    """A folder that cannot be written to."""
    trainer = trained(service, server)
    move(trainer, *DATA)
    trainer.save_state("made").result()
    (folder,) = folders_of(server, trainer.model_id)
    with no_folder(folder):
        error = failure(trainer.save_state("not-made"))
    assert error.category is RequestErrorCategory.Server
    assert loss(trainer, *DATA) > 0


def test_two_clients_at_once_have_what_each_has_alone(server):
    def curve(trainer: Any) -> list[float]:
        return [move(trainer, *DATA) for _ in range(3)]

    with client(server) as service:
        alone = curve(trained(service, server, seed=5))
        trainers = [trained(service, server, seed=5) for _ in range(3)]  # one more than there are places
        computed = [[] for _ in trainers]
        for _ in range(3):
            futures = [trainer.forward_backward(DATA, "cross_entropy") for trainer in trainers]
            steps = [trainer.optim_step(types.AdamParams(learning_rate=1e-2)) for trainer in trainers]
            for own, future, step in zip(computed, futures, steps, strict=True):
                own.append(future.result().metrics["loss:sum"])
                step.result()
    np.testing.assert_allclose(computed, [alone] * 3, rtol=1e-5)


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/api/v1/{path}", json=body, headers={"X-API-Key": KEY}, timeout=60)


def test_unload_frees_a_model(service, server):
    trainer = trained(service, server)
    move(trainer, *DATA)
    found = post(server, "unload_model", model_id=trainer.model_id).json()
    assert post(server, "retrieve_future", request_id=found["request_id"]).json()["type"] == "unload_model"
    assert post(server, "get_info", model_id=trainer.model_id).status_code == 410


def test_http_limits(server):
    for path, body, status in (
        ("create_session", {"tags": [], "user_metadata": {"x": "y" * 5000}, "sdk_version": "0"}, 400),
        ("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0", "unknown": 1}, 400),
        ("session_heartbeat", {"session_id": "0" * 32}, 410),
        ("retrieve_future", {"request_id": "0" * 32 + ":train:0:1"}, 410),
        ("retrieve_futures", {}, 404),
        ("telemetry", {"events": []}, 200),
    ):
        assert post(server, path, **body).status_code == status, path
    url, key = f"{server.url}/api/v1/forward_backward", {"X-API-Key": KEY, "Content-Type": "application/x-protobuf"}
    assert httpx.post(url, content=b"x" * 100, headers=key | {"Content-Encoding": "zstd"}).status_code == 400
    assert httpx.post(url, content=b"\xff" * 100, headers=key).status_code == 400
    assert httpx.post(url, content=b"x" * (2**24 + 1), headers=key).status_code == 413
    assert httpx.post(url, content=b"x").status_code == 401
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}


def test_a_repeated_request_and_a_gap(service, server):
    trainer = trained(service, server)
    body = {"model_id": trainer.model_id, "type": "optim_step", "adam_params": {"learning_rate": 1e-3}}
    first, again = (post(server, "optim_step", **body, seq_id=1).json() for _ in range(2))
    assert first == again
    late = post(server, "optim_step", **body, seq_id=3).json()["request_id"]
    answer = post(server, "retrieve_future", request_id=late).json()
    assert answer["category"] == "user"
    assert "seq_id 2 did not come" in answer["error"]


KILLED = """
import sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key=sys.argv[2])
print(service.create_lora_training_client(base_model=sys.argv[3], rank=2).result().model_id, flush=True)
import time; time.sleep(60)
"""


def test_killed_clients_and_a_killed_server(tmp_path):
    """A client that is gone loses its places; a killed server loses the steps that were not saved."""
    server = Server(tmp_path, "--session-timeout", "15", "--max-models", "2")
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, server.url, KEY, server.base], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert killed.stdout.readline()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    service = client(server)
    trainer = trained(service, server)
    for _ in range(2):
        move(trainer, *DATA)
    path, saved = trainer.save_state("saved").result().path, loss(trainer, *DATA)
    sampler = trainer.save_weights_for_sampler("sampler").result().path
    with pytest.raises(tinker.RequestFailedError, match="2 models are open"):
        trained(service, server)
    deadline = time.monotonic() + 60
    while True:  # the killed client's session ends
        try:
            trained(service, server)
            break
        except tinker.RequestFailedError:
            assert time.monotonic() < deadline
            time.sleep(1)
    move(trainer, *DATA)  # not saved
    server.kill()

    server = Server(tmp_path, "--max-loras", "1", port=server.port)
    rest = client(server).create_rest_client()
    assert trainer.model_id in [run.training_run_id for run in rest.list_training_runs().result().training_runs]
    with pytest.raises(tinker.APIStatusError) as error:
        loss(trainer, *DATA)
    assert error.value.status_code == 410
    service = client(server)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert loss(again, *DATA) == saved
    found = service.create_sampling_client(model_path=sampler)
    found = found.result() if hasattr(found, "result") else found
    for each in (found, current(again)):  # of two adapters in the one place
        assert len(sampled(each, max_tokens=3, stop=[]).sequences[0].tokens) == 3
    assert server.end() == 0


def test_no_bind_beyond_this_machine_without_a_key(tmp_path):
    for host, more in (("0.0.0.0", []), ("127.0.0.1", ["--api-key", "wrong"])):
        command = [
            sys.executable,
            "-m",
            "jlora",
            "tinker",
            "no-such-model",
            "--checkpoints",
            str(tmp_path),
            "--host",
            host,
        ]
        found = subprocess.run([*command, *more], cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 1
        assert ("give a key" if host == "0.0.0.0" else "tml-") in found.stderr

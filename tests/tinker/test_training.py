"""The training thread: order, company, places on the device, errors. Needs no SDK."""

import threading

import jax
import numpy as np
import pytest
from flax import nnx

from jlora.errors import LoRAUsageError
from jlora.models import Decoder
from jlora.tinker.training import Computation, Model, Update, fresh_optimizer
from tests.tinker.models import CONFIG, ask, computed, created, example, moved, training

COMPILED = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def thread():
    found = training()
    found.start()
    yield found
    found.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_new_model_has_the_losses_of_the_base_model(thread):
    tenant = created(thread, "new")
    one = example(0, 5, weights=np.array([0, 1, 2, 0, 1], np.float32))
    found = computed(thread, tenant, one, forward_only=True)
    logits = Decoder(CONFIG, rngs=nnx.Rngs(0))(one.tokens[None])[0]
    logprobs = log_softmax(np.asarray(logits))[np.arange(5), one.targets]
    np.testing.assert_allclose(found.logprobs[0], logprobs, atol=1e-5)  # of the tokens of weight 0 too
    np.testing.assert_allclose(found.losses[0], -(logprobs * one.weights).sum(), rtol=1e-5)


def test_a_model_in_company_has_the_losses_that_it_has_alone(thread):
    """Two models, whose examples share steps, move as each does by itself."""
    examples = {"x": [example(i, 3 + i) for i in range(3)], "y": [example(9 + i, 6) for i in range(5)]}

    def losses(*names: str) -> dict[str, list[list[float]]]:
        tenants = {name: created(thread, f"{name} of {names}", seed=3) for name in names}
        found: dict[str, list[list[float]]] = {name: [] for name in names}
        for _ in range(4):
            answers = {n: ask(thread, tenants[n], Computation(examples[n], "cross_entropy")) for n in names}
            for name, answer in answers.items():
                found[name].append(answer.get(timeout=60).losses)
            for tenant in tenants.values():
                assert moved(thread, tenant) > 0
        return found

    together = losses("x", "y")
    for name in examples:
        np.testing.assert_allclose(np.array(together[name]), np.array(losses(name)[name]), rtol=1e-5)
    assert not np.allclose(together["x"][0], together["x"][-1])


def test_models_beyond_the_capacity_wait_on_the_host_and_go_on(thread):
    """Four models, of which two have a place at a time, interleaved; each has the bits of one that stays."""
    own = example(4, 8)

    def losses(tenants, steps=3):
        for _ in range(steps):
            for tenant in tenants:
                computed(thread, tenant, own)
            for tenant in tenants:
                moved(thread, tenant)
        return [computed(thread, tenant, own, forward_only=True).losses for tenant in tenants]

    (alone,) = losses([created(thread, "stays", seed=7)])
    assert losses([created(thread, f"parked {i}", seed=7) for i in range(4)]) == [alone] * 4


def test_many_models_are_created_without_a_compilation(thread):
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event))
    jax.jit(lambda x: x + 1)(np.float32(1))
    assert COMPILED in compiled  # it is heard
    compiled.clear()
    for i in range(30):
        tenant = created(thread, f"many {i}", rank=1 + i % 4, seed=i)
        computed(thread, tenant, example(i, 1 + i % 16))
        moved(thread, tenant)
        if i % 2:
            assert ask(thread, tenant, lambda tenant=tenant: thread.end(tenant)).get(timeout=60) is None
    assert COMPILED not in compiled


def test_steps_have_the_rows_of_one_model_after_the_other():
    """A model keeps its rows together, and the next step begins with those of another."""
    thread, steps = training(), []
    thread.start()
    tenants, busy = [created(thread, name) for name in ("x", "y")], threading.Event()
    prepare = thread._trainer.prepare
    thread._trainer.prepare = lambda names: steps.append(names) or prepare(names)
    waits = ask(thread, tenants[0], busy.wait)
    answers = [
        ask(thread, tenant, Computation([example(i, 5) for i in range(rows)], "cross_entropy"))
        for tenant, rows in zip(tenants, (7, 3), strict=True)
    ]
    busy.set()
    assert waits.get(timeout=60)
    assert [len(answer.get(timeout=60).losses) for answer in answers] == [7, 3]
    thread.close()
    assert steps == [["x"] * 4, ["y"] * 3 + ["x"], ["x"] * 2 + [None] * 2]


def test_requests_of_a_model_run_in_their_order(thread):
    tenant, own = created(thread, "in order"), example(1, 7)
    expected = [computed(thread, tenant, own).losses[0] for step in range(4) if not step or moved(thread, tenant)]
    tenant, answers, steps = created(thread, "in order at once"), [], []
    for _ in range(4):
        answers.append(ask(thread, tenant, Computation([own], "cross_entropy")))
        numbers = {"learning_rate": 1e-2, "b2": 0.95, "eps": 1e-12}
        steps.append(ask(thread, tenant, Update(numbers)))
    assert [answer.get(timeout=60).losses[0] for answer in answers] == expected
    assert all(isinstance(step.get(timeout=60), float) for step in steps)  # each has the gradients before it


def test_the_losses_of_policies(thread):
    rng, n = np.random.default_rng(0), 6
    own = example(
        2, n, sampled=-rng.random(n).astype(np.float32) * 4, advantages=rng.standard_normal(n).astype(np.float32)
    )
    tenant = created(thread, "policies")
    logprobs = computed(thread, tenant, own, forward_only=True).logprobs[0].astype(np.float64)
    ratio = np.exp(logprobs - own.sampled)
    clipped = ratio.clip(0.7, 1.1)
    for loss, values in {
        "importance_sampling": ratio * own.advantages,
        "ppo": np.minimum(ratio * own.advantages, clipped * own.advantages),
        "cispo": clipped * own.advantages * logprobs,
    }.items():
        found = computed(thread, tenant, own, loss=loss, low=0.7, high=1.1, forward_only=True)
        np.testing.assert_allclose(found.losses[0], -values.sum(), rtol=1e-4)


def test_a_step_without_gradients_is_refused_and_the_model_stays(thread):
    tenant, own = created(thread, "stays as it is"), example(3, 4)
    before = computed(thread, tenant, own, forward_only=True).losses
    assert "there was none" in str(moved(thread, tenant))
    error = LoRAUsageError("loss_fn 'dro' is not implemented")
    computed(thread, tenant, own)
    refused = ask(thread, tenant, lambda: thread.refuse(tenant, error, forward_only=False)).get(timeout=60)
    assert refused is error
    assert "one failed: loss_fn 'dro'" in str(moved(thread, tenant))
    assert computed(thread, tenant, own, forward_only=True).losses == before
    computed(thread, tenant, own)
    first = moved(thread, tenant)  # the gradients before the failure are left out
    other = created(thread, "without a failure")
    computed(thread, other, own)
    assert moved(thread, other) == first


def test_a_gradient_that_is_not_finite_does_not_move_the_model(thread):
    tenant = created(thread, "not finite")
    own = example(3, 4, weights=np.full(4, 3e38, np.float32))
    computed(thread, tenant, own)
    assert "the model does not move" in str(moved(thread, tenant))
    assert np.isfinite(computed(thread, tenant, example(3, 4)).losses[0])


def test_a_state_continues_with_and_without_its_optimizer(thread):
    tenant, own = created(thread, "saved"), example(5, 8)
    for _ in range(2):
        computed(thread, tenant, own)
        moved(thread, tenant)
    fetch = ask(thread, tenant, lambda: thread.snapshot(tenant, with_state=True)).get(timeout=60)
    same, weights_only, later = (created(thread, name) for name in ("same", "weights only", "later"))
    computed(thread, later, own)  # takes the place of the model that was copied
    _, state = fetch()
    ask(thread, same, lambda: thread.load(same, state)).get(timeout=60)
    ask(thread, weights_only, lambda: thread.load(weights_only, fresh_optimizer(state))).get(timeout=60)
    losses = [computed(thread, each, own).losses for each in (tenant, same, weights_only)]
    assert losses[0] == losses[1] == losses[2]
    for each in (tenant, same, weights_only):
        moved(thread, each)
    losses = [computed(thread, each, own).losses for each in (tenant, same, weights_only)]
    assert losses[0] == losses[1] != losses[2]
    late = ask(thread, same, lambda: thread.load(same, state)).get(timeout=60)
    assert isinstance(late, LoRAUsageError)
    assert "comes before all else" in str(late)


def test_a_model_that_is_unloaded_answers_with_an_error(thread):
    tenant, other, own = created(thread, "unloaded"), created(thread, "other"), example(1, 5)
    assert ask(thread, tenant, lambda: thread.end(tenant)).get(timeout=60) is None
    assert "was unloaded" in str(computed(thread, tenant, own))
    assert len(computed(thread, other, own).losses) == 1


def test_a_rank_beyond_the_largest_is_refused(thread):
    model = Model("too large", 5, 0)
    found = ask(thread, model, lambda: thread.create(model)).get(timeout=60)
    assert isinstance(found, LoRAUsageError)
    assert "a rank from 1 to 4" in str(found)

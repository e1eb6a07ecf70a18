"""Calls of a trainer and of the losses with arguments of wrong types, shapes and values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jlora
from jlora.training import losses
from tests.training.test_trainer import TOKENS, loss, served, trainer_of

pytestmark = pytest.mark.usefixtures("unchecked_calls")
USAGE = jlora.LoRAUsageError
STRANGE = (None, 3, 1.5, b"x", [], ["query"], {}, ("query",), True, np.zeros(3), object)


@pytest.fixture(scope="module")
def trainer():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield trainer_of(served(["query"]), ["query"])


@pytest.fixture(autouse=True)
def defaults_of_jax():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def refused(cause: str, function, *args, **options):
    with pytest.raises(USAGE, match=cause):
        function(*args, **options)


@pytest.mark.parametrize("name", STRANGE, ids=repr)
def test_names_that_are_none(trainer, name):
    refused(r"Trainer\.add: an adapter's name must be a non-empty string, got", trainer.add, name)
    refused(r"Trainer\.add: an adapter's name must be a non-empty string, got", trainer.add, name, rank=2, alpha=2)
    for call in (trainer.remove, trainer.state_of, trainer.adapter, trainer.tensors, trainer.publish):
        refused("is not trained here; the trainer has query", call, name)
    if not isinstance(name, list):  # the list of adapters of a step
        refused("is not trained here; the trainer has query", trainer.apply, name)
    if name is not None:
        refused("is not trained here; the trainer has query", trainer.apply, ["query", name])
    assert trainer.names == ("query",)


def test_values_of_a_new_adapter(trainer):
    for targets in (3, True, b"x", "q_proj", [], [None], np.zeros(2), object):
        refused(
            "target_modules must be None or a list of names", trainer.add, "n", rank=2, alpha=2, target_modules=targets
        )
    for alpha in (None, 0, float("nan"), "2", [2], True):
        refused("'n': alpha must be a finite number other than 0", trainer.add, "n", rank=2, alpha=alpha)
    assert trainer.names == ("query",)


def test_options_of_a_trainer():
    manager = served(["query"])
    refused("capacity must be a positive integer, got None", manager.trainer, loss, capacity=None)
    for targets in (3, object, [], [None], iter(["q_proj"])):
        refused(
            "trainer: target_modules must be None or a list of names", manager.trainer, loss, target_modules=targets
        )
    for optimizer, cause in (
        (int, "must have `init` and `update`, .* got <class 'int'>"),
        (optax.adamw, "'mu_dtype: .* = None', which is not a number"),
        (lambda *rates: optax.sgd(0.1), r"'\*rates', which is not a number"),
        (lambda rate, /: optax.sgd(rate), "'rate', which is not a number"),
        (lambda divide=0.1: optax.sgd(divide), "'divide=0.1', which is not a number that `step` takes"),
        (lambda rate=0.1: None, "got one that returns None"),
        (optax.constant_schedule(0.1), "got one that returns 0.1"),
    ):
        refused(cause, manager.trainer, loss, optimizer=optimizer)


def test_states_that_are_none(trainer):
    own = trainer.state["query"]
    for sums, found in (("ab", "str"), (object(), "object"), (np.array([0, "a"], object), "ndarray")):
        with pytest.raises(USAGE, match=rf"\['sums'\] is {found}; expected float32\[2\]"):
            trainer.state = {"query": {**own, "sums": sums}}
    with pytest.raises(USAGE, match="'query' is no state of a trainer"):
        trainer.state = {"query": {1: 2, "a": 3}}
    jax.tree.map(np.testing.assert_array_equal, trainer.state["query"], own)


def test_inputs_and_numbers_of_steps(trainer):
    before = trainer.state
    for call in (trainer.step, trainer.gradients, trainer.evaluate):
        refused("the inputs must be arrays, got one str", call, trainer.prepare(["query"] * 6), "tokens")
    for divide in (None, 1e-3, "no", [True], np.zeros(3)):
        refused(
            "divide must be True or False, got", trainer.step, trainer.prepare(["query"] * 6), TOKENS, divide=divide
        )
        refused("divide must be True or False, got .*; give numbers", trainer.apply, "query", divide)
    refused("learning_rate of adapter 'query' must be a number", trainer.apply, "query", learning_rate="0.1")
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)


def test_folders_that_cannot_be_written(trainer, tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (3, True, ["x"], b"x"):
        refused("save_to must be a new folder, got", trainer.publish, "query", to="new", save_to=folder)
    with pytest.raises(jlora.LoRAError, match=r"save_to='.*/file/new': .*Not a directory"):
        trainer.publish("query", to="new", save_to=tmp_path / "file" / "new")


def test_results_of_a_loss():
    results: list = []  # what the loss returns; a failed trace is not kept
    trainer = trainer_of(served(["query"]), ["query"], loss=lambda *args: results[-1])
    for returned, message in (
        ((None, None), "losses NoneType and weights NoneType; expected floating"),
        (("a", np.zeros(6)), "losses str"),
        ((np.zeros(6), np.zeros(6, complex)), r"weights complex64\[6\]"),
        ((np.zeros(6), np.zeros(6), None), "must be a mapping of names to arrays .* got 'NoneType'"),
        ((np.zeros(6), np.zeros(6), {"a": [1, [2]]}), "got 'a': list"),
        ((np.zeros(6), np.zeros(6), {"a": np.zeros(6, complex)}), r"got 'a': complex64\[6\]"),
        ((np.zeros(6), np.zeros(6), {1: np.zeros(6), "b": np.zeros(6)}), r"got 1: float32\[6\]"),
        ((np.zeros(6), np.zeros(6), {"a": np.zeros(5)}), r"got 'a': float32\[5\]"),
    ):
        results.append(returned)
        refused(message, trainer.step, trainer.prepare(["query"] * 6), TOKENS)


LOGP, MASK, KINDS = jnp.full((3, 3), -1.0), jnp.ones((3, 3)), jnp.array([0, 1, 2])


def test_arrays_of_losses():
    for wrong in (None, 3, "x", [[0.0] * 3] * 3, np.zeros(3), np.zeros((3, 3, 1)), np.array([["a"] * 3] * 3)):
        for name in ("logprobs", "mask", "sampled", "reference"):
            arrays = {"logprobs": LOGP, "mask": MASK, "sampled": LOGP, "reference": LOGP, name: wrong}
            if wrong is not None or name in ("logprobs", "mask"):
                refused(f"losses: {name} ", losses.by_row, KINDS, **arrays)
        refused("losses: logprobs must be floats", losses.cross_entropy, wrong)
        for function in (losses.importance_sampling, losses.ppo, losses.cispo):
            refused("losses: sampled is .*; expected", function, LOGP, wrong, 1.0)
    for kinds in (None, 0, [0, 1, 2], KINDS[:1], KINDS[:, None], KINDS > 0, np.zeros(3), np.array(["ppo"] * 3)):
        refused("losses: kinds must be integers", losses.by_row, kinds, LOGP, MASK)


def test_a_vector_of_advantages_is_refused():
    """With as many sequences as tokens, the advantages of sequences would be those of tokens."""
    for name in ("advantages", "low", "high", "beta"):
        refused(f"losses: {name} is .*broadcasts to it", losses.by_row, KINDS, LOGP, MASK, **{name: jnp.arange(3.0)})
    refused("losses: advantages is float32", losses.ppo, LOGP, LOGP, jnp.arange(3.0))
    by_row = [losses.by_row(KINDS, LOGP, MASK, advantages=each)[0] for each in (2.0, jnp.full((3, 1), 2.0), 2 * MASK)]
    np.testing.assert_array_equal(by_row[0], by_row[1])
    np.testing.assert_array_equal(by_row[0], by_row[2])


def test_logits_targets_and_rewards():
    logits, targets = jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), int)
    for wrong in (None, "x", targets, logits.astype(int), logits.tolist()):
        refused("losses: logits must be floats", losses.token_logprobs, wrong, targets)
    for wrong in (None, targets.T, targets[:1], targets.astype(float), targets.tolist()):
        refused(r"losses: targets must be integers \[2, 3\]", losses.token_logprobs, logits, wrong)
    for wrong in (None, 3, [[1.0]], jnp.zeros(3)):
        refused("losses: rewards must be numbers", losses.group_advantages, wrong)

"""Training of several adapters in one step, against each adapter trained alone in plain JAX; publication of weights."""

import functools
import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.models import Decoder, DecoderConfig, MoEConfig
from jlora.training import losses
from tests.layers.expert_models import HIDDEN, Scanned, Seams, reference
from tests.layers.merging import Target, assert_close, in_int8, make_dora, make_manager, serve
from tests.layers.mesh_models import NAMES, ONE, SMALL, TWO, Small, Written, mesh_of, placed, some_devices, tokens_of
from tests.manager import tiny
from tests.manager.test_experts import plain
from tests.manager.test_shared_experts import ADAPTERS

TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, (6, 5)).astype(np.int32)
QUERY, VALUE, HEAD = "layers.0.q_proj", "layers.1.v_proj", "lm_head"
# Adapter -> its modules and their ranks.
RANKS = {
    "wide": dict.fromkeys(tiny.MODULES, 4),
    "query": {QUERY: 2, VALUE: 1},
    "mixed": {"embed": 3, QUERY: 1, "layers.0.k_proj": 4, HEAD: 2},
}
SCALING = 1.5


@pytest.fixture(autouse=True)
def defaults_of_jax():
    """The promotion of dtypes and ranks that optax needs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def fresh(name: str, seed: int = 0) -> jlora.Adapter:
    rng = np.random.default_rng((seed, *name.encode()))
    modules = {}
    for module, rank in RANKS[name].items():
        k, n, kind = tiny.MODULES[module]
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((rank, k), (n, rank)))
        modules[module] = jlora.ModuleLoRA(a=a, b=b, kind=kind, alpha=SCALING * rank, scaling=SCALING)
    return jlora.Adapter(name=name, modules=modules)


def served(names=RANKS, slots: int = 3, **options) -> jlora.LoRAManager:
    config = jlora.LoRAConfig(max_loras=slots, max_lora_rank=tiny.MAX_RANK, max_cpu_loras=8, **options)
    manager = jlora.LoRAManager(tiny.Model(), config)
    for name in names:
        manager.add_adapter(fresh(name))
    return manager


def answer_loss(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.sum(axis=1), jnp.full(len(tokens), float(tokens.shape[1] - 1))


def loss(model, batch, tokens):
    with jlora.use(batch):
        return answer_loss(model(tokens[:, :-1]), tokens)


def plain_logits(model: tiny.Model, factors, tokens):
    """Return the logits of the model with `factors` (module -> A, B), without jlora."""

    def delta(name, x):
        a, b = factors[name]
        return SCALING * (x @ a.T) @ b.T

    table = model.embed.embedding[...]
    x = table[tokens]
    if "embed" in factors:
        x += delta("embed", jax.nn.one_hot(tokens, tiny.VOCAB))
    for i, layer in enumerate(model.layers):
        y = x @ layer.qkv_proj.kernel[...]
        for part, (start, stop) in tiny.PARTS.items():
            if (name := f"layers.{i}.{part}") in factors:
                y = y.at[..., start:stop].add(delta(name, x))
        y = y[..., :16] + jnp.concatenate([y[..., 16:24], -y[..., 24:]], axis=-1)
        out = y @ layer.o_proj.kernel[...] + layer.o_proj.bias[...].reshape(1, 1, -1)
        x = x + out + (delta(f"layers.{i}.o_proj", y) if f"layers.{i}.o_proj" in factors else 0)
    return x @ table.T + (delta(HEAD, x) if HEAD in factors else 0)


def alone(name: str, optimizer, runs):
    """Train one adapter in plain JAX on the sequences of each run. Return the losses and the factors."""
    model = tiny.Model()
    factors = {module: (jnp.asarray(m.a), jnp.asarray(m.b)) for module, m in fresh(name).modules.items()}
    state, losses = optimizer.init(factors), []

    @jax.jit
    def step(factors, state, tokens):
        def mean(factors):
            summed, weights = answer_loss(plain_logits(model, factors, tokens[:, :-1]), tokens)
            return summed.sum() / weights.sum()

        value, gradients = jax.value_and_grad(mean)(factors)
        updates, state = optimizer.update(gradients, state, factors)
        return optax.apply_updates(factors, updates), state, value

    for rows in runs:
        factors, state, value = step(factors, state, TOKENS[rows])
        losses.append(float(value))
    return losses, factors


def clipped():
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.1))


def trainer_of(manager, names=RANKS, loss=loss, **options) -> jlora.Trainer:
    trainer = manager.trainer(loss, **{"capacity": 4} | options)
    for name in names:
        trainer.add(name)
    return trainer


def scaled(model, batch, tokens, scale=1.0, weights=4.0):
    """Return losses times `scale` [B], `weights` [B], and the log probabilities of each row."""
    with jlora.use(batch):
        logits = model(tokens[:, :-1])
    logprobs, ones = losses.token_logprobs(logits, tokens[:, 1:]), jnp.ones(len(tokens))
    return -logprobs.sum(axis=1) * scale, weights * ones, {"logprobs": logprobs, "ones": ones}


@pytest.fixture(scope="module")
def compiled() -> tuple[jlora.LoRAManager, jlora.Trainer]:
    """One manager and trainer of the module with the default optimizer, since each compiles programs of its own."""
    manager = served()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return manager, trainer_of(manager, loss=scaled)


@pytest.fixture
def begun(compiled) -> tuple[jlora.LoRAManager, jlora.Trainer]:
    """The manager and trainer of the module as new ones, with the adapters of `RANKS`."""
    manager, trainer = compiled
    for name in trainer.names:
        trainer.remove(name)
    manager.remove_all_adapters()
    for name in RANKS:
        manager.add_adapter(fresh(name))
        trainer.add(name)
    return compiled


@pytest.mark.slow
def test_slots_of_int8_serve_what_is_trained_in_float32():
    """Twice, so that the second update takes the plan of the first."""
    serving, before = served([], dtype="int8"), fresh("query")
    serving.add_adapter(before)
    trainer = trainer_of(serving, ["query"], optimizer=optax.sgd(0.5))
    np.testing.assert_array_equal(trainer.adapter("query").modules[QUERY].a, before.modules[QUERY].a)
    for _ in range(2):
        trainer.step(trainer.prepare(["query"] * 6), TOKENS)
        trainer.publish("query")
        trained = trainer.adapter("query")
        assert np.abs(trained.modules[QUERY].a - before.modules[QUERY].a).max() > 1e-4
        with serving.prepare(["query", None]) as batch:
            found = np.asarray(serve(serving.model, TOKENS[:2], batch))
        for tokens, adapter, logits in zip(TOKENS, (in_int8(trained), None), found, strict=False):
            assert_close(logits, tiny.expected(serving.model, adapter, tokens))
        before = trained


@pytest.mark.parametrize(("slots", "dtype"), [("bfloat16", "bfloat16"), ("int8", "float32"), (None, "float32")])
def test_adapter_in_slot_dtype(slots, dtype):
    trainer = trainer_of(served(dtype=slots))
    trainer.step(trainer.prepare(["wide", "query", "mixed"] * 2), TOKENS)
    for name in RANKS:
        exact, found = trainer.adapter(name), trainer.adapter(name, in_slot_dtype=True)
        assert found.modules.keys() == exact.modules.keys()
        for module, own in found.modules.items():
            for half in ("a", "b"):
                want = getattr(exact.modules[module], half)
                assert want.dtype == np.float32
                chex.assert_trees_all_equal(getattr(own, half), want.astype(jnp.dtype(dtype)))
                assert getattr(own, half).dtype == jnp.dtype(dtype)


def test_a_snapshot_has_the_weights_of_its_step():
    trainer = trainer_of(served())
    expected, fetch = trainer.adapter("wide"), trainer.snapshot("wide")
    trainer.step(trainer.prepare(["wide"] * 6), TOKENS, learning_rate=0.1)
    trainer.remove("wide")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(fetch).result()
    for module, own in found.modules.items():
        chex.assert_trees_all_equal((own.a, own.b), (expected.modules[module].a, expected.modules[module].b))


@pytest.mark.parametrize("names", [["wide"], ["wide", "query", "mixed"]])
def test_a_step_holds_no_copy_of_the_members_that_stay(names):
    trainer = trainer_of(served(), capacity=64)
    trainer.apply(names)
    (update,) = [each for key, each in trainer._programs.items() if key[0] == "update"]
    assert update.memory_analysis().temp_size_in_bytes < trainer.nbytes / 4


RUNS = [["wide", "query", None, "wide", "query", "query"], ["mixed", "query", None, "mixed", None, "query"]] * 3


def check_alone(trainer, optimizers, numbers):
    """Check steps of `RUNS` against each adapter alone, trained by an optimizer of optax."""
    losses, rows = {name: [] for name in RANKS}, {name: [] for name in RANKS}
    for names in RUNS:
        found = trainer.step(trainer.prepare(names), TOKENS, **numbers).losses
        assert found.keys() == set(names) - {None}
        for name, value in found.items():
            losses[name].append(float(value))
            rows[name].append(np.flatnonzero([each == name for each in names]))
    for name, optimizer in optimizers.items():
        want, factors = alone(name, optimizer, rows[name])
        np.testing.assert_allclose(losses[name], want, rtol=1e-5)
        trained = trainer.adapter(name).modules
        assert trained.keys() == factors.keys()
        for module, (a, b) in factors.items():
            np.testing.assert_allclose(trained[module].a, a, atol=2e-5)
            np.testing.assert_allclose(trained[module].b, b, atol=2e-5)


@pytest.mark.device
def test_each_adapter_learns_as_if_alone():
    """Clipping, schedules and counts are those of one adapter, and a step without it changes none of them.

    There are more adapters than slots.
    """
    once = chex.assert_max_traces(loss, n=1)
    trainer = trainer_of(served(slots=1), loss=once, optimizer=clipped())
    check_alone(trainer, dict.fromkeys(RANKS, clipped()), {})


@pytest.mark.slow
def test_numbers_of_the_optimizer_are_those_of_each_adapter():
    rates, decays, norms = (
        {**dict.fromkeys(RANKS, one), "query": two} for one, two in ((0.01, 0.05), (0, 0.1), (0.5, 1))
    )
    optimizers = {
        name: optax.chain(
            optax.clip_by_global_norm(norms[name]), optax.adamw(rates[name], b2=0.95, weight_decay=decays[name])
        )
        for name in RANKS
    }
    numbers = {"learning_rate": rates, "weight_decay": decays, "max_norm": norms, "b2": 0.95}
    check_alone(trainer_of(served()), optimizers, numbers)


@pytest.mark.slow
def test_several_gradients_before_a_step_equal_one_of_all_sequences():
    """Microbatches are unequal, and two adapters step at different times."""
    rows = [[0, 1], [2], [3, 4, 5]]
    names = ["wide", "query", "query", "wide", "mixed", "query"]
    whole, parts = trainer_of(served()), trainer_of(served())
    whole.gradients(whole.prepare(names), TOKENS)
    for own in rows:
        report = parts.gradients(parts.prepare([names[i] for i in own]), TOKENS[own])
        assert report.norms == {}
    for name in RANKS:
        sums = parts.state_of(name)["gradients"]
        for key, want in whole.state_of(name)["gradients"].items():
            np.testing.assert_allclose(sums[key], want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=key)
        norms = [float(trainer.apply(name, learning_rate=0.01)) for trainer in (whole, parts)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        for module, want in whole.adapter(name).modules.items():
            np.testing.assert_allclose(parts.adapter(name).modules[module].a, want.a, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(parts.adapter(name).modules[module].b, want.b, rtol=1e-6, atol=1e-7)


def test_several_adapters_move_in_one_program_with_numbers_of_their_own(begun):
    _, trainer = begun
    trainer.gradients(trainer.prepare(["wide", "query", "query", "wide", "mixed", None]), TOKENS)
    rates, kept = {"wide": 0.01, "query": 0.02}, trainer.state
    want = [trainer.apply(name, learning_rate=rates[name]) for name in ("query", "wide")]
    alone, trainer.state = trainer.state, kept
    norms = trainer.apply(["query", None, "wide", None], learning_rate=rates)
    np.testing.assert_allclose(norms, want, rtol=1e-6)
    found = trainer.state
    jax.tree.map(np.testing.assert_array_equal, found["mixed"], kept["mixed"])
    for name in rates:
        assert any((found[name]["factors"][key] != own).any() for key, own in kept[name]["factors"].items())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), found[name], alone[name])
    assert trainer.apply([]) == trainer.apply([None]) == ()
    with pytest.raises(jlora.LoRAUsageError, match="'wide' is twice"):
        trainer.apply(["wide", "query", "wide"])


def test_sums_of_gradients_with_weights_of_any_sign(begun):
    """Tinker divides by no weights. Weights that sum to 0 move nothing if they are to divide."""
    _, trainer = begun
    weights = np.array([1, -1, 2, 0.5, 1, -3], np.float32)
    before = trainer.state_of("query")
    batch = trainer.prepare(["query", "query", "wide", "wide", None, "wide"])
    norms = trainer.step(batch, TOKENS, weights, weights).norms
    assert np.isnan(norms["query"])
    jax.tree.map(np.testing.assert_array_equal, trainer.state_of("query"), before)
    trainer.gradients(batch, TOKENS, weights, weights)
    assert np.isfinite(trainer.apply("query", divide=False, learning_rate=0.1))
    assert not np.array_equal(trainer.adapter("query").modules[QUERY].b, fresh("query").modules[QUERY].b)


def test_results_of_a_loss_per_adapter_and_per_row(begun):
    (_, trainer), numbers = begun, np.array([[1] * 6, [4] * 6], np.float32)
    batch = trainer.prepare(["wide", "query", None, "wide", "wide", "query"])
    before = trainer.state
    report = trainer.evaluate(batch, TOKENS, *numbers)
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)
    rows = np.asarray(report.rows["logprobs"])
    assert rows.shape == (6, 4)
    np.testing.assert_allclose(report.aux["logprobs"]["wide"], rows[[0, 3, 4]].sum(), rtol=1e-6)
    assert {name: float(value) for name, value in report.aux["ones"].items()} == {"wide": 3, "query": 2}
    assert float(report.weights["query"]) == 8
    np.testing.assert_allclose(report.losses["query"], -rows[[1, 5]].sum() / 8, rtol=1e-6)
    np.testing.assert_array_equal(trainer.step(batch, TOKENS, *numbers).rows["logprobs"], rows)


# --- Members --------------------------------------------------------------------------------------------------------


def test_adapters_join_and_leave_without_compilation_or_effect_on_others(begun):
    manager, trainer = begun
    trainer.remove("query")
    targets = [["q_proj"], ["embed", "o_proj"], ["k_proj", "lm_head"], ["v_proj"], None]

    def visit(i: int) -> None:
        name = f"guest{i}"
        trainer.add(name, rank=1 + i % 4, alpha=2 + i, target_modules=targets[i % 5], seed=i)
        trainer.step(trainer.prepare([name, name, None] * 2), TOKENS, learning_rate=0.1 / (i + 1), divide=i % 2 == 0)
        trainer.tensors(name), trainer.adapter(name)
        if i % 3 == 0:
            trainer.publish(name)
            trainer.publish(name, to=f"{name}@1")
        kept = trainer.state_of(name)
        trainer.remove(name)
        trainer.add(name, rank=1 + i % 4, alpha=2 + i, target_modules=targets[i % 5], state=kept) if i % 3 else None
        trainer.remove(name) if i % 3 else None
        manager.remove_adapter(name), manager.remove_adapter(f"{name}@1")

    for i in range(7):
        visit(i)
    trainer.step(trainer.prepare(["wide", None, None] * 2), TOKENS)
    before = trainer.state
    PROGRAMS.clear()
    for i in range(7, 50):
        visit(i)
    assert COMPILED not in PROGRAMS
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)


def test_threads_that_train_publish_and_read_take_turns(begun):
    """Each adapter has the bits of a run in one thread."""
    (manager, trainer), names = begun, ("wide", "query")
    trainer.remove("mixed")
    before = trainer.state

    def steps(name):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # of a thread, for optax
            for _ in range(10):
                trainer.step(trainer.prepare([name, None] * 3), TOKENS, learning_rate=0.01)

    def publish():
        for i in range(4):
            trainer.publish("wide", to=f"wide@{i}"), trainer.add("mixed"), trainer.remove("mixed")
            manager.remove_adapter(f"wide@{i}")

    for name in names:
        steps(name)
    want = trainer.state
    trainer.state = before
    with ThreadPoolExecutor() as pool:
        for done in [*(pool.submit(steps, name) for name in names), pool.submit(publish)]:
            done.result()
    jax.tree.map(np.testing.assert_array_equal, trainer.state, want)


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [
        ({"rate": 1.0}, "no number 'rate'; expected learning_rate, b1"),
        ({"learning_rate": {"qeury": 0.1}}, "learning_rate is given for 'qeury', which is not .*nearest is 'query'"),
        ({"learning_rate": {"query": float("nan")}}, "learning_rate of adapter 'query' must be a number, got nan"),
        ({"max_norm": "1.0 or so"}, "max_norm of adapter 'query' must be a number, got '1.0 or so'"),
        ({"b1": np.ones(2)}, r"b1 of adapter 'query' must be a number, got array"),
    ],
)
@pytest.mark.usefixtures("unchecked_calls")
def test_numbers_that_are_none_are_refused_before_the_gradients(begun, numbers, cause):
    _, trainer = begun
    before = trainer.state
    with pytest.raises(jlora.LoRAUsageError, match=cause):
        trainer.step(trainer.prepare(["query"] * 6), TOKENS, **numbers)
    with pytest.raises(jlora.LoRAUsageError, match=cause):
        trainer.apply("query", **numbers)
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)


@pytest.mark.device
def test_a_gradient_that_is_not_finite_moves_no_adapter(begun):
    """The tenant of the NaN stays where it is. The bits of the other are those of a step without it."""
    states, (_, trainer) = [], begun
    kept = trainer.state
    for bad in (1.0, np.nan, np.inf):
        trainer.state = kept
        scale = np.array([1, bad, 1, bad, 1, 1], np.float32)
        batch = trainer.prepare(["query", "wide", None, "wide", "query", "query"])
        before = trainer.state_of("wide")
        norms = trainer.step(batch, TOKENS, scale, np.full(6, 4, np.float32), learning_rate=0.1).norms
        assert np.isfinite(norms["query"])
        if bad != 1:
            assert not np.isfinite(norms["wide"])
            jax.tree.map(np.testing.assert_array_equal, trainer.state_of("wide"), before)
        states.append(trainer.state_of("query"))
    for each in states[1:]:
        jax.tree.map(np.testing.assert_array_equal, each, states[0])


@pytest.mark.slow
@pytest.mark.device
def test_factors_that_are_not_finite_reach_no_other_adapter():
    def step(spoil):
        manager = served(allow_nonfinite=True)
        if spoil:
            modules = {name: replace(m, b=np.full_like(m.b, np.nan)) for name, m in fresh("wide").modules.items()}
            manager.add_adapter(replace(fresh("wide"), modules=modules), load_inplace=True)
        trainer = trainer_of(manager)
        trainer.step(trainer.prepare(["query", "wide", None] * 2), TOKENS, learning_rate=0.1)
        return trainer.state_of("query")

    jax.tree.map(np.testing.assert_array_equal, step(True), step(False))


@pytest.mark.slow
def test_one_a_of_several_slices_is_trained():
    """Its gradient is the sum over the slices, against plain JAX."""
    rng = np.random.default_rng(0)
    a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, 16), (32, 2)))
    manager = served()
    manager.add_adapter(jlora.Adapter.from_arrays("whole", {"layers.0.qkv_proj": (a, b)}, alpha=2 * SCALING))
    trainer = trainer_of(manager, ["whole", "query"], optimizer=optax.sgd(0.1))
    model, rows = tiny.Model(), [0, 2, 3]

    def mean(a, b):
        parts = {f"layers.0.{part}": (a, b[start:stop]) for part, (start, stop) in tiny.PARTS.items()}
        summed, weights = answer_loss(plain_logits(model, parts, TOKENS[rows][:, :-1]), TOKENS[rows])
        return summed.sum() / weights.sum()

    gradients = jax.grad(mean, (0, 1))(a, b)
    report = trainer.step(trainer.prepare(["whole", "query", "whole", "whole", None, "query"]), TOKENS)
    norm = np.sqrt(sum(np.square(each).sum() for each in gradients))
    assert float(report.norms["whole"]) == pytest.approx(norm, rel=1e-5)
    (found,) = trainer.adapter("whole").modules.values()
    np.testing.assert_allclose(found.a, a - 0.1 * gradients[0], atol=1e-5)
    np.testing.assert_allclose(found.b, b - 0.1 * gradients[1], atol=1e-5)
    trainer.publish("whole")
    with manager.prepare(["whole"] * 6) as batch:
        served_loss = answer_loss(forward(manager.model, TOKENS[:, :-1], batch), TOKENS)[0]
    following = trainer.evaluate(trainer.prepare(["whole"] * 6), TOKENS)
    assert float(following.losses["whole"]) == pytest.approx(float(served_loss.mean()) / 4, rel=1e-5)


@pytest.mark.slow
def test_output_layers_embeddings_and_activated_adapters_are_trained():
    """Losses are those of serving, and fall by the rate times the squared norm of the gradient."""
    modules = {"head": "lm_head", "table": "model.embed_tokens", "late": "model.layers.0.self_attn.v_proj"}
    rng, first = np.random.default_rng(0), [0, 0, 5, 0]
    manager = make_manager(decoder_of(DENSE), activated=True)
    for name, module in modules.items():
        a, b = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((2, 32), (16 if name == "late" else 32, 2)))
        tables = [module] if name == "table" else []
        adapter = jlora.Adapter.from_arrays(name, {module: (a, b)}, alpha=4, embeddings=tables)
        manager.add_adapter(replace(adapter, invocation_tokens=(3,) if name == "late" else ()))
    trainer = trainer_of(manager, modules, optimizer=lambda learning_rate: optax.sgd(learning_rate))
    names, tokens = [*modules, None], rng.integers(0, 32, (4, 9)).astype(np.int32)
    with pytest.raises(jlora.LoRAError, match="no first active rows: give prepare"):
        trainer.step(trainer.prepare(names), tokens, learning_rate=0.1)
    batch = trainer.prepare(names, active_from=first, length=8)
    with manager.prepare(names, active_from=first, length=8) as batch_of_slots:
        want = answer_loss(forward(manager.model, tokens[:, :-1], batch_of_slots), tokens)[0] / 8
    trainer.gradients(batch, tokens)
    for i, name in enumerate(modules):
        factors = trainer.adapter(name).modules[modules[name]]
        norm = float(trainer.apply(name, learning_rate=0.0))
        assert norm > 0.01
        trainer.gradients(batch, tokens)
        rate = 1e-3 * float(want[i]) / norm**2
        trainer.apply(name, learning_rate=rate)
        trained = trainer.adapter(name).modules[modules[name]]
        for half in "ab":
            assert np.abs(getattr(trained, half) - getattr(factors, half)).max() > 0
        found = trainer.evaluate(batch, tokens).losses
        assert float(want[i] - found[name]) == pytest.approx(1e-3 * float(want[i]), rel=0.05)


@pytest.mark.usefixtures("registered")
def test_adapters_of_a_scaled_kernel_are_trained_as_they_are_served():
    """The model holds a quarter of the checkpoint's kernel, so that deltas are a quarter of the adapter's."""

    class Scaled(nnx.Module):
        def __init__(self):
            self.proj = nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.proj(x)

    def squares(model, batch, x):
        with jlora.use(batch):
            return jnp.square(model(x)).sum((1, 2)), jnp.ones(len(x))

    jlora.register_layer(nnx.Linear, lambda layer: jlora.LinearSpec(16, 16, bias=None, scale=0.25))
    manager = jlora.LoRAManager(Scaled(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4))
    a, b = np.random.default_rng(0).normal(0, 0.3, (2, 2, 16)).astype(np.float32)
    manager.add_adapter(jlora.Adapter.from_arrays("one", {"proj": (a, b.T)}, alpha=4))
    trainer, x = trainer_of(manager, ["one"], loss=squares), np.ones((1, 2, 16), np.float32)
    delta = x @ a.T @ b / 4 * 2
    want = np.square(Scaled()(x) + delta).sum()
    assert float(trainer.evaluate(trainer.prepare(["one"]), x).losses["one"]) == pytest.approx(float(want), rel=1e-5)


def test_targets_and_ranks_of_a_trainer(begun):
    manager, whole = begun
    small = trainer_of(manager, ["query"], target_modules=["q_proj", "v_proj"], max_rank=2)
    assert small.nbytes < 0.5 * whole.nbytes
    with pytest.raises(jlora.LoRAUsageError, match=r"'wide': .* is not trained here; expected target_modules"):
        small.add("wide")
    with pytest.raises(jlora.LoRAUsageError, match="has rank 3; expected at most the trainer's max_rank 2"):
        small.add("new", rank=3, alpha=1, target_modules=["q_proj"])
    with pytest.raises(jlora.LoRAUsageError, match=r"\['typo'\] match no layer"):
        manager.trainer(loss, target_modules=["typo", "q_proj"])
    assert small.names == ("query",)
    names = ["query", None] * 3
    found = small.step(small.prepare(names), TOKENS).losses
    assert float(found["query"]) == pytest.approx(float(whole.step(whole.prepare(names), TOKENS).losses["query"]))


def test_an_optimizer_moves_only_the_values_of_an_adapter():
    """One that moves every value, whatever its gradient, leaves absent targets and ranks zero, and idle adapters."""
    manager = served()
    add_one = optax.stateless(lambda updates, params: jax.tree.map(jnp.ones_like, updates))
    trainer = trainer_of(manager, optimizer=add_one)
    trainer.step(trainer.prepare(["query", "mixed"] * 3), TOKENS)
    moved = {
        name: sum(np.asarray(array, np.float64).sum() for array in own["factors"].values())
        for name, own in trainer.state.items()
    }
    for name in RANKS:
        modules = fresh(name).modules.values()
        before = sum(m.a.sum(dtype=np.float64) + m.b.sum(dtype=np.float64) for m in modules)
        values = 0 if name == "wide" else sum(m.a.size + m.b.size for m in modules)
        assert moved[name] - before == pytest.approx(values, abs=1e-3)


# --- The beginning --------------------------------------------------------------------------------------------------


def in_bfloat16(tmp_path, caplog, spoil=lambda manager, folder: None):
    """Return the modules with which a trainer begins, under slots of bfloat16, for an adapter of a folder and two from
    memory, and the warnings.
    """
    config = jlora.LoRAConfig(max_loras=3, max_lora_rank=4, max_cpu_loras=8)
    manager = jlora.LoRAManager(tiny.Model(dtype=jnp.bfloat16), config)
    fresh("wide").save_pretrained(tmp_path / "wide")
    manager.add_adapter(jlora.LoRARequest("wide", str(tmp_path / "wide")))
    held = [fresh("query"), fresh("mixed")]
    for adapter in held:
        manager.add_adapter(adapter)
    spoil(manager, tmp_path / "wide")
    with caplog.at_level(logging.WARNING, logger="jlora"):
        trainer = trainer_of(manager)
    del held  # until here, the arrays given are at hand
    return {name: trainer.adapter(name).modules for name in RANKS}, caplog.messages


def test_training_begins_with_the_values_given_not_with_those_of_the_slots(tmp_path, caplog):
    found, warnings = in_bfloat16(tmp_path, caplog)
    for name, modules in found.items():
        for module, want in fresh(name).modules.items():
            np.testing.assert_array_equal(modules[module].a, want.a)
            np.testing.assert_array_equal(modules[module].b, want.b)
    assert warnings == []


def test_values_whose_source_is_gone_are_those_of_the_slots_with_a_warning(tmp_path, caplog):
    def spoil(manager, folder):
        shutil.rmtree(folder)
        manager.update_adapter("query", {f"{QUERY}.lora_A.weight": fresh("query").modules[QUERY].a})

    found, warnings = in_bfloat16(tmp_path, caplog, spoil)
    for name in ("wide", "query"):
        for module, want in fresh(name).modules.items():
            np.testing.assert_array_equal(found[name][module].b, want.b.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(found["mixed"]["embed"].a, fresh("mixed").modules["embed"].a)
    assert len(warnings) == 2
    assert "'wide': its files are gone" in warnings[0]
    assert "'query': has no files" in warnings[1]


def test_training_begins_with_the_folder_of_a_publication_not_with_its_slots(tmp_path, caplog):
    config = jlora.LoRAConfig(max_loras=3, max_lora_rank=4, max_cpu_loras=8)
    manager = jlora.LoRAManager(tiny.Model(dtype=jnp.bfloat16), config)
    manager.add_adapter(given := fresh("wide"))
    trainer_of(manager, ["wide"]).publish("wide", to="wide@1", save_to=tmp_path / "wide")
    with caplog.at_level(logging.WARNING, logger="jlora"):
        trainer = trainer_of(manager, ["wide@1"])
    assert caplog.messages == []
    np.testing.assert_array_equal(trainer.adapter("wide@1").modules[QUERY].a, given.modules[QUERY].a)


def test_a_state_is_continued_without_the_files_of_its_adapter(tmp_path, caplog):
    config = jlora.LoRAConfig(max_loras=3, max_lora_rank=4, max_cpu_loras=8)
    manager = jlora.LoRAManager(tiny.Model(dtype=jnp.bfloat16), config)
    fresh("wide").save_pretrained(tmp_path / "wide")
    manager.add_adapter(jlora.LoRARequest("wide", str(tmp_path / "wide")))
    trainer = trainer_of(manager, ["wide"])
    state = trainer.state_of("wide")
    trainer.remove("wide")
    shutil.rmtree(tmp_path / "wide")
    with caplog.at_level(logging.WARNING, logger="jlora"):
        trainer.add("wide", state=state)
    assert caplog.messages == []
    np.testing.assert_array_equal(trainer.adapter("wide").modules[QUERY].a, fresh("wide").modules[QUERY].a)


# --- Publication ----------------------------------------------------------------------------------------------------


@jax.jit
def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def check_served(manager, name: str, adapter: jlora.Adapter) -> None:
    """Check that the manager serves and exports these weights of an adapter."""
    manager.prepare([name]).close()
    exported = manager.export_adapter(name).modules
    for module, want in adapter.modules.items():
        np.testing.assert_array_equal(exported[module].a, want.a)
        np.testing.assert_array_equal(exported[module].b, want.b)
    with manager.prepare([name, None]) as batch:
        found = forward(manager.model, TOKENS[:2], batch)
    want = tiny.expected(tiny.Model(), adapter, TOKENS[0])
    np.testing.assert_allclose(found[0], want, atol=1e-5 * np.abs(want).max())


def test_a_published_step_is_neither_undone_nor_mixed_with_others(tmp_path):
    """Eviction, repair of slots, an export and a save keep the published step, and steps of training none of them."""
    manager = served(slots=1)
    trainer = trainer_of(manager, ["query"], optimizer=optax.sgd(0.5))

    def step():
        trainer.step(trainer.prepare(["query", None]), TOKENS[:2])

    step()
    check_served(manager, "query", fresh("query"))  # not yet published
    assert trainer.publish("query") == 1
    published = trainer.adapter("query")
    assert not np.array_equal(published.modules[QUERY].b, fresh("query").modules[QUERY].b)
    check_served(manager, "query", published)
    step()
    check_served(manager, "query", published)
    manager.prepare(["wide"]).close()  # evicts it from the only slot
    assert manager.list_adapters()["query"].slot is None
    check_served(manager, "query", published)
    old = jax.tree.map(jnp.copy, manager.slots)
    assert trainer.publish("query") == 2
    latest = trainer.adapter("query")
    nnx.update(manager.model, old)  # a state of the first step; `prepare` repairs the slots
    check_served(manager, "query", latest)
    for array in jax.tree.leaves(manager.slots):
        array.delete()
    check_served(manager, "query", latest)
    manager.save(tmp_path)
    step()
    other = served(names=(), slots=1)
    other.restore(tmp_path)
    check_served(other, "query", latest)
    restarted = trainer_of(manager, ["query"])
    np.testing.assert_array_equal(restarted.adapter("query").modules[QUERY].a, latest.modules[QUERY].a)


def replaced(name: str, how: str) -> jlora.Adapter:
    """Return another adapter of the name, with the same factors where it has the same modules."""
    own = fresh(name)
    match how:
        case "alpha":
            return replace(own, modules={k: replace(m, alpha=2 * m.alpha, scaling=6.0) for k, m in own.modules.items()})
        case "modules":
            return replace(fresh("wide"), name=name)
        case "aLoRA":
            return replace(own, invocation_tokens=(3,))
        case _:
            ones = {k: {"dora": np.ones(len(m.b))} for k, m in own.modules.items()}
            return replace(own, modules={k: replace(m, vectors=ones[k]) for k, m in own.modules.items()})


def test_an_adapter_that_was_replaced_is_neither_published_nor_trained():
    manager = served(["query"], variants=["dora"], activated=True)
    trainer = trainer_of(manager, ["query"])
    for i, how in enumerate(("alpha", "modules", "aLoRA", "DoRA")):
        manager.add_adapter(replaced("query", how), load_inplace=True)
        with pytest.raises(jlora.LoRAUsageError, match="'query' was replaced by one of other modules"):
            trainer.publish("query")
        assert manager.list_adapters()["query"].version == 1 + 3 * i
        manager.add_adapter(fresh("query"), load_inplace=True)
        assert trainer.publish("query") == 3 + 3 * i
    with pytest.raises(jlora.LoRAUsageError, match="'typo' is not trained here"):
        trainer.publish("typo")


def test_new_names_are_published_with_a_folder_and_without(tmp_path):
    """A name with a folder is evicted from the host cache, and loaded again."""
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=tiny.MAX_RANK, max_cpu_loras=3)
    manager = jlora.LoRAManager(tiny.Model(), config)
    trainer = manager.trainer(loss, optimizer=optax.sgd(0.5))
    trainer.add("new", rank=2, alpha=4, target_modules=["q_proj", "embed"])
    assert manager.list_adapters() == {}
    trainer.step(trainer.prepare(["new", None] * 3), TOKENS)
    first = trainer.adapter("new")
    assert trainer.publish("new", to="new@1") == 0
    for i in range(2, 5):
        assert trainer.publish("new", to=f"new@{i}", save_to=tmp_path / str(i)) == 0
    with pytest.raises(jlora.LoRAUsageError, match="'new@1' exists; expected a new name"):
        trainer.publish("new", to="new@1")
    with pytest.raises(jlora.LoRAUsageError, match="exists; expected a new folder"):
        trainer.publish("new", to="new@more", save_to=tmp_path / "2")
    with pytest.raises(jlora.LoRAUsageError, match="save_to is for a new name"):
        trainer.publish("new", save_to=tmp_path / "more")
    with pytest.raises(jlora.LoRAUsageError, match="'new@1' exists; expected a new name"):
        trainer.publish("new", to="new@1", save_to=tmp_path / "more")
    with pytest.raises(jlora.LoRAUsageError, match="name must be a non-empty string"):
        trainer.publish("new", to="", save_to=tmp_path / "more")
    assert not (tmp_path / "more").exists()
    assert manager.list_adapters(level="evicted").keys() == {"new@2"}
    trainer.step(trainer.prepare(["new", None] * 3), TOKENS)
    check_served(manager, "new@1", first)
    check_served(manager, "new@2", first)
    assert trainer.publish("new") == 0
    check_served(manager, "new", trainer.adapter("new"))


# --- Checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.optimised
@pytest.mark.slow
def test_a_resumed_run_is_bitwise_an_uninterrupted_one(tmp_path):
    """The second half of the resumed one is in the company of others."""

    def run(trainer, steps, other=None):
        for i in range(steps):
            batch = trainer.prepare(["query", "query" if i % 2 else other] * 3)
            trainer.step(batch, TOKENS, learning_rate=0.1)

    trainer = trainer_of(served(), ["query"])
    run(trainer, 4)
    with ocp.CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(4, args=ocp.args.StandardSave(trainer.state))
    run(trainer, 4)

    resumed = trainer_of(served(), ["query"])
    with ocp.CheckpointManager(tmp_path) as checkpoints:
        resumed.state = checkpoints.restore(4, args=ocp.args.StandardRestore(resumed.state))
    among = trainer_of(served(), ["wide", "mixed"])
    among.add("query", state=resumed.state_of("query"))
    run(resumed, 4)
    run(among, 4, "wide")
    jax.tree.map(np.testing.assert_array_equal, resumed.state, trainer.state)
    jax.tree.map(np.testing.assert_array_equal, among.state_of("query"), trainer.state_of("query"))


PROGRAMS: list[str] = []
COMPILED, MISSED = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_misses"
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: PROGRAMS.append(event))
jax.monitoring.register_event_listener(lambda event, *_, **__: PROGRAMS.append(event))


@pytest.mark.slow
def test_a_restored_state_compiles_nothing():
    """Restored arrays are committed to their device, which the first ones of a trainer are not."""

    def begin():
        return trainer_of(served(["query"]), ["query"])

    def step(trainer):
        PROGRAMS.clear()
        trainer.step(trainer.prepare(["query"] * 6), TOKENS)

    trainer = begin()
    step(trainer)
    kept = jax.device_get(trainer.state)
    trainer.state = jax.device_put(kept, jax.devices()[0])
    step(trainer)
    assert COMPILED not in PROGRAMS
    resumed = begin()  # as in another process, all but the persistent cache is new
    resumed.state = jax.device_put(kept, jax.devices()[0])
    step(resumed)
    assert COMPILED in PROGRAMS
    assert MISSED not in PROGRAMS
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.state), jax.device_get(trainer.state))


def test_a_state_that_does_not_fit_is_refused(begun):
    _, trainer = begun
    trainer.remove("wide"), trainer.remove("mixed")
    others = {4: served([]), 2: jlora.LoRAManager(tiny.Model(), jlora.LoRAConfig(max_loras=3, max_lora_rank=2))}
    alike = trainer_of(others[4], [])

    def state_of(adapter, trainer=alike, rank=4):
        others[rank].add_adapter(adapter, load_inplace=True)
        trainer.add(adapter.name)
        state = trainer.state
        trainer.remove(adapter.name)
        return state

    own = fresh("query")
    trainer.step(trainer.prepare(["query"] * 6), TOKENS)
    kept = trainer.state
    fewer = replace(own, modules={QUERY: own.modules[QUERY]})
    wrong = {
        r"'query': it was trained with other modules, ranks or scalings: layers\.0\.qkv_proj, output slice 0, has rank "
        r"2 and scaling 6; expected rank 2 and scaling 1\.5": state_of(replaced("query", "alpha")),
        r"layers\.1\.qkv_proj, output slice 2, has rank 0 and scaling 0; expected rank 1": state_of(fewer),
        r"it is of the adapters \['wide'\]; expected \['query'\]": state_of(fresh("wide")),
        r"'query' lacks .*count.*: it is of another optimizer": state_of(
            own, trainer_of(others[4], [], optimizer=optax.sgd(0.1))
        ),
        r"is float32\[\d, 2, \d+\]; expected float32\[\d, 4, \d+\]": state_of(own, trainer_of(others[2], []), 2),
        r"is float16": jax.tree.map(lambda leaf: leaf.astype(np.float16), kept),
        r"has \['more'\]": {"query": {**kept["query"], "more": np.zeros(1)}},
        r"of the adapters NoneType": None,
        r"lacks .*StandardRestore": {"query": {**kept["query"], "optimizer": {"trace": np.zeros(1)}}},
    }
    for cause, state in wrong.items():
        with pytest.raises(jlora.LoRAUsageError, match=cause):
            trainer.state = state
    jax.tree.map(np.testing.assert_array_equal, trainer.state, kept)
    trainer.state = jax.tree.map(lambda leaf: leaf.astype(np.float64), kept)
    assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state)} == {np.dtype(np.float32)}
    jax.tree.map(np.testing.assert_array_equal, trainer.state, kept)


# --- Other models ---------------------------------------------------------------------------------------------------

DENSE = DecoderConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
MIXTURE = replace(DENSE, moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16, layers=(True,)))
INT8 = replace(DENSE, quantization="int8")
SIZES = {
    "self_attn.q_proj": (32, 32), "self_attn.k_proj": (32, 16), "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32), "mlp.down_proj": (48, 32),
    **{f"mlp.experts.{e}.gate_proj": (32, 16) for e in range(4)},
}  # fmt: skip


def decoder_of(config, dtype="float32", mesh=None) -> Decoder:
    return Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0), mesh=mesh)


def decoder_run(model, ranks, *, steps=3, **options):
    """Train two adapters of a decoder. Return the losses of each step, the manager, the trainer and the tokens."""
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=2, max_lora_rank=4, **options))
    for name, targets in ranks.items():
        rng = np.random.default_rng(len(name))
        arrays = {
            f"model.layers.0.{target}": tuple(
                rng.normal(0, 0.2, shape).astype(np.float32)
                for shape in ((rank, SIZES[target][0]), (SIZES[target][1], rank))
            )
            for target, rank in targets.items()
        }
        manager.add_adapter(jlora.Adapter.from_arrays(name, arrays, alpha=4))
    trainer = trainer_of(manager, ranks)
    shardings = [jax.tree.map(lambda leaf: leaf.sharding, trainer.state_of(name)) for name in ranks]
    tokens = np.random.default_rng(1).integers(0, 32, (4, 9)).astype(np.int32)
    losses = []
    for _ in range(steps):
        report = trainer.step(trainer.prepare(["one", "other", "one", None]), tokens, learning_rate=0.003)
        losses.append({name: float(value) for name, value in report.losses.items()})
    # With another sharding, the next step would be compiled again.
    assert [jax.tree.map(lambda leaf: leaf.sharding, trainer.state_of(name)) for name in ranks] == shardings
    return losses, manager, trainer, tokens


ATTENTION = {"one": {"self_attn.q_proj": 3, "self_attn.v_proj": 1}, "other": dict.fromkeys(tuple(SIZES)[:5], 4)}
EXPERTS = {"one": {**dict.fromkeys(tuple(SIZES)[5:], 2), "self_attn.k_proj": 1}, "other": {"self_attn.o_proj": 3}}


def check_next_loss(manager, trainer, tokens):
    """Check that the slots have the losses of the trainer's next step after a publication."""
    for name in trainer.names:
        trainer.publish(name)

    @manager.jit
    def of_rows(model, batch, tokens):
        summed, weights = loss(model, batch, tokens)
        return summed, weights

    with manager.prepare(["one", "other", "one", None]) as batch:
        summed, weights = map(np.asarray, of_rows(manager.model, batch, tokens))
    report = trainer.step(trainer.prepare(["one", "other", "one", None]), tokens)
    following = {name: float(value) for name, value in report.losses.items()}
    served = {"one": (summed[0] + summed[2]) / (weights[0] + weights[2]), "other": summed[1] / weights[1]}
    assert served == pytest.approx(following, rel=1e-5)


@pytest.mark.slow
def test_stacked_layers_and_experts_that_share_factors():
    """The loss of a step is that of the weights exported before it, merged in NumPy."""
    model, names = Scanned(Seams, nnx.Rngs(0)), ["full", "s", "t", "s"]
    sizes = {"max_loras": 4, "expert_slots": {"per_expert": 2, "shared": 2}}
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_lora_rank=4, max_cpu_loras=8, **sizes))
    for name in set(names):
        manager.add_adapter(ADAPTERS[name])
    x = np.random.default_rng(0).normal(size=(4, 2, HIDDEN)).astype(np.float32)

    def loss(model, batch, x):
        with jlora.use(batch):
            return jnp.square(model(x)).sum((1, 2)), jnp.ones(len(x))

    trainer = trainer_of(manager, sorted(ADAPTERS.keys() - {"dense"}), loss=loss)
    before = {}
    for _ in range(3):
        weights = {name: plain(trainer.adapter(name)) for name in trainer.names}
        losses = trainer.step(trainer.prepare(names), x, learning_rate=0.01).losses
        for name in trainer.names:
            rows = x[[each == name for each in names]]
            want = np.mean([np.square(reference(model, row, [weights[name]] * 2)).sum() for row in rows])
            assert float(losses[name]) == pytest.approx(want, rel=1e-4)
            assert losses[name] < before.get(name, np.inf)
        before = losses
    published = {name: trainer.adapter(name).modules for name in trainer.names}
    for name in published:
        trainer.publish(name)
    for name, modules in published.items():
        manager.prepare([name]).close()
        for module, served in manager.export_adapter(name).modules.items():
            np.testing.assert_array_equal(served.a, modules[module].a)
            np.testing.assert_array_equal(served.b, modules[module].b)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "tolerance"), [("bfloat16", 1e-3), ("int8", 1e-5), ("fp8", 1e-5)])
def test_bases_of_few_bits(base, tolerance):
    """Each has the losses of a float32 model of the same weights, and the trained factors are float32."""
    dtype, quantization = (base, None) if base == "bfloat16" else ("float32", base)
    model, twin = decoder_of(replace(DENSE, quantization=quantization), dtype), decoder_of(DENSE)
    for path, variable in nnx.to_flat_state(nnx.state(twin, nnx.Param)):
        layer = functools.reduce(
            lambda node, key: node[key] if isinstance(key, int) else getattr(node, key), path[:-1], model
        )
        exact = layer.dequantized() if hasattr(layer, "dequantized") else getattr(layer, path[-1])[...]
        variable[...] = jnp.asarray(exact, jnp.float32)
    losses, manager, trainer, tokens = decoder_run(model, ATTENTION)
    want, *_ = decoder_run(twin, ATTENTION)
    for step, expected in zip(losses, want, strict=True):
        assert step == pytest.approx(expected, rel=tolerance)
    assert {array.dtype for own in trainer.state.values() for array in own["factors"].values()} == {
        jnp.dtype("float32")
    }
    check_next_loss(manager, trainer, tokens)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_that_qwix_quantized():
    """The loss is that of a float32 model of the dequantized kernels, and the step is that of its gradient."""
    qwix = pytest.importorskip("qwix")

    class Layers(nnx.Module):
        def __init__(self):
            self.up, self.down = (nnx.Linear(16, 16, use_bias=False, rngs=nnx.Rngs(i)) for i in range(2))

        def __call__(self, x):
            return self.down(jax.nn.silu(self.up(x)))

    def squares(model, batch, x):
        with jlora.use(batch):
            return jnp.square(model(x)).sum((1, 2)), jnp.ones(len(x))

    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 16)).astype(np.float32)
    a, b = rng.normal(0, 0.3, (2, 2, 16)).astype(np.float32)
    rules = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", weight_qtype=jnp.int8)])
    model = qwix.quantize_model(Layers(), rules, x)
    up, down = (qwix.dequantize(layer.kernel.array) for layer in (model.up, model.down))

    def expected(a, b):
        y = jax.nn.silu(x @ up + 2 * (x @ a.T) @ b) @ down
        return jnp.square(y).sum() / 2

    value, gradients = jax.value_and_grad(expected, (0, 1))(a, b)
    manager = make_manager(model, [jlora.Adapter.from_arrays("one", {"up": (a, b.T)}, alpha=4)])
    trainer = trainer_of(manager, ["one"], loss=squares, optimizer=optax.sgd(1e-3))
    assert float(trainer.step(trainer.prepare(["one"] * 2), x).losses["one"]) == pytest.approx(float(value), rel=1e-5)
    trained = trainer.adapter("one").modules["up"]
    assert_close(trained.a, a - 1e-3 * gradients[0])
    assert_close(trained.b, b.T - 1e-3 * gradients[1].T)


@pytest.mark.mesh
@pytest.mark.parametrize(("config", "ranks", "options"), [
    (DENSE, ATTENTION, {"fully_sharded": True}), (INT8, ATTENTION, {}), (MIXTURE, EXPERTS, {}),
], ids=["fully-sharded", "int8", "experts"])  # fmt: skip
def test_eight_devices_train_as_one(config, ranks, options):
    """Four shards have two key heads, so each has a copy, whose gradients are added up."""
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=types, devices=some_devices(8))
    want, _, one, _ = decoder_run(decoder_of(config), ranks)
    found, manager, trainer, tokens = decoder_run(decoder_of(config, mesh=mesh), ranks, **options)
    for step, expected in zip(found, want, strict=True):
        assert step == pytest.approx(expected, rel=1e-5)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(trainer.state_of("one")))
    for name in ranks:
        trained, expected = trainer.adapter(name).modules, one.adapter(name).modules
        for module, each in expected.items():
            np.testing.assert_allclose(trained[module].a, each.a, atol=1e-4)
            np.testing.assert_allclose(trained[module].b, each.b, atol=1e-4)
    check_next_loss(manager, trainer, tokens)


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("kind", "fully"),
    [
        (AxisType.Explicit, False),
        pytest.param(AxisType.Explicit, True, marks=pytest.mark.nightly),
        (AxisType.Auto, True),
    ],
)
def test_axes_of_any_kind(kind, fully):
    """Two shards do not divide the rank 3. A state of one device continues on the mesh."""
    tokens, mesh = tokens_of(4, 3), mesh_of(kind, data=2, t=2)
    numbers = {"learning_rate": {"one": 0.01, "two": 0.001}, "max_norm": {"one": 1.0}}

    def loss(model, batch, tokens):
        with jlora.use(batch):
            return jnp.square(model(tokens)).sum((1, 2)), jnp.ones(len(tokens))

    def run(model, **config):
        manager = make_manager(model, [ONE, TWO], max_lora_rank=3, **config)
        return manager, trainer_of(manager, ["one", "two"], loss=loss)

    def step(trainer, tokens):
        report = trainer.step(trainer.prepare(NAMES), tokens, **numbers)
        return {name: float(value) for name, value in report.losses.items()}

    _, reference = run(Small())
    with jax.set_mesh(mesh):
        model = placed((Written if kind == AxisType.Explicit else Small)(), mesh, SMALL | {"embed": P()})
        manager, trainer = run(model, data_axes=["data"], fully_sharded=fully)
        on_mesh = jax.device_put(tokens, NamedSharding(mesh, P("data")))
        for _ in range(2):
            assert step(trainer, on_mesh) == pytest.approx(step(reference, tokens), rel=1e-5)
        trainer.state = reference.state
        assert step(trainer, on_mesh) == pytest.approx(step(reference, tokens), rel=1e-5)
        assert [trainer.publish(name) for name in ("one", "two")] == [1, 1]
        manager.pin_adapter("one")
        published, trained = (found.modules for found in (manager.export_adapter("one"), trainer.adapter("one")))
    for module, want in reference.adapter("one").modules.items():
        np.testing.assert_allclose(trained[module].a, want.a, atol=1e-4)
        np.testing.assert_allclose(trained[module].b, want.b, atol=1e-4)
        np.testing.assert_array_equal(published[module].a, trained[module].a)


# --- Refusals -------------------------------------------------------------------------------------------------------


def test_adapters_that_are_not_trained_are_refused():
    manager = served(["wide", "query"], variants=["dora"], saved_heads={"o_proj": 16})
    head = jlora.SavedHead(np.ones((16, 16), np.float32), np.ones(16, np.float32))
    manager.add_adapter(replace(fresh("query"), name="head", heads={"layers.0.o_proj": head}))
    manager.add_adapter(make_dora("dora", [Target(QUERY, 16, 16, "")], 2))
    manager.add_adapter(replace(fresh("mixed"), peft_fields={"ensure_weight_tying": True}))
    trainer = manager.trainer(loss, capacity=1)
    for name, options, error, cause in (
        ("head", {}, jlora.LoRAUsageError, r"'head': layers\.0\.o_proj has a saved head, and only A and B"),
        ("dora", {}, jlora.LoRAUsageError, r"'dora': layers\.0\.q_proj has DoRA, and only A and B are trained"),
        ("mixed", {}, jlora.LoRAUsageError, "'mixed': ensure_weight_tying is True, for which PEFT trains one LoRA"),
        ("missing", {}, jlora.AdapterNotFoundError, "'missing' is not loaded; .* give rank and alpha, for a new one"),
        ("missing", {"alpha": 4.0}, jlora.AdapterNotFoundError, "give rank and alpha, for a new one"),
        ("", {"rank": 2, "alpha": 1.0}, jlora.LoRAUsageError, "name must be a non-empty string, got ''"),
        ("new", {"rank": 2, "alpha": 1.0, "seed": -1}, jlora.LoRAUsageError, "seed must be an integer from 0 on"),
        ("query", {"alpha": 1.0}, jlora.LoRAUsageError, "'query' exists, with a rank of its own; give no alpha"),
        ("query", {"target_modules": ["q_proj"]}, jlora.LoRAUsageError, "give no target_modules, or another name"),
        ("query", {"rank": 2, "alpha": 1}, jlora.LoRAUsageError, "'query' exists, with a rank of its own"),
    ):
        with pytest.raises(error, match=cause):
            trainer.add(name, **options)
    assert trainer.names == ()
    trainer.add("query")
    with pytest.raises(jlora.LoRAUsageError, match="'query' is trained already"):
        trainer.add("query")
    with pytest.raises(jlora.LoRAUsageError, match="all 1 places are taken"):
        trainer.add("wide")
    with pytest.raises(jlora.LoRAUsageError, match="'wide' is not trained here; the trainer has query"):
        trainer.tensors("wide")


@pytest.mark.usefixtures("unchecked_calls")
def test_arguments_of_wrong_types_are_refused():
    manager = served(["query"])
    for function, options, cause in (
        (loss, {"capacity": 0}, "capacity must be a positive integer, got 0"),
        (loss, {"max_rank": 1.5}, r"max_rank must be a positive integer, got 1\.5"),
        (loss, {"max_rank": 9}, "max_rank=9 is more than 4, the largest rank of its layers"),
        (loss, {"target_modules": "q_proj"}, "a list of names, at least one, got 'q_proj'"),
        (loss, {"optimizer": 0.1}, "the optimizer must have `init` and `update`"),
        (None, {}, "the loss must be a function"),
    ):
        with pytest.raises(jlora.LoRAUsageError, match=cause):
            manager.trainer(function, **options)
    trainer = trainer_of(manager, ["query"])
    with pytest.raises(jlora.LoRAUsageError, match="open batch"):
        trainer.step(["query"] * 6, TOKENS)
    for names in ("query", None, ["query", ["wide"]], ["query", 3]):
        with pytest.raises(jlora.LoRAUsageError, match=r"Trainer\.prepare takes a list of one name"):
            trainer.prepare(names)


def test_batches_that_cannot_be_trained_are_refused(begun):
    manager, trainer = begun
    other = trainer_of(manager, ["query"])
    trainer.remove("wide")
    before = trainer.state
    batch = trainer.prepare(["query"] * 6)
    batch.close()
    with pytest.raises(jlora.LoRAUsageError, match="open batch"):
        trainer.step(batch, TOKENS)
    for prepare in (manager.prepare, other.prepare):
        with prepare(["query"] * 6) as batch, pytest.raises(jlora.LoRAUsageError, match="of a manager or of another"):
            trainer.step(batch, TOKENS)
    with pytest.raises(jlora.LoRAUsageError, match="'wide' is not trained here"):
        trainer.prepare(["wide"])
    batch = trainer.prepare(["query"] * 6)
    jax.tree.map(np.testing.assert_array_equal, trainer.state, before)
    trainer.remove("query")
    trainer.add("query")
    with pytest.raises(jlora.LoRAUsageError, match="'query' of the batch was removed"):
        trainer.step(batch, TOKENS)


def test_a_loss_of_another_shape_or_dtype_is_refused():
    results: list = []  # what the loss returns, from losses and weights; a failed trace is not kept
    trainer = trainer_of(served(["query"]), ["query"], loss=lambda *args: results[-1](*loss(*args)))
    for returned, message in (
        (lambda losses, weights: (losses.mean(), weights), r"losses float32\[\] and weights float32\[6\]; expected"),
        (lambda losses, weights: (losses[:1], weights), r"losses float32\[1\]"),
        (lambda losses, weights: (losses[:, None], weights), r"losses float32\[6, 1\]"),
        (lambda losses, weights: (losses.astype(int), weights), r"losses int32\[6\]"),
        (lambda losses, weights: (losses, weights.sum()), r"weights float32\[\]"),
        (lambda losses, weights: (losses, weights > 0), r"weights bool\[6\]"),
        (lambda losses, weights: losses, r"returned one .*; expected the pair \(losses \[B\], weights \[B\]\)"),
    ):
        results.append(returned)
        with pytest.raises(jlora.LoRAUsageError, match=message):
            trainer.step(trainer.prepare(["query", None] * 3), TOKENS)

"""DoRA adapters (arXiv:2402.09353) in slots: values against NumPy, reuse of slots, updates, repairs and refusals."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora import Mix
from tests.layers import expert_models
from tests.manager.tiny import MODULES, Model, as_dora, make_adapter, make_world, tensors

LINEAR = [name for name, (_, _, kind) in MODULES.items() if kind == "linear"]
O_PROJ = "layers.1.o_proj"


def dora(name, version=0, *, rank=3, modules=LINEAR, **fields):
    return as_dora(make_adapter(name, version, rank=rank, modules=modules, **fields))


ALL, SOME = dora("all"), dora("some", modules=["layers.0.k_proj", O_PROJ])
PLAIN = make_adapter("plain", rank=2)
BOTH = (ALL, SOME, PLAIN)


@functools.cache
def made(**config):
    return make_world(variants=["dora"], **config)


def served(*adapters, **config):
    """Return a world with these adapters alone. Its step is compiled once for all tests."""
    world = made(**config)
    world.reset()
    world.load(*adapters)
    return world


def test_mixed_batches_equal_scaled_weights():
    world = served(*BOTH, max_loras=3, max_cpu_loras=3)
    for rows in ([ALL, None, SOME], [PLAIN, ALL, ALL], [SOME, PLAIN, None]):
        world.check(world.serve([row and row.name for row in rows]), rows)
    assert len(world.traces) == 1
    assert world.manager.stats().compilations == 1


def test_sums_and_activations_beside_dora():
    config = {"max_adapters_per_sequence": 2, "activated": True}
    world = served(*BOTH, max_loras=3, max_cpu_loras=3, **config)
    entries = [Mix({"all": 1}), Mix({"plain": 0.5}), "all"]
    world.check(world.serve(entries), [ALL, [(PLAIN, 0.5)], ALL])
    base = world.serve([None] * 3)
    assert (world.serve([Mix({"all": 0}), None, Mix({"all": 0, "plain": 0})]) == base).all()


@pytest.mark.slow
def test_plain_and_base_rows_have_the_bits_of_a_manager_without_dora():
    dtype = jnp.bfloat16
    without = make_world(max_loras=2, dtype=dtype)
    without.manager.add_adapter(PLAIN)
    world = served(ALL, PLAIN, dtype=dtype)
    want = without.serve(["plain", None, "plain"])
    assert (world.serve(["plain", None, "plain"]) == want).all()
    got = world.serve(["plain", None, "all"])
    assert (got[:2] == want[:2]).all()
    assert (got[2] != want[2]).any()


def test_a_plain_adapter_in_a_slot_that_held_dora_is_as_in_a_fresh_slot():
    fresh = served(PLAIN, max_loras=1)
    want = fresh.serve(["plain", None, "plain"])
    world = served(*BOTH, max_loras=1)
    world.serve(["all", None, "all"])
    assert (world.serve(["plain", None, "plain"]) == want).all()
    assert all((held == 1).all() for path, held in world.slots() if str(path[-1]).endswith("_dora"))
    world.check(world.serve(["some", None, "some"]), [SOME, None, SOME])
    world.check(world.serve(["all", None, "all"]), [ALL, None, ALL])


@pytest.mark.parametrize(("put", "names"), [(np.asarray, LINEAR), (jnp.asarray, ["layers.0.q_proj", O_PROJ])])
def test_updates_compute_the_norms_again(put, names):
    adapter, other = dora("a", modules=LINEAR), make_adapter("a", 7, rank=3, modules=names)
    world = served(adapter)
    world.serve(["a", None, "a"])
    for scale in (1, 2):
        modules = {n: dataclasses.replace(m, a=scale * m.a) for n, m in other.modules.items()}
        part = dataclasses.replace(other, modules=modules)
        world.manager.update_adapter("a", tensors(part, put))
        changed = {n: dataclasses.replace(adapter.modules[n], a=m.a, b=m.b) for n, m in modules.items()}
        now = dataclasses.replace(adapter, modules=dict(adapter.modules) | changed)
        world.check(world.serve(["a", None, "a"]), [now, None, now])
    with pytest.raises(jlora.AdapterMismatchError, match="found lora_magnitude_vector"):
        world.manager.update_adapter("a", {f"{O_PROJ}.lora_magnitude_vector": np.ones(16, np.float32)})


def test_exports_and_saved_managers_keep_magnitudes(tmp_path):
    world = served(*BOTH[:2])
    world.serve(["all", "some", None])
    exported = world.manager.export_adapter("all")
    for name, module in exported.modules.items():
        np.testing.assert_array_equal(module.vectors["dora"], ALL.modules[name].vectors["dora"].astype(np.float32))
    world.manager.save(tmp_path)
    restored = make_world(variants=["dora"])
    restored.manager.restore(tmp_path)
    assert (restored.serve(["all", "some", None]) == world.serve(["all", "some", None])).all()
    with pytest.raises(jlora.AdapterMismatchError, match=r"LoRAConfig\(variants=\['dora'\]\) serves it"):
        make_world().manager.restore(tmp_path)


def test_lost_arrays_are_written_again():
    world = served(*BOTH, max_loras=2)
    state = jax.tree.map(jnp.copy, nnx.state(world.model, jlora.SlotParam))
    world.serve(["all", "some", None])
    nnx.update(world.model, state)
    world.check(world.serve(["all", "some", None]), [ALL, SOME, None])
    for path, variable in nnx.to_flat_state(nnx.state(world.model, jlora.SlotRanks)):
        if str(path[-1]).endswith("_dora"):
            variable[...].delete()
    world.check(world.serve(["all", "some", None]), [ALL, SOME, None])
    world.check(world.serve(["all", "plain", None]), [ALL, PLAIN, None])


@pytest.mark.parametrize(("param", "slots"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_norms_are_those_of_float64(param, slots):
    k, n, rank = 256, 192, 8
    model = nnx.Dict(layer=nnx.Linear(k, n, param_dtype=param, rngs=nnx.Rngs(0)))
    manager = jlora.LoRAManager(
        model, jlora.LoRAConfig(max_loras=1, max_lora_rank=rank, dtype=slots, variants=["dora"])
    )
    rng = np.random.default_rng(0)
    w = np.asarray(model["layer"].kernel[...]).astype(np.float64)
    # Factors as after a training: the delta is a tenth of the weight, and partly along it.
    u, s, v = np.linalg.svd(w, full_matrices=False)
    a = (-0.1 * s[:rank, None] * u[:, :rank].T + 1e-3 * rng.normal(size=(rank, k))).astype(np.float32)
    b = (v[:rank].T + 0.1 * rng.normal(size=(n, rank))).astype(np.float32)
    magnitude = np.linalg.norm(w, axis=0).astype(np.float32)
    module = jlora.ModuleLoRA(a=a, b=b, alpha=2.0 * rank, scaling=2.0, vectors={"dora": magnitude})
    manager.add_adapter(jlora.Adapter(name="a", modules={"layer": module}))
    manager.prepare(["a"]).close()
    a, b = (factor.astype(slots).astype(np.float64) for factor in (a, b))
    want = magnitude / np.linalg.norm(w.T + 2 * b @ a, axis=1)
    got = np.asarray(nnx.state(model, jlora.SlotRanks)["layer"]["jlora_dora"][...])[0]
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_columns_without_a_finite_norm_are_refused():
    world, adapter = make_world(variants=["dora"]), dora("a", modules=[O_PROJ])
    kernel, module = world.model.layers[1].o_proj.kernel, adapter.modules[O_PROJ]
    kept = kernel[...]
    module.b[5] = 0
    for weight, error in (
        (kept.at[:, 5].set(0), rf"'a': {O_PROJ}: the norm of column 5 .* is 0"),
        (kept.at[:, 2].set(-module.scaling * module.b[2] @ module.a), r"the norm of column 2 .* cancels to 0"),
        (kept.at[3, 4].set(jnp.inf), r"column 4 .* is not finite"),
        (kept.astype(jnp.int8), rf"'a': {O_PROJ}: DoRA needs .* {O_PROJ}.kernel is int8"),
    ):
        kernel.set_value(weight)
        with pytest.raises(jlora.AdapterMismatchError, match=error):
            world.manager.add_adapter(adapter)
    kernel.set_value(gone := jnp.copy(kept))
    gone.delete()
    with pytest.raises(jlora.LoRAError, match=rf"{O_PROJ}.kernel: the parameter was donated"):
        world.manager.add_adapter(adapter)
    kernel.set_value(kept.at[:, 5].set(0))
    module.b[5] = 1  # the delta alone has a norm
    world.manager.add_adapter(adapter)
    world.check(world.serve(["a", None, "a"]), [adapter, None, adapter])


def test_dora_of_other_layers_is_refused(tmp_path):
    adapter, world = dora("a", modules=["embed", O_PROJ]), served()
    adapter.save_pretrained(tmp_path)
    survey = jlora.Survey(Model(), world.manager.config)
    for source in (adapter, jlora.LoRARequest("a", str(tmp_path))):
        for call in (world.manager.add_adapter, survey.check):
            with pytest.raises(jlora.AdapterMismatchError, match="embed: DoRA is served for linear layers, and this"):
                call(source)
    survey = jlora.Survey(expert_models.Model(expert_models.Seams, nnx.Rngs(0)), world.manager.config)
    k, n = expert_models.HIDDEN, expert_models.INNER
    vectors = {"dora": np.ones(n)}
    module = jlora.ModuleLoRA(a=np.ones((1, k)), b=np.ones((n, 1)), alpha=1, scaling=1.0, vectors=vectors)
    with pytest.raises(jlora.AdapterMismatchError, match=r"up_proj: DoRA is served .*is a product of experts"):
        survey.check(jlora.Adapter(name="a", modules={"layers.0.experts.0.up_proj": module}))


def test_factors_and_sums_of_dora_are_refused():
    world = served(*BOTH, max_adapters_per_sequence=2, max_loras=3)
    for entry in (Mix({"all": 0.5}), Mix({"all": 1, "plain": 1}), Mix({"all": -1})):
        with pytest.raises(jlora.LoRAUsageError, match="'all' is a DoRA adapter, which is served alone"):
            world.manager.prepare(["plain", entry, None])
    world.serve(["plain", Mix({"plain": 0.5, "some": 0}), "all"])


class Offset(nnx.Module):
    """A projection with an offset of another name than a bias."""

    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal((6, 8)))
        self.offset = nnx.Param(rngs.normal((8,)))

    def __call__(self, x):
        return x @ self.w[...] + self.offset[...][None]


class Named(Offset):
    pass


class Guessed(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x) + 0


jlora.register_layer(Offset, lambda layer: jlora.LinearSpec(6, 8, param="w"))
jlora.register_layer(Named, lambda layer: jlora.LinearSpec(6, 8, param="w", bias="offset"))


@jax.jit
def step_of_layer(model, x, batch):
    with jlora.use(batch):
        return model["layer"](x)


def of_layer(layer):
    model = nnx.Dict(layer=layer)
    manager = jlora.LoRAManager(model, jlora.LoRAConfig(max_loras=1, max_lora_rank=2, variants=["dora"]))
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 6)), rng.normal(size=(8, 2))
    module = jlora.ModuleLoRA(a=a, b=b, alpha=2, scaling=1.0, vectors={"dora": rng.uniform(1, 2, 8)})
    return model, manager, jlora.Adapter(name="a", modules={"layer": module})


@pytest.mark.parametrize(
    ("layer", "cause"),
    [
        (lambda: Offset(nnx.Rngs(0)), r"no attribute 'bias', and 'offset' may be its bias; name the bias in LinearSp"),
        (lambda: Guessed(6, 8, rngs=nnx.Rngs(0)), "Guessed overrides the __call__ of Linear.* bias .* is not known"),
    ],
)
def test_layers_whose_bias_is_not_known_are_refused(layer, cause):
    _, manager, adapter = of_layer(layer())
    manager.verify(step_of_layer, np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32))
    with pytest.raises(jlora.AdapterMismatchError, match=f"'a': layer: DoRA is not served here: .*{cause}"):
        manager.add_adapter(adapter)


BIASED = {"bias_init": nnx.initializers.normal(), "rngs": nnx.Rngs(0)}
LAYERS_WITH_BIAS = {
    "named": lambda: Named(nnx.Rngs(0)),
    "general": lambda: nnx.LinearGeneral(6, (4, 2), **BIASED),
    "einsum of other order": lambda: nnx.Einsum("bd,dnh->bhn", (6, 4, 2), (2, 4), **BIASED),
}


@pytest.mark.parametrize("kind", LAYERS_WITH_BIAS)
def test_biases_are_not_scaled(kind):
    model, manager, adapter = of_layer(LAYERS_WITH_BIAS[kind]())
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    manager.add_adapter(adapter)
    step = step_of_layer

    def flat(y):
        y = np.asarray(y, np.float64)
        return (y.transpose(0, 2, 1) if kind == "einsum of other order" else y).reshape(len(y), -1)

    with manager.prepare([None] * 3) as batch:
        bias, base = flat(step(model, 0 * x, batch)), flat(step(model, x, batch))
    with manager.prepare(["a", None, "a"]) as batch:
        got = flat(step(model, x, batch))
    layer, lora = model["layer"], adapter.modules["layer"]
    w = np.asarray((layer.w if kind == "named" else layer.kernel)[...], np.float64).reshape(6, 8)
    whole = w.T + lora.b @ lora.a
    want = x @ (whole * (lora.vectors["dora"] / np.linalg.norm(whole, axis=1))[:, None]).T + bias
    np.testing.assert_allclose(got[::2], want[::2], rtol=0, atol=2e-6 * np.abs(want).max())
    assert (got[1] == base[1]).all()
    assert np.abs(bias).max() > 0

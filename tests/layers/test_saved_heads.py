"""Saved heads: layers that an adapter replaces (PEFT's modules_to_save), compared with NumPy row by row."""

import ast
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from tests.layers.merging import make_manager, normal, serve, step_of_one_trace
from tests.layers.mesh_models import mesh_of, placed

K, N, MOST = 6, 2, 4
LENGTH = 3


class Classifier(nnx.Module):
    def __init__(self, bias=True, outputs=N, dtype=jnp.float32):
        self.proj = nnx.Linear(K, K, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
        self.score = nnx.Linear(K, outputs, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(1))
        if bias:
            self.score.bias[...] = normal(outputs, seed=5).astype(dtype)

    def __call__(self, x):
        return self.score(self.proj(x))


def head_of(outputs, seed, bias=True):
    weight = normal(outputs, K, seed=seed)
    return jlora.SavedHead(np.asarray(weight), np.asarray(normal(outputs, seed=seed + 50)) if bias else None)


def adapter_of(name, seed, outputs=None, *, bias=True, lora=("proj",)):
    """Return an adapter with LoRA on the named layers and, with `outputs`, a saved head."""
    sizes = {"proj": (K, K), "score": (K, N)}
    arrays = {m: (normal(2, sizes[m][0], seed=seed), normal(sizes[m][1], 2, seed=seed + 1)) for m in lora}
    heads = None if outputs is None else {"score": head_of(outputs, seed + 2, bias)}
    return jlora.Adapter.from_arrays(name, arrays, alpha=2, heads=heads)


ADAPTERS = [
    adapter_of("three", 10, 3),
    adapter_of("one", 20, 1),
    adapter_of("four", 30, MOST),
    adapter_of("plain", 40),
    adapter_of("score", 60, lora=("proj", "score")),
]


def expected_row(model, adapter, x, width):
    """Return the output of one row of x [.., K], with -inf past the outputs of its head."""

    def weight_of(layer):
        return np.asarray(layer.kernel[...], np.float64).T

    proj, score = weight_of(model.proj), weight_of(model.score)
    bias = 0 if model.score.bias is None else np.asarray(model.score.bias[...], np.float64)
    deltas = (
        {} if adapter is None else {m: f.scaling * f.b.astype(np.float64) @ f.a for m, f in adapter.modules.items()}
    )
    score = score + deltas.get("score", 0)
    if adapter is not None and adapter.heads:
        head = adapter.heads["score"]
        score, bias = head.weight.astype(np.float64), 0 if head.bias is None else head.bias.astype(np.float64)
    y = np.asarray(x, np.float64) @ (proj + deltas.get("proj", 0)).T @ score.T + bias
    return np.concatenate([y, np.full((*y.shape[:-1], width - y.shape[-1]), -np.inf)], axis=-1)


def expected(names, x, model=None, adapters=ADAPTERS, width=MOST):
    model, by_name = model or Classifier(), {a.name: a for a in adapters}
    return np.stack([expected_row(model, by_name.get(n), row, width) for n, row in zip(names, x, strict=True)])


def close(found, want, tolerance=2e-5):
    found = np.asarray(found, np.float64)
    assert found.shape == want.shape
    assert np.array_equal(np.isneginf(found), np.isneginf(want))
    real = np.isfinite(want)
    assert np.abs(found[real] - want[real]).max() <= tolerance * np.abs(want[real]).max()


def manager_of(model=None, adapters=ADAPTERS, **config):
    options = {"max_loras": 5, "saved_heads": {"score": MOST}} | config
    return make_manager(Classifier() if model is None else model, adapters, **options)


NAMES = ["three", None, "one", "plain", "score", "four", "three"]


def check(manager, names, x, step=serve, tolerance=2e-5, **known):
    with manager.prepare(names) as batch:
        close(step(manager.model, x, batch), expected(names, x, **known), tolerance)


@pytest.mark.device
@pytest.mark.parametrize("config", [{}, {"max_adapters_per_sequence": 2, "batch_invariant": True}], ids=str)
def test_mixed_rows(config):
    manager = manager_of(**config)
    for names in (NAMES, NAMES[::-1]):
        for shape in ((LENGTH,), ()):
            check(manager, names, normal(len(NAMES), *shape, K))


@pytest.mark.device
def test_rows_before_first_active_row_take_base_layer():
    """Plain adapters too take `active_from`, with their saved head."""
    manager, x = manager_of(activated=True), normal(len(NAMES), LENGTH, K)
    first = [2, 1, 1, 2, 0, 0, LENGTH]
    with manager.prepare(NAMES, active_from=first, length=LENGTH) as batch:
        active = np.arange(LENGTH)[None, :, None] >= np.array(first)[:, None, None]
        want = np.where(active, expected(NAMES, x), expected([None] * len(NAMES), x))
        close(serve(manager.model, x, batch), want)


@pytest.mark.device
def test_packed_rows():
    manager, counts, names = manager_of(), [2, 0, 3, 1], ["three", "one", None, "four"]
    x = normal(9, K)
    of_row = [name for name, count in zip(names, counts, strict=True) for _ in range(count)] + [None] * 3
    for rows in (x, x[None]):
        with manager.prepare(names, token_counts=counts, pad_to=9) as batch:
            found = serve(manager.model, rows, batch)
        close(np.asarray(found).reshape(9, MOST), expected(of_row, x))


def test_bfloat16():
    model, x = Classifier(dtype=jnp.bfloat16), normal(len(NAMES), LENGTH, K).astype(jnp.bfloat16)
    check(manager_of(model), NAMES, x, tolerance=4e-2, model=Classifier(dtype=jnp.bfloat16))


def test_without_bias_and_with_more_base_outputs():
    adapters, bare = (
        [adapter_of("three", 10, 3, bias=False), adapter_of("plain", 40)],
        Classifier(bias=False, outputs=5),
    )
    manager = manager_of(nnx.clone(bare), adapters)
    check(manager, ["three", None, "plain"], normal(3, LENGTH, K), model=bare, adapters=adapters, width=5)


def test_eviction_and_a_second_load():
    """Two slots for five adapters: each slot holds heads of other sizes, and then none."""
    manager, x, step = manager_of(max_loras=2), normal(2, LENGTH, K), step_of_one_trace()
    for names in (["four", "one"], ["plain", "three"], ["three", "plain"], ["score", "four"], ["one", None]):
        check(manager, names, x, step)
    manager.remove_adapter("one")
    again = adapter_of("one", 80, 2)
    manager.add_adapter(again)
    check(manager, ["one", "four"], x, step, adapters=[again, ADAPTERS[2]])
    assert manager.stats().compilations == 1


def test_export_and_files(tmp_path):
    manager, x = manager_of(), normal(2, LENGTH, K)
    with manager.prepare(["three", "plain"]):
        exported = manager.export_adapter("three")
    assert exported.saved_outputs == {"score": 3}
    assert np.array_equal(exported.heads["score"].weight, ADAPTERS[0].heads["score"].weight)
    assert np.array_equal(exported.heads["score"].bias, ADAPTERS[0].heads["score"].bias)
    exported.save_pretrained(tmp_path / "three")
    manager.remove_adapter("three")
    manager.add_adapter(jlora.LoRARequest("three", path=str(tmp_path / "three")))
    assert info_of(manager, "three").saved_outputs == {"score": 3}
    assert info_of(manager, "three").rank == 2
    check(manager, ["three", "plain"], x)


def info_of(manager, name):
    return manager.list_adapters()[name]


# --- meshes -----------------------------------------------------------------------------------------------------------


def on_mesh(axes, kernel):
    return placed(Classifier(), mesh_of(**axes), {"score": kernel})


@pytest.mark.mesh
def test_on_a_mesh():
    manager = manager_of(on_mesh({"data": 2, "t": 2}, P("t")), data_axes=["data"], fully_sharded=True)
    names = [*NAMES, "one"]
    check(manager, names, normal(8, LENGTH, K))
    with manager.prepare(names, token_counts=[2] * 8) as batch:
        close(serve(manager.model, normal(16, K), batch), expected([n for n in names for _ in "ab"], normal(16, K)))


@pytest.mark.mesh
def test_split_outputs_are_refused():
    with pytest.raises(jlora.LoRAUsageError, match="'score': its outputs are split over t; leave them whole"):
        manager_of(on_mesh({"t": 2}, P(None, "t")))


@pytest.mark.mesh
def test_inside_of_shard_map_is_refused():
    model = on_mesh({"t": 2}, P("t"))
    manager = manager_of(model, [ADAPTERS[0]])
    graph, state = nnx.split(model)
    specs = jax.tree.map(lambda array: array.sharding.spec, state)

    def local(x, state, batch):
        with jlora.use(batch, without=["proj"]):
            return jax.lax.psum(nnx.merge(graph, state).score(x), "t")

    mesh = model.score.kernel[...].sharding.mesh
    ins = P(None, None, "t"), specs, P()
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=P(), check_vma=False))
    with manager.prepare(["three", None]) as batch, pytest.raises(jlora.LoRAError, match="saved heads are not served"):
        mapped(normal(2, LENGTH, K), state, batch)


# --- refusals and off -------------------------------------------------------------------------------------------------


def test_off_means_no_arrays():
    off, on = make_manager(Classifier()), manager_of(adapters=[])

    def arrays(manager):
        return {".".join(map(str, path)) for path in dict(nnx.to_flat_state(nnx.state(manager.model)))}

    assert arrays(on) - arrays(off) == {f"score.jlora_head_{name}" for name in ("a", "b", "ranks")}
    assert not arrays(off) - arrays(on)
    layers = {layer.path: layer for layer in on.layers()}
    assert {path: layer.saved_outputs for path, layer in layers.items()} == {"proj": 0, "score": MOST}
    assert layers["score"].slot_bytes > {layer.path: layer for layer in off.layers()}["score"].slot_bytes
    on.unwrap()
    assert not any("jlora" in name for name in arrays(on))


def broken_head(weight=(3, K), bias=3):
    head = jlora.SavedHead(normal(*weight), None if bias is None else normal(bias))
    return jlora.Adapter.from_arrays("broken", {"proj": (normal(2, K), normal(K, 2))}, alpha=1, heads={"score": head})


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (broken_head((3, K + 1)), f"score: the saved head has {K + 1} input features, and 'score' has {K}"),
        (broken_head(bias=None), "score: the saved head has no bias, and 'score' has one"),
    ],
)
def test_heads_that_do_not_fit(adapter, message):
    manager = manager_of()
    with pytest.raises(jlora.AdapterMismatchError, match=message):
        manager.add_adapter(adapter)
    without = manager_of(Classifier(bias=False), [])
    with pytest.raises(jlora.AdapterMismatchError, match="score: the saved head has a bias, and 'score' has none"):
        without.add_adapter(ADAPTERS[0])
    assert "broken" not in manager.list_adapters()
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=4, saved_heads={"score": MOST})
    with pytest.raises(jlora.AdapterMismatchError, match=message):
        jlora.Survey(Classifier(), config).check(adapter)


def advised(error):
    """Return the `saved_heads` of a message's advice, checked to be the same for LoRAConfig and for `jlora serve`."""
    option = re.search(
        r"LoRAConfig\(saved_heads=({.*?})\) serves .*, or jlora serve --saved-heads ([^\n]*)", str(error)
    )
    found = ast.literal_eval(option[1])
    assert option[2] == " ".join(f"{name}={outputs}" for name, outputs in found.items())
    return found


class Wide(nnx.Module):
    """Two scores, of which the second is below another module, an embedding and a norm."""

    def __init__(self):
        self.embed_tokens = nnx.Embed(8, K, rngs=nnx.Rngs(0))
        self.norm = nnx.RMSNorm(K, rngs=nnx.Rngs(0))
        self.first = Classifier()
        self.second = Classifier(outputs=3)

    def __call__(self, x):
        tokens = jnp.zeros(x.shape[:-1], jnp.int32)
        return self.embed_tokens(tokens), self.first(x), self.second.score(x), self.second.proj(x)


TWO = {"first.score": head_of(5, 1), "second.proj": head_of(7, 2, bias=False)}


@pytest.mark.parametrize("saved", [None, {"score": 5, "second.score": 1}])
def test_advice_serves_the_adapter(saved):
    """One message names all heads without room, and its option keeps the other layers of the configuration."""
    adapter = jlora.Adapter.from_arrays("a", {"first.proj": (normal(2, K), normal(K, 2))}, alpha=1, heads=TWO)
    with pytest.raises(jlora.AdapterMismatchError, match=r"fully trained \(modules_to_save\)") as caught:
        make_manager(Wide(), [adapter], saved_heads=saved)
    heads = advised(caught.value)
    assert (saved or {}).items() <= heads.items()
    manager = make_manager(Wide(), [adapter], saved_heads=heads)
    assert info_of(manager, "a").saved_outputs == {"first.score": 5, "second.proj": 7}
    x = jnp.asarray(normal(1, LENGTH, K))
    with manager.prepare(["a"]) as batch:
        _, score, _, proj = serve(manager.model, x, batch)
    close(proj, np.asarray(x, np.float64) @ TWO["second.proj"].weight.astype(np.float64).T)
    lora, head = adapter.modules["first.proj"], TWO["first.score"]
    inner = np.asarray(x, np.float64) @ (
        np.asarray(Wide().first.proj.kernel[...], np.float64) + (lora.b @ lora.a).T / 2
    )
    close(score, inner @ head.weight.astype(np.float64).T + head.bias)


def test_heads_of_a_mapped_name():
    """The advice names the layer as the model does, not as the adapter does."""
    adapter = jlora.Adapter.from_arrays("a", {}, alpha=1, heads={"classifier": head_of(3, 1)})
    options = {"name_map": {"^classifier$": "score"}}
    config = jlora.LoRAConfig(max_loras=1, max_lora_rank=1)
    with pytest.raises(jlora.LoRAUsageError, match="saved_heads names 'classifier'"):
        jlora.LoRAManager(Classifier(), replace(config, saved_heads={"classifier": 3}), **options)
    with pytest.raises(jlora.AdapterMismatchError) as caught:
        jlora.LoRAManager(Classifier(), config, **options).add_adapter(adapter)
    assert advised(caught.value) == {"score": 3}
    jlora.LoRAManager(Classifier(), replace(config, saved_heads={"score": 3}), **options).add_adapter(adapter)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embed_tokens", "a fully trained 'embed_tokens' .* cannot be served: it is an embedding"),
        ("norm", "'norm' is not wrapped"),
        ("third.score", r"the model has no module 'third.score'.*the nearest is '(first|second).score'"),
    ],
)
def test_modules_that_cannot_be_replaced(name, message):
    """The message advises no option, and the option itself is refused."""
    adapter = jlora.Adapter.from_arrays("a", {}, alpha=1, heads={name: jlora.SavedHead(normal(8, K))})
    with pytest.raises(jlora.AdapterMismatchError, match=message) as caught:
        make_manager(Wide(), [adapter])
    assert "saved_heads" not in str(caught.value)
    with pytest.raises(jlora.LoRAUsageError, match=f"saved_heads names '{name}', and no wrapped layer of that name"):
        make_manager(Wide(), [], saved_heads={"score": 2, name: 8})


def test_a_layer_that_is_not_wrapped():
    with pytest.raises(
        jlora.LoRAUsageError, match=r"saved_heads names 'score'.*not among the configured target_modules"
    ):
        manager_of(target_modules=["proj"])


def test_sums_are_refused():
    manager = manager_of(max_adapters_per_sequence=2)
    with pytest.raises(jlora.LoRAUsageError, match="'three' is an adapter with a saved head, which is served alone"):
        manager.prepare([jlora.Mix({"three": 1.0, "plain": 1.0})])
    manager.prepare([jlora.Mix({"plain": 0.5}), "three"]).close()


def test_updates_of_heads_are_refused():
    manager, x = manager_of(), normal(2, LENGTH, K)
    new = normal(2, K)
    manager.update_adapter("three", {"base_model.model.proj.lora_A.weight": new})
    proj = ADAPTERS[0].modules["proj"]
    changed = jlora.Adapter.from_arrays("three", {"proj": (new, proj.b)}, alpha=2, heads=ADAPTERS[0].heads)
    check(manager, ["three", None], x, adapters=[changed])
    for name in ("base_model.model.score.modules_to_save.weight", "base_model.model.score.weight"):
        with pytest.raises(jlora.AdapterMismatchError, match="load_inplace=True"):
            manager.update_adapter("three", {name: normal(3, K)})

"""MaxText's decoder, scanned with parameters on axis 1, against weights merged in NumPy."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jlora
from jlora.presets import maxtext as maxtext_preset
from tests import maxtext_model as maxtext
from tests.layers.merging import assert_close

pytestmark = pytest.mark.usefixtures("registered")

MODELS = {
    "llama": maxtext.LLAMA,
    "llama, unscanned": dataclasses.replace(maxtext.LLAMA, scan=False, layers=2),
    "gemma3": maxtext.GEMMA,
    "qwen3": maxtext.QWEN,
}
TOKENS = np.random.default_rng(0).integers(0, maxtext.VOCAB, (3, 5))
NAMES = ["one", None, "two"]
MESH = pytest.mark.mesh


def wrapped(model, **kwargs):
    preset = maxtext_preset(model)
    config = jlora.LoRAConfig(**{"max_loras": 3, "max_lora_rank": 4, **kwargs})
    return jlora.LoRAManager(model, config, name_map=preset.name_map)


def adapters_of(model):
    """Return two adapters: of all modules, and of every second one."""
    rng, modules = np.random.default_rng(1), {}
    for name, (_, n, k) in maxtext.weights(model).items():
        kind = "embedding" if name.endswith("embed_tokens") else "linear"
        n, k = (k, n) if kind == "embedding" else (n, k)
        a, b = rng.normal(size=(3, k)).astype(np.float32), rng.normal(size=(n, 3)).astype(np.float32)
        modules[name] = jlora.ModuleLoRA(a=a, b=b, kind=kind, alpha=1.5, scaling=0.5)
    half = dict(list(modules.items())[::2])
    return jlora.Adapter(name="one", modules=modules), jlora.Adapter(name="two", modules=half)


def merged(model, adapter):
    copy = nnx.clone(model)
    for name, (add, _, _) in maxtext.weights(copy).items():
        if (module := adapter.modules.get(name)) is not None:
            delta = module.scaling * module.b.astype(np.float64) @ module.a.astype(np.float64)
            add(delta.T if module.kind == "embedding" else delta)
    return copy


def rows_of(model, adapters):
    """Return the outputs of `NAMES`, each of a model with merged weights."""
    run = jax.jit(lambda model, tokens: model(tokens))
    by_name = {each.name: np.asarray(run(merged(model, each), TOKENS)) for each in adapters}
    by_name[None] = np.asarray(run(model, TOKENS))
    assert all(np.abs(by_name[None] - by_name[each.name]).max() > 0.1 for each in adapters)
    return np.stack([by_name[name][i] for i, name in enumerate(NAMES)])


def step_of(manager):
    @manager.jit
    def step(model, tokens, batch):
        with jlora.use(batch):
            return model(tokens)

    return step


def check(model, manager, adapters, expected):
    """Verify the model, serve a mixed batch, and swap an adapter without another trace."""
    step = step_of(manager)
    report = manager.verify(step, TOKENS)
    assert len(report.checked) == sum(layer.wrapped for layer in manager.layers())
    assert not report.unserved
    for adapter in adapters:
        manager.add_adapter(adapter)
    with manager.prepare(NAMES) as batch:
        assert_close(step(model, TOKENS, batch), expected, tolerance=1e-4)
    traces = step._cache_size()
    manager.remove_adapter("one")
    manager.add_adapter(dataclasses.replace(adapters[0], name="three"))
    with manager.prepare(["three", None, "two"]) as batch:
        assert_close(step(model, TOKENS, batch), expected, tolerance=1e-4)
    assert step._cache_size() == traces


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "llama")) for n in MODELS])
def test_maxtext_models_serve_adapters_of_transformers(name):
    model = maxtext.Transformer(MODELS[name])
    adapters = adapters_of(model)
    expected = rows_of(model, adapters)
    check(model, wrapped(model), adapters, expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MESH) for name in ("qwen3", "gemma3", "llama")])
def test_maxtext_models_on_a_mesh(name):
    model = maxtext.Transformer(MODELS[name])
    adapters = adapters_of(model)
    expected = rows_of(model, adapters)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("fsdp", "tensor"))
    manager = wrapped(maxtext.sharded(model, mesh), data_axes=("fsdp",))
    heads = model.decoder.layers.layers_1 if name == "gemma3" else model.decoder.layers
    assert heads.self_attention.query.jlora_b[...].sharding.spec[-1] == "tensor"
    check(model, manager, adapters, expected)


@pytest.mark.slow
def test_no_step_copies_the_slots():
    """The scan of MaxText returns all state that is no parameter, slots too."""

    def compiled(max_loras):
        model = maxtext.Transformer(maxtext.LLAMA)
        manager = wrapped(model, max_loras=max_loras)
        with manager.prepare([None] * 3) as batch:
            memory = step_of(manager).lower(model, TOKENS, batch).compile().memory_analysis()
        return memory.temp_size_in_bytes, memory.output_size_in_bytes, memory.argument_size_in_bytes

    (temp, out, given), (more_temp, more_out, more_given) = compiled(4), compiled(64)
    assert more_given - given > 60 * 8000  # bytes of slots
    assert abs(more_temp - temp) < 8000
    assert more_out == out


def test_a_model_that_is_not_maxtexts_is_refused():
    with pytest.raises(jlora.LoRAUsageError, match="Dict has no layer of Llama, Gemma 3 or Qwen3 as in MaxText"):
        maxtext_preset(nnx.Dict(proj=nnx.Linear(3, 3, rngs=nnx.Rngs(0))))

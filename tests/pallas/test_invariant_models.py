"""`LoRAConfig(batch_invariant=True)` in a served model: the bits of a row in batches of any size, mix and slots."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora import Mix
from tests.layers.merging import Target, make_adapter
from tests.matrix import thinned

pytestmark = pytest.mark.usefixtures("quickly_compiled")

# On a GPU the rule cuts a K of 1280 into 5 parts for up to 512 rows, and into 4 for more.
VOCAB, WIDTH, INNER, OUT, RANK = 11, 1280, 48, 32, 5
TARGETS = [
    Target("embed", VOCAB, WIDTH, "embed.embedding", kind="embedding"),
    Target("proj", WIDTH, INNER, "proj.kernel"),
    Target("head", INNER, OUT, "head.kernel"),
]
ROWS = (1, 3, 520)


class Model(nnx.Module):
    """A lookup, and projections whose own products are 0: the bits of these hang on the number of rows."""

    def __init__(self):
        given = {"param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.embed = nnx.Embed(VOCAB, WIDTH, **given)
        self.proj = nnx.Linear(WIDTH, INNER, kernel_init=nnx.initializers.zeros, **given)
        self.head = nnx.Linear(INNER, OUT, kernel_init=nnx.initializers.zeros, **given)

    def __call__(self, tokens):
        return self.head(jnp.tanh(self.proj(self.embed(tokens))))


def dora(adapter):
    modules = {
        name: dataclasses.replace(module, vectors={"dora": np.linspace(0.5, 2, len(module.b), dtype=np.float32)})
        for name, module in adapter.modules.items()
        if module.kind == "linear"
    }
    return dataclasses.replace(adapter, modules=modules)


ADAPTERS = [make_adapter(name, TARGETS, RANK) for name in "abcde"] + [dora(make_adapter("dora", TARGETS, RANK))]
OWN = ["a", Mix({"a": -0.3}), Mix({"a": 0.7, "b": 1.3}), "dora"]
OTHERS = [None, "b", "c", "d", "e", Mix({"c": 2.0}), Mix({"d": 1, "e": -1})]


def managed(backend, **config):
    switches = {"max_adapters_per_sequence": 1, "variants": ["dora"], "activated": True}
    sizes = {"max_loras": 4, "max_cpu_loras": 6, "max_lora_rank": 8}
    manager = jlora.LoRAManager(Model(), jlora.LoRAConfig(backend=backend, **sizes, **switches | config))
    for adapter in ADAPTERS:
        manager.add_adapter(adapter)
    return manager


def forward(model, tokens, batch):
    with jlora.use(batch):
        return model(tokens)


def bits_of(manager, step):
    """Return the bits of one row of each of OWN in batches of ROWS, at random places, and the slots of its adapter."""
    rng, found, slots = np.random.default_rng(0), {entry: [] for entry in OWN}, set()
    for rows in ROWS:
        for entry in OWN:
            for _ in range(2):
                place, free = rng.integers(rows), rng.permutation(5)
                company = [OTHERS[i] for i in (0, *free[:1] + 1)]  # few adapters, as there are four slots
                entries = [company[i] for i in rng.integers(len(company), size=rows)]
                tokens = rng.integers(0, VOCAB, (rows, 1))
                entries[place], tokens[place] = entry, 7
                with manager.prepare(entries) as batch:
                    slots.add(int(batch.slots[place]))
                    logits = step(manager.model, jnp.asarray(tokens, jnp.int32), batch)
                found[entry].append(np.asarray(logits)[place, 0].view(np.uint16))
    return found, slots


def alike(found):
    return all((one == rows[0]).all() for rows in found.values() for one in rows)


@pytest.mark.parametrize("backend", thinned(["xla", "triton", "mosaic_tpu"], 1))
@pytest.mark.slow
def test_a_row_has_the_same_bits_in_every_batch(interpret, backend):
    interpret()
    found, slots = bits_of(managed(backend, batch_invariant=True, max_adapters_per_sequence=2), jax.jit(forward))
    assert len(slots) > 1
    assert alike(found)
    assert len({rows[0].tobytes() for rows in found.values()}) == len(OWN)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.usefixtures("force_product")
def test_base_products_are_those_of_xla(interpret, batch_invariant):
    """jlora's kernel would compute them without `batch_invariant`."""
    calls, manager = interpret(), managed("triton", batch_invariant=batch_invariant)
    with manager.prepare(["a", None, "dora"]) as batch:
        jax.eval_shape(forward, manager.model, jnp.zeros((3, 1), jnp.int32), batch)
    assert ("product_in_parts" in calls) != batch_invariant
    assert "add_lora" in calls

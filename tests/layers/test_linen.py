"""Linen models, pure and in the NNX bridge, compared with their own parameters merged in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from tests.layers.merging import Target, assert_close, delta, make_adapter, make_manager, serve

pytestmark = pytest.mark.device


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(6)(jnp.tanh(nn.Dense(8, use_bias=False, name="up")(x)))


class Model(nn.Module):
    """A model with compact and setup modules, and one block under remat."""

    def setup(self):
        self.embed = nn.Embed(11, 6)
        self.first = Block()
        self.again = nn.remat(Block)()
        self.general = nn.DenseGeneral((2, 3))
        self.scanned = nn.scan(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)(6)

    def __call__(self, tokens):
        x = self.again(self.first(self.embed(tokens)))
        x = x + self.general(x).reshape(x.shape)
        return self.embed.attend(x)


TOKENS = np.random.default_rng(0).integers(0, 11, (3, 4)).astype(np.int32)
TARGETS = [
    Target("first.up", 6, 8, ""),
    Target("first.Dense_0", 8, 6, ""),
    Target("again.up", 6, 8, ""),
    Target("embed", 11, 6, "", kind="embedding"),
    Target("lm_head", 6, 11, ""),
]


def expected(variables, module, adapter):
    """Return the logits with one adapter merged. The two uses of the table have separate deltas."""
    params = jax.tree.map(np.array, variables["params"])
    d = {name: delta(m).T for name, m in adapter.modules.items()} if adapter else {}
    for block, name in (("first", "up"), ("first", "Dense_0"), ("again", "up")):
        params[block][name]["kernel"] += d.get(f"{block}.{name}", np.float32(0)).astype(np.float32)
    table = params["embed"]["embedding"].astype(np.float64)

    def run(module, tokens):
        x = jnp.asarray(table + d.get("embed", 0), jnp.float32)[tokens]
        x = module.again(module.first(x))
        return x + module.general(x).reshape(x.shape)

    hidden = np.asarray(module.apply({"params": params}, TOKENS, method=run), np.float64)
    return hidden @ (table.T + d.get("lm_head", 0))


@pytest.mark.parametrize("bridge", [False, True])
def test_linen_model(bridge):
    module = Model()
    variables = module.init(jax.random.key(0), TOKENS)
    if bridge:
        bridged = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(TOKENS)
        variables = {"params": nnx.to_pure_dict(nnx.state(bridged, nnx.Param))}
        model = jlora.LinenModule(bridged)
    else:
        model = jlora.LinenModule(module, variables)
    assert_close(model(TOKENS), module.apply(variables, TOKENS), 1e-6)
    model.tie_word_embeddings = True
    one, two = make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS[:1], 2)
    manager = make_manager(model, [one, two])
    with manager.prepare(["one", None, "two"]) as batch:
        found = serve(model, TOKENS, batch)
    want = [expected(variables, module, adapter)[i] for i, adapter in enumerate([one, None, two])]
    assert_close(found, np.stack(want))
    assert np.abs(want[0] - expected(variables, module, None)[0]).max() > 0.1

    report = manager.verify(serve, TOKENS)
    assert set(report.checked) == {"embed", "first.up", "first.Dense_0", "again.up", "again.Dense_0", "embed.attend"}
    manager.unwrap()
    assert_close(model(TOKENS), module.apply(variables, TOKENS), 1e-6)


def test_unsupported_linen_models_are_refused():
    class Doubled(nn.Dense):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(6, name="good")(x)
            heads = nn.DenseGeneral((2, 3), name="general")(x).reshape(x.shape)
            return Doubled(6, name="doubled")(x) + heads

    module, x = Other(), np.ones((3, 2, 6), np.float32)
    model = jlora.LinenModule(module, module.init(jax.random.key(0), x))
    manager = make_manager(model, [make_adapter("good", [Target("good", 6, 6, "")], 2)])
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match="doubled: it was not called"):
        serve(model, x, batch)
    manager.verify(serve, x)
    with manager.prepare(["good", None, None]) as batch:
        serve(model, x, batch)
    with pytest.raises(AdapterMismatchError, match="'general' is not wrapped"):
        manager.add_adapter(make_adapter("one", [Target("general", 6, 6, "")], 2))
    with pytest.raises(AdapterMismatchError, match="'doubled' takes no adapter yet: the forward never calls"):
        manager.add_adapter(make_adapter("two", [Target("doubled", 6, 6, "")], 2))
    for arguments in ((module,), (module, {}), (nn.Dense(3), nn.Dense(3).init(jax.random.key(0), x))):
        with pytest.raises(LoRAUsageError, match="LinenModule"):
            jlora.LinenModule(*arguments)


def test_a_bare_linen_module_raises_with_the_line_to_write():
    class Held(nnx.Module):
        def __init__(self):
            self.linen = nnx.bridge.ToNNX(nn.Dense(6), rngs=nnx.Rngs(0)).lazy_init(np.ones((1, 6), np.float32))
            self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    manager = make_manager(Held())
    with pytest.raises(AdapterMismatchError, match=r"a Linen module: hold it in a jlora\.LinenModule"):
        manager.add_adapter(make_adapter("one", [Target("linen", 6, 6, "")], 2))


def test_a_stack_of_linen_layers_is_named_and_its_norms_are_not_listed():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.LayerNorm(name="norm")(nn.Dense(6, name="dense")(x)), None

    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return scan(name="layers")(x, None)[0]

    module, x = Scanned(), np.ones((3, 2, 6), np.float32)
    with pytest.raises(LoRAError, match=r"no layer that can serve LoRA") as raised:
        make_manager(jlora.LinenModule(module, module.init(jax.random.key(0), x)))
    _, line = str(raised.value).splitlines()
    assert line.strip().startswith("layers.dense (LinenNode): ")
    assert "this holds a kernel (2, 6, 6): it is a stack of them (nn.scan, nn.vmap), or another module" in line

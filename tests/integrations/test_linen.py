"""Linen models, pure and in the NNX bridge, compared with their own parameters merged in float64 NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from jlora.integrations.linen import openpi_adapter
from tests.layers.merging import Target, assert_close, at_path, delta, make_adapter, make_manager, run, serve

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

    hidden = jax.jit(lambda params: module.apply({"params": params}, TOKENS, method=run))(params)
    hidden = np.asarray(hidden, np.float64)
    return hidden @ (table.T + d.get("lm_head", 0))


@pytest.mark.parametrize("bridge", [False, True])
def test_linen_model(bridge):
    module = Model()
    variables = jax.jit(module.init)(jax.random.key(0), TOKENS)
    if bridge:
        bridged = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(TOKENS)
        variables = {"params": nnx.to_pure_dict(nnx.state(bridged, nnx.Param))}
        model = jlora.LinenModule(bridged)
    else:
        model = jlora.LinenModule(module, variables)
    base = jax.jit(module.apply)(variables, TOKENS)
    assert_close(model(TOKENS), base, 1e-6)
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
    assert_close(run(model, TOKENS), base, 1e-6)


def merged(params, targets, adapter):
    """Return nested parameters with one adapter merged in float64 NumPy."""
    params = jax.tree.map(lambda value: np.array(value, np.float64), params)
    for target in targets:
        if adapter is not None and target.name in adapter.modules:
            weight = at_path(params, target.param)
            change = target.into(delta(adapter.modules[target.name]))
            weight[target.at] += change.reshape(weight[target.at].shape)
    return jax.tree.map(np.float32, params)


def stacked(name, k, n, param, layers, into=np.transpose, axis=0):
    """Return the targets of the layers of a stack below `layers`, of which `name` is a path."""
    below, slices = name.removeprefix("layers."), (slice(None),) * axis
    return [Target(f"layers.{i}.{below}", k, n, param, into, (*slices, i)) for i in range(layers)]


def check(module, x, targets, calls=lambda model, x: model(x), row_groups=None, forward=serve, **kwargs):
    """Serve two adapters and the base in one batch, compared with merged weights, swap one without a trace, verify."""
    variables = jax.jit(module.init)(jax.random.key(0), x)
    model = jlora.LinenModule(module, variables, lambda model: calls(model, x), **kwargs)
    apply = jax.jit(module.apply)
    base = apply(variables, x)
    assert_close(run(model, x), base, 1e-6)
    one, three = (make_adapter(name, targets, 2) for name in ("1", "3"))
    two = make_adapter("2", targets[::2], 2)
    manager = make_manager(model, row_groups=row_groups)
    manager.verify(forward, x)  # layers found by their equation take adapters afterwards
    for adapter in (one, two, three):
        manager.add_adapter(adapter)
    step = jax.jit(chex.assert_max_traces(forward.__wrapped__, n=1))
    for names in (["1", None, "2"], ["3", "2", "3"]):
        with manager.prepare(names) as batch:
            found = step(model, x, batch)
        adapters = {"1": one, "2": two, "3": three, None: None}
        want = [
            apply({**variables, "params": merged(variables["params"], targets, adapters[name])}, x)[i]
            for i, name in enumerate(names)
        ]
        assert_close(found, np.stack(want))
        assert all(name is None or np.abs(w - b).max() > 0.01 for name, w, b in zip(names, want, base, strict=True))
    return manager


class General(nn.Module):
    """Flax's attention, and a projection along two axes that are not the last."""

    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=8, name="attn")(x)
        heads = nn.DenseGeneral((2, 3), name="split")(x)
        return nn.DenseGeneral(6, axis=(-1, 2), use_bias=False, name="join")(heads)


X = np.random.default_rng(1).normal(size=(3, 5, 6)).astype(np.float32)


@pytest.mark.slow
def test_general_layers_and_flax_own_attention():
    targets = [Target(f"attn.{name}", 6, 8, f"attn.{name}.kernel") for name in ("query", "key", "value")]
    targets += [Target("attn.out", 8, 6, "attn.out.kernel"), Target("split", 6, 6, "split.kernel")]
    check(General(), X, [*targets, Target("join", 6, 6, "join.kernel")])


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(8, use_bias=False, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.DenseGeneral(6, name="down")(jnp.tanh(y)), None


class Scanned(nn.Module):
    axis: int = 0
    remat: bool = False
    layers: int = 2

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(block, {"params": self.axis}, split_rngs={"params": True}, length=self.layers)
        x, _ = scan(name="layers")(x, None)
        mapped = nn.vmap(nn.Dense, {"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2)
        return nn.Dense(6, name="last")(x) + (mapped(6, name="heads")(x).sum(0) if self.axis == 0 else 0)


@pytest.mark.parametrize(("axis", "remat"), [pytest.param(0, True, marks=pytest.mark.slow), (1, False)])
@pytest.mark.slow
def test_layers_under_scan_remat_and_vmap(axis, remat):
    targets = stacked("layers.up", 6, 8, "layers.up.kernel", 2, axis=axis)
    targets += stacked("layers.down", 8, 6, "layers.down.kernel", 2, axis=axis)
    targets += [Target("last", 6, 6, "last.kernel")]
    if axis == 0:
        targets += [Target(f"heads.{i}", 6, 6, "heads.kernel", at=(i,)) for i in range(2)]
    check(Scanned(axis, remat), X, targets, stack_axis=axis)


@pytest.mark.parametrize("layers", [2, 6])
def test_a_wrong_stack_axis_is_refused(layers):
    """With six layers the kernel is 6 x 6 x 8, and with as many slots, so are the slots."""
    module = Scanned(1, layers=layers)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    with pytest.raises(LoRAError, match=r"layers\.(up|down): stack_axis=0 of LinenModule is not the axis of its"):
        jlora.LinenModule(module, variables, lambda model: model(X))(X)


def test_a_stack_of_stacks_is_refused_by_name():
    class Inner(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            scan = nn.scan(Layer, {"params": 0}, split_rngs={"params": True}, length=3)
            return scan(name="inner")(x, None)[0], None

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(Inner, {"params": 0}, split_rngs={"params": True}, length=2)
            return nn.Dense(6, name="last")(scan(name="layers")(x, None)[0])

    module = Outer()
    model = jlora.LinenModule(module, jax.jit(module.init)(jax.random.key(0), X), lambda model: model(X))
    manager = make_manager(model)
    with pytest.raises(AdapterMismatchError, match=r"'layers.0.inner.1.up' is not wrapped: its kernel .* is a stack"):
        manager.add_adapter(make_adapter("one", [Target("layers.0.inner.1.up", 6, 8, "")], 2))


def test_layers_that_cannot_be_served_are_refused_by_name():
    class Doubled(nn.Dense):
        def __call__(self, x):
            return 2 * super().__call__(x)

    class Own(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return x @ self.param("kernel", nn.initializers.normal(), (6, 6))

    class Gated(nn.Module):
        @nn.compact
        def __call__(self, x):
            gate, up = self.param("gating", nn.initializers.normal(), (2, 6, 8))
            return (jnp.dot(x, gate) * jnp.dot(x, up)) @ self.param("linear", nn.initializers.normal(), (8, 6))

    class Other(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Own(6, name="own")(nn.Dense(6, name="good")(x)) + Gated(name="mlp")(x)
            return Doubled(6, name="doubled")(x) + nn.Conv(6, (1,), name="conv")(x)

    targets = [Target("good", 6, 6, "good.kernel"), Target("doubled", 6, 6, "doubled.kernel")]
    manager = check(Other(), X, targets)
    for name, reason in {
        "own": "Own overrides the call of Dense, and jlora cannot know",
        "conv": r"Conv is not a linear .* jlora\.register_layer\(Conv, ",
        "mlp.gating": r"Gated is not a linear",
        "mlp.linear": r"Gated is not a linear",
    }.items():
        with pytest.raises(AdapterMismatchError, match=f"'{name}' is not wrapped: {reason}"):
            manager.add_adapter(make_adapter("bad", [Target(name, 6, 6, "")], 2))


def test_models_that_linen_module_cannot_hold_are_refused():
    module = nn.Dense(3)
    variables = jax.jit(module.init)(jax.random.key(0), X)
    for arguments in ((module,), (module, {}), (module, variables), (module, variables, X)):
        with pytest.raises(LoRAUsageError, match="LinenModule"):
            jlora.LinenModule(*arguments)
    with pytest.raises(LoRAUsageError, match=r"stack_axis must be an int of at least 0, got -1"):
        jlora.LinenModule(module, variables, stack_axis=-1)


def test_a_bare_linen_module_raises_with_the_line_to_write():
    class Held(nnx.Module):
        def __init__(self):
            self.linen = nnx.bridge.ToNNX(nn.Dense(6), rngs=nnx.Rngs(0)).lazy_init(np.ones((1, 6), np.float32))
            self.proj = nnx.Linear(6, 6, rngs=nnx.Rngs(0))

    manager = make_manager(Held())
    with pytest.raises(AdapterMismatchError, match=r"a Linen module: hold it in a jlora\.LinenModule"):
        manager.add_adapter(make_adapter("one", [Target("linen", 6, 6, "")], 2))


def test_a_stack_without_calls_is_named_and_its_norms_are_not_listed():
    module = Scanned()
    model = jlora.LinenModule(module, jax.jit(module.init)(jax.random.key(0), X))
    reasons = {layer.path: layer.reason for layer in make_manager(model).layers() if layer.reason}
    assert reasons.keys() == {"layers.up", "layers.down", "heads"}
    assert "it holds kernel (2, 6, 8), and no nn.Dense or nn.Embed; give LinenModule `calls`" in reasons["layers.up"]


class Einsum(nn.Module):
    """As in openpi and the gemma library: the call passes the equation, and modules that share a scope have names."""

    shape: tuple[int, ...]
    param_name: str = "w"

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param(self.param_name, nn.initializers.normal(0.5), self.shape))


class Table(nn.Module):
    vocab: int
    width: int

    def setup(self):
        self.table = self.param("input_embedding", nn.initializers.normal(), (self.vocab, self.width))

    def encode(self, tokens):
        return self.table[(tokens,)] * jnp.sqrt(self.width)

    def decode(self, x):
        return jnp.dot(x, self.table.T)


class Shared(nn.Module):
    """The feed-forward of the gemma library: two einsums in the scope of their parent."""

    @nn.compact
    def __call__(self, x):
        gating = Einsum((2, 8, 6), "gating_einsum")
        nn.share_scope(self, gating)
        gate = gating("...F,NHF->...NH", x)
        linear = Einsum((8, 6), "linear")
        nn.share_scope(self, linear)
        return linear("...H,HF->...F", nn.gelu(gate[..., 0, :]) * gate[..., 1, :])


class Attention(nn.Module):
    """The attention of pi0, with queries and stacked keys and values per head. `merged` has all three in one."""

    merged: bool = False

    @nn.compact
    def __call__(self, x):
        if self.merged:
            q, k, v = Einsum((3, 2, 6, 4), name="qkv_einsum")("BSD,3KDH->3BSKH", x)
        else:
            q = Einsum((2, 6, 4), name="q_einsum")("BTD,NDH->BTNH", x)
            k, v = Einsum((2, 2, 6, 4), name="kv_einsum")("BSD,2KDH->2BSKH", x)
        weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k))
        heads = jnp.einsum("BNTS,BSNH->BTNH", weights, v)
        return Einsum((2, 4, 6), name="attn_vec_einsum")("BTNH,NHD->BTD", heads)


class GemmaBlock(nn.Module):
    merged: bool = False

    @nn.compact
    def __call__(self, x, _):
        x = x + Attention(self.merged, name="attn")(nn.RMSNorm(name="pre_attention_norm")(x))
        return x + Shared(name="mlp")(nn.RMSNorm(name="pre_ffw_norm")(x)), None


class Gemma(nn.Module):
    scanned: bool = True

    def setup(self):
        self.embedder = Table(11, 6)
        if self.scanned:
            block = nn.remat(GemmaBlock, prevent_cse=False)
            self.layers = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=2)()
        else:
            self.layer_0 = GemmaBlock(True)

    def __call__(self, tokens):
        x = self.embedder.encode(tokens)
        x, _ = self.layers(x, None) if self.scanned else self.layer_0(x, None)
        return self.embedder.decode(x)


def per_head(k, n):
    """Return the function from a delta [heads N, K] to a kernel [heads, K, N]."""
    return lambda change: change.reshape(-1, n, k).swapaxes(1, 2)


BLOCK = [
    ("attn.attn_vec_einsum", 8, 6, "w", np.transpose),
    ("mlp.gating_einsum", 6, 16, "", lambda change: change),
    ("mlp.linear", 8, 6, "", np.transpose),
]
OF_TABLE = [
    Target("embedder", 11, 6, "embedder.input_embedding", kind="embedding"),
]


def describe_table(layer):
    shape = layer.vocab, layer.width
    return jlora.EmbedSpec(*shape, "input_embedding", lookup="encode", attend="decode", scale=layer.width**0.5)


@pytest.mark.parametrize("scanned", [pytest.param(True, marks=pytest.mark.slow), False])
def test_einsums_of_ones_own_with_shared_scopes(scanned):
    jlora.register_layer(Table, describe_table)
    own = [("attn.q_einsum", 6, 8, "w", per_head(6, 4)), ("attn.kv_einsum", 6, 16, "w", per_head(6, 4))]
    own = own if scanned else [("attn.qkv_einsum", 6, 24, "w", per_head(6, 4))]
    targets = []
    for name, k, n, param, into in (*own, *BLOCK):
        where = f"{name}.{param}".removesuffix(".")
        if scanned:
            targets += stacked(f"layers.{name}", k, n, f"layers.{where}", 2, into)
        else:
            targets.append(Target(f"layer_0.{name}", k, n, f"layer_0.{where}", into))
    manager = check(Gemma(scanned), TOKENS, targets)
    assert {layer.path for layer in manager.layers() if layer.wrapped and layer.path.endswith("mlp.linear")}


def test_a_table_of_ones_own_and_its_logits():
    jlora.register_layer(Table, describe_table)
    module = Gemma(False)
    variables = jax.jit(module.init)(jax.random.key(0), TOKENS)
    model = jlora.LinenModule(module, variables, lambda model: model(TOKENS))
    model.tie_word_embeddings = True
    targets = [Target("embedder", 11, 6, "", kind="embedding"), Target("lm_head", 6, 11, "")]
    manager = make_manager(model, [make_adapter("one", targets, 2)])
    with manager.prepare([None, "one", None]) as batch:
        found = serve(model, TOKENS, batch)
    change = {name: delta(lora).T for name, lora in make_adapter("one", targets, 2).modules.items()}
    params = jax.tree.map(np.array, variables["params"])
    table = params["embedder"]["input_embedding"].astype(np.float64)

    def hidden(module, tokens):
        return module.layer_0(module.embedder.encode(tokens), None)[0]

    params["embedder"]["input_embedding"] = np.float32(table + change["embedder"])
    x = np.asarray(module.apply({"params": params}, TOKENS, method=hidden), np.float64)
    want = np.array(module.apply(variables, TOKENS))
    want[1] = (x @ (table.T + change["lm_head"]))[1]
    assert_close(found, want)
    assert {"embedder", "embedder.attend"} <= set(manager.verify(serve, TOKENS).checked)


class Experts(nn.Module):
    """The attention of pi0's two experts, with rows of other lengths: q and k of both meet in one softmax."""

    lora: bool = False

    @nn.compact
    def __call__(self, xs, _):
        both, out, start = [], [], 0
        for i, x in enumerate(xs):
            last = f"_{i}" * (i > 0)
            q = PairEinsum((2, 6, 4), self.lora, name=f"q_einsum{last}")("BTD,NDH->BTNH", x)
            k, v = PairEinsum((2, 1, 6, 4), self.lora, name=f"kv_einsum{last}")("BSD,2KDH->2BSKH", x)
            both.append((q, k, v))
        q, k, v = (jnp.concatenate(each, axis=1) for each in zip(*both, strict=True))
        heads = jnp.einsum("BNTS,BSKH->BTNH", jax.nn.softmax(jnp.einsum("BTNH,BSKH->BNTS", q, k)), v)
        for i, x in enumerate(xs):
            own = heads[:, start : start + x.shape[1]]
            einsum = PairEinsum((2, 4, 6), self.lora, name="attn_vec_einsum" + f"_{i}" * (i > 0))
            out.append(x + einsum("BTNH,NHD->BTD", own))
            start += x.shape[1]
        return out, None


class PairEinsum(nn.Module):
    """openpi's einsum, whose factors have the letters of the equation, one of the last two replaced by L."""

    shape: tuple[int, ...]
    lora: bool = False

    @nn.compact
    def __call__(self, equation, x):
        init = nn.initializers.normal(0.5)
        y = jnp.einsum(equation, x, self.param("w", init, self.shape))
        if not self.lora:
            return y
        *heads, k, n = self.shape
        a, b = self.param("lora_a", init, (*heads, k, 2)), self.param("lora_b", init, (*heads, 2, n))
        (given, kernel), out = equation.split("->")[0].split(","), equation.split("->")[1]
        middle = out.replace(kernel[-1], "L")
        lora = jnp.einsum(f"{given},{kernel[:-1]}L->{middle}", x, a)
        return y + jnp.einsum(f"{middle},{kernel[:-2]}L{kernel[-1]}->{out}", lora, b) * (16 / 2)


class Pi0(nn.Module):
    lora: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Experts, prevent_cse=False)
        scan = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=2)
        (prefix, suffix), _ = scan(self.lora, name="layers")([x, x[:, :2] * 2], None)
        return jnp.concatenate([prefix, suffix], axis=1)


ACTIONS = {f"{name}_einsum_1": "sequences" for name in ("q", "kv", "attn_vec")}


@pytest.mark.slow
def test_the_experts_of_pi0_have_rows_of_their_own():
    parts = [("q_einsum", 6, 8, per_head(6, 4)), ("kv_einsum", 6, 8, per_head(6, 4))]
    parts += [("attn_vec_einsum", 8, 6, np.transpose)]
    parts += [(f"{name}_1", k, n, into) for name, k, n, into in parts]
    targets = [
        target for name, k, n, into in parts for target in stacked(f"layers.{name}", k, n, f"layers.{name}.w", 2, into)
    ]
    check(Pi0(), X, targets, row_groups=ACTIONS)


@pytest.mark.slow
def test_adapters_that_openpi_trained_compute_as_in_openpi():
    """The reference is openpi's own computation, with its factors beside the weights and the scaling of 8."""
    trained = jax.jit(Pi0(lora=True).init)(jax.random.key(3), X)["params"]
    base = {name: {"w": own["w"]} for name, own in trained["layers"].items()}
    model = jlora.LinenModule(Pi0(), {"params": {"layers": base}}, lambda model: model(X))
    adapter = openpi_adapter("one", model, trained, alpha=16)
    assert {name: len(lora.a) for name, lora in adapter.modules.items() if name.startswith("layers.1.")} == {
        **dict.fromkeys(("layers.1.q_einsum", "layers.1.q_einsum_1"), 4),  # two heads
        **dict.fromkeys(("layers.1.kv_einsum", "layers.1.kv_einsum_1"), 4),  # keys and values of one head
        **dict.fromkeys(("layers.1.attn_vec_einsum", "layers.1.attn_vec_einsum_1"), 2),  # all heads go in
    }
    manager = make_manager(model, row_groups=ACTIONS)
    manager.verify(serve, X)
    manager.add_adapter(adapter)
    with manager.prepare(["one", None, "one"]) as batch:
        found = serve(model, X, batch)
    own, without = Pi0(lora=True).apply({"params": trained}, X), Pi0().apply({"params": {"layers": base}}, X)
    assert_close(found, np.stack([own[0], without[1], own[2]]))
    rslora = openpi_adapter("two", model, trained, alpha=16, use_rslora=True)
    assert np.isclose(rslora.modules["layers.0.q_einsum"].scaling, 16 / 2**0.5)


def test_openpi_parameters_without_a_layer_are_refused():
    trained = {"layers": {"mlp": {"linear_lora_a": np.ones((8, 2)), "linear_lora_b": np.ones((2, 6))}}}
    model = jlora.LinenModule(Scanned(), jax.jit(Scanned().init)(jax.random.key(0), X), lambda model: model(X))
    with pytest.raises(AdapterMismatchError, match=r"no einsum for the lora_a and lora_b of layers\.mlp\.linear"):
        openpi_adapter("one", model, trained, alpha=16)


class Stream(nn.Module):
    """A double block of FLUX: two streams, each modulated by one vector for each sequence."""

    @nn.compact
    def __call__(self, image, text, vector):
        streams = {"img": image, "txt": text}
        shift = {name: nn.Dense(12, name=f"{name}_mod")(nn.silu(vector))[:, None] for name in streams}
        qkv = {}
        for name, x in streams.items():
            add, gain = jnp.split(shift[name], 2, axis=-1)
            y = nn.Dense(18, name=f"{name}_qkv")((1 + gain) * nn.LayerNorm(use_bias=False, use_scale=False)(x) + add)
            qkv[name] = jnp.split(y, 3, axis=-1)
        q, k, v = (jnp.concatenate([qkv["txt"][i], qkv["img"][i]], axis=1) for i in range(3))
        y = jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v
        size = text.shape[1]
        return image + nn.Dense(6, name="img_proj")(y[:, size:]), text + nn.Dense(6, name="txt_proj")(y[:, :size])


class Flux(nn.Module):
    @nn.compact
    def __call__(self, x):
        image, text = nn.Dense(6, name="img_in")(x), nn.Dense(6, name="txt_in")(x[:, :3])
        image, text = Stream(name="double_0")(image, text, nn.Dense(6, name="vector_in")(x[:, 0]))
        return jnp.concatenate([image, text], axis=1)


@pytest.mark.slow
def test_the_two_streams_of_flux():
    sizes = {"mod": (6, 12), "qkv": (6, 18), "proj": (6, 6)}
    names = [(f"double_0.{stream}_{name}", k, n) for stream in ("img", "txt") for name, (k, n) in sizes.items()]
    names += [(name, 6, 6) for name in ("img_in", "txt_in", "vector_in")]
    text = {name: "sequences" for name in ("txt_in", "txt_qkv", "txt_proj")}
    check(Flux(), X, [Target(name, k, n, f"{name}.kernel") for name, k, n in names], row_groups=text)


class Fixed(nn.Module):
    """An einsum that scales its output, or whose kernel its parent reads too."""

    scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        kernel = self.param("w", nn.initializers.normal(0.5), (4, 6, 4))
        return jnp.einsum("BTD,NDH->BTNH", x, kernel) * self.scale


class Wrong(nn.Module):
    scale: float = 1.0
    twice: bool = False

    @nn.compact
    def __call__(self, x):
        layer = Fixed(self.scale, name="fixed")
        y = layer(x)
        return y + jnp.einsum("BTD,NDH->BTNH", x, layer.variables["params"]["w"]) if self.twice else y


@pytest.mark.parametrize(
    ("module", "equation", "right"),
    [
        (Wrong(), "BTD,NDH->BTNH", True),
        (Wrong(), "BTD,HDN->BTNH", False),  # the heads and their features are exchanged
        (Wrong(3.0), "BTD,NDH->BTNH", False),
        (Wrong(twice=True), "BTD,NDH->BTNH", False),  # the second product is missed
    ],
)
def test_verify_finds_a_spec_that_is_wrong(module, equation, right):
    jlora.register_layer(Fixed, lambda layer: jlora.einsum_spec(equation, (4, 6, 4)))
    variables = jax.jit(Wrong().init)(jax.random.key(0), X)
    manager = make_manager(jlora.LinenModule(module, variables, lambda model: model(X)))
    if right:
        assert manager.verify(serve, X).checked == ("fixed",)
    else:
        with pytest.raises(LoRAError, match="fixed"):
            manager.verify(serve, X)


def test_a_describe_that_fails_leaves_its_class_unserved_with_the_reason():
    class Odd(nn.Dense):
        pass

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(6, name="good")(Odd(6, name="odd")(x))

    variables = jax.jit(Model().init)(jax.random.key(0), X)
    for describe, reason in (
        (lambda layer: layer.missing, "Odd cannot be described"),
        (lambda _: None, "Odd has None"),
    ):
        jlora.register_layer(Odd, describe)
        manager = make_manager(jlora.LinenModule(Model(), variables, lambda model: model(X)))
        with pytest.raises(AdapterMismatchError, match=f"'odd' is not wrapped: .*{reason}"):
            manager.add_adapter(make_adapter("one", [Target("odd", 6, 6, "")], 2))

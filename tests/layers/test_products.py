"""Several parameters in one method, found in its jaxpr: attention of other libraries, refusals, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError
from tests.layers.merging import (
    Holder,
    Target,
    assert_close,
    check_against_merged,
    expected_rows,
    make_adapter,
    make_dora,
    make_manager,
    merge,
    normal,
    run,
    serve,
)

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("registered")]

D, N, K, H = 12, 4, 2, 6  # features, heads, heads of keys, features of a head


def param(*shape, seed):
    return nnx.Param(jnp.asarray(normal(*shape, seed=seed)) * shape[0] ** -0.5)


def attend(q, k, v, same, sinks=None):
    """Return the attention [T, N, H] of packed rows of which `same` [T, T] are of one sequence."""
    k, v = (jnp.repeat(each, q.shape[1] // each.shape[1], axis=1) for each in (k, v))
    scores = jnp.where(same[None], jnp.einsum("tnh,snh->nts", q, k) * H**-0.5, -1e30)
    if sinks is not None:
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : len(same)]
    return jnp.einsum("nts,snh->tnh", weights, v)


class GptOss(nnx.Module):
    """Attention of gpt-oss in tpu-inference: packed rows, a bias for each kernel, sinks, and the cache as a value."""

    def __init__(self):
        self.sinks_N = param(N, seed=1)
        self.kernel_q_DNH, self.bias_q_NH = param(D, N, H, seed=2), param(N, H, seed=3)
        self.kernel_k_DKH, self.bias_k_KH = param(D, K, H, seed=4), param(K, H, seed=5)
        self.kernel_v_DKH, self.bias_v_KH = param(D, K, H, seed=6), param(K, H, seed=7)
        self.kernel_o_proj_NHD, self.bias_o_D = param(N, H, D, seed=8), param(D, seed=9)
        self.dtype = jnp.float32

    def __call__(self, x_TD, cache, same):
        x_TD = jnp.asarray(x_TD, self.dtype)
        with jax.named_scope("q_proj"):
            q_TNH = jnp.einsum("TD,DNH->TNH", x_TD, self.kernel_q_DNH[...])
            q_TNH += self.bias_q_NH[...][None]
        k_TKH = jnp.einsum("TD,DKH->TKH", x_TD, self.kernel_k_DKH[...]) + self.bias_k_KH[...][None]
        v_TKH = jnp.einsum("TD,DKH->TKH", x_TD, self.kernel_v_DKH[...]) + self.bias_v_KH[...][None]
        out_TNH = jax.jit(attend)(q_TNH, k_TKH, v_TKH, same, self.sinks_N[...])
        out_TD = jnp.einsum("TNH,NHD->TD", out_TNH, self.kernel_o_proj_NHD[...])
        return (cache, k_TKH), out_TD + self.bias_o_D[...][None]


class Llama4(nnx.Module):
    """Attention of Llama 4 in tpu-inference: constraints, norms of heads, an attribute set and restored."""

    def __init__(self):
        self.kernel_q_proj_DNH, self.kernel_k_proj_DKH = param(D, N, H, seed=2), param(D, K, H, seed=4)
        self.kernel_v_proj_DKH, self.kernel_o_proj_NHD = param(D, K, H, seed=6), param(N, H, D, seed=8)
        self.head_dim = H

    def norm(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def __call__(self, x, cache, same):
        where = NamedSharding(jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,)), P())
        x_q, kernel_q = (jax.lax.with_sharding_constraint(each, where) for each in (x, self.kernel_q_proj_DNH[...]))
        q = self.norm(jnp.einsum("TD,DNH -> TNH", x_q, kernel_q))
        k = self.norm(jnp.einsum("SD,DKH -> SKH", x, self.kernel_k_proj_DKH[...]))
        v = jnp.einsum("SD,DKH -> SKH", x, self.kernel_v_proj_DKH[...])
        head_dim, self.head_dim = self.head_dim, 8
        padded = [jnp.pad(each, [(0, 0), (0, 0), (0, self.head_dim - head_dim)]) for each in (q, k, v)]
        out = attend(*padded, same)[..., :head_dim]
        self.head_dim = head_dim
        return cache, jnp.einsum("TNH,NHD -> TD", out, self.kernel_o_proj_NHD[...])


def describe(layer):
    """Return the spec of either attention: the kernels by their letters."""
    kernels = {name: name.rpartition("_")[2] for name in vars(layer) if name.startswith("kernel_")}
    products = {}
    for name, letters in kernels.items():
        rows, out = ("TNH", "TD") if letters == "NHD" else ("TD", f"T{letters[1:]}")
        spec = jlora.einsum_spec(f"{rows},{letters}->{out}", getattr(layer, name).shape[-3:], name)
        products[f"{name.split('_')[1]}_proj"] = spec
    return jlora.ProductsSpec(products)


class Packed(nnx.Module):
    """A layer of attention on packed rows. Rows of equal `segments` are those of one sequence."""

    def __init__(self, cls):
        self.self_attn = cls()

    def __call__(self, x, segments=None):
        segments = jnp.arange(len(x)) if segments is None else segments
        _, out = self.self_attn(x, None, segments[:, None] == segments[None])
        return x + out


def targets_of(cls):
    sizes = {"q_proj": (D, N * H), "k_proj": (D, K * H), "v_proj": (D, K * H), "o_proj": (N * H, D)}
    names = {spec: product.param for spec, product in describe(cls()).products.items()}
    return [Target(f"self_attn.{n}", *size, f"self_attn.{names[n]}") for n, size in sizes.items()]


def test_one_row_of_each_sequence():
    jlora.register_layer(GptOss, describe)
    check_against_merged(Packed(GptOss), targets_of(GptOss), normal(3, D))


@pytest.mark.parametrize("cls", [GptOss, Llama4])
def test_packed_rows_swaps_and_verify(cls):
    """Rows of one batch are of several adapters and of none; swaps do not retrace; `verify` checks all products."""
    jlora.register_layer(cls, describe)
    model, targets = Packed(cls), targets_of(cls)
    adapters = [make_adapter("one", targets, 3), make_adapter("two", targets[1:], 2), make_adapter("three", targets, 1)]
    twins = {adapter.name: merge(model, targets, adapter) for adapter in adapters} | {None: nnx.clone(model)}
    manager = make_manager(model, adapters, max_loras=2)
    x, counts = normal(9, D), [2, 0, 4, 3]
    segments = jnp.asarray(np.repeat(np.arange(4), counts))

    @manager.jit
    def step(model, x, segments, batch):
        with jlora.use(batch):
            return model(x, segments)

    for names in (["one", None, "two", None], ["three", "one", None, "one"], [None, "two", "two", "three"]):
        rows = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        with manager.prepare(names, token_counts=counts) as batch:
            found = step(model, x, segments, batch)
        expected = [run_packed(twins[name], x, segments)[i] for i, name in enumerate(rows)]
        assert_close(found, expected)
    assert manager.stats().compilations == 1
    paths = [f"self_attn.{target.param.rpartition('.')[2]}" for target in targets]
    shape = jlora.BatchShape(4, token_counts=counts)
    report = manager.verify(lambda m, inputs, batch: step(m, *inputs, batch), (x, segments), shape=shape)
    assert report.checked == tuple(paths)
    assert not report.unserved


@jax.jit
def run_packed(model, x, segments):
    return model(x, segments)


def test_names_of_configurations_and_adapters():
    """A product has the path of its parameter, and the name that checkpoints give it."""
    jlora.register_layer(GptOss, describe)
    manager = make_manager(
        Packed(GptOss), target_modules=["q_proj", "kernel_o_proj_NHD"], max_lora_rank={"*": 2, "q_proj": 4}
    )
    served = {layer.path: layer for layer in manager.layers() if layer.wrapped}
    assert list(served) == ["self_attn.kernel_q_DNH", "self_attn.kernel_o_proj_NHD"]
    assert served["self_attn.kernel_q_DNH"].aliases == ("self_attn.q_proj",)
    with pytest.raises(AdapterMismatchError, match="k_proj"):
        manager.add_adapter(make_adapter("k", targets_of(GptOss)[1:2], 1))
    renamed = make_manager(Packed(GptOss), name_map={r"^model\.attn\.(\w)$": r"self_attn.\1_proj"})
    renamed.add_adapter(make_adapter("one", [Target("model.attn.q", D, N * H, "")], 2))
    (layer, *_) = renamed.layers()
    assert layer.slot_bytes == 4 * (4 * (D + N * H) + 3)


class Moved(nnx.Module):
    """Products with axes in other orders: transposed and merged kernels, sequences last, an output with heads first."""

    def __init__(self):
        self.wq, self.wk, self.wo = param(D, N * H, seed=1), param(H, N, D, seed=2), param(D, N, H, seed=3)

    def __call__(self, x):
        wq = self.wq[...].astype(jnp.float32).reshape(D, N, H).transpose(1, 0, 2)
        q = jnp.einsum("BTD,NDH->NBHT", x, wq)
        k = jnp.einsum("HND,DBT->BNTH", self.wk[...], jnp.moveaxis(x, -1, 0))
        mixed = jnp.einsum("NBHT,BNSH->BTSN", q, k).sum(2) / x.shape[1]
        heads = jnp.tanh(mixed)[:, :, None] * jnp.moveaxis(q, (0, 1, 2, 3), (3, 0, 2, 1))
        wo = jnp.squeeze(jnp.expand_dims(self.wo[...].T, 0), 0)  # [H, N, D]
        return jax.vmap(lambda row: row.reshape(row.shape[0], H * N) @ wo.reshape(H * N, D))(heads)


@pytest.mark.slow
def test_axes_in_other_orders():
    """Features of an adapter have the order of the spec's axes, whatever the method makes of them."""
    specs = {
        "q": jlora.LinearSpec(D, N * H, "wq"),
        "k": jlora.LinearSpec(D, N * H, "wk", in_axes=(2,), out_axes=(1, 0)),
        "o": jlora.LinearSpec(N * H, D, "wo", in_axes=(1, 2), out_axes=(0,)),
    }
    jlora.register_layer(Moved, lambda layer: jlora.ProductsSpec(specs))
    targets = [
        Target("proj.q", D, N * H, "proj.wq"),
        Target("proj.k", D, N * H, "proj.wk", into=lambda delta: delta.reshape(N, H, D).transpose(1, 0, 2)),
        Target("proj.o", N * H, D, "proj.wo", into=lambda delta: delta),
    ]
    model = Holder(Moved())
    check_against_merged(model, targets, normal(3, 5, D))
    check_against_merged(model, targets, normal(3, 5, D), adapters=[make_dora("one", targets, 2)], variants=["dora"])
    assert len(make_manager(model, variants=["dora"]).verify(serve, normal(5, 3, D)).checked) == 3


# --- Transformations ------------------------------------------------------------------------------------------------


class Mlp(nnx.Module):
    """Two kernels, of which one is multiplied in a nested jit and `jax.checkpoint`, beside a layer of its own."""

    def __init__(self, seed=0):
        self.up, self.down = param(D, H, seed=(seed, 1)), param(H, D, seed=(seed, 2))
        self.gate = nnx.Linear(D, H, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        hidden = jax.nn.silu(self.gate(x)) * (x @ self.up[...])
        inner = jax.jit(lambda h, w: jax.nn.relu(h @ w))
        return jax.checkpoint(lambda h, w: inner(jnp.tanh(h), w))(hidden, self.down[...]) + x


class Remat(Mlp):
    """`Mlp` in an `nnx.remat` of its own, which returns all variables of the module as well."""

    def __call__(self, x):
        return nnx.remat(Mlp.__call__)(self, x)


TARGETS = [
    Target("proj.up", D, H, "proj.up"),
    Target("proj.gate", D, H, "proj.gate.kernel"),
    Target("proj.down", H, D, "proj.down"),
]


def describe_mlp(layer):
    up, down = jlora.LinearSpec(D, H, "up"), jlora.LinearSpec(H, D, "down")
    return jlora.ProductsSpec({"up": up, "down": down})


def served_and_expected(cls):
    jlora.register_layer(cls, describe_mlp)
    model = Holder(cls())
    adapters = [make_adapter("one", TARGETS, 3), make_adapter("two", TARGETS, 2)]
    twins = {adapter.name: merge(model, TARGETS, adapter) for adapter in adapters} | {None: nnx.clone(model)}
    return model, make_manager(model, adapters), twins


@pytest.mark.parametrize("cls", [Mlp, Remat])
def test_checkpoints_inside_keep_their_policy(cls):
    x, names = normal(3, 2, D), ["one", None, "two"]
    model, manager, twins = served_and_expected(cls)
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), expected_rows(twins, names, x))
        text = str(jax.make_jaxpr(serve)(model, x, batch))
    assert "remat" in text or "checkpoint" in text


@pytest.mark.slow
def test_gradients_checkpoint_and_vmap_around():
    x, names = normal(3, 2, D), ["one", None, "two"]
    model, manager, twins = served_and_expected(Mlp)

    @jax.jit
    def gradient(model, x, batch):
        def loss(x):
            with jlora.use(batch):
                return (jax.checkpoint(model)(x) ** 2).sum()

        return jax.grad(loss)(x)

    @jax.jit
    def mapped(model, x, batch):
        def one(x, batch):
            with jlora.use(batch):
                return model(x)

        return jax.vmap(one)(x, batch)

    grad_of = jax.jit(lambda model, x: jax.grad(lambda x: (model(x) ** 2).sum())(x))
    with manager.prepare(names) as batch:
        assert_close(gradient(model, x, batch), expected_rows(twins, names, x, step=grad_of))
        assert_close(mapped(model, x, batch), expected_rows(twins, names, x))


class Scanned(nnx.Module):
    def __init__(self):
        self.layers = nnx.vmap(lambda seed: Mlp(), in_axes=0, out_axes=0)(jnp.arange(3))
        for name in ("up", "down"):
            value = getattr(self.layers, name)
            value[...] = value[...] * jnp.asarray(normal(3, 1, 1, seed=5))

    def __call__(self, x):
        axes = nnx.StateAxes({jlora.SlotParam: 0, ...: 0})
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.slow
def test_layers_under_nnx_scan():
    jlora.register_layer(Mlp, describe_mlp)
    targets = [
        Target(f"layers.{i}.{t.name[5:]}", t.k, t.n, t.param.replace("proj", "layers"), at=(i,))
        for t in TARGETS
        for i in range(3)
    ]
    model = Scanned()
    check_against_merged(model, targets, normal(3, 2, D))
    assert len(make_manager(model).verify(serve, normal(5, 2, D)).checked) == 3


@pytest.mark.device(devices=8)
def test_step_in_a_shard_map_over_sequences():
    """The shards of a method multiply their rows with kernels that JAX marks as equal in all shards."""
    x, names = normal(8, 2, D), ["one", None, "two", "one"] * 2
    model, manager, twins = served_and_expected(Mlp)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = (P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(serve.__wrapped__, mesh=mesh, in_specs=specs, out_specs=P("data")))
    with manager.prepare(names) as batch:
        assert_close(step(model, x, batch), expected_rows(twins, names, x))


@pytest.mark.device(devices=4)
def test_kernels_split_over_a_mesh():
    """Heads of queries, keys, values and of the output's input are split; slots are split as the kernels are."""
    jlora.register_layer(GptOss, describe)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    model, targets = Packed(GptOss), targets_of(GptOss)
    adapters = [make_adapter("one", targets, 3), make_adapter("two", targets, 2)]
    twins = {adapter.name: merge(model, targets, adapter) for adapter in adapters} | {None: nnx.clone(model)}
    for name, value in vars(model.self_attn).items():
        if isinstance(value, nnx.Param):
            spec = P("model") if "NHD" in name else P(None, "model") if name.startswith("kernel") else P()
            value.set_value(jax.device_put(value.get_value(), NamedSharding(mesh, spec)))
    manager, x, names = make_manager(model, adapters), normal(4, D), ["one", None, "two", "one"]
    assert model.self_attn.jlora_q_proj_b[...].sharding.spec == P(None, None, "model")
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), expected_rows(twins, names, x))


def test_use_of_the_base_model_alone_and_eager_calls():
    x = normal(3, D)
    jlora.register_layer(GptOss, describe)
    model, targets = Packed(GptOss), targets_of(GptOss)
    adapter = make_adapter("one", targets, 2)
    base, merged = np.asarray(run(model, x)), merge(model, targets, adapter)
    manager = make_manager(model, [adapter])
    with jlora.use(None):
        np.testing.assert_allclose(model(x), base, rtol=1e-6)
    with manager.prepare(["one", None, "one"]) as batch, jlora.use(batch):
        assert_close(model(x)[:2], [run(merged, x)[0], base[1]])


# --- Refusals -------------------------------------------------------------------------------------------------------


class Refused(nnx.Module):
    def __init__(self, use):
        self.w, self.v, self.use = param(D, D, seed=1), param(D, D, seed=2), use

    def __call__(self, x):
        return self.use(self, x, self.w[...]) + x @ self.v[...]


@jax.custom_vjp
def multiply(x, w):
    return x @ w


multiply.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, dy: (dy @ saved[1].T, saved[0].T @ dy))


def in_kernel(self, x, w):
    def kernel(x, w, y):
        y[...] = x[...] @ w[...]

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x, w)


def in_shards(self, x, w):
    mesh = jax.make_mesh((1,), ("x",))
    return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P(), P()), out_specs=P())(x, w)


USES = {
    "mul": lambda self, x, w: (x[..., None] * w[None]).sum(-2),
    "mul ": lambda self, x, w: x @ (w * 2),
    "concatenate": lambda self, x, w: (x @ jnp.concatenate([w, jnp.ones_like(w)], axis=1))[:, :D],
    "slice": lambda self, x, w: x[..., 1:] @ w[1:],
    "gather": lambda self, x, w: x @ w[:, jnp.arange(D)],
    "dot_general": lambda self, x, w: x @ (w @ jnp.ones_like(w)),
    "dot_general ": lambda self, x, w: x @ (w @ self.v[...]),
    "dot_general  ": lambda self, x, w: x @ w.T,  # against its spec
    "scan": lambda self, x, w: jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=1)[0],
    "cond": lambda self, x, w: jax.lax.cond(x[0].sum() > 0, lambda: x @ w, lambda: x @ w),
    "while": lambda self, x, w: jax.lax.while_loop(lambda x: x.sum() < -1e9, lambda x: x @ w, x),
    "custom_vjp_call": lambda self, x, w: multiply(x, w),
    "pallas_call": in_kernel,
    "shard_map": in_shards,
    "convert_element_type": lambda self, x, w: x @ w.astype(jnp.int8).astype(jnp.float32),
    "mul  ": lambda self, x, w: x @ jax.checkpoint(lambda w: w * w)(w),
    "mul   ": lambda self, x, w: x @ w + jnp.sum(w * w)[None, None],
}


def describe_refused(layer):
    return jlora.ProductsSpec({"w_proj": jlora.LinearSpec(D, D, "w"), "v_proj": jlora.LinearSpec(D, D, "v")})


@pytest.mark.parametrize("use", USES)
def test_another_use_of_a_parameter_is_refused_by_name(use):
    """Also in a batch of the base model, whose rows adapters could join."""
    jlora.register_layer(Refused, describe_refused)
    manager = make_manager(model := Holder(Refused(USES[use])))
    refused = rf"proj\.[wv]: '{use.strip()}' .* in Refused.__call__"
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=refused):
        serve(model, normal(3, D), batch)
    with pytest.raises(LoRAError, match=refused):
        manager.verify(serve, normal(5, D))
    with jlora.use(None):
        assert model(normal(3, D)).shape == (3, D)


def test_a_parameter_that_is_left_out_may_be_used_in_any_way():
    jlora.register_layer(Refused, describe_refused)
    target = Target("proj.v_proj", D, D, "proj.v")
    check_against_merged(Holder(Refused(USES["mul"])), [target], normal(3, D), exclude_modules=["proj.w"])


def test_a_parameter_that_is_never_multiplied_serves_no_adapter():
    """It is missed by name at the end of the step, and `verify` leaves it out."""
    jlora.register_layer(Refused, describe_refused)
    model = Holder(Refused(lambda self, x, w: x))
    manager = make_manager(model)
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=r"proj\.w: it was not called"):
        serve(model, normal(3, D), batch)
    assert list(manager.verify(serve, normal(5, D)).unserved) == ["proj.w"]
    with pytest.raises(LoRAError, match=r"proj\.w"):
        manager.add_adapter(make_adapter("one", [Target("proj.w", D, D, "")], 2))
    with manager.prepare([None] * 3) as batch:
        serve(model, normal(3, D), batch)


class Derived(Refused):
    """A step that multiplies a copy of a kernel, made when the model was loaded, as absorbed MLA does."""

    def __init__(self):
        super().__init__(lambda self, x, w: x @ w + x[:, : D // 2] @ self.derived[...])
        self.derived = nnx.Param(self.w[...][: D // 2])


@pytest.mark.filterwarnings("ignore:proj.derived")
def test_a_derived_kernel_is_found():
    jlora.register_layer(Refused, describe_refused)
    with pytest.raises(LoRAError, match=r"proj\.derived repeats weights of proj\.w"):
        make_manager(Holder(Derived())).verify(serve, normal(5, D))


class Writes(Refused):
    def __init__(self, use):
        super().__init__(use)
        self.cache = nnx.Cache(jnp.zeros((3, D)))


def write(self, x, w):
    self.cache[...] = x
    return x @ w


def write_nested(self, x, w):
    nnx.remat(write)(self, x, w)
    return x @ w


def add_attribute(self, x, w):
    self.calls = 1
    return x @ w


def exchange(self, x, w):
    self.w[...] = self.v[...]
    return x @ w


@pytest.mark.parametrize("use", [write, write_nested, add_attribute, exchange])
def test_methods_that_change_their_module_are_refused(use):
    jlora.register_layer(Refused, describe_refused)
    manager = make_manager(model := Holder(Writes(use)))
    written = "w" if use is exchange else "cache"
    what = "sets attributes" if use is add_attribute else f"writes the Variable '{written}'"
    with manager.prepare([None] * 3) as batch, pytest.raises(LoRAError, match=what):
        serve(model, normal(3, D), batch)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: jlora.ProductsSpec({}), "must map the name of each product"),
        (lambda: jlora.ProductsSpec({"q": jlora.LinearSpec(D, D, None)}), r"\['q'\].* name one of its own in `param`"),
        (lambda: jlora.ProductsSpec(dict.fromkeys("qk", jlora.LinearSpec(D, D, "w"))), "one of its own"),
        (lambda: jlora.ProductsSpec({"q": jlora.LinearSpec(D, D, "w", product=jnp.matmul)}), "without `product`"),
        (lambda: jlora.ProductsSpec({"q": jlora.LinearSpec(D, D, "w", dequantize=id)}), "`dequantize`"),
    ],
)
def test_specs_that_cannot_be_found_in_a_method(make, match):
    with pytest.raises(LoRAUsageError, match=match):
        make()


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (jlora.ProductsSpec({"w": jlora.LinearSpec(D, D, "w")}, method="forward"), "no such method"),
        (jlora.ProductsSpec({"k": jlora.LinearSpec(D, D)}), "names the parameter 'kernel'"),
        (jlora.ProductsSpec({"w": jlora.LinearSpec(D, H, "w")}), "12 features in and 12 out"),
        (jlora.ProductsSpec({"codes": jlora.LinearSpec(D, D, "codes")}), "floats of at least 16 bits"),
    ],
)
def test_specs_that_contradict_their_module(spec, match):
    class Codes(Refused):
        def __init__(self):
            super().__init__(USES["mul"])
            self.codes = nnx.Param(jnp.zeros((D, D), jnp.int8))

    jlora.register_layer(Codes, lambda layer: spec)
    with pytest.raises(LoRAError, match=match):
        make_manager(Holder(Codes()))

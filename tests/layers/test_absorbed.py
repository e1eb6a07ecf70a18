"""Latent attention (MLA), expanded and absorbed, against weights that NumPy merges first and absorbs then, in float64.

The models have the structures of MaxText (one kernel for keys and values, read by both forms), of a model that derives
the absorbed kernels when it is loaded, and of tpu-inference (packed rows, einsums of its own, absorbed kernels alone).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError
from tests.compiled import compiled_programs
from tests.layers.merging import (
    Target,
    assert_close,
    delta,
    in_int8,
    make_adapter,
    make_dora,
    make_manager,
    normal,
    run,
    serve,
    step_of_one_trace,
)
from tests.layers.mesh_models import mesh_of, placed

WIDTH, Q_RANK, RANK, ROPE, HEADS, NOPE, V = 12, 10, 8, 4, 2, 6, 5
TARGETS = {
    name: Target(name, k, n, name)
    for name, k, n in (
        ("q_a_proj", WIDTH, Q_RANK),
        ("q_b_proj", Q_RANK, HEADS * (NOPE + ROPE)),
        ("kv_a_proj_with_mqa", WIDTH, RANK + ROPE),
        ("kv_b_proj", RANK, HEADS * (NOPE + V)),
        ("o_proj", HEADS * V, WIDTH),
    )
}


class Attention(nnx.Module):
    """Heads share one latent and one rotary key. Sequences attend to all of their own rows."""

    absorbed = True

    def __init__(self, rngs=None):
        rngs = rngs or nnx.Rngs(0)
        self.q_a_proj = nnx.Linear(WIDTH, Q_RANK, use_bias=False, rngs=rngs)
        self.q_norm = nnx.RMSNorm(Q_RANK, rngs=rngs)
        self.q_b_proj = nnx.LinearGeneral(Q_RANK, (HEADS, NOPE + ROPE), use_bias=False, rngs=rngs)
        self.kv_a_proj_with_mqa = nnx.Linear(WIDTH, RANK + ROPE, use_bias=False, rngs=rngs)
        self.kv_norm = nnx.RMSNorm(RANK, rngs=rngs)
        self.kv_b_proj = nnx.LinearGeneral(RANK, (HEADS, NOPE + V), use_bias=False, rngs=rngs)
        self.o_proj = nnx.LinearGeneral((HEADS, V), WIDTH, axis=(-2, -1), use_bias=False, rngs=rngs)

    def kernels(self):
        """Return W_UK [RANK, HEADS, NOPE] and W_UV [RANK, HEADS, V]."""
        return jnp.split(self.kv_b_proj.kernel[...], [NOPE], axis=-1)

    def absorb_query(self, q_nope):
        q = jnp.einsum("bthd,chd->bthc", q_nope, self.kernels()[0])
        return jlora.absorbed_delta(self.kv_b_proj, q_nope, q, slice(0, NOPE), transposed=True)

    def absorb_output(self, latent):
        out = jnp.einsum("bthc,chv->bthv", latent, self.kernels()[1])
        return jlora.absorbed_delta(self.kv_b_proj, latent, out, slice(NOPE, None))

    def __call__(self, x):
        q_nope, q_rope = jnp.split(self.q_b_proj(self.q_norm(self.q_a_proj(x))), [NOPE], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [RANK], axis=-1)
        latent = self.kv_norm(latent)
        scores = jnp.einsum("bthd,bsd->bhts", q_rope, k_rope)
        if self.absorbed:
            scores += jnp.einsum("bthc,bsc->bhts", self.absorb_query(q_nope), latent)
            out = jnp.einsum("bhts,bsc->bthc", jax.nn.softmax(scores), latent)
            return self.o_proj(self.absorb_output(out))
        k, v = jnp.split(self.kv_b_proj(latent), [NOPE], axis=-1)
        scores += jnp.einsum("bthd,bshd->bhts", q_nope, k)
        return self.o_proj(jnp.einsum("bhts,bshv->bthv", jax.nn.softmax(scores), v))


class Expanded(Attention):
    absorbed = False


class Derived(Attention):
    """The absorbed kernels are parameters, computed when the model is loaded."""

    def __init__(self):
        super().__init__()
        self.w_uk, self.w_uv = (nnx.Param(half) for half in super().kernels())

    def kernels(self):
        return self.w_uk[...], self.w_uv[...]


def rederive(model):
    model.w_uk[...], model.w_uv[...] = Attention.kernels(model)


def weights_of(model) -> dict[str, np.ndarray]:
    """Return checkpoint name -> [N, K] in float64."""
    kernels = {name: np.asarray(getattr(model, name).kernel[...], np.float64) for name in TARGETS}
    return {name: kernel.reshape(TARGETS[name].k, TARGETS[name].n).T for name, kernel in kernels.items()}


def attend(weights, x, adapter=None) -> np.ndarray:
    """Merge an adapter, absorb `kv_b_proj`, and attend over one sequence x [L, WIDTH]."""
    w = {name: weight + (0 if adapter is None or name not in adapter.modules else delta(adapter.modules[name]))
         for name, weight in weights.items()}  # fmt: skip
    x = np.asarray(x, np.float64)

    def norm(rows):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-6)

    q = (norm(x @ w["q_a_proj"].T) @ w["q_b_proj"].T).reshape(len(x), HEADS, NOPE + ROPE)
    latent, k_rope = np.split(x @ w["kv_a_proj_with_mqa"].T, [RANK], axis=-1)
    latent, out = norm(latent), []
    for head, kv in enumerate(w["kv_b_proj"].reshape(HEADS, NOPE + V, RANK)):
        scores = q[:, head, :NOPE] @ kv[:NOPE] @ latent.T + q[:, head, NOPE:] @ k_rope.T
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out.append(shares / shares.sum(-1, keepdims=True) @ latent @ kv[NOPE:].T)
    return np.concatenate(out, axis=-1) @ w["o_proj"].T


ALL = make_adapter("all", list(TARGETS.values()), 3)
KV_B = make_adapter("kv_b", [TARGETS["kv_b_proj"]], 2)
OTHERS = make_adapter("others", [target for name, target in TARGETS.items() if name != "kv_b_proj"], 4)
ADAPTERS = {each.name: each for each in (ALL, KV_B, OTHERS)}
BATCHES = (["all", None, "kv_b", "all"], ["kv_b", "others", None, "kv_b"], ["others", "all", "others", None])


def expected(model, names, x, adapters=ADAPTERS):
    weights = weights_of(model)
    return np.stack([attend(weights, rows, adapters.get(name)) for name, rows in zip(names, x, strict=True)])


@pytest.mark.parametrize("cls", [Attention, Derived, Expanded])
def test_mixed_batches_and_swaps_without_a_trace(cls):
    """Two slots and three adapters."""
    model, x, step = cls(), normal(4, 3, WIDTH), step_of_one_trace()
    manager = make_manager(model, ADAPTERS.values(), max_loras=2)
    assert not np.allclose(expected(model, ["all"], x[:1]), expected(model, ["others"], x[:1]), atol=1e-2)
    for names in BATCHES:
        with manager.prepare(names) as batch:
            assert_close(step(model, x, batch), expected(model, names, x))


@pytest.mark.parametrize(("cls", "how"), [(Attention, {}), (Derived, {"rederive": rederive})])
def test_verify(cls, how):
    manager = make_manager(cls())
    report = manager.verify(step_of(manager), normal(5, 3, WIDTH), **how)
    assert set(report.checked) == set(TARGETS)
    assert not report.unserved


def step_of(manager):
    @manager.jit
    def forward(model, x, batch):
        with jlora.use(batch):
            return model(x)

    return forward


class OneSided(Attention):
    """The values' product is forgotten."""

    def absorb_output(self, latent):
        return jnp.einsum("bthc,chv->bthv", latent, self.kernels()[1])


class ExchangedHeads(Attention):
    def absorb_output(self, latent):
        out = super().absorb_output(latent)
        lora = out - jnp.einsum("bthc,chv->bthv", latent, self.kernels()[1])
        return out - lora + lora[..., ::-1, :]


class Forgotten(Attention):
    def absorb_query(self, q_nope):
        return jnp.einsum("bthd,chd->bthc", q_nope, self.kernels()[0])

    absorb_output = OneSided.absorb_output


@pytest.mark.parametrize("cls", [OneSided, ExchangedHeads])
@pytest.mark.slow
def test_verify_finds_a_wrong_product(cls):
    manager = make_manager(cls())
    with pytest.raises(LoRAError, match=r"verify: kv_b_proj \(LinearGeneral\) is off"):
        manager.verify(step_of(manager), normal(5, 3, WIDTH))


def test_a_step_without_either_product_raises():
    manager = make_manager(Forgotten(), [KV_B])
    with manager.prepare(["kv_b", None]) as batch, pytest.raises(LoRAError, match="kv_b_proj"):
        step_of(manager)(manager.model, normal(2, 3, WIDTH), batch)


# --- packed rows, and einsums whose kernels have the heads between ---------------------------------------------------


class Einsum(nnx.Module):
    def __init__(self, einsum_str, kernel):
        self.einsum_str = einsum_str
        self.weight = nnx.Param(kernel)

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.weight[...])


class Deleted(Einsum):
    """A `kv_b_proj` whose weight was split into the absorbed kernels and deleted."""

    def __init__(self):
        self.einsum_str = "SA,AL->SL"


class Absorbed(nnx.Module):
    """An absorbed product, with the LoRA of `kv_b_proj`."""

    def __init__(self, product, kv_b_proj):
        self.product, self.kv_b_proj = product, kv_b_proj


class KUp(Absorbed):
    def __call__(self, q):
        y = jnp.swapaxes(self.product(q), 0, 1)
        return jnp.swapaxes(jlora.absorbed_delta(self.kv_b_proj, q, y, slice(0, NOPE), transposed=True), 0, 1)


class VUp(Absorbed):
    def __call__(self, latent):
        x = jnp.swapaxes(latent, 0, 1)
        return jlora.absorbed_delta(self.kv_b_proj, x, self.product(latent), slice(NOPE, None))


class Packed(nnx.Module):
    """The weights of an `Attention` in the layouts of tpu-inference; rows [T, WIDTH] of the sequences `owners` [T]."""

    def __init__(self, model, keep):
        up = model.kv_b_proj.kernel[...]
        self.q_a_proj = Einsum("TD,DA->TA", model.q_a_proj.kernel[...])
        self.q_b_proj = Einsum("TA,AP->TP", model.q_b_proj.kernel[...].reshape(Q_RANK, -1))
        self.kv_a_proj_with_mqa = Einsum("SD,DA->SA", model.kv_a_proj_with_mqa.kernel[...])
        self.kv_b_proj = Einsum("SA,AL->SL", up.reshape(RANK, -1)) if keep else Deleted()
        self.k_up_proj = Einsum("TNH,ANH->NTA", up[..., :NOPE])
        self.v_up_proj = Einsum("NTA,ANH->TNH", up[..., NOPE:])
        self.o_proj = Einsum("TNH,NHD->TD", model.o_proj.kernel[...])
        self.q_norm, self.kv_norm = model.q_norm, model.kv_norm

    def __call__(self, x, owners):
        q = self.q_b_proj(self.q_norm(self.q_a_proj(x))).reshape(-1, HEADS, NOPE + ROPE)
        q_nope, q_rope = jnp.split(q, [NOPE], axis=-1)
        latent, k_rope = jnp.split(self.kv_a_proj_with_mqa(x), [RANK], axis=-1)
        latent = self.kv_norm(latent)
        scores = jnp.einsum("ntc,sc->nts", self.k_up_proj(q_nope), latent) + jnp.einsum("tnd,sd->nts", q_rope, k_rope)
        scores = jnp.where(owners[:, None] == owners, scores, -jnp.inf)
        return self.o_proj(self.v_up_proj(jnp.einsum("nts,sc->ntc", jax.nn.softmax(scores), latent)))


def packed(keep):
    """Return the model and the lines that serve it."""
    jlora.register_layer(Einsum, lambda layer: jlora.einsum_spec(layer.einsum_str, layer.weight.shape, "weight"))
    jlora.register_layer(
        Deleted, lambda layer: jlora.LinearSpec(RANK, HEADS * (NOPE + V), param=None, dtype=jnp.float32)
    )
    model = Packed(Attention(), keep)
    model.k_up_proj = KUp(model.k_up_proj, model.kv_b_proj)
    model.v_up_proj = VUp(model.v_up_proj, model.kv_b_proj)
    return model


COUNTS, OWNERS = [3, 1, 4], np.array([0, 0, 0, 1, 2, 2, 2, 2, -1, -1])  # two rows of padding


@jax.jit
def forward(model, x, batch):
    with jlora.use(batch):
        return model(x, OWNERS)


@pytest.mark.usefixtures("registered")
def test_packed_rows_and_absorbed_kernels_alone():
    model, weights, x = packed(keep=False), weights_of(Attention()), normal(len(OWNERS), WIDTH)
    manager = make_manager(model, ADAPTERS.values(), max_loras=2)
    refused = {layer.path: layer.reason for layer in manager.layers() if not layer.wrapped}
    assert "kernel of its own for each entry of N" in refused["k_up_proj.product"]
    before = compiled_programs(forward)
    for names in (["all", None, "kv_b"], ["kv_b", "all", None], ["others", "all", None]):
        with manager.prepare(names, COUNTS, len(x)) as batch:
            found = forward(model, x, batch)
        for i, name in enumerate(names):
            assert_close(found[i == OWNERS], attend(weights, x[i == OWNERS], ADAPTERS.get(name)))
        assert_close(found[OWNERS < 0], attend(weights, x[OWNERS < 0]))
    assert compiled_programs(forward) == before + 1


def split_again(model):
    up = model.kv_b_proj.weight[...].reshape(RANK, HEADS, NOPE + V)
    model.k_up_proj.product.weight[...], model.v_up_proj.product.weight[...] = jnp.split(up, [NOPE], axis=-1)


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_verify_packed_rows():
    manager, x = make_manager(packed(keep=True)), normal(len(OWNERS), WIDTH)
    shape = jlora.BatchShape(3, COUNTS, len(x))
    report = manager.verify(forward, x, shape, rederive=split_again)
    assert set(report.checked) == set(TARGETS)
    assert not report.unserved
    manager.unwrap()
    without_kernel = make_manager(packed(keep=False))
    with pytest.raises(LoRAError, match=r"verify: kv_b_proj \(Deleted\) is off"):
        without_kernel.verify(forward, x, shape)


# --- other batches, slots and meshes ---------------------------------------------------------------------------------


class Stack(nnx.Module):
    def __init__(self):
        self.layers = nnx.vmap(Attention, in_axes=0, out_axes=0)(nnx.Rngs(0).split(2))

    def __call__(self, x):
        return nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@pytest.mark.slow
def test_stacked_layers():
    model, x, names = Stack(), normal(4, 3, WIDTH), BATCHES[0]
    modules = {f"layers.{i}.{name}": module for i in range(2) for name, module in ALL.modules.items()}
    stacked = replace(ALL, modules=modules), replace(KV_B, modules={"layers.1.kv_b_proj": KV_B.modules["kv_b_proj"]})
    want = np.asarray(x, np.float64)
    for i, adapters in enumerate(({"all": ALL}, ADAPTERS)):
        layer = jax.tree.map(lambda array, i=i: array[i], model.layers)
        want = want + expected(layer, names, want, adapters)
    manager = make_manager(model, stacked)
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), want)


def test_sums_with_factors():
    model, x = Attention(), normal(3, 3, WIDTH)
    manager = make_manager(model, ADAPTERS.values(), max_adapters_per_sequence=2)
    mixed = jlora.Mix({"kv_b": 0.5, "others": 1.0})
    modules = {**OTHERS.modules, "kv_b_proj": replace(KV_B.modules["kv_b_proj"], scaling=0.375)}
    with manager.prepare([mixed, None, "all"]) as batch:
        found = serve(model, x, batch)
    want = {"mixed": replace(OTHERS, modules=modules), "all": ALL}
    assert_close(found, expected(model, ["mixed", None, "all"], x, want))


def test_slots_of_8_bits():
    model, x, names = Attention(), normal(3, 3, WIDTH), ["all", None, "kv_b"]
    manager = make_manager(model, ADAPTERS.values(), dtype="int8")
    with manager.prepare(names) as batch:
        found = serve(model, x, batch)
    assert_close(found, expected(model, names, x, {name: in_int8(each) for name, each in ADAPTERS.items()}), 2e-2)


@pytest.mark.slow
def test_rows_without_an_adapter_keep_their_bits():
    model, x = Attention(), normal(2, 3, WIDTH)
    base = np.asarray(run(model, x))
    manager = make_manager(model, [KV_B])
    with manager.prepare(["kv_b", None]) as batch:
        np.testing.assert_array_equal(np.asarray(serve(model, x, batch))[1], base[1])
        with jlora.use(batch, without=["*"]), jax.numpy_dtype_promotion("strict"):
            y = jnp.full((2, 3, HEADS, V), -0.0, jnp.bfloat16)
            out = jlora.absorbed_delta(model.kv_b_proj, jnp.ones((2, 3, HEADS, RANK), y.dtype), y, slice(NOPE, None))
    assert out.dtype == y.dtype
    assert jnp.all(out[0] != 0)
    assert jnp.all(jnp.signbit(out[1]))


@pytest.mark.slow
def test_gradients_of_an_adapter_that_begins_with_zeros():
    """B is zero. The gradient of B [N, r] is that of the merged kernel [N, K], times A."""
    model, x, weights = Attention(), normal(2, 3, WIDTH), normal(1, 3, WIDTH, seed=1)
    kernels = jax.grad(lambda model: jnp.sum(model(x[:1]) * weights), allow_int=True)(model)
    of_kernel = np.asarray(kernels.kv_b_proj.kernel[...], np.float64).reshape(RANK, -1).T
    lora = KV_B.modules["kv_b_proj"]
    start = replace(KV_B, modules={"kv_b_proj": replace(lora, b=np.zeros_like(lora.b))})
    manager = make_manager(model, [start], max_loras=1, max_lora_rank=2)
    with manager.prepare(["kv_b", None]) as batch:
        slots = jax.grad(lambda model: jnp.sum(serve(model, x, batch)[:1] * weights), allow_int=True)(model)
    (found,) = np.asarray(slots.kv_b_proj.jlora_b[...])
    assert np.abs(of_kernel).max() > 1e-2
    assert_close(found.T, 0.75 * of_kernel @ lora.a.T)


@pytest.mark.mesh
@pytest.mark.parametrize("spec", [P(None, "t"), P()])
def test_heads_on_a_mesh(spec):
    model, x, names = Attention(), normal(4, 3, WIDTH), BATCHES[0]
    want = expected(model, names, x)
    placed(model, mesh_of(t=2), {"kv_b_proj": spec})
    manager = make_manager(model, ADAPTERS.values())
    with manager.prepare(names) as batch:
        assert_close(serve(model, x, batch), want)


@pytest.mark.mesh
def test_a_kernel_split_by_its_inputs_is_refused():
    model = placed(Attention(), mesh_of(t=2), {"kv_b_proj": P("t")})
    manager = make_manager(model, [KV_B])
    with manager.prepare(["kv_b"]) as batch, pytest.raises(LoRAError, match=r"kv_b_proj: .* splits by heads alone"):
        serve(model, normal(1, 3, WIDTH), batch)


def test_other_sizes_are_refused():
    model = Attention()
    manager = make_manager(model, [KV_B])
    q, latent = normal(1, 3, HEADS, NOPE), normal(1, 3, HEADS, RANK)
    with manager.prepare(["kv_b"]) as batch, jlora.use(batch, without=["*"]):
        for x, y, part, transposed in (
            (q, latent, slice(0, NOPE), False),
            (q, latent, slice(NOPE, None), True),
            (latent, q, slice(0, NOPE), True),
        ):
            with pytest.raises(LoRAError, match=r"kv_b_proj: absorbed_delta takes \[.*expected \[\.\.\., heads, "):
                jlora.absorbed_delta(model.kv_b_proj, jnp.asarray(x), jnp.asarray(y), part, transposed=transposed)


def test_dora_is_refused():
    model = Attention()
    dora = make_dora("dora", [TARGETS["kv_b_proj"]], 2)
    manager = make_manager(model, [dora], variants=["dora"])
    with manager.prepare(["dora"]) as batch, pytest.raises(LoRAError, match=r"kv_b_proj: .* without variants"):
        serve(model, normal(1, 3, WIDTH), batch)

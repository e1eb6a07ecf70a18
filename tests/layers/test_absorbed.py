"""Latent attention (MLA), expanded and absorbed, against weights that NumPy merges first and absorbs then, in float64.

The models have the structures of MaxText (one kernel for keys and values, read by both forms), of a model that derives
the absorbed kernels when it is loaded, and of tpu-inference (packed rows, einsums of its own, absorbed kernels alone).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.errors import LoRAError
from tests.layers.merging import Target, assert_close, delta, make_adapter, make_manager, normal, step_of_one_trace
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

    def __init__(self):
        rngs = nnx.Rngs(0)
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

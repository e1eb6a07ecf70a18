"""Parameters that a model derives from a wrapped kernel when it is loaded, such as those of absorbed attention."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jlora
from jlora.errors import LoRAError
from tests.layers.merging import make_manager, normal
from tests.layers.mesh_models import mesh_of, placed

R, HEADS, QK, V = 8, 2, 3, 5


class Latent(nnx.Module):
    """Attention over a latent of R features, expanded by `kv_b`, or with its halves absorbed into q and the output."""

    def __init__(self, dtype_of_v=jnp.float32):
        rngs = nnx.Rngs(0)
        self.kv_a = nnx.Linear(6, R, rngs=rngs)
        self.q = nnx.LinearGeneral(6, (HEADS, QK), rngs=rngs)
        self.kv_b = nnx.Linear(R, HEADS * (QK + V), use_bias=False, rngs=rngs)
        self.w_uk, self.w_uv = (nnx.Param(half) for half in halves(self, dtype_of_v))
        self.table = nnx.Param(jnp.asarray(normal(4, R)))  # repeats nothing
        self.cache = nnx.Cache(jnp.zeros((4, R)))

    def plain(self, x):
        latent = self.kv_a(x)
        k, v = jnp.split(self.kv_b(latent).reshape(*x.shape[:-1], HEADS, QK + V), [QK], axis=-1)
        return jnp.einsum("bnts,bsnv->btnv", jnp.einsum("btnd,bsnd->bnts", self.q(x), k), v)

    def absorbed(self, x):
        latent = self.kv_a(x)
        scores = jnp.einsum("btnd,ndr,bsr->bnts", self.q(x), self.w_uk[...].astype(x.dtype), latent)
        return jnp.einsum("bnts,bsr,nrv->btnv", scores, latent, self.w_uv[...].astype(x.dtype))


def halves(model, dtype_of_v):
    kernel = model.kv_b.kernel[...].reshape(R, HEADS, QK + V)
    return kernel[..., :QK].transpose(1, 2, 0), kernel[..., QK:].transpose(1, 0, 2).astype(dtype_of_v)


def rederive(model):
    model.w_uk[...], model.w_uv[...] = halves(model, model.w_uv[...].dtype)


@jax.jit
def plain(model, x, batch):
    with jlora.use(batch):
        return model.plain(x)


@jax.jit
def both(model, x, batch):
    with jlora.use(batch):
        return model.plain(x), model.absorbed(x)


def test_derived_parameters_are_named(caplog):
    """One of the kernel's dtype, and one of another."""
    with caplog.at_level(logging.WARNING, "jlora"):
        manager = make_manager(Latent(jnp.bfloat16))
    assert [record.message.partition(".")[0] for record in caplog.records] == [
        "w_uk (and 1 more) repeats weights of kv_b"
    ]
    for forward in (plain, both):
        with pytest.raises(LoRAError, match=r"verify: w_uk \(and 1 more\) repeats weights of kv_b.*rederive="):
            manager.verify(forward, normal(3, 4, 6))
    manager.unwrap()
    caplog.clear()
    make_manager(manager.model, exclude_modules=["kv_b"]).verify(both, normal(3, 4, 6))
    assert not caplog.records


@pytest.mark.slow
def test_absorbed_attention_serves_the_base():
    manager = make_manager(Latent())
    x = normal(3, 4, 6)
    assert manager.verify(plain, x, rederive=rederive).checked == ("kv_a", "kv_b", "q")
    with pytest.raises(LoRAError, match=r"verify: kv_b \(Linear\) is off.*derived from its kernel"):
        manager.verify(both, x, rederive=rederive)
    np.testing.assert_array_equal(manager.model.w_uk[...], halves(manager.model, jnp.float32)[0])


def test_rederive_must_keep_the_base_model():
    def wrong(model):
        model.w_uv[...] = 1.1 * model.w_uv[...]

    manager = make_manager(Latent())
    with pytest.raises(LoRAError, match=r"verify: rederive changes the outputs of the base model by 0\.1, and 0\.0001"):
        manager.verify(both, normal(3, 4, 6), rederive=wrong)


@pytest.mark.mesh
def test_derived_parameters_on_a_mesh(caplog):
    for spec in (P("t"), P(None, "t")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "jlora"):
            make_manager(placed(Latent(), mesh_of(t=2), {"kv_b": spec}))
        assert "repeats weights of kv_b" in caplog.text

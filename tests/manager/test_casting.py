"""Casts of factors to slot dtype with the scaling folded in, and the values that are refused."""

import itertools

import chex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jlora
from jlora.manager.casting import times_a_power_of_two
from tests.manager.test_names import Merged, factors, make_manager, placed

DTYPES = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64]


@pytest.mark.parametrize("power", [-130, -100, -9, -1, 0, 1, 2, 77, 101])
def test_a_bfloat16_factor_of_any_bits_times_a_power_of_two(power):
    """In pieces that lie between zero, the least normal number, infinity and NaN, or across one of them."""
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        want = (every.astype(np.float32) * np.float32(2.0**power)).astype(ml_dtypes.bfloat16)
    taken = {0: 0, 1: 0, 63: 0}  # by where the pieces begin
    for begin in taken:
        for at in range(begin, (1 << 16) - 63, 64):
            got = times_a_power_of_two(every[at : at + 64].reshape(8, 8).T, 2.0**power)
            if got is not None:
                np.testing.assert_array_equal(got.T.view(np.uint16).ravel(), want[at : at + 64].view(np.uint16))
                taken[begin] += 1
    # 256 exponents of two signs, two pieces each; what they leave are those of zero, infinity and the products' own.
    assert taken[0] == (2 * 2 * (254 - abs(power)) if abs(power) <= 100 else 0)
    assert times_a_power_of_two(every[0x3F80:0x3FC0], 3.0) is None
    assert times_a_power_of_two(every[0x3F80:0x3FC0], -(2.0**power)) is None


def test_factors_too_large_for_float16_are_refused():
    """A and B are brought to one size by a power of two: A 7e4 or B 6e4 * 2 alone fit, both large do not."""
    for a, b, scaling, fits in ((7e4, 1.0, 1.0, True), (1.0, 6e4, 2.0, True), (1e6, 1e6, 1.0, False)):
        module = jlora.ModuleLoRA(
            a=np.full((2, 3), a, np.float32), b=np.full((12, 2), b, np.float32), alpha=2 * scaling, scaling=scaling
        )
        if fits:
            slot_a, slot_b, _ = placed(make_manager(Merged(), dtype=jnp.float16), {"proj": module})
            product = slot_a[0].T.astype(np.float64) @ slot_b.astype(np.float64)
            np.testing.assert_allclose(product, np.full((3, 12), 2 * a * b * scaling), rtol=2e-3)
        else:
            with pytest.raises(
                jlora.AdapterMismatchError, match=r"'x': proj: A must be finite.*float16, and reaches 1e\+06"
            ):
                placed(make_manager(Merged(), dtype=jnp.float16), {"proj": module})
        slot_a, slot_b, _ = placed(make_manager(Merged(), dtype=jnp.bfloat16), {"proj": module})
        chex.assert_tree_all_finite((slot_a, slot_b))


QUICK = (-10, -3, 0, 6)


@pytest.mark.parametrize("slot_dtype", DTYPES[:3])
@pytest.mark.parametrize(
    "powers", [QUICK, pytest.param(tuple(p for p in range(-10, 7) if p not in QUICK), marks=pytest.mark.slow)]
)
def test_the_error_of_an_adapter_is_at_most_twice_that_of_peft(slot_dtype, powers):
    """PEFT in a float16 (bfloat16, float32) model: h = x A^T, y = h B^T, y * scaling, each rounded to that dtype."""
    model, wide = Merged(), np.float64
    model.proj.kernel[...] = jnp.zeros((3, 12), jnp.float32)
    manager = make_manager(model, dtype=slot_dtype)
    for size, power in itertools.product((1e-5, 1e-3, 1.0), powers):
        case, scaling, rng = f"{size} * 2**{power}", 2.0**power, np.random.default_rng(0)
        a = rng.normal(size=(4, 3)).astype(slot_dtype)
        b = (size * rng.normal(size=(12, 4))).astype(slot_dtype)
        module = jlora.ModuleLoRA(a=a, b=b, alpha=scaling * 4, scaling=scaling)
        slot_a, slot_b, ranks = placed(manager, {"proj": module})
        x = rng.normal(size=(64, 3)).astype(slot_dtype)
        exact = scaling * (x.astype(wide) @ a.T.astype(wide)) @ b.T.astype(wide)
        hidden = (x.astype(np.float32) @ a.T.astype(np.float32)).astype(slot_dtype)
        y = (hidden.astype(np.float32) @ b.T.astype(np.float32)).astype(slot_dtype)
        peft = (y.astype(np.float32) * np.float32(scaling)).astype(slot_dtype).astype(wide)
        # the slot values in exact arithmetic, which shows the error of folding and rounding
        held = (x.astype(wide) @ slot_a[0].T.astype(wide)) @ slot_b.astype(wide)
        error, theirs = (np.linalg.norm(delta - exact) for delta in (held, peft))
        assert error <= 2 * theirs, case
        assert ranks == [4]
        # and served: the layer's own arithmetic on top, with a base of zeros
        with manager.prepare(["x"]) as batch, jlora.use(batch):
            served = np.asarray(model.proj(jnp.asarray(x[None]).astype(jnp.float32)), wide)[0]
        assert np.linalg.norm(served - exact) <= 2 * theirs + 1e-6 * np.linalg.norm(exact), case
        manager.remove_adapter("x")


def test_a_float16_model_serves_small_scalings(rng):
    """Scaling 1/512 folded into B of 1e-5 is below the smallest float16, so a power of two moves from A to B."""

    class Half(nnx.Module):
        def __init__(self):
            self.proj = nnx.Linear(64, 12, use_bias=False, param_dtype=jnp.float16, dtype=jnp.float16, rngs=nnx.Rngs(0))

    for scaling, size, scale_a in ((1 / 512, 1e-5, 1.0), (1 / 1024, 1e-5, 30.0), (64.0, 1.0, 1e-3), (64.0, 1.0, 3.0)):
        model = Half()
        model.proj.kernel[...] = jnp.zeros((64, 12), jnp.float16)
        manager = make_manager(model)
        a, b = (
            (scale_a * rng.normal(size=(4, 64))).astype(np.float16),
            (size * rng.normal(size=(12, 4))).astype(np.float16),
        )
        manager.add_adapter(
            jlora.Adapter(name="x", modules={"proj": jlora.ModuleLoRA(a=a, b=b, alpha=4 * scaling, scaling=scaling)})
        )
        x = rng.normal(size=(32, 64)).astype(np.float16)
        with manager.prepare(["x"]) as batch, jlora.use(batch):
            got = np.asarray(model.proj(jnp.asarray(x[None])), np.float64)[0]
        exact = scaling * (x.astype(np.float64) @ a.T.astype(np.float64)) @ b.T.astype(np.float64)
        hidden = (x.astype(np.float32) @ a.T.astype(np.float32)).astype(np.float16)
        y = (hidden.astype(np.float32) @ b.T.astype(np.float32)).astype(np.float16)
        peft = (y * np.float16(scaling)).astype(np.float64)
        chex.assert_tree_all_finite(got)
        assert np.linalg.norm(got - exact) <= 2 * np.linalg.norm(peft - exact)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("factor", ["a", "b"])
def test_numbers_that_are_none_are_refused_in_memory_too(rng, value, factor):
    module = factors(rng, 2, 3, 12)
    getattr(module, factor)[1, 1] = value
    adapter = jlora.Adapter(name="x", modules={"proj": module})
    manager = make_manager(Merged())
    with pytest.raises(jlora.AdapterFormatError, match=rf"'x': proj: {factor.upper()} holds NaN .*LoRAConfig.allow"):
        manager.add_adapter(adapter)
    assert manager.list_adapters() == {}
    lenient = jlora.LoRAManager(Merged(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, allow_nonfinite=True))
    assert lenient.add_adapter(adapter)
    lenient.activate_adapter("x")
    assert not np.isfinite(np.asarray(getattr(lenient.model.proj, f"jlora_{factor}")[...])).all()

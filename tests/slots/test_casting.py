"""Casts of factors to slot dtype, and the values that are refused."""

import ml_dtypes
import numpy as np
import pytest

import jlora
from jlora.slots.casting import in_slot_dtype
from tests.fit.test_names import Merged, factors, make_manager, placed

DTYPES = list(map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64)))


@pytest.mark.parametrize("slot_dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_casts_are_those_of_numpy(dtype, slot_dtype):
    """Of every bfloat16, and of values half way and a little more between two of them."""
    with np.errstate(over="ignore", invalid="ignore"):
        every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
        values = np.stack([every, every * (1 + 2**-8), every * (1 + 2**-8 + 2**-15)]).astype(dtype)
        want = values.astype(slot_dtype)
        kept = ~(np.isinf(want) & np.isfinite(values))
        found = in_slot_dtype("x", "A", values[kept], slot_dtype)
        assert found.dtype == slot_dtype
        np.testing.assert_array_equal(found.astype(np.float64), want[kept].astype(np.float64))


@pytest.mark.parametrize(
    ("a", "b", "scaling", "wrong"),
    [
        (6e4, 6e4, 64.0, None),
        (7e4, 1.0, 1.0, r"A must be finite in the slots' dtype float16, and reaches 7e\+04"),
        (1.0, 1e6, 1e-6, r"B must be finite in the slots' dtype float16, and reaches 1e\+06"),
    ],
)
def test_factors_too_large_for_float16_are_refused(a, b, scaling, wrong):
    module = jlora.ModuleLoRA(
        a=np.full((2, 3), a, np.float32), b=np.full((12, 2), b, np.float32), alpha=2 * scaling, scaling=scaling
    )
    for dtype in ("float16", "bfloat16"):
        manager = make_manager(Merged(), dtype=dtype)
        if wrong is not None and dtype == "float16":
            with pytest.raises(jlora.AdapterMismatchError, match=f"'x': proj: {wrong}"):
                placed(manager, {"proj": module})
        else:
            slot_a, slot_b, _ = placed(manager, {"proj": module})
            assert (slot_a[0, :2] == module.a.astype(slot_a.dtype)).all()
            assert (slot_b[:2] == module.b.T.astype(slot_b.dtype)).all()


@pytest.mark.parametrize(("factor", "value"), [("a", np.nan), ("b", np.inf), ("b", -np.inf)])
def test_numbers_that_are_none_are_refused_in_memory_too(rng, factor, value):
    module = factors(rng, 2, 3, 12)
    getattr(module, factor)[1, 1] = value
    adapter = jlora.Adapter(name="x", modules={"proj": module})
    manager = make_manager(Merged())
    with pytest.raises(jlora.AdapterFormatError, match=rf"'x': proj.lora_{factor.upper()}.weight holds NaN .*allow"):
        manager.add_adapter(adapter)
    assert manager.list_adapters() == {}
    lenient = jlora.LoRAManager(Merged(), jlora.LoRAConfig(max_loras=1, max_lora_rank=4, allow_nonfinite=True))
    assert lenient.add_adapter(adapter)
    lenient.prepare(["x"]).close()
    assert not np.isfinite(np.asarray(getattr(lenient.model.proj, f"jlora_{factor}")[...])).all()

"""One launch writes the same bits as XLA's copies, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jlora.pallas.triton import write as triton_write
from tests.pallas.lowering import lowered_text
from tests.pallas.running import interpret_of

pytestmark = pytest.mark.device("gpu")

SHAPES = {  # of the arrays, how many, ranks of a block
    "A of three slices": ((4, 3, 8, 40), 5, 4),
    "B": ((4, 8, 24), 3, 8),
    "more than one piece": ((2, 1, 16, 9000), 2, 16),
    "one array, an odd width": ((3, 20, 7), 1, 16),
    "ranks in int8": ((3, 2, 17, 1), 3, 16),
}


@pytest.mark.parametrize(
    ("what", "dtype"),
    [
        *((what, "float32") for what in SHAPES),
        *(("B", name) for name in ("bfloat16", "float16", "int8")),
    ],
)
def test_a_block_of_many_layers(rng, what, dtype):
    shape, rows, step = SHAPES[what]
    held = [(9 * rng.standard_normal(shape, np.float32)).astype(jnp.dtype(dtype)) for _ in range(rows)]
    block = (9 * rng.standard_normal((rows, *shape[1:-2], step, shape[-1]), np.float32)).astype(jnp.dtype(dtype))

    @jax.jit
    def write(arrays, block, slot, start):
        assert triton_write.suits(shape, rows)
        return triton_write.write_rows(arrays, block, slot, start, interpret=interpret_of("triton"))

    for slot, start in ((0, 0), (shape[0] - 1, shape[-2] - step), (1, (shape[-2] - step) // 2)):
        written = write(held, block, np.int32(slot), np.int32(start))
        for old, new, row in zip(held, written, block, strict=True):
            expected = old.copy()
            expected[slot, ..., start : start + step, :] = row
            np.testing.assert_array_equal(np.asarray(new), expected)


@pytest.mark.parametrize("rows", [1, 64])
def test_it_is_one_kernel_in_their_own_memory(rows):
    shape = jax.ShapeDtypeStruct((8, 16, 256), "bfloat16")
    scalar = jax.ShapeDtypeStruct((), "int32")
    block = jax.ShapeDtypeStruct((rows, 16, 256), "bfloat16")
    text = lowered_text(triton_write.write_rows, ([shape] * rows, block, scalar, scalar), "cuda")
    assert text.count("lora_write") >= 1
    assert text.count("custom_call @") == 1
    assert text.count("#stablehlo.output_operand_alias") == rows


def test_arrays_too_large_for_32_bit_indices_are_refused():
    assert triton_write.suits((2**15, 2**8, 2**7), 128)
    assert not triton_write.suits((2**15, 2**8, 2**8), 128)
    assert not triton_write.suits((1, 1, 1), 129)

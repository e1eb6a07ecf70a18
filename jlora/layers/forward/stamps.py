"""Check that a copy of the model holds the adapters of a batch."""

import jax
import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jlora.errors import LoRAError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.mesh import across_mesh, here

_COPY = (
    "{path}: this copy of the model was made before an adapter of the batch was written into its slot, and would serve "
    "what was there. The manager writes the model that it was given, and nothing else: call that one, or make the copy "
    "anew after prepare"
)


def check_copy(
    batch: LoRABatch, path: str, out: Float[Array, "*lead N"], stamps: Int[Array, "S"]
) -> Float[Array, "*lead N"]:
    """Return `out` of the stamped layer, or NaN if its copy of the model missed a write of a slot in the batch.

    A traced function cannot raise at run time, so it returns NaN. An eager call raises instead.

    Raises:
      LoRAError: in an eager call, the copy missed a write.
    """

    def compare(out: Array, stamps: Array, slots: Array, needed: Array) -> Array:
        return jnp.where(_missed(stamps, slots, needed), jnp.nan, out)

    space = batch.sequences
    if space.stamps is None:
        return out
    several = len(space.stamps) > 1
    slots, needed = (jnp.stack(each) if several else each[0] for each in (space.entries.slots, space.stamps))
    operands = stamps, here(slots), here(needed)
    if any(isinstance(operand, jax.core.Tracer) for operand in (out, *operands)):
        return across_mesh(compare, out, *operands)
    if _missed(*operands):
        raise LoRAError(_COPY.format(path=path))
    return out


def _missed(stamps: Array, slots: Array, needed: Array) -> Array:
    return ((needed > 0) & (stamps.at[slots].get(mode="clip") != needed)).any()

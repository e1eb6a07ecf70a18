"""Check that a copy of the model holds the adapters of a batch."""

import jax
import jax.core
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jlora.errors import LoRAError
from jlora.layers.forward.batch import LoRABatch
from jlora.layers.forward.mesh import across_mesh, here
from jlora.layers.site import Site

_COPY = (
    "{path}: this copy of the model was made before an adapter of the batch was written into its slot, and would serve "
    "what was there. The manager writes the model that it was given, and nothing else: call that one, or make the copy "
    "anew after prepare"
)


def check_stamps(
    layer: nnx.Module, site: Site, batch: LoRABatch, out: Float[Array, "*lead N"]
) -> Float[Array, "*lead N"]:
    """Return `out`, or NaN in the stamped layer if its copy of the model missed a write of a slot in the batch.

    A traced function cannot raise at run time, so it returns NaN. An eager call raises instead.

    Raises:
      LoRAError: in an eager call, the copy missed a write.
    """
    space = batch.sequences
    if not site.stamped or space.stamps is None:
        return out
    stamps: Array = vars(layer)[site.stamps][...]

    def compare(out: Array, stamps: Array, slots: Array, needed: Array) -> Array:
        return jnp.where(_missed(stamps, slots, needed), jnp.nan, out)

    several = len(space.stamps) > 1
    slots, needed = (jnp.stack(each) if several else each[0] for each in (space.entries.slots, space.stamps))
    operands = stamps, here(slots), here(needed)
    if any(isinstance(operand, jax.core.Tracer) for operand in (out, *operands)):
        return across_mesh(compare, out, *operands)
    if _missed(*operands):
        raise LoRAError(_COPY.format(path=site.path))
    return out


def _missed(stamps: Array, slots: Array, needed: Array) -> Array:
    return ((needed > 0) & (stamps.at[slots].get(mode="clip") != needed)).any()

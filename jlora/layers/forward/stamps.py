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
    layer: nnx.Module, site: Site, batch: LoRABatch, ranks: Float[Array, "S *rows s"], max_rank: int
) -> Float[Array, "S *rows s"]:
    """Return the ranks and scales of a layer's slots, changed if its copy of the model missed a write for the batch.

    A traced function cannot raise at run time. The stamped layer then has the rank `max_rank` and scales of NaN in all
    slots, so all rows with an adapter become NaN. This costs less than a pass over the output. An eager call raises.

    Args:
      layer: the wrapped layer.
      site: its site.
      batch: the open batch.
      ranks: ranks and scales of slots of the site, or of a site in `site.shared`.
      max_rank: R of these slots. A slot without an adapter has the true rank 0, which would hide a scale.

    Raises:
      LoRAError: in an eager call, the copy missed a write.
    """
    space = batch.sequences
    if not site.stamped or space.stamps is None:
        return ranks
    stamps: Array = vars(layer)[site.stamps][...]

    def compare(ranks: Array, stamps: Array, slots: Array, needed: Array) -> Array:
        invalid = jnp.array([max_rank] + [jnp.nan] * (ranks.shape[-1] - 1), ranks.dtype)
        return jnp.where(_missed(stamps, slots, needed), invalid, ranks)

    several = len(space.stamps) > 1
    slots, needed = (jnp.stack(each) if several else each[0] for each in (space.entries.slots, space.stamps))
    operands = stamps, here(slots), here(needed)
    if any(isinstance(operand, jax.core.Tracer) for operand in (ranks, *operands)):
        return across_mesh(compare, ranks, *operands)
    if _missed(*operands):
        raise LoRAError(_COPY.format(path=site.path))
    return ranks


def _missed(stamps: Array, slots: Array, needed: Array) -> Array:
    return ((needed > 0) & (stamps.at[slots].get(mode="clip") != needed)).any()

"""Replace the output of a layer in the rows of adapters that bring a layer of their own (a saved head).

A saved head is a linear layer of a few outputs. Its weight is the factor A of a slot, and its bias the factor B, so
that x A^T of the rows' slots is the product: one `shrink`, which reads only the weights of slots in use.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

from jlora.errors import LoRAError
from jlora.layers.forward.delta import SlotFactors, factor_specs, options, plan_specs, slot_factors, summed
from jlora.layers.forward.mesh import on_mesh, reached, split_of
from jlora.layers.forward.scope import Scope
from jlora.layers.site import Site
from jlora.pallas.api import shrink
from jlora.pallas.plan import Plan
from jlora.sharding.rules import partition


def replace_rows(
    layer: nnx.Module, site: Site, scope: Scope, base: Float[Array, "*lead N"], x: Float[Array, "*lead K"]
) -> Float[Array, "*lead columns"]:
    """Return max(N, R) columns: x W^T + bias of its saved head in each row that has one, and `base` in the others.

    Columns past the outputs of a row are -inf. A sequence takes a saved head only as its single adapter.

    Args:
      layer: the wrapped layer.
      site: the site of its saved heads, for at most R outputs.
      scope: the open scope.
      base: the complete output of the layer, with LoRA.
      x: the input.

    Raises:
      LoRAError: slots would be constants of a compiled function, or the calling code is one shard of K.
    """
    rows = scope.rows(site, base)
    if rows is None:
        return base
    if reached(site):
        raise LoRAError(
            f"{site.path}: saved heads are not served inside a jax.shard_map over "
            f"{' and '.join(map(repr, split_of(site.spec).ins))}, where the output of the layer is a partial sum; call "
            "the layer outside, or leave it out of LoRAConfig.saved_heads"
        )
    sharding, columns = split_of(site.spec), max(base.shape[-1], site.spec.max_rank)

    def local(base: Array, x: Array, ids: Array, factors: SlotFactors, plans: tuple[Plan, ...]) -> Array:
        flat, inputs = base.reshape(-1, base.shape[-1]), x.reshape(-1, x.shape[-1]).astype(factors.a.dtype)
        h = shrink(inputs, factors.a, plans[0], ranks=factors.ranks, **options(site))
        slots = jnp.repeat(ids.reshape(-1), len(flat) // max(1, ids.size))
        outputs = factors.ranks[:, 0, 0].at[slots].get(mode="fill", fill_value=0)[:, None]
        bias = factors.b[:, :, 0].astype(jnp.float32).at[slots].get(mode="fill", fill_value=0)
        head = (summed(h, sharding.ins)[0] + bias).astype(base.dtype)
        head = jnp.where(jnp.arange(head.shape[1], dtype=jnp.float32)[None] < outputs, head, -jnp.inf)
        out = jnp.where(outputs > 0, _widened(head, columns), _widened(flat, columns))
        return out.reshape(*base.shape[:-1], columns)

    with jax.named_scope("saved_head"):
        lead = rows.sharding.axes
        ids = rows.slots(site.spec.num_slots)[0]
        of_rows, of_x = partition(*lead, ()), partition(*lead, sharding.ins)
        specs = of_rows, of_x, partition(*lead[: ids.ndim]), factor_specs(site.spec), plan_specs(rows)
        mapped = on_mesh(sharding, local, specs, of_rows)
        return mapped(base, x, ids, slot_factors(layer, site, scope.batch), rows.adapters[0])


def _widened(rows: Float[Array, "M N"], columns: int) -> Float[Array, "M columns"]:
    """Return the rows with columns of -inf added on the right."""
    return lax.pad(rows, jnp.array(-jnp.inf, rows.dtype), ((0, 0, 0), (0, columns - rows.shape[1], 0)))

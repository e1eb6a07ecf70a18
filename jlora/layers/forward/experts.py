"""LoRA of the grouped products of a mixture-of-experts layer: their output plus the delta of each row's expert."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jlora._typing import is_mapping
from jlora.errors import LoRAError, LoRAUsageError
from jlora.layers.forward.delta import add_delta
from jlora.layers.forward.linear import first_input, parameters_of
from jlora.layers.forward.mesh import shards_of
from jlora.layers.forward.rows import RowMap
from jlora.layers.forward.scope import Scope, enter_site
from jlora.layers.site import Site
from jlora.layers.specs import EXPERT_NAMES, ExpertsSpec, LinearSpec, own_attribute


def prefix_of(product: str) -> str:
    """Return the prefix of the attributes that a layer holds for one of its products."""
    return f"jlora_{product}"


def product_of(site: Site) -> str:
    """Return the name of the product of a site of experts."""
    return site.prefix.removeprefix(prefix_of(""))


def shared_sites(site: Site, names: Sequence[Sequence[str]], num_slots: int) -> tuple[Site, Site]:
    """Return the sites of A and of B in the slots for adapters whose experts share one factor.

    These slots follow those of `site`. The experts share B of a product that leads out of the experts, as its `names`
    show, and A of every other product.
    """
    leads_out = any(name in EXPERT_NAMES["down"][0] for name in names[0])
    spec = replace(site.spec, num_slots=num_slots, first_slot=site.spec.num_slots)
    a = replace(spec, out_sizes=(0,) * spec.slices, experts=spec.experts if leads_out else None)
    b = replace(spec, in_features=0, experts=None if leads_out else spec.experts)
    return (
        replace(site, spec=a, parts={}, prefix=f"{site.prefix}_shared_a"),
        replace(site, spec=b, parts={}, prefix=f"{site.prefix}_shared_b"),
    )


def experts_methods(cls: type, name: str) -> Callable[..., Any]:
    """Return the method of a wrapped experts layer: the product of `cls`, plus the LoRA delta."""
    method = getattr(cls, name)
    parameters = parameters_of(method)

    @functools.wraps(method)
    def product(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = method(self, *args, **kwargs)
        site: Site = vars(self)[f"{prefix_of(name)}_site"]
        scope = enter_site(site, self)
        if scope is None:
            return y
        spec: ExpertsSpec = vars(self)["jlora_spec"]
        x, others, named = first_input(parameters, args, kwargs)
        if spec.rows is None:
            raise LoRAError(
                f"{site.path}: {cls.__name__}.{name} is a method, and its ExpertsSpec has no `rows` that says which "
                "token and which expert each of its rows is"
            )
        row_map: object = spec.rows(self, name, x, *others, **named)
        return _add_product_delta(self, site, scope, spec, name, x, y, row_map)

    return product


def has_grouped_products(layer: nnx.Module) -> bool:
    """Return True if a class declares its grouped products itself; see `describe_grouped`."""
    grouped = own_attribute(layer, "grouped_products")
    if not is_mapping(grouped) or not grouped:
        return False
    attributes: dict[Any, Any] = {**vars(layer)}
    return all(
        isinstance(attributes.get(param), nnx.Variable) and attributes[param].get_value().ndim >= 3
        for param in grouped.values()
    )


def describe_grouped(layer: nnx.Module) -> ExpertsSpec:
    """Return the spec of a class that declares its grouped products itself, like the reference decoder.

    The class has these attributes; all but the first are optional:

        grouped_products  method -> parameter [E, K, N]. The methods take (x [M, K], rows) with `rows.token` and
                          `rows.expert` [M], and `rows.length` (tokens of a sequence, None for packed rows). In a
                          shard of a mesh, `rows.origin` is the index in the batch of each of the shard's tokens.
        gated             True if "gate_up" holds both gate and up.
        interleaved       True if the columns of gate and up alternate.
        output_blocks     `LinearSpec.out_blocks` of "gate_up".
        gathers           methods that take all tokens [T, K] and gather `rows.token` themselves.
        alternating       as in `ExpertsSpec`.
        quantized         True if the parameters are quantized; `dequantized(param)` returns [E, K, N] in float32, and
                          the methods multiply with these values without rounding their input to fewer bits.
    """
    grouped: Mapping[str, str] = own_attribute(layer, "grouped_products")
    gated, interleaved = own_attribute(layer, "gated", True), own_attribute(layer, "interleaved", False)
    products: dict[str, LinearSpec] = {}
    experts = 0
    for name, param in grouped.items():
        experts, k, n = vars(layer)[param].get_value().shape[-3:]
        alternate = [*range(0, n, 2), *range(1, n, 2)] if name == "gate_up" and gated and interleaved else None
        blocks = own_attribute(layer, "output_blocks") if name == "gate_up" else None
        scaled = functools.partial(_dequantized, param=param) if own_attribute(layer, "quantized", False) else None
        products[name] = LinearSpec(k, n, param=param, out_index=alternate, out_blocks=blocks, dequantize=scaled)
    names = {} if gated else {"gate_up": EXPERT_NAMES["up"]}
    gathers, alternating = own_attribute(layer, "gathers", ()), own_attribute(layer, "alternating", ())
    return ExpertsSpec(experts, products, rows=_grouped_rows, names=names, gathers=gathers, alternating=alternating)


def _dequantized(layer: Any, param: str) -> Array:
    return layer.dequantized(param)


def _grouped_rows(layer: nnx.Module, name: str, x: Array, rows: Any) -> RowMap:
    origin = getattr(rows, "origin", None)
    if origin is None:
        return RowMap(rows.token, of="tokens", length=rows.length, expert=rows.expert)
    return RowMap(origin[rows.token], of="tokens", length=rows.length, expert=rows.expert, taken=rows.token)


def expert_delta(
    layer: nnx.Module, product: str, x: Float[Array, "*rows K"], y: Float[Array, "*lead N"], row_map: RowMap
) -> Float[Array, "*lead N"]:
    """Return `y` plus the LoRA of every row, for a class whose grouped product is not a method.

    Call it right after the product, before the activation or the weighted sum over experts. It returns `y` if the layer
    is not wrapped, or if its product is left out.

    Args:
      layer: the experts' layer (`self`), whose class is registered with an `ExpertsSpec`.
      product: the name of the product in that spec.
      x: the input rows; for a product in `gathers`, the tokens from which they are gathered.
      y: the output of the product.
      row_map: the token and the expert of each row.

    Returns:
      [*lead, N] in y's dtype.

    Raises:
      LoRAError: called outside `jlora.use`, or the sizes of the arrays differ from the spec.
      LoRAUsageError: the row map lacks `expert`, or has another number of rows.

    Example:
      >>> gate_up = jax.lax.ragged_dot(x, self.w13[...], counts)
      >>> gate_up = jlora.expert_delta(self, "gate_up", x, gate_up, jlora.RowMap(token, of="tokens", expert=expert))
    """
    site: Site | None = vars(layer).get(f"{prefix_of(product)}_site")
    if site is None:
        return y
    scope = enter_site(site, layer)
    if scope is None:
        return y
    spec: ExpertsSpec = vars(layer)["jlora_spec"]
    return _add_product_delta(layer, site, scope, spec, product, x, y, row_map)


def _add_product_delta(
    layer: nnx.Module, site: Site, scope: Scope, experts: ExpertsSpec, name: str, x: Any, y: Any, row_map: object
) -> Float[Array, "*lead N"]:
    spec, gathers = experts.products[name], name in experts.gathers
    if not isinstance(row_map, RowMap) or row_map.expert is None:
        raise LoRAUsageError(f"{site.path}: rows of experts are said by a jlora.RowMap with `expert`, got {row_map!r}")
    of_in, of_out = shards_of(site)
    sizes = spec.in_features // of_in, spec.out_features // of_out
    for label, array, size in zip(("takes", "returned"), (x, y), sizes, strict=True):
        good = isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jnp.floating)
        if not good or array.shape[-1:] != (size,):
            found = f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
            raise LoRAError(f"{site.path}: its spec says that it {label} [..., {size}] floats, found {found}")
    if gathers:
        taken = row_map.source if row_map.taken is None else row_map.taken
        if row_map.taken is None and math.prod(x.shape[:-1]) != (counted := scope.num_indexed(site, y, row_map)):
            raise LoRAError(
                f"{site.path}: its ExpertsSpec says that it gathers its rows from all {counted} {row_map.of} of the "
                f"batch, and {list(x.shape)} went in"
            )
        return add_delta(layer, site, scope, y, x, spec, row_map, jnp.asarray(taken))
    if x.shape[:-1] != y.shape[:-1]:
        raise LoRAError(f"{site.path}: {list(x.shape)} went in and {list(y.shape)} came out; expected as many rows")
    return add_delta(layer, site, scope, y, x, spec, row_map)

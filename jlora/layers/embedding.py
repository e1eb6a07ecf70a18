"""LoRA on embeddings: the table lookup, and `attend`, the logits of a model with tied embeddings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from jlora.errors import LoRAError
from jlora.layers.linear import add_delta, first_input, parameters_of, slot_arrays
from jlora.layers.mesh import across_mesh, parts_of
from jlora.layers.scope import Scope, enter_site
from jlora.layers.sharded import Held, add_lookup
from jlora.layers.site import Site
from jlora.layers.specs import EmbedSpec
from jlora.pallas.api import expand
from jlora.pallas.plan import Plan


def _lookup(cls: type, name: str) -> Callable[..., Any]:
    own = getattr(cls, name)
    parameters = parameters_of(own)

    @functools.wraps(own)
    def lookup(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(self, *args, **kwargs)
        site: Site = vars(self)["jlora_site"]
        scope = enter_site(site, vars(self)["jlora_sites"])
        if scope is None:
            return y
        spec: EmbedSpec = vars(self)["jlora_spec"]
        tokens = jnp.asarray(first_input(parameters, args, kwargs)[0])
        features = spec.features // parts_of(site)[1]
        if not isinstance(y, jax.Array) or y.shape != (*tokens.shape, features):
            raise LoRAError(
                f"{site.path}: {cls.__name__}.{name} must return [..., {features}] for token ids "
                f"{list(tokens.shape)}, as its EmbedSpec says, and returned {getattr(y, 'shape', type(y).__name__)}"
            )
        return _add_lookup(self, site, scope, spec, y, tokens)

    return lookup


def _attend(cls: type, name: str) -> Callable[..., Any]:
    own = getattr(cls, name)
    parameters = parameters_of(own)

    @functools.wraps(own)
    def attend(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(self, *args, **kwargs)
        site: Site = vars(self)["jlora_attend_site"]
        scope = enter_site(site, vars(self)["jlora_sites"])
        if scope is None:
            return y
        spec: EmbedSpec = vars(self)["jlora_spec"]
        head = spec.head
        query = jnp.asarray(first_input(parameters, args, kwargs)[0])
        outputs = head.out_features // parts_of(site)[1]
        if not isinstance(y, jax.Array) or y.shape != (*query.shape[:-1], outputs):
            raise LoRAError(
                f"{site.path}: {cls.__name__}.{name} must return [..., {outputs}] for {list(query.shape)}, "
                f"as its EmbedSpec says, and returned {getattr(y, 'shape', type(y).__name__)}"
            )
        if spec.attend_scale != 1:
            query = query.astype(jnp.float32) * spec.attend_scale  # rounded once, where it becomes the slots' dtype
        return add_delta(self, site, scope, y, query, head)

    return attend


embed_methods: dict[str, Callable[[type, str], Callable[..., Any]]] = {"lookup": _lookup, "attend": _attend}


def _add_lookup(
    layer: nnx.Module,
    site: Site,
    scope: Scope,
    spec: EmbedSpec,
    base: Float[Array, "*lead N"],
    tokens: Int[Array, "*lead"],
) -> Float[Array, "*lead N"]:
    """base + scale * A[slot, :, token] @ B[slot]: PEFT's `lora_embedding_B @ lora_embedding_A[:, token]`."""
    if not base.size:
        return base
    plan = scope.plan(site, base)
    if plan is None:
        return base
    if site.spec.sharding is not None:
        with jax.named_scope("lora"):
            ids, lead = scope.runs(site, base), scope.lead(site, base)
            base = scope.checked(layer, site, base)
            return add_lookup(site, spec, lead, base, tokens, ids, Held(plan, *slot_arrays(layer, site)))

    def compute(base: Array, tokens: Array, ids: Array, plan: Plan, a: Array, b: Array, ranks: Array) -> Array:
        tokens = tokens.reshape(-1)
        tokens = jnp.where(tokens < 0, tokens + spec.vocab, tokens)  # as the table itself is indexed
        # Rows without an adapter read some slot's column here, and `expand` gives them no tile.
        h = a.at[ids.clip(0, site.spec.num_slots - 1), 0, :, tokens].get(mode="clip").astype(jnp.float32)  # [M, R]
        rows = base.reshape(-1, spec.features)
        out = expand(
            (h if spec.scale == 1 else h * spec.scale)[None],
            b,
            plan,
            slice_sizes=site.spec.out_sizes,
            base=rows,
            ranks=ranks,
            backend=site.backend,
        )
        if spec.rows < spec.vocab:
            out = jnp.where((tokens < spec.rows)[:, None], out, rows)
        return out.reshape(base.shape)

    with jax.named_scope("lora"):
        ids = scope.row_slots(site, base)
        base = scope.checked(layer, site, base)
        return across_mesh(compute, base, tokens, ids, plan, *slot_arrays(layer, site))

"""LoRA of embeddings: the table lookup, and `attend`, which computes the logits of a model with tied embeddings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jlora.errors import LoRAError
from jlora.layers.forward.delta import add_delta, add_lookup
from jlora.layers.forward.linear import added_bias, first_input, parameters_of
from jlora.layers.forward.mesh import shards_of
from jlora.layers.forward.scope import enter_site
from jlora.layers.site import Site
from jlora.layers.specs import EmbedSpec


def _lookup(cls: type, name: str) -> Callable[..., Any]:
    own = getattr(cls, name)
    parameters = parameters_of(own)

    @functools.wraps(own)
    def lookup(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(self, *args, **kwargs)
        site: Site = vars(self)["jlora_site"]
        scope = enter_site(site, self)
        if scope is None:
            return y
        spec: EmbedSpec = vars(self)["jlora_spec"]
        tokens = jnp.asarray(first_input(parameters, args, kwargs)[0])
        _check_output(site, f"{cls.__name__}.{name}", y, tokens.shape, spec.features, f"token ids {list(tokens.shape)}")
        return add_lookup(self, site, scope, y, tokens, spec)

    return lookup


def _attend(cls: type, name: str) -> Callable[..., Any]:
    own = getattr(cls, name)
    parameters = parameters_of(own)

    @functools.wraps(own)
    def attend(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        y = own(self, *args, **kwargs)
        site: Site = vars(self)["jlora_attend_site"]
        scope = enter_site(site, self)
        if scope is None:
            return y
        spec: EmbedSpec = vars(self)["jlora_spec"]
        head = spec.head
        query = jnp.asarray(first_input(parameters, args, kwargs)[0])
        _check_output(site, f"{cls.__name__}.{name}", y, query.shape[:-1], head.out_features, str(list(query.shape)))
        if spec.attend_scale != 1:
            query = query.astype(jnp.float32) * spec.attend_scale  # rounded once, in the cast to the slots' dtype
        return add_delta(self, site, scope, y, query, head, bias=added_bias(self, site, head))

    return attend


def _check_output(site: Site, method: str, y: object, lead: tuple[int, ...], features: int, given: str) -> None:
    """Raise `LoRAError` unless the output of a method has the shape [*lead, features of a shard]."""
    own = features // shards_of(site)[1]
    if not isinstance(y, jax.Array) or y.shape != (*lead, own):
        raise LoRAError(
            f"{site.path}: {method} must return [..., {own}] for {given}, as its EmbedSpec says, and returned "
            f"{getattr(y, 'shape', type(y).__name__)}"
        )


embed_methods: dict[str, Callable[[type, str], Callable[..., Any]]] = {"lookup": _lookup, "attend": _attend}

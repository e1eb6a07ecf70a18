"""Checks that base weights stored with an adapter equal the weights of the model."""

from collections.abc import Mapping

import numpy as np

from jlora.adapters import BaseShape
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel, checkpoint_weight
from jlora.manager.names import SiteIndex


def misfits(weights: Mapping[str, BaseShape], index: SiteIndex) -> list[str]:
    """Return one message for each base weight whose name or shape does not match the model."""
    problems: list[str] = []
    for name, weight in weights.items():
        if index.skips(name):
            continue
        found = _site(name, index)
        if isinstance(found, str):
            problems.append(f"{name}.base_layer.weight: {found}")
            continue
        site, _, first, count = found
        outputs, inputs = sum(site.spec.out_sizes[first : first + count]), site.spec.in_features
        own = (inputs, outputs) if site.kind == "embedding" else (outputs, inputs)
        if own != tuple(weight.shape):
            problems.append(f"{name}.base_layer.weight: shape {tuple(weight.shape)}, and the model's own has {own}")
    return problems


def _site(name: str, index: SiteIndex) -> tuple[Site, int, int, int] | str:
    """Return the place of the module `name`, or the reason why there is none."""
    found: tuple[Site, int, int, int] | str = ""
    for kind in ("embedding", "linear"):
        found = index.find(kind, name)
        if not isinstance(found, str):
            return found
    return f"no wrapped module can be compared with it ({found})"


def difference(name: str, weight: np.ndarray, wrapped: WrappedModel, index: SiteIndex) -> str | None:
    """Return how a stored base weight differs from the weight of the model, or None if they are equal.

    PEFT can save the full embedding beside its LoRA factors. Values are compared in the dtype of the model.
    """
    found = _site(name, index)
    if isinstance(found, str):
        return found
    site, layer, first, count = found
    if (base := checkpoint_weight(wrapped, site, layer)) is None:
        return "the model's own weight is quantized, so the two cannot be compared; save the adapter without it"
    own, known = base
    if site.kind == "linear":
        start = sum(site.spec.out_sizes[:first])
        rows = slice(start, start + sum(site.spec.out_sizes[first : first + count]))
        own, known = own[rows], known[rows]
    if own.shape != weight.shape:
        return f"shape {weight.shape}, and the model's own weight has {own.shape}"
    with np.errstate(over="ignore", invalid="ignore"):
        stored = weight.astype(own.dtype)
    if not ((own == stored) | ~known).all():
        return "its values differ from the model's own weight: it was trained on another base model"
    return None

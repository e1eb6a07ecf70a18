"""Variants that jlora does not serve, registered for a test: PEFT's `lora_bias`, and IA3 of outputs beside LoRA."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

import jlora
from jlora.adapters.variants import EXTRAS, MAGNITUDE, VARIANTS, Extra
from jlora.layers.variants import FINISHERS
from jlora.layers.variants.dora import SCALE_COLUMNS
from jlora.layers.variants.finisher import Finisher


@dataclass(frozen=True, kw_only=True, eq=False)
class TrialLoRA(jlora.ModuleLoRA):
    """LoRA factors with the array [N] of a trial."""

    added: np.ndarray | None = None
    factor: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class TrialConfig(jlora.LoRAConfig):
    lora_bias: bool = False
    ia3: bool = False


def _add(y, x, base, bias, extras, slots):
    return y + extras[0].at[slots].get(mode="fill", fill_value=-0.0)


def _multiply(y, x, base, bias, extras, slots):
    return y * extras[0].at[slots].get(mode="fill", fill_value=1)


def _extra(name: str, fill: float, option: str) -> Extra:
    return Extra(name=name, key=name, fill=fill, field=f"use_{option}", option=option, title=option)


BIAS = Finisher(
    (_extra("added", 0.0, "lora_bias"),),
    frozenset({"bias"}),
    _add,
    lambda weight, bias, extras: (weight, bias + extras[0]),
)
IA3 = Finisher(
    (_extra("factor", 1.0, "ia3"),),
    frozenset({"sum"}),
    _multiply,
    lambda weight, bias, extras: (weight * extras[0], bias * extras[0]),
)
OPTIONS = {finisher: finisher.extras[0].option for finisher in (SCALE_COLUMNS, BIAS, IA3)}


@contextmanager
def registered(*finishers: Finisher) -> Iterator[None]:
    """Register finishers with their extras. One with the extras of a registered finisher takes its place."""
    kept = [*FINISHERS], [*EXTRAS], dict(VARIANTS)
    try:
        for finisher in finishers:
            FINISHERS[:] = [each for each in FINISHERS if each.extras != finisher.extras] + [finisher]
            EXTRAS.extend(extra for extra in finisher.extras if extra not in EXTRAS)
            VARIANTS.update({(extra.field,): ("linear",) for extra in finisher.extras if extra != MAGNITUDE})
        yield
    finally:
        FINISHERS[:], EXTRAS[:] = kept[:2]
        VARIANTS.clear()
        VARIANTS.update(kept[2])


def with_values(adapter: jlora.Adapter, finisher: Finisher) -> jlora.Adapter:
    """Return an adapter of plain LoRA with random values of one trial."""
    rng = np.random.default_rng(5)
    modules = {}
    for name, module in adapter.modules.items():
        values = {finisher.extras[0].name: rng.uniform(0.5, 2, len(module.b)).astype(np.float32)}
        fields = {field: getattr(module, field) for field in ("a", "b", "kind", "alpha", "scaling")}
        modules[name] = TrialLoRA(**fields, **values)
    return replace(adapter, modules=modules)


def broken(finisher: Finisher) -> Finisher:
    """Return a finisher whose function alone is multiplied by 17 in the rows of adapters."""

    def apply(y, x, base, bias, extras, slots):
        finished = finisher.apply(y, x, base, bias, extras, slots)
        return jnp.where((slots < len(extras[0]))[:, None], 17 * finished, finished)

    return replace(finisher, apply=apply)

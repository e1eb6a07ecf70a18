"""Variants that jlora does not serve, registered for a test: PEFT's `lora_bias`, and IA3 of outputs beside LoRA."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

import jlora
from jlora.adapters.variants import ACTIVATED, COMBINATIONS, VARIANTS, Variant
from jlora.layers.variants import FINISHERS, register
from jlora.layers.variants.finisher import Finisher


def _add(y, x, base, bias, vectors, slots):
    return y + vectors.at[slots].get(mode="fill", fill_value=-0.0)


def _multiply(y, x, base, bias, vectors, slots):
    return y * vectors.at[slots].get(mode="fill", fill_value=1)


BIAS = Finisher(
    Variant(name="lora_bias", title="LoRA bias", field="lora_bias", tensor="lora_B.bias", fill=-0.0, scaled=True),
    frozenset({"bias"}),
    _add,
    lambda weight, bias, vector: (weight, bias + vector),
)
IA3 = Finisher(
    Variant(name="ia3", title="IA3", field="use_ia3", tensor="ia3_l", fill=1.0),
    frozenset({"sum"}),
    _multiply,
    lambda weight, bias, vector: (weight * vector, bias * vector),
)
COMBINED = {  # PEFT refuses `lora_bias` with DoRA, and adds it to the delta of aLoRA too
    BIAS: {("lora_bias",): ("linear",), (ACTIVATED, "lora_bias"): ("linear",)},
    IA3: {("use_ia3",): ("linear",)},
}


@contextmanager
def registered(*finishers: Finisher) -> Iterator[None]:
    """Register finishers. One of a registered variant takes the place of its finisher."""
    kept = [*FINISHERS], dict(VARIANTS), dict(COMBINATIONS)
    try:
        for finisher in finishers:
            if finisher.variant.name in VARIANTS:
                FINISHERS[:] = [finisher if each.variant == finisher.variant else each for each in FINISHERS]
            else:
                register(finisher, next(own for each, own in COMBINED.items() if each.variant == finisher.variant))
        yield
    finally:
        FINISHERS[:] = kept[0]
        for table, before in ((VARIANTS, kept[1]), (COMBINATIONS, kept[2])):
            table.clear()
            table.update(before)


def with_values(adapter: jlora.Adapter, finisher: Finisher) -> jlora.Adapter:
    """Return an adapter of plain LoRA with random vectors of one trial."""
    rng = np.random.default_rng(5)
    modules = {
        name: replace(module, vectors={finisher.variant.name: rng.uniform(0.5, 2, len(module.b)).astype(np.float32)})
        for name, module in adapter.modules.items()
    }
    return replace(adapter, modules=modules)


def broken(finisher: Finisher) -> Finisher:
    """Return a finisher whose function alone is multiplied by 17 in the rows of adapters."""

    def apply(y, x, base, bias, vectors, slots):
        finished = finisher.apply(y, x, base, bias, vectors, slots)
        return jnp.where((slots < len(vectors))[:, None], 17 * finished, finished)

    return replace(finisher, apply=apply)

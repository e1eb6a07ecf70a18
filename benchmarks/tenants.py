"""Thousands of adapters of the demo model that all differ in their bytes, with known answers.

Each is one of the demo's four adapters, with A of some modules multiplied by a power of two and B divided by it. It
computes the same function to the last bit, from other weights.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

import jlora
from jlora.cli.demo import DEMO
from jlora.models import Decoder, generate

FUNCTIONS = tuple(sorted(path.name for path in (DEMO / "adapters").iterdir()))
RANK = 32
_DIGITS = 6  # digits of a number in base 3, one for each module, so 729 adapters of each function
_LEAST = -126  # exponent of the smallest normal number in bfloat16 and float32


@dataclass(frozen=True)
class Tenant:
    """An adapter: its name, its folder, and the demo's adapter with the same function."""

    name: str
    folder: Path
    function: str


def write_tenants(folder: Path, count: int) -> list[Tenant]:
    """Write the first `count` adapters below `folder`, except those that exist."""
    if count > len(FUNCTIONS) * (3**_DIGITS - 1):
        raise SystemExit(f"there are {len(FUNCTIONS) * (3**_DIGITS - 1)} different adapters at most, not {count}")
    tenants = [Tenant(f"t{i:04d}", folder / f"t{i:04d}", FUNCTIONS[i % len(FUNCTIONS)]) for i in range(count)]
    for function in FUNCTIONS:
        own = DEMO / "adapters" / function
        tensors = safetensors.numpy.load_file(own / "adapter_model.safetensors")
        for i, tenant in enumerate(tenants):
            if tenant.function == function and not (tenant.folder / "adapter_model.safetensors").exists():
                tenant.folder.mkdir(parents=True, exist_ok=True)
                shutil.copy(own / "adapter_config.json", tenant.folder)
                part = tenant.folder / "part"
                safetensors.numpy.save_file(_scaled(tensors, 1 + i // len(FUNCTIONS)), part)
                part.rename(tenant.folder / "adapter_model.safetensors")
    return tenants


def _scaled(tensors: dict[str, np.ndarray], number: int) -> dict[str, np.ndarray]:
    """Return the `number`-th equivalent of an adapter; number 0 is the adapter itself."""
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    powers = {module: number // 3**i % 3 for i, module in enumerate(modules[:_DIGITS])}
    found: dict[str, np.ndarray] = {}
    for name, values in tensors.items():
        module, _, half = name.rpartition(".lora_")
        shift = powers.get(module, 0) * (1 if half.startswith("A") else -1)
        scaled = np.ldexp(values.astype(np.float32), shift)
        nonzero = np.abs(scaled[scaled != 0])
        assert nonzero.min() >= 2.0**_LEAST, name  # else the smallest value would have been rounded
        found[name] = scaled.astype(ml_dtypes.bfloat16)
    return found


def right_answers(
    model: Decoder, manager: jlora.LoRAManager, prompts: Sequence[Sequence[int]], tokens: int
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Return (function, number of the prompt) -> the greedy tokens of the demo's own adapter for that prompt alone.

    `manager` is the model's, and has no adapters before and after the call.
    """
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for function in FUNCTIONS:
        manager.add_adapter(jlora.LoRARequest(function, str(DEMO / "adapters" / function)))
        for i, prompt in enumerate(prompts):
            with manager.prepare([function]) as batch:
                found[function, i] = tuple(generate(model, [prompt], batch=batch, max_new_tokens=tokens)[0])
        manager.remove_adapter(function)
    return found


def demo_prompts(count: int) -> list[str]:
    """Return the first distinct prompts of the demo."""
    shipped = json.loads((DEMO / "prompts.json").read_text())
    return list(dict.fromkeys(one["prompt"] for one in shipped))[:count]

"""`jlora inspect`: what is in an adapter, and whether it fits a model. No model is read for it, and no slot is made."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jlora.adapters import Adapter
from jlora.adapters.adapter import ModuleLoRA
from jlora.cli.generate import check_rank
from jlora.cli.text import shown, size
from jlora.errors import AdapterMismatchError

if TYPE_CHECKING:
    from jlora.models import Decoder

_SHOWN_GROUPS = 64
_SHOWN_PROBLEMS = 8
_LARGEST = float(np.finfo(np.float32).max)


def run_inspect(path: str, model: str | None, skip: Sequence[str] = ()) -> int:
    """Prints modules, ranks and bytes of an adapter; with a model, that it fits and what a slot costs.

    Args:
      path, model: the adapter's folder, and the model's.
      skip: regular expressions; the modules in whose names one is found are passed over, counted and shown.

    Raises:
      AdapterMismatchError: the adapter does not fit the model, or brings weights for skipped modules only; the message
        says why.
      LoRAUsageError: a `skip` that is no regular expression.
    """
    patterns = _patterns(skip)
    adapter = Adapter.from_pretrained(path)
    passed = [name for name in adapter.modules if any(pattern.search(name) for pattern in patterns)]
    print(f"adapter      {shown(adapter.name)}")
    print(f"base model   {shown(adapter.base_model_name or '(not said)')}")
    print(f"modules      {len(adapter.modules)}, rank up to {adapter.rank}, {size(adapter.nbytes)}")
    _print_modules(adapter)
    for line in adapter.unchecked:
        print(f"not checked  {shown(line)}")
    if skip:
        print(f"skipped      {len(passed)} modules")
        for name in passed[:_SHOWN_PROBLEMS]:
            print(f"  {shown(name)}")
        if len(passed) > _SHOWN_PROBLEMS:
            print(f"  ... and {len(passed) - _SHOWN_PROBLEMS} more")
    if len(passed) == len(adapter.modules):
        raise AdapterMismatchError(
            f"adapter {adapter.name!r} brings weights for skipped modules only: nothing of it would be served"
        )
    if model is not None:
        modules = {name: module for name, module in adapter.modules.items() if name not in passed}
        base = {n: w for n, w in adapter.base_weights.items() if not any(pattern.search(n) for pattern in patterns)}
        slot_bytes = fit(replace(adapter, modules=modules, base_weights=base), Path(model))
        print(f"fits         {shown(model)}: yes; {size(slot_bytes)} per slot at rank {adapter.rank}, float32")
    return 0


def _patterns(skip: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    if not skip:
        return ()
    from jlora.layers.wrap import skip_patterns  # imports JAX, which takes its time

    return skip_patterns(skip)


def _print_modules(adapter: Adapter) -> None:
    groups: dict[tuple[str, str, int, float, str], int] = {}
    for name, module in adapter.modules.items():
        key = (name.rpartition(".")[2], module.kind, module.rank, module.scaling, module.a.dtype.name)
        groups[key] = groups.get(key, 0) + 1
    for (name, kind, rank, scaling, dtype), count in list(groups.items())[:_SHOWN_GROUPS]:
        print(f"  {count:4d} x {shown(name):<20} {kind:<9} rank {rank:<4} scaling {scaling:<8g} {dtype}")
    if len(groups) > _SHOWN_GROUPS:
        print(f"  ... and {len(groups) - _SHOWN_GROUPS} more kinds")


class Target(NamedTuple):
    """What a module of the model takes: A [r, inputs] and B [outputs, r]; an embedding's inputs are its rows.

    `fills` are the places it is written to: those of a merged projection are its parts.
    """

    kind: str
    inputs: int
    outputs: int
    fills: tuple[str, ...]


def fit(adapter: Adapter, folder: Path) -> int:
    """Checks an adapter against the shapes of a checkpoint's model. Returns the bytes of one float32 slot of its rank.

    Raises:
      AdapterMismatchError: a module that the model lacks, or of another size; base weights that differ from the
        model's; a rank above what the command line makes slots for.
      LoRAError: the folder holds no model that is served.
    """
    from jlora.models.checkpoint import read_skeleton

    check_rank(adapter)
    targets, slot_values = _targets(read_skeleton(folder))
    taken: dict[tuple[str, str], str] = {}
    problems = [
        f"{name}: {why}" for name, module in adapter.modules.items() if (why := _misfit(targets, taken, name, module))
    ]
    problems += [f"{name}: {why}" for name in adapter.base_weights if (why := _base_differs(adapter, name, folder))]
    if problems:
        more = [f"... and {len(problems) - _SHOWN_PROBLEMS} more"] if len(problems) > _SHOWN_PROBLEMS else []
        raise AdapterMismatchError(
            f"adapter {adapter.name!r} does not fit {folder}: " + "; ".join(problems[:_SHOWN_PROBLEMS] + more)
        )
    return 4 * adapter.rank * slot_values


def _targets(model: "Decoder") -> tuple[dict[tuple[str, str], Target], int]:
    """(kind, checkpoint name) -> what it takes, and the values that one slot holds for each unit of its rank."""
    from flax import nnx

    targets: dict[tuple[str, str], Target] = {}
    slot_values = 0

    def add(name: str, target: Target) -> None:
        targets[target.kind, name] = target

    for path, layer in nnx.iter_modules(model):
        name = ".".join(map(str, path))
        parent, _, last = name.rpartition(".")
        if isinstance(layer, nnx.Linear):
            sizes: tuple[int, ...] = getattr(layer, "output_sizes", (layer.out_features,))
            slot_values += len(sizes) * layer.in_features + layer.out_features
            parts = tuple(f"{parent}.{part}" for part in model.packed_modules.get(last, ()))
            add(name, Target("linear", layer.in_features, layer.out_features, parts or (name,)))
            for part, outputs in zip(parts, sizes, strict=False):
                add(part, Target("linear", layer.in_features, outputs, (part,)))
        elif isinstance(layer, nnx.Embed):
            rows, features = layer.num_embeddings, layer.features
            slot_values += rows + features
            add(name, Target("embedding", rows, features, (name,)))
            if model.config.tie_word_embeddings:
                slot_values += rows + features
                for alias in ("lm_head", name, f"{name}.attend"):
                    add(alias, Target("linear", features, rows, ("lm_head",)))
    return targets, slot_values


def _misfit(
    targets: dict[tuple[str, str], Target], taken: dict[tuple[str, str], str], name: str, module: ModuleLoRA
) -> str | None:
    target = targets.get((module.kind, name))
    if target is None:
        other = "embedding" if module.kind == "linear" else "linear"
        if (other, name) in targets:
            return f"takes {other} weights, and these are {module.kind} weights"
        return "the model has no such module"
    expected = ((module.rank, target.inputs), (target.outputs, module.rank))
    if (module.a.shape, module.b.shape) != expected:
        return f"A and B have shapes {module.a.shape} and {module.b.shape}, expected {expected[0]} and {expected[1]}"
    if not abs(module.scaling) <= _LARGEST:  # NaN is not
        return f"its scaling must be a finite float32, found {module.scaling}"
    for place in target.fills:
        if (other := taken.setdefault((target.kind, place), name)) != name:
            return f"fills {place}, which {other} fills too"
    return None


def _base_differs(adapter: Adapter, name: str, folder: Path) -> str | None:
    """PEFT may save the whole embedding beside its LoRA: it must be the one that the model has."""
    from jlora.models.checkpoint import read_weight

    own, stored = read_weight(folder, name), adapter.base_weights[name]
    if own is None:
        return "holds base weights of a module that the model lacks"
    if own.shape != stored.shape:
        return f"its base weights have shape {stored.shape}, and the model's own have {own.shape}"
    with np.errstate(over="ignore", invalid="ignore"):
        same = np.array_equal(own.astype(np.float32), stored.astype(np.float32))
    return None if same else "its base weights differ from the model's own: it was trained on another base model"

"""`jlora inspect`: print an adapter's modules and check them against a model, without loading it or making slots."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from jlora import Adapter, LoRAConfig, LoRARequest, Survey
from jlora.cli.generate import MAX_RANK, check_rank
from jlora.cli.text import patterns, size
from jlora.errors import AdapterMismatchError, LoRAError, LoRAUsageError, printable
from jlora.models import read_skeleton, read_weight

_SHOWN_GROUPS = 64
_SHOWN_PROBLEMS = 8
_SHOWN_TOKENS = 32
# Names of embeddings in transformers. Their weights have the shape of a linear layer's.
_TABLES = ("embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "tok_embeddings")
_LARGEST = float(np.finfo(np.float32).max)


def run_inspect(path: str, model: str | None, skip: Sequence[str] = (), revision: str | None = None) -> int:
    """Print the modules, ranks and bytes of an adapter. With a model, check the fit and print the bytes of a slot.

    Several problems are printed before the error is raised, one a line.

    Args:
      path: Folder or repo id of the adapter.
      model: Folder or repo id of the model, or None.
      skip: Regular expressions. Modules with a match in their names are skipped, counted and shown.
      revision: Branch, tag or commit of the model's repo.

    Raises:
      AdapterMismatchError: The adapter does not fit the model or has weights of skipped modules only. The message gives
        the reason.
      LoRAUsageError: A `skip` is not a regular expression, or a revision is given without a model.
    """
    if revision is not None and model is None:
        raise LoRAUsageError("--revision is of the model's repo; give the repo by --model")
    skipped = patterns("--skip", skip)
    try:
        return _inspect(path, model, skip, skipped, revision)
    except LoRAError as error:
        for problem in error.problems if len(error.problems) > 1 else ():
            print(f"problem      {printable(problem)}")
        raise


def _inspect(
    path: str, model: str | None, skip: Sequence[str], skipped: Sequence[re.Pattern[str]], revision: str | None
) -> int:
    unread: list[Adapter] = []
    try:
        adapter = Adapter.from_pretrained(path, check=unread.append)
    except LoRAError as error:
        if model is not None and unread:  # its other modules may not fit the model either
            try:
                _survey(unread[0], model, revision, skip).check(LoRARequest(unread[0].name, path))
            except LoRAError as other:
                found = [message for each in (error, other) for message in each.problems or (str(each),)]
                error.problems = tuple(dict.fromkeys(found))
        raise
    passed = [name for name in adapter.modules if any(pattern.search(name) for pattern in skipped)]
    print(f"adapter      {printable(adapter.name)}")
    print(f"base model   {printable(adapter.base_model_name or '(not said)')}")
    print(f"modules      {len(adapter.modules)}, rank up to {adapter.rank}, {size(adapter.nbytes)}")
    _print_modules(adapter)
    _print_int8(adapter)
    for name, head in adapter.heads.items():
        if name.rpartition(".")[2] in _TABLES:
            print(f"saved table  {printable(name)}: {head.outputs} rows; a fully trained embedding is not served")
            continue
        bias = "with a bias" if head.biased else "without bias"
        print(
            f"saved head   {printable(name)}: {head.outputs} outputs, {bias}, {head.weight.dtype.name}; served with "
            f"LoRAConfig(saved_heads={{{name!r}: {head.outputs}}}) if the model's {printable(name)} is a linear layer"
        )
    if adapter.variants:
        print(f"variants     {', '.join(adapter.variants)}; served with LoRAConfig(variants={list(adapter.variants)})")
    if tokens := adapter.invocation_tokens:
        shown = " ".join(map(str, tokens[:_SHOWN_TOKENS])) + (" ..." if len(tokens) > _SHOWN_TOKENS else "")
        print(f"aLoRA        active from tokens {shown} on; served with LoRAConfig(activated=True)")
    for line in adapter.unchecked:
        print(f"not checked  {printable(line)}")
    if skip:
        print(f"skipped      {len(passed)} modules")
        for name in passed[:_SHOWN_PROBLEMS]:
            print(f"  {printable(name)}")
        if len(passed) > _SHOWN_PROBLEMS:
            print(f"  ... and {len(passed) - _SHOWN_PROBLEMS} more")
    if len(passed) == len(adapter.modules) and not adapter.heads:
        raise AdapterMismatchError(
            f"adapter {adapter.name!r} brings weights for skipped modules only: nothing of it would be served"
        )
    warnings: Sequence[str] = adapter.warnings()
    if model is not None:
        modules = {name: module for name, module in adapter.modules.items() if name not in passed}
        base = {n: w for n, w in adapter.base_weights.items() if not any(pattern.search(n) for pattern in skipped)}
        slots, warnings = fit(replace(adapter, modules=modules, base_weights=base), model, revision)
        kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in slots.items() if nbytes)
        print(
            f"fits         {printable(model)}: yes; {size(slots['dense'] + slots['experts'])} per slot at rank "
            f"{adapter.rank}, float32 ({kinds})"
        )
    for warning in warnings:
        print(f"warning      {printable(warning)}")
    return 0


def _print_modules(adapter: Adapter) -> None:
    groups: dict[tuple[str, str, int, float, str], int] = {}
    for name, module in adapter.modules.items():
        key = (name.rpartition(".")[2], module.kind, module.rank, module.scaling, module.a.dtype.name)
        groups[key] = groups.get(key, 0) + 1
    for (name, kind, rank, scaling, dtype), count in list(groups.items())[:_SHOWN_GROUPS]:
        print(f"  {count:4d} x {printable(name):<20} {kind:<9} rank {rank:<4} scaling {scaling:<8g} {dtype}")
    if len(groups) > _SHOWN_GROUPS:
        print(f"  ... and {len(groups) - _SHOWN_GROUPS} more kinds")


def _print_int8(adapter: Adapter) -> None:
    errors = adapter.int8_errors() if adapter.rank <= MAX_RANK else {}
    if errors:
        print("int8         relative error of each delta in slots of int8 (Frobenius norm), largest first:")
    for name, error in list(errors.items())[:_SHOWN_PROBLEMS]:
        print(f"  {100 * error:6.2f}%  {printable(name)}")
    if len(errors) > _SHOWN_PROBLEMS:
        print(f"  ... and {len(errors) - _SHOWN_PROBLEMS} more, least {100 * min(errors.values()):.2f}%")


def fit(adapter: Adapter, model: str | Path, revision: str | None = None) -> tuple[dict[str, int], tuple[str, ...]]:
    """Check an adapter against the shapes of a checkpoint's model, as the manager does.

    The weights of a repo id are downloaded only if the adapter brings base weights to compare them with.

    Args:
      adapter: The adapter.
      model: Folder or repo id of the model.
      revision: Branch, tag or commit of the model's repo.

    Returns:
      Kind of layers -> bytes of one float32 slot of the adapter's rank. The kinds are "dense", "experts", and "experts
        that share factors" for a slot of `expert_slots["shared"]`.
      The warnings of `Survey.check`.

    Raises:
      AdapterMismatchError: The model lacks a module or has it in another size, base weights differ from the model's, or
        the rank exceeds `MAX_RANK`.
      LoRAError: The folder has no served model.
    """
    check_rank(adapter)
    survey = _survey(adapter, model, revision)
    problems = [
        f"{name}: its scaling must be a finite float32, found {module.scaling}"
        for name, module in adapter.modules.items()
        if not abs(module.scaling) <= _LARGEST  # also false for NaN
    ]
    try:
        warnings = survey.check(adapter, base_weight=lambda name: read_weight(model, name, revision))
    except LoRAError as error:
        error.problems = (*(error.problems or (str(error),)), *problems)
        raise
    if problems:
        error = AdapterMismatchError(f"adapter {adapter.name!r} does not fit {model}: {problems[0]}")
        error.problems = tuple(problems)
        raise error
    sizes = {"dense": 0, "experts": 0, "experts that share factors": 0}
    for layer in survey.layers():
        sizes["experts" if layer.kind == "experts" else "dense"] += layer.slot_bytes
        sizes["experts that share factors"] += layer.shared_slot_bytes
    return sizes, warnings


def _survey(adapter: Adapter, model: str | Path, revision: str | None, skip: Sequence[str] = ()) -> Survey:
    """Return a survey of the model with the options that serve an adapter."""
    config = LoRAConfig(
        max_loras=2,
        expert_slots={"shared": 1},
        max_lora_rank=adapter.rank or 1,
        dtype=np.float32,
        variants=adapter.variants,
        activated=bool(adapter.invocation_tokens),
        saved_heads=adapter.saved_outputs,
    )
    skeleton = read_skeleton(model, revision)
    try:
        return Survey(skeleton, config, skip=skip)
    except LoRAUsageError:  # a saved head replaces no layer of this model, and `check` gives the reason
        return Survey(skeleton, replace(config, saved_heads=None), skip=skip)

"""Adapters trained with qwix's `LoraProvider`, which Tunix uses, as PEFT adapters and back.

qwix stores two parameters beside a weight `w`: `w_lora_a` [*in, rank] and `w_lora_b` [rank, *out], with the axes of the
weight in its order, and multiplies the delta by `alpha / rank` of its rule. PEFT stores A [rank, K] and B [N, rank].
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

import jlora

Names: TypeAlias = Mapping[str, str | tuple[str, ...]]
Factors: TypeAlias = dict[str, tuple[Float[Array, "r K"], Float[Array, "N r"]]]

_WHOLE_LAYER = ("kernel", "w", "weight")  # names of the weight of a layer with one weight
SUFFIXES = _A, _B = "_lora_a", "_lora_b"  # of the names of the two parameters


def factors(model: Any, names: Names | None = None) -> Factors:
    """Return the LoRA factors of a model or of its state, in PEFT's orientation.

    Args:
      model: An `nnx.Module` with LoRA parameters of qwix, its `nnx.state`, or nested mappings of its arrays.
      names: Regex -> replacement, from the dotted path of a layer in the model to the module name in the checkpoint.
        The first pattern that matches the whole path is used. A path that none matches stays as it is. A tuple of
        replacements splits a merged layer, whose weight has an axis of that size before its other out axes.

    Returns:
      Module name -> (A [r, K], B [N, r]), without the scaling. `jlora.Adapter.from_arrays` takes it, with qwix's alpha.

    Raises:
      LoRAUsageError: there are no LoRA parameters, two modules have one name, a merged layer has another number of
        parts than `names`, or a layer has a kernel for each entry of a batch axis, such as stacked experts.
    """
    found: Factors = {}
    for pair, modules in _named(model, names or {}):
        a, b = pair.a.reshape(-1, pair.rank).T, pair.b.reshape(pair.rank, -1).T
        size = b.shape[0] // len(modules)
        for i, module in enumerate(modules):
            found[module] = a, b[i * size : (i + 1) * size]
    return found


def tensors(model: Any, names: Names | None = None) -> dict[str, Float[Array, "..."]]:
    """Return `factors(model, names)` under PEFT's tensor names, as `LoRAManager.update_adapter` takes them."""
    pairs = factors(model, names).items()
    return {
        f"base_model.model.{name}.lora_{half}.weight": x for name, ab in pairs for half, x in zip("AB", ab, strict=True)
    }


def export(
    model: Any, folder: str | Path, *, alpha: float, names: Names | None = None, base_model_name: str | None = None
) -> None:
    """Write the LoRA parameters of a model or of its state as a PEFT adapter folder.

    Args:
      model: As in `factors`.
      folder: The folder, created if it is missing.
      alpha: Alpha of the qwix rule. The parameters do not contain it.
      names: As in `factors`.
      base_model_name: `base_model_name_or_path` of the adapter.

    Raises:
      LoRAUsageError: as in `factors`.
      LoRAError: `folder` is a file.
    """
    arrays = factors(model, names)
    jlora.Adapter.from_arrays(Path(folder).name, arrays, alpha=alpha, base_model_name=base_model_name).save_pretrained(
        folder
    )


def restore(
    model: nnx.Module, adapter: jlora.Adapter | str | Path, *, alpha: float, names: Names | None = None
) -> None:
    """Write a PEFT adapter into the LoRA parameters of a model, to continue its training with qwix.

    A rank below qwix's is padded with zeros, and B is multiplied by the ratio of the adapter's scaling and qwix's.
    Layers that the adapter lacks get a delta of zero. Parameters keep their dtypes and shardings.

    Args:
      model: The model after `qwix.apply_lora_to_model`.
      adapter: An adapter, or a path or repository that `jlora.Adapter.from_pretrained` reads.
      alpha: Alpha of the qwix rule.
      names: As in `factors`.

    Raises:
      LoRAUsageError: as in `factors`.
      AdapterMismatchError: the adapter has modules that the model lacks, experts, embeddings, DoRA, or a rank above
        qwix's; or a factor has another shape. The model is unchanged.
    """
    if not isinstance(adapter, jlora.Adapter):
        adapter = jlora.Adapter.from_pretrained(str(adapter))
    left, values = dict(adapter.modules), list[tuple[nnx.Variable[Array], np.ndarray]]()
    for pair, modules in _named(model, names or {}):
        a, b = np.zeros((pair.rank, pair.in_features), np.float32), np.zeros((pair.out_features, pair.rank), np.float32)
        size, rank, rows = len(b) // len(modules), 0, list[tuple[np.ndarray, slice]]()
        for i, module in enumerate(modules):
            lora = left.pop(module, None)
            if lora is None:
                continue
            _check(f"adapter {adapter.name!r}: {module}", lora, pair.in_features, size)
            # Parts of a merged layer have one A in qwix. A part with another A gets rows of its own.
            ranks = next(
                (ranks for other, ranks in rows if np.array_equal(other, lora.a)), slice(rank, rank + len(lora.a))
            )
            rank = max(rank, ranks.stop)
            if rank > pair.rank:
                raise jlora.AdapterMismatchError(
                    f"adapter {adapter.name!r}: {module} needs rank {rank} in {pair.path}, which has rank {pair.rank}"
                )
            rows.append((lora.a, ranks))
            a[ranks] = lora.a
            b[i * size : (i + 1) * size, ranks] = lora.b.astype(np.float32) * (lora.scaling * pair.rank / alpha)
        values += [(pair.variables[0], a.T), (pair.variables[1], b.T)]
    if left:
        raise jlora.AdapterMismatchError(
            f"adapter {adapter.name!r}: the model has no LoRA parameters for {sorted(left)}"
        )
    for variable, value in values:
        old = variable[...]
        variable[...] = jax.device_put(value.reshape(old.shape).astype(old.dtype), old.sharding)


@dataclass(frozen=True)
class _Pair:
    """The two LoRA parameters of one weight: a [*in, r], b [r, *out], as arrays and as variables."""

    path: str
    a: Array
    b: Array
    variables: tuple[Any, Any]

    @property
    def rank(self) -> int:
        return self.a.shape[-1]

    @property
    def in_features(self) -> int:
        return math.prod(self.a.shape[:-1])

    @property
    def out_features(self) -> int:
        return math.prod(self.b.shape[1:])


def _named(model: Any, names: Names) -> list[tuple[_Pair, tuple[str, ...]]]:
    """Return each pair with its module names. Raises `LoRAUsageError`, as in `factors`."""
    found = [(pair, _modules_of(pair, names)) for pair in _pairs(model)]
    if not found:
        raise jlora.LoRAUsageError(
            "the model has no LoRA parameters of qwix (*_lora_a, *_lora_b); apply qwix.apply_lora_to_model to it"
        )
    seen = set[str]()
    for pair, modules in found:
        for module in modules:
            if module in seen:
                raise jlora.LoRAUsageError(f"{pair.path}: another layer has the name {module!r} too; change `names`")
            seen.add(module)
    return found


def _pairs(model: Any) -> Iterator[_Pair]:
    """Yield the pairs of LoRA parameters in the order of the model's state."""
    state = cast(Any, nnx.state(model) if isinstance(model, nnx.Module) else model)
    leaves = cast(Any, jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_variable))
    found: dict[tuple[str, ...], Any] = {tuple(map(_key, path)): leaf for path, leaf in leaves}
    for (*parents, name), leaf in found.items():
        if not name.endswith(_A):
            continue
        weight = name.removesuffix(_A)
        path = ".".join([*parents, *([] if weight in _WHOLE_LAYER else [weight])])
        other = found.get((*parents, weight + _B))
        if other is None:
            raise jlora.LoRAUsageError(f"{path}: the model has {name} without {weight + _B}")
        a, b = _array(leaf), _array(other)
        if a.shape[-1] != b.shape[0] or _has_batch_axis(model, parents, weight):
            raise jlora.LoRAUsageError(
                f"{path}: LoRA parameters {a.shape} and {b.shape} with a kernel for each entry of a batch axis cannot "
                "be written as a PEFT adapter"
            )
        yield _Pair(path, a, b, (leaf, other))


def _has_batch_axis(model: Any, parents: list[str], weight: str) -> bool:
    """Return True if the equation that qwix keeps on the layer has an axis of A in its output."""
    if not isinstance(model, nnx.Module):
        return False
    layer: Any = model
    for part in parents:
        layer = layer[int(part)] if part.isdigit() else getattr(layer, part)
    equation = getattr(layer, weight + "_lora_einsum_str", None)
    if equation is None:
        return False
    inputs, out = equation.split("->")
    return bool(set(inputs.split(",")[1]) & set(out))


def _modules_of(pair: _Pair, names: Names) -> tuple[str, ...]:
    """Return the module names of a layer in the checkpoint, more than one for a merged layer."""
    for pattern, replacement in names.items():
        if match := re.fullmatch(pattern, pair.path):
            if isinstance(replacement, str):
                return (match.expand(replacement),)
            parts = len(replacement)
            if pair.b.ndim < 3 or pair.b.shape[1] != parts:
                raise jlora.LoRAUsageError(
                    f"{pair.path}: `names` has {parts} parts {replacement}, but the first out axis of "
                    f"{pair.b.shape[1:]} is not {parts}"
                )
            return tuple(match.expand(part) for part in replacement)
    return (pair.path,)


def _check(where: str, lora: Any, in_features: int, out_features: int) -> None:
    if not isinstance(lora, jlora.ModuleLoRA) or lora.kind != "linear" or lora.vectors:
        raise jlora.AdapterMismatchError(f"{where}: only plain LoRA of a linear layer can be restored")
    if lora.a.shape[1] != in_features or lora.b.shape[0] != out_features:
        raise jlora.AdapterMismatchError(
            f"{where}: A {lora.a.shape} and B {lora.b.shape} do not fit a layer of {in_features} -> {out_features} "
            "features"
        )


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def _array(leaf: Any) -> Array:
    return leaf[...] if _is_variable(leaf) else leaf


def _key(part: Any) -> str:
    """Return one key of a pytree path as text."""
    return str(next(getattr(part, name) for name in ("key", "name", "idx") if hasattr(part, name)))

"""Draw the factors of a new adapter."""

import math
from collections.abc import Collection, Iterator

import numpy as np

from jlora.adapters import Adapter
from jlora.config import checked_targets
from jlora.errors import LoRAUsageError, nearest
from jlora.fit.names import SiteIndex
from jlora.layers.site import Site
from jlora.layers.wrap.wrapped import WrappedModel

_STACKS = ("layers", "blocks", "h")  # keys of a path after which checkpoints have the number of a layer


def fresh_adapter(
    name: str,
    wrapped: WrappedModel,
    index: SiteIndex,
    *,
    rank: int,
    alpha: float,
    target_modules: Collection[str] | None,
    seed: int,
    zeros: bool = False,
) -> Adapter:
    """Return an adapter without effect, drawn as PEFT's `init_lora_weights=True` draws it.

    A of a linear layer is uniform in +-1 / sqrt(K), and B is zero. A of an embedding is zero, and B is normal. The
    values of a module depend on the seed and its name alone.

    Args:
      name: Name of the adapter.
      wrapped: The wrapped model.
      index: Its checkpoint names.
      rank: Rank of all modules.
      alpha: PEFT's `lora_alpha`.
      target_modules: As in `LoRAManager.new_adapter`.
      seed: Seed of the values.
      zeros: Draw nothing; all values are zeros.

    Raises:
      LoRAUsageError: An argument is of the wrong type or value, or a target matches no layer.
    """
    if not isinstance(name, str) or not name:
        raise LoRAUsageError(f"an adapter's name must be a non-empty string, got {name!r}")
    for option, value, least in (("rank", rank, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive integer" if least else "an integer from 0 on"
            raise LoRAUsageError(f"adapter {name!r}: {option} must be {kind}, got {value!r}")
    is_real = isinstance(alpha, int | float | np.integer | np.floating) and not isinstance(alpha, bool)
    if not is_real or not math.isfinite(alpha) or not alpha:
        raise LoRAUsageError(f"adapter {name!r}: alpha must be a finite number other than 0, got {alpha!r:.200}")
    target_modules = checked_targets(f"adapter {name!r}", target_modules)
    modules = dict(_targeted(name, wrapped, index, target_modules))
    arrays: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for module, (site, first, count) in modules.items():
        a = np.zeros((rank, site.spec.in_features), np.float32)
        b = np.zeros((sum(site.spec.out_sizes[first : first + count]), rank), np.float32)
        arrays[module] = a, b
        if zeros:
            continue
        rng = np.random.default_rng((seed, *module.encode()))
        if site.kind == "embedding":
            b[:] = rng.standard_normal(b.shape, np.float32)
        else:
            a[:] = (2 * rng.random(a.shape, np.float32) - 1) / math.sqrt(site.spec.in_features)
    embeddings = [module for module, (site, *_) in modules.items() if site.kind == "embedding"]
    return Adapter.from_arrays(name, arrays, alpha=alpha, embeddings=embeddings)


def _targeted(
    name: str, wrapped: WrappedModel, index: SiteIndex, targets: Collection[str] | None
) -> Iterator[tuple[str, tuple[Site, int, int]]]:
    """Yield (module, (site, first slice, number of slices)) of each targeted module."""
    missing = set(targets or ())
    tables = {table for site in wrapped.modules if site.kind == "embedding" for table in site.parts}
    filled: set[tuple[Site, int, int]] = set()
    for target in targets or ():  # complete names of the checkpoint, which a name map may change
        for kind in ("linear", "embedding"):
            if not isinstance(found := index.find(kind, target), str):
                site, row, first, count = found
                filled |= {(site, row, i) for i in range(first, first + count)}
                missing.discard(target)
                yield target, (site, first, count)
    for site in wrapped.modules:
        if site.kind == "head" or not site.spec.whole or site in wrapped.unserved.sites:
            continue
        # Parts before the whole. Of the names of a tied table's logits, PEFT knows that of the output layer.
        parts = sorted(site.parts.items(), key=lambda part: part[1][1])
        parts = [part for part in parts if site.kind != "linear" or part[0].removesuffix(".attend") not in tables]
        for part, (first, count) in parts:
            own = {each for each in targets or () if f".{part}".endswith(f".{each}")}
            if not (own or (targets is None and site.kind == "linear")):
                continue
            missing -= own
            for row in range(math.prod(site.spec.entries)):
                slices = {(site, row, i) for i in range(first, first + count)}
                if not slices & filled:
                    filled |= slices
                    yield _with_numbers(part, site, row), (site, first, count)
    if missing:
        known = {part: "" for site in wrapped.modules if site not in wrapped.unserved.sites for part in site.parts}
        target = min(missing)
        raise LoRAUsageError(
            f"adapter {name!r}: target_modules: {target!r} matches no layer that serves adapters; expected the name of "
            f"a module or its last part{nearest(target, known)}"
        )


def _with_numbers(part: str, site: Site, row: int) -> str:
    """Return the checkpoint name of a row: the layer's number after the key of the stack, the expert's before the last.

    In the paths of the model, stacked layers and experts are one module.
    """
    if not site.spec.entries:
        return part
    keys, numbers = part.split("."), list(map(str, np.unravel_index(row, site.spec.entries)))
    if site.spec.experts is not None:
        keys.insert(len(keys) - 1, numbers.pop())
    if numbers:
        stack = next((i for i, key in enumerate(keys) if key in _STACKS), 0)
        keys.insert(stack + 1, numbers.pop())
    return ".".join(keys)

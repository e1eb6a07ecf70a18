"""Search the tiles of the GPU kernels for the layers of a model."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jlora.errors import LoRAUsageError
from jlora.layers.site import Site
from jlora.pallas.api import unsupported_reason
from jlora.pallas.gpus import platform
from jlora.pallas.search import Measure, Shape, TuneProgress, search, tasks_of
from jlora.pallas.trial import OnDevice

# Decode steps and a prefill, the most frequent first: if time runs out, the last ones keep the tiles of the rule.
TOKENS = (64, 8, 256, 1, 4096, 32, 512, 16, 128)
_WIDTHS = ("bfloat16", "float16", "float32")


def tune(
    modules: Mapping[Site, nnx.Module],
    *,
    tokens: Sequence[int] = TOKENS,
    experts_per_token: int | None = None,
    seconds: float = 180.0,
    again: bool = False,
    progress: Callable[[TuneProgress], Any] | None = None,
    measure: Measure | None = None,
) -> Path:
    """See `LoRAManager.tune`.

    Args:
      modules: Site -> layer of a wrapped or surveyed model, whose parameters may be shapes.
      tokens: As in `LoRAManager.tune`.
      experts_per_token: As in `LoRAManager.tune`.
      seconds: As in `LoRAManager.tune`.
      again: As in `LoRAManager.tune`.
      progress: As in `LoRAManager.tune`.
      measure: Timing of tiles. None times them on the device.
    """
    counts: list[object] = list(tokens)
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise LoRAUsageError(f"tune: tokens must be positive numbers of tokens of a step, got {tokens!r:.100}")
    if not seconds > 0:
        raise LoRAUsageError(f"tune: seconds must be positive, got {seconds!r}")
    shapes = _shapes(modules)
    _check_platform(modules)
    if experts_per_token is None and any(shape.experts > 1 for shape in shapes):
        raise LoRAUsageError("tune: the model has layers of experts; pass experts_per_token, how many a token takes")
    tasks = tasks_of(shapes, tokens, experts_per_token or 1)
    return search(tasks, measure or OnDevice(), seconds=seconds, again=again, progress=progress)


def _check_platform(modules: Mapping[Site, nnx.Module]) -> None:
    where, backends = platform(), {site.backend for site in modules}
    if not backends & {"auto", "triton"}:
        raise LoRAUsageError(f"tune: LoRAConfig(backend={backends.pop()!r}) chooses no tiles; only 'triton' does")
    if where not in ("gpu", "cuda"):
        kernels = "XLA's path, which has no tiles" if where == "cpu" else "kernels whose tiles follow from the shapes"
        raise LoRAUsageError(
            f"tune: computations run on {where!r} with {kernels}; tiles are tuned on an NVIDIA GPU (JAX_PLATFORMS=cuda)"
        )
    like = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    a, b = jax.ShapeDtypeStruct((1, 1, 16, 16), jnp.bfloat16), jax.ShapeDtypeStruct((1, 16, 16), jnp.bfloat16)
    if reason := unsupported_reason("triton", like, like, a, b, slice_sizes=(16,)):
        raise LoRAUsageError(f"tune: backend 'triton' {reason}")


def _shapes(modules: Mapping[Site, nnx.Module]) -> list[Shape]:
    """Return the distinct shapes of the products with LoRA, on one device of a mesh, in the order of the model."""
    found: dict[Shape, None] = {}
    for site, layer in modules.items():
        spec = site.spec
        if site.kind != "linear" or not spec.whole:
            continue
        a, b = (
            shape if where is None else where.shard_shape(shape)
            for shape, where in zip(spec.shapes[:2], spec.shardings[:2], strict=True)
        )
        lead = len(spec.stack)
        parts = max(1, spec.stored_out // b[-1])
        dtype = _dtype(layer) or spec.dtype
        fusible = spec.sharding is None and not spec.stack and not site.bitwise_base and not site.batch_invariant
        shape = Shape(
            k=a[-1],
            slices=_slices(spec.out_sizes, parts, b[-1]),
            rank=b[-2],
            dtype=dtype,
            slot_dtype=spec.dtype,
            slots=min(a[lead], 64),  # more of them only take memory
            experts=1 if spec.experts is None else a[lead + 1],
            fusible=fusible and spec.experts is None and _dtype(layer) == spec.dtype != "float32",
        )
        found.setdefault(shape)
    return list(found)


def _slices(sizes: Sequence[int], parts: int, total: int) -> tuple[int, ...]:
    """Return the sizes of a shard's slices, which sum to `total`: each has its part of the columns."""
    own = [size // parts for size in sizes[:-1]]
    return (*own, total - sum(own))


def _dtype(layer: nnx.Module) -> str | None:
    """Return the dtype of the kernel of a layer of Flax's own, or None if it is no floating one."""
    kernel: object = vars(layer).get("kernel")
    if not isinstance(layer, nnx.Linear | nnx.LinearGeneral | nnx.Einsum) or not isinstance(kernel, nnx.Variable):
        return None
    name = np.dtype(cast("Any", kernel).get_value().dtype).name
    return name if name in _WIDTHS else None

"""Dimension names of the annotations, type aliases, and type guards.

B  sequences in a batch              K  in-features of a projection
L  tokens a sequence                 N  out-features of a projection (all slices together)
M  rows = tokens, flattened          n  output slices of a merged projection (qkv: 3, gate_up: 2, plain: 1)
S  slots (max_loras)                 R  max_lora_rank; r is one adapter's own rank
G  groups (opaque weight index)      T  tiles of a plan
V  vocabulary                        E  experts
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, TypeGuard

import numpy as np

Backend: TypeAlias = Literal["auto", "xla", "mosaic_tpu", "triton"]
DType: TypeAlias = np.dtype[Any] | type | str


# A bare `isinstance` leaves a type checker with items of unknown type. These guards make the items Any.


def is_mapping(value: object) -> TypeGuard[Mapping[Any, Any]]:
    """Return True if the value is a mapping."""
    return isinstance(value, Mapping)


def is_list_or_tuple(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Return True if the value is a list or a tuple."""
    return isinstance(value, list | tuple)

"""The dimension glossary of the annotations, and two aliases.

B  sequences in a batch              K  in-features of a projection
L  tokens a sequence                 N  out-features of a projection (all slices together)
M  rows = tokens, flattened          n  output slices of a merged projection (qkv: 3, gate_up: 2, plain: 1)
S  slots (max_loras)                 R  max_lora_rank; r is one adapter's own rank
G  groups (opaque weight index)      T  tiles of a plan
V  vocabulary                        E  experts
"""

from typing import Literal, TypeAlias

import numpy as np

Backend: TypeAlias = Literal["auto", "xla", "mosaic_tpu", "triton"]
DType: TypeAlias = np.dtype | type | str

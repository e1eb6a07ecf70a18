"""The reference: multi-LoRA as plain float64 NumPy loops, independent of jlora."""

import numpy as np


def lora_delta(x, group_ids, a, b, slice_sizes=None):
    """Delta of every row, one row at a time.

    Args:
      x: [M, K] rows.
      group_ids: [M] weight index of each row; a row whose id is outside [0, G) takes no adapter.
      a: [G, n, R, K]; b: [G, R, N].
      slice_sizes: the n output sizes, summing to N (default: one slice).

    Returns:
      [M, N] float64.
    """
    x, a, b = (np.asarray(v, np.float64) for v in (x, a, b))
    groups, _, _, _ = a.shape
    sizes = [b.shape[-1]] if slice_sizes is None else list(slice_sizes)
    out = np.zeros((x.shape[0], b.shape[-1]))
    for m, g in enumerate(np.asarray(group_ids)):
        if not 0 <= g < groups:
            continue
        start = 0
        for i, size in enumerate(sizes):
            hidden = a[g, i] @ x[m]
            out[m, start : start + size] = hidden @ b[g, :, start : start + size]
            start += size
    return out


def add_lora(base, x, group_ids, a, b, slice_sizes=None):
    """`base` [M, N] plus the delta of every row, float64."""
    return np.asarray(base, np.float64) + lora_delta(x, group_ids, a, b, slice_sizes)


def merged_weight(weight, a, b, scaling):
    """PEFT's merge: weight [N, K] + scaling * b [N, r] @ a [r, K], float64."""
    return np.asarray(weight, np.float64) + scaling * np.asarray(b, np.float64) @ np.asarray(a, np.float64)

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


def lora_gradients(dout, x, group_ids, a, b, slice_sizes, ranks=None, row_scales=None, x_rows=None):
    """Gradients of `lora_delta`, one row at a time, for the cotangent `dout` [M, N].

    Args:
      x, group_ids, a, b, slice_sizes: as for `lora_delta`; x is [T, K] if `x_rows` says which of its rows each is.
      ranks: [G, n, 2] ranks and scales; entries of a and b past the rank take no part. None: all of R, scale 1.
      row_scales: [M] further factors of the scale.

    Returns:
      dx, da, db, float64, of the shapes of x, a and b.
    """
    dout, x, a, b = (np.asarray(v, np.float64) for v in (dout, x, a, b))
    groups, n, rank, _ = a.shape
    ranks = np.tile([rank, 1.0], (groups, n, 1)) if ranks is None else np.asarray(ranks, np.float64)
    dx, da, db = np.zeros_like(x), np.zeros_like(a), np.zeros_like(b)
    for m, g in enumerate(np.asarray(group_ids)):
        if not 0 <= g < groups:
            continue
        t, start = m if x_rows is None else int(x_rows[m]), 0
        for i, size in enumerate(slice_sizes):
            columns, r = slice(start, start + size), int(ranks[g, i, 0])
            scale = ranks[g, i, 1] * (1 if row_scales is None else float(row_scales[m]))
            dh = scale * b[g, :r, columns] @ dout[m, columns]
            dx[t] += dh @ a[g, i, :r]
            da[g, i, :r] += np.outer(dh, x[t])
            db[g, :r, columns] += np.outer(scale * a[g, i, :r] @ x[t], dout[m, columns])
            start += size
    return dx, da, db


def merged_weight(weight, a, b, scaling):
    """PEFT's merge: weight [N, K] + scaling * b [N, r] @ a [r, K], float64."""
    return np.asarray(weight, np.float64) + scaling * np.asarray(b, np.float64) @ np.asarray(a, np.float64)

"""Rotates keys in plain NumPy, to compare with."""

import numpy as np


def rotated(keys, by, rope):
    """Rotate keys [..., dim] by a number of positions each, [...], in float64."""
    n, first = len(rope.inv_freq), rope.first_dim
    a = first + (2 * np.arange(n) if rope.interleaved else np.arange(n))
    b = a + (1 if rope.interleaved else n)
    angle = np.asarray(by, np.float64)[..., None] * np.array(rope.inv_freq)
    out = np.array(keys, np.float64)
    out[..., a] = keys[..., a] * np.cos(angle) - keys[..., b] * np.sin(angle)
    out[..., b] = keys[..., b] * np.cos(angle) + keys[..., a] * np.sin(angle)
    return out

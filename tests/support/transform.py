"""The Hadamard transform of rows, as kvcache.h defines it."""

import numpy as np


def key_order(dim):
    return min(dim & -dim, 1024)


def value_order(dim):
    return min(dim & -dim, 64)


def hadamard(x, order):
    """Multiply blocks of `order` elements of the last axis by the Hadamard matrix over sqrt(order), summing as ggml."""
    x = np.array(x, np.float32) * (np.float32(1) / np.sqrt(np.float32(order)))
    half = 1
    while half < order:
        pairs = x.reshape(-1, x.shape[-1] // (2 * half), 2, half)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(x.shape)
        half *= 2
    return x

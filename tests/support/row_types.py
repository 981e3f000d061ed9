"""Types in which rows are stored: their names and sizes, and the matrix that may be applied before."""

import numpy as np

NAMES = ["int8", "int6", "int4"]
TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", *NAMES]  # all, in their order
BITS = {"int8": 8, "int6": 6, "int4": 4}


def row_bytes(name, dim):
    return dim * BITS[name] // 8 + 2


def hadamard(x, order):
    """Multiply blocks of `order` elements of the last axis by the Hadamard matrix over sqrt(order), summing as ggml."""
    x = np.array(x, np.float32) * (np.float32(1) / np.sqrt(np.float32(order)))
    half = 1
    while half < order:
        pairs = x.reshape(-1, x.shape[-1] // (2 * half), 2, half)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2).reshape(x.shape)
        half *= 2
    return x

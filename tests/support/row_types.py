"""Types with one scale for a row, in NumPy: int8, int6 and int4, as kvcache.h says."""

import numpy as np

NAMES = ["int8", "int6", "int4"]
TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", *NAMES]  # all, in their order
BITS = {"int8": 8, "int6": 6, "int4": 4}
UPPER_LEVELS = {
    "int6": [1, *range(3, 49, 3), 52, 56, 60, 64, 68, 72, 76, 81, 86, 91, 97, 103, 110, 118, 127],
    "int4": [5, 16, 28, 40, 54, 70, 90, 119],
}


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


def mixed(x):
    """Multiply rows by the matrix of int6 and int4, which is its own inverse."""
    dim = x.shape[-1]
    order = min(dim & -dim, 1024)
    element = np.arange(dim) % order
    odd = sum((element >> bit & 3 == 3).astype(int) for bit in range(0, 10, 2)) % 2
    signs = np.where(odd, -1, 1).astype(np.float32)
    return hadamard(x * signs, order) * signs


def lane_sums(x):
    """Add up every 16th element, then halves of these sums, each in single precision."""
    sums = np.cumsum(x.reshape(*x.shape[:-1], -1, 16), -2, dtype=np.float32)[..., -1, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums


def planes(codes, name):
    """Pack codes of four or six bits, 32 at a time."""
    codes = codes.astype(np.uint8).reshape(*codes.shape[:-1], -1, 32)
    nibbles = codes[..., :16] & 15 | codes[..., 16:] << 4
    if name == "int4":
        return nibbles
    high = codes >> 4
    pairs = high[..., :8] | high[..., 8:16] << 2 | high[..., 16:24] << 4 | high[..., 24:] << 6
    return np.concatenate([pairs, nibbles], -1)


def nearest(x, unit, name):
    """Return codes, and the levels that they stand for."""
    upper = np.array(UPPER_LEVELS[name], np.float32)
    half = len(upper)
    scaled = x * np.divide(np.float32(1), unit, out=np.zeros_like(unit), where=unit != 0)
    magnitude = np.searchsorted((upper[:-1] + upper[1:]) / 2, np.abs(scaled), "right")
    is_positive = scaled >= 0
    codes = np.where(is_positive, half + magnitude, half - 1 - magnitude)
    return codes, np.where(is_positive, upper[magnitude], -upper[magnitude])


def best(x, unit):
    """Return the better of two units for the first elements of int4."""
    units = [unit * np.float32(0.96), unit * np.float32(1.06)]
    merits = []
    for each in units:
        _, levels = nearest(x[..., :1024], each, "int4")
        products = lane_sums(x[..., :1024] * levels)
        merits.append(products * products / lane_sums(levels * levels))
    return np.where(merits[1] > merits[0], units[1], units[0])


def encoded(x, name):
    """Return the bytes of rows [..., dim], the scale behind them, and what they decode to."""
    x = np.asarray(x, np.float32)
    if name == "int8":
        scales = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        levels = np.sign(x) * np.floor(np.abs(x * (1 / scales)) + np.float32(0.5))
        elements = levels.astype(np.int8).view(np.uint8)
    else:
        x = mixed(x)
        unit = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        codes, levels = nearest(x, unit if name == "int6" else best(x, unit), name)
        elements = planes(codes, name)
        scales = lane_sums(x * levels) / lane_sums(levels * levels)
    scales = scales.astype(np.float16)
    raw = np.concatenate([elements.reshape(*x.shape[:-1], -1), scales.view(np.uint8)], -1)
    decoded = levels * scales.astype(np.float32)
    return raw, decoded if name == "int8" else mixed(decoded)

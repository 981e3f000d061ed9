"""ggml's quantised blocks, in NumPy."""

import gguf
import numpy as np
from gguf.quants import quantize

NAMES = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"]
GGML = {name: gguf.GGMLQuantizationType[name.upper()] for name in NAMES}
SIZES = {name: gguf.GGML_QUANT_SIZES[type][1] for name, type in GGML.items()}
LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def inverse_of(d):
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def symmetric(x, bits):
    """Return scales and codes of q4_0 and q5_0."""
    half = np.float32(2 ** (bits - 1))
    d = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1) / -half
    codes = (x * inverse_of(d) + (half + np.float32(0.5))).astype(np.int8)
    return [d], np.minimum(2**bits - 1, codes).astype(np.uint8)


def from_minimum(x, bits):
    """Return scales, minima and codes of q4_1 and q5_1."""
    m = np.take_along_axis(x, x.argmin(-1)[..., None], -1)
    d = (x.max(-1, keepdims=True) - m) / np.float32(2**bits - 1)
    codes = ((x - m) * inverse_of(d) + np.float32(0.5)).astype(np.uint8)
    return [d, m], np.minimum(2**bits - 1, codes)


def levels(x):
    """Return scales and codes of iq4_nl."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    known = np.abs(largest) >= 1e-15
    scaled = np.divide(1, largest / LEVELS[0], out=np.zeros_like(largest), where=known) * x
    codes = (scaled[..., None] >= (LEVELS[:-1] + LEVELS[1:]) / 2).sum(-1).astype(np.uint8)
    weighted = x * x * LEVELS[codes]
    upper, lower = (np.cumsum(weighted * by, -1, dtype=np.float32)[..., -1:] for by in (x, LEVELS[codes]))
    return [np.divide(upper, lower, out=np.zeros_like(upper), where=known)], np.where(known, codes, 8).astype(np.uint8)


def blocks(x, name):
    """Quantise [..., dim] as ggml's reference C does, in f32."""
    x = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    if name == "q8_0":
        d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        scaled = (x * inverse_of(d)).astype(np.float64)
        scales, codes = [d], (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8).view(np.uint8)
    elif name == "iq4_nl":
        scales, codes = levels(x)
    else:
        scales, codes = (from_minimum if name.endswith("_1") else symmetric)(x, int(name[1]))
    with np.errstate(over="ignore"):
        parts = [each.astype(np.float16).view(np.uint8) for each in scales]
    if name.startswith("q5"):
        parts.append(np.packbits(codes >> 4, -1, bitorder="little"))
    parts.append(codes if name == "q8_0" else codes[..., :16] & 15 | codes[..., 16:] << 4)
    return np.concatenate(parts, -1).reshape(*x.shape[:-2], -1)


def quantised_by_gguf(x, name):
    """Quantise [..., dim] with gguf; None where it cannot."""
    return None if name == "iq4_nl" else quantize(np.ascontiguousarray(x), GGML[name])

"""ggml's quantised blocks, in NumPy."""

import gguf
import numpy as np
from gguf.quants import dequantize

GGML = {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_0": gguf.GGMLQuantizationType.Q4_0}
NAMES = list(GGML)


def blocks(x, name):
    """Quantise [..., dim] as ggml's reference C does, in f32."""
    x = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, 32)
    if name == "q8_0":
        d = np.abs(x).max(-1, keepdims=True) / np.float32(127)
        inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
        scaled = (x * inverse).astype(np.float64)
        quants = (np.sign(scaled) * np.floor(np.abs(scaled) + 0.5)).astype(np.int8).view(np.uint8)
    else:
        at = np.abs(x).argmax(-1)[..., None]
        d = np.take_along_axis(x, at, -1) / np.float32(-8)
        inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
        levels = np.minimum(15, (x * inverse + np.float32(8.5)).astype(np.int8)).astype(np.uint8)
        quants = levels[..., :16] | levels[..., 16:] << 4
    with np.errstate(over="ignore"):
        scale = d.astype(np.float16).view(np.uint8)
    return np.concatenate([scale, quants], -1).reshape(*x.shape[:-2], -1)


def decoded(raw, name):
    return dequantize(raw, GGML[name])

"""ONNX Runtime's GroupQueryAttention over a shared buffer, which appends the one token too.

Modes
  flash   the package's default, flash attention
  plain   with ORT_GQA_DISABLE_FLASH_ATTENTION=1
Types: f32 and f16; int8 and int4, with one scale for the tensor.
"""

import os
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from onnx import TensorProto, helper

from kvcache.tools.peers.serve import Floats, Task, Work, rotate, serve

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "int8": TensorProto.INT8, "int4": TensorProto.UINT8}


def model(s: Task) -> bytes:
    """Return the graph of one layer, serialised."""
    value = helper.make_tensor_value_info
    own = TensorProto.FLOAT16 if s.type == "f16" else TensorProto.FLOAT
    stored = [1, s.num_kv_heads, s.context, s.head_dim // 2 if s.type == "int4" else s.head_dim]
    wide, narrow = [1, 1, s.num_heads * s.head_dim], [1, 1, s.num_kv_heads * s.head_dim]
    inputs = [value("q", own, wide), value("k", own, narrow), value("v", own, narrow)]
    inputs += [value(name, TYPES[s.type], stored) for name in ("past_k", "past_v")]
    inputs += [value("last", TensorProto.INT32, [1]), value("total", TensorProto.INT32, [])]
    outputs = [value("out", own, wide), *(value(name, TYPES[s.type], stored) for name in ("now_k", "now_v"))]
    names = [x.name for x in inputs]
    options: dict[str, Any] = {}
    if s.type.startswith("int"):
        inputs += [value(name, TensorProto.FLOAT, [1]) for name in ("k_scale", "v_scale")]
        names += ["", "", "", "", "", "k_scale", "v_scale"]
        options = {"kv_cache_bit_width": int(s.type[3:]), "k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR"}
    node = helper.make_node(
        "GroupQueryAttention", names, [x.name for x in outputs], domain="com.microsoft", num_heads=s.num_heads,
        kv_num_heads=s.num_kv_heads, **options,
    )  # fmt: skip
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, outputs)
    return helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString()


def quantise(x: Floats, kind: str) -> tuple[npt.NDArray[Any], np.float32]:
    """Convert values to the stored type; return them, and their scale."""
    if kind in ("f32", "f16"):
        return x.astype(np.float32 if kind == "f32" else np.float16), np.float32(1)
    most = 127 if kind == "int8" else 7
    scale = np.abs(x).max() / np.float32(most)
    levels = np.clip(np.rint(x / scale), -most - 1, most)
    if kind == "int8":
        return levels.astype(np.int8), scale
    levels = (levels + 8).astype(np.uint8)
    return levels[..., 0::2] | (levels[..., 1::2] << 4), scale


def set_up(s: Task) -> Work:
    """Make the `Work` of a task."""
    if s.num_tokens > 1:
        raise NotImplementedError("only single-token decoding is measured")
    os.environ["ORT_GQA_DISABLE_FLASH_ATTENTION"] = "1" if s.mode == "plain" else "0"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = s.threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # other entrants run between two runs
    session = onnxruntime.InferenceSession(model(s), options, providers=["CPUExecutionProvider"])
    own = np.float16 if s.type == "f16" else np.float32
    k, v = s.rows(2), s.rows(3)
    last = {name: x[:, -1].reshape(1, 1, -1).astype(own) for name, x in (("k", k), ("v", v))}
    given: dict[str, npt.NDArray[Any]] = last | {"q": s.queries().reshape(1, 1, -1).astype(own)}
    given |= {"last": np.array([s.context - 1], np.int32), "total": np.array(s.context, np.int32)}
    (k, k_scale), (v, v_scale) = (quantise(x[None], s.type) for x in (k, v))
    if s.type.startswith("int"):
        given |= {"k_scale": k_scale.reshape(1), "v_scale": v_scale.reshape(1)}
    value = onnxruntime.OrtValue.ortvalue_from_numpy
    shared = {name: value(x) for name, x in given.items()}
    out = value(np.zeros((1, 1, s.num_heads * s.head_dim), own))
    bindings, kept = [], []
    for _ in range(s.num_layers):
        binding = session.io_binding()
        stored = [value(np.ascontiguousarray(x)) for x in (k, v)]
        for name, x in shared.items():
            binding.bind_ortvalue_input(name, x)
        for name, x in zip("kv", stored, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", x)
            binding.bind_ortvalue_output(f"now_{name}", x)
        binding.bind_ortvalue_output("out", out)
        bindings.append(binding)
        kept += stored

    def result() -> npt.NDArray[Any]:
        session.run_with_iobinding(bindings[0])
        return out.numpy().reshape(1, s.num_heads, s.head_dim)

    result()
    run = rotate(s.num_layers, lambda layer: session.run_with_iobinding(bindings[layer]))
    return Work(run, result, kept=(kept, shared))


if __name__ == "__main__":
    serve(set_up)

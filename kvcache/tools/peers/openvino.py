"""OpenVINO's stateful scaled dot product attention, which appends the one token too.

Mode f32 or f16 is the precision hint. Types: f32, f16 and u8, scaled per token; OpenVINO aborts on u4 states. All
layers are one model, so a layer's time is a pass's time divided by the layers.
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset6, opset8
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from kvcache.tools.peers.serve import Task, Work, serve

STEPS = 16  # steps timed before the states are reset


def model(s: Task) -> ov.Model:
    """Return the graph of all layers."""
    group = s.num_heads // s.num_kv_heads
    beam = ops.parameter(ov.PartialShape([-1]), ov.Type.i32, name="beam_idx")
    heads = {"q": s.num_heads, "k": s.num_kv_heads, "v": s.num_kv_heads}
    given = {
        name: ops.parameter(ov.PartialShape([-1, count, -1, s.head_dim]), ov.Type.f32, name=name)
        for name, count in heads.items()
    }
    for name, parameter in [*given.items(), ("beam_idx", beam)]:
        parameter.output(0).set_names({name})

    def part(x: Any, indices: list[int]) -> Any:
        """Return these elements of a tensor's shape."""
        return ops.gather(ops.shape_of(x, output_type="i64"), ops.constant(np.array(indices)), ops.constant(0))

    results, sinks, variables = [], [], []
    for layer in range(s.num_layers):
        seen = []
        for name in "kv":
            info = VariableInfo()
            info.data_shape = ov.PartialShape([-1, s.num_kv_heads, -1, s.head_dim])
            info.data_type = ov.Type.f32
            info.variable_id = f"past.{layer:03d}.{name}"
            variables.append(Variable(info))
            empty = ops.concat([part(given["q"], [0]), ops.constant(np.array([s.num_kv_heads, 0, s.head_dim]))], 0)
            past = opset6.read_value(ops.broadcast(ops.constant(np.float32(0)), empty), variables[-1])
            rows = ops.concat([opset8.gather(past, beam, ops.constant(np.int64(0))), given[name]], 2)
            sinks.append(opset6.assign(rows, variables[-1]))
            wide = ops.concat([part(rows, [0, 1]), ops.constant(np.array([group])), part(rows, [2, 3])], 0)
            wide = ops.broadcast(ops.unsqueeze(rows, ops.constant(np.int64(2))), wide, broadcast_spec="BIDIRECTIONAL")
            by_head = ops.constant(np.array([0, s.num_heads, -1, s.head_dim]))
            seen.append(ops.reshape(wide, by_head, special_zero=True))
        out = ops.scaled_dot_product_attention(given["q"], *seen, causal=False)
        results.append(ops.result(out))
        out.output(0).set_names({f"out{layer}"})
    return ov.Model(results, sinks, [*given.values(), beam], variables, "attention")


def set_up(s: Task) -> Work:
    """Make the `Work` of a task."""
    if s.num_tokens > 1:
        raise NotImplementedError("only single-token decoding is measured")
    options = {
        "INFERENCE_PRECISION_HINT": s.mode, "KV_CACHE_PRECISION": s.type,
        "INFERENCE_NUM_THREADS": s.threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY",
    }  # fmt: skip
    request = ov.Core().compile_model(model(s), "CPU", options).create_infer_request()
    rows = {"k": s.rows(2)[None], "v": s.rows(3)[None]}
    request.set_tensor("q", ov.Tensor(np.ascontiguousarray(s.queries().transpose(1, 0, 2)[None])))
    request.set_tensor("beam_idx", ov.Tensor(np.zeros(1, np.int32)))
    for name, x in rows.items():
        request.set_tensor(name, ov.Tensor(np.ascontiguousarray(x[:, :, -1:])))
    grown = STEPS  # tokens appended since the states were set
    ready: list[float] = []

    def set_states(length: int) -> None:
        """Let the states have the first rows, and append one."""
        nonlocal grown
        request.reset_state()
        for state in request.query_state():
            state.state = ov.Tensor(np.ascontiguousarray(rows[state.name[-1]][:, :, :length]))
        request.infer()
        grown = 1

    def run(count: int) -> list[float]:
        """Return per-layer times: each pass yields one equal share per layer."""
        nonlocal grown
        while len(ready) < count:
            if grown >= STEPS:
                set_states(s.context - STEPS // 2)
            start = time.perf_counter()
            request.infer()
            ready.extend([(time.perf_counter() - start) / s.num_layers] * s.num_layers)
            grown += 1
        handed = ready[:count]
        ready.clear()
        return handed

    def out() -> npt.NDArray[Any]:
        nonlocal grown
        set_states(s.context - 1)
        result = request.get_tensor("out0").data.reshape(1, s.num_heads, s.head_dim).copy()
        grown = STEPS
        return result

    return Work(run, out)


if __name__ == "__main__":
    serve(set_up)

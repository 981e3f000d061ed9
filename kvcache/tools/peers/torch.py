"""PyTorch, called by hand-written code in the fastest ways found: packed SDPA and packed matrix products.

Modes
  sdpa     scaled_dot_product_attention; for one token, the query heads of a KV head take the place of tokens
  matmul   softmax(Q K^T) V, where the query heads of a KV head are the rows of Q; for one token only
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcache.tools.peers.serve import Task, Work, rotate, serve

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def set_up(s: Task) -> Work:
    """Make the `Work` of a task."""
    dtype = TYPES[s.type]
    torch.set_num_threads(s.threads)
    group = s.num_heads // s.num_kv_heads
    q = torch.from_numpy(s.queries()).to(dtype)
    k, v = (torch.from_numpy(s.rows(seed)).to(dtype)[None] for seed in (2, 3))
    layers = [(k, v), *((k.clone(), v.clone()) for _ in range(s.num_layers - 1))]
    if s.num_tokens == 1:
        q = q.view(1, s.num_kv_heads, group, s.head_dim)
        options: dict[str, Any] = {}
    else:
        q = q.transpose(0, 1)[None].contiguous()
        mask = torch.ones(s.num_tokens, s.context, dtype=torch.bool).tril(s.context - s.num_tokens)
        options = {"attn_mask": mask[None, None], "enable_gqa": True}

    def back(out: torch.Tensor) -> torch.Tensor:
        return out.reshape(1, s.num_heads, s.head_dim) if s.num_tokens == 1 else out[0].transpose(0, 1)

    def sdpa(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, **options)

    def matmul(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)).float() * s.head_dim**-0.5
        return torch.matmul(torch.softmax(scores, -1).to(dtype), v)

    if s.mode == "matmul" and s.num_tokens > 1:
        raise NotImplementedError("matmul of one token only")
    attend = {"sdpa": sdpa, "matmul": matmul}[s.mode]
    run = rotate(s.num_layers, lambda layer: attend(*layers[layer]))
    return Work(run, lambda: back(attend(*layers[0])).float().numpy())


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    serve(set_up)

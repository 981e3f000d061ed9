"""Hugging Face transformers, called as its models do: its cache, then its SDPA attention.

Modes
  dynamic          DynamicCache.update of the batch's tokens, then attention
  append           DynamicCache.update alone
  append-static    StaticCache.update alone
"""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache.tools.peers.serve import Task, Work, rotate, serve

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def set_up(s: Task) -> Work:
    """Make the `Work` of a task."""
    dtype = TYPES[s.type]
    torch.set_num_threads(s.threads)
    config = LlamaConfig(
        hidden_size=s.num_heads * s.head_dim, num_attention_heads=s.num_heads, num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim, num_hidden_layers=s.num_layers,
    )  # fmt: skip
    module: Any = SimpleNamespace(num_key_value_groups=s.num_heads // s.num_kv_heads, is_causal=True, training=False)
    q = torch.from_numpy(s.queries()).to(dtype).transpose(0, 1)[None].contiguous()
    k, v = (torch.from_numpy(s.rows(seed)).to(dtype)[None] for seed in (2, 3))
    stored = s.context - s.num_tokens
    new_k, new_v = (x[:, :, stored:].contiguous() for x in (k, v))
    static = s.mode.endswith("static")
    cache: Any = StaticCache(config=config, max_cache_len=s.context) if static else DynamicCache(config=config)
    for layer in range(s.num_layers):
        cache.update(k[:, :, :stored], v[:, :, :stored], layer)
    del k, v
    held = [] if static else [(one.keys, one.values) for one in cache.layers]
    mask = None
    if s.num_tokens > 1:
        mask = torch.ones(s.num_tokens, s.context, dtype=torch.bool).tril(stored)[None, None]

    def attend(layer: int) -> Any:
        keys, values = cache.update(new_k, new_v, layer)
        if not s.mode.startswith("append"):
            return sdpa_attention_forward(module, q, keys, values, mask)[0]
        return None

    def go_back(layer: int) -> None:
        """Take back what `attend` has appended."""
        one = cache.layers[layer]
        if static:
            one.cumulative_length.fill_(stored)
        else:
            one.keys, one.values = held[layer]

    run_once = rotate(s.num_layers, attend)
    next_layer = 0  # the layer that `run_once` attends in next

    def run(count: int) -> list[float]:
        nonlocal next_layer
        seconds = []
        for _ in range(count):
            seconds += run_once(1)
            go_back(next_layer)
            next_layer = (next_layer + 1) % s.num_layers
        return seconds

    def out() -> Any:
        result = attend(0)[0].float().numpy()
        go_back(0)
        return result

    return Work(run, out)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    serve(set_up)

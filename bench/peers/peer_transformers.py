"""Hugging Face transformers as it runs: its cache, then its SDPA attention.

Modes
  dynamic   DynamicCache.update of the batch's tokens, then attention
  static    StaticCache.update, then attention over what is filled
  append    DynamicCache.update alone
"""

import time
from types import SimpleNamespace

import torch
from serve import Shape, Work, rotate, serve
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def set_up(shape: Shape) -> Work:
    s, dtype = shape, TYPES[shape.type]
    torch.set_num_threads(s.threads)
    config = LlamaConfig(
        hidden_size=s.num_heads * s.head_dim, num_attention_heads=s.num_heads, num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim, num_hidden_layers=s.num_layers,
    )  # fmt: skip
    module = SimpleNamespace(num_key_value_groups=s.num_heads // s.num_kv_heads, is_causal=True, training=False)
    q = torch.from_numpy(s.queries()).to(dtype).transpose(0, 1)[None].contiguous()
    k, v = (torch.from_numpy(s.rows(seed)).to(dtype)[None] for seed in (2, 3))
    stored = s.context - s.num_tokens
    new = [x[:, :, stored:].contiguous() for x in (k, v)]
    static = s.mode == "static"
    cache = StaticCache(config=config, max_cache_len=s.context) if static else DynamicCache(config=config)
    for layer in range(s.num_layers):
        cache.update(k[:, :, :stored], v[:, :, :stored], layer)
    del k, v
    held = [] if static else [(one.keys, one.values) for one in cache.layers]
    mask = None
    if s.num_tokens > 1:
        mask = torch.ones(s.num_tokens, s.context, dtype=torch.bool).tril(stored)[None, None]

    def attend(layer):
        keys, values = cache.update(*new, layer)
        if s.mode != "append":
            return sdpa_attention_forward(module, q, keys, values, mask)[0]
        return None

    def go_back(layer):
        one = cache.layers[layer]
        if static:
            one.cumulative_length.fill_(stored)
        else:
            one.keys, one.values = held[layer]

    run_once = rotate(s.num_layers, attend, time.perf_counter)
    turn = 0

    def run(count):
        nonlocal turn
        seconds = []
        for _ in range(count):
            seconds += run_once(1)
            go_back(turn)
            turn = (turn + 1) % s.num_layers
        return seconds

    def out():
        result = attend(0)[0].float().numpy()
        go_back(0)
        return result

    return Work(run, out)


torch.set_grad_enabled(False)
serve(set_up)

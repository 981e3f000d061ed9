"""The same work in Hugging Face transformers."""

import time
import warnings

import numpy as np
import pytest

import kvcache

LAYERS, HEADS, DIM, TOKENS = 4, 8, 128, 8192


@pytest.fixture(scope="module")
def torch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch = pytest.importorskip("torch", reason="needs torch and transformers: pip install '.[bench]'")
        pytest.importorskip("transformers.cache_utils", reason="needs torch and transformers: pip install '.[bench]'")
    torch.set_grad_enabled(False)
    return torch


@pytest.mark.filterwarnings("ignore")
def test_put_against_transformers(figures, in_turn, torch):
    """One token at 8,192; ours converts f32 to f16, theirs are given f16."""
    from transformers import LlamaConfig
    from transformers.cache_utils import DynamicCache, StaticCache

    config = LlamaConfig(
        hidden_size=32 * DIM, num_attention_heads=32, num_key_value_heads=HEADS, head_dim=DIM, num_hidden_layers=LAYERS
    )
    stored = torch.zeros(1, HEADS, TOKENS, DIM, dtype=torch.float16)
    k = torch.ones(1, HEADS, 1, DIM, dtype=torch.float16)
    static, dynamic = StaticCache(config=config, max_cache_len=TOKENS + 64), DynamicCache(config=config)
    cache = kvcache.KVCache(LAYERS, HEADS, DIM, TOKENS + 64)
    for layer in range(LAYERS):
        static.update(stored, stored, layer)
        dynamic.update(stored, stored, layer)
    for extra in (TOKENS, 32):  # so that the memory is there
        with cache.batch(extra) as batch:
            for layer in range(LAYERS):
                batch.put(layer, stored[0, :, :extra], stored[0, :, :extra], layout="HTD")
    x, tensor = np.ones((1, HEADS, DIM), np.float32), torch.ones(1, HEADS, DIM)

    def ours(rows):
        cache.truncate(TOKENS)
        with cache.batch(1) as batch:
            start = time.perf_counter()
            for layer in range(LAYERS):
                batch.put(layer, rows, rows)
            return (time.perf_counter() - start) / LAYERS

    def static_cache():
        for layer in static.layers:
            layer.cumulative_length.fill_(TOKENS)
        start = time.perf_counter()
        for layer in range(LAYERS):
            static.update(k, k, layer)
        return (time.perf_counter() - start) / LAYERS

    def dynamic_cache():
        start = time.perf_counter()
        for layer in range(LAYERS):
            dynamic.update(k, k, layer)
        seconds = (time.perf_counter() - start) / LAYERS
        dynamic.crop(-1)
        return seconds

    mine, mine_torch, theirs = in_turn(lambda: ours(x), lambda: ours(tensor), static_cache)
    micro = [f"{1e6 * np.median(s):.2f} µs" for s in (mine, mine_torch, theirs)]
    figures.ratio("StaticCache.update / put of 1 token", theirs, mine, ">= 3", f"{micro[2]} / {micro[0]}")
    figures.ratio("    given tensors", theirs, mine_torch, "", f"{micro[2]} / {micro[1]}")
    mine, theirs = in_turn(lambda: ours(x), dynamic_cache)
    micro = [f"{1e6 * np.median(s):.2f} µs" for s in (mine, theirs)]
    figures.ratio("DynamicCache.update / put of 1 token", theirs, mine, ">= 20", f"{micro[1]} / {micro[0]}")

"""Small models of transformers, and a scenario played twice: with transformers' own cache, and with this package's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from kvcache.hf import HFCache

VOCAB = 97
LAYERS = 4
WINDOW = 8
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.5,  # so that tokens differ
    "tie_word_embeddings": False,  # else some repeat one token
}
SLIDING = {**BASE, "sliding_window": WINDOW}
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**BASE),
    "mistral": lambda: transformers.MistralConfig(**SLIDING),
    "gemma3": lambda: transformers.Gemma3TextConfig(**MIXED),
    "gpt_oss": lambda: transformers.GptOssConfig(**MIXED, num_local_experts=4, num_experts_per_tok=2),
    "llama4": lambda: transformers.Llama4TextConfig(
        **BASE, attention_chunk_size=WINDOW, num_local_experts=2, intermediate_size_mlp=96
    ),
}
MADE: dict[str, Any] = {}


def model_of(name: str) -> Any:
    """Return a model with random weights, always the same."""
    if name not in MADE:
        MADE[name] = make(CONFIGS[name]())
    return MADE[name]


def make(config: Any, auto: Any = transformers.AutoModelForCausalLM) -> Any:
    """Make a model with random weights."""
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def random_tokens(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    """Return tokens that are neither padding, nor begin or end a text."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def theirs(model: Any) -> tuple[DynamicCache, str]:
    """Return transformers' own cache for a model, and the attention to use it with."""
    has_sdpa = all(getattr(part, "_supports_sdpa", True) for part in model.modules())
    return DynamicCache(config=model.config), "sdpa" if has_sdpa else "eager"


def ours(model: Any) -> tuple[HFCache, str]:
    """Return this package's cache for a model, and the attention to use it with."""
    return HFCache(model.config, dtype="f32"), "kvcache"


Scenario = Callable[[Any], Iterable[torch.Tensor]]


def play(model: Any, cache: Any, attention: str, scenario: Scenario) -> list[torch.Tensor]:
    """Return the results of a scenario with a cache."""
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    with torch.no_grad():
        return list(scenario(cache))


def check_same(model: Any, scenario: Scenario, attention: str = "kvcache") -> HFCache:
    """Play a scenario with both caches, and compare the results: logits nearly, tokens exactly; return our cache."""
    want = play(model, *theirs(model), scenario)
    cache, _ = ours(model)
    got = play(model, cache, attention, scenario)
    compare(got, want)
    return cache


def compare(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """Compare results: logits nearly, by the largest, and tokens exactly."""
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        off = 2e-4 * float(other.abs().max()) if other.is_floating_point() and other.numel() else 0
        torch.testing.assert_close(one, other, rtol=0, atol=off)


def passes(
    model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None, ends: Sequence[int] = ()
) -> Iterator[torch.Tensor]:
    """Feed tokens in parts that end at some columns; yield each part's logits, from a row's first token on."""
    begin = cache.get_seq_length()
    for end in ends or [begin + tokens.shape[1]]:
        part = tokens[:, -tokens.shape[1] :][:, : end - begin]
        tokens = tokens[:, end - begin :]
        seen = None if mask is None else mask[:, :end]
        logits = model(part, attention_mask=seen, past_key_values=cache).logits
        begin = end
        if seen is None:
            yield logits
        else:  # the queries of padding before a row's first token see nothing
            yield logits[seen.cummax(1).values[:, -part.shape[1] :].bool()]

"""Small models of transformers, and a scenario played twice: with transformers' own cache, and with this package's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import transformers
from transformers import DynamicCache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

import kvcache
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
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8}
MAMBA |= {"mamba_chunk_size": 64}  # a short prompt is padded to a chunk, whose time grows with its square
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HYBRID: dict[str, Callable[[], Any]] = {  # some of whose layers are recurrent, or recurrent beside their attention
    "bamba": lambda: transformers.BambaConfig(**BASE, **MAMBA, attn_layer_indices=[1, 3]),
    "falcon_h1": lambda: transformers.FalconH1Config(**BASE, **MAMBA, mamba_d_ssm=128),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **BASE, **MAMBA, **LINEAR, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=96
    ),
    "jamba": lambda: transformers.JambaConfig(
        **BASE, attn_layer_period=2, attn_layer_offset=1, num_experts=4, mamba_d_state=8
    ),
    "lfm2": lambda: transformers.Lfm2Config(**BASE, **CONV),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(**BASE, **CONV, **EXPERTS, num_dense_layers=1),
    "minimax": lambda: transformers.MiniMaxConfig(
        **BASE,
        block_size=8,
        num_local_experts=4,
        num_experts_per_tok=2,  # begins with a layer of attention
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **BASE,
        **LINEAR,
        **EXPERTS,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=32,
    ),
    "zamba2": lambda: transformers.Zamba2Config(
        **{name: BASE[name] for name in BASE if name != "head_dim"} | {"num_key_value_heads": 4},
        layers_block_type=["linear_attention", "hybrid"] * 2,
        mamba_d_state=8,
        chunk_size=64,
    ),
    "zaya": lambda: transformers.ZayaConfig(**BASE, num_experts=4),
}
SPEECH: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "decoder_start_token_id": 2,
    "init_std": 0.5,
}
TWO_SIDED: dict[str, Callable[[], Any]] = {
    "whisper": lambda: transformers.WhisperConfig(
        **SPEECH, num_mel_bins=8, max_source_positions=30, suppress_tokens=None, begin_suppress_tokens=None
    ),
    "bart": lambda: transformers.BartConfig(
        **SPEECH, max_position_embeddings=128, forced_eos_token_id=None, tie_word_embeddings=False
    ),
    "t5": lambda: transformers.T5Config(
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_heads=4,
        num_layers=2,
        num_decoder_layers=LAYERS,
        vocab_size=VOCAB,
        eos_token_id=None,
        decoder_start_token_id=2,
        initializer_factor=3.0,
    ),
}
MADE: dict[str, Any] = {}


def model_of(name: str) -> Any:
    """Return a model with random weights, always the same."""
    if name not in MADE:
        MADE[name] = make({**CONFIGS, **HYBRID}[name]())
    return MADE[name]


def prepared(name: str) -> Any:
    """Return the same model with this package's attention."""
    model = model_of(name)
    model.set_attn_implementation("kvcache")
    return model


def make(config: Any, auto: Any = transformers.AutoModelForCausalLM) -> Any:
    """Make a model with random weights."""
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation="eager").eval()


def models_with_states() -> Iterator[Any]:
    """Return models with layers that keep a state of all tokens: convolution, linear attention."""
    yield make(transformers.Lfm2Config(**BASE | {"layer_types": ["conv", "full_attention"] * 2}))
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "head_dim": 16}
    sizes |= {"linear_num_value_heads": 2, "num_experts": 0}
    types = {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": [0, 1, 2, 3]}
    yield make(transformers.Qwen3NextConfig(**BASE | sizes | types))


def two_sided(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model with an encoder, and what it takes; of two texts, one is padded."""
    torch.manual_seed(0)
    config = TWO_SIDED[name]()
    kind = transformers.AutoModelForSpeechSeq2Seq if name == "whisper" else transformers.AutoModelForSeq2SeqLM
    model = kind.from_config(config, attn_implementation="eager").eval()
    start = torch.tensor([[2, 5, 9], [2, 6, 7]])
    if name == "whisper":
        return model, {"inputs": torch.randn(2, 8, 60), "decoder_input_ids": start}
    tokens = torch.randint(2, VOCAB, (2, 23))
    mask = torch.ones_like(tokens)
    tokens[0, 15:] = mask[0, 15:] = 0
    return model, {"inputs": tokens, "attention_mask": mask, "decoder_input_ids": start}


def random_tokens(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    """Return tokens that are neither padding, nor begin or end a text."""
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def join(*parts: torch.Tensor) -> torch.Tensor:
    """Return texts behind each other."""
    return torch.cat(parts, 1)


def prefix_for(model: Any, block_size: int = 16, **options: Any) -> kvcache.PrefixCache:
    """Return a prefix cache with rows in f32; a model with recurrent layers needs `state_bytes`."""
    memory = HFCache.make_kv_cache(model.config, "f32", block_size=block_size)
    return kvcache.PrefixCache(memory, fingerprint="a model", **options)


@contextlib.contextmanager
def feeding(model: Any) -> Iterator[list[int]]:
    """Give a list of the columns that the model is fed in each pass."""
    fed: list[int] = []

    def note(_: Any, args: Any, given: Any) -> None:
        fed.append((args[0] if args else given["input_ids"]).shape[1])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield fed
    finally:
        hook.remove()


def logits(model: Any, cache: Any, tokens: torch.Tensor) -> Any:
    """Feed tokens with their positions, as `generate` does: Bamba takes them from nowhere else."""
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + tokens.shape[1])[None]
    with torch.no_grad():
        return model(tokens, past_key_values=cache, position_ids=positions).logits


def theirs(model: Any) -> tuple[DynamicCache, str]:
    """Return transformers' own cache for a model, and the attention to use it with."""
    has_sdpa = all(getattr(part, "_supports_sdpa", True) for part in model.modules())
    own = MiniMaxCache() if model.config.model_type == "minimax" else DynamicCache(config=model.config)
    return own, "sdpa" if has_sdpa else "eager"


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

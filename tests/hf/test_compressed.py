"""DeepSeek V4, which keeps a window, and rows that stand for several tokens each, beside its own cache.

`test_sparse.py` and `test_pooled.py` test this model together with others.
"""

import copy
import functools
import threading

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import sparse_models  # noqa: E402 - torch may be missing
from support.sparse_models import (  # noqa: E402 - torch may be missing
    COMPRESSED,
    TOLERANCE,
    logits_of,
    made,
    model_of,
    off,
    their_cache,
    tokens_of,
    with_attention,
)

import kvcache.hf  # noqa: E402 - it imports those
from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.dense import Decoder  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

NAME, LENGTH = "deepseek_v4", 60
ATTENTIONS = ["eager", "kvcache"]
FULL, RESUME = kvcache.FullAttention, 64
WINDOW, HEAVY, SPARSE = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"


theirs = functools.partial(sparse_models.theirs, NAME)


def test_compressed_rows_and_a_choice_matter():
    """Logits depend on both, so that these tests can tell wrong ones from right ones."""
    tokens = tokens_of(1, LENGTH)
    want = theirs(tokens, [LENGTH])
    for change in ({"index_topk": LENGTH}, {"layer_types": ["sliding_attention"] * 4}):
        other = made(NAME, {**COMPRESSED, **change})
        other.load_state_dict(with_attention(NAME, "eager").state_dict(), strict=False)
        assert off(logits_of(other, their_cache(other), tokens, [LENGTH]), want) > 0.05


def test_memory_of_a_token():
    """A layer that chooses takes 320 bytes for a token in bf16, beside what its windows take whatever the length."""
    config = transformers.CONFIG_MAPPING[NAME](
        num_hidden_layers=1, layer_types=["compressed_sparse_attention"], mlp_layer_types=["moe"]
    )  # fmt: skip
    cache = HFCache.make_kv_cache(config, dtype="bf16")
    strided = [layer for layer in cache.layers if layer.policy == FULL(stride=4)]
    assert sum(layer.bytes_per_token for layer in strided) == 4 * 320  # a row stands for 4 tokens
    sizes = [sum(layer.most_bytes(length) for layer in cache.layers) for length in (1 << 12, 1 << 13, 1 << 14)]
    assert sizes[1] - sizes[0] == 320 << 12
    assert sizes[2] - sizes[1] == 320 << 13


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("rates", [(2, 3), (5, 7), pytest.param((4, 128), marks=pytest.mark.slow)])
def test_rows_for_any_number_of_tokens(rates, attention):
    sizes = dict(zip(("compressed_sparse_attention", "heavily_compressed_attention"), rates, strict=True))
    length = max(LENGTH, 2 * rates[1] + 9)
    model = made(NAME, {**COMPRESSED, "compress_rates": sizes})
    tokens = tokens_of(2, length)
    ends = [7, 8, length - 20, *range(length - 19, length + 1)]
    want = logits_of(model, their_cache(model), tokens, ends)
    model.set_attn_implementation(attention)
    assert off(logits_of(model, HFCache(model.config, dtype="f32"), tokens, ends), want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("hidden", [20, 38])
def test_a_token_that_a_mask_hides_between_others(hidden, attention):
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, hidden] = 0
    model = with_attention(NAME, attention)
    cache = HFCache(model.config, dtype="f32")
    with pytest.raises(kvcache.NotSupportedError, match="hides a token behind a row's first"):
        logits_of(model, cache, tokens, [40, LENGTH], mask)
    cache.reset()
    got = logits_of(model, cache, tokens, [40])
    with pytest.raises(kvcache.NotSupportedError, match="hides a token behind a row's first"):
        logits_of(
            model, cache, tokens, [41], mask.index_fill(1, torch.tensor(hidden), 1).index_fill(1, torch.tensor(38), 0)
        )
    want = theirs(tokens, [40, LENGTH])
    model = with_attention(NAME, attention)
    got = torch.cat((got, logits_of(model, cache, tokens, [LENGTH])), 1)
    assert off(got, want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_mask_that_shows_padding_later_is_refused(attention):
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :5] = 0
    model = with_attention(NAME, attention)
    cache = HFCache(model.config, dtype="f32")
    for end in (6, 14) if attention == "kvcache" else [6]:  # the model's own sees padding no more behind the window
        cache.reset()
        logits_of(model, cache, tokens, [end], mask)
        with pytest.raises(ValueError, match="which it hid as padding when they came"):
            logits_of(model, cache, tokens, [end + 1], torch.ones_like(mask))


@pytest.mark.parametrize("padding", [0, 5])
def test_a_mask_that_the_kernels_do_not_know(padding):
    """A mask of elements has the rows decoded, as it may hide any token."""
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :padding] = 0
    model = with_attention(NAME, "kvcache")
    cache = HFCache(model.config, dtype="f32")
    shown = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-7) & mask.bool()[:, None, None]
    given = {"attention_mask": {"sliding_attention": shown}, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        got = model(tokens, use_cache=True, **given, **{CACHE: cache}).logits
    assert cache.stats()["calls"] == {"kernel": 0, "dense": 0, "fallback": 4}
    assert off(got[:1], theirs(tokens[:1], [LENGTH])) < TOLERANCE
    assert off(got[1:, padding:], theirs(tokens[1:, padding:], [LENGTH - padding])) < TOLERANCE


def test_dropout_is_refused():
    model = made(NAME, {**COMPRESSED, "attention_dropout": 0.5}, "kvcache").train()
    cache = HFCache(model.config, dtype="f32")
    with pytest.raises(kvcache.NotSupportedError, match="dropout or a bias by position, with softcap or sinks"):
        logits_of(model, cache, tokens_of(1, LENGTH), [LENGTH])


def test_another_thread_waits_until_rows_are_decoded(monkeypatch):
    """A cache in the same memory ends a pass whose rows are all stored, but not while a layer reads how many it has."""
    tokens, threads = tokens_of(1, 16), []
    want = theirs(tokens, [16])[:, 15:]
    model = with_attention(NAME, "eager")
    cache = HFCache(model.config, dtype="f32")
    logits_of(model, cache, tokens, [15])
    other, decode = copy.deepcopy(cache), Decoder.decode_rows

    def decode_late(decoder, index, *args):
        if decoder is cache.texts.decoder and index == cache.layers[-1].compressed.index and not threads:
            threads.append(threading.Thread(target=logits_of, args=(model, other, tokens, [16])))
            threads[0].start()
            threads[0].join(0.1)
        return decode(decoder, index, *args)

    monkeypatch.setattr(Decoder, "decode_rows", decode_late)
    assert off(logits_of(model, cache, tokens, [16]), want) < TOLERANCE
    threads[0].join()


def test_what_cannot_be():
    cache = HFCache(model_of(NAME).config)
    with pytest.raises(kvcache.NotSupportedError, match="tokens cannot be evicted"):
        cache.evict(lambda prompt: None)
    with pytest.raises(ValueError, match="5 layers or more"):
        cache.shared_layer(4)
    with pytest.raises(ValueError, match="keys that are values"):
        HFCache(transformers.LlamaConfig(num_hidden_layers=1)).shared_layer(0)


@pytest.mark.parametrize(("index", "kind"), [(0, HEAVY), (1, WINDOW), (1, SPARSE), (2, HEAVY), (3, WINDOW)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_a_cache_of_a_model_that_compresses_other_layers(index, kind, attention):
    kinds = [WINDOW, HEAVY, SPARSE, SPARSE]
    kinds[index] = kind
    cache = HFCache(transformers.CONFIG_MAPPING[NAME](**{**COMPRESSED, "layer_types": kinds}))
    with pytest.raises(ValueError, match=rf"layer {index} of the model is of type .* give HFCache model\.config"):
        logits_of(with_attention(NAME, attention), cache, tokens_of(1, 3), [3])


def test_an_attention_with_the_function_of_before():
    """A program may have put the function of the class into an attention, to wrap it, before it was replaced."""
    model = made(NAME, COMPRESSED)
    HFCache(model.config)
    attention = model.model.layers[1].self_attn
    attention.forward = type(attention).forward.__wrapped__.__get__(attention)
    with pytest.raises(kvcache.NotSupportedError, match="make an HFCache, before that"):
        logits_of(model, HFCache(model.config), tokens_of(1, 3), [3])


def test_blocks_of_a_prefix_cache():
    """By default, blocks have as many tokens as rows need: rows for 128 tokens fit blocks of 128."""
    memory = HFCache.make_kv_cache(transformers.CONFIG_MAPPING[NAME]())
    assert memory.block_size == 128
    kvcache.PrefixCache(memory, fingerprint=NAME)
    assert HFCache.make_kv_cache(model_of(NAME).config).block_size == 64
    for rates, block_size in (((3, 5), 75), ((9, 256), 64)):  # blocks of 2304 tokens are too long to be kept
        sizes = dict(zip((SPARSE, HEAVY), rates, strict=True))
        memory = HFCache.make_kv_cache(transformers.CONFIG_MAPPING[NAME](**{**COMPRESSED, "compress_rates": sizes}))
        assert memory.block_size == block_size
    with pytest.raises(kvcache.NotSupportedError, match="a multiple of each layer's stride"):
        kvcache.PrefixCache(memory, fingerprint=NAME)

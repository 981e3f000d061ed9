"""Models whose indexers pool the keys of several tokens, GLM-5.3 Flash and Qwen 4, beside their own cache.

`test_sparse.py` tests these models together with others. DeepSeek V4, which pools rows, is tested here where it does
what they do.
"""

import copy

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.sparse_models import (  # noqa: E402 - torch may be missing
    COMPRESSED,
    GLM5,
    POOLED,
    TOLERANCE,
    logits_of,
    made,
    model_of,
    off,
    their_cache,
    theirs,
    tokens_of,
    with_attention,
)

import kvcache.hf  # noqa: E402 - it imports those
from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

LENGTH = 40
SLOW = pytest.mark.slow
# The others read decoded rows; without --slow test_back_to_any_length has one of them, and test_sparse.py the rest.
ATTENTIONS = ["kvcache", *(pytest.param(name, marks=SLOW) for name in ("eager", "sdpa"))]
PURE = ["glm5_next", "qwen4_exp_text"]
ALL = [*POOLED, "deepseek_v4"]
BLOCK = {
    "glm5_next": lambda n: {"index_kpool": n},
    "qwen4_exp_text": lambda n: {"indexer_compress_ratio": n},
    "deepseek_v4": lambda n: {"compress_rates": {"compressed_sparse_attention": n, "heavily_compressed_attention": 16}},
}


@pytest.mark.parametrize(("name", "attention"), [*((name, "kvcache") for name in BLOCK), ("deepseek_v4", "eager")])
def test_back_to_any_length(name, attention):
    """Half a block needs no state of its own: any number of tokens can be taken back, and others fed."""
    length, end = (60, 38) if name == "deepseek_v4" else (LENGTH, 28)  # a row of DeepSeek V4 may stand for 16 tokens
    tokens, others = tokens_of(1, length), tokens_of(1, length, seed=8)
    model = with_attention(name, attention)
    for kept in (end - 9, end - 8, end - 6, end - 3):
        cache = HFCache(model.config, dtype="f32")
        logits_of(model, cache, tokens, [16, end - 1, end])
        cache.crop(kept - end)
        other = copy.deepcopy(cache)
        mixed = torch.cat((tokens[:, :kept], others[:, kept:]), 1)
        want = theirs(name, mixed, [length])[:, kept:]
        model = with_attention(name, attention)
        assert off(logits_of(model, cache, mixed, [kept + 1, kept + 2, length]), want) < TOLERANCE
        assert off(logits_of(model, other, mixed, [length]), want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("block", [5, *(pytest.param(n, marks=SLOW) for n in (1, 16))])
@pytest.mark.parametrize("name", PURE)
def test_blocks_of_any_size(name, block, attention):
    most = "index_topk" if name == "glm5_next" else "indexer_budget"
    model = made(name, {**POOLED[name], **BLOCK[name](block), most: 2 * block})
    order = torch.randperm(90, generator=torch.Generator().manual_seed(5))  # equal tokens have equal keys in layer 0
    tokens = 3 + order[:60].repeat(2, 1)
    tokens[1] = tokens[1].flip(0)
    ends = [7, 8, 33, *range(34, 61)]
    want = logits_of(model, their_cache(model), tokens, ends)
    model.set_attn_implementation(attention)
    assert off(logits_of(model, HFCache(model.config, dtype="f32"), tokens, ends), want) < TOLERANCE


def test_a_token_may_leave_its_own_block_out():
    """Then the first tokens see nothing. transformers' eager attention takes the mean of all rows for them."""
    model = made("glm5_next", {**GLM5, "index_kpool_always_select_tail": False})
    tokens = tokens_of(2, LENGTH)
    want = logits_of(model, their_cache(model), tokens, [LENGTH])
    assert off(logits_of(model, HFCache(model.config, dtype="f32"), tokens, [LENGTH]), want) < TOLERANCE
    model.set_attn_implementation("sdpa")
    want = logits_of(model, their_cache(model), tokens, [LENGTH])
    model.set_attn_implementation("kvcache")
    got = logits_of(model, HFCache(model.config, dtype="f32"), tokens, [2, 9, *range(10, LENGTH + 1)])
    assert off(got, want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_positions_of_images(attention):
    """Qwen 4 rotates a block's key for its first token, whose three positions need not follow one another."""
    tokens, model = tokens_of(2, LENGTH), with_attention("qwen4_exp_text", "eager")
    positions = torch.randint(0, 50, (3, 2, LENGTH), generator=torch.Generator().manual_seed(3)).sort(-1).values

    def feed(past):
        found = []
        for begin, end in ((0, 13), (13, 14), (14, 30), *((n, n + 1) for n in range(30, LENGTH))):
            given = {"position_ids": positions[:, :, begin:end], "use_cache": True, CACHE: past}
            with torch.no_grad():
                found.append(model(tokens[:, begin:end], **given).logits)
        return torch.cat(found, 1)

    want = feed(their_cache(model))
    model.set_attn_implementation(attention)
    assert off(feed(HFCache(model.config, dtype="f32")), want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", POOLED)
def test_a_token_that_a_mask_hides_between_others(name, attention):
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 20] = 0
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    with pytest.raises(kvcache.NotSupportedError, match="hides a token behind a row's first"):
        logits_of(model, cache, tokens, [LENGTH], mask)
    cache.reset()
    want = theirs(name, tokens, [LENGTH])
    model = with_attention(name, attention)
    assert off(logits_of(model, cache, tokens, [LENGTH]), want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", POOLED)
def test_padding_that_later_masks_do_not_hide(name, attention):
    """GLM-5.3 Flash itself looks at the mask of new tokens alone."""
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, :5] = 0
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    logits_of(model, cache, tokens, [20], mask)
    if "qwen4" in name:
        with pytest.raises(ValueError, match="shows the first 5 tokens of row 1, which it hid as padding"):
            logits_of(model, cache, tokens, [LENGTH], torch.ones_like(mask))
        return
    want = theirs(name, tokens, [LENGTH], mask)
    model = with_attention(name, attention)
    got = logits_of(model, cache, tokens, [LENGTH])
    assert off(got, want[:, 20:]) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("hidden", ["between others", "behind all"])
def test_a_mask_for_each_token(hidden, attention):
    """The model's own indexer counts the blocks of each token, without what is hidden from it."""
    model, tokens = with_attention("qwen4_exp_text", attention), tokens_of(2, LENGTH)
    cache, least = HFCache(model.config, dtype="f32"), torch.finfo(torch.float32).min

    def feed(model, past, hidden):
        shown = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
        shown[1, 0, *hidden] = False
        mask = torch.where(shown, 0.0, least) if model.config._attn_implementation == "eager" else shown
        with torch.no_grad():
            return model(tokens, attention_mask=mask, use_cache=True, **{CACHE: past}).logits

    with pytest.raises(kvcache.NotSupportedError, match="hides other tokens from some tokens"):
        feed(model, cache, (slice(20, 30 if hidden == "between others" else None), slice(20)))
    padding = slice(None), slice(5)
    got = feed(model, cache, padding)
    model = with_attention("qwen4_exp_text", "eager")
    want = feed(model, their_cache(model), padding)
    assert off(got[0], want[0]) < TOLERANCE
    assert off(got[1, 5:], want[1, 5:]) < TOLERANCE


def without_choices(name, attention):
    """Return a model in which rounding changes no choice: of experts, and of the rows of texts of up to 12 tokens."""
    if name != "deepseek_v4":
        return with_attention(name, attention)
    return made(name, {**COMPRESSED, "num_experts_per_tok": 4}, attention)


@pytest.mark.parametrize("name", ALL)
def test_stored_types(name):
    tokens, model = tokens_of(2, 12), without_choices(name, "eager")
    want = logits_of(model, their_cache(model), tokens, [11])
    model.set_attn_implementation("kvcache")
    for dtype, most in (("f16", 1e-3), ("q8_0", 0.08), ("int8", 0.08)):
        cache = HFCache(model.config, dtype)
        assert 0 < off(logits_of(model, cache, tokens, [6, *range(7, 12)]), want) < most
        longer = logits_of(model, cache, tokens_of(2, LENGTH), [LENGTH])
        assert torch.isfinite(longer).all()


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_hashed_tokens_beside_the_layers(attention):
    """Qwen 4 keeps the last tokens, and a convolution of what it looks up for them, as states."""
    more = {"ple_layer_ids": [1], "ngram_size": 3, "heads_per_ngram": 2, "ngram_vocab_size_base": 50}
    more |= {"make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 2, "split_ngram_parts": 1}
    model = made("qwen4_exp_text", {**POOLED["qwen4_exp_text, recurrent"], **more})
    tokens = tokens_of(2, LENGTH)
    ends = [9, 10, 30, *range(31, LENGTH + 1)]
    want = logits_of(model, their_cache(model), tokens, ends)
    model.set_attn_implementation(attention)
    assert off(logits_of(model, HFCache(model.config, dtype="f32"), tokens, ends), want) < TOLERANCE


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*PURE, *(pytest.param(name, marks=SLOW) for name in POOLED if name not in PURE)])
def test_a_call_that_the_kernels_do_not_know(name, padded):
    """A wrapped weight, or an operation on the keys, has the rows decoded; then torch attends to what was chosen."""
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, : 5 if padded else 0] = 0
    ends = [20, 21, 30, *range(31, LENGTH + 1)]
    model = with_attention(name, "eager")
    want = logits_of(model, their_cache(model), tokens, ends, mask)
    model = made(name, POOLED[name], "kvcache")
    if "glm5" in name:
        for part in model.modules():
            if hasattr(part, "kv_b_proj"):
                part.kv_b_proj.register_forward_hook(lambda part, args, made: made + 0)
    else:
        for part in model.modules():
            if hasattr(part, "attention_dropout"):  # of which nothing is left, as each element is kept
                part.train()
                part.attention_dropout = 1e-30
    cache = HFCache(model.config, dtype="f32")
    if padded and "glm5" in name:
        with pytest.raises(kvcache.NotSupportedError, match="before its indexer was told of padding"):
            logits_of(model, cache, tokens, ends, mask)
        return
    got = logits_of(model, cache, tokens, ends, mask)
    assert cache.stats()["calls"]["kernel"] == 0
    assert off(got[0], want[0]) < TOLERANCE
    assert off(got[1, 5:], want[1, 5:]) < TOLERANCE


@pytest.mark.parametrize("name", ALL)
def test_other_caches_are_served_as_before(name):
    """A model that may use an `HFCache` also takes transformers' own, with any attention."""
    HFCache(model_of(name).config)
    tokens = tokens_of(2, LENGTH)
    want = theirs(name, tokens, [20, LENGTH])
    for attention in ("eager" if name == "deepseek_v4" else "sdpa", "kvcache"):
        model = with_attention(name, attention)
        assert off(logits_of(model, their_cache(model), tokens, [20, LENGTH]), want) < TOLERANCE
        with torch.no_grad():
            assert off(model(tokens, use_cache=False).logits, want) < TOLERANCE


@pytest.mark.parametrize("name", BLOCK)
def test_arguments_that_do_not_go_with_it(name):
    config = model_of(name).config
    with pytest.raises(kvcache.NotSupportedError, match="pools what each token brings: leave policy out"):
        HFCache(config, policy=kvcache.SlidingWindow(64))
    with pytest.raises(kvcache.NotSupportedError, match="leave select out"):
        HFCache(config, select=64)


@pytest.mark.parametrize("name", PURE)
def test_what_cannot_be(name):
    config = model_of(name).config
    cache = HFCache(config)
    with pytest.raises(kvcache.NotSupportedError, match=r"call kvcache\.hf\.enable, or make an HFCache, before"):
        cache.update_indexer(torch.zeros(1, 3, 32), 0)
    recurrent = HFCache(model_of(f"{name}, recurrent").config)
    with pytest.raises(ValueError, match="layer 0 of the model has keys of an indexer"):
        recurrent.index_keys(0)
    with pytest.raises(ValueError, match="5 layers or more"):
        recurrent.index_keys(4)


@pytest.mark.parametrize("name", BLOCK)
def test_a_cache_of_a_model_with_other_blocks(name):
    cache = HFCache(made(name, {**POOLED, "deepseek_v4": COMPRESSED}[name] | BLOCK[name](8)).config)
    with pytest.raises(ValueError, match=r"pools keys of 4 tokens, .* of 8: give HFCache model\.config"):
        logits_of(with_attention(name, "kvcache"), cache, tokens_of(1, LENGTH), [LENGTH])


@pytest.mark.parametrize(("name", "attention"), [*((name, "kvcache") for name in BLOCK), ("deepseek_v4", "eager")])
def test_half_precision(name, attention):
    tokens, model = tokens_of(2, 12), without_choices(name, "eager")
    want = logits_of(model, their_cache(model), tokens, [11])
    model = copy.deepcopy(model).to(torch.bfloat16)
    model.set_attn_implementation(attention)
    got = logits_of(model, HFCache(model.config, dtype="bf16"), tokens, [5, 6, 11])
    assert off(got.float(), want) < 0.1


@torch.inference_mode()
def test_a_forward_function_that_was_set_before(monkeypatch):
    model, tokens = copy.deepcopy(with_attention("glm5_next", "kvcache")), tokens_of(1, LENGTH)
    indexers = [part for part in model.modules() if type(part).__name__ == "Glm5NextTextIndexer"]

    def wrap():
        for indexer in indexers:
            own = vars(indexer).pop("forward", None) or indexer.forward
            monkeypatch.setitem(vars(indexer), "forward", lambda *args, own=own, **given: own(*args, **given))

    kind = type(indexers[0])
    with monkeypatch.context() as context:
        context.setattr(kind, "forward", getattr(kind.forward, "__wrapped__", kind.forward))
        wrap()
    with pytest.raises(kvcache.NotSupportedError, match=r"of the model's indexer was set before the first HFCache"):
        model(tokens, past_key_values=HFCache(model.config))
    for indexer in indexers:
        del vars(indexer)["forward"]
    wrap()
    model(tokens, past_key_values=HFCache(model.config))

"""Models with sparse attention: logits and texts with an `HFCache`, in every way of feeding, beside their own cache."""

import copy

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.sparse_models import (  # noqa: E402 - torch may be missing
    CHANGES,
    TOPK,
    logits_of,
    model_of,
    off,
    their_cache,
    tokens_of,
)

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

LENGTH = 40
TOLERANCE = 2e-6  # of the largest logit
ATTENTIONS = ["eager", "kvcache"]
ENDS = {"whole": [LENGTH], "pieces": [13, 14, 25, LENGTH], "tokens": [20, *range(21, LENGTH + 1)]}
NAMES = [*CHANGES]
INDEXERS = {"glm_moe_dsa": 3, "hy_v4": 2, "dots3_note_text": 2, "mistral_large4": 5, "minimax_m3_vl_text": 3}
OWN_ROWS = {"mistral_large4": 4}
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 7},
    "several": {"num_return_sequences": 2, "num_beams": 2},
}


def with_attention(name, attention):
    model = model_of(name)
    model.set_attn_implementation(attention)
    return model


def theirs(name, tokens, ends, mask=None):
    model = with_attention(name, "eager")
    return logits_of(model, their_cache(model), tokens, ends, mask)


def generate(model, past, tokens, **options):
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens), **options}
    return model.generate(tokens, past_key_values=past, **given)


def test_a_choice_matters():
    """Logits depend on the choice, so that these tests can tell a wrong choice from a right one."""
    tokens = tokens_of(1, LENGTH)
    for name in NAMES:
        model, block = with_attention(name, "eager"), "index_topk_blocks" in CHANGES[name]
        texts = model.config.get_text_config()
        want = logits_of(model, their_cache(model), tokens, [LENGTH])
        field = "topk_blocks" if block else "index_topk"
        indexers = [part for part in model.modules() if hasattr(part, field) and hasattr(part, "k_norm")]
        assert indexers
        assert block or (texts.index_n_heads >= 16 and texts.index_topk == TOPK < LENGTH)
        for part in indexers:
            setattr(part, field, LENGTH)
        dense = logits_of(model, their_cache(model), tokens, [LENGTH])
        for part in indexers:
            setattr(part, field, getattr(texts, f"index_{field.removeprefix('index_')}"))
        assert off(dense, want) > 0.05


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_has_keys_of_indexers_beside_the_rows(name):
    cache = HFCache(model_of(name).config)
    layers = cache._cache.layers
    rows = [layer for layer in layers if layer.v_head_dim]
    assert len(rows) == OWN_ROWS.get(name, 4)
    assert [layer.v_head_dim for layer in layers[len(rows) :]] == [0] * INDEXERS.get(name, 4)
    assert [layer.head_dim for layer in layers[len(rows) :]] == [32] * INDEXERS.get(name, 4)
    if name == "dots3_note_text":
        assert [(layer.head_dim, layer.v_head_dim) for layer in rows] == [(48, 32)] * 2 + [(64, 48)] * 2
    if name == "mistral_large4":  # the layer without a rotation keeps latents alone
        assert [layer.head_dim for layer in rows] == [48, 48, 32, 48]
    assert len(cache.policy) == len(rows)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits(name, ends, attention):
    tokens = tokens_of(2, LENGTH)
    want = theirs(name, tokens, ENDS[ends])
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    assert off(logits_of(model, cache, tokens, ENDS[ends]), want) < TOLERANCE
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_left_padding(name, attention):
    tokens, mask = tokens_of(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :5] = mask[2, :21] = 0
    want = theirs(name, tokens, ENDS["tokens"], mask)
    model = with_attention(name, attention)
    got = logits_of(model, HFCache(model.config, dtype="f32"), tokens, ENDS["tokens"], mask)
    paddings = (0, 5, 21)
    if name == "minimax_m3_vl_text" and attention == "kvcache":
        paddings = paddings[:1]  # its blocks are blocks of columns, and the keys of padding take part in the choice
    for row, padding in enumerate(paddings):
        assert off(got[row, padding:], want[row, padding:]) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_rows_come_and_go(name, attention):
    """Crop, reorder, repeat, select and copy."""
    tokens = tokens_of(2, LENGTH)
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    logits_of(model, cache, tokens, [20, 30])
    cache.crop(-8)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    other = copy.deepcopy(cache)
    swapped = tokens[[1, 0]]
    ends = [27, *range(28, LENGTH + 1)]
    want = theirs(name, swapped, [22, *ends])[:, 22:]
    model = with_attention(name, attention)
    assert off(logits_of(model, cache, swapped, ends), want) < TOLERANCE
    cache.reset()
    assert off(logits_of(model, other, swapped, ends), want) < TOLERANCE
    assert off(logits_of(model, cache, swapped, [22, *ends])[:, 22:], want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_generate(name, way, attention):
    tokens = tokens_of(1 if way == "lookup" else 2, 21)
    model = with_attention(name, "eager")
    want = generate(model, their_cache(model), tokens, **WAYS[way])
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    assert generate(model, cache, tokens, **WAYS[way]).tolist() == want.tolist()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_saved_state_goes_on(name, attention, tmp_path):
    tokens = tokens_of(2, LENGTH)
    ends = [25, 26, LENGTH]
    want = theirs(name, tokens, [20, *ends])[:, 20:]
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    logits_of(model, cache, tokens, [20])
    cache.save(tmp_path / "text")
    loaded = HFCache.load(model.config, tmp_path / "text")
    assert loaded._cache.layers == cache._cache.layers
    assert off(logits_of(model, loaded, tokens, ends), want) < TOLERANCE
    other = copy.deepcopy(model.config)
    other.get_text_config().index_head_dim = 64
    with pytest.raises(kvcache.StateFormatError, match="of another shape"):
        HFCache.load(other, tmp_path / "text")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_begin_as_earlier_ones(name, attention):
    model = with_attention(name, attention)
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=4)
    prefix = kvcache.PrefixCache(memory, fingerprint=name)
    tokens = tokens_of(1, LENGTH)
    first = HFCache(model.config, prefix=prefix)
    first.acquire(tokens[:, :30])
    logits_of(model, first, tokens, [30])
    first.release()
    second = HFCache(model.config, prefix=prefix)
    matched = second.acquire(tokens)
    assert 20 < matched <= 30
    want = theirs(name, tokens, [30, LENGTH])[:, matched:]
    model = with_attention(name, attention)
    assert off(logits_of(model, second, tokens, [LENGTH]), want) < TOLERANCE


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_a_failed_pass_is_fed_again(name, attention):
    tokens = tokens_of(2, LENGTH)
    want = theirs(name, tokens, [20, LENGTH])
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    logits_of(model, cache, tokens, [20])
    part = [part for part in model.modules() if type(part).__name__.endswith("Indexer")][-1]

    def fail(*args):
        raise KeyboardInterrupt

    hook = part.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        logits_of(model, cache, tokens, [LENGTH])
    hook.remove()
    assert cache.get_seq_length() == 20
    assert off(logits_of(model, cache, tokens, [LENGTH]), want[:, 20:]) < TOLERANCE


def test_stored_types_and_policies_reach_the_keys_of_indexers():
    config = model_of("minimax_m3_vl_text").config
    cache = HFCache(config, dtype="q8_0", transform="hadamard", policy=kvcache.SlidingWindow(64))
    assert {(layer.k_dtype, layer.k_transform) for layer in cache._cache.layers} == {("q8_0", "hadamard")}
    assert {layer.policy for layer in cache._cache.layers} == {kvcache.SlidingWindow(64)}
    window = kvcache.SlidingWindow(100)
    full = kvcache.FullAttention()
    config = model_of("mistral_large4").config
    cache = HFCache(config, policy=[full, window, full, full])  # layers 1, 2, 4 and 5 read layer 1
    assert [layer.policy for layer in cache._cache.layers[4:]] == [full, window, full, window, full]


def test_keys_of_an_indexer_in_a_wrong_layer_are_refused():
    cache = HFCache(model_of("glm_moe_dsa").config)
    with pytest.raises(ValueError, match="layer 2 of the model has keys of an indexer"):
        cache.update_indexer(torch.zeros(1, 3, 32), 2)
    with pytest.raises(ValueError, match="5 layers or more"):
        cache.update_indexer(torch.zeros(1, 3, 32), 4)
    cache = HFCache(model_of("mistral_large4").config)
    with pytest.raises(ValueError, match="layer 4 of the model has keys and values"):
        cache.update(torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 16), 4)

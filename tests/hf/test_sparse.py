"""Models with sparse attention: logits and texts with an `HFCache`, in every way of feeding, beside their own cache."""

import copy

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.sparse_models import (  # noqa: E402 - torch may be missing
    CHANGES,
    POOLED,
    TOLERANCE,
    TOPK,
    logits_of,
    model_of,
    off,
    their_cache,
    theirs,
    tokens_of,
    with_attention,
)

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.choosing import Chosen  # noqa: E402 - it imports those
from kvcache.hf.passes import ForwardPass  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

LENGTH = 40
SLOW = pytest.mark.slow
ATTENTIONS = ["kvcache", pytest.param("eager", marks=SLOW)]  # test_logits has each model with both
ENDS = {"whole": [LENGTH], "pieces": [13, 14, 25, LENGTH], "tokens": [28, *range(29, LENGTH + 1)]}
QUICK = {"hy_v4", "mistral_large4", "minimax_m3_vl_text", "glm5_next"}  # sinks, shared rows, blocks, pooled keys
QUICK |= {"qwen4_exp_text, recurrent", "deepseek_v4"}
RECURRENT = [name for name in POOLED if "recurrent" in name]
NAMES = [
    name if name in QUICK else pytest.param(name, marks=SLOW)
    for name in [*CHANGES, *POOLED, "deepseek_v4"] if name not in RECURRENT
]  # fmt: skip
WITH_RECURRENT = NAMES + [pytest.param(name, marks=[] if name in QUICK else SLOW) for name in RECURRENT]
WIDTHS = {"index_topk", "topk_blocks", "block_topk", "token_budget"}  # attributes that say how much is chosen
PIECES = [13, 23, 25, *range(26, LENGTH + 1)]  # a single token is no padding for GLM-5.3
MOVED = {("minimax_m3_vl_text", "kvcache"), ("deepseek_v4", "eager"), ("deepseek_v4", "kvcache")}
PADDINGS = [(0, 0), (1, 5), (2, 21)]  # rows, and the columns that a mask hides before them
WITH_IMAGES = [name for name in ("dots3_note", "hy_v4_vl", "minimax_m3_vl") if name in transformers.CONFIG_MAPPING]
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 7},
    "several": {"num_return_sequences": 2, "num_beams": 2},
}
GENERATED = {}  # with transformers' own cache, for each attention of ours the same


def generate(model, past, tokens, **options):
    given = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens), **options}
    return model.generate(tokens, past_key_values=past, **given)


def test_a_choice_matters():
    """Logits depend on the choice, so that these tests can tell a wrong choice from a right one."""
    tokens = tokens_of(1, LENGTH)
    for name in [*CHANGES, *POOLED]:
        model = with_attention(name, "eager")
        want = logits_of(model, their_cache(model), tokens, [LENGTH])
        indexers = [part for part in model.modules() if type(part).__name__.endswith("Indexer")]
        before = {field: value for field, value in vars(indexers[0]).items() if field in WIDTHS}
        heads = getattr(indexers[0], "n_heads", None) or getattr(indexers[0], "index_n_heads", None)
        assert "topk_blocks" in before or (heads >= 16 and TOPK in before.values())
        for part in indexers:
            vars(part).update(dict.fromkeys(before, LENGTH))
        dense = logits_of(model, their_cache(model), tokens, [LENGTH])
        for part in indexers:
            vars(part).update(before)
        assert off(dense, want) > 0.05


@pytest.mark.parametrize("name", [*CHANGES, *POOLED, *WITH_IMAGES])
def test_a_configuration_says_the_same_layers(name):
    """`KVCache.from_config` makes the same layers as `HFCache`, beside layers that read another one's rows."""
    sparse = {"text_config": CHANGES["minimax_m3_vl_text"]} if name == "minimax_m3_vl" else {}
    configs = [] if name in POOLED else [transformers.CONFIG_MAPPING[name](**sparse)]
    configs += [] if name in WITH_IMAGES else [model_of(name).config]
    for config in configs:
        layers = [layer for layer in kvcache.KVCache.from_config(config).layers if layer.share is None and layer.policy]
        own = HFCache(config)._cache.layers
        assert len(layers) == len(own)
        for layer, ours in zip(layers, own, strict=True):
            for field in ("num_kv_heads", "head_dim", "v_head_dim", "value_in_key"):
                assert getattr(layer, field) == getattr(ours, field)
            assert type(layer.policy) is type(ours.policy)


@pytest.mark.parametrize(("ends", "attention"), [*((ends, "kvcache") for ends in ENDS), ("pieces", "eager")])
@pytest.mark.parametrize("name", WITH_RECURRENT)
def test_logits(name, ends, attention):
    tokens = tokens_of(2, LENGTH)
    want = theirs(name, tokens, ENDS[ends])
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    assert off(logits_of(model, cache, tokens, ENDS[ends]), want) < TOLERANCE
    assert cache.get_seq_length() == LENGTH
    counts = cache.stats()["calls"]
    assert {kind for kind in counts if counts[kind]} == {"dense" if attention == "eager" else "kernel"}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", WITH_RECURRENT)
def test_left_padding(name, attention):
    tokens, mask = tokens_of(3, LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, :5] = mask[2, :21] = 0
    ends = PIECES if name in POOLED else ENDS["tokens"]
    want = theirs(name, tokens, ends, mask)
    if (name, attention) in MOVED:  # in transformers, padding moves the blocks
        rows = [(tokens[row : row + 1, n:], [end - n for end in ends if end > n]) for row, n in PADDINGS]
        alone = [theirs(name, *row) for row in rows]
        want = torch.cat([torch.nn.functional.pad(one, (0, 0, LENGTH - one.shape[1], 0)) for one in alone])
    model = with_attention(name, attention)
    got = logits_of(model, HFCache(model.config, dtype="f32"), tokens, ends, mask)
    for row, padding in PADDINGS:
        assert off(got[row, padding:], want[row, padding:]) < TOLERANCE


@pytest.mark.parametrize(
    ("hidden", "counted"),
    [
        ("in the middle", "columns"),
        ("in the middle, and on the left", "tokens that are shown"),
        ("later", "columns"),
        pytest.param("in the middle", "tokens that are shown", marks=SLOW),
        pytest.param("in the middle, and on the left", "columns", marks=SLOW),
        pytest.param("later", "tokens that are shown", marks=SLOW),
    ],
)
@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_hidden_tokens(name, hidden, counted):
    """A mask hides tokens that were stored. Blocks of MiniMax M3 are scored with them."""
    tokens, mask = tokens_of(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 10:15] = 0
    if hidden == "in the middle, and on the left":
        mask[1, :8] = 0
    ends = [LENGTH - 20, *range(LENGTH - 19, LENGTH + 1)]
    first = ends[0] if hidden == "later" else 0
    positions = torch.arange(LENGTH).expand(2, -1) if counted == "columns" else (mask.cumsum(1) - 1).clamp(min=0)

    def feed(model, past):
        begin, found = 0, []
        for end in ends:
            shown = mask[:, :end] if end > first else torch.ones(2, end, dtype=torch.long)
            given = {"attention_mask": shown, "position_ids": positions[:, begin:end], "use_cache": True, CACHE: past}
            with torch.no_grad():
                found.append(model(tokens[:, begin:end], **given).logits)
            begin = end
        return torch.cat(found, 1)

    want = feed(with_attention(name, "eager"), their_cache(model_of(name)))
    model = with_attention(name, "kvcache")
    cache = HFCache(model.config, dtype="f32")
    got = feed(model, cache)
    moves = name == "minimax_m3_vl_text" and "left" in hidden  # the blocks of transformers, by the padding
    for row in [0] if moves else [0, 1]:
        assert off(got[row][mask[row] == 1], want[row][mask[row] == 1]) < TOLERANCE
    assert cache.stats()["calls"]["kernel"] == 4 * len(ends)


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


@pytest.mark.parametrize(
    ("way", "attention"),
    [
        pytest.param("greedy", "kvcache", marks=SLOW),  # chunked is greedy, too
        ("beams", "kvcache"),
        pytest.param("beams", "eager", marks=SLOW),
        ("lookup", "kvcache"),
        ("chunked", "kvcache"),
        pytest.param("several", "kvcache", marks=SLOW),  # of several beams
    ],
)
@pytest.mark.parametrize("name", WITH_RECURRENT)
def test_generate(name, way, attention):
    if way == "lookup" and name in {*POOLED, "deepseek_v4"}:
        pytest.skip("transformers takes these models for stateful ones, whose guesses it cannot take back")
    tokens = tokens_of(1 if way == "lookup" else 2, 21)
    if (name, way) not in GENERATED:
        model = with_attention(name, "eager")
        GENERATED[name, way] = generate(model, their_cache(model), tokens, **WAYS[way])
    model = with_attention(name, attention)
    cache = HFCache(model.config, dtype="f32")
    assert generate(model, cache, tokens, **WAYS[way]).tolist() == GENERATED[name, way].tolist()


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
    other.get_text_config().index_head_dim = other.get_text_config().indexer_head_dim = 64
    with pytest.raises(kvcache.StateFormatError, match="of another shape"):
        HFCache.load(other, tmp_path / "text")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", WITH_RECURRENT)
def test_prompts_begin_as_earlier_ones(name, attention):
    model = with_attention(name, attention)
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=16 if name == "deepseek_v4" else 4)
    prefix = kvcache.PrefixCache(memory, fingerprint=name, state_bytes=HFCache.state_bytes(model))
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
    part = part.q_b_proj if name == "deepseek_v4" else part  # whose own function is not called

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


@pytest.mark.parametrize("how", ["read", "replaced"])
@pytest.mark.parametrize("name", ["hy_v4", "minimax_m3_vl_text", "glm5_next"])
def test_a_choice_that_the_model_makes(name, how):
    """A program may read what an indexer chose, or put another choice in its place: then torch scores the keys."""
    tokens = tokens_of(2, LENGTH)
    ends = [13, *range(14, LENGTH + 1)]
    want = theirs(name, tokens, ends)
    model = with_attention(name, "kvcache")
    seen = []

    def read(part, args, chosen):
        seen.append(int(chosen.max()))
        return chosen.clone() if how == "replaced" else None

    hooks = [part.register_forward_hook(read) for part in model.modules() if type(part).__name__.endswith("Indexer")]
    cache = HFCache(model.config, dtype="f32")
    got = logits_of(model, cache, tokens, ends)
    for hook in hooks:
        hook.remove()
    assert off(got, want) < TOLERANCE
    assert max(seen) == (LENGTH - 1 if name != "minimax_m3_vl_text" else (LENGTH - 1) // 4)
    assert cache.stats()["calls"]["kernel"] == 4 * len(ends)


@pytest.mark.parametrize("name", [*CHANGES, "glm5_next", "qwen4_exp_text"])
def test_short_texts_choose_nothing(name, monkeypatch):
    """As long as every row would be chosen, nothing is scored. The next token chooses."""
    most = {"minimax_m3_vl_text": 3 * 4, "glm5_next": TOPK + 3, "qwen4_exp_text": TOPK + 3}.get(name, TOPK)
    tokens, mask = tokens_of(2, most + 3), torch.ones(2, most + 3, dtype=torch.long)
    mask[:, :2] = tokens[:, :2] = 0
    ends = [most - 2, most + 2, most + 3]
    want = theirs(name, tokens[:, 2:], [end - 2 for end in ends])
    model = with_attention(name, "kvcache")
    cache = HFCache(model.config, dtype="f32")
    choose, seen = kvcache.Batch.choose, []

    def note(batch, *args, **options):
        seen.append(cache.get_seq_length())
        return choose(batch, *args, **options)

    monkeypatch.setattr(kvcache.Batch, "choose", note)
    assert off(logits_of(model, cache, tokens, ends, mask)[:, 2:], want) < TOLERANCE
    assert min(seen) == most + 2


def test_blocks_of_columns_behind_padding():
    """A choice of columns that the model made holds for the positions behind each row's padding."""
    indices = torch.tensor([[[[0, 2, -1]], [[1, 3, -1]]]] * 2)  # [batch, KV heads, queries, blocks of 4]

    class Pass:
        offsets, not_padding = [0, 8], None
        pack = ForwardPass.pack

    def positions(offsets):
        Pass.offsets = offsets
        made = Chosen(indices, 4)._of_columns(Pass())
        return made["chosen"].tolist(), made["chosen_block"]

    whole = [[[0, 2, -1], [1, 3, -1]], [[-2, 0, -1], [-1, 1, -1]]]  # those below 0 count for nothing
    assert positions([0, 8]) == (whole, 4)
    chosen, block = positions([0, 6])
    assert block == 1
    assert chosen[0] == [[0, 1, 2, 3, 8, 9, 10, 11, *[-1] * 4], [4, 5, 6, 7, 12, 13, 14, 15, *[-1] * 4]]
    assert chosen[1][0] == [-6, -5, -4, -3, 2, 3, 4, 5, *[-1] * 4]


def test_a_mask_stays_as_it_is_where_an_indexer_reads_it():
    model = with_attention("deepseek_v32", "kvcache")
    masks = []

    def note(part, args, kwargs):
        masks.append((args[3], kwargs))

    hook = model.model.layers[0].self_attn.indexer.register_forward_pre_hook(note, with_kwargs=True)
    tokens = tokens_of(2, 9)
    logits_of(model, HFCache(model.config), tokens, [9])
    hook.remove()
    plane = masks[0][0]
    assert plane.shape == (2, 9, 9)
    assert plane.mask.made is None
    assert torch.equal(torch.as_tensor(plane.elements()), torch.ones(9, 9, dtype=torch.bool).tril().expand(2, -1, -1))
    assert plane.mask.made is None


def test_sinks_of_a_model_in_half_precision():
    """The kernels take sinks of f32, and a model of another type has sinks of that type."""
    tokens = tokens_of(1, LENGTH)
    want = theirs("hy_v4", tokens, [TOPK])
    model = copy.deepcopy(with_attention("hy_v4", "kvcache")).to(torch.float16)
    cache = HFCache(model.config, dtype="f32")
    assert off(logits_of(model, cache, tokens, [TOPK]).float(), want) < 0.1
    assert cache.stats()["calls"]["kernel"] == 4

"""Which ways of `generate` hold for models with recurrent layers: the table in docs/huggingface.md."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from hf.test_states import MODELS  # noqa: E402 - torch may be missing
from support.hf_pairs import CONFIGS, make, prefix_for, random_tokens  # noqa: E402 - as above

import kvcache.hf  # noqa: E402 - as above
from kvcache import NotSupportedError  # noqa: E402 - as above
from kvcache.hf import HFCache  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

QUICK = {"lfm2", "minimax", "qwen3_next"}
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(MODELS)]
CONVOLUTIONS = {"lfm2", "lfm2_moe", "lfm3"}  # whose recurrent layers are convolutions alone
BY_STEPS = {"jamba", "zamba"}  # whose layers begin anew in a pass of several tokens
SEARCHES = {"greedy": {}, "sampling": {"do_sample": True}, "beams": {"num_beams": 3}}
ASSISTED = {"prompt lookup": {"prompt_lookup_num_tokens": 3}, "early exit": {"assistant_early_exit": 2}, "draft": {}}
MOVED = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
}
MADE = {}


def prepared(name):
    """Return a model that always has the same weights."""
    if name not in MADE:
        MADE[name] = MODELS[name]() if name in MODELS else make(CONFIGS[name]())
        MADE[name].set_attn_implementation("kvcache")
    return MADE[name]


def text_of(num_repeated=0):
    tokens = random_tokens(1, 100)
    tokens[:, 100 - num_repeated :] = tokens[:, :num_repeated]  # which a lookup finds
    return tokens


def generate(model, tokens, cache=None, **options):
    torch.manual_seed(1)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, **options}
    given = {} if cache is None else {"past_key_values": cache}
    return model.generate(tokens, attention_mask=torch.ones_like(tokens), **given, **options)


@pytest.mark.parametrize("way", SEARCHES)
@pytest.mark.parametrize("name", ALL)
def test_searches(name, way):
    """Also in the next turn, and with another one in its place."""
    model, tokens = prepared(name), text_of()
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, tokens, cache, **SEARCHES[way])
    assert text.shape == (1, 112)
    for seed in (1, 2):
        turn = torch.cat([text, random_tokens(1, 9, seed=seed)], 1)
        assert generate(model, turn, cache, **SEARCHES[way]).shape == (1, 133)


@pytest.mark.parametrize("name", ALL)
def test_prefill_in_chunks(name):
    model, tokens = prepared(name), text_of()
    options = {"prefill_chunk_size": 30}
    if name in BY_STEPS:
        with pytest.raises(NotSupportedError, match="by single tokens only"):
            generate(model, tokens, HFCache(model.config, dtype="f32"), **options)
        return
    got = generate(model, tokens, HFCache(model.config, dtype="f32"), **options)
    assert torch.equal(got, generate(model, tokens, HFCache(model.config, dtype="f32")))


@pytest.mark.parametrize("way", ASSISTED)
@pytest.mark.parametrize("name", ALL)
def test_assisted_decoding(name, way):
    """Convolutions go back; transformers refuses the others, or its own cache would."""
    model, tokens, options = prepared(name), text_of(20), ASSISTED[way]
    if way == "draft":
        options = {"assistant_model": prepared("llama")}
    cache = HFCache(model.config, dtype="f32")
    if name in CONVOLUTIONS:
        assert torch.equal(generate(model, tokens, cache, **options), generate(model, tokens))
        return
    if model._is_stateful:
        with pytest.raises(ValueError, match="not supported with stateful models"):
            generate(model, tokens, cache, **options)
        return
    assert name == "minimax"
    words = {"early exit": "does not support `crop`"}.get(way, r"layer 1 cannot go back by \d tokens, to 1\d\d: its")
    words += "|requires a cache that can be cropped"  # of transformers since 5.24
    with pytest.raises((NotSupportedError, RuntimeError, ValueError), match=words):
        generate(model, tokens, cache, **options)
    model.config.num_hidden_layers = 4  # which an early exit that fails leaves cut


@pytest.mark.parametrize("name", ALL)
def test_as_a_draft(name):
    """transformers takes back what a draft guessed wrong: refused, where its own cache would keep it in the states."""
    model, draft, tokens = prepared("llama"), prepared(name), text_of()
    want = generate(model, tokens, HFCache(model.config, dtype="f32"))
    kvcache.hf.enable(draft, dtype="f32")
    try:
        if name in CONVOLUTIONS:
            got = generate(model, tokens, HFCache(model.config, dtype="f32"), assistant_model=draft)
            assert torch.equal(got, want)
            return
        with pytest.raises(NotSupportedError, match=r"cannot go back by \d+ tokens, to \d+: its recurrent state"):
            generate(model, tokens, HFCache(model.config, dtype="f32"), assistant_model=draft)
    finally:
        kvcache.hf.disable(draft)
        draft.set_attn_implementation("kvcache")


@pytest.mark.parametrize("way", MOVED)
def test_searches_that_transformers_has_moved_to_its_hub(way):
    model = prepared("lfm2")
    with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
        generate(model, text_of(), HFCache(model.config, dtype="f32"), **MOVED[way])


@pytest.mark.parametrize("name", ALL)
def test_prefix_caches(name):
    """The same prompt is fed from its last token on."""
    model, tokens = prepared(name), text_of()
    prefix = prefix_for(model, state_bytes=HFCache.state_bytes(model))
    if name in BY_STEPS:
        with pytest.raises(NotSupportedError, match="single tokens only: leave prefix out"):
            HFCache(model.config, prefix=prefix)
        return
    for _ in range(2):
        cache = HFCache(model.config, prefix=prefix)
        text = generate(model, tokens, cache)
        cache.release(text)
    assert prefix.stats.matched == 99


@pytest.mark.parametrize("name", ALL)
def test_files_and_crop(name, tmp_path):
    model, tokens = prepared(name), text_of()
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, tokens, cache)
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert torch.equal(generate(model, text, loaded), generate(model, text, cache))
    cache = HFCache(model.config, dtype="f32")
    generate(model, tokens, cache)
    with pytest.raises(NotSupportedError, match=r"cannot go back by 3 tokens, to 108"):
        cache.crop(-3)
    if name in BY_STEPS:
        return
    cache.crop(92 - 111)
    assert torch.equal(generate(model, tokens, cache), text)

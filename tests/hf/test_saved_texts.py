"""Another text for a cache that was loaded: it keeps what both begin with, as the cache that was saved does."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, make, model_of, random_tokens, two_sided  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache import state  # noqa: E402 - as above
from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - as above

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEW = 6
EDITS = {
    "longer": lambda text: torch.cat([text, random_tokens(len(text), 3, 8)], 1),
    "the whole text": lambda text: text,
    "without its last token": lambda text: text[:, :-1],
    "shorter": lambda text: text[:, :12],
    "one token": lambda text: text[:, :1],
    "another, and longer": lambda text: random_tokens(len(text), text.shape[1] + 9, 9),
    "another, as long": lambda text: random_tokens(*text.shape, 9),
    "another, and shorter": lambda text: random_tokens(len(text), 9, 9),
    "a token in the middle is another": lambda text: edit(text, 10),
    "a token of the answer is another": lambda text: edit(text, 22),
    "longer, and a token of one row is another": lambda text: edit(torch.cat([text, text], 1), 21, 0),
}


def edit(text, column, row=slice(None)):
    edited = text.clone()
    edited[row, column] = 3 + (edited[row, column] + 1) % 90
    return edited


def generate(model, cache, tokens, mask=None, **options):
    """Generate from a text, whose mask shows what follows its first columns; return all tokens."""
    model.set_attn_implementation("kvcache")
    if mask is not None:
        more = torch.ones(len(tokens), max(0, tokens.shape[1] - mask.shape[1]), dtype=mask.dtype)
        options["attention_mask"] = torch.cat([mask[:, : tokens.shape[1]], more], 1)
    return model.generate(tokens, past_key_values=cache, **{"max_new_tokens": NEW, "do_sample": False, **options})


def fresh(model, tokens, mask=None, **options):
    return generate(model, HFCache(model.config, dtype="f32"), tokens, mask, **options)


def fed(model, cache, tokens, mask=None, **options):
    """Return what is generated, and the columns of each pass."""
    columns = []
    part = model.model.embed_tokens
    hook = part.register_forward_pre_hook(lambda _, args: columns.append(args[0].shape[1]))
    try:
        return generate(model, cache, tokens, mask, **options), columns
    finally:
        hook.remove()


def check_loaded(tmp_path, model, cache, text, mask=None, *, save=None, load=None, **options):
    """Give a text to a cache and to its loaded copy: both feed the same columns, and get it right."""
    cache.save(tmp_path / "chat", **save or {})
    loaded = HFCache.load(model.config, tmp_path / "chat", **load or {})
    want, columns = fed(model, cache, text, mask, **options)
    got, loaded_columns = fed(model, loaded, text, mask, **options)
    assert torch.equal(got, want)
    assert torch.equal(got, fresh(model, text, mask, **options))
    assert loaded_columns == columns
    return loaded


QUICK = [("llama", 3), ("gemma3", 1)]  # models, and the rows of a batch
SLOW = [("llama", 1), ("gemma3", 3), ("mistral", 1), ("mistral", 3), ("llama4", 1), ("llama4", 3)]


@pytest.mark.parametrize(("name", "rows"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
@pytest.mark.parametrize("edited", EDITS)
def test_other_texts(tmp_path, edited, name, rows):
    """Also where windows have moved on."""
    model = model_of(name)
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(rows, 20))
    check_loaded(tmp_path, model, cache, EDITS[edited](text))


@pytest.mark.parametrize("edited", EDITS)
def test_tokens_that_the_user_gives(tmp_path, edited):
    """The texts of a cache that calls of the model filled are compared, too."""
    model, tokens = model_of("llama"), random_tokens(2, 20)
    model.set_attn_implementation("kvcache")
    cache = HFCache(model.config, dtype="f32")
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    cache.save(tmp_path / "chat", tokens=torch.cat([tokens, random_tokens(2, 2)], 1))
    loaded = HFCache.load(model.config, tmp_path / "chat")
    text = EDITS[edited](torch.cat([tokens, random_tokens(2, 5, 7)], 1))
    got, columns = fed(model, loaded, text)
    assert torch.equal(got, fresh(model, text))
    common = (text[:, :20] == tokens[:, : text.shape[1]]).all(0).tolist()
    kept = common.index(False) if False in common else len(common)
    assert columns[0] == text.shape[1] - min(kept, text.shape[1] - 1)


def test_a_file_without_tokens(tmp_path):
    """It goes on as a cache that calls of the model filled: a longer text continues it, a shorter one is refused."""
    model, tokens = model_of("llama"), random_tokens(1, 20)
    model.set_attn_implementation("kvcache")
    cache = HFCache(model.config, dtype="f32")
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert loaded.texts.tokens is None
    with pytest.raises(ValueError, match="input_ids has 12 tokens, and the cache holds 20 tokens that it was not told"):
        generate(model, loaded, tokens[:, :12])
    longer = torch.cat([tokens, random_tokens(1, 4)], 1)
    assert torch.equal(generate(model, loaded, longer), fresh(model, longer))


@pytest.mark.parametrize("told", [0, 12])
def test_tokens_that_follow_a_text_untold(tmp_path, told):
    """Tokens that `generate` told are compared; tokens that calls of the model fed behind are taken for the text's."""
    model, tokens = model_of("llama"), random_tokens(1, 20)
    cache = HFCache(model.config, dtype="f32")
    if told:
        generate(model, cache, tokens[:, :told], max_new_tokens=1)
    with torch.no_grad():
        model(tokens[:, told:], past_key_values=cache)
    longer = torch.cat([tokens, random_tokens(1, 4)], 1)
    loaded = check_loaded(tmp_path, model, cache, longer)
    check_loaded(tmp_path, model, loaded, edit(longer, 3))


LEADING = {"none": [0, 0, 0], "left": [0, 5, 11], "all left": [3, 5, 11]}


@pytest.mark.parametrize("after", ["as before", *LEADING])
@pytest.mark.parametrize(
    ("edited", "before"),
    [
        *(("longer", before) for before in LEADING),
        *((edited, "left") for edited in ("shorter", "a token of the answer is another")),
    ],
)
def test_padding(tmp_path, edited, before, after):
    model, tokens = model_of("llama"), random_tokens(3, 24)
    mask = torch.ones_like(tokens)
    for row, num in enumerate(LEADING[before]):
        mask[row, :num] = 0
    cache = HFCache(model.config, dtype="f32")
    text = EDITS[edited](generate(model, cache, tokens, mask))
    if after != "as before":
        mask = torch.ones_like(tokens)
        for row, num in enumerate(LEADING[after]):
            mask[row, :num] = 0
    check_loaded(tmp_path, model, cache, text, mask)


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", [None, 5, 15])
@pytest.mark.parametrize("after", [None, 5, 15])
def test_a_token_that_the_mask_hid(tmp_path, before, after, attention):
    """Rows that saw a token do not serve a text that hides it, nor the other way round."""
    model, tokens = model_of("llama"), random_tokens(2, 20)
    masks = []
    for column in (before, after):
        masks.append(torch.ones_like(tokens))
        masks[-1][0, slice(0) if column is None else column] = 0
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, tokens, masks[0])
    for one in ({}, {"tokens": text}):
        cache.save(tmp_path / "chat", **one)
        loaded = HFCache.load(model.config, tmp_path / "chat")
        longer = EDITS["longer"](text)
        want = fresh(model, longer, masks[1])
        model.set_attn_implementation(attention)
        mask = torch.cat([masks[1], torch.ones_like(longer[:, 20:])], 1)
        given = {"attention_mask": mask, "past_key_values": loaded}
        assert torch.equal(model.generate(longer, **given, max_new_tokens=NEW, do_sample=False), want)


@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("after", [1, 3])
def test_beams(tmp_path, before, after):
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20), num_beams=before)
    cache.save(tmp_path / "chat")
    for edited in ("longer", "shorter", "a token of the answer is another", "another, and longer"):
        loaded = HFCache.load(model.config, tmp_path / "chat")
        more = EDITS[edited](text)
        assert torch.equal(generate(model, loaded, more, num_beams=after), fresh(model, more, num_beams=after))


def test_tokens_of_beams_are_refused(tmp_path):
    """The returned beams are not in the order of the rows."""
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(1, 20), num_beams=3, num_return_sequences=3)
    with pytest.raises(ValueError, match=r"tokens has 3 rows, whose order may be another .* or leave tokens out"):
        cache.save(tmp_path / "chat", tokens=text)
    assert not (tmp_path / "chat").exists()


def test_tokens_that_were_not_fed_are_refused(tmp_path):
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20))
    cache.save(tmp_path / "chat")
    before = (tmp_path / "chat").read_bytes()
    with pytest.raises(
        ValueError, match=r"tokens\[1, 7\] is \d+, where generate fed \d+: give the text that the cache"
    ):
        cache.save(tmp_path / "chat", tokens=edit(text, 7, 1))
    assert (tmp_path / "chat").read_bytes() == before
    cache.save(tmp_path / "chat", tokens=edit(text, text.shape[1] - 1))  # which is not fed yet
    first, second, _ = state.inspect(tmp_path / "chat").sequences
    assert [first.tokens.tolist(), second.tokens.tolist()] == text[:, :-1].tolist()


def test_after_an_interruption(tmp_path):
    """The tokens behind the prompt are known to nobody, or to the user, who saw them."""
    model, tokens, seen = model_of("llama"), random_tokens(1, 20), []

    def stop(ids, scores, **_):
        seen.append(ids)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    cache = HFCache(model.config, dtype="f32")
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, tokens, stopping_criteria=[stop])
    for save, kept in (({}, 20), ({"tokens": seen[-1]}, 23)):
        cache.save(tmp_path / "chat", **save)
        for text in (EDITS["longer"](seen[-1]), random_tokens(1, 40, 9), tokens):
            loaded = HFCache.load(model.config, tmp_path / "chat")
            got, columns = fed(model, loaded, text)
            assert torch.equal(got, fresh(model, text))
            if text.shape[1] == 27:
                assert columns[0] == 27 - kept


def test_generations_of_files(tmp_path):
    """A loaded cache saves what it knows, and so does a copy; also in the form of files that had other tokens."""
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20))
    for _ in range(3):
        cache.save(tmp_path / "chat")
        cache = copy.deepcopy(HFCache.load(model.config, tmp_path / "chat"))
    first, second, _ = state.inspect(tmp_path / "chat").sequences
    assert [first.tokens.tolist(), second.tokens.tolist()] == text[:, :-1].tolist()
    check_loaded(tmp_path, model, cache, EDITS["another, and longer"](text))


@pytest.mark.parametrize("held", [[[], [5, 6]], [[5, 6], [5]], [[5] * 90, [6] * 90]])
def test_a_file_that_knows_other_lengths(tmp_path, held):
    """Fewer tokens than there are rows, or more: as far as all rows' are known, they are compared."""
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20))
    ids = cache._passes.seq_ids
    tokens = {**dict(zip(ids, held, strict=True)), 90: [1, 25, *ids]}
    cache._cache.save(tmp_path / "chat", [*ids, 90], tokens=tokens)
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert (0 if loaded.texts.tokens is None else loaded.texts.tokens.shape[1]) == min(25, *map(len, held))
    assert torch.equal(generate(model, loaded, text), fresh(model, text))


@pytest.mark.parametrize("edited", EDITS)
def test_with_a_prefix_cache(tmp_path, edited):
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20))
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=4)
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    text = EDITS[edited](text)
    loaded = check_loaded(tmp_path, model, cache, text, load={"prefix": prefix})
    loaded.release()
    again = HFCache(model.config, prefix=prefix)
    assert torch.equal(generate(model, again, text), fresh(model, text))
    memory.validate()


def test_an_empty_cache_with_a_prefix_cache(tmp_path):
    """It has no rows yet, of any number: the next text begins with what the prefix cache has."""
    model, text = model_of("llama"), random_tokens(2, 20)
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=4)
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    HFCache(model.config, prefix=prefix).save(tmp_path / "chat")
    for matched in (0, 38):
        loaded = HFCache.load(model.config, tmp_path / "chat", prefix=prefix)
        assert torch.equal(generate(model, loaded, text), fresh(model, text))
        assert prefix.stats.matched == matched
        loaded.release()


def test_quantised_rows_and_a_policy(tmp_path):
    """If only sinks and a window are left, another text is fed anew."""
    model = make(transformers.LlamaConfig(**BASE | {"head_dim": 32}))
    options = {"dtype": "q8_0", "policy": kvcache.SlidingWindow(9, num_sink_tokens=2)}
    cache = HFCache(model.config, **options)
    text = generate(model, cache, random_tokens(1, 40))
    cache.save(tmp_path / "chat")
    for edited in EDITS.values():
        loaded = HFCache.load(model.config, tmp_path / "chat", policy=options["policy"])
        more = edited(text)
        want = generate(model, copy.deepcopy(cache), more)
        assert torch.equal(generate(model, loaded, more), want)


def speak(model, inputs, cache, tokens):
    model.set_attn_implementation("kvcache")
    given = {**inputs, "decoder_input_ids": tokens, "past_key_values": cache}
    options = {"do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": 1}
    return transformers.GenerationMixin.generate(model, **given, **options)


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_another_source(tmp_path, name):
    """A loaded cache knows its source: it starts anew with another one, and goes on with the same."""
    model, inputs = two_sided(name)
    cache = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)
    text = speak(model, inputs, cache, inputs["decoder_input_ids"])
    cache.save(tmp_path / "speech")
    source = inputs["inputs"]
    other = {**inputs, "inputs": source.flip(1) if name == "whisper" else source.clamp_max(90) + 3}
    one_row = {key: value[:1] for key, value in other.items()}
    for source, rows in ((inputs, 2), (other, 2), (one_row, 1)):
        for more in (text[:rows], text[:rows, :4], edit(text[:rows], 3)):
            loaded = HFEncoderDecoderCache.load(model.config, tmp_path / "speech")
            fresh_cache = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)
            assert torch.equal(speak(model, source, loaded, more), speak(model, source, fresh_cache, more))


def test_a_source_that_stands_for_none():
    model, inputs = two_sided("bart")
    cache = HFEncoderDecoderCache(model.config, max_source_len=40)
    blind = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.full((2, 23, 64), torch.nan))
    given = {"encoder_outputs": blind, "attention_mask": inputs["attention_mask"]}
    with pytest.raises(ValueError, match="encoder_outputs is NaN, which stands for the source that the cache holds"):
        speak(model, given, cache, inputs["decoder_input_ids"])
    assert speak(model, inputs, cache, inputs["decoder_input_ids"]).shape[1] > 2

"""Another text for a cache that was loaded: it keeps what both begin with, as the cache that was saved does."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import feeding, model_of, random_tokens, two_sided  # noqa: E402 - torch may be missing

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
    with feeding(model) as columns:
        return generate(model, cache, tokens, mask, **options), columns


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


def speak(model, inputs, cache, tokens):
    model.set_attn_implementation("kvcache")
    given = {**inputs, "decoder_input_ids": tokens, "past_key_values": cache}
    options = {"do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": 1}
    return transformers.GenerationMixin.generate(model, **given, **options)


def test_a_source_that_stands_for_none():
    model, inputs = two_sided("bart")
    cache = HFEncoderDecoderCache(model.config, max_source_len=40)
    blind = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.full((2, 23, 64), torch.nan))
    given = {"encoder_outputs": blind, "attention_mask": inputs["attention_mask"]}
    with pytest.raises(ValueError, match="encoder_outputs is NaN, which stands for the source that the cache holds"):
        speak(model, given, cache, inputs["decoder_input_ids"])
    assert speak(model, inputs, cache, inputs["decoder_input_ids"]).shape[1] > 2

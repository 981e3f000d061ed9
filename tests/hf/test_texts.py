"""Another text for a cache that holds one: it goes on from where both begin alike."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import CONFIGS, feeding, make, prefix_for, prepared, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEW = 8


def generate(model, cache, tokens, **options):
    return model.generate(tokens, past_key_values=cache, **{"max_new_tokens": NEW, "do_sample": False, **options})


def fresh(model, tokens, **options):
    return generate(model, HFCache(model.config, dtype="f32"), tokens, **options)


def edit(text, column):
    edited = text.clone()
    edited[:, column] = 3 + (edited[:, column] + 1) % 90
    return edited


EDITS = {
    "a shorter text": lambda text: text[:, :12],
    "one token": lambda text: text[:, :1],
    "the same prompt": lambda text: text[:, :20],
    "the whole text but its last token": lambda text: text[:, :-1],
    "a token in the middle is another": lambda text: edit(text, 10),
    "the first token is another": lambda text: edit(text, 0),
    "a token of the answer is another": lambda text: edit(text, 23),
    "shorter, and another": lambda text: edit(text[:, :15], 9),
    "longer, and another": lambda text: edit(torch.cat([text, text], 1), 9),
}


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_history_that_was_seen_both_ways(name, attention):
    """Rows of the common beginning follow from tokens that are no more."""
    config = CONFIGS["llama"]()
    config.is_causal = False
    model = make(config)
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, dtype="f32")
    text = EDITS[name](generate(model, cache, random_tokens(1, 20)))
    assert torch.equal(generate(model, cache, text), fresh(model, text))


ROTATIONS = {
    "dynamic": {"factor": 4.0},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
}


@pytest.mark.parametrize("kind", ["dynamic", pytest.param("longrope", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", EDITS)
def test_an_edited_history_that_was_rotated_by_its_length(name, kind):
    """Keys of a long text do not serve a short one."""
    config = CONFIGS["llama"]()
    config.max_position_embeddings = 24
    known = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 24}
    config.rope_parameters = known | ROTATIONS[kind]
    models = [make(config), make(config)]  # a dynamic rotation is a state of the model
    cache = HFCache(config, dtype="f32")
    text = EDITS[name](generate(models[0], cache, random_tokens(1, 20)))
    options = {"output_logits": True, "return_dict_in_generate": True}
    got, want = generate(models[0], cache, text, **options), fresh(models[1], text, **options)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_another_number_of_beams(before, after):
    """Each prompt keeps as many beams as it has now; also in a batch with padding."""
    model, tokens = prepared("llama"), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6] = mask[0, :6] = 0
    for rows in (slice(1, 2), slice(2)):
        cache = HFCache(model.config, dtype="f32")
        text = generate(model, cache, tokens[rows], attention_mask=mask[rows], num_beams=before)
        more = torch.cat([text, random_tokens(len(text), 3)], 1)
        wide = torch.cat([mask[rows], torch.ones_like(more[:, 20:])], 1)
        want = fresh(model, more, attention_mask=wide, num_beams=after)
        with feeding(model) as fed:
            got = generate(model, cache, more, attention_mask=wide, num_beams=after)
        assert torch.equal(got, want)
        assert fed[0] <= more.shape[1] - 20, "the prompt is kept"
        assert cache.batch_size == len(text) * after


def test_rows_of_a_batch_are_no_beams():
    """Rows of different tokens are not taken for each other's, nor are rows whose last tokens nobody told."""
    model = prepared("llama")
    different, told_in_part = (HFCache(model.config, dtype="f32") for _ in range(2))
    text = generate(model, different, random_tokens(2, 20))
    same = random_tokens(1, 20).repeat(2, 1)
    generate(model, told_in_part, same)
    with torch.no_grad():
        model(random_tokens(2, 3), past_key_values=told_in_part)
    for cache in (different, told_in_part):
        with pytest.raises(ValueError, match=r"the batch has 1 row: .* filled with 2; reset it, or call batch_select"):
            generate(model, cache, random_tokens(1, 40))
    different.batch_select_indices([1])
    more = torch.cat([text[1:], random_tokens(1, 2)], 1)
    assert torch.equal(generate(model, different, more), fresh(model, more))


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_either_name_of_the_argument(name):
    model, tokens = prepared("llama"), random_tokens(2, 20)
    cache, options = HFCache(model.config, dtype="f32"), {"max_new_tokens": NEW, "do_sample": False}
    want = fresh(model, tokens)
    for _ in range(2):
        assert torch.equal(model.generate(tokens, **{name: cache}, **options), want)
        assert torch.equal(cache.texts.tokens, want[:, :-1])
    with pytest.raises(ValueError, match="use_cache=False"):
        model.generate(tokens, **{name: cache}, use_cache=False, **options)


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("length", [20, 15])
def test_a_text_with_other_inputs_than_before(length, prefixed):
    """Rows follow from token types, too: a text that does not continue the last one is fed as a whole."""
    model = make(
        transformers.BertConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=97,
            initializer_range=0.5, is_decoder=True, pad_token_id=0,
        )
    )  # fmt: skip
    model.set_attn_implementation("kvcache")
    prefix = prefix_for(model) if prefixed else None
    cache, tokens = HFCache(model.config, "f32", prefix=prefix), random_tokens(1, 20)
    for kind, n in [(0, 20), (1, length), (0, length)]:
        text = tokens[:, :n]
        types = torch.full_like(text, kind)
        want = fresh(model, text, token_type_ids=types)
        assert torch.equal(generate(model, cache, text, token_type_ids=types), want)
    more = torch.cat([want, random_tokens(1, 3)], 1)  # a continuation keeps what the cache holds
    generate(model, cache, more, token_type_ids=torch.ones_like(more))
    assert cache.get_seq_length() == more.shape[1] + NEW - 1
    assert torch.equal(generate(model, cache, more), fresh(model, more)), "the cache's rows followed from types"


POSITIONS = {
    "usual": lambda n: torch.arange(n)[None],
    "twice as far": lambda n: torch.arange(n)[None] * 2,
    "a gap in the middle": lambda n: torch.arange(n)[None] + 9 * (torch.arange(n)[None] >= 12),
    "of each row": lambda n: torch.stack([torch.arange(n), torch.arange(n) * 3]),
}


PAIRS = [pair for way in POSITIONS for pair in ((None, way), (way, None))]
PAIRS += [("twice as far", "of each row"), ("of each row", "of each row")]


@pytest.mark.parametrize(
    ("first", "then", "prefixed"),
    [
        *((*pair, False) for pair in PAIRS),
        *((*pair, True) for pair in PAIRS[-2:]),
        *(pytest.param(*pair, True, marks=pytest.mark.slow) for pair in PAIRS[:-2]),
    ],
)
def test_positions_of_the_caller(first, then, prefixed):
    """Rows follow from their tokens' positions."""
    model, tokens = prepared("llama"), random_tokens(2, 20)
    prefix = prefix_for(model) if prefixed else None
    cache = HFCache(model.config, "f32", prefix=prefix)

    def check(text, way):
        options = {} if way is None else {"position_ids": POSITIONS[way](text.shape[1])}
        want = fresh(model, text, output_logits=True, return_dict_in_generate=True, **options)
        got = generate(model, cache, text, output_logits=True, return_dict_in_generate=True, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-3)
        return got.sequences

    told = check(tokens, first)
    for text in (torch.cat([told, tokens], 1), told[:, :25]):
        check(text, then)
        check(text, first)


def test_only_what_stands_elsewhere_is_fed():
    """The tokens that `generate` adds stand behind the last position."""
    model = prepared("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(1, 40), position_ids=torch.arange(40)[None] * 2)
    positions = torch.cat([torch.arange(40) * 2, 79 + torch.arange(NEW)])[None]
    with feeding(model) as fed:
        for column in (47, 30):
            generate(model, cache, edit(text, column), position_ids=positions, max_new_tokens=1)
        positions[:, 20:] += 1
        generate(model, cache, edit(text, 30), position_ids=positions, max_new_tokens=1)
    assert fed == [1, 18, 28]
    with pytest.raises(ValueError, match=r"^position_ids has the shape \[1, 3\], input_ids \[1, 48\]: give the"):
        generate(model, cache, text, position_ids=positions[:, -3:])


@pytest.mark.parametrize("told", [False, True])
def test_embeddings_of_no_more_tokens_than_the_cache_holds(told):
    """The cache cannot compare them with what it holds."""
    model = prepared("llama")
    cache = HFCache(model.config, dtype="f32")
    embedded = model.get_input_embeddings()(random_tokens(1, 40)).detach()
    if told:
        generate(model, cache, random_tokens(1, 20))
    else:
        generate(model, cache, None, inputs_embeds=embedded[:, :20])
    held = 20 + NEW - 1
    for length in (held, 12):
        with pytest.raises(ValueError, match=rf"^inputs_embeds has {length} tokens, and the cache holds {held}.*reset"):
            generate(model, cache, None, inputs_embeds=embedded[:, :length])
    assert cache.get_seq_length() == held
    generate(model, cache, None, inputs_embeds=embedded)
    assert cache.get_seq_length() == 40 + NEW - 1

"""Another text for a cache that holds one: it goes on from where both begin alike."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, CONFIGS, make, models_with_states, random_tokens  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEW = 8


def model_of(name, attention="kvcache"):
    model = make(CONFIGS[name]())
    model.set_attn_implementation(attention)
    return model


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
    "longer": lambda text: torch.cat([text, text], 1),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_history(name):
    """With rows that are decoded. `test_saved_texts.py` has caches of other models, and windows, with the kernels."""
    model = model_of("llama", "sdpa")
    cache = HFCache(model.config, dtype="f32")
    text = EDITS[name](generate(model, cache, random_tokens(3, 20)))
    assert torch.equal(generate(model, cache, text), fresh(model, text))
    assert cache.get_seq_length() == text.shape[1] + NEW - 1


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("sdpa", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in EDITS if name != "longer"])
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
@pytest.mark.parametrize("name", [name for name in EDITS if name != "longer"])
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


def test_only_what_differs_is_fed():
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text, fed = generate(model, cache, random_tokens(1, 40)), []
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    generate(model, cache, edit(text, 30))
    hook.remove()
    assert fed[0] == text.shape[1] - 30


def test_padding_and_a_token_that_the_mask_hides():
    model = model_of("llama")
    tokens = random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6] = mask[0, :6] = 0
    cache = HFCache(model.config, dtype="f32")
    text = edit(generate(model, cache, tokens, attention_mask=mask), 15)[:, :25]
    mask = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], 1)
    text[0, :6] = 7  # what padding is made of does not count
    want = fresh(model, text, attention_mask=mask)
    assert torch.equal(generate(model, cache, text, attention_mask=mask), want)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (3, 2), (3, 3), (4, 2)])
def test_another_number_of_beams(before, after):
    """Each prompt keeps as many beams as it has now; also in a batch with padding."""
    model, tokens = model_of("llama"), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    tokens[0, :6] = mask[0, :6] = 0
    for rows in (slice(1, 2), slice(2)):
        cache, fed = HFCache(model.config, dtype="f32"), []
        text = generate(model, cache, tokens[rows], attention_mask=mask[rows], num_beams=before)
        more = torch.cat([text, random_tokens(len(text), 3)], 1)
        wide = torch.cat([mask[rows], torch.ones_like(more[:, 20:])], 1)
        want = fresh(model, more, attention_mask=wide, num_beams=after)
        hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args, fed=fed: fed.append(args[0].shape))
        got = generate(model, cache, more, attention_mask=wide, num_beams=after)
        hook.remove()
        assert torch.equal(got, want)
        assert fed[0][1] <= more.shape[1] - 20, "the prompt is kept"
        assert cache.batch_size == len(text) * after


@pytest.mark.parametrize(("num_prompts", "num_beams", "num_returned"), [(1, 3, 2), (2, 3, 2), (1, 4, 3), (1, 3, 1)])
def test_all_texts_that_a_beam_search_returned_go_on(num_prompts, num_beams, num_returned):
    """They differ behind the prompt, and are fewer than the rows."""
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    texts = generate(
        model, cache, random_tokens(num_prompts, 20), num_beams=num_beams, num_return_sequences=num_returned
    )
    answers = generate(model, cache, texts)
    assert torch.equal(answers, fresh(model, texts))
    assert cache.get_seq_length() == answers.shape[1] - 1


def test_another_text_after_beams():
    model, cache = model_of("llama"), HFCache(model_of("llama").config, dtype="f32")
    generate(model, cache, random_tokens(1, 20), num_beams=3)
    for text in (random_tokens(1, 9, seed=8), random_tokens(1, 40, seed=9)):
        assert torch.equal(generate(model, cache, text), fresh(model, text))


def test_beams_with_a_prefix_cache_and_then_none():
    model = model_of("llama")
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=4)
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    cache = HFCache(model.config, prefix=prefix)
    text = generate(model, cache, random_tokens(1, 20), num_beams=3)
    more = torch.cat([text, random_tokens(1, 3)], 1)
    answer = generate(model, cache, more)
    assert torch.equal(answer, fresh(model, more))
    cache.release(answer)
    other = HFCache(model.config, prefix=prefix)
    assert torch.equal(generate(model, other, answer), fresh(model, answer))
    assert prefix.stats.matched >= 16
    memory.validate()


def test_rows_of_a_batch_are_no_beams():
    """Rows of different tokens are not taken for each other's, nor are rows whose last tokens nobody told."""
    model = model_of("llama")
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


def test_rows_that_the_caller_moves():
    model, tokens = model_of("llama"), random_tokens(2, 20)
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, tokens)
    order = torch.tensor([1, 0, 1])
    cache.reorder_cache(order)
    edited = edit(torch.cat([text[order], text[order]], 1), 15)
    assert torch.equal(generate(model, cache, edited), fresh(model, edited))


def test_a_batch_that_is_refused_changes_nothing():
    model = model_of("llama")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(1, 20))
    for length in (9, 40):
        with pytest.raises(ValueError, match="the batch has 2 rows: the cache was filled with 1"):
            generate(model, cache, random_tokens(2, length))
    edited = edit(torch.cat([text, text], 1), 10)
    assert torch.equal(generate(model, cache, edited), fresh(model, edited))


@pytest.mark.parametrize("before", [None, 5, 15])
@pytest.mark.parametrize("after", [None, 5, 15])
def test_a_token_that_the_mask_hides_another_time(before, after):
    """Rows that saw a token do not serve a text that hides it, nor the other way round."""
    model, tokens = model_of("llama"), random_tokens(2, 20)
    cache = HFCache(model.config, dtype="f32")
    for text, column in ((tokens, before), (edit(tokens, 5), after), (edit(tokens, 5), None)):
        mask = torch.ones_like(text)
        mask[0, slice(0) if column is None else column] = 0
        want = fresh(model, text, attention_mask=mask)
        assert torch.equal(generate(model, cache, text, attention_mask=mask), want)


@pytest.mark.parametrize("policy", [None, kvcache.SlidingWindow(12, num_sink_tokens=3)])
def test_more_and_less_padding(policy):
    """Padding that the cache stored as tokens is no sink."""
    model, text = model_of("llama"), random_tokens(2, 20)
    cache = HFCache(model.config, "f32", policy)
    for leading in ((4, 0), (9, 0), (0, 0), (4, 0), (2, 8), (2, 1)):
        mask = torch.ones_like(text)
        for row, num in enumerate(leading):
            mask[row, :num] = 0
        options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        want = generate(model, HFCache(model.config, "f32", policy), text, **options)
        got = generate(model, cache, text, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-3)


def test_prompts_with_other_padding_and_a_prefix_cache():
    model = model_of("llama")
    memory = HFCache.make_kv_cache(model.config, dtype="f32", block_size=4)
    cache = HFCache(model.config, prefix=kvcache.PrefixCache(memory, fingerprint="one"))
    for length, leading in ((30, (20, 0)), (30, (4, 2)), (35, (9, 9)), (35, (0, 15)), (30, (15, 2))):
        text = random_tokens(2, length, seed=length)
        mask = torch.ones_like(text)
        for row, num in enumerate(leading):
            text[row, :num] = mask[row, :num] = 0
        got = generate(model, cache, text, attention_mask=mask)
        assert torch.equal(got, fresh(model, text, attention_mask=mask))


def test_a_cache_that_generate_made():
    model = model_of("llama")
    options = {"return_dict_in_generate": True, "cache_implementation": "kvcache", "cache_config": {"dtype": "f32"}}
    made = generate(model, None, random_tokens(1, 20), **options)
    edited = edit(torch.cat([made.sequences, random_tokens(1, 4)], 1), 23)
    assert torch.equal(generate(model, made.past_key_values, edited), fresh(model, edited))


def test_tokens_that_the_cache_was_not_told():
    model, tokens = model_of("llama"), random_tokens(1, 20)
    cache = HFCache(model.config, dtype="f32")
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    for length in (12, 20):
        with pytest.raises(ValueError, match=f"input_ids has {length} tokens, and the cache holds 20 tokens that it"):
            generate(model, cache, tokens[:, :length])
    cache.crop(-8)
    assert torch.equal(generate(model, cache, tokens), fresh(model, tokens))


def test_after_an_interruption(monkeypatch):
    model, tokens, steps = model_of("llama"), random_tokens(1, 20), []

    def stop(ids, scores, **_):
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    cache = HFCache(model.config, dtype="f32")
    with pytest.raises(KeyboardInterrupt):
        generate(model, cache, tokens, stopping_criteria=[stop])
    assert cache.get_seq_length() > 20
    edited = torch.cat([tokens, random_tokens(1, 9)], 1)
    for text in (edited, tokens):
        assert torch.equal(generate(model, cache, text), fresh(model, text))


def test_copies_assistants_and_prefixes():
    model, tokens = model_of("llama"), random_tokens(1, 20)
    draft = make(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1}))
    memory = HFCache.make_kv_cache(model.config, dtype="f32")
    cache = HFCache(model.config, prefix=kvcache.PrefixCache(memory, fingerprint="one"))
    for options in ({}, {"assistant_model": draft}, {"prompt_lookup_num_tokens": 3}):
        for each in (HFCache(model.config, dtype="f32"), cache):
            text = generate(model, each, tokens, **options)[:, :25]
            for one in (copy.deepcopy(each), each):
                got = generate(model, one, edit(text, 22), **options)
                assert torch.equal(got, fresh(model, edit(text, 22)))
            each.reset()


@pytest.mark.parametrize("columns", [[11], [10, 11], [9], [4]])
@pytest.mark.parametrize("before", [None, 11])
def test_a_token_of_a_state_that_the_mask_hides_now(columns, before):
    """Also of the last token that the cache holds, which no other one saw."""
    for model in models_with_states():
        model.set_attn_implementation("kvcache")
        cache, tokens = HFCache(model.config, dtype="f32"), random_tokens(2, 12)
        mask = torch.ones_like(tokens)
        mask[0, slice(0) if before is None else before] = 0
        generate(model, cache, tokens, attention_mask=mask, max_new_tokens=1)
        text = torch.cat([tokens, random_tokens(2, 1)], 1)
        mask = torch.ones_like(text)
        mask[0, columns] = 0
        options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        want, got = fresh(model, text, **options), generate(model, cache, text, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)


def test_a_token_of_a_state_that_nobody_told_and_the_mask_hides_now():
    def stop(ids, scores, **_):
        if ids.shape[1] == 15:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    for model in models_with_states():
        model.set_attn_implementation("kvcache")
        cache, tokens = HFCache(model.config, dtype="f32"), random_tokens(1, 12)
        with pytest.raises(KeyboardInterrupt):
            generate(model, cache, tokens, stopping_criteria=[stop])
        assert cache.get_seq_length() == 14
        text = torch.cat([tokens, random_tokens(1, 4)], 1)
        mask = torch.ones_like(text)
        mask[0, 12:14] = 0
        options = {"attention_mask": mask, "output_logits": True, "return_dict_in_generate": True}
        want, got = fresh(model, text, **options), generate(model, cache, text, **options)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_either_name_of_the_argument(name):
    model, tokens = model_of("llama"), random_tokens(2, 20)
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
    memory = HFCache.make_kv_cache(model.config, "f32")
    prefix = kvcache.PrefixCache(memory, fingerprint="a model") if prefixed else None
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
    model, tokens = model_of("llama"), random_tokens(2, 20)
    memory = HFCache.make_kv_cache(model.config, "f32")
    prefix = kvcache.PrefixCache(memory, fingerprint="a model") if prefixed else None
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
    model = model_of("llama")
    cache, fed = HFCache(model.config, dtype="f32"), []
    text = generate(model, cache, random_tokens(1, 40), position_ids=torch.arange(40)[None] * 2)
    positions = torch.cat([torch.arange(40) * 2, 79 + torch.arange(NEW)])[None]
    hook = model.model.embed_tokens.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    for column in (47, 30):
        generate(model, cache, edit(text, column), position_ids=positions, max_new_tokens=1)
    positions[:, 20:] += 1
    generate(model, cache, edit(text, 30), position_ids=positions, max_new_tokens=1)
    hook.remove()
    assert fed == [1, 18, 28]
    with pytest.raises(ValueError, match=r"^position_ids has the shape \[1, 3\], input_ids \[1, 48\]: give the"):
        generate(model, cache, text, position_ids=positions[:, -3:])


def test_positions_in_a_file(tmp_path):
    model = model_of("llama")
    cache, tokens = HFCache(model.config, dtype="f32"), random_tokens(1, 20)
    generate(model, cache, tokens, position_ids=torch.arange(20)[None] * 2)
    cache.save(tmp_path / "chat")
    for options in ({}, {"position_ids": torch.arange(20)[None] * 2}):
        loaded = HFCache.load(model.config, tmp_path / "chat")
        assert torch.equal(generate(model, loaded, tokens, **options), fresh(model, tokens, **options))


@pytest.mark.parametrize("told", [False, True])
def test_embeddings_of_no_more_tokens_than_the_cache_holds(told):
    """The cache cannot compare them with what it holds."""
    model = model_of("llama")
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

"""Padding on the left, on the right and in gaps, in chunks and in turns, as transformers' own cache treats it."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import (  # noqa: E402 - torch may be missing
    CONFIGS,
    check_same,
    compare,
    model_of,
    ours,
    passes,
    play,
    random_tokens,
)

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

LENGTH = 24
# The columns that a mask hides of each of three rows.
HIDDEN = {
    "left": [(), range(5), range(11)],
    "right": [(), range(19, 24), range(9, 24)],
    "gaps": [range(6, 9), range(3, 20), ()],
    "mixed": [[*range(4), 9, 10, 22, 23], [1, *range(7, 17)], range(23)],
    "everywhere": [[*range(4), *range(8, 12)], range(12), [*range(4), *range(8, 12), 23]],
}
ENDS = {"whole": [24], "chunks": [4, 8, 12, 17, 24], "tokens": [20, 21, 22, 23, 24]}


def mask_of(name):
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row, columns in zip(mask, HIDDEN[name], strict=True):
        row[[*columns]] = 0
    return mask


def more(mask, count):
    """A mask with `count` more columns, all shown."""
    return torch.cat([mask, torch.ones(len(mask), count, dtype=mask.dtype)], 1)


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in [*CONFIGS][1:])])
def test_passes(name, hidden, ends):
    """All logits from a row's first token on, hidden tokens included; "everywhere" has chunks of padding alone."""
    model, tokens = model_of(name), random_tokens(3, LENGTH + 4)
    mask = more(mask_of(hidden), 4)
    cache = check_same(model, lambda cache: passes(model, cache, tokens, mask, [*ENDS[ends], 25, 26, 28]))
    assert cache.stats()["calls"]["kernel"] > 0


@pytest.mark.parametrize("name", ["llama", "mistral", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_mask_may_hide_more_and_less(name):
    """A mask hides stored tokens in one turn, and shows them in the next."""
    model, tokens = model_of(name), random_tokens(2, 30)

    def turns(cache):
        mask = torch.ones(2, 30, dtype=torch.long)
        yield from passes(model, cache, tokens[:, :14], mask)
        mask[0, 2:9] = mask[1, 12:16] = 0
        yield from passes(model, cache, tokens[:, 14:20], mask, [18, 19, 20])
        mask[:] = 1
        mask[1, 5:7] = 0
        yield from passes(model, cache, tokens[:, 20:24], mask, [21, 24])
        yield from passes(model, cache, tokens[:, 24:28])
        mask[:, :24] = 0  # a window that sees nothing but new tokens
        yield from passes(model, cache, tokens[:, 28:], mask, [29, 30])

    check_same(model, turns)


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("second", ["pads masked", "no mask", "all shown"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_second_turn_on_a_padded_batch(name, second, attention):
    """A row that ends early is padded while the other goes on; then both go on, with the same cache."""
    model = model_of(name)
    prompt = random_tokens(2, 12)
    prompt[0, :4] = 0
    shown = {"past_key_values": None, "do_sample": False, "max_new_tokens": 8}
    model.set_attn_implementation("eager")
    free = model.generate(prompt, attention_mask=prompt.ne(0).long(), pad_token_id=0, **shown)[:, 12:]
    end = next(token for token in free[1, 1:3].tolist() if token not in free[0].tolist())
    options = {**shown, "eos_token_id": end, "pad_token_id": 0}

    def turns(cache):
        options["past_key_values"] = cache
        first = model.generate(prompt, attention_mask=prompt.ne(0).long(), **options)
        assert (first[1, -4:] == 0).all()
        yield first
        tokens = first
        for turn in range(2):
            tokens = torch.cat([tokens, random_tokens(2, 3, seed=turn)], 1)
            mask = tokens.ne(0).long()
            if second == "all shown":
                mask[:, 12:] = 1
            given = {} if second == "no mask" else {"attention_mask": mask}  # without, generate hides the pads itself
            tokens = model.generate(tokens, **given, **options)
            yield tokens

    # Without a cache between turns: one DynamicCache with windows gives other tokens from the third turn on.
    want = play(model, None, "eager", turns)
    compare(play(model, ours(model)[0], attention, turns), want)


def test_padding_that_is_shown_later():
    """A row's leading padding has no rows; a mask that shows it is refused, and changes nothing."""
    model, tokens = model_of("llama"), random_tokens(2, 13)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    cache, attention = ours(model)
    model.set_attn_implementation(attention)
    with torch.no_grad():
        [*passes(model, cache, tokens[:, :12], mask)]
        assert cache.stats()["live_slots"] == 2 * 12 - 3
        with pytest.raises(ValueError, match=r"shows the first 3 tokens of row 1, which it hid as padding"):
            model(tokens[:, 12:], attention_mask=torch.ones_like(mask), past_key_values=cache)
    assert cache.get_seq_length() == 12

    def again(cache):
        yield from passes(model, cache, tokens, mask, [12, 13])

    check_same(model, again)


def test_a_mask_of_elements_that_shows_padding():
    """A 4D mask may hide leading padding as the 2D mask before it did; a mask that shows the padding is refused."""
    model, tokens = model_of("llama"), random_tokens(2, 13)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    for shown in (slice(0, 0), slice(1, 3)):

        def turns(cache, shown=shown):
            yield from passes(model, cache, tokens[:, :12], mask)
            sees = mask[:, None, None].bool()
            sees[1, :, :, shown] = True
            added = torch.where(sees, 0.0, torch.finfo(torch.float32).min)
            yield model(tokens[:, 12:], attention_mask=added, past_key_values=cache).logits

        if shown.stop == 0:
            check_same(model, turns)
        else:
            with pytest.raises(ValueError, match=r"shows the first 3 tokens of row 1, which it hid as padding"):
                check_same(model, turns)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mask_without_columns_for_new_tokens(name):
    """A mask of ones that is narrower than the tokens hides the tokens for which it has no columns."""
    model, tokens = model_of(name), random_tokens(2, 16)

    def turns(cache):
        yield from passes(model, cache, tokens[:, :12])
        yield model(tokens[:, 12:], attention_mask=torch.ones(2, 14).long(), past_key_values=cache).logits

    check_same(model, turns)


def test_a_row_that_is_all_padding():
    """A row without any token yet gets its first in a later pass; the others do not notice."""
    model, tokens = model_of("mistral"), random_tokens(3, 12)
    mask = torch.ones_like(tokens)
    mask[1, :9] = 0
    mask[2, :11] = 0
    check_same(model, lambda cache: passes(model, cache, tokens, mask, [6, 9, 10, 11, 12]))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_mask_of_another_number_of_rows(rows):
    model, tokens = model_of("llama"), random_tokens(2, 8)
    model.set_attn_implementation("kvcache")
    mask = torch.ones(rows, 8, dtype=torch.long)
    mask[0, 0] = 0
    cache, _ = ours(model)
    with torch.no_grad(), pytest.raises(ValueError, match=f"attention_mask has {rows} rows?, and the batch 2: give it"):
        model(tokens, attention_mask=mask, past_key_values=cache)

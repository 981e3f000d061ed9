"""A cache of a model with an encoder, given to `generate` again: with the same source, and with others."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import TWO_SIDED, two_sided  # noqa: E402 - torch may be missing

import kvcache.hf  # noqa: E402 - it imports those
from kvcache.hf import HFEncoderDecoderCache  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEW = 6


def cache_of(model):
    return HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)


def generate(model, cache, inputs, **options):
    """Generate; a text of which no token is said twice."""
    model.set_attn_implementation("kvcache")
    options = {"do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": 1, **options}
    return transformers.GenerationMixin.generate(model, **inputs, past_key_values=cache, **options)


def other_source(inputs):
    given = inputs["inputs"]
    return inputs | {"inputs": -given if given.is_floating_point() else torch.where(given > 0, 3 + given % 90, given)}


def text_of(inputs, tokens):
    return inputs | {"decoder_input_ids": tokens}


@pytest.mark.parametrize("name", TWO_SIDED)
def test_texts_of_the_same_and_of_other_sources(name):
    model, inputs = two_sided(name)
    cache, fed = cache_of(model), []
    text = generate(model, cache, inputs)
    model.get_decoder().register_forward_pre_hook(
        lambda _, args, given: fed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    other = other_source(inputs)
    changed = torch.cat([text[:, :5], text[:, :3]], 1)
    turns = {
        "the same text": (inputs, inputs, 1),
        "a longer one": (inputs, text_of(inputs, text), 1),
        "an edited one": (inputs, text_of(inputs, changed), 3),
        "another source": (inputs, other, 3),
        "a longer text of another source": (inputs, text_of(other, text), 9),
    }
    for turn, (before, given, num_fed) in turns.items():
        cache = cache_of(model)
        generate(model, cache, before)
        want = generate(model, cache_of(model), given)
        fed.clear()
        assert torch.equal(generate(model, cache, given), want), turn
        assert fed[0] == num_fed, turn
        assert cache.get_seq_length() == want.shape[1] - 1
        again = copy.deepcopy(cache)
        assert torch.equal(generate(model, again, inputs), text), turn


@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_draft_encodes_the_source_itself(name):
    model, inputs = two_sided(name)
    draft, seen, runs = copy.deepcopy(model), [], []
    for each in (model, draft):
        kvcache.hf.enable(each, dtype="f32", max_source_len=40)
    one = {name: tensor[:1] for name, tensor in inputs.items()}
    want = generate(model, None, one)
    draft.get_encoder().register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state.shape[1]))
    model.get_encoder().register_forward_hook(lambda *call: seen.append(call[-1].last_hidden_state.shape[1]))
    model.get_decoder().register_forward_hook(lambda *_: runs.append(1))
    assert torch.equal(generate(model, None, one, assistant_model=draft), want)
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert len(runs) < NEW  # the draft, which is the same model, guesses right


@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_prompt_in_chunks_sees_the_whole_source(name):
    model, inputs = two_sided(name)
    kvcache.hf.enable(model, dtype="f32", max_source_len=40)
    prompt = torch.tensor([[2, *range(30, 40)]] * 2)
    options = {"output_logits": True, "return_dict_in_generate": True}
    want = generate(model, None, text_of(inputs, prompt), **options)
    got = generate(model, None, text_of(inputs, prompt), **options, prefill_chunk_size=4)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(got.logits, want.logits)
    one = {name: tensor[1:] for name, tensor in text_of(inputs, prompt).items()}
    for way in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(model)}):
        assert torch.equal(generate(model, None, one, prefill_chunk_size=4, **way), want.sequences[1:]), way

"""Calls of `generate` and of users give the same with this cache as with transformers' own."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, check_same, make, model_of, ours, passes, play, random_tokens, theirs  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.generation import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

NEW = 10  # tokens
MODELS = ["llama", "mistral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "gpt_oss", "llama4"))]


def draft():
    return make(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1}))


def contrastive(model, input_ids, stopping_criteria=None, num_candidates=3, **kwargs):
    """Search for likely tokens that are unlike those before them, and edit the cache as code from the hub does."""
    cache, tokens = kwargs[CACHE], input_ids
    done = model(tokens, past_key_values=cache, output_hidden_states=True)
    hidden, logits = done.hidden_states[-1], done.logits[:, -1]
    while True:
        rows = len(tokens)
        likely, candidates = logits.softmax(-1).topk(num_candidates)
        cache.batch_repeat_interleave(num_candidates)
        done = model(candidates.reshape(-1, 1), past_key_values=cache, output_hidden_states=True)
        new = done.hidden_states[-1].reshape(rows, num_candidates, -1)
        alike = torch.nn.functional.cosine_similarity(new[:, :, None], hidden[:, None], dim=-1).amax(-1)
        best = (0.4 * likely - 0.6 * alike).argmax(-1)
        at = torch.arange(rows)
        # The first step indexes with a tuple, as it may: transformers writes keys[indices, ...].
        kept = at * num_candidates + best
        cache.batch_select_indices(tuple(kept.tolist()) if len(hidden[0]) == input_ids.shape[1] else kept)
        tokens = torch.cat([tokens, candidates[at, best][:, None]], 1)
        hidden = torch.cat([hidden, new[at, best][:, None]], 1)
        logits = done.logits[kept, -1]
        if stopping_criteria(tokens, None).all():
            return tokens


WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 2.0},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "chunks": {"prefill_chunk_size": 4},
    "embeddings": {},
    "contrastive": {"custom_generate": contrastive, "num_candidates": 3},
}
ONE_PROMPT = {
    "draft": lambda: {"assistant_model": draft()},
    "draft, sampling": lambda: {"assistant_model": draft(), "do_sample": True},
    "lookup": lambda: {"prompt_lookup_num_tokens": 2},
}
ASKED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True}


def results(made):
    """The tensors of a dictionary that `generate` returned; where it returned tokens only, those."""
    if isinstance(made, torch.Tensor):
        yield made
        return
    yield made.sequences
    yield from made.scores or ()
    yield from made.logits or ()
    for step in made.hidden_states:
        yield from step


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", [*WAYS, *ONE_PROMPT])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name, way, attention):
    """Tokens, scores, logits and hidden states of each way to generate."""
    model, alone = model_of(name), way in ONE_PROMPT
    tokens = random_tokens(1 if alone else 2, 11)
    tokens[:, 6:9] = tokens[:, :3]  # for the lookup
    options = {**(ONE_PROMPT[way]() if alone else WAYS[way]), **({} if way == "contrastive" else ASKED)}
    prompt = {"inputs_embeds": model.get_input_embeddings()(tokens)} if way == "embeddings" else {"inputs": tokens}

    def generate(cache):
        given = {"do_sample": False, "max_new_tokens": NEW, "past_key_values": cache, **options}
        made = model.generate(**prompt, **given)
        if way != "contrastive":
            assert made.past_key_values is cache
        yield from results(made)
        yield torch.tensor([cache.get_seq_length()])

    check_same(model, generate, attention)


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
def test_attentions_that_are_asked_for(attention):
    """The model's eager attention returns its weights, over our cache too; "kvcache" has none, as "sdpa" has none."""
    model, tokens = model_of("llama"), random_tokens(2, 7)
    asked = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 3, "do_sample": False}
    made = []
    for cache, which in (
        (theirs(model)[0], "sdpa" if attention == "kvcache" else attention),
        (ours(model)[0], attention),
    ):
        model.set_attn_implementation(which)
        made.append(model.generate(tokens, past_key_values=cache, **asked).attentions)
    for step, (want, got) in enumerate(zip(*made, strict=True)):
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None) == (attention == "kvcache")
            if one is not None:
                assert one.shape == (2, 4, 7 if step == 0 else 1, 7 + step)
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def edit(cache):
    """Each operation that edits the rows of a batch, and takes back tokens."""
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 3]))
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    cache.crop(-3)
    cache.batch_select_indices((0, 2))
    cache.crop(0)


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_edits_between_passes(name, attention, padding):
    model, tokens = model_of(name), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0

    def edited(cache):
        if name == "gemma3":
            cache.activate_past_recording()  # else transformers' windows cannot go back
        yield from passes(model, cache, tokens[:, :12], mask)
        edit(cache)
        assert cache.get_seq_length() == 9
        rows = mask[[1, 0]]
        yield from passes(model, cache, tokens[:, 12:16], rows)
        other = copy.deepcopy(cache)
        yield from passes(model, cache, tokens[:, 16:], rows, [15, 17])
        other.crop(-1)
        yield from passes(model, other, tokens[:, 17:], rows)
        other.crop(-50 if name == "llama" else -15)  # more than there are; transformers' windows then count below 0
        assert other.get_seq_length() == 0
        yield from passes(model, other, tokens[:, :6], mask)
        cache.reset()
        yield from passes(model, cache, tokens[:, :5])

    check_same(model, edited, attention)


@pytest.mark.parametrize(
    "empty",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
        lambda cache: cache.batch_repeat_interleave(0),
    ],
)
def test_a_batch_without_rows(empty):
    """The last row of a batch stays: the tokens of a cache without rows could not be counted."""
    model, tokens = model_of("llama"), random_tokens(2, 5)

    def edited(cache):
        yield from passes(model, cache, tokens[:, :4])
        if isinstance(cache, HFCache):
            with pytest.raises(ValueError, match="no row of the batch would be left: select one or more, or reset"):
                empty(cache)
        yield from passes(model, cache, tokens[:, 4:])

    check_same(model, edited)


@pytest.mark.parametrize(
    ("kind", "dtype", "off"), [("float16", "f16", 0.03), ("float16", "bf16", 0.1), ("bfloat16", "bf16", 0.2)]
)
def test_types_of_rows_and_models(kind, dtype, off):
    """A model of 16 bits keeps its type, and is off from the model of 32 as its own cache is: by this much."""
    model, tokens = model_of("llama"), random_tokens(2, 20)
    mask = torch.ones_like(tokens)
    mask[0, :6] = mask[1, 12:15] = 0
    ends = [10, 19, 20]
    [want] = play(model, *theirs(model), lambda cache: [torch.cat([*passes(model, cache, tokens, mask, ends)])])
    model = copy.deepcopy(model).to(getattr(torch, kind))
    cache = HFCache(model.config, dtype=dtype)
    [got] = play(model, cache, "kvcache", lambda cache: [torch.cat([*passes(model, cache, tokens, mask, ends)])])
    assert got.dtype == getattr(torch, kind)
    assert (got - want).abs().max() < off * want.abs().max()

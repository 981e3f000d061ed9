"""A prefix cache keeps rows under the tokens that they follow from alone, whatever else a model is fed."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, join, make, prefix_for, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

BLOCK = 4
LONG = 20
MORE = 10
GREEDY = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}


@pytest.fixture(scope="module")
def model():
    return make(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 2, "initializer_range": 0.3}))


@pytest.fixture
def prefix(model):
    return prefix_for(model, BLOCK)


@torch.inference_mode()
def known(model, prefix, tokens):
    """Return how many tokens of a text are known. Their rows must equal the rows of a fresh pass."""
    model.set_attn_implementation("kvcache")
    seq_id, matched = prefix.acquire([*tokens.tolist(), 1])
    if matched:
        fresh = HFCache(model.config, "f32")
        model(tokens[None, :matched], past_key_values=fresh)
        for index, layer in enumerate(fresh.layers):
            rows = prefix.cache.gather(index, seq_id=seq_id)
            for got, want in zip(rows, (layer.keys, layer.values), strict=True):
                torch.testing.assert_close(torch.tensor(got).flatten(), want.flatten(), rtol=0, atol=1e-3)
    prefix.cache.clear(seq_id)
    return matched


def embedded(model, tokens):
    return {"inputs_embeds": model.get_input_embeddings()(tokens) * 2}


def moved(model, tokens):
    positions = torch.arange(tokens.shape[1])[None].clone()
    positions[:, LONG + 4 :] += 50
    return {"position_ids": positions}


def hides(model, tokens):
    mask = torch.ones_like(tokens)
    mask[:, LONG + 5] = 0
    return {"attention_mask": mask, "position_ids": torch.arange(tokens.shape[1])[None]}


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@pytest.mark.parametrize(("how", "most"), [(embedded, LONG + 3), (moved, LONG + 4), (hides, LONG + 5)])
def test_a_later_turn_of_generate(model, prefix, attention, how, most):
    """The first turn's tokens stay known; the second turn's do not, once their rows follow from other things."""
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, prefix=prefix)
    first = model.generate(random_tokens(1, LONG), cache=cache, **GREEDY)
    text = join(first, random_tokens(1, MORE, seed=1))
    made = model.generate(text, cache=cache, **how(model, text), **GREEDY)
    text = join(text, made[:, :0]) if "inputs_embeds" in how(model, text) else made
    cache.release(text)
    assert LONG <= known(model, prefix, text[0]) <= most


def both_ways(tokens, seen):
    return {"attention_mask": torch.zeros(1, 1, tokens.shape[1] - seen, tokens.shape[1])}


def both_ways_of_bool(tokens, seen):
    return {"attention_mask": torch.ones(1, 1, tokens.shape[1] - seen, tokens.shape[1], dtype=torch.bool)}


def a_hidden_token(tokens, seen):
    mask = torch.ones_like(tokens)
    mask[:, 2] = 0
    return {"attention_mask": mask, "position_ids": torch.arange(seen, tokens.shape[1])[None]}


def too_short_a_mask(tokens, seen):
    return {"attention_mask": torch.ones_like(tokens)[:, :2]}


def other_positions(tokens, seen):
    return {"position_ids": torch.arange(seen, tokens.shape[1])[None] + 7}


def not_causal(tokens, seen):
    return {"is_causal": False}


def token_types(tokens, seen):
    return {"token_type_ids": torch.ones_like(tokens)[:, seen:]}


WAYS = [both_ways, both_ways_of_bool, a_hidden_token, too_short_a_mask, other_positions, not_causal, token_types]


@pytest.mark.parametrize(("attention", "is_copied"), [("kvcache", False), ("kvcache", True), ("sdpa", False)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("plain", [0, 10])
def test_calls_of_the_model(model, prefix, plain, way, is_copied, attention):
    """The first tokens are fed alone, the others with something else."""
    model.set_attn_implementation(attention)
    tokens, cache = random_tokens(1, LONG), HFCache(model.config, prefix=prefix)
    with torch.inference_mode():
        cache.acquire(tokens)
        if plain:
            model(tokens[:, :plain], past_key_values=cache)
        if is_copied:
            other, cache = cache, copy.copy(cache)
            other.reset()
        model(tokens[:, plain:], past_key_values=cache, **way(tokens, plain))
        model(random_tokens(1, 1), past_key_values=cache)
    cache.release(tokens)
    shown = 2 if way in (a_hidden_token, too_short_a_mask) else 0  # of the masks' columns
    assert known(model, prefix, tokens[0]) == max(plain, shown)


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@torch.inference_mode()
def test_what_the_model_is_fed_counts(model, prefix, attention):
    """Embeddings, and other tokens than the named ones; a part of the model is fed what the call makes."""
    tokens, others = random_tokens(1, LONG), random_tokens(1, LONG, seed=1)
    others[:, :7] = tokens[:, :7]
    for inputs, most in (
        ({"inputs_embeds": model.get_input_embeddings()(tokens)}, 0),
        ({"input_ids": others}, 7),
        ({"input_ids": tokens}, LONG),
    ):
        model.set_attn_implementation(attention)
        cache = HFCache(model.config, prefix=prefix)
        assert cache.acquire(tokens) == min(known(model, prefix, tokens[0]), LONG - 1)
        cache.reset()
        prefix.clear()
        model.set_attn_implementation(attention)
        cache.acquire(tokens)
        model(past_key_values=cache, **inputs)
        cache.release(tokens)
        assert known(model, prefix, tokens[0]) == most
    model.set_attn_implementation(attention)
    prefix.clear()
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)
    model.forward(tokens[:, :12], None, None, cache)  # its part is told
    model(tokens[:, 12:], None, None, cache)
    cache.release(tokens)
    assert known(model, prefix, tokens[0]) == LONG


@torch.inference_mode()
def test_rows_that_nobody_told_are_not_kept(model, prefix):
    tokens, cache = random_tokens(1, LONG), HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)
    model(tokens[:, :8], past_key_values=cache)
    type(model.model).forward(model.model, tokens[:, 8:], past_key_values=cache)
    cache.release(tokens)
    assert known(model, prefix, tokens[0]) == 8


def test_rows_that_were_made_in_training_are_not_kept():
    """Dropout makes other rows each time."""
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=97, resid_pdrop=0.5, eos_token_id=None)
    model, tokens = make(config), random_tokens(1, LONG)
    prefix = prefix_for(model, BLOCK)
    options = {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}, **GREEDY}
    with pytest.warns(UserWarning, match=r"keeps nothing of a model in training mode: call model.eval\(\) first"):
        model.train().generate(tokens, **options)
    model.eval()
    assert known(model, prefix, tokens[0]) == 0
    model.generate(tokens, **options)
    assert known(model, prefix, tokens[0]) == LONG


@torch.inference_mode()
def test_positions_of_rows_behind_padding(model, prefix):
    """A model that is given no positions counts the padding, too."""
    tokens, mask = random_tokens(2, LONG), torch.ones(2, LONG, dtype=torch.long)
    mask[1, :6] = 0
    for positions, most in ((None, 0), ((mask.cumsum(1) - 1).clamp(min=0), LONG - 6)):
        cache = HFCache(model.config, prefix=prefix)
        cache.acquire(tokens, mask)
        model(tokens, attention_mask=mask, position_ids=positions, past_key_values=cache)
        cache.release(tokens)
        assert known(model, prefix, tokens[0]) == LONG
        assert known(model, prefix, tokens[1, 6:]) == most
        prefix.clear()


@pytest.mark.parametrize("way", [{"num_beams": 4, "num_return_sequences": 4}, {"num_beams": 2}])
@pytest.mark.parametrize("seed", range(3))
def test_beams_behind_a_crop(model, prefix, seed, way):
    """A shorter text cuts the cache to their common beginning; its beams change places behind the cut."""
    long = random_tokens(1, 40)
    short = join(long[:, :5], random_tokens(1, 5, seed=seed + 1))
    cache = HFCache(model.config, prefix=prefix)
    model.generate(long, cache=cache, **GREEDY)
    made = model.generate(short, cache=cache, **GREEDY | {"max_new_tokens": 12}, **way)
    cache.release(made)
    for row in made:
        assert 5 <= known(model, prefix, row) <= 10
    assert known(model, prefix, long[0]) == 40


@torch.inference_mode()
def test_rows_that_change_places(model, prefix):
    """Selected by hand before and behind the prompts' end, and cropped: each row is kept under its own tokens."""
    tokens = random_tokens(2, LONG)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)
    model(tokens[:, :8], past_key_values=cache)
    cache.batch_select_indices([1, 0])
    model(tokens[:, 8:], past_key_values=cache)  # each row goes on with the other's tokens
    cache.release(tokens[[1, 0]])
    for row in tokens:
        assert known(model, prefix, row) == 8
    cache.acquire(tokens)
    model(tokens[:, cache.get_seq_length() :], past_key_values=cache)
    cache.crop(10 - LONG)
    cache.reorder_cache([1, 1])
    mixed = join(tokens[[1, 1], :10], tokens[:, 10:])
    model(mixed[:, 10:], past_key_values=cache)
    cache.release(mixed[[1, 0]])
    for row in (*tokens, *mixed):
        assert known(model, prefix, row) >= 8


@torch.inference_mode()
def test_a_call_that_failed(model, prefix):
    """What it was about to feed is not taken for what is fed in its place."""
    tokens, others = random_tokens(1, LONG), random_tokens(1, LONG, seed=1)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)

    def fail(*_):
        raise ArithmeticError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        model(tokens, past_key_values=cache)
    hook.remove()
    type(model.model).forward(model.model, others, past_key_values=cache)
    cache.release(tokens)
    assert known(model, prefix, tokens[0]) == 0
    assert cache.acquire(tokens) == 0
    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        model(tokens, past_key_values=cache)
    hook.remove()
    model(tokens, past_key_values=cache)
    cache.release(tokens)
    assert known(model, prefix, tokens[0]) == LONG


@pytest.mark.slow  # torch takes ten seconds to compile anything
@pytest.mark.parametrize("part", ["model", "forward"])
@torch.inference_mode()
def test_a_compiled_model_tells_what_it_is_fed(part):
    model = make(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 1}))
    prefix = prefix_for(model)
    model.set_attn_implementation("kvcache")
    compiled = torch.compile(model if part == "model" else model.forward, backend="eager")
    cache, tokens = HFCache(model.config, prefix=prefix), random_tokens(1, LONG)
    cache.acquire(tokens)
    compiled(tokens[:, :12], past_key_values=cache)
    compiled(tokens[:, 12:], past_key_values=cache, position_ids=torch.arange(12, LONG)[None] + 3)
    cache.release(tokens)
    assert known(model, prefix, tokens[0]) == 12

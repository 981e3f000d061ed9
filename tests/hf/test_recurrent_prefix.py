"""Prompts of models with recurrent layers that begin as earlier ones: a match ends where their state was kept."""

import copy
import gc

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import hf_pairs  # noqa: E402 - torch may be missing
from support.hf_pairs import HYBRID, feeding, join, logits, model_of, prepared, random_tokens  # noqa: E402 - as above

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.texts import PieceByPiece  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

LONG = 60
FEW = ["falcon_h1", "lfm2", "qwen3_next"]
SERVED = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRID if name not in (*FEW, "jamba"))]
# How much of a prompt is fed does not depend on the kind of state; test_bits compares the states of each.
ONE = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in FEW if name != "lfm2")]
OPTIONS = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def prefix_for(model, state_bytes=None):
    return hf_pairs.prefix_for(model, state_bytes=HFCache.state_bytes(model) if state_bytes is None else state_bytes)


def generate(model, tokens, prefix=None, mask=None, **options):
    """Return what is generated, and the tokens of a row in each pass."""
    given = {"dtype": "f32"} if prefix is None else {"prefix": prefix}
    if "past_key_values" not in options:
        options |= {"cache_implementation": "kvcache", "cache_config": given}
    mask = torch.ones_like(tokens) if mask is None else mask
    with feeding(model) as fed:
        return model.generate(tokens, attention_mask=mask, **{**OPTIONS, **options}), fed


@pytest.mark.parametrize("name", SERVED)
def test_bits(name):
    """A model without a prefix cache gives the same output, fed the same tokens in the same passes."""
    model = prepared(name)
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    cache, plain = HFCache(model.config, prefix=prefix), HFCache(model.config, dtype="f32")
    assert cache.acquire(tokens) == 0
    for begin, end in ((0, 20), (20, 45), (45, 60)):
        assert torch.equal(logits(model, cache, tokens[:, begin:end]), logits(model, plain, tokens[:, begin:end]))
    cache.release(tokens)
    for end, matched in ((60, 45), (61, 60), (45, 20), (20, 0), (46, 45)):
        other = join(tokens, random_tokens(1, 5, seed=2))[:, :end]
        cache = HFCache(model.config, prefix=prefix)
        assert cache.acquire(other) == matched
        plain.reset()
        for begin, stop in ((0, 20), (20, 45), (45, 60), (60, end)):
            if begin < stop <= max(matched, 0):
                logits(model, plain, tokens[:, begin:stop])
        assert torch.equal(logits(model, cache, other[:, matched:]), logits(model, plain, other[:, matched:]))


@pytest.mark.parametrize("name", ONE)
def test_where_prompts_part(name):
    """The second prompt with a beginning leaves a state behind it, from which later prompts go on."""
    model = prepared(name)
    system, asked = random_tokens(1, 50), [random_tokens(1, 12, seed=i) for i in range(4)]
    prefix = prefix_for(model)
    for question, wanted in zip(asked, ([61, 1], [50, 11, 1], [11, 1], [11, 1]), strict=True):
        got, fed = generate(model, join(system, question), prefix)
        assert fed[: len(wanted)] == wanted
        assert torch.equal(got, generate(model, join(system, question))[0])
    both, mask = random_tokens(2, 70, seed=8), torch.ones(2, 70, dtype=torch.long)
    both[0, 5:55] = system
    both[0, :5] = mask[0, :5] = 0
    got, fed = generate(model, both, prefix_for(model), mask)
    assert fed[:2] == [69, 1]
    prefix = prefix_for(model)
    generate(model, join(system, asked[0]), prefix)
    got, fed = generate(model, both, prefix, mask)
    assert fed[:3] == [55, 14, 1]
    assert torch.equal(got, generate(model, both, None, mask)[0])
    prefix = prefix_for(model)
    for question in asked[:2]:  # less than a block is not worth a state
        _, fed = generate(model, join(system[:, :15], question), prefix)
        assert fed[:2] == [26, 1]


def test_padding_that_is_fed_token_by_token():
    """transformers gives a pass of one token no mask: the states of that row count its padding, and are not kept."""
    model = prepared("qwen3_next")
    prefix = prefix_for(model)
    tokens, mask = random_tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens, mask)
    with torch.no_grad():
        for i in range(30):
            given = {"attention_mask": mask[:, : i + 1], "position_ids": positions[:, i : i + 1]}
            model(tokens[:, i : i + 1], past_key_values=cache, **given)
    cache.release(tokens)
    assert [prefix.lookup(row) for row in (tokens[0].tolist(), tokens[1, 7:].tolist())] == [30, 0]


@pytest.mark.parametrize("name", ONE)
def test_passes_of_other_caches_between(name):
    """A state is kept behind a pass although another cache's pass, a copy, or a look at the rows has ended it."""
    model = prepared(name)
    prefix = prefix_for(model)
    tokens = [random_tokens(1, LONG, seed=i) for i in range(2)]
    caches = [HFCache(model.config, prefix=prefix) for _ in tokens]
    for cache, text in zip(caches, tokens, strict=True):
        cache.acquire(text)
    for begin, end in ((0, 20), (20, 45), (45, 60)):
        for cache, text in zip(caches, tokens, strict=True):
            logits(model, cache, text[:, begin:end])
    for text in tokens:
        assert prefix.lookup(text[0].tolist()) == 45
        assert prefix.lookup(text[0, :44].tolist()) == 20
    [cache, other], text = caches, tokens[0]
    cache.reset()
    other.reset()
    cache.acquire(text[:, :25])
    logits(model, cache, text[:, 20:23])
    copies = copy.deepcopy(cache), repr(cache)
    logits(model, cache, text[:, 23:25])
    assert prefix.lookup(text[0, :25].tolist()) == 23
    del copies


# ---- what is refused


@pytest.mark.parametrize("name", ["lfm2", "llama"])
def test_state_bytes_of_what_is_no_model(name):
    with pytest.raises(TypeError, match=r"model is a L.*Config: give the model itself, whose configuration does not"):
        HFCache.state_bytes(model_of(name).config)


def test_a_prefix_cache_of_another_kind():
    model = prepared("lfm2")
    with pytest.raises(ValueError, match=r"state_bytes=0 of prefix: a Lfm2Config has recurrent layers: give PrefixC"):
        HFCache(model.config, prefix=prefix_for(model, state_bytes=0))
    llama = model_of("llama")
    with pytest.raises(ValueError, match="state_bytes=7 of prefix: a LlamaConfig has no recurrent layers: leave"):
        HFCache(llama.config, prefix=prefix_for(llama, state_bytes=7))
    jamba = model_of("jamba")
    with pytest.raises(kvcache.NotSupportedError, match="single tokens only: leave prefix out"):
        HFCache(jamba.config, prefix=prefix_for(jamba))


def test_too_few_state_bytes():
    """The value that would do is named."""
    model = prepared("lfm2")
    needed = HFCache.state_bytes(model)
    prefix = prefix_for(model, state_bytes=100)
    with pytest.raises(ValueError, match=f"has {needed} bytes: give PrefixCache state_bytes={needed}"):
        generate(model, random_tokens(1, LONG), prefix)
    gc.collect()
    assert prefix.stats.sequences == 0


def test_a_state_of_another_model():
    """With one fingerprint for both: the first state is refused, and nothing is held."""
    model, tokens = prepared("falcon_h1"), random_tokens(1, LONG)
    prefix = prefix_for(model)
    seq_id, _ = prefix.acquire(tokens[0].tolist())
    x = torch.ones(20, 2, 16)
    with prefix.cache.batch(positions=range(20), seq_ids=[seq_id] * 20) as batch:
        for layer in range(4):
            batch.put(layer, x, x)
    prefix.checkpoint(seq_id, tokens[0, :20].tolist(), b"no state of it")
    prefix.cache.clear(seq_id)
    cache = HFCache(model.config, prefix=prefix)
    with pytest.raises(ValueError, match="prefix has the states of another model: give it another fingerprint"):
        cache.acquire(tokens)
    assert cache.get_seq_length() == prefix.stats.sequences == 0


# ---- where a prompt is cut


@pytest.mark.parametrize(
    ("num_tokens", "seen", "options", "lengths"),
    [
        (1, 0, {}, [1]),
        (2, 0, {}, [1, 1]),
        (100, 0, {}, [64, 35, 1]),
        (65, 0, {}, [64, 1]),
        (66, 0, {}, [64, 1, 1]),
        (100, 50, {}, [14, 64, 21, 1]),
        (100, 0, {"logits_to_keep": 5}, [64, 31, 5]),
        (100, 0, {"logits_to_keep": 50}, [50, 50]),
        (100, 0, {"logits_to_keep": 100}, [100]),
        (100, 0, {"logits_to_keep": 200}, [100]),
        (100, 0, {"output_hidden_states": True}, [100]),
    ],
)
def test_where_a_prompt_is_cut(num_tokens, seen, options, lengths):
    model, passes = prepared("lfm2"), []
    cache, tokens = HFCache(model.config, prefix=prefix_for(model)), random_tokens(1, seen + num_tokens)
    cache.acquire(tokens)
    if seen:
        logits(model, cache, tokens[:, :seen])
    pieces = PieceByPiece(lambda **given: passes.append(given), cache.texts, 64)
    pieces(input_ids=tokens[:, seen:], **options)
    assert [given["input_ids"].shape[1] for given in passes] == lengths

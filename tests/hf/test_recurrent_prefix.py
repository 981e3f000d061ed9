"""Prompts of models with recurrent layers that begin as earlier ones: a match ends where their state was kept."""

import copy
import gc

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import HYBRID, make, model_of, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.texts import PieceByPiece  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

LONG = 60
APART = {"zamba2"}  # whose step and scan of several tokens differ by a thousandth
FEW = ["falcon_h1", "lfm2", "qwen3_next"]
SERVED = [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRID if name not in (*FEW, "jamba"))]
# How much of a prompt is fed does not depend on the kind of state; test_bits compares the states of each.
ONE = ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in FEW if name != "lfm2")]
OPTIONS = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}


def prepared(name):
    model = model_of(name)
    model.set_attn_implementation("kvcache")
    return model


def prefix_for(model, *, state_bytes=None, store=None, block_size=16, **arguments):
    memory = HFCache.make_kv_cache(model.config, "f32", block_size=block_size, **arguments)
    state_bytes = HFCache.state_bytes(model) if state_bytes is None else state_bytes
    return kvcache.PrefixCache(memory, fingerprint="a model", state_bytes=state_bytes, store=store, timeout=60)


def generate(model, tokens, prefix=None, mask=None, **options):
    """Return what is generated, and the tokens of a row in each pass."""
    given = {"dtype": "f32"} if prefix is None else {"prefix": prefix}
    if "past_key_values" not in options:
        options |= {"cache_implementation": "kvcache", "cache_config": given}
    mask, fed = torch.ones_like(tokens) if mask is None else mask, []
    hook = model.register_forward_pre_hook(lambda *given: fed.append(given[2]["input_ids"].shape[1]), with_kwargs=True)
    try:
        return model.generate(tokens, attention_mask=mask, **{**OPTIONS, **options}), fed
    finally:
        hook.remove()


def logits(model, cache, tokens):
    seen = cache.get_seq_length()
    positions = torch.arange(seen, seen + tokens.shape[1])[None]
    with torch.no_grad():
        return model(tokens, past_key_values=cache, position_ids=positions).logits


def join(*parts):
    return torch.cat(parts, 1)


@pytest.mark.parametrize("name", SERVED)
def test_turns(name):
    """Each prompt begins with the last text: it is fed from the end of the last answer on."""
    model = prepared(name)
    prefix = prefix_for(model)
    text = random_tokens(1, LONG)
    for turn in range(3):
        want, _ = generate(model, text)
        got, fed = generate(model, text, prefix)
        assert fed[0] == (LONG - 1 if turn == 0 else 9)  # the last token of a prompt is a pass of its own
        assert torch.equal(got, want) or name in APART
        text = join(got, random_tokens(1, 9, seed=turn))
    assert prefix.stats.sequences == 0
    assert prefix.stats.checkpoints == 6  # before the last token of each prompt, and behind each answer


@pytest.mark.parametrize("name", SERVED)
def test_the_same_prompt_again(name):
    model = prepared(name)
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    want, _ = generate(model, tokens, prefix)
    got, fed = generate(model, tokens, prefix)
    assert torch.equal(got, want)
    assert fed == [1] * 8


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
def test_a_common_beginning(name):
    """A common beginning is found if a piece of the prompt ended there, or a whole prompt."""
    model = prepared(name)
    system, asked = random_tokens(1, 50), [random_tokens(1, 12, seed=i) for i in range(3)]
    prefix = prefix_for(model)
    _, fed = generate(model, join(system, asked[0]), prefix, prefill_chunk_size=16)
    assert fed[:5] == [16, 16, 16, 13, 1]
    for question in asked[1:]:
        want, _ = generate(model, join(system, question))
        got, fed = generate(model, join(system, question), prefix, prefill_chunk_size=16)
        assert fed[:3] == [13, 1, 1]  # from column 48 on
        assert torch.equal(got, want)
    prefix = prefix_for(model)
    generate(model, system, prefix, max_new_tokens=1)
    for question in asked:
        got, fed = generate(model, join(system, question), prefix)
        assert fed[:2] == [11, 1]
        assert torch.equal(got, generate(model, join(system, question))[0])


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


@pytest.mark.parametrize("name", FEW)
def test_batches(name):
    """All rows begin at one column, at which the state of each is known."""
    model = prepared(name)
    prefix = prefix_for(model)
    system = random_tokens(1, 40)
    generate(model, system, prefix, max_new_tokens=2)
    tokens = join(system.expand(3, -1), random_tokens(3, 10))
    got, fed = generate(model, tokens, prefix)
    assert fed[:2] == [9 + 40 - 39, 1] or fed[:2] == [9, 1]
    assert torch.equal(got, generate(model, tokens)[0])
    padded = tokens.clone()
    mask = torch.ones_like(tokens)
    mask[0, :45] = padded[0, :45] = 0
    got, fed = generate(model, padded, prefix, mask)
    assert fed[0] == 49  # there is no state of a row in its padding
    assert torch.equal(got, generate(model, padded, None, mask)[0])


@pytest.mark.parametrize("name", FEW)
def test_padding(name):
    """A prompt is found however it was padded."""
    model = prepared(name)
    prefix = prefix_for(model)
    tokens, mask = random_tokens(2, 30), torch.ones(2, 30, dtype=torch.long)
    tokens[0, :11] = mask[0, :11] = 0
    got, _ = generate(model, tokens, prefix, mask)
    assert torch.equal(got, generate(model, tokens, None, mask)[0])
    for row, begin in ((0, 11), (1, 0)):
        text = join(got[row : row + 1, begin:], random_tokens(1, 9))
        want, _ = generate(model, text)
        again, fed = generate(model, text, prefix)
        assert fed[:2] == [9, 1]
        assert torch.equal(again, want)


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


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}])
@pytest.mark.parametrize("name", ONE)
def test_several_sequences_for_a_prompt(name, way):
    model = prepared(name)
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    torch.manual_seed(3)
    want, _ = generate(model, tokens, **way)
    for fed_first in (LONG - 1, 1):
        torch.manual_seed(3)
        got, fed = generate(model, tokens, prefix, **way)
        assert fed[0] == fed_first
        assert torch.equal(got, want)
    assert prefix.stats.sequences == 0


@pytest.mark.parametrize("name", ONE)
def test_a_cache_that_is_kept(name):
    model = prepared(name)
    prefix = prefix_for(model)
    cache = HFCache(model.config, prefix=prefix)
    text, _ = generate(model, random_tokens(1, LONG), past_key_values=cache)
    other = copy.deepcopy(cache)
    text, _ = generate(model, join(text, random_tokens(1, 9)), past_key_values=cache)
    cache.release(text)
    assert prefix.lookup([*text[0].tolist(), 1]) == text.shape[1] - 1
    assert prefix.lookup(text[0, : text.shape[1] - 20].tolist()) == LONG - 1
    answer, _ = generate(model, text[:, : LONG + 8], past_key_values=other)
    other.release(answer)
    assert prefix.stats.sequences == 0
    assert torch.equal(answer, generate(model, text[:, : LONG + 8])[0])


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


@pytest.mark.parametrize("name", ONE)
def test_what_no_state_is_kept_of(name):
    """Tokens that were not named, of a pass that failed, or behind a hidden one."""
    model = prepared(name)
    tokens = random_tokens(1, LONG)
    prefix = prefix_for(model)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens[:, :30])
    logits(model, cache, tokens)
    cache.release()
    assert prefix.lookup(tokens[0].tolist()) == 0
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)
    hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model, cache, tokens)
    hook.remove()
    cache.release(tokens)
    assert prefix.lookup(tokens[0].tolist()) == 0
    mask = torch.ones_like(tokens)
    mask[0, 20] = 0
    generate(model, tokens, prefix, mask)
    assert prefix.lookup(tokens[0].tolist()) == 20  # where the rows before the hidden one end
    assert prefix.stats.sequences == 0


def test_assisted_decoding_feeds_the_whole_prompt():
    model = prepared("lfm2")
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    tokens[:, 40:] = tokens[:, :20]
    want, _ = generate(model, tokens)
    for _ in range(2):
        got, _ = generate(model, tokens, prefix, prompt_lookup_num_tokens=3)
        assert torch.equal(got, want)
    text = join(want, random_tokens(1, 9))
    got, fed = generate(model, text, prefix)
    assert fed[0] < 12
    assert torch.equal(got, generate(model, text)[0])


def test_a_store():
    model = prepared("qwen3_next")
    store = {}
    prefix = prefix_for(model, store=store)
    text, _ = generate(model, random_tokens(1, LONG), prefix, prefill_chunk_size=32)
    assert prefix.flush(30)
    prefix = prefix_for(model, store=store)
    text = join(text, random_tokens(1, 9))
    got, fed = generate(model, text, prefix)
    assert fed[0] < 50
    assert torch.equal(got, generate(model, text)[0])


def test_where_memory_is_short():
    """A state that does not fit is not kept, and nothing fails."""
    model = prepared("qwen3_next")
    rows = prefix_for(model)
    generate(model, random_tokens(1, LONG), rows)
    prefix = prefix_for(model, max_bytes=rows.cache.nbytes - 2 * HFCache.state_bytes(model))
    for seed in range(4):
        tokens = random_tokens(1, LONG, seed=seed)
        got, _ = generate(model, tokens, prefix)
        assert torch.equal(got, generate(model, tokens)[0])


@pytest.mark.parametrize("name", [*HYBRID, "llama"])
def test_state_bytes(name):
    model = prepared(name)
    cache = HFCache(model.config)
    logits(model, cache, random_tokens(2, 17))
    wanted = HFCache.state_bytes(model)
    assert wanted == (len(cache.recurrent.state_of(1)) if name in HYBRID else 0)
    assert (wanted > cache.recurrent.nbytes // 2) == (name in HYBRID)


def test_state_bytes_follow_the_model():
    model = prepared("qwen3_next")
    wide = HFCache.state_bytes(model)
    narrow = HFCache.state_bytes(make(HYBRID["qwen3_next"]()).to(torch.bfloat16))
    assert narrow < wide


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

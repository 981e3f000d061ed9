"""An interrupt of `generate`, `release` or `reset` comes out as it is, and the cache answers the next text rightly."""

import gc
import itertools

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.hf_pairs import CONFIGS, HYBRID, make, model_of, prefix_for, random_tokens  # noqa: E402 - torch may be missing
from support.interrupts import in_a_thread, interrupt, interrupt_everywhere  # noqa: E402 - beside its like

from kvcache import Batch, KVCache, PrefixCache  # noqa: E402 - it imports those
from kvcache.hf import HFCache, generation  # noqa: E402 - it imports those
from kvcache.hf.prompts import Prompts  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

FEW = ["lfm2", "qwen3_next"]
GREEDY = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}


class Stop(BaseException):
    """Raised by the handler of a signal."""


def interrupt_behind(monkeypatch, owner, name):
    """Let a method do its work once, and the handler of a signal raise before it returns."""
    method, calls = getattr(owner, name), itertools.count()

    def interrupted(*args, **kwargs):
        result = method(*args, **kwargs)
        if next(calls) == 0:
            raise Stop
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.fixture
def model():
    model = make(CONFIGS["llama"]())
    model.set_attn_implementation("kvcache")
    return model


@pytest.mark.parametrize("with_prefix", [True, False])
@pytest.mark.parametrize(
    ("call", "owner", "name"),
    [
        ("release", PrefixCache, "release"),
        ("release", KVCache, "clear"),
        ("reset", KVCache, "clear"),
        ("generate", Batch, "commit"),
        ("generate", Prompts, "note_inexact"),
    ],
)
def test_the_next_text_is_answered_rightly(monkeypatch, model, with_prefix, call, owner, name):
    if owner in (PrefixCache, Prompts) and not with_prefix:
        pytest.skip("it is not called")
    prefix = prefix_for(model)
    text = random_tokens(1, 40)
    other = torch.cat([text[:, :30], random_tokens(1, 12)], 1)
    want = model.generate(other, **GREEDY)
    cache = HFCache(model.config, "f32", prefix=prefix if with_prefix else None)
    with monkeypatch.context() as patched:
        if call != "generate":
            model.generate(text, cache=cache, **GREEDY)
        interrupt_behind(patched, owner, name)
        with pytest.raises(Stop):
            model.generate(text, cache=cache, **GREEDY) if call == "generate" else getattr(cache, call)()
    assert torch.equal(model.generate(other, cache=cache, **GREEDY), want)
    del cache
    gc.collect()
    assert prefix.cache.sequences == []
    prefix.cache.validate()


@pytest.mark.parametrize(("owner", "name"), [(Prompts, "note_inexact"), (Batch, "commit")])
def test_a_cache_that_generate_made_leaves_nothing(monkeypatch, model, owner, name):
    prefix = prefix_for(model)
    options = {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}, **GREEDY}
    with monkeypatch.context() as patched:
        interrupt_behind(patched, owner, name)
        with pytest.raises(Stop):
            model.generate(random_tokens(1, 40), **options)
    assert prefix.cache.sequences == []
    assert prefix.stats.sequences == 0
    prefix.cache.validate()


@pytest.mark.parametrize(
    ("left", "is_open"),
    [(20, True), *(pytest.param(*given, marks=pytest.mark.slow) for given in ((20, False), (30, True), (30, False)))],
)
@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in HYBRID if name in FEW)]
)
def test_crop_is_done_or_not_done(name, left, is_open):
    """Wherever it is interrupted, the rows and the states of all texts are behind the same tokens."""
    model = model_of(name)
    model.set_attn_implementation("kvcache")
    tokens, new = random_tokens(2, 40), random_tokens(2, 4, seed=7)
    with torch.no_grad():
        wanted = {}
        for length in (left, 40):
            cache = HFCache(model.config, "f32")
            wanted[length] = model(torch.cat([tokens[:, :length], new], 1), past_key_values=cache).logits[:, -1]
        for number in itertools.count(1):
            cache = HFCache(model.config, "f32")
            for begin, end in ((0, 20), (20, 30), (30, 40)):
                model(tokens[:, begin:end], past_key_values=cache)
            if not is_open:
                cache._passes.finish()
            is_reached, _ = interrupt(number, lambda: cache.crop(left - 40))  # noqa: B023 - it is called at once
            got = model(new, past_key_values=cache).logits[:, -1]
            want = wanted[cache.get_seq_length() - 4]
            assert (got - want).abs().max() < 1e-3 * want.abs().max(), number
            if not is_reached:
                break
    assert number > 20


@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize(
    "name", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen3_next"))]
)
def test_rows_move_or_stay_or_are_forgotten(name, with_prefix):
    """Wherever beams are interrupted on their way, the rows, the states and the prompts are of the same texts."""
    model = model_of(name)
    model.set_attn_implementation("kvcache")
    tokens, new, beams = random_tokens(3, 20), random_tokens(3, 4, seed=7), [2, 2, 0]
    state_bytes = HFCache.state_bytes(model)
    more = {"state_bytes": state_bytes} if state_bytes else {}
    found = set()
    with torch.no_grad():
        wanted = {}
        for way, text in (("stay", tokens), ("move", tokens[beams])):
            wanted[way] = model(torch.cat([text, new], 1)).logits[:, -1]
        for number in itertools.count(1):
            prefix = prefix_for(model, **more) if with_prefix else None
            cache = HFCache(model.config, "f32", prefix=prefix)
            if with_prefix:
                cache.acquire(tokens)
            model(tokens, past_key_values=cache)
            is_reached, _ = interrupt(number, lambda: cache.reorder_cache(torch.tensor(beams)))  # noqa: B023 - it is called at once
            held = cache.get_seq_length()
            if held:
                got = model(new, past_key_values=cache).logits[:, -1]
                ways = [way for way, want in wanted.items() if (got - want).abs().max() < 1e-3 * want.abs().max()]
                assert (held, len(ways)) == (20, 1), number
                found.update(ways)
            else:
                found.add("forgotten")
            rows = cache._cache
            cache.reset()
            assert rows.sequences == [], number
            rows.validate()
            if not is_reached:
                break
    assert found == {"stay", "move", "forgotten"}


def test_a_cache_is_free_behind_an_interrupt(monkeypatch, model):
    """Wherever `generate` is interrupted, other threads can use its cache, and no later call takes its arguments."""
    cache, tokens = HFCache(model.config, "f32"), random_tokens(1, 13)
    monkeypatch.setattr(generation, "generate", lambda *_, **__: tokens)

    def check(_):
        assert generation._running.get() is None
        in_a_thread(lambda: model.generate(tokens, cache=cache))

    assert interrupt_everywhere(lambda: (None, lambda: model.generate(tokens, cache=cache)), check) > 20


def test_sequences_that_are_acquired_are_held_or_end():
    """Wherever it is interrupted, no sequence is left that nobody has."""
    model, tokens = model_of("lfm2"), random_tokens(2, 40)
    model.set_attn_implementation("kvcache")
    prefix = prefix_for(model, state_bytes=HFCache.state_bytes(model))
    cache = HFCache(model.config, "f32", prefix=prefix)
    cache.acquire(tokens)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    cache.release()

    def make():
        cache = HFCache(model.config, "f32", prefix=prefix)
        return cache, lambda: cache.acquire(torch.cat([tokens, tokens[:, :5]], 1))

    def check(cache):
        assert cache.get_seq_length() in (0, 40)
        cache.reset()
        assert prefix.cache.sequences == []

    assert interrupt_everywhere(make, check) > 100

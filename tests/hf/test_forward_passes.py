"""A forward pass may have layers in another order, twice or left out, and copies and errors in its middle."""

import copy
import threading
import warnings

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import (  # noqa: E402 - torch may be missing
    CONFIGS,
    HYBRID,
    LAYERS,
    check_same,
    make,
    model_of,
    ours,
    passes,
    random_tokens,
    two_sided,
)

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers


def model_with(order):
    """A model that runs its layers in another order."""
    model = make(CONFIGS["llama"]())
    model.model.layers = torch.nn.ModuleList([model.model.layers[i] for i in order])
    return model


@pytest.mark.parametrize("order", [[0, 1, 1, 2], [0, 1, 2, 2]])
@pytest.mark.filterwarnings("ignore:kvcache. the last forward pass")
def test_a_layer_that_runs_twice(order):
    """A layer's rows of one pass are stored once: a model that brings them twice is refused."""
    model = model_with(order)
    cache, _ = ours(model)
    model.set_attn_implementation("kvcache")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"layer . brings keys in a forward pass without layer 0"):
        model(random_tokens(2, 10), past_key_values=cache)
    assert cache.get_seq_length() == 0


def test_a_copy_used_in_the_middle_of_a_pass():
    """The copy's pass is right; the other is refused, drops its tokens, and goes right when it is run again."""
    model, tokens = model_of("llama"), random_tokens(2, 12)
    other_model = make(CONFIGS["llama"]())
    for each in (model, other_model):
        each.set_attn_implementation("kvcache")
    cache, _ = ours(model)
    with torch.no_grad():
        [*passes(model, cache, tokens[:, :10])]
        want = other_model(tokens[:, 10:], past_key_values=copy.deepcopy(cache)).logits
        other, made = copy.deepcopy(cache), []

        def use_copy(*_):
            made.append(other_model(tokens[:, 10:], past_key_values=other).logits)

        hook = model.model.layers[2].register_forward_pre_hook(use_copy)
        with (
            pytest.warns(UserWarning, match="its tokens were dropped: it failed, a copy of the cache was used before"),
            pytest.raises(RuntimeError, match="was used by others before the pass ended"),
        ):
            model(tokens[:, 10:], past_key_values=cache)
        hook.remove()
        assert (cache.get_seq_length(), other.get_seq_length()) == (10, 12)
        again = model(tokens[:, 10:], past_key_values=cache).logits
    torch.testing.assert_close(made[0], want)
    torch.testing.assert_close(again, want)


@pytest.mark.parametrize("told", [False, True])
def test_an_error_between_two_layers(told):
    """The tokens may be fed again as they were; others, once the cache was told that the pass failed."""
    model, tokens = model_of("llama"), random_tokens(2, 13)

    def play(cache):
        yield from passes(model, cache, tokens[:, :8])
        if not isinstance(cache, transformers.DynamicCache):
            hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens[:, 8:12], past_key_values=cache)
            hook.remove()
            assert cache.get_seq_length() == 8
            if told:
                with pytest.raises(ValueError, match=r"2 of 4 layers, .* \(4 tokens\) .*: if .* call crop\(0\)"):
                    model(tokens[:, 8:10], past_key_values=cache)
                cache.crop(0)
        with warnings.catch_warnings():
            warnings.filterwarnings("error" if told else "ignore", "kvcache: the last forward pass")
            yield from passes(model, cache, tokens[:, 8:], None, [10, 13] if told else [12, 13])

    check_same(model, play)


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.parametrize("again", ["forward", "generate"])
@pytest.mark.filterwarnings("ignore:kvcache. the last forward pass")
def test_a_first_pass_that_fails(monkeypatch, layer, again):
    """It leaves the cache as new: another text, of more rows, goes the way it goes in a new cache."""
    model, tokens = model_of("llama"), random_tokens(3, 13)
    model.set_attn_implementation("kvcache")
    attend = kvcache.Batch.attend

    def fail(batch, index, *args, **options):
        if index == layer:
            raise RuntimeError
        return attend(batch, index, *args, **options)

    def run(cache, tokens):
        if again == "forward":
            return model(tokens, past_key_values=cache).logits
        return model.generate(tokens, past_key_values=cache, max_new_tokens=3, do_sample=False)

    cache, new = ours(model)[0], ours(model)[0]
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(kvcache.Batch, "attend", fail)
            with pytest.raises(RuntimeError):
                run(cache, tokens[:2])
        assert cache.batch_size == cache.layers[0].batch_size == -1
        torch.testing.assert_close(run(cache, tokens), run(new, tokens))
    assert (cache.batch_size, cache.get_seq_length()) == (3, new.get_seq_length())


@pytest.mark.parametrize("act", ["feed", "evict"])
def test_a_batch_that_another_thread_is_about_to_end(act):
    """A copy has an open batch and no owner while another thread collects it."""
    model, tokens = model_of("llama"), random_tokens(1, 50)
    model.set_attn_implementation("kvcache")
    cache, _ = ours(model)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    cache._passes.finish()
    batch = cache._cache.batch(positions=[0], seq_ids=[99])
    ending = threading.Timer(0.3, batch.abort)
    ending.start()
    if act == "feed":
        with torch.no_grad():
            model(tokens[:, :1], past_key_values=cache)
    else:
        cache.evict(lambda prompt: range(prompt.num_rows), 0.8)
    ending.join()
    cache._passes.finish()
    assert cache.get_seq_length() == (51 if act == "feed" else 50)
    assert cache._cache.seq_len(cache._passes.seq_ids[0]) == (51 if act == "feed" else 40)


def test_a_cache_by_its_name_in_newer_releases():
    """Calls of a model take it as `cache` in transformers 5.24, and here in 5.23, too."""
    model, tokens = model_of("llama"), random_tokens(1, 9)
    model.set_attn_implementation("kvcache")
    bart, inputs = two_sided("bart")
    given = {"input_ids": inputs["inputs"], "decoder_input_ids": inputs["decoder_input_ids"]}
    cache, two = HFCache(model.config), HFEncoderDecoderCache(bart.config)
    with torch.no_grad():
        model(tokens, cache=cache)
        model.model(tokens, cache=cache)
        bart(**given, cache=two)
    assert (cache.get_seq_length(), two.get_seq_length()) == (18, 3)


def elsewhere(call):
    """Return what a call raises in another thread."""
    raised = []

    def run():
        try:
            call()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_another_thread_cannot_use_the_cache_of_a_text_that_is_made(name):
    model, tokens, raised = make((CONFIGS | HYBRID)[name]()).requires_grad_(False), random_tokens(1, 13), []
    cache = HFCache(model.config)

    def generate(cache, *processors):
        options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "logits_processor": [*processors]}
        return model.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, **options)

    def interfere(input_ids, scores):
        raised.extend(elsewhere(lambda: generate(cache)) + elsewhere(lambda: model(tokens, past_key_values=cache)))
        assert not elsewhere(lambda: generate(copy.deepcopy(cache)))
        return scores

    text = generate(cache, interfere)
    assert torch.equal(text, generate(HFCache(model.config)))
    assert len(raised) == 8
    assert all(isinstance(error, kvcache.CacheBusyError) and "deepcopy" in str(error) for error in raised)
    assert not elsewhere(lambda: generate(cache))  # one thread after the other


@pytest.mark.parametrize("name", ["llama", "lfm2", "bart"])
def test_another_thread_cannot_change_the_cache_of_a_text_that_is_made(name):
    """It would go on behind a gap, or without its prompt, and so would the next text."""
    if name == "bart":
        model, given = two_sided(name)
        make_cache = HFEncoderDecoderCache
    else:
        model, given = make((CONFIGS | HYBRID)[name]()), {"input_ids": random_tokens(2, 13)}
        make_cache = HFCache
    model.set_attn_implementation("kvcache")
    cache, raised, every = make_cache(model.config), [], [0, 1]
    changes = [
        lambda: cache.reset(),
        lambda: cache.crop(-2),
        lambda: cache.reorder_cache(torch.tensor(every)),
        lambda: cache.batch_select_indices(torch.tensor(every)),
        lambda: cache.batch_repeat_interleave(1),
    ]
    if name != "bart":
        changes += [lambda: cache.release(), lambda: cache.note_queries(), lambda: cache.evict(len)]

    def generate(cache, *processors):
        options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0, "logits_processor": [*processors]}
        return model.generate(**given, past_key_values=cache, **options)

    def interfere(input_ids, scores):
        raised.extend(error for change in changes for error in elsewhere(change))
        return scores

    want = generate(make_cache(model.config))
    assert torch.equal(generate(cache, interfere), want)
    assert [type(error) for error in raised] == [kvcache.CacheBusyError] * 4 * len(changes)
    assert torch.equal(generate(cache), want)
    assert not elsewhere(lambda: cache.reset())


@pytest.mark.filterwarnings("ignore:kvcache. the last forward pass")
def test_a_pass_does_not_go_on_in_another_thread():
    model, tokens = make(CONFIGS["llama"]()).requires_grad_(False), random_tokens(1, 13)
    cache, main = HFCache(model.config), threading.get_ident()

    def interfere(*_):
        if threading.get_ident() != main:
            raise RuntimeError("fails behind layer 0")
        assert elsewhere(lambda: model(tokens, past_key_values=cache))

    model.model.layers[1].register_forward_pre_hook(interfere)
    with torch.no_grad(), pytest.raises(kvcache.CacheBusyError, match="layer 1 goes on with the pass of another"):
        model(tokens, past_key_values=cache)

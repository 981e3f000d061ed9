"""A prompt that begins as an earlier one is fed from where they part, and answered as without a prefix cache."""

import copy
import gc
import threading
import weakref

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, CONFIGS, MIXED, feeding, join, make, model_of, passes, prefix_for, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

LONG = 60
BLOCK = 16
GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
NAMES = ["llama", "mistral", "gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt_oss", "llama4"))]


def generate(model, tokens, prefix=None, attention="kvcache", **options):
    """Return what is generated, and the tokens of a row in each pass."""
    model.set_attn_implementation(attention)
    given = {"cache_implementation": "kvcache", "cache_config": {"dtype": "f32"}}
    if prefix is not None:
        given["cache_config"] = {"prefix": prefix}
    torch.manual_seed(3)
    with feeding(model) as fed:
        return model.generate(tokens, **{**GREEDY, **given, **options}), fed


def test_a_cache_is_dropped_in_the_middle_of_a_batch():
    """The garbage collector may drop it in any thread and in the middle of anything."""
    model = model_of("llama")
    prefix = prefix_for(model)
    caches = [HFCache(model.config, prefix=prefix)]
    caches[0].acquire(random_tokens(1, LONG))
    assert prefix.stats.sequences == 1

    def drop():
        caches.clear()
        gc.collect()

    thread = threading.Thread(target=drop)
    with prefix.cache.batch(1, seq_ids=[1 << 40]) as batch:
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        batch.abort()
    assert prefix.stats.sequences == 0
    assert prefix.cache.sequences == []


def test_a_cache_is_dropped_after_its_memory():
    model = model_of("llama")
    prefix = prefix_for(model)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(random_tokens(1, LONG))
    prefix.cache.close()
    del cache
    gc.collect()  # what a finalizer raises is an error here


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_generate(name, attention):
    """A second prompt feeds what follows the common beginning, wherever it parts from the first."""
    model = model_of(name)
    prefix = prefix_for(model)
    first = random_tokens(1, LONG)
    _, fed = generate(model, first, prefix, attention)
    assert fed[0] == LONG
    for at in (1, 15, 16, 17, 40, 59):
        tokens = join(first[:, :at], random_tokens(1, 9, seed=at))
        got, fed = generate(model, tokens, prefix, attention)
        assert sum(fed[1:]) == GREEDY["max_new_tokens"] - 1
        assert 1 <= fed[0] <= 9
        assert torch.equal(got, generate(model, tokens, attention=attention)[0])
    assert prefix.stats.sequences == 0
    assert prefix.cache.sequences == []


def test_hidden_tokens_that_acquire_was_not_told_of():
    model = model_of("llama")
    model.set_attn_implementation("kvcache")
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    mask = torch.ones_like(tokens)
    mask[:, 20:24] = 0
    cache = HFCache(model.config, prefix=prefix)
    with torch.no_grad():
        cache.acquire(tokens)
        model(tokens, attention_mask=mask, past_key_values=cache)
        cache.release(tokens)
        assert cache.acquire(tokens) == 20
        cache.reset()
        mask = torch.ones_like(tokens)
        mask[:, :3] = 0
        other = random_tokens(1, LONG, seed=1)
        cache.acquire(other)
        with pytest.raises(ValueError, match="hides the first 3 tokens of row 0, for acquire it hid 0"):
            model(other, attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 4},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 7},
        {"num_beams": 2, "return_dict_in_generate": True, "output_scores": True},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=str,
)
def test_ways_to_generate(way, attention):
    """Beams, several samples, chunks, and guesses: right the first time and the second."""
    model = model_of("llama")
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    tokens[:, 50:53] = tokens[:, :3]
    want, _ = generate(model, tokens, attention=attention, **way)
    text = want if isinstance(want, torch.Tensor) else want.sequences
    longer = join(text[:1], random_tokens(1, 3))
    text_of_longer, _ = generate(model, longer, attention=attention)
    for turn in range(2):
        got, fed = generate(model, tokens, prefix, attention, **way)
        assert torch.equal(got if isinstance(got, torch.Tensor) else got.sequences, text)
        if turn and "prompt_lookup_num_tokens" not in way:
            assert fed[0] == 1
        assert torch.equal(generate(model, longer, prefix, attention)[0], text_of_longer)
        if not isinstance(got, torch.Tensor):
            got.past_key_values.reset()
    del got
    gc.collect()
    assert prefix.stats.sequences == 0


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 1}])
def test_beams_in_a_cache_of_the_user(way):
    """`release` takes what `generate` returns, and keeps the prompt."""
    model = model_of("llama")
    prefix, tokens = prefix_for(model), random_tokens(1, LONG)
    cache = HFCache(model.config, prefix=prefix)
    got, _ = generate(model, tokens, past_key_values=cache, cache_implementation=None, cache_config=None, **way)
    with pytest.raises(TypeError, match="tokens is a list"):
        cache.release(got.tolist())
    cache.release(got)
    assert cache.acquire(tokens) == LONG - 1
    cache.reset()
    longer = join(got[:1], random_tokens(1, 3))
    assert torch.equal(generate(model, longer, prefix)[0], generate(model, longer)[0])


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_model_whose_first_layers_draft(is_enabled):
    """The draft has fewer layers than the cache of the prefix cache."""
    model = copy.deepcopy(model_of("llama"))
    prefix, tokens = prefix_for(model), random_tokens(1, LONG)
    want, _ = generate(model, tokens)
    options = {"assistant_early_exit": 2, **GREEDY}
    if is_enabled:
        kvcache.hf.enable(model, prefix=prefix)
    else:
        options |= {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}}
    for _ in range(2):
        assert torch.equal(model.generate(tokens, **options), want)
    assert prefix.stats.matched == LONG - 1
    assert prefix.stats.sequences == 0


def test_sequences_are_given_back():
    """`reset` lets rows go; so does a cache that is dropped, or a `generate` that fails."""
    model = model_of("llama")
    prefix = prefix_for(model)
    tokens = random_tokens(2, LONG)
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens)
    with torch.no_grad():
        model.set_attn_implementation("kvcache")
        model(tokens, past_key_values=cache)
    cache.reset()
    assert (prefix.stats.sequences, prefix.cache.sequences) == (0, [])
    assert cache.acquire(tokens) == 48  # full blocks were kept when they were computed
    del cache
    gc.collect()
    assert (prefix.stats.sequences, prefix.cache.sequences) == (0, [])

    def fail(_, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, tokens, prefix, logits_processor=transformers.LogitsProcessorList([fail]))
    assert (prefix.stats.sequences, prefix.cache.sequences) == (0, [])


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
def test_caches_that_take_turns(attention):
    """Passes of several caches alternate in one thread."""
    model = model_of("gemma3")
    prefix = prefix_for(model)
    tokens = [random_tokens(1, LONG, seed=seed) for seed in range(3)]
    caches = [HFCache(model.config, prefix=prefix) for _ in tokens]
    model.set_attn_implementation(attention)
    ends = [40, 41, 50, 51, LONG]
    with torch.no_grad():
        want = [[*passes(model, HFCache(model.config, "f32"), text, None, ends)] for text in tokens]
        for cache, text in zip(caches, tokens, strict=True):
            assert cache.acquire(text) == 0
        running = [passes(model, cache, text, None, ends) for cache, text in zip(caches, tokens, strict=True)]
        for i in range(len(ends)):
            for made, one in zip(running, want, strict=True):
                assert torch.equal(next(made), one[i])
        for cache, text in zip(caches, tokens, strict=True):
            cache.release(text)
            assert cache.acquire(text) == LONG - 1


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
def test_threads(attention):
    """Each thread serves requests with a model and a cache of its own; passes wait for each other."""
    shared = model_of("llama")
    prefix = prefix_for(shared)
    shared.set_attn_implementation(attention)
    system = random_tokens(1, 30)
    prompts = [[join(system, random_tokens(1, 10, seed=10 * t + i)) for i in range(4)] for t in range(3)]
    want = [[generate(shared, prompt, attention=attention)[0] for prompt in each] for each in prompts]
    wrong = []

    def serve(thread):
        try:
            for prompt, answer in zip(prompts[thread], want[thread], strict=True):
                options = {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}, **GREEDY}
                if not torch.equal(shared.generate(prompt, **options), answer):
                    wrong.append((thread, prompt))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=serve, args=(thread,)) for thread in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert prefix.stats.sequences == 0
    assert prefix.cache.sequences == []
    assert prefix.stats.matched >= 9 * 16


def fail_elsewhere(model, cache, tokens):
    """Run a pass in another thread, which fails in the third layer."""

    def fail(*_):
        raise ArithmeticError

    def run(cache):
        with torch.no_grad(), pytest.raises(ArithmeticError):
            model(tokens, past_key_values=cache)

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    thread = threading.Thread(target=run, args=(cache,))
    thread.start()
    thread.join()
    hook.remove()


def test_a_pass_that_failed_elsewhere(monkeypatch):
    """Another thread's pass that never goes on is named; `reset` ends it."""
    monkeypatch.setattr("kvcache.hf.passes.STALLED", 0.5)
    model = model_of("llama")
    model.set_attn_implementation("kvcache")
    prefix, tokens = prefix_for(model), random_tokens(1, 20)
    lost, cache = (HFCache(model.config, prefix=prefix) for _ in range(2))
    fail_elsewhere(model, lost, tokens)
    with torch.no_grad():
        with pytest.raises(kvcache.CacheBusyError, match="reset its HFCache"):
            model(tokens, past_key_values=cache)
        lost.reset()
        with pytest.warns(UserWarning, match="its tokens were dropped"):
            model(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 20


def test_a_pass_that_failed_elsewhere_and_was_dropped():
    """It ends with its cache, without a word from anybody."""
    model = model_of("llama")
    model.set_attn_implementation("kvcache")
    prefix, tokens = prefix_for(model), random_tokens(1, 20)
    fail_elsewhere(model, HFCache(model.config, prefix=prefix), tokens)
    cache = HFCache(model.config, prefix=prefix)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    assert cache.get_seq_length() == 20
    cache._passes.finish()
    assert len(prefix.cache.sequences) == 1


def test_a_wrong_prefix_cache():
    config = CONFIGS["llama"]()
    with pytest.raises(TypeError, match="prefix is a KVCache"):
        HFCache(config, prefix=HFCache.make_kv_cache(config))
    for other, words in (
        (transformers.LlamaConfig(**BASE | {"num_hidden_layers": 3}), "a cache of 3 layers, the model has 4"),
        (transformers.LlamaConfig(**BASE | {"head_dim": 32}), "layer 0 has head_dim=32, and not 16"),
        (transformers.LlamaConfig(**BASE | {"num_key_value_heads": 4}), "layer 0 has num_kv_heads=4, and not 2"),
        (CONFIGS["gemma3"](), r"layer 0 has policy=SlidingWindow\(.*\), and not FullAttention\(\)"),
    ):
        prefix = kvcache.PrefixCache(HFCache.make_kv_cache(other), fingerprint="a model")
        with pytest.raises(ValueError, match=words):
            HFCache(config, prefix=prefix)
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(config, "bf16"), fingerprint="a model")
    with pytest.raises(ValueError, match=r"^dtype='f16': layer 0 .* has k_dtype='bf16'"):
        HFCache(config, "f16", prefix=prefix)
    assert "dtype='bf16'" in repr(HFCache(config, prefix=prefix))
    for kind in ("dynamic", "longrope"):
        other = CONFIGS["llama"]()
        other.rope_parameters = {**other.rope_parameters, "rope_type": kind}
        with pytest.raises(kvcache.NotSupportedError, match=f"rope_type='{kind}' rotates keys by the length"):
            HFCache(other, prefix=prefix)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama", "is_causal", False),
        ("mistral", "is_causal", False),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma4", "use_bidirectional_attention", "all"),
    ],
)
def test_tokens_that_see_later_ones(name, field, value):
    """Their rows depend on the rest of the prompt: no other prompt can use them."""
    gemma4 = {**MIXED, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    config = transformers.Gemma4TextConfig(**gemma4) if name == "gemma4" else CONFIGS[name]()
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(config), fingerprint="a model")
    HFCache(config, prefix=prefix)
    setattr(config, field, value)
    with pytest.raises(kvcache.NotSupportedError, match=f"{field}={value!r} lets tokens see later ones"):
        HFCache(config, prefix=prefix)


def test_wrong_calls():
    model = model_of("llama")
    tokens = random_tokens(2, 20)
    with pytest.raises(ValueError, match="the cache has no prefix cache: make it by HFCache"):
        HFCache(model.config).acquire(tokens)
    prefix = prefix_for(model)
    cache = HFCache(model.config, prefix=prefix)
    for wrong, mask, words in (
        (tokens[0], None, r"input_ids has the shape \[20\]"),
        (tokens[:, :0], None, r"input_ids has the shape \[2, 0\]"),
        (tokens, tokens[:, 1:], r"attention_mask has the shape \[2, 19\], input_ids \[2, 20\]"),
        (tokens, torch.tensor([[1] * 20, [0] * 20]), "attention_mask hides all tokens of row 1"),
    ):
        with pytest.raises(ValueError, match=words):
            cache.acquire(wrong, mask)
        assert prefix.stats.sequences == 0
    for wrong, mask, words in (
        ([[1]], None, r"input_ids is a list: a tensor \[batch, tokens\] is needed"),
        (tokens.numpy(), None, "input_ids is a ndarray"),
        (None, None, "input_ids is a NoneType"),
        (tokens.float(), None, r"input_ids has the type torch\.float32: integers are needed"),
        (tokens, [[1] * 20] * 2, "attention_mask is a list: a tensor"),
    ):
        with pytest.raises(TypeError, match=words):
            cache.acquire(wrong, mask)
        assert prefix.stats.sequences == 0
    cache.acquire(tokens)
    for wrong, words in (([[1]], "tokens is a list: a tensor"), (tokens.double(), "tokens has the type torch.float64")):
        with pytest.raises(TypeError, match=words):
            cache.release(wrong)
    with pytest.raises(ValueError, match=r"tokens has the shape \[20\]: \[2, tokens\] is needed"):
        cache.release(tokens[0])
    with pytest.raises(ValueError, match="the cache holds tokens"):
        cache.acquire(tokens)
    with pytest.raises(ValueError, match="tokens has 1 rows, the cache 2"):
        cache.release(tokens[:1])
    with pytest.raises(ValueError, match="row 0 of tokens does not begin with the prompt"):
        cache.release(tokens.flip(0))
    model.set_attn_implementation("kvcache")
    with torch.no_grad(), pytest.raises(ValueError, match=r"the batch has 1 row: .*batch_select_indices"):
        model(tokens[:1], past_key_values=cache)
    cache.release()
    HFCache(model.config).release(tokens)  # is `reset`
    with pytest.raises(TypeError, match="prefix"):
        HFEncoderDecoderCache(model.config, prefix=prefix)


def test_beams_that_were_saved_and_loaded_are_released(tmp_path):
    """With the texts that the beam search returned, one for each prompt, as before they were saved."""
    model = model_of("llama")
    prefix, tokens = prefix_for(model), random_tokens(2, LONG)
    cache = HFCache(model.config, prefix=prefix)
    texts = model.generate(tokens, past_key_values=cache, **GREEDY, num_beams=3)
    cache.save(tmp_path / "beams")
    cache.release(texts)
    before = prefix.stats.sequences
    loaded = HFCache.load(model.config, tmp_path / "beams", prefix=prefix)
    loaded.release(texts)
    assert prefix.stats.sequences == before
    prefix.cache.validate()


def test_a_file_that_a_prefix_cache_does_not_fit(tmp_path):
    model = model_of("llama")
    saved, tokens = HFCache(model.config, "f32"), random_tokens(1, LONG)
    generate(model, tokens, past_key_values=saved, cache_implementation=None, cache_config=None)
    path = tmp_path / "chat"
    saved.save(path)
    with pytest.raises(TypeError, match="prefix is a KVCache"):
        HFCache.load(model.config, path, prefix=HFCache.make_kv_cache(model.config))
    with pytest.raises(ValueError, match=r"layer 0 has policy=SlidingWindow\(.*\), and not FullAttention\(\)"):
        HFCache.load(model.config, path, prefix=prefix_for(model_of("gemma3")))
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(model.config, "bf16"), fingerprint="a model")
    with pytest.raises(kvcache.StateFormatError, match="k_dtype of layer 0 is 'f32' in the file, and 'bf16' in the ca"):
        HFCache.load(model.config, path, prefix=prefix)
    other = CONFIGS["gemma3"]()
    with pytest.raises(kvcache.StateFormatError, match=r"its layer 0 of attention has .*FullAttention.*; here it"):
        HFCache.load(other, path, prefix=prefix_for(make(other)))
    memory = HFCache.make_kv_cache(model.config, "f32", block_size=BLOCK, max_bytes=30_000)  # a block of rows
    prefix = kvcache.PrefixCache(memory, fingerprint="a model")
    with pytest.raises(kvcache.CacheFullError):
        HFCache.load(model.config, path, prefix=prefix)
    assert prefix.cache.sequences == []


def test_images_are_not_matched():
    """A token that stands for an image says nothing of the image; what comes before it is matched."""
    config = CONFIGS["llama"]()
    config.image_token_id = 90
    model = make(config)
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)
    tokens[:, 30], tokens[tokens == 90] = 90, 90
    first = int((tokens[0] == 90).nonzero()[0])
    cache = HFCache(config, prefix=prefix)
    cache.acquire(tokens)
    with torch.inference_mode():
        model(tokens, past_key_values=cache)
    cache.release(tokens)
    assert cache.acquire(tokens) == first - 1


def test_a_way_to_generate_that_returns_something_else():
    """The cache cannot know the tokens behind a user function's result: the prompt alone is kept."""
    model = model_of("llama")
    prefix = prefix_for(model)
    tokens = random_tokens(1, LONG)

    def sample(model, input_ids, **options):
        model._sample(input_ids, **options)
        return "words"

    for fed in (LONG, 1):
        made, passes = generate(model, tokens, prefix, custom_generate=sample)
        assert made == "words"
        assert passes[0] == fed
    assert prefix.stats.sequences == 0


def test_a_model_whose_config_wants_no_cache():
    """MPT: a prompt is matched once `use_cache` is said; a cache that would store the text in each step is refused."""
    model = make(
        transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, expansion_ratio=2, vocab_size=97, max_seq_len=512)
    )
    assert model.generation_config.use_cache is False
    prefix, tokens = prefix_for(model), random_tokens(1, LONG)
    want, _ = generate(model, tokens, attention="eager", use_cache=True)
    for matched in (0, LONG - 1):
        got, fed = generate(model, tokens, prefix, "eager", use_cache=True)
        assert torch.equal(got, want)
        assert fed[0] == LONG - matched
    with pytest.warns(UserWarning, match=r"no cache is made.*\(MptConfig\): give use_cache=True beside cache_impl"):
        assert torch.equal(generate(model, tokens, prefix, "eager")[0], want)
    before = prefix.stats
    for kind in (HFCache(model.config), HFCache(model.config, prefix=prefix)):
        with pytest.raises(
            ValueError, match=rf"use_cache=False, which may come from the MptConfig.* use_cache=True beside {CACHE}$"
        ):
            model.generate(tokens, past_key_values=kind, **GREEDY)
    assert prefix.stats == before


def test_the_memory_goes_with_its_last_user():
    """The parts that caches of one `KVCache` share do not keep it alive."""
    model = model_of("llama")
    prefix = prefix_for(model)
    cache = HFCache(model.config, prefix=prefix)
    with torch.inference_mode():
        model(random_tokens(1, 20), past_key_values=cache)
    users = [weakref.ref(one) for one in (prefix, prefix.cache, cache)]
    del prefix, cache
    gc.collect()
    assert [user() for user in users] == [None] * 3

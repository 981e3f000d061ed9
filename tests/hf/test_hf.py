"""`HFCache` and `HFEncoderDecoderCache` beyond texts: encoders, shared rows, masks, errors, bad input.

`test_scenarios.py` compares each way to generate with transformers' own cache, and `test_padding.py` each padding.
"""

import copy
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, LAYERS, MIXED, SPEECH, TWO_SIDED, make, model_of, two_sided  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

EXAMPLE = Path(__file__).parents[2] / "examples/hf_generate.py"
NEW = 20  # tokens
# The last layers read what those before them have put.
SHARED = {**MIXED, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97}
CONFIGS = {
    "gemma3n": lambda: transformers.Gemma3nTextConfig(**SHARED, laurel_rank=4, activation_sparsity_pattern=[0.0] * 4),
    "gemma4": lambda: transformers.Gemma4TextConfig(**SHARED, global_head_dim=32),
}
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "several": {"num_beams": 4, "num_return_sequences": 2},
}


def prompt(rows=1, length=19, padding=0):
    """Tokens and the mask; the first row has padding on the left."""
    tokens = torch.randint(2, 97, (rows, length), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    tokens[0, :padding] = mask[0, :padding] = 0
    return tokens, mask


def generate(model, cache, attention, tokens, mask=None, **options):
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    mask = torch.ones_like(tokens) if mask is None else mask
    options = {"do_sample": False, "max_new_tokens": NEW, **options}
    return model.generate(tokens, attention_mask=mask, past_key_values=cache, **options)


def theirs(model):
    return transformers.DynamicCache(config=model.config)


def check_calls(cache, kind):
    calls = cache.stats()["calls"]
    layers = len(cache.layers) if kind == "kernel" else len(cache.policy)  # others have no dense rows
    passes = calls.pop(kind) / layers
    assert passes == int(passes)
    assert 2 <= passes <= NEW + 4  # guessing takes fewer, a prompt in chunks more
    assert not any(calls.values())


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("name", CONFIGS)
def test_layers_that_share_rows(name, way, attention):
    model = make(CONFIGS[name]())
    tokens, mask = prompt(2, padding=7)
    want = generate(model, theirs(model), "eager", tokens, mask, **WAYS[way])
    assert len(set(want[0, -NEW:].tolist())) > 3
    cache = HFCache(model.config, dtype="f32")
    assert torch.equal(generate(model, cache, attention, tokens, mask, **WAYS[way]), want)
    check_calls(cache, "kernel" if attention == "kvcache" else "dense")


def answer(model, cache, attention, inputs, **options):
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    options = {"do_sample": False, "max_new_tokens": NEW, "no_repeat_ngram_size": 1, **options}
    return transformers.GenerationMixin.generate(model, **inputs, past_key_values=cache, **options)


def their_two(model):
    return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())


@pytest.mark.parametrize("attention", ["kvcache", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TWO_SIDED)
def test_models_with_an_encoder(name, way, attention):
    model, inputs = two_sided(name)
    want = answer(model, their_two(model), "eager", inputs, **WAYS[way])
    assert len(set(want[0, -NEW:].tolist())) > 3
    cache = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)
    assert torch.equal(answer(model, cache, attention, inputs, **WAYS[way]), want)
    # T5 adds a bias by position to its scores, for which the kernels have no argument.
    kind = "dense" if attention == "eager" else "fallback" if name == "t5" else "kernel"
    for each in (cache.self_attention_cache, cache.cross_attention_cache):
        check_calls(each, kind)


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy])
def test_rows_of_the_batch_of_a_model_with_an_encoder(attention, make_copy):
    model, inputs = two_sided("bart")

    def logits(cache, attention, make_copy):
        model.set_attn_implementation(attention)
        rows = {"input_ids": inputs["inputs"], "attention_mask": inputs["attention_mask"], "past_key_values": cache}
        with torch.no_grad():
            model(**rows, decoder_input_ids=inputs["decoder_input_ids"])
            other = make_copy(cache)
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 2, 3]))
            cache.crop(-1)
            rows = {name: x[[0, 1, 1]] for name, x in rows.items() if name != "past_key_values"}
            first = model(**rows, past_key_values=cache, decoder_input_ids=torch.tensor([[4], [5], [6]])).logits
            rows = {name: x[:2] for name, x in rows.items()}
            return first, model(**rows, past_key_values=other, decoder_input_ids=torch.tensor([[4], [5]])).logits

    ours = HFEncoderDecoderCache(model.config, dtype="f32")
    wanted = logits(their_two(model), "eager", copy.deepcopy)
    for want, got in zip(wanted, logits(ours, attention, make_copy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def pass_of(model, inputs, cache, attention, tokens):
    """Logits of one pass."""
    model.set_attn_implementation(attention)
    rows = {"input_ids" if name == "inputs" else name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    if model.config.model_type == "whisper":
        rows = {"input_features": rows["input_ids"]}
    with torch.no_grad():
        return model(**rows, decoder_input_ids=tokens, past_key_values=cache).logits


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
def test_an_encoder_after_an_error(attention, monkeypatch):
    """An encoder's rows that a failed pass put are put again by the next."""
    model, inputs = two_sided("whisper")
    tokens = inputs["decoder_input_ids"]
    want = pass_of(model, inputs, their_two(model), "eager", tokens)
    cache = HFEncoderDecoderCache(model.config, dtype="f32")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.decoder.layers[2], "forward", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pass_of(model, inputs, cache, attention, tokens)
    torch.testing.assert_close(pass_of(model, inputs, cache, attention, tokens), want, rtol=1e-4, atol=1e-3)
    with pytest.raises(RuntimeError, match="nothing was stored of an encoder"):
        _ = HFEncoderDecoderCache(model.config).cross_attention_cache.layers[0].keys


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize(("first", "then"), [("kvcache", "eager"), ("eager", "kvcache")])
def test_attention_changed_between_passes(name, first, then):
    model, inputs = two_sided(name)
    ours, theirs = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=30), their_two(model)
    for attention, tokens in ((first, inputs["decoder_input_ids"]), (then, torch.tensor([[4], [5]]))):
        want = pass_of(model, inputs, theirs, "eager", tokens)
        got = pass_of(model, inputs, ours, attention, tokens)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-2)


def test_a_decoder_that_is_a_part():
    """The model's own configuration is read, and not changed."""
    decoder = transformers.MBartConfig(**SPEECH)
    encoder = transformers.ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = transformers.VisionEncoderDecoderConfig(encoder=encoder.to_dict(), decoder=decoder.to_dict())
    before = config.to_dict()
    cache = HFEncoderDecoderCache(config, max_source_len=9)
    assert config.to_dict() == before
    assert len(cache) == LAYERS
    with pytest.raises(kvcache.NotSupportedError, match="T5GemmaConfig is not served: it makes its own cache"):
        HFEncoderDecoderCache(transformers.T5GemmaConfig())


def test_a_small_change_is_noticed(monkeypatch):
    """The comparisons above can tell right from wrong."""
    model, tokens = model_of("llama"), prompt()[0]
    want = generate(model, theirs(model), "eager", tokens)
    run = kvcache.Batch.attend
    monkeypatch.setattr(kvcache.Batch, "attend", lambda self, i, q, k, v, **o: run(self, i, q, k, v * 1.05, **o))
    assert not torch.equal(generate(model, HFCache(model.config, dtype="f32"), "kvcache", tokens), want)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, copy.copy])
def test_a_copy_shares_rows(make_copy):
    model, tokens = model_of("llama"), prompt()[0]
    cache = HFCache(model.config)
    generate(model, cache, "kvcache", tokens)
    before = cache.stats()["live_slots"]
    other = make_copy(cache)
    assert cache.stats()["live_slots"] == before
    cache.reset()
    assert other.stats()["live_slots"] == before
    del cache, other


def test_masks_of_ones_own_fall_back():
    model, tokens = model_of("llama"), prompt(length=6)[0]
    sees = torch.ones(6, 6, dtype=torch.bool).tril()
    sees[:3, :3] = True  # three tokens that see each other
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        want = model(tokens, attention_mask=sees[None, None], past_key_values=theirs(model)).logits
        model.set_attn_implementation("kvcache")
        cache = HFCache(model.config, dtype="f32")
        with pytest.warns(UserWarning, match="using dense tensors"):
            got = model(tokens, attention_mask=sees[None, None], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert cache.stats()["calls"] == {"kernel": 0, "dense": 0, "fallback": LAYERS}


def test_without_a_cache():
    """The attention alone gives what sdpa gives."""
    model, tokens = model_of("mistral"), prompt(2, padding=4)
    logits = []
    for attention in ("sdpa", "kvcache"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits.append(model(tokens[0], attention_mask=tokens[1], use_cache=False).logits[1])
    torch.testing.assert_close(logits[0], logits[1])


def test_a_wrong_policy_for_a_decoder():
    config = transformers.BartConfig(d_model=16, encoder_attention_heads=2, decoder_attention_heads=2)
    with pytest.raises(ValueError, match=r"policy: layer 0 has CrossAttention\(max_len=64\)"):
        HFEncoderDecoderCache(config, policy=kvcache.CrossAttention(64))


def test_a_policy_of_ones_own():
    model, tokens = model_of("llama"), prompt()[0]
    cache = HFCache(model.config, policy=kvcache.SlidingWindow(16, num_sink_tokens=4))
    generate(model, cache, "kvcache", tokens, max_new_tokens=150)
    assert cache.stats()["live_slots"] <= 20


def test_the_example():
    command = [sys.executable, EXAMPLE, "ROMEO:", "--tokens", "12", "--dtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout[:6]) == (0, "ROMEO:"), done.stderr
    assert "HFCache, f32: " in done.stdout
    assert done.stdout.endswith("the first 12 of 12 tokens are the same\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "f8"], "invalid choice: 'f8'"),
        (["--tokens", "0"], "0 must be at least 1"),
        ([""], "prompt is empty"),
    ],
)
def test_the_example_refuses(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    assert words in err


class TestBadInput:
    def test_config(self):
        for kind in (HFCache, HFEncoderDecoderCache):
            with pytest.raises(TypeError, match="config is 3: give the model's"):
                kind(3)
            with pytest.raises(TypeError, match=r"config is a model, a Linear: give its configuration, model\.config"):
                kind(torch.nn.Linear(2, 3))
        with pytest.raises(
            kvcache.NotSupportedError, match="a BartConfig has an encoder too: use HFEncoderDecoderCache"
        ):
            HFCache(transformers.BartConfig())
        with pytest.raises(ValueError, match="max_source_len=None: a T5Config does not say"):
            HFEncoderDecoderCache(transformers.T5Config())
        with pytest.raises(ValueError, match="max_len=0: must be at least 1"):
            HFEncoderDecoderCache(transformers.BartConfig(), max_source_len=0)
        with pytest.raises(ValueError, match="without num_attention_heads"):
            HFCache(transformers.PreTrainedConfig(num_hidden_layers=2))
        with pytest.raises(
            kvcache.NotSupportedError, match="MambaConfig is not served: its state is not keys and values"
        ):
            HFCache(transformers.MambaConfig())

    def test_dtype(self):
        with pytest.raises(ValueError, match="dtype='f8'"):
            HFCache(model_of("llama").config, dtype="f8")

    def test_two_caches(self):
        model = model_of("llama")
        for wanted in ("dynamic", "kvcache"):
            with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
                generate(model, HFCache(model.config), "kvcache", prompt()[0], cache_implementation=wanted)

    def test_another_model(self):
        cache = HFCache(transformers.LlamaConfig(**BASE | {"num_key_value_heads": 4}))
        said = r"layer 0 of the model brings keys of shape \(1, 2, 19, 16\), .* 4 heads of 16 elements"
        with pytest.raises(ValueError, match=said):
            generate(model_of("llama"), cache, "kvcache", prompt()[0])

    def test_another_batch_size(self):
        model = model_of("llama")
        cache = HFCache(model.config)
        generate(model, cache, "kvcache", prompt()[0])
        with pytest.raises(ValueError, match="the batch has 2 rows: the cache was filled with 1"):
            generate(model, cache, "kvcache", prompt(2, 60)[0])

    def test_a_source_that_is_too_long(self):
        model, inputs = two_sided("bart")
        cache = HFEncoderDecoderCache(model.config, max_source_len=20)
        with pytest.raises(kvcache.CacheFullError, match="23 rows do not fit in cross-attention layer 0"):
            answer(model, cache, "kvcache", inputs)

    def test_another_device(self):
        cache = HFCache(model_of("llama").config)
        rows = torch.empty(1, 2, 3, 16, device="meta")
        with pytest.raises(kvcache.NotSupportedError, match="the keys are on meta"):
            cache.update(rows, rows, 0)

    def test_gradients(self):
        model = model_of("llama")
        for attention in ("kvcache", "eager"):
            model.set_attn_implementation(attention)
            with pytest.raises(
                ValueError, match=r"the keys require grad: call the model under torch.inference_mode\(\)"
            ):
                model(prompt()[0], past_key_values=HFCache(model.config))

    def test_crop(self):
        with pytest.raises(ValueError, match="tokens_to_remove is 3"):
            HFCache(model_of("llama").config).crop(3)

"""`HFCache` and `HFEncoderDecoderCache` beyond texts: encoders, shared rows, masks, errors, bad input.

`test_scenarios.py` compares each way to generate with transformers' own cache, and `test_padding.py` each padding.
"""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import LAYERS, MIXED, SPEECH, make, model_of, two_sided  # noqa: E402 - torch may be missing

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
WAYS = {"greedy": {}, "beams": {"num_beams": 3}}


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
@pytest.mark.parametrize("way", WAYS)
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


def test_a_wrong_policy_for_a_decoder():
    config = transformers.BartConfig(d_model=16, encoder_attention_heads=2, decoder_attention_heads=2)
    with pytest.raises(ValueError, match=r"policy: layer 0 has CrossAttention\(max_len=64\)"):
        HFEncoderDecoderCache(config, policy=kvcache.CrossAttention(64))


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

"""Caches saved to a file and loaded from it: generate goes on as if nothing had happened."""

import json
import re
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import (  # noqa: E402 - torch may be missing
    BASE,
    CONFIGS,
    SPEECH,
    TWO_SIDED,
    model_of,
    random_tokens,
    two_sided,
)

import kvcache  # noqa: E402 - as above
from kvcache import NotSupportedError, StateFormatError, state  # noqa: E402 - as above
from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

HIDDEN = {
    "none": [(), (), ()],
    "left": [(), range(5), range(11)],
    "all left": [range(3), range(5), range(11)],
    "gaps": [range(6, 9), [*range(3), *range(9, 20)], range(23)],
}


def generate(model, cache, tokens, mask=None, count=6, **options):
    model.set_attn_implementation("kvcache")
    if mask is None:
        mask = torch.ones_like(tokens)
    more = torch.ones(len(tokens), tokens.shape[1] - mask.shape[1], dtype=torch.long)
    return model.generate(
        tokens, attention_mask=torch.cat([mask, more], 1), past_key_values=cache, do_sample=False, max_new_tokens=count,
        **options,
    )  # fmt: skip


def test_arguments_that_a_file_has(tmp_path):
    """They are refused by the names that a user knows."""
    model, cache, _ = filled(tmp_path)
    for kind in (HFCache, HFEncoderDecoderCache):
        with pytest.raises(TypeError, match=r"^dtype is no argument of load: the file holds it, leave dtype out$"):
            kind.load(model.config, tmp_path / "chat", dtype="f16")
    with pytest.raises(TypeError, match=r"^token is no argument of save: did you mean tokens"):
        cache.save(tmp_path / "chat", token=None)


def filled(tmp_path, model=None, rows=2, **options):
    """Return a model, a saved cache, and its tokens."""
    model = model or model_of("llama")
    cache = HFCache(model.config, **options)
    tokens = generate(model, cache, random_tokens(rows, 20))
    cache.save(tmp_path / "chat", tokens=tokens)
    return model, cache, tokens


NAMES = ["gemma3", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "gemma3")]


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("name", NAMES)
def test_generate_goes_on(tmp_path, name, hidden):
    model, tokens = model_of(name), random_tokens(3, 24)
    mask = torch.ones(3, 24, dtype=torch.long)
    for row, columns in zip(mask, HIDDEN[hidden], strict=True):
        row[[*columns]] = 0
    cache = HFCache(model.config, dtype="f32")
    tokens = generate(model, cache, tokens, mask)
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert (loaded.get_seq_length(), loaded.batch_size) == (29, 3)
    assert loaded._passes.offsets == cache._passes.offsets
    for layer, other in zip(cache.layers, loaded.layers, strict=True):
        torch.testing.assert_close(layer.keys, other.keys, rtol=0, atol=0)
        torch.testing.assert_close(layer.values, other.values, rtol=0, atol=0)
    calls = cache.stats()["calls"]["kernel"]
    want, got = generate(model, cache, tokens, mask, 9), generate(model, loaded, tokens, mask, 9)
    assert torch.equal(got, want)
    assert loaded.stats()["calls"]["kernel"] == cache.stats()["calls"]["kernel"] - calls
    loaded.crop(-1)
    assert loaded.get_seq_length() == cache.get_seq_length() - 1


def test_other_models_are_refused(tmp_path):
    model, _, _ = filled(tmp_path)
    for name in ("mistral", "gemma3"):
        with pytest.raises(
            StateFormatError, match=r"of another shape: its layer . of attention has .* give the config"
        ):
            HFCache.load(model_of(name).config, tmp_path / "chat")
    with pytest.raises(StateFormatError, match="it has 4 layers, config's model 3"):
        HFCache.load(transformers.LlamaConfig(**BASE | {"num_hidden_layers": 3}), tmp_path / "chat")
    with pytest.raises(StateFormatError, match=r"num_kv_heads=2.*num_kv_heads=4"):
        HFCache.load(transformers.LlamaConfig(**BASE | {"num_key_value_heads": 4}), tmp_path / "chat")
    with pytest.raises(TypeError, match=r"give its configuration, model\.config"):
        HFCache.load(model, tmp_path / "chat")


def test_bad_files_are_refused(tmp_path):
    model, cache, _ = filled(tmp_path)
    good = (tmp_path / "chat").read_bytes()
    for at in range(0, len(good) - 40, len(good) // 97):  # the last bytes are a MAC
        for data in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            (tmp_path / "bad").write_bytes(data)
            with pytest.raises(StateFormatError, match="bad: "):
                HFCache.load(model.config, tmp_path / "bad")
    for options, words in (({"fingerprint": "another"}, "fingerprint"), ({"secret": b"x"}, "has no MAC")):
        with pytest.raises(StateFormatError, match=words):
            HFCache.load(model.config, tmp_path / "chat", **options)
    cache._cache.save(tmp_path / "plain")
    ids = cache._passes.seq_ids
    cache._cache.save(tmp_path / "lies", [*ids, 90], tokens={90: [1, 3, *ids]})  # fewer columns than positions
    cache._cache.save(tmp_path / "other", [*ids, 90], tokens={90: [1, 99, ids[0], ids[0]]})
    cache._cache.save(tmp_path / "short", [*ids, 90], tokens={90: [2, 99, *ids, 0]})  # not a number for each column
    cache._cache.save(tmp_path / "long", [*ids, 90], tokens={90: [1, 99, *ids, *[0] * 99 * len(ids)]})
    for name in ("plain", "lies", "other", "short", "long"):
        with pytest.raises(StateFormatError, match=f"{name}: no state of an HFCache"):
            HFCache.load(model.config, tmp_path / name)


def test_wrong_arguments_are_named(tmp_path):
    model, cache, _ = filled(tmp_path)
    with pytest.raises(TypeError, match=r"config is .*chat.*: give the model's, model\.config"):
        HFCache.load(tmp_path / "chat", model.config)
    with pytest.raises(TypeError, match=r"config is .*chat.*: give the model's, model\.config"):
        HFCache.load(str(tmp_path / "chat"), model.config)
    with pytest.raises(TypeError, match="path=3: the name of a file is needed"):
        HFCache.load(model.config, 3)
    with pytest.raises(TypeError, match="path=None: the name of a file is needed"):
        cache.save(None)
    with pytest.raises(TypeError, match=r"tokens='a text': a tensor \[batch, tokens\] is needed"):
        cache.save(tmp_path / "chat", tokens="a text")
    with pytest.raises(ValueError, match="block_size=4096: must be at most 1024"):
        HFCache.make_kv_cache(model.config, block_size=4096)


def test_tokens_after_beams(tmp_path):
    """The cache has the rows of all beams: an error says how to keep the returned text's rows alone."""
    model = model_of("llama")
    model.set_attn_implementation("kvcache")
    cache, options = HFCache(model.config, dtype="f32"), {"do_sample": False, "max_new_tokens": 5}
    text = model.generate(random_tokens(1, 12), past_key_values=cache, num_beams=3, **options)
    with pytest.raises(ValueError, match=r"tokens has 1 row, the cache 3, as after a beam .*, with max_new_tokens=1"):
        cache.save(tmp_path / "chat", tokens=text)
    model.generate(text, past_key_values=cache, max_new_tokens=1)
    cache.save(tmp_path / "chat", tokens=text)
    [saved, _] = kvcache.state.inspect(tmp_path / "chat").sequences
    assert saved.tokens.tolist() == text[0].tolist()
    loaded, more = HFCache.load(model.config, tmp_path / "chat"), torch.cat([text, random_tokens(1, 3)], 1)
    want = model.generate(more, past_key_values=HFCache(model.config, dtype="f32"), **options)
    assert torch.equal(model.generate(more, past_key_values=loaded, **options), want)


def speak(model, inputs, cache, tokens, attention="kvcache", **options):
    """Generate after these tokens of the decoder; return all of them."""
    model.set_attn_implementation(attention)
    given = {**inputs, "decoder_input_ids": tokens, "past_key_values": cache}
    return transformers.GenerationMixin.generate(
        model, **given, do_sample=False, max_new_tokens=6, no_repeat_ngram_size=1, **options
    )


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("name", TWO_SIDED)
def test_a_model_with_an_encoder_goes_on(tmp_path, name, attention):
    """A cache goes on with the same source, and without it: the encoder's rows are in the file."""
    model, inputs = two_sided(name)
    cache = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)
    tokens = speak(model, inputs, cache, inputs["decoder_input_ids"], attention)
    cache.save(tmp_path / "speech", tokens=tokens, fingerprint="a model", secret=b"secret")
    given = {"fingerprint": "a model", "secret": b"secret"}
    loaded, other = (HFEncoderDecoderCache.load(model.config, tmp_path / "speech", **given) for _ in range(2))
    assert (loaded.get_seq_length(), loaded.self_attention_cache.batch_size) == (8, 2)
    assert loaded.cross_attention_cache.stats()["live_slots"] == cache.cross_attention_cache.stats()["live_slots"]
    fresh = HFEncoderDecoderCache(model.config, dtype="f32", max_source_len=40)
    want = speak(model, inputs, cache, tokens, attention)
    assert torch.equal(want, speak(model, inputs, fresh, tokens, attention))
    assert torch.equal(speak(model, inputs, loaded, tokens, attention), want)
    source = torch.full((2, 30 if name == "whisper" else 23, 64), torch.nan)  # nothing reads what is in it
    blind = {"encoder_outputs": transformers.modeling_outputs.BaseModelOutput(last_hidden_state=source)}
    if "attention_mask" in inputs:
        blind["attention_mask"] = inputs["attention_mask"]
    assert torch.equal(speak(model, blind, other, tokens, attention), want)
    first, second = state.read_states(tmp_path / "speech", state.ENCODER)
    assert [one.tokens.tolist() for one in first.sequences[:2]] == tokens[:, :8].tolist()
    assert second.layers[0].policy.max_len == 40
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(model_of("llama").config), fingerprint="a model")
    with pytest.raises(NotSupportedError, match="leave prefix out"):
        HFEncoderDecoderCache.load(model.config, tmp_path / "speech", prefix=prefix)


def saved_speech(tmp_path, **options):
    model, inputs = two_sided("bart")
    cache = HFEncoderDecoderCache(model.config, max_source_len=30)
    speak(model, inputs, cache, inputs["decoder_input_ids"])
    cache.save(tmp_path / "speech", **options)
    return model, cache


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_bad_files_of_a_model_with_an_encoder_are_refused(tmp_path, secret):
    """Truncated or altered anywhere; or made of parts of two good files, if there is a secret."""
    model, cache = saved_speech(tmp_path, secret=secret)
    good, first = (tmp_path / "speech").read_bytes(), state.inspect(tmp_path / "speech").nbytes
    macs = set() if secret else {*range(first - 32, first), *range(len(good) - 32, len(good))}  # then they are ignored
    places = sorted({*range(0, len(good), len(good) // 97), *range(first - 2, first + 12, 2)})
    bad = [good[:at] for at in places]
    bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in places if at not in macs]
    bad += [good[first:] + good[:first], good + good[first:], good + b"x", good + good]
    for data in bad:
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(StateFormatError, match="bad: "):
            HFEncoderDecoderCache.load(model.config, tmp_path / "bad", secret=secret)
        if secret is None and data not in (good[:first], good[first:] + good[:first]):  # whose bytes are whole
            with pytest.raises(StateFormatError, match="bad: "):
                state.inspect(tmp_path / "bad", verify=True)
    if secret:
        cache.crop(-1)
        cache.save(tmp_path / "other", secret=secret)
        other = (tmp_path / "other").read_bytes()
        (tmp_path / "bad").write_bytes(other[: -(len(good) - first)] + good[first:])
        with pytest.raises(StateFormatError, match="bad: its MAC is another one"):
            HFEncoderDecoderCache.load(model.config, tmp_path / "bad", secret=secret)


def test_files_of_other_caches_are_refused(tmp_path):
    model, cache = saved_speech(tmp_path)
    with pytest.raises(StateFormatError, match=r"speech: has rows of an encoder as well: HFEncoderDecoderCache\.load"):
        kvcache.KVCache.load(tmp_path / "speech")
    with pytest.raises(StateFormatError, match="speech: has rows of an encoder as well"):
        cache.self_attention_cache._cache.restore(tmp_path / "speech")
    with pytest.raises(StateFormatError, match="speech: has rows of an encoder as well"):
        HFCache.load(model_of("llama").config, tmp_path / "speech")
    _, _, _ = filled(tmp_path)
    with pytest.raises(
        StateFormatError, match=r"chat: has no rows of an encoder: HFCache\.load or KVCache\.load reads it"
    ):
        HFEncoderDecoderCache.load(model.config, tmp_path / "chat")
    config = transformers.BartConfig(**SPEECH | {"decoder_attention_heads": 2})
    with pytest.raises(StateFormatError, match=r"its layer 0 of attention has num_kv_heads=4.*num_kv_heads=2"):
        HFEncoderDecoderCache.load(config, tmp_path / "speech")
    with pytest.raises(NotSupportedError, match="an encoder's rows alone: save the HFEncoderDecoderCache"):
        cache.cross_attention_cache.save(tmp_path / "part")
    assert not (tmp_path / "part").exists()
    before = (tmp_path / "speech").read_bytes()
    with pytest.raises(ValueError, match=r"tokens has the shape .*: integers \[2, 8\] are needed"):
        cache.save(tmp_path / "speech", tokens=torch.ones(2, 3, dtype=torch.long))
    assert (tmp_path / "speech").read_bytes() == before


def test_inspect_shows_both_parts(tmp_path):
    saved_speech(tmp_path, fingerprint="a bart")
    command = [sys.executable, "-m", "kvcache", "inspect", tmp_path / "speech", "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("model: a bart") == done.stdout.count("checksums: right") == 2
    assert "behind it, rows of an encoder" in done.stdout
    assert re.search(r"sequence +rows +next position +token ids\n +0 +23 +0 +64\n", done.stdout)
    shown = json.loads(subprocess.check_output([*command, "--json"]))
    size = (tmp_path / "speech").stat().st_size
    assert shown["nbytes"] + shown["following"]["nbytes"] == shown["following"]["tensors"][-1]["end"] == size


def test_the_parts_of_a_file_belong_together(tmp_path):
    """An encoder's rows of another number of texts."""
    model, cache = saved_speech(tmp_path)
    good, first = (tmp_path / "speech").read_bytes(), state.inspect(tmp_path / "speech").nbytes
    cache.batch_select_indices(torch.tensor([1]))
    cache.save(tmp_path / "other")
    (tmp_path / "bad").write_bytes(
        good[:first] + (tmp_path / "other").read_bytes()[state.inspect(tmp_path / "other").nbytes :]
    )
    with pytest.raises(StateFormatError, match="bad: altered: the rows of the encoder are not those of the batch"):
        HFEncoderDecoderCache.load(model.config, tmp_path / "bad")

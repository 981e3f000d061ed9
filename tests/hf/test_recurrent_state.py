"""Caches of models with recurrent layers, saved to a file and loaded: `generate` goes on as if they never were."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, HYBRID, MAMBA, feeding, make, prefix_for, prepared, random_tokens  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - as above
from kvcache import StateFormatError, state  # noqa: E402 - as above
from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers

QUICK = ["falcon_h1", "jamba", "lfm2", "qwen3_next"]  # a state beside attention, one by one, convolution, linear
SLOW = [name for name in HYBRID if name not in QUICK]
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HYBRID]
LOADING = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from support.hf_pairs import prepared
from kvcache.hf import HFCache
for name in sys.argv[3:]:
    path = sys.argv[2] + "/" + name
    model = prepared(name)
    cache = HFCache.load(model.config, path)
    tokens = torch.load(path + ".tokens")
    options = dict(do_sample=False, max_new_tokens=8, pad_token_id=0)
    more = model.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, **options)
    torch.save(more, path + ".more")
"""


def generate(model, cache, tokens, mask=None, **options):
    mask = torch.ones_like(tokens) if mask is None else mask
    mask = torch.nn.functional.pad(mask, (0, tokens.shape[1] - mask.shape[1]), value=1)
    options = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0, **options}
    return model.generate(tokens, attention_mask=mask, past_key_values=cache, **options)


def step(model, cache, token, mask=None):
    """Return the logits of one more token."""
    seen = cache.get_seq_length()
    mask = torch.ones(len(token), 1, dtype=torch.long) if mask is None else mask
    mask = torch.nn.functional.pad(mask, (0, seen + 1 - mask.shape[1]), value=1)
    with torch.no_grad():
        positions = mask.sum(1, keepdim=True) - 1
        return model(token, attention_mask=mask, past_key_values=cache, position_ids=positions).logits


def filled(name, path, **options):
    model = prepared(name)
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20))
    cache.save(path, **options)
    return model, cache, text


@pytest.mark.parametrize("names", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=" ".join)
def test_another_process_goes_on(tmp_path, names):
    """One process for all models: it takes seconds to import torch."""
    wanted = {}
    for name in names:
        model, cache, text = filled(name, tmp_path / name)
        torch.save(text, tmp_path / f"{name}.tokens")
        wanted[name] = generate(model, cache, text)
    command = [sys.executable, "-c", LOADING, Path(__file__).parents[1], tmp_path, *names]
    subprocess.run(command, check=True, timeout=300)
    for name, want in wanted.items():
        assert torch.equal(torch.load(tmp_path / f"{name}.more"), want), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_bits(tmp_path, name, dtype):
    """A loaded cache, and the saved one, go on bit by bit, also behind padding."""
    model = prepared(name) if dtype == torch.float32 else make(HYBRID[name]()).to(dtype)
    model.set_attn_implementation("kvcache")
    tokens, mask = random_tokens(3, 20), torch.ones(3, 20, dtype=torch.long)
    tokens[1, :7] = mask[1, :7] = 0
    cache = HFCache(model.config, dtype="bf16")
    text = generate(model, cache, tokens, mask)
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert loaded.recurrent.nbytes == cache.recurrent.nbytes > 0
    with feeding(model) as fed:
        got = generate(model, loaded, text, mask)
    assert fed[0] == 1
    assert torch.equal(got, generate(model, cache, text, mask))
    cache.save(tmp_path / "chat")
    again = HFCache.load(model.config, tmp_path / "chat")
    for token in text[:, -1:], text[:, :1]:
        assert torch.equal(step(model, again, token, mask), step(model, cache, token, mask))


@pytest.mark.parametrize("name", ["falcon_h1", "lfm2"])
def test_turns_and_a_second_save(tmp_path, name):
    model, cache, text = filled(name, tmp_path / "chat")
    for turn in range(2):
        loaded = HFCache.load(model.config, tmp_path / "chat")
        text = torch.cat([text, random_tokens(2, 5, seed=turn)], 1)
        want = generate(model, cache, text)
        text = generate(model, loaded, text)
        assert torch.equal(text, want)
        loaded.save(tmp_path / "chat")


@pytest.mark.parametrize("name", ["falcon_h1", "qwen3_next"])
def test_with_a_prefix_cache(tmp_path, name):
    model = prepared(name)
    prefix = prefix_for(model, state_bytes=HFCache.state_bytes(model))
    cache = HFCache(model.config, prefix=prefix)
    text = generate(model, cache, random_tokens(2, 40))
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat", prefix=prefix)
    want = generate(model, cache, text)
    assert torch.equal(generate(model, loaded, text), want)
    assert torch.equal(generate(model, HFCache.load(model.config, tmp_path / "chat"), text), want)
    for each in (cache, loaded):
        each.release(want)


def test_an_empty_cache(tmp_path):
    model = prepared("lfm2")
    HFCache(model.config, dtype="f32").save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert loaded.batch_size == -1
    tokens = random_tokens(1, 20)
    want = generate(model, HFCache(model.config, dtype="f32"), tokens)
    assert torch.equal(generate(model, loaded, tokens), want)


def test_copies_and_beams(tmp_path):
    model = prepared("qwen3_next")
    cache = HFCache(model.config, dtype="f32")
    text = generate(model, cache, random_tokens(2, 20), num_beams=3, num_return_sequences=3)
    cache.save(tmp_path / "chat")
    loaded = HFCache.load(model.config, tmp_path / "chat")
    assert loaded.batch_size == 6
    assert torch.equal(step(model, loaded, text[:, :1]), step(model, cache, text[:, :1]))


def test_a_pass_that_failed(tmp_path):
    """Its tokens are in some states: nothing is written."""
    model, cache, text = filled("falcon_h1", tmp_path / "chat")
    before = (tmp_path / "chat").read_bytes()
    hook = model.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, cache, text[:, -1:])
    hook.remove()
    with pytest.raises(ValueError, match=r"did not go through all layers.*reset\(\) the cache"):
        cache.save(tmp_path / "chat")
    assert (tmp_path / "chat").read_bytes() == before


def test_damage_is_found(tmp_path):
    model, _, _ = filled("lfm2", tmp_path / "chat", secret=b"key", fingerprint="a model")
    good, first = (tmp_path / "chat").read_bytes(), state.inspect(tmp_path / "chat").nbytes
    step_of = max(1, (len(good) - first) // 40)
    for at in range(first, len(good) - 40, step_of):
        (tmp_path / "bad").write_bytes(good[:at] + bytes([good[at] ^ 64]) + good[at + 1 :])
        with pytest.raises(StateFormatError, match="bad: "):
            HFCache.load(model.config, tmp_path / "bad")
        (tmp_path / "bad").write_bytes(good[:at])
        with pytest.raises(StateFormatError, match="bad: "):
            HFCache.load(model.config, tmp_path / "bad")
    for options, words in (
        ({"secret": b"other"}, "its MAC is another one"),
        ({"fingerprint": "another"}, "of another model: its fingerprint"),
    ):
        with pytest.raises(StateFormatError, match=words):
            HFCache.load(model.config, tmp_path / "chat", **options)
    HFCache.load(model.config, tmp_path / "chat", secret=b"key", fingerprint="a model")


def test_states_of_another_file(tmp_path):
    """A secret finds them, and without it what differs: the column, or the number of rows."""
    model, cache, text = filled("lfm2", tmp_path / "chat", secret=b"key")
    good, first = (tmp_path / "chat").read_bytes(), state.inspect(tmp_path / "chat").nbytes
    step(model, cache, text[:, -1:])
    cache.save(tmp_path / "later", secret=b"key")
    cache.reset()
    step(model, cache, text[:1, :1])
    cache.save(tmp_path / "other", secret=b"key")
    words = {"later": "altered.*behind column 28, and a batch of 27", "other": "altered.*behind column 1, and a batch"}
    for name, says in words.items():
        others, begin = (tmp_path / name).read_bytes(), state.inspect(tmp_path / name).nbytes
        (tmp_path / "bad").write_bytes(good[:first] + others[begin:])
        with pytest.raises(StateFormatError, match=f"bad: {says}"):
            HFCache.load(model.config, tmp_path / "bad")
        with pytest.raises(StateFormatError, match="bad: its MAC is another one"):
            HFCache.load(model.config, tmp_path / "bad", secret=b"key")


def test_files_of_others_are_refused(tmp_path):
    model, _, _ = filled("lfm2", tmp_path / "chat")
    llama = prepared("llama")
    HFCache(llama.config).save(tmp_path / "llama")
    with pytest.raises(StateFormatError, match=r"llama: has no recurrent states: HFCache.load or KVCache.load reads"):
        HFCache.load(model.config, tmp_path / "llama")
    words = r"chat: has recurrent states as well: HFCache.load reads it, with the config of a model with recurrent"
    with pytest.raises(StateFormatError, match=words):
        HFCache.load(llama.config, tmp_path / "chat")
    with pytest.raises(StateFormatError, match=words):
        kvcache.KVCache.load(tmp_path / "chat")
    good, first = (tmp_path / "chat").read_bytes(), state.inspect(tmp_path / "chat").nbytes
    (tmp_path / "rows").write_bytes(good[:first])
    with pytest.raises(StateFormatError, match=r"rows: has no recurrent states"):
        HFCache.load(model.config, tmp_path / "rows")


def test_states_of_another_shape(tmp_path):
    """The rows are as those of the model; the states are not."""
    filled("falcon_h1", tmp_path / "chat")
    config = transformers.FalconH1Config(**BASE, **{**MAMBA, "mamba_d_state": 16}, mamba_d_ssm=128)
    with pytest.raises(StateFormatError, match=r"chat: .*of another model: it has states of .* elements, and config"):
        HFCache.load(config, tmp_path / "chat")
    filled("lfm2", tmp_path / "other")
    config = transformers.Lfm2Config(**BASE, layer_types=["full_attention", "conv"] * 2)
    with pytest.raises(StateFormatError, match=r"other: .*of another model"):
        HFCache.load(config, tmp_path / "other")


def test_inspect(tmp_path):
    filled("lfm2", tmp_path / "chat")
    command = [sys.executable, "-m", "kvcache", "inspect", tmp_path / "chat", "--verify"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "behind it, recurrent states" in done.stdout
    shown = json.loads(subprocess.check_output([*command, "--json"]))
    assert [one["tokens"][0] for one in shown["following"]["sequences"]] == [27, 27]

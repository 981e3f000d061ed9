"""How many functions of the package a token, or a command, goes through, and how often the path changes file.

The numbers may only fall. Modules are loaded before their calls are counted.

A change of file is a call of a function that lies in another file than the function that was called before.
"""

import gc
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import kvcache

PACKAGE = Path(kvcache.__file__).parent


class Walk(NamedTuple):
    calls: int
    functions: int
    files: int
    changes: int


def walk(run):
    """Count the calls of Python functions of the package in a call."""
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(f"{PACKAGE}/"):
            called.append(frame.f_code)

    before = sys.getprofile()
    gc.collect()
    gc.disable()  # a collection would call finalizers of what other tests left
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
        gc.enable()
    files = [code.co_filename for code in called]
    changes = sum(one != other for one, other in pairwise(files))
    return Walk(len(called), len(set(called)), len(set(files)), changes)


def check(what, found, most):
    print(f"{what}: {found.calls} calls of {found.functions} functions in {found.files} files,", end=" ")
    print(f"{found.changes} changes of file")
    grown = {name: (now, limit) for name, now, limit in zip(Walk._fields, found, most, strict=True) if now > limit}
    assert not grown, f"{what}: (now, limit) are {grown}"
    assert found.calls > most.calls / 2, "the limits may be lowered"


def test_a_step_of_one_layer():
    cache = kvcache.KVCache(1, 2, 32, 64)
    x = np.ones((1, 2, 32), np.float32)

    def step():
        with cache.batch(1) as batch:
            batch.attend(0, x, x, x)

    step()
    check("a step of one layer", walk(step), Walk(6, 6, 2, 1))


def test_a_text_of_four_tokens(monkeypatch, capsys):
    from kvcache import runner  # noqa: F401  # which the command loads when it runs
    from kvcache.tools import cli

    model = Path(__file__).parents[2] / "examples/model"
    monkeypatch.setattr(sys, "argv", ["kvcache", "generate", str(model), "ROMEO:", "--tokens", "4"])

    def generate():
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0, capsys.readouterr().err

    check("a text of four tokens", walk(generate), Walk(2750, 272, 24, 666))


def make_model(num_layers):
    """Make a model with the attention "kvcache", and a prefix cache for it."""
    import transformers

    from kvcache.hf import HFCache

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "eos_token_id": None, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=num_layers, **sizes, **heads)
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("kvcache")
    return model, HFCache, kvcache.PrefixCache(HFCache.make_kv_cache(model.config), fingerprint="a model")


@pytest.mark.hf
@pytest.mark.parametrize(("has_prefix", "most"), [(False, Walk(73, 29, 8, 40)), (True, Walk(92, 44, 11, 54))])
def test_a_pass_of_transformers(has_prefix, most):
    import torch

    model, make, prefix = make_model(4)
    cache = make(model.config, prefix=prefix if has_prefix else None)
    if has_prefix:
        cache.acquire(torch.zeros(1, 2, dtype=torch.long))
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        for _ in range(3):
            model(token, past_key_values=cache)
        found = walk(lambda: model(token, past_key_values=cache))
    assert cache.stats()["calls"] == {"kernel": 16, "dense": 0, "fallback": 0}
    check("a pass of HFCache through 4 layers", found, most)


@pytest.mark.hf
def test_a_text_of_transformers_that_begins_as_an_earlier_one():
    import torch

    model, make, prefix = make_model(4)

    def generate():
        cache, prompt = make(model.config, prefix=prefix), torch.arange(1, 64)[None]
        cache.release(model.generate(prompt, past_key_values=cache, max_new_tokens=4, do_sample=False))

    for _ in range(2):
        generate()
    check("a text of four tokens through a prefix cache", walk(generate), Walk(857, 302, 28, 424))
    assert prefix.stats.matched > 100


@pytest.mark.hf
def test_a_cache_for_transformers_is_made_of_one_reading_of_the_configuration():
    model, make, _ = make_model(32)
    check("a cache for 32 layers", walk(lambda: make(model.config)), Walk(555, 166, 18, 193))

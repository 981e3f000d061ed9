"""Warnings: that the model, the reason and what would do are named, once, at the user's line."""

import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, make, random_tokens, two_sided  # noqa: E402 - torch may be missing

from kvcache import NotSupportedError  # noqa: E402 - it imports those
from kvcache.cache import KVCache  # noqa: E402 - it imports those
from kvcache.hf import HFCache, disable, enable  # noqa: E402 - it imports those

OPTIONS = {"max_new_tokens": 3, "do_sample": False}


def llama():
    return make(transformers.LlamaConfig(**BASE | {"head_dim": 32}))


def bloom():
    return make(transformers.BloomConfig(hidden_size=128, n_layer=4, n_head=4, vocab_size=97, eos_token_id=None))


def diffllama():
    return make(transformers.DiffLlamaConfig(**BASE))


def said(run):
    """Return the package's warnings of a call, each of which must name a line of this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    ours = [one for one in caught if issubclass(one.category, UserWarning)]
    assert {one.filename for one in ours} <= {__file__}
    return [str(one.message).removeprefix("kvcache: ") for one in ours]


def fed(model, **options):
    """Return a call that feeds a model two tokens."""

    def run():
        with torch.inference_mode():
            model(random_tokens(1, 2), cache=HFCache(model.config), **options)

    return run


def test_a_model_that_takes_no_attention_but_its_own():
    """`enable` says so, and nothing advises it afterwards."""
    model = bloom()
    own = "takes no attention but its own, so the cache only stores its rows, and is not faster than"
    [once] = said(lambda: enable(model))
    assert once.startswith(f"a BloomForCausalLM {own}")
    assert said(lambda: model.generate(random_tokens(1, 5), **OPTIONS)) == []
    disable(model)
    [once] = said(fed(model))
    assert once.startswith(f"the rows of every layer are decoded in each step, because a BloomForCausalLM {own}")
    assert "enable" not in once
    with pytest.raises(NotSupportedError, match=r"^select=16: .* a BloomForCausalLM takes no .*: leave select out$"):
        said(lambda: model.generate(random_tokens(1, 5), cache=HFCache(model.config, select=16), **OPTIONS))


def test_another_attention_that_could_be_ours():
    model = llama()
    [once] = said(fed(model))
    assert "because the model's attention is not 'kvcache'" in once
    assert "kvcache.hf.enable(model), or set_attn_implementation('kvcache'), has them read" in once
    with pytest.raises(NotSupportedError, match=r"^select=16: .*: kvcache.hf.enable\(model, select=...\), or leave"):
        said(lambda: model.generate(random_tokens(1, 5), cache=HFCache(model.config, select=16), **OPTIONS))


def test_a_model_that_computes_with_the_rows():
    model = diffllama()
    enable(model)
    [once] = said(lambda: model.generate(random_tokens(1, 5), **OPTIONS))
    assert "because the model computes with them first" in once
    assert "enable" not in once


def test_what_the_kernels_do_not_know():
    model, inputs = two_sided("t5")
    enable(model, max_source_len=40)
    found = said(lambda: model.generate(**inputs, **OPTIONS))
    reason = "a T5Attention brings position_bias, which the kernels do not know; using dense tensors"
    assert {*found} == {reason}  # of the decoder's rows, and of the encoder's
    model = llama()
    enable(model)
    sees = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert said(fed(model, attention_mask=sees)) == [
        "a LlamaAttention brings a mask, which the kernels do not know; using dense tensors"
    ]


def test_warnings_name_the_line_of_the_user():
    model, short = llama(), 16
    config = model.config.to_dict() | {"model_type": "new"}
    model.set_attn_implementation("kvcache")
    for run in (
        lambda: HFCache(model.config, select=short),
        lambda: enable(llama(), select=short),
        lambda: HFCache.make_kv_cache(model.config, select=short),
        lambda: model.generate(random_tokens(1, 5), **OPTIONS),  # with transformers' own cache
        lambda: KVCache.from_config(config),
    ):
        assert len(said(run)) == 1

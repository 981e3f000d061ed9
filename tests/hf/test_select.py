"""`select`: rows that new tokens of long texts select by sketches, with the attention ``"kvcache"``."""

import copy
import itertools
import warnings

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import sparse_models  # noqa: E402 - torch may be missing
from support.hf_pairs import BASE, MAMBA, make, random_tokens, two_sided  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache import selecting  # noqa: E402 - it imports those
from kvcache.hf import HFCache, HFEncoderDecoderCache, enable  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

LENGTH, FROM, SELECT = 300, 310, 16  # of the prompts; from where rows are selected; how many
NEW = 20
OPTIONS = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture(autouse=True)
def early(monkeypatch):
    monkeypatch.setattr(selecting, "SELECT_FROM", FROM)


@pytest.fixture
def calls(monkeypatch):
    """Return what each call of `Batch.attend` is given: the layer, the tokens of the query, `select`."""
    found, attend = [], kvcache.Batch.attend

    def noting(self, layer, q, *args, **kwargs):
        found.append((layer, q.shape[-2], kwargs.get("select")))
        return attend(self, layer, q, *args, **kwargs)

    monkeypatch.setattr(kvcache.Batch, "attend", noting)
    return found


def config_of(kind=transformers.LlamaConfig, **changes):
    return kind(**BASE | {"head_dim": 32, "initializer_range": 0.1} | changes)


def model_of(*args, **changes):
    model = make(config_of(*args, **changes))
    model.set_attn_implementation("kvcache")
    return model


def generate(model, tokens, cache, **options):
    return model.generate(tokens, past_key_values=cache, **OPTIONS | options)


def logits_of(model, cache, tokens, at, **options):
    """Feed a text up to a column, then a token at a time; return the logits of these tokens."""
    with torch.inference_mode():
        model(tokens[:, :at], past_key_values=cache, **{n: m[:, :at] for n, m in options.items()})
        return torch.cat(
            [
                model(
                    tokens[:, i : i + 1], past_key_values=cache, **{n: m[:, : i + 1] for n, m in options.items()}
                ).logits
                for i in range(at, tokens.shape[1])
            ],
            1,
        )


def test_a_context_in_which_nothing_is_selected():
    config = config_of(max_position_embeddings=FROM - 1)
    said = rf"select={SELECT} changes nothing: .* of {FROM} tokens or more, .* max_position_embeddings={FROM - 1}"
    with pytest.warns(UserWarning, match=said):
        HFCache(config, select=SELECT)
    with pytest.warns(UserWarning, match=said):
        enable(make(config), select=SELECT)
    config.max_position_embeddings = FROM
    with warnings.catch_warnings(action="error"):
        HFCache(config, select=SELECT)


def test_new_tokens_of_long_texts_select(calls):
    model, tokens = model_of(), random_tokens(1, LENGTH)
    enable(model, dtype="f32", select=SELECT)
    out = model.generate(tokens, return_dict_in_generate=True, **OPTIONS)
    cache = out.past_key_values
    assert [layer.sketch for layer in cache._cache.layers] == [False, False, True, True]
    assert calls[:4] == [(layer, LENGTH, None) for layer in range(4)]
    assert cache.stats()["calls"]["dense"] == 0
    for step in range(1, NEW):
        selects = LENGTH + step >= FROM
        wanted = [(layer, 1, SELECT if selects and layer >= 2 else None) for layer in range(4)]
        assert calls[4 * step : 4 * step + 4] == wanted
    assert len(calls) == 4 * NEW
    num_selecting = 2 * (LENGTH + NEW - FROM)
    assert cache.stats()["calls"] == {"kernel": 4 * NEW, "dense": 0, "fallback": 0, "select": num_selecting}
    assert f"select={SELECT} in 2 layers, once each text has {FROM} tokens" in repr(cache)
    assert f"; {num_selecting} of the kernels' calls selected rows" in repr(cache)


def test_a_selection_of_more_rows_than_there_are_counts_as_none(calls):
    model, tokens = model_of(), random_tokens(1, LENGTH)
    cache = HFCache(model.config, select=LENGTH)
    generate(model, tokens, cache)
    assert cache.stats()["calls"]["select"] == sum(select is not None for *_, select in calls) == 0
    assert f"once each text has {80 + 2 * LENGTH + 1} tokens" in repr(cache)


def test_the_shortest_text_of_a_batch_counts(calls):
    model, tokens = model_of(), random_tokens(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    generate(model, tokens, HFCache(model.config, select=SELECT), attention_mask=mask)
    steps = [select for layer, n, select in calls if layer == 3 and n == 1]
    assert steps == [None] * (FROM - LENGTH + 5 - 1) + [SELECT] * (NEW - 1 - (FROM - LENGTH + 5 - 1))


@pytest.mark.parametrize("way", ["lookup", "draft"])
def test_verified_guesses_are_dense(calls, way):
    model, tokens = model_of(), random_tokens(1, 2 * FROM)
    tokens[:, FROM:] = tokens[:, :FROM]
    draft = copy.deepcopy(model)
    enable(model, dtype="f32", select=SELECT)
    model.generate(
        tokens, **OPTIONS, **({"prompt_lookup_num_tokens": 3} if way == "lookup" else {"assistant_model": draft})
    )
    several = [call for call in calls if call[1] > 1]
    assert len(several) > 8
    assert {select for *_, select in several} == {None}


@pytest.mark.parametrize("layers", [2, 3])
def test_the_first_layers_as_a_draft_select_no_rows(calls, layers):
    model, tokens = model_of(), random_tokens(1, FROM)
    enable(model, dtype="f32", select=SELECT)
    model.generate(tokens, assistant_early_exit=layers, **OPTIONS)
    ends = [select for (layer, _, select), after in itertools.pairwise(calls) if (layer, after[0]) == (layers - 1, 0)]
    assert len(ends) > 3
    assert set(ends) == {None}


def test_prefixes_keep_no_token_behind_the_first_that_selected():
    model, tokens = model_of(), random_tokens(1, LENGTH)
    memory = HFCache.make_kv_cache(model.config, dtype="f32", select=SELECT, block_size=16)
    prefix = kvcache.PrefixCache(memory, fingerprint="one")
    for select, kept in ((SELECT, FROM - 1), (None, LENGTH + NEW - 1)):
        enable(model, prefix=prefix, select=select)
        text = model.generate(tokens, **OPTIONS)[0].tolist()
        assert prefix.lookup([*text, 5]) == kept
    want = make_dense(model, tokens)
    enable(model, prefix=prefix)
    assert torch.equal(model.generate(tokens, **OPTIONS), want)


def make_dense(model, tokens):
    cache = HFCache(model.config, dtype="f32")
    return generate(model, tokens, cache)


def test_a_prompt_of_which_one_token_is_missing_reads_all_rows(calls):
    """The same prompt again feeds its last token alone."""
    model, tokens = model_of(), random_tokens(1, 352)  # whole blocks
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(model.config, select=SELECT, block_size=16), fingerprint="one")
    found = []
    for _ in range(2):
        enable(model, prefix=prefix, select=SELECT)
        calls.clear()
        found.append(model.generate(tokens, **OPTIONS, output_logits=True, return_dict_in_generate=True).logits)
    assert [select for _, n, select in calls if n == 1][:4] == [None] * 4
    assert any(select for _, _, select in calls)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)


def test_a_prefix_cache_without_sketches_is_refused():
    model = model_of()
    prefix = kvcache.PrefixCache(HFCache.make_kv_cache(model.config), fingerprint="one")
    with pytest.raises(ValueError, match="layer 2 has sketch=False, and not True: give the arguments here"):
        HFCache(model.config, prefix=prefix, select=SELECT)


def test_saved_caches_select_again(tmp_path):
    model, tokens = model_of(), random_tokens(1, LENGTH + NEW)
    cache, at = HFCache(model.config, select=SELECT), FROM + 5
    want = logits_of(model, cache, tokens[:, :at], LENGTH)
    cache.save(tmp_path / "chat", tokens=tokens)
    loaded = HFCache.load(model.config, tmp_path / "chat", select=SELECT)
    dense = HFCache.load(model.config, tmp_path / "chat")
    with torch.inference_mode():
        for other, is_same in ((loaded, True), (dense, False)):
            want = model(tokens[:, at : at + 1], past_key_values=copy.deepcopy(cache)).logits
            got = model(tokens[:, at : at + 1], past_key_values=other).logits
            assert torch.equal(got, want) == is_same


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_another_attention_is_refused(attention):
    model, tokens = make(config_of()), random_tokens(1, 9)
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, select=SELECT)
    with pytest.raises(kvcache.NotSupportedError, match=f"select={SELECT}: .* because the model's attention is not"):
        generate(model, tokens, cache)
    enable(model)
    assert torch.equal(generate(model, tokens, cache), generate(model, tokens, HFCache(model.config)))


def test_windows_and_hybrids():
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = config_of(transformers.Gemma3TextConfig, sliding_window=64, layer_types=kinds)
    long = config_of(transformers.MistralConfig, sliding_window=8192)
    hybrid = config_of(
        transformers.Lfm2Config, num_attention_heads=2, hidden_size=64, layer_types=["full_attention", "conv"] * 2,
        num_hidden_layers=4,
    )  # fmt: skip
    for config, wanted in ((mixed, [0, 0, 0, 1]), (long, [0, 0, 1, 1])):
        assert [layer.sketch for layer in HFCache(config, select=SELECT)._cache.layers] == wanted
    with pytest.raises(kvcache.NotSupportedError, match="no layer of the model can select rows"):
        HFCache(hybrid, select=SELECT)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"select": 0}, ValueError, "select=0"),
        ({"select": 2.5}, TypeError, "select=2.5"),
        ({"select": 16, "policy": kvcache.SlidingWindow(64)}, kvcache.NotSupportedError, "^select=16: no layer of"),
    ],
)
def test_bad_arguments(arguments, error, says):
    model = model_of()
    model.set_attn_implementation("eager")
    with pytest.raises(error, match=says):
        enable(model, **arguments)
    assert model.config._attn_implementation == "eager"


def test_models_that_cannot():
    with pytest.raises(kvcache.NotSupportedError, match=r"^select=16: no layer of the model can select rows; it needs"):
        HFCache(config_of(head_dim=16), select=16)
    with pytest.raises(kvcache.NotSupportedError, match=r"^select=16: no layer"):
        HFCache(config_of(num_hidden_layers=2), select=16)
    model, _ = two_sided("bart")
    with pytest.raises(TypeError, match="select"):
        HFEncoderDecoderCache(model.config, select=16)
    sparse = sparse_models.model_of("minimax_m3_vl_text")
    with pytest.raises(
        kvcache.NotSupportedError, match=r"^select=16: a MiniMaxM3VLTextConfig chooses rows by an indexer"
    ):
        HFCache(sparse.config, select=16)


def test_no_file_of_an_encoder_is_loaded_to_select(tmp_path):
    model, inputs = two_sided("bart")
    enable(model)
    made = model.generate(**inputs, return_dict_in_generate=True, max_new_tokens=3)
    made.past_key_values.save(tmp_path / "both")
    with pytest.raises(kvcache.NotSupportedError, match=r"^select=16: texts behind an encoder are short"):
        HFEncoderDecoderCache.load(model.config, tmp_path / "both", select=16)


def test_unusual_masks_read_all_rows(calls):
    model, tokens = model_of(), random_tokens(1, FROM + 1)
    cache = HFCache(model.config, select=SELECT)
    mask = torch.ones(FROM + 1, FROM + 1, dtype=torch.bool).tril()[None, None]
    with torch.inference_mode():
        with pytest.warns(UserWarning, match="using dense tensors"):
            model(tokens[:, :FROM], past_key_values=cache, attention_mask=mask[..., :FROM, :FROM])
        got = model(tokens[:, FROM:], past_key_values=cache, attention_mask=mask[..., FROM:, :]).logits
    assert calls == []
    dense = logits_of(model, HFCache(model.config), tokens, FROM)
    torch.testing.assert_close(got, dense, rtol=0, atol=1e-3)


def test_no_state_is_kept_behind_tokens_that_selected():
    model, tokens = make(config_of(transformers.FalconH1Config, **MAMBA, mamba_d_ssm=128)), random_tokens(1, LENGTH)
    memory = HFCache.make_kv_cache(model.config, dtype="f32", select=SELECT, block_size=16)
    prefix = kvcache.PrefixCache(memory, fingerprint="one", state_bytes=HFCache.state_bytes(model))
    for select, kept in ((SELECT, LENGTH - 1), (None, LENGTH + NEW - 1)):
        enable(model, prefix=prefix, select=select)
        text = model.generate(tokens, **OPTIONS)[0].tolist()
        assert prefix.lookup([*text, 5]) == kept

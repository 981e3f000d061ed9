"""`HFCache.evict`: attention over the tokens that stay, beside transformers' own attention with the others hidden."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support import sparse_models  # noqa: E402 - torch may be missing
from support.hf_pairs import BASE, make, random_tokens, two_sided  # noqa: E402 - torch may be missing
from support.hf_pairs import model_of as recurrent_model  # noqa: E402 - torch may be missing

import kvcache  # noqa: E402 - it imports those
from kvcache import eviction  # noqa: E402 - it imports those
from kvcache.eviction import Prompt, future, kvzip  # noqa: E402 - it imports those
from kvcache.hf import HFCache, HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

LENGTH, NEW = 120, 6


def third(prompt):
    """Take every third token for the most important, whatever they are."""
    return (np.arange(prompt.num_rows) % 3 == 0).astype(float)


def model_of(kind=transformers.LlamaConfig, **changes):
    model = make(kind(**BASE | {"initializer_range": 0.1} | changes))
    model.set_attn_implementation("kvcache")
    return model


def texts(rows=1):
    return random_tokens(rows, LENGTH + NEW)


def logits_of(model, cache, tokens, mask=None, begin=LENGTH, **options):
    """Feed the tokens from a column on, each in a pass of its own; return their logits."""
    found = []
    with torch.inference_mode():
        for i in range(begin, tokens.shape[1]):
            positions = {"position_ids": torch.tensor([[i]] * len(tokens))} if mask is None else {}
            if mask is not None:
                positions = {"attention_mask": mask[:, : i + 1], "position_ids": options["positions"][:, i : i + 1]}
            found.append(model(tokens[:, i : i + 1], past_key_values=cache, **positions).logits)
    return torch.cat(found, 1)


def prefill(model, cache, tokens, mask=None, positions=None):
    options = {} if mask is None else {"attention_mask": mask[:, :LENGTH], "position_ids": positions[:, :LENGTH]}
    with torch.inference_mode():
        model(tokens[:, :LENGTH], past_key_values=cache, **options)


def hidden(model, tokens, kept, mask=None, positions=None):
    """Return the logits of transformers' own cache whose mask hides the columns that were evicted."""
    model.set_attn_implementation("sdpa")
    cache = transformers.DynamicCache(config=model.config)
    shown = torch.ones_like(tokens) if mask is None else mask.clone()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens) if positions is None else positions
    prefill(model, cache, tokens, shown, positions)
    for row, columns in enumerate(kept):
        shown[row, :LENGTH] = 0
        shown[row, columns] = 1
    found = logits_of(model, cache, tokens, shown, positions=positions)
    model.set_attn_implementation("kvcache")
    return found


def columns_of(cache):
    """Return the columns that each row of an evicted cache holds."""
    passes = cache._passes
    pairs = zip(passes.seq_ids, passes.offsets, strict=True)
    return [cache._cache.positions(seq_id=seq_id) + offset for seq_id, offset in pairs]


@pytest.mark.parametrize("kind", [transformers.LlamaConfig, transformers.Qwen3Config, transformers.Phi3Config])
def test_logits_are_those_of_the_tokens_that_stay(kind):
    model, tokens = model_of(kind), texts(2)
    cache = HFCache(model.config, "f32")
    prefill(model, cache, tokens)
    cache.evict(third, 0.4)
    kept = columns_of(cache)
    assert [len(each) for each in kept] == [48, 48]
    assert cache.get_seq_length() == LENGTH
    found = logits_of(model, cache, tokens)
    torch.testing.assert_close(found, hidden(model, tokens, kept), rtol=1e-4, atol=1e-5)
    assert cache.stats()["calls"]["dense"] == 0


def test_a_batch_with_padding_keeps_what_its_texts_alone_would():
    model, tokens = model_of(), texts(2)
    mask = torch.ones_like(tokens)
    mask[0, :17] = 0
    positions = (mask.cumsum(1) - 1).clamp(0)
    for policy in (future, kvzip):
        cache = HFCache(model.config, "f32")
        cache.note_queries(8)
        prefill(model, cache, tokens, mask, positions)
        again = {"model": model, "input_ids": tokens[:, :LENGTH]} if policy is kvzip else {}
        cache.evict(policy, 0.5, **again)
        kept = columns_of(cache)
        for row, padding in enumerate((17, 0)):
            alone, text = HFCache(model.config, "f32"), tokens[row : row + 1, padding:LENGTH]
            alone.note_queries(8)
            with torch.inference_mode():
                model(text, past_key_values=alone)
            alone.evict(policy, 0.5, **({"model": model, "input_ids": text} if again else {}))
            assert (columns_of(alone)[0] + padding).tolist() == kept[row].tolist()
        found = logits_of(model, cache, tokens, mask, positions=positions)
        torch.testing.assert_close(
            found, hidden(model, tokens, kept, mask, positions), rtol=1e-4, atol=1e-5, msg=str(policy)
        )


KINDS = {
    "llama": (transformers.LlamaConfig, {}),
    "phi, a part rotated": (transformers.PhiConfig, {"partial_rotary_factor": 0.5}),
    "glm4, neighbours rotated": (transformers.Glm4Config, {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "gemma3, two bases": (
        transformers.Gemma3TextConfig,
        {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 512, "num_hidden_layers": 4},
    ),
    "deepseek_v3, latents": (
        transformers.DeepseekV3Config,
        {
            "head_dim": 8, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "yarn": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 64}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_queries_are_moved_as_the_model_rotates_them(kind):
    """Layer 0's queries depend on their token and position alone."""
    config, changes = KINDS[kind]
    model, tokens, noted = model_of(config, **changes), texts()[:, :40], []
    for begin in (0, 90):
        cache = HFCache(model.config, "f32")
        cache.note_queries(1)
        with torch.inference_mode():
            model(tokens, past_key_values=cache, position_ids=begin + torch.arange(40)[None])
        cache._passes.finish()
        ropes = eviction_ropes(cache)
        noted.append(Prompt(cache._cache, cache._passes.seq_ids[0], cache._passes.queries, ropes=ropes))
    for layer in (0,):
        first, behind = (each.picked(layer) for each in noted)
        moved = noted[0].moved(first, layer, first.positions + 90)
        np.testing.assert_allclose(moved.q, behind.q, rtol=2e-3, atol=2e-3 * abs(behind.q.astype(float)).max())
        assert abs(first.q - behind.q).max() > 0.01 * abs(behind.q).max()


def eviction_ropes(cache):
    from kvcache.hf.policies import ropes_of

    return ropes_of(cache._passes.config, cache._cache)


def test_a_rotation_that_follows_the_length():
    model = model_of(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    cache = HFCache(model.config)
    cache.note_queries()
    prefill(model, cache, texts())
    with pytest.raises(kvcache.NotSupportedError, match="queries of layer 0 cannot be moved"):
        cache.evict(future)
    cache.evict(kvzip, model=model, input_ids=texts()[:, :LENGTH])
    assert [len(each) for each in columns_of(cache)] == [36]


def test_a_prompt_longer_than_what_is_fed_again_at_once(monkeypatch):
    model, tokens = model_of(), texts()
    found = []
    for length in (256, 50):
        monkeypatch.setattr(eviction, "AGAIN", length)
        cache = HFCache(model.config, "f32")
        prefill(model, cache, tokens)
        cache.evict(kvzip, 0.5, model=model, input_ids=tokens[:, :LENGTH])
        assert cache._cache.sequences == cache._passes.seq_ids  # no fork is left
        found.append(columns_of(cache)[0])
    assert len(found[0]) == len(found[1]) == 60


def test_rows_that_were_cut_off_within_a_gap_are_not_read():
    model, tokens = model_of(), texts()
    cache = HFCache(model.config, "f32")
    prefill(model, cache, tokens)
    cache.evict(lambda prompt: -np.arange(prompt.num_rows), 0.5)  # keeps 0 to 27, and 88 to 119
    cache.crop(80 - LENGTH)
    with pytest.raises(kvcache.NotSupportedError, match="tokens were evicted"):
        _ = cache.layers[0].keys
    cache.crop(28 - 80)
    assert cache.layers[0].keys.shape[2] == 28


def test_a_policy_that_feeds_a_copy_or_the_cache_itself():
    model, tokens = model_of(), texts()
    cache = HFCache(model.config, "f32")
    prefill(model, cache, tokens)
    copies = []

    def feeding(prompt, is_copy):
        copies.append(copy.deepcopy(cache) if is_copy else cache)
        logits_of(model, copies[-1], tokens)
        return third(prompt)

    with pytest.raises(RuntimeError, match="changed the cache"):
        cache.evict(lambda prompt: feeding(prompt, False), 0.5)
    assert cache.get_seq_length() == len(columns_of(cache)[0]) == LENGTH + NEW
    cache.crop(-NEW)
    cache.evict(lambda prompt: feeding(prompt, True), 0.5)
    assert len(columns_of(cache)[0]) == 60


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next"])
def test_recurrent_layers_keep_their_state(name):
    model, tokens = recurrent_model(name), texts()
    model.set_attn_implementation("kvcache")
    cache, whole = HFCache(model.config, "f32"), HFCache(model.config, "f32")
    for each in (cache, whole):
        prefill(model, each, tokens)
    cache.evict(third, 0.5)
    shown = torch.zeros_like(tokens)
    shown[0, LENGTH:] = shown[0, columns_of(cache)[0]] = 1
    masked = logits_of(model, whole, tokens, shown, positions=torch.arange(LENGTH + NEW)[None])
    torch.testing.assert_close(logits_of(model, cache, tokens), masked)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_other_attention_is_refused_afterwards(name):
    model, tokens = model_of(), texts()
    cache = HFCache(model.config, "f32")
    prefill(model, cache, tokens)
    cache.evict(third, 0.5)
    model.set_attn_implementation(name)
    with pytest.raises(kvcache.NotSupportedError, match="tokens were evicted"):
        logits_of(model, cache, tokens)
    with pytest.raises(kvcache.NotSupportedError, match="tokens were evicted"):
        _ = cache.layers[0].keys
    model.set_attn_implementation("kvcache")
    assert logits_of(model, cache, tokens).isfinite().all()


DENSE = "attended with dense tensors in the last pass: .* tokens cannot be evicted"


def test_eviction_needs_the_kernels():
    """Rows are refused to be dropped, not the next pass that would need them; after a pass of the kernels they go."""
    model, tokens = model_of(), texts()
    model.set_attn_implementation("sdpa")
    cache = HFCache(model.config, "f32")
    cache.note_queries()
    prefill(model, cache, tokens)
    again = {"model": model, "input_ids": tokens[:, :LENGTH]}
    for policy, options in ((future, {}), (third, {}), (kvzip, again)):
        with pytest.raises(kvcache.NotSupportedError, match=f"layer 0 {DENSE}"):
            cache.evict(policy, **options)
    assert cache._cache.sequences == cache._passes.seq_ids
    assert len(columns_of(cache)[0]) == LENGTH
    model.set_attn_implementation("kvcache")
    logits_of(model, cache, tokens)
    cache.evict(third, 0.5)
    assert len(columns_of(cache)[0]) == (LENGTH + NEW) // 2


def test_queries_are_noted_if_the_kernels_do_not_know_a_mask():
    model, tokens = model_of(), texts()
    kept = []
    for mask in (None, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]):
        cache = HFCache(model.config, "f32")
        cache.note_queries(8)
        with torch.no_grad():
            model(tokens[:, :LENGTH], attention_mask=mask, past_key_values=cache)
        cache.evict(future, 0.5)
        kept.append(columns_of(cache)[0].tolist())
        assert logits_of(model, cache, tokens).isfinite().all()
    assert cache.stats()["calls"]["fallback"] == 4
    assert kept[0] == kept[1]


def test_a_model_that_fails_while_it_reads_the_prompt_again(monkeypatch):
    model, tokens = model_of(), texts()
    monkeypatch.setattr(eviction, "AGAIN", 50)
    cache = HFCache(model.config, "f32")
    prefill(model, cache, tokens)
    left = [None]  # what a hook returns changes nothing; the second call fails
    hook = model.model.layers[2].register_forward_pre_hook(lambda *_: left.pop())
    with pytest.raises(IndexError) as error:  # it keeps the frames in which the model failed
        cache.evict(kvzip, 0.5, model=model, input_ids=tokens[:, :LENGTH])
    hook.remove()
    assert cache._cache.sequences == cache._passes.seq_ids
    assert len(columns_of(cache)[0]) == LENGTH
    cache.evict(kvzip, 0.5, model=model, input_ids=tokens[:, :LENGTH])
    assert len(columns_of(cache)[0]) == 60
    assert error.value


def test_a_model_with_an_encoder_reads_nothing_again():
    model, given = two_sided("bart")
    model.set_attn_implementation("kvcache")
    cache, tokens = HFEncoderDecoderCache(model.config, "f32", max_source_len=30), random_tokens(2, 50)
    inputs = {"input_ids": given["inputs"], "attention_mask": given["attention_mask"], "decoder_input_ids": tokens}
    with torch.inference_mode():
        model(**inputs, past_key_values=cache)
    with pytest.raises(kvcache.NotSupportedError, match="BartForConditionalGeneration has an encoder"):
        cache.self_attention_cache.evict(kvzip, model=model, input_ids=tokens)
    cache.self_attention_cache.evict(third)
    assert [len(each) for each in columns_of(cache.self_attention_cache)] == [36, 36]


def test_refused():
    model, tokens = model_of(), texts()
    cache = HFCache(model.config)
    prefill(model, cache, tokens)
    cache._passes.finish()
    calls = {
        r"keep=1.5: must be above 0 and at most 1": lambda: cache.evict(third, 1.5),
        r"no queries of sequence": lambda: cache.evict(future),
        r"the policy needs the prompt fed once more": lambda: cache.evict(kvzip),
        r"give both model, .* and input_ids": lambda: cache.evict(kvzip, model=model),
        r"give both model": lambda: cache.evict(kvzip, model="llama", input_ids=tokens),
        r"input_ids has the shape \(1, 126\): .* 1 rows of at most the 120": lambda: cache.evict(
            kvzip, model=model, input_ids=tokens
        ),
        r"input_ids has 0 columns, and row 0 begins behind 0 of padding": lambda: cache.evict(
            kvzip, model=model, input_ids=tokens[:, :0]
        ),
        r"the model went through 2 of 4 layers": lambda: cache.evict(
            kvzip, model=model_of(num_hidden_layers=2), input_ids=tokens[:, :LENGTH]
        ),
        r"policy='future': a function": lambda: cache.evict("future"),
        r"every=0": lambda: cache.note_queries(0),
    }
    for message, call in calls.items():
        with pytest.raises((ValueError, TypeError), match=message):
            call()
        assert len(columns_of(cache)[0]) == LENGTH


def test_models_that_choose_rows_are_refused():
    model = sparse_models.model_of("deepseek_v32")
    cache = HFCache(model.config)
    with pytest.raises(kvcache.NotSupportedError, match="an indexer of the model chooses rows"):
        cache.evict(third)

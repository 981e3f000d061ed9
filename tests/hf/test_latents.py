"""Latent attention (MLA): the kernels read the latents, which nothing expands; other projections get dense tensors."""

import copy

import numpy as np
import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

LAYERS = 3
WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "chunked": {"prefill_chunk_size": 5},
}


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=32,
        v_head_dim=12,
        mlp_layer_types=["dense"] * LAYERS,
        vocab_size=97,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def prompt(rows=1, padding=0):
    tokens = torch.randint(2, 97, (rows, 19), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    tokens[0, :padding] = mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def generate(model, cache, attention, **options):
    model.set_attn_implementation(attention)
    return model.generate(**{"max_new_tokens": 20, "do_sample": False, **options}, past_key_values=cache)


def logits(model, cache, attention):
    """Logits of a padded prompt and of further tokens."""
    model.set_attn_implementation(attention)
    given = prompt(2, 4)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 3, dtype=torch.long)], 1)
    with torch.no_grad():
        results = [model(**given, past_key_values=cache).logits[given["attention_mask"] == 1]]
        for i in range(3):
            tokens = torch.tensor([[7 + i], [9 + i]])
            step = model(tokens, attention_mask=mask[:, : 20 + i], past_key_values=cache).logits
            results.append(step.flatten(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("attention", ["kvcache", "sdpa", pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("way", "padding"), [*((way, 0) for way in WAYS), ("greedy", 6), ("beams", 6)])
def test_same_tokens(model, way, padding, attention):
    given = prompt(2 if padding else 1, padding) | WAYS[way]
    want = generate(model, transformers.DynamicCache(config=model.config), "sdpa", **given)
    assert len(set(want[0, -20:].tolist())) > 3
    cache = HFCache(model.config, dtype="f32")
    assert torch.equal(generate(model, cache, attention, **given), want)
    kind = "kernel" if attention == "kvcache" else "dense"
    assert {name for name, count in cache.stats()["calls"].items() if count} == {kind}


@pytest.mark.parametrize(("dtype", "off"), [("f32", 1e-5), ("bf16", 0.03), ("q8_0", 0.1)])
def test_types(model, dtype, off):
    want = logits(model, transformers.DynamicCache(config=model.config), "sdpa")
    got = logits(model, HFCache(model.config, dtype=dtype), "kvcache")
    assert (got - want).abs().max() < off * want.abs().max()


def test_stored_latents_are_not_expanded(model):
    """What the model makes of latents is described, never computed."""
    cache, made = HFCache(model.config), []
    for layer in model.model.layers:
        layer.self_attn.expand_kv = noted(layer.self_attn.expand_kv, made)
    logits(model, cache, "kvcache")
    assert len(made) == 4 * LAYERS * 2
    assert not any(result.made is not None for result in made)
    made.clear()
    model.set_attn_implementation("kvcache")
    with torch.no_grad():
        model(prompt()["input_ids"], use_cache=False)
    assert all(type(result) is torch.Tensor for result in made)


def noted(expand, made):
    def expand_and_note(*args):
        expanded = expand(*args)
        made.extend(expanded)
        return expanded

    return expand_and_note


class Odd(torch.nn.Module):
    """A projection that is no plain linear one, though its numbers are the same."""

    def __init__(self, linear, way):
        super().__init__()
        self.linear, self.way = linear, way

    def forward(self, latents):
        if self.way == "matmul":
            return latents @ self.linear.weight.T
        if self.way == "in_place":
            return self.linear(latents).mul_(1.0)
        return self.linear(latents) + torch.nn.functional.linear(latents, torch.ones_like(self.linear.weight)) * 0.1


@pytest.mark.parametrize("way", ["matmul", "in_place", "adapter", "bias", "hook", "another forward"])
def test_other_projections(model, way):
    for layer in model.model.layers:
        attention = layer.self_attn
        if way == "bias":
            attention.kv_b_proj.bias = torch.nn.Parameter(torch.randn(attention.kv_b_proj.out_features))
        elif way == "hook":
            attention.kv_b_proj.register_forward_hook(lambda part, args, made: made * 1.5)
        elif way == "another forward":
            forward = attention.kv_b_proj.forward
            attention.kv_b_proj.forward = lambda latents, forward=forward: forward(latents) * 1.5
        else:
            attention.kv_b_proj = Odd(attention.kv_b_proj, way)
    want = logits(model, transformers.DynamicCache(config=model.config), "sdpa")
    cache = HFCache(model.config, dtype="f32")
    torch.testing.assert_close(logits(model, cache, "kvcache"), want, rtol=1e-4, atol=1e-4)
    assert cache.stats()["calls"] == {"kernel": 0, "dense": 4 * LAYERS, "fallback": 0}


def test_a_mask_of_ones_own(model):
    """Recorded operations are computed if the kernels do not know the mask."""
    sees = torch.ones(19, 19, dtype=torch.bool).tril()
    sees[:3, :3] = True
    results = []
    for attention, cache in (("sdpa", transformers.DynamicCache()), ("kvcache", HFCache(model.config, dtype="f32"))):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            given = {"attention_mask": sees[None, None], "past_key_values": cache}
            results.append(model(prompt()["input_ids"], **given).logits)
            results.append(model(torch.tensor([[5]]), past_key_values=cache).logits)
    torch.testing.assert_close(results[2:], results[:2], rtol=1e-4, atol=1e-4)
    assert cache.stats()["calls"] == {"kernel": LAYERS, "dense": 0, "fallback": LAYERS}


def test_what_is_stored(model):
    """The latents are the keys, and the rotated elements are the values, as in other caches."""
    theirs, ours = transformers.DynamicCache(config=model.config), HFCache(model.config, dtype="f32")
    for attention, cache in (("sdpa", theirs), ("kvcache", ours)):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            model(prompt(2)["input_ids"], past_key_values=cache)
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        # Of the second layer on, what either attention of the layers before has rounded.
        torch.testing.assert_close((one.keys, one.values), (other.keys, other.values), rtol=1e-5, atol=1e-5)
    assert all(layer.value_in_key for layer in ours._cache.layers)  # a row of 64 elements for all heads together


def test_attention_changed_and_copies(model):
    tokens = prompt()["input_ids"]
    want = logits_of_turns(model, transformers.DynamicCache(config=model.config), ["sdpa"] * 3, tokens)
    ours = HFCache(model.config, dtype="f32")
    torch.testing.assert_close(
        logits_of_turns(model, ours, ["kvcache", "sdpa", "kvcache"], tokens), want, rtol=1e-4, atol=1e-4
    )


def logits_of_turns(model, cache, attentions, tokens):
    results = []
    for attention in attentions:
        model.set_attn_implementation(attention)
        copied = copy.deepcopy(cache)
        with torch.no_grad():
            results.extend(model(tokens, past_key_values=each).logits for each in (cache, copied))
        cache.crop(-2)
    return results


LATENT = {
    "deepseek_v2": {"num_experts_per_tok": 2}, "deepseek_v3": {}, "axk1": {}, "glm4_moe_lite": {}, "minicpm3": {},
    "sarvam_mla": {}, "youtu": {},
}  # fmt: skip


@pytest.mark.parametrize("name", LATENT)
@pytest.mark.parametrize("interleave", [True, False])
def test_latents_after_a_removal_are_as_if_stored_anew(name, interleave):
    """transformers stores the keys; the rotation that the configuration is read to have moves them."""
    if name not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    sizes |= {"qk_rope_head_dim": 32, "v_head_dim": 16, "vocab_size": 97, "pad_token_id": 0, "n_routed_experts": 4}
    sizes |= {"moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "rope_interleave": interleave}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes, **LATENT[name])
    small = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()

    def stored(tokens):
        past = transformers.DynamicCache(config=config)
        with torch.no_grad():
            small(torch.tensor([tokens]), past_key_values=past)
        return torch.cat([past.layers[0].keys, past.layers[0].values], -1)[0].transpose(0, 1).numpy()

    cache = kvcache.KVCache.from_config(config, dtype="f32", max_seq_len=8)
    with cache.batch(6) as batch:
        batch.put(0, stored([5, 6, 7, 8, 9, 10]), None)
    cache.remove(1, 3)
    assert np.abs(cache.gather(0)[0][0] - stored([5, 8, 9, 10])[:, 0]).max() < 1e-5

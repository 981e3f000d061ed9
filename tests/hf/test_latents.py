"""Latent attention (MLA): the kernels read the latents, which nothing expands; other projections get dense tensors."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

LAYERS = 3


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

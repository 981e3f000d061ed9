"""Models with windows take the memory of their windows, also while a prompt runs."""

import pytest

from kvcache import ChunkedAttention, FullAttention, SlidingWindow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.policies import RESUME, block_size_for  # noqa: E402
from kvcache.models.shapes import PREFILL_TOKENS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:kvcache. the rows of every layer")

WINDOW, LENGTH = 256, 4096


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, vocab_size=64, sliding_window=WINDOW, max_position_embeddings=LENGTH * 2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def generate(model, cache, ids, **options):
    with torch.inference_mode():
        return model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False, **options)


def generate_and_watch(model, ids, attention, **options):
    """Generate; return the text, the cache, and the most bytes that it held behind a layer."""
    model.set_attn_implementation(attention)
    cache = HFCache(model.config, dtype="f32")
    held = []
    hooks = [layer.register_forward_hook(lambda *_: held.append(cache._cache.nbytes)) for layer in model.model.layers]
    try:
        return generate(model, cache, ids, **options), cache, max(held)
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
def test_a_prompt_takes_its_windows_and_a_piece(model, attention):
    ids = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("sdpa")
    theirs = DynamicCache(config=model.config)
    text = generate(model, theirs, ids)
    token = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers) // (WINDOW - 1)
    ours, cache, most = generate_and_watch(model, ids, attention)
    assert torch.equal(ours, text)
    kept, bookkeeping = WINDOW + RESUME + 2 * 64, 64_000
    assert cache.nbytes <= token * kept + bookkeeping
    assert most <= token * (kept + PREFILL_TOKENS) + bookkeeping


@pytest.mark.parametrize(
    ("policy", "block_size"),
    [
        (None, 64),  # the model's window is 256
        (FullAttention(), 256),
        (SlidingWindow(1), 64),
        (SlidingWindow(600), 128),
        (SlidingWindow(4096), 256),
        ([FullAttention(), SlidingWindow(1024), ChunkedAttention(300), FullAttention()], 64),
    ],
)
def test_two_blocks_are_at_most_half_a_window(model, policy, block_size):
    cache = HFCache(model.config, policy=policy)
    assert cache._cache.block_size == block_size
    assert block_size_for(cache.policy) == block_size


def test_rows_of_unequal_length(model):
    """The first pieces of a row may be nothing but padding."""
    ids = torch.randint(1, 64, (2, 1_300), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :700] = 0
    model.set_attn_implementation("sdpa")
    text = generate(model, DynamicCache(config=model.config), ids, attention_mask=mask)
    ours, _, _ = generate_and_watch(model, ids, "kvcache", attention_mask=mask)
    assert torch.equal(ours, text)


def test_a_prompt_whose_states_are_shown_is_fed_at_once(model):
    ids = torch.randint(0, 64, (1, 1_000), generator=torch.Generator().manual_seed(3))
    model.set_attn_implementation("kvcache")
    cache = HFCache(model.config)
    result = generate(model, cache, ids, return_dict_in_generate=True, output_hidden_states=True)
    assert result.hidden_states[0][0].shape[1] == 1_000
    assert model.generation_config.prefill_chunk_size is None

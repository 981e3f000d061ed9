"""Models of images that count positions thrice (Qwen2-VL): for a text alone, all three are its columns."""

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, make, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

IMAGE = 90  # the token in the place of a piece of an image
LONG = 30
GREEDY = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
EYES = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}


@pytest.fixture(scope="module")
def model():
    text = BASE | {"num_hidden_layers": 2, "rope_parameters": ROPE}
    fields = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=EYES, **fields)
    made = make(config, transformers.AutoModelForImageTextToText)
    made.set_attn_implementation("kvcache")
    return made


@pytest.fixture
def prefix(model):
    return kvcache.PrefixCache(HFCache.make_kv_cache(model.config, "f32", block_size=4), fingerprint="a model")


def text_of(rows, length=LONG):
    return random_tokens(rows, length).clamp(max=IMAGE - 1)


def show_an_image(model):
    """Let the model see an image: it then notes how far later positions are behind their columns."""
    tokens = text_of(1, 40)
    tokens[:, 5:30] = IMAGE
    seen = {"pixel_values": torch.randn(100, 3 * 2 * 4 * 4), "image_grid_thw": torch.tensor([[1, 10, 10]])}
    model.generate(tokens, mm_token_type_ids=(tokens == IMAGE).int(), **seen, **GREEDY)
    assert (model.model.rope_deltas < 0).all()


@pytest.mark.parametrize("padding", [0, 3])
def test_a_prompt_without_an_image_is_matched(model, prefix, padding):
    tokens = text_of(2)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    want = model.generate(tokens, attention_mask=mask, **GREEDY)
    show_an_image(model)
    for turn in range(2):
        options = {"cache_implementation": "kvcache", "cache_config": {"prefix": prefix}, "attention_mask": mask}
        assert torch.equal(model.generate(tokens, **options, **GREEDY), want)
        assert prefix.stats.matched == turn * (2 * (LONG - 1) - padding)


@torch.inference_mode()
def test_rows_at_the_positions_of_another_text_are_not_kept(model, prefix):
    """The model counts on from the last image that it was shown, if it is called with rows in the cache."""
    tokens = text_of(1)
    model.model.rope_deltas = None
    cache = HFCache(model.config, prefix=prefix)
    cache.acquire(tokens[:, :10])
    model(tokens[:, :10], past_key_values=cache)
    cache.release(tokens[:, :10])
    show_an_image(model)
    cache = HFCache(model.config, prefix=prefix)
    assert cache.acquire(tokens) == 10
    model(tokens[:, 10:], past_key_values=cache)
    cache.release(tokens)
    assert prefix.lookup([*tokens[0].tolist(), 1]) == 10
    cache = HFCache(model.config, prefix=prefix)
    assert cache.acquire(tokens) == 10
    positions = torch.arange(10, LONG).expand(3, 1, -1)
    got = model(tokens[:, 10:], position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(got, model(tokens).logits[:, 10:], rtol=0, atol=1e-4)
    cache.release(tokens)
    assert prefix.lookup([*tokens[0].tolist(), 1]) == LONG

"""Models with sparse attention that are shown images, beside their own cache."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.sparse_models import CHANGES, POOLED, off, their_cache, tokens_of  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.told import CACHE  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers, and that dense tensors are used

IMAGE = 95  # the token in the place of a piece of an image
EYES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
DEEP = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
SEEING = {  # fields of the configuration, the numbers of a patch, and the tokens of an image of 8 x 8 patches
    "hy_v4_vl": (
        {
            "text_config": CHANGES["hy_v4"] | TURNS,
            "vision_config": {**EYES, "num_key_value_heads": 2, "out_hidden_size": 64, "max_image_size": 64},
            "image_token_id": IMAGE,
            "video_token_id": IMAGE + 1,
        },
        3 * 4 * 4,
        20,
    ),
    "minimax_m3_vl": (
        {
            "text_config": CHANGES["minimax_m3_vl_text"],
            "vision_config": {**EYES, "image_size": 32},
            "image_token_index": IMAGE,
            "video_token_index": IMAGE + 1,
            "projector_hidden_size": 64,
            "merged_hidden_size": 256,
        },
        2 * 3 * 4 * 4,
        16,
    ),
    "qwen4_exp": (
        {
            "text_config": POOLED["qwen4_exp_text, recurrent"],
            "vision_config": {**DEEP, "num_position_embeddings": 256},
            "image_token_id": IMAGE,
            "video_token_id": IMAGE + 1,
        },
        2 * 3 * 4 * 4,
        16,
    ),
    "glm5_next": (
        {
            "text_config": POOLED["glm5_next, recurrent"],
            "vision_config": {**DEEP, "image_size": 32, "projection_intermediate_size": 32},
            "image_token_id": IMAGE,
            "video_token_id": IMAGE + 1,
        },
        2 * 3 * 4 * 4,
        16,
    ),
}


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("name", SEEING)
def test_images(name, options):
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("a later transformers has it")
    fields, patch, count = SEEING[name]
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**fields)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.data.normal_(0, 0.08)
    tokens = tokens_of(2, 45).clamp(max=IMAGE - 1)
    tokens[0, 5 : 5 + count] = tokens[1, 15 : 15 + count] = IMAGE
    seen = {"pixel_values": torch.randn(2 * 64, patch), "image_grid_thw": torch.tensor([[1, 8, 8]] * 2)}
    if name in ("hy_v4_vl", "qwen4_exp"):
        seen["mm_token_type_ids"] = (tokens == IMAGE).int()
    made = []
    for attention in ("eager", "kvcache"):
        model.set_attn_implementation(attention)
        cache = their_cache(model) if attention == "eager" else HFCache(model.config, dtype="f32")
        given = {**seen, **options, "attention_mask": torch.ones_like(tokens), CACHE: cache, "do_sample": False}
        given |= {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 10, "pad_token_id": 0}
        made.append(torch.stack(model.generate(tokens, **given, eos_token_id=None).logits))
    assert off(made[1], made[0]) < 4e-6
    calls = cache.stats()["calls"]
    assert calls["kernel"] == 10 * len(cache.policy)
    assert calls["dense"] == calls["fallback"] == 0

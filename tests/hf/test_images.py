"""Images in each turn: the same picture and text match what a cache holds, and no other picture does."""

import contextlib
import copy

import pytest

import kvcache

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, make, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

BLOCK = 4
IMAGE = 90  # the token in the place of a piece of an image
GREEDY = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0, "suppress_tokens": [0, *range(IMAGE, 97)]}
TEXT = BASE | {"num_hidden_layers": 2, "initializer_range": 0.3}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0}
ROPE = {"rope_parameters": ROPE}
CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 4, "image_size": 16, "projection_dim": 32}  # fmt: skip
DEEP = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64}
PLACES = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip


def grids(num, seed, patch):
    """Return images of 4 x 4 patches, as models take them that count height and width; 4 tokens each."""
    pixels = torch.randn(num, 16, patch, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels.flatten(0, 1), "image_grid_thw": torch.tensor([[1, 4, 4]] * num)}


def plain(num, seed):
    return {"pixel_values": torch.randn(num, 3, 16, 16, generator=torch.Generator().manual_seed(seed))}


def flat_patches(num, seed):
    pixels = torch.randn(num, 16, 48, generator=torch.Generator().manual_seed(seed))
    shapes = torch.tensor([[4, 4]] * num)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": torch.ones(num, 16).long()}


def of_rows(num, seed):
    """Return images as models take them that have an axis of rows and one of a row's images."""
    return {name: value[None] for name, value in plain(num, seed).items()}


def tiles(num, seed):
    pixels = torch.randn(num, 5, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]] * num)}


FAMILIES = {  # the configuration, how to make images, and the tokens of one
    "llava": (
        lambda: transformers.LlavaConfig(
            text_config={"model_type": "llama", **TEXT}, vision_config=CLIP, image_token_id=IMAGE
        ),
        plain,
        16,
    ),
    "qwen2_vl": (
        lambda: transformers.Qwen2VLConfig(
            text_config=TEXT | ROPE,
            vision_config=DEEP | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1},
            **PLACES,
        ),
        lambda num, seed: grids(num, seed, 96),
        4,
    ),
    "qwen3_vl": (
        lambda: transformers.Qwen3VLConfig(
            text_config=TEXT | ROPE,
            vision_config=DEEP | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            **PLACES,
        ),
        lambda num, seed: grids(num, seed, 96),
        4,
    ),
    "qwen3_5": (
        lambda: transformers.Qwen3_5Config(
            text_config=TEXT | ROPE | LINEAR, vision_config=DEEP | {"num_position_embeddings": 16}, **PLACES
        ),
        lambda num, seed: grids(num, seed, 96),
        4,
    ),
    "lfm2_vl": (
        lambda: transformers.Lfm2VlConfig(
            text_config={"model_type": "lfm2", **TEXT, "layer_types": ["conv", "full_attention"]},
            vision_config=CLIP | {"model_type": "siglip2_vision_model", "num_patches": 16},
            image_token_id=IMAGE,
        ),
        flat_patches,
        4,
    ),
    "smolvlm": (
        lambda: transformers.SmolVLMConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config=CLIP | {"model_type": "smolvlm_vision"},
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        of_rows,
        4,
    ),
    "llava_next": (
        lambda: transformers.LlavaNextConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config=CLIP,
            image_token_id=IMAGE,
            image_grid_pinpoints=[[32, 32]],
        ),
        tiles,
        16 + 64 + 8,
    ),
    "glm4v": (
        lambda: transformers.Glm4vConfig(
            text_config=TEXT | ROPE,
            vision_config=DEEP | {"image_size": 16, "intermediate_size": 64},
            **PLACES | {"image_start_token_id": 92, "image_end_token_id": 93},
        ),
        lambda num, seed: grids(num, seed, 96),
        4,
    ),
    "internvl": (
        lambda: transformers.InternVLConfig(
            text_config={"model_type": "qwen2", **TEXT},
            vision_config={**CLIP, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            image_token_id=IMAGE,
        ),
        plain,
        4,
    ),
}


class Told:
    """A model, its prefix cache, and prompts with images."""

    def __init__(self, name):
        make_config, self.images, self.count = FAMILIES[name]
        self.model = make(make_config(), transformers.AutoModelForImageTextToText)
        self.plain = copy.deepcopy(self.model)
        self.model.set_attn_implementation("kvcache")
        self.has_types = "image_grid_thw" in self.images(1, 0)
        state_bytes = HFCache.state_bytes(self.model)
        memory = HFCache.make_kv_cache(self.model.config, "f32", block_size=BLOCK)
        more = {"state_bytes": state_bytes} if state_bytes else {}
        self.prefix = kvcache.PrefixCache(memory, fingerprint=name, **more)
        self.feeds_all = not state_bytes

    def show(self, *parts, rows=1):
        """Return tokens, and the arguments for their images; a part is a number of tokens, or an image's seed."""
        tokens, seeds = [], []
        for i, part in enumerate(parts):
            if isinstance(part, str):
                tokens.append(torch.full((rows, self.count), IMAGE))
                seeds.append(int(part))
            else:
                tokens.append(random_tokens(rows, part, seed=i).clamp(max=IMAGE - 1))
        return self.given(torch.cat(tokens, 1), seeds)

    def given(self, tokens, seeds):
        made = [self.images(1, seed) for seed in seeds]
        axis = int(self.images is of_rows)
        given = (
            {name: torch.cat([image[name] for image in made] * len(tokens), axis) for name in made[0]} if made else {}
        )
        return tokens, given | ({"mm_token_type_ids": (tokens == IMAGE).int()} if self.has_types else {})

    @torch.inference_mode()
    def logits(self, tokens, given):
        """Return the logits of a pass of transformers' own, without a cache."""
        return self.plain(tokens, use_cache=False, **given).logits

    def answer(self, tokens, given, prefixed=True, **options):
        """Return what is generated, and how many tokens were matched."""
        before = self.prefix.stats.matched
        if prefixed:
            options |= {"cache_implementation": "kvcache", "cache_config": {"prefix": self.prefix}}
        else:
            options["past_key_values"] = HFCache(self.model.config, "f32")
        made = self.model.generate(tokens, **given, **GREEDY | options)
        return made, self.prefix.stats.matched - before

    def check(self, tokens, given, matched, **options):
        """Generate with the prefix cache: the text must be the same as without. Return it.

        A model with recurrent layers may match less than `matched`: it resumes where a state was kept.
        """
        want, _ = self.answer(tokens, given, prefixed=False, **options)
        got, found = self.answer(tokens, given, **options)
        assert torch.equal(got, want)
        assert found == matched or (self.prefix.state_bytes and found < matched)
        return got


@pytest.fixture(params=["llava", "qwen2_vl", "qwen3_5"])
def told(request):
    return Told(request.param)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "smolvlm"])  # whose images match all or none
def test_the_next_turn_and_a_picture_in_it(name):
    told = Told(name)
    first = told.check(*told.show(7, "1", 9), 0)
    more = torch.cat([first, random_tokens(1, 6, seed=5).clamp(max=IMAGE - 1)], 1)
    second = told.check(*told.given(more, [1]), first.shape[1] - 1)
    image = torch.full((1, told.count), IMAGE)
    more = torch.cat([second, image, random_tokens(1, 6, seed=6).clamp(max=IMAGE - 1)], 1)
    third = told.check(*told.given(more, [1, 2]), second.shape[1] - 1)
    told.check(*told.given(more, [1, 3]), second.shape[1])
    told.check(*told.given(torch.cat([third, third[:, :3]], 1), [1, 2]), third.shape[1] - 1)


def test_an_image_that_is_shown_again_in_a_cache_that_holds_it(told):
    tokens, given = told.show(7, "1", 9)
    cache = HFCache(told.model.config, prefix=told.prefix)
    first = told.model.generate(tokens, past_key_values=cache, **given, **GREEDY)
    more, given = told.given(torch.cat([first, tokens[:, 7:]], 1), [1, 2])
    want, _ = told.answer(more, given, prefixed=False)
    assert torch.equal(told.model.generate(more, past_key_values=cache, **given, **GREEDY), want)
    cache.reset()
    told.check(more, given, tokens.shape[1])


def converse(told, between, **options):
    """Converse with all images in each turn; return how many tokens were fed. An image comes in turns 0, 2 and 3.

    Logits must be those of a pass without a cache. `between` is called before each turn, and returns more options.
    """
    fed, seeds, tokens = [], [], random_tokens(1, 7, seed=0).clamp(max=IMAGE - 1)
    told.model.get_input_embeddings().register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[-1]))
    options |= {"output_logits": True, "return_dict_in_generate": True}
    counts = []
    for turn in range(5):
        if turn in (0, 2, 3):
            seeds.append(turn % 3)  # the first one again, and another one
            tokens = torch.cat([tokens, torch.full((1, told.count), IMAGE)], 1)
        tokens, given = told.given(torch.cat([tokens, random_tokens(1, 6, seed=turn).clamp(max=IMAGE - 1)], 1), seeds)
        more = between(turn, tokens, given)
        fed.clear()
        made = told.model.generate(tokens, **given, **GREEDY | options | more)
        counts.append(fed[0])
        whole, given = told.given(made.sequences[:, :-1], seeds)
        want = told.logits(whole, given)[:, tokens.shape[1] - 1 :]
        torch.testing.assert_close(torch.stack(made.logits, 1), want, rtol=0, atol=2e-3)
        tokens = made.sequences
    return counts


@pytest.mark.parametrize("name", FAMILIES)
def test_all_images_in_each_turn_of_a_cache_of_the_user(name, tmp_path):
    """Which is saved, cut and interrupted between turns."""
    told = Told(name)
    caches = [HFCache(told.model.config, "f32")]

    def between(turn, tokens, given):
        cache = caches[-1]
        if turn == 2:
            cache.save(tmp_path / "chat")
            caches.append(HFCache.load(told.model.config, tmp_path / "chat"))
        if turn == 3 and told.feeds_all:
            cache.crop(-3)
        if turn == 4:
            stop_in_the_last_layer(told, tokens, given, cache)
        return {"past_key_values": caches[-1]}

    fed = converse(told, between)
    if name != "smolvlm":  # whose images are known all or none
        assert fed[1] == 7
        assert fed[2] == 7 + told.count
        assert fed[3] <= 10 + told.count


def stop_in_the_last_layer(told, tokens, given, cache):
    """Have the last layer interrupt a turn."""

    def stop(*_):
        raise KeyboardInterrupt

    layer = told.model.base_model.get_decoder().layers[-1]
    hook = layer.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        told.model.generate(tokens, past_key_values=cache, **given, **GREEDY)
    hook.remove()


def test_images_that_are_not_given(told):
    """Their tokens would be fed as text. That is refused wherever the cache does not hold them."""
    tokens, given = told.show(7, "1", 9)
    types = {name: value for name, value in given.items() if name == "mm_token_type_ids"}
    cache, text = HFCache(told.model.config, "f32"), "give the images of the whole text"
    first = told.model.generate(tokens, past_key_values=cache, **given, **GREEDY)
    edited = torch.cat([tokens[:, :3] + 1, tokens[:, 3:]], 1)
    own = {"past_key_values": HFCache(told.model.config, "f32")}
    prefixed = {"cache_implementation": "kvcache", "cache_config": {"prefix": told.prefix}}
    calls = [(edited, {"past_key_values": cache}), (tokens, own), (tokens, prefixed), (tokens, prefixed)]
    if told.feeds_all:  # else transformers has no drafts
        calls += [(tokens, own | {"prompt_lookup_num_tokens": 3})]
    for prompt, options in calls:
        with pytest.raises(ValueError, match=text):
            told.model.generate(prompt, **types, **options, **GREEDY)
    assert cache.get_seq_length() == first.shape[1] - 1
    kvcache.hf.enable(told.model, "f32")
    with pytest.raises(ValueError, match=text):
        told.model.generate(tokens, **types, **GREEDY)
    cache.reset()
    with pytest.raises(ValueError, match=text):
        told.model.generate(tokens, past_key_values=cache, **types, **GREEDY)
    assert told.prefix.stats.sequences == 0
    assert told.model.generate(tokens[:, :7], past_key_values=cache, **GREEDY).shape == (1, 12)


def test_a_new_image_alone_is_refused(told):
    """The old one may be left out as long as no other comes."""
    tokens, given = told.show(7, "1", 9)
    cache = HFCache(told.model.config, "f32")
    first = told.model.generate(tokens, past_key_values=cache, **given, **GREEDY)
    more = torch.cat([first, tokens[:, 7:]], 1)
    types = {"mm_token_type_ids": (more == IMAGE).int()} if told.has_types else {}
    with pytest.raises(ValueError, match="give all images of the text, in its order"):
        told.model.generate(more, past_key_values=cache, **told.images(1, 2), **types, **GREEDY)
    want, _ = told.answer(*told.given(more, [1, 2]), prefixed=False)
    assert torch.equal(told.model.generate(more, past_key_values=cache, **told.given(more, [1, 2])[1], **GREEDY), want)


@torch.inference_mode()
def test_a_prompt_that_was_cut():
    """What follows the cut stands at other positions than the image did."""
    told = Told("qwen2_vl")
    tokens, given = told.show(7, "1", 9)
    for end in (3, 9, 11, 15):
        cache = HFCache(told.model.config, prefix=told.prefix)
        told.model.generate(tokens, past_key_values=cache, **given, **GREEDY)
        cache.crop(end - cache.get_seq_length())
        text = torch.cat([tokens[:, :end], tokens[:, :7]], 1)
        positions = torch.arange(end, end + 7).expand(4, 1, -1)
        told.model(text[:, end:], past_key_values=cache, position_ids=positions)
        cache.release(text)
        known = told.prefix.lookup([*text[0].tolist(), 1])
        assert known == (10 if end == 3 else 7)


def test_another_process_finds_an_image_in_the_store(told):
    memory = HFCache.make_kv_cache(told.model.config, "f32", block_size=BLOCK)
    store, more = {}, {"timeout": 60} | ({"state_bytes": told.prefix.state_bytes} if told.prefix.state_bytes else {})
    told.prefix = kvcache.PrefixCache(told.prefix.cache, fingerprint="stored", store=store, **more)
    prompt = told.show(7, "1", 9)
    told.check(*prompt, 0)
    assert told.prefix.flush(60)
    told.prefix = kvcache.PrefixCache(memory, fingerprint="stored", store=store, **more)
    num_full = (prompt[0].shape[1] - 1) // BLOCK * BLOCK
    told.check(*told.show(7, "2", 9), 7 // BLOCK * BLOCK)
    told.check(*prompt, num_full)


def test_a_match_that_ends_within_an_image(told):
    """It ends where a block does: a model is fed the features of the other tokens alone."""
    tokens, given = told.show(3, "1", 1)
    told.answer(tokens, given)
    told.prefix.evict(tokens.shape[1] + 4 - BLOCK)  # the last token was not fed
    told.check(tokens, given, BLOCK)


def test_rows_with_two_pictures_and_one():
    """The model's tensor has an element for each row: all of its images stand for all of its tokens."""
    told = Told("smolvlm")
    tokens, given = told.show(7, "1", 3, "2", 9)
    other = tokens.clone()
    other[:, 7 + told.count + 3 : -9] = 5
    tokens = torch.cat([tokens, other])
    pixels = given["pixel_values"]
    padded = torch.stack([pixels[0, 0], 0 * pixels[0, 0]])[None]
    for matched in (0, 2 * (tokens.shape[1] - 1)):
        told.check(tokens, {"pixel_values": torch.cat([pixels, padded])}, matched)
    pixels = told.show("1", "3")[1]["pixel_values"]
    told.check(tokens, {"pixel_values": torch.cat([pixels, padded])}, 2 * 7)


def test_beams_of_a_model_that_orders_images_by_itself():
    told = Told("glm4v")
    tokens, given = told.show(7, "1", 3, "2", 9, rows=2)
    for _ in range(2):
        told.check(tokens, given, 0, num_beams=3)
    told.check(*told.show(7, "1", 3, "2", 9), 0)


def test_a_video_and_an_image():
    """Each of the two is known again without the other."""
    told = Told("qwen2_vl")

    def show(video, image):
        tokens, given = told.show(7, "0", 9, str(image), 5)
        tokens[:, 7:11] = 91
        frames = grids(1, video, 96)
        given |= {"pixel_values_videos": frames["pixel_values"], "video_grid_thw": frames["image_grid_thw"]}
        given |= grids(1, image, 96)
        given["mm_token_type_ids"] = (tokens == IMAGE).int() + 2 * (tokens == 91).int()
        return tokens, given

    tokens, _ = show(1, 2)
    told.check(*show(1, 2), 0)
    told.check(*show(1, 2), tokens.shape[1] - 1)
    told.check(*show(1, 3), 7 + 4 + 9)
    told.check(*show(3, 2), 7)


def test_types_that_do_not_say_where_images_are():
    """The model counts height and width where they say so."""
    told = Told("qwen2_vl")
    tokens, given = told.show(7, "1", 9)
    told.check(tokens, given, 0)
    given["mm_token_type_ids"] = (tokens == tokens[0, 2]).int() | given["mm_token_type_ids"]
    before = told.prefix.stats.matched
    with contextlib.suppress(RuntimeError, ValueError):
        told.answer(tokens, given)
    assert told.prefix.stats.matched == before

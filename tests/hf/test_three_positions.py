"""Models of images that count positions thrice (Qwen2-VL): for a text alone, all three are its columns."""

import contextlib
import itertools

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, make, prefix_for, random_tokens  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

IMAGE = 90  # the token in the place of a piece of an image
LONG = 30
GREEDY = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
EYES = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1, "patch_size": 4}


TEXT = BASE | {"num_hidden_layers": 2, "rope_parameters": ROPE}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 16, "linear_value_head_dim": 16}  # fmt: skip
DEEP = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
        "num_position_embeddings": 16}  # fmt: skip
PLACES = {"image_token_id": IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}


class Stop(KeyboardInterrupt):
    """Raised in the middle of a pass."""


def model_for(config):
    made = make(config, transformers.AutoModelForImageTextToText)
    made.set_attn_implementation("kvcache")
    return made


@pytest.fixture(scope="module")
def model():
    return model_for(transformers.Qwen2VLConfig(text_config=TEXT, vision_config=EYES, **PLACES))


@pytest.fixture(scope="module")
def hybrid():
    rope = {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
    return model_for(transformers.Qwen3_5Config(text_config=TEXT | rope | LINEAR, vision_config=DEEP, **PLACES))


@pytest.fixture
def prefix(model):
    return prefix_for(model, block_size=4)


def text_of(rows, length=LONG):
    return random_tokens(rows, length).clamp(max=IMAGE - 1)


def with_image(tokens, seed=0):
    """Return tokens with an image in the middle, and what `generate` is given of it."""
    tokens = tokens.clone()
    tokens[:, 5:30] = IMAGE
    pixels = torch.randn(len(tokens) * 100, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(seed))
    sizes = torch.tensor([[1, 10, 10]] * len(tokens))
    return tokens, {"pixel_values": pixels, "image_grid_thw": sizes, "mm_token_type_ids": (tokens == IMAGE).int()}


def show_an_image(model):
    """Let the model see an image: it then notes how far later positions are behind their columns."""
    tokens, image = with_image(text_of(1, 40))
    model.generate(tokens, **image, **GREEDY)
    assert (model.model.rope_deltas < 0).all()


def show_another(model, kind):
    """Let the model see something else than "the same" image that it saw last; "nothing": as in another process."""
    if kind == "nothing":
        model.model.rope_deltas = None
    elif kind == "an image":
        show_an_image(model)
        model.model.rope_deltas -= 3  # of another size
    elif kind == "a text":
        answer(model, HFCache(model.config, "f32"), text_of(1))


def answer(model, cache, tokens, **options):
    """Return the logits of an answer, and the whole text."""
    options = {"output_logits": True, "return_dict_in_generate": True, **GREEDY, **options}
    got = model.generate(tokens, past_key_values=cache, **options)
    return torch.stack(got.logits), got.sequences


def stop_in(model, layer, number):
    """Have the call of this number of a layer, from 0 on, raise before it does anything; return the hook."""
    calls = itertools.count()

    def stop(*_):
        if next(calls) == number:
            raise Stop

    return model.model.language_model.layers[layer].register_forward_pre_hook(stop)


def check_next_turn(model, cache, more, image):
    """Check the answer to a text whose image the cache holds, whatever image the model was shown last."""
    types = {"mm_token_type_ids": (more == IMAGE).int()}
    got, _ = answer(model, cache, more, **types)
    want, _ = answer(model, HFCache(model.config, "f32"), more, **image | types)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("kinds", ["image image", "image other", "image edited", "image text image", "text image text"])
def test_texts_behind_an_image(model, prefix, kinds, prefixed, num_beams):
    """The model counts positions before the cache is cut to what texts have in common, and on from the last image."""
    tokens = text_of(2, 40)
    texts = {"text": (tokens, {}), "image": with_image(tokens), "other": with_image(tokens, seed=1)}
    texts["edited"] = (texts["image"][0].clone(), texts["image"][1])
    texts["edited"][0][:, 35] = 7
    cache = HFCache(model.config, "f32", prefix=prefix if prefixed else None)
    for kind in kinds.split():
        text, image = texts[kind]
        got, _ = answer(model, cache, text, num_beams=num_beams, **image)
        behind = model.model.rope_deltas
        want, _ = answer(model, HFCache(model.config, "f32"), text, num_beams=num_beams, **image)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
        assert torch.equal(model.model.rope_deltas, behind)


def test_a_text_goes_on_behind_its_image_which_is_not_shown_again(model):
    text, image = with_image(text_of(1, 40))
    cache = HFCache(model.config, "f32")
    _, first = answer(model, cache, text, **image)
    check_next_turn(model, cache, torch.cat([first, text_of(1, 6)], 1), image)


@pytest.mark.parametrize("kind", ["edited", "shorter", "interrupted", "loaded"])
@pytest.mark.parametrize("name", ["model", "hybrid"])
def test_a_text_whose_image_is_lacking(request, tmp_path, name, kind):
    """The cache would feed it from its beginning, without the image. That is refused until the image is given."""
    model = request.getfixturevalue(name)
    text, image = with_image(text_of(1, 40))
    cache = HFCache(model.config, "f32")
    hook = stop_in(model, 0, 2 if kind == "interrupted" else -1)
    with pytest.raises(Stop) if kind == "interrupted" else contextlib.nullcontext():
        answer(model, cache, text, **image)
    hook.remove()
    if kind == "loaded":
        cache.save(tmp_path / "chat")
        cache = HFCache.load(model.config, tmp_path / "chat")
    more = text[:, :38] if kind == "shorter" else torch.cat([text[:, :35], text_of(1, 9)], 1)
    held = cache.get_seq_length()
    types = {"mm_token_type_ids": (more == IMAGE).int()}
    for _ in range(2):
        with pytest.raises(ValueError, match=r"input_ids.*of images.*give the images of the whole text"):
            answer(model, cache, more, **types)
        assert cache.get_seq_length() == held
    got, _ = answer(model, cache, more, **image | types)
    want, _ = answer(model, HFCache(model.config, "f32"), more, **image | types)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_conversations_take_turns(model):
    """Each goes on behind its own image, or behind none."""
    tokens = text_of(2, 40)
    texts = {"text": (tokens, {}), "image": with_image(tokens)}
    caches = {name: HFCache(model.config, "f32") for name in texts}
    for _ in range(2):
        for name, (text, image) in texts.items():
            cache = caches[name]
            is_first = not cache.get_seq_length()
            types = {"mm_token_type_ids": (text == IMAGE).int()} if image else {}
            got, told = answer(model, cache, text, **(image if is_first else types))
            behind, model.model.rope_deltas = model.model.rope_deltas, None
            want, _ = answer(model, HFCache(model.config, "f32"), text, **image | types)
            model.model.rope_deltas = behind
            torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
            texts[name] = torch.cat([told, tokens[:, :6]], 1), image


@pytest.mark.parametrize("shown", ["the same", "a text", "an image", "nothing"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_interrupted_turn_behind_an_image(hybrid, shown, number):
    """The cache goes back to before the turn by itself. The image stands there, and the model may have seen others."""
    text, image = with_image(text_of(1, 40))
    cache = HFCache(hybrid.config, "f32")
    _, first = answer(hybrid, cache, text, **image)
    more = torch.cat([first, text_of(1, 6)], 1)
    hook = stop_in(hybrid, 1, number)
    with pytest.raises(Stop):
        answer(hybrid, cache, more, mm_token_type_ids=(more == IMAGE).int())
    hook.remove()
    show_another(hybrid, shown)
    check_next_turn(hybrid, cache, torch.cat([more, text_of(1, 5)], 1), image)


@pytest.mark.parametrize("shown", ["the same", "a text", "an image", "nothing"])
@pytest.mark.parametrize("name", ["model", "hybrid"])
def test_a_saved_cache_behind_an_image(request, tmp_path, name, shown):
    """Another process goes on with it, whose model has not seen the image."""
    model = request.getfixturevalue(name)
    text, image = with_image(text_of(2, 40))
    cache = HFCache(model.config, "f32")
    _, first = answer(model, cache, text, **image)
    cache.save(tmp_path / "chat")
    show_another(model, shown)
    loaded = HFCache.load(model.config, tmp_path / "chat")
    check_next_turn(model, loaded, torch.cat([first, text_of(2, 6)], 1), image)


def test_a_loaded_cache_that_is_cut(model, tmp_path):
    """The cut is before the image, and then behind it."""
    text, image = with_image(text_of(1, 40))
    cache = HFCache(model.config, "f32")
    answer(model, cache, text, **image)
    cache.save(tmp_path / "chat")
    for end in (3, 33):
        show_another(model, "an image")
        loaded = HFCache.load(model.config, tmp_path / "chat")
        loaded.crop(end - loaded.get_seq_length())
        more = torch.cat([text[:, :end], text_of(1, 7)], 1)
        check_next_turn(model, loaded, more, image if end > 5 else {})


def test_a_failed_piece_before_an_image(model):
    """The cache holds tokens before the image alone, whose positions are their columns."""
    text, image = with_image(text_of(1, 40))
    cache = HFCache(model.config, "f32")
    hook = stop_in(model, 0, 1)
    with pytest.raises(Stop):
        answer(model, cache, text, prefill_chunk_size=4, **image)
    hook.remove()
    assert cache.get_seq_length() == 4
    check_next_turn(model, cache, torch.cat([text[:, :4], text_of(1, 9)], 1), {})


def test_generate_behind_an_image_and_what_was_acquired(model, prefix):
    tokens = text_of(1)
    want, _ = answer(model, HFCache(model.config, "f32"), tokens)
    cache = HFCache(model.config, prefix=prefix)
    answer(model, cache, tokens)
    cache.release()
    show_an_image(model)
    assert cache.acquire(tokens) == LONG - 1
    got, _ = answer(model, cache, tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


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

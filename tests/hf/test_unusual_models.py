"""Models that touch the mask, the keys or the cache between the layers, as their own caches serve them."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from support.hf_pairs import BASE, MIXED, SLIDING, check_same, compare, make, play, random_tokens  # noqa: E402 - torch may be missing

from kvcache import NotSupportedError  # noqa: E402 - as above
from kvcache.hf import HFEncoderDecoderCache  # noqa: E402 - it imports those

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers

VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 20,
    "patch_size": 5,
}
IMAGE = 95  # the token in the place of a piece of an image; further ones of images and sounds follow
TEXT = {**BASE, "initializer_range": 0.2}
AUDIO = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [16, 8],
    "conv_kernel_size": 3,
    "attention_chunk_size": 4,
    "attention_context_left": 5,
    "attention_context_right": 0,
    "output_proj_dims": 32,
}


def paligemma(kind="gemma"):
    text = {**TEXT, "model_type": kind}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=VISION, image_token_index=IMAGE, projection_dim=64
    )
    return config, 16, {"pixel_values": torch.randn(2, 3, 20, 20)}


def gemma4():
    text = {**TEXT, **MIXED, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4Config(
        text_config=text,
        vision_config=None,
        audio_config=AUDIO,
        audio_token_id=IMAGE,
        image_token_id=96,
        video_token_id=94,
    )
    sound = {"input_features": torch.randn(2, 40, 16), "input_features_mask": torch.ones(2, 40, dtype=torch.bool)}
    return config, 10, sound


MULTIMODAL = {"paligemma": paligemma, "paligemma2": lambda: paligemma("gemma2"), "gemma4": gemma4}


@pytest.mark.parametrize("attention", ["kvcache", "eager"])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_images_and_sounds(name, attention):
    """A prompt with an image or a sound, and padding."""
    torch.manual_seed(3)
    config, pieces, given = MULTIMODAL[name]()
    model = make(config, transformers.AutoModelForMultimodalLM)
    tokens = random_tokens(2, 8).clamp(max=90)
    tokens = torch.cat([tokens[:, :2], torch.full((2, pieces), IMAGE), tokens[:, 2:]], 1)
    mask = torch.ones_like(tokens)
    tokens[0, :2] = mask[0, :2] = 0

    def speak(cache):
        options = {"do_sample": False, "max_new_tokens": 6, "past_key_values": cache, "output_logits": True}
        options |= {"return_dict_in_generate": True, "suppress_tokens": [91, 92, 93, 94, 95, 96]}
        made = model.generate(tokens, attention_mask=mask, **given, **options)
        yield torch.stack(made.logits)
        yield made.sequences

    check_same(model, speak, attention)


TEXTS = {
    "diffllama": lambda: transformers.DiffLlamaConfig(**BASE),
    "doge": lambda: transformers.DogeConfig(**BASE, num_experts=4, num_experts_per_tok=2),
    "hrm": lambda: transformers.HrmTextConfig(
        **{**BASE, "num_hidden_layers": 8, "num_key_value_heads": 4, "initializer_range": 0.1}, num_layers_per_stack=1
    ),
}


def test_a_prefix_that_is_seen_both_ways():
    """The first pass is told from later ones: only its prefix is seen both ways."""
    model, tokens = make(TEXTS["hrm"]()), random_tokens(2, 14)
    kinds = torch.zeros_like(tokens)
    kinds[:, :5] = 1

    def both(cache):
        for begin, end in ((0, 9), (9, 10), (10, 14)):
            part = {"token_type_ids": kinds[:, begin:end], "past_key_values": cache}
            assert cache.is_initialized == (begin > 0)
            yield model(tokens[:, begin:end], **part).logits

    check_same(model, both)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softcap_and_sinks_without_a_cache(name):
    """The attention alone caps scores and has sinks, as the model's own."""
    config = {
        "gemma2": lambda: transformers.Gemma2Config(**SLIDING),
        "gpt_oss": lambda: transformers.GptOssConfig(**SLIDING, num_local_experts=4, num_experts_per_tok=2),
    }[name]()
    model, tokens = make(config), random_tokens(2, 14)
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    for given in ({}, {"attention_mask": mask}):

        def alone(cache, given=given):
            yield model(tokens, use_cache=False, **given).logits[given.get("attention_mask", mask * 0 + 1) == 1]

        compare(play(model, None, "kvcache", alone), play(model, None, "eager", alone))


@pytest.mark.parametrize("name", ["sinks", "block_indices"])
def test_arguments_that_change_another_attention(name):
    """An argument that neither the kernels nor torch's attention have is refused, and not ignored."""
    attend, rows = transformers.AttentionInterface()["kvcache"], torch.zeros(1, 1, 2, 8)
    with pytest.raises(NotSupportedError, match=f"the attention 'kvcache' has no argument {name}: set the model's own"):
        attend(torch.nn.Identity(), rows, rows, rows, None, **{name: torch.zeros(1)})


# ---- Whisper

END, BEGIN, NO_TIMESTAMPS = 90, 91, 96
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": NO_TIMESTAMPS + 1 + 1501,
    "num_mel_bins": 8,
    "max_source_positions": 30,
    "max_target_positions": 40,
    "pad_token_id": 0,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": BEGIN,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "init_std": 0.3,
}


@pytest.fixture(scope="module")
def whisper():
    model = make(transformers.WhisperConfig(**SPEECH), transformers.AutoModelForSpeechSeq2Seq)
    model.generation_config.alignment_heads = [[0, 0], [1, 1]]
    model.generation_config.no_timestamps_token_id = NO_TIMESTAMPS
    model.generation_config.max_initial_timestamp_index = 50
    return model


ASKED = {
    "dictionary": {"return_dict_in_generate": True, "output_scores": True},
    "times": {"return_token_timestamps": True, "return_timestamps": True},
    "times of segments": {"return_timestamps": True, "return_segments": True, "return_dict_in_generate": True},
    "long": {"return_timestamps": True, "return_segments": True, "long": True},
    "beams": {"num_beams": 3, "return_dict_in_generate": True},
}


def tensors_of(made):
    """The tensors in what Whisper's `generate` returns, except a cache's tensors."""
    if isinstance(made, torch.Tensor):
        yield made
    elif isinstance(made, dict):
        for key in sorted(made):
            if key != "past_key_values":
                yield from tensors_of(made[key])
    elif isinstance(made, (list, tuple)):
        for each in made:
            yield from tensors_of(each)


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@pytest.mark.parametrize("asked", ASKED)
def test_whisper(whisper, asked, attention):
    """Dictionaries, times of tokens and segments, and a long sound in parts."""
    options = {**ASKED[asked]}
    frames = 150 if options.pop("long", False) else 60
    sound = torch.randn(2, 8, frames, generator=torch.Generator().manual_seed(4))
    given = {"attention_mask": torch.ones(2, frames, dtype=torch.long), "max_new_tokens": 12, "do_sample": False}

    def speak(cache):
        made = whisper.generate(sound, past_key_values=cache, **given, **options)
        yield from tensors_of(made)

    want = play(whisper, None, "sdpa", speak)  # each part in a cache of its own: in one, transformers' go wrong
    got = play(whisper, HFEncoderDecoderCache(whisper.config, dtype="f32"), attention, speak)
    assert want
    compare(got, want)

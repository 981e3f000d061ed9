"""Models with windows take the memory of their windows, also while a prompt runs."""

import copy

import pytest

from kvcache import ChunkedAttention, FullAttention, SlidingWindow

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, DynamicCache, MistralConfig  # noqa: E402 - torch may be missing

from kvcache.hf import HFCache  # noqa: E402 - it imports those
from kvcache.hf.policies import RESUME, block_size_for  # noqa: E402
from kvcache.hf.texts import PieceByPiece  # noqa: E402
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


def text_and_bound(model, ids):
    """Return what transformers' own cache makes of a prompt, and the most bytes of ours, after it and during it."""
    model.set_attn_implementation("sdpa")
    theirs = DynamicCache(config=model.config)
    text = generate(model, theirs, ids)
    token = sum(layer.keys.nbytes + layer.values.nbytes for layer in theirs.layers) // (WINDOW - 1)
    kept, bookkeeping = WINDOW + RESUME + 2 * 64, 64_000
    return text, token * kept + bookkeeping, token * (kept + PREFILL_TOKENS) + bookkeeping


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
def test_a_prompt_takes_its_windows_and_a_piece(model, attention):
    ids = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    text, most_after, most_during = text_and_bound(model, ids)
    ours, cache, most = generate_and_watch(model, ids, attention)
    assert torch.equal(ours, text)
    assert cache.nbytes <= most_after
    assert most <= most_during


@pytest.mark.parametrize("way", ["prompt lookup", "in pieces of 300", "draft", "embeddings", "padded embeddings"])
def test_a_prompt_takes_no_more_however_it_is_fed(model, way):
    ids = torch.randint(1, 64, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    text, _, most_during = text_and_bound(model, ids)
    options = {
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "in pieces of 300": {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 300},
        "draft": {"assistant_model": copy.deepcopy(model)},
        "embeddings": {"inputs_embeds": model.get_input_embeddings()(ids).detach()},
    }
    padded = torch.nn.functional.pad(options["embeddings"]["inputs_embeds"], (0, 0, 700, 0))
    mask = torch.ones(1, LENGTH + 700, dtype=torch.long)
    mask[:, :700] = 0
    options["padded embeddings"] = {"inputs_embeds": padded, "attention_mask": mask}
    sizes = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[1]))
    ours, _, most = generate_and_watch(model, None if "emb" in way else ids, "kvcache", **options[way])
    hook.remove()
    assert torch.equal(ours, text[:, LENGTH:] if "emb" in way else text)
    assert max(sizes) == (300 if "300" in way else PREFILL_TOKENS)
    assert most <= most_during


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


TOKENS = torch.ones(1, 1_100, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "lengths"),
    [
        ({}, [76, 512, 512]),
        ({"attention_mask": TOKENS, "position_ids": TOKENS}, [76, 512, 512]),
        ({"position_ids": TOKENS.expand(3, 1, 1_100)}, [76, 512, 512]),
        ({"logits_to_keep": 600}, [500, 600]),  # the guesses of a draft are in one piece
        ({"logits_to_keep": 2_000}, [1_100]),
        ({"token_type_ids": TOKENS}, [1_100]),
        ({"pixel_values": [TOKENS]}, [1_100]),
        ({"output_hidden_states": True}, [1_100]),
        ({"attention_mask": TOKENS[:, 1:]}, [1_100]),
        ({"attention_mask": TOKENS[None, None]}, [1_100]),
        ({"position_ids": TOKENS[:, 1:]}, [1_100]),
    ],
)
def test_where_a_prompt_is_cut(model, inputs, lengths):
    passes = []
    pieces = PieceByPiece(lambda **given: passes.append(given), HFCache(model.config).texts, None)
    pieces(input_ids=TOKENS, **inputs)
    assert [given["input_ids"].shape[1] for given in passes] == lengths
    if len(lengths) > 1 and "position_ids" in inputs:
        assert [given["position_ids"].shape[-1] for given in passes] == lengths
    if len(lengths) > 1 and "attention_mask" in inputs:
        assert [given["attention_mask"].shape[1] for given in passes] == [76, 588, 1_100]

"""Going back by `crop`: to where the windows still have all rows, or not at all."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache import RowsGoneError  # noqa: E402 - torch may be missing
from kvcache.hf import HFCache  # noqa: E402 - torch may be missing

pytestmark = pytest.mark.filterwarnings("default")  # those of transformers


def model_with_windows(window):
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, sliding_window=window, pad_token_id=0, eos_token_id=None, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.MistralForCausalLM(config).eval()


@pytest.mark.parametrize("attention", ["kvcache", "sdpa"])
@pytest.mark.parametrize("padding", [0, 75, 130])
def test_tokens_of_the_last_pass_can_always_be_taken_back(padding, attention):
    """The cache keeps the tokens asked for, as far as windows reach, also after its length was asked for."""
    model = model_with_windows(6)
    model.set_attn_implementation(attention)
    tokens = torch.randint(1, 50, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0

    def feed(cache, begin, end):
        return model(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache).logits

    with torch.inference_mode():
        for left in (299, 131, 120, 100, 99):
            cache, fresh = HFCache(model.config, dtype="f32"), HFCache(model.config, dtype="f32")
            for begin, end in ((0, 90), (90, 100), (100, 300)):
                feed(cache, begin, end)
            cache.crop(left - cache.get_seq_length())
            assert cache.get_seq_length() == left
            feed(fresh, 0, left)
            for got in (cache, fresh):
                assert got._cache.seq_len(got._passes.seq_ids[1], layer=0) <= min(left, 6 + 64)
            want, got = feed(fresh, left, 300), feed(cache, left, 300)
            shown = mask[:, left:].bool()
            torch.testing.assert_close(got[shown], want[shown], rtol=0, atol=1e-3)


def test_a_crop_past_a_window_changes_no_row_of_the_batch():
    """Less of the last pass can be taken back behind it."""
    model = model_with_windows(6)
    model.set_attn_implementation("kvcache")
    tokens = torch.randint(1, 50, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :270] = 0  # its row begins there, and has lost nothing, where the other has
    with torch.inference_mode():
        cache = HFCache(model.config, dtype="f32")
        for begin, end in ((0, 200), (200, 299)):
            out = model(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
        with pytest.raises(RowsGoneError, match="cannot go on at position 129"):
            cache.crop(-170)
        assert cache.get_seq_length() == 299
        cache.crop(-9)
        again = model(tokens[:, 290:299], attention_mask=mask[:, :299], past_key_values=cache)
    torch.testing.assert_close(again.logits, out.logits[:, -9:], rtol=0, atol=1e-3)

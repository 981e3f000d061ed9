"""Going back by `crop`: to where the windows still have all rows, or not at all."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvcache import RowsGoneError  # noqa: E402 - torch may be missing
from kvcache.hf import HFCache  # noqa: E402 - torch may be missing


def test_crop_past_a_window_changes_no_row_of_the_batch():
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, sliding_window=6, pad_token_id=0,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval()
    model.set_attn_implementation("kvcache")
    tokens = torch.randint(1, 50, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :75] = 0  # its row begins there, and has lost nothing, where the other has
    with torch.inference_mode():
        cache = HFCache(config)
        for begin, end in [(0, 80), *((at, at + 1) for at in range(80, 90))]:
            out = model(tokens[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
        with pytest.raises(RowsGoneError, match="cannot go on at position"):
            cache.crop(-80)
        assert cache.get_seq_length() == 90
        cache.crop(-1)
        again = model(tokens[:, 89:], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(again.logits, out.logits, rtol=0, atol=1e-3)

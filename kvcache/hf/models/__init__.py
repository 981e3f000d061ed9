"""Methods of models that `kvcache.hf.replacing` replaces. A model that needs code of its own has a file here."""

from __future__ import annotations

from kvcache.hf.models import deepseek_v4, deepseek_v32, glm5_next, minimax_m3_vl, qwen4_exp
from kvcache.hf.models.minimax import register_minimax
from kvcache.hf.replacing import REPLACED, Replacement

# Methods of classes, by the type of model.
METHODS: dict[str, dict[str, Replacement]] = {
    "axk2": {"AXK2Indexer.forward": deepseek_v32.choose},
    "deepseek_v32": {"DeepseekV32Indexer.forward": deepseek_v32.choose},
    "deepseek_v4": {"DeepseekV4Attention.forward": deepseek_v4.attend},
    "dots3_note_text": {"Dots3NoteTextIndexer.forward": deepseek_v32.choose_interleaved},
    "glm5_next_text": {
        "Glm5NextTextIndexer.forward": glm5_next.choose,
        "Glm5NextTextAttention.build_attention_mask_from_topk": glm5_next.make_mask,
    },
    "glm_moe_dsa": {"GlmMoeDsaIndexer.forward": deepseek_v32.choose_interleaved},
    "hy_v4": {"HYV4Indexer.forward": deepseek_v32.choose_with_last},
    "hy_v4_vl_text": {"HYV4VLIndexer.forward": deepseek_v32.choose_with_last},
    "minimax_m3_vl_text": {"MiniMaxM3VLIndexer.forward": minimax_m3_vl.choose},
    "mistral_large4_text": {"MistralLarge4TextIndexer.forward": deepseek_v32.choose_by_own},
    "qwen4_exp_text": {"Qwen4ExpTextQSAIndexer.forward": qwen4_exp.choose},
}


def register_models() -> None:
    """Have these methods replaced, and `HFCache` make the caches that models take alone."""
    REPLACED.update(METHODS)
    register_minimax()

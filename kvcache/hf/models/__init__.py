"""Which methods of models an `HFCache` replaces, and by what. A model that needs code of its own has a file here."""

from __future__ import annotations

import inspect
import threading
from typing import Any

from kvcache.hf import latents
from kvcache.hf.dense import model_of
from kvcache.hf.models import (
    deepseek_v4,
    deepseek_v32,
    glm5_next,
    hy_v4,
    minimax_m3_vl,
    mistral_large4,
    qwen4_exp,
)
from kvcache.hf.replacing import Replacement, replace

# Methods of classes, by the type of model.
REPLACED: dict[str, dict[str, Replacement]] = {
    "axk2": {"AXK2Indexer.forward": deepseek_v32.choose},
    "deepseek_v32": {"DeepseekV32Indexer.forward": deepseek_v32.choose},
    "deepseek_v4": {"DeepseekV4Attention.forward": deepseek_v4.attend},
    "dots3_note_text": {"Dots3NoteTextIndexer.forward": deepseek_v32.choose_interleaved},
    "glm5_next_text": {
        "Glm5NextTextIndexer.forward": glm5_next.choose,
        "Glm5NextTextAttention.build_attention_mask_from_topk": glm5_next.make_mask,
    },
    "glm_moe_dsa": {"GlmMoeDsaIndexer.forward": deepseek_v32.choose_interleaved},
    "hy_v4": {"HYV4Indexer.forward": hy_v4.choose},
    "hy_v4_vl_text": {"HYV4VLIndexer.forward": hy_v4.choose},
    "minimax_m3_vl_text": {"MiniMaxM3VLIndexer.forward": minimax_m3_vl.choose},
    "mistral_large4_text": {"MistralLarge4TextIndexer.forward": mistral_large4.choose},
    "qwen4_exp_text": {"Qwen4ExpTextQSAIndexer.forward": qwen4_exp.choose},
}


def replacements(kind: type[Any]) -> list[tuple[Any, str, Replacement]]:
    """Return the methods to replace in models that have this class of configuration: class, name, and function.

    All attentions with latents have a method `expand_kv`. Models whose methods have other names run their own code.
    """
    model = model_of(kind)
    if model is None:
        return []
    code = inspect.getmodule(model)
    paths = ((path.split("."), replacement) for path, replacement in REPLACED.get(kind.model_type, {}).items())
    known = ((getattr(code, owner, None), name, replacement) for (owner, name), replacement in paths)
    found = [(owner, name, replacement) for owner, name, replacement in known if hasattr(owner, name)]
    attentions = (owner for owner in vars(code).values() if isinstance(owner, type) and "expand_kv" in vars(owner))
    return [*found, *((owner, "expand_kv", latents.expand) for owner in attentions)]


_installing = threading.Lock()  # a method replaced twice would take lazy tensors for those that the model makes


def install(kind: type[Any]) -> None:
    """Replace the methods of models that have this class of configuration."""
    with _installing:
        for owner, name, replacement in replacements(kind):
            replace(owner, name, replacement)

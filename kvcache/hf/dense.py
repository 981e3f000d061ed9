"""Say in words why a model attends with dense tensors."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig

KINDS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)
OWN = "takes no attention but its own, so the cache only stores its rows, and is not faster than transformers' cache"


def model_of(kind: type[PreTrainedConfig]) -> Any:
    """Return the class of the model that a class of configurations is for; None: it is not known."""
    found = next((model for of in KINDS if (model := of.get(kind, None)) is not None), None)
    return found[0] if isinstance(found, tuple) else found


def why_decoded(config: PreTrainedConfig) -> tuple[str, str]:
    """Return why rows are decoded before they reach the attention, and what would change it; "": nothing would."""
    text = config.get_text_config(decoder=True)
    model = model_of(type(text))
    if model is not None and not model._can_set_attn_implementation():
        return f"a {model.__name__} {OWN}", ""
    if text._attn_implementation == "kvcache":
        return "the model computes with them first, or has another attention than its config says", ""
    return (
        "the model's attention is not 'kvcache', or it computes with them first",
        "kvcache.hf.enable(model), or set_attn_implementation('kvcache'), has them read where they lie",
    )

"""Hugging Face transformers with this cache: `HFCache`, and the attention implementation ``"kvcache"``.

::

    import kvcache.hf

    kvcache.hf.enable(model, dtype="int8")  # the attention "kvcache", and an HFCache in each `generate`
    model.generate(**inputs)

or, for a cache that outlives a call::

    model.set_attn_implementation("kvcache")
    model.generate(**inputs, cache=kvcache.hf.HFCache(model.config, dtype="int8"))

Importing this package registers an attention and a mask function under that name. With them, keys and values go from
the model into the cache and are attended over where they lie. With the model's own attention (``"sdpa"``, ``"eager"``)
the cache returns dense tensors, as any other does. `HFEncoderDecoderCache` is for models that have an encoder too.
``generate(..., cache_implementation="kvcache")`` makes the cache by itself.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from kvcache.hf.attention import attention, flex_attention
from kvcache.hf.cache import HFCache, HFEncoderDecoderCache
from kvcache.hf.dense import NAME
from kvcache.hf.enabling import disable, enable
from kvcache.hf.engine import Engine
from kvcache.hf.generation import register, register_calls
from kvcache.hf.lazy import make_mask
from kvcache.hf.models import register_models
from kvcache.hf.requests import Request

__all__ = ["NAME", "Engine", "HFCache", "HFEncoderDecoderCache", "Request", "disable", "enable"]

AttentionInterface.register(NAME, attention)
AttentionInterface.register("flex_attention", flex_attention)
AttentionMaskInterface.register(NAME, make_mask)
register()
register_calls()
register_models()

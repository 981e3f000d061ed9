"""Decode stored rows to dense tensors, for a model with an attention of its own, and say in words why it has one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, PreTrainedConfig

from kvcache.cache import KVCache

LINE = 64  # bytes of a cache line, to which torch aligns its tensors too
WORTH_KEEPING = 1 << 21  # bytes; less is allocated anew in less time


class Scratch:
    """Memory for one tensor after another, each of which takes it once nothing uses the one before.

    A model drops the keys of a layer before the cache makes the next layer's. Memory that is used again is still in the
    processor's caches, and takes no new pages from the system. If the tensor before is still used (by a model whose
    layers share keys, or by its user), it keeps its memory. The next one then gets new memory.
    """

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)  # lent to the last tensor
        self._user: Callable[[], object] = lambda: None  # returns what the last tensor's storage refers to, while it is

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < WORTH_KEEPING:
            return torch.empty(shape, dtype=dtype)
        if self._memory.size < num_bytes or self._user() is not None:
            self._memory = np.empty(0, np.uint8)  # frees it before there is more
            memory = np.empty(num_bytes + num_bytes // 8 + LINE, np.uint8)  # more than now, for the rows of later steps
            self._memory = memory[-memory.ctypes.data % LINE :]
        lent = self._memory[:num_bytes]
        self._user = weakref.ref(lent)
        return torch.from_numpy(lent).view(dtype).view(shape)


class Decoder:
    """Decodes rows of a `KVCache` to dense tensors of an element type."""

    def __init__(self, cache: KVCache, dtype: torch.dtype) -> None:
        self._cache, self.dtype = cache, dtype
        self.v_dims = [layer.v_head_dim for layer in cache.layers]
        self._shapes = [(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in cache.layers]  # by layer
        self.forget()

    def forget(self) -> None:
        """Free the memory that is kept for the next rows."""
        self._k, self._v = Scratch(), Scratch()  # memory of decoded keys and values

    def decode_rows(
        self, layer: int, seq_ids: Sequence[int], num_columns: int, num_new: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decode the last `num_columns` rows of several sequences in a layer, from whatever type they are stored in.

        Return keys and values, ``[batch, heads, num_columns + num_new, dim]``. A sequence with fewer rows gets zeros
        before them, where its padding was; the `num_new` last columns are uninitialised, for the rows of new tokens.
        """
        heads, k_dim, v_dim = self._shapes[layer]
        shape = len(seq_ids), heads, num_columns + num_new
        k, v = self._k.empty((*shape, k_dim), self.dtype), self._v.empty((*shape, v_dim), self.dtype)
        for batch_index, seq_id in enumerate(seq_ids):
            stored = self._cache.seq_len(seq_id, layer=layer)
            begin = max(0, num_columns - stored)
            if begin:
                k[batch_index, :, :begin] = v[batch_index, :, :begin] = 0
            out = k[batch_index, :, begin:num_columns], v[batch_index, :, begin:num_columns]
            self._cache.gather(layer, seq_id=seq_id, first=stored - num_columns + begin, out=out)
        return k, v


NAME = "kvcache"  # the attention of this package, which reads rows where they lie
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
    if text._attn_implementation == NAME:
        return "the model computes with them first, or has another attention than its config says", ""
    return (
        f"the model's attention is not {NAME!r}, or it computes with them first",
        f"kvcache.hf.enable(model), or set_attn_implementation({NAME!r}), has them read where they lie",
    )

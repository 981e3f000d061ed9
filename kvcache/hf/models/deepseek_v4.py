"""The attention of DeepSeek V4, which sees a window of tokens, and rows that stand for several tokens each.

The model's own attention asks the layers of its own cache for the tokens that are not compressed yet. So `attend`
replaces it. A block is the tokens that a compressed row stands for; a span is the tokens, of one block or two, that it
is made of. Some layers have an indexer, whose keys are compressed as well: it chooses blocks for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcache.hf.choosing import Compressed, Places, Query, SharedLayer, Taken
from kvcache.hf.dense import NAME
from kvcache.hf.lazy import Mask, is_shown
from kvcache.hf.passes import Passes


def attend(
    own: Callable[..., Any], attention: Any, *, cache: Any, hidden_states: Tensor, position_embeddings: Any,
    position_ids: Tensor, attention_mask: Tensor | None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Do what `DeepseekV4Attention.forward` does, with the rows of an `HFCache`."""
    layer: SharedLayer = cache.shared_layer(attention.layer_idx)
    _check_type(attention, layer)
    model, config = _code_of(attention), attention.config
    cos, sin = position_embeddings[attention.rope_layer_type]
    heads = *hidden_states.shape[:2], -1, attention.head_dim
    q_residual = attention.q_a_norm(attention.q_a_proj(hidden_states))
    q = attention.q_b_norm(attention.q_b_proj(q_residual).view(heads).transpose(1, 2))
    new = attention.kv_norm(attention.kv_proj(hidden_states)).view(heads).transpose(1, 2)
    q, new = (model.apply_rotary_pos_emb(x, cos, sin) for x in (q, new))
    (key, value), mask = layer.update(new, new), attention_mask
    padding = _padding_of(mask, layer.passes, hidden_states)
    layer.begin(new, padding)
    if layer.compressed is not None:
        compressed = _compress(
            attention.compressor, layer, hidden_states, q_residual, position_ids, padding, (cos, sin)
        )
        if config._attn_implementation == NAME:
            options["compressed"] = compressed
        else:
            key, value, mask = compressed.join(key, value, mask)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, model.eager_attention_forward)
    options |= {"scaling": attention.scaling, "sliding_window": attention.sliding_window, "s_aux": attention.sinks}
    options["dropout"] = attention.attention_dropout if attention.training else 0.0
    out, weights = interface(attention, q, key, value, mask, **options)
    out = model.apply_rotary_pos_emb(out.transpose(1, 2), cos, -sin).transpose(1, 2)
    grouped = attention.o_a_proj(out.reshape(*hidden_states.shape[:2], config.o_groups, -1))
    return attention.o_b_proj(grouped.flatten(2)), weights


def _check_type(attention: Any, layer: SharedLayer) -> None:
    """Raise ValueError if the cache was made for a layer of another type: one keeps rows that the other has not."""
    made = attention.compressor is not None, hasattr(attention.compressor, "indexer")
    if made != (layer.compressed is not None, layer.index_keys is not None):
        raise ValueError(
            f"layer {attention.layer_idx} of the model is of type {attention.layer_type!r}, that of the config which"
            " this cache was made from is not: give HFCache model.config"
        )


def _code_of(part: Any) -> Any:
    """Return the module of Python that a part of the model is defined in."""
    return inspect.getmodule(type(part))


def _compress(
    compressor: Any, layer: SharedLayer, hidden_states: Tensor, q_residual: Tensor, position_ids: Tensor,
    padding: Tensor | None, rotation: tuple[Tensor, Tensor],
) -> Compressed:  # fmt: skip
    """Store the rows that a pass completes, and choose among all for its tokens."""
    position_ids = position_ids.expand(len(hidden_states), -1)

    def take(rows: Any, part: Any) -> Taken:
        def pool(spans: Tensor, places: Places, positions: Tensor) -> Tensor:
            return _pool(part, spans, position_ids[places], positions)

        inputs = torch.cat((part.kv_proj(hidden_states), part.gate_proj(hidden_states)), -1)
        taken: Taken = rows.take(inputs, padding, pool, part.compress_rate)
        return taken

    assert layer.compressed is not None
    taken, chosen = take(layer.compressed, compressor), None
    if layer.index_keys is not None:
        indexer, keys = compressor.indexer, layer.index_keys
        keyed = take(keys, indexer)
        if keys.leaves_out(keyed, indexer.index_topk):
            q = indexer.q_b_proj(q_residual).view(*q_residual.shape[:2], -1, indexer.head_dim)
            q = _code_of(indexer).apply_rotary_pos_emb(q, *rotation, unsqueeze_dim=2)
            weights = indexer.scorer.weights_proj(hidden_states).float() * indexer.scorer.weights_scaling
            query = Query(q, weights, indexer.index_topk, keys.block, {"relu": True})
            chosen = query.choose(keyed.this_pass, keys.index)
    return Compressed(layer.compressed, taken, chosen)


def _pool(part: Any, spans: Tensor, ends: Tensor, positions: Tensor) -> Tensor:
    """Make rows of spans of tokens, ``[rows, tokens, elements]``.

    `part` is a compressor or an indexer. `ends` are the positions of the spans' last tokens as the model counts them,
    `positions` as the cache does. A row of two blocks takes half of the elements from each.
    """
    block, dim = part.compress_rate, part.head_dim
    kv, gate = spans.chunk(2, -1)
    bias = part.position_bias
    if spans.shape[1] == block:
        gate = gate + bias
    else:
        is_first = (positions < block)[:, None, None]  # of all blocks: it has none before it
        before = (gate[:, :block, :dim] + bias[:, :dim]).masked_fill(is_first, -torch.inf)
        gate = torch.cat((before, gate[:, block:, dim:] + bias[:, dim:]), 1)
        kv = torch.cat((kv[:, :block, :dim].masked_fill(is_first, 0), kv[:, block:, dim:]), 1)
    rows = part.kv_norm((kv * gate.softmax(1, dtype=torch.float32).to(kv.dtype)).sum(1))
    cos, sin = part.rotary_emb(rows, position_ids=(ends - block + 1)[None], layer_type=part.rope_layer_type)
    rotated: Tensor = _code_of(part).apply_rotary_pos_emb(rows[None, None], cos, sin)
    return rotated[0, 0]


def _padding_of(mask: Tensor | None, passes: Passes, new: Tensor) -> Tensor | None:
    """Return which tokens so far a mask shows, ``[batch, tokens]``; None: all. `new` is of a pass's tokens.

    A mask of elements, ``[batch, 1, tokens, columns]``, has the columns of the new tokens, and of those before them
    that the first one sees in its window. Of tokens before these, earlier passes know which are padding.
    """
    if mask is None or isinstance(mask, Mask):
        return None if mask is None else mask.padding
    batch_size, num_tokens = new.shape[:2]
    sees = is_shown(mask)[:, 0].expand(batch_size, -1, -1)
    num_past = sees.shape[2] - num_tokens
    offsets = passes.offsets or [0]  # in a first pass, there are none yet
    shown = torch.arange(passes.num_seen + num_tokens) >= torch.tensor(offsets)[:, None]
    shown = shown.expand(batch_size, -1).clone()
    shown[:, passes.num_seen - num_past : passes.num_seen] = sees[:, 0, :num_past]
    shown[:, passes.num_seen :] = sees[:, :, num_past:].diagonal(dim1=1, dim2=2)  # padding does not see itself
    if any(offsets):  # also if all are shown: the cache refuses a mask that shows padding which it has left out
        return shown
    return None if shown.all() else shown

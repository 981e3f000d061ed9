"""Layers with an indexer (sparse attention), whose keys the cache holds in layers of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvcache.hf.latents import LatentLayer
from kvcache.hf.layers import Layer, LayerRows, Rows
from kvcache.hf.lazy import elements_of
from kvcache.hf.masks import Plane, shown_by
from kvcache.hf.passes import ForwardPass
from kvcache.hf.pooling import PooledKeys
from kvcache.hf.scoring import Scoring, Step, pad, relu, top_indices, top_values


class IndexRows(Scoring, Rows):
    """The keys of an indexer, of `LayerRows`."""


class IndexKeys(Layer):
    """The keys of a layer's indexer: a layer of the `KVCache` that holds keys alone.

    It stands by itself for a layer of the model that reads another layer's rows.
    """

    tensor_type = IndexRows

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys alone."""
        return (k,)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Take the new tokens' keys, ``[batch, 1, tokens, dim]``; return a lazy tensor for the keys of all tokens."""
        return self.update(idx_k, idx_k[..., :0])[0]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Do what `update_index` does, with keys ``[batch, tokens, dim]``."""
        return self.update_index(indexer_key_states.unsqueeze(1)).squeeze(1)


class _NoPositions:
    """The positions of all tokens, which Qwen 4 keeps in a cache: none, as its rows hold what comes of them."""

    def __get__(self, layer: Any, owner: type) -> None:
        return None

    def __set__(self, layer: Any, positions: Tensor) -> None:
        """Keep nothing."""


class _Indexed:
    """A layer that has keys of an indexer beside its rows."""

    index_keys: IndexKeys | PooledKeys
    indexer_position_ids = _NoPositions()

    def update_index(self, idx_k: Tensor) -> Tensor:
        """As `IndexKeys.update_index`."""
        assert isinstance(self.index_keys, IndexKeys)
        return self.index_keys.update_index(idx_k)

    @property
    def pools(self) -> bool:
        """Whether a key of the indexer stands for several tokens."""
        return isinstance(self.index_keys, PooledKeys)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """As `IndexKeys.update_indexer`."""
        return self.index_keys.update_indexer(indexer_key_states)


class IndexedLayer(_Indexed, Layer):
    """A layer of keys and values with an indexer."""


class IndexedLatentLayer(_Indexed, LatentLayer):
    """A layer of latent attention with an indexer."""


class Scored(NamedTuple):
    """The queries with which an indexer scores its keys, and the rule by which it chooses."""

    rows: LayerRows  # of the keys
    q: Tensor  # [batch, queries, heads, dim]
    mask: Tensor | None  # the mask that hides keys from the choice; None: that of the attention
    rule: dict[str, Any]  # arguments of `Batch.choose`; `weights` are [batch, queries, heads]
    later: Tensor | None = (
        None  # which columns lie behind a query, [batch, 1, queries, columns]; None: the mask says it
    )
    local: Tensor | None = None  # blocks that a query takes anyway, [batch, heads, queries, num_local]

    @classmethod
    def of(cls, indices: Tensor, block: int) -> Self | None:
        """Return what indices are the record of; None: they were computed, or made otherwise."""
        try:
            return cls._single(indices) if indices.dim() == 3 else cls._blocks(indices, block)
        except _OtherwiseError:
            return None

    @classmethod
    def _single(cls, indices: Tensor) -> Self:
        """Recognise single columns: scores of heads are weighted sums of products that are not negative."""
        (chosen,) = _arguments(indices, Tensor.to, 1, torch.int32)
        scores, width = _arguments(chosen, top_indices, 2)
        if isinstance(scores, Step) and scores.func is Tensor.add:
            summed, shown = _arguments(scores, Tensor.add, 2)
        else:
            summed, hidden = _arguments(scores, Tensor.masked_fill, 2, -math.inf)
            (shown,) = _arguments(hidden, Tensor.__invert__, 1)
        (product,) = _arguments(summed, Tensor.squeeze, 1, -2)
        weights, positive = _arguments(product, torch.matmul, 2)
        (scores,) = _arguments(positive, relu, 1)
        scale = 1.0
        if isinstance(scores, Step) and scores.func is Tensor.mul:
            scores, scale = _arguments(scores, Tensor.mul, 2)
        q, keys = _arguments(scores, torch.matmul, 2)
        (keys,) = _arguments(keys, Tensor.unsqueeze, 1, 1)
        (keys,) = _arguments(keys, Tensor.float, 1)
        (keys,) = _arguments(keys, Tensor.transpose, 1, -1, -2)
        (keys,) = _arguments(keys, Tensor.squeeze, 1, 1)
        if not isinstance(shown, Plane) or shown.made is not None or not isinstance(scale, float):
            raise _OtherwiseError
        rule = {"width": width, "weights": weights[:, :, 0], "relu": True, "scale": scale, "block": 1}
        return cls(_rows_of(keys), q, shown.mask, rule)

    @classmethod
    def _blocks(cls, indices: Tensor, block: int) -> Self:
        """Recognise blocks: each head chooses by the largest product of a block, and takes the last blocks anyway."""
        chosen, unused = _arguments(indices, Tensor.masked_fill, 2, -1)
        scores, width = _arguments(chosen, top_indices, 2)
        (values,) = _arguments(unused, torch.eq, 1, -math.inf)
        if _arguments(values, top_values, 2)[0] is not scores:
            raise _OtherwiseError
        num_local, local = 0, None
        if isinstance(scores, Step) and scores.func is torch.scatter:
            scores, dim, local = _arguments(scores, torch.scatter, 3, math.inf)
            num_local = local.shape[-1] if dim == -1 else -1
        (scores,) = _arguments(scores, Tensor.amax, 1)
        scores, *shape = _arguments(scores, Tensor.view, 6)
        if isinstance(scores, Step) and scores.func is pad:
            scores, _ = _arguments(scores, pad, 2)
        products, later = _arguments(scores, Tensor.masked_fill, 2, -math.inf)
        q, keys = _arguments(products, torch.matmul, 2)
        (keys,) = _arguments(keys, Tensor.transpose, 1, -1, -2)
        (keys,) = _arguments(keys, Tensor.float, 1)
        if shape[-1] != block or num_local < 0:
            raise _OtherwiseError
        rule = {"width": width, "scale": 1.0, "num_choices": q.shape[1], "block": block, "num_local": num_local}
        return cls(_rows_of(keys), q.transpose(1, 2), None, rule, later, local)

    def counts_alike(self, this_pass: ForwardPass) -> bool:
        """Whether the model's positions are columns, or positions of the cache, which begin at a row's first token."""
        if self.later is None:
            return True
        columns = torch.arange(this_pass.num_tokens) + this_pass.num_seen
        offsets = torch.tensor(this_pass.offsets)[:, None]
        return any(
            self._counts(places, columns < offsets) for places in (columns - offsets, columns.expand(len(offsets), -1))
        )

    def _counts(self, places: Tensor, is_padding: Tensor) -> bool:
        """Whether queries have these positions, ``[batch, queries]``, except for padding."""
        assert self.later is not None
        places = places.clamp(min=0)
        later = self.later[:, 0].expand(len(places), -1, -1)
        last = later.shape[-1] - 1
        ends = torch.stack((places, (places + 1).clamp(max=last)), -1)
        is_alike = (later.gather(-1, ends) == (ends > places[..., None])).all(-1)
        if self.local is not None:
            local = places[..., None] // self.rule["block"] - torch.arange(self.rule["num_local"])
            is_alike &= (self.local[:, 0] == local.clamp(min=0)).all(-1)
        return bool((is_alike | is_padding).all())

    def choose(self, this_pass: ForwardPass, masked: Any) -> dict[str, Any]:
        """Store the new keys, and choose. Return arguments of `Batch.attend`: none if all rows would be chosen."""
        layer, passes = self.rows.layer, self.rows.layer.passes
        if layer.index in this_pass.pending:
            passes.put(this_pass, layer.index)
        assert this_pass.batch is not None
        block, num_rows = self.rule["block"], this_pass.num_seen + this_pass.num_tokens - min(this_pass.offsets)
        if num_rows <= self.rule["width"] * block:
            return {}
        rule: dict[str, Any] = {
            name: this_pass.pack(x) if isinstance(x, Tensor) else x for name, x in self.rule.items()
        }
        hidden = masked if self.later is None else None  # the model scores blocks before its mask hides columns
        chosen = this_pass.batch.choose(layer.index, this_pass.pack(self.q), masked=hidden, **rule)
        return {"chosen": chosen, "chosen_block": block}


class _OtherwiseError(Exception):
    """A tensor is not the record that was looked for."""


def _arguments(tensor: Any, func: Callable[..., Any], count: int, *rest: Any) -> tuple[Any, ...]:
    """Return the first arguments of the operation that made a tensor; raise if it was another, or the rest differs."""
    if not isinstance(tensor, Step) or tensor.made is not None or tensor.func is not func:
        raise _OtherwiseError
    if tensor.args[count:] != rest or len(tensor.args) < count:
        raise _OtherwiseError
    return tensor.args[:count]


def _rows_of(keys: Any) -> LayerRows:
    """Return the rows whose keys a tensor stands for."""
    if not isinstance(keys, IndexRows) or keys.made is not None:
        raise _OtherwiseError
    return keys.source


class Chosen(NamedTuple):
    """The choice of an indexer for each query: columns, or blocks of columns."""

    indices: Tensor  # [batch, queries, n], or [batch, KV heads, queries, n]; a negative one is none
    block: int  # the columns of a block; 1: they are columns
    scored: Scored | None  # what the kernels choose by; None: the model chose
    hides_padding: bool = False  # whether it says of padding that it is hidden, in place of a mask

    @classmethod
    def of(cls, indices: Tensor, block: int) -> Self:
        """Return the choice that an attention is handed."""
        return cls(indices, block, Scored.of(indices, block))

    def shown(self, num_heads: int, num_columns: int) -> Tensor:
        """Return which columns were chosen, of bool, ``[batch, heads, queries, columns]``; heads may be 1."""
        indices = elements_of(self.indices)
        indices = indices if indices.dim() == 4 else indices.unsqueeze(1)
        shown = shown_by(indices, num_columns, self.block)
        num_choices = shown.shape[1]
        return shown if num_choices == 1 else shown.repeat_interleave(num_heads // num_choices, 1)

    def fits(self, rows: LayerRows, mask: Tensor | None) -> bool:
        """Whether the kernels can attend to the choice: it has a choice for each token, and for all or each KV head."""
        num_choices = self.indices.shape[1] if self.indices.dim() == 4 else 1
        num_kv_heads = rows.layer.passes.cache.layers[rows.layer.index].num_kv_heads
        has_tokens = rows.new is not None and self.indices.shape[-2] == rows.new[0].shape[2]
        has_mask = self.scored is None or self.scored.mask is None or self.scored.mask is mask
        return has_tokens and has_mask and num_choices in (1, num_kv_heads)

    def options(self, this_pass: ForwardPass, masked: Any) -> dict[str, Any]:
        """Return the arguments of `Batch.attend` for the choice. The first layer that uses it chooses."""
        known = this_pass.chosen.get(id(self.indices))
        if known is not None:
            return known[1]
        scored = self.scored
        is_known = scored is not None and scored.counts_alike(this_pass)
        options = scored.choose(this_pass, masked) if scored and is_known else self._of_columns(this_pass)
        this_pass.chosen[id(self.indices)] = self.indices, options
        return options

    def _of_columns(self, this_pass: ForwardPass) -> dict[str, Any]:
        """Return the arguments for columns, which stand for positions behind each row's padding."""
        columns = elements_of(self.indices)
        columns = (columns if columns.dim() == 4 else columns.unsqueeze(1)).transpose(1, 2)
        offsets = torch.tensor(this_pass.offsets)[:, None, None, None]
        block = self.block
        if (offsets % block).any():  # blocks of columns are no blocks of positions
            places = columns[..., None] * block + torch.arange(block)
            columns, block = places.masked_fill(columns[..., None] < 0, -1).flatten(3), 1
        positions = torch.where(columns < 0, -1, columns - offsets // block).int()
        return {"chosen": this_pass.pack(positions).numpy(), "chosen_block": block}

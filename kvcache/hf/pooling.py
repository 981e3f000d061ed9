"""The indexers of GLM-5.3 Flash and Qwen 4, whose keys stand for several tokens each.

They pool keys of n tokens to one. The cache holds pooled keys in a layer with a row for every n-th token. It holds what
is not pooled yet in a layer with a window. These models hand the choice to the attention as a mask, in which the choice
is not recognised. So `install` has an indexer call `PooledKeys.choose` where its cache is an `HFCache`. With any other
cache, it does what it did before.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.errors import NotSupportedError
from kvcache.hf.decode import Decoder
from kvcache.hf.layers import Layer, check_new
from kvcache.hf.lazy import LazyTensor
from kvcache.hf.masks import ChosenMask, Mask
from kvcache.hf.padding import count_leading, shown_columns
from kvcache.hf.passes import ForwardPass, Passes
from kvcache.policy import FullAttention, SlidingWindow


class Query(NamedTuple):
    """The queries of an indexer, and the rule by which it chooses blocks of tokens."""

    q: Tensor  # [batch, tokens, heads, dim]
    weights: Tensor | None  # of the heads, [batch, tokens, heads]
    block: int  # the tokens of a block
    width: int  # the number of blocks to choose
    has_tail: bool  # whether a token sees its own incomplete block, too


class Choice(LazyTensor):
    """The columns that each token chose, ``[batch, tokens, n]`` of int32; -1: none."""

    query: Query
    blocks: Tensor | None  # the chosen ones, [tokens without padding, n]; None: all that are complete
    positions: Tensor  # of the tokens, [batch, tokens]; padding has negative ones
    offsets: Tensor  # the column of each row's position 0

    @classmethod
    def of(cls, query: Query, blocks: Tensor | None, positions: Tensor, offsets: Sequence[int]) -> Choice:
        """Return the choice of the tokens of a pass."""
        width = query.width * query.block + (query.block - 1 if query.has_tail else 0)
        made = cls.of_shape((*positions.shape, width), torch.int32)
        made.query, made.blocks = query, blocks
        made.positions, made.offsets = positions, torch.tensor(offsets)
        return made

    def make(self) -> Tensor:
        """List the columns of each block, then the columns of the token's incomplete block."""
        positions, block = self.positions[..., None], self.query.block
        complete = (positions + 1) // block
        blocks = torch.arange(self.query.width).repeat(*self.positions.shape, 1)
        if self.blocks is not None:
            blocks[self.positions >= 0] = self.blocks
        blocks = torch.where(blocks < complete, blocks, -1)[..., None]
        listed = torch.where(blocks < 0, -1, blocks * block + torch.arange(block)).flatten(2)
        if self.query.has_tail:
            tail = complete * block + torch.arange(block - 1)
            listed = torch.cat((listed, torch.where(tail <= positions, tail, -1)), -1)
        return torch.where((listed < 0) | (positions < 0), -1, listed + self.offsets[:, None, None]).int()


Places: TypeAlias = tuple[Tensor, ...]  # of tokens of a pass: rows of the batch, and columns


class Taken(NamedTuple):
    """The rows that a pass made of what it brought."""

    this_pass: ForwardPass
    positions: Tensor  # of the tokens, [batch, tokens]; padding has negative ones
    places: Places  # of the tokens that complete a block
    made: Tensor | None  # their rows, [rows, elements]; None: there are none


Pool: TypeAlias = Callable[[Tensor, Places, Tensor], Tensor]


class Pooled(Layer):
    """Rows that stand for several tokens each: a layer of the `KVCache` with a stride.

    The next layer of the `KVCache` holds the inputs that are pooled, as far back as the next row needs them.
    """

    def __init__(self, passes: Passes, decoder: Decoder, index: int, follows_config: bool) -> None:
        super().__init__(passes, decoder, index, follows_config)
        rows, inputs = (passes.cache.layers[i].policy for i in (index, index + 1))
        assert isinstance(rows, FullAttention)
        assert isinstance(inputs, SlidingWindow)
        self.block, self.span = rows.stride, inputs.window  # the tokens that a row stands for, and is made of

    def take(self, inputs: Tensor, padding: Tensor | None, pool: Pool, block: int) -> Taken:
        """Store what the new tokens bring, ``[batch, tokens, elements]``, and the rows of blocks that they complete.

        `pool` makes rows of the inputs of as many spans of tokens, ``[rows, tokens, elements]``, and of the places and
        the positions of their last tokens. Inputs before position 0 may be anything. `padding` says which tokens so far
        the mask shows, and `block` the tokens that the model has in a block.
        """
        if block != self.block:
            raise ValueError(
                f"the model pools keys of {block} tokens, that of the config which this cache was made from keys of"
                f" {self.block}: give HFCache model.config"
            )
        this_pass = self._open(inputs, padding)
        columns = torch.arange(this_pass.num_seen, this_pass.num_seen + this_pass.num_tokens)
        positions = columns - torch.tensor(this_pass.offsets)[:, None]
        passes = self.passes
        passes.put(this_pass, self.index + 1)
        places, made = ((positions >= 0) & ((positions + 1) % self.block == 0)).nonzero(as_tuple=True), None
        if len(places[0]):
            past, _ = self.decoder.decode_rows(self.index + 1, passes.seq_ids, self.span - 1)
            known = torch.cat((past.squeeze(1), inputs), 1)
            spans = known[places[0][:, None], places[1][:, None] + torch.arange(self.span)]
            assert this_pass.batch is not None
            made = pool(spans, places, positions[places])
            this_pass.batch.put(self.index, made.unsqueeze(1))
        passes.note_done(this_pass, self.index)
        return Taken(this_pass, positions, places, made)

    def _open(self, inputs: Tensor, padding: Tensor | None) -> ForwardPass:
        """Return the pass that brings these inputs, and begin its batch."""
        check_new(inputs)
        passes = self.passes
        this_pass = passes.reach(self.index + 1, (inputs.unsqueeze(1),))
        passes.reach(self.index)
        if not this_pass.is_open:
            passes.open(this_pass, len(inputs), inputs.shape[1], padding)
        elif padding is not None:
            self._check_told(this_pass, padding)
        if padding is not None and passes.masked(this_pass, padding):
            raise NotSupportedError(
                "attention_mask hides a token behind a row's first: the model counts blocks of tokens, which this cache"
                " does from each row's first token on"
            )
        self.decoder.dtype = inputs.dtype
        return this_pass

    def _check_told(self, this_pass: ForwardPass, padding: Tensor) -> None:
        """Raise NotSupportedError if a pass was opened without its padding."""
        leading = count_leading(shown_columns(padding, this_pass.num_seen + this_pass.num_tokens))
        if any(hidden > offset for hidden, offset in zip(leading, this_pass.offsets, strict=True)):
            raise NotSupportedError(
                "the model computed with the rows before its indexer was told of padding, because a weight is quantised"
                " or has an adapter, or a hook: feed rows of different lengths apart"
            )


class PooledKeys(Pooled):
    """The keys of an indexer, each pooled of several tokens."""

    def choose(self, inputs: Tensor, padding: Tensor | None, pool: Callable[[Tensor], Tensor], query: Query) -> Choice:
        """Store keys as `take` does, and choose blocks for the new tokens."""
        taken = self.take(inputs, padding, lambda spans, *_: pool(spans), query.block)
        this_pass, positions = taken.this_pass, taken.positions
        options: dict[str, Any] = {}
        blocks = None
        if not query.has_tail or self.leaves_out(taken, query.width):
            chosen = self.choose_blocks(taken, query)
            options = {"chosen": chosen, "chosen_block": self.block, "chosen_tail": query.has_tail}
            blocks = None if chosen is None else torch.from_numpy(chosen[:, 0].astype(np.int64))
        choice = Choice.of(query, blocks, positions, this_pass.offsets)
        this_pass.chosen[id(choice)] = choice, options
        return choice

    def leaves_out(self, taken: Taken, width: int) -> bool:
        """Whether some token of a pass has more blocks than it chooses."""
        return int(taken.positions.max()) + 1 >= (width + 1) * self.block

    def choose_blocks(self, taken: Taken, query: Query) -> npt.NDArray[np.int32] | None:
        """Choose blocks for the tokens of a pass, ``[tokens without padding, 1, n]``; None: all are padding."""
        this_pass = taken.this_pass
        if this_pass.batch is None:
            return None
        rule: dict[str, Any] = {"width": query.width, "relu": True, "block": self.block}
        rule["weights"] = None if query.weights is None else this_pass.pack(query.weights)
        return this_pass.batch.choose(self.index, this_pass.pack(query.q), **rule)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Raise NotSupportedError: the keys of single tokens are not kept."""
        raise NotSupportedError("this indexer is not the model's own: the cache has no keys of single tokens for it")


# ---- the models' indexers


def choose_glm5(
    indexer: Any, keys: PooledKeys, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor
) -> Tensor:
    """Do what the indexer of GLM-5.3 Flash does: return the columns that it chooses."""
    heads = *hidden_states.shape[:2], -1, indexer.head_dim
    k = indexer.k_norm(indexer.wk(hidden_states))
    gate = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()

    def pool(blocks: Tensor) -> Tensor:
        k, gate = blocks.chunk(2, -1)
        shares = (gate.float() + indexer.index_kpool_compress_ape.float()).softmax(1)
        return (shares.to(k.dtype) * k).sum(1)

    query = Query(
        indexer.wq_b(q_resid).view(heads),
        weights * indexer.n_heads**-0.5,
        indexer.index_kpool,
        indexer.index_topk // indexer.index_kpool,
        indexer.index_kpool_always_select_tail,
    )
    padding = None
    if not attention_mask.all():  # it says nothing of earlier passes
        passes = keys.passes
        past = torch.arange(passes.num_seen) >= torch.tensor(passes.offsets or [0])[:, None]
        padding = torch.cat((past.expand(len(attention_mask), -1), attention_mask), 1)
    return keys.choose(torch.cat((k, gate), -1), padding, pool, query)


def mask_of_glm5(make: Callable[..., Any], module: Any, topk_indices: Tensor, **arguments: Any) -> Any:
    """Make the mask for the attention: for the attention "kvcache", a mask that holds the choice."""
    if module.config._attn_implementation in (None, "eager", "sdpa"):
        return make(module, topk_indices=topk_indices, **arguments)
    return ChosenMask.of(topk_indices, arguments["kv_length"])


def _padding_in(mask: Tensor) -> Tensor:
    """Return which tokens the elements of a mask show; raise NotSupportedError if some tokens see others of them."""
    shown = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    padding, (num_queries, num_columns) = shown[:, -1], shown.shape[1:]
    causal = torch.ones(num_queries, num_columns, dtype=torch.bool).tril(num_columns - num_queries)
    if not torch.equal(shown, causal & padding[:, None]):
        raise NotSupportedError(
            "attention_mask hides other tokens from some tokens than from the last one: the model's indexer counts"
            " blocks of what each token sees, this cache those of the whole row"
        )
    return padding


def choose_qwen4(
    indexer: Any, keys: PooledKeys, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor
) -> Tensor:
    """Do what the indexer of Qwen 4 does: return a mask that shows the columns which it chooses."""
    num_tokens, dim = hidden_states.shape[1], indexer.index_head_dim
    rotate = importlib.import_module(type(indexer).__module__).apply_rotary_pos_emb
    cos, sin = (part[:, -num_tokens:] for part in position_embeddings)
    q, raw = indexer.index_qk_proj(hidden_states).split((indexer.index_n_heads * dim, dim), -1)
    q = indexer.q_layernorm(q.reshape(*q.shape[:2], -1, dim))

    def pool(blocks: Tensor) -> Tensor:
        raw, cos, sin = blocks.split((dim, *[(blocks.shape[-1] - dim) // 2] * 2), -1)
        pooled = indexer.k_layernorm(raw.float().mean(1).to(raw.dtype))
        rotated: Tensor = rotate(pooled.unsqueeze(1), cos=cos[:, 0], sin=sin[:, 0]).squeeze(1)
        return rotated

    padding = attention_mask.padding if isinstance(attention_mask, Mask) else _padding_in(attention_mask)
    query = Query(rotate(q, cos=cos, sin=sin, unsqueeze_dim=2), None, indexer.compress_ratio, indexer.block_topk, True)
    whole = cos.expand(len(raw), -1, -1), sin.expand(len(raw), -1, -1)
    choice = keys.choose(torch.cat((raw, *whole), -1), padding, pool, query)
    return ChosenMask.of(choice, attention_mask.shape[-1])


def _choosing(forward: Callable[..., Any], choose: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a forward function of an indexer that lets an `HFCache` choose."""
    names = [*inspect.signature(forward).parameters]

    @functools.wraps(forward)
    def choose_or_forward(indexer: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        find = getattr(given.pop("cache", None) or given.pop("past_key_values", None), "pooled_keys", None)
        if find is None:
            return forward(indexer, *args, **kwargs)
        with torch.no_grad():  # a choice has no gradient
            return choose(indexer, find(indexer.layer_idx), **given)

    return choose_or_forward


def _making(make: Callable[..., Any], replace: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method in the place of another, which it is given."""

    @functools.wraps(make)
    def made(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip([*inspect.signature(make).parameters][1:], args, strict=False)) | kwargs
        return replace(make, module, **given)

    return made


@functools.cache
def install(model_type: str) -> None:
    """Have the indexers of a type of models choose by an `HFCache`, where they are given one."""
    if model_type == "glm5_next_text":
        glm5: Any = importlib.import_module("transformers.models.glm5_next.modeling_glm5_next")
        indexer, attention = glm5.Glm5NextTextIndexer, glm5.Glm5NextTextAttention
        indexer.forward = _choosing(indexer.forward, choose_glm5)
        attention.build_attention_mask_from_topk = _making(attention.build_attention_mask_from_topk, mask_of_glm5)
    elif model_type == "qwen4_exp_text":
        qwen4: Any = importlib.import_module("transformers.models.qwen4_exp.modeling_qwen4_exp")
        indexer = qwen4.Qwen4ExpTextQSAIndexer
        indexer.forward = _choosing(indexer.forward, choose_qwen4)

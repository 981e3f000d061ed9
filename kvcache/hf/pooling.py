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
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvcache.errors import NotSupportedError
from kvcache.hf.layers import Layer, check_new
from kvcache.hf.lazy import LazyTensor
from kvcache.hf.masks import ChosenMask, Mask
from kvcache.hf.padding import count_leading, shown_columns
from kvcache.hf.passes import ForwardPass


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


class PooledKeys(Layer):
    """The keys of an indexer, each pooled of several tokens.

    The next layer of the `KVCache` holds the inputs that are pooled.
    """

    @property
    def block(self) -> int:
        """The tokens that a key stands for."""
        policy: Any = self.passes.cache.layers[self.index].policy
        stride: int = policy.stride
        return stride

    def choose(self, inputs: Tensor, padding: Tensor | None, pool: Callable[[Tensor], Tensor], query: Query) -> Choice:
        """Store the keys of blocks that a pass completes, and choose blocks for its tokens.

        `inputs` are what the keys of the new tokens are pooled of, ``[batch, tokens, dim]``, and `pool` makes keys of
        blocks of them, ``[blocks, tokens, dim]``. `padding` says which tokens so far the mask shows.
        """
        if query.block != self.block:
            raise ValueError(
                f"the model's indexer pools keys of {query.block} tokens, that of the config which this cache was made"
                f" from keys of {self.block}: give HFCache model.config"
            )
        this_pass = self._open(inputs, padding)
        batch, block, offsets = this_pass.batch, self.block, this_pass.offsets
        columns = torch.arange(this_pass.num_seen, this_pass.num_seen + this_pass.num_tokens)
        positions = columns - torch.tensor(offsets)[:, None]
        self._store(this_pass, inputs, pool, positions)
        options: dict[str, Any] = {}
        blocks = None
        if batch is not None and (int(positions.max()) + 1 >= (query.width + 1) * block or not query.has_tail):
            rule: dict[str, Any] = {"width": query.width, "weights": query.weights, "relu": True, "block": block}
            if query.weights is not None:
                rule["weights"] = this_pass.pack(query.weights)
            chosen = batch.choose(self.index, this_pass.pack(query.q), **rule)
            options = {"chosen": chosen, "chosen_block": block, "chosen_tail": query.has_tail}
            blocks = torch.from_numpy(chosen[:, 0].astype(np.int64))
        choice = Choice.of(query, blocks, positions, offsets)
        this_pass.chosen[id(choice)] = choice, options
        return choice

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
                "attention_mask hides a token behind a row's first: the model's indexer counts blocks of tokens, which"
                " this cache does from each row's first token on"
            )
        self.decoder.dtype = inputs.dtype
        return this_pass

    def _check_told(self, this_pass: ForwardPass, padding: Tensor) -> None:
        """Raise NotSupportedError if a pass was opened without its padding."""
        leading = count_leading(shown_columns(padding, this_pass.num_seen + this_pass.num_tokens))
        if leading != this_pass.offsets:
            raise NotSupportedError(
                "the model computed with the rows before its indexer was told of padding, because a weight is quantised"
                " or has an adapter, or a hook: feed rows of different lengths apart"
            )

    def _store(
        self, this_pass: ForwardPass, inputs: Tensor, pool: Callable[[Tensor], Tensor], positions: Tensor
    ) -> None:  # fmt: skip
        """Store inputs, and the keys of the blocks that tokens at these positions complete."""
        passes, block = self.passes, self.block
        passes.put(this_pass, self.index + 1)
        rows, columns = ((positions >= 0) & ((positions + 1) % block == 0)).nonzero(as_tuple=True)
        if len(rows):
            past, _ = self.decoder.decode_rows(self.index + 1, passes.seq_ids, block - 1)
            known = torch.cat((past.squeeze(1), inputs), 1)
            keys = pool(known[rows[:, None], columns[:, None] + torch.arange(block)])
            assert this_pass.batch is not None
            this_pass.batch.put(self.index, keys.unsqueeze(1))
        passes.note_done(this_pass, self.index)

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

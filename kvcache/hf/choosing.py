"""Layers that have an indexer, what it chooses, and layers whose rows stand for several tokens each.

The keys of an indexer are layers of the `KVCache` of their own. Rows for several tokens lie in a layer with a row for
every n-th token, and what is not pooled yet in a layer with a window. DeepSeek V4 has them beside the rows of a window.
A block is the tokens that one row stands for, or that are chosen together. A span is the tokens that a row is made of.
A column is a place in the text, padding included; a position counts behind the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.batch import Batch
from kvcache.errors import NotSupportedError
from kvcache.hf.dense import Decoder
from kvcache.hf.layers import LatentLayer, Layer, LayerRows, check_new
from kvcache.hf.lazy import LazyTensor, Mask, elements_of, shown_by
from kvcache.hf.passes import ForwardPass, Passes
from kvcache.hf.told import count_leading, shown_columns
from kvcache.policy import FullAttention, SlidingWindow


class Query(NamedTuple):
    """The queries of an indexer, and the rule by which they choose."""

    q: Tensor  # [batch, tokens, heads, dim]
    weights: Tensor | None  # of the heads, [batch, tokens, heads]
    width: int  # the number of tokens, or of blocks of tokens, to choose
    block: int  # the tokens of a block; 1: they are chosen one by one
    rule: dict[str, Any]  # further arguments of `Batch.choose`

    def choose(self, this_pass: ForwardPass, index: int, masked: Any = None) -> npt.NDArray[np.int32] | None:
        """Choose among the keys of a layer, ``[tokens without padding, choices, n]``; None: all tokens are padding."""
        if this_pass.batch is None:
            return None
        given: dict[str, Any] = {"width": self.width, "block": self.block, "masked": masked, **self.rule}
        given["weights"] = None if self.weights is None else this_pass.pack(self.weights)
        return this_pass.batch.choose(index, this_pass.pack(self.q), **given)


Choose: TypeAlias = Callable[[ForwardPass, Any], dict[str, Any] | None]


class Choice(LazyTensor):
    """What the kernels choose for each token. It has elements, as of the model's own indexer, for whoever reads them.

    They are columns, ``[batch, tokens, n]``, or blocks of columns, ``[batch, KV heads, tokens, n]``; -1: none.
    """

    list_chosen: Callable[[], Tensor]  # makes the elements
    choose: Choose  # returns what `options` does
    mask: Mask | None  # the only mask of an attention that may use `options`; None: any mask
    _options: dict[str, Any] | None = None

    @classmethod
    def of(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        list_chosen: Callable[[], Tensor],
        choose: Choose,
        mask: Mask | None = None,
    ) -> Self:
        """Return a choice with these attributes."""
        made = cls.of_shape(shape, dtype)
        made.list_chosen, made.choose, made.mask = list_chosen, choose, mask
        return made

    def make(self) -> Tensor:
        """List what was chosen."""
        return self.list_chosen()

    def options(self, this_pass: ForwardPass, masked: Any) -> dict[str, Any] | None:
        """Return arguments of `Batch.attend`; None: the elements say them. The first layer that asks has it chosen.

        `masked` are the positions that the mask of the pass hides.
        """
        if self._options is None:
            self._options = self.choose(this_pass, masked)
        return self._options


class Chosen(NamedTuple):
    """The choice that an attention is handed: columns, or blocks of columns, for each query."""

    indices: Tensor  # [batch, queries, n], or [batch, KV heads, queries, n]; a negative one is none
    block: int  # the columns of a block; 1: they are columns
    hides_padding: bool = False  # whether it says of padding that it is hidden, in place of a mask

    @property
    def choice(self) -> Choice | None:
        """What the kernels choose; None: the model chose, or a program has read the elements, and may change them."""
        return self.indices if isinstance(self.indices, Choice) and self.indices.made is None else None

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
        num_kv_heads = rows.layer.passes.layers[rows.layer.index].num_kv_heads
        has_tokens = rows.new is not None and self.indices.shape[-2] == rows.new[0].shape[2]
        has_mask = self.choice is None or self.choice.mask is None or self.choice.mask is mask
        return has_tokens and has_mask and num_choices in (1, num_kv_heads)

    def options(self, this_pass: ForwardPass, masked: Any) -> dict[str, Any]:
        """Return the arguments of `Batch.attend` for the choice."""
        options = None if self.choice is None else self.choice.options(this_pass, masked)
        return self._of_columns(this_pass) if options is None else options

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


class IndexKeys(Layer):
    """The keys of a layer's indexer: a layer of the `KVCache` that holds keys alone.

    It stands by itself for a layer of the model that reads another layer's rows.
    """

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys alone."""
        return (k,)

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Take the new tokens' keys, ``[batch, 1, tokens, dim]``; return a lazy tensor for the keys of all tokens."""
        return self.update(idx_k, idx_k[..., :0])[0]

    def choose(self, this_pass: ForwardPass, query: Query, masked: Any) -> dict[str, Any]:
        """Store the new keys, and choose. Return arguments of `Batch.attend`: none if all rows would be chosen."""
        if self.index in this_pass.pending:
            self.passes.put(this_pass, self.index)
        num_rows = this_pass.num_seen + this_pass.num_tokens - min(this_pass.offsets)
        if num_rows <= query.width * query.block:
            return {}
        return {"chosen": query.choose(this_pass, self.index, masked), "chosen_block": query.block}


class HeldKeys:
    """Stands for a cache, and for its layers, where a model's own indexer scores keys that the cache has taken."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self.layers = self  # it stands for each of them, too

    def __getitem__(self, layer_idx: int) -> HeldKeys:
        return self

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Return the keys of all tokens, ``[batch, 1, tokens, dim]``."""
        return self._keys

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Return the keys of all tokens, ``[batch, tokens, dim]``."""
        return self._keys.squeeze(1)


class _NoPositions:
    """The positions of all tokens, which Qwen 4 keeps in a cache: none, as its rows hold what comes of them."""

    def __get__(self, layer: Any, owner: type) -> None:
        return None

    def __set__(self, layer: Any, positions: Tensor) -> None:
        """Keep nothing."""


class Indexing(Protocol):
    """The keys of an indexer, of single tokens or of several each."""

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Take the new tokens' keys, ``[batch, 1, tokens, dim]``; return those of all tokens."""


class _Indexed:
    """A layer that has keys of an indexer beside its rows."""

    index_keys: Indexing
    indexer_position_ids = _NoPositions()

    def update_index(self, idx_k: Tensor) -> Tensor:
        """As `IndexKeys.update_index`."""
        return self.index_keys.update_index(idx_k)


class IndexedLayer(_Indexed, Layer):
    """A layer of keys and values with an indexer."""


class IndexedLatentLayer(_Indexed, LatentLayer):
    """A layer of latent attention with an indexer."""


OWN_FORWARD = (
    "the forward function of the model's {} was set before the first HFCache for such a model was made, as hooks of"
    " accelerate do: call kvcache.hf.enable, or make an HFCache, before that"
)

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
        rows, inputs = (passes.layers[i].policy for i in (index, index + 1))
        assert isinstance(rows, FullAttention)
        assert isinstance(inputs, SlidingWindow)
        self.block = rows.stride  # the tokens that a row stands for
        self.span = inputs.window  # the tokens that a row is made of

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

    def choose(
        self, inputs: Tensor, padding: Tensor | None, pool: Callable[[Tensor], Tensor], query: Query, has_tail: bool
    ) -> Choice:
        """Store keys as `take` does, and choose blocks for the new tokens.

        `has_tail` says whether a token sees its own incomplete block, too.
        """
        taken = self.take(inputs, padding, lambda spans, *_: pool(spans), query.block)
        options: dict[str, Any] = {}
        blocks = None  # all that are complete
        if not has_tail or self.leaves_out(taken, query.width):
            chosen = query.choose(taken.this_pass, self.index)
            options = {"chosen": chosen, "chosen_block": self.block, "chosen_tail": has_tail}
            blocks = None if chosen is None else torch.from_numpy(chosen[:, 0].astype(np.int64))
        width = query.width * query.block + (query.block - 1 if has_tail else 0)
        return Choice.of(
            (*taken.positions.shape, width),
            torch.int32,
            lambda: _columns_of(blocks, query, has_tail, taken),
            lambda this_pass, masked: options,
        )

    def leaves_out(self, taken: Taken, width: int) -> bool:
        """Whether some token of a pass has more blocks than it chooses."""
        return int(taken.positions.max()) + 1 >= (width + 1) * self.block

    def update_index(self, idx_k: Tensor) -> Tensor:
        """Raise NotSupportedError: the keys of single tokens are not kept."""
        raise NotSupportedError(OWN_FORWARD.format("indexer"))


def _columns_of(blocks: Tensor | None, query: Query, has_tail: bool, taken: Taken) -> Tensor:
    """List the columns of the blocks that each token chose, then the columns of its incomplete block.

    `blocks` are ``[tokens without padding, n]``; None: all that are complete. Return ``[batch, tokens, n]``.
    """
    positions, block = taken.positions[..., None], query.block
    complete = (positions + 1) // block
    listed = torch.arange(query.width).repeat(*taken.positions.shape, 1)
    if blocks is not None:
        listed[taken.positions >= 0] = blocks
    listed = torch.where(listed < complete, listed, -1)[..., None]
    columns = torch.where(listed < 0, -1, listed * block + torch.arange(block)).flatten(2)
    if has_tail:
        tail = complete * block + torch.arange(block - 1)
        columns = torch.cat((columns, torch.where(tail <= positions, tail, -1)), -1)
    offsets = torch.tensor(taken.this_pass.offsets)[:, None, None]
    return torch.where((columns < 0) | (positions < 0), -1, columns + offsets).int()


class SharedLayer(Layer):
    """A layer whose keys are the values, too."""

    compressed: Pooled | None = None  # the rows beside its own
    index_keys: PooledKeys | None = None  # by which tokens choose among these

    def pack(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the keys alone."""
        return (k,)

    def begin(self, new: Tensor, padding: Tensor | None) -> None:
        """Begin the batch of the pass that brought these rows; `padding` says which tokens so far the mask shows."""
        this_pass = self.passes.last
        assert this_pass is not None
        if not this_pass.is_open:
            self.passes.open(this_pass, len(new), new.shape[2], padding)

    def store_compression_weights(self, *args: Any) -> NoReturn:
        """Raise NotSupportedError: only the model's own function calls this."""
        raise NotSupportedError(OWN_FORWARD.format("attention"))


class Compressed(NamedTuple):
    """Rows that stand for several tokens each, which the tokens of a pass see beside a layer's own rows."""

    rows: Pooled
    taken: Taken
    chosen: npt.NDArray[np.int32] | None  # the blocks that each token chose; None: all

    def attend(self, batch: Batch, q: Tensor, options: dict[str, Any]) -> Any:
        """Attend over the rows, with some of these options; return what `Batch.attend` takes as `prior`."""
        given = {name: options[name] for name in ("scale", "precision", "layout", "out")}
        if self.chosen is not None:
            given |= {"chosen": self.chosen, "chosen_block": self.rows.block}
        return batch.attend(self.rows.index, q, return_lse=True, **given)

    def join(self, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Append the rows, as dense tensors, to keys and values, and what tokens see of them to a mask.

        Keys and values are ``[batch, 1, columns, dim]``. The mask, ``[batch, 1, queries, columns]``, is of bool, or is
        added to scores.
        """
        num_rows = int((self.taken.positions.max() + 1).clamp(min=0)) // self.rows.block
        rows, shown = self._dense(key, num_rows), self._shown(num_rows)
        if mask is None:
            mask = shown.new_ones(*shown.shape[:3], key.shape[2])
        if mask.dtype != torch.bool:
            shown = torch.zeros(shown.shape, dtype=mask.dtype).masked_fill(~shown, torch.finfo(mask.dtype).min)
        mask = torch.cat((mask.expand(len(shown), -1, -1, -1), shown), -1)
        return torch.cat((key, rows), 2), torch.cat((value, rows), 2), mask

    def _dense(self, like: Tensor, num_rows: int) -> Tensor:
        """Return the rows of each sequence, ``[batch, 1, rows, dim]``; one with fewer has zeros behind them."""
        layer, taken = self.rows, self.taken
        passes = layer.passes
        dense = like.new_zeros(len(like), 1, num_rows, like.shape[3])
        with passes.turns.lock:  # until the rows are decoded, no other cache may end the pass, which adds some
            for rows, seq_id in zip(dense, passes.seq_ids, strict=True):
                num_stored = passes.cache.seq_len(seq_id, layer=layer.index)
                stored, _ = layer.decoder.decode_rows(layer.index, [seq_id], num_stored)
                rows[:, :num_stored] = stored[0]
        if taken.made is not None:
            batch_indices, columns = taken.places
            dense[batch_indices, 0, taken.positions[batch_indices, columns] // layer.block] = taken.made
        return dense

    def _shown(self, num_rows: int) -> Tensor:
        """Return which rows each token sees, of bool, ``[batch, 1, tokens, rows]``."""
        positions = self.taken.positions
        shown = torch.arange(num_rows) < (positions[:, None, :, None] + 1) // self.rows.block
        if self.chosen is None:
            return shown
        blocks = torch.full((*positions.shape, self.chosen.shape[-1]), -1)
        blocks[positions >= 0] = torch.from_numpy(self.chosen[:, 0]).long()
        return shown & shown_by(blocks.unsqueeze(1), num_rows)

"""What an indexer chooses, and the layers that have one: their keys are layers of the `KVCache` of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.hf.layers import LatentLayer, Layer, LayerRows
from kvcache.hf.lazy import LazyTensor, Mask, elements_of, shown_by
from kvcache.hf.passes import ForwardPass


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
        num_kv_heads = rows.layer.passes.cache.layers[rows.layer.index].num_kv_heads
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
        self.layers = self

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

"""Layers of DeepSeek V4: rows of a window, whose keys are the values, and beside them rows of several tokens each."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvcache.batch import Batch
from kvcache.errors import NotSupportedError
from kvcache.hf.layers import Layer
from kvcache.hf.masks import shown_by
from kvcache.hf.pooling import OWN_FORWARD, Pooled, PooledKeys, Taken


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

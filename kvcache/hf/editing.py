"""Take back tokens of an `HFCache`, and move the rows of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.arguments import INT32_MAX, INT64_MAX, integer
from kvcache.errors import KVCacheError, shown
from kvcache.hf.prefixing import PrefixedBatch
from kvcache.hf.recurrent import Narrowed

INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}  # types of indices


def indices_of(given: Any, name: str, num_rows: int) -> list[int]:
    """Return batch indices, or the True places of a mask, as a list. Raise if there are none, or one is no row."""
    try:
        indices = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        indices = None
    if indices is not None and indices.dtype == torch.bool and indices.shape == (num_rows,):
        indices = indices.nonzero()[:, 0]
    if indices is None or indices.ndim != 1 or (len(indices) and indices.dtype not in INTEGERS):
        raise TypeError(f"{name}={shown(given)}: batch indices are needed, a tensor or a list of integers")
    batch_indices: list[int] = indices.tolist()
    if not batch_indices:
        raise ValueError(f"{name}: no row of the batch would be left: select one or more, or reset the cache")
    for i in batch_indices:
        if not 0 <= i < num_rows:
            raise IndexError(f"{name} has {i}: the rows of the batch are 0 to {num_rows - 1}")
    return batch_indices


class EditableBatch(PrefixedBatch):
    """Crops, reorders, selects and repeats sequences; a base of `HFCache`."""

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens: `tokens_to_remove` is minus their number.

        Tokens of the last pass can always be removed. Before them, a window can go back as far as its `resume_window`
        keeps rows, else ``RowsGoneError`` is raised, and nothing has changed.

        Recurrent layers go back only to where their states are kept: before each pass of several tokens behind others,
        up to four of these, if there is no prefix cache. Otherwise ``NotSupportedError`` is raised, names the nearest
        kept states, and nothing has changed. Convolutions also go back in the last pass after
        `activate_past_recording`. If a pass of several tokens failed within its layers, ``crop(0)`` goes back to before
        it.
        """
        tokens_to_remove = integer(tokens_to_remove, "tokens_to_remove", -INT64_MAX, INT64_MAX)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        passes = self._passes
        passes.check_user()
        with passes.turns.lock:  # until tokens of the last pass are taken back, no other cache may end it
            if not passes.num_open:
                passes.end()
            before = self.get_seq_length()  # without a pass that failed behind its last rows
            seen = max(0, before + tokens_to_remove)
            num_back = min(passes.length - seen, passes.num_open)
            stuck: list[int] = []  # sequences whose windows have moved on
            if seen < passes.num_seen:
                begins = zip(passes.seq_ids, passes.offsets, strict=True)
                stuck = [i for i, offset in begins if not self._cache.can_resume(max(0, seen - offset), seq_id=i)]
            if stuck:
                num_back = 0
            else:
                self._recurrent.check_crop(before - seen, seen)
            narrowed = self._recurrent.narrowed(before - seen, seen)
            try:
                self._take_back(before, seen, num_back, stuck, narrowed)
            except (KVCacheError, ValueError):  # of rows, none of which has changed
                raise
            except BaseException:  # an interrupt came halfway: the same again completes it
                try:
                    self._take_back(before, seen, num_back, stuck, narrowed)
                except BaseException:
                    self.reset()
                    raise
                raise

    def _take_back(self, before: int, seen: int, num_back: int, stuck: list[int], narrowed: Sequence[Narrowed]) -> None:
        """Take back the columns from `seen` to `before`, of which the last pass has `num_back`.

        `stuck` are sequences whose windows have moved on, `narrowed` what states of convolutions become. Whatever was
        done before, it ends alike.
        """
        passes = self._passes
        passes.end(num_back)
        lengths = {i: max(0, seen - offset) for i, offset in zip(passes.seq_ids, passes.offsets, strict=True)}
        for seq_id in (*stuck, *lengths):  # first what raises: then none has changed
            self._cache.truncate(lengths[seq_id], seq_id=seq_id)  # also tells a prefix cache what was taken back
        if self._recurrent.crop(seen, narrowed):
            passes.has_dropped = False
        self.text = None if self.text is None else self.text[:, :seen]
        self.ahead = None if self.ahead is None or not seen else self.ahead[:, :seen]
        if passes.prompts is not None and seen < before:
            if self.begins_behind(seen):
                passes.prompts = None  # what comes now may have other padding
            else:
                passes.prompts.crop(seen)
        passes.num_seen, passes.offsets = seen, [min(offset, seen) for offset in passes.offsets]

    def reorder_cache(self, beam_idx: torch.Tensor | Sequence[int]) -> None:
        """Continue batch index i from the tokens of index ``beam_idx[i]``; no row of keys or values is copied."""
        self._select(beam_idx, "beam_idx")

    def batch_select_indices(self, indices: torch.Tensor | Sequence[int]) -> None:
        """Keep the sequences at some batch indices, or at the True places of a mask. Drop the others."""
        self._select(indices, "indices")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch `repeats` times."""
        num_rows = len(self._passes.seq_ids)
        repeats = integer(repeats, "repeats", 0, INT32_MAX)
        self._select(torch.arange(num_rows).repeat_interleave(repeats), f"repeats={repeats}")

    def _select(self, indices: torch.Tensor | Sequence[int], name: str) -> None:
        """Make a batch of the sequences at these indices; nothing has changed where one does not exist."""
        self._passes.check_user()
        self._passes.end()
        num_rows = len(self._passes.seq_ids)
        if not num_rows:  # transformers' own caches ignore this as well
            return
        batch_indices = indices_of(indices, name, num_rows)
        before = self._passes.seq_ids
        try:
            self._passes.select(batch_indices)
            self.text, self.has_moved_rows = None if self.text is None else self.text[batch_indices], True
            self.ahead = None if self.ahead is None else self.ahead[batch_indices]
            self._recurrent.select(batch_indices)
        except BaseException:
            if self._passes.seq_ids is not before:  # an interrupt came halfway
                self.reset()
            raise

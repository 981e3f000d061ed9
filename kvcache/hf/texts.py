"""Let a cache go on with another text than the one that it holds: from where both begin alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache.errors import RowsGoneError

if TYPE_CHECKING:
    from kvcache.hf.cache import HFCache


def begin_text(cache: HFCache, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Cut a cache to what it has in common with a text that `generate` is given as a whole, and note the text.

    A text that goes on from what the cache holds is left as it is; so is one that is longer, where the cache was filled
    with tokens that nobody told it.

    Raises
    ------
    ValueError
        If the text is not longer than what the cache holds, and the cache does not know its own tokens.
    """
    seen, length = cache.get_seq_length(), input_ids.shape[1]
    known = None if cache.text is None or len(cache.text) != len(input_ids) else cache.text[:, :seen]
    if known is not None:
        num_common = _count_common(known, input_ids, mask)
        if length <= seen or num_common < known.shape[1]:
            _cut(cache, min(num_common, length - 1))
    elif length <= seen:
        raise ValueError(
            f"input_ids has {length} tokens, and the cache holds {seen} tokens that it was not told: crop the cache to"
            " what both begin with, or reset it"
        )
    cache.text = input_ids


def end_text(cache: HFCache, tokens: torch.Tensor) -> None:
    """Note the whole text that `generate` returns, unless the rows of the batch changed places (beam search)."""
    if cache.text is None or len(tokens) != len(cache.text):
        return
    begin = tokens[:, : cache.text.shape[1]]
    if torch.equal(begin, cache.text):
        cache.text = tokens[:, : cache.get_seq_length()]


def _count_common(known: torch.Tensor, input_ids: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Count the columns before the first in which a token that the mask shows is another one in any row."""
    n = min(known.shape[1], input_ids.shape[1])
    differs = known[:, :n] != input_ids[:, :n]
    if mask is not None:
        differs &= mask[:, :n].bool()
    columns = differs.any(0).nonzero()
    return int(columns[0]) if len(columns) else n


def _cut(cache: HFCache, length: int) -> None:
    """Keep the first tokens, or none where a layer cannot go back to there."""
    if length and not cache.others:  # these do not go back
        try:
            cache.crop(length - cache.get_seq_length())
            return
        except RowsGoneError:  # a window has moved on
            pass
    cache.reset()

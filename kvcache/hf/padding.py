"""Padding of a batch: which columns are not stored, and which stored positions a mask hides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from kvcache.layer import count


def refuse_padding(row: int, offset: int) -> NoReturn:
    """Raise ValueError for a mask that shows padding which was not stored."""
    raise ValueError(
        f"attention_mask shows the first {offset} tokens of row {row}, which it hid as padding when they came, so that"
        " they were not stored: hide them again, or reset the cache"
    )


def refuse_batch(batch_size: int, num_filled: int) -> NoReturn:
    """Raise ValueError for a batch of more or fewer rows than the cache holds."""
    repeats, left = divmod(batch_size, num_filled)
    method = "batch_select_indices with as many indices" if left else f"batch_repeat_interleave({repeats})"
    raise ValueError(
        f"the batch has {count(batch_size, 'row')}: the cache was filled with {num_filled}; reset it, or call"
        f" {method} first"
    )


def check_rows(inputs: Mapping[str, Any], num_filled: int) -> None:
    """Raise ValueError if a model's arguments have other rows than its cache; `num_filled` -1: the cache has none."""
    fed = _fed(inputs)
    if fed is not None and num_filled >= 0 and len(fed) != num_filled:
        refuse_batch(len(fed), num_filled)


def count_fed(inputs: Mapping[str, Any]) -> int:
    """Return how many tokens of each row a model's arguments feed; 0 if they do not say it."""
    fed = _fed(inputs)
    return fed.shape[1] if isinstance(fed, torch.Tensor) and fed.ndim > 1 else 0


def _fed(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the tokens, or their embeddings, of a model's arguments: ``[batch, tokens, ...]``."""
    return next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)


def check_mask(mask: torch.Tensor, batch_size: int) -> None:
    """Raise ValueError if a mask ``[batch, columns]`` has more or fewer rows than the batch."""
    if mask.ndim == 2 and len(mask) != batch_size:
        raise ValueError(
            f"attention_mask has {count(len(mask), 'row')}, and the batch {batch_size}: give it a row for each text"
        )


def shown_columns(padding: torch.Tensor, num_columns: int) -> npt.NDArray[np.bool_]:
    """Return which columns a mask shows, ``[batch, num_columns]``; it hides columns that it does not have."""
    shown = np.zeros((len(padding), num_columns), np.bool_)
    given = padding[:, :num_columns].bool().numpy(force=True)
    shown[:, : given.shape[1]] = given
    return shown


def count_leading(shown: npt.NDArray[np.bool_]) -> list[int]:
    """Count the hidden columns before the first shown column, for each row."""
    counts: list[int] = np.where(shown.any(1), shown.argmax(1), shown.shape[1]).tolist()
    return counts


def masked_ranges(
    shown: npt.NDArray[np.bool_], seq_ids: Sequence[int], offsets: Sequence[int]
) -> list[tuple[int, int, int]]:
    """Return the positions that a mask hides, as ranges ``(seq_id, begin, end)``, by rising position for each row.

    `shown` says which columns the mask shows, ``[batch, columns]`` of bool; `seq_ids` and `offsets` have the sequence
    of each row, and the column of its position 0.
    """
    ranges: list[tuple[int, int, int]] = []
    for row, seq_id, offset in zip(shown, seq_ids, offsets, strict=True):
        if row[offset:].all():
            continue
        edges = np.flatnonzero(np.diff(~row[offset:], prepend=False, append=False)).tolist()
        ranges += [(seq_id, begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
    return ranges

"""What a call of a model feeds: its tokens, as far as the rows that it makes follow from them, and its padding.

A column is a place in the batch's texts, padding included; the offset of a row is the column of its first token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers.generation.utils import ALL_CACHE_NAMES

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


NAMES_OF_CACHE = NEW_NAME, OLD_NAME = "cache", "past_key_values"  # from transformers 5.24 on, and before
CACHE = NEW_NAME if NEW_NAME in ALL_CACHE_NAMES else OLD_NAME  # in the release that runs

# In place of a token:
NONE = -1  # it was hidden
UNKNOWN = -2  # nobody told which one was fed, or its row follows from other things, too
NAMED = UNKNOWN - 2**62  # numbers below stand for a token of a known image; those between for one at other positions

# Arguments that `Prompts.tell` looks into, or that change what is made of a model's result alone.
READ = ("input_ids", "attention_mask", "position_ids", "cache_position")
OF_RESULTS = ("labels", "logits_to_keep")
FEATURES = "mm_encoder_outputs"  # of images, which `generate` has a model encode before the text
TYPES = "mm_token_type_ids"  # 0 for a token of text
Tokens: TypeAlias = npt.NDArray[np.int64]  # [batch, columns], UNKNOWN where rows do not follow from a token


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache that a call is given under either name, or None."""
    cache = arguments.get(NEW_NAME)
    return arguments.get(OLD_NAME) if cache is None else cache


def name_cache(arguments: dict[str, Any]) -> None:
    """Give a cache its older name where transformers knows no other, so that one program runs with every release."""
    if CACHE != NEW_NAME and arguments.get(NEW_NAME) is not None and arguments.get(CACHE) is None:
        arguments[CACHE] = arguments.pop(NEW_NAME)


def has_others(inputs: Mapping[str, Any]) -> bool:
    """Whether a model is given more that rows follow from than tokens, mask and positions: images, embeddings.

    Types that call all tokens text say nothing.
    """
    types = inputs.get(TYPES)
    is_text = isinstance(types, torch.Tensor) and not types.any()
    known = (*READ, *OF_RESULTS, *((TYPES,) if is_text else ()))
    for name in inputs.keys() - {*known}:
        value = inputs[name]
        if isinstance(value, torch.Tensor) or (isinstance(value, (list, tuple, dict)) and value):
            return True
    return inputs.get("is_causal") is False


def without_images(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's arguments except what they say of images."""
    return {name: value for name, value in inputs.items() if name not in (FEATURES, TYPES)}


def at_positions(tokens: torch.Tensor, positions: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    """Return tokens that compare as equal only at the same positions: a digest of both where these are not usual.

    `tokens` and `usual` are ``[batch, columns]``, `positions` ``[axes, batch, columns]``. A digest is below UNKNOWN.
    """
    given = positions.numpy(force=True).astype(np.uint64)
    digest = tokens.numpy(force=True).astype(np.uint64)
    for axis in given:
        digest = (digest ^ digest >> np.uint64(32)) * np.uint64(0x9E3779B97F4A7C15) + axis
    digest = (digest ^ digest >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
    named = UNKNOWN - 1 - torch.from_numpy((digest >> np.uint64(2)).astype(np.int64))
    is_usual = torch.from_numpy((given == usual.numpy(force=True).astype(np.uint64)).all(0))
    return torch.where(is_usual | (tokens == NONE), tokens, named)


def widened(ahead: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return how far positions are ahead, ``[batch, columns]``, of so many columns: further ones are like the last."""
    return torch.cat([ahead, ahead[:, -1:].expand(-1, max(0, num_columns - ahead.shape[1]))], 1)[:, :num_columns]


@dataclass(frozen=True)
class Images:
    """A text that `generate` is given, with what is known of its images."""

    tokens: torch.Tensor  # [batch, columns], for the tokens of a known image numbers below NAMED that follow from it
    lacking: torch.Tensor  # [batch, columns], which tokens stand for an image or sound, and nothing is given for them
    unnamed: torch.Tensor  # [batch, columns], which stand for what is given, and is not known
    has_names: bool  # whether there are images, and all are known
    is_causal: bool  # whether the rows of images follow from nothing behind them, and from no other arguments
    positions: npt.NDArray[np.int64] | None = None  # where the model counts height and width, [axes, batch, columns]

    @property
    def are_given(self) -> bool:
        """Whether there are images, and all are given."""
        return not self.num_needed and (self.has_names or bool(self.unnamed.any()))

    @property
    def num_needed(self) -> int:
        """The first columns that a cache must hold, because nothing is given for the last token of them."""
        columns = self.lacking.any(0).nonzero()
        return int(columns[-1]) + 1 if len(columns) else 0

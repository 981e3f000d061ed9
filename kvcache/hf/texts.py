"""Let a cache continue with another text than it holds: from the last column that both have in common."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import torch

from kvcache.errors import RowsGoneError
from kvcache.hf.images import Images
from kvcache.hf.told import NAMED, NONE, UNKNOWN, at_positions

if TYPE_CHECKING:
    from kvcache.hf.cache import HFCache
    from kvcache.hf.encoder_decoder import HFEncoderDecoderCache


def begin_text(
    cache: HFCache,
    images: Images,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    follows_from_others: bool,
) -> None:
    """Cut a cache to the columns it shares with a text that `generate` is given as a whole, and note the text.

    A text that continues the cache's text changes nothing. Nor does a longer text if the cache was filled with tokens
    that nobody told it. Any other text begins anew if its rows, or the cache's, follow from more than tokens, known
    images and `positions` (`follows_from_others`): the cache does not know what else. So does a text with images if
    there is a prefix cache, which is then told their names. If images are given that are not known, their tokens are
    no common ones. If the text does not begin with the acquired prompts, forget all: its rows would get their names.

    Raise ``ValueError``, and change nothing, if the cache does not know its own tokens and the text is not longer.
    Raise it also if the number of rows differs, except for beams of the same prompts; or if tokens of images would be
    fed that are not given. `positions` of None are the usual ones.
    """
    needed, tokens = images.num_needed, images.tokens
    if cache.has_lost_state:
        _cut(cache, 0 if cache.text is None else cache.get_seq_length(), needed)
    if cache.goes_on_by_one_token and tokens.shape[1] > cache.get_seq_length() + 1:
        begin_anew(cache, needed)
    seen, length = cache.get_seq_length(), tokens.shape[1]
    text = tokens if mask is None else tokens.masked_fill(~mask.bool(), NONE)
    if positions is not None:
        positions = _positions_of(text, positions)
        text = at_positions(text, positions, (text != NONE).cumsum(1) - 1)
    _match_beams(cache, text)
    cache.check_batch_size(len(text))
    if cache.text is not None and seen:
        known = cache.text[:, :seen]
        begin = text[:, : known.shape[1]]  # changed in place: an image that is held, and not given, is the same
        is_held = images.lacking[:, : known.shape[1]] & (known[:, :length] < NAMED)
        begin[is_held] = known[:, :length][is_held]
        num_common = _count_common(known, text)
        has_others = follows_from_others or cache.follows_from_others or (images.has_names and cache.has_prefix)
        if images.unnamed[:, :seen].any():
            _cut(cache, 0, needed)
        elif length <= seen or num_common < known.shape[1]:
            _cut(cache, 0 if has_others else min(num_common, length - 1), needed)
    elif not cache.is_acquired:
        check_longer(cache, length, "input_ids", "that it was not told")
    if not cache.is_begun_by(text, NONE):
        begin_anew(cache, needed)
    check_given(cache.get_seq_length(), needed)
    cache.text, cache.has_moved_rows = text, False
    cache.next_positions = None if positions is None else positions[..., -1:] + 1
    cache.follows_from_others |= follows_from_others


def check_given(num_kept: int, needed: int) -> None:
    """Raise ValueError if tokens of images that are not given come behind what a cache keeps, before `needed`."""
    if num_kept < needed:
        raise ValueError(
            f"input_ids has tokens of images or sound, up to column {needed - 1}, that are not given, and the cache"
            f" keeps {num_kept} columns of the text: give the images of the whole text, or its sound, in each turn"
        )


def _positions_of(text: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return the positions of a text's tokens, ``[axes, batch, columns]``; raise ValueError if some are missing."""
    batch_size, num_columns = text.shape
    if given.shape[-1] < num_columns:
        raise ValueError(
            f"position_ids has the shape {[*given.shape]}, input_ids {[*text.shape]}: give the positions of all tokens,"
            " also of those that the cache holds"
        )
    given = given[..., -num_columns:]  # as transformers takes them
    return given.reshape(-1, 1 if given.ndim == 1 else given.shape[-2], num_columns).expand(-1, batch_size, -1)


def check_longer(cache: HFCache, length: int, name: str, why: str) -> None:
    """Raise ValueError unless a text is longer than what a cache holds, which cannot be compared with it (`why`)."""
    seen = cache.get_seq_length()
    if seen > 0 and length <= seen:
        raise ValueError(
            f"{name} has {length} tokens, and the cache holds {seen} tokens {why}: crop the cache to what both begin"
            " with, or reset it"
        )


def end_text(cache: HFCache, tokens: torch.Tensor) -> None:
    """Note the whole text that `generate` returns, unless the rows of the batch changed places (beam search)."""
    cache.finish()
    if cache.text is None:
        return
    num_given = cache.text.shape[1]
    is_next = not cache.has_moved_rows and len(tokens) == len(cache.text) and tokens.shape[1] >= num_given
    if is_next and ((tokens[:, :num_given] == cache.text) | (cache.text < 0)).all():
        new = tokens[:, num_given : cache.get_seq_length()]
        if cache.next_positions is not None:
            columns = torch.arange(new.shape[1])
            new = at_positions(new, cache.next_positions + columns, (cache.text != NONE).sum(1, keepdim=True) + columns)
        cache.text = torch.cat([cache.text, new], 1)
    else:
        leave_text(cache)


def leave_text(cache: HFCache, has_failed: bool = False) -> None:
    """Note that nobody told what `generate` fed behind the text that it was given, or that it fed less.

    Forget all where it did not feed the whole prompts that it acquired: others may come in their place. If it failed
    (`has_failed`), a recurrent layer may lack the last tokens. Then the next text goes back to kept states, because no
    token behind these is known.
    """
    if cache.lacks_prompt:
        cache.reset()
    seen = cache.get_seq_length()
    if cache.text is not None:
        known = cache.text[:, : cache.recurrent.last_kept(seen) if has_failed and cache.recurrent else seen]
        cache.text = torch.nn.functional.pad(known, (0, seen - known.shape[1]), value=UNKNOWN)


def begin_source(cache: HFEncoderDecoderCache, encoded: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Reset a cache that holds the rows of another source, and note this one by a digest of each row.

    `encoded` is what the encoder made, ``[batch, tokens, dim]``; NaN alone stands for the source that the cache holds.
    A cache that was filled with a source that nobody told it is taken to hold this one. Raise ``ValueError``, and
    change nothing, if a source that is not known to be another one has more or fewer rows, or if NaN stands for none.
    """
    if encoded.isnan().all():
        _check_held(cache.cross_attention_cache, len(encoded))
        return
    parts = [x.detach().contiguous().view(torch.uint8).flatten(1) for x in (encoded, mask) if x is not None]
    rows = torch.cat(parts, 1).numpy(force=True)
    source = torch.tensor([list(hashlib.blake2b(row).digest()) for row in rows])
    held: Any = cache.cross_attention_cache
    if held.text is not None and not torch.equal(held.text, source):
        cache.reset()
    held.check_batch_size(len(source))
    held.text = source


def _check_held(cache: Any, batch_size: int) -> None:
    """Raise ValueError unless a cache holds an encoder's rows for so many texts."""
    cache.check_batch_size(batch_size)
    if cache.batch_size < 0:
        raise ValueError(
            "encoder_outputs is NaN, which stands for the source that the cache holds, and it holds none: give what the"
            " encoder makes of the source"
        )


def _match_beams(cache: HFCache, text: torch.Tensor) -> None:
    """Keep as many rows of each prompt as the text has, where the rows of both are beams of the same prompts.

    Beams of a prompt are neighbours. The cache knows the same tokens of them: only the prompt. Behind it, the text's
    rows may differ, as the sequences do that a beam search returns.
    """
    held = cache.text
    if held is None or len(held) == len(text) or held.shape[1] < cache.get_seq_length():
        return
    num_prompts = math.gcd(len(held), len(text))
    num_held, num_given = len(held) // num_prompts, len(text) // num_prompts
    num_known = int((held != UNKNOWN).all(0).sum())
    are_beams = (
        torch.equal(rows, rows[::num_beams].repeat_interleave(num_beams, 0))
        for rows, num_beams in ((held, num_held), (text[:, :num_known], num_given))
    )
    if all(are_beams):
        first_beams = torch.arange(0, len(held), num_held)
        cache.batch_select_indices(first_beams.repeat_interleave(num_given))


def _count_common(known: torch.Tensor, text: torch.Tensor) -> int:
    """Count the columns before the first column in which the tokens of some row differ.

    A token that is hidden now differs itself. Its row would still count as a sink, or in a state, or for an indexer.
    """
    n = min(known.shape[1], text.shape[1])
    columns = (known[:, :n] != text[:, :n]).any(0).nonzero()
    return int(columns[0]) if len(columns) else n


def _cut(cache: HFCache, length: int, needed: int) -> None:
    """Keep the first tokens; none where a layer cannot go back to there, or their rows follow from what is cut off.

    Recurrent layers go back to the last kept states before. If none is kept, this is `begin_anew`. Raise ``ValueError``
    as `check_given` does.
    """
    if cache.recurrent:
        length = cache.recurrent.last_kept(length)
    if length and not cache.follows_from_later and not cache.begins_behind(length):
        check_given(length, needed)
        try:
            cache.crop(length - cache.get_seq_length())
            return
        except RowsGoneError:  # a window has moved on
            pass
    begin_anew(cache, needed)


def begin_anew(cache: HFCache, needed: int) -> None:
    """Forget all tokens; raise ValueError, and change nothing, if images of a text are not given (`check_given`)."""
    check_given(0, needed)
    cache.reset()

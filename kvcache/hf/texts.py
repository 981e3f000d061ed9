"""Let a cache continue with another text than it holds, and feed a long prompt in pieces.

It continues from the last column that both texts have in common. With pieces, a layer with a window holds no more than
a piece beside the window. A column is a place in the texts, padding included. `texts.tokens` are the tokens that
`generate` told, with NONE for padding and UNKNOWN for a token that nobody told; None: it told nothing. `needed` is the
column up to which a cache must hold a text, because images before it are not given.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcache.errors import RowsGoneError
from kvcache.hf.batch import TextBatch
from kvcache.hf.images import features_between
from kvcache.hf.told import FEATURES, NAMED, NONE, TYPES, UNKNOWN, Images, at_positions
from kvcache.models.shapes import PREFILL_TOKENS
from kvcache.models.states import CHECKPOINT_TOKENS
from kvcache.policy import window_of


def begin_text(
    texts: TextBatch,
    images: Images,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    follows_from_others: bool,
    has_prefix: bool,
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
    if texts.has_lost_state:
        _cut(texts, 0 if texts.tokens is None else texts.length, needed)
    if texts.goes_on_by_one_token and tokens.shape[1] > texts.length + 1:
        begin_anew(texts, needed)
    text = tokens if mask is None else tokens.masked_fill(~mask.bool(), NONE)
    if positions is not None:
        positions = _positions_of(text, positions)
        text = at_positions(text, positions, (text != NONE).cumsum(1) - 1)
    _match_beams(texts, text)
    texts.check_batch_size(len(text))
    if _rotates_otherwise(texts, mask):
        begin_anew(texts, needed)
    seen, length = texts.length, tokens.shape[1]
    if texts.tokens is not None and seen:
        known = texts.tokens[:, :seen]
        begin = text[:, : known.shape[1]]  # changed in place: an image that is held, and not given, is the same
        is_held = images.lacking[:, : known.shape[1]] & (known[:, :length] < NAMED)
        begin[is_held] = known[:, :length][is_held]
        num_common = _count_common(known, text)
        has_others = follows_from_others or texts.follows_from_others or (images.has_names and has_prefix)
        if images.unnamed[:, :seen].any():
            _cut(texts, 0, needed)
        elif length <= seen or num_common < known.shape[1]:
            _cut(texts, 0 if has_others else min(num_common, length - 1), needed)
    elif not texts.is_acquired:
        check_longer(texts, length, "input_ids", "that it was not told")
    if not texts.is_begun_by(text, NONE):
        begin_anew(texts, needed)
    check_given(texts.length, needed)
    texts.tokens, texts.has_moved_rows = text, False
    texts.next_positions = None if positions is None else positions[..., -1:] + 1
    texts.follows_from_others |= follows_from_others


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


def check_longer(texts: TextBatch, length: int, name: str, why: str) -> None:
    """Raise ValueError unless a text is longer than what a cache holds, which cannot be compared with it (`why`)."""
    seen = texts.length
    if seen > 0 and length <= seen:
        raise ValueError(
            f"{name} has {length} tokens, and the cache holds {seen} tokens {why}: crop the cache to what both begin"
            " with, or reset it"
        )


def end_text(texts: TextBatch, tokens: torch.Tensor) -> None:
    """Note the whole text that `generate` returns, unless the rows of the batch changed places (beam search)."""
    texts.passes.finish()
    if texts.tokens is None:
        return
    num_given = texts.tokens.shape[1]
    is_next = not texts.has_moved_rows and len(tokens) == len(texts.tokens) and tokens.shape[1] >= num_given
    if is_next and ((tokens[:, :num_given] == texts.tokens) | (texts.tokens < 0)).all():
        new = tokens[:, num_given : texts.length]
        if texts.next_positions is not None:
            columns = torch.arange(new.shape[1])
            new = at_positions(
                new, texts.next_positions + columns, (texts.tokens != NONE).sum(1, keepdim=True) + columns
            )
        texts.tokens = torch.cat([texts.tokens, new], 1)
    else:
        leave_text(texts)


def leave_text(texts: TextBatch, has_failed: bool = False) -> None:
    """Note that nobody told what `generate` fed behind the text that it was given, or that it fed less.

    Forget all where it did not feed the whole prompts that it acquired: others may come in their place. If it failed
    (`has_failed`), a recurrent layer may lack the last tokens. Then the next text goes back to kept states, because no
    token behind these is known.
    """
    if texts.lacks_prompt:
        texts.reset()
    seen = texts.length
    if texts.tokens is not None:
        known = texts.tokens[:, : texts.recurrent.last_kept(seen) if has_failed and texts.recurrent.layers else seen]
        texts.tokens = torch.nn.functional.pad(known, (0, seen - known.shape[1]), value=UNKNOWN)


def begin_source(
    held: TextBatch, reset: Callable[[], None], encoded: torch.Tensor, mask: torch.Tensor | None
) -> None:  # fmt: skip
    """Reset a cache that holds the rows of another source, and note this one by a digest of each row.

    `held` are the sources of the cache that `reset` resets. `encoded` is what the encoder made, ``[batch, tokens,
    dim]``; NaN alone stands for the source that the cache holds. A cache that was filled with a source that nobody told
    it is taken to hold this one. Raise ``ValueError``, and change nothing, if a source that is not known to be another
    one has more or fewer rows, or if NaN stands for none.
    """
    if encoded.isnan().all():
        _check_held(held, len(encoded))
        return
    parts = [x.detach().contiguous().view(torch.uint8).flatten(1) for x in (encoded, mask) if x is not None]
    rows = torch.cat(parts, 1).numpy(force=True)
    source = torch.tensor([list(hashlib.blake2b(row).digest()) for row in rows])
    if held.tokens is not None and not torch.equal(held.tokens, source):
        reset()
    held.check_batch_size(len(source))
    held.tokens = source


def _check_held(held: TextBatch, batch_size: int) -> None:
    """Raise ValueError unless a cache holds an encoder's rows for so many texts."""
    held.check_batch_size(batch_size)
    if held.passes.batch_size < 0:
        raise ValueError(
            "encoder_outputs is NaN, which stands for the source that the cache holds, and it holds none: give what the"
            " encoder makes of the source"
        )


def _match_beams(texts: TextBatch, text: torch.Tensor) -> None:
    """Keep as many rows of each prompt as the text has, where the rows of both are beams of the same prompts.

    Beams of a prompt are neighbours. The cache knows the same tokens of them: only the prompt. Behind it, the text's
    rows may differ, as the sequences do that a beam search returns.
    """
    held = texts.tokens
    if held is None or len(held) == len(text) or held.shape[1] < texts.length:
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
        texts.select(first_beams.repeat_interleave(num_given), "indices")


def _count_common(known: torch.Tensor, text: torch.Tensor) -> int:
    """Count the columns before the first column in which the tokens of some row differ.

    A token that is hidden now differs itself. Its row would still count as a sink, or in a state, or for an indexer.
    """
    n = min(known.shape[1], text.shape[1])
    columns = (known[:, :n] != text[:, :n]).any(0).nonzero()
    return int(columns[0]) if len(columns) else n


def _cut(texts: TextBatch, length: int, needed: int) -> None:
    """Keep the first tokens; none where a layer cannot go back to there, or their rows follow from what is cut off.

    Recurrent layers go back to the last kept states before. If none is kept, this is `begin_anew`. Raise ``ValueError``
    as `check_given` does.
    """
    if texts.recurrent.layers:
        length = texts.recurrent.last_kept(length)
    if length and not texts.follows_from_later and not texts.begins_behind(length):
        check_given(length, needed)
        try:
            texts.crop(length - texts.length)
            return
        except RowsGoneError:  # a window has moved on
            pass
    begin_anew(texts, needed)


def _rotates_otherwise(texts: TextBatch, mask: torch.Tensor | None) -> bool:
    """Whether rows that are held may have another rotation than the text's new ones will (Phi-3).

    Such a model drops its cache by the number of columns, and rotates by the tokens of the longest text. So a text of
    more tokens than its first rotation is for begins anew behind padding, and where rows have lost a longer neighbour.
    """
    limit = getattr(texts.passes.config, "original_max_position_embeddings", None)
    if not limit or not texts.follows_from_later or mask is None:
        return False
    is_padded = not mask[:, :1].any() and int(mask.sum(1).max()) > limit
    return is_padded or (texts.has_moved_rows and texts.length > limit)


def begin_anew(texts: TextBatch, needed: int) -> None:
    """Forget all tokens; raise ValueError, and change nothing, if images of a text are not given (`check_given`)."""
    check_given(0, needed)
    texts.reset()


# The last tokens of a prompt, which are fed behind kept states. In a later turn, a template may write them otherwise
# ("<think>"). They are several, because some models (Zamba 2) compute a single token less precisely.
ENDING = 8
SHORT = 64  # tokens of a prompt that are fed again in less time than another pass takes
TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, TYPES: -1}  # the axis of a pass's tokens
SHOWING = ("output_attentions", "output_hidden_states")  # they ask for more of a prompt than its last token


class PieceByPiece:
    """Stands for a model where transformers feeds a prompt to it: a long one is cut into passes of `size` tokens.

    The result of the last pass is returned. While a pass runs, each layer holds what it sees and the pass's own tokens.
    Without a size, a pass has `PREFILL_TOKENS`, or `CHECKPOINT_TOKENS` where a prefix cache keeps states. If the cache
    is held beyond the call (`is_held`), recurrent layers can go back to before a prompt's last tokens. The model's
    attributes are found here, too. A prompt whose rows depend on later tokens is never cut.
    """

    def __init__(self, model: Any, texts: TextBatch, size: int | None, is_held: bool = False) -> None:
        self._model, self._texts = model, texts
        # Whether states are to be kept before the last tokens of a prompt.
        self._goes_back = is_held and bool(texts.recurrent.layers) and not texts.keeps_states
        self._size = size or (CHECKPOINT_TOKENS if texts.keeps_states else PREFILL_TOKENS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Feed what a pass of the model is given."""
        for piece in self._cut(inputs):
            result = self._model(**piece)
            self._texts.check_complete()
        return result

    def _cut(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Cut a pass into pieces. The last one has its whole size: a draft's guesses are all in it."""
        given = {name: axis for name, axis in TOKENS.items() if inputs.get(name) is not None}
        lengths = {inputs[name].shape[axis] for name, axis in given.items()}
        num_tokens, mask = max(lengths, default=0), inputs.get("attention_mask")
        known = (FEATURES, TYPES) if self._texts.knows_images else ()
        if len(lengths) > 1 or not self._gains(num_tokens) or not _follows_columns(inputs, known):
            return [inputs]
        seen = self._texts.length
        if mask is not None and mask.shape[1] != seen + num_tokens:
            return [inputs]
        ends = self._ends(num_tokens, seen, inputs.get("logits_to_keep") or 1)
        if mask is not None and self._texts.recurrent.layers:
            ends = _join_hidden(ends, mask[:, seen:].bool().all(0).tolist())
        begin, pieces = 0, []
        for end in ends:
            piece = {name: inputs[name].narrow(axis, begin, end - begin) for name, axis in given.items()}
            if mask is not None:
                piece["attention_mask"] = mask[:, : seen + end]
            if inputs.get(FEATURES):
                piece[FEATURES] = features_between(self._model.config, inputs, begin, end)
            pieces.append(inputs | piece)
            begin = end
        return pieces

    def _ends(self, num_tokens: int, seen: int, num_last: int) -> list[int]:
        """Return where the pieces of a pass end; the last one has `num_last` tokens or more.

        If a prefix cache keeps states behind pieces, pieces end where these help other prompts (`Prompts.ends`). The
        last piece is the last token, so that the whole prompt may come again, or with a store what follows the last
        full block.
        """
        if self._texts.keeps_states:
            columns = self._texts.ends_of_states(seen, seen + num_tokens - num_last, self._size)
            return [*(column - seen for column in columns), num_tokens]
        size = max(self._size, num_last) if self._exceeds_windows(num_tokens) else num_tokens
        ends = {*range((num_tokens - 1) % size + 1, num_tokens + 1, size)}
        if self._goes_back and num_tokens > SHORT and num_last <= ENDING:
            ends.add(num_tokens - ENDING)
        return sorted(ends)

    def _gains(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens takes less memory in pieces, or leaves states for other texts."""
        if self._texts.goes_on_by_one_token or self._texts.follows_from_later:
            return False
        return self._goes_back or self._texts.keeps_states or self._exceeds_windows(num_tokens)

    def _exceeds_windows(self, num_tokens: int) -> bool:
        """Whether a layer would hold more of a pass of so many tokens than it sees, and than a piece has."""
        if num_tokens <= self._size:
            return False
        windows = (window for policy in self._texts.policy if (window := window_of(policy)))
        return num_tokens > min(windows, default=num_tokens)


def _join_hidden(ends: list[int], shown: list[bool]) -> list[int]:
    """Return ends of pieces, without pieces of one token that some row of the batch does not show.

    transformers takes a pass of one token for a generated one, and has recurrent layers count it in each row.
    """
    joined: list[int] = []
    for end in ends:
        if end - (joined[-1] if joined else 0) > 1 or shown[end - 1]:
            joined.append(end)
        elif joined:
            joined[-1] = end
    return joined or ends  # a pass of one token stays


def _follows_columns(inputs: dict[str, Any], known: Sequence[str]) -> bool:
    """Whether a pass can be cut at any column: nothing except `known` tells of images or the like, or asks for all."""
    mask, types = inputs.get("attention_mask"), inputs.get(TYPES)
    if types is not None and TYPES not in known and types.any():
        return False
    if any(inputs.get(name) for name in SHOWING) or (mask is not None and getattr(mask, "ndim", 0) != 2):
        return False
    others = (value for name, value in inputs.items() if name not in (*TOKENS, "attention_mask", *known))
    return not any(isinstance(x, torch.Tensor) or (isinstance(x, (list, tuple, dict)) and x) for x in others)

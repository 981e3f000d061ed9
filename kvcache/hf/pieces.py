"""Feed long prompts in pieces, so that a layer with a window holds no more than a piece beside the window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache.hf.cache import HFCache
from kvcache.hf.images import features_between
from kvcache.hf.told import FEATURES, TYPES
from kvcache.models.shapes import PREFILL_TOKENS
from kvcache.policy import window_of

CHECKPOINT_TOKENS = 2048  # a state may take as much memory as the rows of so many tokens
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

    def __init__(self, model: Any, cache: HFCache, size: int | None, is_held: bool = False) -> None:
        self._model, self._cache = model, cache
        self._goes_back = is_held and bool(cache.recurrent) and not cache.keeps_states
        self._size = size or (CHECKPOINT_TOKENS if cache.keeps_states else PREFILL_TOKENS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        """Feed what a pass of the model is given."""
        for piece in self._cut(inputs):
            result = self._model(**piece)
            self._cache.check_complete()
        return result

    def _cut(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Cut a pass into pieces. The last one has its whole size: a draft's guesses are all in it."""
        given = {name: axis for name, axis in TOKENS.items() if inputs.get(name) is not None}
        lengths = {inputs[name].shape[axis] for name, axis in given.items()}
        num_tokens, mask = max(lengths, default=0), inputs.get("attention_mask")
        known = (FEATURES, TYPES) if self._cache.knows_images else ()
        if len(lengths) > 1 or not self._gains(num_tokens) or not _follows_columns(inputs, known):
            return [inputs]
        seen = self._cache.get_seq_length()
        if mask is not None and mask.shape[1] != seen + num_tokens:
            return [inputs]
        ends = self._ends(num_tokens, seen, inputs.get("logits_to_keep") or 1)
        if mask is not None and self._cache.recurrent:
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
        if self._cache.keeps_states:
            columns = self._cache.ends_of_states(seen, seen + num_tokens - num_last, self._size)
            return [*(column - seen for column in columns), num_tokens]
        size = max(self._size, num_last) if self._exceeds_windows(num_tokens) else num_tokens
        ends = {*range((num_tokens - 1) % size + 1, num_tokens + 1, size)}
        if self._goes_back and num_tokens > SHORT and num_last <= ENDING:
            ends.add(num_tokens - ENDING)
        return sorted(ends)

    def _gains(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens takes less memory in pieces, or leaves states for other texts."""
        if self._cache.goes_on_by_one_token or self._cache.follows_from_later:
            return False
        return self._goes_back or self._cache.keeps_states or self._exceeds_windows(num_tokens)

    def _exceeds_windows(self, num_tokens: int) -> bool:
        """Whether a layer would hold more of a pass of so many tokens than it sees, and than a piece has."""
        windows = (window for policy in self._cache.policy if (window := window_of(policy)))
        return num_tokens > max(self._size, min(windows, default=num_tokens))


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

"""Feed long prompts in pieces, so that a layer with a window holds no more than a piece beside the window."""

from __future__ import annotations

from typing import Any

import torch

from kvcache.hf.cache import HFCache
from kvcache.hf.policies import window_of
from kvcache.models.shapes import PREFILL_TOKENS

TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}  # the axis of a pass's tokens
SHOWING = ("output_attentions", "output_hidden_states")  # they ask for more of a prompt than its last token


class PieceByPiece:
    """Stands for a model where transformers feeds a prompt to it: a long one is cut into passes of `size` tokens.

    The result is that of the last pass. While a pass runs, each layer holds what it sees and the pass's own tokens.
    Without a size, a pass has `PREFILL_TOKENS`. The model's attributes are found here, too.
    """

    def __init__(self, model: Any, cache: HFCache, size: int | None) -> None:
        self._model, self._cache, self._size = model, cache, size or PREFILL_TOKENS

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
        if len(lengths) > 1 or not self._gains(num_tokens) or not _follows_columns(inputs):
            return [inputs]
        seen = self._cache.get_seq_length()
        if mask is not None and mask.shape[1] != seen + num_tokens:
            return [inputs]
        size = max(self._size, inputs.get("logits_to_keep") or 1)
        begin, pieces = 0, []
        for end in range((num_tokens - 1) % size + 1, num_tokens + 1, size):
            piece = {name: inputs[name].narrow(axis, begin, end - begin) for name, axis in given.items()}
            if mask is not None:
                piece["attention_mask"] = mask[:, : seen + end]
            pieces.append(inputs | piece)
            begin = end
        return pieces

    def _gains(self, num_tokens: int) -> bool:
        """Whether a pass of so many tokens takes less memory in pieces.

        Layers of linear attention may take a text up in the middle by a single token only.
        """
        windows = (window for policy in self._cache.policy if (window := window_of(policy)))
        return num_tokens > max(self._size, min(windows, default=num_tokens)) and not self._cache.others


def _follows_columns(inputs: dict[str, Any]) -> bool:
    """Whether a pass can be cut at any column: nothing tells of images or the like, or asks for all states."""
    mask = inputs.get("attention_mask")
    if any(inputs.get(name) for name in SHOWING) or (mask is not None and getattr(mask, "ndim", 0) != 2):
        return False
    others = (value for name, value in inputs.items() if name not in (*TOKENS, "attention_mask"))
    return not any(isinstance(x, torch.Tensor) or (isinstance(x, (list, tuple, dict)) and x) for x in others)

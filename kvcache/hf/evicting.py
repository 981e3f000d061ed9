"""Evict tokens of an `HFCache` by importance."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvcache import eviction
from kvcache.errors import NotSupportedError
from kvcache.hf.feeding import FedBatch
from kvcache.hf.images import places_in
from kvcache.hf.policies import ropes_of
from kvcache.hf.prompts import check_tokens
from kvcache.hf.told import CACHE


class EvictableBatch(FedBatch):
    """Evicts tokens; a base of `HFCache`."""

    def note_queries(self, every: int = eviction.EVERY) -> None:
        """Note queries of all tokens that are fed from now on, for `evict`: call this before the prompt.

        Kept are the queries of one token in `every`, and of the last 32, in float16. With 32, they take a 32nd of the
        memory of float16 keys for each query head of a KV head. Only the attention ``"kvcache"`` has queries to note.
        """
        self._passes.check_user()
        self._passes.end()
        self._passes.queries = eviction.Queries(every)

    def evict(
        self,
        policy: eviction.Policy,
        keep: float = 0.25,
        *,
        model: Any = None,
        input_ids: torch.Tensor | None = None,
    ) -> None:
        """Keep the most important tokens of each text, and give the memory of all others back.

        The first 4 tokens and the last 32 are always kept. The cache loses the others for every later question: do not
        evict before the question is known. Quantised rows lose less, so use them first. Tokens keep their positions.
        Lengths and masks count all tokens, as before. Rows in windows are dropped, too, and recurrent states stay. The
        model then needs the attention ``"kvcache"``.

        Parameters
        ----------
        policy : callable
            `kvcache.eviction.future`, which needs `note_queries`; `kvcache.eviction.kvzip`, which needs `model` and
            `input_ids`; or a function of a `kvcache.eviction.Prompt` that returns how important each token is.
        keep : float, default 0.25
            The share that is kept of the tokens that the cache has of each text, above 0 and at most 1.
        model, input_ids
            The model, and the tokens that it has read, ``[batch, tokens]`` with their padding. Behind padding, the
            model must have been given positions that count from the first real token, as by `generate`.

        Raises
        ------
        NotSupportedError
            If no layer keeps the rows of all tokens, an indexer chooses rows, the policy needs a rotation that is not
            known, or the prompt cannot be fed again: it has images, or the model has an encoder. Also if a layer
            attended with dense tensors in the last pass, for another reason than its mask.
        ValueError
            If `keep` is out of range, `input_ids` cannot be what was fed, or the policy lacks what it needs. Whatever
            the policy or the model raises, no token was dropped.
        RuntimeError
            If the policy has fed the cache or otherwise changed it. No token was dropped.
        """
        passes, keep = self._passes, eviction.check_share(keep)
        passes.check_user()
        passes.end()
        passes.check_evictable()
        if model is not None or input_ids is not None:
            self._check_fed_again(model, input_ids)
        held, kept, ropes = ([*passes.seq_ids], passes.num_seen), [], ropes_of(self._config, self._cache)
        for row, seq_id in enumerate(held[0]):
            again = None if input_ids is None else partial(self._feed_again, row, model, input_ids)
            prompt = eviction.Prompt(self._cache, seq_id, passes.queries, again, ropes)
            kept.append(eviction.choose(prompt, policy, keep))
        passes.end()
        if (passes.seq_ids, passes.num_seen) != held:
            raise RuntimeError("the policy changed the cache that it was asked about: give it copy.deepcopy(cache)")
        passes.keep_positions(kept)

    def _check_fed_again(self, model: Any, input_ids: torch.Tensor | None) -> None:
        """Raise unless a model can be fed these tokens once more."""
        if not isinstance(model, torch.nn.Module) or input_ids is None:
            raise TypeError("give both model, which is fed the prompt once more, and input_ids, its tokens")
        check_tokens(input_ids, "input_ids")
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise NotSupportedError(f"a {type(model).__name__} has an encoder: it cannot be fed its prompt once more")
        wanted = len(self._passes.seq_ids), self._passes.num_seen
        if input_ids.ndim != 2 or len(input_ids) != wanted[0] or input_ids.shape[1] > wanted[1]:
            raise ValueError(
                f"input_ids has the shape {tuple(input_ids.shape)}: [batch, tokens] is needed, {wanted[0]} rows of at"
                f" most the {wanted[1]} tokens that were fed"
            )
        for row, offset in enumerate(self._passes.offsets):
            if input_ids.shape[1] <= offset < wanted[1]:
                raise ValueError(
                    f"input_ids has {input_ids.shape[1]} columns, and row {row} begins behind {offset} of padding: give"
                    " the tokens that the model has read"
                )
        if places_in(self._config, input_ids).any():
            raise NotSupportedError("input_ids has tokens that stand for images or sound, which cannot be fed again")

    def _feed_again(
        self, row: int, model: Any, input_ids: torch.Tensor
    ) -> Iterator[tuple[int, eviction.Queries]]:  # fmt: skip
        """Feed the tokens of a row once more, some at a time behind a copy; yield the copy's sequence and queries."""
        offset, seen = self._passes.offsets[row], self._passes.num_seen
        for begin in range(offset, input_ids.shape[1], eviction.AGAIN):
            chunk = input_ids[row : row + 1, begin : begin + eviction.AGAIN]
            again = copy.deepcopy(self)
            again.batch_select_indices(torch.tensor([row]))
            queries = again._passes.queries = eviction.Queries(every=1, last=0)
            again._passes.prompts = None
            inputs: dict[str, Any] = {"input_ids": chunk, CACHE: again, "use_cache": True}
            if offset:
                inputs["attention_mask"] = (torch.arange(seen + chunk.shape[1]) >= offset)[None].long()
                inputs["position_ids"] = torch.arange(seen - offset, seen - offset + chunk.shape[1])[None]
            try:
                with torch.no_grad():
                    model(**inputs)
                again.check_complete()
                again.finish()
            except BaseException:
                again.reset()  # the traceback keeps the copy
                raise
            yield again._passes.seq_ids[0], queries

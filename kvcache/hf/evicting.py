"""Evict tokens of an `HFCache` by importance. An offset is the column of a text's first token, behind its padding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from kvcache import eviction
from kvcache.errors import NotSupportedError
from kvcache.hf.images import places_in
from kvcache.hf.passes import Passes
from kvcache.hf.policies import ropes_of
from kvcache.hf.prompts import check_tokens
from kvcache.hf.told import CACHE


class Again(NamedTuple):
    """Tokens that a policy has a model read once more, behind a copy of the cache that holds them."""

    cache: Any
    model: Any
    input_ids: torch.Tensor

    @classmethod
    def of(cls, cache: Any, passes: Passes, model: Any, input_ids: torch.Tensor | None) -> Again | None:
        """Return what is fed, None if nothing is given; raise unless a model can be fed these tokens once more."""
        if model is None and input_ids is None:
            return None
        if not isinstance(model, torch.nn.Module) or input_ids is None:
            raise TypeError("give both model, which is fed the prompt once more, and input_ids, its tokens")
        check_tokens(input_ids, "input_ids")
        config: Any = getattr(model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            raise NotSupportedError(f"a {type(model).__name__} has an encoder: it cannot be fed its prompt once more")
        wanted = len(passes.seq_ids), passes.num_seen
        if input_ids.ndim != 2 or len(input_ids) != wanted[0] or input_ids.shape[1] > wanted[1]:
            raise ValueError(
                f"input_ids has the shape {tuple(input_ids.shape)}: [batch, tokens] is needed, {wanted[0]} rows of at"
                f" most the {wanted[1]} tokens that were fed"
            )
        for row, offset in enumerate(passes.offsets):
            if input_ids.shape[1] <= offset < wanted[1]:
                raise ValueError(
                    f"input_ids has {input_ids.shape[1]} columns, and row {row} begins behind {offset} of padding: give"
                    " the tokens that the model has read"
                )
        if places_in(passes.config, input_ids).any():
            raise NotSupportedError("input_ids has tokens that stand for images or sound, which cannot be fed again")
        return cls(cache, model, input_ids)

    def feed(self, passes: Passes, row: int) -> Iterator[tuple[int, eviction.Queries]]:
        """Feed the tokens of a row, some at a time behind a copy; yield the copy's sequence and queries."""
        offset, seen = passes.offsets[row], passes.num_seen
        for begin in range(offset, self.input_ids.shape[1], eviction.AGAIN):
            chunk = self.input_ids[row : row + 1, begin : begin + eviction.AGAIN]
            again = copy.deepcopy(self.cache)
            again.texts.select(torch.tensor([row]), "indices")
            queries = again.texts.passes.queries = eviction.Queries(every=1, last=0)
            again.texts.passes.prompts = None
            inputs: dict[str, Any] = {"input_ids": chunk, CACHE: again, "use_cache": True}
            if offset:
                inputs["attention_mask"] = (torch.arange(seen + chunk.shape[1]) >= offset)[None].long()
                inputs["position_ids"] = torch.arange(seen - offset, seen - offset + chunk.shape[1])[None]
            try:
                with torch.no_grad():
                    self.model(**inputs)
                again.texts.check_complete()
                again.texts.passes.finish()
            except BaseException:
                again.reset()  # the traceback keeps the copy
                raise
            yield again.texts.passes.seq_ids[0], queries


def evict(
    cache: Any, passes: Passes, policy: eviction.Policy, keep: float, model: Any, input_ids: torch.Tensor | None
) -> None:
    """Do what `HFCache.evict` does for a cache with these passes: it drops rows of theirs, and changes nothing else."""
    keep = eviction.check_share(keep)
    passes.check_user()
    passes.end()
    passes.check_evictable()
    again = Again.of(cache, passes, model, input_ids)
    held, kept, ropes = ([*passes.seq_ids], passes.num_seen), [], ropes_of(passes.config, passes.cache)
    for row, seq_id in enumerate(held[0]):
        fed_again = None if again is None else partial(again.feed, passes, row)
        prompt = eviction.Prompt(passes.cache, seq_id, passes.queries, fed_again, ropes)
        kept.append(eviction.choose(prompt, policy, keep))
    passes.end()
    if (passes.seq_ids, passes.num_seen) != held:
        raise RuntimeError("the policy changed the cache that it was asked about: give it copy.deepcopy(cache)")
    passes.keep_positions(kept)

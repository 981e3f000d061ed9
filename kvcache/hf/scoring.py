"""Record how a model's indexer scores the keys of earlier tokens, and chooses among them.

`Scoring` records these operations of an indexer instead of computing them. `kvcache.hf.indexing.Choice` recognises the
record when it reaches the attention, and the kernels choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvcache.hf import recording

relu, pad = torch.nn.functional.relu, torch.nn.functional.pad
# Operations that make one tensor of another, and are recorded.
RECORDED = {
    relu, pad, torch.matmul, Tensor.squeeze, Tensor.unsqueeze, Tensor.transpose, Tensor.float, Tensor.view, Tensor.mul,
    Tensor.add, Tensor.amax, Tensor.masked_fill, Tensor.to, Tensor.__invert__,
}  # fmt: skip


class Scoring(recording.Recording):
    """A tensor whose operations are recorded if they score keys, or choose among them."""

    def record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the record of an operation with this tensor; None: it is to be computed."""
        if func in RECORDED:
            return Step.of(func, *args, **kwargs)
        if getattr(func, "__name__", "") in ("eq", "__eq__"):
            return Step.of(torch.eq, *args)
        if func is Tensor.topk and len(args) == 2 and kwargs == {"dim": -1}:
            both = Step.of(top_values, *args), Step.of(top_indices, *args)
            return torch.return_types.topk(both)  # type: ignore[attr-defined] # torch's stubs leave it out
        if func is Tensor.scatter_ and isinstance(self, Step) and self is args[0] and not kwargs:
            self.become(torch.scatter, (Step.of(self.func, *self.args, **self.options), *args[1:]), {})
            return self
        return None


class Step(Scoring, recording.Recorded):
    """The result of an operation that was recorded."""


def top_values(scores: Tensor, width: int) -> Tensor:
    """Return the largest scores of each query."""
    return scores.topk(width, dim=-1).values


def top_indices(scores: Tensor, width: int) -> Tensor:
    """Return the places of the largest scores of each query."""
    return scores.topk(width, dim=-1).indices

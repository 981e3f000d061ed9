"""`ForwardPass`: one pass of a model through the layers of an `HFCache`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvcache.arrays import Layout
from kvcache.batch import Batch

if TYPE_CHECKING:
    from kvcache.hf.layers import Layer


class ForwardPass:
    """The state of one forward pass: its batch, its padding, and the layers it has been through.

    A pass begins when its first layer brings keys (`HFCache._pass_of`). Its batch is opened by the first attention,
    whose mask says which tokens are padding (`open`). It ends when the next pass begins, or when stored tokens are
    asked for (`HFCache._end_pass`, `HFCache._finish_pass`). Its tokens stay if it has been through every layer (`end`).
    """

    # Set by `open`.
    batch: Batch
    num_tokens: int  # tokens of each sequence, padding included
    real: torch.Tensor | None  # [batch, tokens] of bool, False: padding; None: there is no padding
    has_gaps: bool  # whether a token comes before padding

    def __init__(self, num_layers: int, uses_kernels: bool) -> None:
        self.num_layers = num_layers
        self.uses_kernels = uses_kernels  # whether the model's attention is `kvcache.hf.attention.attention`
        self.is_open = False
        self.done: set[int] = set()  # layers that have stored the new tokens, or attended
        self.awaited: Layer | None = None  # the layer whose keys `HFCache.store` returned, and the attention expects

    def check_received(self, layer: Layer) -> None:
        """Raise if the new keys of a layer before this one never reached the attention."""
        if self.awaited is not None and self.awaited.index < layer.index:
            index, self.awaited = self.awaited.index, None
            raise RuntimeError(f"the keys of layer {index} did not reach the attention: this model changes them first")

    def receive(self, layer: Layer) -> bool:
        """Return whether the keys that reached the attention are this layer's new keys, yet to be stored."""
        is_new, self.awaited = self.awaited is layer, None
        return is_new

    def open(self, batch: Batch, num_tokens: int, real: torch.Tensor | None, has_gaps: bool) -> None:
        """Take the batch of the new tokens."""
        self.batch, self.num_tokens, self.real, self.has_gaps = batch, num_tokens, real, has_gaps
        self.is_open = True

    def drop_padding(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack tensors ``[batch, heads, tokens, dim]`` to ``[tokens, heads, dim]`` if there is padding to drop."""
        if self.real is None:
            return tensors
        return tuple(x.transpose(1, 2)[self.real] for x in tensors)

    @property
    def layout(self) -> Layout:
        """The layout of the tensors that `drop_padding` returns."""
        return "BHTD" if self.real is None else "THD"

    @property
    def is_complete(self) -> bool:
        """Whether the pass has been through every layer."""
        return len(self.done) == self.num_layers

    def end(self) -> bool:
        """Commit the tokens if the pass is complete, else drop them; return whether it was complete."""
        if self.is_complete:
            self.batch.commit()
            return True
        if self.is_open:
            self.batch.abort()
        return False

"""`ForwardPass`: one pass of a model through the layers of an `HFCache`."""

from __future__ import annotations

import threading
import time

import torch

from kvcache.arrays import Layout
from kvcache.batch import Batch
from kvcache.hf.rows import LayerRows

# Warnings of passes in which the kernels do not attend.
UNKNOWN = "a mask or an operation that the kernels do not know; using dense tensors"
DECODED = (
    "the rows of every layer are decoded in each step, because the model's attention is not 'kvcache', or it computes"
    " with them first: kvcache.hf.enable(model), or set_attn_implementation('kvcache'), has them read where they lie"
)


class ForwardPass:
    """The state of one forward pass: its batch, its padding, and the layers it has been through.

    A pass begins when its first layer brings keys (`HFCache._pass_of`). Its batch is opened by the first attention,
    whose mask says which tokens are leading padding, or by the first operation on a layer's keys (`open`). It ends when
    the next pass begins, or when stored tokens are asked for (`HFCache._end_pass`, `HFCache._finish_pass`). Its tokens
    stay if it has been through every layer (`end`).
    """

    # Set by `open`.
    batch: Batch | None  # None: all tokens are leading padding
    num_tokens: int  # tokens of each sequence, padding included
    stored: torch.Tensor | None  # [batch, tokens] of bool, False: leading padding; None: there is none
    offsets: list[int]  # the column of each sequence's position 0
    num_seen: int  # tokens of each sequence before the pass, padding included

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.is_open = False
        self.thread = threading.get_ident()
        self.last_active = time.monotonic()  # when it reached a layer
        self.begun: set[int] = set()  # layers that have brought keys, or attended
        self.done: set[int] = set()  # layers that have stored the new tokens, or attended
        self.decoded: set[int] = set()  # layers whose rows were made dense tensors
        self.pending: dict[int, LayerRows] = {}  # rows that neither the attention nor the model has used yet
        self.leaves_rows = False  # whether the model left a layer's rows unused, and attends to others
        self.hidden: dict[int, tuple[torch.Tensor, list[tuple[int, int, int]]]] = {}  # id of a mask: it, and its ranges

    def open(
        self, batch: Batch | None, num_tokens: int, stored: torch.Tensor | None, offsets: list[int], num_seen: int
    ) -> None:
        """Take the batch of the new tokens."""
        self.batch, self.num_tokens, self.stored, self.offsets = batch, num_tokens, stored, offsets
        self.num_seen = num_seen
        self.is_open = True

    def drop_padding(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Pack tensors ``[batch, heads, tokens, dim]`` to ``[tokens, heads, dim]`` if there is leading padding."""
        if self.stored is None:
            return tensors
        return tuple(x.transpose(1, 2)[self.stored] for x in tensors)

    @property
    def layout(self) -> Layout:
        """The layout of the tensors that `drop_padding` returns."""
        return "BHTD" if self.stored is None else "THD"

    @property
    def is_complete(self) -> bool:
        """Whether the pass has been through every layer."""
        left = len(self.pending) if self.leaves_rows else 0
        return len(self.done) + left == self.num_layers

    @property
    def all_decoded(self) -> bool:
        """Whether the pass made dense tensors of the rows of every layer."""
        return len(self.decoded) == self.num_layers

    def end(self) -> None:
        """Commit the tokens if the pass is complete, else drop them."""
        if self.is_open and self.batch is not None:
            if self.is_complete:
                self.batch.commit()
            else:
                self.batch.abort()

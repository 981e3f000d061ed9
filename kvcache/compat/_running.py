"""The tokens that are running: their rows come layer by layer, and are read before they are part of a sequence."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvcache import Batch, KVCache

Rows = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Running:
    """A cache, and the open batch of the next tokens of its sequences 0 to `sequences` - 1, in lock step.

    Arrays are ``[tokens, heads, dim]`` of one sequence, or ``[sequences, heads, tokens, dim]``, as `layout` says.
    """

    def __init__(self, cache: KVCache, sequences: int = 1, *, layout: Literal["THD", "BHTD"] = "THD") -> None:
        self.cache = cache
        self.sequences = sequences
        self.layout = layout
        self.batch: Batch | None = None
        self.layers: set[int] = set()  # those that have the rows of the batch

    @property
    def num_tokens(self) -> int:
        """The running tokens of each sequence."""
        return 0 if self.batch is None else len(self.batch) // self.sequences

    @property
    def is_complete(self) -> bool:
        """Whether every layer has the rows of the running tokens."""
        return len(self.layers) == self.cache.num_layers

    def begin(self, num_tokens: int) -> Batch:
        """Return the open batch; begin one of `num_tokens` tokens of each sequence if there is none."""
        if self.batch is None:
            first = self.cache.next_position()
            positions = np.tile(np.arange(first, first + num_tokens), self.sequences)
            self.batch = self.cache.batch(positions=positions, seq_ids=np.repeat(np.arange(self.sequences), num_tokens))
        return self.batch

    def put(self, layer: int, k: npt.NDArray[Any], v: npt.NDArray[Any], q: npt.NDArray[Any] | None = None) -> Any:
        """Put the running tokens' rows of a layer; a failed call changes nothing.

        With `q` attend, too, and return the result: the tokens of a call all see each other.
        """
        axis = self.layout.index("T")
        out = None
        try:
            batch = self.begin(k.shape[axis] if k.ndim > axis else 1)
            if q is None:
                batch.put(layer, k, v, layout=self.layout)
            else:
                out = batch.attend(layer, q, k, v, layout=self.layout, non_causal=True)
        except BaseException:
            if not self.layers:
                self.discard()
            raise
        self.layers.add(layer)
        return out

    def rows(self, layer: int) -> Rows:
        """Return all rows of sequence 0 in a layer, those of the running tokens included: ``[heads, n, dim]`` each."""
        if self.batch is not None and layer in self.layers:
            k, v, _ = self.batch.dense(layer, mask=None)
            return k, v
        return self.cache.keys(layer), self.cache.values(layer)

    def commit(self) -> None:
        """Make the running tokens part of their sequences.

        Raises
        ------
        ValueError
            If a layer does not have their rows; the batch stays open then.
        """
        if self.batch is not None:
            self.batch.commit()
        self.batch, self.layers = None, set()

    def discard(self) -> None:
        """Forget the running tokens."""
        if self.batch is not None:
            self.batch.abort()
        self.batch, self.layers = None, set()

    def clear(self) -> None:
        """Forget all tokens."""
        self.discard()
        self.cache.clear()

    def close(self) -> None:
        """Free all memory."""
        self.discard()
        self.cache.close()

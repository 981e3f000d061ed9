"""`Case`, and the interface `Implementation`, which the benchmarks time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvcache.arguments import INT32_MAX, integer


@dataclass(frozen=True, kw_only=True)
class Case:
    """The sizes, type and window that a cache is made for.

    Parameters
    ----------
    num_layers : int
        The number of layers.
    num_heads, num_kv_heads : int
        The number of query heads and of KV heads, which divides it.
    head_dim : int
        The number of elements of a key, and of a value, of one head.
    max_seq_len : int
        The most tokens of a sequence.
    dtype : str
        The type of stored rows: ``"f32"``, ``"f16"``, ``"bf16"``, ``"q8_0"``, ``"q4_0"``, or any other name given to
        ``--dtype``.
    window : int, optional
        The number of tokens that a query sees, itself included; None: all.
    max_sequences : int, default 1
        The most sequences at once: 2 if a sequence is forked.
    threads : int, default 1
        The number of threads that a call may use.

    Raises
    ------
    ValueError, TypeError
        If a number is below 1, too large or no integer, or `num_heads` is no multiple of `num_kv_heads`.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    dtype: str
    window: int | None = None
    max_sequences: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and value is not None:
                integer(value, field.name, 1, INT32_MAX)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads}: must be a multiple of num_kv_heads, {self.num_kv_heads}")


class Implementation(Protocol):
    """The methods of a cache that is timed beside ours: a class whose constructor takes a `Case` only.

    The constructor raises `NotImplementedError`, with a reason, for an unsupported case (a type, a window), which is
    then skipped. The class may have more methods; the benchmarks of a missing method are skipped:

    ``fork(src, dst)``
        Give the empty sequence `dst` all tokens of `src`.
    ``remove(begin, end)``
        Remove the tokens at ``[begin, end)`` of sequence 0, and move later tokens down. Keys carry no rotation.
    ``compact()``
        Give back, or close, the holes that removed tokens leave.
    ``gather(layer)``
        Return the keys and the values of sequence 0, as two f32 arrays ``[num_kv_heads, n, head_dim]``, in order.
    """

    def begin(self, num_tokens: int, seq_id: int = 0) -> None:
        """Begin a batch of the next tokens of a sequence; one batch is open at a time."""

    def put(self, layer: int, k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]) -> None:
        """Store the batch's keys and values in a layer: ``[num_tokens, num_kv_heads, head_dim]``."""

    def attend(self, layer: int, q: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        """Return causal attention of the batch's queries over all stored tokens, the batch's own included.

        Queries and the result are ``[num_tokens, num_heads, head_dim]``. Scores are scaled by ``head_dim ** -0.5``. A
        layer may be attended over more than once; with a window the batch has one token.
        """

    def commit(self) -> None:
        """End the batch, and keep its tokens."""

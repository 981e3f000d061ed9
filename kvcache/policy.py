"""Policies, which say what positions a layer's queries may see, and so which rows the layer may drop."""

from dataclasses import dataclass, fields
from typing import TypeAlias

from kvcache._core import INT32_MAX, integer
from kvcache.arguments import spelt


@spelt
@dataclass(frozen=True)
class FullAttention:
    """A query sees every position up to its own; no row is ever dropped.

    Parameters
    ----------
    stride : int, optional
        The number of positions that share a row; by default 1. With n, only tokens at positions p with ``(p + 1) % n ==
        0`` have a row. It stands for the n positions up to p, for instance as a pooled key. A query at position p sees
        the rows of ``(p + 1) // n`` complete blocks. `Batch.put` takes rows of these tokens alone. Another layer of the
        cache must have a row for each token.

    Raises
    ------
    ValueError, TypeError
        If the number is too small or too large, or no integer.

    Examples
    --------
    >>> FullAttention(stride=4)
    FullAttention(stride=4)
    """

    stride: int = 1

    def __post_init__(self) -> None:
        _set(self, "stride", 1)

    def __repr__(self) -> str:
        return written(self)


@spelt
@dataclass(frozen=True)
class SlidingWindow:
    """A query sees the latest positions up to its own, and optionally the first tokens.

    Parameters
    ----------
    window : int
        The number of positions that a query sees, its own included, as Hugging Face and Mistral count it. At least 1.
    num_sink_tokens : int, optional
        The number of first positions that stay, and are always seen beside the window [1]_. 0 by default.
    resume_window : int, optional
        The number of latest positions that are kept, counted like `window`: at least `window`, the default. With more,
        a sequence can go back further: to at least ``resume_window - window`` tokens before its end.

    Raises
    ------
    ValueError, TypeError
        If a number is too small or too large, or no integer.

    References
    ----------
    .. [1] Guangxuan Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024.

    Examples
    --------
    >>> SlidingWindow(1024, num_sink_tokens=4)
    SlidingWindow(window=1024, num_sink_tokens=4, resume_window=None)
    """

    window: int
    num_sink_tokens: int = 0
    resume_window: int | None = None

    def __post_init__(self) -> None:
        window = _set(self, "window", 1)
        _set(self, "num_sink_tokens", 0)
        if self.resume_window is not None:
            _set(self, "resume_window", window)


@spelt
@dataclass(frozen=True)
class ChunkedAttention:
    """A query sees the positions of its own chunk up to its own, as in Llama 4; chunks begin at multiples of the size.

    Parameters
    ----------
    attention_chunk_size : int
        The number of positions in a chunk. At least 1.
    resume_window : int, optional
        The least number of positions that are kept before the current chunk; by default 0. With more, a sequence can go
        back further: to any chunk that begins at a kept position.

    Raises
    ------
    ValueError, TypeError
        If a number is too small or too large, or no integer.

    Examples
    --------
    >>> ChunkedAttention(8192)
    ChunkedAttention(attention_chunk_size=8192, resume_window=None)
    """

    attention_chunk_size: int
    resume_window: int | None = None

    def __post_init__(self) -> None:
        _set(self, "attention_chunk_size", 1)
        if self.resume_window is not None:
            _set(self, "resume_window", 0)


@spelt
@dataclass(frozen=True)
class CrossAttention:
    """Every query sees all rows; these come from an encoder, and are put at once for a whole sequence.

    `Batch.put` takes any number of rows, whatever the tokens of the batch, and replaces the sequence's former rows. The
    rows have no positions to remove or shift: only `KVCache.clear` and other methods that forget the whole sequence
    drop them.

    Parameters
    ----------
    max_len : int
        The most rows of one sequence. At least 1. Each sequence has a block of this size in each such layer, which
        counts whole for `max_bytes`.

    Raises
    ------
    ValueError, TypeError
        If the number is too small or too large, or no integer.

    Examples
    --------
    >>> CrossAttention(1500)
    CrossAttention(max_len=1500)
    """

    max_len: int

    def __post_init__(self) -> None:
        _set(self, "max_len", 1)


Policy: TypeAlias = FullAttention | SlidingWindow | ChunkedAttention | CrossAttention


def most_rows(policy: Policy | None, num_tokens: int, batch_tokens: int = 0) -> int:
    """Return the most rows that a policy keeps of `num_tokens` tokens, `batch_tokens` of them of a batch still open."""
    match policy:
        case None:
            return 0
        case CrossAttention(max_len):
            return max_len
        case SlidingWindow(window, sinks, resume):
            return min(num_tokens, (resume or window) + sinks + batch_tokens)
        case ChunkedAttention(size, resume):
            return min(num_tokens, size + (resume or 0) + batch_tokens)
        case FullAttention(stride):
            return num_tokens // stride


def window_of(policy: Policy | None) -> int:
    """Return the most tokens that a query sees under a policy; 0: all."""
    if isinstance(policy, SlidingWindow):
        return policy.window
    return policy.attention_chunk_size if isinstance(policy, ChunkedAttention) else 0


def written(policy: Policy) -> str:
    """Return the Python expression that makes a policy, without arguments that have their default."""
    given = [f"{f.name}={getattr(policy, f.name)}" for f in fields(policy) if getattr(policy, f.name) != f.default]
    return f"{type(policy).__name__}({', '.join(given)})"


def _set(policy: Policy, name: str, least: int) -> int:
    """Check a field and make it a plain integer."""
    number = integer(getattr(policy, name), name, least, INT32_MAX)
    object.__setattr__(policy, name, number)
    return number

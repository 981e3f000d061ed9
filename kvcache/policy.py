"""Which positions a query of a layer may see, and so which rows a layer may drop."""

from dataclasses import dataclass
from typing import TypeAlias

from kvcache._core import INT32_MAX, integer

__all__ = ["FullAttention", "Policy", "SlidingWindow"]


@dataclass(frozen=True)
class FullAttention:
    """A query sees every position up to its own; no row is ever dropped."""


@dataclass(frozen=True)
class SlidingWindow:
    """A query sees the latest positions up to its own, and the first tokens where these are to stay.

    Parameters
    ----------
    window : int
        How many positions a query sees, its own included, as Hugging Face and Mistral count it. At least 1.
    num_sink_tokens : int, optional
        Positions below this number are always seen, beside the window, and stay [1]_. None by default.
    resume_window : int, optional
        How many of the latest positions are kept, counted like `window` and at least that, its default. More means
        that a sequence can go back further: to at least ``resume_window - window`` tokens before its end.

    Raises
    ------
    ValueError
        If a number is too small or too large.
    TypeError
        If one is no integer.

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
        window = integer(self.window, "window", 1, INT32_MAX)
        fields: dict[str, int] = {"window": window}
        fields["num_sink_tokens"] = integer(self.num_sink_tokens, "num_sink_tokens", 0, INT32_MAX)
        if self.resume_window is not None:
            fields["resume_window"] = integer(self.resume_window, "resume_window", window, INT32_MAX)
        for name, number in fields.items():
            object.__setattr__(self, name, number)  # plain integers, whatever was given


Policy: TypeAlias = FullAttention | SlidingWindow

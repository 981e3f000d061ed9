"""Measure decoding without a cache, and the effect of each element type on a model's loss and logits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from kvcache.layer import DType, bytes_of_token, dtypes_for, stored_as
from kvcache.models.reading import open_file
from kvcache.models.tokenizer import Tokenizer
from kvcache.models.weights import F32
from kvcache.runner.generate import Options, Speed, new_cache
from kvcache.runner.llama import Llama, LlamaConfig

__all__ = ["Fidelity", "Report", "compare_dtypes", "mean_loss", "read_windows", "seconds_without_cache"]

EVAL_WINDOWS = 4  # texts of eval.txt that the loss is averaged over
EVAL_TOKENS = 2048  # tokens of each text, unless the model's context is shorter
EVAL_BYTES = 16 * EVAL_WINDOWS * EVAL_TOKENS  # bytes read of eval.txt: a token usually stands for fewer than 16


@dataclass(frozen=True)
class Fidelity:
    """The effect of a cache's element type on a model, for given texts."""

    loss: float  # mean over the texts, in nats per token
    max_difference: float  # largest difference of a logit from the same logit with an f32 cache
    prefill: Speed


def mean_loss(logits: F32, tokens: ArrayLike) -> float:
    """Return the mean negative log-likelihood of a text, in nats per token.

    Parameters
    ----------
    logits : ndarray of float32, shape [n, vocab_size]
        The model's logits after each token.
    tokens : array_like of int, shape [n]
        The text; its first token is not predicted.
    """
    wide, targets = logits[:-1].astype(np.float64), np.asarray(tokens, dtype=np.intp)[1:]
    top = wide.max(axis=-1)
    log_total = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return float(np.mean(log_total - wide[np.arange(len(targets)), targets]))


def read_windows(path: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Cut the beginning of a text file into texts of `length` tokens; return none if there is no file."""
    if not path.exists():
        return []
    with open_file(path) as file:
        tokens = tokenizer.encode(file.read(0, min(EVAL_BYTES, file.size)))
    first = [] if tokenizer.bos is None else [tokenizer.bos]  # the token that each text begins with
    tokens, length = tokens[len(first) :], max(length - len(first), 1)
    windows = [first + tokens[i : i + length] for i in range(0, len(tokens), length)]
    return [window for window in windows if len(window) > 1][:EVAL_WINDOWS]


def compare_dtypes(
    model: Llama, options: Options, windows: Sequence[Sequence[int]]
) -> Iterator[tuple[DType, Fidelity]]:
    """Run each text through a cache of each element type, f32 first; yield the type and its effect."""
    exact: list[F32] = []
    for dtype in dtypes_for(model.config.head_dim):
        losses, differences, speed = [], [], Speed()
        for i, window in enumerate(windows):
            with new_cache(model.config, options, dtype) as cache:
                start = time.perf_counter()
                logits = model.forward(window, cache)
                speed.seconds += time.perf_counter() - start
            speed.tokens += len(window)
            if dtype == "f32":
                exact.append(logits)
            losses.append(mean_loss(logits, window))
            differences.append(float(np.abs(logits - exact[i]).max()))
        yield dtype, Fidelity(float(np.mean(losses)), max(differences), speed)


def seconds_without_cache(model: Llama, options: Options, tokens: Sequence[int], lengths: Sequence[int]) -> list[float]:
    """Return the seconds of a decode step without a cache, a pass over all tokens, for each length of a sequence."""
    seconds = []
    with new_cache(model.config, options) as cache:
        for length in lengths:
            cache.clear()
            start = time.perf_counter()
            model.forward(tokens[:length], cache, last_only=True)
            seconds.append(time.perf_counter() - start)
    return seconds


@dataclass
class Report:
    """The speeds of a run, and the lines of the table that begins with them, without newlines."""

    config: LlamaConfig
    options: Options
    prefill: Speed = field(default_factory=Speed)
    decode: Speed = field(default_factory=Speed)
    _exact: Fidelity | None = field(default=None, init=False)  # of f32, which comes first

    def line(self) -> str:
        """Return the speeds in one line."""
        speeds = ("prefill", self.prefill), ("decode", self.decode)
        said = (f"{name} {s.tokens:,} tokens, {s.tokens_per_second:,.1f} tokens/s" for name, s in speeds if s.tokens)
        return "; ".join(said) or "no token was generated"

    def speed_lines(self) -> list[str]:
        """Return a heading, and a line for each speed that was measured."""
        stored = stored_as(self.options.dtype, self.options.transform)
        speeds = (f"prefill, {stored} cache", self.prefill), (f"decode, {stored} cache", self.decode)
        return [f"{'':28}{'tokens':>8}{'tokens/s':>12}", *(_speed(*named) for named in speeds if named[1].tokens)]

    def line_without_cache(self, speed: Speed) -> str:
        """Return the line for decoding without the cache."""
        whole = "context" if self.options.shift else "sequence"
        return f"{_speed('decode, without cache', speed)}   the whole {whole} again for each"

    def sizes(self) -> list[str]:
        """Return a heading, and a line for each type with its bytes: nothing was compared."""
        return [f"{'cache type':14}{'bytes/token':>12}", *map(self._size, dtypes_for(self.config.head_dim))]

    def heading(self) -> str:
        """Return the heading of the rows."""
        measured = f"{'logits off by':>15}{'loss':>10}{'change':>11}{'prefill tokens/s':>18}"
        return f"{'cache type':14}{'bytes/token':>12}{measured}"

    def row(self, dtype: DType, found: Fidelity) -> str:
        """Return a type's bytes and its effect on the model; the first type is f32, with which others are compared."""
        exact = self._exact = self._exact or found
        off, change = f"{found.max_difference:.4f}", f"{found.loss - exact.loss:+.6f}"
        off, change = ("-", "-") if found is exact else (off, change)
        rate = found.prefill.tokens_per_second
        return f"{self._size(dtype)}{off:>15}{found.loss:10.6f}{change:>11}{rate:18,.1f}"

    def _size(self, dtype: DType) -> str:
        c = self.config
        nbytes = c.num_layers * bytes_of_token(c.num_kv_heads, c.head_dim, c.head_dim, dtype, dtype)
        return f"{stored_as(dtype, self.options.transform):14}{nbytes:12,}"


def _speed(name: str, speed: Speed) -> str:
    return f"{name:28}{speed.tokens:8,}{speed.tokens_per_second:12,.1f}"

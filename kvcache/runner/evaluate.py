"""Measure decoding without a cache, and the effect of each element type on a model's loss and predictions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache.columns import NO_LIMIT, Table
from kvcache.layer import DTYPES, DType, bytes_of_token, dtypes_for, stored_as
from kvcache.models.reading import open_file
from kvcache.models.tokenizer import Tokenizer
from kvcache.models.weights import F32
from kvcache.runner.generate import Options, Speed, Speeds, new_cache
from kvcache.runner.llama import Llama, LlamaConfig

F64: TypeAlias = NDArray[np.float64]

EVAL_WINDOWS = 4  # texts of eval.txt that the loss is averaged over
EVAL_TOKENS = 2048  # tokens of each text, unless the model's context is shorter
EVAL_BYTES = 16 * EVAL_WINDOWS * EVAL_TOKENS  # bytes read of eval.txt: a token usually stands for fewer than 16
ROWS_AT_ONCE = 256  # of logits in float64: a vocabulary may be large


@dataclass(frozen=True)
class Fidelity:
    """How near a model's predictions stay to those with an f32 cache, for given texts."""

    loss: float  # mean over the texts, in nats per token
    divergence: float  # mean Kullback-Leibler divergence of the next token's probabilities, in nats
    divergence_999: float  # its 99.9 % quantile: one token in 1,000 diverges more
    best_kept: float  # share of tokens after which the likeliest next token is the same


def fidelity(passes: Iterable[F32], exact: Sequence[F32], texts: Sequence[Sequence[int]]) -> Fidelity:
    """Compare a model's logits with the logits from an f32 cache.

    Parameters
    ----------
    passes : iterable of ndarray of float32, shape [n, vocab_size]
        The logits after each token of a text, for each text; only one text's are held at a time.
    exact : sequence of ndarray of float32, shape [n, vocab_size]
        The same with an f32 cache.
    texts : sequence of sequences of int
        The texts' tokens.
    """
    losses, divergences, kept = [], [], []
    for logits, wanted, text in zip(passes, exact, texts, strict=True):
        losses.append(mean_loss(logits, text))
        divergences.append(_divergences(logits, wanted))
        kept.append(logits.argmax(axis=-1) == wanted.argmax(axis=-1))
    found = np.concatenate(divergences)
    return Fidelity(
        float(np.mean(losses)),
        float(found.mean()),
        float(np.quantile(found, 0.999)),
        float(np.concatenate(kept).mean()),
    )


def _divergences(logits: F32, exact: F32) -> F64:
    """Return each next token's Kullback-Leibler divergence from the exact probabilities, in nats: [n]."""
    found = np.empty(len(exact))
    for i in range(0, len(exact), ROWS_AT_ONCE):
        rows = slice(i, i + ROWS_AT_ONCE)
        wanted = _log_probabilities(exact[rows])
        found[rows] = np.vecdot(np.exp(wanted), wanted - _log_probabilities(logits[rows]))
    return found


def _log_probabilities(logits: F32) -> F64:
    """Return the logarithms of the tokens' probabilities."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def mean_loss(logits: F32, tokens: ArrayLike) -> float:
    """Return the mean negative log-likelihood of a text, in nats per token.

    Parameters
    ----------
    logits : ndarray of float32, shape [n, vocab_size]
        The model's logits after each token.
    tokens : array_like of int, shape [n]
        The text; its first token is not predicted.
    """
    targets = np.asarray(tokens, dtype=np.intp)[1:]
    return float(-np.mean(_log_probabilities(logits[:-1])[np.arange(len(targets)), targets]))


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
    """Run each text through a cache of each element type, f32 first; yield the type and its effect.

    Texts are prompts, which are attended to as `options` say, except with f32.
    """
    exact = list(_passes(model, replace(options, prompts="stored"), "f32", windows))
    for dtype in dtypes_for(model.config.head_dim):
        passes = exact if dtype == "f32" else _passes(model, options, dtype, windows)
        yield dtype, fidelity(passes, exact, windows)


def _passes(model: Llama, options: Options, dtype: DType, windows: Sequence[Sequence[int]]) -> Iterator[F32]:
    """Yield the logits after each token of each text, through an empty cache."""
    for window in windows:
        with new_cache(model.config, options, dtype) as cache:
            yield model.forward(window, cache, prompts=options.prompts)


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


WITHOUT_CACHE = "decode, without cache"


@dataclass
class Report:
    """The speeds of a run, and the table that begins with them: its rows without the last newline.

    A row has several lines if it is wider than `width` columns.
    """

    config: LlamaConfig
    options: Options
    speeds: Speeds
    width: int = NO_LIMIT
    _exact: Fidelity | None = field(default=None, init=False)  # of f32, which comes first

    def speed_lines(self) -> list[str]:
        """Return a heading, and a row for each speed that was measured."""
        prefill, decode, num_kept = self.speeds.prefill, self.speeds.decode, self.speeds.num_kept
        kept = "" if num_kept is None else f"{num_kept:,} of them kept"
        speeds = zip(self._names, (prefill, decode), (kept, ""), strict=True)
        rows = [self._speed(name, speed, remark) for name, speed, remark in speeds if speed.tokens]
        return [self._speeds.row(["", "tokens", "tokens/s", ""]), *rows]

    def line_without_cache(self, speed: Speed) -> str:
        """Return the row for decoding without the cache."""
        whole = "context" if self.options.shift else "sequence"
        return self._speed(WITHOUT_CACHE, speed, f"the whole {whole} again for each")

    def sizes(self) -> list[str]:
        """Return a heading, and a row for each type with its bytes: nothing was compared."""
        table = self._types([11])
        types = dtypes_for(self.config.head_dim)
        return [table.row(["cache type", "bytes/token"]), *(table.row(self._size(dtype)) for dtype in types)]

    def heading(self) -> str:
        """Return the heading of the rows."""
        names = ["cache type", "bytes/token", "loss", "change", "divergence", "99.9 %", "best kept"]
        return self._effects.row(names)

    def row(self, dtype: DType, found: Fidelity) -> str:
        """Return a type's bytes and its effect on the model; the first type is f32, with which others are compared."""
        exact = self._exact = self._exact or found
        effect = "----" if found is exact else (
            f"{found.loss - exact.loss:+.6f}",
            f"{found.divergence:.2e}",
            f"{found.divergence_999:.2e}",
            f"{found.best_kept:.2%}",
        )  # fmt: skip
        name, nbytes = self._size(dtype)
        name += "" if found is exact else self._in_bytes
        return self._effects.row([name, nbytes, f"{found.loss:.6f}", *effect])

    @property
    def _names(self) -> list[str]:
        """The names of the speeds with the cache."""
        stored = stored_as(self.options.dtype, self.options.transform)
        return [f"prefill{self._in_bytes}, {stored} cache", f"decode, {stored} cache"]

    @property
    def _in_bytes(self) -> str:
        """What is said of prompts that are multiplied in bytes."""
        return "" if self.options.prompts == "stored" else " in bytes"

    @property
    def _speeds(self) -> Table:
        first = max(map(len, (*self._names, WITHOUT_CACHE)))
        return Table([first, 7, 10, 33], [False, True, True, False], self.width)

    def _speed(self, name: str, speed: Speed, remark: str = "") -> str:
        return self._speeds.row([name, f"{speed.tokens:,}", f"{speed.tokens_per_second:,.1f}", remark])

    @property
    def _effects(self) -> Table:
        return self._types([11, 9, 9, 10, 8, 9])

    def _types(self, widths: Sequence[int]) -> Table:
        """Return the table that begins with names of types."""
        first = max(len(stored_as(dtype, self.options.transform)) for dtype in DTYPES) + len(self._in_bytes)
        return Table([max(first, 10), *widths], [False, *(True for _ in widths)], self.width)

    def _size(self, dtype: DType) -> list[str]:
        """Return the name of a type, and the bytes of a token's rows in it."""
        c = self.config
        nbytes = c.num_layers * bytes_of_token(c.num_kv_heads, c.head_dim, c.head_dim, dtype, dtype)
        return [stored_as(dtype, self.options.transform), f"{nbytes:,}"]

"""Generate tokens with a `Llama`: `generate` is the loop, over `new_cache`, `sample` and `shift_context`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

import numpy as np

from kvcache import KVCache, SlidingWindow, eviction, selecting
from kvcache.arguments import to_float
from kvcache.arrays import Precision
from kvcache.eviction import Queries
from kvcache.layer import DTYPES, DType, Layer, Transform, to_dtype
from kvcache.models.weights import F32
from kvcache.policy import Policy
from kvcache.runner import llama
from kvcache.runner.llama import Llama, LlamaConfig, LlamaError
from kvcache.selecting import with_sketches

FIRST_TOKENS_KEPT = 4  # first tokens that a shift keeps: models attend to them, whatever they are
POLICIES: dict[str, eviction.Policy] = {"future": eviction.future, "kvzip": eviction.kvzip}  # by the name of an option


@dataclass(frozen=True)
class Options:
    """Settings of a run, with the defaults of the example and of the command line.

    Parameters
    ----------
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"}
        The element type of the cache.
    window : int, optional
        The number of tokens that each token sees, itself included; by default all.
    shift : bool
        Whether to go on when the model's context is full: drop its older half, and move the rest down.
    num_sink_tokens : int, optional
        The number of first tokens that stay visible beside a window, or stay when the context shifts. By default 0 with
        a window, and `FIRST_TOKENS_KEPT` with a shift.
    max_new_tokens : int
        The most tokens to generate.
    seed : int
        The seed of the sampling.
    temperature : float
        The divisor of the logits; 0 always takes the likeliest token.
    top_p : float
        The probability that the likeliest tokens, from which one is drawn, have together.
    compare : bool
        Whether to measure also the speed without the cache, to compare the element types, and to end with a table; else
        a notice says the speeds.
    quiet : bool
        Whether to write the text only, without the table and notices.
    transform : {"hadamard"}, optional
        How keys and values are transformed before they are quantised; by default not at all.
    prompts : {"stored", "int8"}
        How prompts are attended to, as by `Llama.forward`.
    select : int, optional
        About how many rows a generated token reads for each KV head, as in `kvcache.Batch.attend`, once the text has
        8192 tokens. Prompts and the first two layers read all rows. By default all rows are read.
    keep : float, optional
        The share of the prompt's tokens whose rows are kept behind the prompt; by default all.
    evict_by : {"future", "kvzip"}, optional
        The policy of `kvcache.eviction` that says which tokens are kept; by default "future".

    Raises
    ------
    LlamaError
        A value is out of range.
    """

    dtype: DType = "f16"
    window: int | None = None
    shift: bool = False
    num_sink_tokens: int | None = None
    max_new_tokens: int = 300
    seed: int = 0
    temperature: float = 0.8
    top_p: float = 0.95
    compare: bool = False
    quiet: bool = False
    transform: Transform | None = None
    prompts: Precision = "stored"
    select: int | None = None
    keep: float | None = None
    evict_by: str | None = None

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "dtype", to_dtype(self.dtype, "dtype"))
        except ValueError:
            raise LlamaError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}") from None
        if self.prompts not in get_args(Precision):
            raise LlamaError(f"prompts must be one of {', '.join(get_args(Precision))}, not {self.prompts!r}")
        for name, value, lowest in (
            ("window", self.window, 1),
            ("sink tokens", self.num_sink_tokens, 0),
            ("tokens", self.max_new_tokens, 1),
            ("seed", self.seed, 0),
            ("selected rows", self.select, 1),
        ):
            if value is not None and value < lowest:
                raise LlamaError(f"{name} must be at least {lowest}, not {value}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise LlamaError(f"the share to keep must be above 0 and at most 1, not {self.keep:g}")
        if self.keep is not None and self.window is not None:
            raise LlamaError("a window drops rows by itself: give it, or a share of the prompt to keep")
        if self.evict_by is not None and self.keep is None:
            raise LlamaError(f"the policy {self.evict_by!r} needs a share of the prompt to keep")
        if self.evict_by is not None and self.evict_by not in POLICIES:
            raise LlamaError(f"the policy must be one of {', '.join(POLICIES)}, not {self.evict_by!r}")
        if self.shift and self.window is not None:
            raise LlamaError("a window and a shift are two ways to go beyond the model's context: give one of them")
        if self.num_sink_tokens and self.window is None and not self.shift:
            raise LlamaError("sink tokens need a window or a shift: without these every token is seen anyway")
        if not 0 <= self.temperature < math.inf:
            raise LlamaError(f"temperature must be 0 or a positive number, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise LlamaError(f"top-p must be above 0 and at most 1, not {self.top_p}")

    @property
    def first_tokens_kept(self) -> int:
        """The number of first tokens that stay: `num_sink_tokens`, or its default."""
        return (FIRST_TOKENS_KEPT if self.shift else 0) if self.num_sink_tokens is None else self.num_sink_tokens


@dataclass
class Speed:
    """Tokens, and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 where nothing was timed."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Speeds:
    """The speeds of a run with the cache."""

    prefill: Speed = field(default_factory=Speed)
    decode: Speed = field(default_factory=Speed)
    num_kept: int | None = None  # tokens of the prompt whose rows were kept; None: all

    def line(self) -> str:
        """Return the speeds in one line."""
        speeds = ("prefill", self.prefill), ("decode", self.decode)
        said = [f"{name} {s.tokens:,} tokens, {s.tokens_per_second:,.1f} tokens/s" for name, s in speeds if s.tokens]
        said += [] if self.num_kept is None else [f"kept the rows of {self.num_kept:,} tokens of the prompt"]
        return "; ".join(said) or "no token was generated"


def new_cache(config: LlamaConfig, options: Options, dtype: DType | None = None) -> KVCache:
    """Make an empty cache for one sequence of a model.

    Parameters
    ----------
    config : LlamaConfig
        The model's configuration.
    options : Options
        The settings. `window` and `num_sink_tokens` narrow the policies of layers that see more.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "int8", "int6", "int4"}, optional
        The element type, `options.dtype` by default.

    Returns
    -------
    KVCache
        A cache for the model's whole context; with a window, for the window, the sink tokens and one batch. For the
        policy "kvzip", the cache has room for a fork that reads the prompt again.

    Raises
    ------
    NotSupportedError
        `options` select rows, and no layer can; or keep a share of the prompt, and no layer keeps the rows of all
        tokens.
    """
    policy, max_seq_len = config.policy, config.max_seq_len
    if options.window is not None:
        policy = tuple(_narrowed(own, options.window, options.first_tokens_kept) for own in config.policy)
        max_seq_len = options.window + options.first_tokens_kept + llama.PREFILL_TOKENS
    layers = [
        Layer(
            config.num_kv_heads,
            config.head_dim,
            dtype=dtype or options.dtype,
            k_transform=options.transform,
            v_transform=options.transform,
            policy=own,
            rope=config.rope,
        )
        for own in policy
    ]
    layers = layers if options.select is None else with_sketches(layers, options.select)
    if options.keep is not None:
        eviction.layers_with_all(layers)
    if options.evict_by == "kvzip":
        return KVCache(layers, max_seq_len=max_seq_len + eviction.AGAIN, max_sequences=2)
    return KVCache(layers, max_seq_len=max_seq_len)


def _narrowed(own: Policy | None, window: int, num_sink_tokens: int) -> SlidingWindow:
    """Return a window for a layer whose own policy is `own`; a narrower window of its own stays."""
    if isinstance(own, SlidingWindow):
        window = min(window, own.window)
    return SlidingWindow(window, num_sink_tokens=num_sink_tokens)


def sample(logits: F32, rng: np.random.Generator, *, temperature: float = 1.0, top_p: float = 1.0) -> int:
    """Draw the next token.

    Parameters
    ----------
    logits : ndarray of float32, shape [vocab_size]
        The logits of the next token.
    rng : numpy.random.Generator
        The generator, which is used once; not at temperature 0.
    temperature : float
        The divisor of the logits; 0 takes the largest logit, the first of equals.
    top_p : float
        The probability that the likeliest tokens, from which one is drawn, have together.

    Returns
    -------
    int
        The token.

    Raises
    ------
    TypeError
        If `temperature` or `top_p` is no number.
    ValueError
        If `temperature` is negative or not finite, or `top_p` is not above 0 and at most 1.
    """
    temperature, top_p = to_float(temperature, "temperature"), to_float(top_p, "top_p")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be 0, for the likeliest token, or a positive number")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must be above 0 and at most 1, which keeps all tokens")
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    with np.errstate(over="ignore"):  # tiny temperatures: exp(-inf) = 0, as it should
        weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / temperature)
    cumulative = np.cumsum(weights)
    kept = cumulative[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]
    drawn = int(np.searchsorted(kept, rng.random() * kept[-1], side="right"))
    return int(order[min(drawn, len(kept) - 1)])


def shift_context(cache: KVCache, num_tokens_kept: int) -> None:
    """Drop the older half of a sequence, except its first tokens, and move the rest down.

    Nothing is computed again: the cache rotates the remaining keys to their new positions. The remaining tokens'
    keys and values still depend on the dropped tokens, to which they attended.

    Parameters
    ----------
    cache : KVCache
        A cache with more than `num_tokens_kept` tokens.
    num_tokens_kept : int
        The number of first tokens that stay in place.
    """
    cache.remove(num_tokens_kept, num_tokens_kept + num_dropped_by_shift(cache.next_position(), num_tokens_kept))


def num_dropped_by_shift(num_tokens: int, num_tokens_kept: int) -> int:
    """Return how many of `num_tokens` tokens a shift drops."""
    return (num_tokens - num_tokens_kept + 1) // 2


def evict_prompt(model: Llama, cache: KVCache, prompt: Sequence[int], options: Options, queries: Queries) -> int:
    """Keep the share of a prompt's tokens that `options` name, and give the memory of the others back.

    Returns the number of tokens that were kept.

    Parameters
    ----------
    cache : KVCache
        A cache of `new_cache`, which holds the prompt.
    queries : kvcache.eviction.Queries
        What `Llama.forward` noted of the prompt.
    """
    assert options.keep is not None
    again = partial(feed_again, model, cache, prompt)
    kept = eviction.evict(cache, POLICIES[options.evict_by or "future"], options.keep, queries=queries, again=again)
    cache.compact()
    return len(kept)


def feed_again(model: Llama, cache: KVCache, prompt: Sequence[int], seq_id: int = 0) -> Iterator[tuple[int, Queries]]:
    """Feed the prompt of a sequence once more, some tokens at a time behind a fork, for `kvcache.eviction.kvzip`.

    Yields the fork, and the queries of these tokens.
    """
    fork = max(cache.sequences) + 1
    for begin in range(0, len(prompt), eviction.AGAIN):
        queries = Queries(every=1, last=0)
        cache.fork(seq_id, fork)
        try:
            part = prompt[begin : begin + eviction.AGAIN]
            model.forward(part, cache, seq_id=fork, last_only=True, queries=queries)
            yield fork, queries
        finally:
            cache.clear(fork)


def generate(
    model: Llama,
    cache: KVCache,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Callable[[F32], int],
    prefill: Speed,
    decode: Speed,
    *,
    num_tokens_kept: int | None = None,
    select: int | None = None,
    prompts: Precision = "stored",
    evict: Callable[[Queries], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[int]:
    """Yield tokens that follow a prompt, one forward pass for each.

    Parameters
    ----------
    model, cache
        The model, and a cache for it, to which the prompt is appended.
    prompt : sequence of int
        The prompt's tokens, at least one.
    max_new_tokens : int
        The most tokens to yield.
    choose : callable
        A function that takes logits [vocab_size] in float32 and returns the next token.
    prefill, decode : Speed
        The sums to which tokens and seconds of forward passes are added, without the caller's time between two tokens.
    num_tokens_kept : int, optional
        The argument of `shift_context`, which is called when the model's context is full. By default it is not called,
        and the tokens must fit.
    select : int, optional
        The argument of `Llama.forward` for generated tokens, once the text has 8192 tokens.
    prompts : {"stored", "int8"}, default "stored"
        The argument of `Llama.forward`.
    evict : callable, optional
        A function called once the prompt is in the cache, with its queries. Its time counts for the prompt.
    on_prefill : callable, optional
        A function called after each batch of the prompt with the number of tokens done, and of the prompt's tokens.
    """
    pending: Sequence[int] = prompt
    queries = None if evict is None else Queries()
    for i in range(max_new_tokens):
        speed = decode if i else prefill
        start = time.perf_counter()
        if num_tokens_kept is not None and cache.next_position() == model.config.max_seq_len:
            shift_context(cache, num_tokens_kept)
        selects = i and cache.next_position() + 1 >= selecting.SELECT_FROM
        logits = model.forward(
            pending, cache, last_only=True, select=select if selects else None, prompts=prompts, queries=queries,
            on_batch=None if i else on_prefill,
        )  # fmt: skip
        if evict is not None and queries is not None:
            evict(queries)
            queries = None
        token = choose(logits[-1])
        speed.seconds += time.perf_counter() - start
        speed.tokens += len(pending)
        yield token
        pending = [token]

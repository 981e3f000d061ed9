"""A Llama-family model in NumPy that generates through a `KVCache`: what the examples and the command line share.

It reads a Hugging Face folder (``config.json``, safetensors, ``tokenizer.json``) or a GGUF file, with packages that are
imported when a model needs them. The parts are `Llama` (the model), `sample` and `generate` (the loop),
`seconds_without_cache` and `compare_dtypes` (the measuring), and `run`, which ties them to a stream of text that ends
with a table.
"""

from __future__ import annotations

import codecs
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvcache import FullAttention, KVCache, Rope, SlidingWindow
from kvcache.errors import shown
from kvcache.layer import DTYPES, DType, bytes_of_token, dtypes_for, suits
from kvcache.models import shapes
from kvcache.models.fields import Fields, read_config
from kvcache.models.reading import MAX_CONTEXT, open_file
from kvcache.models.tokenizer import Tokenizer, load_tokenizer
from kvcache.models.weights import F32, Tensors
from kvcache.policy import Policy
from kvcache.rope import RopeLike

__all__ = [
    "Fidelity",
    "Llama",
    "LlamaConfig",
    "LlamaError",
    "Options",
    "Report",
    "Speed",
    "compare_dtypes",
    "generate",
    "mean_loss",
    "new_cache",
    "read_windows",
    "run",
    "sample",
    "seconds_without_cache",
    "shift_context",
]

PREFILL_TOKENS = 512  # tokens of one forward pass: enough for the matrix products, and scratch stays small
FIRST_TOKENS_KEPT = 4  # by a shift: models lean on them, whatever they are
STEPS_WITHOUT_CACHE = 8  # how many decode steps are repeated without the cache to time them
EVAL_WINDOWS = 4  # how many texts from eval.txt the loss is taken over
EVAL_TOKENS = 2048  # the most that each has, if the model's context has as many
EVAL_BYTES = 16 * EVAL_WINDOWS * EVAL_TOKENS  # of eval.txt that are read: more than tokens usually stand for
INTERRUPTED = 130  # exit status, as shells have it: 128 + SIGINT

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


class LlamaError(ValueError):
    """What was asked for cannot be run; the message says what is wrong with what, in one sentence."""


# --- the model's files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers of a model's files that the runner needs, under this project's names."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_seq_len: int
    rms_norm_eps: float
    rope: Rope
    policy: tuple[FullAttention | SlidingWindow, ...]  # of each layer
    tie_word_embeddings: bool

    def check_tokens(self, tokens: ArrayLike) -> None:
        """Refuse tokens that the model has not: a tokenizer may be another model's."""
        for token in (np.min(tokens), np.max(tokens)):
            if not 0 <= token < self.vocab_size:
                raise LlamaError(f"token {token:,} is none of the model's {self.vocab_size:,}")

    @classmethod
    def read(cls, path: str | Path) -> LlamaConfig:
        """Read the configuration of a Hugging Face folder or a GGUF file.

        Raises
        ------
        ModelFileError
            The file is missing, a field is missing or makes no sense, or the model is not of Llama's family.
        NotSupportedError
            What a layer sees is nothing that this cache has a policy for.
        """
        fields = read_config(path)
        _check_family(fields)
        shape = shapes.read(fields)
        num_heads, num_kv_heads, head_dim = _heads(fields, shape)
        return cls(
            num_layers=shape.num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            vocab_size=fields.count("vocab_size"),
            max_seq_len=fields.count("max_position_embeddings", most=MAX_CONTEXT),
            rms_norm_eps=fields.positive("rms_norm_eps"),
            rope=_rope(fields, shape.rope, head_dim),
            policy=_policy(fields, shape.policy),
            tie_word_embeddings=fields.get("tie_word_embeddings") is True,
        )


def _check_family(fields: Fields) -> None:
    """Refuse what the forward pass does not compute."""
    model_type = fields.text("model_type")
    if model_type not in MODEL_TYPES:
        raise fields.error(f"model_type {shown(model_type)} is not supported, only {', '.join(MODEL_TYPES)} are")
    fields.expect("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, False)
    scaling = fields.part("rope_parameters") or fields.part("rope_scaling") or Fields({}, fields.source)
    rope_type = scaling.text("rope_type", scaling.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise fields.error(f"rope_type {shown(rope_type)} is not supported, only {', '.join(ROPE_TYPES)} are")


def _heads(fields: Fields, shape: shapes.Shape) -> tuple[int, int, int]:
    """Query heads, key-value heads and their size, which all layers have in common."""
    kinds = set(zip(shape.num_heads, shape.num_kv_heads, shape.head_dim, strict=True))
    if len(kinds) > 1 or shape.v_head_dim != shape.head_dim or any(shape.value_in_key):
        raise fields.error("its layers differ, or their keys and values do, which is not supported")
    (num_heads, num_kv_heads, head_dim) = kinds.pop()
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads are not a multiple of {num_kv_heads} key-value heads")
    if head_dim % 2:
        raise fields.error(f"head_dim must be even for RoPE, not {head_dim}")
    return num_heads, num_kv_heads, head_dim


def _rope(fields: Fields, ropes: Sequence[RopeLike], head_dim: int) -> Rope:
    """The rotation of all layers."""
    rope = ropes[0]
    if not isinstance(rope, Rope) or len({*ropes}) > 1 or 2 * len(rope.inv_freq) != head_dim:
        raise fields.error("only models whose heads are rotated as a whole, and all alike, are supported")
    return rope


def _policy(fields: Fields, policies: Sequence[Policy | None]) -> tuple[FullAttention | SlidingWindow, ...]:
    supported = tuple(policy for policy in policies if isinstance(policy, FullAttention | SlidingWindow))
    if len(supported) < len(policies):
        raise fields.error("only layers that see everything, or a window, are supported")
    return supported


# --- the model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Layer:
    """One layer's weights; matrices are [out, in], those that read the same input are stacked into one."""

    attention_norm: F32  # [hidden]
    qkv: F32  # [(num_heads + 2 num_kv_heads) * head_dim, hidden]
    qkv_bias: F32 | None  # [(num_heads + 2 num_kv_heads) * head_dim]
    q_norm: F32 | None  # [head_dim]
    k_norm: F32 | None  # [head_dim]
    out: F32  # [hidden, num_heads * head_dim]
    mlp_norm: F32  # [hidden]
    gate_up: F32  # [2 intermediate, hidden]
    down: F32  # [hidden, intermediate]


class Llama:
    """A Llama model in float32: RMSNorm, rotary positions (half-split), grouped-query attention, SwiGLU.

    Where there are such weights, queries, keys and values have biases (Qwen2), or queries and keys are normed (Qwen3).

    It holds weights only. Keys and values, and so the sequence it is in, are the cache's that each call is given.
    Use `load` to read one from a folder or a GGUF file.
    """

    def __init__(self, config: LlamaConfig, embedding: F32, layers: Sequence[_Layer], norm: F32, head: F32) -> None:
        self.config = config
        self.embedding = embedding  # [vocab, hidden]
        self.layers = layers
        self.norm = norm  # [hidden]
        self.head = head  # [vocab, hidden]
        self.inv_freq = np.array(config.rope.inv_freq)

    @classmethod
    def load(cls, path: str | Path) -> Llama:
        """Load a Hugging Face folder, ``config.json`` and ``model.safetensors`` or its shards, or a GGUF file.

        Weights of safetensors may be F32, F16 or BF16, those of GGUF whatever the ``gguf`` package decodes: these
        types, Q8_0, Q4_0, and more. All are decoded to float32. Embeddings may be tied or not.

        Raises
        ------
        ModelFileError
            A file, field or tensor is missing, of another shape, or of a kind that is not supported.
        ImportError
            A package that reads the weights is not installed.
        """
        config = LlamaConfig.read(path)
        tensors = Tensors(Path(path))
        embedding = tensors.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        layers = [_take_layer(tensors, config, f"model.layers.{i}.") for i in range(config.num_layers)]
        norm = tensors.take("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        head = embedding if tied else tensors.take("lm_head.weight", config.vocab_size, config.hidden_size)
        tensors.finish("lm_head.weight", "rope_freqs.weight")  # the factors are in the configuration's frequencies
        rope = Rope(config.rope.inv_freq)  # the rows of interleaved heads are in order now
        return cls(replace(config, rope=rope), embedding, layers, norm, head)

    def forward(
        self,
        tokens: ArrayLike,
        cache: KVCache,
        *,
        last_only: bool = False,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> F32:
        """Append tokens to sequence 0 of a cache and return what the model expects after each.

        Parameters
        ----------
        tokens : array_like of int, shape [n]
            The tokens that follow those in the cache, at least one. Many are cut into several batches.
        cache : KVCache
            Made for this model's shape, as `new_cache` does.
        last_only : bool
            Compute the logits of the last token only.
        on_batch : callable, optional
            Called after each batch with the number of tokens that are done, and with `n`.

        Returns
        -------
        ndarray of float32, shape [n, vocab_size], or [1, vocab_size] with `last_only`
            The logits of the next token.

        Raises
        ------
        LlamaError
            A token is none of the model's.
        """
        ids = np.asarray(tokens, dtype=np.intp)
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"tokens must be one list of at least one token, not of shape {list(ids.shape)}")
        self.config.check_tokens(ids)
        hidden = []
        for i in range(0, len(ids), PREFILL_TOKENS):
            hidden.append(self._hidden(ids[i : i + PREFILL_TOKENS], cache))
            if on_batch is not None:
                on_batch(min(i + PREFILL_TOKENS, len(ids)), len(ids))
        x = hidden[-1][-1:] if last_only else np.concatenate(hidden)
        return _rms_norm(x, self.norm, self.config.rms_norm_eps) @ self.head.T

    def _hidden(self, ids: NDArray[np.intp], cache: KVCache) -> F32:
        """One batch through all layers: [n] -> [n, hidden]."""
        c, n = self.config, len(ids)
        rotated, all_heads = c.num_heads + c.num_kv_heads, c.num_heads + 2 * c.num_kv_heads
        first = cache.next_position()
        angles = np.arange(first, first + n)[:, None, None] * self.inv_freq  # in float64: positions may be large
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        x = self.embedding[ids]
        with cache.batch(n) as batch:
            for index, layer in enumerate(self.layers):
                qkv = _rms_norm(x, layer.attention_norm, c.rms_norm_eps) @ layer.qkv.T
                if layer.qkv_bias is not None:
                    qkv += layer.qkv_bias
                heads = qkv.reshape(n, all_heads, c.head_dim)
                q, k, v = heads[:, : c.num_heads], heads[:, c.num_heads : rotated], heads[:, rotated:]
                for rows, norm in ((q, layer.q_norm), (k, layer.k_norm)):
                    if norm is not None:
                        rows[...] = _rms_norm(rows, norm, c.rms_norm_eps)
                _rotate(heads[:, :rotated], cos, sin)
                x += batch.attend(index, q, k, v).reshape(n, -1) @ layer.out.T
                gate_up = _rms_norm(x, layer.mlp_norm, c.rms_norm_eps) @ layer.gate_up.T
                x += _swiglu(gate_up) @ layer.down.T
        return x


def _take_layer(tensors: Tensors, config: LlamaConfig, prefix: str) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def take(name: str, *shape: int) -> F32:
        return tensors.take(f"{prefix}{name}", *shape)

    def take_qkv(kind: str, *columns: int) -> F32:
        q, k, v = (
            take(f"self_attn.{n}_proj.{kind}", r, *columns)
            for n, r in zip("qkv", (q_rows, kv_rows, kv_rows), strict=True)
        )
        if config.rope.interleaved:
            q, k = _to_halves(q, config.head_dim), _to_halves(k, config.head_dim)
        return np.concatenate([q, k, v])

    def take_if_there(name: str) -> F32 | None:
        return take(name, config.head_dim) if f"{prefix}{name}" in tensors else None

    return _Layer(
        attention_norm=take("input_layernorm.weight", hidden),
        qkv=take_qkv("weight", hidden),
        qkv_bias=take_qkv("bias") if f"{prefix}self_attn.q_proj.bias" in tensors else None,
        q_norm=take_if_there("self_attn.q_norm.weight"),
        k_norm=take_if_there("self_attn.k_norm.weight"),
        out=take("self_attn.o_proj.weight", hidden, q_rows),
        mlp_norm=take("post_attention_layernorm.weight", hidden),
        gate_up=np.concatenate(
            [take("mlp.gate_proj.weight", inner, hidden), take("mlp.up_proj.weight", inner, hidden)]
        ),
        down=take("mlp.down_proj.weight", hidden, inner),
    )


def _to_halves(rows: F32, head_dim: int) -> F32:
    """Order the rows of heads so that halves are rotated together, where neighbours were: 0 2 4 ... 1 3 5 ..."""
    return rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _rms_norm(x: F32, weight: F32, eps: float) -> F32:
    squares: F32 = np.vecdot(x, x)[..., None]
    normed: F32 = x / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(eps)) * weight
    return normed


def _rotate(heads: F32, cos: F32, sin: F32) -> None:
    """Rotate [n, heads, head_dim] in place; component i pairs with i + head_dim / 2."""
    half = heads.shape[-1] // 2
    a, b = heads[..., :half], heads[..., half:]
    rotated_a = a * cos - b * sin
    b *= cos
    b += a * sin
    a[...] = rotated_a


def _swiglu(gate_up: F32) -> F32:
    """silu(gate) * up: [n, 2 inner] -> [n, inner]."""
    inner = gate_up.shape[-1] // 2
    gate, up = gate_up[:, :inner], gate_up[:, inner:]
    with np.errstate(over="ignore"):  # exp(-gate) = inf gives the right 0
        out: F32 = gate / (1 + np.exp(-gate)) * up
    return out


# --- generating --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How to generate; the defaults are those of the example and of the command line.

    Parameters
    ----------
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0"}
        The element type of the cache.
    window : int, optional
        Tokens that each token sees, itself included; all by default.
    shift : bool
        Go on when the model's context is full: drop the older half of it, and move the rest down.
    num_sink_tokens : int, optional
        First tokens that stay, beside the window, or when the context shifts. By default none with a window, and a few
        with a shift.
    max_new_tokens : int
        When to stop.
    seed : int
        Where the random numbers of the sampling begin.
    temperature : float
        Divides the logits; 0 always takes the likeliest token.
    top_p : float
        Sample among the likeliest tokens that together have this probability.
    compare : bool
        Measure also the speed without the cache, and the element types against each other.
    quiet : bool
        Write the text only.

    Raises
    ------
    LlamaError
        A value is out of its range.
    """

    dtype: DType = "f16"
    window: int | None = None
    shift: bool = False
    num_sink_tokens: int | None = None
    max_new_tokens: int = 300
    seed: int = 0
    temperature: float = 0.8
    top_p: float = 0.95
    compare: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise LlamaError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name, value, lowest in (
            ("window", self.window, 1),
            ("sink tokens", self.num_sink_tokens, 0),
            ("tokens", self.max_new_tokens, 1),
            ("seed", self.seed, 0),
        ):
            if value is not None and value < lowest:
                raise LlamaError(f"{name} must be at least {lowest}, not {value}")
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
        """How many first tokens stay: `num_sink_tokens`, or what that is by default."""
        return (FIRST_TOKENS_KEPT if self.shift else 0) if self.num_sink_tokens is None else self.num_sink_tokens


@dataclass
class Speed:
    """Tokens, and the seconds they took."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """The rate; 0 where nothing was timed."""
        return self.tokens / self.seconds if self.seconds else 0.0


def new_cache(config: LlamaConfig, options: Options, dtype: DType | None = None) -> KVCache:
    """Make an empty cache for one sequence of a model.

    Parameters
    ----------
    config : LlamaConfig
        The model's shape.
    options : Options
        Its `window` and `num_sink_tokens` choose the policy, where the model's own is wider.
    dtype : {"f32", "f16", "bf16", "q8_0", "q4_0"}, optional
        The element type, `options.dtype` by default.

    Returns
    -------
    KVCache
        For the model's whole context, or with a window for the window, the sinks and one batch beside them.
    """
    policy, max_seq_len = config.policy, config.max_seq_len
    if options.window is not None:
        policy = tuple(_narrowed(own, options.window, options.first_tokens_kept) for own in config.policy)
        max_seq_len = options.window + options.first_tokens_kept + PREFILL_TOKENS
    return KVCache(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        max_seq_len,
        dtype=dtype or options.dtype,
        policy=policy,
        rope=config.rope,
    )


def _narrowed(own: FullAttention | SlidingWindow, window: int, num_sink_tokens: int) -> SlidingWindow:
    """A window for a layer that may have one of its own."""
    if isinstance(own, SlidingWindow):
        window = min(window, own.window)
    return SlidingWindow(window, num_sink_tokens=num_sink_tokens)


def sample(logits: F32, rng: np.random.Generator, *, temperature: float = 1.0, top_p: float = 1.0) -> int:
    """Draw the next token.

    Parameters
    ----------
    logits : ndarray of float32, shape [vocab_size]
        What the model expects.
    rng : numpy.random.Generator
        Drawn from once, or not at all at temperature 0.
    temperature : float
        Divides the logits; 0 takes the largest, the first of equals.
    top_p : float
        Only the likeliest tokens that together have this probability are drawn from; at least one.

    Returns
    -------
    int
        The token.
    """
    if temperature == 0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    with np.errstate(over="ignore"):  # a tiny temperature: exp(-inf) = 0 is right
        weights = np.exp((logits[order].astype(np.float64) - float(logits[order[0]])) / temperature)
    cumulative = np.cumsum(weights)
    kept = cumulative[: np.searchsorted(cumulative, top_p * cumulative[-1]) + 1]
    drawn = int(np.searchsorted(kept, rng.random() * kept[-1], side="right"))
    return int(order[min(drawn, len(kept) - 1)])


def shift_context(cache: KVCache, num_tokens_kept: int) -> None:
    """Drop the older half of a sequence, but not its first tokens, and move the rest down.

    Nothing is computed again: what stays has seen what goes, and the cache turns its keys to where they stand now.

    Parameters
    ----------
    cache : KVCache
        It holds more than `num_tokens_kept` tokens.
    num_tokens_kept : int
        How many first tokens stay where they are.
    """
    cache.remove(num_tokens_kept, num_tokens_kept + _half(cache.next_position(), num_tokens_kept))


def _half(num_tokens: int, num_tokens_kept: int) -> int:
    """How many tokens a shift drops."""
    return (num_tokens - num_tokens_kept + 1) // 2


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
    on_prefill: Callable[[int, int], None] | None = None,
) -> Iterator[int]:
    """Yield new tokens after a prompt, one forward pass each.

    Parameters
    ----------
    model, cache
        The model, and a cache for it, which the prompt is appended to.
    prompt : sequence of int
        At least one token.
    max_new_tokens : int
        When to stop.
    choose : callable
        Takes logits [vocab_size] in float32 and returns the next token.
    prefill, decode : Speed
        What was computed and how long it took is added here, between two tokens; what the caller does is not timed.
    num_tokens_kept : int, optional
        Where the model's context is full, `shift_context`, keeping that many; by default it is the caller who sees to
        it that the tokens fit.
    on_prefill : callable, optional
        Called after each batch of the prompt with the number of its tokens that are done, and that of all.
    """
    pending: Sequence[int] = prompt
    for i in range(max_new_tokens):
        speed = decode if i else prefill
        start = time.perf_counter()
        if num_tokens_kept is not None and cache.next_position() == model.config.max_seq_len:
            shift_context(cache, num_tokens_kept)
        logits = model.forward(pending, cache, last_only=True, on_batch=None if i else on_prefill)
        token = choose(logits[-1])
        speed.seconds += time.perf_counter() - start
        speed.tokens += len(pending)
        yield token
        pending = [token]


# --- measuring ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fidelity:
    """What an element type of the cache does to the model, on a given text."""

    loss: float  # mean, nats per token
    max_difference: float  # of any logit, from f32's
    prefill: Speed


def mean_loss(logits: F32, tokens: ArrayLike) -> float:
    """Mean negative log-likelihood of a text, in nats per token.

    Parameters
    ----------
    logits : ndarray of float32, shape [n, vocab_size]
        What the model expected after each token.
    tokens : array_like of int, shape [n]
        The text; its first token is not predicted.
    """
    wide, targets = logits[:-1].astype(np.float64), np.asarray(tokens, dtype=np.intp)[1:]
    top = wide.max(axis=-1)
    log_total = top + np.log(np.exp(wide - top[:, None]).sum(axis=-1))
    return float(np.mean(log_total - wide[np.arange(len(targets)), targets]))


def read_windows(path: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Cut the beginning of a text file into texts of `length` tokens; none where there is no file."""
    if not path.exists():
        return []
    with open_file(path) as file:
        tokens = tokenizer.encode(file.read(0, min(EVAL_BYTES, file.size)))
    first = [] if tokenizer.bos is None else [tokenizer.bos]  # with which each of them begins
    tokens, length = tokens[len(first) :], max(length - len(first), 1)
    windows = [first + tokens[i : i + length] for i in range(0, len(tokens), length)]
    return [window for window in windows if len(window) > 1][:EVAL_WINDOWS]


def compare_dtypes(
    model: Llama, options: Options, windows: Sequence[Sequence[int]]
) -> Iterator[tuple[DType, Fidelity]]:
    """Run texts, each on its own, through a cache of each element type, f32 first, and yield what it does to them."""
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
    """Time steps that keep nothing: for each length, the first so many tokens go through an emptied cache."""
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
    """What a run measured; what an interrupt left out is absent from the table."""

    config: LlamaConfig
    options: Options
    prefill: Speed = field(default_factory=Speed)
    decode: Speed = field(default_factory=Speed)
    without_cache: Speed = field(default_factory=Speed)
    types: dict[DType, Fidelity] = field(default_factory=dict)

    def table(self) -> str:
        """Format the report as plain text, without a newline at the end."""
        return "\n".join([*self._speed_lines(), "", *self._type_lines()])

    def _speed_lines(self) -> list[str]:
        lines = [f"{'':26}{'tokens':>8}{'tokens/s':>12}"]
        for name, speed, note in (
            (f"prefill, {self.options.dtype} cache", self.prefill, ""),
            (f"decode, {self.options.dtype} cache", self.decode, ""),
            ("decode, without cache", self.without_cache, f"   the whole {self._whole} again for each"),
        ):
            if speed.tokens:
                lines.append(f"{name:26}{speed.tokens:8,}{speed.tokens_per_second:12,.1f}{note}")
        return lines

    @property
    def _whole(self) -> str:
        return "context" if self.options.shift else "sequence"

    def _type_lines(self) -> list[str]:
        if not self.types:
            heading = f"{'cache type':12}{'bytes/token':>12}"
            return [heading, *(self._type_cells(dtype) for dtype in dtypes_for(self.config.head_dim))]
        exact = self.types["f32"]
        heading = f"{'logits off by':>15}{'loss':>10}{'change':>11}{'prefill tokens/s':>18}"
        lines = [f"{'cache type':12}{'bytes/token':>12}{heading}"]
        for dtype, row in self.types.items():
            change = f"{row.loss - exact.loss:+.6f}" if row is not exact else "-"
            off = f"{row.max_difference:.4f}" if row is not exact else "-"
            rate = row.prefill.tokens_per_second
            lines.append(f"{self._type_cells(dtype)}{off:>15}{row.loss:10.6f}{change:>11}{rate:18,.1f}")
        return lines

    def _type_cells(self, dtype: DType) -> str:
        c = self.config
        nbytes = c.num_layers * bytes_of_token(c.num_kv_heads, c.head_dim, c.head_dim, dtype, dtype)
        return f"{dtype:12}{nbytes:12,}"


# --- a whole run -------------------------------------------------------------------------------------------------


def run(
    path: str | Path,
    prompt: bytes,
    options: Options,
    out: TextIO,
    *,
    on_prefill: Callable[[int, int], None] | None = None,
) -> int:
    """Load a model, stream a continuation of the prompt, and end with a table.

    An interrupt (Ctrl-C) ends the text, or the measuring after it, and the table shows what is known by then. Notices
    go to stderr. The text ends where the model ends it; without a window or a shift, also when its context is full.

    With a window it goes on: positions keep growing, but rotary keys only tell distances, and within the window these
    stay as trained. The distance to sink tokens grows, which a model bears for a few of them, not for many. With a
    shift it goes on by dropping the older half of a full context and moving the rest down: positions stay as trained.

    Parameters
    ----------
    path : str or Path
        A Hugging Face folder, or a GGUF file; where there is an ``eval.txt`` in the folder, or beside the file, the
        element types are compared on that.
    prompt : bytes
        At least one byte.
    options : Options
        How to generate.
    out : TextIO
        Where the text and the table go.
    on_prefill : callable, optional
        Called after each batch of the prompt with the number of its tokens that are done, and that of all.

    Returns
    -------
    int
        An exit status: 0, or 130 after an interrupt.

    Raises
    ------
    ModelFileError
        The model's files cannot be used.
    LlamaError
        The prompt, the type, the window or the sink tokens do not fit the model.
    ImportError
        A package that this model needs is not installed.
    """
    if not prompt:
        raise LlamaError("the prompt is empty")
    tokenizer, model = load_tokenizer(path), Llama.load(path)
    tokens = tokenizer.encode(prompt)
    room = _room(model.config, tokens, options)
    report = Report(model.config, options)
    text = _Text(out, tokenizer)
    status = 0
    try:
        text.write(prompt)
        try:
            ended = _stream(model, tokens, report, min(room, options.max_new_tokens), text, on_prefill)
        finally:
            text.end()
        _notice_limits(model.config, options, len(tokens), full=not ended and room < options.max_new_tokens)
        if options.compare and not options.quiet:
            _measure(model, Path(path), tokenizer, tokens, report)
    except KeyboardInterrupt:
        status = INTERRUPTED
    if not options.quiet:
        out.write(f"\n{report.table()}\n")
    out.flush()
    return status


def _room(config: LlamaConfig, prompt: Sequence[int], options: Options) -> int:
    """How many tokens may be generated; refuses what does not fit the model."""
    context = config.max_seq_len
    if not prompt:
        raise LlamaError("the prompt has no token")
    config.check_tokens(prompt)
    if not suits(options.dtype, config.head_dim):
        raise LlamaError(f"{options.dtype} stores 32 elements at a time, and the model's head_dim is {config.head_dim}")
    if options.shift and options.first_tokens_kept > context // 2:
        raise LlamaError(f"a shift can keep at most half of the model's context, {context // 2:,} sink tokens")
    if options.window is None:
        if len(prompt) >= context:
            raise LlamaError(
                f"the prompt of {len(prompt):,} tokens leaves no room in the model's context of {context:,}"
            )
        return options.max_new_tokens if options.shift else context - len(prompt)
    if options.window + options.first_tokens_kept > context:
        raise LlamaError(f"window and sink tokens may together be at most the model's context, {context:,}")
    return options.max_new_tokens


class _Text:
    """What people read of a stream of tokens."""

    def __init__(self, out: TextIO, tokenizer: Tokenizer) -> None:
        self.out, self.tokenizer = out, tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.last = ""

    def write(self, data: bytes) -> None:
        # a model may write any byte: what would steer a terminal is replaced
        text = [c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in self.decoder.decode(data)]
        self.last = text[-1] if text else self.last
        self.out.write("".join(text))
        self.out.flush()

    def end(self) -> None:
        """Begin a new line."""
        if self.last != "\n":
            self.out.write("\n")


def _stream(
    model: Llama,
    tokens: list[int],
    report: Report,
    max_new_tokens: int,
    text: _Text,
    on_prefill: Callable[[int, int], None] | None,
) -> bool:
    """Write what follows a prompt, token by token; `tokens` grows. Returns whether the model ended it."""
    options = report.options
    rng = np.random.default_rng(options.seed)

    def choose(logits: F32) -> int:
        return sample(logits, rng, temperature=options.temperature, top_p=options.top_p)

    with new_cache(model.config, options) as cache:
        for token in generate(
            model,
            cache,
            list(tokens),
            max_new_tokens,
            choose,
            prefill=report.prefill,
            decode=report.decode,
            num_tokens_kept=options.first_tokens_kept if options.shift else None,
            on_prefill=on_prefill,
        ):
            tokens.append(token)
            if token in text.tokenizer.stop:
                return True
            text.write(text.tokenizer.decode([token]))
    return False


def _notice_limits(config: LlamaConfig, options: Options, num_tokens: int, *, full: bool) -> None:
    """Say where a text came to the end of what the model was trained for."""
    if full:
        _notice(f"stopped at {num_tokens:,} tokens, the model's whole context; with a window or a shift it would go on")
    elif options.window and options.first_tokens_kept and num_tokens > config.max_seq_len:
        _notice("the sink tokens ended up further back than the model was trained to look")


def _measure(model: Llama, path: Path, tokenizer: Tokenizer, tokens: list[int], report: Report) -> None:
    """Fill in what needs more runs of the model: no cache, and the element types."""
    if report.decode.tokens:
        # the lengths that the decode steps had, evenly spread over all of them
        spread = np.linspace(len(tokens) - report.decode.tokens, len(tokens) - 1, STEPS_WITHOUT_CACHE)
        lengths = [int(length) for length in np.unique(spread.astype(int))]
        if report.options.shift:
            lengths = [_held(n, model.config.max_seq_len, report.options.first_tokens_kept) for n in lengths]
        seconds = seconds_without_cache(model, report.options, tokens, lengths)
        report.without_cache = Speed(len(lengths), sum(seconds))
    folder = path if path.is_dir() else path.parent
    windows = read_windows(folder / "eval.txt", tokenizer, min(model.config.max_seq_len, EVAL_TOKENS))
    if not windows:
        _notice(f"{folder} has no eval.txt to compare the types on")
        return
    for dtype, fidelity in compare_dtypes(model, report.options, windows):
        report.types[dtype] = fidelity


def _held(num_tokens: int, context: int, num_tokens_kept: int) -> int:
    """How many of a text's tokens a context that shifts holds when the last of them has come."""
    dropped = _half(context, num_tokens_kept)
    return num_tokens if num_tokens <= context else context - dropped + 1 + (num_tokens - context - 1) % dropped


def _notice(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)

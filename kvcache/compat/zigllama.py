"""ZigLlama's ``inference.kv_cache``: strategies, a layer at a time, many sequences, a sliding window.

Running tokens are those whose rows not every layer has yet: the open batch (`kvcache.compat._running`).
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, Rows, Running, check_index, read_rows, to_integer

__all__ = [
    "CacheFull",
    "CacheStrategy",
    "KVCacheEntry",
    "KVCacheStats",
    "KVCacheUtils",
    "LayerKVCache",
    "ModelKVCache",
    "MultiSequenceKVCache",
    "SlidingWindowKVCache",
]

CacheFull = kvcache.CacheFullError


LONG = 512  # tokens of the longest sequence that CacheStrategy.LONG_SEQUENCE_ONLY does not store


class CacheStrategy(Enum):
    """When a sequence is stored."""

    ALWAYS = "always"
    LONG_SEQUENCE_ONLY = "long sequence only"  #: once it is longer than 512 tokens; all of it then
    ADAPTIVE = "adaptive"  #: as long as there is memory for it
    DISABLED = "disabled"


class KVCacheEntry(NamedTuple):
    """The rows of one position in a layer, ``[num_heads, head_dim]`` each."""

    key: npt.NDArray[Any]
    value: npt.NDArray[Any]
    position: int


class LongRunning(Running):
    """A `Running` for `CacheStrategy.LONG_SEQUENCE_ONLY`: the first rows of a sequence wait until it is long enough."""

    def __init__(self, cache: kvcache.KVCache) -> None:
        super().__init__(cache)
        self._waiting: list[list[Rows]] = [[] for _ in range(cache.num_layers)]  # [tokens, heads, dim] each
        self._num_waiting = 0
        self._num_joined = 0  # waiting tokens that are running once more, to be stored

    @property
    def position(self) -> int:
        return super().position + self._num_waiting - self._num_joined

    def put(self, layer: int, k: Any, v: Any, q: Any = None) -> Any:
        num_tokens = self._num_waiting + len(k)
        if self.cache.max_seq_len is not None and num_tokens > self.cache.max_seq_len:
            raise CacheFull(f"a sequence of {num_tokens} tokens: max_seq_len is {self.cache.max_seq_len}")
        joins = self._num_waiting and num_tokens > LONG
        if joins:
            k, v = (np.concatenate(x) for x in zip(*self._waiting[layer], (k, v), strict=True))
        out = super().put(layer, k, v, q)
        self._num_joined = self._num_waiting if joins else 0
        return out

    def commit(self) -> None:
        num_tokens = self.num_tokens
        waits = not super().position and num_tokens <= LONG
        rows = [[x.swapaxes(0, 1).copy() for x in self.rows(layer)] for layer in self.layers] if waits else []
        super().commit()
        if not waits:
            self._forget()
            return
        for waiting, (k, v) in zip(self._waiting, rows, strict=True):
            waiting.append((k, v))
        self._num_waiting += num_tokens

    def clear(self) -> None:
        super().clear()
        self._forget()

    def _forget(self) -> None:
        for waiting in self._waiting:
            waiting.clear()
        self._num_waiting = self._num_joined = 0


class LayerKVCache:
    """A layer of a sequence; `ModelKVCache` makes it.

    The tokens appended to one layer are to be appended to every other layer, before the next ones.
    """

    def __init__(self, running: Running, layer: int) -> None:
        self._running = running
        self.layer_id = layer

    def __repr__(self) -> str:
        return f"<zigllama.LayerKVCache {self.layer_id}: {self.sequence_length} tokens>"

    @property
    def entries(self) -> list[KVCacheEntry]:
        """Copies of the rows of every position that the layer holds, in order."""
        running = self._running
        first = running.position - running.cache.seq_len(layer=self.layer_id)
        k, v = (x.swapaxes(0, 1).copy() for x in running.rows(self.layer_id))
        return [KVCacheEntry(*rows, first + i) for i, rows in enumerate(zip(k, v, strict=True))]

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return self._running.cache.layers[self.layer_id].num_kv_heads

    @property
    def head_dim(self) -> int:
        """The elements of a head."""
        return self._running.cache.layers[self.layer_id].head_dim

    @property
    def max_seq_len(self) -> int | None:
        """The most tokens, or None."""
        return self._running.cache.max_seq_len

    @property
    def sequence_length(self) -> int:
        """The number of tokens that the layer holds."""
        running = self._running
        return running.cache.seq_len(layer=self.layer_id) + (self.layer_id in running.layers) * running.num_tokens

    def append(self, key: npt.ArrayLike, value: npt.ArrayLike) -> None:
        """Add the rows of the next token, or tokens.

        Parameters
        ----------
        key, value : array_like
            ``[num_heads, head_dim]``, or ``[tokens, num_heads, head_dim]``.

        Raises
        ------
        CacheFull
            If there would be more than `max_seq_len` tokens; nothing has changed then.
        ValueError
            If a shape is wrong, or another layer lacks the rows of the tokens before.
        """
        shape = -1, self.num_heads, self.head_dim
        self._running.put(self.layer_id, read_rows(key, "key", *shape), read_rows(value, "value", *shape))
        if self._running.is_complete:
            self._running.commit()

    def get(self, position: int) -> KVCacheEntry | None:
        """Return copies of the rows at a position, or None if it is not there."""
        running, position = self._running, to_integer("position", position)
        index = position - running.position
        if self.layer_id in running.layers and 0 <= index < running.num_tokens:
            key, value = (x[:, index - running.num_tokens].copy() for x in running.rows(self.layer_id))
            return KVCacheEntry(key, value, position)
        found = running.cache.get(self.layer_id, position)
        return None if found is None else KVCacheEntry(*found, position)

    def get_range(self, start_pos: int, length: int) -> Rows:
        """Return copies of the rows of `length` tokens, ``[length, num_heads, head_dim]`` each.

        Raises
        ------
        IndexError
            If not all of them are there.
        """
        start_pos, length = to_integer("start_pos", start_pos), to_integer("length", length)
        if not 0 <= start_pos <= start_pos + length <= self.sequence_length:
            raise IndexError(
                f"start_pos={start_pos}, length={length}: layer {self.layer_id} holds {self.sequence_length} tokens"
            )
        k, v = (x[:, start_pos : start_pos + length].swapaxes(0, 1).copy() for x in self._running.rows(self.layer_id))
        return k, v


class ModelKVCache(Copied):
    """The layers of a model, for one sequence.

    Parameters
    ----------
    num_layers, num_heads, head_dim : int
        The shape of the model.
    max_seq_len : int or None
        The most tokens; None: no limit.
    strategy : CacheStrategy, default CacheStrategy.ALWAYS
        When the sequence is stored. What is not stored is there until every layer has it.
        ``LONG_SEQUENCE_ONLY`` keeps the first 512 tokens aside, and stores them with the 513th.
    window_size : int, optional
        The tokens that a token sees, itself included; older ones are dropped.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcache.compat.zigllama import ModelKVCache
    >>> cache = ModelKVCache(num_layers=2, num_heads=2, head_dim=4, max_seq_len=16)
    >>> for layer in cache.layers:
    ...     layer.append(np.ones((2, 4)), np.ones((2, 4)))
    >>> cache.layers[1].get(0).key.shape, cache.layers[1].get(1)
    ((2, 4), None)
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int | None,
        strategy: CacheStrategy = CacheStrategy.ALWAYS,
        *,
        window_size: int | None = None,
    ) -> None:
        if not isinstance(strategy, CacheStrategy):
            raise TypeError(f"strategy={strategy!r}: must be a CacheStrategy, such as CacheStrategy.ALWAYS")
        strategies: dict[CacheStrategy, Any] = {
            CacheStrategy.LONG_SEQUENCE_ONLY: kvcache.LongSequencesOnly(LONG),
            CacheStrategy.ADAPTIVE: kvcache.Adaptive() if strategy is CacheStrategy.ADAPTIVE else None,
        }
        policy: Any = kvcache.FullAttention()
        if window_size is not None:
            policy = kvcache.SlidingWindow(to_integer("window_size", window_size, 1))
        self.cache = kvcache.KVCache(
            num_layers,
            to_integer("num_heads", num_heads, 1),
            head_dim,
            max_seq_len,
            dtype="f32",
            policy=policy,
            strategy=strategies.get(strategy, strategy.value),
        )
        self.num_layers = self.cache.num_layers
        self.strategy = strategy
        is_long = strategy is CacheStrategy.LONG_SEQUENCE_ONLY
        self._running = LongRunning(self.cache) if is_long else Running(self.cache)
        self.layers = [LayerKVCache(self._running, layer) for layer in range(num_layers)]

    def __repr__(self) -> str:
        return f"<zigllama.ModelKVCache: {self.num_layers} layers, {self.layers[0].sequence_length} tokens>"

    def clear(self) -> None:
        """Forget all tokens, and keep the memory."""
        self._running.clear()

    def compact(self) -> None:
        """Give back memory that no token takes.

        Raises
        ------
        kvcache.CacheBusyError
            If a layer lacks the rows of the last token.
        """
        self.cache.compact()

    def deinit(self) -> None:
        """Free all memory."""
        self._running.close()


class MultiSequenceKVCache(Copied):
    """Sequences, each with a cache of its own, by any integer.

    Parameters
    ----------
    n_layers, n_heads, head_dim : int
        The shape of the model.
    max_seq_length : int or None
        The most tokens of a sequence.
    max_sequences : int, optional
        The most sequences.
    window_size : int, optional
        As for `ModelKVCache`.
    """

    def __init__(
        self,
        n_layers: int,
        n_heads: int,
        head_dim: int,
        max_seq_length: int | None,
        *,
        max_sequences: int | None = None,
        window_size: int | None = None,
    ) -> None:
        sizes = {"n_layers": n_layers, "n_heads": n_heads, "head_dim": head_dim}
        limits = {"max_seq_length": max_seq_length, "max_sequences": max_sequences, "window_size": window_size}
        for name, value in (sizes | {name: limit for name, limit in limits.items() if limit is not None}).items():
            to_integer(name, value, 1)
        self._shape = n_layers, n_heads, head_dim, max_seq_length
        self.max_sequences = max_sequences
        self.window_size = window_size
        self.sequences: dict[int, ModelKVCache] = {}

    def __repr__(self) -> str:
        return f"<zigllama.MultiSequenceKVCache: {len(self.sequences)} sequences>"

    def get_or_create_sequence(self, sequence_id: int) -> list[LayerKVCache]:
        """Return the layers of a sequence; create it if it is not there.

        Raises
        ------
        CacheFull
            If there would be more than `max_sequences`.
        """
        sequence_id = to_integer("sequence_id", sequence_id)
        if sequence_id not in self.sequences:
            if self.max_sequences is not None and len(self.sequences) >= self.max_sequences:
                raise CacheFull(
                    f"sequence_id={sequence_id}: there are max_sequences={self.max_sequences} already; remove one"
                )
            self.sequences[sequence_id] = ModelKVCache(*self._shape, window_size=self.window_size)
        return self.sequences[sequence_id].layers

    def append_to_sequence(self, sequence_id: int, layer_id: int, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Add rows to a layer of a sequence, which is created if it is not there; see `LayerKVCache.append`."""
        check_index("layer_id", layer_id, self._shape[0])
        is_new = self._find(sequence_id) is None
        try:
            self.get_or_create_sequence(sequence_id)[layer_id].append(keys, values)
        except BaseException:
            if is_new:
                self.remove_sequence(sequence_id)
            raise

    def get_from_sequence(self, sequence_id: int, layer_id: int, start_pos: int, length: int) -> Rows | None:
        """Return rows as `LayerKVCache.get_range` does, or None if there is no such sequence."""
        model = self._find(sequence_id)
        if model is None:
            return None
        check_index("layer_id", layer_id, self._shape[0])
        return model.layers[layer_id].get_range(start_pos, length)

    def get_sequence_length(self, sequence_id: int) -> int:
        """Return the number of tokens of a sequence, 0 if there is no such sequence."""
        model = self._find(sequence_id)
        return 0 if model is None else model.layers[0].sequence_length

    def clear_sequence(self, sequence_id: int) -> None:
        """Forget the tokens of a sequence, and keep its memory; do nothing if there is no such sequence."""
        model = self._find(sequence_id)
        if model is not None:
            model.clear()

    def remove_sequence(self, sequence_id: int) -> None:
        """Forget a sequence, and free its memory; do nothing if there is no such sequence."""
        model = self._find(sequence_id)
        if model is not None:
            del self.sequences[sequence_id]
            model.deinit()

    def get_memory_usage(self) -> int:
        """Return the bytes that are taken."""
        return sum(model.cache.nbytes for model in self.sequences.values())

    def deinit(self) -> None:
        """Free all memory."""
        for sequence_id in list(self.sequences):
            self.remove_sequence(sequence_id)

    def _find(self, sequence_id: int) -> ModelKVCache | None:
        return self.sequences.get(to_integer("sequence_id", sequence_id))


class SlidingWindowKVCache(Copied):
    """Sequences of which the last `window_size` tokens stay.

    Parameters
    ----------
    n_layers, n_heads, head_dim : int
        The shape of the model.
    window_size : int
        The tokens that a token sees, itself included.
    """

    def __init__(self, n_layers: int, n_heads: int, head_dim: int, window_size: int) -> None:
        window_size = to_integer("window_size", window_size, 1)
        self.cache = MultiSequenceKVCache(n_layers, n_heads, head_dim, None, window_size=window_size)
        self.window_size = window_size

    def __repr__(self) -> str:
        return f"<zigllama.SlidingWindowKVCache({self.window_size}): {len(self.cache.sequences)} sequences>"

    def append_with_sliding(self, sequence_id: int, layer_id: int, keys: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Add rows to a layer of a sequence, of which the oldest are dropped; see `LayerKVCache.append`."""
        self.cache.append_to_sequence(sequence_id, layer_id, keys, values)

    def get_with_window(self, sequence_id: int, layer_id: int, position: int = 0) -> Rows | None:
        """Return copies of the last rows, ``[at most window_size, n_heads, head_dim]`` each; None if empty.

        `position` is of no effect, as there.
        """
        check_index("layer_id", layer_id, self.cache._shape[0])
        model = self.cache._find(sequence_id)
        if model is None:
            return None
        layer = model.layers[layer_id]
        length = layer.sequence_length
        kept = min(length, self.window_size)
        return layer.get_range(length - kept, kept) if length else None

    def deinit(self) -> None:
        """Free all memory."""
        self.cache.deinit()


class KVCacheStats(NamedTuple):
    """Figures of many sequences."""

    total_sequences: int
    total_memory_bytes: int
    average_sequence_length: float
    cache_efficiency: float  #: tokens held, by tokens that there is memory for

    @classmethod
    def compute(cls, cache: MultiSequenceKVCache) -> KVCacheStats:
        """Return the figures of now."""
        lengths = [cache.get_sequence_length(sequence_id) for sequence_id in cache.sequences]
        used = slots = 0
        for model in cache.sequences.values():
            stats = model.cache.stats()
            used += stats["live_slots"]
            slots += (stats["blocks_in_use"] + stats["blocks_free"]) * model.cache.block_size
        return cls(len(lengths), cache.get_memory_usage(), sum(lengths) / max(len(lengths), 1), used / max(slots, 1))

    def print(self) -> None:
        """Print the figures."""
        print(f"sequences: {self.total_sequences}")
        print(f"memory: {self.total_memory_bytes / 2**20:.2f} MiB")
        print(f"tokens of a sequence: {self.average_sequence_length:.1f}")
        print(f"memory in use: {self.cache_efficiency:.1%}")


class KVCacheUtils:
    """Estimates."""

    @staticmethod
    def estimate_memory_usage(n_sequences: int, max_seq_length: int, n_layers: int, n_heads: int, head_dim: int) -> int:
        """Return the bytes that sequences of this length come to."""
        sizes = {
            "n_sequences": n_sequences, "max_seq_length": max_seq_length, "n_layers": n_layers, "n_heads": n_heads,
            "head_dim": head_dim,
        }  # fmt: skip
        return math.prod(to_integer(name, size, 0) for name, size in sizes.items()) * 2 * 4

    @staticmethod
    def recommended_window_size(model_context_length: int, available_memory_mb: int) -> int:
        """Return the tokens of 4,096 bytes that memory has room for, at most the model's."""
        most = to_integer("model_context_length", model_context_length, 0)
        return min(to_integer("available_memory_mb", available_memory_mb, 0) * 2**20 // 4096, most)

"""Edifice's ``Blocks.KVCache``: f32 arrays of ``[batch, heads, seq, dim]``, all sequences in lock step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

import kvcache
from kvcache.compat._running import Copied, Rows, Running, check_index, read_array, to_integer

__all__ = ["KVCache"]

Array = npt.NDArray[Any]
Attention = Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, "KVCache"], tuple[Array, "KVCache"]]


class KVCache(Copied):
    """A state; `init` makes one. Functions that return a state there return this one, changed.

    A step ends when every layer has been updated, and the position advances once for a step. If a layer is updated
    again before, the layers that were left out get zeros, as in Edifice.

    Examples
    --------
    >>> import numpy as np
    >>> from kvcache.compat.edifice import KVCache
    >>> cache = KVCache.init(batch_size=2, num_layers=1, num_heads=4, head_dim=8)
    >>> cache, k, v = KVCache.update(cache, 0, np.ones((2, 4, 3, 8)), np.ones((2, 4, 3, 8)))
    >>> k.shape, KVCache.seq_length(cache)
    ((2, 4, 3, 8), 3)
    """

    def __init__(self, running: Running, max_seq_len: int) -> None:
        self._running = running
        self.max_seq_len = max_seq_len

    @classmethod
    def init(
        cls,
        *,
        batch_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        max_seq_len: int = 2048,
        type: Any = "f32",
    ) -> Self:
        """Return an empty state, all of whose memory is there.

        Parameters
        ----------
        batch_size : int
            The number of sequences.
        num_layers, num_heads, head_dim : int
            The shape of the model.
        max_seq_len : int, default 2048
            The most tokens of each sequence.
        type : str, default "f32"
            The element type, any that `kvcache.KVCache` stores.
        """
        sizes = {
            "batch_size": batch_size, "num_layers": num_layers, "num_heads": num_heads, "max_seq_len": max_seq_len
        }  # fmt: skip
        batch_size, num_layers, num_heads, max_seq_len = (to_integer(name, value, 1) for name, value in sizes.items())
        try:
            layer = kvcache.Layer(num_heads, head_dim, dtype=type)
        except ValueError as error:
            raise ValueError(str(error).replace("dtype=", "type=", 1)) from None
        capacity = batch_size * max_seq_len
        cache = kvcache.KVCache(
            [layer] * num_layers, max_sequences=batch_size, capacity=capacity, block_size=max_seq_len
        )
        cache.reserve(capacity)
        return cls(Running(cache, batch_size, layout="BHTD"), max_seq_len)

    def __repr__(self) -> str:
        return (
            f"<edifice.KVCache: {self._running.sequences} sequences, {self.num_layers} layers, {self.position} of "
            f"{self.max_seq_len} tokens>"
        )

    @property
    def cache(self) -> kvcache.KVCache:
        """The cache below, with the tokens of the steps that ended in sequences 0 to `batch_size` - 1."""
        return self._running.cache

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.cache.num_layers

    @property
    def position(self) -> int:
        """The position of the next token."""
        return self.cache.seq_len() + self._running.num_tokens

    def update(self, layer_idx: int, new_k: npt.ArrayLike, new_v: npt.ArrayLike) -> tuple[Self, Any, Any]:
        """Append rows in a layer.

        Parameters
        ----------
        layer_idx : int
            The layer's index.
        new_k, new_v : array_like
            The new rows, ``[batch, heads, tokens, dim]``.

        Returns
        -------
        state : KVCache
            This state.
        k, v : numpy.ndarray
            Copies of all rows of the layer, the new ones included, ``[batch, heads, seq, dim]`` of f32.

        Raises
        ------
        kvcache.CacheFullError
            If there would be more than `max_seq_len` tokens.
        IndexError
            If there is no such layer.
        ValueError
            If a shape is wrong.
        """
        self._put_and_attend(layer_idx, new_k, new_v, None)
        k, v = self.get(layer_idx)
        self._end_step_if_complete()
        return self, k, v

    def get(self, layer_idx: int) -> Rows:
        """Return copies of the keys and values of a layer, ``[batch, heads, seq, dim]`` of f32.

        As in Edifice, an empty state gives one row of zeros. Tokens that the layer was not updated with give zeros too.
        """
        running = self._running
        if running.batch is not None and layer_idx in running.layers:
            k, v, _ = running.batch.dense(layer_idx, layout="BHTD", mask=None)
            return k, v
        length = max(self.position, 1)
        k, v = (np.stack(x) for x in zip(*(self.cache.extract(layer_idx, 0, length, seq_id=i)
                                           for i in range(running.sequences)), strict=True))  # fmt: skip
        return k, v

    def seq_length(self, layer_idx: int | None = None) -> int:
        """Return the number of tokens of each sequence, which is the same in every layer.

        Raises
        ------
        IndexError
            If there is no such layer.
        """
        if layer_idx is not None:
            check_index("layer_idx", layer_idx, self.num_layers)
        return self.position

    def reset(self) -> Self:
        """Forget all tokens, and keep the memory; return this state."""
        self._running.clear()
        return self

    @staticmethod
    def build_cached_attention(*, num_heads: int, head_dim: int, layer_idx: int) -> Attention:
        """Return a function that updates a layer and attends over it.

        Parameters
        ----------
        num_heads, head_dim : int
            The shape of the queries.
        layer_idx : int
            The layer's index.

        Returns
        -------
        function
            ``attention(q, k, v, state)``, all arrays ``[batch, heads, tokens, dim]``, returns the result, ``[batch,
            tokens, num_heads * head_dim]``, and the state. As there, new tokens all see each other. It raises what
            `update` raises; a call that fails changes nothing.
        """
        num_heads, head_dim = to_integer("num_heads", num_heads, 1), to_integer("head_dim", head_dim, 1)

        def attention(
            q: npt.ArrayLike, new_k: npt.ArrayLike, new_v: npt.ArrayLike, state: KVCache
        ) -> tuple[npt.NDArray[Any], KVCache]:
            queries = read_array(q, "q")
            state._check_shape("q", queries, num_heads, head_dim)
            out = state._put_and_attend(layer_idx, new_k, new_v, queries)
            state._end_step_if_complete()
            return out.swapaxes(1, 2).reshape(len(out), -1, num_heads * head_dim), state

        return attention

    def _put_and_attend(self, layer: int, k: npt.ArrayLike, v: npt.ArrayLike, q: npt.NDArray[Any] | None) -> Any:
        """Put rows in a layer, in a new step if it has rows of this step. Unless `q` is None, attend over the layer.

        Return the attention's result.
        """
        running = self._running
        k, v = read_array(k, "new_k"), read_array(v, "new_v")
        check_index("layer_idx", layer, self.num_layers)
        self._check(k, v, q)
        if layer in running.layers:
            self._check_room(k.shape[2])  # before this step ends
            self._fill_with_zeros()
            running.commit()
        return running.put(layer, k, v, q)

    def _check_shape(self, name: str, array: Array, heads: int, head_dim: int) -> None:
        """Raise ``ValueError`` unless an array is ``[batch, heads, tokens, head_dim]``, of at least one token."""
        tokens = array.shape[2] if array.ndim == 4 else 0
        if not tokens or array.shape != (self._running.sequences, heads, tokens, head_dim):
            axes = f"{self._running.sequences}, {heads}, tokens, {head_dim}"
            raise ValueError(f"{name}: an array of shape {array.shape}, where [{axes}] is needed")

    def _check(self, k: Array, v: Array, q: Array | None) -> None:
        """Raise ``ValueError`` unless arrays are of the same tokens, and suit the cache."""
        [layer, *_] = self.cache.layers
        self._check_shape("new_k", k, layer.num_kv_heads, layer.head_dim)
        if v.shape != k.shape:
            raise ValueError(f"new_v: an array of shape {v.shape}, where new_k is of shape {k.shape}")
        if q is not None and (q.shape[2:] != k.shape[2:] or q.shape[1] % layer.num_kv_heads):
            raise ValueError(
                f"q: an array of shape {q.shape}, where new_k is of shape {k.shape}: only the number of heads may "
                "differ, and is a multiple then"
            )

    def _check_room(self, tokens: int) -> None:
        """Raise ``CacheFullError`` unless the next step can be of `tokens`."""
        if self.position + tokens > self.max_seq_len:
            raise kvcache.CacheFullError(
                f"{tokens} more tokens do not fit: there are {self.position} of max_seq_len={self.max_seq_len}"
            )

    def _end_step_if_complete(self) -> None:
        """End the step if every layer was updated."""
        if self._running.is_complete:
            self._running.commit()

    def _fill_with_zeros(self) -> None:
        """Put zeros in the layers that the step has left out."""
        cache, running = self.cache, self._running
        first = cache.layers[0]
        shape = running.sequences, first.num_kv_heads, running.num_tokens, first.head_dim
        for layer in set(range(cache.num_layers)) - running.layers:
            running.put(layer, *np.zeros((2, *shape), np.float32))

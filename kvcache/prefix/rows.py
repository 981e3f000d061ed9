"""Carry the rows of a block to a store and back: as bytes, in the types in which the cache stores them.

A payload is a byte for each layer, 1 if its rows follow, then the rows of these layers: the keys, then the values if
they are stored apart, each ``[num_kv_heads][tokens][bytes of a row]``. The key of a block stands for shapes and types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache import _core

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcache.cache import KVCache

__all__ = ["Rows"]


class Rows:
    """Reads and writes the rows of retained sequences of a cache."""

    def __init__(self, cache: KVCache) -> None:
        self._core = cache._core
        self._num_layers = cache.num_layers
        self._shapes = {  # of each layer with rows: KV heads, and the bytes of a key and of a value, 0: none
            i: (
                layer.num_kv_heads,
                _core.bytes_of_row(_core.TYPES[layer.k_dtype], layer.head_dim),
                0 if layer.value_in_key else _core.bytes_of_row(_core.TYPES[layer.v_dtype], layer.v_head_dim),
            )
            for i, layer in enumerate(cache.layers)
            if layer.policy is not None and layer.share is None
        }
        groups: dict[object, set[int]] = {}  # as the core makes them: policies that are equal there share slots
        for layer in self._shapes:
            groups.setdefault(cache.layers[layer].for_core()[5], set()).add(layer)
        self._groups = list(groups.values())
        self._leaders = [min(group) for group in self._groups]  # layers of a group hold the same tokens

    def nbytes(self, num_tokens: int) -> int:
        """Return the bytes of a payload in which no layer is missing."""
        return self._num_layers + num_tokens * sum(heads * (k + v) for heads, k, v in self._shapes.values())

    def read(self, seq_id: int, begin: int, end: int) -> list[Buffer] | None:
        """Return the payload of a retained sequence, in parts; None if it was evicted, or the cache is closed."""
        try:
            return self._read(seq_id, begin, end)
        except ValueError:
            if self._core.closed:  # perhaps only since it was begun
                return None
            raise

    def _read(self, seq_id: int, begin: int, end: int) -> list[Buffer] | None:
        held = self._held(seq_id, end - begin)
        if not held:
            return None
        flags = np.zeros(self._num_layers, np.uint8)
        flags[held] = 1
        parts: list[Buffer] = [flags.tobytes()]
        for layer in held:
            keys, values = self._core.extract(seq_id, layer, begin, end, True)
            parts.append(np.ascontiguousarray(keys).view(np.uint8).reshape(-1).data)
            if self._shapes[layer][2]:
                parts.append(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)
        return parts if self._held(seq_id, end - begin) == held else None

    def _held(self, seq_id: int, num_tokens: int) -> list[int]:
        """Return the layers in which a sequence has all its rows."""
        return [layer for layer in self._shapes if self._core.seq_len(seq_id, layer) == num_tokens]

    def are_complete(self, seq_id: int, num_tokens: int) -> bool:
        """Return whether a sequence has rows of so many tokens in every layer that has rows."""
        return all(self._core.seq_len(seq_id, layer) == num_tokens for layer in self._leaders)

    def write(self, seq_id: int, begin: int, end: int, payload: memoryview) -> bool:
        """Make a retained sequence, pinned, of a payload.

        Return False, and make none, if its size is wrong, or if it has some layers of a group and not all: the others
        would show what their slots held before.
        """
        flags = bytes(payload[: self._num_layers])
        layers = [i for i, flag in enumerate(flags) if flag]
        if len(flags) < self._num_layers or not layers or not self._shapes.keys() >= set(layers):
            return False
        if any(0 < len(group.intersection(layers)) < len(group) for group in self._groups):
            return False
        n, at = end - begin, self._num_layers
        if len(payload) != at + n * sum(heads * (k + v) for heads, k, v in map(self._shapes.__getitem__, layers)):
            return False
        _core.retain_new(self._core, seq_id, begin, end, layers)
        for layer in layers:
            heads, *sizes = self._shapes[layer]
            keys, values = (
                np.frombuffer(payload, np.uint8, heads * n * size, offset).reshape(heads, n, size)
                for size, offset in zip(sizes, (at, at + heads * n * sizes[0]), strict=True)
            )
            self._core.inject(seq_id, layer, begin, keys, values if sizes[1] else None, False)
            at += heads * n * sum(sizes)
        return True

"""Save an `HFCache` to a file, and make one of it.

The file is a saved state of the `KVCache`, with one more sequence, which has no rows: its tokens say which sequences
are the rows of the batch (docs/format.md).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NoReturn, Self, TypeVar, cast

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvcache import state
from kvcache.errors import NotSupportedError, StateFormatError
from kvcache.hf.layers import CrossLayer
from kvcache.hf.policies import SHAPE, parts_of
from kvcache.layer import Layer
from kvcache.policy import Policy

C = TypeVar("C", bound="Saveable")

VERSION = 1  # of the tokens of the sequence without rows: version, columns seen, ids of the batch's sequences


class Saveable:
    """Saves a cache to a file; a base of `HFCache`."""

    def save(
        self, path: str | os.PathLike[str], *, tokens: torch.Tensor | None = None, fingerprint: str = "",
        secret: bytes | None = None,
    ) -> None:  # fmt: skip
        """Save all tokens to a file, which `load` makes a cache of, in this process or another.

        The file at `path` is replaced as a whole, as by `kvcache.KVCache.save`. Tokens of a forward pass that did not
        go through all layers are no part of it.

        Parameters
        ----------
        path : path
            The file.
        tokens : torch.Tensor, optional
            All tokens of the batch, ``[batch, tokens]``, with padding, as `generate` returns them, to be found again by
            `kvcache.state.inspect`; the cache does not use them.
        fingerprint, secret
            As in `kvcache.KVCache.save`.

        Raises
        ------
        NotSupportedError
            If a layer keeps transformers' own state (linear attention), or the rows of an encoder.
        OSError
            If the file cannot be written.
        ValueError, TypeError
            If an argument is wrong.
        """
        _save(self, path, tokens, fingerprint, secret)

    @classmethod
    def load(
        cls, config: PreTrainedConfig, path: str | os.PathLike[str], *,
        policy: Policy | Sequence[Policy] | None = None, fingerprint: str | None = None, secret: bytes | None = None,
    ) -> Self:  # fmt: skip
        """Make a cache of a file that `save` wrote; `generate` goes on with it.

        Parameters
        ----------
        config : transformers.PreTrainedConfig
            The model's configuration. Types and transform of the rows are the file's.
        path : path
            The file.
        policy : policy or list of policies, optional
            That of the saved cache, if it was given one.
        fingerprint, secret : optional
            As in `kvcache.KVCache.load`.

        Returns
        -------
        HFCache
            The cache, with the same rows of the batch. Masks must hide the padding that they hid before.

        Raises
        ------
        StateFormatError
            As by `kvcache.KVCache.load`; or if the layers of `config` and `policy` are others, or the file was not
            written by an `HFCache`.
        OSError
            If the file cannot be read.
        NotSupportedError, ValueError, TypeError
            As by `HFCache`; or if a layer has a state that no file has.
        """
        return _load(cls, config, path, policy, fingerprint, secret)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an HFCache cannot be pickled: use save() and HFCache.load(), or where a layer cannot be saved, keep the"
            " token ids and give them to the model again; copy.deepcopy() makes a cache that shares its rows, in this"
            " process"
        )


def check_layers(layers: Sequence[Any]) -> None:
    """Raise NotSupportedError for a layer whose rows or state a file would lack."""
    for i, layer in enumerate(layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            raise NotSupportedError(
                f"layer {i} keeps transformers' own state ({type(layer).__name__}), which no saved state has: keep the"
                " token ids and give them to the model again"
            )
        if isinstance(layer, CrossLayer):
            raise NotSupportedError(f"layer {i} keeps rows of an encoder, which no saved state has: run it again")


def _save(cache: Any, path: state.StrPath, tokens: Any, fingerprint: str, secret: bytes | None) -> None:
    """Write a file, as `HFCache.save` says."""
    check_layers(cache.layers)
    cache._end_pass()
    seen, seq_ids = cache._seen, cache._seq_ids
    held: dict[int, Any] = {}
    if tokens is not None:
        given = torch.as_tensor(tokens)
        if given.ndim != 2 or given.is_floating_point() or len(given) != len(seq_ids) or given.shape[1] < seen:
            raise ValueError(
                f"tokens has the shape {[*given.shape]} and the type {given.dtype}: integers [{len(seq_ids)}, {seen}]"
                " are needed, or more columns, as generate returns them"
            )
        columns = zip(seq_ids, given, cache._offsets, strict=True)
        held = {seq_id: row[offset:seen].tolist() for seq_id, row, offset in columns}
    [marker] = cache._new_ids(1)
    held[marker] = [VERSION, seen, *seq_ids]
    state.save(path, [(cache._cache._core, [*seq_ids, marker], held)], fingerprint, secret)


def _load(
    kind: type[C],
    config: PreTrainedConfig,
    path: state.StrPath,
    policy: Policy | Sequence[Policy] | None,
    fingerprint: str | None,
    secret: bytes | None,
) -> C:
    """Make a cache, as `HFCache.load` says."""
    types = state.inspect(path).layers
    cast(Any, kind).make_kv_cache(config)  # raises for a model that no HFCache serves
    check_layers(parts_of(config)[1])
    dtype, transform = next(((layer.k_dtype, layer.k_transform) for layer in types), (None, None))
    try:
        cache: Any = cast(Any, kind)(config, dtype, policy, transform)
    except (TypeError, ValueError):
        state.inspect(path, verify=True)  # where the file is damaged, that is why
        raise
    _check_shapes(cache, path, types)
    found: list[int] = []

    def choose(saved: state.SavedState) -> dict[int, int]:
        seen, rows, lengths = _batch_of(saved)
        ids = cache._new_ids(len(rows))
        found.extend((seen, *(seen - lengths[row] for row in rows)))
        return dict(zip(rows, ids, strict=True))

    [targets] = state.restore_chosen(path, [(cache._cache, choose)], fingerprint, secret)
    cache._seq_ids, cache._seen, cache._offsets = [*(targets or {}).values()], found[0], found[1:]
    return cast(C, cache)


def _check_shapes(cache: Any, path: state.StrPath, saved: Sequence[Layer]) -> None:
    """Raise StateFormatError if the layers of a file are not those of a cache."""
    ours = list(zip(*(getattr(cache._cache, name) for name in SHAPE), strict=True))
    theirs = [tuple(getattr(layer, name) for name in SHAPE) for layer in saved]
    if ours == theirs:
        return
    state.inspect(path, verify=True)  # where the file is damaged, that is why
    what = f"it has {len(theirs)} layers, config's model {len(ours)}"
    if len(ours) == len(theirs):
        i = next(i for i, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
        there, here = (", ".join(f"{n}={v!r}" for n, v in zip(SHAPE, of[i], strict=True)) for of in (theirs, ours))
        what = f"its layer {i} of attention has {there}; here it has {here}"
    raise StateFormatError(
        f"{os.fspath(path)}: of another shape: {what}; give the config, and the policy, that it was saved with"
    )


def _batch_of(saved: state.SavedState) -> tuple[int, list[int], dict[int, int]]:
    """Return the columns seen, the sequence of each row of the batch, and each sequence's length."""
    lengths = {one.seq_id: one.next_position for one in saved.sequences}
    for one in saved.sequences:
        if not any(one.num_rows) and len(one.tokens) >= 2:
            version, seen, *rows = one.tokens.tolist()
            del lengths[one.seq_id]
            if version == VERSION and sorted(rows) == sorted(lengths) and seen >= max(lengths.values(), default=0):
                return seen, rows, lengths
            break
    raise StateFormatError("no state of an HFCache: it does not say which sequence is which row of the batch")

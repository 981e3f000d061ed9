"""`Saveable`: the methods of `KVCache` that save it to a file, and load it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from kvcache import _core
from kvcache.layer import Layer
from kvcache.rope import RopeLike

if TYPE_CHECKING:
    from kvcache.follower import Edit


class Saveable:
    """Saves a cache's sequences to files; the base of `KVCache`."""

    __slots__ = ()

    if TYPE_CHECKING:
        _core: _core.Cache
        _layers: tuple[Layer, ...]

        @property
        def _edits(self) -> deque[Edit] | None: ...
        def _note_edits(self) -> None: ...

    def save(
        self, path: str | os.PathLike[str], seq_ids: Iterable[SupportsIndex] | None = None, *,
        tokens: Mapping[int, Sequence[SupportsIndex]] | None = None, fingerprint: str = "", secret: bytes | None = None,
    ) -> None:  # fmt: skip
        """Save sequences to a file, which `load` and `restore` read.

        The file has their rows as they are stored (shared rows once), their positions, deltas and expired ranges, and
        the configuration. It is the state of one moment: other threads may edit meanwhile, and an open batch is no part
        of it. The file at `path` is replaced as a whole, once all is on the disk: whatever happens, it is the old one
        or the new one. Tokens and rows tell what was said, so only its owner may read a new file. A file that is
        replaced keeps its mode.

        Parameters
        ----------
        path : path
            The file. A link's target is replaced; a folder, a device or a FIFO is not. A temporary file beside it,
            ``.NAME.*.tmp``, is left over if the process is killed.
        seq_ids : iterable of int, optional
            The sequences; by default all. Each must hold something, or be in `tokens`.
        tokens : mapping of int to sequence of int, optional
            The tokens of sequences, to be found again by `kvcache.state.inspect`. The cache does not use them: there
            may be more or fewer than rows.
        fingerprint : str, default ""
            A name of the model, say a hash of its file, which `load` can ask for: up to 255 printable ASCII characters
            but quotes and backslashes.
        secret : bytes, optional
            From 1 to 64 bytes. With the same secret, `load` finds any change of the file. Without, checksums find
            damage, but not a change by somebody who computes them anew.

        Raises
        ------
        OSError
            If the file cannot be written.
        ValueError, TypeError
            If an argument is wrong.
        MemoryError
            If memory for the tables is short. Rows are written 1 MiB at a time.

        Notes
        -----
        The format is safetensors: docs/format.md has every byte. Meanwhile `compact` and `close` raise ``BufferError``.

        Examples
        --------
        >>> import tempfile
        >>> cache = kvcache.KVCache(1, 1, 2, 64)
        >>> with cache.batch(3) as batch:
        ...     batch.put(0, np.ones((3, 1, 2), np.float32), np.ones((3, 1, 2), np.float32))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(f"{folder}/state")
        ...     other = kvcache.KVCache.load(f"{folder}/state")
        ...     cache.restore(f"{folder}/state", seq_id=7)
        >>> other.seq_len(), cache.seq_len(7)
        (3, 3)
        """
        from kvcache import state  # not loaded by `import kvcache`

        ids = state.sequences_to_save(self._core, seq_ids, tokens)
        state.save(path, [(self._core, ids, tokens)], fingerprint, secret)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, fingerprint: str | None = None, secret: bytes | None = None,
        rope: RopeLike | Sequence[RopeLike] = None, sketch: bool | Sequence[bool] = False, **overrides: Any,
    ) -> Self:  # fmt: skip
        """Make a cache of a saved state: with its configuration, and all its sequences.

        Parameters
        ----------
        path : path
            The file. It may come from anywhere: nothing in it is executed, and all of it is checked. It is read, not
            mapped: one that becomes shorter meanwhile is refused.
        fingerprint : str, optional
            The fingerprint that it must have.
        secret : bytes, optional
            The secret that it was saved with. A file that was changed, or saved without it, is refused.
        rope : as in `KVCache`, optional
            The rotations, where functions move keys, as these are not in the file.
        sketch : as in `KVCache`, optional
            The layers for which sketches are made of the keys, because the file has none.
        **overrides
            `max_seq_len`, `max_sequences`, `capacity`, `max_bytes`, `block_size`, `num_threads` and `strategy`, which
            are as in `KVCache`; the file's replace those that are not given. Limits are checked as by `restore`. If
            `max_bytes` does not hold the file's blocks, and `block_size` is not given, blocks are smaller.

        Returns
        -------
        KVCache
            The cache.

        Raises
        ------
        StateFormatError
            If the file is no saved state, is truncated or altered, is of a newer format, or has another fingerprint or
            MAC. The message says which.
        CacheFullError
            If the rows pass `capacity` or `max_bytes`.
        OSError
            If the file cannot be read.
        TypeError, ValueError
            If an argument is wrong.
        MemoryError
            If memory is short.
        """
        from kvcache import state  # not loaded by `import kvcache`

        return state.load(cls, path, fingerprint, secret, rope, sketch, overrides)

    def restore(
        self, path: str | os.PathLike[str], seq_id: SupportsIndex | None = None, *,
        saved_id: SupportsIndex | None = None, fingerprint: str | None = None, secret: bytes | None = None,
    ) -> None:  # fmt: skip
        """Restore sequences from a saved state, in place of what this cache holds under their ids.

        The layers must equal the file's: shapes, types, transforms, policies and ropes. Limits, `block_size` and
        everything else may differ. Rows that two restored sequences share are shared again. Other threads may use the
        cache meanwhile; the sequences are there once all is read and checked. The restored sequences must fit within
        `capacity` and `max_bytes`. `max_seq_len` and `max_sequences` are checked when the next batch begins, as after
        `KVCache.fork`.

        Parameters
        ----------
        path : path
            The file.
        seq_id : int, optional
            The sequence that is to hold what the file has under `saved_id`; by default all sequences of the file are
            restored under their own ids.
        saved_id : int, optional
            The sequence in the file; by default `seq_id`, or the only one.
        fingerprint, secret : optional
            As in `load`.

        Raises
        ------
        StateFormatError
            As by `load`; also if the file's layers are others, and the message names the layer and what differs.
        CacheBusyError
            If a sequence is in an open batch.
        CacheFullError
            If the rows do not fit within `capacity` or `max_bytes`.
        OSError
            If the file cannot be read.
        TypeError, ValueError
            If an argument is wrong, or the file has not that sequence.
        MemoryError
            If memory is short.
        """
        from kvcache import state  # not loaded by `import kvcache`

        state.restore(self, path, seq_id, saved_id, fingerprint, secret)
        self._note_edits()

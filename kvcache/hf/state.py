"""Save an `HFCache` or an `HFEncoderDecoderCache` to a file, and load it.

The file is a saved state of the `KVCache` with one more sequence, which has no rows. Its tokens say which sequences are
the rows of the batch (docs/format.md). With an encoder's rows, it is two such states, one behind the other. The tokens
of the other sequences are the text that the cache knows, or of an encoder's rows, the digest of their source. The
states of recurrent layers follow in a second state as well. Their bytes are its rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import numpy as np
import torch
from transformers import PreTrainedConfig

from kvcache import KVCache, state
from kvcache.arguments import check_names
from kvcache.arrays import Precision
from kvcache.errors import NotSupportedError, StateFormatError, shown
from kvcache.hf.images import places_in
from kvcache.hf.passes import Passes
from kvcache.hf.policies import SHAPE, check_config
from kvcache.hf.told import NONE, UNKNOWN, widened
from kvcache.layer import Layer, count
from kvcache.models.states import read as read_sizes
from kvcache.policy import CrossAttention, Policy
from kvcache.prefix import PrefixCache
from kvcache.state.saved import BATCH_OF_IMAGES, BATCH_VERSION, batch_of

STATE = Layer(1, 1024, v_head_dim=0, dtype="f32")  # whose rows have the bytes of recurrent states
ROW_BYTES = 4 * STATE.head_dim
Source: TypeAlias = tuple[Any, list[int], dict[int, list[int]]]  # for `state.save`: a core, ids to save, their tokens


class SaveableBatch:
    """Saves a cache to a file; a base of `HFCache` and `HFEncoderDecoderCache`."""

    if TYPE_CHECKING:

        @property
        def _parts(self) -> list[Any]:
            """The `HFCache`s whose states are saved, one behind the other."""

        @classmethod
        def _behind_in(cls, config: PreTrainedConfig) -> str:
            """Return what the second state of a model's file is of; "": there is none."""

        @classmethod
        def _made_for(
            cls,
            config: PreTrainedConfig,
            policy: Any,
            prefix: PrefixCache | None,
            select: int | None,
            prompts: Precision | None,
            states: Sequence[state.SavedState],
        ) -> Self:
            """Make an empty cache for a model, which stores rows as those in the states of a file."""

    @check_names("save")
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
            All tokens of the batch, ``[batch, tokens]``, with padding, as `generate` returns them. Leave them out after
            `generate`, which tells the cache its tokens. The file then has these. A loaded cache compares its tokens
            with the next text, and keeps what both begin with.
        fingerprint, secret
            As in `kvcache.KVCache.save`.

        Raises
        ------
        NotSupportedError
            If it is the part of an `HFEncoderDecoderCache` that has an encoder's rows.
        OSError
            If the file cannot be written.
        ValueError, TypeError
            If an argument is wrong; or if `tokens` are others than `generate` fed; or if a forward pass failed within
            recurrent layers, and `crop` has not gone back to before it.
        """
        if self._parts == [self] and not _has_tokens(self):
            raise NotSupportedError(
                "the cache has an encoder's rows alone: save the HFEncoderDecoderCache that it is part of"
            )
        sources: list[Source] = []
        for part in self._parts:
            passes = part._passes
            passes.end()
            if part.texts.has_lost_state:
                part.texts.begin_anew()
            texts = _tokens_of(part, tokens)
            [marker] = passes.new_ids(1)
            texts[marker] = _batch_tokens(part)
            sources.append((part._cache._core, [*passes.seq_ids, marker], texts))
            tokens = None  # they are those of the first part, the decoder
            if part.recurrent.layers:
                sources.append(_states_to_save(part))
        state.save(path, sources, fingerprint, secret)

    @classmethod
    @check_names("load")
    def load(
        cls, config: PreTrainedConfig, path: str | os.PathLike[str], *,
        policy: Policy | Sequence[Policy] | None = None, prefix: PrefixCache | None = None,
        fingerprint: str | None = None, secret: bytes | None = None, select: int | None = None,
        prompts: Precision | None = None,
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
        prefix : PrefixCache, optional
            As in `HFCache`: the rows are restored in the memory of its cache, which has layers and types as the file,
            in sequences of their own. An `HFEncoderDecoderCache` takes none.
        fingerprint, secret : optional
            As in `kvcache.KVCache.load`.
        select : int, optional
            As in `HFCache`, whatever the saved cache was given. An `HFEncoderDecoderCache` takes none.
        prompts : {"stored", "int8"}, optional
            As in `HFCache`, for what is fed from now on, whatever the saved cache was given.

        Returns
        -------
        HFCache or HFEncoderDecoderCache
            The cache, with the same rows of the batch, and the text that the file has. Masks must hide the padding that
            they hid before.

        Raises
        ------
        StateFormatError
            As by `kvcache.KVCache.load`; or if the layers of `config` and `policy` are others, or the file was not
            written by a cache of this class.
        CacheFullError
            If the rows pass what the cache of `prefix` may hold.
        OSError
            If the file cannot be read.
        NotSupportedError, ValueError, TypeError
            As when a cache is made.
        """
        check_config(config)
        behind = cls._behind_in(config)
        states = state.read_states(path, behind)
        try:
            cache = cls._made_for(config, policy, prefix, select, prompts, states)
        except (TypeError, ValueError):
            state.inspect(path, verify=True)  # where the file is damaged, that is why
            raise
        for part, one in zip(cache._parts, states, strict=behind != state.RECURRENT):
            _check_shapes(part, path, one.layers)
        fillers = [Filler(part) for part in cache._parts]
        targets: list[tuple[KVCache, Any]] = [(filler.part._cache, filler.choose) for filler in fillers]
        recurrent = KVCache([STATE], max_sequences=None)
        if behind == state.RECURRENT:
            targets.append((recurrent, lambda saved: None))
        state.restore_chosen(path, targets, fingerprint, secret, behind)
        if len({len(filler.seq_ids) for filler in fillers} - {0}) > 1:
            raise StateFormatError(f"{os.fspath(path)}: altered: the rows of the encoder are not those of the batch")
        for filler in fillers:
            texts = filler.part.texts
            texts.tokens = filler.text
            filler.part.beginnings.go_on_from(filler.seq_ids, filler.seen, filler.offsets)
            texts.ahead = torch.tensor(filler.ahead) if filler.ahead else None
            texts.follows_from_others = filler.text is not None and bool(places_in(config, filler.text).any())
        if behind == state.RECURRENT:
            try:
                _restore_states(fillers[0], recurrent, states[1], config)
            except ValueError as error:
                raise StateFormatError(f"{os.fspath(path)}: altered, or of another model: it has {error}") from None
        return cache


def stored_in(saved: state.SavedState) -> dict[str, Any]:
    """Return the types and the transform of the rows of a file, as arguments of a cache; none if it has no layers."""
    layer = next(iter(saved.layers), None)
    return {} if layer is None else types_of(layer)


def types_of(layer: Layer) -> dict[str, Any]:
    """Return how a layer stores rows, as arguments of a cache."""
    return {"k_dtype": layer.k_dtype, "v_dtype": layer.v_dtype, "transform": layer.k_transform}


def _states_to_save(part: Any) -> Source:
    """Return the recurrent states of an `HFCache`, each as a sequence: its rows are the bytes of the state.

    Two numbers stand in the place of the sequence's tokens: the columns that the state follows from, and its bytes.
    """
    cache = KVCache([STATE], max_sequences=None)
    tokens: dict[int, list[int]] = {}
    for row in range(len(part._passes.seq_ids)):
        one = part.recurrent.state_of(row)
        padded = np.frombuffer(one + bytes(-len(one) % ROW_BYTES), np.float32).reshape(-1, 1, STATE.head_dim)
        with cache.batch(positions=range(len(padded)), seq_ids=[row] * len(padded)) as batch:
            batch.put(0, padded)
        tokens[row] = [part._passes.num_seen, len(one)]
    return cache._core, [*tokens], tokens


def _batch_tokens(part: Any) -> list[int]:
    """Return the tokens that say which sequences are the rows of a batch, and how far positions are ahead, if known."""
    passes = part._passes
    version, ahead = BATCH_VERSION, []
    if part.texts.ahead is not None and passes.num_seen:
        version, ahead = BATCH_OF_IMAGES, widened(part.texts.ahead, passes.num_seen).flatten().tolist()
    return [version, passes.num_seen, *passes.seq_ids, *ahead]


def _has_tokens(part: Any) -> bool:
    """Return whether a cache has rows of tokens, not of an encoder."""
    return not any(isinstance(policy, CrossAttention) for policy in part.policy)


def _tokens_of(part: Any, tokens: Any) -> dict[int, list[int]]:
    """Return what a cache, or its user, knows of the tokens of each sequence, without the padding before the first."""
    passes = part._passes
    text = None if part.texts.tokens is None or len(part.texts.tokens) != len(passes.seq_ids) else part.texts.tokens
    if not _has_tokens(part):  # a digest of each row's source
        return {} if text is None else dict(zip(passes.seq_ids, text.tolist(), strict=True))
    if tokens is not None:
        text = _add_tokens(text, _check_tokens(passes, tokens), part.texts.has_moved_rows)
    if text is None:
        return {}
    rows = zip(passes.seq_ids, text[:, : passes.num_seen], passes.offsets, strict=True)
    return {seq_id: row[offset:].tolist() for seq_id, row, offset in rows}


def _check_tokens(passes: Passes, tokens: Any) -> torch.Tensor:
    """Return the tokens that a cache holds, ``[batch, columns seen]``; raise if it is no tensor, or too short."""
    try:
        given = torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"tokens={shown(tokens)}: a tensor [batch, tokens] is needed ({error})") from None
    num_rows, seen = len(passes.seq_ids), passes.num_seen
    if given.ndim == 2 and 0 < len(given) < num_rows:
        _refuse_beams(f"tokens has {count(len(given), 'row')}, the cache {num_rows}")
    if given.ndim != 2 or given.is_floating_point() or len(given) != num_rows or given.shape[1] < seen:
        raise ValueError(
            f"tokens has the shape {[*given.shape]} and the type {given.dtype}: integers [{num_rows}, {seen}]"
            " are needed, or more columns, as generate returns them"
        )
    return given[:, :seen].long()


def _add_tokens(text: torch.Tensor | None, given: torch.Tensor, has_moved_rows: bool) -> torch.Tensor:
    """Return a text with the tokens that its user gives where the cache knows none; raise if it knows others."""
    if text is None:
        return given
    known = torch.nn.functional.pad(text, (0, max(0, given.shape[1] - text.shape[1])), value=UNKNOWN)
    known = known[:, : given.shape[1]]
    if has_moved_rows and (known == UNKNOWN).any():
        _refuse_beams(f"tokens has {count(len(given), 'row')}, whose order may be another than the cache's")
    differs = ((known != given) & (known >= 0)).nonzero().tolist()
    if differs:
        row, column = differs[0]
        raise ValueError(
            f"tokens[{row}, {column}] is {int(given[row, column])}, where generate fed {int(known[row, column])}: give"
            " the text that the cache holds, or leave tokens out, because the cache knows it"
        )
    return torch.where(known == UNKNOWN, given, known)


def _refuse_beams(what: str) -> NoReturn:
    """Raise for tokens that are not of the rows of a cache that holds beams."""
    raise ValueError(
        f"{what}, as after a beam search, when it holds every beam: give the returned tokens to generate once more,"
        " with max_new_tokens=1, or leave tokens out"
    )


class Filler:
    """Chooses what of a file becomes the rows of the batch, in an empty cache."""

    def __init__(self, part: Any) -> None:
        self.part = part  # an `HFCache`
        self.seen = 0  # columns that the file has
        self.seq_ids: list[int] = []  # by row of the batch
        self.offsets: list[int] = []  # by row, the column of position 0
        self.text: torch.Tensor | None = None  # the tokens of all rows
        self.ahead: list[list[int]] = []  # by row, how far positions are ahead of columns

    def choose(self, saved: state.SavedState) -> dict[int, int]:
        """Return which sequences of a file are restored, and under which ids."""
        self.seen, rows, lengths, self.ahead = _batch_of(saved)
        self.seq_ids = self.part._passes.new_ids(len(rows))
        self.part._passes.seq_ids = self.seq_ids  # which it clears in the end, also if an exception comes meanwhile
        has_tokens = _has_tokens(self.part)
        self.offsets = [self.seen - lengths[row] if has_tokens else 0 for row in rows]
        texts = {one.seq_id: one.tokens.tolist() for one in saved.sequences}
        self.text = _text_of([texts[row] for row in rows], self.offsets, self.seen if has_tokens else None)
        return dict(zip(rows, self.seq_ids, strict=True))


def _restore_states(filler: Filler, cache: KVCache, saved: state.SavedState, config: PreTrainedConfig) -> None:
    """Give recurrent layers the states of a file, whose sequences a cache has; raise ValueError for a wrong state."""
    seen, num_rows = filler.seen, len(filler.seq_ids)
    rows = []
    for one in saved.sequences:
        stored = cache.keys(0, seq_id=one.seq_id).tobytes()
        column, nbytes = one.tokens.tolist() if len(one.tokens) == 2 else (-1, -1)
        if column != seen or not 0 < nbytes <= len(stored):
            raise ValueError(f"a state of {nbytes} bytes behind column {column}, and a batch of {seen}")
        rows.append(stored[:nbytes])
    if len(rows) != num_rows:
        raise ValueError(f"{count(len(rows), 'state')} for {count(num_rows, 'row')}")
    if not rows:
        return
    recurrent = filler.part.recurrent
    recurrent.restore(rows)
    with suppress(NotSupportedError):  # of some models the sizes are not known
        wanted = sum(one.conv_in_transformers + one.recurrent for one in read_sizes(config))
        if recurrent.num_elements != wanted:
            raise ValueError(f"states of {recurrent.num_elements} elements, and config says {wanted}")


def _text_of(rows: list[list[int]], offsets: list[int], limit: int | None) -> torch.Tensor | None:
    """Return the text that the tokens of a file are, up to a column; None: it does not say all rows' tokens."""
    if not any(rows):
        return None
    padded = [[NONE] * offset + row for offset, row in zip(offsets, rows, strict=True)]
    width = min(len(row) for row in padded)
    return torch.tensor([row[: width if limit is None else min(width, limit)] for row in padded]) if width else None


def _check_shapes(cache: Any, path: state.StrPath, saved: Sequence[Layer]) -> None:
    """Raise StateFormatError if the layers of a file differ from a cache's."""
    ours, theirs = ([tuple(getattr(one, name) for name in SHAPE) for one in of] for of in (cache._cache.layers, saved))
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


def _batch_of(saved: state.SavedState) -> tuple[int, list[int], dict[int, int], list[list[int]]]:
    """Return the columns seen, the sequence of each row, each sequence's length, and how far positions are ahead."""
    batch = batch_of(saved)
    if batch is None:
        raise StateFormatError("no state of an HFCache: it does not say which sequence is which row of the batch")
    marker, seen, rows, ahead = batch
    return seen, rows, {one.seq_id: one.next_position for one in saved.sequences if one.seq_id != marker}, ahead

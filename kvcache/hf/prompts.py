"""The prompts of a batch whose beginnings come from a prefix cache.

A column is a place in the prompts, padding included; `leading` counts the columns of padding before a row's tokens.
`seen` is the column behind the tokens of earlier passes. A state is that of recurrent layers, and a prefix with
`state_bytes` keeps states. A row of the cache is exact, and may be kept, if it follows from known tokens alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedConfig

from kvcache.arguments import INT64_MAX
from kvcache.arrays import Precision, to_precision
from kvcache.errors import CacheFullError, NotSupportedError
from kvcache.hf.policies import BY_ONE_TOKEN, both_ways, rotation_by_length
from kvcache.hf.told import (
    FEATURES,
    UNKNOWN,
    Images,
    Tokens,
    count_leading,
    has_others,
    shown_columns,
    without_images,
)
from kvcache.layer import Layer
from kvcache.prefix import PrefixCache

PLACEHOLDER = re.compile(r".*(image|video|audio|vision|boi|eoi|boa|eoa).*_(token_id|token_index|index)")
StateOf: TypeAlias = Callable[[int], bytes]  # returns the state of a row of the batch


@dataclass(frozen=True)
class Prompt:
    """The known tokens of a row."""

    leading: int  # columns of padding before the first token
    tokens: list[int]  # of the prompt, up to the first one whose rows do not follow from tokens alone
    fed: list[int]  # the same as the model is fed them: an image's tokens have no names of their own

    def named(self, row: list[int]) -> list[int]:
        """Return a row's tokens, with the names of the prompt's images if it begins with the prompt."""
        num = min(len(row), len(self.fed))
        return self.tokens[:num] + row[num:] if row[:num] == self.fed[:num] else row


def placeholders_of(config: PreTrainedConfig) -> set[int]:
    """Return the tokens that stand for an image or sound: what they stand for is not in the token."""
    return {value for name, value in vars(config).items() if PLACEHOLDER.fullmatch(name) and isinstance(value, int)}


def check_tokens(tokens: object, name: str) -> None:
    """Raise TypeError for what is no tensor of integers."""
    if not isinstance(tokens, torch.Tensor):
        raise TypeError(
            f"{name} is a {type(tokens).__name__}: a tensor [batch, tokens] is needed, as tokenizers return with"
            ' return_tensors="pt"'
        )
    if tokens.is_floating_point() or tokens.is_complex():
        raise TypeError(f"{name} has the type {tokens.dtype}: integers are needed")


def prompts_of(
    input_ids: torch.Tensor, mask: torch.Tensor | None, placeholders: set[int], images: Images | None = None
) -> list[Prompt]:
    """Return the prompt of each row; raise ValueError for a mask of another shape, or a row that it hides whole.

    `input_ids` and `mask` are ``[batch, tokens]``, 0 for padding; a mask of None shows all. With `images`, all
    placeholders have names, or stand for nothing.
    """
    check_tokens(input_ids, "input_ids")
    if input_ids.ndim != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has the shape {[*input_ids.shape]}: [batch, tokens] is needed")
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}: a tensor [batch, tokens] is needed")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask has the shape {[*mask.shape]}, input_ids {[*input_ids.shape]}")
    shown = shown_columns(torch.ones_like(input_ids) if mask is None else mask, input_ids.shape[1])
    prompts = []
    for row, (leading, columns) in enumerate(zip(count_leading(shown), shown, strict=True)):
        if leading == len(columns):
            raise ValueError(f"attention_mask hides all tokens of row {row}: leave the row out")
        fed = input_ids[row, leading:].tolist()
        tokens = fed if images is None else images.tokens[row, leading:].tolist()
        ends = placeholders if images is None else ()
        unknown = (i for i, token in enumerate(tokens) if not columns[leading + i] or token in ends)
        end = next(unknown, None)
        prompts.append(Prompt(leading, tokens[:end], fed[:end]))
    return prompts


class Prompts:
    """The prompts of a batch whose beginnings come from a prefix cache, and the tokens that were fed.

    `mask` is the mask of the prompts; `most_leading` is the column at which the last row begins, and `end` the column
    behind the last token of a prompt. `placeholders` are tokens that stand for an image or sound, and do not say for
    which; `images` has names for those of the prompts.

    The tokens that calls of a model feed are noted for each column. UNKNOWN stands where no call told a token, and
    where the row does not follow from tokens alone. A row is kept under tokens that equal these, up to the first that
    differs. `_fed` has these tokens, and `_branches` the columns at which an earlier prompt diverged from them.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        rows: list[Prompt],
        placeholders: set[int],
        mask: torch.Tensor | None = None,
        images: Images | None = None,
    ) -> None:
        self._prefix = prefix
        self.has_images = images is not None
        # Where the model counts height and width of images: the prompts' positions, [axes, batch, columns].
        self._positions = None if images is None else images.positions
        self._take(rows)
        self._placeholders = placeholders
        self.mask = mask
        self._fed: Tokens = np.empty((len(rows), 0), np.int64)  # replaced, not changed: copies of a cache share it
        # The first column behind the prompts at which rows were selected, as by beam search; None: never.
        self._moved_at: int | None = None
        self.num_matched = 0  # columns that the sequences held when they were acquired
        # Columns at which an earlier prompt diverged from these, and no state was kept.
        self._branches: set[int] = set()
        self._has_store = prefix.stats.store is not None  # whether full blocks are also written to a store
        # By row: tokens up to the end of the last full block behind the prompt, and the state there, for `release`.
        self._ends_of_blocks: dict[int, tuple[int, bytes]] = {}

    def _take(self, rows: list[Prompt]) -> None:
        """Go on with these prompts, and note where they begin and end: each pass asks for it."""
        self._rows = rows  # one for each row of the batch
        self._begins = np.array([[prompt.leading] for prompt in rows])  # [batch, 1]
        self.most_leading = max(prompt.leading for prompt in rows)
        self.end = max(prompt.leading + len(prompt.tokens) for prompt in rows)

    def acquire(self, num_columns: int, take: Callable[[list[int], int, list[int]], None]) -> None:
        """Acquire a sequence for each prompt, all of which hold what is before one column.

        `take` is given them, the column, and the column of each sequence's position 0. If anything fails, they end.

        The column is before the last of `num_columns`.
        """
        rows: dict[int, tuple[int, int]] = {}  # by index: the sequence, and how many tokens it holds
        lowest = num_columns - 1
        try:
            column = num_columns
            while lowest < column:
                column = lowest
                for i, prompt in enumerate(self._rows):
                    length = max(0, column - prompt.leading)
                    if i in rows and rows[i][1] > length:
                        self._prefix.cache.clear(rows.pop(i)[0])
                    if i not in rows and prompt.tokens:
                        rows[i] = self._prefix.acquire(prompt.tokens, max_matched=length)
                    elif i not in rows:
                        rows[i] = self._prefix.new_sequence(), 0
                    if length:
                        lowest = min(lowest, prompt.leading + rows[i][1])
                    elif self._prefix.state_bytes:  # of padding alone there is no state
                        lowest = 0
            self._begin_at(column)
            offsets = [min(prompt.leading, column) for prompt in self._rows]
            take([rows[i][0] for i in range(len(self._rows))], column, offsets)
        except BaseException:
            for seq_id, _ in rows.values():
                self._prefix.cache.clear(seq_id)
            raise

    def _begin_at(self, column: int) -> None:
        """Note that the sequences hold what is before a column."""
        self.num_matched = column
        self._fed = np.full((len(self._rows), column), UNKNOWN, np.int64)
        for fed, prompt in zip(self._fed, self._rows, strict=True):
            fed[prompt.leading :] = prompt.tokens[: max(0, column - prompt.leading)]
        if self._prefix.state_bytes:
            self._branches = self._find_branches()

    def _find_branches(self) -> set[int]:
        """Return the columns up to which a row has known rows, by a block or more beyond what it begins with.

        With a store these are ends of full blocks, for other processes.
        """
        block_size, branches = self._prefix.cache.block_size, set()
        for prompt in self._rows:
            end = self._resumable(prompt.leading + self._prefix.lookup(prompt.tokens, rows=True))
            if end - max(self.num_matched, prompt.leading) >= block_size:
                branches.add(end)
        return branches

    def states(self, seq_ids: Sequence[int]) -> list[Any]:
        """Return the state that each of the sequences goes on from; call it before tokens are fed."""
        return [self._prefix.state(seq_id) for seq_id in seq_ids]

    def ends(self, seen: int, last: int, size: int) -> list[int]:
        """Return columns behind `seen`, up to `last`, behind which states help other prompts.

        They are multiples of `size`, columns where earlier prompts went on otherwise, and the last one to resume from.
        """
        ends = {*range(0, last, size), self._resumable(last), *self._branches}
        return sorted(end for end in ends if seen < end <= last)

    def _resumable(self, column: int) -> int:
        """Return the last column, up to this one, whose states another process can resume from.

        A store has no state of a block that is not full. All rows begin at one column: in a full block of each.
        """
        if not self._has_store:
            return column
        block_size = self._prefix.cache.block_size
        return min(column - (column - prompt.leading) % block_size for prompt in self._rows)

    def checkpoint(self, seq_ids: Sequence[int], seen: int, num_last: int, state_of: StateOf) -> None:
        """Keep the states behind a pass of `num_last` tokens, which ended at a column, `seen`.

        One token of a prompt is not worth a state. Behind the prompt, the state at the end of a row's last full block
        waits for `release`, where there is a store. `state_of` returns the state of a row of the batch.
        """
        for row, (seq_id, prompt) in enumerate(zip(seq_ids, self._rows, strict=True)):
            length = seen - prompt.leading
            if length > len(prompt.tokens):
                self._note_end_of_block(row, length, state_of)
            elif num_last > 1:
                self._checkpoint_one(seq_id, self._known(row, prompt.tokens), length, partial(state_of, row))

    def _note_end_of_block(self, row: int, length: int, state_of: StateOf) -> None:
        """Note a row's state behind so many tokens if a block is full there, in place of the one before."""
        if self._has_store and length % self._prefix.cache.block_size == 0 and self._moved_at is None:
            self._ends_of_blocks = {**self._ends_of_blocks, row: (length, state_of(row))}

    def _keep_end_of_block(self, row: int, seq_id: int, tokens: list[int]) -> None:
        """Keep the state that was noted of a row, if it is behind some of these tokens."""
        if row in self._ends_of_blocks:
            length, state = self._ends_of_blocks[row]
            self._checkpoint_one(seq_id, tokens, length, lambda: state)

    def _checkpoint_one(self, seq_id: int, tokens: list[int], length: int, make_state: Callable[[], bytes]) -> None:
        """Keep the recurrent state that a sequence has behind `length` of its `tokens`, if the prefix has room.

        `make_state` is not called where the prefix keeps no states, or there are fewer tokens.
        """
        if not self._prefix.state_bytes or not 0 < length <= len(tokens):
            return
        state = make_state()
        if len(state) > self._prefix.state_bytes:
            raise ValueError(
                f"state_bytes={self._prefix.state_bytes} of prefix: the state of a sequence has {len(state)} bytes:"
                f" give PrefixCache state_bytes={len(state)}"
            )
        with contextlib.suppress(CacheFullError):
            self._prefix.checkpoint(seq_id, tokens[:length], state)

    def begin(self, text: torch.Tensor, hidden: int) -> bool:
        """Whether each row of a text begins with its prompt, and before it with as much padding: `hidden`."""
        return all(
            row[: prompt.leading + len(prompt.tokens)] == [hidden] * prompt.leading + prompt.tokens
            for row, prompt in zip(text.tolist(), self._rows, strict=True)
        )

    def check_leading(self, offsets: Sequence[int], num_columns: int) -> None:
        """Raise if a row begins behind other padding than it should; before `num_columns`, it has a token."""
        for row, (prompt, offset) in enumerate(zip(self._rows, offsets, strict=True)):
            if offset > prompt.leading or offset < min(prompt.leading, num_columns):
                raise ValueError(
                    f"attention_mask hides the first {offset} tokens of row {row}, for acquire it hid"
                    f" {prompt.leading}: give both the same"
                )

    # ---- what was fed

    def tell(self, seen: int, inputs: Mapping[str, Any]) -> None:
        """Note the tokens that a call is about to feed behind a column, `seen`; `inputs` are the model's arguments."""
        if self.has_images and seen < self.end:
            tokens = self._find_fed(without_images(inputs), seen, ())
            tokens = None if tokens is None else self._named(tokens, seen, bool(inputs.get(FEATURES)))
        else:
            tokens = self._find_fed(inputs, seen, self._placeholders)
        self.tell_end(seen)
        if tokens is not None:
            self._fed = np.concatenate([self._fed, tokens], 1)

    def _find_fed(self, inputs: Mapping[str, Any], seen: int, placeholders: Collection[int]) -> Tokens | None:
        """Return the tokens of a call, UNKNOWN from where a row does not follow from its tokens alone; None: none does.

        `placeholders` are tokens that do not say what they stand for.
        """
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != len(self._rows) or has_others(inputs):
            return None
        if mask is not None and (type(mask) is not torch.Tensor or mask.ndim != 2 or len(mask) != len(ids)):
            return None
        tokens: Tokens = ids.numpy(force=True).astype(np.int64)
        columns = np.arange(seen, seen + tokens.shape[1])
        is_known = self._have_positions(inputs, columns) & ~np.isin(tokens, [*placeholders])
        if mask is not None:
            shown = shown_columns(mask, seen + tokens.shape[1])
            wrong = shown != (np.arange(shown.shape[1]) >= self._begins)
            if wrong.any():
                is_known &= ~np.logical_or.accumulate(wrong, 1)[:, seen:]
        elif self.most_leading:
            is_known &= self._begins == 0
        return np.where(is_known, tokens, UNKNOWN)

    def _have_positions(self, inputs: Mapping[str, Any], columns: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which columns stand at their usual positions, ``[batch, columns]``.

        A model that counts height and width of images (Qwen2-VL) is given positions for each axis. If no positions are
        given, models count all columns.
        """
        behind, usual = columns - self._begins, self._usual(columns)
        has = np.ones(behind.shape, np.bool_)
        given = inputs.get("position_ids"), inputs.get("cache_position")
        for positions, expected, is_padding in zip(
            given, (usual, columns[None, None]), (behind < 0, False), strict=True
        ):
            if positions is not None:
                found = np.array(positions.numpy(force=True), ndmin=3)
                fits = found.ndim == 3 and found.shape[1] in (1, len(behind)) and found.shape[2] == len(columns)
                fits = fits and (len(expected) == 1 or len(found) in (1, len(expected)))
                has &= (found == expected).all(0) | is_padding if fits else False
        return has if given[0] is not None else has & (self._begins == 0) & (usual == behind).all(0)

    def _named(self, tokens: Tokens, seen: int, has_features: bool) -> Tokens:
        """Return tokens that are fed behind a column, with the names of images where these have their features."""
        named = np.where(np.isin(tokens, [*self._placeholders]), UNKNOWN, tokens)
        for row, new, prompt in zip(named, tokens, self._rows, strict=True):
            begin = max(seen, prompt.leading)
            wanted = np.array(prompt.tokens[begin - prompt.leading :], np.int64)[: max(0, seen + len(new) - begin)]
            fed = np.array(prompt.fed[begin - prompt.leading :], np.int64)[: len(wanted)]
            at = slice(begin - seen, begin - seen + len(wanted))
            is_same = (new[at] == fed) & (has_features | (wanted == fed))
            row[at] = np.where(is_same, wanted, row[at])
        return named

    def _usual(self, columns: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the positions of columns, ``[axes, batch, columns]``: behind padding, or as images have them.

        Behind a prompt, a model that counts height and width goes on counting on each axis.
        """
        usual = (columns - self._begins)[None]
        if self._positions is None:
            return usual
        num_columns, last = self._positions.shape[2], self._positions[:, :, -1:]
        is_within = columns < num_columns
        within = self._positions[:, :, np.minimum(columns, num_columns - 1)]
        return np.where(is_within, within, last + columns + 1 - num_columns)

    def tell_part(self, seen: int, inputs: Mapping[str, Any]) -> None:
        """Note at which positions a part of the model is fed what a call was told to feed behind a column, `seen`.

        A model may count on from another text (Qwen2-VL, behind an image).
        """
        columns = np.arange(seen, self._fed.shape[1])
        if len(columns):
            is_known = self._have_positions(inputs, columns)
            self._fed = np.concatenate([self._fed[:, :seen], np.where(is_known, self._fed[:, seen:], UNKNOWN)], 1)

    def tell_end(self, seen: int) -> None:
        """Note that the tokens before a column were fed, and no others. Tokens that were not noted are UNKNOWN."""
        num_untold = seen - self._fed.shape[1]
        self._fed = np.pad(self._fed, ((0, 0), (0, max(0, num_untold))), constant_values=UNKNOWN)[:, :seen]

    def note_inexact(self, seq_ids: Sequence[int], seen: int, num_tokens: int) -> None:
        """Tell the prefix cache which rows not to keep: those that do not follow from the prompts' tokens.

        A pass, whose batch is open, feeds `num_tokens` tokens behind a column, `seen`; its end keeps full blocks.
        """
        if self._fed.shape[1] != seen + num_tokens:  # nobody told, or the model feeds other tokens
            self.tell_end(seen)
            self.tell_end(seen + num_tokens)
        for fed, seq_id, prompt in zip(self._fed, seq_ids, self._rows, strict=True):
            begin = max(seen, prompt.leading)
            if num_tokens == 1 and seen < begin and self._prefix.state_bytes:  # recurrent layers are given no mask
                self._prefix.note_inexact(seq_id, 0)
            new = fed[begin:]
            wanted = prompt.tokens[begin - prompt.leading :][: len(new)]
            differs = new == UNKNOWN
            differs[: len(wanted)] |= new[: len(wanted)] != wanted
            if differs.any():
                self._prefix.note_inexact(seq_id, begin - prompt.leading + int(differs.argmax()))

    def _known(self, row: int, tokens: list[int]) -> list[int]:
        """Return as many of these tokens as a row was fed, up to the first whose row does not follow from them."""
        fed = self._fed[row, self._rows[row].leading :]
        named = np.array(tokens[: len(fed)], np.int64)
        differs = (fed[: len(named)] != named) | (named == UNKNOWN)
        return tokens[: int(differs.argmax()) if differs.any() else len(named)]

    def select(self, indices: Sequence[int], seen: int) -> None:
        """Go on with the rows at these indices, when the cache holds `seen` columns.

        Behind the prompts, a row's tokens may then be tokens of another row, unlike what its user believes.
        """
        at = seen if self.end <= seen else INT64_MAX
        self._moved_at = at if self._moved_at is None else min(at, self._moved_at)
        self._take([self._rows[i] for i in indices])
        self._fed = self._fed[[*indices]]
        if self._positions is not None:
            self._positions = self._positions[:, [*indices]]
        self._ends_of_blocks = {}

    def crop(self, seen: int) -> None:
        """Forget the tokens from a column on."""
        ends = [max(0, seen - row.leading) for row in self._rows]
        rows = zip(self._rows, ends, strict=True)
        self._take([replace(row, tokens=row.tokens[:end], fed=row.fed[:end]) for row, end in rows])
        if self._positions is not None:
            self._positions = self._positions[:, :, :seen] if seen else None
        noted = self._ends_of_blocks.items()
        self._ends_of_blocks = {row: end for row, end in noted if end[0] <= ends[row]}
        self.tell_end(seen)

    def tokens_of(self, tokens: torch.Tensor | None) -> list[list[int]]:
        """Return the tokens of each row, or the prompts' tokens. Raise if the rows are of other prompts.

        Once rows were selected, their number may differ, because a beam search may return several for each prompt.
        """
        rows = [prompt.tokens for prompt in self._rows]
        if tokens is not None:
            check_tokens(tokens, "tokens")
            if tokens.ndim != 2:
                raise ValueError(f"tokens has the shape {[*tokens.shape]}: [{len(rows)}, tokens] is needed")
            if len(tokens) == len(rows):
                given = [row[prompt.leading :].tolist() for row, prompt in zip(tokens, self._rows, strict=True)]
                rows = [prompt.named(row) for row, prompt in zip(given, self._rows, strict=True)]
            elif self._moved_at is None:
                raise ValueError(f"tokens has {len(tokens)} rows, the cache {len(rows)}: give all, or leave it out")
        for i, (row, prompt) in enumerate(zip(rows, self._rows, strict=True)):
            num = min(len(row), len(prompt.tokens))
            if row[:num] != prompt.tokens[:num]:
                raise ValueError(f"row {i} of tokens does not begin with the prompt that was acquired for it")
        return rows

    def release(self, seq_ids: Sequence[int], seen: int, rows: list[list[int]], state_of: StateOf) -> None:
        """Release the sequences with the tokens that `tokens_of` returns.

        Each row is kept as far as it follows from these tokens, and not behind the column at which rows were selected.
        The sequences hold the columns before `seen`; `state_of` returns the state of a row there.
        """
        self.tell_end(seen)
        for i, (seq_id, row, prompt) in enumerate(zip(seq_ids, rows, self._rows, strict=True)):
            end = None if self._moved_at is None else max(0, self._moved_at - prompt.leading)
            known = self._known(i, row[:end])
            self._keep_end_of_block(i, seq_id, known)
            self._checkpoint_one(seq_id, known, seen - prompt.leading, partial(state_of, i))
            self._prefix.note_inexact(seq_id, len(known))  # the other tokens are not to be kept
            self._prefix.release(seq_id, known)


def check_prefix(
    prefix: Any, config: PreTrainedConfig, is_recurrent: bool, wanted: Sequence[Layer], fields: Mapping[str, str | None]
) -> None:
    """Raise if a prefix cache is not one for a model: name the first layer, and what differs of it.

    `fields` of layers must be alike. Each comes with the argument that says it; None: the model says it.
    """
    if not isinstance(prefix, PrefixCache):
        raise TypeError(f"prefix is a {type(prefix).__name__}: a kvcache.PrefixCache is needed")
    if is_recurrent and config.model_type in BY_ONE_TOKEN:
        raise NotSupportedError(
            f"a {type(config).__name__} goes on from the state of its recurrent layers by single tokens only: leave"
            " prefix out"
        )
    if is_recurrent != bool(prefix.state_bytes):
        what = "has recurrent layers: give PrefixCache state_bytes=HFCache.state_bytes(model)"
        if not is_recurrent:
            what = "has no recurrent layers: leave state_bytes out"
        raise ValueError(f"state_bytes={prefix.state_bytes} of prefix: a {type(config).__name__} {what}")
    if field := rotation_by_length(config):
        raise NotSupportedError(
            f"a {type(config).__name__} with {field} rotates keys by the length of the whole text, so that another text"
            " cannot use them: leave prefix out"
        )
    if field := both_ways(config):
        raise NotSupportedError(
            f"a {type(config).__name__} with {field} lets tokens see later ones, so that another text cannot use their"
            " rows: leave prefix out"
        )
    given = prefix.cache
    if given.num_layers != len(wanted):
        raise ValueError(
            f"prefix has a cache of {given.num_layers} layers, the model has {len(wanted)} with keys and values:"
            " make it by HFCache.make_kv_cache(config)"
        )
    for i, (one, other) in enumerate(zip(given.layers, wanted, strict=True)):
        for name, argument in fields.items():
            if getattr(one, name) != getattr(other, name):
                if argument is not None:
                    raise ValueError(
                        f"{argument}={getattr(other, name)!r}: layer {i} of the cache of prefix has"
                        f" {name}={getattr(one, name)!r}: leave {argument} out, or make that cache by"
                        " HFCache.make_kv_cache with the same arguments"
                    )
                raise ValueError(
                    f"prefix has a cache whose layer {i} has {name}={getattr(one, name)!r}, and not"
                    f" {getattr(other, name)!r}: give the arguments here that HFCache.make_kv_cache was given"
                )
        if one.share is not None:
            raise ValueError(f"prefix has a cache whose layer {i} shares another's rows: leave share out")


def to_prompts(value: Any) -> Precision:
    """Return how prompts are attended to, by default as rows are stored."""
    return "stored" if value is None else to_precision(value, "prompts")


def check_prompts(prefix: PrefixCache, prompts: Precision | None) -> None:
    """Raise if the rows of a prefix cache come from prompts that were attended to in another way than asked for."""
    made = prefix.cache._prompts
    if prompts not in (None, made):
        raise ValueError(
            f"prompts={prompts!r}: the cache of prefix was made with prompts={made!r}: leave prompts out, or make that"
            f" cache by HFCache.make_kv_cache(config, prompts={prompts!r})"
        )

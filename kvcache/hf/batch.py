"""The texts that an `HFCache` holds: `TextBatch`; and what it does with its prefix cache: `Beginnings`.

A pass is a forward pass of the model. A column is a place in the texts, padding included; an offset is the column of a
text's first token. `passes.num_seen` are the columns of ended passes, `length` also those of a last, complete pass.
`passes.prompts` are prompts whose beginnings were acquired from the prefix cache; None: there are none. States are
those of recurrent layers: they go back only to a column behind which they were kept.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from kvcache.arguments import INT64_MAX, integer
from kvcache.errors import KVCacheError, shown
from kvcache.hf.dense import Decoder
from kvcache.hf.passes import Passes
from kvcache.hf.prompts import Prompt, Prompts, prompts_of
from kvcache.hf.recurrent import Narrowed, Recurrent
from kvcache.hf.told import Images, check_rows, count_fed
from kvcache.policy import Policy
from kvcache.prefix import PrefixCache

TOLD = "tokens", "next_positions", "ahead", "has_moved_rows", "follows_from_others"  # by `generate`
INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}  # types of indices


class TextBatch:
    """The texts of a batch: their sequences in `passes`, their states in `recurrent`, and what `generate` told of them.

    Whatever changes all of these is done here: texts are cropped, moved, and forgotten. A pass that failed is ended
    here. It touches no layer of rows, except for the memory of the `decoder`, and no prefix cache.
    """

    tokens: torch.Tensor | None  # what `generate` told of each sequence: its tokens, or a digest of an encoder's rows
    has_moved_rows: bool  # since `generate` told them
    next_positions: torch.Tensor | None  # of what `generate` makes, [axes, batch, 1]; None: usual ones
    # How far the position behind a column is ahead of the column's own, behind images, [batch, columns]; later columns
    # are like the last. None: unknown, or the model counts once.
    ahead: torch.Tensor | None
    follows_from_others: bool  # whether rows follow from images or the like as well

    goes_on_by_one_token = False  # whether recurrent layers begin anew in a pass of several tokens
    follows_from_later = False  # whether a row follows from later tokens

    def __init__(self, passes: Passes, recurrent: Recurrent, decoder: Decoder) -> None:
        self.passes, self.recurrent, self.decoder = passes, recurrent, decoder
        self._forget_told()

    def copy_with(self, passes: Passes, recurrent: Recurrent, decoder: Decoder) -> Self:
        """Return the same texts, in sequences of other passes, and in copies of the states."""
        other = copy.copy(self)
        other.passes, other.recurrent, other.decoder = passes, recurrent, decoder
        recurrent.go_on_as(self.recurrent)
        return other

    def _forget_told(self) -> None:
        """Forget what `generate` told."""
        self.tokens = self.next_positions = self.ahead = None
        self.has_moved_rows = self.follows_from_others = False

    # ---- what they are

    @property
    def length(self) -> int:
        """The number of tokens seen, padding included, without tokens of a pass that still runs, or that failed."""
        is_among_rows = self.recurrent.layers and self.recurrent.has_come_to_rows
        return self.passes.num_seen if is_among_rows else self.passes.length

    @property
    def policy(self) -> tuple[Policy | None, ...]:
        """The policy of each layer of attention."""
        return tuple(layer.policy for layer in self.passes.layers[: self.passes.num_rows])

    @property
    def has_lost_state(self) -> bool:
        """Whether some recurrent layers have tokens of a pass that failed in them; ask when none runs."""
        return bool(self.recurrent.layers) and (self.passes.has_dropped or self.recurrent.is_within)

    @property
    def is_acquired(self) -> bool:
        """Whether they are what `acquire` took from the prefix cache, and no token was fed since."""
        passes = self.passes
        return passes.prompts is not None and passes.num_seen == passes.prompts.num_matched and passes.last is None

    @property
    def lacks_prompt(self) -> bool:
        """Whether prompts were acquired and not fed to their end."""
        prompts = self.passes.prompts
        return prompts is not None and self.length < prompts.end

    @property
    def knows_images(self) -> bool:
        """Whether prompts with images are fed: these may be cut at any column."""
        prompts = self.passes.prompts
        return prompts is not None and prompts.has_images and self.lacks_prompt

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix cache keeps the states of recurrent layers behind the passes that feed a prompt."""
        return bool(self.recurrent.layers) and self.passes.prompts is not None

    def is_begun_by(self, text: torch.Tensor, hidden: int) -> bool:
        """Whether a text begins with the prompts that were acquired, if any; `hidden` stands for padding."""
        prompts = self.passes.prompts
        return prompts is None or prompts.begin(text, hidden)

    def begins_behind(self, column: int) -> bool:
        """Whether a prompt that was acquired begins there or behind: another one cannot take its place."""
        prompts = self.passes.prompts
        return prompts is not None and prompts.most_leading >= column

    def ends_of_states(self, seen: int, last: int, size: int) -> list[int]:
        """Return what `Prompts.ends` does for the prompts that were acquired."""
        prompts = self.passes.prompts
        return [] if prompts is None else prompts.ends(seen, last, size)

    # ---- a pass

    def reach(self, layer_idx: int, part: int) -> None:
        """Note that a pass has come to a part of a layer of the model, if some layers are recurrent."""
        if self.recurrent.is_begun_by(layer_idx, part):
            self.passes.check_user()
            if self.has_lost_state:
                self.begin_anew()
            self.passes.finish()  # if this pass fails before any rows, the last one is not taken for it
            self._checkpoint()
        self.recurrent.reach(layer_idx, part)

    def begin_anew(self) -> None:
        """Forget the states that a pass which failed has left; raise if tokens before it are lost with them."""
        is_first = self.passes.last is not None and self.passes.last.brings_sequences
        self.passes.end()
        if self.passes.seq_ids and not is_first:
            seen = self.passes.num_seen
            raise ValueError(
                "a forward pass did not go through all layers, and recurrent layers cannot go back to before it:"
                f" {self.recurrent.ways_back(seen)}"
            )
        self.reset()

    def _checkpoint(self) -> None:
        """Let the prefix cache keep the states behind the last pass, where they help."""
        passes = self.passes
        if passes.prompts is not None:
            passes.prompts.checkpoint(passes.seq_ids, passes.num_seen, passes.num_last, self.recurrent.state_of)

    def keep_states(self) -> None:
        """Keep the states of recurrent layers behind the last token, if there is one, for `crop`."""
        if self.passes.num_seen:
            self.recurrent.keep(self.passes.num_seen, len(self.passes.seq_ids))

    def check_complete(self) -> None:
        """Raise ValueError if the model has returned from a pass that did not go through every layer."""
        last = self.passes.last
        if last is not None and not last.is_complete:
            raise ValueError(
                f"the model went through {len(last.done)} of {last.num_layers} layers of attention that the config has"
                " which this cache was made from: give HFCache model.config"
            )
        if self.recurrent.layers and self.recurrent.is_within:
            raise ValueError(
                "the model left out recurrent layers that the config has which this cache was made from: give HFCache"
                " model.config"
            )

    def drop_failed(self) -> None:
        """End a pass that failed."""
        last = self.passes.last
        if last is not None and not last.is_complete:
            self.passes.end()

    def check_batch_size(self, batch_size: int) -> None:
        """End a pass that failed; raise ValueError if there are more or fewer rows."""
        self.passes.end()
        self.passes.check_batch_size(batch_size)

    # ---- changes

    def feed_again(self) -> None:
        """Forget all rows, because the text is fed once more from its beginning; keep what `generate` told of it."""
        told = {name: getattr(self, name) for name in TOLD}
        self.reset()
        self.__dict__.update(told)

    def reset(self) -> None:
        """Forget all tokens."""
        passes = self.passes
        passes.check_user()
        passes.end()
        seq_ids = passes.seq_ids
        try:  # forget first: after an interrupt, no token may count as held whose row is gone
            passes.forget()
            passes.has_dropped = True  # until recurrent layers have forgotten as well
            self._forget_told()
            self.recurrent.reset()
            self.decoder.forget()
            passes.has_dropped = False
        finally:
            for seq_id in seq_ids:
                passes.cache.clear(seq_id)

    def crop(self, tokens_to_remove: int) -> None:
        """Do what `HFCache.crop` does."""
        tokens_to_remove = integer(tokens_to_remove, "tokens_to_remove", -INT64_MAX, INT64_MAX)
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove is {tokens_to_remove}: give minus the number of tokens to take back")
        passes = self.passes
        passes.check_user()
        with passes.turns.lock:  # until tokens of the last pass are taken back, no other cache may end it
            if not passes.num_open:
                passes.end()
            before = self.length  # without a pass that failed behind its last rows
            seen = max(0, before + tokens_to_remove)
            num_back = min(passes.length - seen, passes.num_open)
            stuck: list[int] = []  # sequences whose windows have moved on
            if seen < passes.num_seen:
                begins = zip(passes.seq_ids, passes.offsets, strict=True)
                stuck = [i for i, offset in begins if not passes.cache.can_resume(max(0, seen - offset), seq_id=i)]
            if stuck:
                num_back = 0
            else:
                self.recurrent.check_crop(before - seen, seen)
            narrowed = self.recurrent.narrowed(before - seen, seen)
            try:
                self._take_back(before, seen, num_back, stuck, narrowed)
            except (KVCacheError, ValueError):  # of rows, none of which has changed
                raise
            except BaseException:  # an interrupt came halfway: the same again completes it
                try:
                    self._take_back(before, seen, num_back, stuck, narrowed)
                except BaseException:
                    self.reset()
                    raise
                raise

    def _take_back(self, before: int, seen: int, num_back: int, stuck: list[int], narrowed: Sequence[Narrowed]) -> None:
        """Take back the columns from `seen` to `before`, of which the last pass has `num_back`.

        `stuck` are sequences whose windows have moved on, `narrowed` what states of convolutions become. Whatever was
        done before, it ends alike.
        """
        passes = self.passes
        passes.end(num_back)
        lengths = {i: max(0, seen - offset) for i, offset in zip(passes.seq_ids, passes.offsets, strict=True)}
        for seq_id in (*stuck, *lengths):  # first what raises: then none has changed
            passes.cache.truncate(lengths[seq_id], seq_id=seq_id)  # also tells a prefix cache what was taken back
        if self.recurrent.crop(seen, narrowed):
            passes.has_dropped = False
        self.tokens = None if self.tokens is None else self.tokens[:, :seen]
        self.ahead = None if self.ahead is None or not seen else self.ahead[:, :seen]
        if passes.prompts is not None and seen < before:
            if self.begins_behind(seen):
                passes.prompts = None  # what comes now may have other padding
            else:
                passes.prompts.crop(seen)
        passes.num_seen, passes.offsets = seen, [min(offset, seen) for offset in passes.offsets]

    def select(self, indices: torch.Tensor | Sequence[int], name: str) -> None:
        """Make a batch of the texts at these indices, an argument `name`; nothing has changed if one does not exist."""
        self.passes.check_user()
        self.passes.end()
        num_rows = len(self.passes.seq_ids)
        if not num_rows:  # transformers' own caches ignore this as well
            return
        batch_indices = indices_of(indices, name, num_rows)
        before = self.passes.seq_ids
        try:
            self.passes.select(batch_indices)
            self.tokens, self.has_moved_rows = None if self.tokens is None else self.tokens[batch_indices], True
            self.ahead = None if self.ahead is None else self.ahead[batch_indices]
            self.recurrent.select(batch_indices)
        except BaseException:
            if self.passes.seq_ids is not before:  # an interrupt came halfway
                self.reset()
            raise


def indices_of(given: Any, name: str, num_rows: int) -> list[int]:
    """Return batch indices, or the True places of a mask, as a list. Raise if there are none, or one is no row."""
    try:
        indices = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        indices = None
    if indices is not None and indices.dtype == torch.bool and indices.shape == (num_rows,):
        indices = indices.nonzero()[:, 0]
    if indices is None or indices.ndim != 1 or (len(indices) and indices.dtype not in INTEGERS):
        raise TypeError(f"{name}={shown(given)}: batch indices are needed, a tensor or a list of integers")
    batch_indices: list[int] = indices.tolist()
    if not batch_indices:
        raise ValueError(f"{name}: no row of the batch would be left: select one or more, or reset the cache")
    for i in batch_indices:
        if not 0 <= i < num_rows:
            raise IndexError(f"{name} has {i}: the rows of the batch are 0 to {num_rows - 1}")
    return batch_indices


class Beginnings:
    """Takes the beginnings of prompts from a prefix cache, if `prefix` is one, and gives it the rows of `texts`.

    It gives the passes of the texts their sequences and `Prompts`, and recurrent layers their states. All else of the
    texts is changed by `TextBatch.reset` alone. `placeholders` are tokens that stand for an image or sound.
    """

    def __init__(self, texts: TextBatch, prefix: PrefixCache | None, placeholders: set[int]) -> None:
        self._texts, self._prefix, self._placeholders = texts, prefix, placeholders

    def copy_with(self, texts: TextBatch) -> Beginnings:
        """Return what does the same for other texts."""
        return Beginnings(texts, self._prefix, self._placeholders)

    @property
    def is_open(self) -> bool:
        """Whether the next prompt may begin with tokens of the prefix cache: there is one, and no token was fed."""
        passes = self._texts.passes
        return self._prefix is not None and passes.last is None and not passes.seq_ids

    @property
    def are_known(self) -> bool:
        """Whether there is a prefix cache."""
        return self._prefix is not None

    def tell(self, inputs: Mapping[str, Any]) -> None:
        """Note what a call of the model is about to feed; `inputs` are its arguments."""
        texts, passes = self._texts, self._texts.passes
        passes.check_user()
        if texts.recurrent.layers and not texts.has_lost_state:  # what is lost ends with its rows
            check_rows(inputs, passes.batch_size)
            if self._prefix is None and count_fed(inputs) > 1:
                texts.keep_states()
        if passes.prompts is not None:
            passes.prompts.tell(texts.length, inputs)
        passes.note_call(True)

    def tell_part(self, inputs: Mapping[str, Any]) -> None:
        """Note at which positions a part of the model is about to be fed what its call was told."""
        passes = self._texts.passes
        if passes.prompts is not None:
            passes.prompts.tell_part(self._texts.length, inputs)

    def tell_end(self, has_failed: bool) -> None:
        """Note that a call has ended; if it has failed, only the tokens that the cache holds were fed."""
        passes = self._texts.passes
        passes.note_call(False)
        if has_failed and passes.prompts is not None:
            passes.prompts.tell_end(self._texts.length)

    def acquire(self, images: Images | None, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        """Do what `HFCache.acquire` does, with names for the tokens of images, which all calls that feed these show."""
        passes = self._texts.passes
        if self._prefix is None:
            raise ValueError("the cache has no prefix cache: make it by HFCache(config, prefix=prefix)")
        passes.check_user()
        passes.end()
        if not self.is_open:
            raise ValueError("the cache holds tokens: release or reset it first")
        rows, num_columns = prompts_of(input_ids, attention_mask, self._placeholders, images), input_ids.shape[1]
        self._begin_with(Prompts(self._prefix, rows, self._placeholders, attention_mask, images), num_columns)
        return passes.num_seen

    def _begin_with(self, prompts: Prompts, num_columns: int) -> None:
        """Begin with the beginnings of prompts, as far as `Prompts.acquire` has them before the last column."""
        passes, recurrent = self._texts.passes, self._texts.recurrent
        try:
            prompts.acquire(num_columns, passes.take)
            passes.prompts = prompts
            recurrent.reset()
            if recurrent.layers and passes.num_seen:
                self._restore(prompts)
        except BaseException:
            self._texts.reset()
            raise

    def _restore(self, prompts: Prompts) -> None:
        """Go on from the states that the prefix cache has kept for prompts."""
        try:
            self._texts.recurrent.restore(prompts.states(self._texts.passes.seq_ids))
        except ValueError as error:
            raise ValueError(f"prefix has the states of another model: give it another fingerprint ({error})") from None

    def go_on_from(self, seq_ids: list[int], seen: int, offsets: list[int]) -> None:
        """Take sequences that were restored as the rows of the batch, in which so many columns were seen."""
        passes = self._texts.passes
        passes.take(seq_ids, seen, offsets)
        if self._prefix is None or not seq_ids or seen in offsets:  # of a row without a token nothing can be kept
            return
        for seq_id in seq_ids:
            self._prefix.note_inexact(seq_id, 0)  # without a prefix cache, the one that was saved noted no masks
        passes.prompts = Prompts(self._prefix, [Prompt(offset, [], []) for offset in offsets], self._placeholders)
        passes.prompts.select(range(len(offsets)), 0)  # as the saved cache may have done, which kept nothing behind it

    def feed_all(self) -> None:
        """Give back what was acquired, because the whole prompt is fed, if no token was fed yet."""
        passes = self._texts.passes
        if passes.prompts is not None and self._texts.is_acquired:
            for seq_id in passes.seq_ids:
                passes.cache.clear(seq_id)
            self._begin_with(passes.prompts, 1)

    def release(self, tokens: torch.Tensor | None) -> None:
        """Do what `HFCache.release` does."""
        texts, passes = self._texts, self._texts.passes
        passes.check_user()
        passes.end()
        prompts = None if texts.has_lost_state else passes.prompts
        rows = [] if prompts is None else prompts.tokens_of(tokens)
        try:
            if prompts is not None:
                prompts.release(passes.seq_ids, passes.num_seen, rows, texts.recurrent.state_of)
        finally:  # sequences that were released hold nothing more
            texts.reset()

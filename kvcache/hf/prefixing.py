"""What an `HFCache` does with its prefix cache: prompts that begin as earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcache.hf.feeding import FedBatch
from kvcache.hf.images import Images
from kvcache.hf.prompts import Prompt, Prompts, prompts_of
from kvcache.hf.told import check_rows, count_fed


class PrefixedBatch(FedBatch):
    """Takes the beginnings of prompts from a prefix cache, and gives it their rows; a base of `HFCache`."""

    @property
    def keeps_states(self) -> bool:
        """Whether a prefix cache keeps the states of recurrent layers behind the passes that feed a prompt."""
        return bool(self._recurrent) and self._passes.prompts is not None

    def ends_of_states(self, seen: int, last: int, size: int) -> list[int]:
        """Return what `Prompts.ends` does for the prompts that were acquired."""
        prompts = self._passes.prompts
        return [] if prompts is None else prompts.ends(seen, last, size)

    @property
    def has_prefix(self) -> bool:
        """Whether there is a prefix cache."""
        return self._prefix is not None

    @property
    def takes_prompt(self) -> bool:
        """Whether the next prompt may begin with tokens of the prefix cache: there is one, and no token was fed."""
        return self._prefix is not None and self._passes.last is None and not self._passes.seq_ids

    def tell(self, inputs: Mapping[str, Any], is_part: bool) -> None:
        """Note what a call of the model, or in it a call of its part, is about to feed; `inputs` are its arguments."""
        self._passes.check_user()
        prompts = self._passes.prompts
        if self._recurrent and not is_part and not self.has_lost_state:  # what is lost ends with its rows
            check_rows(inputs, self._passes.batch_size)
            if self._prefix is None and count_fed(inputs) > 1:
                self._keep_states()
        if prompts is not None:
            tell = prompts.tell_part if is_part else prompts.tell
            tell(self.get_seq_length(), inputs)
        if not is_part:
            self._passes.note_call(True)

    def _keep_states(self) -> None:
        """Keep the states of recurrent layers behind the last token, if there is one, for `crop`."""
        passes = self._passes
        if passes.num_seen:
            self._recurrent.keep(passes.num_seen, len(passes.seq_ids))

    def tell_end(self, has_failed: bool) -> None:
        """Note that a call has ended; if it has failed, only the tokens that the cache holds were fed."""
        self._passes.note_call(False)
        prompts = self._passes.prompts
        if has_failed and prompts is not None:
            prompts.tell_end(self.get_seq_length())

    @property
    def is_acquired(self) -> bool:
        """Whether the cache holds what `acquire` took from the prefix cache, and no token was fed since."""
        passes = self._passes
        return passes.prompts is not None and passes.num_seen == passes.prompts.num_matched and passes.last is None

    def acquire(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Take the beginning of prompts from the prefix cache. `generate` calls this by itself, with its own prompt.

        If you call the model yourself, call this first. Then feed ``input_ids[:, matched:]`` with the whole mask. If
        there is padding, or the model counts height and width of images (Qwen2-VL), give positions that count from the
        first real token, as `generate` does.

        Parameters
        ----------
        input_ids : torch.Tensor
            The prompts, ``[batch, tokens]``. What follows a token that stands for an image or sound is not matched.
        attention_mask : torch.Tensor, optional
            0 for padding, ``[batch, tokens]``. What follows a hidden token in the middle is not matched.

        Returns
        -------
        int
            The number of columns that need not be fed, the same for all rows: as far as the rows' matches all reach.

        Raises
        ------
        ValueError
            If there is no prefix cache, the cache holds tokens, or a shape is wrong.
        """
        return self.acquire_with(None, input_ids, attention_mask)

    def acquire_with(self, images: Images | None, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> int:
        """Do what `acquire` does, with names for the tokens of images. All calls that feed the prompts show these."""
        if self._prefix is None:
            raise ValueError("the cache has no prefix cache: make it by HFCache(config, prefix=prefix)")
        self._passes.check_user()
        self._passes.end()
        if not self.takes_prompt:
            raise ValueError("the cache holds tokens: release or reset it first")
        rows, num_columns = prompts_of(input_ids, attention_mask, self._placeholders, images), input_ids.shape[1]
        prompts = Prompts(self._prefix, rows, self._placeholders, attention_mask, images)
        self._begin_with(prompts, num_columns)
        return self._passes.num_seen

    @property
    def knows_images(self) -> bool:
        """Whether prompts with images are fed: these may be cut at any column."""
        prompts = self._passes.prompts
        return prompts is not None and prompts.has_images and self.lacks_prompt

    def _begin_with(self, prompts: Prompts, num_columns: int) -> None:
        """Begin with the beginnings of prompts, as far as `Prompts.acquire` has them before the last column."""
        passes = self._passes
        try:
            prompts.acquire(num_columns, passes.take)
            passes.prompts = prompts
            self._recurrent.reset()
            if self._recurrent and passes.num_seen:
                self._restore(prompts)
        except BaseException:
            self.reset()
            raise

    def _restore(self, prompts: Prompts) -> None:
        """Go on from the states that the prefix cache has kept for prompts."""
        try:
            self._recurrent.restore(prompts.states(self._passes.seq_ids))
        except ValueError as error:
            raise ValueError(f"prefix has the states of another model: give it another fingerprint ({error})") from None

    def _go_on_from(self, seq_ids: list[int], seen: int, offsets: list[int], text: torch.Tensor | None) -> None:
        """Take sequences that were restored as the rows of the batch, in which so many columns were seen."""
        passes, self.text = self._passes, text
        passes.take(seq_ids, seen, offsets)
        if self._prefix is None or not seq_ids or seen in offsets:  # of a row without a token nothing can be kept
            return
        for seq_id in seq_ids:
            self._prefix.note_inexact(seq_id, 0)  # without a prefix cache, the one that was saved noted no masks
        passes.prompts = Prompts(self._prefix, [Prompt(offset, [], []) for offset in offsets], self._placeholders)
        passes.prompts.select(range(len(offsets)), 0)  # as the saved cache may have done, which kept nothing behind it

    def is_begun_by(self, text: torch.Tensor, hidden: int) -> bool:
        """Whether a text begins with the prompts that were acquired, if any; `hidden` stands for padding."""
        prompts = self._passes.prompts
        return prompts is None or prompts.begin(text, hidden)

    @property
    def lacks_prompt(self) -> bool:
        """Whether prompts were acquired and not fed to their end."""
        prompts = self._passes.prompts
        return prompts is not None and not prompts.are_fed(self.get_seq_length())

    def begins_behind(self, column: int) -> bool:
        """Whether a prompt that was acquired begins there or behind: another one cannot take its place."""
        prompts = self._passes.prompts
        return prompts is not None and prompts.begins_behind(column)

    def release(self, tokens: torch.Tensor | None = None) -> None:
        """Give the rows back to the prefix cache, for prompts to come, and forget all tokens.

        Parameters
        ----------
        tokens : torch.Tensor, optional
            All tokens of the batch, ``[batch, tokens]``, with the prompts and their padding, as `generate` returns
            them; those that were not fed are ignored. By default, and of a batch whose rows were reordered (beam
            search), the prompts alone are kept; nothing, if they were not named to `acquire`. Without a prefix cache,
            this is `reset`.

        Raises
        ------
        ValueError
            If there are more or fewer rows, and none were reordered, or a row does not begin with its prompt; nothing
            has changed then.
        """
        passes = self._passes
        passes.check_user()
        passes.end()
        prompts = None if self.has_lost_state else passes.prompts
        rows = [] if prompts is None else prompts.tokens_of(tokens)
        try:
            if prompts is not None:
                prompts.release(passes.seq_ids, passes.num_seen, rows, self._recurrent.state_of)
        finally:  # sequences that were released hold nothing more
            self.reset()

    def activate_past_recording(self) -> None:
        """Prepare for assisted decoding, which feeds the whole prompt even if the cache holds its beginning."""
        prompts = self._passes.prompts
        if prompts is not None and self.is_acquired:
            for seq_id in self._passes.seq_ids:
                self._cache.clear(seq_id)
            self._begin_with(prompts, 1)
        super().activate_past_recording()

"""`Running`: a request in an `Engine`, the text that is fed for it, and what its prefix cache is told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from kvcache.hf.packed import Packed, Text
from kvcache.hf.pieces import CHECKPOINT_TOKENS
from kvcache.hf.prompts import Prompt, Prompts
from kvcache.hf.requests import Request
from kvcache.prefix import PrefixCache


class Running(Text):
    """A request whose tokens are fed, or that waits for it."""

    def __init__(self, request: Request, prefix: PrefixCache) -> None:
        super().__init__()
        self.request, self._prefix = request, prefix
        self.number = 0  # in the order of arrival
        self.tokens = [*request.prompt]  # the prompt, and what was generated
        self._names = prefix.names(request.prompt)  # of its full blocks: of equal names, rows are equal
        self._prompts: Prompts | None = None  # what the prefix cache is told; None: it waits
        self._num_told = 0  # tokens of which it was told
        self._num_prompt = 0  # tokens that were there when it began
        self._was_fed = False
        self.wants = 0  # while it waits: the free rows with which it may begin
        self.is_barred = False  # whether it has to wait, because there was no memory for it
        self._ends: set[int] = set()  # tokens behind which a piece ends, because other texts go on from there

    @property
    def num_left(self) -> int:
        """The tokens that are to be fed."""
        return len(self.tokens) - self.num_fed

    @property
    def is_answering(self) -> bool:
        """Whether only its last token is to be fed, which was generated."""
        return self.num_left == 1 and bool(self.request.tokens)

    @property
    def has_begun(self) -> bool:
        """Whether it has a sequence."""
        return self._prompts is not None

    @property
    def num_wanted(self) -> int:
        """The rows that it needs for the tokens that are to be fed, and for a block of the next ones."""
        return self.num_left + max(0, min(self._prefix.cache.block_size, self.request.num_more - 1))

    @property
    def next_end(self) -> int:
        """The token up to which the next piece may go."""
        return min((end for end in self._ends if end > self.num_fed), default=len(self.tokens))

    def rows_only_of(self, others: Sequence[Running], beside: Sequence[Running]) -> int:
        """Return how many rows others have that neither this one begins with nor those beside have."""
        size = self._prefix.cache.block_size
        blocks = [one._names[: one.num_fed // size] for one in others]
        names = {name for some in blocks for name in some}
        names -= {name for one in [*beside, self] for name in one._names} if names else set()
        num_behind = sum(one.num_fed - len(some) * size for one, some in zip(others, blocks, strict=True))
        return len(names) * size + num_behind

    def awaits(self, other: Running) -> bool:
        """Whether another request is just feeding what this prompt begins with: a new block or more."""
        if other._prefix is not self._prefix or other.is_answering:
            return False
        both = zip(self._names, other._names, strict=False)
        num_blocks = sum(1 for _ in itertools.takewhile(lambda names: names[0] == names[1], both))
        common = min(num_blocks * self._prefix.cache.block_size, len(self.request.prompt) - 1)
        if common <= other.num_fed:
            return False
        other._ends.add(common)
        return True

    def begin(self, packed: Packed) -> None:
        """Take a sequence that holds as many of the first tokens as are known."""
        tokens = [*self.tokens]
        prompts = Prompts(self._prefix, [Prompt(0, tokens, tokens)], set())
        prompts.acquire(len(tokens), self._take)
        self._prompts, self._num_told, self._num_prompt = prompts, self.num_fed, len(tokens)
        if not self._was_fed:
            self.request.num_matched = self.num_fed
        if not packed.recurrent:
            return
        if self.num_fed:
            packed.restore(self, prompts.states([self.seq_id])[0])
        self._ends = {*prompts.ends(self.num_fed, len(tokens) - 1, CHECKPOINT_TOKENS)}

    def _take(self, seq_ids: list[int], num_fed: int, offsets: list[int]) -> None:
        """Go on from a sequence that holds so many tokens."""
        [self.seq_id], self.num_fed = seq_ids, num_fed

    def draw(self, logits: torch.Tensor) -> str | None:
        """Draw the next token, and return why it is the last one, if it is."""
        reason = self.request.draw(logits)
        self.tokens.append(self.request.tokens[-1])
        return reason

    def checkpoint(self, packed: Packed) -> None:
        """Keep what other texts may go on from, behind the last pass."""
        assert self._prompts is not None
        self._was_fed = True
        is_prompt = self.num_fed <= self._num_prompt
        if not packed.recurrent:
            if is_prompt:
                self._prefix.checkpoint(self.seq_id, self.tokens[: self.num_fed])
        elif not is_prompt or self.num_fed in self._ends:
            if is_prompt:  # behind a prompt, a state only waits for `release`
                self._tell(self._prompts)
            self._prompts.checkpoint([self.seq_id], self.num_fed, 2, lambda row: packed.state_of(self))

    def release(self, packed: Packed) -> None:
        """Give the sequence back, if it has one, and have its rows kept."""
        if self._prompts is None:
            return
        try:
            if packed.has_state(self):
                self._tell(self._prompts)
                self._prompts.release([self.seq_id], self.num_fed, [self.tokens], lambda row: packed.state_of(self))
        finally:
            self.withdraw(packed)

    def withdraw(self, packed: Packed) -> None:
        """Give the sequence back."""
        self._prefix.cache.clear(self.seq_id)
        packed.forget(self)
        self._prompts, self.num_fed, self._ends = None, 0, set()

    def _tell(self, prompts: Prompts) -> None:
        """Note which tokens were fed since it was told last."""
        prompts.tell(self._num_told, {"input_ids": torch.tensor([self.tokens[self._num_told : self.num_fed]])})
        self._num_told = self.num_fed

"""Feed tokens of many texts to a model together, in one pass without padding: also the requests of an `Engine`.

A part is a text with its next tokens. Recurrent layers hold the states of the texts of one pass; other texts have their
states with them (`Text.state`). To tell a prefix cache is to name the tokens that were fed.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn, Self, TypeAlias

import torch
from safetensors.torch import load, save

from kvcache.arguments import INT32_MAX
from kvcache.batch import Batch
from kvcache.errors import NotSupportedError
from kvcache.hf.adapters import Adapters
from kvcache.hf.cache import HFCache
from kvcache.hf.dense import why_decoded
from kvcache.hf.passes import STALLED, ForwardPass, Passes
from kvcache.hf.prompts import Prompt, Prompts
from kvcache.hf.recurrent import Recurrent
from kvcache.hf.requests import Request
from kvcache.hf.state import types_of
from kvcache.hf.told import CACHE
from kvcache.models.states import CHECKPOINT_TOKENS
from kvcache.prefix import PrefixCache
from kvcache.selecting import least_tokens


class Text:
    """A text that is fed piece by piece."""

    def __init__(self) -> None:
        self.seq_id = -1  # the sequence that holds its rows
        self.num_fed = 0
        # The states of recurrent layers behind these tokens. None: the layers hold them, or have none.
        self.state: dict[str, torch.Tensor] | None = None
        self.is_alone = False  # whether it shares no pass with others
        self.adapter: str | None = None  # of the model, which its tokens are computed with

    @property
    def is_answering(self) -> bool:
        """Whether only its last token is to be fed, which was generated."""
        return False


TOLERANCE = 0.1  # of the spread of logits: passes of more tokens round them otherwise, and may choose other experts
Part: TypeAlias = tuple[Text, list[int]]  # a text, and its next tokens


class PackedPasses(Passes):
    """Passes whose tokens belong to any sequences; the next pass goes on from no text of the last one.

    `begin` opens a batch, `opened`, before the model runs. The pass, `last`, takes it over once a layer needs it
    (`open`). Passes of other threads wait for `turns.changed` until both have ended.
    """

    opened: Batch | None = None  # a batch that is begun, which no pass has taken over; None: there is none
    thread = 0  # which opened it
    selects = False  # whether its tokens select rows

    @classmethod
    def like(cls, other: Passes) -> Self:
        """Return passes through the same layers."""
        return cls(other.cache, other.turns, other.has_readers, other.num_selected, other.num_rows, other.config)

    def begin(self, seq_ids: list[int], positions: list[int], selects: bool) -> None:
        """Open the batch of a pass that comes: where there is no room for it, no layer has changed."""
        with self.turns.lock:
            self.turns.take_turn(self)
            self.thread = threading.get_ident()
            self.opened = self.cache.batch(positions=positions, seq_ids=seq_ids, timeout=STALLED)
            self.selects = selects

    def open(self, this_pass: ForwardPass, batch_size: int, num_tokens: int, padding: torch.Tensor | None) -> None:
        """Give a pass the batch that was opened for it."""
        this_pass.not_padding, this_pass.offsets, this_pass.num_seen = None, [0] * batch_size, 0
        this_pass.num_tokens, this_pass.selects = num_tokens, self.selects
        this_pass.batch, self.opened = self.opened, None
        this_pass.is_open = True

    def runs_elsewhere(self) -> bool:
        """Whether a pass runs in another thread, or is about to."""
        return super().runs_elsewhere() or (self.opened is not None and self.thread != threading.get_ident())

    def end(self, num_back: int = 0) -> None:
        """End the last pass."""
        with self.turns.lock:
            super().end(num_back)
            self.num_seen = 0

    def room(self, seq_id: int) -> int:
        """Return how many more tokens of a sequence fit."""
        with self.turns.lock:
            self.turns.take_turn(self)
            return self.turns.patiently(partial(self.cache.room, seq_id))

    def drop(self) -> None:
        """Drop the tokens of a pass that failed, before or after it took its batch over."""
        with self.turns.lock:
            failed, self.last = self.last, None
            for batch in (self.opened, None if failed is None else failed.batch):
                if batch is not None:
                    batch.abort()
            self.opened = None
            self.turns.changed.notify_all()  # other threads' passes, which wait for their turn

    def put(self, this_pass: ForwardPass, index: int) -> NoReturn:
        """Raise, because rows of many texts make no tensor that a model could compute with."""
        why, remedy = why_decoded(self.config)
        how = ": call model.set_attn_implementation('kvcache') again" if remedy else ""
        raise NotSupportedError(f"rows of many texts make no tensors, and layer {index} needs them, because {why}{how}")

    def warn(self, what: str) -> NoReturn:
        """Raise, as `put` does, with the reason why the kernels cannot attend."""
        raise NotSupportedError(what)


class Packed:
    """A model that is fed tokens of many texts at once. It takes the arguments of `HFCache`.

    Tokens of all texts stand in one row, ``[1, tokens]``, and meet in the attention alone. Recurrent layers need a row
    for each text. So texts that are fed one token share a pass, ``[texts, 1]``. Each piece of a prompt then has a pass
    of its own.
    """

    def __init__(self, model: Any, select: int | None = None, **arguments: Any) -> None:
        made = HFCache(model.config, select=select, **arguments)
        self._passes = PackedPasses.like(made._passes)
        self._cache = made._copy_with(self._passes, {})
        self._model, self._select = model, select
        self.adapters = Adapters(model)
        known = inspect.signature(model.forward).parameters
        if "position_ids" not in known:
            raise NotSupportedError(f"a {type(model).__name__} takes no position_ids: its texts cannot share a pass")
        self._has_last = "logits_to_keep" in known  # whether it computes the logits of some tokens alone
        self.nobody = Text()  # which never has rows
        [self.nobody.seq_id] = self._passes.new_ids(1)
        self._held: list[Text] = []  # the texts whose states the recurrent layers hold, in the order of the batch
        apart = {name: value for name, value in arguments.items() if name in ("policy", "prompts")}
        self._check(HFCache(model.config, **apart, **types_of(self._passes.layers[0])))

    @property
    def recurrent(self) -> Recurrent:
        """The recurrent layers of the model."""
        return self._cache.recurrent

    def passes(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Return which parts share a pass."""
        shared: dict[Any, list[Part]] = {}
        for text, tokens in parts:
            is_one = len(tokens) == 1 and text.num_fed > 0
            alone = text if text.is_alone or (self.recurrent.layers and not is_one) else None
            shared.setdefault((text.adapter, alone, self._selects(text, tokens)), []).append((text, tokens))
        return [*shared.values()]

    def feed(self, parts: Sequence[Part]) -> torch.Tensor:
        """Feed the next tokens of texts in one pass, and return the logits behind each, ``[texts, vocabulary]``.

        All texts have the same adapter.
        If it raises, no text has changed, unless the model has recurrent layers: then these texts have lost their
        states, and have to begin anew. A `CacheFullError` always comes before anything changes.
        """
        texts = [text for text, _ in parts]
        positions = [text.num_fed + i for text, tokens in parts for i in range(len(tokens))]
        seq_ids = [text.seq_id for text, tokens in parts for _ in tokens]
        shape = (len(parts), -1) if self.recurrent.layers else (1, -1)  # a row for each text, or one for all
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([token for _, tokens in parts for token in tokens]).view(shape),
            "position_ids": torch.tensor(positions).view(shape),
        }
        last = torch.tensor([len(tokens) for _, tokens in parts]).cumsum(0) - 1
        if self._has_last:
            inputs["logits_to_keep"] = 1 if self.recurrent.layers else last
        self._passes.begin(seq_ids, positions, self._selects(*parts[0]))
        try:
            self.adapters.activate(texts[0].adapter)
            self._hold(texts)
            result = self._model(**inputs, **{CACHE: self._cache}, use_cache=True)
            self._cache.texts.check_complete()
            self._passes.end()
        except BaseException:
            self._passes.drop()
            self.recurrent.reset()
            self._held = []
            raise
        for text, tokens in parts:
            text.num_fed += len(tokens)
        logits: torch.Tensor = result.logits
        if self.recurrent.layers:
            return logits[:, -1]
        return logits[0] if self._has_last else logits[0, last]

    def room(self, text: Text) -> int:
        """Return how many more tokens of a text fit now. A limit of the tokens of one text does not count."""
        limit, num_tokens = self._passes.cache.max_seq_len, self._passes.room(text.seq_id)
        return INT32_MAX if limit is not None and num_tokens + text.num_fed >= limit else num_tokens

    def state_of(self, text: Text) -> bytes:
        """Return the states of recurrent layers behind a text, as a prefix cache keeps them."""
        if text in self._held:
            return self.recurrent.state_of(self._held.index(text))
        return save(text.state or {})

    def has_state(self, text: Text) -> bool:
        """Whether the states behind a text are known, if there are recurrent layers."""
        return not self.recurrent.layers or text.state is not None or text in self._held

    def forget(self, text: Text) -> None:
        """Forget the states of a text."""
        text.state = None
        self._held = [Text() if one is text else one for one in self._held]

    def restore(self, text: Text, state: Any) -> None:
        """Let a text go on from states that `state_of` returned."""
        text.state = load(bytes(state))

    def _selects(self, text: Text, tokens: list[int]) -> bool:
        """Whether a text's next tokens select rows, by the rule of `HFCache`."""
        is_long = self._select is not None and text.num_fed + 1 >= least_tokens(self._select)
        return is_long and text.is_answering and len(tokens) == 1

    def _hold(self, texts: list[Text]) -> None:
        """Have the recurrent layers hold the states of these texts."""
        if not self.recurrent.layers or texts == self._held:
            return
        for i, text in enumerate(self._held):
            text.state = self.recurrent.states_of(i)
        self._held = texts
        states = [text.state for text in texts if text.state is not None]
        if states:
            self.recurrent.go_on_from(states)
        else:
            self.recurrent.reset()
        for text in texts:
            text.state = None

    def _check(self, alone: HFCache) -> None:
        """Raise NotSupportedError unless a text in a pass with another one has the logits that ``generate`` has."""
        name, one, other = type(self._model).__name__, [1, 2], [3, 4, 5]
        texts = Text(), Text()
        try:
            for text in texts:
                [text.seq_id] = self._passes.new_ids(1)
            for shared in self.passes([(texts[0], other), (texts[1], one)]):
                with torch.no_grad():
                    found = self.feed(shared)[-1].float()
        except NotSupportedError as error:
            raise NotSupportedError(f"texts of a {name} cannot share a pass: {error}") from None
        finally:
            for text in texts:
                self._passes.cache.clear(text.seq_id)
                self.forget(text)
        options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "output_logits": True}
        options |= {"return_dict_in_generate": True, CACHE: alone, "attention_mask": torch.ones(1, len(one))}
        options |= {"stop_strings": None}  # those of the model's own need a tokenizer
        wanted = self._model.generate(torch.tensor([one]), **options).logits[0][0].float()
        if (found - wanted).std() > TOLERANCE * wanted.std():
            raise NotSupportedError(f"texts of a {name} cannot share a pass: their logits are others than alone")


class Running(Text):
    """A request whose tokens are fed, or that waits for it.

    It has a sequence and `_prompts` from `begin` until `release` or `withdraw`. `_ends` are tokens behind which a piece
    of its prompt is to end, and `_names` the names of the prompt's full blocks.
    """

    def __init__(self, request: Request, prefix: PrefixCache, adapter: str | None) -> None:
        super().__init__()
        self.request, self._prefix, self.adapter = request, prefix, adapter
        self.number = 0  # in the order of arrival
        self.tokens = [*request.prompt]  # the prompt, and what was generated
        self._names = prefix.names(request.prompt)  # of its full blocks: of equal names, rows are equal
        self._prompts: Prompts | None = None  # what the prefix cache is told; None: it waits
        self._num_told = 0  # tokens of which it was told
        self._num_prompt = 0  # tokens that were there when it began
        self._was_fed = False
        self.wants = 0  # while it waits: it is not tried again while fewer rows are free
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
        """Return how many rows would be free without `others`: those that neither this one nor one of `beside` has."""
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
        if not packed.recurrent.layers:
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
        if not packed.recurrent.layers:
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

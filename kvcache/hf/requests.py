"""`Request`: a prompt in an `Engine`, and the tokens that are generated behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
import torch
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.stopping_criteria import MaxLengthCriteria, StopStringCriteria

from kvcache.arguments import INT64_MAX, integer
from kvcache.errors import NotSupportedError, shown
from kvcache.hf.images import places_in
from kvcache.hf.told import NAMES_OF_CACHE, has_others

MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
# Arguments of `generate` that a request does not take.
REFUSED = {"assistant_model", "custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask"}
REFUSED |= {*NAMES_OF_CACHE, "return_dict_in_generate", "token_healing"}
REFUSED |= {"output_attentions", "output_hidden_states", "output_logits", "output_scores"}


class Logprobs(NamedTuple):
    """How likely the model found a token: natural logarithms of probabilities."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, each with its own


class Request:
    """A prompt, and its answer, whose tokens can be iterated over, with ``for`` or ``async for``, as they are made.

    `Engine.submit` makes it. Any number of threads and tasks may iterate; each gets all tokens from the first on.

    Attributes
    ----------
    prompt : list of int
        The tokens of the prompt.
    tokens : list of int
        The tokens that were generated, so far.
    logprobs : list of Logprobs
        With `num_logprobs`: how likely the model found each of `tokens`, and the likeliest tokens. Options such as
        ``temperature`` do not change it.
    num_matched : int
        How many tokens of the prompt were known when it began to be fed.
    finish_reason : {"stop", "length", "cancelled", "error"} or None
        Why the answer has ended: at a token, text or criterion that stops it, at its most tokens, by `cancel`, or by an
        error. None: it goes on.
    error : Exception or None
        The error that ended it. `result` and iteration raise it.
    """

    def __init__(
        self, model: Any, input_ids: Any, streamer: Any, seed: SupportsIndex | None, num_logprobs: SupportsIndex | None,
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        num_tokens = vocab_size_of(model)
        self._ids = _tokens_of(input_ids, num_tokens)
        self.prompt: list[int] = self._ids[0].tolist()
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self._num_logprobs = None if num_logprobs is None else integer(num_logprobs, "num_logprobs", 0, num_tokens)
        self.num_matched = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        if streamer is not None and not (hasattr(streamer, "put") and hasattr(streamer, "end")):
            raise TypeError(
                f"streamer is a {type(streamer).__name__}: give one with put() and end(), as generate takes"
            )
        self._streamer, self._generator = streamer, torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(integer(seed, "seed", 0, INT64_MAX))
        self._changed = threading.Condition()  # told when there are more tokens, or it has ended
        self._listeners: list[Callable[[], object]] = []  # called when there are more tokens, or it has ended
        self._when_done: list[Callable[[Request], object]] = []  # called once it has ended
        self.on_cancel: Callable[[Request], object] = lambda request: None  # how the engine learns of `cancel`
        self._prepare(model, options)

    # ---- what its user calls

    def __iter__(self) -> Iterator[int]:
        """Yield the tokens as they are generated; raise the error that ends them, if any."""
        num_seen = 0
        while True:
            with self._changed:
                while len(self.tokens) == num_seen and not self.has_ended:
                    self._changed.wait()
                new, has_ended = self.tokens[num_seen:], self.has_ended
            yield from new
            num_seen += len(new)
            if has_ended:
                break
        self._raise()

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yield the tokens as they are generated, without holding up the event loop."""
        loop, changed, num_seen = asyncio.get_running_loop(), asyncio.Event(), 0
        listen = _waker(loop, changed)
        with self._changed:
            self._listeners.append(listen)
        try:
            while True:
                changed.clear()
                with self._changed:
                    new, has_ended = self.tokens[num_seen:], self.has_ended
                for token in new:
                    yield token
                num_seen += len(new)
                if has_ended:
                    break
                if not new:
                    await changed.wait()
        finally:
            with self._changed:
                self._listeners.remove(listen)
        self._raise()

    def result(self, timeout: float | None = None) -> torch.Tensor:
        """Wait for the end, and return the prompt and what was generated, ``[1, tokens]``, as `generate` does.

        Raises the error that ended it, and TimeoutError after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.has_ended, timeout):
                raise TimeoutError(f"timeout={timeout!r}: the answer has {len(self.tokens)} tokens, and goes on")
        self._raise()
        return self._ids

    def add_done_callback(self, function: Callable[[Request], object]) -> None:
        """Call ``function(request)`` once the answer has ended: in the engine's thread, or now if it has ended."""
        with self._changed:
            if not self.has_ended:
                self._when_done.append(function)
                return
        function(self)

    def cancel(self) -> None:
        """End the answer before the next step, if it goes on."""
        self.on_cancel(self)

    @property
    def num_more(self) -> int:
        """The most tokens that will still be generated."""
        return self._most - self._ids.shape[1]

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more tokens."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        state = self.finish_reason or "goes on"
        return f"<Request: {len(self.prompt)} tokens, {len(self.tokens)} generated; {state}>"

    # ---- what the engine calls

    def draw(self, logits: torch.Tensor) -> str | None:
        """Draw the next token from its logits, ``[vocabulary]``, and return why it is the last one, if it is."""
        if self._streamer is not None and not self.tokens:
            self._streamer.put(self._ids)
        scores = self._processors(self._ids, logits[None].to(copy=True, dtype=torch.float32))
        if self._samples:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self._generator)
        else:
            token = torch.tensor([[int(scores.numpy().argmax())]])  # a fifth of the time of torch's
        ids = torch.cat([self._ids, token], 1)
        with self._changed:
            self._ids = ids
            self.tokens.append(int(token))
            if self._num_logprobs is not None:
                self.logprobs.append(_logprobs_of(logits, int(token), self._num_logprobs))
            self._tell()
        if self._streamer is not None:
            self._streamer.put(token[0])
        ended = [one for one in self._criteria if torch.as_tensor(one(ids, None)).all()]
        if not ended:
            return None
        return "length" if all(isinstance(one, MaxLengthCriteria) for one in ended) else "stop"

    def end(self, reason: str, error: BaseException | None = None) -> None:
        """Note why it has ended, and tell everybody."""
        if self._streamer is not None:
            try:
                self._streamer.end()
            except BaseException as raised:
                reason, error = "error", error or raised
        if error is not None and not isinstance(error, Exception):  # which its user's thread must not end by
            error = RuntimeError(f"the request has failed: {error!r}").with_traceback(error.__traceback__)
        with self._changed:
            self.finish_reason, self.error = reason, error
            self._traceback = None if error is None else error.__traceback__
            self._tell()
            when_done, self._when_done = self._when_done, []
        for function in when_done:
            try:
                function(self)
            except Exception:  # it is not the engine's, which goes on, as an executor does
                logging.getLogger(__name__).exception("an error of a function given to add_done_callback")

    # ----

    def _tell(self) -> None:
        """Wake all who wait for tokens; call it with `_changed` held."""
        self._changed.notify_all()
        for listen in self._listeners:
            listen()

    def _raise(self) -> None:
        """Raise the error that has ended the answer, if any."""
        if self.error is not None:
            raise self.error.with_traceback(self._traceback)  # else it grows with each time

    def _prepare(self, model: Any, options: dict[str, Any]) -> None:
        """Have transformers prepare what follows from the options: processors, criteria and the most tokens."""
        options = dict(options)
        refused = sorted(name for name in REFUSED if options.get(name) not in (None, False))
        refused += ["use_cache"] if options.pop("use_cache", None) is False else []
        if refused:
            raise NotSupportedError(f"{', '.join(refused)}: an engine does not generate so: leave it out")
        mask, config = options.get("attention_mask"), options.get("generation_config")
        if mask is not None and not isinstance(mask, torch.Tensor):
            raise TypeError(f"attention_mask is a {type(mask).__name__}: leave it out, as all tokens count")
        if mask is not None and mask.shape != self._ids.shape:
            raise ValueError(f"attention_mask has the shape {[*mask.shape]}: leave it out, as all tokens count")
        if config is not None and not isinstance(config, GenerationConfig):
            raise TypeError(f"generation_config is a {type(config).__name__}: give a GenerationConfig")
        tokenizer, stops = options.pop("tokenizer", None), config and config.stop_strings
        stops = options.get("stop_strings", stops or model.generation_config.stop_strings)
        if stops is not None:
            if tokenizer is None:
                raise ValueError(f"stop_strings={stops!r}: give the model's tokenizer beside it")
            criteria = [*(options.pop("stopping_criteria", None) or []), StopStringCriteria(tokenizer, stops)]
            options |= {"stopping_criteria": criteria, "stop_strings": None}  # `generate` would miss the tokenizer
        options.setdefault("attention_mask", torch.ones_like(self._ids))  # else tokens of padding would be hidden
        model.generate(self._ids, custom_generate=self._take, use_cache=False, **options)

    def _take(
        self, model: Any, input_ids: torch.Tensor, *, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, **inputs: Any,
    ) -> None:  # fmt: skip
        """Take what `generate` has prepared in place of generating."""
        mode = generation_config.get_generation_mode()
        if mode not in MODES or len(input_ids) > 1:
            what = f"num_return_sequences={len(input_ids)}" if mode in MODES else f"the mode {mode.value!r}"
            raise NotSupportedError(f"{what}: an engine generates one answer of a request, greedily or by sampling")
        if generation_config.guidance_scale not in (None, 1):
            raise NotSupportedError(f"guidance_scale={generation_config.guidance_scale}: an engine has no guidance")
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        has_columns = positions is None or bool((positions == torch.arange(input_ids.shape[1])).all())
        if not has_columns or not (mask is None or bool(mask.all())):
            raise NotSupportedError("attention_mask, position_ids: an engine takes prompts without padding alone")
        if has_others(inputs) or places_in(model.config, input_ids).any():
            raise NotSupportedError("an engine takes prompts of tokens alone, without images or embeddings")
        self._processors, self._criteria = logits_processor, stopping_criteria
        lengths = (one.max_length for one in stopping_criteria if isinstance(one, MaxLengthCriteria))
        self._most = min(lengths, default=INT64_MAX)  # tokens, those of the prompt included
        self._samples = generation_config.do_sample


def _logprobs_of(logits: torch.Tensor, token: int, num: int) -> Logprobs:
    """Return how likely a token was, and the `num` likeliest tokens."""
    found = logits.to(torch.float32).log_softmax(-1)
    values, tokens = found.topk(min(num, len(found)))
    return Logprobs(float(found[token]), [*zip(tokens.tolist(), values.tolist(), strict=True)])


def vocab_size_of(model: Any) -> int:
    """Return how many tokens a model has. An adapter may wrap its embeddings."""
    parts = model.get_input_embeddings().modules()
    found: int = next(part.num_embeddings for part in parts if hasattr(part, "num_embeddings"))
    return found


def _waker(loop: asyncio.AbstractEventLoop, changed: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of a loop, from any thread; it does nothing once the loop is closed."""

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # which may close at any time, in its own thread
            loop.call_soon_threadsafe(changed.set)

    return wake


def _tokens_of(input_ids: Any, vocab_size: int) -> torch.Tensor:
    """Return the tokens of a prompt, ``[1, tokens]``, or raise."""
    if isinstance(input_ids, np.ndarray):  # torch takes neither negative strides nor bytes in the other order
        input_ids = np.array(input_ids, input_ids.dtype.newbyteorder("="), order="C")
    try:
        ids = input_ids if isinstance(input_ids, torch.Tensor) else torch.as_tensor(input_ids)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"input_ids is {shown(input_ids)}: tokens are needed, as a tokenizer's input_ids") from None
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel():
        raise ValueError(f"input_ids has the shape {[*ids.shape]}: one prompt of at least a token, [1, tokens]")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"input_ids has the type {ids.dtype}: integers are needed")
    ids = ids.to("cpu", torch.long, copy=True)  # its user may write to it meanwhile
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids has the token {low if low < 0 else high}: tokens are from 0 to {vocab_size - 1}")
    return ids

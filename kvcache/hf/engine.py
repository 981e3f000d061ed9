"""`Engine`: continuous batches of requests on a model of transformers.

A request waits until it has begun: then it has a sequence, and runs. Each step feeds parts, the next tokens of running
requests, in one pass or several. If memory is short, the youngest request is put back: it gives its sequence up, and
waits again. It is barred then: it may not begin before another one has ended, or an older one was put back.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import queue
import threading
from bisect import bisect, insort
from operator import attrgetter
from typing import Any, Self, SupportsFloat, SupportsIndex
from weakref import WeakKeyDictionary

import torch

from kvcache.arguments import INT32_MAX, integer
from kvcache.errors import CacheFullError
from kvcache.hf.cache import HFCache
from kvcache.hf.dense import NAME
from kvcache.hf.enabling import implementations, served
from kvcache.hf.packed import Packed, Part, Running
from kvcache.hf.requests import Request
from kvcache.policy import most_rows
from kvcache.prefix import PrefixCache
from kvcache.system import available_memory

ARRIVAL = attrgetter("number")
OF_ROWS = {"policy", "transform", "k_dtype", "v_dtype", "prompts"}  # arguments of `HFCache`; others limit the memory


class Engine:
    """Runs many requests on one model: in each step, tokens of all of them go through it together.

    A step feeds one token of each answer and, beside them, tokens of prompts. Requests come and go between steps. Each
    request gets the tokens that ``generate`` alone gives it, up to rounding.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that generates text from tokens, on the CPU, in ``eval`` mode. It gets the attention ``"kvcache"``.
    dtype : str, optional
        The type that rows are stored in, as for `HFCache`; by default "f16" or, with `prefix`, the type of its cache.
    prefix : PrefixCache, optional
        Where prompts begin that were computed before, as for `HFCache`. By default the engine makes its own.
    select : int, optional
        About how many rows a token of a long text reads, as for `HFCache`.
    max_running : int, default 64
        The most requests that run at once; others wait. With more, each answer goes on more slowly. A pass of 64 texts
        has most of what texts gain by sharing it.
    max_waiting : int, default 256
        The most requests that wait; `submit` refuses more.
    prompt_tokens : int, default 512
        The most tokens of prompts in a step. Fewer let answers go on more evenly while prompts are fed; more feed
        prompts faster.
    **arguments
        Further ones of `HFCache.make_kv_cache`, without `prefix`: policy, transform, prompts, `capacity` or
        `max_bytes`. By default the cache takes up to half of the free memory.

    Raises
    ------
    NotSupportedError
        If the texts of such a model cannot share a pass: it computes with stored rows itself (BLOOM), its tokens meet
        in other places than attention and recurrent layers, it takes no positions, or `HFCache` with a prefix cache
        does not serve it.
    ValueError, TypeError
        As from `HFCache` and `kvcache.KVCache`; or if the model is in training mode.

    Attributes
    ----------
    prefix : PrefixCache
        The prefix cache of requests without a tenant.

    Notes
    -----
    Any thread may call any method, except in a child of ``fork``. A thread of the engine runs the model until `close`,
    or the end of a ``with`` block.
    Of the prompts that are fed, the oldest gets half of a step or more, and the shortest get the rest. A prompt that
    begins as another one that is being fed waits until the common part is computed.
    Where memory is short, older requests have it. A waiting request begins as soon as its rows fit beside those of the
    older requests that run. Younger ones that have its rows are put back to wait. So a request waits for older ones at
    most, and the oldest one runs to its end.
    `tenant` makes prefix caches for requests that must not find others' prompts, or that an adapter (LoRA) answers. All
    texts of a pass have the same adapter, so a step has as many passes as adapters in use, or more. The engine switches
    between them itself, and `close` leaves the model as it was.
    If you switch or add an adapter or change weights, close the engine and make another one. It cannot know, and its
    prefix caches have rows of the old weights.

    Examples
    --------
    >>> import torch, transformers, kvcache.hf
    >>> config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    ...     num_attention_heads=2, vocab_size=97, eos_token_id=None)
    >>> model = transformers.AutoModelForCausalLM.from_config(config).eval()
    >>> with kvcache.hf.Engine(model, max_bytes=1 << 20) as engine:
    ...     requests = [engine.submit([5, 6, 7, i], max_new_tokens=3) for i in range(8)]
    ...     answers = [[*request] for request in requests]
    >>> [len(answer) for answer in answers]
    [3, 3, 3, 3, 3, 3, 3, 3]
    """

    def __init__(
        self,
        model: Any,
        dtype: Any = None,
        *,
        prefix: PrefixCache | None = None,
        select: int | None = None,
        max_running: SupportsIndex = 64,
        max_waiting: SupportsIndex = 256,
        prompt_tokens: SupportsIndex = 512,
        **arguments: Any,
    ) -> None:
        self._max_running = integer(max_running, "max_running", 1, INT32_MAX)
        self._max_waiting = integer(max_waiting, "max_waiting", 1, INT32_MAX)
        self._prompt_tokens = integer(prompt_tokens, "prompt_tokens", 1, INT32_MAX)
        model = served(model)
        if model.training:
            raise ValueError("the model is in training mode: call model.eval() first")
        self._model, self._owns_cache = model, prefix is None
        attention = implementations(model.config)
        try:
            model.set_attn_implementation(NAME)
            self.prefix = _make_prefix(model, dtype, select, arguments) if prefix is None else prefix
            if prefix is None:
                arguments = {name: value for name, value in arguments.items() if name in OF_ROWS}
            self._packed = Packed(model, dtype=dtype, prefix=self.prefix, select=select, **arguments)  # feeds texts
        except BaseException:
            model.set_attn_implementation(attention)
            raise
        policies = {layer.policy for layer in self.prefix.cache.layers}
        self._most_rows = max(most_rows(policy, INT32_MAX, self._prompt_tokens) for policy in policies)  # of a text
        self._changed = threading.Condition()  # guards the requests; told when the thread has work
        self._adapters: WeakKeyDictionary[PrefixCache, str] = WeakKeyDictionary()  # of tenants that have one
        self._waiting: list[Running] = []  # in the order of arrival, as the next ones
        self._running: list[Running] = []  # have a sequence
        self._cancelled: set[Request] = set()  # which the next step ends
        self._is_closing, self._why_closed = False, "the engine is closed"
        self._num_submitted = self._num_generated = self._num_put_back = 0
        self._process = os.getpid()  # which has the thread: a child of fork does not
        self._thread = threading.Thread(target=self._run, name="kvcache engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def tenant(
        self,
        salt: bytes = b"",
        *,
        adapter: str | None = None,
        quota: SupportsIndex = 0,
        ttl: SupportsFloat | None = None,
    ) -> PrefixCache:
        """Return a prefix cache for requests that find no prompts of others: `submit` takes it as `tenant`.

        Parameters
        ----------
        salt : bytes
            The tenant. Keep it secret where tenants distrust each other.
        adapter : str, optional
            The name of an adapter that PEFT has put into the model. The requests get the tokens that ``generate`` gives
            while it alone is active. By default they get those of the model as it was when the engine was made. A hash
            of the adapter's weights and configuration is a part of each block's name, also in a store.
        quota, ttl
            As for `PrefixCache`: tokens that are kept for this prefix cache, and seconds after which unused ones go.

        Raises
        ------
        ValueError
            If the model has no such adapter, or one is merged into it; or as from `PrefixCache`.
        """
        if adapter is not None:
            self._packed.adapters.check(adapter)
            salt = hashlib.blake2b(salt, key=self._packed.adapters.fingerprint(adapter)).digest()
        made = self.prefix.tenant(salt, quota=quota, ttl=ttl)
        if adapter is not None:
            with self._changed:
                self._adapters[made] = adapter
        return made

    def submit(
        self,
        input_ids: Any,
        *,
        tenant: PrefixCache | None = None,
        streamer: Any = None,
        seed: SupportsIndex | None = None,
        num_logprobs: SupportsIndex | None = None,
        **options: Any,
    ) -> Request:
        """Add a request, and return it at once.

        Parameters
        ----------
        input_ids : torch.Tensor or sequence of int
            The tokens of a prompt, ``[1, tokens]`` or ``[tokens]``.
        tenant : PrefixCache, optional
            Whose prompts it may begin with, and which adapter answers it: what `tenant` returned, the same for all
            requests of a tenant. By default `prefix`.
        streamer : transformers streamer, optional
            Gets the prompt and the tokens in the engine's thread, as from ``generate``. An error that it raises ends
            the request.
        seed : int, optional
            With ``do_sample=True``: the tokens are those of ``torch.manual_seed(seed)`` and ``generate``.
        num_logprobs : int, optional
            Have `Request.logprobs` tell how likely each token was, and so many of the likeliest tokens.
        **options
            Arguments of ``generate`` for one answer, greedy or sampled: max_new_tokens, temperature, stop_strings with
            a tokenizer, logits_processor, stopping_criteria, generation_config and the like. Processors and criteria
            run in the engine's thread; an error that they raise ends this request alone.

        Raises
        ------
        queue.Full
            If `max_waiting` requests wait.
        NotSupportedError
            If an engine cannot generate in the way that the options ask for: beams, a draft, padding, images.
        ValueError, TypeError
            If the engine is closed, or the prompt or an option is wrong.
        """
        if os.getpid() != self._process:
            raise ValueError("the engine runs in the process that made it: this one is a child of fork")
        prefix = self.prefix if tenant is None else tenant
        if not isinstance(prefix, PrefixCache) or prefix.cache is not self.prefix.cache:
            raise ValueError(f"tenant is {tenant!r}: give what tenant() returned")
        with self._changed:
            self._check_room()
            adapter = self._adapters.get(prefix)
        request = Request(self._model, input_ids, streamer, seed, num_logprobs, options)
        capacity = prefix.cache.capacity
        if capacity is not None and len(request.prompt) > capacity:
            raise ValueError(f"input_ids has {len(request.prompt)} tokens, and the cache a capacity of {capacity}")
        request.on_cancel, added = self._cancel, Running(request, prefix, adapter)
        with self._changed:
            self._check_room()
            added.number = self._num_submitted
            self._num_submitted += 1
            self._waiting.append(added)
            self._changed.notify()
        return request

    def stats(self) -> dict[str, int]:
        """Return how many requests run and wait, and how many tokens were generated and requests put back so far."""
        with self._changed:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "generated": self._num_generated,
                "put_back": self._num_put_back,
            }

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End all requests with an error, and the thread. An engine's own cache is freed."""
        if os.getpid() != self._process:  # a child of fork, which has no such thread
            return
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def _check_room(self) -> None:
        """Raise if there may be no more requests."""
        if self._is_closing:
            raise ValueError(self._why_closed)
        if len(self._waiting) >= self._max_waiting:
            raise queue.Full(f"max_waiting={self._max_waiting}: as many requests wait: try again when one has ended")

    def _cancel(self, request: Request) -> None:
        with self._changed:
            if not request.has_ended:
                self._cancelled.add(request)
                self._changed.notify()

    # ---- in the thread

    def _run(self) -> None:
        """Feed the requests in steps until the engine is closed or fails, and end those that are left."""
        try:
            with torch.no_grad():
                while self._begin_step():
                    for parts in self._packed.passes(self._plan()):
                        if not self._feed(parts):
                            break
        except BaseException as raised:
            self._why_closed = f"the engine has stopped: {raised!r}"
        with self._changed:
            self._is_closing = True
        for one in [*self._running, *self._waiting]:
            self._end(one, "error", RuntimeError(self._why_closed))
        self._packed.adapters.activate(None)
        if self._owns_cache:
            self.prefix.cache.close()
        atexit.unregister(self.close)

    def _begin_step(self) -> bool:
        """Wait for requests, end cancelled ones, and begin new ones; return False to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing or self._waiting or self._running)
            if self._is_closing:
                return False
            cancelled = [one for one in [*self._running, *self._waiting] if one.request in self._cancelled]
            self._cancelled.clear()
        for one in cancelled:
            self._end(one, "cancelled")
        for one in [*self._waiting]:
            if len(self._running) >= self._max_running:
                break
            if any(one.awaits(other) for other in self._running):  # another is just feeding what both begin with
                one.wants = 0  # once that is fed, both share its rows, and this one needs fewer
            elif not one.is_barred:
                self._begin(one)
        return True

    def _begin(self, one: Running) -> None:
        """Let a request that waits run, unless it has to wait on."""
        try:
            has_begun = self._try_to_begin(one)
        except CacheFullError as error:
            self._make_room([*self._running, one], error)
            return
        except BaseException as error:
            self._end(one, "error", error)
            return
        if has_begun:
            with self._changed:
                self._waiting.remove(one)
                insort(self._running, one, key=ARRIVAL)

    def _try_to_begin(self, one: Running) -> bool:
        """Let a request have a sequence if no older one runs, or its rows fit beside the rows that older ones need.

        Younger ones may be put back for it. If it does not fit, `one.wants` says with how many free rows it may.
        """
        num_older = bisect(self._running, one.number, key=ARRIVAL)
        older, younger = self._running[:num_older], self._running[num_older:]
        if not older:  # the oldest one always begins
            one.begin(self._packed)
            return True
        rows = one.rows_only_of(younger, older) - sum(map(self._rows_for, older))  # that it may have beside free ones
        num_free = self._packed.room(self._packed.nobody) + rows
        if num_free < one.wants:
            return False
        one.begin(self._packed)
        num_lacking = self._rows_for(one) - self._packed.room(one) - rows
        if num_lacking <= 0:
            return True
        one.withdraw(self._packed)
        one.wants = num_free + num_lacking
        return False

    def _rows_for(self, one: Running) -> int:
        """Return how many more rows a request needs until it is fed, and then goes on for a while."""
        return min(one.num_wanted, self._most_rows)

    def _plan(self) -> list[Part]:
        """Return which tokens a step feeds."""
        parts: list[Part] = [(one, one.tokens[one.num_fed :]) for one in self._running if one.is_answering]
        prompts = [one for one in self._running if not one.is_answering]
        others = sorted(prompts[1:], key=lambda one: one.num_left)
        left = self._prompt_tokens
        oldest = left - min(left // 2, sum(one.num_left for one in others))  # half at least for the oldest prompt
        for one in [*prompts[:1], *others]:
            num = min(oldest if one is prompts[0] else left, one.next_end - one.num_fed)
            if num:
                parts.append((one, one.tokens[one.num_fed : one.num_fed + num]))
                left -= num
        return parts

    def _feed(self, parts: list[Part]) -> bool:
        """Feed a pass, and draw the next tokens of texts that were fed to their end; return False if it has no room.

        Then a text was put back that may be in the next pass of the step.
        """
        texts = [text for text, _ in parts if isinstance(text, Running)]
        try:
            logits = self._packed.feed(parts)
        except CacheFullError as error:
            self._make_room(self._running, error)
            return False
        except BaseException as error:
            self._separate(texts, error)
            return True
        for one, row in zip(texts, logits, strict=True):
            try:
                one.checkpoint(self._packed)
                if one.num_left:
                    continue
                self._num_generated += 1
                reason = one.draw(row)
            except BaseException as error:
                self._end(one, "error", error)
                continue
            if reason:
                self._end(one, reason)
        return True

    def _separate(self, texts: list[Running], error: BaseException) -> None:
        """Give each text of a pass that failed passes of its own, so that only the text fails that is the cause."""
        if len(texts) == 1:
            self._end(texts[0], "error", error)
            return
        for one in texts:
            one.is_alone = True
            if self._packed.recurrent.layers:  # their states are lost
                self._put_back(one)

    def _make_room(self, requests: list[Running], error: CacheFullError) -> None:
        """Let the youngest of the requests that do not fit wait. If it is the only one, it ends with the error.

        It waits until another one has ended, or an older one was put back, even if its rows seem to fit. So there is an
        end to putting back: the oldest request never waits again, and the others wait again a limited number of times
        until one ends.
        """
        youngest = max(requests, key=ARRIVAL)
        if len(requests) == 1:
            self._end(youngest, "error", error)
            return
        if youngest.has_begun:
            self._put_back(youngest)
            self._num_put_back += 1
        for one in self._waiting[bisect(self._waiting, youngest.number, key=ARRIVAL) :]:
            one.is_barred = False
        youngest.is_barred = True

    def _put_back(self, one: Running) -> None:
        """Let a request begin anew. Its rows are kept until their memory is needed."""
        one.release(self._packed)
        with self._changed:
            self._running.remove(one)
            insort(self._waiting, one, key=ARRIVAL)

    def _end(self, one: Running, reason: str, error: BaseException | None = None) -> None:
        """End a request that runs or waits. Those that were barred may try again."""
        with self._changed:
            (self._running if one in self._running else self._waiting).remove(one)
        for other in self._waiting:
            other.is_barred = False
        try:
            one.release(self._packed)
        except BaseException as raised:
            reason, error = "error", error or raised
        one.request.end(reason, error)


def _make_prefix(model: Any, dtype: Any, select: int | None, arguments: dict[str, Any]) -> PrefixCache:
    """Make a prefix cache of an engine's own, which keeps the prompts of its requests."""
    if arguments.get("capacity") is None and arguments.get("max_bytes") is None:
        arguments = {**arguments, "max_bytes": available_memory()[0] // 2}
    cache = HFCache.make_kv_cache(model.config, dtype or "f16", select=select, **arguments)
    return PrefixCache(cache, fingerprint="kvcache.hf.Engine", state_bytes=HFCache.state_bytes(model))

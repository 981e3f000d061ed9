"""Run many requests through one model: their tokens go through it together, in one batch for each step."""

from __future__ import annotations

import codecs
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import kvcache
from kvcache.runner import PREFILL_TOKENS, Llama, sample

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Options:
    """How a request's tokens are drawn, and where its text ends."""

    max_tokens: int
    temperature: float
    top_p: float
    stop: tuple[bytes, ...]
    seed: int | None


class Text:
    """The bytes of an answer. It hands out whole characters, and nothing that may become a stop sequence."""

    def __init__(self, stop: Sequence[bytes]) -> None:
        self._stop = sorted(stop, key=len, reverse=True)  # of two that end together, the longer one counts
        self._held = b""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def add(self, token: int) -> tuple[str, bool]:
        """Return what may be shown after another token, and whether the text has come to a stop sequence."""
        self._held += bytes([token])
        for stop in self._stop:
            if self._held.endswith(stop):
                text, self._held = self._held.removesuffix(stop), b""
                return self._decode(text), True
        shown = len(self._held) - max((self._begun(stop) for stop in self._stop), default=0)
        text, self._held = self._held[:shown], self._held[shown:]
        return self._decode(text), False

    def _begun(self, stop: bytes) -> int:
        """Return how many first bytes of a stop sequence the text ends with."""
        most = min(len(stop) - 1, len(self._held))  # a client's sequence may be far longer than the text
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)

    def end(self) -> str:
        """Return the rest."""
        return self._decode(self._held, final=True)


@dataclass(eq=False)
class Request:
    """A prompt and its answer.

    `deliver` is called in the engine's thread with pieces of text and the reason why it ended, "" while it goes on.
    """

    prefix: kvcache.PrefixCache
    prompt: list[int]
    options: Options
    deliver: Callable[[str, str], object] = field(init=False)
    tokens: list[int] = field(init=False)  # the prompt, and what was generated
    num_fed: int = 0
    seq_id: int | None = None  # None: it waits
    num_matched: int | None = None  # tokens of the prompt that were known when it began first

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt]
        self.text, self.rng = Text(self.options.stop), np.random.default_rng(self.options.seed)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt)


class Engine:
    """A thread that feeds requests to a model, on one cache. Requests wait while it has no room for them."""

    def __init__(self, model: Llama, capacity: int, fingerprint: str) -> None:
        c = model.config
        layers = [kvcache.Layer(c.num_kv_heads, c.head_dim, policy=policy, rope=c.rope) for policy in c.policy]
        self.cache = kvcache.KVCache(layers, max_sequences=None, capacity=capacity, block_size=BLOCK_SIZE)
        self.prefix = kvcache.PrefixCache(self.cache, fingerprint=fingerprint)
        self.model = model
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_generated = self.num_preempted = 0
        self._quotas = 0  # tokens that may be kept for tenants
        self._is_full = False  # whether a request was put back, and none has ended since
        self._changed, self._is_stopping = threading.Condition(), False
        self._cancelled: set[Request] = set()
        self._thread = threading.Thread(target=self._run, name="engine")

    def tenant(self, salt: bytes, quota: int) -> kvcache.PrefixCache:
        """Return the prefix cache of a tenant, for whom so many tokens are kept."""
        self._quotas += quota + BLOCK_SIZE - 1 if quota else 0  # the block in which it ends is kept whole
        return self.prefix.tenant(salt, quota=quota)

    @property
    def max_tokens(self) -> int:
        """The most tokens of a request, its answer included: as many as there is always room for, if it is alone."""
        spare = 2 * BLOCK_SIZE  # of a block that it shares, and of one that it fills in part
        return min(self.model.config.max_seq_len, (self.cache.capacity or 0) - self._quotas - spare)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Have the thread end all requests, and itself, after the step that runs."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and free the cache."""
        self.stop()
        self._thread.join()
        self.cache.close()

    def submit(self, request: Request) -> None:
        with self._changed:
            if not self._is_stopping:
                self.waiting.append(request)
                self._changed.notify()
                return
        request.deliver("", "shutdown")

    def cancel(self, request: Request) -> None:
        """Let a request go that nobody waits for; do nothing if it has ended."""
        with self._changed:
            if request in self.waiting:
                self.waiting.remove(request)
            elif request in self.running:
                self._cancelled.add(request)
                self._changed.notify()

    # ---- in the thread

    def _run(self) -> None:
        while self._begin_step():
            try:
                self._step()
            except kvcache.CacheFullError:
                self._put_back()
            except Exception as error:  # a step changes all of its requests or none
                for request in [*self.running]:
                    self._end(request, f"error: {error}")
        with self._changed:
            left = [*self.running, *self.waiting]
            self.running.clear()
            self.waiting.clear()  # so that `cancel` does nothing from here on
        for request in left:
            self._finish(request, "shutdown")

    def _begin_step(self) -> bool:
        """Wait for requests, release cancelled requests, and begin new ones; return False to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopping or self.waiting or self.running)
            if self._is_stopping:
                return False
            cancelled = [request for request in [*self.running, *self.waiting] if request in self._cancelled]
            self._cancelled.clear()
        for request in cancelled:
            self._end(request, "")
        with self._changed:
            while self.waiting and not self._is_full:
                self.running.append(self.waiting.popleft())
        return True

    def _step(self) -> None:
        """Feed a token of each answer, and as much of prompts as a batch holds beside them; draw the next tokens."""
        for request in self.running:
            if request.seq_id is None:
                request.seq_id, request.num_fed = request.prefix.acquire(request.tokens)
                request.num_matched = request.num_fed if request.num_matched is None else request.num_matched
        fed: list[tuple[Request, int]] = []
        left = PREFILL_TOKENS
        for request in sorted(self.running, key=lambda one: len(one.tokens) - one.num_fed > 1):  # answers first
            num = min(left, len(request.tokens) - request.num_fed)
            if num:
                fed.append((request, num))
                left -= num
        if not fed:
            return
        tokens = [token for one, num in fed for token in one.tokens[one.num_fed : one.num_fed + num]]
        logits = self.model.forward(
            tokens, self.cache, seq_id=[one.seq_id or 0 for one, num in fed for _ in range(num)]
        )
        row = -1
        for request, num in fed:
            request.num_fed += num
            row += num
            if request.num_fed == len(request.tokens):
                self._draw(request, logits[row])

    def _draw(self, request: Request, logits: np.ndarray) -> None:
        options = request.options
        token = sample(logits, request.rng, temperature=options.temperature, top_p=options.top_p)
        request.tokens.append(token)
        self.num_generated += 1
        text, is_stopped = request.text.add(token)
        if is_stopped:
            self._end(request, "stop", text)
        elif request.num_generated == options.max_tokens:
            self._end(request, "length", text + request.text.end())
        elif text:
            request.deliver(text, "")

    def _put_back(self) -> None:
        """Let the youngest request wait until another one has ended. Its rows are kept until their memory is needed."""
        request = self.running[-1]
        if len(self.running) == 1:
            self._end(request, "error: the cache has no room for the request")
            return
        with self._changed:
            self.running.remove(request)
            self.waiting.appendleft(request)
            self._is_full = True
        self.num_preempted += 1
        self._release(request)

    def _end(self, request: Request, reason: str, text: str = "") -> None:
        with self._changed:
            (self.running if request in self.running else self.waiting).remove(request)
            self._is_full = False
        self._finish(request, reason, text)

    def _finish(self, request: Request, reason: str, text: str = "") -> None:
        self._release(request)
        request.deliver(text, reason)

    def _release(self, request: Request) -> None:
        if request.seq_id is not None:
            request.prefix.release(request.seq_id, request.tokens)
            request.seq_id = None

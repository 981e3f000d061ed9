"""Calls for routers: events, names, how much would match, and forgetting a prompt."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import types
from typing import Any

import pytest
from support.faulty_stores import for_caller
from support.prefixes import make_cache, serve
from support.servers import until

import kvcache
from kvcache import PrefixEvent
from kvcache.stores import reader, worker

PROMPT = list(range(40))
LONG = 30  # seconds within which anything that should happen has happened


def make(**options: Any) -> tuple[kvcache.KVCache, kvcache.PrefixCache]:
    cache = make_cache()
    return cache, kvcache.PrefixCache(cache, fingerprint="a model", **{"timeout": LONG, **options})


def test_events_say_what_is_kept_and_dropped() -> None:
    cache, prefix = make(max_events=8)
    names = prefix.names(PROMPT)
    assert len(names) == len(set(names)) == 2
    serve(prefix, cache, PROMPT)
    assert prefix.take_events() == [PrefixEvent("kept", names[0], 0), PrefixEvent("kept", names[1], 16)]
    assert prefix.take_events() == []
    prefix.evict(1000)
    assert {(e.kind, e.name) for e in prefix.take_events()} == {("dropped", name) for name in names}
    prefix.clear()
    assert prefix.take_events() == [PrefixEvent("cleared")]
    for first in range(10):
        serve(prefix, cache, [first + 100, *PROMPT])
    events = prefix.take_events()
    assert len(events) == 9
    assert events[0] == PrefixEvent("lost")
    assert make()[1].take_events() == []


def test_lookup_asks_the_store_what_it_has() -> None:
    store: dict[str, bytes] = {}
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    _, other = make(store=store)
    assert (other.lookup(PROMPT), other.lookup(PROMPT, store=True)) == (0, 32)
    assert other.lookup([*PROMPT[:20], 7], store=True) == 16
    assert other.stats.store is not None
    assert (other.stats.store.hits, other.stats.store.bytes_read, other.stats.blocks) == (0, 0, 0)
    del store[prefix.names(PROMPT)[0]]
    assert other.lookup(PROMPT, store=True) == 0
    assert prefix.lookup(PROMPT, store=True) == prefix.lookup(PROMPT) == 40
    other.close()
    assert other.lookup(PROMPT, store=True) == 0


def test_lookup_waits_no_longer_than_the_timeout() -> None:
    class Slow(dict[str, bytes]):
        may_go_on = threading.Event()

        def __contains__(self, key: object) -> bool:
            self.may_go_on.wait(2 * LONG)
            return True

    store = Slow()
    _, prefix = make(store=store, timeout=0.05)
    assert prefix.lookup(PROMPT, store=True) == 0, "it waited for the answer"
    store.may_go_on.set()


def test_forget_drops_a_prompt_from_memory_and_store() -> None:
    store: dict[str, bytes] = {}
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    serve(prefix, cache, [7, *PROMPT])
    assert prefix.flush(LONG)
    prefix.pin(PROMPT)
    assert prefix.forget(PROMPT) == 40
    assert prefix.flush(LONG)
    assert prefix.lookup(PROMPT, store=True) == 0
    assert not set(prefix.names(PROMPT)) & set(store)
    assert prefix.lookup([7, *PROMPT]) == 41
    assert set(store) == set(prefix.names([7, *PROMPT]))
    assert prefix.forget(PROMPT) == 0
    assert serve(prefix, cache, PROMPT) == 0
    assert prefix.lookup(PROMPT) == 40


def test_what_was_read_before_a_prompt_was_forgotten_is_not_added() -> None:
    class Forgetting(dict[str, bytes]):
        forgets = False

        def __getitem__(self, key: str) -> bytes:
            value = super().__getitem__(key)
            if self.forgets:
                self.forgets = False
                other.forget(PROMPT)
            return value

    store = Forgetting()
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    _, other = make(store=store)
    store.forgets = True
    assert other.acquire([*PROMPT, 1])[1] == 0
    assert not store.forgets
    assert other.flush(LONG)
    assert not store
    assert other.acquire([*PROMPT, 1])[1] == 0


class Failing(dict[str, bytes]):
    """A store whose next deletions fail."""

    num_failures: float = math.inf

    def __delitem__(self, key: str) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise OSError("no")
        super().__delitem__(key)


def test_what_is_to_be_deleted_is_not_fetched_and_deleted_as_soon_as_that_succeeds() -> None:
    store = Failing()
    cache, prefix = make(store=store)
    longer = [*PROMPT[:20], *range(700, 720)]
    serve(prefix, cache, PROMPT)
    serve(prefix, cache, longer)  # parts from it within a block
    assert prefix.flush(LONG)
    prefix.forget(PROMPT)
    assert not prefix.flush(LONG)
    assert prefix.names(longer)[1] in store
    _, other = make(store=store)
    for each in (prefix, other):  # of the same names and store
        assert each.lookup(PROMPT, store=True) == each.lookup(longer, store=True) == 0
        assert each.acquire([*PROMPT, 1])[1] == each.acquire([*longer, 1])[1] == 0
    assert prefix.acquire([*PROMPT, 1])[1] == prefix.acquire([*longer, 1])[1] == 0
    store.num_failures = 0
    until(lambda: prefix.forget(PROMPT) == 0 and prefix.flush(LONG) and not store)  # it is left alone for a while
    assert prefix.flush(LONG)
    assert serve(other, make(store=store)[0], PROMPT) == 0


def test_a_deletion_that_waits_is_queued_once() -> None:
    class Slow(dict[str, bytes]):
        may_go_on = threading.Event()
        num_deletions = 0

        def __delitem__(self, key: str) -> None:
            assert self.may_go_on.wait(2 * LONG)
            self.num_deletions += 1
            super().__delitem__(key)

    store = Slow()
    cache, prefix = make(store=store)
    prompts = [[i, *PROMPT] for i in range(8)]
    for prompt in prompts:
        serve(prefix, cache, prompt)
    assert prefix.flush(LONG)
    for prompt in prompts:
        prefix.forget(prompt)
    store.may_go_on.set()
    assert prefix.flush(LONG)
    assert not store
    assert store.num_deletions == 8 * len(prefix.names(prompts[0]))


class HeldUp(dict[str, bytes]):
    """A store that writes nothing before `may_go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def __setitem__(self, key: str, value: bytes) -> None:
        assert self.may_go_on.wait(2 * LONG)
        super().__setitem__(key, value)


def test_what_a_dropped_tenant_wrote_is_stored_and_then_leaves_memory() -> None:
    store = HeldUp()
    cache, prefix = make(store=store)
    for i in range(8):
        serve(prefix.tenant(b"%d" % i), cache, PROMPT)
    gc.collect()
    store.may_go_on.set()
    serve(prefix, cache, PROMPT)  # written last
    assert prefix.flush(LONG)
    assert len(store) == 9 * 2
    for i in range(8):
        assert make(store=store)[1].tenant(b"%d" % i).lookup(PROMPT, store=True) == 32
    prefix.clear()
    until(lambda: not cache.stats()["live_slots"])  # the thread that wrote lets go of the last ones


def test_what_waits_to_be_written_and_is_forgotten_is_no_failure() -> None:
    store = HeldUp()
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    prefix.forget(PROMPT)
    store.may_go_on.set()
    assert prefix.flush(LONG)
    assert not store
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    assert set(store) == set(prefix.names(PROMPT))


def test_what_is_computed_again_after_a_failed_deletion_is_read_again_and_stays() -> None:
    store = Failing()
    cache, prefix = make(store=store)
    other = [*range(500, 540)]
    for prompt in (PROMPT, other):
        serve(prefix, cache, prompt)
    assert prefix.flush(LONG)
    store.num_failures = 2
    prefix.forget(PROMPT)
    assert not prefix.flush(LONG)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    _, second = make(store=store)
    assert second.lookup(PROMPT, store=True) == 32
    assert second.acquire([*PROMPT, 1])[1] == 32
    prefix.forget(other)
    assert prefix.flush(LONG)
    assert set(store) == set(prefix.names(PROMPT))


def test_what_is_written_while_its_deletion_waits_again_is_not_deleted() -> None:
    class HeldUpAndFailing(HeldUp, Failing):
        pass

    store = HeldUpAndFailing()
    store.may_go_on.set()
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    prefix.forget(PROMPT)
    assert not prefix.flush(LONG)
    store.num_failures = 0
    store.may_go_on.clear()
    serve(prefix, cache, PROMPT)
    prefix.forget([*range(500, 540)])  # has what the store failed to delete deleted, behind the writes
    store.may_go_on.set()
    assert prefix.flush(LONG)
    assert make(store=store)[1].lookup(PROMPT, store=True) == 32


def test_blocks_that_are_forgotten_while_they_wait_to_be_written_are_not_dropped_by_the_store() -> None:
    """The prompt has none of their names: the store learns of them after they have gone."""
    store = HeldUp()
    cache, prefix = make(store=store)
    private = PROMPT[:20]
    serve(prefix, cache, [9, *PROMPT])  # whose write is held up
    for i in range(8):
        serve(prefix, cache, [*private, *range(100 * i, 100 * i + 12)])

    class Core:
        def forget(self, *arguments: Any) -> int:
            num: int = core.forget(*arguments)
            store.may_go_on.set()
            time.sleep(0.2)  # for the writer, to find blocks gone
            return num

        def __getattr__(self, name: str) -> Any:
            return getattr(core, name)

    core, prefix._prefix = prefix._prefix, Core()  # type: ignore[assignment]  # stands in for a final class
    assert prefix.forget(private) >= 8 * 16
    assert prefix.flush(LONG)
    assert prefix.stats.store is not None
    assert prefix.stats.store.dropped == 0


def test_nobody_is_answered_by_a_read_that_began_before_a_value_was_deleted() -> None:
    class Slow(dict[str, bytes]):
        is_reading, may_go_on = threading.Event(), threading.Event()

        def __getitem__(self, key: str) -> bytes:
            value = super().__getitem__(key)
            self.is_reading.set()
            assert self.may_go_on.wait(2 * LONG)
            return value

    store = Slow()
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    prefix.clear()
    matched: list[int] = []
    first = threading.Thread(target=lambda: matched.append(prefix.acquire([*PROMPT, 1])[1]))
    first.start()
    assert store.is_reading.wait(30)
    prefix.forget(PROMPT)
    assert prefix.flush(LONG)
    assert not store
    _, other = make(store=store)
    second = threading.Thread(target=lambda: matched.append(other.acquire([*PROMPT, 1])[1]))
    second.start()
    time.sleep(0.1)  # to be waiting for the same keys
    store.may_go_on.set()
    first.join()
    second.join()
    assert matched == [0, 0]


def test_lookup_of_a_store_that_is_slow_says_what_it_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup's time is up behind 40 answers, each of which takes a second by a clock of the test's own."""

    class Slow(dict[str, bytes]):
        may_answer, now = threading.Semaphore(0), 0.0

        def __contains__(self, key: object) -> bool:
            assert self.may_answer.acquire(timeout=LONG)
            self.now += 1
            return super().__contains__(key)

    store = Slow()
    cache, prefix = make(store=store)
    tokens = list(range(16 * 100))
    serve(prefix, cache, tokens)
    assert prefix.flush(LONG)
    _, other = make(store=store, timeout=36)
    for part in (reader, worker):
        monkeypatch.setattr(part, "time", types.SimpleNamespace(monotonic=lambda: store.now))
    assert other._client is not None
    wait_for = for_caller(other._client, lambda: not store.may_answer._value)
    monkeypatch.setattr(other._client._shared.reader.worker.changed, "wait_for", wait_for)
    for _ in range(4):
        store.may_answer.release(40)
        assert 0 < other.lookup(tokens, store=True) < 16 * 100
    assert other.stats.store is not None
    assert other.stats.store.reading
    store.may_answer.release(1000)


def test_a_store_without_contains_and_a_timeout_without_end() -> None:
    class Plain:
        def __init__(self) -> None:
            self.values: dict[str, bytes] = {}

        def __getitem__(self, key: str) -> bytes:
            return self.values[key]

        def __setitem__(self, key: str, value: bytes) -> None:
            self.values[key] = value

        def __delitem__(self, key: str) -> None:
            del self.values[key]

    store: Any = Plain()
    cache, prefix = make(store=store)
    serve(prefix, cache, PROMPT)
    assert prefix.flush(LONG)
    _, other = make(store=store, timeout=math.inf)
    assert other.lookup(PROMPT, store=True) == 32


def test_events_of_a_store_that_are_lost_are_told() -> None:
    cache, prefix = make(store={}, max_events=3)
    tokens = list(range(16 * 10))
    serve(prefix, cache, tokens)
    assert prefix.flush(LONG)
    events = prefix.take_events()
    assert [e.name for e in events if e.kind == "written"] == prefix.names(tokens)[-3:]
    assert events[0].kind == "lost"
    assert [e.kind for e in events[1:]] == ["kept"] * 3 + ["written"] * 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork()")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_goes_on_whatever_the_parent_was_writing() -> None:
    cache, prefix = make(store={})
    serve(prefix, cache, PROMPT)
    with prefix._watch._lock:  # type: ignore[union-attr]
        child = os.fork()
        if not child:
            done = threading.Thread(target=prefix.flush, args=(1,), daemon=True)
            done.start()
            done.join(LONG)
            os._exit(done.is_alive())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

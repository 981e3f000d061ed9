"""The client: whatever a store does, callers lose time at most, and not much of it."""

import gc
import logging
import math
import os
import subprocess
import sys
import threading
import time
import types
import weakref

import hypothesis
import pytest
from hypothesis import strategies as st
from support.faulty_stores import Blocking, Bulk, Faulty, for_caller, raising, sleeping
from support.servers import until

from kvcache.stores import DirectoryStore, calls, reader, worker, writer
from kvcache.stores.client import StoreClient

LONG = 30  # seconds within which anything that should happen has happened

pytestmark = pytest.mark.usefixtures("short_pauses")


def put(client, key, payload=b"rows"):
    return client.put(key, lambda stored: payload)


def fill(client, keys):
    assert all(put(client, key) for key in keys)
    assert client.flush(LONG)


@pytest.mark.parametrize("kind", [dict, Faulty, Bulk])
def test_values_come_back(make, kind):
    store = kind()
    client = make(store)
    fill(client, "abc")
    assert client.get_many(["a", "x", "c", "a"], LONG) == {"a": b"rows", "c": b"rows"}
    stats = client.stats
    assert (stats.hits, stats.misses, stats.written) == (2, 1, 3)
    assert (stats.bytes_read, stats.bytes_written) == (8, 12)
    assert (stats.errors, stats.timeouts, stats.corrupt, stats.dropped) == (0, 0, 0, 0)
    assert stats.reading
    assert stats.writing
    assert client.delete("a")
    assert client.flush(LONG)
    assert set(store) == {"b", "c"}


def put_behind(client, keys, payload=b"rows"):
    """Put values that wait while the store is busy with another one."""
    blocked = threading.Event()
    client.put("first", lambda stored: blocked.wait(LONG) and payload)
    assert all(put(client, key, payload) for key in keys)
    blocked.set()
    assert client.flush(LONG)


def test_many_keys_are_few_calls(make):
    store = Bulk()
    client = make(store)
    keys = [f"key {i}" for i in range(100)]
    put_behind(client, keys)
    assert len(store.calls) <= 2
    assert client.stats.written == 101
    client.get_many(keys[:1], LONG)  # values are known to be small from here on
    store.calls.clear()
    assert len(client.get_many(keys, LONG)) == 100
    assert [verb for verb, _ in store.calls] == ["get_many"]


def test_large_values_are_several_calls(make, monkeypatch):
    """The values of one call are in memory at once."""
    monkeypatch.setattr(calls, "CALL_BYTES", 1000)
    store = Bulk()
    client = make(store)
    keys = [f"key {i}" for i in range(6)]
    put_behind(client, keys, b"x" * 400)
    assert [len(keys) for verb, keys in store.calls if verb == "set_many"] == [1, 2, 2, 2]
    client.get_many(keys[:1], LONG)
    store.calls.clear()
    assert len(client.get_many(keys[:4], LONG)) == 4
    assert [len(keys) for _, keys in store.calls] == [2, 2]


@pytest.mark.parametrize("kind", [Faulty, Bulk])
def test_reading_may_stop_at_a_miss(make, kind, monkeypatch):
    monkeypatch.setattr(calls, "MAX_CALL_KEYS", 2)
    store = kind(items=dict.fromkeys("abdef", b"rows"))
    client = make(store)
    assert set(client.get_many("abcdef", LONG)) == set("abdef")
    store.calls.clear()
    found = client.get_many("abcdef", LONG, stop_at_miss=True)
    assert {"a", "b"} <= set(found) <= {"a", "b", "d"}
    assert [keys for _, keys in store.calls] == (["a", "b", "c"] if kind is Faulty else [["a", "b"], ["c", "d"]])


def test_a_store_that_can_say_hands_out_no_more_than_a_value_may_have(make):
    class Sized(Bulk):
        def read_many(self, keys, most):
            self._call("read_many", list(keys))
            return {key: self.items_[key][:most] for key in keys if key in self.items_}

    store = Sized(items={"a": 1000 * b"x", "b": 2000 * b"x", "c": bytes(10**6)})
    client = make(store, most_bytes=1000)
    assert set(client.get_many("abcd", LONG)) == {"a"}
    assert [verb for verb, _ in store.calls if "get" in verb or "read" in verb] == ["read_many"]
    assert client.flush(LONG)
    assert set(store) == {"a"}
    assert client.stats.corrupt == 2


# ---- time


def test_a_slow_store_takes_no_longer_than_allowed(make):
    store = Blocking(items={"a": b"rows"})
    client = make(store)
    assert client.get_many("a", timeout=0.05) == {}
    for i in range(100):
        put(client, f"key {i}")
    assert not store.num_ended, "something waited for the store"
    assert client.stats.timeouts == 1
    store.released.set()


def test_what_has_come_in_time_is_taken(make, monkeypatch):
    store = Blocking()
    store.items_ |= dict.fromkeys("ab", b"rows")
    store.fault = lambda verb, key: store.block(verb, key) if key == "b" else None
    client = make(store)
    with monkeypatch.context() as patch:
        patch.setattr(client._shared.reader.worker.changed, "wait_for", for_caller(client, store.entered.is_set))
        found = client.get_many("ab", timeout=0.01)
    assert found == {"a": b"rows"}
    store.released.set()
    until(lambda: client._shared.reader.worker.is_idle)
    assert found == {"a": b"rows"}, "a late answer changed what was handed out"
    assert (client.stats.hits, client.stats.misses, client.stats.timeouts) == (1, 1, 1)


def test_what_nobody_waits_for_is_not_read(make):
    store = Blocking()
    client = make(store)
    until(lambda: client.get_many("abc", timeout=0.02) or store.calls)
    client.get_many("abc", timeout=0.02)
    store.released.set()
    until(lambda: client._shared.reader.worker.is_idle)
    assert store.calls == [("get", "a")]


@pytest.mark.parametrize("timeout", [0, -1])
def test_no_time_asks_nothing(make, timeout):
    store = Faulty()
    assert make(store).get_many("a", timeout) == {}
    assert store.calls == []


def test_any_time(make):
    assert make({"a": b"rows"}).get_many("a", math.inf) == {"a": b"rows"}


def test_an_interrupted_caller_waits_no_more(make, monkeypatch):
    store = Blocking()
    client = make(store)

    caller, wait_for = threading.current_thread(), client._shared.reader.worker.changed.wait_for

    def interrupt(condition, timeout):
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        return wait_for(condition, timeout)

    monkeypatch.setattr(client._shared.reader.worker.changed, "wait_for", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.get_many("abc", LONG)
    monkeypatch.undo()
    until(lambda: client._shared.reader.worker.is_idle)
    assert store.calls == []


# ---- failures


def test_a_caller_in_a_hurry_blames_nobody(make):
    store = Blocking()
    client = make(store)
    for _ in range(5):
        assert client.get_many("a", timeout=0.01, patience=LONG) == {}
    assert client.stats.timeouts == 5
    assert client.stats.reading
    store.released.set()
    until(lambda: client._shared.reader.worker.is_idle)
    assert client.stats.reading


def test_a_store_that_hangs_is_left_alone_by_callers_in_a_hurry(make):
    client = make(Blocking())
    until(lambda: client.get_many("a", timeout=0.01, patience=0.2) or not client.stats.reading)


@pytest.mark.parametrize("error", [OSError("gone"), KeyboardInterrupt(), SystemExit(3), MemoryError(), ValueError()])
@pytest.mark.parametrize("kind", [Faulty, Bulk])
def test_a_store_that_raises(make, kind, error):
    store = kind(raising(error), {"a": b"rows"})
    client = make(store)
    assert client.get_many("a", LONG) == {}
    assert put(client, "b")
    assert client.flush(LONG)
    assert client.stats.errors == 2
    assert client.stats.dropped == 1
    store.fault = lambda verb, key: None
    assert client.get_many("a", LONG) == {"a": b"rows"}


@pytest.mark.parametrize("answer", [None, 5, "text", [], {"a": None}, {"a": 5}, {"a": "text"}, {"a": b""}, {"b": b"x"}])
def test_a_store_that_answers_nonsense(make, answer):
    store = Bulk()
    store.get_many = lambda keys: answer
    client = make(store)
    assert client.get_many("a", LONG) == {}
    assert client.stats.misses == 1


@pytest.mark.parametrize("value", [b"", "rows", 10**30])
def test_what_is_no_value_is_a_miss_and_deleted(make, value):
    store = {"a": value, "b": b"rows"}
    client = make(store)
    assert client.get_many("ab", LONG) == {"b": b"rows"}
    assert client.flush(LONG)
    assert set(store) == {"b"}
    assert client.stats.corrupt == 1
    put(client, "a")
    assert client.flush(LONG)
    assert client.get_many("a", LONG) == {"a": b"rows"}


def test_what_a_caller_refuses_is_a_miss_and_deleted(make, caplog):
    store = {"a": b"wrong", "b": b"rows"}
    client = make(store)
    assert client.get_many("ab", LONG) == store
    client.refuse("a", "it is wrong")
    assert client.flush(LONG)
    assert set(store) == {"b"}
    assert (client.stats.hits, client.stats.misses, client.stats.corrupt) == (1, 1, 1)
    assert "what it has for 'a' was refused and deleted: it is wrong" in caplog.text


def test_a_value_is_joined_with_the_one_that_is_there(make):
    store = {"a": b"old", "b": b"old", "c": 5}
    client = make(store)
    seen = []
    for key in "abcd":
        client.put(key, lambda stored, key=key: seen.append(stored) or (b"" if key == "b" else b"new"), joins=True)
    assert client.flush(LONG)
    assert seen == [b"old", b"old", None, None]
    assert store == {"a": b"new", "b": b"old", "c": b"new", "d": b"new"}
    assert (client.stats.written, client.stats.dropped) == (3, 0)


def test_a_store_that_fails_is_left_alone_and_asked_again(make, monkeypatch):
    monkeypatch.setattr(worker, "FIRST_PAUSE", math.inf)
    store = Faulty(raising(OSError("gone")), {"a": b"rows"})
    client = make(store)
    for _ in range(worker.MAX_FAILURES):
        client.get_many("a", LONG)
    assert not client.stats.reading
    calls = len(store.calls)
    for _ in range(50):
        client.get_many("a", LONG)
    assert len(store.calls) == calls
    client._shared.reader.worker.breaker.until = 0.0  # the pause is over
    store.fault = lambda verb, key: None
    until(lambda: client.get_many("a", LONG))
    assert client.stats.reading


def test_pauses_double_up_to_a_limit(make, monkeypatch):
    now = 0.0
    monkeypatch.setattr(worker.time, "monotonic", lambda: now)
    breaker = worker.Breaker()
    pauses = []
    for _ in range(worker.MAX_FAILURES - 1):
        assert not breaker.failed()
        assert not breaker.is_open
    for _ in range(5):
        breaker.failed()
        assert breaker.is_open
        pauses.append(breaker.until - now)
        now = breaker.until
        assert breaker.may_probe
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.2, 0.2])
    breaker.succeeded()
    assert not breaker.is_open
    assert breaker.pause == 0.05


def test_a_store_that_hangs_is_left_alone_and_nobody_waits_for_it(make):
    store = Blocking(items={"a": b"rows"})
    client = make(store)
    until(lambda: client.get_many("a", timeout=0.02) or store.calls)
    for _ in range(worker.MAX_FAILURES):
        client.get_many("a", timeout=0.02)
    assert not client.stats.reading
    num_timeouts = client.stats.timeouts
    time.sleep(0.1)  # a probe would be due, but the store has not even answered what it was asked
    for _ in range(1000):
        assert client.get_many("a", timeout=LONG) == {}
    assert not store.num_ended, "somebody waited"
    assert client.stats.timeouts == num_timeouts, "somebody waited"
    assert len(store.calls) == 1
    queue = client._shared.reader.worker.queue
    assert all(read.is_done for read in queue), "a probe would be late by the time it is made"
    store.released.set()
    until(lambda: client.get_many("a", timeout=LONG))


def test_time_outs_of_a_store_that_is_busy_for_others_are_no_failures(make, monkeypatch):
    now, patience, is_over = 0.0, 8.0, False
    for module in (reader, worker):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(reader, "NUM_THREADS", 1)
    goes_on = threading.Semaphore(0)
    store = Faulty(lambda verb, key: goes_on.acquire(timeout=LONG), {"a": b"rows"})
    client = make(store)
    shared = client._shared.reader
    changed, wait_for = shared.worker.changed, shared.worker.changed.wait_for

    def wait(condition, timeout):
        if timeout != patience:  # a thread of the store's
            return wait_for(condition, timeout)
        assert wait_for(lambda: is_over, LONG)
        return condition()

    monkeypatch.setattr(changed, "wait_for", wait)
    callers = [threading.Thread(target=client.get_many, args=(key, patience)) for key in "axyz"]
    for caller in callers:
        caller.start()
        until(lambda: store.calls)
    until(lambda: len(shared.worker.queue) == worker.MAX_FAILURES)
    now = patience / 2
    goes_on.release()
    until(lambda: shared.answers)
    now = patience * 2
    with shared.lock:
        is_over = True
        changed.notify_all()
    for caller in callers:
        caller.join(LONG)
    assert client.stats.timeouts == worker.MAX_FAILURES
    assert client.stats.reading
    goes_on.release(worker.MAX_FAILURES)


def test_a_full_store_still_reads(make, monkeypatch):
    monkeypatch.setattr(worker, "FIRST_PAUSE", math.inf)
    store = Faulty(raising(OSError("full"), "set"), {"a": b"rows"})
    client = make(store)
    for i in range(worker.MAX_FAILURES):
        put(client, str(i))
        assert client.flush(LONG)
    assert not client.stats.writing
    assert not put(client, "b")
    assert client.get_many("a", LONG) == {"a": b"rows"}
    assert client.stats.reading
    store.fault = lambda verb, key: None
    client._shared.writer.worker.breaker.until = 0.0  # the pause is over
    assert put(client, "b")
    assert client.flush(LONG)
    assert client.stats.writing
    assert "b" in store.items_


def turn_off_writing(client, store):
    store.fault = raising(OSError("full"), "set")
    while client.stats.writing:
        put(client, "x")
        assert client.flush(LONG)


def test_a_store_that_is_left_alone_is_asked_with_one_value(make):
    store = Blocking(("set",))
    client = make(store)
    turn_off_writing(client, store)
    store.fault = store.block
    until(lambda: put(client, "a"))
    store.entered.wait(LONG)
    time.sleep(0.3)  # longer than any pause
    assert not put(client, "b")
    store.released.set()
    until(lambda: put(client, "c"))
    assert client.flush(LONG)
    assert set(store) == {"a", "c"}


def test_a_value_that_is_gone_says_nothing_of_the_store(make):
    store = Faulty()
    client = make(store)
    turn_off_writing(client, store)
    until(lambda: client.put("a", lambda stored: None))
    assert client.flush(LONG)
    assert not client.stats.writing


def test_what_waits_is_dropped_when_the_store_fails(make):
    """And not tried one after the other, which may take a time-out each."""
    store = Blocking(("set",))
    client = make(store)
    for i in range(50):
        put(client, str(i))
    store.entered.wait(LONG)
    store.fault = raising(OSError("full"))
    store.released.set()
    assert client.flush(LONG)
    assert len(store.calls) <= 1 + worker.MAX_FAILURES
    assert client.stats.dropped == 49


def test_one_warning(make, caplog):
    """It is short: messages of clients may quote the value, which is as confidential as a prompt."""
    store = Faulty(raising(OSError("no route\n\0" + 10**6 * "x")), {"a": b"rows"})
    client = make(store)
    for _ in range(5):
        client.get_many("a", LONG)
        put(client, "a")
        client.flush(LONG)
    (record,) = (record for record in caplog.records if record.name == "kvcache")
    assert record.levelno == logging.WARNING
    assert "the store Faulty fails: OSError: 'no route" in record.getMessage()
    assert len(record.getMessage()) < 500
    assert record.getMessage().isprintable()


def test_one_warning_of_many_threads(make, caplog):
    """Without a GIL several threads look at once whether there has been one."""
    for _ in range(20):
        client, barrier = make({}), threading.Barrier(8)

        def warn(client=client, barrier=barrier):
            barrier.wait()
            client._shared.warn("it is full")

        threads = [threading.Thread(target=warn) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(caplog.records) == 1
        caplog.clear()


def test_a_warning_names_the_address(make, caplog, tmp_path):
    store = DirectoryStore(tmp_path / "folder")
    client = make(store)
    store.path.rename(tmp_path / "other")
    client.get_many([64 * "a"], LONG)
    assert f"the store DirectoryStore('{store.path}', max_bytes=None) fails: OSError" in caplog.text


# ---- writing


def test_a_full_queue_drops(make, monkeypatch):
    monkeypatch.setattr(writer, "MOST_WRITES", 10)
    store = Blocking()
    client = make(store)
    assert put(client, "first")
    assert store.entered.wait(LONG)
    assert [put(client, str(i)) for i in range(1000)] == [True] * 10 + [False] * 990
    assert not client.delete("first")
    assert client.stats.dropped == 991  # values, and the deletion
    assert not client.flush(0.01)
    store.released.set()
    assert client.flush(LONG)
    assert put(client, "later")
    assert client.flush(LONG)
    assert len(store.items_) == 12


def test_a_mistake_in_making_a_value_is_not_the_store_s(make, caplog):
    store = Faulty()
    client = make(store)
    for _ in range(5):
        client.put("a", lambda stored: 1 / 0)
    assert put(client, "c")
    assert client.flush(LONG)
    assert set(store) == {"c"}
    assert (client.stats.errors, client.stats.dropped) == (0, 5)
    assert "ZeroDivisionError" in caplog.text


def test_closing_writes_what_is_queued(make):
    store = Faulty(sleeping(0.01))
    client = make(store)
    for i in range(10):
        put(client, str(i))
    assert client.close(LONG)
    assert len(store.items_) == 10
    assert not put(client, "late")
    assert client.get_many("0", LONG) == {}
    assert client.close(LONG)


def test_closing_drops_what_is_not_written_in_time(make):
    store = Blocking()
    client = make(store)
    for i in range(5):
        assert put(client, str(i))
    assert store.entered.wait(LONG)
    assert not client.close(0.01)
    assert client.stats.dropped == 4
    store.released.set()
    assert client.flush(LONG)
    assert set(store.items_) == {"0"}


def test_a_guard_without_work_has_no_threads_and_is_collected(monkeypatch):
    monkeypatch.setattr(worker, "LINGER", 0.01)

    def use_twice():
        client = StoreClient({})
        for key in "ab":
            fill(client, key)
            client.get_many(key, LONG)
            until(lambda: not client._shared.reader.worker.threads | client._shared.writer.worker.threads)
        return weakref.ref(client)

    gone = use_twice()
    until(lambda: gc.collect() >= 0 and gone() is None)  # a thread may be on its last line still


FAULTS = st.sampled_from(["none", "slow", "raise", "nothing", "text"])


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(["get", "put", "delete"]), st.integers(0, 5), FAULTS), max_size=30)
)
def test_whatever_happens_only_what_was_put_comes_back(steps):
    store, fault = Bulk(), "none"

    def misbehave(verb, key):
        if fault == "slow":
            time.sleep(0.002)
        if fault == "raise":
            raise ConnectionError
        for name in store.items_ if fault in ("text", "nothing") else ():
            store.items_[name] = {"text": "x", "nothing": None}[fault]

    store.fault = misbehave
    client = StoreClient(store)
    for verb, number, fault in steps:
        key = f"key {number}"
        if verb == "get":
            keys = [key, "key 0"]
            found = client.get_many(keys, timeout=0.001 if fault == "slow" else LONG)
            assert all(value == name.encode() for name, value in found.items())
            assert found.keys() <= {*keys}
        elif verb == "put":
            put(client, key, key.encode())
        else:
            client.delete(key)
    assert client.close(LONG)


# ---- processes


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_begins_anew(make):
    """A forked child has no threads, and its parent's locks may be held for ever."""
    store = Blocking(("set",), {"a": b"rows"})
    client = make(store)
    put(client, "b")
    put(client, "c")
    store.entered.wait(LONG)
    with client._shared.lock:  # as another thread might hold it at the time
        child = os.fork()
        if child == 0:
            store.fault = lambda verb, key: None
            ok = client.get_many("a", LONG) == {"a": b"rows"} and put(client, "d") and client.flush(LONG)
            os._exit(0 if ok and {*store.items_} == {"a", "d"} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.released.set()
    assert client.flush(LONG)
    assert {*store.items_} == {"a", "b", "c"}


@pytest.mark.parametrize("answer", [RuntimeError("thread already started"), KeyError("a thread"), None])
def test_a_handler_raises_while_a_thread_starts(monkeypatch, answer):
    """What a signal's handler raises is raised, though Python's own code may answer it by another error."""
    raised = KeyError("of the handler")

    def start(thread):
        try:
            raise raised
        except KeyError:
            if answer is None:
                raise
            raise answer  # noqa: B904 - as threading does, whose own step fails then

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyError, match="of the handler"):
        worker.Worker("test", threading.RLock(), lambda: None).add("a job")


def test_a_handler_raises_what_threading_raises(monkeypatch):
    """A RuntimeError is a handler's, unless the interpreter raised it because it can start no thread."""

    def start(thread):
        raise RuntimeError("of the handler")

    one = worker.Worker("test", threading.RLock(), lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="of the handler"):
            one.add("a job")
    usual = threading.stack_size(1 << 50)  # more than there are addresses
    try:
        assert not one.add("a job")
    finally:
        threading.stack_size(usual)
    assert not one.queue
    assert not one.threads


@pytest.mark.parametrize(
    ("store", "result"),
    [("Faulty(sleeping(0.05))", "3"), ("Blocking()", "0"), ("Faulty(raising(OSError('gone')))", "0")],
    ids=["slow", "blocks", "raises"],
)
def test_the_interpreter_exits(store, result):
    """At exit, queued values are written if the store takes them soon; a store that hangs delays nothing for long."""
    code = f"""
import atexit, sys
sys.path[:] = {sys.path!r}
from support.faulty_stores import *
store = {store}
atexit.register(lambda: print(len(store.items_)))  # runs after what modules register from here on
from kvcache.stores import client as module
if not isinstance(store, Blocking):
    module.EXIT_TIMEOUT = 30.0  # however slowly its threads get to run
client = module.StoreClient(store)
for i in range(3):
    client.put(str(i), lambda stored: b"rows")
client.get_many("x", 0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.split() == [result]
    assert "Traceback" not in done.stderr

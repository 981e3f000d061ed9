"""A handler of a signal that raises, wherever Python may run it: what is found is right, and nothing is kept."""

import gc
import itertools
import threading

import pytest
from support.interrupts import in_a_thread, interrupt, interrupt_everywhere
from support.prefixes import feed, make_cache, rows_of, serve

import kvcache
from kvcache.stores import DirectoryStore
from kvcache.stores.client import StoreClient
from kvcache.stores.worker import Worker
from kvcache.threads import Condition

PROMPT, OTHER, THIRD = [*range(50)], [*range(20), *range(70, 110)], [*range(300, 340)]


class Scene:
    """Blocks of one prompt, and a sequence in use: 40 tokens of another one, of which 20 are the first one's."""

    def __init__(self, store=None):
        self.cache = make_cache(rope=False)
        self.prefix = kvcache.PrefixCache(self.cache, fingerprint="a", store=store)
        serve(self.prefix, self.cache, PROMPT)
        feed(self.cache, 900, THIRD, 0, 40)  # not the prefix cache's
        self.seq_id, matched = self.prefix.acquire(OTHER)
        feed(self.cache, self.seq_id, OTHER, matched, 40)

    def check(self, held):
        """Go on with the sequence, of which the user believes that it holds these tokens; then serve others."""
        cache, prefix = self.cache, self.prefix
        cache.validate()
        tokens = [*held, *range(500, 530)]
        if begin := cache.next_position(self.seq_id):
            feed(cache, self.seq_id, tokens, begin, begin + 20)
            prefix.release(self.seq_id, tokens[: begin + 20])
        for _ in range(2):
            for prompt in (PROMPT, OTHER, THIRD, tokens, [*OTHER, *tokens[40:]], [*THIRD, *tokens[40:]]):
                serve(prefix, cache, prompt)  # which compares all rows that it found
        assert serve(prefix, cache, PROMPT) == len(PROMPT) - 1
        prefix.close(60)
        for seq_id in cache.sequences:
            cache.clear(seq_id)
        stats = cache.stats()
        assert (stats["live_slots"], stats["retained"], prefix.stats.blocks) == (0, 0, 0)
        cache.validate()
        cache.close()


def block(value):
    return kvcache._core.np.full((1, 10, 2), value, "f")


def keep_some(scene):
    with scene.cache.batch(positions=range(40, 52), seq_ids=[scene.seq_id] * 12) as batch:
        for layer in range(2):
            rows = rows_of(OTHER, 40, 52, layer)
            batch.put(layer, rows, rows)
        batch.commit(keep=range(9))


REMOVED, SHIFTED = [*OTHER[:10], *OTHER[25:40]], [*OTHER[:30], *[0] * 5, *OTHER[30:40]]
CALLS = {  # what is called, and what the sequence then holds, by its length; else what it held
    "acquire": (lambda s: s.prefix.acquire([*PROMPT, 1, 2]), {}),
    "release": (lambda s: s.prefix.release(s.seq_id, OTHER[:40]), {}),
    "a batch": (lambda s: feed(s.cache, s.seq_id, OTHER, 40, 60), {}),
    "a batch that keeps some": (keep_some, {}),
    "pin": (lambda s: (s.prefix.pin(PROMPT), s.prefix.unpin(PROMPT)), {}),
    "evict": (lambda s: s.prefix.evict(20), {}),
    "clear": (lambda s: s.prefix.clear(), {}),
    "note_inexact": (lambda s: s.prefix.note_inexact(s.seq_id, 20), {}),
    "stats": (lambda s: s.prefix.stats, {}),
    "make": (lambda s: kvcache.PrefixCache(s.cache, fingerprint="b"), {}),
    "KVCache.remove": (lambda s: s.cache.remove(10, 25, seq_id=s.seq_id), {25: REMOVED}),
    "KVCache.shift": (lambda s: s.cache.shift(30, None, 5, seq_id=s.seq_id), {45: SHIFTED}),
    "KVCache.divide": (lambda s: s.cache.divide(0, None, 2, seq_id=s.seq_id), {20: OTHER[:40:2]}),
    "KVCache.inject": (lambda s: s.cache.inject(0, 22, block(1), block(2), seq_id=s.seq_id), {}),
    "KVCache.truncate": (lambda s: s.cache.truncate(30, seq_id=s.seq_id), {}),
    "KVCache.clear": (lambda s: s.cache.clear(s.seq_id), {}),
    "KVCache.keep": (lambda s: s.cache.keep(900), {}),
    "KVCache.fork": (lambda s: (s.cache.truncate(39, seq_id=900), s.cache.fork(900, s.seq_id)), {39: THIRD}),
}


# A finalizer that is interrupted cannot raise.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def step(pytestconfig):
    """Return how many points there are to each point that is tried."""
    return 1 if pytestconfig.option.full else 3 if pytestconfig.option.slow else 7


@pytest.mark.parametrize("name", CALLS)
def test_what_is_found_is_right(name, step):
    call, holds = CALLS[name]

    def make():
        scene = Scene()
        return scene, lambda: call(scene)

    def check(scene):
        in_a_thread(lambda: scene.check(holds.get(scene.cache.next_position(scene.seq_id), OTHER)))

    assert interrupt_everywhere(make, check, step)


STORED = {
    "acquire": lambda s: s.prefix.acquire([*PROMPT, 1, 2]),
    "release": lambda s: s.prefix.release(s.seq_id, OTHER[:40]),
    "flush": lambda s: s.prefix.flush(10),
    "close": lambda s: s.prefix.close(10),
}


@pytest.mark.parametrize("name", STORED)
def test_what_a_store_has_is_right(name, step):
    items = {}
    Scene(items).prefix.close(60)

    def make():
        scene = Scene(dict(items))
        if name == "acquire":
            scene.prefix.clear()
        return scene, lambda: STORED[name](scene)

    assert interrupt_everywhere(make, lambda scene: in_a_thread(lambda: scene.check(OTHER)), step)


def test_what_is_forgotten_leaves_the_store_once_forget_is_called_again(step):
    """The prompt's last block is of other prompts, too, so that only the call that drops them learns their names."""
    private = [*range(24)]
    alike = [[*private, *range(100 + 20 * i, 120 + 20 * i)] for i in range(3)]

    def make():
        cache, items = make_cache(rope=False), {}
        prefix = kvcache.PrefixCache(cache, fingerprint="a", store=items)
        for prompt in (*alike, THIRD):
            serve(prefix, cache, prompt)
        assert prefix.flush(60)
        return (cache, prefix, items), lambda: prefix.forget(private)

    def check(made):
        def look():
            cache, prefix, items = made
            prefix.forget(private)
            assert prefix.flush(60)
            assert set(items) == set(prefix.names(THIRD))
            assert max(prefix.lookup(prompt, store=True) for prompt in alike) == 0
            cache.close()

        in_a_thread(look)

    assert interrupt_everywhere(make, check, step)


def test_a_wait_for_a_store_is_interrupted_as_anything_is():
    items, places = {}, (threading.Condition.wait, threading.Condition.wait_for)
    Scene(items).prefix.close(60)

    def make():
        scene = Scene(dict(items))
        scene.prefix.clear()
        return scene, lambda: (scene.prefix.acquire([*PROMPT, 1, 2]), scene.prefix.flush(10))

    def check(scene):
        in_a_thread(lambda: scene.check(OTHER))

    assert interrupt_everywhere(make, check, also=places)


def test_a_wait_that_is_interrupted_ends_with_its_lock_held():
    def make():
        lock = threading.RLock()
        changed = Condition(lock)

        def wait():
            with lock:  # which raises another error if it is not held in the end
                changed.wait_for(lambda: False, 0.001)

        return lock, wait

    def check(lock):
        in_a_thread(lambda: lock.acquire(timeout=30) or pytest.fail("the lock is held"))

    assert interrupt_everywhere(make, check, also=(threading.Condition.wait, threading.Condition.wait_for))


def test_flush_ends_behind_a_write_that_was_interrupted():
    def make():
        client = StoreClient({})
        return client, lambda: client.put("key", lambda stored: b"rows")

    def check(client):
        assert client.put("other", lambda stored: b"rows")
        assert client.flush(10)

    assert interrupt_everywhere(make, check)


@pytest.fixture
def no_garbage():
    """No garbage of other tests is collected meanwhile: its finalizers would swallow an interrupt."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_an_interrupt_while_a_thread_starts_is_raised(no_garbage):
    for number in itertools.count(1):
        lock = threading.RLock()
        worker = Worker("test", lock, lambda: None)
        worker.work = worker.queue.clear  # otherwise its thread would go on for ever

        def add(worker=worker, lock=lock):
            with lock:
                worker.add(1)

        met, raised = interrupt(number, add, also=(threading.Condition.wait,))
        if not met:
            break
        assert type(raised) is KeyboardInterrupt, (number, raised)
    assert number > 5


A, B = 64 * "a", 64 * "b"
FOLDER = {
    "set": lambda store: store.__setitem__(A, b"new"),
    "set another": lambda store: store.__setitem__(B, b"new"),
    "get": lambda store: store[A],
    "delete": lambda store: store.__delitem__(A),
    "list": lambda store: (len(store), list(store)),
    "many": lambda store: [store.get(key) for key in (A, "x")],
}


@pytest.mark.parametrize("name", FOLDER)
def test_a_folder_has_the_old_value_or_the_new_one(tmp_path, name, step):
    def make():
        store = DirectoryStore(tmp_path, max_bytes=1 << 20)
        store[A] = b"old"
        store.pop(B, None)
        return store, lambda: FOLDER[name](store)

    def check(store):
        def look():
            assert store.get(A) in {b"old", b"new" if name == "set" else None if name == "delete" else b"old"}
            assert store.get(B) in (b"new", None)
            store[A] = b"after"
            assert DirectoryStore(tmp_path)[A] == b"after"
            assert set(store) <= {A, B}

        in_a_thread(look)

    assert interrupt_everywhere(make, check, step)

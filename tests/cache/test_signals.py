"""A signal's handler that raises, wherever Python may run it: all is as it was, or done, and nothing is kept."""

import pytest
from support import intruder
from support.interrupts import in_a_thread, interrupt_everywhere

import kvcache

COUNTERS = ("aborted", "batches")  # of a batch that nobody was handed
ROWS = intruder.rows(3)


# A finalizer that is interrupted cannot raise.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def step(pytestconfig):
    """Return how many points there are to each point that is tried."""
    return 1 if pytestconfig.option.slow or pytestconfig.option.full else 6


def world(cache):
    """All that can be seen of a cache."""
    if cache._core.closed:
        return None
    rows = {
        (seq_id, layer): [cache.positions(seq_id=seq_id, layer=layer).tobytes()]
        + [a.tobytes() for a in cache.gather(layer, seq_id=seq_id)]
        for seq_id in cache.sequences
        for layer in range(2)
    }
    return rows, {name: value for name, value in cache.stats().items() if name not in COUNTERS}


def makes(cls, name, given):
    """Return a function that makes a scene, and the call of a method."""

    def make():
        scene = intruder.Scene(cls is kvcache.Batch)
        method = getattr(scene.cache if cls is kvcache.KVCache else scene.batch, name)
        return scene, lambda: method(*given[0], **given[1])

    return make


METHODS = {
    f"{cls.__name__}.{name}": (cls, name, given)
    for cls, name, given in intruder.cases()
    if callable(getattr(cls, name))
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_is_done_or_not(method, step):
    make = makes(*METHODS[method])
    scene, call = make()
    worlds = [world(scene.cache)]
    call()
    worlds.append(world(scene.cache))
    scene.end()

    def check(scene):
        assert world(scene.cache) in worlds
        if worlds[1] is None:
            return
        scene.cache.validate()
        if scene.batch is not None:
            scene.batch.abort()
        scene.batch = None
        in_a_thread(lambda: scene.cache.batch(positions=[0], seq_ids=[5]).abort())
        scene.cache.close()

    assert interrupt_everywhere(make, check, step if method not in ("KVCache.restore", "KVCache.save") else 9 * step)


@pytest.mark.parametrize("ends", ["commits", "aborts"])
def test_a_with_ends_its_batch(ends):
    """Although its user still has it."""

    def make():
        scene = intruder.Scene(True)
        scene.is_inside = False

        def call():
            try:
                with scene.batch:
                    scene.is_inside = True
                    scene.batch.put(1, ROWS, ROWS)
                    if ends == "aborts":
                        raise StopIteration
            except StopIteration:
                pass

        return scene, call

    def check(scene):
        if scene.is_inside:
            assert repr(scene.batch) == "<Batch: 3 tokens, ended>"
        scene.cache.validate()
        scene.end()

    assert interrupt_everywhere(make, check)


def test_a_batch_that_its_user_never_got_is_ended():
    """While the error is handled, as by a ``finally`` that begins another batch."""

    def make():
        scene = intruder.Scene(False)
        scene.is_busy = False

        def call():
            try:
                with scene.cache.batch(positions=[0], seq_ids=[5]):
                    pass
            finally:
                try:
                    scene.cache.batch(positions=[0], seq_ids=[6]).abort()
                except kvcache.CacheBusyError:
                    scene.is_busy = True

        return scene, call

    def check(scene):
        assert not scene.is_busy
        scene.end()

    assert interrupt_everywhere(make, check)

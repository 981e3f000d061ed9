"""The benchmarks. Every implementation is compared with a float64 softmax before it is timed."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcache.benchmarks.conftest import Peer, Subject
    from kvcache.benchmarks.known import Floats, Known

REMOVED = 10  # tokens that a call removes

# Do not let warnings of other packages fail a benchmark, whatever the configuration of the folder. Ignore the warning
# about an unused fixture: a case may be refused before it is timed.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"),
]


def step(cache: Any, rows: list[tuple[Floats, Floats]]) -> None:
    """Store one token in all layers."""
    cache.begin(1)
    for layer, (k, v) in enumerate(rows):
        cache.put(layer, k, v)
    cache.commit()


def test_append(subject: Subject) -> None:
    """Time storing a token in all layers, with begin and commit."""
    known = subject.filled()
    known.check()
    subject.time("append", lambda: (known.cache, known.next_rows()), step)


def test_window_step(subject: Subject) -> None:
    """Time storing a token that pushes another out of a window as long as the context."""
    window = subject.context
    known = subject.filled(2 * window, window=window, max_seq_len=3 * window + 1000)
    known.check()
    subject.time("window step", lambda: (known.cache, known.next_rows()), step)


def test_fork(subject: Subject) -> None:
    """Time forking a sequence."""
    subject.needs("fork")
    known = subject.filled(max_sequences=2)
    known.fork()
    for seq_id in (0, 1, 0):  # append to both
        known.check(seq_id)
    del known
    subject.time_edit("fork", lambda _: None, lambda cache: cache.fork(0, 1), max_sequences=2)


def test_remove(subject: Subject) -> None:
    """Time removing ten tokens near the front; all later ones move down."""
    subject.needs("remove")
    known = subject.filled()
    begin = min(5, subject.context // 2)
    known.remove(begin, begin + REMOVED)
    known.check()
    del known
    subject.time_edit("remove", lambda _: None, lambda cache: cache.remove(begin, begin + REMOVED))


def test_compact(subject: Subject) -> None:
    """Time compacting a cache whose every other ten tokens were removed."""
    subject.needs("remove", "compact")

    def punch(known: Known) -> None:
        for begin in range(0, subject.context // 2, REMOVED):
            known.remove(begin, begin + REMOVED)

    known = subject.filled()
    punch(known)
    known.cache.compact()
    known.check()
    del known
    subject.time_edit("compact", punch, lambda cache: cache.compact())


def test_gather(subject: Subject) -> None:
    """Time copying the rows of a layer to f32."""
    subject.needs("gather")
    known = subject.filled()
    for layer in subject.layers:
        known.check_gathered(layer)
    layers = cycle(subject.layers)
    subject.time("gather", lambda: (next(layers),), lambda layer: known.cache.gather(layer))


def test_decode(subject: Subject) -> None:
    """Time attention of one token, in all layers."""
    known = subject.filled(subject.context - 1)
    known.open()
    known.check_batch(1)
    q = known.queries(1)

    def attend(cache: Any) -> None:
        for layer in subject.layers:
            cache.attend(layer, q)

    subject.time("decode attention", lambda: (known.cache,), attend)


def test_prompt(subject: Subject) -> None:
    """Time attention of a prompt, the last tokens of the context, in one layer."""
    known = subject.filled(subject.context - subject.prompt)
    known.open(subject.prompt)
    known.check_batch(subject.prompt)
    q, layers = known.queries(subject.prompt), cycle(subject.layers)
    subject.time("prompt attention", lambda: (next(layers), q), known.cache.attend)


def test_peer(peer: Peer) -> None:
    """Time attention in a peer, with storing tokens where the peer does both at once."""
    if peer.what != "append":
        peer.check()
    peer.time(peer.what, lambda: (peer.calls,), peer.run)

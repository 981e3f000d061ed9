"""The benchmarks; every implementation is compared with a float64 softmax first."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvcache.benchmarks.conftest import Peer, Subject
    from kvcache.benchmarks.known import Floats, Known

REMOVED = 10  # tokens that one call removes

# Let no warning of other people's code end a benchmark, whatever the folder's configuration makes of warnings; ignore
# the one about a fixture that was not used, as where a case is refused before it is timed.
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
    """A token in all layers, begin and commit included."""
    known = subject.filled()
    known.check()
    subject.time("append", lambda: (known.cache, known.next_rows()), step)


def test_window_step(subject: Subject) -> None:
    """The same where each token pushes another out of a window as long as the context."""
    window = subject.context
    known = subject.filled(2 * window, window=window, max_seq_len=3 * window + 1000)
    known.check()
    subject.time("window step", lambda: (known.cache, known.next_rows()), step)


def test_fork(subject: Subject) -> None:
    """A second sequence that holds what the first does."""
    subject.needs("fork")
    known = subject.filled(max_sequences=2)
    known.fork()
    for seq_id in (0, 1, 0):  # both go on
        known.check(seq_id)
    del known
    subject.time_edit("fork", lambda _: None, lambda cache: cache.fork(0, 1), max_sequences=2)


def test_remove(subject: Subject) -> None:
    """Ten tokens near the front; all others move down."""
    subject.needs("remove")
    known = subject.filled()
    begin = min(5, subject.context // 2)
    known.remove(begin, begin + REMOVED)
    known.check()
    del known
    subject.time_edit("remove", lambda _: None, lambda cache: cache.remove(begin, begin + REMOVED))


def test_compact(subject: Subject) -> None:
    """After every other ten tokens were removed."""
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
    """The rows of a layer, as f32."""
    subject.needs("gather")
    known = subject.filled()
    for layer in subject.layers:
        known.check_gathered(layer)
    layers = cycle(subject.layers)
    subject.time("gather", lambda: (next(layers),), lambda layer: known.cache.gather(layer))


def test_decode(subject: Subject) -> None:
    """Attention of one token, in all layers."""
    known = subject.filled(subject.context - 1)
    known.open()
    known.check_batch(1)
    q = known.queries(1)

    def attend(cache: Any) -> None:
        for layer in subject.layers:
            cache.attend(layer, q)

    subject.time("decode attention", lambda: (known.cache,), attend)


def test_prompt(subject: Subject) -> None:
    """Attention of a prompt, the last tokens of the context, in one layer."""
    known = subject.filled(subject.context - subject.prompt)
    known.open(subject.prompt)
    known.check_batch(subject.prompt)
    q, layers = known.queries(subject.prompt), cycle(subject.layers)
    subject.time("prompt attention", lambda: (next(layers), q), known.cache.attend)


def test_peer(peer: Peer) -> None:
    """The same in other people's code; where it stores tokens as it attends over them, that is timed as well."""
    if peer.what != "append":
        peer.check()
    peer.time(peer.what, lambda: (peer.calls,), peer.run)

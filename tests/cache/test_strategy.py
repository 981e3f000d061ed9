"""Which sequences are stored, and what memory is free: decisions of Python.

tests/world holds what a sequence that is not stored computes, and what stays of it.
"""

import copy
import gc
import itertools
import logging
import sys
import sysconfig
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support.programs import run_python

import kvcache
from kvcache import Adaptive, LongSequencesOnly, RowsGoneError, system

KIB, GIB = 1 << 10, 1 << 30


def new_cache(strategy, **options):
    """A cache in which a token takes 256 bytes, and a sequence at most 16 KiB."""
    options = {"max_seq_len": 64, "dtype": "f32", "max_sequences": None} | options
    return kvcache.KVCache(2, 2, 8, strategy=strategy, **options)


def put(batch):
    for layer in range(2):
        batch.put(layer, *np.ones((2, len(batch), 2, 8), np.float32))


def run(cache, length, seq_id=0, **commit):
    """Feed the tokens of a sequence of this length that are not stored; return the first one's index."""
    first = cache.next_position(seq_id)
    with cache.batch(positions=range(first, length), seq_ids=[seq_id] * (length - first)) as batch:
        put(batch)
        batch.commit(**commit)
    return first


class Machine:
    """Stands for the system, and says how much memory is free."""

    def __init__(self, monkeypatch, *cgroups):
        self.available = GIB
        monkeypatch.setattr(system, "machine_memory", lambda: self.available)
        monkeypatch.setattr(system.free_memory, "__defaults__", cgroups)


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path / "nothing", tmp_path)


# ---- what is decided


# (free bytes, sequence, its length, where its batch begins, what explain() says of it then), or an edit between steps.
DECISIONS = {
    "always": ("always", {}, [(0, 0, 2, 0, ""), (0, 0, 3, 2, ""), (0, 0, 5, 3, "every sequence is stored")]),
    "disabled": ("disabled", {}, [(GIB, 0, 2, 0, ""), (GIB, 0, 3, 0, ""), (GIB, 0, 5, 0, "no sequence is stored")]),
    "long": (
        LongSequencesOnly(4),
        {},
        [
            (0, 0, 2, 0, "sequence 0 is not stored: its length, 2 tokens, is not above the threshold of 4"),
            (0, 0, 4, 0, "sequence 0 is not stored: its length, 4 tokens, is not above"),
            (0, 0, 5, 0, "sequence 0 is stored: its length, 5 tokens, is above the threshold of 4"),
            (0, 0, 6, 5, ""),
            (0, 0, 8, 6, ""),
            lambda cache: cache.truncate(2),
            (0, 0, 3, 2, ""),  # what holds rows is stored, however short
            (0, 0, 4, 3, ""),
            lambda cache: cache.truncate(0),
            (0, 0, 2, 0, "sequence 0 is not stored"),
            (0, 0, 3, 0, ""),
        ],
    ),
    "adaptive": (
        Adaptive(0.25),
        {},
        [
            (64 * KIB, 0, 2, 0, "a sequence of 64 tokens takes 16.0 KiB"),
            (64 * KIB - 4, 0, 3, 2, ""),  # what is stored is not dropped for a little less
            (
                64 * KIB - 4, 0, 5, 3, "sequence 0 is stored: it may come to 16.0 KiB, which is at most 40.5 KiB, the "
                "fraction 0.625 of the 64.7 KiB that would be free without it (of this machine)",
            ),
            (
                64 * KIB - 4, 1, 2, 0, "sequence 1 is not stored: it may come to 16.0 KiB, which is more than 16.0 KiB,"
                " the fraction 0.25 of the 64.0 KiB that are free (of this machine)",
            ),
            (64 * KIB - 4, 1, 3, 0, ""),
        ],
    ),
    "dropped": (
        Adaptive(0.5),
        {"block_size": 8},
        [
            (32 * KIB, 0, 8, 0, ""),
            (32 * KIB, 0, 9, 8, ""),
            (64 * KIB // 3 + 1 - 9 * 256, 0, 10, 9, "sequence 0 is stored"),  # it is dropped below 21.3 KiB without it
            (
                64 * KIB // 3 + 1 - 13 * 256, 0, 11, 10, "sequence 0 was dropped: it may come to 16.0 KiB, which is "
                "more than 15.4 KiB, the fraction 0.75 of the 20.6 KiB that would be free without it (of this machine)",
            ),
            (64 * KIB // 3 + 1 - 13 * 256, 0, 12, 0, "sequence 0 is not stored"),
            (32 * KIB, 0, 14, 0, "sequence 0 is stored"),
            (32 * KIB, 0, 15, 14, ""),
        ],
    ),
    "memory kept for reuse is free": (
        Adaptive(0.5),
        {},
        [(32 * KIB, 0, 64, 0, ""), kvcache.KVCache.clear, (16 * KIB, 0, 2, 0, "0 is stored"), (16 * KIB, 0, 3, 2, "")],
    ),
    "without a limit the batch counts": (
        Adaptive(1),
        {"max_seq_len": None},
        [(10 * 256, 0, 10, 0, "sequence 0 is stored"), (10 * 256, 1, 11, 0, "sequence 1 is not stored")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_decisions(machine, name):
    strategy, options, steps = DECISIONS[name]
    cache = new_cache(strategy, **options)
    assert cache.strategy == strategy
    for step in steps:
        if callable(step):
            step(cache)
            continue
        machine.available, seq_id, length, begin, words = step
        assert run(cache, length, seq_id) == begin, step
        assert cache.explain().startswith(f"strategy: {strategy}\n")
        assert words in cache.explain()
    cache.validate()


def test_what_is_not_stored_leaves_nothing(machine):
    cache = new_cache("disabled")
    run(cache, 5)
    assert (cache.sequences, cache.stats()["live_slots"], cache.stats()["batches"]) == ([], 0, 1)
    cache = new_cache(Adaptive(0.5), block_size=8)
    run(cache, 16)
    taken, machine.available = cache.nbytes, 0
    run(cache, 17)
    assert (cache.next_position(), cache.sequences, cache.stats()["live_slots"]) == (0, [], 0)
    assert cache.nbytes < taken / 2


def test_sequences_of_a_batch_are_decided_on_one_by_one(machine):
    cache = new_cache(LongSequencesOnly(2))
    run(cache, 3, seq_id=7)
    with cache.batch(positions=[0, 3, 1, 0, 1, 2, 4], seq_ids=[5, 7, 5, 6, 6, 6, 7]) as batch:
        put(batch)
    assert [cache.seq_len(s) for s in (5, 6, 7)] == [0, 3, 5]
    cache = new_cache(Adaptive(0.5))
    for seq_id in range(3):
        run(cache, 4, seq_id)
    machine.available = 0
    with cache.batch(positions=[4, 4, 0], seq_ids=[0, 2, 9]) as batch:
        put(batch)
    assert cache.sequences == [1]
    assert [line.split(":")[0] for line in cache.explain().splitlines()[2:]] == [
        "sequence 1 is stored", "sequence 0 was dropped", "sequence 2 was dropped", "sequence 9 is not stored",
    ]  # fmt: skip


def test_only_what_is_committed_is_dropped(machine):
    cache = new_cache(Adaptive(0.5))
    run(cache, 4)
    machine.available = 0
    cache.batch(1).abort()
    assert cache.next_position() == 4
    assert "sequence 0 is to be dropped" in cache.explain()
    batch = cache.batch(1)
    with pytest.raises(IndexError):
        batch.commit(keep=[1])
    assert cache.next_position() == 4
    batch.abort()
    machine.available = GIB
    assert run(cache, 5) == 4
    assert "sequence 0 is stored" in cache.explain()


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, 2 * 64 * 256),
        ({"dtype": "f16"}, 2 * 64 * 128),
        ({"k_dtype": "q8_0", "v_dtype": "q4_0", "head_dim": 64}, 2 * 64 * 4 * (34 + 18)),
        ({"policy": kvcache.SlidingWindow(8, 2)}, 2 * 10 * 256),
        ({"policy": kvcache.SlidingWindow(8, resume_window=20)}, 2 * 20 * 256),
        ({"policy": kvcache.SlidingWindow(200)}, 2 * 64 * 256),
        ({"policy": kvcache.ChunkedAttention(16, 4)}, 2 * 20 * 256),
        ({"policy": [kvcache.FullAttention(), kvcache.CrossAttention(100)]}, 164 * 256),
        ({"policy": [None, kvcache.FullAttention()]}, 64 * 256),
        ({"share": [None, 0]}, 64 * 256),
        ({"value_in_key": True, "v_head_dim": 8}, 2 * 64 * 128),
    ],
)
def test_what_a_sequence_may_come_to(machine, options, nbytes):
    options = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "max_seq_len": 64, "dtype": "f32"} | options
    cache = kvcache.KVCache(**options, strategy=Adaptive())
    assert cache.most_bytes(64) == cache.most_bytes(1000) == nbytes


# ---- what a sequence lacks


@pytest.mark.parametrize("strategy", ["disabled", LongSequencesOnly(4)])
def test_a_prompt_in_pieces_does_not_lose_the_first_in_silence(strategy):
    cache = new_cache(strategy)
    run(cache, 3)
    with pytest.raises(RowsGoneError, match=r"position 3 of sequence 0 .*not stored.*one batch"):
        cache.batch(positions=[3, 4, 5])
    with pytest.raises(RowsGoneError):
        cache.batch(positions=[0, 7], seq_ids=[1, 0])
    cache.batch(positions=range(6)).abort()


def restore(cache):
    with cache.batch(positions=range(4), seq_ids=[0] * 4, replaced=range(2)) as batch:
        put(batch)


# Each edit, beside sequence 0, which was dropped, its fork 2, and sequence 7, which is stored; and which ones lack rows
# after it.
EDITS = {
    "none": (lambda cache: None, {0, 2}),
    "fork": (lambda cache: cache.fork(0, 1), {0, 1, 2}),
    "copy_prefix": (lambda cache: cache.copy_prefix(0, 1, 2), {0, 1, 2}),
    "share_range": (lambda cache: cache.share_range(0, 1), {0, 1, 2}),
    "share_range with one that holds rows": (lambda cache: cache.share_range(0, 7), {0, 2}),
    "fork of one that is stored": (lambda cache: cache.fork(7, 0), {2}),
    "share_range of one that is stored": (lambda cache: cache.share_range(7, 0), {2}),
    "clear": (lambda cache: cache.clear(0), {2}),
    "truncate": (lambda cache: cache.truncate(0), {2}),
    "keep": (lambda cache: cache.keep(0), {0}),
    "keep another": (lambda cache: cache.keep(7), set()),
    "clear all": (lambda cache: cache.clear(), set()),
    "feed it whole": (lambda cache: run(cache, 5), {2}),
    "restore": (restore, {2}),
    "clear a copy": (lambda cache: copy.copy(cache).clear(), {0, 2}),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_is_dropped_does_not_go_on_in_silence(machine, name):
    cache = new_cache(Adaptive(0.5))
    for seq_id in (7, 0):
        run(cache, 4, seq_id)
    machine.available = 0
    run(cache, 5, 0)
    cache.fork(0, 2)  # lacks the same rows for the same reason
    machine.available = GIB
    edit, lacking = EDITS[name]
    edit(cache)
    other = copy.copy(cache)  # lacks what the cache lacks
    for seq_id in (0, 1, 2, 7):
        assert (f"sequence {seq_id} was dropped: it may come to" in cache.explain()) == (seq_id in lacking)
        for one in (cache, other):
            if seq_id not in lacking:
                one.batch(positions=[8], seq_ids=[seq_id]).abort()
                continue
            with pytest.raises(RowsGoneError, match=rf"position 8 of sequence {seq_id} .*dropped.*next_position"):
                one.batch(positions=[9, 8], seq_ids=[seq_id] * 2)


def test_what_was_not_stored_does_not_go_on_in_silence(machine):
    cache = new_cache(Adaptive(0.5))
    machine.available = 0
    run(cache, 4)
    machine.available = GIB
    for _ in range(2):
        with pytest.raises(RowsGoneError, match=r"position 4 of sequence 0 .*not stored.*next_position"):
            cache.batch(positions=[4, 5])
        run(cache, 5, keep=[])  # a batch of which no token is kept stores nothing
    cache.batch(positions=[4], seq_ids=[2]).abort()  # positions are the caller's, where nothing was fed
    assert [run(cache, 5), run(cache, 7)] == [0, 5]


@pytest.mark.parametrize("strategy", ["disabled", LongSequencesOnly(1000), Adaptive()], ids=str)
def test_what_is_restored_is_stored_whatever_the_strategy(strategy):
    cache = new_cache(strategy)
    restore(cache)
    assert (cache.seq_len(), cache.next_position(), cache.can_resume(4)) == (4, 4, True)


# ---- explain, logging


def test_explain_forgets_sequences_that_there_are_not():
    cache = new_cache(LongSequencesOnly(2))
    assert cache.explain() == "strategy: LongSequencesOnly(threshold=2)"
    with pytest.raises(kvcache.CacheFullError):
        cache.batch(100)
    cache.batch(3).abort()
    assert cache.explain() == "strategy: LongSequencesOnly(threshold=2)"
    run(cache, 3, seq_id=-1)
    for seq_id in range(300):
        run(cache, 1, seq_id)
    lines = cache.explain().splitlines()
    assert len(lines) == 10
    assert lines[1] == "sequence -1 is stored: its length, 3 tokens, is above the threshold of 2"
    assert lines[-1].startswith("sequence 299 is not stored")
    assert len(cache._decider._decisions) == 9


def test_decisions_are_logged(caplog):
    cache = new_cache(LongSequencesOnly(1))
    with caplog.at_level(logging.DEBUG, logger="kvcache"):
        for length in (1, 1, 2):
            run(cache, length)
    assert [(r.name, r.levelname) for r in caplog.records] == [
        ("kvcache", "INFO"), ("kvcache", "DEBUG"), ("kvcache", "INFO"),
    ]  # fmt: skip
    assert caplog.messages[0] == "sequence 0 is not stored: its length, 1 tokens, is not above the threshold of 1"


def test_strategies_are_values(machine):
    assert Adaptive() == Adaptive(np.float32(0.5))
    assert repr(Adaptive(1)) == "Adaptive(fraction=1.0)"
    assert hash(LongSequencesOnly(np.int64(3))) == hash(LongSequencesOnly(3))


# ---- other threads, and finalizers


def test_forks_while_another_thread_keeps_one_sequence(machine):
    cache = new_cache(Adaptive(0.5))
    machine.available = 0
    ids = range(800)
    cache.batch(positions=[0], seq_ids=[3000]).commit()  # not stored
    is_over = threading.Event()

    def fork():
        for dst in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count(10_000)):
            cache.fork(3000, dst)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for _ in range(8):
            cache.batch(positions=[0] * len(ids), seq_ids=ids).commit()  # nor are these
            cache.keep(3000)
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_a_finalizer_forks_while_decisions_are_listed(machine):
    cache = new_cache(Adaptive(0.5))
    machine.available = 0
    ids = range(400)
    cache.batch(positions=[0], seq_ids=[6000]).commit()  # not stored
    others = itertools.count(10_000)

    def fork(phase, info):
        cache.fork(6000, next(others))

    threshold = gc.get_threshold()
    gc.freeze()  # objects of other tests are not looked at
    gc.callbacks.append(fork)
    gc.set_threshold(1)
    try:
        cache.batch(positions=[0] * len(ids), seq_ids=ids).abort()
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(fork)
        gc.unfreeze()
    # Without a GIL, a collection also waits until a quarter of all objects are new.
    assert next(others) > 10_000 or sysconfig.get_config_var("Py_GIL_DISABLED")


# ---- what memory is free


def test_linux_says_what_is_free(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "psutil", None)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:  10 kB\nMemAvailable:  4096 kB\n")
    assert system.machine_memory(meminfo) == 4 << 20


def test_psutil_says_so_elsewhere(monkeypatch, tmp_path):
    free = SimpleNamespace(available=77)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(virtual_memory=lambda: free))
    assert system.machine_memory(tmp_path / "none") == 77
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match="pip install psutil"):
        system.machine_memory(tmp_path / "none")
    monkeypatch.setattr(system.machine_memory, "__defaults__", (tmp_path / "none",))
    with pytest.raises(ImportError, match="pip install psutil"):
        Adaptive()


@pytest.mark.skipif(sys.platform != "linux", reason="psutil is asked elsewhere")
def test_the_machine_is_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    cache = new_cache(Adaptive(1))
    assert [run(cache, 2), run(cache, 3)] == [0, 2]
    assert "would be free without it (" in cache.explain()


def tree(path, **groups):
    """A directory of cgroups: name, with __ between its parts, and the files in it."""
    for name, files in groups.items():
        directory = path.joinpath(*filter(None, name.split("__")))
        directory.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (directory / file).write_text(text)


def version_2(limit, used=0, inactive=0):
    stat = f"anon 5\nfile 7\ninactive_anon 11\ninactive_file {inactive}\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def version_1(limit, used=0, inactive=0):
    stat = f"cache 3\ninactive_file 99\ntotal_inactive_file {inactive}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{used}\n", "memory.stat": stat}


@pytest.mark.parametrize(
    ("lines", "groups", "free", "source"),
    [
        ("0::/\n", {}, 1000, "machine"),
        ("0::/a/b\n", {"a__b": version_2("max"), "a": version_2("max")}, 1000, "machine"),
        ("0::/a/b\n", {"a__b": version_2(500, 300, 50), "a": version_2(900, 100)}, 250, "a/b/memory.max"),
        ("0::/a/b\n", {"a__b": version_2("max"), "a": version_2(900, 200, 1)}, 701, "a/memory.max"),
        ("0::/a/b\n", {"a__b": version_2(5000, 300), "": version_2(400, 300)}, 100, "memory.max"),
        ("0::/\n", {"": version_2(400, 300)}, 100, "memory.max"),  # a container's own
        ("0::/../../x\n", {"x": version_2(400, 300)}, 100, "x/memory.max"),
        ("0::/gone/b\n", {"": version_2(400, 300)}, 100, "memory.max"),
        ("0::/a\n", {"a": version_2(100, 300)}, 0, "a/memory.max"),
        ("0::/a\n", {"a": {"memory.max": "300", "memory.current": "100"}}, 200, "a/memory.max"),
        ("0::/a\n", {"a": {"memory.max": "300"}}, 1000, "machine"),
        ("0::/a\n", {"a": {"memory.max": "", "memory.current": "x"}}, 1000, "machine"),
        ("0::/a\n", {"unified__a": version_2(300, 100)}, 200, "unified/a/memory.max"),
        (
            "12:cpu,cpuacct:/x\n5:memory:/docker/1\n0::/docker/1\n",
            {"memory__docker__1": version_1(600, 500, 40), "cpu__x": version_1(1)},
            140,
            "memory/docker/1/memory.limit_in_bytes",
        ),
        ("5:memory:/docker/1\n", {"memory": version_1(600, 500)}, 100, "memory/memory.limit_in_bytes"),
        ("5:cpu,memory:/a\n", {"memory__a": version_1(2**63 - 4096, 10)}, 1000, "machine"),
        ("5:name=systemd:/a\nnonsense\n\n", {"a": version_2(1)}, 1000, "machine"),
    ],
)
def test_cgroups(tmp_path, lines, groups, free, source):
    (tmp_path / "cgroup").write_text(lines)
    tree(tmp_path / "fs", **groups)
    found, why = system.free_memory(1000, tmp_path / "cgroup", tmp_path / "fs")
    assert found == free
    assert why == ("of this machine" if source == "machine" else f"by {tmp_path / 'fs' / source}")


def test_a_small_cgroup_decides(tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("0::/job\n")
    tree(tmp_path, job=version_2(GIB, GIB - 100))
    Machine(monkeypatch, tmp_path / "cgroup", tmp_path)
    cache = new_cache(Adaptive())
    assert [run(cache, 2), run(cache, 3)] == [0, 0]
    assert "job/memory.max" in cache.explain()


def test_psutil_is_met_only_when_it_is_needed():
    assert run_python("import kvcache; print('psutil' in sys.modules)") == "False\n"

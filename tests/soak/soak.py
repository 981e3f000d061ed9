"""Run a server on one KVCache for as long as is asked, check every answer, and watch memory and time.

python tests/soak/soak.py --seconds 3600 --json soak.json --output soak.svg

Threads of clients serve requests whose prompts begin alike, for tenants with a store behind them: they fork, remove,
insert, take back, save and restore, run batches of their own, and give up. One thread decodes what all of them wait
for, in one batch a step. Each logit is compared with those of plain NumPy without a cache, in a process of its own.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported

import argparse
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.attention import softmax

import kvcache
from kvcache import ChunkedAttention, FullAttention, SlidingWindow
from kvcache.stores import DirectoryStore

VOCAB, HIDDEN, INNER, HEADS, KV_HEADS, DIM = 256, 64, 128, 4, 2, 32
CHUNK, GOES_BACK = 64, 32  # tokens
POLICIES = (
    FullAttention(),
    SlidingWindow(48, num_sink_tokens=4, resume_window=48 + GOES_BACK),
    FullAttention(),
    SlidingWindow(24, resume_window=24 + GOES_BACK),
    ChunkedAttention(CHUNK, resume_window=CHUNK),
    FullAttention(),
)
MAX_SEQ_LEN = 448
INV_FREQ = 10_000.0 ** (-np.arange(0, DIM, 2) / DIM)
ANGLES = np.arange(MAX_SEQ_LEN + 1)[:, None, None] * INV_FREQ
COS, SIN = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)

MAX_BYTES, STORE_BYTES = 8 << 20, 16 << 20
BOOKKEEPING = 64 << 10  # of edits that copy no row: max_bytes is checked when rows are taken
NUM_CLIENTS = 4
MOST_STEPS = 1 << 16  # whose times are kept: in an array that does not grow, as memory is watched
PIECE = 64  # tokens of a prompt that a step takes
FINGERPRINT, SECRET = "random weights", b"known to the servers"
TOLERANCE = 1e-3  # of a logit, whose standard deviation is about 1
KINDS = {  # of requests, and how many of each
    **{"answer": 4, "chat": 4, "fork": 2, "take_back": 2, "forget": 2},
    **{"insert": 2, "move": 1, "score": 2, "give_up": 2, "guest": 1},
}


# ---- the model, with any attention


class Model:
    """A transformer of random weights: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    def __init__(self):
        rng = np.random.default_rng(0)

        def matrix(rows, columns, scale=1.0):
            return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale * rows**-0.5)

        self.embedding = matrix(VOCAB, HIDDEN, VOCAB**0.5)
        self.layers = [
            (
                matrix(HIDDEN, HEADS * DIM, 2),  # queries that tell keys apart, so that each row matters to some
                matrix(HIDDEN, KV_HEADS * DIM),
                matrix(HIDDEN, KV_HEADS * DIM),
                matrix(HEADS * DIM, HIDDEN),
                matrix(HIDDEN, INNER),
                matrix(HIDDEN, INNER),
                matrix(INNER, HIDDEN),
            )
            for _ in POLICIES
        ]
        self.head = matrix(HIDDEN, VOCAB)

    def run(self, tokens, attend):
        """Return the logits after each token; `attend(layer, q, k, v)` takes what is not rotated yet."""
        x, n = self.embedding[tokens], len(tokens)
        for layer, (q, k, v, out, gate, up, down) in enumerate(self.layers):
            h = normed(x)
            heads = (h @ q).reshape(n, HEADS, DIM), (h @ k).reshape(n, KV_HEADS, DIM), (h @ v).reshape(n, KV_HEADS, DIM)
            x = x + attend(layer, *heads).reshape(n, -1) @ out
            h = normed(x)
            gated = h @ gate
            x = x + (gated / (1 + np.exp(-gated)) * (h @ up)) @ down
        return normed(x) @ self.head


def normed(x):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(1e-6))


def rotated(rows, positions):
    """Rotate [n, heads, DIM] for their positions."""
    a, b = rows[..., : DIM // 2], rows[..., DIM // 2 :]
    cos, sin = COS[positions], SIN[positions]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


# ---- the answers without a cache


class Plain:
    """A sequence as arrays: all its rows in every layer, keys not rotated, and where each token stands now."""

    def __init__(self, model):
        self.model = model
        self.positions = np.zeros(0, np.intp)
        self.rows = [tuple(np.zeros((0, KV_HEADS, DIM), np.float32) for _ in "kv") for _ in POLICIES]

    def feed(self, tokens, position):
        new = position + np.arange(len(tokens))
        self.positions = np.concatenate([self.positions, new])

        def attend(layer, q, k, v):
            k, v = self.rows[layer] = tuple(np.concatenate(pair) for pair in zip(self.rows[layer], (k, v), strict=True))
            k, v = (np.repeat(rows, HEADS // KV_HEADS, axis=1) for rows in (rotated(k, self.positions), v))
            scores = rotated(q, new).transpose(1, 0, 2) @ k.transpose(1, 2, 0) * np.float32(DIM**-0.5)
            scores[:, ~seen(POLICIES[layer], new[:, None], self.positions)] = -np.inf
            weights, _ = softmax(scores)
            return (weights @ v.transpose(1, 0, 2)).transpose(1, 0, 2)

        return self.model.run(tokens, attend)

    def remove(self, begin, end):
        self._keep((self.positions < begin) | (self.positions >= end))
        self.positions[self.positions >= end] -= end - begin

    def truncate(self, length):
        self._keep(self.positions < length)

    def shift(self, begin, delta):
        self.positions[self.positions >= begin] += delta

    def _keep(self, kept):
        self.positions = self.positions[kept]
        self.rows = [(k[kept], v[kept]) for k, v in self.rows]


def seen(policy, query, position):
    """Say which positions a query sees."""
    before = position <= query
    if isinstance(policy, SlidingWindow):
        return before & ((position > query - policy.window) | (position < policy.num_sink_tokens))
    if isinstance(policy, ChunkedAttention):
        return before & (position // CHUNK == query // CHUNK)
    return before


@dataclass
class Fed:
    """Tokens that a sequence was fed from a position on, and the logits that were seen, by index of the token."""

    position: int
    tokens: list[int]
    logits: dict[int, np.ndarray]


def largest_difference(history):
    """Do without a cache what was done to a sequence, `Fed` and edits; return by how much a logit differs."""
    plain, largest = Plain(the_model()), 0.0
    for step in history:
        if not isinstance(step, Fed):
            edit, *arguments = step
            getattr(plain, edit)(*arguments)
            continue
        logits = plain.feed(step.tokens, step.position)
        for i, found in step.logits.items():
            largest = max(largest, float(np.abs(found - logits[i]).max()))
    return largest


@functools.cache
def the_model():
    return Model()


# ---- the server


class GaveUp(Exception):
    """A client did not wait for its answer."""


@dataclass(eq=False)
class Job:
    """Tokens to feed a sequence, and how many to generate behind them."""

    seq_id: int
    position: int
    todo: list[int]
    wanted: int
    answer: list[int] = field(default_factory=list)
    fed: Fed = None
    failure: tuple[type[Exception], str] | None = None  # not an exception, whose traceback would hold the job
    is_given_up: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self):
        self.fed = Fed(self.position, [], {})

    def take(self, num_tokens, logits):
        """Note that the first tokens were fed, and choose the next one if there are no others."""
        self.fed.tokens += self.todo[:num_tokens]
        self.todo = self.todo[num_tokens:]
        if not self.todo:
            self.fed.logits[len(self.fed.tokens) - 1] = logits
            self.answer.append(int(logits.argmax()))
            if len(self.answer) < self.wanted:
                self.todo = self.answer[-1:]
            else:
                self.done.set()


class Server:
    """A cache, its tenants, and a thread that decodes for all clients."""

    def __init__(self, folder, seed):
        layers = [
            kvcache.Layer(KV_HEADS, DIM, policy=policy, k_dtype="f32", v_dtype="f32", rope=kvcache.Rope(INV_FREQ))
            for policy in POLICIES
        ]
        limits = {"max_seq_len": MAX_SEQ_LEN, "max_sequences": None, "max_bytes": MAX_BYTES}
        self.cache = kvcache.KVCache(layers, block_size=16, num_threads=1, **limits)
        self.folder = folder
        self.store = DirectoryStore(folder / "store", max_bytes=STORE_BYTES)
        self.tenants = [self.tenant(name) for name in (b"alice", b"bob")]
        self.choose = random.Random(f"{seed} server")
        self.jobs = []
        self.changed = threading.Condition()
        self.stopped = threading.Event()
        self.loading = threading.Lock()  # while a file is read, the cache may exceed max_bytes by what is loaded
        self.steps = 0  # of decoding
        self.seconds = np.ones((MOST_STEPS, 2))  # of each of the last ones: wall, and of the processor

    def tenant(self, salt):
        return kvcache.PrefixCache(
            self.cache, fingerprint=FINGERPRINT, salt=salt, secret=SECRET, store=self.store, timeout=5
        )

    # -- what clients call

    def submit(self, seq_id, position, tokens, wanted):
        job = Job(seq_id, position, list(tokens), wanted)
        with self.changed:
            if self.stopped.is_set():
                raise GaveUp("the server has stopped")
            self.jobs.append(job)
            self.changed.notify()
        return job

    def wait(self, job, patience=None):
        """Wait until a job is done, or give it up; whatever was fed is in `job.fed` then."""
        if not job.done.wait(patience):
            job.is_given_up = True
            job.done.wait()
        if job.failure is not None:
            kind, text = job.failure
            raise kind(text)

    # -- the thread that decodes

    def run(self):
        steps = 0
        try:
            while not self.stopped.is_set():
                with self.changed:
                    self.changed.wait_for(lambda: self.jobs, timeout=0.1)
                    jobs = list(self.jobs)
                if jobs:
                    self.step(jobs)
                    steps += 1
                    if steps % 500 == 0:
                        self.tidy(steps // 500)
        finally:
            with self.changed:  # from now on nobody submits
                self.stopped.set()
                jobs = list(self.jobs)
            for job in jobs:
                self.end(job, (GaveUp, "the server has stopped"))

    def end(self, job, failure=None):
        with self.changed:
            self.jobs.remove(job)
        job.failure = failure
        job.done.set()

    def step(self, jobs):
        for job in [job for job in jobs if job.is_given_up]:
            self.end(job, (GaveUp, "the client has gone"))
            jobs.remove(job)
        if not jobs:
            return
        counts = [min(len(job.todo), PIECE) for job in jobs]
        positions = np.concatenate(
            [job.position + len(job.fed.tokens) + np.arange(n) for job, n in zip(jobs, counts, strict=True)]
        )
        tokens = [token for job, n in zip(jobs, counts, strict=True) for token in job.todo[:n]]
        seq_ids = np.repeat([job.seq_id for job in jobs], counts)
        begin = time.perf_counter(), time.thread_time()
        try:
            with self.cache.batch(positions=positions, seq_ids=seq_ids, timeout=None) as batch:
                logits = the_model().run(tokens, attention(batch, positions, self.breaks_off()))
        except kvcache.CacheFullError as error:
            self.end(jobs[-1], (kvcache.CacheFullError, str(error)))  # who came last has to come again
            return
        except GaveUp:
            return
        if max(counts) == 1:
            self.seconds[self.steps % MOST_STEPS] = time.perf_counter() - begin[0], time.thread_time() - begin[1]
            self.steps += 1
        for job, n, row in zip(jobs, counts, logits[np.cumsum(counts) - 1], strict=True):
            job.take(n, row)
            if job.done.is_set():
                self.end(job)

    def breaks_off(self):
        """Choose, rarely, a layer in which the batch is to be aborted."""
        return self.choose.randrange(len(POLICIES)) if self.choose.random() < 0.005 else None

    def tidy(self, turn):
        """Do what a server does now and then, unless a client has a batch of its own, or saves."""
        prefix = self.tenants[turn % 2]
        with suppress(kvcache.CacheBusyError, BufferError):
            (self.cache.compact, lambda: prefix.evict(500), prefix.clear)[turn // 2 % 3]()


def attention(batch, positions, breaks_off=None):
    def attend(layer, q, k, v):
        if layer == breaks_off:
            raise GaveUp("in the middle of a batch")
        return batch.attend(layer, rotated(q, positions), rotated(k, positions), v)

    return attend


# ---- the clients


class Sequence:
    """A sequence of the cache: its text, and all that was done to it."""

    def __init__(self, server, prefix, seq_id, text, history=()):
        self.server, self.prefix, self.cache, self.seq_id = server, prefix, server.cache, seq_id
        self.text = list(text)  # its last tokens may not be fed yet
        self.history = list(history)
        self.job = None

    @classmethod
    def begin(cls, server, prefix, prompt):
        seq_id, matched = prefix.acquire(prompt)
        sequence = cls(server, prefix, seq_id, prompt)
        sequence.note(Fed(0, prompt[:matched], {}))
        return sequence

    @property
    def length(self):
        return self.cache.next_position(self.seq_id)

    def start(self, wanted):
        """Ask for tokens behind the text."""
        self.job = self.server.submit(self.seq_id, self.length, self.text[self.length :], wanted)

    def finish(self, patience=None):
        try:
            self.server.wait(self.job, patience)
        finally:
            self.note(self.job.fed)
            self.text += self.job.answer

    def generate(self, wanted, patience=None):
        self.start(wanted)
        self.finish(patience)

    def note(self, fed):
        if not fed.tokens:
            return
        last = self.history[-1] if self.history else None
        if isinstance(last, Fed) and last.position + len(last.tokens) == fed.position:
            logits = last.logits | {len(last.tokens) + i: row for i, row in fed.logits.items()}
            self.history[-1] = Fed(last.position, last.tokens + fed.tokens, logits)
        else:
            self.history.append(fed)

    def score(self, patience):
        """Feed the rest of the text in a batch of this thread's own; every logit is an answer."""
        first = self.length
        rest = self.text[first:]
        positions = first + np.arange(len(rest))
        with self.cache.batch(positions=positions, seq_ids=[self.seq_id] * len(rest), timeout=patience) as batch:
            logits = the_model().run(rest, attention(batch, positions))
        self.note(Fed(first, rest, dict(enumerate(logits))))

    def fork(self):
        child = self.prefix.new_sequence()
        self.cache.fork(self.seq_id, child)
        return Sequence(self.server, self.prefix, child, self.text[: self.length], self.history)

    def remove(self, begin, end):
        self.cache.remove(begin, end, seq_id=self.seq_id)
        del self.text[begin:end]
        self.history.append(("remove", begin, end))

    def truncate(self, length):
        self.cache.truncate(length, seq_id=self.seq_id)
        del self.text[length:]
        self.history.append(("truncate", length))

    def insert(self, position, tokens):
        self.cache.shift(position, None, len(tokens), seq_id=self.seq_id)
        self.history.append(("shift", position, len(tokens)))
        job = self.server.submit(self.seq_id, position, tokens, 1)
        try:
            self.server.wait(job)
        finally:
            self.note(job.fed)
        self.text[position:position] = tokens

    def move(self):
        """Leave the cache for a file, and come back under another id."""
        path = self.server.folder / f"sequence-{self.seq_id}"
        held = {self.seq_id: self.text[: self.length]}
        self.cache.save(path, [self.seq_id], tokens=held, fingerprint=FINGERPRINT, secret=SECRET)
        self.cache.clear(self.seq_id)
        old, self.seq_id = self.seq_id, self.prefix.new_sequence()
        with self.server.loading:
            self.cache.restore(path, self.seq_id, saved_id=old, fingerprint=FINGERPRINT, secret=SECRET)
        path.unlink()

    def end(self):
        self.prefix.release(self.seq_id, self.text)


class Clients:
    """Draws from a seed what requests do: the tenant, the common beginning, and what happens meanwhile."""

    def __init__(self, server, seed, checker):
        self.server, self.seed, self.checker = server, seed, checker
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.counts = Counter()
        self.largest = 0.0

    def run(self):
        while not self.stopped.is_set() and not self.server.stopped.is_set():
            number = next(self.numbers)
            Request(self, number).run()

    def count(self, *names):
        with self.lock:
            self.counts.update(names)

    def check(self, sequence, of):
        largest = self.checker.submit(largest_difference, sequence.history).result()
        with self.lock:
            self.largest = max(self.largest, largest)
        if not largest <= TOLERANCE:
            raise AssertionError(f"a logit of {of} differs by {largest}")


class Request:
    """A request of one client."""

    def __init__(self, clients, number):
        self.clients, self.server, self.number = clients, clients.server, number
        self.choose = random.Random(f"{clients.seed} request {number}")
        self.kind = self.choose.choices([*KINDS], [*KINDS.values()])[0]
        self.tenant = self.choose.randrange(len(self.server.tenants))
        self.prefix = self.server.tenants[self.tenant]
        self.sequences = []

    def run(self):
        self.clients.count("requests", self.kind)
        try:
            getattr(self, self.kind)()
        except kvcache.CacheFullError:
            self.clients.count("full")
        except kvcache.CacheBusyError:
            self.clients.count("busy")
        except GaveUp:
            self.clients.count("given up")
        finally:
            for sequence in self.sequences:
                sequence.end()
        for sequence in self.sequences:
            self.clients.check(sequence, f"request {self.number} ({self.kind})")

    # -- what is asked

    def begin(self, prompt=None):
        self.sequences.append(Sequence.begin(self.server, self.prefix, prompt or self.prompt()))
        return self.sequences[-1]

    def prompt(self):
        """The tenant's system prompt, a document that is asked about for some time, and a question."""
        system = self.text(f"system {self.tenant}", 16, 64)
        which = self.number // 25 + int(40 * self.choose.random() ** 2)
        return system + self.text(f"document {which}", 16, 112) + self.tokens(4, 32)

    def text(self, name, least, most):
        choose = random.Random(f"{self.clients.seed} {name}")
        return [choose.randrange(VOCAB) for _ in range(choose.randint(least, most))]

    def tokens(self, least, most):
        return [self.choose.randrange(VOCAB) for _ in range(self.choose.randint(least, most))]

    def some(self):
        return self.choose.randint(8, 40)

    # -- kinds of requests

    def answer(self):
        self.begin().generate(self.some())

    def chat(self):
        text = self.prompt()
        for _ in range(self.choose.randint(2, 3)):
            sequence = self.begin(text)
            sequence.generate(self.some())
            sequence.end()
            text = sequence.text + self.tokens(4, 32)

    def fork(self):
        sequence = self.begin()
        sequence.generate(1)
        for first in self.tokens(2, 2):
            self.sequences.append(sequence.fork())
            self.sequences[-1].text.append(first)
        for each in self.sequences:
            each.start(self.some())
        for each in self.sequences:
            each.finish()

    def take_back(self):
        sequence = self.begin()
        sequence.generate(self.some())
        back = sequence.length - self.choose.randint(1, GOES_BACK)
        if self.server.cache.can_resume(back, seq_id=sequence.seq_id):
            sequence.truncate(back)
            sequence.text += self.tokens(1, 4)
            sequence.generate(self.some())

    def forget(self):
        """Remove whole chunks behind the first tokens, so that each window, and the last chunk, stays whole."""
        sequence = self.begin()
        sequence.generate(self.some())
        chunks = (sequence.length - 64) // CHUNK
        if chunks > 0:
            sequence.remove(4, 4 + CHUNK * self.choose.randint(1, chunks))
            sequence.generate(self.some())

    def insert(self):
        sequence = self.begin()
        sequence.generate(self.some())
        position = sequence.length - self.choose.randint(1, GOES_BACK // 2)
        if self.server.cache.can_resume(position, seq_id=sequence.seq_id):
            sequence.insert(position, self.tokens(1, GOES_BACK // 2))  # the sequence's end is no farther off then
            sequence.generate(self.some())

    def move(self):
        sequence = self.begin()
        sequence.generate(self.some())
        sequence.move()
        sequence.generate(self.some())

    def score(self):
        self.begin().score(self.choose.uniform(0, 0.1))

    def give_up(self):
        self.begin().generate(self.some(), self.choose.uniform(0, 0.1))

    def guest(self):
        """A tenant that comes and goes; its rows are left in the store."""
        self.prefix = self.server.tenant(b"guest")
        try:
            sequence = self.begin()
            sequence.generate(self.some())
            sequence.end()
        finally:
            self.prefix.close()


# ---- what is seen


@dataclass
class Minute:
    """Counts and times of a stretch of the run."""

    seconds: float  # since the beginning, at its end
    rss: float  # resident bytes, and those of the cache: medians
    nbytes: float
    held: int  # resident bytes at the end, when what nobody holds was given back
    objects: int  # of Python, then
    store: int
    threads: int
    steps: int
    wall: tuple[float, float]  # p50 and p99 of a step of decoding
    processor: tuple[float, float]  # the same of the processor's time
    retained: int
    evicted: int
    counts: dict[str, int]
    prefix: dict[str, int]


class Watch:
    """Looks at a server, and keeps what it saw of each stretch of time."""

    def __init__(self, server, clients):
        self.server, self.clients = server, clients
        self.start = time.monotonic()
        self.minutes = []
        self.samples = []
        self.steps = 0  # when it last ended a stretch

    def look(self):
        with self.server.loading:
            nbytes = self.server.cache.nbytes
        assert nbytes <= MAX_BYTES + BOOKKEEPING, nbytes
        self.samples.append((resident(), nbytes))

    def end(self):
        server = self.server
        server.cache.validate()
        store = server.store.nbytes
        assert store <= STORE_BYTES, store
        begin, self.steps = self.steps, server.steps
        stats = server.cache.stats()
        prefixes = [prefix.stats for prefix in server.tenants]
        names = ("requests", "hits", "tokens", "matched", "fetched", "blocks", "sequences")
        rss, nbytes = np.median(self.samples, axis=0)
        which = np.arange(max(begin, self.steps - MOST_STEPS), self.steps) % MOST_STEPS
        wall, processor = np.percentile(server.seconds[which], [50, 99], axis=0).T if len(which) else np.zeros((2, 2))
        give_back_memory()
        self.minutes.append(
            Minute(
                seconds=time.monotonic() - self.start,
                rss=float(rss),
                nbytes=float(nbytes),
                held=resident(),
                objects=sys.getallocatedblocks(),
                store=store,
                threads=threading.active_count(),
                steps=self.steps - begin,
                wall=tuple(wall.tolist()),
                processor=tuple(processor.tolist()),
                retained=stats["retained"],
                evicted=stats["rows_evicted"],
                counts=dict(self.clients.counts),
                prefix={name: sum(getattr(one, name) for one in prefixes) for name in names},
            )
        )
        self.samples = []
        return self.minutes[-1]


def give_back_memory():
    """Collect cycles, and have the C library return its free pages: what then grows is held, and not scattered."""
    gc.collect()
    with suppress(AttributeError):  # of another C library
        ctypes.CDLL(None).malloc_trim(0)


def use_one_arena():
    """Have all threads share a heap. Otherwise their own heaps grow to their peaks one after the other, for hours."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def soak(seconds, period, seed, folder):
    server = Server(folder, seed)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as checker, ThreadPoolExecutor() as pool:
        clients = Clients(server, seed, checker)
        watch = Watch(server, clients)
        running = [pool.submit(server.run), *(pool.submit(clients.run) for _ in range(NUM_CLIENTS))]
        try:
            while time.monotonic() < watch.start + seconds and not any(one.done() for one in running):
                time.sleep(min(1, period / 10))
                watch.look()
                if time.monotonic() >= watch.start + period * (len(watch.minutes) + 1):
                    show(watch.end())
        finally:
            clients.stopped.set()
            wait(running[1:])
            server.stopped.set()
            for one in running:
                one.result()
    finish(server)
    return watch


def finish(server):
    """Check that whatever was taken is given back."""
    for prefix in server.tenants:
        prefix.close(30)
    stats = server.cache.stats()
    left = {name: stats[name] for name in ("live_slots", "retained", "evictable_slots")}
    assert not any(left.values()), left
    assert not any(prefix.stats.sequences for prefix in server.tenants)
    assert server.cache.sequences == []
    server.cache.validate()


def show(minute):
    memory = {"resident": minute.rss, "held": minute.held, "cache": minute.nbytes, "store": minute.store}
    times = {"time": minute.wall, "processor": minute.processor}
    parts = [
        f"{minute.seconds:5.0f} s",
        "MiB: " + ", ".join(f"{name} {nbytes / 2**20:.2f}" for name, nbytes in memory.items()),
        f"{minute.steps} steps, p50 and p99 in ms: "
        + ", ".join(f"{name} {1000 * p50:.2f} {1000 * p99:.2f}" for name, (p50, p99) in times.items()),
        f"{minute.retained} retained, {minute.prefix['hits']} hits, {minute.objects} objects",
        ", ".join(f"{count} {name}" for name, count in minute.counts.items()),
    ]
    print("; ".join(parts), flush=True)


# ---- the verdict


LEAST_JUDGED = 600  # seconds with cache and store full, before which memory is not judged


@dataclass
class Verdict:
    """Begins once cache and store are full, and compares what then came first and last, at most ten minutes of each."""

    warm: int  # the first minute that counts
    growth: float | None  # of what is held, as a share; None if too little was seen
    slope: float | None  # by least squares over all that counts, per hour
    p99: tuple[float, float] | None  # of a step, medians of the first and the last third
    processor_p99: tuple[float, float] | None

    @classmethod
    def of(cls, minutes):
        full = [m.evicted > 0 and m.store > 0.9 * STORE_BYTES for m in minutes]
        warm = full.index(True) + 1 if True in full else len(minutes)
        counted = minutes[warm:]
        if len(counted) < 6 or counted[-1].seconds - counted[0].seconds < LEAST_JUDGED:
            return cls(warm, None, None, None, None)
        third = len(counted) // 3
        some = min(10, third)
        held = np.array([m.held for m in counted])
        base = np.median(held[:some])
        slope = np.polyfit([m.seconds for m in counted], held, 1)[0] * 3600
        wall, processor = (
            tuple(float(np.median(part)) for part in (values[:third], values[-third:]))
            for values in ([m.wall[1] for m in counted], [m.processor[1] for m in counted])
        )
        return cls(warm, float(np.median(held[-some:]) / base - 1), float(slope / base), wall, processor)

    def show(self):
        if self.growth is None:
            print("too short to judge memory: cache and store are to be full for ten minutes")
            return
        print(f"memory held: {self.growth:+.2%} from the first to the last; by least squares {self.slope:+.2%} an hour")
        for name, (first, last) in {"time": self.p99, "processor time": self.processor_p99}.items():
            print(f"p99 of a step's {name}: {1000 * first:.2f} ms, then {1000 * last:.2f} ms")


def draw(minutes, verdict, path):
    from matplotlib.figure import Figure

    from kvcache.plot import HUES, SIZE

    at = [m.seconds / 60 for m in minutes]
    panels = {
        "MiB": {
            "resident": [m.rss / 2**20 for m in minutes],
            "held": [m.held / 2**20 for m in minutes],
            "cache": [m.nbytes / 2**20 for m in minutes],
            "store": [m.store / 2**20 for m in minutes],
        },
        "ms a step": {
            "p99": [1000 * m.wall[1] for m in minutes],
            "p50": [1000 * m.wall[0] for m in minutes],
            "processor, p99": [1000 * m.processor[1] for m in minutes],
            "processor, p50": [1000 * m.processor[0] for m in minutes],
        },
        "retained": {"retained sequences": [m.retained for m in minutes]},
    }
    figure = Figure(figsize=(8, 7), layout="constrained")
    for ax, (unit, lines) in zip(figure.subplots(len(panels), 1, sharex=True), panels.items(), strict=True):
        for hue, (name, values) in zip(HUES, lines.items(), strict=False):
            ax.plot(at, values, label=name, color=hue, linewidth=1.5)
        if verdict.warm < len(minutes):
            ax.axvline(at[verdict.warm], color="#8C8C8C", linewidth=0.8, linestyle=":")
        ax.set_ylim(bottom=0)
        ax.set_ylabel(unit, fontsize=SIZE)
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(fontsize=SIZE, frameon=False, loc="lower right")
    ax.set_xlabel("minutes", fontsize=SIZE)
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--period", type=float, default=60, help="seconds between two looks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    parser.add_argument("--output", type=Path, help="where to draw it")
    arguments = parser.parse_args()
    use_one_arena()
    with tempfile.TemporaryDirectory() as folder:
        watch = soak(arguments.seconds, arguments.period, arguments.seed, Path(folder))
    verdict = Verdict.of(watch.minutes)
    verdict.show()
    print(f"largest difference of a logit: {watch.clients.largest:.1e}")
    if arguments.json:
        seen = {"verdict": asdict(verdict), "minutes": [asdict(minute) for minute in watch.minutes]}
        arguments.json.write_text(json.dumps(seen))
    if arguments.output:
        draw(watch.minutes, verdict, arguments.output)
    if verdict.growth is not None and abs(verdict.growth) > 0.01:
        sys.exit("memory is not flat within 1 %")


if __name__ == "__main__":
    main()

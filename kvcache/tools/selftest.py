"""Check this build on this machine: its kernels, a generation, threads, files and `fork`."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvcache import FullAttention, KVCache, SlidingWindow
from kvcache.arguments import MAX_THREADS
from kvcache.columns import NO_LIMIT, columns, wrap
from kvcache.errors import sentence
from kvcache.layer import DTYPES, DType, count
from kvcache.runtime import get_num_threads, set_num_threads, show_config
from kvcache.stores import DirectoryStore
from kvcache.tools.terminal import print_paragraph

HEADS, KV_HEADS, DIM = 8, 2, 64
ROWS = 200  # that a call attends over: a tile and more
MOST_ERROR = 0.01  # of the largest element: AMX rounds queries to bf16; others stay within 0.0002

F32 = NDArray[np.float32]
Policy = FullAttention | SlidingWindow
POLICIES: tuple[Policy, ...] = (FullAttention(), SlidingWindow(90))


@dataclass(frozen=True)
class Check:
    """A check and its result."""

    name: str
    passed: bool
    said: str


def instruction_sets() -> list[str]:
    """Return the build's instruction sets that this machine has, as `KVCACHE_ISA` names them, the plain one first."""
    names = str(show_config("dicts")["build"]).split(", ")[2].split()
    return [name for name in names if _has(name)]


def machine() -> str:
    """Return in a line what this is: the build, the system, the instruction sets."""
    found = show_config("dicts")
    versions = f"Python {found['python']}, NumPy {found['numpy']}"
    return (
        f"{found['build']}; {found['system']}; {versions}; {' '.join(instruction_sets())}; "
        f"{count(get_num_threads(), 'thread')}"
    )


def run() -> Iterator[Check]:
    """Yield each check once it is done."""
    for name in instruction_sets():
        yield _check(f"kernels, {name}", partial(_check_kernels, name))
    yield _check("generation", _check_generation)
    yield _check("threads", _check_threads)
    yield _check("files", _check_files)
    if hasattr(os, "fork"):
        yield _check("fork", _check_fork)


def main() -> int:
    """Print each check once it is done, and a line to send; return the command's status."""
    checks = []
    for check in run():
        checks.append(check)
        print_paragraph(f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.said}")
        sys.stdout.flush()  # the next one may end the process
    passed = sum(check.passed for check in checks)
    print()
    print(wrap(f"{passed} of {count(len(checks), 'check')} passed: {machine()}", columns(NO_LIMIT)))
    return 0 if passed == len(checks) else 1


def _check(name: str, function: Callable[[], str]) -> Check:
    """Run a check, which returns what it found, or raises."""
    try:
        return Check(name, True, function())
    except Exception as error:  # whatever it is, it is what the user should send
        return Check(name, False, f"{type(error).__name__}: {sentence(error)}")


def _expect(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)


# ---- kernels


@contextmanager
def _isa(name: str) -> Iterator[None]:
    """Let caches that are made meanwhile use an instruction set."""
    before = os.environ.get("KVCACHE_ISA")
    os.environ["KVCACHE_ISA"] = name
    try:
        yield
    finally:
        del os.environ["KVCACHE_ISA"]
        if before is not None:
            os.environ["KVCACHE_ISA"] = before


def _has(name: str) -> bool:
    with _isa(name):
        return bool(show_config("dicts")["isa"])


def _random(*shape: int) -> F32:
    return np.random.default_rng(shape).standard_normal(shape, dtype=np.float32)


def _attend(dtype: DType, policy: Policy, num_tokens: int) -> F32:
    """Attend for the last tokens of a sequence."""
    kept = KVCache(1, KV_HEADS, DIM, ROWS + num_tokens, dtype=dtype, policy=policy)
    k, v = (_random(ROWS + num_tokens, KV_HEADS, DIM + i)[:, :, :DIM] for i in range(2))
    with kept.batch(ROWS) as batch:
        batch.put(0, k[:ROWS], v[:ROWS])
    with kept.batch(num_tokens) as batch:
        return np.asarray(batch.attend(0, _random(num_tokens, HEADS, DIM), k[ROWS:], v[ROWS:]))


def _reference(policy: Policy, num_tokens: int) -> F32:
    """Compute what `_attend` does, for f32, without a cache."""
    k, v = (_random(ROWS + num_tokens, KV_HEADS, DIM + i)[:, :, :DIM] for i in range(2))
    positions = np.arange(ROWS + num_tokens)
    age = positions[ROWS:, None] - positions
    window = policy.window if isinstance(policy, SlidingWindow) else len(positions)
    return _attend_plainly(_random(num_tokens, HEADS, DIM), k, v, (age >= 0) & (age < window))


def _attend_plainly(q: F32, k: F32, v: F32, shown: NDArray[np.bool_]) -> F32:
    """Attend in f64; `shown` says which keys each query sees."""
    k, v = (np.repeat(x.astype(float), HEADS // KV_HEADS, axis=1) for x in (k, v))
    weights = np.where(shown, np.exp(np.einsum("qhd,khd->hqk", q, k) / DIM**0.5), 0)
    return np.asarray(np.einsum("hqk,khd->qhd", weights / weights.sum(axis=2, keepdims=True), v), np.float32)


def _check_kernels(name: str) -> str:
    """Compare attention by an instruction set with attention by the plain one, and that, in f32, with NumPy."""
    worst = 0.0
    for dtype, policy, num_tokens in product(DTYPES, POLICIES, (1, 3, 40)):
        with _isa("scalar"):
            wanted = _attend(dtype, policy, num_tokens)
        if name == "scalar" and dtype == "f32":
            wanted = _reference(policy, num_tokens)
        with _isa(name):
            found = _attend(dtype, policy, num_tokens)
        error = float(np.abs(found - wanted).max() / np.abs(wanted).max())
        _expect(error <= MOST_ERROR, f"{dtype}, {policy}, {num_tokens} tokens: off by {error:.3g}")
        worst = max(worst, error)
    return f"{len(DTYPES)} types, the largest difference {worst:.1g}"


# ---- a generation


@dataclass(frozen=True)
class _Model:
    """A model of random weights: two layers of attention, each beside an eighth of what it gets."""

    embedding: F32
    layers: list[list[F32]]  # for queries, keys, values
    head: F32

    @classmethod
    def make(cls) -> _Model:
        hidden = HEADS * DIM
        layers = [
            [_random(n * DIM, hidden, seed + layer)[:, :, -1] for seed, n in ((1, HEADS), (3, KV_HEADS), (5, KV_HEADS))]
            for layer in range(2)
        ]
        return cls(_random(256, hidden), layers, _random(256, hidden, 1)[:, :, 0])

    def next_token(self, tokens: Sequence[int], attend: Callable[[int, F32, F32, F32], F32]) -> int:
        """Return the likeliest token behind these."""
        x = self.embedding[np.asarray(tokens)]
        for layer, weights in enumerate(self.layers):
            q, k, v = ((x @ w.T / (HEADS * DIM) ** 0.5).reshape(len(x), -1, DIM) for w in weights)
            x = x / 8 + attend(layer, q, k, v).reshape(len(x), -1)
        return int((self.head @ x[-1]).argmax())


def _check_generation() -> str:
    """Compare tokens generated through a cache with tokens generated by the same model without a cache."""
    model = _Model.make()
    tokens, wanted = [[*b"Once upon a time"] for _ in range(2)]
    kept = KVCache(2, KV_HEADS, DIM, 64, dtype="f32")
    for i in range(24):
        new = tokens if i == 0 else tokens[-1:]
        with kept.batch(len(new)) as batch:
            tokens.append(model.next_token(new, lambda layer, q, k, v: np.asarray(batch.attend(layer, q, k, v))))
        wanted.append(model.next_token(wanted, lambda _, q, k, v: _attend_plainly(q, k, v, np.tri(len(q), dtype=bool))))
    _expect(tokens == wanted, f"{tokens}, not {wanted}")
    return f"{i + 1} tokens as without a cache"


# ---- threads, files, fork


def _results() -> list[F32]:
    return [_attend(dtype, FullAttention(), 40) for dtype in DTYPES]


def _same(one: Sequence[F32], other: Sequence[F32]) -> bool:
    return all(map(np.array_equal, one, other))


def _check_threads() -> str:
    """Compare results of any number of threads, and of calls beside each other, bit for bit."""
    before, wanted = get_num_threads(), _results()
    most = min(before + 1, MAX_THREADS)
    try:
        for number in range(1, most + 1):
            set_num_threads(number)
            _expect(_same(_results(), wanted), f"{number} threads give other results than {before}")
    finally:
        set_num_threads(before)
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(_results) for _ in range(8)]
        _expect(all(_same(each.result(), wanted) for each in beside), "calls beside each other give other results")
    return f"1 to {most}, and 4 callers, to the bit"


def _check_files() -> str:
    """Save a state and load it; share a folder of blocks between two stores."""
    kept = KVCache(1, KV_HEADS, DIM, ROWS)
    with kept.batch(ROWS) as batch:
        batch.put(0, *(_random(ROWS, KV_HEADS, DIM) for _ in range(2)))
    with tempfile.TemporaryDirectory() as folder:
        encoding = sys.getfilesystemencoding()
        name = "h\N{LATIN SMALL LETTER E WITH ACUTE}".encode(encoding, "ignore").decode(encoding)
        file = os.path.join(folder, f"{name}.state")
        for _ in range(2):  # the second one replaces the first
            kept.save(file)
        _expect(np.array_equal(KVCache.load(file).keys(0), kept.keys(0)), "a state is loaded with other rows")
        one, other = (DirectoryStore(os.path.join(folder, name), max_bytes=1 << 20) for _ in range(2))
        key = 64 * "a"
        one[key] = b"value"
        _expect(other[key] == b"value", "a store does not find what another one wrote")
        del other[key]
        _expect(key not in one, "a store finds what another one deleted")
    return "a state, a store"


def _check_fork() -> str:
    """Attend in a child of this process."""
    wanted = _results()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are threads is the point
        child = os.fork()
    if child == 0:
        try:
            os._exit(not _same(_results(), wanted))
        finally:  # something was raised, which must not go on with the checks in a second process
            os._exit(1)
    _expect(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child of a fork gives other results")
    return "a child attends"

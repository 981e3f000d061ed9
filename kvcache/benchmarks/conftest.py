"""Fixtures and parameters of the benchmarks: implementations, contexts, types, and the clock."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.benchmarks import Case, Implementation, options
from kvcache.benchmarks.known import Known, check
from kvcache.benchmarks.ours import Ours
from kvcache.tools.peers import KINDS, serve

ROUNDS = 256  # the most rounds of one benchmark, and so the most tokens that it appends
STEPS = 4  # last tokens of a filled cache, which are appended one by one
MORE = ROUNDS + 2 * STEPS  # tokens that a cache can take beyond its context
ALIKE = {"q8_0": ("int8", "u8", "fp8"), "q4_0": ("int4",)}  # peers' types that are timed beside a type of ours


# ---- timing


class Clock:
    """Times calls at one context and type, through the ``benchmark`` fixture."""

    def __init__(self, config: pytest.Config, benchmark: Any, context: int, dtype: str) -> None:
        self.context, self.prompt = context, min(options.chosen(config, "prompt"), max(1, context // 2))
        self._benchmark = benchmark
        self._least, self._seconds = config.getoption("benchmark_min_rounds"), config.getoption("benchmark_max_time")
        names = ("num-layers", "num-heads", "num-kv-heads", "head-dim", "threads")
        sizes = {name.replace("-", "_"): options.chosen(config, name) for name in names}
        self.case = Case(max_seq_len=context + MORE, dtype=dtype, **sizes)

    def time(self, what: str, prepare: Callable[[], tuple[Any, ...]], call: Callable[..., object]) -> None:
        """Time a call as often as time allows; before each call, `prepare` makes its arguments."""
        case = self.case
        sizes = f"{case.num_layers} layers of {case.num_heads}/{case.num_kv_heads} heads x {case.head_dim}"
        self._benchmark.group = f"{what}, {self.context:,} tokens, {sizes}, {case.dtype}"
        self._benchmark.extra_info.update(asdict(case))
        start = time.perf_counter()
        call(*prepare())
        rounds = int(float(self._seconds) / (time.perf_counter() - start))
        rounds = max(1, min(max(rounds, self._least), ROUNDS))
        self._benchmark.pedantic(call, setup=lambda: (prepare(), {}), rounds=rounds)


class Subject:
    """An implementation, ours or another, at one context and type."""

    def __init__(self, clock: Clock, make: Callable[[Case], Implementation]) -> None:
        self.context, self.prompt, self.layers = clock.context, clock.prompt, range(clock.case.num_layers)
        self.time = clock.time
        self._case, self._make = clock.case, make

    def needs(self, *methods: str) -> None:
        """Skip the benchmark if the implementation lacks a method that it needs."""
        if lacking := [name for name in methods if not hasattr(self._make, name)]:
            pytest.skip(f"it has no {' and no '.join(lacking)}")

    def filled(self, tokens: int | None = None, **changes: Any) -> Known:
        """Make a cache for the case with these changes; fill it with `tokens` tokens, by default the context."""
        tokens = tokens or self.context
        known = Known(self._make, replace(self._case, **changes))
        steps = min(STEPS, tokens - 1)
        known.append(tokens - steps)
        for _ in range(steps):
            known.append()
        return known

    def time_edit(
        self, what: str, ready: Callable[[Known], object], edit: Callable[[Any], object], **changes: Any
    ) -> None:
        """Time a call that edits a cache, each time on a fresh cache that `ready` has prepared."""
        held: list[Known] = []

        def prepare() -> tuple[Any]:
            held.clear()  # free the last cache before making the next
            held.append(self.filled(**changes))
            ready(held[0])
            return (held[0].cache,)

        self.time(what, prepare, edit)


# ---- the implementations and peers


@dataclass(frozen=True)
class Offered:
    """A task that a peer offers, and the type of ours to time beside it."""

    what: str
    key: str
    mode: str
    type: str
    dtype: str


class Peer:
    """A peer, in this process."""

    def __init__(self, clock: Clock, offered: Offered) -> None:
        case, self.time, self.what = clock.case, clock.time, offered.what
        self.calls = 1 if offered.what == "prompt attention" else case.num_layers
        self._task = serve.Task(
            offered.mode, offered.type, case.threads, case.num_heads, case.num_kv_heads, case.head_dim, clock.context,
            clock.prompt if offered.what == "prompt attention" else 1, case.num_layers,
        )  # fmt: skip
        self._work: serve.Work = importlib.import_module(f"kvcache.tools.peers.{offered.key}").set_up(self._task)
        self.run = self._work.run

    def check(self) -> None:
        """Compare the result of the peer's attention with the exact one."""
        check("attention", serve.error(self._task, self._work.out().astype(np.float64)), self._task.type)


def _offers(dtypes: tuple[str, ...]) -> Iterator[Any]:
    """Yield the offers of peers for these types. A missing peer gives a skipped offer, which says how to install it."""
    for key, kind in KINDS.items():
        if not kind.command():
            missing = pytest.mark.skip(reason=f"{kind.name} is not installed: {kind.install}")
            yield pytest.param(Offered("", key, "", "", dtypes[0]), id=key, marks=missing)
            continue
        parts = {"append": kind.append, "decode attention": kind.decode, "prompt attention": kind.prefill}
        for what, offers in parts.items():
            for mode, own in offers:
                for dtype in dtypes:
                    if own in (dtype, *ALIKE.get(dtype, ())):
                        name = f"{what.split()[0]}-{key}-{mode}-{own}"
                        yield pytest.param(Offered(what, key, mode, own, dtype), id=name)


def pytest_configure(config: pytest.Config) -> None:
    """Check the options; with ``-p kvcache.benchmarks`` that was done before this file was found."""
    options.check(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise by contexts, types and implementations."""
    config = metafunc.config
    metafunc.parametrize("context", options.chosen(config, "context"))
    if "peer" in metafunc.fixturenames:
        metafunc.parametrize("offered", [*_offers(options.chosen(config, "dtype"))])
    else:
        metafunc.parametrize("dtype", options.chosen(config, "dtype"))
        implementations = [pytest.param(Ours, id="kvcache")]
        implementations += [pytest.param(found, id=name) for name, found in options.implementations(config).items()]
        metafunc.parametrize("implementation", implementations)


# ---- fixtures


@pytest.fixture
def subject(request: pytest.FixtureRequest, benchmark: Any, implementation: Any, context: int, dtype: str) -> Subject:
    """An implementation, ours or another."""
    return Subject(Clock(request.config, benchmark, context, dtype), implementation)


@pytest.fixture
def peer(request: pytest.FixtureRequest, benchmark: Any, context: int, offered: Offered) -> Peer:
    """An offer of an installed peer."""
    return Peer(Clock(request.config, benchmark, context, offered.dtype), offered)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip cases that an implementation says it does not support."""
    try:
        return (yield)
    except NotImplementedError as reason:
        pytest.skip(str(reason) or "it does not do that")


@pytest.hookimpl(optionalhook=True)  # for pytest without pytest-benchmark, which pytest_configure reports
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Add the version and the report of kvcache to saved figures."""
    machine_info["kvcache"] = kvcache.show_config("dicts")

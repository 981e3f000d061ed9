"""Simulate clients of a cache: threads, memory, pages, clock and fork() as a seed decides (world.h, sim.c).

To repeat a failure, build with build() and run the command that it names, with --trace to see every call.
"""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.compiling import (
    EMULATOR,
    ENVIRONMENT,
    LIBRARIES,
    ROOT,
    SANITIZERS,
    TIMEOUT,
    compile_all,
    compiler,
    run,
    works,
)

HERE = Path(__file__).parent
OPTIONS = {"--clients": 4, "--calls": 400, "--faults": 63}


def build(folder):
    """Build the core for the simulated world, under the sanitizers unless only quick tests run; return the program."""
    quick = ENVIRONMENT.get("KVCACHE_TEST_PART") == "quick"
    extra = SANITIZERS if not quick and works(compiler(), SANITIZERS, folder) else []
    command = [*compiler(), "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", *extra]
    command += [f"-I{ROOT / path}" for path in ("include", "src", "tests/sim")]

    def command_for(source):
        if source.parent == HERE:
            return command
        instrumented = [] if source.parent.name == "kernels" else ["-finstrument-functions"]
        return [*command, "-DSIM_CORE", "-include", HERE / "world.h", *instrumented]

    objects = compile_all(folder, [*HERE.glob("*.c"), *ROOT.glob("src/*/*.c")], command_for)
    run(*command, *objects, "-o", folder / "sim", *LIBRARIES)
    return folder / "sim"


@pytest.fixture(scope="module")
def sim(tmp_path_factory):
    if not sys.platform.startswith("linux") or EMULATOR:
        pytest.skip("the simulated world stands in for Linux, without an emulator")
    return build(tmp_path_factory.mktemp("sim"))


def play(sim, seed, options, runs=1):
    """Return what a failing run prints; None if none fails."""
    words = [str(word) for word in itertools.chain(["--seed", seed, "--runs", runs], *options.items())]
    done = subprocess.run(
        [sim, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=TIMEOUT
    )
    return done.stdout if done.returncode else None


def shrink(sim, seed):
    """Return options with which the seed still fails: fewer clients, no fault that is not needed, the fewest calls."""
    options = dict(OPTIONS)
    simpler = [{"--clients": n} for n in (1, 2, 3)] + [{"--faults": 63 & ~(1 << bit)} for bit in range(6)]
    for change in simpler:
        if "--faults" in change:
            change = {"--faults": options["--faults"] & change["--faults"]}
        if play(sim, seed, options | change):
            options |= change
    fewest, most = 0, options["--calls"]
    while fewest + 1 < most:  # a run with fewer calls begins as the one with more
        middle = (fewest + most) // 2
        fewest, most = (fewest, middle) if play(sim, seed, options | {"--calls": middle}) else (middle, most)
    return options | {"--calls": most}


def check(sim, seeds):
    for seed in seeds:
        if play(sim, seed, OPTIONS):
            options = shrink(sim, seed)
            words = " ".join(f"{name} {value}" for name, value in options.items())
            pytest.fail(f"sim --seed {seed} {words}\n{play(sim, seed, options)}", pytrace=False)


def test_seeds(sim):
    check(sim, range(1, 26))


@pytest.mark.parametrize(
    "seconds", [pytest.param(60, marks=pytest.mark.slow), pytest.param(3600, marks=pytest.mark.full)]
)
def test_new_seeds(sim, seconds):
    first, end = int.from_bytes(os.urandom(6), "big"), time.monotonic() + seconds
    check(sim, itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first)))


def test_the_same_seed_is_the_same_run(sim):
    def steps(seed):
        return subprocess.run([sim, "--seed", str(seed)], capture_output=True, text=True, check=True).stdout

    assert steps(5) == steps(5) != steps(6)

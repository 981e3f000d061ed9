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
from support.compiling import EMULATOR, LIBRARIES, ROOT, TIMEOUT, compile_all, run, watched
from support.defects import put_back, read_defects

HERE = Path(__file__).parent
DEFECTS = [*read_defects(HERE / "defects.txt")]
OPTIONS = {"--clients": 3, "--calls": 400, "--faults": 127}


def build(folder, core):
    """Build the core for the simulated world, under the address sanitizer where that works; return the program.

    Its kernels come from build_core(): they only compute.
    """
    core = watched(core, folder)
    sources = [source for source in ROOT.glob("src/*/*.c") if source.parent.name != "kernels"]
    return link(core, compile_sources(core, folder, [*HERE.glob("*.c"), *sources]), folder / "sim")


def build_with(folder, core, source, text):
    """Build it with this text in the place of a source of src/, and the other objects of build()."""
    core = watched(core, folder)
    own = folder / "changed"
    path = own / source
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    (changed,) = compile_sources(core, own, [path])
    return link(core, [changed, *(path for path in folder.glob("*.o") if path.name != changed.name)], own / "sim")


def compile_sources(core, folder, sources):
    command = [*core[0], "-std=gnu11", "-fno-openmp", f"-I{HERE}"]

    def command_for(source):
        if source.parent == HERE:
            return command
        return [*command, "-DSIM_CORE", "-include", HERE / "world.h", "-finstrument-functions"]

    return compile_all(folder, sources, command_for)


def link(core, objects, program):
    command, others = core
    kernels = [name for name in others if Path(name).name.startswith("kernels-")]
    run(*command, *objects, *kernels, "-o", program, *LIBRARIES)
    return program


@pytest.fixture(scope="module")
def sim(workshop, tmp_path_factory):
    if not sys.platform.startswith("linux") or EMULATOR:
        pytest.skip("the simulated world stands in for Linux, without an emulator")
    return build(tmp_path_factory.mktemp("sim"), workshop.core())


def play(sim, seed, options, runs=1):
    """Return what a failing run prints; None if none fails."""
    words = [str(word) for word in itertools.chain(["--seed", seed, "--runs", runs], *options.items())]
    done = subprocess.run(
        [sim, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=TIMEOUT
    )
    return None if done.returncode == 0 else f"status {done.returncode}\n{done.stdout}"


def shrink(sim, seed):
    """Return options with which the seed still fails: fewer clients, no fault that is not needed, the fewest calls."""
    options = dict(OPTIONS)
    simpler = [{"--clients": n} for n in (1, 2)] + [{"--faults": 127 & ~(1 << bit)} for bit in range(7)]
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


@pytest.mark.parametrize(
    "seeds",
    [
        range(1, 16),
        pytest.param(range(16, 41), marks=pytest.mark.slow),
        pytest.param(range(41, 201), marks=pytest.mark.full),
    ],
)
def test_seeds(sim, seeds):
    check(sim, seeds)


@pytest.mark.full
def test_new_seeds(sim):
    first, end = int.from_bytes(os.urandom(6), "big"), time.monotonic() + 3600
    check(sim, itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first)))


def test_the_same_seed_is_the_same_run(sim):
    def steps(seed):
        return subprocess.run([sim, "--seed", str(seed)], capture_output=True, text=True, check=True).stdout

    assert steps(5) == steps(5) != steps(6)


def test_defects_can_be_put_back():
    for defect in DEFECTS:
        put_back(*defect.values)


@pytest.mark.full
@pytest.mark.parametrize(("source", "changes"), DEFECTS)
def test_defects_put_back(sim, workshop, source, changes):
    program = build_with(sim.parent, workshop.core(), source, put_back(source, changes))
    start = time.monotonic()
    for seed in itertools.count(1):
        if said := play(program, seed, OPTIONS):
            break
        assert time.monotonic() - start < 600
    print(f"seed {seed}, {time.monotonic() - start:.0f} s: {said.strip().splitlines()[-1]}")

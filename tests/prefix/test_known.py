"""Compare what prefixes know with an oracle that was written from the header alone (known/known.h says how).

To repeat a failure, run the program that it names with --trace, which prints each call.
"""

import itertools
import os
import subprocess
import time
from pathlib import Path

import pytest
from support.compiling import EMULATOR, ENVIRONMENT, compile_all, is_for_windows, link
from support.defects import put_back, read_defects

HERE = Path(__file__).parent / "known"
SOURCES = [HERE / "known.c", *sorted({*HERE.glob("*.c")} - {HERE / "known.c"})]
DEFECTS = [*read_defects(HERE / "defects.txt")]
SCENES = {  # so many of each in turn
    "--runs": 20,
    "--names": 10,
    "--forks": 1,
    "--fits": 20,
    "--orders": 40,
    "--fetches": 40,
    "--states": 40,
    "--reuse": 40,
    "--forgets": 40,
    "--selected": 20,
}


@pytest.fixture(scope="module")
def known(build):
    """The program: the core, whose clock is the world's, and the oracle."""
    if is_for_windows() or EMULATOR:
        pytest.skip("the clock of the core is replaced by the linker, and runs are long")
    return build(*SOURCES)


def play(known, *options):
    """Return what a failing program prints; None if it does not fail."""
    command = [str(word) for word in (known, *options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    return f"{' '.join(command)}\n{done.stdout[-2000:]}" if done.returncode else None


def check(known, *options):
    if said := play(known, *options):
        pytest.fail(said, pytrace=False)


@pytest.mark.parametrize(
    ("seed", "runs"),
    [
        (1, 40),
        (1059, 1),
        (50196, 1),
        (920157, 1),
        pytest.param(41, 60, marks=pytest.mark.slow),
        pytest.param(101, 400, marks=pytest.mark.full),
    ],
)
def test_what_is_known(known, seed, runs):
    check(known, "--seed", seed, "--runs", runs)


@pytest.mark.parametrize(
    ("scene", "number"),
    [
        ("--fits", 500),  # what fits without a match fits with one
        ("--names", 300),
        ("--orders", 500),  # blocks are evicted in the order of their last use
        ("--fetches", 500),  # what is fetched goes in the order of its last use
        ("--states", 500),  # states go in the order of their last use
        ("--reuse", 500),  # tokens are taken from elsewhere
        ("--forgets", 500),  # what is forgotten while a store works is gone
        ("--selected", 200),  # tokens that select rows are not known
        ("--forks", 3),  # children of fork() have no state that nobody owns
    ],
)
def test_scenes(known, scene, number):
    check(known, "--seed", 1, scene, number)


@pytest.mark.full
def test_new_seeds(known):
    first, end = int.from_bytes(os.urandom(6), "big"), time.monotonic() + 900
    for seed in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first, 100)):
        check(known, "--seed", seed, "--runs", 100)
        check(known, "--seed", seed, "--fits", 20)


def build_with(workshop, folder, source, text):
    """Build the program with this text in the place of a source of src/."""
    command, objects = workshop.core()
    path = folder / source
    path.parent.mkdir()
    path.write_text(text)
    (changed,) = compile_all(folder, [path], lambda _: command)
    others = [name for name in objects if Path(name).name != changed.name]
    return link((command, [str(changed), *others]), folder, *SOURCES)


def test_defects_can_be_put_back():
    for defect in DEFECTS:
        put_back(*defect.values)


@pytest.mark.full
@pytest.mark.parametrize(("source", "changes"), DEFECTS)
def test_defects_put_back(workshop, known, tmp_path, source, changes):
    program = build_with(workshop, tmp_path, source, put_back(source, changes))
    start, seeds = time.monotonic(), itertools.count(1, 20)
    for seed, (scene, number) in itertools.product(itertools.islice(seeds, 100), SCENES.items()):
        options = "--seed", seed, scene, number
        said = play(program, *options)
        if said and not play(known, *options):
            break
        assert time.monotonic() - start < 600
    else:
        pytest.fail("it is not found")
    print(f"seed {seed}, {scene}, {time.monotonic() - start:.0f} s: {said.strip().splitlines()[-1]}")

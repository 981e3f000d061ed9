"""Compare everything that the core answers with one oracle, which is written from the header (world.h).

A driver makes calls from one table: one thread, threads of the system, threads of a simulated scheduler, one thread
whose allocations fail, or the bytes of a fuzzer.  What one thread fails on is printed as a short list of calls in C.
Two more drivers play in closed worlds, and know there exactly what goes (closed.h, victims.h).
To repeat a failure, run the program that the test names; TESTING.md says how.
"""

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import compiling
from support.compiling import EMULATOR, ENVIRONMENT, ROOT, compile_all, is_for_windows, public_functions, run
from support.defects import put_back, read_defects
from world import fields

HERE = Path(__file__).parent
SOURCES = compiling.world_sources()
DEFECTS = [*read_defects(HERE / "defects.txt")]
PARTS = {"quick": (1, 1), "full": (4000, 10)}  # the first seed, and how many times as many runs
ALONE = "drive_thread", "drive_faults", "drive_orders", "drive_limits"
RUNS = {
    "drive_thread": 60,
    "drive_scheduler": 20,
    "drive_threads": 8,
    "drive_faults": 6,
    "drive_fuzz": 40,
    "drive_orders": 200,
    "drive_limits": 100,
}

ELSEWHERE = {  # public functions that are in no row of the table, with the reason
    "each world, or each call, makes it": {
        "kvc_cache_new",
        "kvc_new_sequence",
        "kvc_strerror",
        "kvc_last_error",
        "kvc_set_last_error",
        "kvc_type_name",
        "kvc_row_bytes",
        "kvc_block_size",
    },
    "it is compared after each call": {
        "kvc_seq_len",
        "kvc_position_range",
        "kvc_next_position",
        "kvc_can_resume",
        "kvc_exact_to",
        "kvc_sequences",
        "kvc_positions",
        "kvc_nbytes",
        "kvc_get_stats",
        "kvc_blocks",
        "kvc_prefix_get_stats",
        "kvc_prefix_take_events",
    },
    "it answers the same all the time": {
        "kvc_version",
        "kvc_build_info",
        "kvc_isa",
        "kvc_threading_layer",
        "kvc_capacity",
        "kvc_capacity_bytes",
    },
    "it depends on the machine": {"kvc_num_threads", "kvc_set_num_threads", "kvc_utilization"},
    "stores in folders have tests of their own": {"kvc_dir_store_new", "kvc_dir_store_free"},
}


def test_every_public_function_is_in_the_table_or_has_a_reason():
    table = {
        name
        for names in re.findall(r'^    \{"([^"]+)", \d+,', (HERE / "calls.c").read_text(), re.M)
        for name in names.split()
    }
    elsewhere = set().union(*ELSEWHERE.values())
    assert not table & elsewhere
    assert (table | elsewhere) & public_functions() == public_functions(), public_functions() - table - elsewhere


@pytest.fixture(scope="module")
def drivers(workshop, tmp_path_factory):
    """A function that returns the program of a driver, and builds it if there is none yet."""
    if is_for_windows() or EMULATOR or not sys.platform.startswith("linux"):
        pytest.skip("the world replaces the clock of the core, and forks")
    programs = {}

    def program(driver):
        if driver not in programs:
            programs[driver] = build(driver, workshop.core(), tmp_path_factory.mktemp(driver))
        return programs[driver]

    return program


SMALL = "-DKVC_SIZE(usual, simulated)=(simulated)"  # as in scheduler.h


def build(driver, core, folder, changed=()):
    """Build a driver with a core as it is tested, or, for the scheduler, as it is simulated.

    A changed source replaces the core's source of the same name. Texts are short, and sizes of attention small.
    """
    if driver == "drive_scheduler":
        return build_simulated(compiling.watched(core, folder), folder, changed)
    # The core alone is watched, which makes runs half as long; clients of drive_threads share the oracle.
    flags = ["-fno-sanitize=all"] if any(word.startswith("-fsanitize=") for word in core[0]) else []
    command, objects = core
    folder_of_core = Path(objects[-1]).parent
    folder_of_parts = folder_of_core / f"world-{os.getpid()}"
    notes = [SMALL, "-D_DEFAULT_SOURCE=", "-include", folder_of_parts / "fields.h"]

    def command_for(source):
        return [*command, *flags, *(notes if source.parent == HERE else [])]

    def small(source):
        return [*command, SMALL]

    parts = compiled_once(folder_of_parts, SOURCES, command_for, fields.write)
    attention = compiled_once(folder_of_core / f"small-{os.getpid()}", ROOT.glob("src/attend/*.c"), small)
    objects = in_place_of(in_place_of(objects, attention), compile_all(folder, changed, small))
    return compiling.link((command, objects), folder, HERE / f"{driver}.c", flags=flags, parts=parts)


def in_place_of(objects, others):
    """Return objects; each of the others replaces the object of its name."""
    names = {Path(path).name for path in others}
    return [*(path for path in objects if Path(path).name not in names), *others]


def compiled_once(folder, sources, command_for, write=lambda _: []):
    """Compile sources, and those that a function writes into the folder, unless it is there; return the objects."""
    if not folder.exists():
        folder.mkdir()
        compile_all(folder, [*sources, *write(folder)], command_for)
    return [*folder.glob("*.o")]


def build_simulated(core, folder, changed=()):
    """Build the core for the simulated world, with changed sources in the place of those of the same names.

    Its kernels come from build_core(): they only compute. The other objects are compiled once in a process.
    """
    command, others = core
    flags = [*command, "-std=gnu11", "-fno-openmp", "-fno-sanitize=undefined"]  # drive_thread's core has it

    def command_for(source):
        if source.parent == HERE:
            return [*flags, SMALL]
        return [*flags, "-DSIM_CORE", "-include", HERE / "scheduler.h", "-finstrument-functions"]

    def simulated(sources):
        return [path for path in sources if path.parent.name != "kernels"]

    sources = [*simulated(ROOT.glob("src/*/*.c")), *SOURCES, HERE / "drive_scheduler.c", HERE / "scheduler.c"]
    objects = compiled_once(Path(others[-1]).parent / f"simulated-{os.getpid()}", sources, command_for)
    objects = in_place_of(objects, compile_all(folder, simulated(changed), command_for))
    kernels = [name for name in others if Path(name).name.startswith("kernels-")]
    program = folder / "drive_scheduler"
    run(*command, *objects, *kernels, "-o", program, *compiling.LIBRARIES)
    return program


def play(program, seed, runs, *words):
    """Return what a failing program prints; None if it does not fail."""
    command = [str(word) for word in (program, "--seed", seed, "--runs", runs, *words)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=ENVIRONMENT
    )
    return f"{' '.join(command)}\n{done.stdout[-8000:]}" if done.returncode else None


def simplify(program, seed):
    """Return what drive_scheduler prints with as few clients, faults and calls as a seed still fails with."""
    options, said = {"--clients": 3, "--faults": 127, "--calls": 400}, None
    less = [("--clients", 1), *(("--faults", 1 << i) for i in range(7)), *(("--calls", 200 >> i) for i in range(8))]
    for name, number in less:
        fewer = options | {name: options[name] - number}
        if shorter := play(program, seed, 1, *itertools.chain(*fewer.items())):
            options, said = fewer, shorter
    return said


def check(program, seed, runs):
    if said := play(program, seed, runs):
        failing = re.findall(r"^seed (\d+)", said, re.M)
        if program.name == "drive_scheduler" and failing:
            said = simplify(program, failing[-1]) or said
        pytest.fail(said, pytrace=False)


PLAYS = [("quick", driver) for driver in RUNS if driver != "drive_thread"]  # the test of fields plays that
PLAYS += [pytest.param("full", driver, marks=pytest.mark.full) for driver in RUNS]


@pytest.mark.parametrize(("part", "driver"), PLAYS)
def test_world(drivers, driver, part):
    seed, times = PARTS[part]
    check(drivers(driver), seed, RUNS[driver] * times)


@pytest.mark.full
@pytest.mark.parametrize("driver", RUNS)
def test_new_seeds(drivers, driver):
    first = int.from_bytes(os.urandom(5), "big")
    end = time.monotonic() + (3600 if driver == "drive_scheduler" else 600)
    for seed in itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first, RUNS[driver])):
        check(drivers(driver), seed, RUNS[driver])


def test_each_public_field_is_drawn_as_0_and_not_and_beside_others(drivers):
    """Many short runs, because each draws the layers of its cache once."""
    command = [drivers("drive_thread"), "--seed", "1", "--runs", "300", "--calls", "100"]
    said = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | {"FIELDS": "1"})
    assert not said.returncode, said.stdout
    assert not [*fields.undrawn(said.stdout.splitlines())]


def test_the_same_seed_is_the_same_run(drivers):
    def trace(seed):
        words = [drivers("drive_scheduler"), "--seed", str(seed), "--trace", "1"]
        return subprocess.run(words, capture_output=True, check=True, env=ENVIRONMENT).stdout

    assert trace(5) == trace(5) != trace(6)


def test_defects_can_be_put_back():
    for defect in DEFECTS:
        put_back(*defect.values)


def build_all_with(core, folder, source, text):
    """Build drivers with this text in the place of a source of src/."""
    path = folder / source
    path.parent.mkdir()
    path.write_text(text)
    programs = []
    for driver in (*ALONE, "drive_scheduler"):
        (own := folder / driver).mkdir()
        programs.append(build(driver, core, own, [path]))
    return programs


@pytest.mark.full
@pytest.mark.parametrize(("source", "changes"), DEFECTS)
def test_defects_put_back(workshop, tmp_path, source, changes):
    programs = build_all_with(workshop.core(), tmp_path, source, put_back(source, changes))
    start = time.monotonic()
    for seed, program in ((seed, program) for seed in itertools.count(1, 40) for program in programs):
        if said := play(program, seed, 40):
            break
        assert time.monotonic() - start < 600
    print(f"seed {seed}, {time.monotonic() - start:.0f} s: {said.strip().splitlines()[-1]}")

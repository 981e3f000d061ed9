"""Put defects that nobody chose into src/, one at a time, and see which machine finds each: no test that is written by
hand runs here.

    python tests/support/fresh.py --seed 1 --number 8 --seconds 600 [folder]    # keeps what it builds in the folder

A seed draws two kinds of defects.

- A change of one line, as mutate.py makes them. It counts if a quick program of tests/c runs the line, the compiler
  makes other code of it, and same_changes.txt does not list it.
- What a former commit mended. It counts if the commit changes one source of src/, in at most LINES lines, and a
  program or an input of a fuzzer. One of these must fail today once the change of the source is taken back.

Kernels are left out, as in mutate.py. The machines take turns with new seeds until one fails or the time is up. Prints
for each defect the machine that found it, and the seconds of a processor until then.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["KVCACHE_TEST_PART"] = "quick"  # without sanitizers
from sim import test_sim as sim
from support import coverage, mutate
from support.compiling import (
    FLAGS,
    LIBRARIES,
    OPENMP,
    ROOT,
    compile_all,
    compile_core,
    compiler,
    divert,
    diverted_by,
    run,
)

LINES = 12
TURN = 6  # seconds of a processor that each machine has in turn, or about so many
HANGS = 60  # seconds of a processor after which a program is taken to run for ever
FUZZERS = sorted(ROOT.glob("tests/fuzz/fuzz_*.c"))
ALTERED = {"fuzz_attention": 10, "fuzz_calls": 10, "fuzz_state": 80}  # how often each input in a turn
REPLAY = ROOT / "tests/fuzz/replay.c"
SEEDED = ROOT / "tests/c/interface/test_random_threads.c"
KERNELS = ROOT / "tests/c/kernels/test_kernels.c"


# ---- programs


class Bench:
    """The core, and the programs that are linked with it."""

    def __init__(self, folder):
        self.folder = folder
        self.command = [*compiler(), *(flag for flag in FLAGS if flag != "-g"), "-w", OPENMP]
        self.core = compile_core(folder, self.command)
        self.parts = {}
        for name in ("programs", "changed", "sim"):
            (folder / name).mkdir(exist_ok=True)
        sim.build(folder / "sim")

    def compile(self, source):
        if source not in self.parts:
            command = [*self.command, "-DTEST_STOPS"]
            (self.parts[source],) = compile_all(self.folder / "programs", [source], lambda _: command)
        return self.parts[source]

    def change(self, source, text):
        """Return the core's objects with another text of a source; None if they are the same, or none."""
        path = self.folder / "changed" / source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        target = path.parent / f"{path.parent.name}-{path.stem}.o"
        if subprocess.run([*self.command, "-c", path, "-o", target], capture_output=True).returncode:
            return None
        if target.read_bytes() == (self.folder / target.name).read_bytes():
            return None
        return [target if path.name == target.name else path for path in self.core]

    def link(self, core, *sources):
        program = self.folder / "changed" / sources[0].stem
        parts = [self.compile(source) for source in sources]
        if diverted := diverted_by(*sources):
            core = [divert(self.command, core, diverted, program.with_suffix(".core.o"))]
        run(*self.command, *parts, *core, "-o", program, *LIBRARIES)
        return program

    def passes(self, core, source):
        """Whether a test in C, or a fuzzer on its inputs, passes."""
        if source in FUZZERS:
            command = [self.link(core, source, REPLAY), "2", source.with_suffix(".txt")]
        else:
            command = [self.link(core, source)]
        return mutate.play(command, HANGS)[0]


# ---- defects


@dataclass
class Defect:
    name: str
    source: str  # of src/
    text: str


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


def test_of(path):
    """The program of a changed file that can say whether a former commit mended something; None: there is none."""
    if re.fullmatch(r"tests/c/\w+/test_\w+\.c", path) or re.fullmatch(r"tests/fuzz/fuzz_\w+\.(c|txt)", path):
        program = (ROOT / path).with_suffix(".c")
        return program if program.exists() else None
    return None


def taken_back(commit):
    """Return the source that a commit changed, its text without that change, and the tests in C that it changed.

    None if the commit changed more or less, or its change cannot be taken back today.
    """
    counts = git("show", "--numstat", "--format=", commit).split("\n")
    changed = [line.split("\t") for line in counts if line]
    sources = [row for row in changed if re.fullmatch(r"src/(?!kernels/)\w+/\w+\.[ch]", row[2])]
    tests = {test for row in changed if (test := test_of(row[2]))}
    if len(sources) != 1 or not sources[0][2].endswith(".c") or not tests:
        return None
    added, removed, path = sources[0]
    if int(added) + int(removed) > LINES or not (ROOT / path).exists():
        return None
    patch = git("show", "--format=", commit, "--", path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / path).read_text())
        words = ["patch", "-R", "-p1", "-s", "-f", "-F0"]
        done = subprocess.run(words, cwd=folder, input=patch, text=True, capture_output=True)
        return (path.removeprefix("src/"), copy.read_text(), tests) if done.returncode == 0 else None


def former(bench, seed):
    """Yield each former defect, in an order that the seed draws."""
    commits = git("log", "--no-merges", "--format=%h %s", "--", "src").splitlines()
    for line in sorted(commits, key=lambda line: hashlib.sha256(f"{seed} {line}".encode()).digest()):
        if found := taken_back(line.split()[0]):
            source, text, tests = found
            core = bench.change(source, text)
            if core and not all(bench.passes(core, test) for test in sorted(tests)):
                yield Defect(line, source, text)


def covered(folder):
    """The lines of each source that the quick programs run, measured once."""
    measured = folder / "covered.json"
    if not measured.exists():
        counting = folder / "counting"
        counting.mkdir(exist_ok=True)
        coverage.play(counting)
        lines = defaultdict(dict)
        for (source, line), count in coverage.read_counts(counting)["lines"].items():
            lines[source][line] = count
        measured.write_text(json.dumps(lines))
    read = json.loads(measured.read_text())
    return {source: {int(line): count for line, count in lines.items()} for source, lines in read.items()}


def one_line(bench, seed):
    """Yield each change of one line, in an order that the seed draws."""
    sources = sorted(path for path in ROOT.glob("src/*/*.c") if path.parent.name != "kernels")
    possible = [change for path in sources for change in mutate.changes_of(path)]
    listed = mutate.read_listed(possible)
    all_programs = mutate.Program(Path(), Path(), lines=covered(bench.folder))
    for change in sorted(possible, key=lambda change: change.rank(seed)):
        if change not in listed and all_programs.runs(change) and bench.change(change.source, change.apply()):
            yield Defect(str(change), change.source, change.apply())


KINDS = {"former": former, "one_line": one_line}

# ---- machines


def spent():
    """The seconds of a processor that programs have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def simulate(bench, defect, core):
    program = sim.build_with(bench.folder / "sim", defect.source, defect.text)
    first = 1
    while True:
        end = spent() + TURN
        while spent() < end:
            if sim.play(program, first, sim.OPTIONS):
                yield f"sim --seed {first}"
                first += 1
        yield None


def fuzz(bench, fuzzer, core):
    """Its inputs, and alterations of them, of which there are more each time."""
    program = bench.link(core, fuzzer, REPLAY)
    for seed in itertools.count(1):
        command = [program, str(ALTERED[fuzzer.stem]), fuzzer.with_suffix(".txt"), str(seed)]
        yield None if mutate.play(command, HANGS)[0] else f"{fuzzer.stem}, seed {seed}"


def call_at_random(bench, core):
    program = bench.link(core, SEEDED)
    seeds = itertools.count(1, 4)  # each run has four
    while True:
        end = spent() + TURN
        while spent() < end:
            if not mutate.play([program, str(seed := next(seeds))], HANGS)[0]:
                yield f"{SEEDED.stem} {seed}"
        yield None


def compare_kernels(bench, core):
    yield None if bench.passes(core, KERNELS) else KERNELS.stem


def machines(bench, defect, core):
    """The machines, each of which yields after a turn what failed in it, or None."""
    yield simulate(bench, defect, core)
    for fuzzer in FUZZERS:
        yield fuzz(bench, fuzzer, core)
    yield call_at_random(bench, core)
    yield compare_kernels(bench, core)


def find(bench, defect, seconds):
    """Return what found a defect, None if nothing did, and how long it took."""
    core = bench.change(defect.source, defect.text)
    running, start, found = list(machines(bench, defect, core)), spent(), None
    for machine in itertools.cycle(running):
        found = found or next(machine, None)
        if found or spent() - start > seconds:
            return found, spent() - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=8, help="of each kind")
    parser.add_argument("--seconds", type=float, default=600, help="of a processor, for each")
    parser.add_argument("--kind", choices=sorted(KINDS), help="one of the two alone")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder)
        for kind in [KINDS[options.kind]] if options.kind else KINDS.values():
            for defect in itertools.islice(kind(bench, options.seed), options.number):
                found, seconds = find(bench, defect, options.seconds)
                print(f"{found or 'not found'}, {seconds:.0f} s: {defect.name}", flush=True)


if __name__ == "__main__":
    main()

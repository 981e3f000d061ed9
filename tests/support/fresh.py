"""Put defects that nobody chose into src/, one at a time, and see which machine finds each: no test that is written by
hand runs here.

    python tests/support/fresh.py --seed 1 --number 8 --seconds 600 [folder]    # keeps what it builds in the folder

A seed draws two kinds of defects.

- A change of one line, as mutate.py makes them. It counts if a quick program of coverage.py runs the line, the compiler
  makes other code of it, and same_changes.txt does not list it.
- The change of a former commit, taken back. It counts if the commit changes one source of src/, in at most LINES lines,
  and a program or an input of a fuzzer. Without the change of the source, the program or input must fail today.

Kernels are left out, as in mutate.py. The machines take turns with new seeds until one fails or the time is up. A seed
with which the core fails without the change, too, finds nothing, and is named. Prints for each defect the machine that
found it, and the seconds of a processor until then.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["KVCACHE_TEST_PART"] = "quick"  # without sanitizers
from support import coverage, mutate
from support.compiling import ROOT, world_sources

LINES = 48
TURN = 6  # seconds of a processor that each machine has in turn, or about so many
HANGS = 60  # seconds of a processor after which a program is taken to run for ever
FUZZERS = sorted(ROOT.glob("tests/fuzz/fuzz_*.c"))
REPLAY = ROOT / "tests/fuzz/replay.c"

# ---- machines


@dataclass(frozen=True)
class Machine:
    """A program that makes an input of each seed."""

    name: str
    sources: tuple[Path, ...] = ()  # none: drive_scheduler
    words: Callable[[int], list] = lambda _: []
    num_seeds: int | None = None

    def say(self, seed):
        return " ".join([self.name, *(str(word) for word in self.words(seed) if not isinstance(word, Path))])


def sources_of(source):
    """The sources of a test in C, or of a program that replays a fuzzer's inputs."""
    if source not in FUZZERS:
        return (source,)
    return (source, REPLAY, *(world_sources() if source.stem == "fuzz_state" else ()))


def fuzzer(source, altered):
    """Replay a fuzzer's inputs, and so many alterations of each."""
    inputs = source.with_suffix(".txt")
    return Machine(source.stem, sources_of(source), lambda seed: [altered, inputs, seed])


def randomised(name):
    """Run the random steps of a program of tests/c alone."""
    source = ROOT / f"tests/c/{name}.c"
    return Machine(source.stem, (source,), lambda seed: [seed])


def world(driver, runs):
    """Let a driver of tests/world play so many seeds in a turn."""
    sources = () if driver == "drive_scheduler" else (ROOT / f"tests/world/{driver}.c", *world_sources())
    return Machine(driver, sources, lambda seed: ["--seed", 1 + (seed - 1) * runs, "--runs", runs])


MACHINES = [
    world("drive_scheduler", 1),
    fuzzer(ROOT / "tests/fuzz/fuzz_attention.c", 10),
    fuzzer(ROOT / "tests/fuzz/fuzz_state.c", 80),
    world("drive_thread", 10),
    world("drive_faults", 2),
    world("drive_orders", 40),
    world("drive_limits", 40),
    randomised("prefix/test_directory_posix"),
    Machine("test_kernels", (ROOT / "tests/c/kernels/test_kernels.c",), num_seeds=1),
]

# ---- programs


class Bench(mutate.Core):
    """The core, and the programs that are linked with it."""

    def __init__(self, folder):
        super().__init__(folder)
        for name in ("linked", "changed"):
            (folder / name).mkdir(exist_ok=True)
        self.parts = {}
        self.originals = {}  # programs without a change
        self.sound = {}  # whether an input passes without a change

    def link(self, core, *sources):
        if new := [source for source in sources if source not in self.parts]:
            self.parts |= self.compile(new)
        program = self.folder / ("linked" if core is self.objects else "changed") / sources[0].stem
        return mutate.link(self.command, {source: self.parts[source] for source in sources}, core, program)

    def build(self, machine, core, *changed):
        """Return a machine's program; the core has changes in these sources."""
        return self.link(core, *machine.sources) if machine.sources else self.simulate(*changed)

    def is_sound(self, machine, seed):
        """Whether an input that fails passes without the change."""
        if machine.sources not in self.originals:
            self.originals[machine.sources] = self.build(machine, self.objects)
        said = machine.say(seed)
        if said not in self.sound:
            self.sound[said] = plays(self.originals[machine.sources], machine.words(seed))
            if not self.sound[said]:
                print(f"without a change, too: {said}", flush=True)
        return self.sound[said]

    def passes(self, core, source):
        """Whether a test in C, or a fuzzer on its inputs, passes."""
        words = [2, source.with_suffix(".txt")] if source in FUZZERS else []
        return plays(self.link(core, *sources_of(source)), words)


def plays(program, words=()):
    return mutate.play([program, *map(str, words)], HANGS)[0]


# ---- defects


@dataclass
class Defect:
    name: str
    source: str  # of src/
    text: str


def git(*words):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True).stdout


def test_of(path):
    """The program of a changed file that can say whether a former commit mended something; None: no program can."""
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
        words = ["patch", "-R", "-p1", "-s", "-f"]
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
    possible = mutate.possible_changes()
    listed = mutate.read_listed(possible)
    all_programs = mutate.Program((), {}, lines=covered(bench.folder))
    for change in sorted(possible, key=lambda change: change.rank(seed)):
        if change not in listed and all_programs.runs(change) and bench.change(change.source, change.apply()):
            yield Defect(str(change), change.source, change.apply())


KINDS = {"former": former, "one_line": one_line}

# ---- turns


def spent():
    """The seconds of a processor that programs have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def turns(bench, machine, core, defect):
    """Let a machine try seeds; yield after a turn what failed in it, or None."""
    program, end = bench.build(machine, core, defect.source), spent() + TURN
    for seed in itertools.islice(itertools.count(1), machine.num_seeds):
        if not plays(program, machine.words(seed)) and bench.is_sound(machine, seed):
            yield machine.say(seed)
        if spent() > end:
            yield None
            end = spent() + TURN


def find(bench, defect, seconds):
    """Return what found a defect, None if nothing did, and how long it took."""
    core = bench.change(defect.source, defect.text)
    start, found = spent(), None
    running = [turns(bench, machine, core, defect) for machine in MACHINES]
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

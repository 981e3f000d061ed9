"""Count the lines and branches of src/ that the programs in tests/c and tests/world run.

    python tests/support/coverage.py [folder]    # keeps what it builds in the folder

Prints each folder's counts, the lines that no test runs, and last the sum; fails where that is less than it should be.
Code of templates counts once, however often it is compiled; branches that the compiler adds count, too.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.compiling import FLAGS, OPENMP, ROOT, compile_core, compiler, link, run, world_sources

# GCC's; programs then keep what a child of fork() counts: end_child() of tests/c/support/test.h.
COUNTING = ["--coverage", "-fprofile-update=atomic", "-Wl,-u,__gcov_dump"]
LEAST = {"lines": 97.0, "branches": 92.0}  # percent

# The programs that test the core, by their sources, with the words of each call. The first source names the program.
PROGRAMS = {(source,): [()] for source in sorted(ROOT.glob("tests/c/*/test_*.c"))}
for driver, runs in (("drive_thread", "40"), ("drive_faults", "4"), ("drive_orders", "40"), ("drive_limits", "40")):
    PROGRAMS[(ROOT / f"tests/world/{driver}.c", *world_sources())] = [("--runs", runs)]


def play(folder):
    """Run all programs on a core that counts."""
    command = [*compiler(), *FLAGS, OPENMP, *COUNTING]
    objects = compile_core(folder, command)

    def play_one(sources):
        program = link((command, objects), folder, *sources)
        for words in PROGRAMS[sources]:
            run(program, *words)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(play_one, sorted(PROGRAMS, key=lambda sources: -sources[0].stat().st_size)))


def read_counts(folder):
    """How often each line, and each branch of a line, of a source was taken."""
    counts = {"lines": defaultdict(int), "branches": defaultdict(int)}
    done = subprocess.run(
        ["gcov", "--json-format", "--stdout", "--branch-probabilities", *map(str, folder.glob("*.gcda"))],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    )
    for file in (file for line in done.stdout.splitlines() for file in json.loads(line)["files"]):
        if not (found := re.search(r"/src/(\w+/\w+\.[ch])$", file["file"])):
            continue
        for line in file["lines"]:
            place = found[1], line["line_number"]
            counts["lines"][place] += line["count"]
            for i, branch in enumerate(line["branches"]):
                counts["branches"][*place, i] += branch["count"]
    return counts


def percent(counts, folder=""):
    chosen = [count > 0 for place, count in counts.items() if place[0].startswith(folder)]
    return 100 * sum(chosen) / max(len(chosen), 1)


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        folder.mkdir(parents=True, exist_ok=True)
        play(folder)
        counts = read_counts(folder)
    folders = sorted({place[0].split("/")[0] for place in counts["lines"]})
    for name in folders:
        print(f"{name:8}", *(f"{percent(of, name + '/'):5.1f} % of {what}" for what, of in counts.items()))
    for source, line in sorted(place for place, count in counts["lines"].items() if not count):
        print(f"src/{source}:{line}:", (ROOT / "src" / source).read_text().splitlines()[line - 1].strip())
    found = {what: percent(of) for what, of in counts.items()}
    print("src/ in tests/c:", *(f"{value:.1f} % of {what}" for what, value in found.items()))
    return any(found[what] < least for what, least in LEAST.items())


if __name__ == "__main__":
    sys.exit(main())

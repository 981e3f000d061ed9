"""Put a fresh choice of defects into src/, one at a time, and see whether the simulator finds them.

    python tests/support/fresh.py --seed 1 --number 8 --seconds 60 [folder]

Draws two kinds by the seed: changes of one line, as mutate.py makes them, and what former commits mended. A former
commit counts if it changes a test and at most LINES lines of one source of src/, and its change there can be taken back
today. The list of the latter still has commits that mended nothing: read their subjects. Prints for each the first seed
of the simulator that fails and the seconds until then.
"""

import argparse
import hashlib
import itertools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sim import test_sim as sim
from support import mutate
from support.compiling import ROOT

LINES = 12


def git(*words, **options):
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, **options)


def taken_back(commit):
    """Return the source that a commit changed, and its text without that change; None if the commit does not count."""
    counts = git("show", "--numstat", "--format=", commit).stdout.split("\n")
    changed = [line.split("\t") for line in counts if line]
    sources = [row for row in changed if re.fullmatch(r"src/(?!kernels/)\w+/\w+\.[ch]", row[2])]
    if len(sources) != 1 or not sources[0][2].endswith(".c") or not any(row[2].startswith("tests/") for row in changed):
        return None
    added, removed, path = sources[0]
    if int(added) + int(removed) > LINES or not (ROOT / path).exists():
        return None
    patch = git("show", "--format=", commit, "--", path).stdout
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path
        copy.parent.mkdir(parents=True)
        copy.write_text((ROOT / path).read_text())
        done = subprocess.run(
            ["patch", "-R", "-p1", "-s", "-f", "-F0"], cwd=folder, input=patch, text=True, capture_output=True
        )
        return (path.removeprefix("src/"), copy.read_text()) if done.returncode == 0 else None


def former(seed):
    """Yield name, source and text of each former defect, in an order that the seed draws."""
    commits = git("log", "--no-merges", "--format=%h %s", "--", "src").stdout.splitlines()
    for line in sorted(commits, key=lambda line: hashlib.sha256(f"{seed} {line}".encode()).digest()):
        if found := taken_back(line.split()[0]):
            yield line, *found


def one_line(seed):
    """Yield name, source and text of each change of one line, in an order that the seed draws."""
    sources = sorted(path for path in ROOT.glob("src/*/*.c") if path.parent.name != "kernels")
    possible = [change for path in sources for change in mutate.changes_of(path)]
    listed = mutate.read_listed(possible)
    for change in sorted(possible, key=lambda change: change.rank(seed)):
        if change not in listed:
            yield str(change), change.source, change.apply()


def find(folder, source, text, seconds):
    """Return the first seed that fails and what it prints; None if none does in time, False if it does not compile."""
    try:
        program = sim.build_with(folder, source, text)
    except Exception:  # of the compiler's warnings, which are errors, too
        return False
    end = time.monotonic() + seconds
    for seed in itertools.count(1):
        if time.monotonic() > end:
            return None
        if said := sim.play(program, seed, sim.OPTIONS):
            return seed, said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=8, help="of each kind")
    parser.add_argument("--seconds", type=float, default=60, help="for each")
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        sim.build(folder)
        for kind in (one_line, former):
            left = options.number
            for name, source, text in kind(options.seed):
                start, found = time.monotonic(), find(folder, source, text, options.seconds)
                if found is False:
                    continue
                what = f"seed {found[0]}, {time.monotonic() - start:.0f} s" if found else "not found"
                print(f"{what}: {name}", flush=True)
                left -= 1
                if not left:
                    break


if __name__ == "__main__":
    main()

"""Build a driver of the world, and run it: python tests/world [drive_thread] [--seed 5914 --runs 1 --trace 1 ...]."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("KVCACHE_TEST_PART", "quick")  # without sanitizers, except for drive_scheduler
from support import compiling
from world.test_world import HERE, RUNS, build


def program_of(driver):
    """Return the program of a driver; it is built again if a source has changed."""
    sources = [*compiling.ROOT.glob("src/*/*.[ch]"), *compiling.HEADERS, *HERE.glob("*.*")]
    text = b"".join(path.read_bytes() for path in sorted(sources)) + os.environ.get("KVCACHE_C_FLAGS", "").encode()
    folder = compiling.ROOT / "build/world" / hashlib.sha256(text).hexdigest()[:16]
    program = folder / driver / driver
    if not program.exists():
        core = folder / f"core-{os.getpid()}"
        for new in (core, program.parent):
            new.mkdir(parents=True, exist_ok=True)
        build(driver, compiling.build_core(core), program.parent)
    return program


def main(driver="drive_thread", *words):
    if driver not in RUNS:
        if not driver.startswith("--"):
            return f"there is no {driver}; the drivers are {', '.join(RUNS)}"
        driver, words = "drive_thread", (driver, *words)
    return subprocess.call([program_of(driver), *words], env=compiling.ENVIRONMENT)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

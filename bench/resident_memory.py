"""Measure resident memory, of this process or of one of its own, where nothing else changes it."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

PROLOGUE = """
import json
import numpy as np
import kvcache

def resident():
    with open("/proc/self/smaps_rollup") as rollup:
        return 1024 * int(next(line for line in rollup if line.startswith("Rss:")).split()[1])

# Load, compile and allocate what first use does, so that it is not counted.
with kvcache.KVCache(1, 1, 8, 256) as cache:
    x = np.ones((128, 1, 8), np.float32)
    for n in (1, 128):
        with cache.batch(n) as batch:
            batch.put(0, x[:n], x[:n])
    cache.remove(10, 20, shift=False)
    cache.compact()
    cache.nbytes, cache.stats()
resident()
result = []
"""


def smaps() -> dict[str, int]:
    """Return this process's bytes of memory, by kind."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith("kB")}


def measure_in_child(code):
    """Run code that appends to `result`, and may use `resident()`, np and kvcache; return `result`."""
    script = PROLOGUE + textwrap.dedent(code) + "\nprint(json.dumps(result))\n"
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    return json.loads(done.stdout)

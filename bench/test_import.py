"""Measure the cost of `import kvcache` beside the cost of `import numpy`."""

import json
import os
import subprocess
import sys

import numpy as np

CODE = """
import json
import sys
import time
before = set(sys.modules)
times = [(time.thread_time(), time.perf_counter())]
import numpy
times.append((time.thread_time(), time.perf_counter()))
import kvcache
times.append((time.thread_time(), time.perf_counter()))
new = {name for name in set(sys.modules) - before if hasattr(sys.modules[name], "__file__")}  # Cython makes two without
names = {name.partition(".")[0] for name in new} - sys.stdlib_module_names - {"numpy", "kvcache"}
print(json.dumps([times, sorted(names)]))
"""


def test_import(figures, interleave):
    def load():
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        return json.loads(done.stdout)

    (found,) = interleave(load)
    times = 1e3 * np.diff([times for times, _ in found], axis=1)  # [run, numpy or kvcache, processor or wall time]
    (numpy, ours), wall = times[..., 0].T, times[:, 1, 1]
    note = f"of the processor; by the clock {np.median(wall):.1f}, at best {wall.min():.1f}"
    figures.samples("import kvcache after import numpy", ours, "ms", "<= 10", note)
    figures.ratio("import kvcache, cost over import numpy", ours, numpy)
    others = found[-1][1]
    figures.value("imported beside numpy and the standard library", ", ".join(others) or "nothing", "nothing")
    assert not others

"""State files that become shorter while they are read, as a copy over one makes them; in processes of their own.

A process that maps such a file ends with SIGBUS.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
from support.saved_states import SECRET, STATES

import kvcache

READ = """
import os, sys
import kvcache
from kvcache import _core, state
from support.saved_states import SECRET

path, when, how = sys.argv[1:]
cache = kvcache.KVCache(2, 8, 128, None)
cut = lambda length: os.truncate(path, length)
if when == "before the rows":
    for name in ("verify", "restore"):
        call = getattr(_core, name)
        setattr(_core, name, lambda *a, call=call: (cut(os.path.getsize(path) // 2), call(*a)))
elif when == "before the header":
    starts = state.saved.BEGINNING
    state.saved.BEGINNING = type("Beginning", (bytes,), {"startswith": lambda self, start: (cut(64), True)[1]})(starts)
else:
    loads = state.saved.json.loads
    state.saved.json.loads = lambda text: (cut(8), loads(text))[1]
try:
    if how.startswith("inspect"):
        state.inspect(path, verify=how == "inspect all")
    elif how == "load":
        kvcache.KVCache.load(path)
    else:
        cache.restore(path, secret=SECRET if how == "restore with a secret" else None)
except kvcache.StateFormatError as error:
    print(error)
assert not cache.seq_len()
cache.validate()
"""
HOW = ["inspect all", "load", "restore", "restore with a secret"]
QUICK = {
    ("before the rows", "inspect all"),
    ("before the rows", "load"),
    ("before the header", "restore with a secret"),
    ("behind the header", "inspect"),
}


def cases():
    for when in ("before the rows", "before the header", "behind the header"):
        for how in HOW if when == "before the rows" else ["inspect", *HOW]:
            yield pytest.param(when, how, marks=[] if (when, how) in QUICK else pytest.mark.slow)


@pytest.mark.skipif(sys.platform == "win32", reason="a file that is open cannot be cut there")
@pytest.mark.parametrize(("when", "how"), [*cases()])
def test_a_file_that_is_cut_is_an_error(tmp_path, when, how):
    path = tmp_path / "state"
    cache = kvcache.KVCache(2, 8, 128, None)
    rows = np.ones((1024, 8, 128), np.float32)
    with cache.batch(1024) as batch:
        for layer in range(2):
            batch.put(layer, rows, rows)
    cache.save(path, secret=SECRET)
    environment = os.environ | {"PYTHONPATH": str(STATES.parents[1]), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", READ, path, when, how]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path}: became shorter while it was read\n"

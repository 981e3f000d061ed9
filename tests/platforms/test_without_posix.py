"""Python without POSIX, as on Windows: everything is imported, and a build's own checks pass."""

import subprocess
import sys

import pytest

BEGIN = """
import sys, tempfile
sys.path[:] = {path!r}
from support import without_posix
without_posix.begin()
"""

SELFTEST = """
from kvcache.tools import selftest
checks = [*selftest.run()]
assert "fork" not in [check.name for check in checks]
assert all(check.passed for check in checks), checks
"""

STATE = """
import numpy as np, os
from kvcache import KVCache
from kvcache.models import reading
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "file")
    cache = KVCache(1, 1, 32, 100)
    for secret in (None, b"secret"):
        cache.save(path, secret=secret)
        KVCache.load(path, secret=secret).close()
    with reading.open_file(path) as file:
        assert file.read_array(0, file.size).tobytes() == file.read(0, file.size)
    os.mkdir(path + " of another kind")
    try:
        cache.save(path + " of another kind")
    except OSError as error:
        assert "is not a regular file" in str(error)
"""

STORE = """
import os
from kvcache.stores import DirectoryStore

with tempfile.TemporaryDirectory() as folder:
    store, key = DirectoryStore(folder, max_bytes=10_000), 64 * "a"
    store[key] = b"a value"
    assert dict(DirectoryStore(folder)) == {key: b"a value"}
    store.clear()
    assert os.listdir(folder) == ["usage.lock"]
"""

IMPORTS = """
import importlib, pkgutil
import kvcache
others = ("kvcache.hf", "kvcache.server", "kvcache.tools.peers", "kvcache.__main__", "kvcache.plot")
for module in pkgutil.walk_packages(kvcache.__path__, "kvcache."):
    if not module.name.startswith(others):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert error.name not in without_posix.MODULES, module.name
"""


@pytest.mark.parametrize("code", [SELFTEST, STATE, STORE, IMPORTS], ids=["selftest", "state", "store", "imports"])
def test_on_a_system_without_posix(code):
    done = subprocess.run(
        [sys.executable, "-c", BEGIN.format(path=sys.path) + code], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")

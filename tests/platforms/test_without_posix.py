"""Python without POSIX, as on Windows: everything is imported, and a build's own checks pass."""

import subprocess
import sys

import pytest

BEGIN = """
import sys, tempfile, threading
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
from kvcache.stores import DirectoryStore, directory, files

def work(folder, number):
    store = DirectoryStore(folder, max_bytes=10_000)
    for i in range(200):
        key = str(i * 7 % 30)
        store[key] = key.encode() * 200
        value = store.get(str(i * 3 % 30))
        assert value in (None, str(i * 3 % 30).encode() * 200)
        if i % 5 == number:
            store.pop(key, None)
    done.append(number)

done = []
with tempfile.TemporaryDirectory() as folder:
    threads = [threading.Thread(target=work, args=(folder, i)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    store = DirectoryStore(folder)
    with files.open_folder(store.path) as opened, directory._Usage(opened) as usage:
        assert usage.total == store.nbytes <= 10_000
        directory.LOCK_WAIT = 0.01
        try:
            store["a"] = b"value"
            raise AssertionError("it has written")
        except TimeoutError:
            pass
    with files.open_folder(store.path) as opened, directory._Temporary(opened) as temporary:
        path = opened.at(temporary.name)
        DirectoryStore(folder)
        assert os.path.exists(path)
        files.unlock(temporary.file)
        DirectoryStore(folder)
        assert not os.path.exists(path)
    store.clear()
    assert os.listdir(folder) == [directory.USAGE_NAME]
"""

IMPORTS = """
import importlib, pkgutil
import kvcache
for module in pkgutil.walk_packages(kvcache.__path__, "kvcache."):
    if not module.name.startswith(("kvcache.hf", "kvcache.tools.peers", "kvcache.__main__", "kvcache.plot")):
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


def test_other_processes_keep_an_open_file_for_a_moment(tmp_path, monkeypatch):
    """On Windows, what is open can neither be replaced nor removed."""
    from kvcache.stores import DirectoryStore, files

    store, failures = DirectoryStore(tmp_path), [PermissionError(13, "is open")] * 3
    store["a"] = b"value"

    def busy(call):
        def replaced(*arguments, **named):
            if failures:
                raise failures.pop()
            return call(*arguments, **named)

        return replaced

    for name in ("replace", "unlink"):
        monkeypatch.setattr(files.os, name, busy(getattr(files.os, name)))
    with pytest.raises(PermissionError):
        store["a"] = b"other"
    failures[:] = [PermissionError(13, "is open")] * 3
    monkeypatch.setattr(files, "BUSY_WAIT", 60.0)
    store["a"] = b"other"
    failures[:] = [PermissionError(13, "is open")] * 3
    del store["a"]
    assert not failures

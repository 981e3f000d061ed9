"""The build of llama.cpp on this cache, whose programs and library some tests run.

$KVCACHE_LLAMA_CPP names the folder of a build by integrations/llama.cpp/build.sh; an empty value means no build.
Without the variable, the build in the user's cache folder is used, if it was made from the sources in this checkout.
"""

import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from support.compiling import ROOT

BUILD = "integrations/llama.cpp/build.sh"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kvcache/llama.cpp")
SOURCES = [
    "include/*.h",
    *(f"integrations/llama.cpp/{name}" for name in ("kvcache.cmake", "pin.txt", "patches/*.patch")),
    *(f"integrations/llama.cpp/{name}" for name in ("src/*.*", "tests/*.cpp", "tests/*.h")),
    "src/*/*.[ch]",
]


def hash_of_sources(root=ROOT):
    """Return the hash of the sources that a checkout has in a build, as build.sh writes it."""
    paths = (path for pattern in SOURCES for path in sorted(root.glob(pattern), key=str))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def folder():
    """Return the folder of the build; skip the test if there is none."""
    named = os.environ.get("KVCACHE_LLAMA_CPP")
    if named == "":
        pytest.skip("KVCACHE_LLAMA_CPP names no build of llama.cpp")
    build = Path(named) if named else CACHE / "shared-openmp"
    signature = build / "kvcache.sha256"
    if not signature.exists():
        (pytest.fail if named else pytest.skip)(f"llama.cpp was not built in {build}: {BUILD} --tests --output {build}")
    if not named and signature.read_text().strip() != hash_of_sources():
        pytest.skip(f"llama.cpp in {build} was built of other sources: {BUILD} --tests")
    return build


def sources():
    """Return the folder of the pinned llama.cpp's sources; skip the test if they are not there.

    `build.sh --prepare` unpacks them without a build.
    """
    named = os.environ.get("KVCACHE_LLAMA_CPP")
    if named == "":
        pytest.skip("KVCACHE_LLAMA_CPP names no build of llama.cpp")
    build = Path(named) if named else CACHE / "shared-openmp"
    pin = build / "source.pin"
    if not pin.exists() or pin.read_text() != (ROOT / BUILD).with_name("pin.txt").read_text():
        pytest.skip(f"the pinned sources of llama.cpp are not in {build}: {BUILD} --prepare --output {build}")
    return build / "source"


def program(name):
    """Return the path of a program of the build; skip the test where it was not built."""
    path = folder() / "bin" / name
    if not path.exists():
        pytest.skip(f"{name} was not built: {BUILD} --tests --output {path.parents[1]}")
    return path


def run(name, *args, timeout=1800, **environment):
    """Run a program of the build on one thread, in a folder that is removed afterwards; return what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [program(name), *map(str, args)],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        )
    assert done.returncode == 0, f"{name} returned {done.returncode}:\n{done.stdout[-8000:]}"
    return done.stdout

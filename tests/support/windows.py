"""Programs for Windows: the compilers of MinGW, and Wine, which runs what they build."""

import functools
import shutil
import subprocess

import pytest
from support.compiling import ENVIRONMENT, run

CC, CXX = "x86_64-w64-mingw32-gcc", "x86_64-w64-mingw32-g++"


def need(*commands):
    for command in commands:
        if not shutil.which(command):
            pytest.skip(f"there is no {command} here")


@functools.cache
def start_wine():
    """Have Wine make its folder, of which it tells on a new machine; skip the test where there is no Wine."""
    need("wine")
    run("wine", "wineboot", "--init")


def wine(folder, *command):
    """Run a program in a folder, in which it finds libraries; return what it prints."""
    done = subprocess.run(["wine", *command], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout

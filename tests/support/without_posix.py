"""Run Python as on Windows, without POSIX; what Windows has instead stands on POSIX, which is hidden."""

import errno
import fcntl
import importlib
import mmap
import os
import platform
import subprocess  # noqa: F401 - as NumPy, before the system is another one
import sys
import types

import numpy as np

MODULES = ["fcntl", "grp", "posix", "pwd", "resource", "termios"]
NAMES = """
    chown fchmod fchown fdatasync fork forkpty geteuid getgid getloadavg getpgid getuid mkfifo nice posix_fadvise
    posix_fallocate pread preadv pwrite pwritev readv register_at_fork sched_getaffinity sendfile setsid sysconf uname
    wait4 writev O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC
"""
ACCESS = {0x80000000: os.O_RDONLY, 0xC0000000: os.O_RDWR}
HOW = {1: os.O_CREAT | os.O_EXCL, 3: 0, 4: os.O_CREAT}
MODES = {0: fcntl.LOCK_UN, 2: fcntl.LOCK_EX | fcntl.LOCK_NB}
flock, open_file = fcntl.flock, os.open


def open_shared(path, access, how):
    return open_file(path, ACCESS[access] | HOW[how], 0o600)


def locking(file, mode, num_bytes):
    assert (os.lseek(file, 0, os.SEEK_CUR), num_bytes) == (0x7FFFFFFF, 1)
    try:
        flock(file, MODES[mode])
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def begin():
    """Take POSIX away in this process, for good; modules that were imported before keep what they have."""
    np.random.default_rng()
    platform.platform()
    sys.platform = "win32"
    for name in MODULES:
        sys.modules[name] = None
    for name in NAMES.split():
        vars(os).pop(name, None)
    for name in [name for name in vars(mmap) if name.startswith("MADV_")]:
        delattr(mmap, name)
    os.O_BINARY = os.O_NOINHERIT = 0
    os.supports_fd = os.supports_dir_fd = os.supports_follow_symlinks = set()
    sys.modules["_winapi"] = types.SimpleNamespace(
        GENERIC_READ=0x80000000, GENERIC_WRITE=0x40000000, CloseHandle=os.close
    )
    sys.modules["msvcrt"] = types.SimpleNamespace(
        LK_UNLCK=0, LK_NBLCK=2, locking=locking, open_osfhandle=lambda handle, flags: handle
    )
    importlib.import_module("kvcache._core").open_shared = open_shared

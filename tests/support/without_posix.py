"""Run Python as on Windows, without POSIX; what Windows has instead stands on POSIX, which is hidden."""

import mmap
import os
import platform
import subprocess  # noqa: F401 - as NumPy, before the system is another one
import sys

import numpy as np

MODULES = ["fcntl", "grp", "posix", "pwd", "resource", "termios"]
NAMES = """
    chown fchmod fchown fdatasync fork forkpty geteuid getgid getloadavg getpgid getuid mkfifo nice posix_fadvise
    posix_fallocate pread preadv pwrite pwritev readv register_at_fork sched_getaffinity sendfile setsid sysconf uname
    wait4 writev O_CLOEXEC O_DIRECTORY O_NOCTTY O_NOFOLLOW O_NONBLOCK O_SYNC
"""


def begin():
    """Take POSIX away in this process, for good; modules that were imported before keep their functions."""
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

"""Let calls to the system fail: the nth, that one and the next, or all from it on, for each n in turn."""

import builtins
import errno
import fcntl
import io
import itertools
import os
import sys

NAMES = "chmod close fstat fsync lseek lstat mkdir open read replace scandir stat unlink utime write"
FUNCTIONS = [*((os, name) for name in NAMES.split()), (fcntl, "flock"), (builtins, "open")]


class Calls:
    """In a `with` block, calls [first, first + most) fail; `failed` and `done` name the calls that were made."""

    def __init__(self, first, most):
        self.failing = range(first, first + most)
        self.failed, self.done = [], []

    def make(self, name, function, *arguments, **options):
        fails = len(self.failed) + len(self.done) in self.failing
        (self.failed if fails else self.done).append(name)
        if fails and name == "close":  # which closes nevertheless
            function(*arguments, **options)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return function(*arguments, **options)

    def open_file(self, file, mode, buffering=-1, opener=None):
        """Open a file; where it has no buffer, its calls may fail, too."""
        calls = self

        class File(io.FileIO):
            def readinto(self, to):
                return calls.make("read", super().readinto, to)

            def write(self, data):
                return calls.make("write", super().write, data)

            def close(self):
                if not self.closed:
                    calls.make("close", super().close)

        if buffering == 0:
            return File(file, mode, opener=opener)
        return io.open(file, mode, buffering, opener=opener)  # noqa: UP020 - the built-in one is replaced

    def __enter__(self):
        self.own = [getattr(where, name) for where, name in FUNCTIONS]
        for where, name in FUNCTIONS:
            function = self.open_file if where is builtins else getattr(where, name)
            setattr(where, name, lambda *a, _name=name, _function=function, **o: self.make(_name, _function, *a, **o))
        return self

    def __exit__(self, *exception):
        for (where, name), function in zip(FUNCTIONS, self.own, strict=True):
            setattr(where, name, function)


def every_failure():
    """Yield a `Calls` for each call that can fail, until none of them was made."""
    for most in (1, 2, sys.maxsize):
        for first in itertools.count():
            calls = Calls(first, most)
            yield calls
            if not calls.failed:
                break

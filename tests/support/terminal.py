"""Run a command with its outputs in terminals, files or pipes; show what a terminal's user sees in the end."""

import os
import pty
import re
import subprocess
import termios
import threading

CONTROL = re.compile(r"\x1b\[(\??)(\d*)(?:;\d+)*([A-Za-z])")


def screen(sent, columns=80):
    """Return the lines that a terminal shows, scrolled off ones too, of all that it was sent."""
    lines, row, column, at = [[]], 0, 0, 0
    while at < len(sent):
        control = CONTROL.match(sent, at)
        char = sent[at]
        at = control.end() if control else at + 1
        if control:
            private, number, what = control[1], int(control[2] or 0), control[3]
            if what == "A":
                row = max(0, row - (number or 1))
            elif what == "K":
                lines[row] = {0: lines[row][:column], 2: []}[number]
            else:
                assert (private, what) in (("?", "h"), ("?", "l"), ("", "m")), control
        elif char == "\r":
            column = 0
        elif char == "\n" or column == columns:
            row, column = row + 1, 0
            lines += [[]] * (row == len(lines))
        if not control and char not in "\r\n":
            assert char.isprintable(), repr(char)
            lines[row] += " " * (column + 1 - len(lines[row]))
            lines[row][column] = char
            column += 1
    return ["".join(line).rstrip() for line in lines]


class _Reader(threading.Thread):
    """Reads a file descriptor until nothing writes to its other end."""

    def __init__(self, number):
        super().__init__(daemon=True)
        self.number, self.found = number, b""
        self.start()

    def run(self):
        try:
            while chunk := os.read(self.number, 65536):
                self.found += chunk
        except OSError:  # the other end of a terminal is closed
            pass
        os.close(self.number)


def run_in_terminal(code, *, stdout="terminal", stderr="terminal", size=(24, 80), timeout=600, **environment):
    """Run a program; return its exit status, and what each output was sent.

    `stdout` and `stderr` are "terminal" (one, if both are), "pipe" or a file's path; standard input is the terminal.
    """
    keep = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    reader, readers, given = _Reader(ours), {}, {}
    for name, kind in (("stdout", stdout), ("stderr", stderr)):
        if kind == "terminal":
            given[name], readers[name] = os.dup(theirs), reader
        elif kind == "pipe":
            end, given[name] = os.pipe()
            readers[name] = _Reader(end)
        else:
            given[name] = os.open(kind, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    environment = keep | {"TERM": "xterm-256color"} | environment
    with subprocess.Popen([*map(str, code)], stdin=theirs, **given, env=environment) as process:
        for number in (theirs, *given.values()):
            os.close(number)
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    found = []
    for name, kind in (("stdout", stdout), ("stderr", stderr)):
        if name in readers:
            readers[name].join()
            found.append(readers[name].found.decode())
        else:
            with open(kind, "rb") as file:
                found.append(file.read().decode())
    return status, *found

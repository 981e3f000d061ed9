"""Run the command `kvcache` in this process, which takes a hundredth of the time: for all that needs no process."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from kvcache.tools import cli


def run_here(*arguments):
    """Run the command without a terminal; return how it ended, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["kvcache", *map(str, arguments)])
        patch.setattr(sys, "stdin", None)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return subprocess.CompletedProcess(arguments, ended.value.code or 0, out.getvalue(), err.getvalue())

"""Each change that tests/support/same_changes.txt lists is one that mutate.py can still draw from the core."""

import subprocess
import sys

from support.compiling import ROOT


def test_listed_changes_can_be_drawn():
    """In a process of its own, because mutate.py sets variables of the environment."""
    program = "import sys; sys.path[:0] = sys.argv[1:]; from support.mutate import *; read_listed(possible_changes())"
    done = subprocess.run([sys.executable, "-c", program, ROOT / "tests"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

"""Programs in Python that a test runs in an interpreter of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(code: str, **environment: str) -> str:
    """Run a program that must succeed, in a new interpreter with this one's path; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout

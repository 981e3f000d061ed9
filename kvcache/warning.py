"""Warn a user at the line that called a library, not at a line of the library."""

from __future__ import annotations

import sys
import warnings

LIBRARIES = {"kvcache", "torch", "transformers"}


def warn(message: str) -> None:
    """Warn at the innermost line that lies in none of the libraries, or else at the outermost line."""
    level, frame = 2, sys._getframe(1)  # the second line is the caller's
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)

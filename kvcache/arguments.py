"""Check the arguments that are numbers or names of files; the limits of numbers."""

import os
from typing import SupportsFloat, cast

import numpy as np

from kvcache._core import INT32_MAX, INT64_MAX, MAX_THREADS, integer, integers
from kvcache.errors import shown

__all__ = ["INT32_MAX", "INT64_MAX", "MAX_THREADS", "check_path", "integer", "integers", "to_float"]


def to_float(value: object, name: str) -> float:
    """Return a number as a float.

    Raise a ``TypeError`` that says `name` if it is not a number, and a ``ValueError`` if it is too large for a float.
    """
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | bytearray):
            raise TypeError
        return float(cast("SupportsFloat", value))
    except (TypeError, ValueError):
        raise TypeError(f"{name}={shown(value)}: a number is needed, not {type(value).__name__}") from None
    except OverflowError:
        raise ValueError(f"{name}={shown(value)}: is beyond the range of floats, about 1.8e308") from None


def check_path(path: object, name: str = "path", what: str = "file") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless `path` names a file. A number would be an open file's."""
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{name}={shown(path)}: the name of a {what} is needed, as a str or a Path")
    text = os.fsencode(path)
    if not text or b"\0" in text:
        reason = f"a null byte is in no name of a {what}" if text else f"it names no {what}"
        raise ValueError(f"{name}={shown(path)}: {reason}")

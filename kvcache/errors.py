"""Exception types of kvcache, for errors that Python has no type for.

kvcache also raises Python's own errors: ``TypeError``, ``IndexError``, ``MemoryError``, ``ValueError`` and
``BufferError``. ``ValueError`` is for an unsuitable value, a closed cache or an ended batch. ``BufferError`` is raised
while an array still shows memory that would be freed.
"""

import os
import reprlib


class KVCacheError(Exception):
    """The base of kvcache's errors; raised itself if a cache is damaged."""


class CacheFullError(KVCacheError):
    """The tokens do not fit: `max_seq_len`, `max_sequences`, `capacity` or `max_bytes` would be exceeded.

    Not a ``MemoryError``: the limit is an argument of the cache.
    """


class CacheBusyError(KVCacheError):
    """An open batch, of which a cache has one at a time, or a call in another thread uses what the call would change.

    End the batch first, or give `KVCache.batch` a `timeout`, with which it waits.
    """


class NotSupportedError(KVCacheError, NotImplementedError):
    """The operation makes sense, but this cache does not support it."""


class RowsGoneError(KVCacheError):
    """A token would see rows that are gone, expired or not restored, now or once a sequence is cut there."""


class ModelFileError(KVCacheError, ValueError):
    """A model's file cannot be used: it is missing, damaged, or of an unsupported kind."""


class StateFormatError(KVCacheError, ValueError):
    """A saved state cannot be loaded: truncated, altered, of a newer format, of another shape, model or secret."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Quote a value from a file for a message, without control characters, and cut it if it is long.

    The cost depends on the length of the result, not on the size of the value.
    """
    if isinstance(value, str):
        text = repr(value[:80]) + ("..." if len(value) > 80 else "")
    else:
        try:
            text = _SHORT.repr(value)
        except ValueError:  # an integer of thousands of digits
            text = f"a {type(value).__name__} of very many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain(text: object) -> str:
    """Return a path or a name unchanged; quote it if it has control characters, and cut it if it is long."""
    text = str(text)
    if len(text) > 255:
        text = f"{text[:120]}...{text[-120:]}"
    return text if text.isprintable() else shown(text)


def described(error: BaseException) -> str:
    """Return an error's kind and message, cut short, because a client's error may quote its arguments."""
    try:
        message = plain(error)
    except Exception:  # of the error's own
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def sentence(error: BaseException) -> str:
    """Return an error's message for the command line: a file that cannot be used is named, without a number."""
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f"{plain(os.fsdecode(error.filename))}: "
        return f"{name}{error.strerror}"
    return str(error) or ("there is not enough memory" if isinstance(error, MemoryError) else type(error).__name__)

"""What can go wrong with a cache and is not an ordinary Python error already.

Beside these, kvcache raises what Python itself would: ``ValueError`` for an argument with a value that will not do and
for the use of a closed cache or an ended batch, ``TypeError``, ``IndexError``, ``MemoryError``, and ``BufferError``
where an array still looks at memory that would go.
"""

import reprlib


class KVCacheError(Exception):
    """The base of the errors that are kvcache's own; by itself, that a cache is damaged."""


class CacheFullError(KVCacheError):
    """The tokens do not fit: `max_seq_len`, `max_sequences`, `capacity` or `max_bytes` would be passed.

    Not a ``MemoryError``: the limit is one that the cache was given.
    """


class CacheBusyError(KVCacheError):
    """An open batch, or a call in another thread, is using what was to be changed."""


class NotSupportedError(KVCacheError, NotImplementedError):
    """The operation makes sense, but not with this cache."""


class RowsGoneError(KVCacheError):
    """A token would have to see rows that were evicted."""


class ModelFileError(KVCacheError, ValueError):
    """A model's file cannot be used: it is damaged, or of a kind that is not read."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80


def shown(value: object) -> str:
    """Return a value from a file as a sentence has it: quoted, no control characters, and cut where it is long.

    It takes no more time or memory than what is shown, however large the value is.
    """
    if isinstance(value, str):
        text = repr(value[:80]) + ("..." if len(value) > 80 else "")
    else:
        try:
            text = _SHORT.repr(value)
        except ValueError:  # thousands of digits
            text = f"a {type(value).__name__} of very many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain(text: object) -> str:
    """Return a path or a name as it is, but quoted where it could steer a terminal, and cut where it could flood it."""
    text = str(text)
    if len(text) > 255:
        text = f"{text[:120]}...{text[-120:]}"
    return text if text.isprintable() else shown(text)

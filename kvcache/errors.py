"""What can go wrong with a cache and is not an ordinary Python error already.

Beside these, kvcache raises what Python itself would: ``ValueError`` for an argument with a value that will not do and
for the use of a closed cache or an ended batch, ``TypeError``, ``IndexError``, ``MemoryError``, and ``BufferError``
where an array still looks at memory that would go.
"""


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


def shown(value: object) -> str:
    """Return a value from a file as a sentence has it: no control characters, and not the whole of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."

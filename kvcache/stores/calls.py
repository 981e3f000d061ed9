"""Call any mapping for many keys at once, if it can; what keys and values are.

`kvcache.stores` says which methods a mapping may have for that. Whatever they raise comes out of these functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, cast

from kvcache.errors import shown

if TYPE_CHECKING:
    from typing_extensions import Buffer

CALL_BYTES, MAX_CALL_KEYS = 8 << 20, 256  # of one call, about


def encode_key(key: object) -> bytes:
    """Return the bytes of a key; raise TypeError if it is no str."""
    if not isinstance(key, str):
        raise TypeError(f"key={shown(key)}: a str is needed, not {type(key).__name__}")
    return key.encode(errors="surrogatepass")


def view_of(value: object) -> memoryview:
    """Return the bytes of a value to store, without copying them; raise TypeError if it has none."""
    try:
        return memoryview(cast("Buffer", value)).cast("B")
    except TypeError:
        raise TypeError(f"value is a {type(value).__name__}: bytes are needed") from None


def bytes_of(value: object) -> bytes:
    """Return the bytes that a store handed out, which nobody changes; b"" if it handed out anything else."""
    kind = type(value)  # not isinstance, which asks the value
    if kind is bytes:
        return cast("bytes", value)
    return memoryview(cast("Buffer", value)).tobytes() if issubclass(kind, bytes | bytearray | memoryview) else b""


def name_of(store: object) -> str:
    """Return what to call a store in messages: its address if it is of this package, else its kind alone."""
    kind = type(store)
    return repr(store) if kind.__module__.startswith("kvcache.stores.") else kind.__name__


def keys_per_call(value_bytes: int) -> int:
    """Return for how many values of about so many bytes to call at once: all are in memory."""
    return max(1, min(CALL_BYTES // max(value_bytes, 1), MAX_CALL_KEYS))


def reads_many(store: Mapping[str, bytes]) -> bool:
    """Return whether a mapping reads many values in one call."""
    return hasattr(store, "read_many") or hasattr(store, "get_many")


def writes_many(store: Mapping[str, bytes]) -> bool:
    """Return whether a mapping takes many values in one call."""
    return hasattr(store, "set_many")


def read_many(store: Mapping[str, bytes], keys: Sequence[str], most: int | None) -> dict[str, bytes]:
    """Return the values that there are of some keys; of longer ones, if the mapping can, the first `most` bytes.

    None is nothing. Other values are handed on, whatever they are.
    """
    own = list(keys)  # which the mapping may change
    if most is not None and hasattr(store, "read_many"):
        found = store.read_many(own, most)
    elif hasattr(store, "get_many"):
        found = store.get_many(own)
    else:
        found = {}
        for key in own:
            with contextlib.suppress(KeyError):
                found[key] = store[key]
    return {key: value for key in keys if (value := found.get(key)) is not None}


def has(store: Mapping[str, bytes], key: str) -> bool:
    """Return whether a key is there."""
    if hasattr(store, "__contains__"):
        return key in store
    return bool(read_many(store, [key], 1))


def write_many(store: MutableMapping[str, bytes], items: Mapping[str, bytes]) -> None:
    """Store some values. A value that is refused, for example for its size, keeps out no others."""
    if hasattr(store, "set_many"):
        store.set_many(dict(items))  # which the mapping may change
        return
    refusal: Exception | None = None
    for key, value in items.items():
        try:
            store[key] = value
        except (TypeError, ValueError) as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal

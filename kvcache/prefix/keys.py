"""Name blocks of tokens: a key stands for the block's tokens, all tokens before it, and the cache they were fed to.

A key is BLAKE2b of the key of the block before and of the block's tokens. The first one's parent stands for the
model and for the shape of the cache, and all are keyed with a tenant's salt. Without the salt nobody can name a block,
or tell what others have asked by the names in a store or by how soon an answer begins.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvcache.layer import FIELDS
from kvcache.rope import Rope

if TYPE_CHECKING:
    from kvcache.cache import KVCache

__all__ = ["KEY_SIZE", "Keys", "Tokens", "are_integers", "blocks_of", "common_tokens", "count_tokens", "identity_of"]

Token: TypeAlias = SupportsIndex | bytes
Tokens: TypeAlias = Sequence[Token] | bytes | bytearray | memoryview | npt.NDArray[np.integer[Any]]

KEY_SIZE = 32
LAYOUT_VERSION = 1  # of what keys stand for, and of the rows in a store: raise it with either
INT_SIZE = 8  # bytes of a 64-bit integer in the content of a block
DIGEST_SIZE = 32  # bytes of any other token, and of those behind it
COUNT_SIZE = 4  # bytes of the number of integers, at the end of a content with digests
INTEGERS, DIGESTS = b"\x00", b"\x01"  # begin what a key is made of: the integers of a block, or a digest of each token


def blocks_of(tokens: Tokens, block_size: int, most: int | None = None) -> list[bytes]:
    """Cut tokens, or the first `most` of them, into blocks; return the content of each block.

    The last block may be short. Integers of 64 bits are written as they are, up to the first token that is bytes or an
    integer that is longer. From there each token is written as a digest, and how many integers there are comes last.
    No two blocks have the same content, and blocks that begin alike have contents that begin alike.
    """
    integers = _as_integers(tokens)
    if integers is None:
        others = list(tokens)[:most]
        return [_content_of(others[i : i + block_size]) for i in range(0, len(others), block_size)]
    integers, size = integers if most is None else integers[: INT_SIZE * most], INT_SIZE * block_size
    return [INTEGERS + integers[i : i + size] for i in range(0, len(integers), size)]


def _as_integers(tokens: Tokens) -> bytes | None:
    """Return the tokens as 64-bit integers, little-endian; None if one of them is none."""
    if isinstance(tokens, bytes | bytearray):  # each byte is a token
        tokens = np.frombuffer(tokens, np.uint8)
    if isinstance(tokens, memoryview) or hasattr(tokens, "__array__"):  # of NumPy, of torch
        found = np.asarray(tokens)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise TypeError(f"tokens are {found.dtype}{list(found.shape)}: one dimension of integers is needed")
        if found.dtype == np.uint64 and found.size and found.max() > np.iinfo(np.int64).max:
            return None
        return found.astype("<i8").tobytes()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        hint = "; where bytes are tokens, encode it" if isinstance(tokens, str) else ""
        raise TypeError(f"tokens is a {type(tokens).__name__}: a sequence of integers or bytes is needed{hint}")
    try:
        numbers = array("q", cast("Sequence[int]", tokens))
    except (TypeError, OverflowError):
        return None
    if np.little_endian:
        return numbers.tobytes()
    numbers.byteswap()
    return numbers.tobytes()


def _content_of(block: list[Token]) -> bytes:
    integers = _as_integers(block)
    if integers is not None:
        return INTEGERS + integers
    first: list[bytes] = []
    while (integer := _as_integers(block[len(first) : len(first) + 1])) is not None:
        first.append(integer)
    digests = map(_digest_of, block[len(first) :])
    return INTEGERS + b"".join([*first, *digests]) + len(first).to_bytes(COUNT_SIZE, "big")


def are_integers(content: bytes) -> bool:
    """Return whether a block has 64-bit integers only."""
    return len(content) % INT_SIZE == len(INTEGERS)


def _num_integers(content: bytes) -> int:
    """Return how many tokens of a block are written as integers: the first ones."""
    return len(content) // INT_SIZE if are_integers(content) else int.from_bytes(content[-COUNT_SIZE:], "big")


def _named(content: bytes) -> bytes:
    """Return what the key of a block with digests is made of: a digest of each token."""
    end = len(INTEGERS) + INT_SIZE * _num_integers(content)
    numbers = np.frombuffer(content[len(INTEGERS) : end], "<i8").tolist()
    return DIGESTS + b"".join(map(_digest_of, numbers)) + content[end:-COUNT_SIZE]


def _digest_of(token: Token) -> bytes:
    if isinstance(token, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(token, digest_size=DIGEST_SIZE, person=b"bytes").digest()
    if not isinstance(token, SupportsIndex):
        raise TypeError(f"a token is {token!r}: an integer, or bytes, is needed")
    number = token.__index__()
    try:
        text = str(number)
    except ValueError:  # of more decimal digits than Python writes
        text = hex(number)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE, person=b"integer").digest()


def count_tokens(content: bytes) -> int:
    """Return the number of tokens of a block."""
    integers = _num_integers(content)
    return integers + (len(content) - len(INTEGERS) - INT_SIZE * integers) // DIGEST_SIZE


def common_tokens(one: bytes, other: bytes) -> int:
    """Return how many tokens two blocks have in common at their beginning."""
    num = min(len(one), len(other))
    a, b = np.frombuffer(one, np.uint8, num), np.frombuffer(other, np.uint8, num)
    differ = np.flatnonzero(a != b)
    same = (int(differ[0]) if len(differ) else num) - len(INTEGERS)  # bytes
    integers, others = _num_integers(one), _num_integers(other)
    if same >= INT_SIZE * integers and integers == others:
        return integers + (same - INT_SIZE * integers) // DIGEST_SIZE
    return min(same // INT_SIZE, integers, others)


def identity_of(cache: KVCache, fingerprint: str) -> bytes:
    """Return what rows depend on besides tokens: the model, and how the cache stores its rows."""
    rotations = [
        [rope.inv_freq, rope.interleaved, rope.first_dim] if isinstance(rope, Rope) else "none" if rope is False else ""
        for rope in (layer.rope for layer in cache.layers)
    ]
    described = {
        "layout": LAYOUT_VERSION,
        "fingerprint": fingerprint,
        "block_size": cache.block_size,
        "layers": [[_text_of(getattr(layer, n) if n != "rope" else None) for n in FIELDS] for layer in cache.layers],
        "rope": rotations,
    }
    return json.dumps(described, sort_keys=True, default=list).encode()


def _text_of(value: Any) -> str:
    """Return `str(value)`; of a dataclass built here, as its own is "..." for ever once a signal interrupted it."""
    if not is_dataclass(value):
        return str(value)
    own = (f"{field.name}={getattr(value, field.name)!r}" for field in fields(value))
    return f"{type(value).__qualname__}({', '.join(own)})"


class Keys:
    """Makes keys, of one tenant and one cache.

    `identity` is what rows depend on besides tokens (`identity_of`); tenants with different `salt` share nothing.

    >>> keys = Keys(b"a model", b"a tenant")
    >>> first, second = keys.chain(keys.root, blocks_of([1, 2, 3, 4], 2))
    >>> first == keys.chain(keys.root, blocks_of([1, 2], 2))[0], first == second
    (True, False)
    """

    def __init__(self, identity: bytes, salt: bytes) -> None:
        self._salt = hashlib.blake2b(salt, digest_size=KEY_SIZE, person=b"kvcache salt").digest()
        self.root = hashlib.blake2b(identity, digest_size=KEY_SIZE, key=self._salt, person=b"kvcache root").digest()

    def chain(self, parent: bytes, blocks: Sequence[bytes]) -> list[bytes]:
        """Return the keys of blocks that follow each other, the first one behind `parent`."""
        keys, blake2b, salt = [], hashlib.blake2b, self._salt
        for content in blocks:
            named = content if are_integers(content) else _named(content)
            parent = blake2b(parent + named, digest_size=KEY_SIZE, key=salt).digest()
            keys.append(parent)
        return keys

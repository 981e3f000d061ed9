"""Tokens as the arrays that the core takes."""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Any, SupportsIndex, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvcache.errors import shown

Token: TypeAlias = SupportsIndex | bytes
Tokens: TypeAlias = Sequence[Token] | bytes | bytearray | memoryview | npt.NDArray[np.integer[Any]]
Arrays: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8] | None]

NAME_SIZE = 32


def arrays_of(tokens: Tokens, most: int | None = None) -> Arrays:
    """Return tokens, or the first `most`, as the core takes them: ids, and digests for tokens that are not ids.

    A token that is no 64-bit integer has a digest of 32 bytes.

    >>> arrays_of([1, 2])
    (array([1, 2]), None)
    >>> ids, digests = arrays_of([1, b"an image"])
    >>> ids.tolist(), digests.shape, digests.any(axis=1).tolist()
    ([1, 0], (2, 32), [False, True])
    """
    integers = _as_integers(tokens, most)
    if integers is not None:
        return integers, None
    others = list(islice(tokens, most))
    ids, digests = np.zeros(len(others), np.int64), np.zeros((len(others), NAME_SIZE), np.uint8)
    for i, token in enumerate(others):
        one = _as_integers([token])
        if one is not None:
            ids[i] = one[0]
        else:
            digests[i] = np.frombuffer(_digest_of(token), np.uint8)
    return ids, digests


def _as_integers(tokens: Tokens, most: int | None = None) -> npt.NDArray[np.int64] | None:
    """Return the tokens, or the first `most`, as 64-bit integers; None if one of them is not an integer."""
    if isinstance(tokens, bytes | bytearray):  # each byte is a token
        tokens = np.frombuffer(tokens, np.uint8)
    if isinstance(tokens, memoryview) or hasattr(tokens, "__array__"):  # of NumPy, of torch
        try:
            found = np.asarray(tokens)
        except (TypeError, ValueError, RuntimeError) as error:  # of torch, for example a tensor with a gradient
            raise TypeError(
                f"tokens is a {type(tokens).__name__}: one dimension of integers is needed ({error})"
            ) from None
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise TypeError(f"tokens are {found.dtype}{list(found.shape)}: one dimension of integers is needed")
        found = found[:most]
        if found.dtype == np.uint64 and found.size and found.max() > np.iinfo(np.int64).max:
            return None
        return np.ascontiguousarray(found, np.int64)
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        hint = "; where bytes are tokens, encode it" if isinstance(tokens, str) else ""
        raise TypeError(f"tokens is a {type(tokens).__name__}: a sequence of integers or bytes is needed{hint}")
    if most is not None and len(tokens) > most:
        tokens = list(islice(tokens, most))
    try:
        return np.frombuffer(array("q", cast("Sequence[int]", tokens)), np.int64)
    except (TypeError, OverflowError):
        return None


def _digest_of(token: Token) -> bytes:
    if isinstance(token, (bytes, bytearray, memoryview)):
        return hashlib.blake2b(bytes(token), digest_size=NAME_SIZE, person=b"bytes").digest()
    try:
        number = operator.index(token)
    except TypeError:  # arrays of several tokens raise it, too
        raise TypeError(f"a token is {shown(token)}: an integer, or bytes, is needed") from None
    try:
        text = str(number)
    except ValueError:  # of more decimal digits than Python writes
        text = hex(number)
    return hashlib.blake2b(text.encode(), digest_size=NAME_SIZE, person=b"integer").digest()

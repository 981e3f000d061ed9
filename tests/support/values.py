"""Values of stores as docs and src/prefix/value.h describe them, made by Python's own hashes and checksums."""

import hashlib
import struct
import zlib

MAGIC = b"kvcache value\r\n\x1a"
HEADER_SIZE = 128


def digest_of(prefix):
    """Return what stands for the model and the shape of a prefix cache."""
    named = hashlib.blake2b(prefix.identity).digest()
    return hashlib.blake2b(named, digest_size=32, person=b"kvcache digest").digest()


def pack(key, digest, payload, secret=None):
    """Return the value of a payload under a key."""
    name = hashlib.blake2b(key.encode(), digest_size=32, person=b"kvcache key").digest()
    fields = struct.pack("<16sHHIQ32s32s", MAGIC, 1, secret is not None, HEADER_SIZE, len(payload), name, digest)
    if secret is None:
        return fields + zlib.crc32(fields + payload).to_bytes(32, "little") + payload
    mac = hashlib.blake2b(digest_size=32, key=hashlib.blake2b(secret).digest(), person=b"kvcache value")
    mac.update(fields + payload)
    return fields + mac.digest() + payload

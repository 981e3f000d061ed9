"""The envelope of a value: what was stored comes back, and nothing else does."""

import zlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from kvcache.stores.values import HEADER_SIZE, ValueRefusedError, pack, unpack

SECRETS = [None, b"secret", b"a long secret " * 20]


@pytest.fixture(params=SECRETS, ids=["no secret", "secret", "long secret"])
def secret(request):
    return request.param


def refusal(value, key="key", digest=b"digest", secret=None):
    with pytest.raises(ValueRefusedError) as caught:
        unpack(value, key, digest, secret)
    return str(caught.value)


@hypothesis.given(
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.lists(st.binary(max_size=40)),
    st.sampled_from(SECRETS),
    st.sampled_from([bytes, bytearray, memoryview]),
)
def test_what_was_packed_comes_back(key, digest, parts, secret, form):
    value = pack(key, digest, parts, secret)
    assert type(value) is bytes
    assert len(value) == HEADER_SIZE + sum(map(len, parts))
    payload = unpack(form(value), key, digest, secret)
    assert payload == b"".join(parts)
    assert payload.readonly


def test_arrays_are_parts(secret):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    payload = unpack(pack("key", b"", [rows, rows[:1]], secret), "key", b"", secret)
    assert np.frombuffer(payload, np.float32).tolist() == [*range(12), *range(4)]


def test_a_payload_is_not_copied(secret):
    value = pack("key", b"", [b"x" * 1000], secret)
    assert unpack(value, "key", b"", secret).obj is value


def test_every_truncation_is_refused(secret):
    value = pack("key", b"digest", [b"some rows" * 5], secret)
    for length in range(len(value)):
        refusal(value[:length], secret=secret)
    assert refusal(value + b"\0", secret=secret) == "its length is not what its header says"


def test_every_flipped_bit_is_refused(secret):
    value = pack("key", b"digest", [b"some rows" * 5], secret)
    for place in range(len(value)):
        for bit in range(8):
            flipped = bytearray(value)
            flipped[place] ^= 1 << bit
            refusal(bytes(flipped), secret=secret)


@hypothesis.given(st.binary(max_size=300))
def test_other_bytes_are_refused(data):
    for secret in SECRETS:
        refusal(data, secret=secret)


@pytest.mark.parametrize("value", [None, "text", 5, 10**30, [b"bytes"], {}, object(), np.zeros(200, np.uint8)])
def test_what_is_not_bytes_is_refused(value):
    assert refusal(value) == f"it is a {type(value).__name__}, not bytes"


def test_what_belongs_to_others_is_refused(secret):
    """Also where keys and digests are long, and begin alike."""
    key, digest = "key" * 40, b"digest" * 20
    value = pack(key, digest, [b"rows"], secret)
    assert refusal(value, key=key[:-1] + "z", digest=digest, secret=secret) == "it was stored under another key"
    assert refusal(value, key=key, digest=digest[:-1] + b"u", secret=secret) == "it is of another model or shape"


def test_another_secret_is_refused():
    for one, other in ((b"one tenant's", b"another's"), (b"tenant's " * 20 + b"1", b"tenant's " * 20 + b"2")):
        assert refusal(pack("key", b"digest", [b"rows"], one), secret=other) == "its checksum does not match"
    value = pack("key", b"digest", [b"rows"], b"one tenant's")
    assert refusal(value) == "it was stored with a secret, or another kind of one"
    assert refusal(pack("key", b"digest", [b"rows"]), secret=b"one tenant's")


def test_a_value_cannot_be_made_without_the_secret():
    """An attacker who knows all but the secret changes the payload and mends what checksum there is."""
    value = bytearray(pack("key", b"digest", [b"rows"], b"secret"))
    value[-1] ^= 1
    value[96:128] = zlib.crc32(bytes(value[:96]) + bytes(value[128:])).to_bytes(32, "little")
    assert refusal(bytes(value), secret=b"secret") == "its checksum does not match"
    value[18] = 0  # says that there is no MAC
    assert refusal(bytes(value), secret=b"secret") == "it was stored with a secret, or another kind of one"


def test_a_value_that_changes_later_is_copied():
    value = bytearray(pack("key", b"digest", [b"rows"]))
    payload = unpack(value, "key", b"digest")
    value[-4:] = b"evil"
    assert payload == b"rows"


HEADER = (
    "6b7663616368652076616c75650d0a1a 0100 {kind}00 80000000 0400000000000000"
    "9135fefb98871afa73fd5025dacb091aff1b897ca360778ecb7d424f8ab84e3e"
    "068418b18852d71d71dcc179456d4bf58f5673e83aa4758ebf1eda3d27364d9a"
)
CHECKSUMS = {
    None: "5319e39200000000000000000000000000000000000000000000000000000000",
    b"secret": "4f149eab5071c6efc9b6703eafdf20f997f123e70a9df8d825f4adacc09707fa",
}


@pytest.mark.parametrize("secret", CHECKSUMS)
def test_values_of_version_1_are_read_for_ever(secret):
    """Machines that share a store may run different releases."""
    header = HEADER.format(kind="00" if secret is None else "01")
    value = bytes.fromhex(header + CHECKSUMS[secret]) + b"rows"
    assert unpack(value, "key", b"digest", secret) == b"rows"
    assert pack("key", b"digest", [b"ro", b"ws"], secret) == value

"""Blocks that a program in C kept in a folder are found in Python, and the other way round, byte for byte."""

import subprocess
from pathlib import Path

import pytest
from support.compiling import EMULATOR, ENVIRONMENT
from support.prefixes import check_rows, make_cache, serve

import kvcache
from kvcache.stores import DirectoryStore

PROMPT = list(range(100))
TENANTS = [(b"", b""), (b"a tenant", b"of this tenant")]


@pytest.fixture(scope="module")
def peer(build):
    """Return a function that serves the prompt in C, and returns what it prints."""
    program = build(Path(__file__).with_name("peer.c"))

    def run(folder, prefix, salt, secret):
        command = [*EMULATOR, program, folder, prefix.identity.hex(), salt.decode(), secret.decode()]
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=900)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def make(folder, salt, secret):
    cache = make_cache()
    store = DirectoryStore(folder)
    return cache, kvcache.PrefixCache(
        cache, fingerprint="a model", store=store, salt=salt, secret=secret or None, timeout=60
    )


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.kv")}


@pytest.mark.parametrize(("salt", "secret"), TENANTS, ids=["plain", "tenant"])
def test_each_finds_what_the_other_kept(peer, tmp_path, salt, secret):
    ours, theirs = tmp_path / "Python", tmp_path / "C"
    cache, prefix = make(ours, salt, secret)
    serve(prefix, cache, PROMPT)
    assert prefix.close()
    assert peer(ours, prefix, salt, secret) == "96 0\n"
    assert peer(theirs, prefix, salt, secret) == "0 6\n"
    assert files(ours) == files(theirs)
    cache, prefix = make(theirs, salt, secret)
    seq_id, matched = prefix.acquire(PROMPT)
    assert matched == prefix.stats.fetched == 96
    check_rows(cache, seq_id, PROMPT, matched)

"""`kvcache.stores.open`: addresses of stores."""

import os
import re

import pytest
from support.programs import run_python

from kvcache import stores


@pytest.mark.parametrize(
    ("url", "max_bytes"),
    [
        ("dir:{}", None),
        ("dir://{}", None),
        ("dir:{}?max_bytes=1000", 1000),
        ("dir:{}?max_bytes=20GiB", 20 << 30),
        ("dir:{}?max_bytes=1.5%20MB", 1_500_000),
    ],
)
def test_a_folder(tmp_path, url, max_bytes):
    store = stores.open(url.format(tmp_path / "new"))
    assert store.path == tmp_path / "new"
    assert store.max_bytes == max_bytes
    store[64 * "a"] = b"value"
    assert stores.open(f"dir:{tmp_path / 'new'}")[64 * "a"] == b"value"


def test_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for url in ("dir:here", "dir:~/there", "dir:100%25 or%3F", "dir:a b"):
        stores.open(url)
    assert sorted(os.listdir()) == ["100% or?", "a b", "here", "home"]
    assert os.listdir("home") == ["there"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "'' is no store"),
        ("/some/path", "'/some/path' is no store: dir:PATH"),
        ("file:path", "'file:path' is no store"),
        ("dir:", "'dir:' has no path"),
        ("dir:a\0b", "a null byte is in no name of a folder"),
        ("dir:?max_bytes=5", "has no path"),
        ("dir:x?max_byte=5", "there is no option 'max_byte', but max_bytes"),
        ("dir:x?max_bytes=lots", "'lots' is no number of bytes"),
        ("dir:x?max_bytes=0", "max_bytes=0: must be at least 1"),
        ("dir:x?max_bytes", "'dir:x?max_bytes': bad query field: 'max_bytes'"),
        ("dir:x?max_bytes=5&max_bytes=6", "gives max_bytes twice"),
    ],
)
def test_bad_addresses(tmp_path, monkeypatch, url, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=re.escape(message)):
        stores.open(url)
    assert os.listdir() == []


def test_folders_may_have_the_characters_of_a_login(tmp_path):
    stores.open(f"dir:{tmp_path}/user:name@host")
    assert os.listdir(tmp_path) == ["user:name@host"]
    with pytest.raises(ValueError, match=re.escape("user:name@host?x=1': there is no option 'x'")):
        stores.open(f"dir:{tmp_path}/user:name@host?x=1")


@pytest.mark.parametrize("url", [5, None, b"dir:x"])
def test_addresses_that_are_no_text(url):
    with pytest.raises(TypeError, match=re.escape(f"url={url!r}: an address is needed, as a str")):
        stores.open(url)


def test_import_loads_no_store():
    assert run_python("import kvcache; print('kvcache.stores' in sys.modules)") == "False\n"

import contextlib

import pytest

from kvcache.stores import worker
from kvcache.stores.client import StoreClient


@pytest.fixture
def short_pauses(monkeypatch):
    """A store that fails is left alone for a part of a second."""
    monkeypatch.setattr(worker, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(worker, "LONGEST_PAUSE", 0.2)


@pytest.fixture
def make(short_pauses):
    """A function that makes clients, which are closed in the end."""
    with contextlib.ExitStack() as stack:

        def make(store, **options):
            client = StoreClient(store, **options)
            stack.callback(client.close, 0)
            return client

        yield make

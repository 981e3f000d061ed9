"""Stores that are slow, broken, full or wrong."""

import threading
import time
from collections.abc import MutableMapping


class Faulty(MutableMapping):
    """A dictionary whose calls first call `fault(verb, key)`, which may sleep or raise."""

    def __init__(self, fault=lambda verb, key: None, items=()):
        self.items_ = dict(items)
        self.fault = fault
        self.calls = []

    def _call(self, verb, key):
        self.calls.append((verb, key))
        return self.fault(verb, key)

    def __getitem__(self, key):
        self._call("get", key)
        return self.items_[key]

    def __setitem__(self, key, value):
        self._call("set", key)
        self.items_[key] = value

    def __delitem__(self, key):
        self._call("delete", key)
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


class Bulk(Faulty):
    """The same with calls for many keys."""

    def get_many(self, keys):
        self._call("get_many", list(keys))
        return {key: self.items_[key] for key in keys if key in self.items_}

    def set_many(self, items):
        self._call("set_many", list(items))
        self.items_ |= items


class Blocking(Faulty):
    """Calls block until they are released."""

    def __init__(self, verbs=("get", "set", "delete"), items=()):
        super().__init__(self.block, items)
        self.verbs = verbs
        self.released = threading.Event()
        self.entered = threading.Event()
        self.num_ended = 0  # calls that blocked

    def block(self, verb, key):
        if verb in self.verbs:
            self.entered.set()
            self.released.wait(60)
            self.num_ended += 1


def for_caller(client, is_time):
    """What to put in place of a client's `wait_for`: this thread's time is up when this is true, however late."""
    changed, caller = client._shared.reader.worker.changed, threading.current_thread()
    wait_for = changed.wait_for

    def wait(condition, timeout):
        if threading.current_thread() is not caller:
            return wait_for(condition, timeout)
        deadline = time.monotonic() + 30
        while not is_time():
            assert time.monotonic() < deadline, "it never happened"
            changed.wait(0.005)
        return condition()

    return wait


def sleeping(seconds, *verbs):
    """A fault: sleep in these verbs, or in all."""

    def fault(verb, key):
        if not verbs or verb in verbs:
            time.sleep(seconds)

    return fault


def raising(error, *verbs):
    """A fault: raise in these verbs, or in all."""

    def fault(verb, key):
        if not verbs or verb in verbs:
            raise error

    return fault

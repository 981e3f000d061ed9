"""A program: calls every public method of a cache and a batch, and ends the object in the middle of the call.

It does so wherever other code may run: when the garbage collector runs, and in arguments that convert themselves.

    python intruder.py collector | arguments

Whatever the method then returns or raises, the process must not crash, and the remaining objects must be valid.  The
program prints "<class>.<name> <times>" for each method that it tried.
"""

import atexit
import contextlib
import gc
import shutil
import sys
import tempfile

import numpy as np

import kvcache

ERRORS = (ValueError, IndexError, BufferError, kvcache.KVCacheError)  # that a method may raise when it is interrupted


def rows(tokens, heads=2):
    return np.ones((tokens, heads, 8), np.float32)


def block(tokens):
    return np.ones((2, tokens, 8), np.float32)


def move(layer, keys, delta):
    return keys.copy()


class Scene:
    """A cache of two sequences that share rows, with a strategy and moved keys, and if need be a batch of both."""

    def __init__(self, with_batch):
        self.cache = kvcache.KVCache(
            3,
            2,
            8,
            64,
            v_head_dim=[8, 8, 0],
            dtype="f32",
            max_sequences=8,
            block_size=4,
            policy=[kvcache.FullAttention(), kvcache.SlidingWindow(16), kvcache.FullAttention()],
            rope=[kvcache.Rope([1.0]), move, kvcache.Rope([1.0])],
            strategy=kvcache.LongSequencesOnly(2),
        )
        with self.cache.batch(9) as batch:
            for layer in range(3):
                batch.put(layer, rows(9), rows(9) if layer < 2 else None)
        self.cache.fork(0, 1)
        self.cache.remove(1, 3, seq_id=1)
        self.batch = None
        if with_batch:
            self.batch = self.cache.batch(positions=[9, 7, 10], seq_ids=[0, 1, 0])
            self.batch.put(0, rows(3), rows(3))
            self.batch.put(2, rows(3))

    def end(self):
        with contextlib.suppress(kvcache.CacheBusyError, BufferError):
            if self.batch is not None:
                self.batch.abort()
            self.cache.close()


FOLDER = tempfile.mkdtemp()
atexit.register(shutil.rmtree, FOLDER)
scene = Scene(False)
scene.cache.save(f"{FOLDER}/restored")
scene.end()

# Every public name, with what to call it with; a property is looked at.  None: it is not called.
CACHE = {
    "batch": ((), {"positions": [9, 0, 9], "seq_ids": [0, 2, 1], "parents": [-1, -1, -1]}),
    "blocks": ((0,), {}),
    "can_resume": ((3,), {"seq_id": 1}),
    "clear": ((1,), {}),
    "close": ((), {}),
    "compact": ((), {}),
    "copy_prefix": ((0, 5, 6), {}),
    "divide": ((0, 4, 2), {"seq_id": 1}),
    "explain": ((), {}),
    "extract": ((0, 0, 9), {"seq_id": 1}),
    "first_position": ((1,), {"layer": 0}),
    "fork": ((1, 6), {}),
    "from_config": None,
    "gather": ((0,), {"seq_id": 1, "first": 2, "out": (block(3), block(3))}),
    "get": ((0, 2), {"seq_id": 1}),
    "inject": ((0, 1, block(2), block(2)), {"seq_id": 1}),
    "keep": ((1,), {}),
    "keep_positions": (([0, 2, 5],), {"seq_id": 1}),
    "keys": ((0,), {"seq_id": 1}),
    "last_position": ((1,), {"layer": 1}),
    "load": None,
    "most_bytes": ((100,), {}),
    "next_position": ((1,), {}),
    "positions": ((), {"seq_id": 1, "layer": 1}),
    "remove": ((1, 2), {"seq_id": 1}),
    "reserve": ((5,), {"seq_id": 1}),
    "restore": ((f"{FOLDER}/restored", 1), {"saved_id": 0}),
    "room": ((1,), {}),
    "save": ((f"{FOLDER}/saved", [0, 1]), {"tokens": {0: [3, 4]}}),
    "seq_len": ((1,), {"layer": 0}),
    "share_range": ((0, 7, 1), {}),
    "shift": ((1, None, 3), {"seq_id": 1}),
    "spans": ((0,), {"seq_id": 1}),
    "stats": ((), {}),
    "truncate": ((4,), {"seq_id": 1}),
    "validate": ((), {}),
    "values": ((1,), {"seq_id": 0}),
    "weights": ((0, rows(2), [4, 9]), {"seq_id": 1, "reduce": "max", "rotate": True, "sinks": np.ones(2, np.float32)}),
    "__copy__": ((), {}),
    "__deepcopy__": (({},), {}),
    "__enter__": ((), {}),
    "__exit__": ((None, None, None), {}),
    "__repr__": ((), {}),
}
BATCH = {
    "abort": ((), {}),
    "attend": (
        (1, rows(3, 4), rows(3), rows(3)),
        {
            "first": 0,
            "scale": 0.5,
            "softcap": 3.0,
            "sinks": np.ones(4, np.float32),
            "alibi": np.ones(4, np.float32),
            "non_causal": [True, False, True],
            "masked": [(1, 0, 3)],
            "chosen": [[0, 1], [2, 3], [4, 5]],
            "chosen_block": 2,
            "chosen_tail": True,
            "out": np.empty((3, 4, 8), np.float32),
            "return_lse": True,
        },
    ),
    "choose": (
        (2, rows(3, 4)),
        {
            "width": 3,
            "weights": np.ones((3, 4), np.float32),
            "relu": True,
            "scale": 0.5,
            "num_choices": 2,
            "num_first": 1,
            "num_local": 1,
            "among": [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
            "non_causal": [True, False, True],
            "masked": [(1, 0, 3)],
            "first": 0,
            "return_scores": True,
        },
    ),
    "commit": (([],), {}),
    "dense": ((0,), {"non_causal": [True, False, True], "masked": [(1, 0, 3)]}),
    "keys": ((0,), {"seq_id": 1}),
    "put": ((1, rows(2), rows(2)), {"first": 1}),
    "slots": ((1,), {"first": 1}),
    "spans": ((0,), {"seq_id": 1}),
    "values": ((0,), {"seq_id": 1}),
    "written": ((1, 0, 2), {}),
    "__enter__": ((), {}),
    "__exit__": ((ValueError, None, None), {}),
    "__len__": ((), {}),
    "__repr__": ((), {}),
}


def names(cls):
    """The public names of a class, and those special methods that are its own."""
    special = ("__copy__", "__deepcopy__", "__enter__", "__exit__", "__len__", "__repr__")
    return {name for name in dir(cls) if not name.startswith("_") or (name in special and name in vars(cls))}


def cases():
    """(class, name, arguments) of all that can be called or looked at; fails if one is missing above."""
    for cls, table in ((kvcache.KVCache, CACHE), (kvcache.Batch, BATCH)):
        for name in sorted(names(cls)):
            is_property = not callable(getattr(cls, name))
            assert is_property or name in table, f"{cls.__name__}.{name} is new: say how to call it"
            given = ((), {}) if is_property else table[name]
            if given is not None:
                yield cls, name, given


def call(scene, cls, name, args, keywords):
    """Calls it, or looks at it; returns what it returned, or None."""
    try:
        found = getattr(scene.cache if cls is kvcache.KVCache else scene.batch, name)
        return found(*args, **keywords) if callable(found) else found
    except ERRORS:
        return None


def touch(result):
    """Reads arrays, which may be memory of the cache."""
    if isinstance(result, np.ndarray):
        result.tobytes()
    elif isinstance(result, list | tuple):
        for each in result:
            touch(each)
    elif isinstance(result, kvcache.Span):
        touch((result.k, result.v))


def check(scene, name, result):
    touch(result)
    if name == "slots" and result is not None:
        ended = repr(scene.batch) == "<Batch: 3 tokens, ended>"
        assert all(view.flags.writeable is not ended for view in result)
    with contextlib.suppress(ValueError):  # closed
        scene.cache.validate()


# ---- when the collector runs


def end_at_collection(scene, number, padding, cls, name, given):
    """Ends it at this collection of the call; returns whether there was one.

    There is a collection at every second new object, beginning with the first or the second. If padding is None, there
    is only one, once there are that many more objects than before.
    """
    left = 1 if padding is None else number

    def count(phase, info):
        nonlocal left
        if phase == "start":
            left -= 1
            if left == 0:
                scene.end()

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(count)
    kept = [[] for _ in range(padding or 0)]
    gc.set_threshold(gc.get_count()[0] + number if padding is None else 1)
    try:
        result = call(scene, cls, name, *given)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(count)
        kept.clear()
    check(scene, name, result)
    return left <= 0


def collector():
    """One collection after the other is the one to end everything."""
    for cls, name, given in cases():
        times = 0
        for padding in (0, 1, None):
            number = 1
            while True:
                scene = Scene(cls is kvcache.Batch)
                met = end_at_collection(scene, number, padding, cls, name, given)
                times += met
                if not met:
                    break
                number += 1
        print(f"{cls.__name__}.{name} {times}")


# ---- arguments that end it


class Number:
    def __init__(self, scene, value):
        self.scene, self.value = scene, value

    def __index__(self):
        self.scene.end()
        return self.value

    def __float__(self):
        self.scene.end()
        return self.value

    def __bool__(self):
        self.scene.end()
        return bool(self.value)

    def __repr__(self):
        self.scene.end()
        return "a number"


class List:
    def __init__(self, scene, value):
        self.scene, self.value = scene, value

    def __iter__(self):
        self.scene.end()
        return iter([Number(self.scene, x) if type(x) is int else x for x in self.value])

    def __array__(self, dtype=None, copy=None):
        self.scene.end()
        return np.array(self.value)


class Array:
    def __init__(self, scene, value):
        self.scene, self.value = scene, value

    def __array__(self, dtype=None, copy=None):
        self.scene.end()
        return self.value


class Tensor(Array):
    def __dlpack__(self, **options):
        self.scene.end()
        return self.value.__dlpack__(**options)


class Strategy(kvcache.LongSequencesOnly):
    scene = None

    def __getattribute__(self, name):
        if Strategy.scene is not None and not name.startswith("__"):
            Strategy.scene.end()
        return super().__getattribute__(name)


def intruders(scene, value):
    """Objects to pass in place of an argument, which end the cache or batch as they are converted."""
    if isinstance(value, tuple):
        return [(kind(scene, value[0]), value[1]) for kind in (Array, Tensor)]
    if isinstance(value, np.ndarray):
        return [kind(scene, value) for kind in (Array, Tensor)]
    if isinstance(value, list):
        return [List(scene, value)]
    return [Number(scene, value)]


def arguments():
    for cls, name, (args, keywords) in cases():
        places = [*range(len(args)), *keywords]
        times = 0
        for place in places:
            value = args[place] if isinstance(place, int) else keywords[place]
            for kind in range(len(intruders(None, value))):
                scene = Scene(cls is kvcache.Batch)
                bad = intruders(scene, value)[kind]
                if isinstance(place, int):
                    given = [*args[:place], bad, *args[place + 1 :]], keywords
                else:
                    given = args, {**keywords, place: bad}
                with contextlib.suppress(TypeError):  # not every argument takes every kind
                    check(scene, name, call(scene, cls, name, *given))
                times += 1
        print(f"{cls.__name__}.{name} {times}")
    strategies()


def strategies():
    """A strategy that ends it when it is asked."""
    scene = Scene(False)
    scene.cache = cache = kvcache.KVCache(1, 2, 8, 64, strategy=Strategy(2), max_sequences=4)
    Strategy.scene = scene
    with contextlib.suppress(*ERRORS):
        cache.batch(positions=[0, 0, 1], seq_ids=[0, 1, 1])
    with contextlib.suppress(*ERRORS):
        cache.explain()
    Strategy.scene = None
    check(scene, "batch", None)


if __name__ == "__main__":
    globals()[sys.argv[1]]()

"""Bad input is refused with the right error and message, and changes nothing: the calls of refusals.txt, and others."""

import builtins
import contextlib
import copy
import itertools
import os
import re
import subprocess
import sys
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support import fake_dlpack
from support.saved_states import everything

import kvcache

NAN = float("nan")


def world(cache):
    """All there is to see of a cache, to compare later."""
    stats = cache.stats()
    return everything(cache), [stats[name] for name in ("batches", "aborted", "tokens", "rows_expired", "live_slots")]


@contextlib.contextmanager
def refused(error, *words, unchanged=None):
    """The block raises exactly this error, its message has these words, and the cache is as it was."""
    before = world(unchanged) if unchanged is not None else None
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    for word in words:
        assert str(word) in str(caught.value)
    assert "\n" not in str(caught.value)
    if before is not None:
        assert world(unchanged) == before
        unchanged.validate()


def ones(tokens, heads=2, dim=8, dtype=np.float32):
    return np.ones((tokens, heads, dim), dtype)


def feed(cache, positions, seq_id=0):
    positions = list(positions)
    with cache.batch(positions=positions, seq_ids=[seq_id] * len(positions)) as batch:
        for layer in range(cache.num_layers):
            batch.put(layer, ones(len(positions)), ones(len(positions)))


@pytest.fixture
def cache():
    cache = kvcache.KVCache(2, 2, 8, 16, max_sequences=2, block_size=4)
    feed(cache, range(3))
    return cache


@pytest.fixture
def batch(cache):
    return cache.batch(4)


def make(**options):
    return kvcache.KVCache(**({"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 16} | options))


# ---- the calls of refusals.txt


def rows(rows=3, heads=2, dim=8, dtype="f4"):
    return np.ones((heads, rows, dim), dtype)


def grid(*shape):
    return np.ones((*shape, 8), "f4")


def put_all(batch):
    for layer in range(2):
        batch.put(layer, ones(len(batch)), ones(len(batch)))


class WithGrad(fake_dlpack.Array):
    requires_grad = True


class Negative(fake_dlpack.Array):
    def is_neg(self):
        return True


class Nowhere(fake_dlpack.Array):
    def __init__(self, array):
        super().__init__(array)
        self.tensor.data = None


class Less(fake_dlpack.Array):
    """Has a negative number of tokens."""

    def __init__(self, array):
        super().__init__(array)
        self.shape[0] = -len(array)


class Moody:
    def __dlpack__(self):
        raise BufferError("not today")


class Grown:
    """An array of a library that cannot convert it now, as torch's tensors with a gradient."""

    def __array__(self, *args, **kwargs):
        raise RuntimeError("use tensor.detach()")


NAMES = {name: getattr(kvcache, name) for name in kvcache.__all__} | {
    "np": np, "NAN": NAN, "Fraction": Fraction, "dlpack": fake_dlpack.Array, "CUDA": fake_dlpack.CUDA,
    "READ_ONLY": fake_dlpack.READ_ONLY, "COPIED": fake_dlpack.COPIED,
    "WithGrad": WithGrad, "Negative": Negative, "Nowhere": Nowhere, "Less": Less, "Moody": Moody, "Grown": Grown,
    "rows": rows, "grid": grid, "put_all": put_all, "ones": ones, "feed": feed, "make": make,
}  # fmt: skip


def table():
    """[code that is run before, call, error, words], of each line of refusals.txt."""
    before = ""
    text = Path(__file__).with_name("refusals.txt").read_text()
    for line in text[text.index("\n##\n") :].splitlines():
        if line.startswith("##"):
            before = line[2:].strip()
        elif line:
            call, error, words = re.fullmatch(r"(.+) => (\w+): (.+)", line).groups()
            yield pytest.param(before, call, error, words, id=call[:60])


def expanded(call, words):
    """Yield a call for each choice of {a|b} in it, with its words."""
    choices = [found.split("|") for found in re.findall(r"\{([^{}]*\|[^{}]*)\}", call)]
    for chosen in itertools.product(*choices):
        one = call
        for text in chosen:
            one = re.sub(r"\{[^{}]*\|[^{}]*\}", lambda _, text=text: text, one, count=1)

        def say(found, chosen=chosen):
            evaluated, function, number = found.groups()
            text = chosen[int(number) - 1]
            return str(eval(f"{function}({text})", NAMES)) if evaluated else text

        yield one, re.sub(r"\{(=?)([\w.]*)\(?(\d)\)?\}", say, words).split(" | ")


@pytest.mark.parametrize(("before", "call", "error", "words"), list(table()))
def test_refusals(cache, before, call, error, words):
    scope = NAMES | {"cache": cache}
    exec(before, scope)
    cache = scope["cache"]
    error = getattr(kvcache, error, None) or getattr(builtins, error)
    for one, parts in expanded(call, words):
        with refused(error, *parts, unchanged=cache):
            eval(one, scope)
    if before.startswith("batch = cache.batch(4)") and not re.search("put|attend", before):  # nothing was put
        put_all(scope["batch"])
        scope["batch"].commit()


# ---- making a cache


def test_a_cache_larger_than_the_machine_takes_no_memory_before_its_rows():
    cache = make(num_kv_heads=128, head_dim=1024, max_seq_len=2**31 - 2, block_size=64)
    assert cache.nbytes < 1 << 20
    assert cache.capacity == 2**31 - 2


@pytest.mark.parametrize(("name", "named"), [("sparc", "sparc"), (os.fsdecode(b"\xf6"), "KVCACHE_ISA is")])
def test_an_instruction_set_that_is_not_there(name, named):
    code = "import kvcache; print(kvcache.show_config('dicts')['isa']); kvcache.KVCache(1, 1, 8, 16)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        env=os.environ | {"KVCACHE_ISA": name},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None\n"
    assert "KVCACHE_ISA" in done.stderr.splitlines()[-1]
    assert named in done.stderr.splitlines()[-1]
    assert "UnicodeDecodeError" not in done.stderr


# ---- layers, sequences and positions


# Calls of a cache with a layer, a sequence or a position x, behind the argument's name in messages.
LAYERS = [f"layer {call}" for call in (
    "keys(x)", "values(x)", "get(x, 0)", "gather(x)", "blocks(x)", "spans(x)", "positions(layer=x)", "seq_len(layer=x)",
    "first_position(layer=x)", "last_position(layer=x)", "extract(x, 0, 1)", "weights(x, ones(1, 2))",
    "inject(x, 0, ones(2, 1), ones(2, 1))",
)]  # fmt: skip
SEQUENCES = [*(f"seq_id {call}" for call in (
    "keys(0, seq_id=x)", "values(0, seq_id=x)", "get(0, 0, seq_id=x)", "gather(0, seq_id=x)", "spans(0, seq_id=x)",
    "positions(seq_id=x)", "seq_len(x)", "first_position(x)", "last_position(x)", "next_position(x)",
    "can_resume(0, seq_id=x)", "room(x)", "reserve(1, seq_id=x)", "keep(x)", "clear(x)", "remove(seq_id=x)",
    "keep_positions([0], seq_id=x)", "truncate(0, seq_id=x)", "shift(0, None, 1, seq_id=x)",
    "divide(0, None, 2, seq_id=x)", "weights(0, ones(1, 2), seq_id=x)", "extract(0, 0, 1, seq_id=x)",
    "inject(0, 0, ones(2, 1), ones(2, 1), seq_id=x)",
)),
    "src fork(x, 1)", "dst fork(0, x)", "src copy_prefix(x, 1, 1)", "dst copy_prefix(0, x, 1)", "src share_range(x, 1)",
    "dst share_range(0, x)", "seq_ids[1] batch(positions=[3, 3], seq_ids=[0, x])",
]  # fmt: skip
POSITIONS = [
    "position get(0, x)", "position can_resume(x)", "begin remove(x)", "end remove(0, x, shift=False)",
    "begin shift(x, None, 1)", "end shift(0, x, 1)", "begin divide(x, None, 2)", "end divide(0, x, 2)",
    "begin extract(0, x, 2**31 - 1)", "end extract(0, 0, x)", "begin inject(0, x, ones(2, 1), ones(2, 1))",
    "length truncate(x)", "length copy_prefix(0, 1, x)", "begin share_range(0, 1, x)", "end share_range(0, 1, 0, x)",
    "positions[1] keep_positions([1, x])", "positions[1] weights(0, ones(2, 2), [1, x])",
    "positions[1] batch(positions=[3, x])",
]  # fmt: skip


def call_with(cache, call, x):
    return eval(f"cache.{call.split(' ', 1)[1]}", NAMES | {"cache": cache, "x": x})


@pytest.mark.parametrize("call", LAYERS + SEQUENCES + POSITIONS)
def test_layers_sequences_and_positions(cache, call):
    name, error, words = call.split()[0], ValueError, ("must be at",)
    wrong = (2**63, -(2**63) - 1, 2**70)
    if call in LAYERS:
        wrong, error, words = (-1, 2, 2**31, -(2**63), 2**64, 10**5000), IndexError, ("0 to 1",)
    elif call in POSITIONS:
        wrong = (-1, -(2**40), 2**31, 2**70)
    for value in wrong:
        number = "" if value == 10**5000 else value
        with refused(error, f"{name}={number}", *words, unchanged=cache):
            call_with(cache, call, value)
    for value in (0.0, NAN, True, "0", [0]):
        with refused(TypeError, f"{name}=", "integer", unchanged=cache):
            call_with(cache, call, value)


@pytest.mark.parametrize("n", [2**24 + 1, 2**31 - 1])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_bytes": 10**6}, pytest.param({"strategy": kvcache.LongSequencesOnly(8)}, marks=pytest.mark.slow)],
    ids=str,
)
def test_more_tokens_than_a_batch_has(n, options):
    """Refused before memory is taken for what is noted down of each."""
    cache = make(max_seq_len=None, **options)
    tracemalloc.start()
    try:
        with refused(ValueError, f"n={n}", 2**24, unchanged=cache):
            cache.batch(n)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    with refused(ValueError, f"len(positions)={2**24 + 1}", 2**24, unchanged=cache):
        cache.batch(positions=np.zeros(2**24 + 1, np.int32))


# ---- arrays


@pytest.mark.hf
def test_a_torch_tensor_with_grad_anywhere():
    """Each function that takes a tensor refuses it in one sentence of ours, and so does the result of `rope`."""
    import torch

    with_grad = torch.ones(4, requires_grad=True)
    with pytest.raises(ValueError, match=r"inv_freq: the tensor requires grad.*give its \.detach\(\)"):
        kvcache.Rope(with_grad)
    cache = kvcache.KVCache(1, 1, 4, 64, rope=lambda layer, keys, delta: with_grad)
    with cache.batch(1) as batch:
        batch.put(0, np.ones((1, 1, 4), "f4"), np.ones((1, 1, 4), "f4"))
    with pytest.raises(
        ValueError, match=r"the function of layer 0 returned keys: the tensor requires grad.*\.detach\(\)"
    ):
        cache.shift(0, None, 1)
    assert cache.positions().tolist() == [0]


@pytest.mark.hf
def test_torch_tensors_that_their_memory_does_not_show(cache, batch):
    """DLPack exports the memory of a negative view with the wrong sign. Others have no export, or another type."""
    import torch

    rows = torch.ones(4, 2, 8)
    negative = torch.complex(rows, rows).conj().imag
    assert negative.is_neg()
    unreadable = [
        (negative, ValueError, "resolve_neg()"),
        (torch._efficientzerotensor(rows.shape), ValueError, "clone()"),
        (rows.to("meta"), TypeError, "meta"),
        (rows.to_sparse(), TypeError, "dense"),
        (torch.complex(rows, rows).conj(), TypeError, "complex64"),
    ]
    for x, error, word in unreadable:
        kept = x[:3].transpose(0, 1) if not x.is_sparse else x
        calls = {
            "k": lambda x=x: batch.put(0, x, rows),
            "v": lambda x=x: batch.put(0, rows, x),
            "q": lambda x=x: batch.attend(0, x, rows, rows),
            "out": lambda x=x: batch.attend(0, rows, rows, rows, out=x),
            "out[1]": lambda kept=kept: cache.gather(0, out=(torch.empty(2, 3, 8), kept)),
        }
        for name, call in calls.items():
            with refused(error, f"{name}: ", word, unchanged=cache):
                call()
    batch.put(0, negative.resolve_neg(), rows)
    batch.abort()
    with refused(ValueError, "k: ", "resolve_neg()", unchanged=cache):
        cache.inject(0, 0, negative[:2].transpose(0, 1), torch.ones(2, 2, 8))


# ---- the order of things


@pytest.mark.parametrize(
    ("end", "words"),
    [("commit", "it was committed: read its rows from the KVCache, and"), ("abort", "it was aborted:")],
)
def test_use_after_the_end_of_a_batch(cache, batch, end, words):
    for layer in range(2):
        batch.put(layer, ones(4), ones(4))
    getattr(batch, end)()
    for call in (
        lambda: batch.put(0, ones(4), ones(4)),
        lambda: batch.attend(0, ones(4)),
        lambda: batch.attend(0, ones(4), ones(4), ones(4)),
        lambda: batch.choose(0, ones(4), width=1),
        lambda: batch.dense(0),
        lambda: batch.slots(0),
        lambda: batch.written(0, 0, 4),
        lambda: batch.keys(0),
        lambda: batch.values(0),
        lambda: batch.spans(0),
    ):
        with refused(ValueError, f"the batch has ended: {words} begin another with KVCache.batch()", unchanged=cache):
            call()
    batch.commit(keep=["anything"])
    assert len(batch) == len(batch.positions) == len(batch.seq_ids) == 4


def test_use_after_close(cache):
    cache.close()
    properties = {name: lambda name=name: getattr(cache, name) for name in ("nbytes", "utilization", "sequences")}
    calls = {
        **{call: lambda call=call: call_with(cache, call, 0) for call in LAYERS + SEQUENCES + POSITIONS},
        **properties,
        "capacity_bytes": lambda: cache.capacity_bytes,
        "copy": lambda: copy.copy(cache),
        "batch": lambda: cache.batch(1),
        "with": cache.__enter__,
        "explain": cache.explain,
        "most_bytes": lambda: cache.most_bytes(3),
        "clear": cache.clear,
        "stats": cache.stats,
        "validate": cache.validate,
        "compact": cache.compact,
        "reserve": lambda: cache.reserve(1),
    }
    for call in calls.values():
        with refused(ValueError, "the cache is closed"):
            call()
    cache.close()
    assert cache.num_layers == 2


class Closes:
    """An argument that does harm while it is converted."""

    def __init__(self, harm, array=None):
        self.harm, self.array = harm, array

    def __index__(self):
        self.harm()
        return 0

    def __dlpack__(self):
        self.harm()
        return self.array.__dlpack__()


def test_arguments_that_close_the_cache(cache, batch):
    with refused(ValueError, "the batch has ended"):
        batch.put(0, Closes(batch.abort, ones(4)), ones(4))
    batch = cache.batch(4)
    with refused(ValueError, "the batch has ended"):
        batch.attend(0, ones(4), ones(4), ones(4), first=Closes(batch.abort))
    for call in LAYERS + SEQUENCES:
        cache = make()
        with refused(ValueError, "the cache is closed"):
            call_with(cache, call, Closes(cache.close))


# ---- functions that move keys


def interrupt(layer, keys, delta):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("function", "error", "word"),
    [
        (interrupt, KeyboardInterrupt, ""),
        (lambda layer, keys, delta: 1 / 0, ZeroDivisionError, "division"),
        (lambda layer, keys, delta: keys[:1], ValueError, "shape (1, "),
        (lambda layer, keys, delta: None, ValueError, "shape ()"),
        (lambda layer, keys, delta: keys.astype(np.int32), TypeError, "int32"),
        (lambda layer, keys: keys, TypeError, "positional"),
    ],
)
def test_functions_that_fail(function, error, word):
    cache = make(rope=function)
    feed(cache, range(6))
    for call in (
        lambda: cache.shift(2, None, 3),
        lambda: cache.remove(0, 2),
        lambda: cache.divide(0, None, 2),
    ):
        with refused(error, word, unchanged=cache):
            call()


def test_a_function_that_wants_to_edit():
    def greedy(layer, keys, delta):
        for call in (cache.clear, cache.close, cache.compact, lambda: cache.shift(0, None, 1), lambda: cache.batch(1)):
            with pytest.raises(kvcache.CacheBusyError):
                call()
        return keys

    cache = make(rope=greedy)
    feed(cache, range(6))
    cache.shift(2, None, 3)
    assert cache.positions().tolist() == [0, 1, 5, 6, 7, 8]
    cache.validate()

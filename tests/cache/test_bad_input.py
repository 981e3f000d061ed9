"""Bad input is refused with the right error and message, and changes nothing."""

import contextlib
import os
import subprocess
import sys
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from support import fake_dlpack

import kvcache

NAN = float("nan")


def everything(cache):
    """All there is to see of a cache, to compare later."""
    layers = range(cache.num_layers)
    stats = cache.stats()
    return {
        "stats": {name: stats[name] for name in ("batches", "aborted", "tokens", "rows_evicted", "live_slots")},
        "rows": {
            (seq_id, layer): (
                cache.positions(seq_id=seq_id, layer=layer).tolist(),
                cache.keys(layer, seq_id=seq_id, copy=True).tobytes(),
                cache.values(layer, seq_id=seq_id, copy=True).tobytes(),
            )
            for seq_id in cache.sequences
            for layer in layers
        },
        "resume": [
            cache.can_resume(p, seq_id=s) for s in cache.sequences for p in range(min(cache.next_position(s), 50))
        ],
    }


@contextlib.contextmanager
def refused(error, *words, unchanged=None):
    """The block raises exactly this error, its message has these words, and the cache is as it was."""
    before = everything(unchanged) if unchanged is not None else None
    with pytest.raises(error) as caught:
        yield
    assert caught.type is error
    for word in words:
        assert str(word) in str(caught.value)
    if before is not None:
        assert everything(unchanged) == before
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


# ---- making a cache

SIZES = ("num_layers", "num_kv_heads", "head_dim", "max_seq_len")
LIMITS = ("v_head_dim", "max_sequences", "capacity", "max_bytes", "block_size", "num_threads")


def make(**options):
    return kvcache.KVCache(**({"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "max_seq_len": 16} | options))


@pytest.mark.parametrize("value", [0, -1, -(2**31), -(2**64), 2**63, pytest.param(10**5000, id="10**5000")])
@pytest.mark.parametrize("name", SIZES + LIMITS)
def test_sizes_out_of_range(name, value):
    with refused(ValueError, f"{name}=", "must be at"):
        make(**{name: value})


@pytest.mark.parametrize("value", [2**31, 2**32 + 1])
@pytest.mark.parametrize("name", [*SIZES, "v_head_dim", "max_sequences", "block_size", "num_threads"])
def test_sizes_above_32_bits(name, value):
    with refused(ValueError, f"{name}={value}", "must be at most"):
        make(**{name: value})


@pytest.mark.parametrize("value", [1.0, NAN, True, np.True_, "8", np.float32(8), object(), {}, np.ones(2)])
@pytest.mark.parametrize("name", SIZES + LIMITS)
def test_sizes_that_are_no_integers(name, value):
    with refused(TypeError, f"{name}=", "integer"):
        make(**{name: value})


@pytest.mark.parametrize("name", SIZES[:3])
def test_sizes_that_are_missing(name):
    with refused(TypeError, name, "integer"):
        make(**{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kv_heads", [2]),
        ("head_dim", [8, 8, 8]),
        ("v_head_dim", []),
        ("dtype", ["f16"]),
        ("k_dtype", ("f16",) * 3),
        ("policy", [kvcache.FullAttention()]),
    ],
)
def test_not_one_value_per_layer(name, value):
    with refused(ValueError, f"len({name})={len(value)}", "num_layers", 2):
        make(**{name: value})


@pytest.mark.parametrize("name", SIZES[1:3])
def test_a_layer_of_several_is_wrong(name):
    with refused(ValueError, f"{name}[1]=0"):
        make(**{name: [8, 0]})
    with refused(TypeError, f"{name}[0]=8.0"):
        make(**{name: [8.0, 8]})


@pytest.mark.parametrize("value", ["float16", "F16", "Q8_0", "", np.float16, np.dtype("f2"), 1, b"f16"])
@pytest.mark.parametrize("name", ["dtype", "k_dtype", "v_dtype"])
def test_unknown_types(name, value):
    if isinstance(value, bytes):
        value = [value, "f16"]
    with refused(ValueError, name, "'f32', 'f16', 'bf16', 'q8_0', 'q4_0', 'q4_1', 'q5_0', 'q5_1' or 'iq4_nl'"):
        make(**{name: value})


def test_dtype_must_be_given():
    with refused(ValueError, "dtype=None"):
        make(dtype=None)


@pytest.mark.parametrize("value", ["full", 8, kvcache.SlidingWindow, False, [kvcache.FullAttention(), 8]])
def test_no_policy(value):
    with refused(TypeError, "policy", "SlidingWindow", "None"):
        make(policy=value)


@pytest.mark.parametrize("name", ["num_heads", "window", "from_config"])
def test_options_that_are_not_there(name):
    with pytest.raises(TypeError, match=name):
        make(**{name: None})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_dim": 80, "dtype": "q8_0"}, ("head_dim=80", "multiple of 32", "keys", "q8_0")),
        ({"head_dim": 80, "v_dtype": "q4_0"}, ("head_dim=80", "multiple of 32", "values", "q4_0")),
        ({"head_dim": [64, 48], "k_dtype": "q4_0"}, ("head_dim[1]=48", "keys", "q4_0")),
        ({"head_dim": 64, "v_head_dim": 1, "dtype": "q8_0"}, ("v_head_dim=1", "values", "q8_0")),
        ({"head_dim": 64, "v_head_dim": (32, 16), "v_dtype": ["q8_0"] * 2}, ("v_head_dim[1]=16", "values", "q8_0")),
    ],
)
def test_dims_that_quantised_types_do_not_take(options, words):
    with refused(ValueError, *words):
        make(**options)


@pytest.mark.parametrize("value", [None, 1, "yes", [False, 0], kvcache])
def test_value_in_key_is_no_truth_value(value):
    with refused(TypeError, "value_in_key", "True or False"):
        make(value_in_key=value)


def test_values_that_do_not_lie_in_keys():
    with refused(ValueError, "v_head_dim=16", "head_dim", 8, "value_in_key"):
        make(value_in_key=True, v_head_dim=16)
    with refused(ValueError, "v_dtype='f32'", "f16", "value_in_key"):
        make(value_in_key=[False, True], v_dtype="f32")
    with refused(ValueError, "rope=", "value_in_key", "first_dim"):
        make(value_in_key=True, v_head_dim=4, rope=kvcache.Rope([1.0], first_dim=3))


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0, TypeError, ("share=0", "sequence")),
        ("0", TypeError, ("share='0'", "sequence")),
        ([None], ValueError, ("len(share)=1", 2)),
        ([None, 2], ValueError, ("share[1]=2", "at most 1")),
        ([-1, None], ValueError, ("share[0]=-1", "at least 0")),
        ([None, 1], ValueError, ("share[1]=1", "itself")),
        ([1, 0], ValueError, ("share[0]=1", "layer 0")),
        ([None, False], TypeError, ("share[1]=False", "integer")),
        ([None, 0.0], TypeError, ("share[1]=0.0", "integer")),
    ],
)
def test_shares(value, error, words):
    with refused(error, *words):
        make(share=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_kv_heads", [2, 4]),
        ("head_dim", [8, 16]),
        ("v_head_dim", [8, 4]),
        ("k_dtype", ["f16", "f32"]),
        ("v_dtype", ["f16", "bf16"]),
        ("policy", [kvcache.FullAttention(), kvcache.SlidingWindow(4)]),
        ("value_in_key", [True, False]),
        ("rope", [None, False]),
        ("rope", [kvcache.Rope([1.0]), kvcache.Rope([2.0])]),
    ],
)
def test_layers_that_share_must_be_alike(name, value):
    with refused(ValueError, "share[1]=0", name):
        make(**{"share": [None, 0], name: value})


@pytest.mark.parametrize("value", [True, 0, 1.0, "rope", np.ones(4), [None, 3], kvcache.Rope, {}])
def test_what_is_no_rope(value):
    with refused(TypeError, "rope", "Rope", "False"):
        make(rope=value)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([], ValueError, ("inv_freq", "(0,)")),
        ([[1.0]], ValueError, ("inv_freq", "(1, 1)")),
        (np.float64(1), ValueError, ("inv_freq", "()")),
        ([1.0, NAN], ValueError, ("inv_freq[1]=nan", "finite")),
        ([float("inf")], ValueError, ("inv_freq[0]=inf", "finite")),
        (1.0, TypeError, ("inv_freq", "float")),
        (None, TypeError, ("inv_freq", "NoneType")),
        ("1", TypeError, ("inv_freq",)),
        ([True], TypeError, ("inv_freq", "bool")),
        ([1j], TypeError, ("inv_freq", "complex")),
        ([[1.0], [1.0, 2.0]], TypeError, ("inv_freq", "list")),
        ([object()], TypeError, ("inv_freq", "numbers")),
        ([10**400], TypeError, ("inv_freq", "numbers")),
    ],
)
def test_frequencies(value, error, words):
    with refused(error, *words):
        kvcache.Rope(value)


def test_ropes_that_do_not_fit():
    for value in (1, "no", None):
        with refused(TypeError, "interleaved="):
            kvcache.Rope([1.0], value)
    with refused(ValueError, "first_dim=-1"):
        kvcache.Rope([1.0], first_dim=-1)
    with refused(TypeError, "first_dim=1.0", "integer"):
        kvcache.Rope([1.0], first_dim=1.0)
    with refused(ValueError, "rope=Rope(5 frequencies", "0 to 9", "head_dim", 8):
        make(rope=kvcache.Rope(np.ones(5)))
    with refused(ValueError, "rope=", "6 to 9", "layer 1"):
        make(rope=[None, kvcache.Rope(np.ones(2), first_dim=6)])


@pytest.mark.parametrize(
    ("value", "error"),
    [("never", ValueError), (None, TypeError), (4, TypeError), (kvcache.LongSequencesOnly, TypeError), ([], TypeError)],
)
def test_no_strategy(value, error):
    with refused(error, "strategy=", "'always'", "'disabled'"):
        make(strategy=value)


def test_numbers_of_strategies():
    with refused(ValueError, "threshold=-1", "at least 0"):
        kvcache.LongSequencesOnly(-1)
    with refused(TypeError, "threshold=1.0", "integer"):
        kvcache.LongSequencesOnly(1.0)
    for value in (0, -0.5, 1.1, NAN, float("inf")):
        with refused(ValueError, f"fraction={value}", "at most 1"):
            kvcache.Adaptive(value)
    for value in ("0.5", True, None, [0.5]):
        with refused(TypeError, "fraction=", "number"):
            kvcache.Adaptive(value)
    for value in (10**400, -(10**400), 10**5000, Fraction(10**400)):
        with refused(ValueError, "fraction=", "is beyond the range of floats"):
            kvcache.Adaptive(value)


@pytest.mark.parametrize("value", [0, -1, 2**31])
def test_numbers_of_other_policies(value):
    with refused(ValueError, f"attention_chunk_size={value}"):
        kvcache.ChunkedAttention(value)
    with refused(ValueError, f"max_len={value}"):
        kvcache.CrossAttention(value)
    if value:
        with refused(ValueError, f"resume_window={value}"):
            kvcache.ChunkedAttention(4, value)
    for wrong in (4.0, True, "4", None):
        with refused(TypeError, "attention_chunk_size=", "integer"):
            kvcache.ChunkedAttention(wrong)
        with refused(TypeError, "max_len=", "integer"):
            kvcache.CrossAttention(wrong)


@pytest.mark.parametrize("value", [0, -1, 2**31, 2**70])
def test_windows_out_of_range(value):
    with refused(ValueError, f"window={value}"):
        kvcache.SlidingWindow(value)
    with refused(ValueError, f"resume_window={value}"):
        kvcache.SlidingWindow(4, 0, value)
    if value:
        with refused(ValueError, f"num_sink_tokens={value}"):
            kvcache.SlidingWindow(4, value)


@pytest.mark.parametrize("value", [4.0, NAN, True, "4", [4]])
def test_windows_that_are_no_integers(value):
    for arguments, name in (((value,), "window"), ((4, value), "num_sink_tokens"), ((4, 0, value), "resume_window")):
        with refused(TypeError, f"{name}=", "integer"):
            kvcache.SlidingWindow(*arguments)


def test_resume_window_below_window():
    with refused(ValueError, "resume_window=7", "at least 8"):
        kvcache.SlidingWindow(8, resume_window=7)


def test_a_block_beyond_the_address_space():
    with refused(ValueError, "block_size"):
        make(num_layers=1, num_kv_heads=2**20, head_dim=2**20, block_size=2**31 - 2, dtype="f32")


def test_a_cache_larger_than_the_machine_takes_no_memory_before_its_rows():
    cache = make(num_kv_heads=128, head_dim=1024, max_seq_len=2**31 - 2, block_size=64)
    assert cache.nbytes < 1 << 20
    assert cache.capacity == 2**31 - 2


@pytest.mark.parametrize("value", [0, -1, 2**31, 10**30])
def test_threads_out_of_range(value):
    with refused(ValueError, f"num_threads={value}"):
        kvcache.set_num_threads(value)


@pytest.mark.parametrize("value", [1.0, True, "1", NAN])
def test_threads_that_are_no_integer(value):
    with refused(TypeError, "num_threads=", "integer"):
        kvcache.set_num_threads(value)


def test_an_unknown_mode():
    with refused(ValueError, "mode='json'", "'dicts'"):
        kvcache.show_config("json")


def test_an_instruction_set_that_is_not_there():
    code = "import kvcache; print(kvcache.show_config('dicts')['isa']); kvcache.KVCache(1, 1, 8, 16)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"],
        env=os.environ | {"KVCACHE_ISA": "sparc"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "None\n"
    assert "KVCACHE_ISA" in done.stderr.splitlines()[-1]
    assert "sparc" in done.stderr.splitlines()[-1]


# ---- layers, sequences and positions


def calls_with_layer(cache):
    return {
        "keys": cache.keys,
        "values": cache.values,
        "get": lambda layer: cache.get(layer, 0),
        "gather": cache.gather,
        "spans": cache.spans,
        "positions": lambda layer: cache.positions(layer=layer),
        "seq_len": lambda layer: cache.seq_len(layer=layer),
        "first_position": lambda layer: cache.first_position(layer=layer),
        "last_position": lambda layer: cache.last_position(layer=layer),
        "extract": lambda layer: cache.extract(layer, 0, 1),
        "inject": lambda layer: cache.inject(layer, 0, ones(2, 1), ones(2, 1)),
    }


@pytest.mark.parametrize("name", calls_with_layer(make()))
def test_layers_out_of_range(cache, name):
    call = calls_with_layer(cache)[name]
    for layer in (-1, 2, 2**31, -(2**63), 2**64, 10**5000):
        with refused(IndexError, "layer=", "0 to 1", unchanged=cache):
            call(layer)
    for layer in (0.0, NAN, True, "0", [0]):
        with refused(TypeError, "layer=", "integer", unchanged=cache):
            call(layer)


def rows_for_gather(**options):
    """A pair of arrays for the three rows of the cache, but for what is said."""
    given = {"heads": 2, "rows": 3, "dim": 8, "dtype": np.float32} | options
    return np.ones((given["heads"], given["rows"], given["dim"]), given["dtype"])


@pytest.mark.parametrize(
    ("error", "word", "options"),
    [
        (ValueError, "first=4: must be at most 3", lambda: {"first": 4}),
        (ValueError, "first=-1", lambda: {"first": -1}),
        (TypeError, "first=1.0", lambda: {"first": 1.0}),
        (ValueError, "dtype='q8_0'", lambda: {"dtype": "q8_0"}),
        (ValueError, "dtype='f32': rows are converted to the type of out", lambda: {"dtype": "f32", "out": (1, 2)}),
        (TypeError, "out: a pair of arrays", lambda: {"out": rows_for_gather()}),
        (TypeError, "out: a pair of arrays", lambda: {"out": (rows_for_gather(),)}),
        (TypeError, "out[1]: an array", lambda: {"out": (rows_for_gather(), [1.0])}),
        (TypeError, "out[0]: elements of type float64", lambda: {"out": (rows_for_gather(dtype=float), None)}),
        (TypeError, "not float32 and float16", lambda: {"out": (rows_for_gather(), rows_for_gather(dtype=np.float16))}),
        (ValueError, "out[0]: an array of 2 axes", lambda: {"out": (rows_for_gather()[0], rows_for_gather())}),
        (ValueError, "out[0]: an array of shape (3, 3, 8)", lambda: {"out": (rows_for_gather(heads=3),) * 2}),
        (ValueError, "(2, 3, 8) is needed", lambda: {"out": (rows_for_gather(), rows_for_gather(rows=2))}),
        (ValueError, "4 rows, where the sequence has 3", lambda: {"out": (rows_for_gather(rows=4),) * 2}),
        (ValueError, "has 2 from first on", lambda: {"first": 1, "out": (rows_for_gather(),) * 2}),
        (ValueError, "overlaps out[1]", lambda: {"out": (rows_for_gather(),) * 2}),
        (
            ValueError,
            "out[0]: is read-only",
            lambda: {"out": (np.broadcast_to(np.ones(8, np.float32), (2, 3, 8)), rows_for_gather())},
        ),
        (ValueError, "out[1]: its last axis", lambda: {"out": (rows_for_gather(), rows_for_gather(dim=16)[:, :, ::2])}),
    ],
)
def test_gather_refuses(cache, error, word, options):
    with refused(error, word, unchanged=cache):
        cache.gather(0, **options())


@pytest.mark.parametrize("layer", [-1, 2, 2**32])
def test_layers_of_a_batch_out_of_range(cache, batch, layer):
    with refused(IndexError, f"layer={layer}", "0 to 1", unchanged=cache):
        batch.put(layer, ones(4), ones(4))
    with refused(IndexError, f"layer={layer}", "0 to 1", unchanged=cache):
        batch.attend(layer, ones(4), ones(4), ones(4))
    for call in (batch.dense, batch.slots, lambda layer: batch.written(layer, 0, 1)):
        with refused(IndexError, f"layer={layer}", "0 to 1", unchanged=cache):
            call(layer)


def calls_with_seq_id(cache):
    return {
        "seq_id keys": lambda s: cache.keys(0, seq_id=s),
        "seq_id values": lambda s: cache.values(0, seq_id=s),
        "seq_id get": lambda s: cache.get(0, 0, seq_id=s),
        "seq_id gather": lambda s: cache.gather(0, seq_id=s),
        "seq_id spans": lambda s: cache.spans(0, seq_id=s),
        "seq_id positions": lambda s: cache.positions(seq_id=s),
        "seq_id seq_len": cache.seq_len,
        "seq_id first_position": cache.first_position,
        "seq_id last_position": cache.last_position,
        "seq_id next_position": cache.next_position,
        "seq_id can_resume": lambda s: cache.can_resume(0, seq_id=s),
        "seq_id keep": cache.keep,
        "seq_id clear": cache.clear,
        "seq_id remove": lambda s: cache.remove(seq_id=s),
        "seq_id truncate": lambda s: cache.truncate(0, seq_id=s),
        "seq_id shift": lambda s: cache.shift(0, None, 1, seq_id=s),
        "seq_id divide": lambda s: cache.divide(0, None, 2, seq_id=s),
        "seq_id extract": lambda s: cache.extract(0, 0, 1, seq_id=s),
        "seq_id inject": lambda s: cache.inject(0, 0, ones(2, 1), ones(2, 1), seq_id=s),
        "src fork": lambda s: cache.fork(s, 1),
        "dst fork": lambda s: cache.fork(0, s),
        "src copy_prefix": lambda s: cache.copy_prefix(s, 1, 1),
        "dst copy_prefix": lambda s: cache.copy_prefix(0, s, 1),
        "src share_range": lambda s: cache.share_range(s, 1),
        "dst share_range": lambda s: cache.share_range(0, s),
        "seq_ids[1] batch": lambda s: cache.batch(positions=[3, 3], seq_ids=[0, s]),
    }


@pytest.mark.parametrize("call", calls_with_seq_id(make()))
def test_sequence_ids(cache, call):
    name = call.split()[0]
    call = calls_with_seq_id(cache)[call]
    for value in (2**63, -(2**63) - 1, 2**70):
        with refused(ValueError, f"{name}={value}", unchanged=cache):
            call(value)
    for value in (0.0, NAN, True, "0"):
        with refused(TypeError, f"{name}=", "integer", unchanged=cache):
            call(value)


def calls_with_position(cache):
    return {
        "position get": lambda p: cache.get(0, p),
        "position can_resume": cache.can_resume,
        "begin remove": cache.remove,
        "end remove": lambda p: cache.remove(0, p, shift=False),
        "begin shift": lambda p: cache.shift(p, None, 1),
        "end shift": lambda p: cache.shift(0, p, 1),
        "begin divide": lambda p: cache.divide(p, None, 2),
        "end divide": lambda p: cache.divide(0, p, 2),
        "begin extract": lambda p: cache.extract(0, p, 2**31 - 1),
        "end extract": lambda p: cache.extract(0, 0, p),
        "begin inject": lambda p: cache.inject(0, p, ones(2, 1), ones(2, 1)),
        "length truncate": cache.truncate,
        "length copy_prefix": lambda p: cache.copy_prefix(0, 1, p),
        "begin share_range": lambda p: cache.share_range(0, 1, p),
        "end share_range": lambda p: cache.share_range(0, 1, 0, p),
        "positions[1] batch": lambda p: cache.batch(positions=[3, p]),
    }


@pytest.mark.parametrize("call", calls_with_position(make()))
def test_positions(cache, call):
    name = call.split()[0]
    call = calls_with_position(cache)[call]
    for value in (-1, -(2**40), 2**31, 2**70):
        with refused(ValueError, f"{name}={value}", "must be at", unchanged=cache):
            call(value)
    for value in (0.0, NAN, True, "0"):
        with refused(TypeError, f"{name}=", "integer", unchanged=cache):
            call(value)


@pytest.mark.parametrize(
    ("positions", "error", "words"),
    [
        ([], ValueError, ("len(positions)=0",)),
        (np.zeros((0,)), ValueError, ("len(positions)=0",)),
        (np.array([3, NAN]), TypeError, ("positions[0]=3.0", "integer")),
        (np.array([3, -4]), ValueError, ("positions[1]=-4", "at least 0")),
        (np.array([3, 2**64 - 1], np.uint64), ValueError, ("positions[1]=18446744073709551615",)),
        ([3, 2**31 - 1], ValueError, ("positions[1]=2147483647", "at most 2147483646")),
        (np.array([[3, 4]]), TypeError, ("positions[0]=[3, 4]",)),
        (np.array([True]), TypeError, ("positions[0]=True",)),
        (3, TypeError, ("positions=3", "sequence")),
        (np.array(3), TypeError, ("positions=3", "sequence")),
        ("34", TypeError, ("positions[0]='3'",)),
        ([None], TypeError, ("positions[0]=None",)),
    ],
)
def test_positions_of_a_batch(cache, positions, error, words):
    with refused(error, *words, unchanged=cache):
        cache.batch(positions=positions)


def test_arguments_of_batch_that_do_not_go_together(cache):
    with refused(TypeError, "exactly one", unchanged=cache):
        cache.batch()
    with refused(TypeError, "exactly one", unchanged=cache):
        cache.batch(1, positions=[3])
    with refused(TypeError, "exactly one", unchanged=cache):
        cache.batch(seq_ids=[0])
    with refused(ValueError, "len(seq_ids)=1", "n, which is 2", unchanged=cache):
        cache.batch(2, seq_ids=[0])
    with refused(ValueError, "len(seq_ids)=1", "len(positions)", 2, unchanged=cache):
        cache.batch(positions=[3, 4], seq_ids=[0])
    for options in ({"n": 2}, {"positions": [3, 4]}):
        with refused(ValueError, "len(parents)=1", 2, unchanged=cache):
            cache.batch(**options, parents=[-1])


@pytest.mark.parametrize(
    ("parents", "error", "words"),
    [
        ([-2, 0], ValueError, ("parents[0]=-2", "at least -1")),
        ([-1, 1], ValueError, ("parents[1]", 1)),
        ([1, -1], ValueError, ("parents[0]", 1)),
        ([-1, 2**31], ValueError, ("parents[1]=2147483648",)),
        ([-1, 0.0], TypeError, ("parents[1]=0.0", "integer")),
        ([-1, None], TypeError, ("parents[1]=None", "integer")),
        (0, TypeError, ("parents=0", "sequence")),
        ([], ValueError, ("len(parents)=0",)),
    ],
)
def test_parents(cache, parents, error, words):
    with refused(error, *words, unchanged=cache):
        cache.batch(2, parents=parents)


def test_parents_of_another_sequence(cache):
    with refused(ValueError, "parents[1]", "sequence", unchanged=cache):
        cache.batch(positions=[3, 0], seq_ids=[0, 1], parents=[-1, 0])


@pytest.mark.parametrize(
    ("keep", "error", "words"),
    [
        ([4], IndexError, ("keep[0]=4", "4 tokens")),
        ([0, -1], IndexError, ("keep[1]=-1", "4 tokens")),
        ([1, 2, 1], ValueError, ("keep[2]=1", "before")),
        ([2**40], ValueError, ("keep[0]=",)),
        ([True], TypeError, ("keep[0]=True", "integer")),
        (np.array([True, False, True, False]), TypeError, ("keep[0]=True", "integer")),
        ([0.0], TypeError, ("keep[0]=0.0", "integer")),
        (2, TypeError, ("keep=2", "sequence")),
    ],
)
def test_keep(cache, batch, keep, error, words):
    for layer in range(2):
        batch.put(layer, ones(4), ones(4))
    with refused(error, *words, unchanged=cache):
        batch.commit(keep)
    batch.commit(keep=())
    assert cache.seq_len() == 3


def test_tokens_that_are_kept_must_have_been_put(cache, batch):
    for layer in range(2):
        batch.put(layer, ones(2), ones(2))
    with refused(ValueError, "token 2", "layer 0", unchanged=cache):
        batch.commit(keep=[0, 2])
    batch.commit(keep=[0, 1])
    assert cache.positions().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [0, -1, 2**31, 2**70])
def test_no_batch_of_so_many(cache, n):
    with refused(ValueError, f"n={n}", unchanged=cache):
        cache.batch(n)


@pytest.mark.parametrize("n", [1.0, NAN, True, "1", [1]])
def test_no_batch_of_what_is_no_number(cache, n):
    with refused(TypeError, "n=", "integer", unchanged=cache):
        cache.batch(n)


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


def test_positions_end():
    cache = make()
    feed(cache, [2**31 - 3])
    with refused(ValueError, "a batch of 2", 2**31 - 2, unchanged=cache):
        cache.batch(2)
    feed(cache, [2**31 - 2])
    with refused(ValueError, "a batch of 1", "goes on at 2147483647", unchanged=cache):
        cache.batch(1)


def test_ranges_that_end_before_they_begin(cache):
    for call in (
        lambda: cache.remove(2, 1),
        lambda: cache.shift(2, 1, 1),
        lambda: cache.divide(2, 1, 2),
        lambda: cache.extract(0, 2, 1),
    ):
        with refused(ValueError, "end=1", "at least 2", unchanged=cache):
            call()


def test_rows_that_are_gone():
    cache = make(policy=[kvcache.SlidingWindow(4), kvcache.FullAttention()], max_seq_len=None)
    for position in range(12):
        feed(cache, [position])
    with refused(kvcache.RowsGoneError, "position 5", "sequence 0", "12", unchanged=cache):
        cache.batch(positions=[12, 5])
    assert not cache.can_resume(5)


def test_to_move_later_tokens_is_not_supported(cache):
    for call in (
        lambda: cache.remove(0, 1),
        lambda: cache.shift(1, None, 1),
        lambda: cache.divide(0, None, 2),
    ):
        with refused(kvcache.NotSupportedError, "rope", unchanged=cache):
            call()
    assert issubclass(kvcache.NotSupportedError, NotImplementedError)


def test_by_how_much_tokens_move():
    cache = make(rope=False)
    feed(cache, range(3))
    for value in (-(2**31) - 1, 2**31, 2**70):
        with refused(ValueError, f"delta={value}", unchanged=cache):
            cache.shift(0, None, value)
    for value in (0, -1, 2**31):
        with refused(ValueError, f"divisor={value}", unchanged=cache):
            cache.divide(0, None, value)
    for value in (1.0, True, None, "1"):
        with refused(TypeError, "delta=", "integer", unchanged=cache):
            cache.shift(0, None, value)
        with refused(TypeError, "divisor=", "integer", unchanged=cache):
            cache.divide(0, None, value)
    with refused(ValueError, 2**31 - 2, unchanged=cache):
        cache.shift(0, None, 2**31 - 3)


@pytest.mark.parametrize("value", [0, -1, 2**63])
def test_reserve_of_so_many(cache, value):
    with refused(ValueError, f"num_tokens={value}", unchanged=cache):
        cache.reserve(value)
    with refused(TypeError, "num_tokens=1.0", "integer", unchanged=cache):
        cache.reserve(1.0)


def test_inject_of_what_does_not_fit(cache):
    for k, v, error, words in (
        (ones(2, 1), None, TypeError, ("v=None", "together")),
        (None, ones(2, 1), TypeError, ("k=None", "together")),
        (ones(1, 2), ones(2, 2), ValueError, ("k:", "(2, tokens, 8)")),
        (ones(2, 2), ones(2, 2, 4), ValueError, ("v:", "(2, tokens, 8)")),
        (ones(2, 2), ones(2, 3), ValueError, ("k and v", 2, 3)),
        (ones(2, 0), ones(2, 0), ValueError, ("k:", "no tokens")),
        (ones(2, 1, dtype=np.float64), ones(2, 1), TypeError, ("k:", "float64")),
        (fake_dlpack.Array(ones(2, 1), device=fake_dlpack.CUDA), ones(2, 1), ValueError, ("k:", "CPU")),
    ):
        with refused(error, *words, unchanged=cache):
            cache.inject(0, 0, k, v)
    with refused(ValueError, f"begin={2**31 - 1}", 2**31 - 2, unchanged=cache):
        cache.inject(0, 2**31 - 1, ones(2, 1), ones(2, 1))
    for options, error in (
        ({"policy": [kvcache.FullAttention(), kvcache.CrossAttention(4)]}, kvcache.NotSupportedError),
        ({"policy": [kvcache.FullAttention(), None]}, ValueError),
        ({"share": [None, 0]}, ValueError),
    ):
        with refused(error, "layer 1"):
            make(**options).inject(1, 0, ones(2, 1), ones(2, 1))


def test_copies_onto_itself(cache):
    with refused(ValueError, "src", "dst", "differ", unchanged=cache):
        cache.fork(0, 0)
    with refused(ValueError, "src", "dst", "differ", unchanged=cache):
        cache.copy_prefix(0, 0, 2)
    with refused(ValueError, "src", "dst", "differ", unchanged=cache):
        cache.share_range(0, 0, 2)


# ---- room


def test_more_sequences_than_allowed(cache):
    feed(cache, range(2), 1)
    with refused(kvcache.CacheFullError, "max_sequences", 2, unchanged=cache):
        feed(cache, range(2), 2)
    cache.fork(0, 2)  # needs no room; the next batch does
    with refused(kvcache.CacheFullError, "max_sequences", 2, unchanged=cache):
        cache.batch(1)
    assert not issubclass(kvcache.CacheFullError, MemoryError)


def test_a_sequence_too_long(cache):
    with refused(kvcache.CacheFullError, "max_seq_len", 16, unchanged=cache):
        cache.batch(14)
    with refused(kvcache.CacheFullError, "n=17", 16, unchanged=cache):
        cache.batch(17)
    with refused(kvcache.CacheFullError, "n=2147483000", 16, unchanged=cache):
        cache.batch(2147483000)
    feed(cache, range(3, 16))
    with refused(kvcache.CacheFullError, "max_seq_len", 16, unchanged=cache):
        cache.batch(1)


@pytest.mark.parametrize("limit", [{"capacity": 20}, {"max_bytes": 10_240}])
def test_full_in_the_middle_of_a_long_batch(limit):
    cache = make(max_seq_len=None, max_sequences=None, block_size=4, **limit)
    feed(cache, range(10))
    feed(cache, range(5), 1)
    positions = [*range(10, 14), *range(5, 200), 0]
    seq_ids = [0] * 4 + [1] * 195 + [2]
    with refused(kvcache.CacheFullError, next(iter(limit)), *limit.values(), unchanged=cache):
        cache.batch(positions=positions, seq_ids=seq_ids)
    feed(cache, [10])


# ---- arrays

WRONG_SHAPES = [
    (4, 2, 7),
    (4, 2, 16),
    (4, 1, 8),
    (4, 3, 8),
    (4, 2, 0),
    (4, 0, 8),
    (0, 2, 8),
]


@pytest.mark.parametrize("shape", WRONG_SHAPES)
def test_wrong_shapes(cache, batch, shape):
    wrong = np.ones(shape, np.float32)
    for name, call in {
        "k": lambda: batch.put(0, wrong, ones(4)),
        "v": lambda: batch.put(0, ones(4), wrong),
        "k:": lambda: batch.attend(0, ones(4), wrong, ones(4)),
        "v:": lambda: batch.attend(0, ones(4), ones(4), wrong),
    }.items():
        with refused(ValueError, name, "array of", unchanged=cache):
            call()
    batch.put(0, ones(4), ones(4))


@pytest.mark.parametrize("shape", [shape for shape in WRONG_SHAPES if shape[1] != 2 or shape[2] != 8])
def test_wrong_shapes_of_queries(cache, batch, shape):
    with refused(ValueError, "q:", "(tokens, a multiple of 2, 8)", unchanged=cache):
        batch.attend(0, np.ones(shape, np.float32), ones(4), ones(4))
    batch.put(0, ones(4), ones(4))


@pytest.mark.parametrize("ndim", [0, 1, 2, 4, 30])
def test_wrong_numbers_of_axes(cache, batch, ndim):
    for wrong in (np.ones((1,) * ndim, np.float32), fake_dlpack.Array(np.ones((1,) * ndim, np.float32))):
        with refused(ValueError, "k:", f"{ndim} axes", unchanged=cache):
            batch.put(0, wrong, ones(4))


def test_shapes_are_read_by_layout(cache, batch):
    with refused(ValueError, "k:", "(4, 2, 8)", "(2, tokens, 8)", unchanged=cache):
        batch.put(0, ones(4), ones(4), layout="HTD")
    with refused(ValueError, "k:", "3 axes", 4, unchanged=cache):
        batch.put(0, ones(4), ones(4), layout="BHTD")
    with refused(ValueError, "k:", "(2, 3, 2, 8)", "(sequences, 2, tokens, 8)", unchanged=cache):
        batch.put(0, np.ones((2, 3, 2, 8), np.float32), np.ones((2, 2, 2, 8), np.float32), layout="BHTD")
    with refused(ValueError, "k and v", "2 x 2", "1 x 4", unchanged=cache):
        batch.put(0, np.ones((2, 2, 2, 8), np.float32), np.ones((1, 2, 4, 8), np.float32), layout="BHTD")
    with refused(IndexError, "6 tokens", "has 4", unchanged=cache):
        batch.put(0, np.ones((2, 2, 3, 8), np.float32), np.ones((2, 2, 3, 8), np.float32), layout="BHTD")
    huge = np.broadcast_to(np.ones((1, 2, 1, 8), np.float32), (2**28, 2, 2**28, 8))
    with refused(IndexError, "has 4", unchanged=cache):
        batch.put(0, huge, huge, layout="BHTD")
    for layout in ("BTHD", "thd", "", None, 3):
        with refused(TypeError if layout == 3 else ValueError, "layout", unchanged=cache):
            batch.put(0, ones(4), ones(4), layout=layout)


def test_k_v_and_q_of_different_tokens(cache, batch):
    with refused(ValueError, "k and v", 4, 3, unchanged=cache):
        batch.put(0, ones(4), ones(3))
    with refused(ValueError, "q and k", 4, 3, unchanged=cache):
        batch.attend(0, ones(4), ones(3), ones(3))
    for k, v, name in ((ones(4), None, "v=None"), (None, ones(4), "k=None")):
        with refused(TypeError, name, "together", unchanged=cache):
            batch.attend(0, ones(4), k, v)
    batch.put(0, ones(4), ones(4))


@pytest.mark.parametrize("dtype", ["f8", "i4", "u1", "?", "c8", "U3", "O", "V2", "V4", "M8[s]", "f4,f4"])
def test_wrong_types(cache, batch, dtype):
    wrong = np.zeros((4, 2, 8), dtype)
    for name, arguments in {"k:": (wrong, ones(4)), "v:": (ones(4), wrong)}.items():
        with refused(TypeError, name, wrong.dtype, "float32", unchanged=cache):
            batch.put(0, *arguments)
    with refused(TypeError, "q:", wrong.dtype, "float32", unchanged=cache):
        batch.attend(0, wrong, ones(4), ones(4))
    batch.put(0, ones(4), ones(4))


def test_uint16_is_not_guessed_to_be_bf16(cache, batch):
    with refused(TypeError, "k:", "uint16", "ml_dtypes.bfloat16", unchanged=cache):
        batch.put(0, ones(4, dtype=np.uint16), ones(4))


@pytest.mark.parametrize("dtype", [">f4", ">f2"])
def test_the_other_byte_order(cache, batch, dtype):
    with refused(TypeError, "k:", "astype", unchanged=cache):
        batch.put(0, ones(4, dtype=dtype), ones(4))


@pytest.mark.parametrize(
    "value", [None, 1.0, "rows", [[[1.0] * 8] * 2] * 4, memoryview(b"12"), object(), b"", np.ndarray]
)
def test_what_is_no_array(cache, batch, value):
    with refused(TypeError, "k", unchanged=cache):
        batch.put(0, value, ones(4))
    with refused(TypeError, "q", unchanged=cache):
        batch.attend(0, value, ones(4), ones(4))
    batch.put(0, ones(4), ones(4))


def test_dlpack_that_will_not_do(cache, batch):
    for wrong, error, word in (
        (fake_dlpack.Array(ones(4), device=fake_dlpack.CUDA), ValueError, "CPU"),
        (fake_dlpack.Array(ones(4), code=0), TypeError, "32 bits"),
        (fake_dlpack.Array(ones(4, dtype=np.float64)), TypeError, "64 bits"),
        (fake_dlpack.Array(ones(4), version=2), TypeError, "version 2"),
        (type("X", (), {"__dlpack__": lambda self: 3})(), TypeError, "capsule"),
    ):
        with refused(error, "k", word, unchanged=cache):
            batch.put(0, wrong, ones(4))


def test_errors_of_an_array_are_its_own(cache, batch):
    class Moody:
        def __dlpack__(self):
            raise BufferError("not today")

    with refused(BufferError, "not today", unchanged=cache):
        batch.put(0, ones(4), Moody())


class WithGrad(fake_dlpack.Array):
    requires_grad = True


def test_a_tensor_with_grad(cache, batch):
    for name, call in {
        "k:": lambda: batch.put(0, WithGrad(ones(4)), ones(4)),
        "v:": lambda: batch.put(0, ones(4), WithGrad(ones(4))),
        "q:": lambda: batch.attend(0, WithGrad(ones(4)), ones(4), ones(4)),
        "out:": lambda: batch.attend(0, ones(4), ones(4), ones(4), out=WithGrad(ones(4))),
    }.items():
        with refused(ValueError, name, "requires grad", "detach()", unchanged=cache):
            call()
    batch.put(0, ones(4), ones(4))


def test_a_torch_tensor_with_grad(cache, batch):
    torch = pytest.importorskip("torch")
    with refused(ValueError, "k:", "detach()", unchanged=cache):
        batch.put(0, torch.ones(4, 2, 8, requires_grad=True), torch.ones(4, 2, 8))
    with refused(TypeError, "k:", "torch.float64", unchanged=cache):
        batch.put(0, torch.ones(4, 2, 8, dtype=torch.float64), torch.ones(4, 2, 8))


@pytest.mark.parametrize("name", ["sinks", "alibi"])
def test_factors(cache, batch, name):
    for value, error, words in (
        (np.ones(3, np.float32), ValueError, (3, "q has 4 heads")),
        (np.ones((1, 4), np.float32), ValueError, ("2 axes",)),
        (np.ones(4), TypeError, ("float64", "float32")),
        (np.ones(4, np.float16), TypeError, ("float32",)),
        ([1.0] * 4, TypeError, ("array",)),
        (1.0, TypeError, ("array",)),
    ):
        with refused(error, f"{name}:", *words, unchanged=cache):
            batch.attend(0, ones(4, 4), ones(4), ones(4), **{name: value})
    batch.put(0, ones(4), ones(4))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_numbers(cache, batch, name):
    values = [0, 0.0, NAN, float("inf"), 1e-60, 1e60, *([-1.0] if name == "softcap" else [])]
    for value in values:
        with refused(ValueError, f"{name}={value}", unchanged=cache):
            batch.attend(0, ones(4), ones(4), ones(4), **{name: value})
    for value in ("1", True, [1.0], 1j):
        with refused(TypeError, f"{name}=", "number", unchanged=cache):
            batch.attend(0, ones(4), ones(4), ones(4), **{name: value})
    batch.attend(0, ones(4), ones(4), ones(4), **{name: np.float16(0.5)})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([True] * 3, ValueError, ("3 booleans", "2 tokens", "4 in the batch")),
        ([[True, False]], ValueError, ("2 axes",)),
        ([1, 0], TypeError, ("boolean", "int64")),
        (1, TypeError, ("non_causal=1", "boolean")),
        ("yes", TypeError, ("boolean",)),
        (np.ones(2), TypeError, ("boolean", "float64")),
        ([[True], []], TypeError, ("boolean",)),
    ],
)
def test_non_causal(cache, batch, value, error, words):
    batch.put(0, ones(4), ones(4))
    with refused(error, "non_causal", *words, unchanged=cache):
        batch.attend(0, ones(2), non_causal=value)
    with refused(error, "non_causal", unchanged=cache):
        batch.dense(0, non_causal=value)


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ([(0, 0, 1), (5, 0, 1)], ValueError, ("hidden[1]", "5", "batch")),
        ([(0, -1, 3)], ValueError, ("hidden[0]=(0, -1, 3)", "at least 0")),
        ([(0, 3, 2)], ValueError, ("hidden[0]=(0, 3, 2)", "at least begin")),
        ([(0, 1)], ValueError, ("(1, 2)", "(seq_id, begin, end)")),
        ((0, 1, 2), ValueError, ("(3,)", "(seq_id, begin, end)")),
        (5, ValueError, ("()", "(seq_id, begin, end)")),
        ([(0.0, 1, 2)], TypeError, ("integers", "float64")),
        ([(False, True, True)], TypeError, ("integers", "bool")),
        ([(0, 1, 2**70)], TypeError, ("integers",)),
        ([(0, 1, 2), (0, 1)], TypeError, ("integers",)),
        ("yes", TypeError, ("'yes'", "integers")),
    ],
)
def test_hidden(cache, batch, value, error, words):
    batch.put(0, ones(4), ones(4))
    with refused(error, "hidden", *words, unchanged=cache):
        batch.attend(0, ones(2), hidden=value)
    with refused(error, "hidden", unchanged=cache):
        batch.dense(0, hidden=value)


# ---- out


def outs():
    q, k, v = ones(4), ones(4), ones(4)
    read_only = ones(4)
    read_only.flags.writeable = False
    shared = np.ones((6, 2, 8), np.float32)
    sinks = np.ones(64, np.float32)
    versioned = {"version": 1, "flags": fake_dlpack.READ_ONLY}
    copied = {"version": 1, "flags": fake_dlpack.COPIED}
    return {
        "read-only": (read_only, ValueError, "read-only", {}),
        "read-only tensor": (fake_dlpack.Array(ones(4), **versioned), ValueError, "read-only", {}),
        "copy of a tensor": (fake_dlpack.Array(ones(4), **copied), ValueError, "read-only", {}),
        "other type": (ones(4, dtype=np.float16), TypeError, "float32", {}),
        "float64": (ones(4, dtype=np.float64), TypeError, "float64", {}),
        "too few tokens": (ones(3), ValueError, "(4, 2, 8)", {}),
        "too many heads": (ones(4, 4), ValueError, "(4, 2, 8)", {}),
        "too long": (ones(4, 2, 16), ValueError, "(4, 2, 8)", {}),
        "flat": (np.ones(64, np.float32), ValueError, "1 axes", {}),
        "list": (ones(4).tolist(), TypeError, "array", {}),
        "backwards over q": (shared[3::-1], ValueError, "overlaps q", {"q": shared[2:]}),
        "every second element": (ones(4, 2, 16)[..., ::2], ValueError, "last axis", {}),
        "all tokens in one place": (
            np.lib.stride_tricks.as_strided(ones(4), strides=(0, 32, 4)),
            ValueError,
            "overlap",
            {},
        ),
        "tokens that overlap": (
            np.lib.stride_tricks.as_strided(np.ones(256, np.float32), (4, 2, 8), (32, 64, 4)),
            ValueError,
            "overlap",
            {},
        ),
        "is q": (q, ValueError, "overlaps q", {"q": q}),
        "is k": (k, ValueError, "overlaps k", {"k": k}),
        "is v": (v, ValueError, "overlaps v", {"v": v}),
        "part of q": (shared[:4], ValueError, "overlaps q", {"q": shared[2:]}),
        "q in it": (shared[2:], ValueError, "overlaps q", {"q": shared[:4]}),
        "is sinks": (sinks.reshape(4, 2, 8), ValueError, "overlaps sinks", {"sinks": sinks[60:62]}),
        "is alibi": (sinks.reshape(4, 2, 8), ValueError, "overlaps alibi", {"alibi": sinks[:2]}),
    }


@pytest.mark.parametrize("case", outs())
def test_out(cache, batch, case):
    out, error, word, others = outs()[case]
    given = {"q": ones(4), "k": ones(4), "v": ones(4)} | others
    before = np.array(getattr(out, "array", out))
    with refused(error, "out:", word, unchanged=cache):
        batch.attend(0, out=out, **given)
    np.testing.assert_array_equal(np.array(getattr(out, "array", out)), before)
    batch.put(0, ones(4), ones(4))


# ---- the order of things


def test_put_twice(cache, batch):
    batch.put(0, ones(2), ones(2), first=1)
    for call in (lambda: batch.put(0, ones(4), ones(4)), lambda: batch.attend(0, ones(4), ones(4), ones(4))):
        with refused(ValueError, "token 1", "layer 0", "before", unchanged=cache):
            call()
    for call in (lambda: batch.written(0, 0, 2), lambda: batch.slots(0, first=1)):
        with refused(ValueError, "token 1", "layer 0", "before", unchanged=cache):
            call()
    batch.put(0, ones(1), ones(1))
    batch.put(0, ones(1), ones(1), first=3)


@pytest.mark.parametrize(("first", "tokens"), [(4, 1), (3, 2), (0, 5), (-1, 1), (2**31, 1), (2**70, 1)])
def test_put_outside_the_batch(cache, batch, first, tokens):
    words = (f"first={first}", f"{tokens} tokens", "has 4")
    with refused(IndexError, *words, unchanged=cache):
        batch.put(0, ones(tokens), ones(tokens), first=first)
    with refused(IndexError, *words, unchanged=cache):
        batch.attend(0, ones(tokens), first=first)
    with refused(IndexError, *words, unchanged=cache):
        batch.written(0, first, tokens)


@pytest.mark.parametrize("first", [0.0, NAN, True, "0", None])
def test_first_is_no_integer(cache, batch, first):
    for call in (
        lambda: batch.put(0, ones(1), ones(1), first=first),
        lambda: batch.slots(0, first=first),
        lambda: batch.written(0, first, 1),
    ):
        with refused(TypeError, "first=", "integer", unchanged=cache):
            call()


def test_slots_outside_the_batch(cache, batch):
    for first in (-1, 4, 2**40):
        with refused(IndexError, f"first={first}", "has 4", unchanged=cache):
            batch.slots(0, first=first)
    for number in (0, -1, 2**31):
        with refused(ValueError, f"num_tokens={number}", unchanged=cache):
            batch.written(0, 0, number)


def test_attend_before_put(cache, batch):
    with refused(ValueError, "token 0", "layer 0", "not put", unchanged=cache):
        batch.attend(0, ones(4))
    batch.put(0, ones(2), ones(2))
    with refused(ValueError, "token 2", "not put", unchanged=cache):
        batch.attend(0, ones(1), first=3)
    batch.attend(0, ones(2))


def test_commit_with_a_layer_missing(cache, batch):
    batch.put(0, ones(4), ones(4))
    batch.put(1, ones(3), ones(3))
    with refused(ValueError, "token 3", "layer 1", unchanged=cache):
        batch.commit()
    batch.put(1, ones(1), ones(1), first=3)
    batch.commit()


def test_a_batch_in_a_batch(cache, batch):
    with refused(kvcache.CacheBusyError, "batch", unchanged=cache):
        cache.batch(1)
    with refused(kvcache.CacheBusyError, "batch", unchanged=cache):
        cache.batch(positions=[0], seq_ids=[1])


def test_the_sequence_of_an_open_batch(cache, batch):
    for call in (
        cache.clear,
        lambda: cache.clear(0),
        lambda: cache.keep(1),
        lambda: cache.remove(1),
        lambda: cache.truncate(1),
        lambda: cache.fork(0, 1),
        lambda: cache.fork(1, 0),
        lambda: cache.copy_prefix(0, 1, 1),
        lambda: cache.share_range(0, 1),
        lambda: cache.share_range(1, 0),
        lambda: cache.inject(0, 0, ones(2, 1), ones(2, 1)),
        cache.settle,
        lambda: cache.reserve(1),
        cache.compact,
        cache.close,
    ):
        with refused(kvcache.CacheBusyError, "batch", unchanged=cache):
            call()
    batch.abort()
    cache.close()


def test_views_across_eviction_compact_and_close(cache):
    view = cache.keys(0, copy=False)
    before = view.copy()
    for call in (cache.compact, cache.close):
        with refused(BufferError, "view", unchanged=cache):
            call()
    cache.clear()
    feed(cache, range(16))
    np.testing.assert_array_equal(view, before)
    del view
    cache.compact()
    cache.close()


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
        **{name: lambda call=call: call(0) for name, call in calls_with_layer(cache).items()},
        **{name: lambda call=call: call(0) for name, call in calls_with_seq_id(cache).items()},
        **{name: lambda call=call: call(0) for name, call in calls_with_position(cache).items()},
        **properties,
        "capacity_bytes": lambda: cache.capacity_bytes,
        "batch": lambda: cache.batch(1),
        "clear": cache.clear,
        "stats": cache.stats,
        "validate": cache.validate,
        "compact": cache.compact,
        "settle": cache.settle,
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
    for name in calls_with_layer(cache):
        cache = make()
        with refused(ValueError, "the cache is closed"):
            calls_with_layer(cache)[name](Closes(cache.close))
    for name in calls_with_seq_id(cache):
        cache = make()
        with refused(ValueError, "the cache is closed"):
            calls_with_seq_id(cache)[name](Closes(cache.close))


# ---- layers that are not like the others


def test_a_sequence_where_the_batch_names_it(cache, batch):
    with refused(ValueError, "seq_id=0", "CrossAttention", "layer 0", unchanged=cache):
        batch.put(0, ones(4), ones(4), seq_id=0)


def test_rows_of_cross_attention():
    cache = make(policy=[kvcache.FullAttention(), kvcache.CrossAttention(4)], max_sequences=2)
    batch = cache.batch(positions=[0, 0], seq_ids=[3, 5])
    with refused(ValueError, "seq_id=None", "2 sequences"):
        batch.put(1, ones(3), ones(3))
    with refused(ValueError, "seq_id=None", "2 sequences"):
        batch.attend(1, ones(2), ones(3), ones(3))
    with refused(ValueError, "4", "sequence"):
        batch.put(1, ones(3), ones(3), seq_id=4)
    with refused(ValueError, "first=1", "must be 0"):
        batch.put(1, ones(3), ones(3), seq_id=3, first=1)
    with refused(kvcache.CacheFullError, "max_len", 4, 5):
        batch.put(1, ones(5), ones(5), seq_id=3)
    with refused(TypeError, "seq_id=", "integer"):
        batch.put(1, ones(3), ones(3), seq_id=3.0)
    with refused(ValueError, "k:", "2 sequences", "seq_id"):
        batch.put(1, np.ones((2, 2, 3, 8), np.float32), np.ones((2, 2, 3, 8), np.float32), layout="BHTD", seq_id=3)
    with refused(kvcache.NotSupportedError, "layer 1"):
        batch.slots(1)
    cache.validate()
    batch.put(1, ones(4), ones(4), seq_id=3)


def test_layers_without_rows_of_their_own():
    cache = make(num_layers=3, share=[None, 0, None], policy=[kvcache.FullAttention()] * 2 + [None])
    batch = cache.batch(2)
    for layer in (1, 2):
        for call in (
            lambda layer=layer: batch.put(layer, ones(2), ones(2)),
            lambda layer=layer: batch.attend(layer, ones(2), ones(2), ones(2)),
            lambda layer=layer: batch.slots(layer),
            lambda layer=layer: batch.written(layer, 0, 2),
        ):
            with refused(ValueError, f"layer {layer}", unchanged=cache):
                call()
    batch.put(0, ones(2), ones(2))
    batch.commit()


def test_values_in_keys():
    cache = make(value_in_key=True, v_head_dim=4, num_layers=1)
    k = np.random.default_rng(0).standard_normal((4, 2, 8), np.float32)
    batch = cache.batch(4)
    with refused(ValueError, "v:", "k[..., :4]", "value_in_key", unchanged=cache):
        batch.put(0, k, k[..., 1:5])
    with refused(TypeError, "k=None", unchanged=cache):
        batch.put(0, None, k[..., :4])
    with refused(ValueError, "scale=None", "value_in_key", unchanged=cache):
        batch.attend(0, k, k)
    batch.attend(0, k, k, scale=1.0)
    batch.commit()
    with refused(ValueError, "v:", "k[..., :4]", unchanged=cache):
        cache.inject(0, 0, ones(2, 1), 2 * ones(2, 1, 4))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"])
def test_quantised_types_have_no_views(name):
    cache = make(head_dim=32, k_dtype=name, v_dtype="f16")
    for copy in (None, False, True):
        with refused(ValueError, name, "gather()", "layer 0"):
            cache.keys(0, copy=copy)
    with refused(ValueError, name, "gather()", "layer 1"):
        cache.spans(1)
    assert cache.values(0).shape == (2, 0, 32)
    with refused(ValueError, f"dtype='{name}'", "'f32', 'f16' or 'bf16'"):
        cache.gather(0, dtype=name)


# ---- functions that move keys


@pytest.mark.parametrize(
    ("function", "error", "word"),
    [
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

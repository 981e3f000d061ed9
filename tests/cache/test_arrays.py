"""Arrays in and out: NumPy and DLPack, element types, layouts, strides, `out`."""

import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from support import fake_dlpack
from support.programs import run_python

import kvcache

BF16 = ml_dtypes.bfloat16
NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": BF16}
TOKENS, HEADS, KV_HEADS, K_DIM, V_DIM = 5, 6, 3, 8, 12


def small_numbers(*shape, dtype=np.float32, seed=0):
    """Numbers that every type holds exactly."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32).astype(dtype)


def new_cache(dtype="f32", **options):
    return kvcache.KVCache(1, KV_HEADS, K_DIM, 64, v_head_dim=V_DIM, dtype=dtype, **options)


def rows(dtype=np.float32):
    k = small_numbers(TOKENS, KV_HEADS, K_DIM, dtype=dtype, seed=1)
    return k, small_numbers(TOKENS, KV_HEADS, V_DIM, dtype=dtype, seed=2)


def queries(dtype=np.float32):
    return small_numbers(TOKENS, HEADS, K_DIM, dtype=dtype, seed=3)


def stored_after_put(k, v, dtype="f32", **options):
    cache = new_cache(dtype)
    with cache.batch(TOKENS) as batch:
        batch.put(0, k, v, **options)
    return cache.keys(0), cache.values(0)


def attended(q, k, v, dtype="f32", **options):
    with new_cache(dtype).batch(TOKENS) as batch:
        return batch.attend(0, q, k, v, **options)


def check_stored(got, k, v):
    np.testing.assert_array_equal(got[0].astype(np.float32), np.swapaxes(k, 0, 1).astype(np.float32))
    np.testing.assert_array_equal(got[1].astype(np.float32), np.swapaxes(v, 0, 1).astype(np.float32))


# ---- in


@pytest.mark.parametrize("stored", NUMPY)
@pytest.mark.parametrize("given", NUMPY)
def test_every_type_goes_into_every_type(given, stored):
    k, v = rows(NUMPY[given])
    keys, values = stored_after_put(k, v, stored)
    assert keys.dtype == values.dtype == NUMPY[stored]
    check_stored((keys, values), k, v)


def strided(x):
    """The same array, lying in many ways; those after the first three have to be copied."""
    wide = np.zeros((x.shape[0] * 2, x.shape[1] + 1, x.shape[2] + 4), x.dtype)
    inside = wide[::2, 1:, 2:-2]
    inside[...] = x
    yield "part of a larger one", inside
    yield "heads outside", np.swapaxes(np.ascontiguousarray(np.swapaxes(x, 0, 1)), 0, 1)
    read_only = x.copy()
    read_only.flags.writeable = False
    yield "read-only", read_only
    yield "backwards", x[::-1].copy()[::-1]
    yield "heads backwards", x[:, ::-1].copy()[:, ::-1]
    yield "elements backwards", x[..., ::-1].copy()[..., ::-1]
    yield "dim outside", np.asfortranarray(x)
    yield "every second element", np.repeat(x, 2, axis=2)[..., ::2]
    odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    odd[...] = x
    yield "at an odd address", odd


CASES = [name for name, _ in strided(np.zeros((2, 2, 2), np.float32))]


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("case", CASES)
def test_strides(case, dtype):
    k, v = rows(NUMPY[dtype])
    q = queries(NUMPY[dtype])
    given = [dict(strided(x))[case] for x in (q, k, v)]
    check_stored(stored_after_put(*given[1:]), k, v)
    np.testing.assert_array_equal(attended(*given), attended(q, k, v))


def put_and_attend(q, k, v):
    with new_cache() as cache:
        with cache.batch(TOKENS) as batch:
            out = batch.attend(0, q, k, v)
        return out, cache.keys(0).copy(), cache.values(0).copy()


def replace(q, k, v):
    with new_cache() as cache:
        with cache.batch(TOKENS) as batch:
            batch.put(0, *rows())
        cache.inject(0, 0, k.swapaxes(0, 1), v.swapaxes(0, 1))
        return cache.keys(0).copy(), cache.values(0).copy()


def weigh(q, k, v):
    with new_cache() as cache:
        with cache.batch(TOKENS) as batch:
            batch.put(0, *rows())
        return [cache.weights(0, q)]


def choose(q, k, v):
    cache = kvcache.KVCache([kvcache.Layer(KV_HEADS, K_DIM, v_head_dim=0)], max_seq_len=TOKENS)
    with cache.batch(TOKENS) as batch:
        batch.put(0, k)
        return batch.choose(0, q, width=2, weights=q[..., 0], num_choices=KV_HEADS, return_scores=True)


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.hf)])
@pytest.mark.parametrize("axes", ["token", "head", "token, head"])
@pytest.mark.parametrize("call", [put_and_attend, replace, weigh, choose])
def test_axes_of_stride_0_have_the_same_rows_again(call, axes, library):
    first = tuple(slice(1 if axis in axes else None) for axis in ("token", "head"))
    views = [np.broadcast_to(x[first], x.shape) for x in (queries(), *rows())]
    expected = call(*(x.copy() for x in views))
    if library == "torch":
        import torch

        views = [torch.from_numpy(x[first].copy()).expand(x.shape) for x in views]
    for got, right in zip(call(*views), expected, strict=True):
        np.testing.assert_array_equal(got, right)


def test_strides_of_axes_of_length_1_mean_nothing():
    cache = kvcache.KVCache(1, 1, 8, 64)
    x = small_numbers(1, 1, 8)
    x = np.lib.stride_tricks.as_strided(x, x.shape, (-4, 2, 4))
    with cache.batch(1) as batch:
        batch.put(0, x, x)
    np.testing.assert_array_equal(cache.keys(0), x)
    with cache.batch(1) as batch:
        out = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), x.shape, (0, 2, 4))
        np.testing.assert_array_equal(batch.attend(0, x, x, x, out=out), x)
    keys = kvcache.KVCache([kvcache.Layer(1, 8, v_head_dim=0)], max_seq_len=64)
    with keys.batch(1) as batch:
        batch.put(0, x)
        weights = np.lib.stride_tricks.as_strided(np.ones(1, np.float32), (1, 1), (0, 2))
        assert batch.choose(0, x, width=1, weights=weights).tolist() == [[[0]]]


@pytest.mark.parametrize("way", ["__array__", "__dlpack__"])
def test_arrays_of_other_libraries(way):
    k, v = rows()
    wrapped = type("Wrapped", (), {way: lambda self, **options: getattr(k, way)(**options)})()
    before = sys.getrefcount(k)
    check_stored(stored_after_put(wrapped, v), k, v)
    assert sys.getrefcount(k) == before


@pytest.mark.parametrize(
    "options",
    [{}, {"strides": False}, {"byte_offset": 64}, {"version": 1}, {"version": 1, "flags": fake_dlpack.READ_ONLY}],
)
def test_bf16_through_dlpack(options):
    k, v = rows()
    check_stored(stored_after_put(fake_dlpack.bf16(k, **options), fake_dlpack.bf16(v, **options)), k, v)
    out = attended(fake_dlpack.bf16(queries(), **options), k, v)
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, attended(queries(BF16), k, v))


def test_strided_bf16_through_dlpack():
    k, v = rows()
    bits = (k.view(np.uint32) >> 16).astype(np.uint16)
    for _, array in strided(bits):
        if array.ctypes.data % 2 == 0:
            check_stored(stored_after_put(fake_dlpack.Array(array, fake_dlpack.BFLOAT), v), k, v)


def test_host_memory_of_a_device_is_memory():
    k, v = rows()
    check_stored(stored_after_put(fake_dlpack.Array(k, device=3), v), k, v)


def test_factors():
    k, v = rows()
    sinks, alibi = np.linspace(-1, 1, HEADS, dtype=np.float32), np.linspace(0, 1, HEADS, dtype=np.float32)
    out = attended(queries(), k, v, sinks=sinks, alibi=alibi)
    sparse = np.repeat(sinks, 3)[::3]
    wrapped = fake_dlpack.Array(alibi)
    np.testing.assert_array_equal(attended(queries(), k, v, sinks=sparse, alibi=wrapped), out)
    assert (out != attended(queries(), k, v)).any()


def test_the_way_of_c():
    k, v = rows()
    fake_dlpack.deleted.clear()
    fast = [fake_dlpack.FastArray(x) for x in (k, v, queries())]
    check_stored(stored_after_put(*fast[:2]), k, v)
    assert len(fake_dlpack.deleted) == 2
    out = fake_dlpack.FastArray(np.zeros((TOKENS, HEADS, V_DIM), np.float32))
    assert attended(fast[2], *fast[:2], out=out) is out
    assert len(fake_dlpack.deleted) == 6
    np.testing.assert_array_equal(out.array, attended(queries(), k, v))


# ---- out


@pytest.mark.parametrize("layout", ["THD", "HTD"])
@pytest.mark.parametrize("dtype", NUMPY)
def test_out(dtype, layout):
    q, (k, v) = queries(NUMPY[dtype]), rows()
    if layout == "HTD":
        q, k, v = (np.swapaxes(x, 0, 1) for x in (q, k, v))
    expected, sums = attended(q, k, v, layout=layout, return_lse=True)
    right, right_sums = attended(queries(NUMPY[dtype]), *rows(), return_lse=True)
    for found, wanted in ((expected, right), (sums, right_sums)):
        np.testing.assert_array_equal(found, wanted.swapaxes(0, 1) if layout == "HTD" else wanted)
    a, b, dim = expected.shape
    for out in (
        np.zeros((a, b, dim), NUMPY[dtype]),
        np.swapaxes(np.zeros((b, a, dim), NUMPY[dtype]), 0, 1),
        np.zeros((a, b, 2 * dim), NUMPY[dtype])[..., :dim],
        np.zeros((a, b, dim), NUMPY[dtype])[::-1],
    ):
        assert attended(q, k, v, layout=layout, out=out) is out
        np.testing.assert_array_equal(out, expected)
    assert attended(q, k, v, layout=layout, out=out, return_lse=True)[0] is out


class OldArray(fake_dlpack.Array):
    def __dlpack__(self):
        return super().__dlpack__()


@pytest.mark.parametrize(
    ("kind", "options"), [(fake_dlpack.Array, {}), (fake_dlpack.Array, {"version": 1}), (OldArray, {})]
)
def test_out_through_dlpack(kind, options):
    k, v = rows()
    out = kind(np.zeros((TOKENS, HEADS, V_DIM), np.uint16), fake_dlpack.BFLOAT, **options)
    assert attended(queries(BF16), k, v, out=out) is out
    np.testing.assert_array_equal(out.array.view(BF16), attended(queries(BF16), k, v))


def dlpack_type(array):
    """The DLPack type code of what goes out, and whether the capsule is of the new kind."""
    import ctypes

    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    new = array.__dlpack__(max_version=(1, 0))
    old = None if not array.flags.writeable else array.__dlpack__()
    kind = fake_dlpack.ManagedVersioned.from_address(pointer(new, b"dltensor_versioned"))
    if old is not None:
        assert fake_dlpack.Managed.from_address(pointer(old, b"dltensor")).tensor.code == kind.tensor.code
    return kind.tensor.code


def test_bf16_goes_out_through_dlpack():
    k, v = rows()
    cache = new_cache("bf16")
    with cache.batch(TOKENS) as batch:
        out = batch.attend(0, queries(BF16), k, v)
    for array in (out, out[1:], cache.keys(0), cache.keys(0, copy=True), cache.gather(0, dtype="bf16")[1]):
        assert isinstance(array, np.ndarray)
        assert dlpack_type(array) == fake_dlpack.BFLOAT
        assert array.__dlpack_device__() == (fake_dlpack.CPU, 0)
    assert dlpack_type(out.astype(np.float32)) == fake_dlpack.FLOAT


WITHOUT_ML_DTYPES = """
    import sys
    sys.modules["ml_dtypes"] = None  # not to be had
    import numpy as np
    import kvcache
    from support import fake_dlpack

    cache = kvcache.KVCache(1, 1, 4, 8, dtype="bf16")
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    with cache.batch(1) as batch:
        out = batch.attend(0, fake_dlpack.bf16(x), x, x)
    assert out.shape == (1, 1, 4) and out.dtype == "V2"
    assert (out.view("uint16") == x.view(np.uint32) >> 16).all()
    with cache.batch(1) as batch:  # what came out goes in again
        again = batch.attend(0, out, out, cache.keys(0))
    assert (again.view("uint16") == out.view("uint16")).all()
    assert (cache.gather(0)[0][:, 1] == x[0]).all()
    try:
        with cache.batch(1) as batch:
            batch.put(0, np.zeros((1, 1, 4), "V2"), x)
    except TypeError as error:
        assert "V2" in str(error)
    else:
        raise AssertionError("two bytes were taken for bf16")
    try:
        import torch
    except ImportError:
        pass
    else:
        assert torch.from_dlpack(out).dtype == torch.bfloat16
        assert torch.from_dlpack(out).tolist() == x.tolist()
"""


def test_bf16_without_ml_dtypes():
    run_python(textwrap.dedent(WITHOUT_ML_DTYPES))


# ---- PyTorch


@pytest.mark.hf
@pytest.mark.parametrize("layout", ["THD", "HTD", "BHTD"])
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
def test_torch_in_torch_out(given, layout):
    """The result and its log-sum-exp are what q is, whatever the other arrays are."""
    import torch

    def laid_out(x):
        return x if layout == "THD" else x.swapaxes(0, 1) if layout == "HTD" else x.swapaxes(0, 1)[None]

    q, k, v = (laid_out(x) for x in (queries(), *rows()))
    tensors = [torch.from_numpy(x).to(getattr(torch, given)) for x in (q, k, v)]
    options = {"layout": layout, "return_lse": True}
    want, want_lse = attended(q.astype(BF16 if given == "bfloat16" else given), k, v, **options)
    for one in ((tensors[0], k, v), tensors):
        out, lse = attended(*one, **options)
        assert (out.dtype, lse.dtype) == (tensors[0].dtype, torch.float32)
        np.testing.assert_array_equal(out.float().numpy(), want.astype(np.float32))
        np.testing.assert_array_equal(lse.numpy(), want_lse)
    out, lse = attended(q, *tensors[1:], **options)
    assert isinstance(out, np.ndarray)
    assert isinstance(lse, np.ndarray)


@pytest.mark.hf
def test_whatever_takes_an_array_takes_a_tensor(tmp_path):
    import torch

    def results(array):
        """Return what calls make of arrays, each converted by `array`."""
        k, v = (array(x) for x in rows())
        cache = new_cache(max_sequences=None)
        with cache.batch(positions=array(np.arange(4)), seq_ids=array(np.array([0, 0, 3, 3]))) as batch:
            yield batch.attend(
                0, array(queries()[:4]), k[:4], v[:4], non_causal=array(np.array([True, False, True, False])),
                masked=array(np.array([[0, 0, 1]])), sinks=array(np.ones(HEADS, np.float32)),
                alibi=array(np.ones(HEADS, np.float32)), scale=array(np.array(0.5)),
            )  # fmt: skip
        with cache.batch(positions=[2, 3, 3], parents=array(np.array([-1, 0, 0]))) as batch:
            batch.put(array(np.array(0)), k[:3], v[:3])
            outs = [array(np.zeros(shape, np.float32)) for shape in ((KV_HEADS, 5, K_DIM), (KV_HEADS, 5, V_DIM))]
            for mask, dtype in (("f32", np.float32), ("bool", np.bool_)):
                given = [*outs, array(np.zeros((3, 5), dtype))]
                got = batch.dense(0, mask=mask, out=given)
                assert all(x is y for x, y in zip(got, given, strict=True))
                yield from got
            batch.commit(keep=array(np.array([0, 2])))
        got = cache.gather(0, out=(outs[0][:, :4], outs[1][:, :4]))
        yield from got
        cache.inject(0, 1, k[:2].swapaxes(0, 1), v[:2].swapaxes(0, 1))
        yield cache.keys(0)
        cache.save(tmp_path / "state", tokens={0: array(np.arange(4))})
        yield kvcache.state.inspect(tmp_path / "state").sequences[0].tokens
        rope = kvcache.Rope(array(np.array([1.0, 0.1])))
        yield rope.inv_freq
        shared = kvcache.KVCache(1, 1, 8, block_size=2, max_sequences=None)
        prefix = kvcache.PrefixCache(shared, fingerprint="one")
        seq_id, _ = prefix.acquire(array(np.arange(5)))
        with shared.batch(5, seq_ids=[seq_id] * 5) as batch:
            batch.put(0, np.zeros((5, 1, 8), np.float32), np.zeros((5, 1, 8), np.float32))
        prefix.release(seq_id, array(np.arange(5)))
        yield prefix.lookup(array(np.arange(5)))

    for got, want in zip(results(torch.from_numpy), results(np.asarray), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.hf
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_rows", [0, TOKENS])
def test_a_type_of_torch_gives_tensors(name, num_rows):
    import torch

    cache, dtype = new_cache(), getattr(torch, name)
    with cache.batch(TOKENS) as batch:
        batch.put(0, *rows())
        for mask, kind in (("f32", torch.float32), ("bool", torch.bool), (None, None)):
            made, as_numpy = (batch.dense(0, dtype=dtype, mask=mask), batch.dense(0, mask=mask))
            assert [x if x is None else x.dtype for x in made] == [dtype, dtype, kind]
            for got, want in zip(made, as_numpy, strict=True):
                assert got is want is None or np.array_equal(got.float(), want)
    made, as_numpy = (cache.gather(0, first=TOKENS - num_rows, **how) for how in ({"dtype": dtype}, {}))
    for got, want in zip(made, as_numpy, strict=True):
        assert got.dtype == dtype
        assert isinstance(want, np.ndarray)
        assert np.array_equal(got.float(), want)
        got[:] = 0  # it may be written to


@pytest.mark.hf
def test_masks_of_torch_that_are_refused():
    import torch

    with new_cache().batch(2) as batch:
        batch.put(0, *(x[:2] for x in rows()))
        outs = torch.zeros(KV_HEADS, 2, K_DIM), torch.zeros(KV_HEADS, 2, V_DIM)
        for mask, words in (
            (
                torch.zeros(2, 2, dtype=torch.bool),
                "an array of float32 is needed, where mask='f32', not torch.bool|bool",
            ),
            (torch.zeros(2, 2, requires_grad=True), "requires grad"),
            (torch.zeros(2, 2, device="meta"), "an array of float32 is needed"),
            (torch.zeros(2, 4)[:, ::2], "must be contiguous"),
            (torch.zeros(2, 3), r"an array of shape \(2, 3\), where \(2, 2\) is needed"),
        ):
            with pytest.raises((TypeError, ValueError), match=rf"out\[2\]: .*({words})"):
                batch.dense(0, out=(*outs, mask))


# ---- names of element types


NAMES = {
    "f32": ["float32", "torch.float32", np.float32, np.dtype("float32")],
    "f16": ["float16", "half", "torch.float16", np.float16, np.dtype("f2")],
    "bf16": ["bfloat16", "torch.bfloat16", BF16, np.dtype(BF16)],
}


def test_names_of_other_libraries():
    for dtype, names in NAMES.items():
        for name in names:
            layer = kvcache.Layer(1, 8, k_dtype=name, v_dtype=name)
            assert layer == kvcache.Layer(1, 8, dtype=name) == kvcache.Layer(1, 8, dtype=dtype)
            cache = kvcache.KVCache(2, 1, 8, dtype=[name, "f32"])
            assert (cache.layers[0].k_dtype, cache.layers[1].k_dtype) == (dtype, "f32")
            with cache.batch(1) as batch:
                for at in range(2):
                    batch.put(at, np.ones((1, 1, 8), np.float32), np.ones((1, 1, 8), np.float32))
                assert batch.dense(0, dtype=name)[0].dtype == NUMPY[dtype]
            assert cache.gather(0, dtype=name)[1].dtype == NUMPY[dtype]


@pytest.mark.hf
def test_names_of_torch():
    import torch

    for dtype, name in (("f32", torch.float), ("f16", torch.half), ("bf16", torch.bfloat16)):
        cache = kvcache.KVCache(2, 1, 8, dtype=name, v_dtype=[name, "f32"])
        assert [layer.k_dtype for layer in cache.layers] == [dtype] * 2
        assert [layer.v_dtype for layer in cache.layers] == [dtype, "f32"]
        assert cache.gather(0, dtype=name)[0].dtype == name
    for name in (torch.float64, torch.float8_e4m3fn, torch.int8, torch.Tensor):
        with pytest.raises(ValueError, match=r"dtype=.*torch.*: must be 'f32', 'f16',"):
            kvcache.KVCache(1, 1, 8, dtype=name)


def test_a_name_of_numpy_is_a_name():
    layer = kvcache.Layer(2, 32, dtype=np.str_("q8_0"))
    assert type(layer.k_dtype) is str

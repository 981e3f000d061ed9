# cython: language_level=3
"""The C core as Python sees it: arguments in, arrays out; no logic of its own.

What the functions mean stands in include/kvcache.h; what users see, in cache.py. Three rules hold throughout:

- A handle is used between enter(), which says so, and leave(), and only C runs there: nothing that can fail, make
  an object (which may start the garbage collector), or run anyone's code. So nobody frees it meanwhile. Arguments are
  converted before, results made afterwards.
- What may wait for the cache's mutex, or takes more than a microsecond, runs without the GIL.
- What was found out about a sequence is as old as the last leave(): another thread may have edited it since.

Arrays that are contiguous and of one type are typed memoryviews. Pointers, with strides, are for what views cannot be:
arrays of bf16, of DLPack, or with any strides; and for what batch(), put() and attend() need at each step, where taking
a view of an array would cost half as much as all of batch().
"""

import operator
import os
import weakref
from threading import get_ident

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.object cimport PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_INCREF
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from kvcache.errors import CacheBusyError, CacheFullError, KVCacheError, NotSupportedError, RowsGoneError

cnp.import_array()


cdef extern from "Python.h":
    double PyFloat_AsDouble(object number) except? -1.0


cdef extern from "numpy/arrayobject.h":
    # numpy's own declaration of this one takes no NULL
    object PyArray_NewFromDescr(
        PyTypeObject *subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides, void *data,
        int flags, void *prototype)


cdef extern from "kvcache.h" nogil:
    ctypedef enum kvc_status:
        KVC_OK
        KVC_ERR_INVALID
        KVC_ERR_INDEX
        KVC_ERR_FULL
        KVC_ERR_NOMEM
        KVC_ERR_UNSUPPORTED
        KVC_ERR_BUSY
        KVC_ERR_HELD
        KVC_ERR_GONE
        KVC_ERR_CANCELLED
        KVC_ERR_CALLBACK

    cdef enum:
        KVC_F32
        KVC_F16
        KVC_BF16
        KVC_Q8_0
        KVC_Q4_0
        KVC_FULL
        KVC_SLIDING
        KVC_CHUNKED
        KVC_CROSS
        KVC_NONE
        KVC_ROPE_UNKNOWN
        KVC_ROPE_NONE
        KVC_ROPE_FREQUENCIES
        KVC_ROPE_FUNCTION
        KVC_END
        KVC_MAX_BATCH

    int32_t kvc_version()
    const char *kvc_build_info()
    const char *kvc_isa()
    int32_t kvc_num_threads()
    const char *kvc_last_error()
    kvc_status kvc_set_num_threads(int32_t num_threads)

    ctypedef struct kvc_policy:
        int32_t kind, window, num_sink_tokens, attention_chunk_size, resume_window, max_len

    ctypedef int32_t kvc_shift_fn(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows,
                                  int32_t k_dim, int32_t delta) noexcept

    ctypedef struct kvc_rope:
        int32_t kind, interleaved, first_dim, num_freqs
        const double *inv_freq
        kvc_shift_fn *shift
        void *user

    ctypedef struct kvc_layer:
        int32_t num_kv_heads, k_dim, v_dim, k_type, v_type, value_in_key, share
        kvc_policy policy
        kvc_rope rope

    ctypedef int32_t kvc_poll_fn(void *user) noexcept

    ctypedef struct kvc_config:
        size_t struct_size
        const kvc_layer *layers
        size_t layer_size
        int32_t num_layers, block_size
        int64_t max_seq_len, max_sequences, capacity, max_bytes
        int32_t num_threads
        kvc_poll_fn *poll
        void *poll_user

    ctypedef struct kvc_cache
    ctypedef struct kvc_batch
    ctypedef struct kvc_hold

    kvc_status kvc_cache_new(const kvc_config *config, kvc_cache **cache)
    kvc_status kvc_cache_clone(kvc_cache *cache, kvc_cache **clone)
    kvc_status kvc_cache_free(kvc_cache *cache)

    int64_t kvc_seq_len(kvc_cache *cache, int64_t seq_id, int32_t layer)
    int32_t kvc_first_position(kvc_cache *cache, int64_t seq_id)
    int32_t kvc_next_position(kvc_cache *cache, int64_t seq_id)
    int32_t kvc_can_resume(kvc_cache *cache, int64_t seq_id, int32_t position)
    int64_t kvc_sequences(kvc_cache *cache, int64_t *seq_ids, int64_t max_ids)
    int64_t kvc_positions(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t *positions, int64_t max_positions)

    kvc_status kvc_clear(kvc_cache *cache)
    kvc_status kvc_clear_sequence(kvc_cache *cache, int64_t seq_id)
    kvc_status kvc_keep(kvc_cache *cache, int64_t seq_id)
    kvc_status kvc_copy_prefix(kvc_cache *cache, int64_t src, int64_t dst, int32_t length)
    kvc_status kvc_fork(kvc_cache *cache, int64_t src, int64_t dst)
    kvc_status kvc_remove(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t shift)
    kvc_status kvc_truncate(kvc_cache *cache, int64_t seq_id, int32_t length)
    kvc_status kvc_shift(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t delta)
    kvc_status kvc_divide(kvc_cache *cache, int64_t seq_id, int32_t begin, int32_t end, int32_t divisor)
    kvc_status kvc_settle(kvc_cache *cache)
    kvc_status kvc_reserve(kvc_cache *cache, int64_t seq_id, int64_t num_tokens)
    kvc_status kvc_room(kvc_cache *cache, int64_t seq_id, int64_t *num_tokens)
    kvc_status kvc_compact(kvc_cache *cache)

    ctypedef struct kvc_stats:
        int64_t batches, aborted, tokens, rows_evicted, rows_moved, compactions
        int64_t blocks_opened, blocks_reused, blocks_returned
        int64_t live_slots, wasted_slots, blocks_in_use, blocks_free, rows_copied

    void kvc_get_stats(kvc_cache *cache, kvc_stats *stats, size_t stats_size)
    int64_t kvc_nbytes(kvc_cache *cache)
    int32_t kvc_block_size(kvc_cache *cache)
    int64_t kvc_capacity(kvc_cache *cache)
    int64_t kvc_capacity_bytes(kvc_cache *cache)
    double kvc_utilization(kvc_cache *cache)
    kvc_status kvc_validate(kvc_cache *cache)

    ctypedef struct kvc_block_info:
        int32_t num_slots, filled, live, references, resident, is_held, is_free

    ctypedef struct kvc_run_info:
        int64_t seq_id
        int32_t block, slot, count, position, delta, in_batch

    kvc_status kvc_blocks(kvc_cache *cache, int32_t layer, kvc_block_info *blocks, size_t block_info_size,
                          int64_t max_blocks, int64_t *num_blocks, kvc_run_info *runs, size_t run_info_size,
                          int64_t max_runs, int64_t *num_runs)

    ctypedef struct kvc_span:
        const void *k
        const void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t num_rows, position, delta

    kvc_status kvc_spans(kvc_cache *cache, int64_t seq_id, int32_t layer, kvc_span *spans, size_t span_size,
                         int64_t max_spans, int64_t *num_spans, kvc_hold **hold)
    void kvc_hold_free(kvc_hold *hold)

    ctypedef struct kvc_rows_out:
        size_t struct_size
        int32_t type
        void *k
        void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t *positions
        int64_t *num_stored

    kvc_status kvc_gather(kvc_cache *cache, int64_t seq_id, int32_t layer, int64_t first_row, int64_t num_rows,
                          const kvc_rows_out *out)
    kvc_status kvc_extract(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                           const kvc_rows_out *out)

    ctypedef struct kvc_rows_in:
        size_t struct_size
        const void *k
        const void *v
        int64_t k_head_stride, k_row_stride, v_head_stride, v_row_stride
        int32_t k_type, v_type, skip_missing
        int64_t *num_replaced

    kvc_status kvc_inject(kvc_cache *cache, int64_t seq_id, int32_t layer, int32_t begin, int32_t end,
                          const kvc_rows_in *rows)

    ctypedef struct kvc_begin_args:
        size_t struct_size
        int32_t num_tokens
        const int32_t *positions
        const int64_t *seq_ids
        const int32_t *parents
        const uint8_t *unstored
    kvc_status kvc_begin_with(kvc_cache *cache, const kvc_begin_args *args, kvc_batch **batch)
    const int32_t *kvc_batch_positions(const kvc_batch *batch)

    ctypedef struct kvc_put_args:
        size_t struct_size
        int32_t first, num_tokens
        const void *k
        const void *v
        int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride
        int32_t k_type, v_type, inner_tokens
        int64_t k_batch_stride, v_batch_stride, seq_id

    kvc_status kvc_put(kvc_batch *batch, int32_t layer, const kvc_put_args *args)
    kvc_status kvc_slots(kvc_batch *batch, int32_t layer, int32_t first, kvc_span *span, size_t span_size,
                         kvc_hold **hold)
    kvc_status kvc_written(kvc_batch *batch, int32_t layer, int32_t first, int32_t num_tokens)

    ctypedef struct kvc_attend_args:
        size_t struct_size
        const void *q
        void *out
        float *lse
        const float *sinks
        const float *alibi
        int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride, lse_token_stride, lse_head_stride
        int32_t q_type
        float scale, softcap
        const kvc_put_args *put
        int32_t inner_tokens
        int64_t q_batch_stride, out_batch_stride, lse_batch_stride

    ctypedef struct kvc_plan_args:
        size_t struct_size
        int32_t layer, first, num_tokens, num_heads
        const uint8_t *non_causal

    kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *plan, const kvc_attend_args *args)
    kvc_status kvc_dense_rows(kvc_batch *batch, int32_t layer, int64_t *num_rows)
    kvc_status kvc_dense_sequences(kvc_batch *batch, int32_t layer, int32_t *num_sequences, int64_t *most_rows)

    ctypedef struct kvc_dense_args:
        size_t struct_size
        const kvc_rows_out *rows
        float *mask
        int64_t mask_token_stride, num_rows
        const uint8_t *non_causal
        uint8_t *seen
        int64_t seen_token_stride
        int32_t by_sequence
        int64_t k_batch_stride, v_batch_stride

    kvc_status kvc_dense(kvc_batch *batch, int32_t layer, const kvc_dense_args *args)
    kvc_status kvc_commit(kvc_batch *batch)
    kvc_status kvc_commit_kept(kvc_batch *batch, const int32_t *kept, int32_t num_kept)
    void kvc_abort(kvc_batch *batch)


# DLPack, https://dmlc.github.io/dlpack/latest/c_api.html: what a capsule of either kind holds.

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # in elements; NULL: one row after the other
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void *context
    void *deleter

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void *context
    void (*deleter)(DLManagedTensorVersioned *) noexcept
    uint64_t flags
    DLTensor tensor

cdef struct DLExchangeAPI:
    uint32_t major
    uint32_t minor
    void *older
    void *allocate
    int (*from_object)(void *tensor, DLManagedTensorVersioned **out) except -1

cdef enum:
    DL_FLOAT = 2
    DL_BFLOAT = 4
    DL_CPU = 1
    DL_CUDA_HOST = 3  # pinned: memory of the CPU
    DL_ROCM_HOST = 11
    DL_READ_ONLY = 1
    DL_COPIED = 2


INT32_MAX = 0x7fffffff
INT64_MAX = 0x7fffffffffffffff
MAX_THREADS = 4096
TYPES = {"f32": KVC_F32, "f16": KVC_F16, "bf16": KVC_BF16, "q8_0": KVC_Q8_0, "q4_0": KVC_Q4_0}
POLICIES = {
    "full": KVC_FULL, "sliding": KVC_SLIDING, "chunked": KVC_CHUNKED, "cross": KVC_CROSS, "none": KVC_NONE,
}
cdef int64_t _INT32_MAX = 0x7fffffff
cdef int64_t _INT64_MAX = 0x7fffffffffffffff
cdef int64_t _INT64_MIN = -_INT64_MAX - 1
# Positions end one below the largest int32, which as the end of a range means "to the last one".
cdef int32_t _MAX_POSITION = 0x7ffffffe

cdef int64_t[3] ITEM_SIZE = [4, 2, 2]  # by kvc_type
cdef int64_t[2] BLOCK_SIZE = [34, 18]  # of 32 elements, by kvc_type less KVC_Q8_0

cdef dict ERRORS = {
    KVC_ERR_INVALID: ValueError,
    KVC_ERR_INDEX: IndexError,
    KVC_ERR_FULL: CacheFullError,
    KVC_ERR_NOMEM: MemoryError,
    KVC_ERR_UNSUPPORTED: NotSupportedError,
    KVC_ERR_BUSY: CacheBusyError,
    KVC_ERR_HELD: BufferError,
    KVC_ERR_GONE: RowsGoneError,
}


cdef int check(kvc_status status) except -1:
    if status != KVC_OK:
        words = kvc_last_error().decode()  # first of all: another call that fails in this thread replaces it
        raise ERRORS.get(status, KVCacheError)(words)
    return 0


# ---- numbers ---------------------------------------------------------------------------------------------------------

cdef str show(object value):
    """The value for an error message, which must neither fail nor fill the screen."""
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits refuses, among others
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


cdef object to_index(object value, str name):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value}: an integer is needed, not a truth value")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={show(value)}: an integer is needed, not {type(value).__name__}") from None


cdef bint is_plain(object value, int64_t low, int64_t high, int64_t *number) noexcept:
    """Whether it is an int of [low, high] and nothing else, as it nearly always is."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    number[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return not overflow and low <= number[0] <= high


cdef int64_t to_int(object value, str name, int64_t low, int64_t high) except? -1:
    cdef int64_t number
    if is_plain(value, low, high, &number):
        return number
    value = to_index(value, name)
    if value < low:
        raise ValueError(f"{name}={show(value)}: must be at least {low}")
    if value > high:
        raise ValueError(f"{name}={show(value)}: must be at most {high}")
    return value


cdef int32_t to_layer(object value, int32_t num_layers) except -1:
    cdef int64_t number
    if is_plain(value, 0, num_layers - 1, &number):
        return <int32_t>number
    value = to_index(value, "layer")
    if not 0 <= value < num_layers:
        raise IndexError(f"layer={show(value)}: the layers are 0 to {num_layers - 1}")
    return value


cdef inline int64_t to_seq_id(object value, str name="seq_id") except? -1:
    return to_int(value, name, _INT64_MIN, _INT64_MAX)


cdef float to_factor(object value, str name, bint positive) except? -1:
    """A number that C takes, where 0 would ask for the default."""
    cdef float number
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = <float>PyFloat_AsDouble(value)
    except TypeError:
        raise TypeError(f"{name}={show(value)}: a number or None is needed, not {type(value).__name__}") from None
    if not isfinite(number) or number == 0 or (positive and number < 0):
        what = "above 0" if positive else "other than 0"
        raise ValueError(f"{name}={show(value)}: must be a finite f32 number {what}; None asks for the default")
    return number


cdef cnp.ndarray to_int_array(object values, str name, int typenum, int64_t low, int64_t high, int64_t least=1):
    """A new, read-only array of `least` integers or more out of any iterable of them."""
    cdef cnp.npy_intp size, i
    cdef int64_t number
    cdef cnp.ndarray array
    if isinstance(values, np.ndarray):
        values = values.tolist()
    try:
        values = list(values)
    except TypeError:
        what = type(values).__name__
        raise TypeError(f"{name}={show(values)}: a sequence of integers is needed, not {what}") from None
    size = to_int(len(values), f"len({name})", least, _INT32_MAX)
    array = cnp.PyArray_EMPTY(1, &size, typenum, 0)
    for i in range(size):
        if not is_plain(values[i], low, high, &number):
            number = to_int(values[i], f"{name}[{i}]", low, high)
        if typenum == cnp.NPY_INT32:
            (<int32_t *>cnp.PyArray_DATA(array))[i] = <int32_t>number
        else:
            (<int64_t *>cnp.PyArray_DATA(array))[i] = number
    array.flags.writeable = False
    return array


def integer(value, str name, int64_t low, int64_t high):
    """`value` as an int of [low, high]: a TypeError or ValueError that names it where it is none."""
    return to_int(value, name, low, high)


cdef cnp.ndarray to_flags(object value, int64_t first, int64_t tokens, int64_t batch_tokens):
    """A byte for each token of [first, first + tokens): whether it sees later ones; None: none does."""
    cdef cnp.ndarray flags
    if value is None or value is False:
        return None
    if isinstance(value, (bool, np.bool_)):
        return np.ones(tokens, np.uint8) if value else None
    what = "True, False or one boolean per token is needed"
    try:
        flags = np.asarray(value)
    except Exception as error:
        raise TypeError(f"non_causal={show(value)}: {what} ({error})") from None
    if cnp.PyArray_TYPE(flags) != cnp.NPY_BOOL:
        raise TypeError(f"non_causal={show(value)}: {what}, not {flags.dtype}")
    if cnp.PyArray_NDIM(flags) != 1:
        raise ValueError(f"non_causal: an array of {cnp.PyArray_NDIM(flags)} axes, where 1 is needed")
    if cnp.PyArray_DIM(flags, 0) != tokens:
        if cnp.PyArray_DIM(flags, 0) != batch_tokens:
            raise ValueError(f"non_causal: {len(flags)} booleans, where there are {tokens} tokens"
                             + (f", of {batch_tokens} in the batch" if tokens != batch_tokens else ""))
        flags = flags[first:first + tokens]
    return np.ascontiguousarray(flags).view(np.uint8)


# ---- bf16, which NumPy does not know ---------------------------------------------------------------------------------

cdef cnp.dtype bf16_dtype = None
cdef int bf16_typenum = -1  # of ml_dtypes, once it was met


cdef cnp.dtype find_bf16():
    """ml_dtypes.bfloat16 where that is installed, else two bytes that NumPy will not calculate with."""
    global bf16_dtype, bf16_typenum
    if bf16_dtype is None:
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            bf16_dtype = np.dtype("V2")
        else:
            bf16_dtype = np.dtype(bfloat16)
            bf16_typenum = bf16_dtype.num
    return bf16_dtype


cdef bint is_bf16(cnp.ndarray x):
    return x.dtype == find_bf16() and (bf16_typenum >= 0 or isinstance(x, BFloat16Array))


class BFloat16Array(np.ndarray):
    """A NumPy array of bf16 that also goes out through DLPack, for example to `torch.from_dlpack`.

    Its dtype is ``ml_dtypes.bfloat16`` where ml_dtypes is installed. Elsewhere it is ``V2``: shape, strides and indices
    work, calculating does not; ``view("uint16")`` has the bits.
    """

    def __dlpack__(self, **options):
        if self.dtype != bf16_dtype:  # NumPy hands the class on to what is computed from such an array
            return super().__dlpack__(**options)
        # NumPy does the work, for the same bits; the capsule is new and nobody else's, so that it can be relabelled.
        capsule = self.view(np.ndarray).view(np.uint16).__dlpack__(**options)
        dltensor(capsule, "self", NULL).code = DL_BFLOAT
        return capsule


# ---- arrays in -------------------------------------------------------------------------------------------------------

cdef struct Array:
    char *data
    int32_t type  # kvc_type
    int32_t ndim
    bint read_only
    int64_t[4] shape
    int64_t[4] strides  # in bytes


cdef DLTensor *dltensor(object capsule, str name, uint64_t *flags) except NULL:
    """What a capsule holds. It is borrowed: it stays the capsule's, which frees it as it dies."""
    cdef DLManagedTensorVersioned *versioned
    if PyCapsule_IsValid(capsule, "dltensor"):
        return &(<DLManagedTensor *>PyCapsule_GetPointer(capsule, "dltensor")).tensor
    if not PyCapsule_IsValid(capsule, "dltensor_versioned"):
        raise TypeError(f"{name}.__dlpack__() returned {type(capsule).__name__}, no DLPack capsule")
    versioned = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
    if versioned.major != 1:
        raise TypeError(f"{name}: DLPack version {versioned.major}.{versioned.minor}, where 0 and 1 are understood")
    if flags != NULL:
        flags[0] = versioned.flags
    return &versioned.tensor


cdef void free_tensor(object capsule) noexcept:
    cdef DLManagedTensorVersioned *managed
    managed = <DLManagedTensorVersioned *>PyCapsule_GetPointer(capsule, "dltensor_versioned")
    if managed.deleter != NULL:
        managed.deleter(managed)


cdef object to_capsule(object x, bint write):
    """The array's memory; by a function in C where its type has one, which for PyTorch is five times faster."""
    cdef DLManagedTensorVersioned *managed = NULL
    cdef DLExchangeAPI *api
    table = getattr(type(x), "__dlpack_c_exchange_api__", None)
    if table is not None:
        api = <DLExchangeAPI *>PyCapsule_GetPointer(table, "dlpack_exchange_api")
        if api.major == 1:
            api.from_object(<void *>x, &managed)
            return PyCapsule_New(managed, "dltensor_versioned", free_tensor)
    if write:  # only a versioned capsule says whether that is allowed
        try:
            return x.__dlpack__(max_version=(1, 0))
        except TypeError:
            pass  # an older library, such as PyTorch was, where it always is
    return x.__dlpack__()


cdef int wrong_type(str name, str given) except -1:
    advice = f"convert {name} to float32"
    if given == "uint16":
        advice = f"uint16 may or may not be bf16; if it is, pass {name}.view(ml_dtypes.bfloat16)"
    raise TypeError(f"{name}: elements of type {given}, where float32, float16 and bfloat16 are taken; {advice}")


cdef int wrong_ndim(str name, int ndim, int wanted) except -1:
    raise ValueError(f"{name}: an array of {ndim} axes, where {wanted} are needed")


cdef int read_numpy(cnp.ndarray x, str name, int ndim, Array *a) except -1:
    cdef int i, typenum = cnp.PyArray_TYPE(x)
    if typenum == cnp.NPY_FLOAT32:
        a.type = KVC_F32
    elif typenum == cnp.NPY_FLOAT16:
        a.type = KVC_F16
    elif typenum == bf16_typenum or is_bf16(x):
        a.type = KVC_BF16
    else:
        wrong_type(name, str(x.dtype))
    if not cnp.PyArray_ISNOTSWAPPED(x):
        raise TypeError(f"{name}: {x.dtype!r} has its bytes in the other order; pass {name}.astype({x.dtype.name!r})")
    if cnp.PyArray_NDIM(x) != ndim:
        wrong_ndim(name, cnp.PyArray_NDIM(x), ndim)
    a.data = cnp.PyArray_BYTES(x)
    a.ndim = ndim
    a.read_only = not cnp.PyArray_ISWRITEABLE(x)
    for i in range(ndim):
        a.shape[i] = cnp.PyArray_DIM(x, i)
        a.strides[i] = cnp.PyArray_STRIDE(x, i)
    return 0


cdef object read_dlpack(object x, str name, int ndim, bint write, Array *a):
    cdef uint64_t flags = 0
    cdef int64_t step
    cdef int i
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{name}: the tensor requires grad, which a cache would lose; pass {name}.detach()")
    capsule = to_capsule(x, write)
    cdef DLTensor *t = dltensor(capsule, name, &flags)
    if t.device_type != DL_CPU and t.device_type != DL_CUDA_HOST and t.device_type != DL_ROCM_HOST:
        raise ValueError(f"{name}: lies on a device (DLPack type {t.device_type}); copy it to the CPU")
    if t.code == DL_FLOAT and t.bits == 32 and t.lanes == 1:
        a.type = KVC_F32
    elif t.code == DL_FLOAT and t.bits == 16 and t.lanes == 1:
        a.type = KVC_F16
    elif t.code == DL_BFLOAT and t.bits == 16 and t.lanes == 1:
        a.type = KVC_BF16
    else:
        wrong_type(name, str(getattr(x, "dtype", f"{t.bits} bits, DLPack code {t.code}")))
    if t.ndim != ndim:
        wrong_ndim(name, t.ndim, ndim)
    a.data = <char *>t.data + t.byte_offset
    a.ndim = ndim
    a.read_only = (flags & (DL_READ_ONLY | DL_COPIED)) != 0
    step = ITEM_SIZE[a.type]
    for i in range(ndim - 1, -1, -1):
        a.shape[i] = t.shape[i]
        a.strides[i] = step if t.strides == NULL else t.strides[i] * ITEM_SIZE[a.type]
        step *= a.shape[i]
    return capsule


cdef object read_array(object x, str name, int ndim, Array *a, bint write=False):
    """Says where and how an array lies; returns what keeps it there."""
    if cnp.PyArray_Check(x):
        read_numpy(<cnp.ndarray>x, name, ndim, a)
        return x
    is_class = isinstance(x, type)
    if hasattr(x, "__dlpack__") and not is_class:
        return read_dlpack(x, name, ndim, write, a)
    if hasattr(x, "__array__") and not is_class and not write:
        x = np.asarray(x)
        read_numpy(<cnp.ndarray>x, name, ndim, a)
        return x
    raise TypeError(f"{name}: an array (NumPy or DLPack, on the CPU) is needed, not {type(x).__name__}")


cdef object make_array(object subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides,
                       void *data, int flags=0):
    """An array of new memory, or one over what somebody else keeps: read-only, if the flags do not say otherwise."""
    Py_INCREF(descr)  # which the next line gives away
    return PyArray_NewFromDescr(<PyTypeObject *>subtype, descr, ndim, shape, strides, data, flags, NULL)


cdef object wrap(Array *a, object owner):
    """A read-only NumPy array over memory that `owner` keeps; bf16 as its bits."""
    cdef cnp.npy_intp[4] shape
    cdef cnp.npy_intp[4] strides
    cdef int i
    for i in range(a.ndim):
        shape[i] = <cnp.npy_intp>a.shape[i]
        strides[i] = <cnp.npy_intp>a.strides[i]
    cdef int typenum = [cnp.NPY_FLOAT32, cnp.NPY_FLOAT16, cnp.NPY_UINT16][a.type]
    cdef cnp.dtype descr = cnp.PyArray_DescrFromType(typenum)
    array = make_array(np.ndarray, descr, a.ndim, shape, strides, a.data)
    cnp.set_array_base(array, owner)
    return array


cdef bint lies_well(Array *a) noexcept:
    """Whether C can read it where it lies: elements adjacent and aligned, the other strides whole elements."""
    cdef int last = a.ndim - 1, i
    cdef int64_t size = ITEM_SIZE[a.type]
    if a.strides[last] != size and a.shape[last] > 1:
        return False
    if <size_t>a.data % <size_t>size:
        return False
    for i in range(last):
        if a.shape[i] == 1:
            a.strides[i] = 0  # never used, and producers may have written anything there
        elif a.strides[i] % size:
            return False
    return True


cdef object settle(Array *a, object owner):
    """Copies the array if C cannot read it where it lies; returns what keeps it."""
    cdef cnp.ndarray copied
    cdef int i
    if lies_well(a):
        return owner
    copied = np.array(wrap(a, owner), order="C")
    a.data = cnp.PyArray_BYTES(copied)
    for i in range(a.ndim):
        a.strides[i] = cnp.PyArray_STRIDE(copied, i)
    return copied


cdef enum:
    THD = 0
    HTD = 1
    BHTD = 2  # sequences in lock step: token t of sequence b is b * T + t
    BTHD = 3  # the same, token by token: rows for a cross-attention layer, which one sequence gets

cdef int[4] NUM_AXES = [3, 3, 4, 4]  # by layout, as are the next two
cdef int[4] TOKEN_AXIS = [0, 1, 2, 1]
cdef int[4] HEAD_AXIS = [1, 0, 1, 2]


cdef int to_layout(str layout) except -1:
    if layout == "THD":
        return THD
    if layout == "HTD":
        return HTD
    if layout == "BHTD":
        return BHTD
    raise ValueError(f"layout={layout!r}: must be 'THD' (tokens, heads, dim), 'HTD' (heads, tokens, dim) or 'BHTD'")


cdef inline int64_t count_tokens(Array *a, int layout) noexcept:
    """Tokens in an array of rows; of too many, more than there may be."""
    cdef int64_t tokens = a.shape[TOKEN_AXIS[layout]]
    return min(a.shape[0], _INT32_MAX + 1) * min(tokens, _INT32_MAX + 1) if layout >= BHTD else tokens


cdef inline bint same_tokens(Array *a, Array *b, int layout) noexcept:
    cdef int axis = TOKEN_AXIS[layout]
    return a.shape[axis] == b.shape[axis] and (layout < BHTD or a.shape[0] == b.shape[0])


cdef str show_tokens(Array *a, int layout):
    tokens = f"{a.shape[TOKEN_AXIS[layout]]}"
    return f"{a.shape[0]} x {tokens}" if layout >= BHTD else tokens


cdef int wrong_shape(str name, Array *a, int layout, object heads, int64_t dim, Array *like=NULL) except -1:
    """`like`: an array whose tokens it should have had."""
    shape = ", ".join([str(a.shape[i]) for i in range(a.ndim)])
    tokens = "tokens" if like == NULL else f"{like.shape[TOKEN_AXIS[layout]]}"
    wanted = f"{tokens}, {heads}, {dim}" if layout in (THD, BTHD) else f"{heads}, {tokens}, {dim}"
    if layout == BTHD:
        wanted = "any, " + wanted
    if layout == BHTD:
        wanted = ("sequences, " if like == NULL else f"{like.shape[0]}, ") + wanted
    raise ValueError(f"{name}: an array of shape ({shape}), where ({wanted}) is needed")


cdef bint rows_overlap(Array *a) noexcept:
    """Whether rows of an array that lies well, along its last axis, share bytes with each other."""
    cdef int64_t extent = a.shape[a.ndim - 1] * ITEM_SIZE[a.type]
    cdef int64_t step
    cdef int axis, next, done = 0  # a bit for each axis
    for _ in range(a.ndim - 1):
        next = -1
        for axis in range(a.ndim - 1):  # by rising stride
            if not done & 1 << axis and (next < 0 or abs(a.strides[axis]) < abs(a.strides[next])):
                next = axis
        done |= 1 << next
        step = abs(a.strides[next])
        if a.shape[next] > 1 and step < extent:
            return True
        extent += (a.shape[next] - 1) * step
    return False


cdef char *begin_of(Array *a) noexcept:
    cdef char *begin = a.data
    cdef int i
    for i in range(a.ndim):
        begin += min(<int64_t>0, (a.shape[i] - 1) * a.strides[i])
    return begin


cdef char *end_of(Array *a) noexcept:
    cdef char *end = a.data + ITEM_SIZE[a.type]
    cdef int i
    for i in range(a.ndim):
        end += max(<int64_t>0, (a.shape[i] - 1) * a.strides[i])
    return end


cdef int check_apart(Array *out, Array *other, str name) except -1:
    """The result may not lie between the first and the last byte of an argument, nor the argument in it."""
    if other.data != NULL and begin_of(out) < end_of(other) and begin_of(other) < end_of(out):
        raise ValueError(f"out: overlaps {name}; give it memory of its own")
    return 0


cdef int check_writable(Array *a, str name) except -1:
    if a.read_only:
        raise ValueError(f"{name}: is read-only; pass an array that can be written to")
    if a.shape[1] and (not lies_well(a) or rows_overlap(a)):  # the strides of an array of nothing may be anything
        raise ValueError(f"{name}: its last axis must be contiguous and aligned, and its rows may not overlap")
    return 0


# ---- arrays out ------------------------------------------------------------------------------------------------------

cdef cnp.dtype dtype_of(int32_t type):
    if type == KVC_BF16:
        return find_bf16()
    return cnp.PyArray_DescrFromType(cnp.NPY_FLOAT32 if type == KVC_F32 else cnp.NPY_FLOAT16)


cdef int64_t row_bytes(int32_t type, int64_t dim) noexcept:
    return dim // 32 * BLOCK_SIZE[type - KVC_Q8_0] if type >= KVC_Q8_0 else dim * ITEM_SIZE[type]


def bytes_of_row(int32_t type, int64_t dim):
    return row_bytes(type, dim)


def skip_strings(const uint8_t[::1] data not None, int64_t at, int64_t count):
    """Where `count` strings end that begin at `at`, each of them 8 bytes of length and its bytes; -1: past the end."""
    cdef uint64_t length
    cdef int64_t _i, left = data.shape[0] - at
    cdef int shift
    for _i in range(count):
        if left < 8:
            return -1
        length = 0
        for shift in range(8):
            length |= <uint64_t> data[data.shape[0] - left + shift] << 8 * shift
        left -= 8
        if length > <uint64_t> left:
            return -1
        left -= <int64_t> length
    return data.shape[0] - left


cdef cnp.ndarray new_array(int32_t type, int ndim, int64_t a, int64_t b, int64_t c=0, int64_t d=0):
    cdef cnp.npy_intp[4] shape = [a, b, c, d]
    if type == KVC_F32:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    if type == KVC_F16:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT16, 0)
    return make_array(BFloat16Array, find_bf16(), ndim, shape, NULL, NULL)


cdef int free_hold(Cache cache, kvc_hold *hold) noexcept:
    """Lets go of the rows; the cache counts as in use meanwhile."""
    if hold != NULL:
        cache.count_call()
        with nogil:
            kvc_hold_free(hold)
        cache.leave()
    return 0


@cython.final
@cython.no_gc_clear  # what is freed rests on the cache
cdef class Hold:
    """The rows of a sequence in a layer, kept as they are for as long as this lives; what views of them rest on."""

    cdef Cache cache
    cdef kvc_hold *handle
    cdef kvc_span *spans
    cdef int64_t num_spans

    def __cinit__(self, Cache cache not None, int32_t layer, int64_t seq_id):
        cdef int64_t room = 0
        cdef void *spans
        cdef kvc_cache *handle
        cdef kvc_status status
        self.cache = cache
        self.num_spans = 1
        while room < self.num_spans:
            room = self.num_spans
            spans = PyMem_Realloc(self.spans, room * sizeof(kvc_span))
            if spans == NULL:
                raise MemoryError
            self.spans = <kvc_span *>spans
            handle = cache.enter()
            with nogil:
                status = kvc_spans(handle, seq_id, layer, self.spans, sizeof(kvc_span), room, &self.num_spans,
                                   &self.handle)
            cache.leave()
            check(status)

    def __dealloc__(self):
        free_hold(self.cache, self.handle)
        PyMem_Free(self.spans)

    cdef bint in_one_piece(self) noexcept:
        """Whether each span goes on where the one before ends."""
        cdef kvc_span *a
        cdef kvc_span *b
        cdef int64_t i
        for i in range(self.num_spans - 1):
            a, b = &self.spans[i], &self.spans[i + 1]
            if <char *>a.k + a.num_rows * a.k_row_stride != <char *>b.k or a.k_head_stride != b.k_head_stride:
                return False
            if <char *>a.v + a.num_rows * a.v_row_stride != <char *>b.v or a.v_head_stride != b.v_head_stride:
                return False
        return True

    cdef int32_t waiting(self) noexcept:
        """A delta of keys that are yet to be rotated; 0: there are none."""
        cdef int64_t i
        for i in range(self.num_spans):
            if self.spans[i].delta:
                return self.spans[i].delta
        return 0

    cdef object view(self, kvc_layer *layer, int64_t first, int64_t num_spans, bint values):
        """The rows of spans that lie in one piece, [num_kv_heads, rows, dim], read-only."""
        cdef kvc_span *span = &self.spans[first]
        cdef int32_t type = layer.v_type if values else layer.k_type
        cdef cnp.npy_intp[3] shape = [layer.num_kv_heads, 0, layer.v_dim if values else layer.k_dim]
        cdef cnp.npy_intp[3] strides = [span.k_head_stride, span.k_row_stride, ITEM_SIZE[type]]
        cdef int64_t i
        for i in range(first, first + num_spans):
            shape[1] += self.spans[i].num_rows
        if values:
            strides[0], strides[1] = span.v_head_stride, span.v_row_stride
        array = make_array(BFloat16Array if type == KVC_BF16 else np.ndarray, dtype_of(type), 3, shape, strides,
                           <void *>(span.v if values else span.k))
        cnp.set_array_base(array, self)
        return array


# ---- the cache -------------------------------------------------------------------------------------------------------

cdef int32_t num_forks = 0  # how many forks lie between this process and the one that imported the module


def _count_fork():
    global num_forks
    num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


@cython.final
@cython.no_gc_clear  # functions that are cleared could not be called; a cycle through them is broken elsewhere
cdef class Functions:
    """The functions that move keys, which a cache and its copies have in common."""
    cdef list by_layer
    cdef dict raised  # exceptions of these functions, or of handlers of signals, by thread

    def __cinit__(self, int32_t num_layers):
        self.by_layer = [None] * num_layers
        self.raised = {}

    cdef void keep_error(self, object error) noexcept:
        """Keeps an exception for the call that this thread is in, which raises it."""
        self.raised[get_ident()] = error

    cdef int move_keys(self, int32_t layer, float *keys, int32_t heads, int64_t rows, int32_t dim,
                       int32_t delta) except -1:
        """Calls the layer's function. It gets a copy, for it may keep what it gets."""
        cdef float[:, :, ::1] given = new_array(KVC_F32, 3, heads, rows, dim)
        cdef const float[:, :, ::1] taken
        cdef cnp.ndarray moved
        cdef size_t size = <size_t>(heads * rows * dim) * sizeof(float)
        memcpy(&given[0, 0, 0], keys, size)
        moved = np.asarray(self.by_layer[layer](layer, given.base, delta))
        if np.shape(moved) != (heads, rows, dim):
            raise ValueError(f"rope: the function of layer {layer} returned an array of shape {np.shape(moved)}, where "
                             f"{(heads, rows, dim)} is needed")
        if moved.dtype.kind != "f" and not is_bf16(moved):
            raise TypeError(f"rope: the function of layer {layer} returned elements of type {moved.dtype}, where "
                            "floating-point numbers are needed")
        taken = np.ascontiguousarray(moved, np.float32)
        memcpy(keys, &taken[0, 0, 0], size)
        return 0


cdef int32_t shift_keys(void *user, int32_t layer, float *keys, int32_t heads, int64_t rows, int32_t dim,
                        int32_t delta) noexcept with gil:
    cdef Functions functions = <Functions>user
    try:
        functions.move_keys(layer, keys, heads, rows, dim, delta)
        return 0
    except BaseException as error:
        functions.keep_error(error)
    return 1


cdef int32_t handle_signals(void *user) noexcept with gil:
    """Ends a call that takes long where a handler raises, as that of Ctrl-C does."""
    try:
        PyErr_CheckSignals()  # runs handlers in the main thread only
        return 0
    except BaseException as error:
        (<Functions>user).keep_error(error)
    return 1


@cython.final
@cython.no_gc_clear  # the functions, as there
cdef class Cache:
    cdef kvc_cache *handle  # NULL: closed
    cdef kvc_layer *layers
    cdef readonly int32_t num_layers
    cdef int64_t most_tokens  # that fit, whatever is evicted; 0: no limit
    cdef int32_t calls  # between enter() and leave()
    cdef int32_t forks  # num_forks when these were counted: in a child, those of other threads never return
    cdef bint closing  # another thread is about to free it
    cdef Functions functions

    def __cinit__(self, list layers, int64_t max_seq_len, int64_t max_sequences, int64_t capacity, int64_t max_bytes,
                  int32_t block_size, int32_t num_threads, Cache original=None):
        """Makes a new cache, or a copy of `original`, which was made of the same arguments."""
        cdef kvc_cache *other
        cdef kvc_config config
        cdef kvc_layer *layer
        cdef kvc_status status
        cdef const double[::1] frequencies
        cdef int32_t i
        self.num_layers = len(layers)
        self.functions = Functions(self.num_layers) if original is None else original.functions
        self.layers = <kvc_layer *>PyMem_Calloc(self.num_layers, sizeof(kvc_layer))
        if self.layers == NULL:
            raise MemoryError
        owners = []
        for i in range(self.num_layers):
            layer = &self.layers[i]
            shapes, types, layer.value_in_key, layer.share, policy, rope = layers[i]
            layer.num_kv_heads, layer.k_dim, layer.v_dim = shapes
            layer.k_type, layer.v_type = types
            layer.policy.kind, layer.policy.window, layer.policy.num_sink_tokens = policy[:3]
            layer.policy.attention_chunk_size, layer.policy.resume_window, layer.policy.max_len = policy[3:]
            if rope is None:
                layer.rope.kind = KVC_ROPE_UNKNOWN
            elif rope is False:
                layer.rope.kind = KVC_ROPE_NONE
            elif callable(rope):
                self.functions.by_layer[i] = rope
                layer.rope.kind, layer.rope.shift = KVC_ROPE_FUNCTION, shift_keys
                layer.rope.user = <void *>self.functions
            else:
                layer.rope.kind = KVC_ROPE_FREQUENCIES
                inv_freq, layer.rope.interleaved, layer.rope.first_dim = rope
                owners.append(np.array(inv_freq, np.float64))
                frequencies = owners[-1]
                layer.rope.num_freqs, layer.rope.inv_freq = <int32_t>frequencies.shape[0], &frequencies[0]
        memset(&config, 0, sizeof(config))
        config.struct_size = sizeof(kvc_config)
        config.layers = self.layers
        config.layer_size = sizeof(kvc_layer)
        config.num_layers = self.num_layers
        config.block_size = block_size
        config.max_seq_len = max_seq_len
        config.max_sequences = max_sequences
        config.capacity = capacity
        config.max_bytes = max_bytes
        config.num_threads = num_threads
        config.poll, config.poll_user = handle_signals, <void *>self.functions
        if original is None:
            with nogil:
                status = kvc_cache_new(&config, &self.handle)
        else:
            other = original.enter()
            with nogil:
                status = kvc_cache_clone(other, &self.handle)
            original.leave()
        check(status)
        for i in range(self.num_layers):
            self.layers[i].rope.inv_freq = NULL  # which was copied
        self.most_tokens = min(max_seq_len or _INT64_MAX, capacity or _INT64_MAX)

    def __dealloc__(self):
        with nogil:
            kvc_cache_free(self.handle)  # which batches and holds, had there been any left, would have kept alive
        PyMem_Free(self.layers)

    cdef kvc_cache *enter(self) except NULL:
        """Returns the handle, valid until leave(): see above what may be done in between."""
        if self.handle == NULL:
            raise ValueError("the cache is closed")
        if self.closing:
            raise CacheBusyError("another thread is closing the cache")
        self.count_call()
        return self.handle

    cdef void count_call(self) noexcept:
        if self.forks != num_forks:
            self.forks, self.calls = num_forks, 0
        self.calls += 1

    cdef void leave(self) noexcept:
        if self.calls and self.forks == num_forks:
            self.calls -= 1

    cdef int check_open(self) except -1:
        """Raises if the cache is closed, before arguments are looked at that mean nothing then."""
        self.enter()
        self.leave()
        return 0

    cdef int check_call(self, kvc_status status) except -1:
        """Checks the status of a call that may have run anyone's code, and raises what that raised."""
        if status == KVC_ERR_CALLBACK or status == KVC_ERR_CANCELLED:
            error = self.functions.raised.pop(get_ident(), None)
            if error is not None:
                raise error
        check(status)
        return 0

    def close(self):
        cdef kvc_status status
        if (self.calls and self.forks == num_forks) or self.closing:
            raise CacheBusyError("a call in another thread is using the cache; close it when that has returned")
        self.closing = True
        with nogil:
            status = kvc_cache_free(self.handle)
        self.closing = False
        if status == KVC_OK:
            self.handle = NULL
        check(status)

    @property
    def closed(self):
        return self.handle == NULL

    # -- looking at sequences

    cdef int64_t count_rows(self, int64_t seq_id, int32_t layer) except -1:
        cdef int64_t rows
        cdef kvc_cache *cache = self.enter()
        with nogil:
            rows = kvc_seq_len(cache, seq_id, layer)
        self.leave()
        return rows

    cdef int32_t find_next(self, int64_t seq_id) except -1:
        cdef int32_t position
        cdef kvc_cache *cache = self.enter()
        with nogil:
            position = kvc_next_position(cache, seq_id)
        self.leave()
        return position

    def seq_len(self, seq_id, layer):
        cdef int64_t seq = to_seq_id(seq_id)
        return self.count_rows(seq, -1 if layer is None else to_layer(layer, self.num_layers))

    def first_position(self, seq_id):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t position
        cdef kvc_cache *cache = self.enter()
        with nogil:
            position = kvc_first_position(cache, seq)
        self.leave()
        return position

    def last_position(self, seq_id):
        return self.find_next(to_seq_id(seq_id)) - 1

    def next_position(self, seq_id):
        return self.find_next(to_seq_id(seq_id))

    def can_resume(self, seq_id, position):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = <int32_t>to_int(position, "position", 0, _INT32_MAX), can
        cdef kvc_cache *cache = self.enter()
        with nogil:
            can = kvc_can_resume(cache, seq, at)
        self.leave()
        return can != 0

    def sequences(self):
        cdef int64_t room = -1, count = 0
        cdef kvc_cache *cache
        cdef int64_t[::1] ids
        cdef int64_t *to
        while room < count:
            room = max(count, 8)
            found = np.empty(room, np.int64)
            ids = found
            to = &ids[0]
            cache = self.enter()
            with nogil:
                count = kvc_sequences(cache, to, room)
            self.leave()
        return found[:count].tolist()

    def positions(self, seq_id, layer):
        cdef int64_t seq = to_seq_id(seq_id), room = -1, count = 0
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_cache *cache
        cdef int32_t[::1] positions
        cdef int32_t *to
        while room < count:
            room = max(count, 8)
            found = np.empty(room, np.int32)
            positions = found
            to = &positions[0]
            cache = self.enter()
            with nogil:
                count = kvc_positions(cache, seq, at, to, room)
            self.leave()
        return found[:count]

    # -- editing sequences

    def clear(self, seq_id):
        cdef bint every = seq_id is None
        cdef int64_t seq = 0 if every else to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_clear(cache) if every else kvc_clear_sequence(cache, seq)
        self.leave()
        check(status)

    def keep(self, seq_id):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_keep(cache, seq)
        self.leave()
        check(status)

    def copy_prefix(self, src, dst, length):
        cdef int64_t source = to_seq_id(src, "src"), target = to_seq_id(dst, "dst")
        cdef int32_t end = <int32_t>to_int(length, "length", 0, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_copy_prefix(cache, source, target, end)
        self.leave()
        check(status)

    def fork(self, src, dst):
        cdef int64_t source = to_seq_id(src, "src"), target = to_seq_id(dst, "dst")
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_fork(cache, source, target)
        self.leave()
        check(status)

    def remove(self, seq_id, begin, end, bint shift):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = <int32_t>to_int(begin, "begin", 0, _INT32_MAX)
        cdef int32_t high = KVC_END if end is None else <int32_t>to_int(end, "end", low, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_remove(cache, seq, low, high, shift)
        self.leave()
        self.check_call(status)

    def shift(self, seq_id, begin, end, delta):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = <int32_t>to_int(begin, "begin", 0, _INT32_MAX)
        cdef int32_t high = KVC_END if end is None else <int32_t>to_int(end, "end", low, _INT32_MAX)
        cdef int32_t by = <int32_t>to_int(delta, "delta", -_INT32_MAX - 1, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_shift(cache, seq, low, high, by)
        self.leave()
        self.check_call(status)

    def divide(self, seq_id, begin, end, divisor):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t low = <int32_t>to_int(begin, "begin", 0, _INT32_MAX)
        cdef int32_t high = KVC_END if end is None else <int32_t>to_int(end, "end", low, _INT32_MAX)
        cdef int32_t by = <int32_t>to_int(divisor, "divisor", 1, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_divide(cache, seq, low, high, by)
        self.leave()
        self.check_call(status)

    def truncate(self, seq_id, length):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t end = <int32_t>to_int(length, "length", 0, _INT32_MAX)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_truncate(cache, seq, end)
        self.leave()
        check(status)

    def settle(self):
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_settle(cache)
        self.leave()
        check(status)

    def reserve(self, num_tokens, seq_id):
        cdef int64_t number = to_int(num_tokens, "num_tokens", 1, _INT64_MAX), seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_reserve(cache, seq, number)
        self.leave()
        check(status)

    def room(self, seq_id):
        cdef int64_t number = 0, seq = to_seq_id(seq_id)
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_room(cache, seq, &number)
        self.leave()
        check(status)
        return number

    def compact(self):
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_compact(cache)
        self.leave()
        check(status)

    def inject(self, seq_id, layer, begin, k, v, bint skip_missing):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef int32_t low = <int32_t>to_int(begin, "begin", 0, _INT32_MAX)
        cdef kvc_layer *shape = &self.layers[at]
        cdef kvc_rows_in rows
        cdef kvc_cache *cache
        cdef kvc_status status
        cdef Array read_k, read_v
        cdef int32_t high
        cdef int64_t num_replaced = 0
        memset(&rows, 0, sizeof(rows))
        _owners = read_pair(shape, k, v, HTD, &read_k, &read_v)
        if count_tokens(&read_k, HTD) > _INT32_MAX - low:
            raise ValueError(f"begin={low} with arrays of {read_k.shape[1]} tokens: positions go up to {_MAX_POSITION}")
        high = low + <int32_t>read_k.shape[1]
        rows.struct_size = sizeof(kvc_rows_in)
        rows.k, rows.k_type = read_k.data, read_k.type
        rows.k_head_stride, rows.k_row_stride = read_k.strides[0], read_k.strides[1]
        if not shape.value_in_key:
            rows.v, rows.v_type = read_v.data, read_v.type
            rows.v_head_stride, rows.v_row_stride = read_v.strides[0], read_v.strides[1]
        rows.skip_missing, rows.num_replaced = skip_missing, &num_replaced
        cache = self.enter()
        with nogil:
            status = kvc_inject(cache, seq, at, low, high, &rows)
        self.leave()
        check(status)
        return num_replaced

    # -- memory

    def stats(self):
        cdef kvc_stats s
        cdef kvc_cache *cache
        memset(&s, 0, sizeof(s))
        cache = self.enter()
        with nogil:
            kvc_get_stats(cache, &s, sizeof(s))
        self.leave()
        return {
            "batches": s.batches, "aborted": s.aborted, "tokens": s.tokens, "rows_evicted": s.rows_evicted,
            "rows_moved": s.rows_moved, "rows_copied": s.rows_copied, "compactions": s.compactions,
            "blocks_opened": s.blocks_opened, "blocks_reused": s.blocks_reused, "blocks_returned": s.blocks_returned,
            "live_slots": s.live_slots, "wasted_slots": s.wasted_slots, "blocks_in_use": s.blocks_in_use,
            "blocks_free": s.blocks_free,
        }

    def blocks(self, layer):
        """Two lists of tuples, fields as in the header: the blocks, and the runs, of which block and whose first."""
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef int64_t num_blocks = 0, num_runs = 0, max_blocks = -1, max_runs = -1, i
        cdef cnp.ndarray block_room = None, run_room = None
        cdef kvc_block_info *b = NULL
        cdef kvc_run_info *r = NULL
        cdef kvc_status status
        cdef kvc_cache *cache
        while max_blocks < num_blocks or max_runs < num_runs:
            max_blocks, max_runs = num_blocks, num_runs
            block_room = np.empty(max_blocks * sizeof(kvc_block_info), np.uint8)
            run_room = np.empty(max_runs * sizeof(kvc_run_info), np.uint8)
            b, r = <kvc_block_info *>cnp.PyArray_DATA(block_room), <kvc_run_info *>cnp.PyArray_DATA(run_room)
            cache = self.enter()
            with nogil:
                status = kvc_blocks(cache, at, b, sizeof(kvc_block_info), max_blocks, &num_blocks,
                                    r, sizeof(kvc_run_info), max_runs, &num_runs)
            self.leave()
            check(status)
        return (
            [(b[i].num_slots, b[i].filled, b[i].live, b[i].references, b[i].resident, b[i].is_held != 0)
             for i in range(num_blocks)],
            [(r[i].block, r[i].seq_id, r[i].slot, r[i].count, r[i].position, r[i].delta, r[i].in_batch != 0)
             for i in range(num_runs)],
        )

    def nbytes(self):
        cdef int64_t size
        cdef kvc_cache *cache = self.enter()
        with nogil:
            size = kvc_nbytes(cache)
        self.leave()
        return size

    def block_size(self):
        cdef int32_t slots = kvc_block_size(self.enter())
        self.leave()
        return slots

    def capacity(self):
        cdef int64_t slots = kvc_capacity(self.enter())
        self.leave()
        return None if slots < 0 else slots

    def capacity_bytes(self):
        cdef int64_t size = kvc_capacity_bytes(self.enter())
        self.leave()
        return None if size < 0 else size

    def utilization(self):
        cdef double part
        cdef kvc_cache *cache = self.enter()
        with nogil:
            part = kvc_utilization(cache)
        self.leave()
        return part

    def validate(self):
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_validate(cache)
        self.leave()
        check(status)

    # -- reading rows

    cdef tuple new_rows(self, int32_t layer, int64_t rows, int32_t type, bint want_k, bint want_v, kvc_rows_out *out):
        """New arrays for keys and values, [num_kv_heads, rows, dim]; None for those that are not wanted."""
        cdef kvc_layer *shape = &self.layers[layer]
        cdef cnp.ndarray k = None, v = None
        memset(out, 0, sizeof(kvc_rows_out))
        out.struct_size = sizeof(kvc_rows_out)
        out.type = type
        if want_k:
            k = new_array(type, 3, shape.num_kv_heads, rows, shape.k_dim)
            out.k = cnp.PyArray_DATA(k)
            out.k_row_stride = shape.k_dim * ITEM_SIZE[type]
            out.k_head_stride = rows * out.k_row_stride
        if want_v:
            v = new_array(type, 3, shape.num_kv_heads, rows, shape.v_dim)
            out.v = cnp.PyArray_DATA(v)
            out.v_row_stride = shape.v_dim * ITEM_SIZE[type]
            out.v_head_stride = rows * out.v_row_stride
        return k, v

    cdef tuple copy_rows(self, int32_t layer, int64_t seq_id, object first, int32_t type, bint want_k, bint want_v):
        """Returns the rows from `first` on, as many as there are when they are copied, not when they were counted."""
        cdef kvc_status status = KVC_OK
        cdef kvc_rows_out out
        cdef int64_t stored = self.count_rows(seq_id, layer), rows = -1, begin = 0
        while rows != stored - begin:
            begin = to_int(first, "first", 0, stored)
            rows = stored - begin
            arrays = self.new_rows(layer, rows, type, want_k, want_v, &out)
            out.num_stored = &stored
            status = self.copy_to(layer, seq_id, begin, rows, &out)
        check(status)
        return arrays

    cdef kvc_status copy_to(self, int32_t layer, int64_t seq_id, int64_t first, int64_t rows,
                            kvc_rows_out *out) except? KVC_OK:
        cdef kvc_status status
        cdef kvc_cache *cache = self.enter()
        with nogil:
            status = kvc_gather(cache, seq_id, layer, first, rows, out)
        self.leave()
        return status

    def get(self, seq_id, layer, position):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers), found = -1
        cdef int32_t where = <int32_t>to_int(position, "position", 0, _INT32_MAX)
        cdef kvc_cache *cache
        cdef kvc_status status
        cdef kvc_rows_out out
        k, v = self.new_rows(at, 1, KVC_F32, True, True, &out)
        out.positions = &found
        cache = self.enter()
        with nogil:
            status = kvc_extract(cache, seq, at, where, where + (where <= _MAX_POSITION), &out)
        self.leave()
        check(status)
        return None if found < 0 else (k[:, 0], v[:, 0])

    def gather(self, seq_id, layer, first, dtype, out):
        cdef int64_t seq = to_seq_id(seq_id), begin, rows
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_rows_out to
        if out is None:
            return self.copy_rows(at, seq, first, TYPES["f32" if dtype is None else dtype], True, True)
        if dtype is not None:
            raise ValueError(f"dtype={dtype!r}: rows are converted to the type of out; leave it out")
        rows = self.count_rows(seq, at)
        begin = to_int(first, "first", 0, rows)
        _owner = read_rows_out(&self.layers[at], out, rows - begin, &rows, &to)
        check(self.copy_to(at, seq, begin, rows, &to))
        return out

    def extract(self, seq_id, layer, begin, end):
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef int32_t low = <int32_t>to_int(begin, "begin", 0, _INT32_MAX)
        cdef int32_t high = <int32_t>to_int(end, "end", low, _INT32_MAX)
        cdef kvc_cache *cache
        cdef kvc_status status
        cdef kvc_rows_out out
        self.check_open()
        arrays = self.new_rows(at, high - low, KVC_F32, True, True, &out)
        cache = self.enter()
        with nogil:
            status = kvc_extract(cache, seq, at, low, high, &out)
        self.leave()
        check(status)
        return arrays

    cdef int check_viewable(self, int32_t layer, int32_t type) except -1:
        if type >= KVC_Q8_0:
            name = next(name for name, number in TYPES.items() if number == type)
            raise ValueError(f"layer {layer} stores {name}, which no array can show: gather() decodes it")
        return 0

    def rows(self, seq_id, layer, copy, bint values):
        """Keys or values as they are stored: a view or a copy, as `KVCache.keys` has it."""
        cdef int64_t seq = to_seq_id(seq_id)
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_layer *shape = &self.layers[at]
        cdef int32_t type = shape.v_type if values else shape.k_type, delta = 0
        cdef kvc_rows_out none
        cdef Hold hold
        self.check_viewable(at, type)
        if not copy:
            hold = Hold(self, at, seq)
            if not hold.num_spans:
                array = self.new_rows(at, 0, type, not values, values, &none)[1 if values else 0]
                array.flags.writeable = False  # as a view would be
                return array
            if not values and shape.rope.kind == KVC_ROPE_FREQUENCIES:
                delta = hold.waiting()
            if not delta and hold.in_one_piece():
                return hold.view(shape, 0, hold.num_spans, values)
            if copy is not None and delta:
                raise ValueError(f"copy=False: keys that were moved, by {delta}, are yet to be rotated; settle() does "
                                 "it for all, copy=None and gather() in a copy")
            if copy is not None:
                raise ValueError(f"copy=False: the rows lie in {hold.num_spans} pieces, so that there is no view of "
                                 "them all; spans() has one of each, copy=None and gather() copy")
        return self.copy_rows(at, seq, 0, type, not values, values)[1 if values else 0]

    def spans(self, seq_id, layer):
        """A list of (k, v, position of the first row, number of rows, delta)."""
        cdef int64_t seq = to_seq_id(seq_id), i
        cdef int32_t at = to_layer(layer, self.num_layers)
        cdef kvc_layer *shape = &self.layers[at]
        cdef Hold hold
        self.check_viewable(at, max(shape.k_type, shape.v_type))
        hold = Hold(self, at, seq)
        return [
            (hold.view(shape, i, 1, False), hold.view(shape, i, 1, True), hold.spans[i].position,
             hold.spans[i].num_rows, hold.spans[i].delta)
            for i in range(hold.num_spans)
        ]

    # -- a forward pass

    def begin(self, n, positions, seq_ids, parents, decide):
        """Begins a batch. `decide` returns for each token whether its sequence is unstored; None: all are stored."""
        cdef Batch batch = Batch.__new__(Batch)
        cdef cnp.npy_intp size
        cdef kvc_begin_args args
        cdef kvc_status status
        cdef kvc_cache *cache
        cdef void *found
        cdef cnp.ndarray trees, unstored = None
        self.check_open()
        memset(&args, 0, sizeof(args))
        args.struct_size = sizeof(args)
        if n is not None:
            size = to_int(n, "n", 1, _INT32_MAX)
            if size > self.most_tokens:  # before their positions are written down
                raise CacheFullError(f"n={size}: at most {self.most_tokens} tokens fit at once; room() says how many")
            to_int(size, "n", 1, KVC_MAX_BATCH)
            batch.positions = cnp.PyArray_EMPTY(1, &size, cnp.NPY_INT32, 0)
        else:
            batch.positions = to_int_array(positions, "positions", cnp.NPY_INT32, 0, _MAX_POSITION)
            args.positions = <const int32_t *>cnp.PyArray_DATA(batch.positions)
        size = cnp.PyArray_DIM(batch.positions, 0)
        if seq_ids is not None:
            batch.seq_ids = to_int_array(seq_ids, "seq_ids", cnp.NPY_INT64, _INT64_MIN, _INT64_MAX)
            if cnp.PyArray_DIM(batch.seq_ids, 0) != size:
                raise ValueError(f"len(seq_ids)={len(batch.seq_ids)}: must be len(positions), which is {size}")
            args.seq_ids = <const int64_t *>cnp.PyArray_DATA(batch.seq_ids)
        if parents is not None:
            trees = to_int_array(parents, "parents", cnp.NPY_INT32, -1, _INT32_MAX)
            if cnp.PyArray_DIM(trees, 0) != size:
                raise ValueError(f"len(parents)={len(trees)}: must be one for each token, and there are {size}")
            args.parents = <const int32_t *>cnp.PyArray_DATA(trees)
        batch.cache = self
        args.num_tokens = batch.num_tokens = <int32_t>size
        if decide is not None:
            if n is not None:  # where they will probably be: what another thread edits meanwhile shifts them
                batch.positions[:] = np.arange(size) + self.find_next(0)
            unstored = decide(batch.positions, batch.get_seq_ids())
        if unstored is not None:
            args.unstored = <const uint8_t *>cnp.PyArray_DATA(unstored)
        found = cnp.PyArray_DATA(batch.positions)
        cache = self.enter()
        with nogil:
            status = kvc_begin_with(cache, &args, &batch.handle)
            if status == KVC_OK and args.positions == NULL:
                memcpy(found, kvc_batch_positions(batch.handle), size * sizeof(int32_t))
        self.leave()
        check(status)
        cnp.PyArray_CLEARFLAGS(batch.positions, cnp.NPY_ARRAY_WRITEABLE)
        return batch


cdef struct PutRows:
    kvc_put_args args
    Array k
    Array v

cdef struct Query:
    kvc_plan_args plan
    kvc_attend_args args
    Array q
    Array out
    Array sinks
    Array alibi


cdef object read_rows(object x, str name, int64_t heads, bint multiple, int64_t dim, int layout, Array *a):
    """An array of rows, of `heads` heads (or a multiple), where C can read it; returns what keeps it there."""
    cdef int64_t given
    owner = read_array(x, name, NUM_AXES[layout], a)
    given = a.shape[HEAD_AXIS[layout]]
    if multiple and 0 < given <= _INT32_MAX and given % heads == 0:
        heads = given
    if given != heads or a.shape[a.ndim - 1] != dim:
        wrong_shape(name, a, layout, f"a multiple of {heads}" if multiple else heads, dim)
    if count_tokens(a, layout) == 0:
        raise ValueError(f"{name}: an array of no tokens")
    return settle(a, owner)


cdef void fill_rows_out(kvc_rows_out *to, Array *k, Array *v, int layout) noexcept:
    cdef int head = HEAD_AXIS[layout], row = TOKEN_AXIS[layout]
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type, to.k, to.v = k.type, k.data, v.data
    to.k_head_stride, to.k_row_stride = k.strides[head], k.strides[row]
    to.v_head_stride, to.v_row_stride = v.strides[head], v.strides[row]


cdef object read_rows_out(kvc_layer *shape, object out, int64_t most, int64_t *rows, kvc_rows_out *to):
    """Where keys and values go, at most so many rows; returns what keeps the arrays."""
    cdef Array k, v
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out: a pair of arrays is needed, for keys and values, not {type(out).__name__}")
    owners = read_array(out[0], "out[0]", 3, &k, write=True), read_array(out[1], "out[1]", 3, &v, write=True)
    if v.type != k.type:
        raise TypeError(f"out: both must be of one type, not {dtype_of(k.type)} and {dtype_of(v.type)}")
    if k.shape[0] != shape.num_kv_heads or k.shape[2] != shape.k_dim:
        wrong_shape("out[0]", &k, HTD, shape.num_kv_heads, shape.k_dim)
    if v.shape[0] != shape.num_kv_heads or v.shape[1] != k.shape[1] or v.shape[2] != shape.v_dim:
        wrong_shape("out[1]", &v, HTD, shape.num_kv_heads, shape.v_dim, &k)
    if k.shape[1] > most:
        raise ValueError(f"out: for {k.shape[1]} rows, where the sequence has {most} from first on")
    check_writable(&k, "out[0]")
    check_writable(&v, "out[1]")
    check_apart(&k, &v, "out[1]")
    rows[0] = k.shape[1]
    fill_rows_out(to, &k, &v, HTD)
    return owners


cdef object in_f32(Array *a, object owner):
    array = wrap(a, owner)
    if a.type == KVC_BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


cdef tuple read_pair(kvc_layer *shape, object k, object v, int layout, Array *a, Array *b):
    """Keys and values of as many tokens; where values lie in the keys, `b` may be left empty."""
    if k is None or (v is None and not shape.value_in_key):
        raise TypeError(f"{'k' if k is None else 'v'}=None: k and v go together")
    k = read_rows(k, "k", shape.num_kv_heads, False, shape.k_dim, layout, a)
    b.data = NULL
    if v is None:
        return k, v
    v = read_rows(v, "v", shape.num_kv_heads, False, shape.v_dim, layout, b)
    if not same_tokens(a, b, layout):
        raise ValueError(f"k and v: of {show_tokens(a, layout)} and {show_tokens(b, layout)} tokens, where they must "
                         "match")
    if shape.value_in_key and not np.array_equal(in_f32(a, k)[..., :shape.v_dim], in_f32(b, v), equal_nan=True):
        raise ValueError(f"v: must be k[..., :{shape.v_dim}], where values lie in the keys (value_in_key), or be left "
                         "out")
    return k, v


@cython.final
@cython.no_gc_clear  # what is freed rests on the cache
cdef class Slots:
    """Memory of tokens of a batch, to be written to, kept as it is for as long as this lives; what views rest on."""

    cdef Cache cache
    cdef kvc_hold *handle
    cdef kvc_span span

    def __dealloc__(self):
        free_hold(self.cache, self.handle)

    cdef object view(self, kvc_layer *layer, bint values):
        cdef kvc_span *span = &self.span
        cdef int32_t type = layer.v_type if values else layer.k_type
        cdef int64_t dim = layer.v_dim if values else layer.k_dim
        cdef cnp.npy_intp[3] shape = [layer.num_kv_heads, span.num_rows, dim]
        cdef cnp.npy_intp[3] strides = [span.k_head_stride, span.k_row_stride, 1]
        cdef cnp.dtype descr
        if values:
            strides[0], strides[1] = span.v_head_stride, span.v_row_stride
        if type >= KVC_Q8_0:
            shape[2] = row_bytes(type, dim)
            descr = cnp.PyArray_DescrFromType(cnp.NPY_UINT8)
        else:
            strides[2] = ITEM_SIZE[type]
            descr = dtype_of(type)
        array = make_array(BFloat16Array if type == KVC_BF16 else np.ndarray, descr, 3, shape, strides,
                           <void *>(span.v if values else span.k), cnp.NPY_ARRAY_WRITEABLE)
        cnp.set_array_base(array, self)
        return array


@cython.final
@cython.no_gc_clear  # what is aborted rests on the cache
cdef class Batch:
    cdef Cache cache
    cdef kvc_batch *handle  # NULL: ended
    cdef readonly int32_t num_tokens
    cdef readonly cnp.ndarray positions
    cdef cnp.ndarray seq_ids  # None: all of sequence 0
    cdef list writable  # weak references to views of its slots; None: there never were any
    cdef int32_t calls  # between enter() and leave()
    cdef int32_t forks  # as in Cache
    cdef bint ending  # another thread is about to free it

    def __dealloc__(self):
        if self.handle != NULL and not self.ending:  # which no thread is that is still there: the handle may be gone
            self.cache.count_call()
            with nogil:
                kvc_abort(self.handle)
            self.cache.leave()

    cdef kvc_batch *enter(self) except NULL:
        """Returns the handle, valid until leave(): see above what may be done in between."""
        if self.handle == NULL:
            raise ValueError("the batch has ended: it was committed or aborted")
        if self.ending:
            raise CacheBusyError("another thread is ending the batch")
        if self.forks != num_forks:
            self.forks, self.calls = num_forks, 0
        self.calls += 1
        return self.handle

    cdef void leave(self) noexcept:
        if self.calls and self.forks == num_forks:
            self.calls -= 1

    cdef int check_open(self) except -1:
        """Raises if the batch has ended, before arguments are looked at that mean nothing then."""
        self.enter()
        self.leave()
        return 0

    cdef int begin_ending(self) except -1:
        """Makes the handle this call's alone, or raises if another call is using it."""
        if (self.calls and self.forks == num_forks) or self.ending:
            raise CacheBusyError("a call in another thread is using the batch; end it when that has returned")
        self.ending = True
        return 0

    def get_seq_ids(self):
        if self.seq_ids is None:
            self.seq_ids = np.zeros(self.num_tokens, np.int64)
            self.seq_ids.flags.writeable = False
        return self.seq_ids

    @property
    def ended(self):
        return self.handle == NULL

    cdef int32_t to_first(self, object first, int64_t tokens) except -1:
        cdef int64_t number
        if is_plain(first, 0, self.num_tokens - tokens, &number):
            return <int32_t>number
        first = to_index(first, "first")
        if 0 <= first <= self.num_tokens - tokens:
            return first
        raise IndexError(f"first={show(first)} with {tokens} tokens: the batch has {self.num_tokens}")

    cdef int64_t only_sequence(self) except? -1:
        if self.seq_ids is None:
            return 0
        seq_ids = set(self.seq_ids.tolist())
        if len(seq_ids) > 1:
            raise ValueError(f"seq_id=None: the batch has {len(seq_ids)} sequences; put() with the seq_id of the one "
                             "whose rows these are")
        return self.seq_ids[0]

    cdef int read_cross(self, int32_t layer, object first, object seq_id, int layout, PutRows *rows) except -1:
        """Whose rows these are, which have nothing to do with the tokens of the batch."""
        cdef int64_t number, tokens = count_tokens(&rows.k, layout)
        if not is_plain(first, 0, 0, &number) and to_index(first, "first") != 0:
            raise ValueError(f"first={show(first)}: must be 0 in layer {layer}, whose policy is CrossAttention: what "
                             "is put there is all that the sequence has")
        if layout == BHTD and rows.k.shape[0] != 1:
            raise ValueError(f"k: of {rows.k.shape[0]} sequences, where layer {layer}, whose policy is CrossAttention, "
                             "takes the rows of one at a time; call put() for each, with its seq_id")
        if tokens > _INT32_MAX:
            raise ValueError(f"k: {tokens} rows, where {_INT32_MAX} are the most there may be")
        rows.args.seq_id = self.only_sequence() if seq_id is None else to_seq_id(seq_id)
        return 0

    cdef tuple read_put(self, int32_t layer, object k, object v, object first, object seq_id, int layout,
                        PutRows *rows):
        cdef kvc_layer *shape = &self.cache.layers[layer]
        cdef kvc_put_args *args = &rows.args
        if shape.policy.kind == KVC_CROSS and layout == THD and getattr(k, "ndim", 3) == 4:
            layout = BTHD
        cdef int token = TOKEN_AXIS[layout], head = HEAD_AXIS[layout]
        owners = read_pair(shape, k, v, layout, &rows.k, &rows.v)
        memset(args, 0, sizeof(kvc_put_args))
        args.struct_size = sizeof(kvc_put_args)
        if shape.policy.kind == KVC_CROSS:
            self.read_cross(layer, first, seq_id, layout, rows)
        elif seq_id is not None:
            raise ValueError(f"seq_id={show(seq_id)}: is for CrossAttention, and layer {layer} has another policy: "
                             "whose tokens these are, the batch says")
        else:
            args.first = self.to_first(first, count_tokens(&rows.k, layout))
        args.num_tokens = <int32_t>count_tokens(&rows.k, layout)
        args.k, args.k_type = rows.k.data, rows.k.type
        args.k_token_stride, args.k_head_stride = rows.k.strides[token], rows.k.strides[head]
        if not shape.value_in_key:
            args.v, args.v_type = rows.v.data, rows.v.type
            args.v_token_stride, args.v_head_stride = rows.v.strides[token], rows.v.strides[head]
        if layout >= BHTD:
            args.inner_tokens = <int32_t>rows.k.shape[token]
            args.k_batch_stride = rows.k.strides[0]
            if not shape.value_in_key:
                args.v_batch_stride = rows.v.strides[0]
        return owners

    def put(self, layer, k, v, first, seq_id, str layout):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef PutRows rows
        cdef kvc_batch *batch
        cdef kvc_status status
        _owners = self.read_put(at, k, v, first, seq_id, to_layout(layout), &rows)
        batch = self.enter()
        with nogil:
            status = kvc_put(batch, at, &rows.args)
        self.leave()
        self.cache.check_call(status)

    def slots(self, layer, first):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int32_t token = self.to_first(first, 1)
        cdef Slots slots = Slots.__new__(Slots)
        cdef kvc_status status
        cdef kvc_batch *batch
        slots.cache = self.cache
        batch = self.enter()
        with nogil:
            status = kvc_slots(batch, at, token, &slots.span, sizeof(kvc_span), &slots.handle)
        self.leave()
        check(status)
        views = slots.view(&self.cache.layers[at], False), slots.view(&self.cache.layers[at], True)
        writable = []
        if self.writable is None:
            self.writable = writable
        self.writable.extend([weakref.ref(view, self.writable.remove) for view in views])
        if self.handle == NULL:  # it ended while the views were made
            self.end_writing()
        return views

    def written(self, layer, first, num_tokens):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int32_t tokens = <int32_t>to_int(num_tokens, "num_tokens", 1, _INT32_MAX)
        cdef int32_t token = self.to_first(first, tokens)
        cdef kvc_status status
        cdef kvc_batch *batch = self.enter()
        with nogil:
            status = kvc_written(batch, at, token, tokens)
        self.leave()
        check(status)

    cdef object read_factors(self, object x, str name, int64_t heads, Array *a):
        """One f32 number per query head."""
        owner = read_array(x, name, 1, a)
        if a.type != KVC_F32:
            raise TypeError(f"{name}: one float32 number per query head is needed; convert {name} to float32")
        if a.shape[0] != heads:
            raise ValueError(f"{name}: an array of {a.shape[0]} numbers, where q has {heads} heads")
        return settle(a, owner)

    cdef object read_out(self, object out, int64_t dim, int layout, Array *q, Array *a):
        """Where the result goes, checked if it was given; returns it."""
        cdef int head = HEAD_AXIS[layout]
        if out is None:
            if layout == BHTD:
                out = new_array(q.type, 4, q.shape[0], q.shape[1], q.shape[2], dim)
            else:
                out = new_array(q.type, 3, q.shape[0], q.shape[1], dim)
            read_numpy(out, "out", q.ndim, a)
            return out
        owner = read_array(out, "out", q.ndim, a, write=True)
        if a.type != q.type:
            raise TypeError(f"out: must be {dtype_of(q.type)}, as q is, not {dtype_of(a.type)}")
        if not same_tokens(a, q, layout) or a.shape[head] != q.shape[head] or a.shape[a.ndim - 1] != dim:
            wrong_shape("out", a, layout, f"{q.shape[head]}", dim, q)
        check_writable(a, "out")
        return owner

    cdef tuple read_query(self, int32_t layer, object q, object first, object scale, object softcap, object sinks,
                          object alibi, object non_causal, int layout, object out, Query *query):
        """Fills in the query; returns what keeps the arrays it points to."""
        cdef kvc_layer *shape = &self.cache.layers[layer]
        cdef kvc_plan_args *plan = &query.plan
        cdef kvc_attend_args *args = &query.args
        cdef int token = TOKEN_AXIS[layout], head = HEAD_AXIS[layout]
        cdef cnp.ndarray flags = None
        cdef const uint8_t[::1] sees_all
        memset(query, 0, sizeof(Query))
        plan.struct_size, args.struct_size = sizeof(kvc_plan_args), sizeof(kvc_attend_args)
        q = read_rows(q, "q", shape.num_kv_heads, True, shape.k_dim, layout, &query.q)
        plan.first = self.to_first(first, count_tokens(&query.q, layout))
        plan.layer, plan.num_tokens = layer, <int32_t>count_tokens(&query.q, layout)
        plan.num_heads = <int32_t>query.q.shape[head]
        args.q, args.q_type = query.q.data, query.q.type
        args.q_token_stride, args.q_head_stride = query.q.strides[token], query.q.strides[head]
        if scale is not None:
            args.scale = to_factor(scale, "scale", False)
        elif shape.value_in_key:
            raise ValueError(f"scale=None: must be given in layer {layer}, whose values lie in the keys "
                             f"(value_in_key): it does not follow from head_dim, {shape.k_dim}")
        if softcap is not None:
            args.softcap = to_factor(softcap, "softcap", True)
        if sinks is not None:
            sinks = self.read_factors(sinks, "sinks", plan.num_heads, &query.sinks)
            args.sinks = <const float *>query.sinks.data
        if alibi is not None:
            alibi = self.read_factors(alibi, "alibi", plan.num_heads, &query.alibi)
            args.alibi = <const float *>query.alibi.data
        if non_causal is not None:
            flags = to_flags(non_causal, plan.first, plan.num_tokens, self.num_tokens)
            if flags is not None:
                sees_all = flags
                plan.non_causal = &sees_all[0]
        out = self.read_out(out, shape.v_dim, layout, &query.q, &query.out)
        args.out = query.out.data
        args.out_token_stride, args.out_head_stride = query.out.strides[token], query.out.strides[head]
        if layout == BHTD:
            args.inner_tokens = <int32_t>query.q.shape[2]
            args.q_batch_stride, args.out_batch_stride = query.q.strides[0], query.out.strides[0]
        return q, sinks, alibi, flags, out

    def attend(self, layer, q, k, v, first, scale, softcap, sinks, alibi, non_causal, str layout, out,
               bint return_lse):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers)
        cdef int axes = to_layout(layout)
        cdef bint store = k is not None or v is not None
        cdef bint cross = self.cache.layers[at].policy.kind == KVC_CROSS
        cdef kvc_batch *batch
        cdef kvc_status status
        cdef cnp.ndarray lse = None
        cdef PutRows rows
        cdef Query query
        query_owners = self.read_query(at, q, first, scale, softcap, sinks, alibi, non_causal, axes, out, &query)
        if store:
            # In a cross-attention layer `first` is of the queries only.
            _put_owners = self.read_put(at, k, v, 0 if cross else first, None, axes, &rows)
            if not cross and not same_tokens(&query.q, &rows.k, axes):
                raise ValueError(f"q and k: of {show_tokens(&query.q, axes)} and {show_tokens(&rows.k, axes)} tokens, "
                                 "where they must match")
        if out is None:
            out = query_owners[4]
        else:
            check_apart(&query.out, &query.q, "q")
            check_apart(&query.out, &query.sinks, "sinks")
            check_apart(&query.out, &query.alibi, "alibi")
            if store:
                check_apart(&query.out, &rows.k, "k")
                check_apart(&query.out, &rows.v, "v")
        if return_lse:
            lse = new_array(KVC_F32, query.q.ndim - 1, query.q.shape[0], query.q.shape[1], query.q.shape[2])
            query.args.lse = <float *>cnp.PyArray_DATA(lse)
            query.args.lse_token_stride = cnp.PyArray_STRIDE(lse, TOKEN_AXIS[axes])
            query.args.lse_head_stride = cnp.PyArray_STRIDE(lse, HEAD_AXIS[axes])
            query.args.lse_batch_stride = cnp.PyArray_STRIDE(lse, 0)
        if store:
            query.args.put = &rows.args
        batch = self.enter()
        with nogil:
            status = kvc_attend(batch, &query.plan, &query.args)
        self.leave()
        self.cache.check_call(status)
        return (out, lse) if return_lse else out

    cdef object dense_rows(self, object out, str name, int32_t type, int layout, int64_t heads, int64_t dim,
                           Array *like, Array *a):
        """Returns an array for as many sequences and rows as `like` has: `out`, checked, or a new one."""
        cdef int64_t sequences = like.shape[0], rows = like.shape[TOKEN_AXIS[layout]]
        if out is None:
            if layout == BHTD:
                out = new_array(type, 4, sequences, heads, rows, dim)
            elif layout == HTD:
                out = new_array(type, 3, heads, rows, dim)
            else:
                out = new_array(type, 3, rows, heads, dim)
            read_numpy(out, name, NUM_AXES[layout], a)
            return out
        owner = read_array(out, name, NUM_AXES[layout], a, write=True)
        if not same_tokens(a, like, layout) or a.shape[HEAD_AXIS[layout]] != heads or a.shape[a.ndim - 1] != dim:
            wrong_shape(name, a, layout, heads, dim, like)
        check_writable(a, name)
        return owner

    cdef cnp.ndarray dense_mask(self, object out, str kind, tuple shape, Array *k, Array *v):
        cdef cnp.ndarray mask
        cdef char *end
        dtype = np.dtype(np.float32 if kind == "f32" else np.bool_)
        if out is None:
            return np.empty(shape, dtype)
        if not isinstance(out, np.ndarray) or out.dtype != dtype:
            raise TypeError(f"out[2]: a NumPy array of {dtype} is needed, where mask={kind!r}, not "
                            f"{getattr(out, 'dtype', type(out).__name__)}")
        if out.shape != shape:
            raise ValueError(f"out[2]: an array of shape {out.shape}, where {shape} is needed")
        if not out.flags.c_contiguous or not out.flags.aligned or not out.flags.writeable:
            raise ValueError("out[2]: must be contiguous, and may not be read-only")
        mask = out
        end = cnp.PyArray_BYTES(mask) + cnp.PyArray_NBYTES(mask)
        if (begin_of(k) < end and cnp.PyArray_BYTES(mask) < end_of(k)) or (
                begin_of(v) < end and cnp.PyArray_BYTES(mask) < end_of(v)):
            raise ValueError("out: the mask overlaps keys or values; give it memory of its own")
        return mask

    def dense(self, layer, non_causal, dtype, str layout, mask, out):
        self.check_open()
        cdef int32_t at = to_layer(layer, self.cache.num_layers), sequences = 1, type
        cdef int where = to_layout(layout)
        cdef kvc_layer *shape = &self.cache.layers[at]
        cdef cnp.ndarray flags = to_flags(non_causal, 0, self.num_tokens, self.num_tokens), masks = None
        cdef const uint8_t[::1] sees_all
        cdef kvc_batch *batch
        cdef Array k, v, like
        cdef kvc_dense_args args
        cdef kvc_rows_out rows
        cdef kvc_status status
        given = (None, None) if out is None else tuple(out) if isinstance(out, (tuple, list)) else ()
        if not 2 <= len(given) <= 2 + (mask is not None) or out is not None and any(to is None for to in given):
            raise TypeError("out: a tuple of arrays for keys, values and, where there is one, the mask is needed")
        memset(&args, 0, sizeof(args))
        args.struct_size = sizeof(args)
        args.by_sequence = where == BHTD
        batch = self.enter()
        with nogil:
            if args.by_sequence:
                status = kvc_dense_sequences(batch, at, &sequences, &args.num_rows)
            else:
                status = kvc_dense_rows(batch, at, &args.num_rows)
        self.leave()
        check(status)
        type = TYPES["f32" if dtype is None else dtype]
        like.shape[0] = sequences
        like.shape[TOKEN_AXIS[where]] = args.num_rows
        key_owner = self.dense_rows(given[0], "out[0]", type, where, shape.num_kv_heads, shape.k_dim, &like, &k)
        value_owner = self.dense_rows(given[1], "out[1]", type, where, shape.num_kv_heads, shape.v_dim, &like, &v)
        if out is not None:
            if v.type != k.type:
                raise TypeError(f"out: both must be of one type, not {dtype_of(k.type)} and {dtype_of(v.type)}")
            check_apart(&k, &v, "out[1]")
        if mask is not None:
            lengths = [self.num_tokens, args.num_rows]
            if args.by_sequence:
                lengths[:1] = [sequences, self.num_tokens // sequences]
            masks = self.dense_mask(given[2] if len(given) > 2 else None, mask, tuple(lengths), &k, &v)
        fill_rows_out(&rows, &k, &v, where)
        args.rows = &rows
        args.k_batch_stride, args.v_batch_stride = k.strides[0], v.strides[0]
        if masks is not None and mask == "f32":
            args.mask = <float *>cnp.PyArray_DATA(masks)
            args.mask_token_stride = args.num_rows * sizeof(float)
        elif masks is not None:
            args.seen = <uint8_t *>cnp.PyArray_DATA(masks)
            args.seen_token_stride = args.num_rows
        if flags is not None:
            sees_all = flags
            args.non_causal = &sees_all[0]
        batch = self.enter()
        with nogil:
            status = kvc_dense(batch, at, &args)
        self.leave()
        check(status)
        if out is None:
            return key_owner, value_owner, masks
        return given[0], given[1], masks

    cdef cnp.ndarray to_kept(self, object keep):
        cdef cnp.ndarray kept = to_int_array(keep, "keep", cnp.NPY_INT32, -_INT32_MAX - 1, _INT32_MAX, least=0)
        before = set()
        for i, token in enumerate(kept.tolist()):
            if not 0 <= token < self.num_tokens:
                raise IndexError(f"keep[{i}]={token}: the batch has {self.num_tokens} tokens")
            if token in before:
                raise ValueError(f"keep[{i}]={token}: was given before")
            before.add(token)
        return kept

    def commit(self, keep):
        """Commits the tokens to keep, None: all. Returns whether the batch had not ended before."""
        cdef const int32_t[::1] kept
        cdef const int32_t *tokens = NULL
        cdef bint every = keep is None
        cdef int32_t num_kept = 0
        cdef kvc_status status
        if self.handle == NULL:
            return False
        if keep is not None:
            kept = self.to_kept(keep)
            num_kept = <int32_t>kept.shape[0]
        if num_kept:
            tokens = &kept[0]
        if self.handle == NULL:  # by what was converted
            return False
        self.begin_ending()
        with nogil:
            status = kvc_commit(self.handle) if every else kvc_commit_kept(self.handle, tokens, num_kept)
        if status == KVC_OK:
            self.handle = NULL
        self.ending = False
        check(status)
        self.end_writing()
        return True

    def abort(self):
        if self.handle == NULL:
            return
        self.begin_ending()
        with nogil:
            kvc_abort(self.handle)
        self.handle = NULL
        self.ending = False
        self.end_writing()

    cdef int end_writing(self) except -1:
        if self.writable is not None:
            for ref in tuple(self.writable):  # the list shrinks when a view dies
                view = ref()
                if view is not None:
                    view.flags.writeable = False
        return 0


# ---- the machine -----------------------------------------------------------------------------------------------------

def version():
    return kvc_version()


def build_info():
    return kvc_build_info().decode()


def isa():
    """None: KVCACHE_ISA names one that is not to be had here."""
    cdef const char *name = kvc_isa()
    return None if name == NULL else name.decode()


def get_num_threads():
    cdef int32_t number
    with nogil:
        number = kvc_num_threads()
    return number


def set_num_threads(num_threads):
    cdef int32_t number = 0 if num_threads is None else <int32_t>to_int(num_threads, "num_threads", 1, MAX_THREADS)
    check(kvc_set_num_threads(number))

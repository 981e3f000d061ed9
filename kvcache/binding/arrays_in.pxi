"""Describe argument arrays, NumPy's or DLPack's, for C: address, type, shape and strides."""

cdef struct Array:
    char *data
    int32_t type  # kvc_type
    int32_t ndim
    bint read_only
    bint is_raw  # elements are bytes, the last axis a row of `type` as it is stored
    int64_t[4] shape
    int64_t[4] strides  # in bytes


cdef int wrong_type(str name, str given) except -1:
    advice = f"convert {name} to float32"
    if given == "uint16":
        advice = f"uint16 may or may not be bf16; if it is, pass {name}.view(ml_dtypes.bfloat16)"
    raise TypeError(f"{name}: elements of type {given}, where float32, float16 and bfloat16 are taken; {advice}")


cdef int wrong_ndim(str name, int ndim, int wanted) except -1:
    axes = ""
    if name in ("q", "k", "v"):
        batched = "[batch, heads, tokens, dim]"
        axes = f"; {batched} is layout='BHTD' of attend" if wanted == 3 else f", {batched}"
    raise ValueError(f"{name}: an array of {ndim} axes, where {wanted} are needed{axes}")


cdef inline int64_t item_size(Array *a) noexcept:
    return 1 if a.is_raw else bytes_of_row(a.type, 1)


cdef int read_numpy(cnp.ndarray x, str name, int ndim, Array *a, int32_t stored=-1) except -1:
    """Describe an array of floats; or of bytes, if these may be rows of a stored type."""
    cdef int i, typenum = cnp.PyArray_TYPE(x)
    a.is_raw = typenum == cnp.NPY_UINT8 and stored >= 0
    if a.is_raw:
        a.type = stored
    elif typenum == cnp.NPY_FLOAT32:
        a.type = KVC_F32
    elif typenum == cnp.NPY_FLOAT16:
        a.type = KVC_F16
    elif is_bf16(x):
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


def check_tensor(x, str name not None):
    """Raise a ValueError that says `name` for a tensor of PyTorch whose memory lacks its gradient or its sign."""
    if getattr(x, "requires_grad", False):
        raise ValueError(f"{name}: the tensor requires grad, which a cache would lose; give its .detach()")
    is_neg = getattr(x, "is_neg", None)
    if is_neg is not None and is_neg():
        raise ValueError(f"{name}: the tensor has its negative bit set, so that its memory has the other sign; give "
                         "its .resolve_neg()")


cdef object read_array(object x, str name, int ndim, Array *a, bint write=False, int32_t stored=-1):
    """Describe an array of floats; or of bytes, if these may be rows of a stored type.

    Return the object that keeps the array's memory.
    """
    if cnp.PyArray_Check(x):
        read_numpy(<cnp.ndarray>x, name, ndim, a, stored)
        return x
    is_class = isinstance(x, type)
    if hasattr(x, "__dlpack__") and not is_class:
        return read_dlpack(x, name, ndim, write, a, stored)
    if hasattr(x, "__array__") and not is_class and not write:
        x = np.asarray(x)
        read_numpy(<cnp.ndarray>x, name, ndim, a, stored)
        return x
    raise TypeError(f"{name}: an array (NumPy or DLPack, on the CPU) is needed, not {type(x).__name__}")


cdef object wrap(Array *a, object owner):
    """Return a read-only NumPy array over memory that `owner` keeps; bf16 as uint16."""
    cdef cnp.npy_intp[4] shape
    cdef cnp.npy_intp[4] strides
    cdef int i
    for i in range(a.ndim):
        shape[i] = <cnp.npy_intp>a.shape[i]
        strides[i] = <cnp.npy_intp>a.strides[i]
    cdef int typenum = cnp.NPY_UINT8 if a.is_raw else [cnp.NPY_FLOAT32, cnp.NPY_FLOAT16, cnp.NPY_UINT16][a.type]
    cdef cnp.dtype descr = cnp.PyArray_DescrFromType(typenum)
    array = make_array(np.ndarray, descr, a.ndim, shape, strides, a.data)
    cnp.set_array_base(array, owner)
    return array


cdef bint is_readable(Array *a) noexcept:
    """Whether C can read an array in place: elements adjacent and aligned, the other strides whole elements, not 0."""
    cdef int last = a.ndim - 1, i
    cdef int64_t size = item_size(a)
    if <size_t>a.data % <size_t>size:
        return False
    for i in range(a.ndim):
        if a.shape[i] == 1:  # the stride is never used; producers may have put anything there
            a.strides[i] = size if i == last else 0
        elif a.strides[i] != size if i == last else a.strides[i] % size or not a.strides[i]:
            return False
    return True


cdef object make_readable(Array *a, object owner):
    """Copy an array if C cannot read it in place; return the object that keeps the memory to read."""
    cdef cnp.ndarray copied
    cdef int i
    if is_readable(a):
        return owner
    copied = np.array(wrap(a, owner), order="C")
    a.data = cnp.PyArray_BYTES(copied)
    for i in range(a.ndim):
        a.strides[i] = cnp.PyArray_STRIDE(copied, i)
    return copied


cdef bint rows_overlap(Array *a) noexcept:
    """Whether any two rows of a readable array (a row is its last axis) share bytes."""
    cdef int64_t extent = a.shape[a.ndim - 1] * item_size(a)  # bytes that the axes done so far reach over
    cdef int64_t step
    cdef int axis, nearest, done = 0  # done: a bit for each axis
    for _ in range(a.ndim - 1):
        nearest = -1
        for axis in range(a.ndim - 1):  # go through the axes by rising stride
            if not done & 1 << axis and (nearest < 0 or abs(a.strides[axis]) < abs(a.strides[nearest])):
                nearest = axis
        done |= 1 << nearest
        step = abs(a.strides[nearest])
        if a.shape[nearest] > 1 and step < extent:
            return True
        extent += (a.shape[nearest] - 1) * step
    return False


cdef char *begin_of(Array *a) noexcept:
    """Return the lowest address of an array, whose strides may be negative."""
    cdef char *begin = a.data
    cdef int i
    for i in range(a.ndim):
        begin += min(<int64_t>0, (a.shape[i] - 1) * a.strides[i])
    return begin


cdef char *end_of(Array *a) noexcept:
    """Return the address behind the highest element of an array."""
    cdef char *end = a.data + item_size(a)
    cdef int i
    for i in range(a.ndim):
        end += max(<int64_t>0, (a.shape[i] - 1) * a.strides[i])
    return end


cdef int check_apart(Array *out, Array *other, str name) except -1:
    """Raise if the memory of a result, from its first byte to its last, overlaps another argument's."""
    if other.data != NULL and begin_of(out) < end_of(other) and begin_of(other) < end_of(out):
        raise ValueError(f"out: overlaps {name}; give it memory of its own")
    return 0


cdef int check_writable(Array *a, str name) except -1:
    if a.read_only:
        raise ValueError(f"{name}: is read-only; pass an array that can be written to")
    if a.shape[1] and (not is_readable(a) or rows_overlap(a)):  # an empty array may have any strides
        raise ValueError(f"{name}: its last axis must be contiguous and aligned, and its rows may not overlap")
    return 0


cdef object read_rows(object x, str name, int64_t heads, bint multiple, int64_t dim, int layout, Array *a,
                      int32_t stored=-1, bint may_be_empty=False):
    """Describe an array of rows of `heads` heads, or of a multiple of it if `multiple`.

    The rows may be bytes if a stored type is given. Return the object that keeps the array's memory. It may still have
    to be made readable.
    """
    cdef int64_t given, wanted = heads
    owner = read_array(x, name, NUM_AXES[layout], a, False, stored)
    if a.is_raw and a.shape[a.ndim - 1] == dim:  # one for each element: these are no rows as they are stored
        wrong_type(name, "uint8")
    dim = length_of_row(a, dim)
    given = a.shape[HEAD_AXIS[layout]]
    if multiple and 0 < given <= _INT32_MAX and given % heads == 0:
        wanted = given
    if given != wanted or a.shape[a.ndim - 1] != dim:
        wrong_shape(name, a, layout, f"a multiple of {heads}" if multiple else heads, dim)
    if count_tokens(a, layout) == 0 and not may_be_empty:
        raise ValueError(f"{name}: an array of no tokens")
    return owner


cdef object read_factors(object x, str name, int64_t heads, Array *a):
    """Describe an array of one f32 number per query head; return the object that keeps the array's memory."""
    owner = read_array(x, name, 1, a)
    if a.type != KVC_F32:
        raise TypeError(f"{name}: one float32 number per query head is needed; convert {name} to float32")
    if a.shape[0] != heads:
        raise ValueError(f"{name}: an array of {a.shape[0]} numbers, where q has {heads} heads")
    return make_readable(a, owner)


cdef float to_scale(object scale, int32_t layer, kvc_layer *shape) except? -1:
    """Convert what scores in a layer are multiplied by; None: 0, the default of C, which some layers lack."""
    if scale is not None:
        return to_factor(scale, "scale", False)
    if shape.value_in_key:
        raise ValueError(f"scale=None: must be given in layer {layer}, whose values lie in the keys (value_in_key): it "
                         f"does not follow from head_dim, {shape.k_dim}")
    return 0


cdef object to_f32(Array *a, object owner):
    """Copy an array to f32."""
    array = wrap(a, owner)
    if a.type == KVC_BF16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


cdef bint begins_with(Array *k, object k_owner, Array *v, object v_owner):
    """Whether the rows of v are the first parts of the rows of k. Both may be bytes."""
    cdef int64_t n = v.shape[v.ndim - 1]
    if k.is_raw or v.is_raw:
        return k.is_raw == v.is_raw and np.array_equal(wrap(k, k_owner)[..., :n], wrap(v, v_owner))
    return np.array_equal(to_f32(k, k_owner)[..., :n], to_f32(v, v_owner), equal_nan=True)


cdef object fold_axes(object x, str name, int64_t heads, int64_t dim):
    """Return an array [..., heads, dim] or [rows, heads * dim] as [rows, heads, dim]."""
    cdef tuple shape = tuple(x.shape)
    if len(shape) == 2 and shape != (heads, dim) and shape[1] == heads * dim:
        return x.reshape(shape[0], heads, dim)
    if len(shape) < 2 or shape[len(shape) - 2] != heads:
        raise ValueError(f"{name}: an array of shape {shape}, where (..., {heads}, {dim}) is needed, or "
                         f"(rows, {heads * dim})")
    rows = 1
    for length in shape[:len(shape) - 2]:
        rows *= length
    return x.reshape(rows, heads, shape[len(shape) - 1])


cdef tuple fold_encoder_rows(object k, object v, kvc_layer *shape):
    """Return keys and values for a cross-attention layer, of any leading axes, as arrays of three axes."""
    if k is None or all(getattr(x, "ndim", 3) == 3 or not hasattr(x, "reshape") for x in (k, v)):
        return k, v
    shapes = [tuple(getattr(x, "shape", ())) for x in (k, v)]
    if v is not None and shapes[0][:-1] != shapes[1][:-1]:
        raise ValueError(f"k and v: arrays of shapes {shapes[0]} and {shapes[1]}; only their last axes may differ")
    heads = shape.num_kv_heads
    return (fold_axes(k, "k", heads, shape.k_dim), None if v is None else fold_axes(v, "v", heads, shape.v_dim))


cdef inline bint stores_values(kvc_layer *shape) noexcept:
    """Whether a layer stores values beside its keys: they may lie in the keys, or there may be none."""
    return shape.v_dim != 0 and not shape.value_in_key


cdef int check_no_values(object v, object k, str name) except -1:
    """Raise unless v has the axes of k, and a last axis of length 0: values of a layer of keys alone."""
    cdef tuple wanted = (*tuple(k.shape)[:-1], 0), given = tuple(getattr(v, "shape", ()))
    if given != wanted:
        raise ValueError(f"{name}: of shape {given}, where the layer holds keys alone (v_head_dim=0): leave it out, or "
                         f"give an array of shape {wanted}")
    return 0


cdef tuple read_pair(kvc_layer *shape, object k, object v, int layout, Array *a, Array *b):
    """Describe keys and values, and check that they have the same tokens; return the objects that keep their memory.

    For a layer whose values lie in its keys, or that holds keys alone, `v` may be None. The arrays may still have to be
    made readable.
    """
    if k is None or (v is None and stores_values(shape)):
        raise TypeError(f"{'k' if k is None else 'v'}=None: k and v go together")
    cdef bint may_be_empty = shape.policy.stride > 1  # its batch may have no token with a row
    k_owner = read_rows(k, "k", shape.num_kv_heads, False, shape.k_dim, layout, a, shape.k_type, may_be_empty)
    b.data = NULL
    if v is None or not shape.v_dim:
        if v is not None:
            check_no_values(v, k, "v")
        return k_owner, v
    k = k_owner
    v = read_rows(v, "v", shape.num_kv_heads, False, shape.v_dim, layout, b, shape.v_type, may_be_empty)
    if not same_tokens(a, b, layout):
        raise ValueError(f"k and v: of {show_tokens(a, layout)} and {show_tokens(b, layout)} tokens, where they must "
                         "match")
    if shape.value_in_key and not begins_with(a, k, b, v):
        raise ValueError(f"v: must be k[..., :{length_of_row(a, shape.v_dim)}], where values lie in the keys "
                         "(value_in_key), or be left out")
    return k, v


cdef tuple make_pair_readable(Array *a, Array *b, tuple owners):
    """Copy keys and values that C cannot read in place; return the objects that keep the memory to read."""
    return make_readable(a, owners[0]), make_readable(b, owners[1]) if b.data != NULL else owners[1]


cdef inline int32_t rows_below(kvc_layer *shape, int32_t position) noexcept:
    """Return how many rows stand below a position, in a layer that lacks none."""
    return kvc_rows_below(position, max(shape.policy.stride, 1))


cdef tuple read_replacement(kvc_layer *shape, object k, object v, int32_t begin, kvc_rows_in *rows, int32_t *end):
    """Describe new rows for positions [begin, end), and set `end`; return the objects that keep their memory."""
    cdef Array keys, values
    owners = read_pair(shape, k, v, HTD, &keys, &values)
    if count_tokens(&keys, HTD) > rows_below(shape, _INT32_MAX) - rows_below(shape, begin):
        raise ValueError(f"begin={begin} with arrays of {keys.shape[1]} tokens: positions go up to {_MAX_POSITION}")
    owners = make_pair_readable(&keys, &values, owners)
    end[0] = begin + <int32_t>keys.shape[1] * max(shape.policy.stride, 1)
    memset(rows, 0, sizeof(kvc_rows_in))
    rows.struct_size = sizeof(kvc_rows_in)
    rows.k, rows.k_type = keys.data, keys.type
    rows.k_head_stride, rows.k_row_stride = keys.strides[0], keys.strides[1]
    if stores_values(shape):
        rows.v, rows.v_type = values.data, values.type
        rows.v_head_stride, rows.v_row_stride = values.strides[0], values.strides[1]
    return owners


cdef cnp.ndarray to_flags(object value, int64_t first, int64_t tokens, int64_t batch_tokens):
    """Convert `non_causal` to a byte for each of the batch's tokens [first, first + tokens).

    1: the token sees later ones. None instead of an array: no token does.
    """
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


cdef cnp.ndarray to_masked(object value, const kvc_masked **masked, size_t *size, int32_t *num):
    """Convert `masked`, rows (seq_id, begin, end), for C; return the array that keeps the memory."""
    cdef cnp.ndarray ranges, kept
    cdef const int64_t *row
    cdef kvc_masked *to
    cdef cnp.npy_intp i, rows
    if value is None:
        return None
    what = "rows of three integers, (seq_id, begin, end), are needed"
    try:
        given = np.asarray(value)
    except Exception as error:
        raise TypeError(f"masked={show(value)}: {what} ({error})") from None
    if given.shape == (0,):
        return None
    if given.dtype.kind not in "iu" or not np.can_cast(given.dtype, np.int64):
        raise TypeError(f"masked={show(value)}: {what}, not {given.dtype}")
    if given.ndim != 2 or given.shape[1] != 3:
        raise ValueError(f"masked: an array of shape {given.shape}, where {what}")
    rows = to_int(len(given), "len(masked)", 0, _INT32_MAX)
    ranges = np.ascontiguousarray(given, np.int64)
    kept = np.empty(rows * sizeof(kvc_masked), np.uint8)
    to = <kvc_masked *>cnp.PyArray_DATA(kept)
    for i in range(rows):
        row = <const int64_t *>cnp.PyArray_DATA(ranges) + 3 * i
        if row[1] < 0 or row[2] < row[1]:
            raise ValueError(f"masked[{i}]={row[0], row[1], row[2]}: begin must be at least 0, and end at least begin")
        to[i].seq_id = row[0]
        to[i].begin, to[i].end = <int32_t>min(row[1], _INT32_MAX), <int32_t>min(row[2], _INT32_MAX)
    masked[0], size[0], num[0] = to, sizeof(kvc_masked), <int32_t>rows
    return kept


cdef cnp.ndarray to_entries(object entries, str name, int64_t tokens, int64_t choices):
    """Convert entries, [tokens, n], [tokens, 1, n] or [tokens, choices, n], to int32 that lie one after the other."""
    cdef cnp.ndarray array
    try:
        array = np.asarray(entries)
    except ValueError as error:
        raise ValueError(f"{name}: lists of one length are needed, {tokens} of them: {error}") from None
    shape = (<object>array).shape
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: elements of type {array.dtype}, where integers are needed")
    if len(shape) not in (2, 3) or shape[0] != tokens or not shape[-1] or shape[1:-1] not in ((), (1,), (choices,)):
        raise ValueError(f"{name}: an array of shape {shape}, where ({tokens}, n) is needed, or ({tokens}, "
                         f"{choices}, n), with n at least 1")
    if array.dtype != np.int32:
        array = np.clip(array, -1, _INT32_MAX)  # no row stands at the largest number
    return np.ascontiguousarray(array, np.int32)

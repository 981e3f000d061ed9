"""Make arrays for results, and describe the caller's arrays that results are written to."""

cdef object make_array(object subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides,
                       void *data, int flags=0):
    """Return an array over `data`, read-only unless the flags say otherwise; over new memory if `data` is NULL."""
    Py_INCREF(descr)  # the next call steals a reference
    return PyArray_NewFromDescr(<PyTypeObject *>subtype, descr, ndim, shape, strides, data, flags, NULL)


cdef cnp.dtype dtype_of(int32_t type):
    if type == KVC_BF16:
        return find_bf16()
    return cnp.PyArray_DescrFromType(cnp.NPY_FLOAT32 if type == KVC_F32 else cnp.NPY_FLOAT16)


cpdef int64_t bytes_of_row(int32_t type, int64_t dim) noexcept:
    """Return the bytes of `dim` elements of a kvc_type."""
    return kvc_row_bytes(type, <int32_t>dim)


cdef cnp.ndarray new_array(int32_t type, int ndim, int64_t a, int64_t b, int64_t c=0, int64_t d=0):
    cdef cnp.npy_intp[4] shape = [a, b, c, d]
    if type == KVC_F32:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT32, 0)
    if type == KVC_F16:
        return cnp.PyArray_EMPTY(ndim, shape, cnp.NPY_FLOAT16, 0)
    return make_array(BFloat16Array, find_bf16(), ndim, shape, NULL, NULL)


cdef object new_result(object like, int32_t type, int ndim, int64_t a, int64_t b, int64_t c, int64_t d=0):
    """Return a new array for a result: a tensor of PyTorch if `like` is one, which is f32 or of `type`."""
    if cnp.PyArray_Check(like) or not hasattr(like, "new_empty"):
        return new_array(type, ndim, a, b, c, d)
    made = like.new_empty((a, b, c, d)[:ndim])
    return made.float() if type == KVC_F32 else made


cdef str type_name(int32_t type):
    return next(name for name, number in TYPES.items() if number == type)


cdef int64_t length_of_row(Array *a, int64_t dim) noexcept:
    """Return the length of the last axis of an array of rows of `dim` elements."""
    return bytes_of_row(a.type, dim) if a.is_raw else dim


cdef cnp.ndarray new_row_array(int64_t heads, int64_t rows, int64_t dim, int32_t type, bint raw):
    cdef cnp.npy_intp[3] shape = [heads, rows, 0]
    if not raw:
        return new_array(type, 3, heads, rows, dim)
    shape[2] = bytes_of_row(type, dim)
    return cnp.PyArray_EMPTY(3, shape, cnp.NPY_UINT8, 0)


cdef tuple new_rows(kvc_layer *shape, int64_t rows, int32_t type, bint raw, bint want_k, bint want_v,
                    kvc_rows_out *to):
    """Make arrays for keys and values, [num_kv_heads, rows, dim], where wanted; describe and return them.

    If `raw`, they are bytes of the stored types; else `type` is theirs.
    """
    cdef cnp.ndarray k = None, v = None
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type, to.raw = type, raw
    if want_k:
        k = new_row_array(shape.num_kv_heads, rows, shape.k_dim, shape.k_type if raw else type, raw)
        to.k = cnp.PyArray_DATA(k)
        to.k_head_stride, to.k_row_stride = cnp.PyArray_STRIDE(k, 0), cnp.PyArray_STRIDE(k, 1)
    if want_v:
        v = new_row_array(shape.num_kv_heads, rows, shape.v_dim, shape.v_type if raw else type, raw)
        to.v = cnp.PyArray_DATA(v) if shape.v_dim else NULL
        to.v_head_stride, to.v_row_stride = cnp.PyArray_STRIDE(v, 0), cnp.PyArray_STRIDE(v, 1)
    return k, v


cdef void fill_rows_out(kvc_rows_out *to, Array *k, Array *v, int layout) noexcept:
    cdef int head = HEAD_AXIS[layout], row = TOKEN_AXIS[layout]
    memset(to, 0, sizeof(kvc_rows_out))
    to.struct_size = sizeof(kvc_rows_out)
    to.type, to.raw, to.k, to.v = k.type, k.is_raw, k.data, v.data
    to.k_head_stride, to.k_row_stride = k.strides[head], k.strides[row]
    to.v_head_stride, to.v_row_stride = v.strides[head], v.strides[row]


cdef object read_row_array(object x, str name, int32_t stored, bint raw, Array *a):
    """Describe the caller's array for rows, of bytes if `raw`; return the object that keeps the array's memory."""
    owner = read_array(x, name, 3, a, True, stored if raw else -1)
    if raw and not a.is_raw:
        raise TypeError(f"{name}: elements of type {dtype_of(a.type)}, where raw=True needs uint8")
    return owner


cdef object read_values_out(kvc_layer *shape, object out, object k_out, bint raw, Array *k, Array *v):
    """Describe the caller's array for values, beside the one for keys; return the object that keeps its memory."""
    cdef int64_t length
    memset(v, 0, sizeof(Array))
    if not shape.v_dim:
        check_no_values(out, k_out, "out[1]")
        return None
    owner = read_row_array(out, "out[1]", shape.v_type, raw, v)
    if v.type != k.type and not raw:
        raise TypeError(f"out: both must be of one type, not {dtype_of(k.type)} and {dtype_of(v.type)}")
    length = length_of_row(v, shape.v_dim)
    if v.shape[0] != shape.num_kv_heads or v.shape[1] != k.shape[1] or v.shape[2] != length:
        wrong_shape("out[1]", v, HTD, shape.num_kv_heads, length, k)
    return owner


cdef object read_rows_out(kvc_layer *shape, object out, int64_t most, bint raw, int64_t *rows, kvc_rows_out *to):
    """Describe the caller's arrays for at most `most` rows of keys and values, and set `rows` to their number.

    Return the objects that keep the arrays' memory.
    """
    cdef Array k, v
    cdef int64_t k_length
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out: a pair of arrays is needed, for keys and values, not {type(out).__name__}")
    k_owner = read_row_array(out[0], "out[0]", shape.k_type, raw, &k)
    k_length = length_of_row(&k, shape.k_dim)
    if k.shape[0] != shape.num_kv_heads or k.shape[2] != k_length:
        wrong_shape("out[0]", &k, HTD, shape.num_kv_heads, k_length)
    v_owner = read_values_out(shape, out[1], out[0], raw, &k, &v)
    if k.shape[1] > most:
        raise ValueError(f"out: for {k.shape[1]} rows, where the sequence has {most} from first on")
    check_writable(&k, "out[0]")
    if shape.v_dim:
        check_writable(&v, "out[1]")
        check_apart(&k, &v, "out[1]")
    rows[0] = k.shape[1]
    fill_rows_out(to, &k, &v, HTD)
    return k_owner, v_owner

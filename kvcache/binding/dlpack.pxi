"""Read arrays of other libraries through DLPack, https://dmlc.github.io/dlpack/latest/c_api.html."""

cdef struct DLTensor:
    void *data
    int32_t device_type
    int32_t device_id
    int32_t ndim
    uint8_t code
    uint8_t bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides  # in elements; NULL: contiguous
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
    DL_UINT = 1
    DL_FLOAT = 2
    DL_BFLOAT = 4
    DL_CPU = 1
    DL_CUDA_HOST = 3  # pinned memory, which the CPU reads as its own
    DL_ROCM_HOST = 11
    DL_READ_ONLY = 1
    DL_COPIED = 2


cdef DLTensor *dltensor(object capsule, str name, uint64_t *flags) except NULL:
    """Return the tensor in a capsule of either version; the capsule owns it. Set `flags` if the capsule has any."""
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
    """Export an array to a capsule.

    A C function of the array's type is used if there is one: five times as fast with PyTorch.
    """
    cdef DLManagedTensorVersioned *managed = NULL
    cdef DLExchangeAPI *api
    table = getattr(type(x), "__dlpack_c_exchange_api__", None)
    if table is not None:
        api = <DLExchangeAPI *>PyCapsule_GetPointer(table, "dlpack_exchange_api")
        if api.major == 1:
            api.from_object(<void *>x, &managed)
            return PyCapsule_New(managed, "dltensor_versioned", free_tensor)
    if write:  # only a versioned capsule says whether the memory may be written
        try:
            return x.__dlpack__(max_version=(1, 0))
        except TypeError:
            pass  # a library older than versions, such as an old PyTorch: the memory may be written
    return x.__dlpack__()


cdef object read_dlpack(object x, str name, int ndim, bint write, Array *a, int32_t stored):
    """Describe an array that exports DLPack, as read_array does; return the capsule, which keeps its memory."""
    cdef uint64_t flags = 0
    cdef int64_t step
    cdef int i
    check_tensor(x, name)
    try:
        capsule = to_capsule(x, write)
    except (BufferError, RuntimeError) as error:  # PyTorch's function in C raises the latter, with a trace of C++
        reason = str(error).partition("\n")[0]
        raise TypeError(f"{name}: a {type(x).__name__} that DLPack cannot export ({reason}); give a dense array of "
                        "float32, float16 or bfloat16 in the CPU's memory") from error
    cdef DLTensor *t = dltensor(capsule, name, &flags)
    if t.device_type != DL_CPU and t.device_type != DL_CUDA_HOST and t.device_type != DL_ROCM_HOST:
        raise ValueError(f"{name}: lies on a device (DLPack type {t.device_type}); copy it to the CPU")
    a.is_raw = t.code == DL_UINT and t.bits == 8 and t.lanes == 1 and stored >= 0
    if a.is_raw:
        a.type = stored
    elif t.code == DL_FLOAT and t.bits == 32 and t.lanes == 1:
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
    step = item_size(a)
    for i in range(ndim - 1, -1, -1):
        if t.shape[i] < 0:
            raise ValueError(f"{name}: axis {i} has the length {t.shape[i]}")
        a.shape[i] = t.shape[i]
        a.strides[i] = step if t.strides == NULL else t.strides[i] * item_size(a)
        step *= a.shape[i]
    if t.data == NULL and step:
        raise ValueError(f"{name}: a {type(x).__name__} without memory: its address is NULL; give its .clone()")
    return capsule

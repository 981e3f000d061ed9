"""What the core calls back: functions that rotate keys, and handlers of signals."""


@cython.final
@cython.no_gc_clear  # the core may call until the cache is freed; other objects break a cycle through a function
cdef class Callbacks:
    """The functions that rotate keys, and what they raised. A cache and its copies share them."""
    cdef list by_layer
    cdef dict raised  # by thread: an exception of such a function, or of a handler of signals

    def __cinit__(self, int32_t num_layers):
        self.by_layer = [None] * num_layers
        self.raised = {}

    cdef void keep_error(self, object error) noexcept:
        """Keep an exception for the call that this thread is in to raise, see Cache.check_call."""
        self.raised[get_ident()] = error

    cdef int rotate_keys(self, int32_t layer, float *keys, int32_t heads, int64_t rows, int32_t dim,
                         int32_t delta) except -1:
        """Rotate keys with the layer's function. It gets a copy, which it may keep."""
        cdef float[:, :, ::1] given = new_array(KVC_F32, 3, heads, rows, dim)
        cdef const float[:, :, ::1] taken
        cdef cnp.ndarray rotated
        cdef size_t size = <size_t>(heads * rows * dim) * sizeof(float)
        memcpy(&given[0, 0, 0], keys, size)
        rotated = np.asarray(self.by_layer[layer](layer, given.base, delta))
        if np.shape(rotated) != (heads, rows, dim):
            raise ValueError(f"rope: the function of layer {layer} returned an array of shape {np.shape(rotated)}, "
                             f"where {(heads, rows, dim)} is needed")
        if rotated.dtype.kind != "f" and not is_bf16(rotated):
            raise TypeError(f"rope: the function of layer {layer} returned elements of type {rotated.dtype}, where "
                            "floating-point numbers are needed")
        taken = np.ascontiguousarray(rotated, np.float32)
        memcpy(keys, &taken[0, 0, 0], size)
        return 0


cdef int32_t shift_keys(void *user, int32_t layer, float *keys, int32_t heads, int64_t rows, int32_t dim,
                        int32_t delta) noexcept with gil:
    cdef Callbacks callbacks = <Callbacks>user
    try:
        callbacks.rotate_keys(layer, keys, heads, rows, dim, delta)
        return 0
    except BaseException as error:
        callbacks.keep_error(error)
    return 1


cdef int32_t handle_signals(void *user) noexcept with gil:
    """Cancel a long call if a handler of signals raises, as that of Ctrl-C does."""
    try:
        PyErr_CheckSignals()  # runs handlers in the main thread only
        return 0
    except BaseException as error:
        (<Callbacks>user).keep_error(error)
    return 1

"""What the core calls: functions that rotate keys, and handlers of signals."""


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

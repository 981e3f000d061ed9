"""Callbacks of the core: functions that rotate keys, and signal handlers."""


@cython.final
@cython.no_gc_clear  # the core may call back until the cache is freed; a cycle through a function breaks elsewhere
cdef class Callbacks:
    """The functions that rotate keys, and the exceptions of callbacks. A cache and its copies share one object."""
    cdef list by_layer
    cdef dict raised  # the exception of a rotation or a signal handler, by thread

    def __cinit__(self, int32_t num_layers):
        self.by_layer = [None] * num_layers
        self.raised = {}

    cdef void keep_error(self, object error) noexcept:
        """Keep an exception that this thread's present call raises when C returns (`check`)."""
        self.raised[threading.get_ident()] = error

    cdef int check(self, kvc_status status) except -1:
        """Check the status of a call that may have called back, and raise what the callback raised."""
        if status == KVC_ERR_CALLBACK or status == KVC_ERR_CANCELLED:
            error = self.raised.pop(threading.get_ident(), None)
            if error is not None:
                raise error
        return check(status)

    cdef int rotate_keys(self, int32_t layer, float *keys, int32_t heads, int64_t rows, int32_t dim,
                         int32_t delta) except -1:
        """Rotate keys with the layer's function, which gets a copy and may keep it."""
        cdef float[:, :, ::1] given = new_array(KVC_F32, 3, heads, rows, dim)
        cdef const float[:, :, ::1] taken
        cdef cnp.ndarray rotated
        cdef size_t size = <size_t>(heads * rows * dim) * sizeof(float)
        memcpy(&given[0, 0, 0], keys, size)
        returned = self.by_layer[layer](layer, given.base, delta)
        check_tensor(returned, f"rope: the function of layer {layer} returned keys")
        rotated = np.asarray(returned)
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


cdef int32_t call_handlers(void *user) noexcept with gil:
    """Call the signal handlers that are due; return 1 if one raises, as Python's handler of Ctrl-C does."""
    try:
        PyErr_CheckSignals()
        return 0
    except BaseException as error:
        (<Callbacks>user).keep_error(error)
    return 1


cdef int32_t handle_signals(void *user) noexcept nogil:
    """Cancel a long call if a signal handler raises; handlers run in the main thread only."""
    # A daemon thread may still wait here when the interpreter is gone, and with it the lock that call_handlers takes.
    return call_handlers(user) if PyThread_get_thread_ident() == main_thread else 0

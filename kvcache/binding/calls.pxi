"""Count the calls that use a handle of the core, so that no other thread frees it meanwhile.

A critical section of the object guards the counter and the handle. If Python has a GIL, the GIL does this.
"""

cdef int32_t num_forks = 0  # how many times fork() was called between the process that imported the module and this one
cdef unsigned long main_thread = threading.main_thread().ident


def _begin_in_child():
    """Count the fork() of the process that made this child, whose only thread is its main one."""
    global num_forks, main_thread
    num_forks += 1
    main_thread = PyThread_get_thread_ident()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


@cython.auto_pickle(False)
cdef class _CallCounter:
    """The number of calls that use the handle of a cache or a batch; enter() of either begins a call.

    Methods whose names begin with "locked" are called in a critical section of the object.
    """

    cdef int32_t calls  # calls that have not reached leave()
    cdef int32_t forks  # num_forks when they began: in a child, calls of the parent's other threads never return
    cdef bint ending  # whether a thread is about to free the handle

    @cython.final
    cdef void locked_count(self) noexcept:
        if self.forks != num_forks:
            self.forks, self.calls = num_forks, 0
        self.calls += 1

    @cython.final
    cdef void count_call(self) noexcept:
        with cython.critical_section(self):
            self.locked_count()

    @cython.final
    cdef void leave(self) noexcept:
        with cython.critical_section(self):
            if self.calls and self.forks == num_forks:
                self.calls -= 1

    @cython.final
    cdef bint locked_in_use(self) noexcept:
        """Whether a call of another thread uses the handle, or is about to free it."""
        return (self.calls and self.forks == num_forks) or self.ending

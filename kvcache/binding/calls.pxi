"""How many calls are in the core, where another thread may free what they use, or a process fork."""

cdef int32_t num_forks = 0  # how many forks lie between this process and the one that imported the module


def _count_fork():
    global num_forks
    num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)

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

include "binding/errors.pxi"
include "binding/numbers.pxi"
include "binding/bfloat16.pxi"
include "binding/layouts.pxi"
include "binding/dlpack.pxi"
include "binding/arrays_in.pxi"
include "binding/arrays_out.pxi"
include "binding/views.pxi"
include "binding/calls.pxi"
include "binding/callbacks.pxi"
include "binding/cache.pxi"
include "binding/batch.pxi"


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

# cython: language_level=3, freethreading_compatible=True
"""The C core for Python: arguments in, arrays out; no logic of its own.

include/kvcache.h documents the functions, and cache.py the classes that users see. The module is one translation unit,
divided by subject: _core.pxd declares the C header, and the parts in binding/ are included below. Three rules hold
throughout:

- A handle is used between enter() and leave(), which count the calls in progress, so that no other thread frees it.
  Only C runs there: nothing that can fail, make an object (which may start the garbage collector), or run other code.
  Arguments are converted before enter(), results are made after leave().
- A call that may wait for the cache's mutex, or takes more than a microsecond, runs without the GIL.
- An answer about a sequence may be out of date after leave(): another thread may have edited the sequence.

Typed memoryviews are used for contiguous arrays of one type. Pointers and strides are used for arrays that memoryviews
cannot describe (bf16, DLPack, any strides).  The arguments of batch(), put() and attend(), which are called at each
step, use them too: taking a memoryview of an array costs half as much as all of batch().
"""

import operator
import os
import threading
import weakref

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyBUF_READ, PyBUF_WRITE
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from cpython.memoryview cimport PyMemoryView_FromMemory
from cpython.object cimport PyTypeObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_INCREF, PyObject
from libc.math cimport INFINITY, ceil, isfinite
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from kvcache.errors import (
    CacheBusyError,
    CacheFullError,
    KVCacheError,
    NotSupportedError,
    RowsGoneError,
    StateFormatError,
)

cnp.import_array()


cdef extern from "Python.h":
    double PyFloat_AsDouble(object number) except? -1.0
    unsigned long PyThread_get_thread_ident() nogil  # Cython's own declaration asks for the GIL


cdef extern from "numpy/arrayobject.h":
    # NumPy's own declaration does not allow NULL.
    object PyArray_NewFromDescr(
        PyTypeObject *subtype, cnp.dtype descr, int ndim, cnp.npy_intp *shape, cnp.npy_intp *strides, void *data,
        int flags, void *prototype)


INT32_MAX = 0x7fffffff
INT64_MAX = 0x7fffffffffffffff
IDS = (-INT64_MAX - 1, INT64_MAX)  # the range of the ids of sequences
MAX_THREADS = 4096
TYPES = {}
while kvc_type_name(len(TYPES)):
    TYPES[kvc_type_name(len(TYPES)).decode()] = len(TYPES)
TRANSFORMS = {None: KVC_TRANSFORM_NONE, "hadamard": KVC_TRANSFORM_HADAMARD}
POLICIES = {
    "full": KVC_FULL, "sliding": KVC_SLIDING, "chunked": KVC_CHUNKED, "cross": KVC_CROSS, "none": KVC_NONE,
}
cdef int64_t _INT32_MAX = 0x7fffffff
cdef int64_t _INT64_MAX = 0x7fffffffffffffff
cdef int64_t _INT64_MIN = -_INT64_MAX - 1
# The largest int32 is no position: as the end of a range it means "to the last position".
cdef int32_t _MAX_POSITION = 0x7ffffffe


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
include "binding/prefix.pxi"
include "binding/stores.pxi"
include "binding/state.pxi"
include "binding/results.pxi"
include "binding/choosing.pxi"
include "binding/weights.pxi"
include "binding/batch.pxi"
include "binding/rows.pxi"


def version():
    return kvc_version()


def build_info():
    return kvc_build_info().decode()


def isa():
    """Return the instruction set in use; None: KVCACHE_ISA names a set that this machine or build lacks."""
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


def threading_layer():
    """Return whose threads calls use; None: KVCACHE_THREADS names a layer that this build lacks."""
    cdef const char *name = kvc_threading_layer()
    return None if name == NULL else name.decode()

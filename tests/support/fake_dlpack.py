"""An array library of one class, for what goes through DLPack and not through NumPy: bf16, devices, versions."""

import ctypes

import numpy as np

FLOAT, BFLOAT = 2, 4  # DLPack's type codes
CPU, CUDA = 1, 2  # its devices
READ_ONLY, COPIED = 1, 2  # its flags


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


PyCapsule_New = ctypes.pythonapi.PyCapsule_New
PyCapsule_New.restype = ctypes.py_object
PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Array:
    """The memory of a NumPy array, under any description; `version` None: the capsules of old."""

    def __init__(self, array, code=None, *, device=CPU, version=None, flags=0, strides=True, byte_offset=0):
        self.array = array
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        self.tensor = Tensor(
            data=array.ctypes.data - byte_offset,
            device_type=device,
            ndim=array.ndim,
            code=FLOAT if code is None else code,
            bits=array.itemsize * 8,
            lanes=1,
            shape=self.shape,
            strides=self.strides if strides else None,
            byte_offset=byte_offset,
        )
        self.version, self.flags = version, flags

    def __dlpack__(self, *, max_version=None):
        if self.version is None:
            self.managed = Managed(tensor=self.tensor)
            return PyCapsule_New(ctypes.addressof(self.managed), b"dltensor", None)
        self.managed = ManagedVersioned(major=self.version, flags=self.flags, tensor=self.tensor)
        return PyCapsule_New(ctypes.addressof(self.managed), b"dltensor_versioned", None)


deleted = []  # addresses of what the deleter below was called for


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def deleter(managed):
    deleted.append(managed)


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
def from_object(array, out):
    array.managed = ManagedVersioned(major=1, flags=array.flags, tensor=array.tensor)
    array.managed.deleter = ctypes.cast(deleter, ctypes.c_void_p).value
    out[0] = ctypes.addressof(array.managed)
    return 0


class ExchangeAPI(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
    )


class FastArray(Array):
    """Has its memory shared by a function in C."""

    _table = ExchangeAPI(major=1, from_object=ctypes.cast(from_object, ctypes.c_void_p).value)
    _name = b"dlpack_exchange_api"  # a capsule does not keep its name
    __dlpack_c_exchange_api__ = PyCapsule_New(ctypes.addressof(_table), _name, None)
    __dlpack__ = None


def bf16(values, **options):
    """An array of bf16, rounded towards zero."""
    bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return Array(bits, BFLOAT, **options)

"""bf16, a type that NumPy does not have."""

cdef cnp.dtype bf16_dtype = None
cdef int bf16_typenum = -1  # of ml_dtypes.bfloat16, once it was imported


cdef cnp.dtype find_bf16():
    """Return ml_dtypes.bfloat16 if it is installed, else two bytes, with which NumPy does not calculate."""
    global bf16_dtype, bf16_typenum
    if bf16_dtype is None:
        try:
            from ml_dtypes import bfloat16
        except ImportError:
            bf16_dtype = np.dtype("V2")
        else:
            bf16_dtype = np.dtype(bfloat16)
            bf16_typenum = bf16_dtype.num
    return bf16_dtype


cdef bint is_bf16(cnp.ndarray x):
    return x.dtype == find_bf16() and (bf16_typenum >= 0 or isinstance(x, BFloat16Array))


class BFloat16Array(np.ndarray):
    """A NumPy array of bf16 that also goes out through DLPack, for example to `torch.from_dlpack`.

    Its dtype is ``ml_dtypes.bfloat16`` where ml_dtypes is installed. Elsewhere it is ``V2``: shape, strides and indices
    work, calculating does not; ``view("uint16")`` has the bits.
    """

    def __dlpack__(self, **options):
        if self.dtype != bf16_dtype:  # what NumPy computes from such an array has the same class
            return super().__dlpack__(**options)
        # NumPy exports the bits as uint16. Nobody else has seen the new capsule yet, so its type may be changed.
        capsule = self.view(np.ndarray).view(np.uint16).__dlpack__(**options)
        dltensor(capsule, "self", NULL).code = DL_BFLOAT
        return capsule

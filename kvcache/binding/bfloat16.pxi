"""Arrays of bf16, a type that NumPy does not have."""

cdef cnp.dtype bf16_dtype = None
cdef int bf16_typenum = -1  # NumPy's number for ml_dtypes.bfloat16, once that was imported


cdef cnp.dtype find_bf16():
    """Return ml_dtypes.bfloat16 if that is installed, else a type of two bytes, which NumPy cannot calculate with."""
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
        if self.dtype != bf16_dtype:  # results that NumPy computes from a BFloat16Array have this class too
            return super().__dlpack__(**options)
        # NumPy exports the bits as uint16. No consumer has seen the new capsule yet, so its type may be changed.
        capsule = self.view(np.ndarray).view(np.uint16).__dlpack__(**options)
        dltensor(capsule, "self", NULL).code = DL_BFLOAT
        return capsule

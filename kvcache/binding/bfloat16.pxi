"""bf16, which NumPy does not know."""

cdef cnp.dtype bf16_dtype = None
cdef int bf16_typenum = -1  # of ml_dtypes, once it was met


cdef cnp.dtype find_bf16():
    """ml_dtypes.bfloat16 where that is installed, else two bytes that NumPy will not calculate with."""
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
        if self.dtype != bf16_dtype:  # NumPy hands the class on to what is computed from such an array
            return super().__dlpack__(**options)
        # NumPy does the work, for the same bits; the capsule is new and nobody else's, so that it can be relabelled.
        capsule = self.view(np.ndarray).view(np.uint16).__dlpack__(**options)
        dltensor(capsule, "self", NULL).code = DL_BFLOAT
        return capsule

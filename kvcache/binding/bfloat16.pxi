"""Arrays of bf16, a type that NumPy does not have."""

cdef cnp.dtype bf16_dtype = None  # written once, in a critical section of BFloat16Array; so is the next one
cdef int bf16_typenum = -1  # NumPy's number for ml_dtypes.bfloat16, once that was imported


cdef cnp.dtype find_bf16():
    """Return ml_dtypes.bfloat16 if that is installed, else a type of two bytes, which NumPy cannot calculate with."""
    global bf16_dtype, bf16_typenum
    with cython.critical_section(BFloat16Array):
        if bf16_dtype is not None:
            return bf16_dtype
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        bfloat16 = None
    found = np.dtype("V2" if bfloat16 is None else bfloat16)
    number = -1 if bfloat16 is None else found.num
    with cython.critical_section(BFloat16Array):
        if bf16_dtype is None:
            bf16_dtype, bf16_typenum = found, number
        return bf16_dtype


cdef bint is_bf16(cnp.ndarray x):
    cdef cnp.dtype bf16 = find_bf16()
    if bf16_typenum >= 0:
        return cnp.PyArray_TYPE(x) == bf16_typenum
    return x.dtype == bf16 and isinstance(x, BFloat16Array)


class BFloat16Array(np.ndarray):
    """A NumPy array of bf16 that also goes out through DLPack, for example to `torch.from_dlpack`.

    Its dtype is ``ml_dtypes.bfloat16`` where ml_dtypes is installed. Elsewhere it is ``V2``: shape, strides and indices
    work, calculating does not; ``view("uint16")`` has the bits.
    """

    def __dlpack__(self, **options):
        if self.dtype != find_bf16():  # results that NumPy computes from a BFloat16Array have this class too
            return super().__dlpack__(**options)
        # NumPy exports the bits as uint16. No consumer has seen the new capsule yet, so its type may be changed.
        capsule = self.view(np.ndarray).view(np.uint16).__dlpack__(**options)
        dltensor(capsule, "self", NULL).code = DL_BFLOAT
        return capsule

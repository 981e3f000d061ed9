"""Convert argument numbers, or raise an error that names the argument."""

cdef str show(object value):
    """Quote a value for an error message: repr() may fail, and may fill the screen."""
    try:
        text = repr(value)
    except Exception:  # for example of an int of thousands of digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else f"{text[:57]}..."


cdef object to_index(object value, str name):
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value}: an integer is needed, not a truth value")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={show(value)}: an integer is needed, not {type(value).__name__}") from None


cdef bint is_plain(object value, int64_t low, int64_t high, int64_t *number) noexcept:
    """Convert an int in [low, high], the usual argument, quickly; return False for anything else."""
    cdef int overflow = 0
    if not PyLong_CheckExact(value):
        return False
    number[0] = PyLong_AsLongLongAndOverflow(value, &overflow)
    return not overflow and low <= number[0] <= high


cdef int64_t to_int(object value, str name, int64_t low, int64_t high) except? -1:
    cdef int64_t number
    if is_plain(value, low, high, &number):
        return number
    value = to_index(value, name)
    if value < low:
        raise ValueError(f"{name}={show(value)}: must be at least {low}")
    if value > high:
        raise ValueError(f"{name}={show(value)}: must be at most {high}")
    return value


cdef int32_t to_layer(object value, int32_t num_layers) except -1:
    cdef int64_t number
    if is_plain(value, 0, num_layers - 1, &number):
        return <int32_t>number
    value = to_index(value, "layer")
    if not 0 <= value < num_layers:
        raise IndexError(f"layer={show(value)}: the layers are 0 to {num_layers - 1}")
    return value


cdef inline int64_t to_seq_id(object value, str name="seq_id") except? -1:
    return to_int(value, name, _INT64_MIN, _INT64_MAX)


cdef inline int32_t to_position(object value, str name, int32_t least=0) except -1:
    return <int32_t>to_int(value, name, least, _INT32_MAX)


cdef inline int32_t to_end(object value, int32_t begin) except -1:
    """Convert the end of a range of positions; None: behind the last position."""
    return KVC_END if value is None else to_position(value, "end", begin)


cdef float to_factor(object value, str name, bint positive) except? -1:
    """Convert a number for an argument of which C takes 0 as "the default"."""
    cdef float number
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = <float>PyFloat_AsDouble(value)
    except TypeError:
        raise TypeError(f"{name}={show(value)}: a number or None is needed, not {type(value).__name__}") from None
    except OverflowError:  # an int beyond all floats
        number = INFINITY
    if not isfinite(number) or number == 0 or (positive and number < 0):
        what = "above 0" if positive else "other than 0"
        raise ValueError(f"{name}={show(value)}: must be a finite f32 number {what}; None asks for the default")
    return number


cdef int64_t to_timeout(object value) except? -2:
    """Convert seconds to milliseconds, rounded up; None: -1, which is without end."""
    cdef int64_t number
    cdef double seconds
    if value is None:
        return -1
    if is_plain(value, 0, _INT32_MAX, &number):
        return number * 1000
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        seconds = PyFloat_AsDouble(value)
    except TypeError:
        what = type(value).__name__
        raise TypeError(f"timeout={show(value)}: a number of seconds or None is needed, not {what}") from None
    except OverflowError:
        raise ValueError(f"timeout={show(value)}: is beyond the range of floats; None waits without end") from None
    if not seconds >= 0:
        raise ValueError(f"timeout={show(value)}: must be a number of seconds of at least 0; None waits without end")
    return <int64_t>ceil(seconds * 1000) if seconds < 1e15 else -1


_MANY = 64  # integers of an array from which on NumPy checks them faster


cdef cnp.ndarray to_int_array(object values, str name, int typenum, int64_t low, int64_t high, int64_t least=1):
    """Copy an iterable of at least `least` integers in [low, high] to a new, read-only array."""
    cdef cnp.npy_intp size, i
    cdef int64_t number
    cdef cnp.ndarray array
    if isinstance(values, np.ndarray):
        if values.ndim == 1 and values.dtype.kind in "iu" and values.size >= max(least, _MANY) and (
            low <= int(values.min()) and int(values.max()) <= high
        ):
            array = values.astype(cnp.PyArray_DescrFromType(typenum))
            array.flags.writeable = False
            return array
        values = values.tolist()
    try:
        values = list(values)
    except TypeError:
        what = type(values).__name__
        raise TypeError(f"{name}={show(values)}: a sequence of integers is needed, not {what}") from None
    size = to_int(len(values), f"len({name})", least, _INT32_MAX)
    array = cnp.PyArray_EMPTY(1, &size, typenum, 0)
    for i in range(size):
        if not is_plain(values[i], low, high, &number):
            number = to_int(values[i], f"{name}[{i}]", low, high)
        if typenum == cnp.NPY_INT32:
            (<int32_t *>cnp.PyArray_DATA(array))[i] = <int32_t>number
        else:
            (<int64_t *>cnp.PyArray_DATA(array))[i] = number
    array.flags.writeable = False
    return array


cpdef bint flag(value, str name) except -1:
    """Return a truth value, or raise a TypeError that says `name`."""
    if value is not True and value is not False and not isinstance(value, np.bool_):
        raise TypeError(f"{name}={show(value)}: must be True or False")
    return bool(value)


def integers(values, str name not None):
    """Return `values`, any number of 64-bit integers, as an array, or raise a TypeError or ValueError with `name`."""
    return to_int_array(values, name, cnp.NPY_INT64, _INT64_MIN, _INT64_MAX, 0)


def integer(value, str name, int64_t low, int64_t high):
    """Return `value` as an int in [low, high], or raise a TypeError or ValueError that says `name`."""
    return to_int(value, name, low, high)

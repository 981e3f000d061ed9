"""Open files on Windows as POSIX does, by a path of any letters: ``_winapi.CreateFile`` of CPython 3.11 takes ASCII."""

cdef extern from *:
    """
    #if defined(_WIN32)
    #include <windows.h>
    #endif

    static size_t open_handle(PyObject *path, unsigned long access, unsigned long how) {
    #if defined(_WIN32)
        const DWORD shared = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
        const DWORD itself = FILE_FLAG_OPEN_REPARSE_POINT | FILE_FLAG_BACKUP_SEMANTICS;
        wchar_t *wide = PyUnicode_AsWideCharString(path, NULL);
        HANDLE handle;
        DWORD error;
        if (!wide) return 0;
        Py_BEGIN_ALLOW_THREADS
        handle = CreateFileW(wide, access, shared, NULL, how, itself, NULL);
        error = GetLastError();
        Py_END_ALLOW_THREADS
        PyMem_Free(wide);
        if (handle != INVALID_HANDLE_VALUE) return (size_t)handle;
        PyErr_SetExcFromWindowsErrWithFilenameObject(PyExc_OSError, (int)error, path);
    #else
        (void)path, (void)access, (void)how;
        PyErr_SetString(PyExc_NotImplementedError, "open_shared is for Windows");
    #endif
        return 0;
    }
    """
    size_t open_handle(object path, unsigned long access, unsigned long how) except 0


def open_shared(str path not None, unsigned long access, unsigned long how):
    """Return the handle of a file that others may read, write, rename and remove meanwhile. Follow no link."""
    return open_handle(path, access, how)

/* unistd.h: what POSIX has in it and Windows lacks, for the tests in C. */
#include_next <unistd.h>

#ifndef TEST_WINDOWS_UNISTD_H
#define TEST_WINDOWS_UNISTD_H

#include <stdlib.h>
#include <windows.h>

enum { _SC_PAGESIZE };

static inline long sysconf(int name) {
    SYSTEM_INFO info;
    (void)name;
    GetSystemInfo(&info);
    return (long)info.dwPageSize;
}

/* It is never called: test.h says that Windows has no fork(). */
static inline pid_t fork(void) { abort(); }

static DWORD WINAPI end_late(void *seconds) {
    Sleep((DWORD)(uintptr_t)seconds * 1000);
    _exit(14);
}

/* Ends the process after so many seconds. */
static inline unsigned alarm(unsigned seconds) {
    CloseHandle(CreateThread(NULL, 0, end_late, (void *)(uintptr_t)seconds, 0, NULL));
    return 0;
}

/* Removes a folder, whose path is UTF-8 of any length. */
static inline int remove_folder(const char *path) {
    wchar_t wide[2000], full[2000] = L"\\\\?\\";
    if (!MultiByteToWideChar(CP_UTF8, 0, path, -1, wide, 2000) || !GetFullPathNameW(wide, 1990, full + 4, NULL))
        return -1;
    return RemoveDirectoryW(full) ? 0 : -1;
}

#undef rmdir
#define rmdir remove_folder

static inline int link(const char *from, const char *to) { return CreateHardLinkA(to, from, NULL) ? 0 : -1; }

#endif

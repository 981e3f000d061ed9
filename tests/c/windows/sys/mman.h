/* sys/mman.h: pages of memory, for the tests in C. */
#ifndef TEST_WINDOWS_MMAN_H
#define TEST_WINDOWS_MMAN_H

#include <stddef.h>
#include <sys/types.h>
#include <windows.h>

enum { PROT_NONE = PAGE_NOACCESS, PROT_READ = PAGE_READWRITE, PROT_WRITE = PAGE_READWRITE };
enum { MAP_PRIVATE, MAP_ANONYMOUS };
#define MAP_FAILED NULL

static inline void *mmap(void *at, size_t size, int protection, int flags, int file, off_t offset) {
    (void)flags, (void)file, (void)offset;
    return VirtualAlloc(at, size, MEM_RESERVE | MEM_COMMIT, (DWORD)protection);
}

static inline int munmap(void *p, size_t size) {
    (void)size;
    return VirtualFree(p, 0, MEM_RELEASE) ? 0 : -1;
}

static inline int mprotect(void *p, size_t size, int protection) {
    DWORD before;
    return VirtualProtect(p, size, (DWORD)protection, &before) ? 0 : -1;
}

#endif

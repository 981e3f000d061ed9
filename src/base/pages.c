/* pages.c: maps, returns (drops), collapses and takes pages of the operating system.  To collapse pages is to make one
 * huge page of them. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* declares MAP_ANONYMOUS and madvise */
#endif
#include "base/pages.h"

#include <stdatomic.h>
#include <stdint.h>

#include "base/align.h"

#if defined(_WIN32)

#include <windows.h>

static size_t ask_page_size(void) {
    SYSTEM_INFO info;
    GetSystemInfo(&info);
    return info.dwPageSize;
}

/* Large pages are left alone: they take their memory at once, and return none of it. */
void *kvc_pages_map(size_t size) {
    const size_t slack = size >= KVC_HUGE_PAGE ? KVC_HUGE_PAGE : 0;
    if (size > SIZE_MAX - KVC_HUGE_PAGE) return NULL;
    char *p = VirtualAlloc(NULL, size + slack, MEM_RESERVE, PAGE_READWRITE); /* addresses alone */
    if (!p) return NULL;
    void *begin = slack ? (void *)kvc_align_up((uintptr_t)p, KVC_HUGE_PAGE) : p;
    if (VirtualAlloc(begin, size, MEM_COMMIT, PAGE_READWRITE)) return begin;
    VirtualFree(p, 0, MEM_RELEASE);
    return NULL;
}

void kvc_pages_unmap(void *p, size_t size) {
    MEMORY_BASIC_INFORMATION info;
    (void)size;
    if (VirtualQuery(p, &info, sizeof info)) VirtualFree(info.AllocationBase, 0, MEM_RELEASE);
}

/* Resets the pages, and has them leave the process by unlocking what was not locked. */
void kvc_pages_drop(void *p, size_t size) {
    if (VirtualAlloc(p, size, MEM_RESET, PAGE_READWRITE)) VirtualUnlock(p, size);
}

int kvc_pages_collapse(void *p, size_t size) { return (void)p, (void)size, 0; }
int kvc_pages_take(void *p, size_t size) { return (void)p, (void)size, 0; }

#else

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t ask_page_size(void) { return (size_t)sysconf(_SC_PAGESIZE); }

void *kvc_pages_map(size_t size) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
    flags |= MAP_NORESERVE; /* a long contiguous cache may exceed the memory of the machine */
#endif
    const size_t page = kvc_os_page_size(), slack = size >= KVC_HUGE_PAGE ? KVC_HUGE_PAGE - page : 0;
    const size_t used = (size_t)kvc_align_up(size, page);
    char *p = mmap(NULL, used + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = slack ? (size_t)kvc_align_up((uintptr_t)p, KVC_HUGE_PAGE) - (uintptr_t)p : 0;
    if (before) munmap(p, before); /* cuts off what lies before the aligned begin, and behind the size asked for */
    if (slack - before) munmap(p + before + used, slack - before);
    return p + before;
}

void kvc_pages_unmap(void *p, size_t size) { munmap(p, size); }

void kvc_pages_drop(void *p, size_t size) {
#if defined(__APPLE__)
    madvise(p, size, MADV_FREE); /* MADV_DONTNEED keeps contents there, and with them the memory */
#else
    madvise(p, size, MADV_DONTNEED);
#endif
}

int kvc_pages_collapse(void *p, size_t size) {
#if defined(__linux__)
    enum { COLLAPSE = 25 }; /* MADV_COLLAPSE, which older headers lack and older systems refuse */
    return madvise(p, size, COLLAPSE) == 0;
#else
    return (void)p, (void)size, 0;
#endif
}

int kvc_pages_take(void *p, size_t size) {
#if defined(__linux__)
    enum { POPULATE_WRITE = 23 }; /* MADV_POPULATE_WRITE */
    const size_t before = (uintptr_t)p % kvc_os_page_size();
    return madvise((char *)p - before, size + before, POPULATE_WRITE) == 0 || errno != EINVAL;
#else
    return (void)p, (void)size, 0;
#endif
}

#endif

size_t kvc_os_page_size(void) {
    static atomic_size_t known; /* every thread stores the same value */
    size_t size = atomic_load_explicit(&known, memory_order_relaxed);
    if (!size) {
        size = ask_page_size();
        atomic_store_explicit(&known, size, memory_order_relaxed);
    }
    return size;
}

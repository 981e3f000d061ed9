#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#endif
#include "memory.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "status.h"

#if defined(_WIN32)
#include <malloc.h>
#else
#include <sys/mman.h>
#include <unistd.h>
#endif

/* Blocks of at least this size are mapped: they take memory as it is touched, and can give pages back. */
static const size_t MAPPED_SIZE = (size_t)256 << 10;

static int is_mapped(size_t size, const kvc_memory_hint *hint) {
#if defined(_WIN32)
    (void)size, (void)hint;
    return 0;
#else
    return hint->kind == KVC_MEMORY_ROWS && size >= MAPPED_SIZE;
#endif
}

#if !defined(_WIN32)
/* Where huge pages fit in, at the beginning of one: what is too much on both sides goes back. */
static void *map_aligned(size_t size, int flags) {
    const size_t page = kvc_os_page_size(), slack = size >= KVC_HUGE_PAGE ? KVC_HUGE_PAGE - page : 0;
    if (size > SIZE_MAX - KVC_HUGE_PAGE) return NULL;
    const size_t used = kvc_align_up(size, page);
    char *p = mmap(NULL, used + slack, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return NULL;
    const size_t before = slack ? kvc_align_up((uintptr_t)p, KVC_HUGE_PAGE) - (uintptr_t)p : 0;
    if (before) munmap(p, before);
    if (slack - before) munmap(p + before + used, slack - before);
    return p + before;
}
#endif

static void *default_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user;
#if defined(_WIN32)
    (void)hint;
    return _aligned_malloc(size, alignment);
#else
    if (is_mapped(size, hint)) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#if defined(MAP_NORESERVE)
        flags |= MAP_NORESERVE; /* a long contiguous cache may be larger than the memory there is */
#endif
        return map_aligned(size, flags);
    }
    if (alignment <= _Alignof(max_align_t)) return malloc(size); /* aligning costs bytes that nobody counts */
    return size > SIZE_MAX - alignment ? NULL : aligned_alloc(alignment, kvc_align_up(size, alignment));
#endif
}

static void default_free(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)user;
#if defined(_WIN32)
    (void)size, (void)hint;
    _aligned_free(memory);
#else
    if (is_mapped(size, hint))
        munmap(memory, size);
    else
        free(memory);
#endif
}

#if defined(_WIN32)
#define default_purge NULL
#else
static void default_purge(void *user, void *memory, size_t size) {
    (void)user;
    madvise(memory, size, MADV_DONTNEED);
}
#endif

static const kvc_allocator DEFAULT_ALLOCATOR = {sizeof(kvc_allocator), NULL, default_alloc, default_free,
                                                default_purge};

kvc_status kvc_memory_init(kvc_memory *memory, const kvc_allocator *allocator) {
    *memory = (kvc_memory){.allocator = DEFAULT_ALLOCATOR};
    if (!allocator) return KVC_OK;
    if (allocator->struct_size < sizeof(kvc_allocator))
        return kvc_fail(KVC_ERR_INVALID, "allocator->struct_size is %zu: set it to sizeof(kvc_allocator), %zu",
                        allocator->struct_size, sizeof(kvc_allocator));
    if (!allocator->alloc || !allocator->free)
        return kvc_fail(KVC_ERR_INVALID, "allocator->alloc and allocator->free must not be NULL");
    memory->allocator = *allocator;
    return KVC_OK;
}

void *kvc_memory_alloc(kvc_memory *memory, size_t size, kvc_memory_kind kind, int32_t group) {
    const kvc_memory_hint hint = {(int32_t)kind, group, 0, INT32_MAX};
    const size_t alignment = kind == KVC_MEMORY_BOOKKEEPING ? _Alignof(max_align_t) : KVC_CACHE_LINE;
    void *p = memory->allocator.alloc(memory->allocator.user, size, alignment, &hint);
    if (p && kind == KVC_MEMORY_BOOKKEEPING) memory->bookkeeping += (int64_t)size;
    return p;
}

void kvc_memory_free(kvc_memory *memory, void *p, size_t size, kvc_memory_kind kind, int32_t group) {
    if (!p) return;
    const kvc_memory_hint hint = {(int32_t)kind, group, 0, INT32_MAX};
    if (kind == KVC_MEMORY_BOOKKEEPING) memory->bookkeeping -= (int64_t)size;
    memory->allocator.free(memory->allocator.user, p, size, &hint);
}

void *kvc_memory_resize(kvc_memory *memory, void *p, size_t used, size_t old_size, size_t new_size) {
    void *moved = kvc_memory_alloc(memory, new_size, KVC_MEMORY_BOOKKEEPING, -1);
    if (!moved) return NULL;
    if (used) memcpy(moved, p, used);
    kvc_memory_free(memory, p, old_size, KVC_MEMORY_BOOKKEEPING, -1);
    return moved;
}

size_t kvc_os_page_size(void) {
#if defined(_WIN32)
    return 4096;
#else
    static atomic_size_t known; /* the same whoever finds out first */
    size_t size = atomic_load_explicit(&known, memory_order_relaxed);
    if (!size) {
        size = (size_t)sysconf(_SC_PAGESIZE);
        atomic_store_explicit(&known, size, memory_order_relaxed);
    }
    return size;
#endif
}

void kvc_memory_purge(kvc_memory *memory, void *p, size_t size) {
    if (!memory->allocator.purge) return;
    const size_t page = kvc_os_page_size();
    const uintptr_t begin = kvc_align_up((uintptr_t)p, page), end = ((uintptr_t)p + size) / page * page;
    if (begin < end) memory->allocator.purge(memory->allocator.user, (void *)begin, end - begin);
}

void kvc_memory_join(kvc_memory *memory, void *p, size_t size) {
#if defined(__linux__)
    /* Unlike advice given beforehand, this takes no memory for what is not written yet.  Older systems refuse. */
    enum { COLLAPSE = 25 }; /* MADV_COLLAPSE, which older headers lack */
    if (memory->allocator.alloc == default_alloc) madvise(p, size, COLLAPSE);
#else
    (void)memory, (void)p, (void)size;
#endif
}

int kvc_memory_is_lazy(const kvc_memory *memory, size_t size) { return memory->allocator.purge && size >= MAPPED_SIZE; }

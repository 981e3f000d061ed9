/* memory.c: makes every allocation of a cache, and counts it.  Has the default allocator, too.  Memory is for rows, for
 * bookkeeping, or scratch (kvc_memory_kind).  The default allocator has large blocks of rows in slabs, which are mapped
 * and lazy: the system gives them memory only as it is touched. */
#include "base/memory.h"

#include <stddef.h>
#include <stdlib.h>

#include "base/structs.h"

#if defined(_WIN32)
#include <malloc.h>
#endif

/* Blocks of at least this size take memory only as it is touched, and can return pages.  The default allocator places
 * them side by side in slabs. */
static const size_t LAZY_SIZE = (size_t)256 << 10, DEFAULT_LAZY_SIZE = (size_t)128 << 10;

static void *default_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    (void)user, (void)hint;
#if defined(_WIN32)
    return _aligned_malloc(size, alignment);
#else
    if (alignment <= _Alignof(max_align_t)) return malloc(size); /* aligned_alloc takes more memory than is counted */
    return aligned_alloc(alignment, (size_t)kvc_align_up(size, alignment));
#endif
}

static void default_free(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

static void default_purge(void *user, void *memory, size_t size) {
    (void)user;
    kvc_pages_drop(memory, size);
}

static const kvc_allocator DEFAULT_ALLOCATOR = {sizeof(kvc_allocator), NULL, default_alloc, default_free,
                                                default_purge};

kvc_status kvc_memory_init(kvc_memory *memory, const kvc_allocator *allocator) {
    *memory = (kvc_memory){.allocator = DEFAULT_ALLOCATOR};
    if (!allocator) return KVC_OK;
    const kvc_status status = KVC_READ(kvc_allocator, &memory->allocator, allocator, "allocator");
    if (status == KVC_OK && (!memory->allocator.alloc || !memory->allocator.free))
        return kvc_fail(KVC_ERR_INVALID, "allocator->alloc and allocator->free must not be NULL");
    return status;
}

static int is_default(const kvc_memory *memory) { return memory->allocator.alloc == default_alloc; }

/* Whether a block of this size lies in a slab. */
static int is_in_slab(const kvc_memory *memory, uint64_t size, kvc_memory_kind kind) {
    return is_default(memory) && kind == KVC_MEMORY_ROWS && size >= DEFAULT_LAZY_SIZE;
}

void *kvc_memory_alloc(kvc_memory *memory, uint64_t size, kvc_memory_kind kind, int32_t group) {
    if (size > PTRDIFF_MAX - KVC_HUGE_PAGE) return NULL; /* leaves room for alignment */
    if (is_in_slab(memory, size, kind)) return kvc_slab_take(&memory->slabs, (size_t)size);
    const kvc_memory_hint hint = {sizeof hint, (int32_t)kind, group};
    const size_t alignment = kind == KVC_MEMORY_BOOKKEEPING ? _Alignof(max_align_t) : KVC_CACHE_LINE;
    void *p = memory->allocator.alloc(memory->allocator.user, (size_t)size, alignment, &hint);
    if (p && kind == KVC_MEMORY_BOOKKEEPING) memory->bookkeeping += (int64_t)size;
    return p; // cppcheck-suppress returnDanglingLifetime ; the allocator keeps no hint
}

void kvc_memory_free(kvc_memory *memory, void *p, uint64_t size, kvc_memory_kind kind, int32_t group) {
    if (!p) return;
    if (is_in_slab(memory, size, kind)) {
        kvc_slab_give(&memory->slabs, p);
        return;
    }
    const kvc_memory_hint hint = {sizeof hint, (int32_t)kind, group};
    if (kind == KVC_MEMORY_BOOKKEEPING) memory->bookkeeping -= (int64_t)size;
    memory->allocator.free(memory->allocator.user, p, (size_t)size, &hint);
}

void kvc_memory_purge(kvc_memory *memory, void *p, size_t size) {
    if (!memory->allocator.purge) return;
    const size_t page = kvc_os_page_size();
    const uintptr_t begin = (uintptr_t)kvc_align_up((uintptr_t)p, page), end = ((uintptr_t)p + size) / page * page;
    if (begin < end) memory->allocator.purge(memory->allocator.user, (void *)begin, end - begin);
}

int kvc_memory_collapses(const kvc_memory *memory, size_t size) { return is_in_slab(memory, size, KVC_MEMORY_ROWS); }

void kvc_memory_mark(kvc_memory *memory, void *p, int is_written) { kvc_slab_mark(&memory->slabs, p, is_written); }

int kvc_memory_fills(kvc_memory *memory, const void *p) { return kvc_slab_fills(&memory->slabs, p); }

int kvc_memory_is_busy(const kvc_memory *memory, const uint8_t *p, size_t size) {
    const kvc_page_work *work = memory->works;
    while (work && !(work->size && p < work->p + work->size && work->p < p + size)) work = work->next;
    return work != NULL;
}

int kvc_memory_is_lazy(const kvc_memory *memory, size_t size) {
    return memory->allocator.purge && size >= (is_default(memory) ? DEFAULT_LAZY_SIZE : LAZY_SIZE);
}

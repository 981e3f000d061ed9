/* memory.h: where memory comes from, and how much there is of it. */
#ifndef KVC_MEMORY_H
#define KVC_MEMORY_H

#include "kvcache.h"
#include "base/pages.h"
#include "base/slab.h"

enum { KVC_CACHE_LINE = 64 };

/* Memory whose pages a call takes, or makes huge, without the mutex: meanwhile it is neither freed nor purged. */
typedef struct kvc_page_work {
    struct kvc_page_work *next;
    uint8_t *p;
    size_t size; /* 0: none just now */
} kvc_page_work;

typedef struct kvc_memory {
    kvc_allocator allocator;
    int64_t bookkeeping; /* bytes */
    int64_t replaced;    /* of these, lists that longer ones are ready to take the place of */
    kvc_slab *slabs;     /* of the default allocator */
    kvc_page_work *works;
} kvc_memory;

/* allocator NULL: the C library, and the operating system's pages for what is large. */
kvc_status kvc_memory_init(kvc_memory *memory, const kvc_allocator *allocator);

/* Not cleared, aligned to a cache line unless it is bookkeeping; NULL if there is none.  Sizes have 64 bits wherever
 * they are computed from how many there are of something, so that none wraps around where addresses have 32. */
void *kvc_memory_alloc(kvc_memory *memory, uint64_t size, kvc_memory_kind kind, int32_t group);
void kvc_memory_free(kvc_memory *memory, void *p, uint64_t size, kvc_memory_kind kind, int32_t group);

/* Gives the whole OS pages within [p, p + size) back; they stay addressable and lose their contents. */
void kvc_memory_purge(kvc_memory *memory, void *p, size_t size);

/* [p, p + size), or a block at p that is smaller than a huge page, is written and stays.  Makes whole huge pages of it,
 * or of several such blocks side by side, the work that kvc_pages_join is to do; 0: there are none.  Then rows are
 * read faster, as fewer addresses have to be looked up. */
int kvc_memory_written(kvc_memory *memory, uint8_t *p, size_t size, kvc_page_work *work);

/* Whether some call works on pages of [p, p + size); on any at all. */
int kvc_memory_is_busy(const kvc_memory *memory, const uint8_t *p, size_t size);
int kvc_memory_any_busy(const kvc_memory *memory);

/* The block at p is about to be purged in part. */
void kvc_memory_part(kvc_memory *memory, void *p);

/* Whether a block of this size takes memory only as it is touched, and can give it back page by page. */
int kvc_memory_is_lazy(const kvc_memory *memory, size_t size);

static inline uint64_t kvc_align_up(uint64_t size, size_t alignment) {
    return (size + alignment - 1) / alignment * alignment;
}

/* Lays an array of `bytes` bytes behind the *size bytes that an allocation has so far; returns where it begins. */
static inline uint64_t kvc_add_array(uint64_t *size, uint64_t bytes) {
    const uint64_t at = kvc_align_up(*size, KVC_CACHE_LINE);
    *size = at + bytes;
    return at;
}

#endif

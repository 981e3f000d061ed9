/* memory.h: makes every allocation of a cache, through the caller's allocator or the default one, and counts it. */
#ifndef KVC_MEMORY_H
#define KVC_MEMORY_H

#include "base/align.h"
#include "base/compiler.h"
#include "base/pages.h"
#include "base/slab.h"
#include "kvcache.h"

/* Pages that a call faults in or collapses into huge pages without holding the mutex.  Until it has ended, they are
 * neither freed nor purged. */
typedef struct kvc_page_work {
    struct kvc_page_work *next;
    uint8_t *p;
    size_t size; /* 0 while the call is between two steps */
} kvc_page_work;

typedef struct kvc_memory {
    kvc_allocator allocator;
    int64_t bookkeeping;  /* bytes allocated as KVC_MEMORY_BOOKKEEPING */
    kvc_slab *slabs;      /* slabs of the default allocator */
    kvc_page_work *works; /* list of the work on pages that is going on */
} kvc_memory;

/* Sets the allocator.  NULL: the default one, which uses the C library, and OS pages for large blocks. */
kvc_status kvc_memory_init(kvc_memory *memory, const kvc_allocator *allocator);

/* Frees memory that was allocated with this size, kind and group; NULL is allowed. */
void kvc_memory_free(kvc_memory *memory, void *p, uint64_t size, kvc_memory_kind kind, int32_t group);

/* Allocates without clearing, aligned to a cache line unless it is bookkeeping; NULL if memory is exhausted.  Callers
 * compute sizes from counts in 64 bits, so that none wraps around on 32-bit machines. */
KVC_FREED_BY(kvc_memory_free, 2)
void *kvc_memory_alloc(kvc_memory *memory, uint64_t size, kvc_memory_kind kind, int32_t group);

/* Returns the whole OS pages within [p, p + size) to the system; they stay addressable and lose their contents. */
void kvc_memory_purge(kvc_memory *memory, void *p, size_t size);

/* Returns whether pages of blocks of this size may be collapsed: of the default allocator's blocks alone, in slabs. */
int kvc_memory_collapses(const kvc_memory *memory, size_t size);

/* Records whether the block of rows at p is written as a whole.  Call it with 0 before purging a part of it. */
void kvc_memory_mark(kvc_memory *memory, void *p, int is_written);

/* Returns whether written blocks, side by side, fill the huge page at p. */
int kvc_memory_fills(kvc_memory *memory, const void *p);

/* Whether some call works on pages of [p, p + size). */
int kvc_memory_is_busy(const kvc_memory *memory, const uint8_t *p, size_t size);

/* Whether a block of this size takes memory only as it is touched, and can return it page by page. */
int kvc_memory_is_lazy(const kvc_memory *memory, size_t size);

#endif

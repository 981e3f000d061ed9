/* memory.h: an allocator that can be told to fail, and that notes what it handed out. */
#ifndef KVC_TEST_MEMORY_H
#define KVC_TEST_MEMORY_H

#include <stdlib.h>
#include <string.h>

#include "kvcache.h"
#include "support/test.h"

enum { MAX_ALLOCATIONS = 4096 };

typedef struct allocation {
    void *start;
    size_t size;
    kvc_memory_hint hint;
} allocation;

typedef struct memory {
    kvc_allocator allocator;
    int fail_after; /* allocations that succeed before one fails; -1: all do */
    int failed;     /* how many did since memory_fail_after */
    int num;
    allocation live[MAX_ALLOCATIONS];
} memory;

static inline void *memory_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    memory *m = user;
    void *start;
    CHECK(size > 0 && alignment >= sizeof(void *) && (alignment & (alignment - 1)) == 0);
    CHECK((hint->kind == KVC_MEMORY_ROWS || hint->group < 0) && hint->first_head < hint->end_head);
    if (m->fail_after >= 0 && m->fail_after-- == 0) {
        m->failed++;
        return NULL;
    }
    CHECK(m->num < MAX_ALLOCATIONS);
    if (m->num == MAX_ALLOCATIONS || posix_memalign(&start, alignment, size)) return NULL;
    memset(start, 0xff, size); /* NaN in every type: nothing may count on zeros, or touch rows that nobody put */
    m->live[m->num++] = (allocation){start, size, *hint};
    return start;
}

static inline void memory_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    memory *m = user;
    int i = 0;
    while (i < m->num && m->live[i].start != start) i++;
    CHECKF(i < m->num, "freed, but not handed out");
    if (i == m->num) return;
    CHECKF(m->live[i].size == size, "freed as %zu bytes, not %zu", size, m->live[i].size);
    CHECK(m->live[i].hint.kind == hint->kind && m->live[i].hint.group == hint->group);
    m->live[i] = m->live[--m->num];
    free(start);
}

static inline void memory_init(memory *m) {
    *m = (memory){
        .allocator = {.struct_size = sizeof m->allocator, .user = m, .alloc = memory_alloc, .free = memory_free},
        .fail_after = -1};
}

static inline void memory_fail_after(memory *m, int fail_after) {
    m->fail_after = fail_after;
    m->failed = 0;
}

/* Returns the bytes handed out, without scratch: what kvc_nbytes should answer. */
static inline int64_t memory_bytes(const memory *m) {
    int64_t bytes = 0;
    for (int i = 0; i < m->num; i++) bytes += m->live[i].hint.kind == KVC_MEMORY_SCRATCH ? 0 : (int64_t)m->live[i].size;
    return bytes;
}

#endif

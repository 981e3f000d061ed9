/* memory.h: an allocator that can be told to fail, and that notes what it handed out.  A test that sees what else the
 * core asks of the system, and refuses that by memory_refuses, has both in one numbering. */
#ifndef KVC_TEST_MEMORY_H
#define KVC_TEST_MEMORY_H

#include <stdlib.h>
#include <string.h>

#include "kvcache.h"
#include "support/aligned.h"
#include "support/test.h"

enum { MAX_ALLOCATIONS = 4096 };

typedef struct allocation {
    void *start;
    size_t size;
    kvc_memory_hint hint;
} allocation;

typedef struct memory {
    kvc_allocator allocator;
    int is_failing;   /* requests are counted, and some fail */
    int asked;        /* how many were counted */
    int first, most;  /* of these, [first, first + most) fail */
    int failed;       /* how many did */
    int refuses_rows; /* each request for rows fails, uncounted */
    int num;
    allocation live[MAX_ALLOCATIONS];
} memory;

/* Counts a request, while they are; returns whether it fails. */
static inline int memory_refuses(memory *m) {
    if (!m->is_failing) return 0;
    const int n = m->asked++, fails = n >= m->first && n - m->first < m->most;
    m->failed += fails;
    return fails;
}

static inline void *memory_alloc(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    memory *m = user;
    CHECK(size > 0 && alignment >= sizeof(void *) && (alignment & (alignment - 1)) == 0);
    CHECK(hint->kind == KVC_MEMORY_ROWS || hint->group < 0);
    if ((m->refuses_rows && hint->kind == KVC_MEMORY_ROWS) || memory_refuses(m)) return NULL;
    CHECK(m->num < MAX_ALLOCATIONS);
    void *start = m->num < MAX_ALLOCATIONS ? aligned_new(alignment, size) : NULL;
    if (!start) return NULL;
    memset(start, 0xff, size); /* NaN in every type: nothing may count on zeros, or touch rows that nobody put */
    m->live[m->num++] = (allocation){start, size, *hint};
    return start;
}

/* A write that no compiler leaves out before free(). */
static void *(*const volatile overwrite)(void *, int, size_t) = memset;

static inline void memory_free(void *user, void *start, size_t size, const kvc_memory_hint *hint) {
    memory *m = user;
    int i = 0;
    while (i < m->num && m->live[i].start != start) i++;
    CHECKF(i < m->num, "freed, but not handed out");
    if (i == m->num) return;
    CHECKF(m->live[i].size == size, "freed as %zu bytes, not %zu", size, m->live[i].size);
    CHECK(m->live[i].hint.kind == hint->kind && m->live[i].hint.group == hint->group);
    m->live[i] = m->live[--m->num];
    overwrite(start, 0xff, size); /* from now on, nobody may read this memory */
    aligned_free(start);
}

static inline void memory_init(memory *m) {
    *m = (memory){
        .allocator = {.struct_size = sizeof m->allocator, .user = m, .alloc = memory_alloc, .free = memory_free}};
}

/* Lets requests [first, first + most) fail, counted from this call on. */
static inline void memory_fail(memory *m, int first, int most) {
    m->is_failing = 1;
    m->asked = m->failed = 0;
    m->first = first;
    m->most = most;
}

/* Lets one request fail, after so many others; -1: none. */
static inline void memory_fail_after(memory *m, int fail_after) {
    memory_fail(m, fail_after, 1);
    m->is_failing = fail_after >= 0;
}

/* Returns the bytes handed out, without scratch: what kvc_nbytes should answer. */
static inline int64_t memory_bytes(const memory *m) {
    int64_t bytes = 0;
    for (int i = 0; i < m->num; i++) bytes += m->live[i].hint.kind == KVC_MEMORY_SCRATCH ? 0 : (int64_t)m->live[i].size;
    return bytes;
}

#endif

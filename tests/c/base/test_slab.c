/* Blocks side by side in slabs.  No block lies over another or over memory that was given back.  Contents stay whatever
 * is joined.  The system has its memory back when the last block has gone. */
#include "base/slab.h"

#include <string.h>

#include "base/pages.h"
#include "support/test.h"

enum { BLOCKS = 100 };

#if defined(__linux__)
enum { LOSES_AT_ONCE = 1 }; /* the contents of pages that are dropped; elsewhere some time later */
#else
enum { LOSES_AT_ONCE = 0 };
#endif

typedef struct block {
    uint8_t *p;
    size_t size;
    uint8_t tag;
} block;

/* Marks both ends and the middle. */
static void fill(block *b, uint8_t tag) {
    b->tag = tag;
    memset(b->p, tag, 64);
    memset(b->p + b->size / 2, tag, 64);
    memset(b->p + b->size - 64, tag, 64);
}

static int is_filled(const block *b) {
    uint8_t expected[64];
    memset(expected, b->tag, sizeof expected);
    return !memcmp(b->p, expected, 64) && !memcmp(b->p + b->size / 2, expected, 64) &&
           !memcmp(b->p + b->size - 64, expected, 64);
}

static void take(kvc_slab **slabs, block *b, size_t size) {
    *b = (block){.p = kvc_slab_take(slabs, size), .size = size};
    CHECK(b->p && (uintptr_t)b->p % kvc_os_page_size() == 0);
    for (size_t i = 0; i < size; i += size / 16)
        CHECKF(!LOSES_AT_ONCE || b->p[i] == 0, "what was given back is still there");
    fill(b, (uint8_t)random_int(1, 256));
}

static void give(kvc_slab **slabs, block *b) {
    CHECK(is_filled(b));
    kvc_slab_give(slabs, b->p);
    b->p = NULL;
}

/* Returns whether a block is from one of the slabs.  Marks it as written, and makes huge pages of written memory. */
static int join(kvc_slab **slabs, uint8_t *p) {
    size_t size = 0;
    const int found = kvc_slab_mark_written(slabs, &p, &size);
    CHECK(size % KVC_HUGE_PAGE == 0 && (!size || (uintptr_t)p % KVC_HUGE_PAGE == 0));
    if (size) kvc_pages_collapse(p, size);
    return found;
}

static void test_random_steps(void) {
    static const size_t sizes[] = {256 << 10, 300000, 1 << 20, (2 << 20) - 64};
    kvc_slab *slabs = NULL;
    block blocks[BLOCKS] = {{.p = NULL}};
    for (int step = 0; step < 4000; step++) {
        block *b = &blocks[random_int(0, BLOCKS)];
        const int what = random_int(0, 4);
        if (!b->p)
            take(&slabs, b, sizes[random_int(0, 4)]);
        else if (what == 0)
            give(&slabs, b);
        else if (what == 1)
            kvc_slab_clear_written(&slabs, b->p);
        else
            CHECK(join(&slabs, b->p));
        if (b->p) CHECK(is_filled(b));
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].p) give(&slabs, &blocks[i]);
    CHECK(!slabs);
}

static void test_neighbours(void) {
    kvc_slab *slabs = NULL;
    uint8_t other[64];
    CHECK(!join(&slabs, other));
    kvc_slab_clear_written(&slabs, other);
    uint8_t *first = kvc_slab_take(&slabs, 1 << 20);
    CHECK(first && !join(&slabs, other));
    if (SIZE_MAX > UINT32_MAX) CHECKF(!kvc_slab_take(&slabs, SIZE_MAX / 64), "more than the system has");
    CHECKF(kvc_slab_take(&slabs, 1 << 20) == first + (1 << 20), "not side by side");
    kvc_slab_give(&slabs, first);
    CHECKF(kvc_slab_take(&slabs, 1 << 20) == first, "room that was given back is not taken first");
    kvc_slab_give(&slabs, first + (1 << 20));
    kvc_slab_give(&slabs, first);
    CHECK(!slabs);
}

int main(void) {
    test_random_steps();
    test_neighbours();
    return test_result();
}

/* Blocks side by side in slabs.  No block lies over another or over memory that was given back.  Contents stay whatever
 * is collapsed.  The system has its memory back when the last block has gone.  A huge page is full once all of its
 * blocks are written. */
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
    int is_written;
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

/* Returns how many bytes of the huge page at `page` written blocks fill. */
static size_t written_bytes(const block *blocks, uintptr_t page) {
    const size_t os_page = kvc_os_page_size();
    size_t bytes = 0;
    for (const block *b = blocks; b < blocks + BLOCKS; b++) {
        if (!b->p || !b->is_written) continue;
        uintptr_t begin = (uintptr_t)b->p, end = begin + (b->size + os_page - 1) / os_page * os_page;
        if (begin < page) begin = page;
        if (end > page + KVC_HUGE_PAGE) end = page + KVC_HUGE_PAGE;
        if (begin < end) bytes += end - begin;
    }
    return bytes;
}

/* Checks the huge pages on which a block lies, and collapses the full ones. */
static void collapse(kvc_slab **slabs, const block *blocks, const block *b) {
    uintptr_t page = (uintptr_t)b->p / KVC_HUGE_PAGE * KVC_HUGE_PAGE;
    for (; page < (uintptr_t)b->p + b->size; page += KVC_HUGE_PAGE) {
        const int is_full = kvc_slab_fills(slabs, (void *)page);
        CHECKF(is_full == (written_bytes(blocks, page) == KVC_HUGE_PAGE), "full: %d", is_full);
        if (is_full) kvc_pages_collapse((void *)page, KVC_HUGE_PAGE);
    }
}

static void test_random_steps(void) {
    static const size_t sizes[] = {128 << 10, 300000, 1 << 20, (2 << 20) - 64, 5 << 20, 65 << 20};
    kvc_slab *slabs = NULL;
    block blocks[BLOCKS] = {{.p = NULL}};
    for (int step = 0; step < 4000; step++) {
        block *b = &blocks[random_int(0, BLOCKS)];
        const int what = random_int(0, 4);
        if (!b->p)
            take(&slabs, b, sizes[random_int(0, 6)]);
        else if (what == 0)
            give(&slabs, b);
        else
            kvc_slab_mark(&slabs, b->p, b->is_written = what > 1);
        if (b->p) collapse(&slabs, blocks, b);
        if (b->p) CHECK(is_filled(b));
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i].p) give(&slabs, &blocks[i]);
    CHECK(!slabs);
}

static void test_neighbours(void) {
    kvc_slab *slabs = NULL;
    uint8_t other[64];
    kvc_slab_mark(&slabs, other, 1);
    CHECK(!kvc_slab_fills(&slabs, other));
    uint8_t *first = kvc_slab_take(&slabs, 1 << 20);
    kvc_slab_mark(&slabs, other, 1);
    CHECK(first && !kvc_slab_fills(&slabs, other));
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

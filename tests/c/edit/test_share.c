/* Sharing ranges of positions: what refuses it, and where a sequence's positions end.  tests/world compares
 * what is shared. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* Feeds a sequence token by token, so that each begins a batch that expires what no later one sees. */
static void feed_singly(pair *p, int64_t id, int32_t begin, int32_t end) {
    for (int32_t at = begin; at < end; at++) CHECK(pair_feed(p, id, at, at + 1) == KVC_OK);
}

/* Another row at a position is refused, and named, whichever layer it is in; nothing has changed then. */
static void test_another_row(int block_size) {
    pair *p = mixed_pair(block_size);
    pair_feed(p, 7, 0, 10);
    kvc_copy_prefix(p->cache, 7, -3, 6);
    pair_feed(p, -3, 6, 9);
    CHECK_FAILS(kvc_share(p->cache, 7, -3, 0, KVC_END), KVC_ERR_INVALID, "position 6, ", "sequence -3, ");
    CHECK_FAILS(kvc_share(p->cache, 7, -3, 8, 12), KVC_ERR_INVALID, "position 8, ", "sequence 7:");
    pair_feed(p, 9, 0, 1);
    CHECK_FAILS(kvc_share(p->cache, 7, 9, 0, 1), KVC_ERR_INVALID, "position 0, ", "sequence 9, ");
    pair_check(p);
    CHECK(kvc_share(p->cache, 7, -3, 0, 6) == KVC_OK && kvc_share(p->cache, 7, -3, 9, KVC_END) == KVC_OK);
    pair_check(p);
    if (kvc_truncate(p->cache, -3, 6) == KVC_OK) CHECK(kvc_share(p->cache, 7, -3, 0, KVC_END) == KVC_OK);
    pair_check(p);
    pair_free(p);
}

/* ---- positions' ends --------------------------------------------------------------------------------------------- */

static void test_position_range(void) {
    pair *p = mixed_pair(4);
    int32_t first = 5, last = 5;
    CHECK(kvc_position_range(p->cache, 0, 1, &first, &last) == KVC_OK && first == -1 && last == -1);
    feed_singly(p, 0, 0, 30);
    CHECK(kvc_position_range(p->cache, 0, 0, &first, &last) == KVC_OK && first == 0 && last == 29);
    CHECK(kvc_position_range(p->cache, 0, 3, &first, &last) == KVC_OK && first == 21 && last == 29);
    CHECK(kvc_position_range(p->cache, 0, -1, &first, &last) == KVC_OK && first == 0 && last == 29);
    CHECK_FAILS(kvc_position_range(p->cache, 0, 4, &first, &last), KVC_ERR_INDEX, "layer", "is 4:");
    CHECK_FAILS(kvc_position_range(p->cache, 0, -2, &first, &last), KVC_ERR_INDEX, "layer", "is -2:");
    CHECK_FAILS(kvc_position_range(p->cache, 0, 0, NULL, &last), KVC_ERR_INVALID, "first", "NULL");
    CHECK_FAILS(kvc_position_range(p->cache, 0, 0, &first, NULL), KVC_ERR_INVALID, "last", "NULL");
    pair_free(p);
}

int main(void) {
    static const int block_sizes[] = {1, 3, 16};
    for (int i = 0; i < 3; i++) test_another_row(block_sizes[i]);
    test_position_range();
    return test_result();
}

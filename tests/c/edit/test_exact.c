/* Marks of rows that are not exact.  tests/world compares where exact rows end after each call. */
#include "support/pairs.h"

enum { ALL = INT32_MAX };

/* Makes a pair whose sequence 1 has positions 0 to 9, and is marked. */
static pair *marked_pair(int32_t position) {
    pair *p = pair_with(full_policy, 4);
    CHECK(pair_feed(p, 1, 0, 10) == KVC_OK && kvc_mark_inexact(p->cache, 1, position) == KVC_OK);
    return p;
}

static void test_marks(void) {
    pair *p = marked_pair(6);
    CHECK_FAILS(kvc_mark_inexact(p->cache, 1, -1), KVC_ERR_INVALID, "position is -1", "");
    CHECK(kvc_mark_inexact(p->cache, 1, 8) == KVC_OK && kvc_exact_to(p->cache, 1) == 6);
    CHECK(kvc_mark_inexact(p->cache, 3, 0) == KVC_OK && kvc_exact_to(p->cache, 3) == ALL);
    pair_free(p);

    p = marked_pair(12); /* it is of rows to come, also when others were dropped */
    CHECK(kvc_truncate(p->cache, 1, 5) == KVC_OK && pair_feed(p, 1, 5, 14) == KVC_OK);
    CHECK(kvc_exact_to(p->cache, 1) == 12);
    CHECK(kvc_truncate(p->cache, 1, 12) == KVC_OK && pair_feed(p, 1, 12, 14) == KVC_OK);
    CHECK(kvc_exact_to(p->cache, 1) == ALL);
    pair_free(p);

    p = marked_pair(ALL - 1); /* a new sequence of the open batch, which is no more when that is aborted */
    CHECK(kvc_reserve(p->cache, 5, 2) == KVC_OK); /* whose struct is there for the next new one, too */
    for (int keeps = 0; keeps < 2; keeps++) {
        CHECK(pair_begin(p, 2, (int32_t[]){0, 1}, (int64_t[]){5, 5}) == KVC_OK);
        CHECK(kvc_mark_inexact(p->cache, 5, 0) == KVC_OK && kvc_exact_to(p->cache, 5) == 0);
        pair_put_all(p);
        CHECK(keeps ? kvc_commit(p->batch) == KVC_OK : (kvc_abort(p->batch), 1));
        CHECK(kvc_exact_to(p->cache, 5) == (keeps ? 0 : ALL));
        if (!keeps) pair_feed(p, 6, 0, 2);
        CHECK(kvc_exact_to(p->cache, 6) == ALL);
    }
    pair_free(p);
}

int main(void) {
    test_marks();
    return test_result();
}

/* Exact rows, which follow from their sequence's tokens alone: where they end after each commit of a tree, or of a part
 * of a batch, and what a new sequence of a batch leaves behind that is aborted.  tests/world/ compares them after every
 * call, edits above all. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "cache/cache.h"
#include "support/pairs.h"

enum { ALL = INT32_MAX };

static kvc_sequence *in_cache(const pair *p, int64_t id) { return kvc_table_find(&p->cache->sequences, id); }

static void check_exact_at(const pair *p, const char *what, int64_t id, int32_t exact_to, int32_t edited_from) {
    const kvc_sequence *s = in_cache(p, id);
    const int32_t got = kvc_exact_to(p->cache, id), edited = s ? s->edited_from : ALL;
    CHECKF(got == exact_to && edited == edited_from, "%s: exact to %d, edited from %d, not %d and %d", what, got,
           edited, exact_to, edited_from);
    pair_check(p);
}

/* Sequence 1 holds positions 0 to 9, all exact. */
static pair *exact_pair(void) {
    static const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = right_angles};
    static pair p;
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .rope = rope},
                                {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1, .rope.kind = KVC_ROPE_NONE}};
    p = (pair){.config = {.block_size = 4, .num_threads = 1}, .roundings = 8, .has_own_parents = 1};
    pair_new(&p, 2, layers);
    CHECK(pair_feed(&p, 1, 0, 10) == KVC_OK);
    return &p;
}

/* ---- commits ----------------------------------------------------------------------------------------------------- */

enum { MOST_TOKENS = 6 };

/* Tokens behind the 10 tokens of sequence 1, and which of these are kept; kept[0] -1: all. */
static const struct {
    const char *name;
    int num, is_tree;
    int32_t positions[MOST_TOKENS], parents[MOST_TOKENS];
    int num_kept;
    int32_t kept[MOST_TOKENS];
    int32_t exact_to;
} commits[] = {
    {"in order", 3, 0, {10, 11, 12}, {0}, -1, {0}, ALL},
    {"none", 3, 0, {10, 11, 12}, {0}, 0, {0}, ALL},
    {"the first", 3, 0, {10, 11, 12}, {0}, 2, {1, 0}, ALL},
    {"the last", 3, 0, {10, 11, 12}, {0}, 1, {2}, 12},
    {"not the middle", 3, 0, {10, 11, 12}, {0}, 2, {0, 2}, 12},
    {"twice", 3, 0, {10, 10, 11}, {0}, -1, {0}, 10},
    {"twice, one kept", 3, 0, {10, 10, 11}, {0}, 2, {0, 2}, 10},
    {"another in sight", 3, 0, {10, 5, 11}, {0}, 2, {0, 2}, 10},
    {"a dropped one out of sight", 3, 0, {10, 11, 12}, {0}, 1, {0}, ALL},
    {"backwards", 3, 0, {12, 11, 10}, {0}, -1, {0}, 10},
    {"from before", 3, 0, {3, 10, 11}, {0}, -1, {0}, 3},
    {"a path", 3, 1, {10, 11, 12}, {-1, 0, 1}, -1, {0}, ALL},
    {"a branch of a tree", 5, 1, {10, 10, 11, 11, 12}, {-1, -1, 0, 1, 3}, 3, {1, 3, 4}, ALL},
    {"its beginning", 5, 1, {10, 10, 11, 11, 12}, {-1, -1, 0, 1, 3}, 2, {1, 3}, ALL},
    {"two branches", 5, 1, {10, 10, 11, 11, 12}, {-1, -1, 0, 1, 3}, 4, {0, 2, 1, 3}, 10},
    {"a tree", 5, 1, {10, 10, 11, 11, 12}, {-1, -1, 0, 1, 3}, -1, {0}, 10},
    {"another branch's end", 5, 1, {10, 10, 11, 11, 12}, {-1, -1, 0, 1, 3}, 2, {0, 3}, 11},
    {"without parents in a tree", 3, 1, {10, 11, 12}, {-1, -1, -1}, -1, {0}, 11},
    {"without its parent", 3, 1, {10, 11, 12}, {-1, 0, 1}, 2, {1, 2}, 11},
    {"a parent at another position", 3, 1, {10, 12, 11}, {-1, 0, 1}, -1, {0}, 11},
};

static void test_commits(void) {
    for (size_t i = 0; i < sizeof commits / sizeof *commits; i++) {
        pair *p = exact_pair();
        p->own_parents = commits[i].is_tree ? commits[i].parents : NULL;
        CHECK(pair_begin(p, commits[i].num, commits[i].positions, (int64_t[]){1, 1, 1, 1, 1, 1}) == KVC_OK);
        pair_put_all(p);
        pair_commit_kept(p, commits[i].num_kept < 0 ? NULL : commits[i].kept, commits[i].num_kept);
        check_exact_at(p, commits[i].name, 1, commits[i].exact_to, ALL);
        pair_free(p);
    }
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

static void test_marks(void) {
    pair *p = exact_pair(); /* a new sequence of the open batch, which is no more when that is aborted */
    CHECK(pair_reserve(p, 5, 2) == KVC_OK); /* whose struct is there for the next new one, too */
    for (int keeps = 0; keeps < 2; keeps++) {
        CHECK(pair_begin(p, 2, (int32_t[]){0, 1}, (int64_t[]){5, 5}) == KVC_OK);
        CHECK(kvc_mark_inexact(p->cache, 5, 0) == KVC_OK && kvc_exact_to(p->cache, 5) == 0);
        pair_put_all(p);
        CHECK(keeps ? kvc_commit(p->batch) == KVC_OK : (pair_abort(p), 1));
        CHECK(kvc_exact_to(p->cache, 5) == (keeps ? 0 : ALL));
        if (!keeps) pair_feed(p, 6, 0, 2);
        CHECK(kvc_exact_to(p->cache, 6) == ALL);
    }
    p->batch = NULL;
    pair_free(p);
}

int main(void) {
    test_commits();
    test_marks();
    return test_result();
}

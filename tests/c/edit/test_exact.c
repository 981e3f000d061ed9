/* Exact rows, which follow from their sequence's tokens alone: where they end after each edit and commit, and what was
 * edited.  Random steps compare the rest with the oracle (support/oracle.h): what is shared, retained and attached.  It
 * also checks that rows which pass for exact were computed behind the tokens that are before them. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "cache/cache.h"
#include "support/pairs.h"
#include "support/saved.h"

enum { ALL = INT32_MAX };

static kvc_sequence *in_cache(const pair *p, int64_t id) { return kvc_table_find(&p->cache->sequences, id); }

static void check_exact_at(const pair *p, const char *what, int64_t id, int32_t exact_to, int32_t edited_from) {
    const kvc_sequence *s = in_cache(p, id);
    const int32_t got = kvc_exact_to(p->cache, id), edited = s ? s->edited_from : ALL;
    CHECKF(got == exact_to && edited == edited_from, "%s: exact to %d, edited from %d, not %d and %d", what, got,
           edited, exact_to, edited_from);
    pair_check(p);
}

/* ---- edits of a sequence ----------------------------------------------------------------------------------------- */

static kvc_status edit_nothing(pair *p) { return (void)p, KVC_OK; }
static kvc_status truncate_at_7(pair *p) { return pair_truncate(p, 1, 7); }
static kvc_status truncate_behind_all(pair *p) { return pair_truncate(p, 1, 10); }
static kvc_status remove_the_end(pair *p) { return pair_remove(p, 1, 7, 12, 1); }
static kvc_status remove_nothing(pair *p) { return pair_remove(p, 1, 7, 7, 1); }
static kvc_status remove_behind_all(pair *p) { return pair_remove(p, 1, 10, 20, 0); }
static kvc_status remove_4_to_6(pair *p) { return pair_remove(p, 1, 4, 6, 0); }
static kvc_status remove_and_shift(pair *p) { return pair_remove(p, 1, 4, 6, 1); }
static kvc_status keep(pair *p, int32_t num, const int32_t *positions) {
    return pair_keep_positions(p, 1, positions, num);
}
static kvc_status keep_all(pair *p) { return keep(p, 10, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9}); }
static kvc_status keep_all_and_more(pair *p) { return keep(p, 12, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 50}); }
static kvc_status keep_the_first_7(pair *p) { return keep(p, 7, (int32_t[]){0, 1, 2, 3, 4, 5, 6}); }
static kvc_status keep_up_to_a_gap(pair *p) {
    const kvc_status status = pair_remove(p, 1, 5, 8, 0);
    return status == KVC_OK ? keep(p, 6, (int32_t[]){0, 1, 2, 3, 4, 6}) : status;
}
static kvc_status keep_without_3(pair *p) { return keep(p, 9, (int32_t[]){0, 1, 2, 4, 5, 6, 7, 8, 9}); }
static kvc_status keep_some_of_the_first_7(pair *p) { return keep(p, 6, (int32_t[]){0, 1, 2, 4, 5, 6}); }
static kvc_status shift_up(pair *p) { return pair_shift(p, 1, 6, 8, 5); }
static kvc_status shift_down(pair *p) { return pair_shift(p, 1, 6, KVC_END, -2); }
static kvc_status shift_by_0(pair *p) { return pair_shift(p, 1, 6, KVC_END, 0); }
static kvc_status shift_nothing(pair *p) { return pair_shift(p, 1, 10, KVC_END, -3); }
static kvc_status shift_away(pair *p) { return pair_shift(p, 1, 7, KVC_END, -20); }
static kvc_status shift_some_away(pair *p) { return pair_shift(p, 1, 3, 6, -5); }
static kvc_status shift_the_end_and_cut_it(pair *p) {
    const kvc_status status = pair_shift(p, 1, 8, 10, 5);
    return status == KVC_OK ? pair_truncate(p, 1, 12) : status;
}
static kvc_status shift_the_end_and_remove_it(pair *p) {
    const kvc_status status = pair_shift(p, 1, 8, 10, 5);
    return status == KVC_OK ? pair_remove(p, 1, 13, 15, 0) : status;
}
static kvc_status shift_the_end_and_cut_some(pair *p) {
    const kvc_status status = pair_shift(p, 1, 8, 10, 5);
    return status == KVC_OK ? pair_truncate(p, 1, 14) : status;
}
static kvc_status divide_by_3(pair *p) { return pair_divide(p, 1, 7, KVC_END, 3); }
static kvc_status divide_by_1(pair *p) { return pair_divide(p, 1, 7, KVC_END, 1); }
static kvc_status inject_at_5(pair *p) { return pair_inject(p, 1, 0, 5, 8); }
static kvc_status inject_nothing(pair *p) { return pair_inject(p, 1, 0, 10, 12); }
static kvc_status settle(pair *p) { return pair_settle(p); }
static kvc_status compact(pair *p) { return pair_compact(p); }
static kvc_status reserve(pair *p) { return pair_reserve(p, 1, 5); }
static kvc_status mark_at_6(pair *p) { return pair_mark_inexact(p, 1, 6); }
static kvc_status mark_behind_all(pair *p) { return pair_mark_inexact(p, 1, 12); }
static kvc_status go_on(pair *p) { return pair_feed(p, 1, 10, 14); }
static kvc_status go_back(pair *p) { return pair_feed(p, 1, 8, 11); }
static kvc_status leave_a_gap(pair *p) { return pair_feed(p, 1, 11, 13); }

/* Edits of sequence 1, which holds positions 0 to 9, all exact. */
static const struct {
    const char *name;
    kvc_status (*edit)(pair *p);
    int32_t exact_to, edited_from;
} edits[] = {
    {"nothing", edit_nothing, ALL, ALL},
    {"truncate_at_7", truncate_at_7, ALL, 7},
    {"truncate_behind_all", truncate_behind_all, ALL, ALL},
    {"remove_the_end", remove_the_end, ALL, 7},
    {"remove_nothing", remove_nothing, ALL, ALL},
    {"remove_behind_all", remove_behind_all, ALL, ALL},
    {"remove_4_to_6", remove_4_to_6, 4, 4},
    {"remove_and_shift", remove_and_shift, 4, 4},
    {"keep_all", keep_all, ALL, ALL},
    {"keep_all_and_more", keep_all_and_more, ALL, ALL},
    {"keep_the_first_7", keep_the_first_7, ALL, 7},
    {"keep_up_to_a_gap", keep_up_to_a_gap, ALL, 5},
    {"keep_without_3", keep_without_3, 3, 3},
    {"keep_some_of_the_first_7", keep_some_of_the_first_7, 3, 3},
    {"shift_up", shift_up, 6, 6},
    {"shift_down", shift_down, 4, 4},
    {"shift_by_0", shift_by_0, ALL, ALL},
    {"shift_nothing", shift_nothing, ALL, ALL},
    {"shift_the_end_and_cut_it", shift_the_end_and_cut_it, ALL, 8},
    {"shift_the_end_and_remove_it", shift_the_end_and_remove_it, ALL, 8},
    {"shift_the_end_and_cut_some", shift_the_end_and_cut_some, 8, 8},
    {"shift_away", shift_away, ALL, 7},
    {"shift_some_away", shift_some_away, 0, 0},
    {"divide_by_3", divide_by_3, 2, 2},
    {"divide_by_1", divide_by_1, ALL, ALL},
    {"inject_at_5", inject_at_5, 5, 5},
    {"inject_nothing", inject_nothing, ALL, ALL},
    {"settle", settle, ALL, ALL},
    {"compact", compact, ALL, ALL},
    {"reserve", reserve, ALL, ALL},
    {"mark_at_6", mark_at_6, 6, ALL},
    {"mark_behind_all", mark_behind_all, 12, ALL},
    {"go_on", go_on, ALL, ALL},
    {"go_back", go_back, 8, ALL},
    {"leave_a_gap", leave_a_gap, 11, ALL},
};

static pair *edited_pair(kvc_status (*edit)(pair *p)) {
    static const kvc_rope rope = {.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = right_angles};
    static pair p;
    const kvc_layer layers[] = {{.num_kv_heads = 1, .k_dim = 2, .v_dim = 2, .rope = rope},
                                {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1, .rope.kind = KVC_ROPE_NONE}};
    p = (pair){.config = {.block_size = 4, .num_threads = 1}, .roundings = 8, .has_own_parents = 1};
    pair_new(&p, 2, layers);
    CHECK(pair_feed(&p, 1, 0, 10) == KVC_OK);
    CHECKF(edit(&p) == KVC_OK, "%s", kvc_last_error());
    return &p;
}

/* After each of them: what it did, and where copies, and what builds on it, stop being exact. */
static void test_edits(void) {
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        pair *p = edited_pair(edits[i].edit);
        const int32_t exact_to = edits[i].exact_to, next = kvc_next_position(p->cache, 1);
        check_exact_at(p, edits[i].name, 1, exact_to, edits[i].edited_from);
        for (int32_t length = 1; length < 12; length++) {
            pair_copy_prefix(p, 1, 2, length);
            check_exact_at(p, edits[i].name, 2, exact_to < length ? exact_to : ALL, length > 1 ? 0 : ALL);
        }
        pair_fork(p, 1, 2);
        pair_feed(p, 2, next, next + 2);
        check_exact_at(p, edits[i].name, 2, exact_to, 0);
        pair_clone(p);
        pair_save(p);
        pair_restore(p, 1, 2);
        check_exact_at(p, edits[i].name, 2, exact_to, 0);
        CHECK(pair_truncate(p, 2, 3) == KVC_OK);
        check_exact_at(p, edits[i].name, 2, exact_to < 3 || exact_to >= next ? exact_to : ALL, 0);
        pair_clear_sequence(p, 1);
        check_exact_at(p, edits[i].name, 1, ALL, ALL);
        pair_feed(p, 1, 0, 3);
        check_exact_at(p, edits[i].name, 1, ALL, ALL);
        pair_free(p);
    }
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
        pair *p = edited_pair(edit_nothing);
        p->own_parents = commits[i].is_tree ? commits[i].parents : NULL;
        CHECK(pair_begin(p, commits[i].num, commits[i].positions, (int64_t[]){1, 1, 1, 1, 1, 1}) == KVC_OK);
        pair_put_all(p);
        pair_commit_kept(p, commits[i].num_kept < 0 ? NULL : commits[i].kept, commits[i].num_kept);
        check_exact_at(p, commits[i].name, 1, commits[i].exact_to, ALL);
        pair_free(p);
    }
}

/* Whoever restores layers says what their rows are. */
static void test_restoring(void) {
    static const struct {
        int32_t positions[3], num_kept, exact_in_batch, exact_to;
    } cases[] = {{{8, 7, 9}, 3, 7, 7}, {{8, 7, 9}, 1, 7, 8}, {{10, 11, 12}, 3, 10, 10}, {{10, 11, 12}, 2, 10, 10}};
    static const uint8_t layers[] = {1, 1};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pair *p = edited_pair(edit_nothing);
        CHECK(pair_begin_with(p, 3, cases[i].positions, (int64_t[]){1, 1, 1}, layers) == KVC_OK);
        CHECK(kvc_exact_to(p->cache, 1) == cases[i].exact_in_batch);
        pair_put_all(p);
        CHECK(pair_commit_kept(p, (int32_t[]){0, 1, 2}, cases[i].num_kept) == KVC_OK);
        check_exact_at(p, "restored", 1, cases[i].exact_to, 0);
        pair_free(p);
    }
}

/* ---- marks ------------------------------------------------------------------------------------------------------- */

static void test_marks(void) {
    pair *p = edited_pair(mark_at_6);
    CHECK_FAILS(kvc_mark_inexact(p->cache, 1, -1), KVC_ERR_INVALID, "position is -1", "");
    CHECK(kvc_mark_inexact(p->cache, 1, 8) == KVC_OK && kvc_exact_to(p->cache, 1) == 6);
    CHECK(kvc_mark_inexact(p->cache, 3, 0) == KVC_OK && kvc_exact_to(p->cache, 3) == ALL);
    pair_free(p);

    p = edited_pair(mark_behind_all); /* it is of rows to come, also when others were dropped */
    CHECK(pair_truncate(p, 1, 5) == KVC_OK && pair_feed(p, 1, 5, 14) == KVC_OK);
    check_exact_at(p, "marked before", 1, 12, 5);
    CHECK(pair_truncate(p, 1, 12) == KVC_OK && pair_feed(p, 1, 12, 14) == KVC_OK);
    check_exact_at(p, "dropped since", 1, ALL, 5);
    pair_free(p);

    p = edited_pair(edit_nothing); /* a new sequence of the open batch, which is no more when that is aborted */
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
    test_edits();
    test_commits();
    test_restoring();
    test_marks();
    return test_result();
}

/* A call that needs room evicts by one plan: as much as it needs, once the rest of the call cannot fail.  It evicts
 * nothing if that would not be enough.  tests/world compares what fits, and that a failed call changes nothing. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/feeding.h"
#include "support/keeping.h"
#include "support/pairs.h"

enum { MOST = 64, FIRST_ID = 1000 };

/* Returns which of the sequences FIRST_ID, FIRST_ID + 1, ... are retained, as bits. */
static int left(kvc_cache *cache) {
    int64_t found[MOST];
    const int64_t num = list_retained(cache, found, MOST);
    int bits = 0;
    for (int64_t i = 0; i < num; i++) bits |= 1 << (found[i] - FIRST_ID);
    return bits;
}

/* Retains `num` sequences of 2 rows each, which nobody else holds, and which are the first of the table. */
static void retain_pairs(kvc_cache *cache, int num) {
    for (int64_t id = FIRST_ID; id < FIRST_ID + num; id++)
        CHECK(retain_new(cache, id, 0, 2, NULL) == KVC_OK && pin_retained(cache, &id, 1, -1) == KVC_OK);
}

static int32_t move(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                    int32_t delta) {
    (void)user, (void)layer, (void)keys, (void)num_kv_heads, (void)num_rows, (void)k_dim, (void)delta;
    return 0;
}

static int32_t refuse(void *user, int32_t layer, float *keys, int32_t num_kv_heads, int64_t num_rows, int32_t k_dim,
                      int32_t delta) {
    move(user, layer, keys, num_kv_heads, num_rows, k_dim, delta);
    return 1;
}

/* Lets the system refuse rows, or not; returns how many blocks there are. */
static int64_t blocks_if_refused(kvc_cache *cache, int refuses) {
    const kvc_stats stats = stats_in(cache);
    heap.refuses_rows = refuses;
    return stats.blocks_in_use + stats.blocks_free;
}

/* ---- victims ----------------------------------------------------------------------------------------------------- */

/* If the system has no memory for a block, kept blocks give up theirs: the least recently used, and no more than the
 * call needs.  If they cannot, nothing was evicted. */
static void test_no_memory_for_blocks(void) {
    for (int reserves = 0; reserves < 2; reserves++)
        for (int num = 4; num <= 20; num += 4) {
            kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.block_size = 4});
            for (int64_t id = FIRST_ID; id < FIRST_ID + 4; id++)
                CHECK(retain_new(cache, id, 0, 4, NULL) == KVC_OK && pin_retained(cache, &id, 1, -1) == KVC_OK);
            CHECK(feed(cache, 1, 1, 4) == KVC_OK);
            const int64_t blocks = blocks_if_refused(cache, 1);
            const kvc_status status = reserves ? kvc_reserve(cache, 1, num) : feed(cache, 1, 1, num);
            CHECKF(status == (num > 16 ? KVC_ERR_NOMEM : KVC_OK), "%d tokens: %s", num, kvc_last_error());
            CHECKF(left(cache) == (num > 16 ? 15 : 15 & ~((1 << num / 4) - 1)), "%d: %x", num, left(cache));
            CHECKF(blocks_if_refused(cache, 0) == blocks, "%d", num);
            free_valid(cache);
        }
}

/* If only one group lacks slots, sequences that free no slots there stay. */
static void test_one_group(void) {
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.capacity = 16});
    CHECK(retain_new(cache, FIRST_ID, 0, 4, (uint8_t[]){0, 1}) == KVC_OK);
    CHECK(retain_new(cache, FIRST_ID + 1, 0, 4, (uint8_t[]){1, 0}) == KVC_OK);
    CHECK(pin_retained(cache, (int64_t[]){FIRST_ID, FIRST_ID + 1}, 2, -1) == KVC_OK);
    for (int i = 0; i < 3; i++) CHECK(feed(cache, 2, 5, 4) == KVC_OK);
    CHECK(left(cache) == 3);
    CHECK(feed(cache, 2, 5, 1) == KVC_OK && left(cache) == 1);
    free_valid(cache);
}

/* A sequence stays if it would only free rows of a group that lacks none.  Rows of others that it shares stay, too. */
static void test_one_group_of_shared_rows(void) {
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(2, 0, 0))};
    const int64_t id = FIRST_ID + 1;
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.capacity = 8});
    CHECK(feed(cache, 2, 5, 2) == KVC_OK && retain(cache, 5, id, 0, 2) == KVC_OK);
    CHECK(feed(cache, 2, 5, 2) == KVC_OK && retain(cache, 5, FIRST_ID, 0, 2) == KVC_OK); /* none in the window */
    CHECK(touch_retained(cache, &id, 1) == KVC_OK && kvc_clear_sequence(cache, 5) == KVC_OK);
    CHECK(retain_new(cache, FIRST_ID + 2, 0, 4, (uint8_t[]){0, 1}) == KVC_OK);
    CHECK(retain_new(cache, FIRST_ID + 3, 0, 4, (uint8_t[]){0, 1}) == KVC_OK);
    CHECK(left(cache) == 15 && kvc_seq_len(cache, id, 0) == 2 && kvc_seq_len(cache, id, 1) == 0);
    free_valid(cache);
}

/* A retained sequence whose windows are evicted has lost these rows, sinks too, and those expired before: where a
 * query sees any of them, nothing goes on from it. */
static void test_evicted_windows(void) {
    const kvc_policy policies[] = {sliding_policy(3, 0, 0), sliding_policy(3, 2, 0), sliding_policy(3, 2, 5),
                                   sliding_policy(1, 2, 0), sliding_policy(1, 0, 0), chunked_policy(5, 0),
                                   chunked_policy(4, 0),    chunked_policy(4, 3)};
    for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
        const kvc_policy *policy = &policies[i];
        const kvc_layer layers[] = {plain_layer, layer_with(*policy)};
        const int has_sinks = policy->kind == KVC_SLIDING && policy->num_sink_tokens;
        kvc_cache *cache = heap_cache(2, layers, (kvc_config){.capacity = 16});
        kvc_batch *batch;
        for (int t = 0; t < 8; t++) CHECK(feed(cache, 2, 1, 1) == KVC_OK);
        CHECK(retain(cache, 1, FIRST_ID, 0, 8) == KVC_OK);
        for (int t = 0; t < 8; t++) CHECK(feed(cache, 2, 1, 1) == KVC_OK);
        for (int64_t id = FIRST_ID + 1; id < FIRST_ID + 16 && kvc_seq_len(cache, FIRST_ID, 1); id++)
            CHECK(retain_new(cache, id, 0, 1, (uint8_t[]){0, 1}) == KVC_OK);
        CHECK(kvc_seq_len(cache, FIRST_ID, 0) == 8 && kvc_seq_len(cache, FIRST_ID, 1) == 0);
        CHECK(kvc_fork(cache, FIRST_ID, 2) == KVC_OK);
        for (int32_t at = 1; at <= 8; at++) {
            const int sees_none = policy->kind == KVC_SLIDING
                                      ? policy->window == 1
                                      : policy->kind == KVC_CHUNKED && at % policy->attention_chunk_size == 0;
            const int resumes = at == 8 && sees_none && !has_sinks;
            CHECKF(kvc_can_resume(cache, FIRST_ID, at) == resumes && kvc_can_resume(cache, 2, at) == resumes,
                   "policy %d: at %d", (int)i, at);
            const kvc_status status = kvc_copy_prefix(cache, FIRST_ID, 3, at);
            CHECKF(status == (at == 8 ? KVC_OK : KVC_ERR_GONE), "policy %d: prefix of %d", (int)i, at);
        }
        CHECK(kvc_clear_sequence(cache, 1) == KVC_OK);
        const kvc_status status = kvc_begin(cache, 1, (int32_t[]){20}, (int64_t[]){2}, NULL, &batch);
        CHECKF(status == (has_sinks ? KVC_ERR_GONE : KVC_OK), "policy %d: %s", (int)i, kvc_last_error());
        if (status == KVC_OK) kvc_abort(batch);
        free_valid(cache);
    }
}

/* A call evicts the windows of two sequences.  Then one of them is freed, and another call evicts the other. */
static void test_evicted_twice(void) {
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    kvc_cache *cache = heap_cache(2, layers, (kvc_config){.capacity = 16, .block_size = 16});
    for (int i = 0; i < 2; i++) /* whose windows share no row */
        CHECK(feed(cache, 2, 1, 4) == KVC_OK && retain(cache, 1, FIRST_ID + i, 0, 4 * (i + 1)) == KVC_OK);
    CHECK(feed(cache, 2, 1, 4) == KVC_OK && feed(cache, 2, 2, 1) == KVC_OK);
    CHECK(retain_new(cache, FIRST_ID + 2, 0, 11, (uint8_t[]){0, 1}) == KVC_OK);
    CHECK(left(cache) == 7 && !kvc_seq_len(cache, FIRST_ID, 1) && !kvc_seq_len(cache, FIRST_ID + 1, 1));
    CHECK(kvc_clear_sequence(cache, FIRST_ID + 1) == KVC_OK && kvc_clear_sequence(cache, FIRST_ID + 2) == KVC_OK);
    CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && left(cache) == 1);
    CHECK(feed(cache, 2, 2, 12) == KVC_OK && left(cache) == 0);
    free_valid(cache);
}

/* Rows that an edit holds until it has copied them count as evicted as well. */
static void test_rows_evicted(void) {
    kvc_layer layer = plain_layer;
    layer.rope = (kvc_rope){.kind = KVC_ROPE_FUNCTION, .shift = move};
    kvc_cache *cache = heap_cache(1, &layer, (kvc_config){.capacity = 12});
    kvc_stats stats;
    CHECK(feed(cache, 1, 1, 10) == KVC_OK && retain(cache, 1, FIRST_ID, 0, 10) == KVC_OK);
    CHECK(kvc_shift(cache, 1, 0, KVC_END, 5) == KVC_OK && !left(cache));
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECKF(stats.rows_evicted == 10 && stats.live_slots == 10, "%d rows", (int)stats.rows_evicted);
    free_valid(cache);
}

/* Replaces the rows of the first n tokens of a sequence in every layer. */
static kvc_status try_inject(kvc_cache *cache, int64_t id, int32_t n) {
    static const float rows[1 << 16];
    const kvc_rows_in in = {.struct_size = sizeof in, .k = rows, .v = rows, .skip_missing = 1};
    return kvc_inject(cache, id, 0, 0, n, &in);
}

/* Feeds 64 tokens.  `num` retained sequences share the first 16 of their rows.  A later one shares none. */
static kvc_cache *with_sharers(int num, kvc_config config) {
    config.block_size = 16;
    kvc_cache *cache = heap_cache(1, &plain_layer, config);
    CHECK(retain_new(cache, FIRST_ID, 0, 16, NULL) == KVC_OK && pin_retained(cache, (int64_t[]){FIRST_ID}, 1, -1) == 0);
    CHECK(feed(cache, 1, 1, 64) == KVC_OK);
    for (int i = 1; i <= num; i++) CHECK(retain(cache, 1, FIRST_ID + i, 0, 16) == KVC_OK);
    CHECK(touch_retained(cache, (int64_t[]){FIRST_ID}, 1) == KVC_OK);
    return cache;
}

/* If a copy of shared rows lacks room, the sequences that share them are evicted.  Then nothing has to be copied.  If
 * one of these sequences is pinned, evicting the others would not help, so they are kept. */
static void test_inject(void) {
    const int64_t max_bytes = bytes_of_blocks(1, &plain_layer, (kvc_config){.block_size = 16}, 5);
    kvc_cache *cache;
    for (int num = 1; num < 4; num++)
        for (int is_pinned = 0; is_pinned < 2; is_pinned++) {
            for (int bytes = 0; bytes < 2; bytes++) {
                cache = with_sharers(num, bytes ? (kvc_config){.max_bytes = max_bytes} : (kvc_config){.capacity = 80});
                if (is_pinned) CHECK(pin_retained(cache, (int64_t[]){FIRST_ID, FIRST_ID + 1}, 2, 1) == KVC_OK);
                const int before = left(cache);
                const kvc_status status = try_inject(cache, 1, 1);
                CHECKF(status == (is_pinned ? KVC_ERR_FULL : KVC_OK), "%d sharers: %s", num, kvc_last_error());
                CHECKF(left(cache) == (is_pinned ? before : 1), "%x are left", left(cache));
                CHECK(stats_in(cache).rows_copied == 0);
                free_valid(cache);
            }
        }
}

/* If a batch of the next token would be refused whatever the room, there is no room, and none is reserved. */
static void test_room_of_those_that_end(void) {
    const kvc_layer layer = layer_with(sliding_policy(5, 0, 0));
    kvc_cache *cache = heap_cache(1, &layer, (kvc_config){.capacity = 100});
    int64_t room = -1;
    CHECK(feed(cache, 1, 1, 20) == KVC_OK && kvc_share(cache, 1, 2, 0, 17) == KVC_OK);
    CHECK(retain(cache, 1, FIRST_ID, 15, 20) == KVC_OK);
    CHECK(kvc_room(cache, 2, &room) == KVC_OK && room == 0);
    CHECK_FAILS(kvc_reserve(cache, 2, 1), KVC_ERR_GONE, "position 17", "from position 19 on");
    CHECK(kvc_truncate(cache, 2, 17) == KVC_OK); /* drops nothing */
    CHECK_FAILS(kvc_truncate(cache, 2, 16), KVC_ERR_GONE, "position 16", "from position 19 on");
    CHECK_FAILS(kvc_room(cache, FIRST_ID, &room), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK_FAILS(kvc_reserve(cache, FIRST_ID, 1), KVC_ERR_INVALID, "sequence 1000", "running call");
    CHECK(room == 0 && kvc_share(cache, 1, 2, 17, 20) == KVC_OK);
    CHECK(kvc_room(cache, 2, &room) == KVC_OK && room == 95 && kvc_reserve(cache, 2, 95) == KVC_OK);
    free_valid(cache);
}

/* ---- what frees nothing ------------------------------------------------------------------------------------------ */

/* Retained sequences that share all rows with a running one stay, however old they are, until it lets go of these rows.
 * It does so at its end, where it is cut, or as its windows move on in the call that needs the room. */
static void test_useless(void) {
    enum { ENDS, IS_CUT, MOVES_ON, NUM_WAYS };
    for (int way = 0; way < NUM_WAYS; way++)
        for (int size = 1; size <= 8; size *= 2) { /* rows of a retained one: a part of a block, or several */
            const kvc_layer layer = way == MOVES_ON ? layer_with(sliding_policy(8, 0, 0)) : plain_layer;
            const int num = 8 / size, shared = (1 << num) - 1, others = 15 << num, cut = way == IS_CUT ? 4 : 0;
            kvc_cache *cache = heap_cache(1, &layer, (kvc_config){.capacity = 16});
            CHECK(feed(cache, 1, 1, 8) == KVC_OK);
            for (int i = 0; i < num; i++) CHECK(retain(cache, 1, FIRST_ID + i, i * size, (i + 1) * size) == KVC_OK);
            for (int i = num; i < num + 4; i++) { /* they are newer, and nobody else's */
                const int64_t id = FIRST_ID + i;
                CHECK(retain_new(cache, id, 0, 2, NULL) == KVC_OK && pin_retained(cache, &id, 1, -1) == KVC_OK);
            }
            CHECK(feed(cache, 1, 2, 2) == KVC_OK);
            CHECKF(left(cache) == ((others & others << 1) | shared), "%d rows: %x are left", size, left(cache));
            if (way != MOVES_ON) CHECK(kvc_truncate(cache, 1, cut) == KVC_OK);
            CHECKF(feed(cache, 1, way == MOVES_ON ? 1 : 2, 1) == KVC_OK, "%s", kvc_last_error());
            const int gone = 1 << cut / size;
            CHECKF(left(cache) == ((others & others << 1) | (shared & ~gone)), "way %d, %d rows: %x are left", way,
                   size, left(cache));
            free_valid(cache);
        }
}

/* A shift whose copies need room evicts for them once its function has copied all.  If the function fails, it has
 * evicted nothing. */
static void test_shift(void) {
    for (int fails = 0; fails < 2; fails++) {
        kvc_layer layer = plain_layer;
        layer.rope = (kvc_rope){.kind = KVC_ROPE_FUNCTION, .shift = fails ? refuse : move};
        kvc_cache *cache = heap_cache(1, &layer, (kvc_config){.capacity = 19});
        retain_pairs(cache, 2);
        CHECK(feed(cache, 1, 1, 8) == KVC_OK && kvc_fork(cache, 1, 2) == KVC_OK);
        const kvc_status status = kvc_shift(cache, 1, 0, KVC_END, 1);
        CHECKF(status == (fails ? KVC_ERR_CALLBACK : KVC_OK), "%s", kvc_last_error());
        CHECKF(left(cache) == (fails ? 3 : 2) && stats_in(cache).rows_evicted == (fails ? 0 : 2), "%x", left(cache));
        free_valid(cache);
    }
}

/* ---- views ------------------------------------------------------------------------------------------------------- */

/* Retains three sequences of a block each; the first is held by a view. */
static kvc_cache *with_view(int64_t max_bytes, kvc_hold **hold) {
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.max_bytes = max_bytes, .block_size = MOST});
    kvc_span span;
    int64_t num;
    for (int64_t id = FIRST_ID; id < FIRST_ID + 3; id++)
        CHECK(retain_new(cache, id, 0, MOST, NULL) == KVC_OK && pin_retained(cache, &id, 1, -1) == KVC_OK);
    CHECK(kvc_spans(cache, FIRST_ID, 0, &span, sizeof span, 1, &num, hold) == KVC_OK);
    return cache;
}

/* A sequence whose blocks views hold frees no bytes: it stays. */
static void test_views(void) {
    kvc_hold *hold;
    kvc_cache *cache = with_view(bytes_of_blocks(1, &plain_layer, (kvc_config){.block_size = MOST}, 3), &hold);
    CHECK(feed(cache, 1, 9, MOST) == KVC_OK);
    CHECKF(left(cache) == 5, "%x are left", left(cache));
    kvc_hold_free(hold);
    free_valid(cache);
}

int main(void) {
    test_no_memory_for_blocks();
    test_one_group();
    test_one_group_of_shared_rows();
    test_evicted_windows();
    test_evicted_twice();
    test_rows_evicted();
    test_inject();
    test_room_of_those_that_end();
    test_useless();
    test_shift();
    test_views();
    return test_result();
}

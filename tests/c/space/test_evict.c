/* A call that needs room evicts by one plan: as much as it needs, once the rest of the call cannot fail.  Here the
 * system refuses a block's memory, or a function of the caller fails.  tests/world compares what goes otherwise. */
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

/* A reservation of as many tokens as there may be does not fit beside a running sequence, and evicts nothing. */
static void test_reserving_too_many(void) {
    for (int64_t n = INT32_MAX - 70; n < INT32_MAX; n++) {
        kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.capacity = n});
        retain_pairs(cache, 1);
        CHECK(feed(cache, 1, 2, 4) == KVC_OK);
        CHECK_FAILS(kvc_reserve(cache, 5, n), KVC_ERR_FULL, "more tokens", "fit");
        CHECK(left(cache) == 1);
        free_valid(cache);
    }
}

int main(void) {
    test_no_memory_for_blocks();
    test_shift();
    test_reserving_too_many();
    return test_result();
}

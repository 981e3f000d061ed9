/* Compaction, on request and by itself. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

/* Makes a pair of three sequences that share blocks, with holes in all. */
static pair *scattered_pair(int block_size) {
    pair *p = mixed_pair(block_size);
    pair_feed(p, 0, 0, 50);
    pair_feed(p, 5, 0, 33);
    kvc_copy_prefix(p->cache, 0, 1, 31);
    pair_feed(p, 0, 50, 60);
    for (int32_t at = 0; at < 60; at += 4) {
        kvc_remove(p->cache, 0, at, at + 3, 0);
        kvc_remove(p->cache, 5, at + 1, at + 2, 0);
        if (at > 20) kvc_remove(p->cache, 1, at, at + 2, 0);
    }
    pair_check(p);
    return p;
}

/* Compacting closes all holes and returns free blocks; doing it again moves nothing. */
static void test_compact(int block_size) {
    pair *p = scattered_pair(block_size);
    kvc_stats before = stats_of(p);
    int64_t bytes = kvc_nbytes(p->cache);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    pair_check(p);
    kvc_stats after = stats_of(p);
    CHECK(after.live_slots == before.live_slots && after.wasted_slots == 0 && after.blocks_free == 0);
    CHECK(block_size == 1 || (after.rows_moved > before.rows_moved && after.compactions > before.compactions));
    CHECK(after.blocks_in_use <= (after.live_slots + 3 * (block_size - 1)) / block_size);
    CHECK(after.blocks_returned - before.blocks_returned ==
          before.blocks_in_use + before.blocks_free - after.blocks_in_use);
    CHECK(kvc_nbytes(p->cache) < bytes);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    CHECK(stats_of(p).rows_moved == after.rows_moved); /* there is nothing left to do */
    for (int64_t id = 0; id < 6; id++)
        pair_feed(p, id, kvc_next_position(p->cache, id), kvc_next_position(p->cache, id) + 7);
    pair_check(p);
    kvc_clear(p->cache);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    CHECK(stats_of(p).blocks_in_use == 0 && stats_of(p).blocks_free == 0);
    pair_check(p);
    pair_free(p);
}

/* Compacting joins half-full blocks without holes. */
static void test_compact_short_sequences(void) {
    pair *p = mixed_pair(16);
    for (int64_t id = 0; id < 5; id++) pair_feed(p, id, 0, 3 + (int32_t)id);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    pair_check(p);
    CHECK(stats_of(p).blocks_in_use == 3 * 2);
    for (int64_t id = 0; id < 5; id++) pair_feed(p, id, 3 + (int32_t)id, 30);
    pair_check(p);
    pair_free(p);
}

/* Compacting moves no row of a full block: all blocks of a cache may be full, except a few. */
static void test_compact_spares_full_blocks(void) {
    pair *p = pair_with(full_policy, 4);
    pair_feed(p, 0, 0, 8);
    pair_feed(p, 1, 0, 100);
    pair_feed(p, 2, 0, 8);
    kvc_remove(p->cache, 0, 1, 2, 0);
    kvc_remove(p->cache, 2, 5, 7, 0);
    CHECK(kvc_compact(p->cache) == KVC_OK);
    pair_check(p);
    CHECKF(stats_of(p).rows_moved <= 3 + 2, "%lld rows moved", (long long)stats_of(p).rows_moved);
    CHECK(stats_of(p).wasted_slots == 0);
    pair_free(p);
}

/* A batch that needs a block compacts first if more than a quarter of the slots are wasted. */
static void test_automatic_compaction(int32_t stride, int64_t compactions) {
    pair *p = pair_with(full_policy, 4);
    pair_feed(p, 0, 0, 128);
    for (int32_t at = 1; at < 128; at += stride) kvc_remove(p->cache, 0, at, at + 1, 0);
    CHECK(stats_of(p).wasted_slots > 0 && stats_of(p).compactions == 0);
    pair_feed(p, 1, 0, 3);
    pair_check(p);
    CHECKF(stats_of(p).compactions == compactions, "one in %d removed", stride);
    pair_free(p);
}

/* Automatic compaction moves no row of a held block. */
static void test_automatic_compaction_spares_held_blocks(void) {
    kvc_span spans[8];
    kvc_hold *hold = NULL;
    int64_t num;
    pair *p = pair_with(full_policy, 4);
    pair_feed(p, 0, 0, 16);
    pair_feed(p, 1, 0, 96);
    for (int32_t at = 1; at < 96; at += 2) {
        kvc_remove(p->cache, 0, at, at + 1, 0);
        kvc_remove(p->cache, 1, at, at + 1, 0);
    }
    CHECK(kvc_spans(p->cache, 0, 0, spans, sizeof *spans, 8, &num, &hold) == KVC_OK && hold);
    pair_feed(p, 2, 0, 40);
    pair_check(p);
    CHECK(stats_of(p).compactions == 1 && stats_of(p).rows_moved > 0);
    kvc_hold_free(hold);
    pair_check(p);
    pair_free(p);
}

/* Windows leave holes that are free soon, so that sequences under them are not compacted. */
static void test_windows_are_not_compacted(int block_size) {
    static const kvc_policy policy = {KVC_SLIDING, .window = 20, .num_sink_tokens = 4};
    pair *p = pair_with(policy, block_size);
    for (int64_t id = 0; id < 8; id++) /* each opens blocks beside the others' holes */
        for (int32_t at = 0; at < 100 + 5 * (int32_t)id; at++) pair_feed(p, id, at, at + 1);
    pair_check(p);
    CHECKF(stats_of(p).rows_moved == 0, "blocks of %d: %lld rows moved", block_size, (long long)stats_of(p).rows_moved);
    pair_free(p);
}

int main(void) {
    static const int block_sizes[] = {1, 3, 16, 64};
    test_compact_short_sequences();
    test_compact_spares_full_blocks();
    test_automatic_compaction(2, 1);
    test_automatic_compaction(4, 0);
    test_automatic_compaction(8, 0);
    test_automatic_compaction_spares_held_blocks();
    for (int i = 0; i < 4; i++) test_compact(block_sizes[i]);
    for (int i = 1; i < 4; i++) test_windows_are_not_compacted(block_sizes[i]);
    return test_result();
}

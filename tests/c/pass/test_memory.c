/* Memory that batches take: none of what was reserved for them, and none that stays once they have ended. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include <math.h>

#include "support/feeding.h"
#include "support/pairs.h"

enum { BLOCK = 4, MOST = 64 };

/* ---- reserved ---------------------------------------------------------------------------------------------------- */

/* Tokens that memory was reserved for take no more, in however many batches they come.  tests/world compares how many
 * blocks reserved tokens take beside others. */
static void test_reserved(void) {
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(5, 2, 0)), layer_with(chunked_policy(7, 0))};
    for (int32_t at_once = 1; at_once <= 30; at_once++) {
        kvc_cache *cache = heap_cache(3, layers, (kvc_config){0});
        CHECK(kvc_reserve(cache, 1, 30) == KVC_OK);
        memory_fail_after(&heap, 0);
        for (int32_t rest = 30; rest > 0; rest -= at_once)
            CHECKF(feed(cache, 3, 1, rest < at_once ? rest : at_once) == KVC_OK, "%d at once: %s", (int)at_once,
                   kvc_last_error());
        memory_fail_after(&heap, -1);
        free_valid(cache);
    }
}

/* ---- given back -------------------------------------------------------------------------------------------------- */

static int64_t blocks_in(kvc_cache *cache) {
    const kvc_stats stats = stats_in(cache);
    return stats.blocks_in_use + stats.blocks_free;
}

/* Blocks count as opened, taken again, and returned, once each; blocks of an aborted batch do not count. */
static void test_counted(void) {
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){0});
    CHECK(feed(cache, 1, 1, 10 * BLOCK) == KVC_OK && kvc_truncate(cache, 1, 4 * BLOCK) == KVC_OK);
    CHECK(feed(cache, 1, 1, 2 * BLOCK) == KVC_OK && try_batch(cache, 1, 6 * BLOCK) == KVC_OK);
    CHECK(kvc_compact(cache) == KVC_OK);
    const kvc_stats stats = stats_in(cache);
    CHECKF(stats.blocks_opened == 10 && stats.blocks_reused == 2 && stats.blocks_returned == 4, "%d, %d, %d",
           (int)stats.blocks_opened, (int)stats.blocks_reused, (int)stats.blocks_returned);
    free_valid(cache);
}

/* However many batches are aborted, they leave no block. */
static void test_aborted(void) {
    const kvc_layer windows[] = {layer_with(sliding_policy(5, 0, 0)), layer_with(sliding_policy(5, 2, 0)),
                                 layer_with(chunked_policy(7, 0)), plain_layer};
    for (int kind = 0; kind < 4; kind++)
        for (int32_t held = 0; held < 20; held++) {
            kvc_cache *cache = heap_cache(1, &windows[kind], (kvc_config){0});
            if (held) CHECK(feed(cache, 1, 1, held) == KVC_OK);
            const int64_t before = blocks_in(cache);
            for (int tries = random_int(1, 24); tries > 0; tries--)
                CHECK(try_batch(cache, 1, tries > 1 ? random_int(1, MOST + 1) : MOST) == KVC_OK);
            CHECKF(blocks_in(cache) == before, "%d blocks, not %d", (int)blocks_in(cache), (int)before);
            free_valid(cache);
        }
}

/* Reserved blocks stay, even if a view keeps the blocks that an aborted batch took beyond them. */
static void test_aborted_under_a_view(void) {
    const kvc_layer layer = layer_with(sliding_policy(5, 0, 0));
    for (int32_t reserved = 1; reserved < MOST; reserved++) {
        const int64_t seq_ids[MOST] = {0};
        kvc_cache *cache = heap_cache(1, &layer, (kvc_config){0});
        kvc_batch *batch = NULL;
        kvc_span spans[MOST];
        kvc_hold *hold = NULL;
        int64_t num;
        CHECK(feed(cache, 1, 0, 2 * BLOCK) == KVC_OK && kvc_reserve(cache, 0, reserved) == KVC_OK);
        CHECKF(kvc_begin(cache, MOST, NULL, seq_ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
        const kvc_put_args put = zero_rows(reserved + 2 * BLOCK, 0);
        if (put.first < MOST) CHECK(kvc_put(batch, 0, &put) == KVC_OK);
        CHECK(kvc_batch_spans(batch, 0, 0, spans, sizeof *spans, MOST, &num, &hold) == KVC_OK);
        kvc_abort(batch);
        memory_fail_after(&heap, 0);
        CHECKF(feed(cache, 1, 0, reserved) == KVC_OK, "%d: %s", (int)reserved, kvc_last_error());
        memory_fail_after(&heap, -1);
        kvc_hold_free(hold);
        free_valid(cache);
    }
}

/* Reserved memory stays resident: batches of as many tokens touch no other, whatever was aborted between them. */
static void test_aborted_leaves_resident(void) {
    for (int round = 0; round < 300; round++) {
        const kvc_policy policies[] = {full_policy, sliding_policy(random_int(1, 50), random_int(0, 3), 0),
                                       chunked_policy(random_int(1, 60), 0)};
        const kvc_layer layer = {.num_kv_heads = 4, .k_dim = 1024, .v_dim = 1024, .policy = policies[random_int(0, 3)]};
        kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 16, .num_threads = 1});
        const int32_t reserved = random_int(1, MOST);
        CHECK(feed(cache, 1, 1, random_int(1, MOST)) == KVC_OK && kvc_reserve(cache, 1, reserved) == KVC_OK);
        for (int32_t rest = reserved, n; rest > 0; rest -= n) {
            n = random_int(1, rest + 1);
            CHECK(try_batch(cache, 1, random_int(1, MOST + 1)) == KVC_OK);
            const int64_t before = kvc_nbytes(cache);
            CHECK(feed(cache, 1, 1, n) == KVC_OK);
            CHECKF(kvc_nbytes(cache) <= before, "round %d: %d of %d took %d bytes", round, (int)n, (int)reserved,
                   (int)(kvc_nbytes(cache) - before));
        }
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* A free block with memory for some slots has no more memory after a batch that took it was aborted. */
static void test_aborted_leaves_free(void) {
    const kvc_layer layer = {.num_kv_heads = 4, .k_dim = 1024, .v_dim = 1024};
    for (int32_t more = 1; more < 16; more++) {
        kvc_cache *cache = cache_of(&layer, 1, (kvc_config){.block_size = 16});
        CHECK(feed(cache, 1, 1, 16 + more) == KVC_OK && kvc_truncate(cache, 1, 16) == KVC_OK);
        const int64_t held = kvc_nbytes(cache);
        CHECK(try_batch(cache, 1, 16) == KVC_OK);
        CHECKF(kvc_nbytes(cache) == held, "%d tokens: %d bytes more", (int)more, (int)(kvc_nbytes(cache) - held));
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* Returns how many blocks were opened by 60 steps of decoding, each after `tries` that were aborted. */
static int64_t opened_by_steps(const kvc_layer *layer, int tries) {
    kvc_cache *cache = heap_cache(1, layer, (kvc_config){0});
    CHECK(feed(cache, 1, 1, 40) == KVC_OK);
    const int64_t before = stats_in(cache).blocks_opened;
    for (int i = 0; i < 60; i++) {
        for (int t = 0; t < tries; t++) CHECK(try_batch(cache, 1, 1) == KVC_OK);
        CHECK(feed(cache, 1, 1, 1) == KVC_OK);
    }
    const int64_t opened = stats_in(cache).blocks_opened - before;
    free_valid(cache);
    return opened;
}

/* Steps of decoding that are aborted first take no more blocks than others. */
static void test_aborted_steps(void) {
    for (int32_t window = 1; window < 12; window++)
        for (int32_t sinks = 0; sinks < 4; sinks++) {
            const kvc_layer layer = layer_with(sliding_policy(window, sinks, 0));
            const int64_t without = opened_by_steps(&layer, 0), with = opened_by_steps(&layer, 2);
            CHECKF(with <= without, "window %d, %d sinks: %d blocks, not %d", (int)window, (int)sinks, (int)with,
                   (int)without);
        }
}

/* ---- what a batch takes besides rows ----------------------------------------------------------------------------- */

/* Bytes of the heap that are of this kind. */
static int64_t bytes_of_kind(int32_t kind) {
    int64_t bytes = 0;
    for (int i = 0; i < heap.num; i++)
        if (heap.live[i].hint.kind == kind) bytes += (int64_t)heap.live[i].size;
    return bytes;
}

/* KVC_MAX_BATCH says what a token takes, by layers and groups, and how long; kvc_nbytes does not count it. */
static void test_bytes_of_a_token(void) {
    enum { NUM = 20000, MANY = 40 };
    static int32_t positions[NUM];
    kvc_layer layers[MANY];
    for (int has_gaps = 0; has_gaps < 2; has_gaps++)
        for (int num_groups = 1; num_groups <= 3; num_groups++)
            for (int num_layers = num_groups; num_layers <= MANY; num_layers += MANY - num_groups) {
                for (int l = 0; l < num_layers; l++)
                    layers[l] =
                        l % num_groups ? layer_with(sliding_policy(l % num_groups * 3 * NUM, 0, 0)) : plain_layer;
                kvc_cache *cache = heap_cache(num_layers, layers, (kvc_config){.block_size = NUM});
                for (int i = 0; i < NUM; i++) positions[i] = has_gaps ? 2 * i : i;
                kvc_batch *batch = NULL;
                const int64_t before = bytes_of_kind(KVC_MEMORY_BOOKKEEPING);
                CHECK(bytes_of_kind(KVC_MEMORY_SCRATCH) == 0);
                CHECKF(kvc_begin(cache, NUM, positions, NULL, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
                const double scratch = (double)bytes_of_kind(KVC_MEMORY_SCRATCH) / NUM;
                const double lists = (double)(bytes_of_kind(KVC_MEMORY_BOOKKEEPING) - before) / NUM / num_groups;
                CHECKF(fabs(scratch - 80 - 100 * num_groups - 1.3 * num_layers) < 12, "%d layers, %d groups: %g bytes",
                       num_layers, num_groups, scratch);
                CHECKF(lists < (has_gaps ? 24 : 12) + 11, "%g bytes in a group", lists); /* 11: of the block's slots */
                CHECK(kvc_nbytes(cache) == memory_bytes(&heap));
                kvc_abort(batch);
                CHECK(bytes_of_kind(KVC_MEMORY_SCRATCH) > 0 && kvc_compact(cache) == KVC_OK);
                CHECK(bytes_of_kind(KVC_MEMORY_SCRATCH) == 0);
                free_valid(cache);
            }
}

/* kvc_slots takes memory for a hold only. */
static void test_slots_without_memory(void) {
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){0});
    kvc_batch *batch = NULL;
    kvc_hold *hold = NULL;
    kvc_span span;
    CHECK(begin_at_end(cache, 1, 3, &batch) == KVC_OK);
    memory_fail(&heap, 0, INT32_MAX);
    CHECK(kvc_slots(batch, 0, 0, &span, sizeof span, NULL) == KVC_OK && span.num_rows == 3);
    CHECK_FAILS(kvc_slots(batch, 0, 0, &span, sizeof span, &hold), KVC_ERR_NOMEM, "out of memory", "hold");
    heap.is_failing = 0;
    CHECK(!hold);
    kvc_abort(batch);
    free_valid(cache);
}

int main(void) {
    test_bytes_of_a_token();
    test_slots_without_memory();
    test_reserved();
    test_counted();
    test_aborted();
    test_aborted_under_a_view();
    test_aborted_leaves_resident();
    test_aborted_leaves_free();
    test_aborted_steps();
    return test_result();
}

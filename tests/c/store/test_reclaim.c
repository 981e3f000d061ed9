/* Reclaiming as one plan: a call that needs room takes what it needs of retained sequences, and only if that is enough
 * and nothing can fail any more.  kvc_room says exactly what a batch can have; a call that fails has changed nothing. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/memory.h"
#include "support/pairs.h"
#include "support/random_steps.h"

enum { MOST = 64, FIRST_ID = 1000 };

static memory heap; /* where caches have their memory from, so that sanitizers see what is freed */

static kvc_cache *new_cache(int num_layers, const kvc_layer *layers, kvc_config config)
{
    kvc_cache *cache = NULL;
    config.struct_size = sizeof config;
    config.layers = layers;
    config.layer_size = sizeof *layers;
    config.num_layers = num_layers;
    config.block_size = config.block_size ? config.block_size : 4;
    config.num_threads = 1;
    memory_init(&heap);
    config.allocator = &heap.allocator;
    CHECKF(kvc_cache_new(&config, &cache) == KVC_OK, "%s", kvc_last_error());
    return cache;
}

/* Feeds n tokens to the end of a sequence, in one batch. */
static kvc_status feed(kvc_cache *cache, int num_layers, int64_t id, int32_t n)
{
    static const float rows[MOST * 2 * 8];
    int64_t seq_ids[MOST * 2];
    kvc_batch *batch;
    for (int32_t i = 0; i < n; i++)
        seq_ids[i] = id;
    const kvc_status status = kvc_begin(cache, n, NULL, seq_ids, NULL, &batch);
    if (status != KVC_OK)
        return status;
    for (int l = 0; l < num_layers; l++) {
        const kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows, .k_token_stride = 16,
                                  .k_head_stride = 16, .v_token_stride = 8, .v_head_stride = 8};
        CHECK(kvc_put(batch, l, &put) == KVC_OK);
    }
    return kvc_commit(batch);
}

static void free_valid(kvc_cache *cache)
{
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_nbytes(cache) == memory_bytes(&heap) && kvc_cache_free(cache) == KVC_OK && heap.num == 0);
}

/* Returns which of the sequences FIRST_ID, FIRST_ID + 1, ... are retained, as bits. */
static int left(kvc_cache *cache)
{
    int64_t found[MOST];
    const int64_t num = kvc_retained(cache, found, MOST);
    int bits = 0;
    for (int64_t i = 0; i < num; i++)
        bits |= 1 << (found[i] - FIRST_ID);
    return bits;
}

/* Retains `num` sequences of 2 rows each, which nobody else holds, and which are the first of the table. */
static void retain_pairs(kvc_cache *cache, int num)
{
    for (int64_t id = FIRST_ID; id < FIRST_ID + num; id++)
        CHECK(kvc_retain_new(cache, id, 0, 2, NULL) == KVC_OK && kvc_pin(cache, &id, 1, -1) == KVC_OK);
}

/* ---- victims ---------------------------------------------------------------------------------------------------- */

/* The table of sequences is full, so that a new one lengthens it, while others leave it. */
static void test_full_table(void)
{
    for (int reserves = 0; reserves < 2; reserves++) {
        kvc_cache *cache = new_cache(1, &plain_layer, (kvc_config){.capacity = 8});
        retain_pairs(cache, 4);
        if (reserves)
            CHECK(kvc_reserve(cache, 9, 5) == KVC_OK && left(cache) == 8);
        CHECK_FAILS(kvc_reserve(cache, 9, 9), KVC_ERR_FULL, "9 tokens", "capacity is 8");
        CHECK(feed(cache, 1, 9, 5) == KVC_OK && left(cache) == 8);
        CHECK_FAILS(feed(cache, 1, 10, 4), KVC_ERR_FULL, "4 more tokens", "3 fit");
        CHECK(left(cache) == 8 && kvc_validate(cache) == KVC_OK && feed(cache, 1, 10, 3) == KVC_OK && !left(cache));
        free_valid(cache);
    }
}

/* Where an allocation fails, nothing was reclaimed. */
static void test_failed_allocations(void)
{
    for (int reserves = 0; reserves < 2; reserves++)
        for (int fail_after = 0, done = 0; !done; fail_after++) {
            kvc_cache *cache = new_cache(1, &plain_layer, (kvc_config){.capacity = 16});
            retain_pairs(cache, 4);
            CHECK(feed(cache, 1, 1, 6) == KVC_OK);
            const int64_t bytes = kvc_nbytes(cache);
            memory_fail_after(&heap, fail_after);
            const kvc_status status = reserves ? kvc_reserve(cache, 2, 8) : feed(cache, 1, 2, 8);
            memory_fail_after(&heap, -1);
            done = status == KVC_OK;
            CHECKF(done || status == KVC_ERR_NOMEM, "%s", kvc_last_error());
            CHECK(left(cache) == (done ? 8 : 15) && (done || kvc_nbytes(cache) == bytes));
            CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
            CHECK(feed(cache, 1, 3, done && !reserves ? 2 : 10) == KVC_OK && left(cache) == 0);
            free_valid(cache);
        }
}

/* Rows that two retained sequences share are free once both are gone; a third that frees nothing stays. */
static void test_shared_rows(void)
{
    for (int others = 0; others < 2; others++) {
        kvc_cache *cache = new_cache(1, &plain_layer, (kvc_config){.capacity = 8});
        int64_t room;
        CHECK(feed(cache, 1, 1, 4) == KVC_OK);
        if (others)
            CHECK(kvc_retain(cache, 1, FIRST_ID + 2, 0, 4) == KVC_OK && kvc_fork(cache, 1, 2) == KVC_OK);
        CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && feed(cache, 1, 1, 4) == KVC_OK);
        for (int i = 0; i < 2; i++)
            CHECK(kvc_retain(cache, 1, FIRST_ID + i, 0, 4) == KVC_OK);
        CHECK(kvc_clear_sequence(cache, 1) == KVC_OK);
        CHECK(kvc_utilization(cache) == (others ? 0.5 : 0));
        CHECK(kvc_room(cache, 5, &room) == KVC_OK && room == (others ? 4 : 8));
        if (others) {
            CHECK(feed(cache, 1, 5, 5) == KVC_ERR_FULL && left(cache) == 7);
            CHECK(feed(cache, 1, 5, 1) == KVC_OK && left(cache) == 4);
        } else {
            CHECK(feed(cache, 1, 5, 4) == KVC_OK && left(cache) == 3);
            CHECK(feed(cache, 1, 5, 1) == KVC_OK && left(cache) == 0);
        }
        free_valid(cache);
    }
}

/* Rows that a running window leaves behind with this batch count as held by retained sequences alone. */
static void test_running_windows(void)
{
    const kvc_layer layer = layer_with(sliding_policy(4, 0, 0));
    for (int32_t n = 1; n <= 24; n++) {
        kvc_cache *cache = new_cache(1, &layer, (kvc_config){.capacity = 24});
        int64_t room;
        CHECK(feed(cache, 1, 1, 24) == KVC_OK);
        for (int i = 0; i < 6; i++)
            CHECK(kvc_retain(cache, 1, FIRST_ID + i, 4 * i, 4 * i + 4) == KVC_OK);
        CHECK(kvc_room(cache, 1, &room) == KVC_OK && room == 21);
        const int num_before = left(cache);
        CHECKF((feed(cache, 1, 1, n) == KVC_OK) == (n <= room), "%d of %d", n, (int)room);
        if (n > room)
            CHECK(left(cache) == num_before);
        free_valid(cache);
    }
}

/* Where only one group lacks slots, what frees none there stays. */
static void test_one_group(void)
{
    const kvc_layer layers[] = {plain_layer, layer_with(sliding_policy(4, 0, 0))};
    kvc_cache *cache = new_cache(2, layers, (kvc_config){.capacity = 16});
    CHECK(kvc_retain_new(cache, FIRST_ID, 0, 4, (uint8_t[]){0, 1}) == KVC_OK);
    CHECK(kvc_retain_new(cache, FIRST_ID + 1, 0, 4, (uint8_t[]){1, 0}) == KVC_OK);
    CHECK(kvc_pin(cache, (int64_t[]){FIRST_ID, FIRST_ID + 1}, 2, -1) == KVC_OK);
    for (int i = 0; i < 3; i++)
        CHECK(feed(cache, 2, 5, 4) == KVC_OK);
    CHECK(left(cache) == 3);
    CHECK(feed(cache, 2, 5, 1) == KVC_OK && left(cache) == 1);
    free_valid(cache);
}

/* ---- room ------------------------------------------------------------------------------------------------------- */

/* Checks that a batch of as many tokens as kvc_room says begins, and that one of a token more is full, in clones. */
static void check_room(kvc_cache *cache, int64_t id, const char *where, int64_t limit)
{
    int64_t room = -1, at_most;
    kvc_batch *batch = NULL;
    int64_t seq_ids[512];
    const int64_t bytes = kvc_nbytes(cache), num = kvc_retained(cache, NULL, 0);
    CHECK(kvc_room(cache, id, &room) == KVC_OK);
    CHECK(kvc_nbytes(cache) == bytes && kvc_retained(cache, NULL, 0) == num);
    at_most = room + 1 < 500 ? room + 1 : 500;
    for (int i = 0; i < 512; i++)
        seq_ids[i] = id;
    for (int64_t n = at_most; n >= room && n; n--) {
        kvc_status status = kvc_begin(cache, (int32_t)n, NULL, seq_ids, NULL, &batch);
        CHECKF(status == (n <= room ? KVC_OK : KVC_ERR_FULL), "%s, limit %d: room %d, begin of %d is %d: %s", where,
               (int)limit, (int)room, (int)n, (int)status, kvc_last_error());
        if (status == KVC_OK)
            kvc_abort(batch);
        else
            CHECK(kvc_nbytes(cache) == bytes && kvc_retained(cache, NULL, 0) == num);
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
    }
}

/* States with retained sequences, windows, sharing and pins; `limit` bounds bytes or slots. */
static kvc_cache *state_with(int kind, int retained, kvc_config config)
{
    const kvc_layer two[] = {plain_layer, layer_with(sliding_policy(4, 1, 0))};
    const kvc_layer chunks[] = {layer_with(chunked_policy(6, 0)), plain_layer};
    const int num = kind == 0 ? 1 : 2;
    kvc_cache *cache = new_cache(num, kind == 1 ? two : kind == 2 ? chunks : &plain_layer, config);
    static const int32_t steps[] = {9, 1, 6, 3};
    kvc_status status = KVC_OK;
    for (int i = 0; i < 4 && status == KVC_OK; i++) {
        status = feed(cache, num, 1, steps[i]);
        if (status == KVC_OK && retained && i < 3)
            CHECK(kvc_retain(cache, 1, FIRST_ID + i, 4 * i, 4 * i + 4) == KVC_OK);
        if (status == KVC_OK && retained && i == 1)
            CHECK(kvc_retain(cache, 1, FIRST_ID + 8, 2, 7) == KVC_OK && kvc_fork(cache, 1, 2) == KVC_OK);
    }
    if (retained > 1)
        CHECK(kvc_pin(cache, (int64_t[]){FIRST_ID + 1}, 1, 1) == KVC_OK);
    if (retained > 2)
        CHECK(kvc_clear_sequence(cache, 1) == KVC_OK);
    if (retained > 3)
        CHECK(kvc_clear_sequence(cache, 2) == KVC_OK);
    if (!retained)
        CHECK(kvc_remove(cache, 1, 3, 5, 0) == KVC_OK);
    return cache;
}

static void test_room_is_exact(void)
{
    for (int kind = 0; kind < 3; kind++)
        for (int retained = 0; retained < 5; retained++)
            for (int step = 0; step < 50; step++) {
                kvc_cache *cache = state_with(kind, retained, (kvc_config){.max_bytes = 2600 + 61 * step});
                check_room(cache, 1, "bytes", 2600 + 61 * step);
                free_valid(cache);
                cache = state_with(kind, retained, (kvc_config){.max_bytes = 2600 + 61 * step});
                check_room(cache, 7, "bytes, new sequence", 2600 + 61 * step);
                free_valid(cache);
            }
    for (int kind = 0; kind < 3; kind++)
        for (int retained = 0; retained < 5; retained++)
            for (int capacity = 10; capacity < 30; capacity++) {
                kvc_cache *cache = state_with(kind, retained, (kvc_config){.capacity = capacity});
                check_room(cache, 1, "capacity", capacity);
                free_valid(cache);
            }
}

int main(void)
{
    test_full_table();
    test_failed_allocations();
    test_shared_rows();
    test_running_windows();
    test_one_group();
    test_room_is_exact();
    return test_result();
}

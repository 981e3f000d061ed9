/* Room under max_bytes is a sum over whole blocks.  These scenes say what fits, what goes for it, and what tokens in
 * blocks of other sequences leave behind.  tests/world does the sum for random caches. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/serving.h"

enum { SIZE = 8, MOST_BLOCKS = 64, MOST_RUNS = 64, KEPT_ID = 1000 };

/* Makes a cache of blocks of `size` slots, of which `num` fit of each layer. */
static kvc_cache *cache_of_blocks(int count, const kvc_layer *layers, int32_t size, int64_t num) {
    const int64_t max_bytes = bytes_of_blocks(count, layers, (kvc_config){.block_size = size}, num);
    return heap_cache(count, layers, (kvc_config){.block_size = size, .max_bytes = max_bytes});
}

/* Feeds n tokens to each of `count` sequences, of which the first is given.  Each row tells its token. */
static kvc_status feed_rows(kvc_cache *cache, int64_t first, int count, int n) {
    float k[MOST_FED * 4], v[MOST_FED * 2];
    int64_t ids[MOST_FED];
    kvc_batch *batch;
    for (int i = 0; i < count * n; i++) {
        ids[i] = first + i / n;
        const int32_t at = kvc_next_position(cache, ids[i]) + i % n;
        for (int d = 0; d < 4; d++) k[i * 4 + d] = element_of(0, ids[i], at, d);
        for (int d = 0; d < 2; d++) v[i * 2 + d] = element_of(1, ids[i], at, d);
    }
    const kvc_status status = kvc_begin(cache, count * n, NULL, ids, NULL, &batch);
    if (status != KVC_OK) return status;
    put_floats(batch, 0, 0, count * n, 1, 4, 2, k, v);
    return kvc_commit(batch);
}

/* Checks that a sequence holds the rows of n tokens. */
static void check_rows(kvc_cache *cache, int64_t id, int n) {
    float k[MOST_FED * 4], v[MOST_FED * 2];
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .v = v};
    int wrong = 0;
    CHECKF(kvc_gather(cache, id, 0, 0, n, &out) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < n * 4; i++) wrong += k[i] != element_of(0, id, i / 4, i % 4);
    for (int i = 0; i < n * 2; i++) wrong += v[i] != element_of(1, id, i / 2, i % 2);
    CHECKF(!wrong && kvc_seq_len(cache, id, 0) == n, "sequence %d: %d elements are wrong", (int)id, wrong);
}

/* Sequences have so many tokens each.  They get one token each in so many steps: until fewer slots are left than there
 * are sequences. */
static void test_steps(int sequences, int tokens, int32_t size, int steps) {
    enum { SLOTS = 2048 };
    kvc_cache *cache = cache_of_blocks(1, &plain_layer, size, SLOTS / size);
    for (int id = 0; id < sequences; id++) CHECK(feed_rows(cache, id, 1, tokens) == KVC_OK);
    int done = 0;
    for (; feed_rows(cache, 0, sequences, 1) == KVC_OK; done++)
        for (int id = 0; id < sequences; id++) check_rows(cache, id, tokens + done + 1);
    CHECKF(done == steps, "%d of %d tokens, blocks of %d: %d steps", sequences, tokens, (int)size, done);
    free_valid(cache);
}

/* A picture of the cache by kvc_blocks and kvc_nbytes. */
typedef struct picture {
    int64_t bytes, num_blocks, num_runs;
    kvc_block_info blocks[MOST_BLOCKS];
    kvc_run_info runs[MOST_RUNS];
} picture;

static picture picture_of(kvc_cache *cache) {
    picture p;
    memset(&p, 0, sizeof p);
    p.bytes = kvc_nbytes(cache);
    CHECK(kvc_blocks(cache, 0, p.blocks, sizeof *p.blocks, MOST_BLOCKS, &p.num_blocks, p.runs, sizeof *p.runs,
                     MOST_RUNS, &p.num_runs) == KVC_OK);
    return p;
}

static void check_unchanged(kvc_cache *cache, const picture *before) {
    enum { ALL = offsetof(kvc_block_info, is_free) + sizeof(int32_t) }; /* padding follows, and a constant */
    const picture after = picture_of(cache);
    CHECKF(after.bytes == before->bytes, "%d bytes, not %d", (int)after.bytes, (int)before->bytes);
    CHECK(after.num_blocks == before->num_blocks && after.num_runs == before->num_runs);
    for (int i = 0; i < MOST_BLOCKS; i++) CHECKF(!memcmp(&after.blocks[i], &before->blocks[i], ALL), "block %d", i);
    CHECK(!memcmp(after.runs, before->runs, sizeof after.runs) && kvc_validate(cache) == KVC_OK);
}

/* Checks what kvc_room says.  A batch of so many tokens begins, and one token more is refused.  kvc_reserve does the
 * same. */
static void check_room(kvc_cache *cache, int64_t id, int64_t right) {
    int64_t room = -1;
    CHECKF(kvc_room(cache, id, &room) == KVC_OK && room == right, "room for %d, not %d", (int)room, (int)right);
    const picture before = picture_of(cache);
    CHECK_FAILS(try_batch(cache, id, (int32_t)room + 1), KVC_ERR_FULL, "more token", "max_bytes");
    CHECK(kvc_reserve(cache, id, room + 1) == KVC_ERR_FULL);
    check_unchanged(cache, &before);
    CHECKF(kvc_reserve(cache, id, room) == KVC_OK, "%s", kvc_last_error());
    CHECKF(try_batch(cache, id, (int32_t)room) == KVC_OK && kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
}

static kvc_hold *hold_rows(kvc_cache *cache, int64_t id, kvc_span *span) {
    kvc_hold *hold = NULL;
    int64_t num;
    CHECK(kvc_spans(cache, id, 0, span, sizeof *span, 1, &num, &hold) == KVC_OK && num == 1);
    return hold;
}

static void open_blocks(int num, int64_t state_bytes) {
    const kvc_layer layer = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM};
    const int64_t max_bytes = bytes_of_blocks(1, &layer, (kvc_config){0}, num);
    open_world(&full, 1, (kvc_config){.max_bytes = max_bytes}, (kvc_prefix_config){.state_bytes = state_bytes});
}

/* Kept blocks are room.  An acquired prompt is not, and takes some. */
static void test_room_beside_prompts(void) {
    enum { SLOTS = 20 * BLOCK, KNOWN = MOST - 4 };
    int64_t room;
    open_blocks(SLOTS / BLOCK, 0);
    serve(numbers(0), KNOWN, MOST);
    check_room(cache, 5, SLOTS); /* evicts them */
    serve(numbers(0), KNOWN, MOST);
    const int64_t id = acquire(numbers(0), MOST, NULL);
    CHECK(kvc_room(cache, 5, &room) == KVC_OK && room == SLOTS - KNOWN - BLOCK);
    check_room(cache, 5, room);
    CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
    check_room(cache, 5, SLOTS);
    close_world();
}

/* Two kept sequences share a block.  Neither of them frees it alone, so both go. */
static void test_kept_in_one_block(void) {
    kvc_cache *cache = cache_of_blocks(1, &plain_layer, SIZE, 2);
    CHECK(feed(cache, 1, 1, SIZE) == KVC_OK && feed(cache, 1, 2, SIZE) == KVC_OK);
    CHECK(retain(cache, 1, KEPT_ID, 0, SIZE / 2) == KVC_OK && retain(cache, 1, KEPT_ID + 1, SIZE / 2, SIZE) == KVC_OK);
    CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && list_retained(cache, NULL, 0) == 2);
    CHECK(feed(cache, 1, 2, SIZE) == KVC_OK && list_retained(cache, NULL, 0) == 0);
    free_valid(cache);
}

/* A kept block goes for its state, although others hold its rows. */
static void test_kept_state(void) {
    enum { TOKENS = 2 * BLOCK, SLOTS = 12 * BLOCK, LARGE = 3 * BLOCK * DIM * 8 };
    static const uint8_t state[LARGE];
    const kvc_tokens tokens = tokens_of(numbers(0), TOKENS);
    open_blocks(SLOTS / BLOCK, LARGE);
    const int64_t id = acquire(tokens.ids, TOKENS, NULL);
    feed_to(id, TOKENS, TOKENS);
    CHECK(kvc_prefix_checkpoint(prefix, id, &tokens, state, LARGE) == KVC_OK && kvc_fork(cache, id, 5) == KVC_OK);
    release(id, tokens.ids, TOKENS);
    check_room(cache, 5, SLOTS - TOKENS);
    CHECK(stats_now().checkpoints == 0 && kvc_seq_len(cache, 5, 0) == TOKENS);
    close_world();
}

/* Makes three sequences that leave one slot free in each of three blocks.  Views hold the first blocks. */
static kvc_cache *scattered(int num_held, kvc_span *spans, kvc_hold **holds) {
    kvc_cache *cache = cache_of_blocks(1, &plain_layer, SIZE, 3);
    for (int64_t id = 0; id < 3; id++) CHECK(feed_rows(cache, id, 1, SIZE - 1) == KVC_OK);
    for (int64_t id = 0; id < num_held; id++) holds[id] = hold_rows(cache, id, &spans[id]);
    return cache;
}

/* A new sequence gets these slots.  If memory is lacking at any time, nothing has changed.  An aborted batch leaves the
 * cache as it was, except that it uses up slots of blocks that are held.  Views stay. */
static void test_anywhere(void) {
    for (int num_held = 0; num_held <= 3; num_held++) {
        kvc_span spans[3], now;
        kvc_hold *holds[3];
        kvc_cache *cache = scattered(num_held, spans, holds);
        picture before = picture_of(cache);
        kvc_status status = KVC_ERR_NOMEM;
        for (int fail_after = 0; status == KVC_ERR_NOMEM; fail_after++) {
            memory_fail_after(&heap, fail_after);
            status = num_held ? feed_rows(cache, 3, 1, 3) : try_batch(cache, 3, 3);
            memory_fail_after(&heap, -1);
            if (status == KVC_ERR_NOMEM) check_unchanged(cache, &before);
            CHECK(status == KVC_ERR_NOMEM || (status == KVC_OK && fail_after));
        }
        if (!num_held) { /* it has moved rows together */
            before = picture_of(cache);
            CHECK(try_batch(cache, 3, 3) == KVC_OK);
            check_unchanged(cache, &before);
            CHECK(feed_rows(cache, 3, 1, 3) == KVC_OK);
        }
        for (int id = 0; id < 4; id++) check_rows(cache, id, id < 3 ? SIZE - 1 : 3);
        CHECK(feed_rows(cache, 0, 1, 1) == KVC_ERR_FULL);
        for (int id = 0; id < num_held; id++) {
            kvc_hold_free(hold_rows(cache, id, &now));
            CHECK(now.k == spans[id].k && now.v == spans[id].v);
            kvc_hold_free(holds[id]);
        }
        free_valid(cache);
    }
}

/* The error says what would count, what may, and what holds it. */
static void test_message(void) {
    kvc_span span;
    kvc_hold *hold;
    kvc_cache *cache = scattered(1, &span, &hold);
    const long long block = picture_of(cache).blocks[0].bytes;
    char numbers[64];
    CHECK_FAILS(feed_rows(cache, 0, 1, 4), KVC_ERR_FULL, "4 more tokens", "3 blocks are in use");
    snprintf(numbers, sizeof numbers, " %lld bytes", 4 * block);
    CHECK_FAILS(feed_rows(cache, 0, 1, 4), KVC_ERR_FULL, numbers, "1 of these blocks are kept in place by views");
    snprintf(numbers, sizeof numbers, " leaves %lld ", 3 * block);
    CHECK_FAILS(feed_rows(cache, 0, 1, 4), KVC_ERR_FULL, numbers, "max_bytes");
    kvc_hold_free(hold);
    free_valid(cache);
}

/* Room ends at the last position. */
static void test_last_positions(void) {
    kvc_cache *cache = heap_cache(1, &plain_layer, (kvc_config){.block_size = SIZE});
    const int32_t last = INT32_MAX - 1, positions[] = {last - 5};
    int64_t room;
    kvc_batch *batch;
    float k[4] = {0}, v[2] = {0};
    CHECK(kvc_begin(cache, 1, positions, NULL, NULL, &batch) == KVC_OK);
    put_floats(batch, 0, 0, 1, 1, 4, 2, k, v);
    CHECK(kvc_commit(batch) == KVC_OK && kvc_room(cache, 0, &room) == KVC_OK && room == 5);
    CHECK_FAILS(kvc_reserve(cache, 0, 6), KVC_ERR_INVALID, "6 tokens would pass the last position",
                "goes on at 2147483642");
    CHECK(kvc_reserve(cache, 0, 5) == KVC_OK && feed_rows(cache, 0, 1, 5) == KVC_OK);
    CHECK(kvc_room(cache, 0, &room) == KVC_OK && room == 0);
    CHECK_FAILS(kvc_reserve(cache, 0, 1), KVC_ERR_INVALID, "would pass the last position", "goes on at 2147483647");
    free_valid(cache);
}

int main(void) {
    test_steps(45, 40, 64, 5);
    test_steps(40, 40, 64, 11);
    test_steps(60, 20, 64, 14);
    test_steps(16, 100, 64, 28);
    test_steps(16, 100, 512, 28);
    test_room_beside_prompts();
    test_kept_in_one_block();
    test_kept_state();
    test_anywhere();
    test_message();
    test_last_positions();
    return test_result();
}

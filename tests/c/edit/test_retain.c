/* Retained sequences: which of their rows another sequence goes on from, what is evicted and when, and what they
 * are not taken for.  What a sequence holds after it was attached is compared with one that was fed, and where it can
 * go on with a search over all positions. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/memory.h"
#include "support/pairs.h"

enum { PIECES = 6, PIECE = 4, TOKENS = PIECES * PIECE, FIRST_ID = 1000 };

static const int64_t ids[PIECES] = {FIRST_ID, FIRST_ID + 1, FIRST_ID + 2, FIRST_ID + 3, FIRST_ID + 4, FIRST_ID + 5};

static kvc_cache *new_cache(int num_layers, const kvc_policy *policies, kvc_config config)
{
    kvc_layer layers[MAX_LAYERS];
    kvc_cache *cache = NULL;
    for (int l = 0; l < num_layers; l++)
        layers[l] = layer_with(policies[l]);
    config.struct_size = sizeof config;
    config.layers = layers;
    config.layer_size = sizeof *layers;
    config.num_layers = num_layers;
    config.block_size = PIECE;
    config.num_threads = 1;
    CHECK(kvc_cache_new(&config, &cache) == KVC_OK);
    return cache;
}

/* Puts rows of 1000 * layer + position in every layer, at positions [begin, end) of a sequence, in one batch.  Of what
 * the sequence holds then, retains the pieces with bits in `pieces`: windows expire rows at the commit. */
static kvc_status feed_and_retain(kvc_cache *cache, int num_layers, int64_t id, int32_t begin, int32_t end, int pieces)
{
    float rows[TOKENS * 2][4];
    int32_t positions[TOKENS * 2] = {0};
    int64_t seq_ids[TOKENS * 2] = {0};
    kvc_batch *batch;
    for (int32_t i = 0; i < end - begin; i++) {
        positions[i] = begin + i;
        seq_ids[i] = id;
    }
    kvc_status status = kvc_begin(cache, end - begin, positions, seq_ids, NULL, &batch);
    if (status != KVC_OK)
        return status;
    for (int l = 0; l < num_layers; l++) {
        for (int32_t i = 0; i < end - begin; i++)
            for (int d = 0; d < 4; d++)
                rows[i][d] = (float)(1000 * l + begin + i);
        const kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows, .k_token_stride = sizeof *rows,
                                  .k_head_stride = sizeof *rows, .v_token_stride = sizeof *rows,
                                  .v_head_stride = sizeof *rows};
        CHECK(kvc_put(batch, l, &put) == KVC_OK);
    }
    for (int i = 0; i < PIECES; i++)
        if (pieces >> i & 1)
            CHECK(kvc_retain(cache, id, ids[i], i * PIECE, (i + 1) * PIECE) == KVC_OK);
    return kvc_commit(batch);
}

static kvc_status feed(kvc_cache *cache, int num_layers, int64_t id, int32_t begin, int32_t end)
{
    return feed_and_retain(cache, num_layers, id, begin, end, 0);
}

/* Checks that a sequence holds these rows in a layer. */
static void check_rows(kvc_cache *cache, int64_t id, int l, const int32_t *positions, int64_t num)
{
    int32_t found[TOKENS * 2];
    float k[TOKENS * 2][4];
    int64_t stored = kvc_positions(cache, id, l, found, TOKENS * 2);
    CHECKF(stored == num && !memcmp(found, positions, (size_t)num * sizeof *found), "layer %d of %d: %d rows, not %d",
           l, (int)id, (int)stored, (int)num);
    const kvc_rows_out out = {.struct_size = sizeof out, .k = k, .k_head_stride = sizeof k, .k_row_stride = sizeof *k};
    if (stored == num && num)
        CHECK(kvc_gather(cache, id, l, 0, num, &out) == KVC_OK);
    for (int64_t i = 0; stored == num && i < num; i++)
        CHECK(k[i][3] == (float)(1000 * l + positions[i]));
}

/* ---- attaching --------------------------------------------------------------------------------------------------- */

static int sees(const kvc_policy *policy, int32_t query, int32_t position)
{
    if (policy->kind == KVC_SLIDING)
        return position > query - policy->window || position < policy->num_sink_tokens;
    const int32_t size = policy->attention_chunk_size;
    return policy->kind != KVC_CHUNKED || position / size == query / size;
}

/* Returns the largest position, at most length, at which every layer holds all that a query there sees. */
static int32_t best_match(const kvc_policy *policies, int num_layers, const int (*held)[TOKENS], int32_t length)
{
    for (; length > 0; length--) {
        int fits = 1;
        for (int l = 0; l < num_layers; l++)
            for (int32_t at = 0; at < length; at++)
                fits &= held[l][at] || !sees(&policies[l], length, at);
        if (fits)
            return length;
    }
    return 0;
}

static int holds(kvc_cache *cache, int layer, int32_t position)
{
    int32_t positions[TOKENS], found = 0;
    const int64_t num = kvc_positions(cache, 2, layer, positions, TOKENS);
    for (int64_t i = 0; i < num; i++)
        found |= positions[i] == position;
    return found;
}

/* Checks what is matched up to a length, and that the sequence goes on there. */
static void check_attached(kvc_cache *cache, const kvc_policy *policies, int num_layers, const int (*held)[TOKENS],
                           int32_t length, int32_t end)
{
    int32_t matched = -1, right = best_match(policies, num_layers, held, length < end ? length : end);
    CHECK(kvc_attach(cache, ids, PIECES, 2, length, &matched) == KVC_OK);
    CHECKF(matched == right, "length %d: %d matched, not %d", length, matched, right);
    CHECK(kvc_can_resume(cache, 2, matched) && kvc_next_position(cache, 2) == matched);
    CHECK(kvc_validate(cache) == KVC_OK);
    for (int l = 0; matched && l < num_layers; l++)
        for (int32_t at = 0; at < matched; at++)
            CHECK(holds(cache, l, at) || !sees(&policies[l], matched, at));
    CHECK(kvc_clear_sequence(cache, 2) == KVC_OK);
}

/* With two layers, in two groups, each of which has any of the pieces: in this order, and in the other.  A piece that
 * neither has does not exist, and no token is known behind the last that does. */
static void test_every_pair_of_subsets(kvc_policy one, kvc_policy other)
{
    const kvc_policy policies[2][2] = {{one, other}, {other, one}};
    for (int subset = 0; subset < 1 << (2 * PIECES); subset += is_quick() ? 7 : 1) {
        kvc_cache *cache = new_cache(2, policies[subset % 2], (kvc_config){0});
        int held[MAX_LAYERS][TOKENS];
        int32_t end = 0;
        for (int i = 0; i < PIECES; i++) {
            const uint8_t has[2] = {subset >> 2 * i & 1, subset >> (2 * i + 1) & 1};
            for (int t = 0; t < PIECE; t++)
                for (int l = 0; l < 2; l++)
                    held[l][i * PIECE + t] = has[l];
            if (!has[0] && !has[1])
                continue;
            CHECK(kvc_retain_new(cache, ids[i], i * PIECE, (i + 1) * PIECE, has) == KVC_OK);
            end = (i + 1) * PIECE;
        }
        for (int32_t length = 1 + subset % 3; length <= TOKENS; length += 3)
            check_attached(cache, policies[subset % 2], 2, held, length, end);
        check_attached(cache, policies[subset % 2], 2, held, 500, end);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* With these policies, whichever pieces of the first layer's group, and which of the others', are there. */
static void test_every_subset(int num_layers, const kvc_policy *policies)
{
    for (int subset = 0; subset < 1 << PIECES; subset++) {
        kvc_cache *cache = new_cache(num_layers, policies, (kvc_config){0});
        int held[MAX_LAYERS][TOKENS];
        int32_t end = 0;
        CHECK(feed_and_retain(cache, num_layers, 1, 0, TOKENS, subset) == KVC_OK);
        for (int i = 0; i < PIECES; i++) {
            end = subset >> i & 1 ? (i + 1) * PIECE : end;
            for (int l = 0; l < num_layers; l++)
                for (int t = 0; t < PIECE; t++)
                    held[l][i * PIECE + t] = subset >> i & 1;
        }
        CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && kvc_sequences(cache, NULL, 0) == 0);
        for (int32_t length = 0; length <= TOKENS; length += 1 + (subset & 1))
            check_attached(cache, policies, num_layers, held, length, end);
        CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
    }
}

/* A sequence that goes on where it was attached is as one that was fed all along: rows, expiries, limits of going
 * back. */
static void test_like_fed(int num_layers, const kvc_policy *policies)
{
    for (int32_t length = 1; length <= TOKENS; length++) {
        kvc_cache *cache = new_cache(num_layers, policies, (kvc_config){0});
        kvc_cache *other = new_cache(num_layers, policies, (kvc_config){0});
        int32_t matched, positions[TOKENS * 2];
        CHECK(feed_and_retain(cache, num_layers, 1, 0, TOKENS, (1 << PIECES) - 1) == KVC_OK);
        CHECK(kvc_attach(cache, ids, PIECES, 2, length, &matched) == KVC_OK && matched == length);
        CHECK(feed(other, num_layers, 2, 0, length) == KVC_OK);
        for (int32_t at = length; at < TOKENS + 6; at++) {
            CHECK(feed(cache, num_layers, 2, at, at + 1) == KVC_OK && feed(other, num_layers, 2, at, at + 1) == KVC_OK);
            for (int l = 0; l < num_layers; l++)
                check_rows(cache, 2, l, positions, kvc_positions(other, 2, l, positions, TOKENS * 2));
            for (int32_t back = 0; back <= at + 1; back++)
                CHECK(kvc_can_resume(cache, 2, back) == kvc_can_resume(other, 2, back));
        }
        CHECK(kvc_compact(cache) == KVC_OK && kvc_settle(cache) == KVC_OK && kvc_validate(cache) == KVC_OK);
        for (int i = 0; i < PIECES; i++)
            check_rows(cache, ids[i], 0, (int32_t[]){4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3}, PIECE);
        CHECK(kvc_cache_free(cache) == KVC_OK && kvc_cache_free(other) == KVC_OK);
    }
}

/* ---- evicting ---------------------------------------------------------------------------------------------------- */

/* Returns which pieces exist, as bits. */
static int pieces_left(kvc_cache *cache)
{
    int64_t found[PIECES];
    int64_t num = kvc_retained(cache, found, PIECES);
    int left = 0;
    for (int64_t i = 0; i < num; i++)
        left |= 1 << (found[i] - FIRST_ID);
    return left;
}

/* Makes a cache of all pieces, which nobody else holds, the first of them used last. */
static kvc_cache *all_pieces(int num_layers, const kvc_policy *policies, kvc_config config)
{
    kvc_cache *cache = new_cache(num_layers, policies, config);
    CHECK(feed_and_retain(cache, num_layers, 1, 0, TOKENS, (1 << PIECES) - 1) == KVC_OK);
    CHECK(kvc_touch(cache, ids, PIECES) == KVC_OK && kvc_clear_sequence(cache, 1) == KVC_OK);
    return cache;
}

/* The least recently used go first, no more than are needed, and none where all would not do. */
static void test_capacity(void)
{
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.capacity = TOKENS + 2});
    int64_t room;
    kvc_stats stats;
    CHECK(kvc_room(cache, 5, &room) == KVC_OK && room == TOKENS + 2 && kvc_utilization(cache) == 0);
    CHECK(feed(cache, 1, 5, 0, 2) == KVC_OK && pieces_left(cache) == 63);
    CHECK(feed(cache, 1, 5, 2, 3) == KVC_OK && pieces_left(cache) == 31);
    CHECK(feed(cache, 1, 5, 3, 11) == KVC_OK && pieces_left(cache) == 7);
    CHECK_FAILS(feed(cache, 1, 6, 0, TOKENS - 8), KVC_ERR_FULL, "16 more tokens", "15 fit");
    CHECK(pieces_left(cache) == 7 && kvc_validate(cache) == KVC_OK);
    kvc_get_stats(cache, &stats, sizeof stats);
    CHECK(stats.retained == 3 && stats.evictable_slots == 12 && stats.rows_evicted == 12);
    CHECK(kvc_reserve(cache, 5, 7) == KVC_OK && pieces_left(cache) == 3);
    CHECK(kvc_pin(cache, ids, 1, 1) == KVC_OK && kvc_room(cache, 5, &room) == KVC_OK && room == 11);
    CHECK(feed(cache, 1, 5, 11, 22) == KVC_OK && pieces_left(cache) == 1);
    CHECK_FAILS(feed(cache, 1, 5, 22, 23), KVC_ERR_FULL, "1 more tokens", "26");
    CHECK(kvc_pin(cache, ids, 1, -1) == KVC_OK && feed(cache, 1, 5, 22, 23) == KVC_OK && !pieces_left(cache));
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Of many retained sequences, those that may be evicted are found behind more than are looked at first. */
static void test_many(void)
{
    enum { MANY = 300, PINNED = 200, BEGIN = 40 };
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = new_cache(1, policies, (kvc_config){.capacity = MANY});
    int64_t many[MANY], found[MANY];
    for (int32_t at = 0; at < MANY; at += BEGIN)
        CHECK(feed(cache, 1, 1, at, at + BEGIN < MANY ? at + BEGIN : MANY) == KVC_OK);
    for (int32_t i = 0; i < MANY; i++) {
        many[i] = FIRST_ID + i;
        CHECK(kvc_retain(cache, 1, many[i], i, i + 1) == KVC_OK);
    }
    CHECK(kvc_clear_sequence(cache, 1) == KVC_OK && kvc_pin(cache, many, PINNED, 1) == KVC_OK);
    CHECK(feed(cache, 1, 5, 0, 3) == KVC_OK && kvc_retained(cache, found, MANY) == MANY - 3);
    CHECK(found[PINNED - 1] == many[PINNED - 1] && found[PINNED] == many[PINNED + 3]);
    CHECK(kvc_pin(cache, many + PINNED, MANY - PINNED - 2, 1) == KVC_OK);
    CHECK_FAILS(feed(cache, 1, 5, 3, 6), KVC_ERR_FULL, "3 more tokens", "2 fit");
    CHECK(kvc_retained(cache, NULL, 0) == MANY - 3 && feed(cache, 1, 5, 3, 5) == KVC_OK);
    CHECK(kvc_retained(cache, NULL, 0) == MANY - 5 && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* There is as much room as if all that may be evicted were dropped, and asking changes nothing. */
static void test_room(void)
{
    const kvc_policy policies[] = {full_policy, sliding_policy(5, 1, 0)};
    kvc_cache *cache = all_pieces(2, policies, (kvc_config){.max_bytes = 40000});
    int64_t before, pinned, room;
    CHECK(kvc_room(cache, 5, &before) == KVC_OK && before > TOKENS && pieces_left(cache) == 63);
    CHECK(kvc_pin(cache, ids, 2, 1) == KVC_OK && kvc_room(cache, 5, &pinned) == KVC_OK && pinned < before);
    CHECK(kvc_validate(cache) == KVC_OK && pieces_left(cache) == 63);
    for (int i = 2; i < PIECES; i++)
        CHECK(kvc_clear_sequence(cache, ids[i]) == KVC_OK);
    CHECK(kvc_room(cache, 5, &room) == KVC_OK && room == pinned);
    CHECK(kvc_clear(cache) == KVC_OK && kvc_room(cache, 5, &room) == KVC_OK && room == before);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Nor does a reservation of as many tokens as there can be, beside a running sequence, evict anything. */
static void test_reserving_too_many(void)
{
    const kvc_policy policies[] = {full_policy};
    for (int64_t n = INT32_MAX - 70; n < INT32_MAX; n++) {
        kvc_cache *cache = new_cache(1, policies, (kvc_config){.capacity = n});
        for (int id = 1; id <= 2; id++)
            CHECK(feed(cache, 1, id, 0, PIECE) == KVC_OK);
        CHECK(kvc_retain(cache, 1, FIRST_ID, 0, PIECE) == KVC_OK && kvc_clear_sequence(cache, 1) == KVC_OK);
        CHECK_FAILS(kvc_reserve(cache, 5, n), KVC_ERR_FULL, "more tokens", "fit");
        CHECK(kvc_retained(cache, NULL, 0) == 1 && kvc_validate(cache) == KVC_OK);
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

/* Rows that a sequence holds as well free nothing, so what is retained of it stays. */
static void test_shared_stay(void)
{
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.capacity = TOKENS});
    int32_t matched;
    CHECK(kvc_attach(cache, ids + 0, 4, 7, TOKENS, &matched) == KVC_OK && matched == 16);
    CHECK(kvc_touch(cache, ids + 4, 2) == KVC_OK); /* the pieces of 7 are the least recently used now */
    CHECK(feed(cache, 1, 7, 16, 20) == KVC_OK && pieces_left(cache) == 31);
    CHECK_FAILS(feed(cache, 1, 7, 20, 25), KVC_ERR_FULL, "5 more tokens", "4 fit");
    CHECK(feed(cache, 1, 7, 20, 24) == KVC_OK && pieces_left(cache) == 15);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Where a sequence holds the rows of full layers, those of a window that it has left behind are evicted alone. */
static void test_windows_go_first(void)
{
    const kvc_policy policies[] = {full_policy, sliding_policy(5, 0, 0)};
    kvc_cache *cache = new_cache(2, policies, (kvc_config){0});
    CHECK(feed_and_retain(cache, 2, 1, 0, TOKENS, (1 << PIECES) - 1) == KVC_OK);
    CHECK(feed(cache, 2, 1, TOKENS, TOKENS + 1) == KVC_OK);
    const int64_t most = kvc_nbytes(cache);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    cache = new_cache(2, policies, (kvc_config){.max_bytes = most + 1200});
    CHECK(feed_and_retain(cache, 2, 1, 0, TOKENS, (1 << PIECES) - 1) == KVC_OK);
    for (int32_t at = TOKENS; at < 2 * TOKENS && kvc_seq_len(cache, ids[0], 1) == PIECE; at++)
        CHECK(feed(cache, 2, 1, at, at + 1) == KVC_OK);
    CHECK(pieces_left(cache) == 63 && kvc_seq_len(cache, ids[0], 1) == 0 && kvc_seq_len(cache, ids[0], 0) == PIECE);
    CHECK(kvc_nbytes(cache) <= most + 1200 && kvc_validate(cache) == KVC_OK);
    int32_t matched;
    CHECK(kvc_attach(cache, ids, PIECES, 2, 6, &matched) == KVC_OK && matched == 0);
    CHECK(kvc_attach(cache, ids, PIECES, 2, TOKENS, &matched) == KVC_OK && matched == TOKENS);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Edits that copy rows evict, too. */
static void test_edits(void)
{
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.capacity = TOKENS});
    CHECK(feed(cache, 1, 5, 0, 4) == KVC_OK && pieces_left(cache) == 31 && kvc_fork(cache, 5, 6) == KVC_OK);
    float rows[4][4] = {{0}};
    const kvc_rows_in in = {.struct_size = sizeof in, .k = rows, .v = rows, .k_head_stride = sizeof rows,
                            .k_row_stride = sizeof *rows, .v_head_stride = sizeof rows, .v_row_stride = sizeof *rows};
    CHECK(kvc_inject(cache, 6, 0, 0, 4, &in) == KVC_OK && pieces_left(cache) == 15);
    CHECK(kvc_inject(cache, ids[0], 0, 0, 4, &in) == KVC_OK && pieces_left(cache) == 15);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- rows from elsewhere ----------------------------------------------------------------------------------------- */

/* New rows are pinned until they are written, in the groups that were asked for, and are attached as others are. */
static void test_new_rows(void)
{
    const kvc_policy policies[] = {full_policy, sliding_policy(3, 0, 0)};
    kvc_cache *cache = new_cache(2, policies, (kvc_config){.capacity = 8});
    float rows[PIECE][4];
    int32_t matched;
    for (int i = 0; i < PIECE; i++)
        for (int d = 0; d < 4; d++)
            rows[i][d] = (float)i;
    const kvc_rows_in in = {.struct_size = sizeof in, .k = rows, .v = rows, .k_head_stride = sizeof rows,
                            .k_row_stride = sizeof *rows, .v_head_stride = sizeof rows, .v_row_stride = sizeof *rows};
    CHECK(kvc_retain_new(cache, ids[0], 0, 4, (uint8_t[]){1, 0}) == KVC_OK);
    CHECK(kvc_retain_new(cache, ids[1], 4, 8, NULL) == KVC_OK);
    CHECK_FAILS(kvc_retain_new(cache, ids[2], 8, 9, NULL), KVC_ERR_FULL, "1 more tokens", "8 of capacity 8");
    CHECK(kvc_inject(cache, ids[0], 0, 0, 4, &in) == KVC_OK);
    for (int i = 0; i < PIECE; i++)
        rows[i][3] += 4;
    CHECK(kvc_inject(cache, ids[1], 0, 4, 8, &in) == KVC_OK && kvc_inject(cache, ids[1], 1, 4, 8, &in) == KVC_OK);
    CHECK_FAILS(kvc_inject(cache, ids[0], 1, 0, 4, &in), KVC_ERR_INDEX, "sequence 1000", "layer 1");
    CHECK(kvc_attach(cache, ids, 2, 1, 8, &matched) == KVC_OK && matched == 8);
    check_rows(cache, 1, 0, (int32_t[]){0, 1, 2, 3, 4, 5, 6, 7}, 8);
    CHECK(kvc_seq_len(cache, 1, 1) == 2 && kvc_clear_sequence(cache, 1) == KVC_OK);
    CHECK_FAILS(feed(cache, 2, 3, 0, 1), KVC_ERR_FULL, "1 more tokens", "8 of capacity 8");
    CHECK(kvc_pin(cache, ids + 1, 1, -1) == KVC_OK && feed(cache, 2, 3, 0, 1) == KVC_OK && pieces_left(cache) == 1);
    CHECK(kvc_validate(cache) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* ---- what retained sequences are not ----------------------------------------------------------------------------- */

static void test_refused(void)
{
    const kvc_policy policies[] = {full_policy};
    kvc_cache *cache = all_pieces(1, policies, (kvc_config){.max_sequences = 1});
    int32_t matched;
    CHECK(feed(cache, 1, 1, 0, 2) == KVC_OK);
    CHECK_FAILS(feed(cache, 1, ids[0], 4, 5), KVC_ERR_INVALID, "sequence 1000", "retained");
    CHECK_FAILS(kvc_truncate(cache, ids[0], 0), KVC_ERR_INVALID, "sequence 1000", "retained");
    CHECK_FAILS(kvc_remove(cache, ids[0], 0, 2, 0), KVC_ERR_INVALID, "sequence 1000", "retained");
    CHECK_FAILS(kvc_fork(cache, 1, ids[0]), KVC_ERR_INVALID, "sequence 1000", "retained");
    CHECK_FAILS(kvc_share(cache, 1, ids[0], 0, 1), KVC_ERR_INVALID, "sequence 1000", "retained");
    CHECK_FAILS(kvc_retain(cache, 1, ids[0], 0, 1), KVC_ERR_INVALID, "sequence 1000", "not used");
    CHECK_FAILS(kvc_retain(cache, 1, 1, 0, 1), KVC_ERR_INVALID, "sequence 1", "not used");
    CHECK_FAILS(kvc_retain(cache, 1, 9, 1, 0), KVC_ERR_INVALID, "end", "0");
    CHECK_FAILS(kvc_retain_new(cache, 9, 0, PIECE + 1, NULL), KVC_ERR_INVALID, "end is 5", "block_size, 4");
    CHECK_FAILS(kvc_attach(cache, ids, 1, 1, 4, &matched), KVC_ERR_INVALID, "sequence 1", "holds rows");
    CHECK_FAILS(kvc_attach(cache, (int64_t[]){1}, 1, 2, 4, &matched), KVC_ERR_INVALID, "ids[0] is 1", "retained");
    CHECK_FAILS(kvc_attach(cache, (int64_t[]){ids[1], ids[0]}, 2, 2, 4, &matched), KVC_ERR_INVALID, "ids[1]", "behind");
    CHECK_FAILS(kvc_attach(cache, ids, -1, 2, 4, &matched), KVC_ERR_INVALID, "num_ids", "-1");
    CHECK_FAILS(kvc_attach(cache, NULL, 1, 2, 4, &matched), KVC_ERR_INVALID, "num_ids is 1", "NULL");
    CHECK_FAILS(kvc_attach(cache, ids, 1, 2, -4, &matched), KVC_ERR_INVALID, "length", "-4");
    CHECK_FAILS(kvc_attach(cache, ids, 1, 2, 4, NULL), KVC_ERR_INVALID, "matched", "NULL");
    CHECK_FAILS(kvc_pin(cache, ids, 1, 0), KVC_ERR_INVALID, "add", "0");
    CHECK_FAILS(kvc_touch(cache, NULL, 1), KVC_ERR_INVALID, "num_ids is 1", "NULL");
    CHECK(kvc_retain(cache, 1, 9, 5, 9) == KVC_OK && kvc_retain(cache, 77, 9, 0, 9) == KVC_OK); /* no rows there */
    CHECK(pieces_left(cache) == 63 && kvc_sequences(cache, NULL, 0) == 1 && kvc_validate(cache) == KVC_OK);
    CHECK(kvc_clear(cache) == KVC_OK && !pieces_left(cache) && kvc_cache_free(cache) == KVC_OK);
}

/* A clone has them in the same order, with their pins. */
static void test_clone(void)
{
    const kvc_policy policies[] = {full_policy, sliding_policy(3, 1, 0)};
    kvc_cache *cache = all_pieces(2, policies, (kvc_config){.capacity = TOKENS}), *clone = NULL;
    int64_t before[PIECES], after[PIECES];
    CHECK(kvc_pin(cache, ids + 5, 1, 1) == KVC_OK && kvc_cache_clone(cache, &clone) == KVC_OK);
    CHECK(kvc_retained(cache, before, PIECES) == PIECES && kvc_retained(clone, after, PIECES) == PIECES);
    CHECK(!memcmp(before, after, sizeof before) && kvc_validate(clone) == KVC_OK);
    CHECK(feed(clone, 2, 1, 0, 1) == KVC_OK && pieces_left(clone) == 47 && pieces_left(cache) == 63);
    CHECK(kvc_cache_free(cache) == KVC_OK && kvc_validate(clone) == KVC_OK && kvc_cache_free(clone) == KVC_OK);
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static kvc_status retain_some(kvc_cache *cache)
{
    int32_t matched = 0;
    kvc_status status = kvc_retain(cache, 1, 50, 0, 5);
    if (status == KVC_OK)
        status = kvc_retain_new(cache, 51, 5, 9, NULL);
    if (status == KVC_OK)
        status = kvc_attach(cache, (int64_t[]){50, 51}, 2, 2, 9, &matched);
    CHECK(status != KVC_OK || matched == 9);
    return status;
}

/* Every allocation fails once: an error, and nothing has changed but what calls before it did. */
static void test_allocation_failures(void)
{
    const kvc_policy policies[] = {full_policy, sliding_policy(3, 1, 0)};
    static memory m;
    memory_init(&m);
    for (int fail_after = 0, done = 0; !done; fail_after++) {
        memory_fail_after(&m, -1);
        kvc_cache *cache = new_cache(2, policies, (kvc_config){.allocator = &m.allocator});
        CHECK(feed(cache, 2, 1, 0, 8) == KVC_OK);
        memory_fail_after(&m, fail_after);
        const kvc_status status = retain_some(cache);
        memory_fail_after(&m, -1);
        done = status == KVC_OK;
        CHECK(done || status == KVC_ERR_NOMEM);
        CHECK(kvc_validate(cache) == KVC_OK);
        for (int64_t id = 50; !done && id < 52; id++)
            CHECK(kvc_clear_sequence(cache, id) == KVC_OK);
        CHECK(done || retain_some(cache) == KVC_OK);
        CHECK(kvc_nbytes(cache) == memory_bytes(&m) && kvc_validate(cache) == KVC_OK);
        CHECK(kvc_cache_free(cache) == KVC_OK && m.num == 0);
    }
}

int main(void)
{
    const kvc_policy all[][2] = {
        {full_policy, sliding_policy(6, 2, 0)}, {full_policy, sliding_policy(3, 0, 9)},
        {sliding_policy(7, 0, 0), sliding_policy(5, 3, 0)}, {full_policy, chunked_policy(5, 0)},
        {chunked_policy(6, 4), sliding_policy(2, 0, 0)}, {full_policy, full_policy},
        {chunked_policy(4, 0), full_policy}, {chunked_policy(8, 0), chunked_policy(3, 5)},
        {sliding_policy(1, 0, 0), chunked_policy(12, 0)}, {sliding_policy(1, 3, 0), sliding_policy(4, 0, 0)},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        test_every_subset(2, all[i]);
        test_like_fed(2, all[i]);
    }
    test_every_pair_of_subsets(chunked_policy(4, 0), full_policy);
    test_every_pair_of_subsets(chunked_policy(6, 2), sliding_policy(3, 1, 0));
    test_every_pair_of_subsets(chunked_policy(8, 0), chunked_policy(5, 0));
    test_every_pair_of_subsets(sliding_policy(1, 0, 0), chunked_policy(3, 0));
    test_capacity();
    test_many();
    test_room();
    test_reserving_too_many();
    test_shared_stay();
    test_windows_go_first();
    test_edits();
    test_new_rows();
    test_refused();
    test_clone();
    test_allocation_failures();
    return test_result();
}

/* Batches that restore some layers: states whose layers have different positions, and the window of an earlier moment
 * in a sequence that has gone on since. */
#define _POSIX_C_SOURCE 200809L /* posix_memalign */
#include "support/pairs.h"

enum { WINDOW = 8, SINKS = 2, DIM = 4, LAYERS = 4, MAX_POSITION = 80 };

/* ---- the same results as without saving and restoring ------------------------------------------------------------ */

/* Two groups, of two layers each: the second reads the first's rows, or has its own. */
static kvc_cache *new_cache(int32_t num_sinks, int shares)
{
    const kvc_layer full = {.num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM},
                    window = {.num_kv_heads = 1,
                              .k_dim = DIM,
                              .v_dim = DIM,
                              .policy = {.kind = KVC_SLIDING, .window = WINDOW, .num_sink_tokens = num_sinks}};
    kvc_layer layers[LAYERS] = {full, window, full, window};
    if (shares)
        layers[3].share = 2;
    return cache_of(layers, LAYERS, (kvc_config){.block_size = 16, .num_threads = 1});
}

static const uint8_t full_layers[LAYERS] = {1, 0, 1, 0}, window_layers[LAYERS] = {0, 1, 0, 1};

static float element_at(int layer, int32_t position, int d)
{
    return (float)((position * 37 + layer * 11 + d * 5) % 29 - 14) / 8;
}

static kvc_status put_positions(kvc_batch *batch, int layer, int n, const int32_t *positions)
{
    float rows[MAX_POSITION][DIM];
    for (int t = 0; t < n; t++)
        for (int d = 0; d < DIM; d++)
            rows[t][d] = element_at(layer, positions[t], d);
    const kvc_put_args args = {
        .struct_size = sizeof args, .k = rows, .v = rows, .k_token_stride = sizeof *rows, .v_token_stride = sizeof *rows};
    return kvc_put(batch, layer, &args);
}

/* Feeds positions [begin, end) to a sequence; *out: what the tokens of all layers attend to, if that is not NULL. */
static void feed(kvc_cache *cache, int64_t id, int32_t begin, int32_t end, int shares, float (*out)[MAX_POSITION][DIM])
{
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 1};
    float q[MAX_POSITION][DIM], unused[LAYERS][MAX_POSITION][DIM];
    int32_t positions[MAX_POSITION], n = end - begin;
    int64_t ids[MAX_POSITION];
    kvc_batch *batch = NULL;
    for (int t = 0; t < n; t++) {
        positions[t] = begin + t;
        ids[t] = id;
        for (int d = 0; d < DIM; d++)
            q[t][d] = element_at(7, positions[t], d);
    }
    CHECKF(kvc_begin(cache, n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; batch && l < LAYERS; l++) {
        kvc_plan_args at = plan;
        at.layer = l;
        const kvc_attend_args args = {.struct_size = sizeof args,
                                      .q = q,
                                      .out = out ? out[l] : unused[l],
                                      .q_token_stride = sizeof *q,
                                      .out_token_stride = sizeof *q};
        if (l < 3 || !shares)
            CHECK(put_positions(batch, l, n, positions) == KVC_OK);
        CHECKF(kvc_attend(batch, &at, &args) == KVC_OK, "%s", kvc_last_error());
    }
    CHECKF(batch && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
}

/* Restores these layers of a sequence, backwards, at positions [begin, end) and [0, num_sinks). */
static void restore(kvc_cache *cache, int64_t id, const uint8_t *layers, int32_t begin, int32_t end, int32_t num_sinks)
{
    int32_t positions[MAX_POSITION], n = 0;
    int64_t ids[MAX_POSITION];
    kvc_batch *batch = NULL;
    for (int32_t at = end - 1; at >= 0; at--)
        if (at >= begin || at < num_sinks)
            positions[n++] = at;
    for (int t = 0; t < n; t++)
        ids[t] = id;
    const kvc_begin_args args = {
        .struct_size = sizeof args, .num_tokens = n, .positions = positions, .seq_ids = ids, .replaced = layers};
    CHECKF(kvc_begin_with(cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    for (int l = 0; batch && l < LAYERS; l++) {
        kvc_status status = put_positions(batch, l, n, positions);
        CHECKF((status == KVC_OK) == layers[l] || strstr(kvc_last_error(), "shares"), "%s", kvc_last_error());
    }
    CHECKF(batch && kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
}

/* Checks that two sequences go on alike at a position. */
static void check_alike(kvc_cache *a, int64_t id, kvc_cache *b, int64_t other, int32_t at, int shares)
{
    static float out[2][LAYERS][MAX_POSITION][DIM];
    for (int n = 1; n < 10; n += 4) {
        memset(out, 0, sizeof out);
        feed(a, id, at, at + n, shares, out[0]);
        feed(b, other, at, at + n, shares, out[1]);
        CHECKF(!memcmp(out[0], out[1], sizeof out[0]), "from %d on", at);
        at += n;
    }
}

static kvc_status begin_at(kvc_cache *cache, int64_t id, int32_t position)
{
    kvc_batch *batch = NULL;
    kvc_status status = kvc_begin(cache, 1, &position, &id, NULL, &batch);
    kvc_abort(batch);
    return status;
}

/* A whole state, of one batch for each group, in either order: in a new sequence, and over one that holds others. */
static void test_state(int32_t num_sinks, int shares)
{
    kvc_cache *original = new_cache(num_sinks, shares), *cache = new_cache(num_sinks, shares);
    feed(original, 0, 0, 50, shares, NULL);
    feed(cache, 1, 0, 33, shares, NULL);
    feed(cache, 1, 33, 70, shares, NULL);
    for (int64_t id = 0; id < 2; id++) {
        restore(cache, id, full_layers, 0, 50, 0);
        CHECK_FAILS(begin_at(cache, id, id ? 70 : 50), KVC_ERR_GONE, id ? "layer 0 lacks" : "layer 1 lacks", "restore");
        CHECK(kvc_next_position(cache, id) == (id ? 70 : 50));
        CHECK(!kvc_can_resume(cache, id, 50) && !kvc_can_resume(cache, id, 49) && !kvc_can_resume(cache, id, 1));
        restore(cache, id, window_layers, 50 - WINDOW, 50, num_sinks);
        CHECK(kvc_next_position(cache, id) == 50 && kvc_can_resume(cache, id, 50) && kvc_can_resume(cache, id, 49));
        CHECK(!kvc_can_resume(cache, id, 48));
        CHECK(kvc_seq_len(cache, id, 0) == 50 && kvc_seq_len(cache, id, 1) == WINDOW + num_sinks);
    }
    restore(cache, 2, window_layers, 50 - WINDOW, 50, num_sinks);
    CHECK_FAILS(begin_at(cache, 2, 50), KVC_ERR_GONE, "layer 0 lacks", "from ");
    restore(cache, 2, full_layers, 0, 50, 0);
    for (int64_t id = 0; id < 3; id++) {
        CHECK(kvc_fork(original, 0, 9 + id) == KVC_OK);
        check_alike(cache, id, original, 9 + id, 50, shares);
    }
    CHECK(kvc_cache_free(original) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* The window of an earlier moment, then truncating to it; other sequences go on in between. */
static void test_checkpoint(int32_t num_sinks, int shares)
{
    kvc_cache *original = new_cache(num_sinks, shares), *cache = new_cache(num_sinks, shares);
    feed(original, 0, 0, 30, shares, NULL);
    feed(cache, 0, 0, 30, shares, NULL);
    feed(cache, 0, 30, 60, shares, NULL);
    CHECK(begin_at(cache, 0, 60) == KVC_OK);
    CHECK(kvc_truncate(cache, 0, 30) == KVC_ERR_GONE);
    restore(cache, 0, window_layers, 30 - WINDOW, 30, num_sinks);
    CHECK_FAILS(begin_at(cache, 0, 60), KVC_ERR_GONE, "position 60", "layer 1 lacks, from 30 to 59");
    CHECK(begin_at(cache, 0, 30) == KVC_ERR_GONE); /* the layers that see everything hold the tokens behind, too */
    CHECK(kvc_seq_len(cache, 0, 1) == WINDOW + num_sinks);
    feed(cache, 1, 0, 20, shares, NULL); /* expires what no query at 30 sees, and no more */
    CHECK(kvc_reserve(cache, 2, 40) == KVC_OK);
    CHECK(kvc_seq_len(cache, 0, 1) == WINDOW - 1 + num_sinks);
    CHECK_FAILS(kvc_truncate(cache, 0, 31), KVC_ERR_GONE, "position 31", "layer 1 lacks");
    CHECK(kvc_fork(cache, 0, 3) == KVC_OK && kvc_copy_prefix(cache, 0, 4, 30) == KVC_OK);
    CHECK(kvc_copy_prefix(cache, 0, 5, 40) == KVC_ERR_GONE);
    for (int64_t id = 0; id < 5; id++) {
        if (id == 1 || id == 2)
            continue;
        CHECKF(kvc_truncate(cache, id, 30) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_can_resume(cache, id, 30) && !kvc_can_resume(cache, id, 29));
        CHECK(kvc_fork(original, 0, 9) == KVC_OK);
        check_alike(cache, id, original, 9, 30, shares);
    }
    CHECK(kvc_cache_free(original) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
}

/* Sinks that were not among the rows, though other layers have them, and holes in a window. */
static void test_left_out(void)
{
    kvc_cache *cache = new_cache(SINKS, 0);
    feed(cache, 0, 0, 40, 0, NULL);
    restore(cache, 0, window_layers, 40 - WINDOW, 40, 0);
    CHECK_FAILS(begin_at(cache, 0, 40), KVC_ERR_GONE, "layer 1 lacks, from 0 to 1", "position 40");
    CHECK(kvc_truncate(cache, 0, 39) == KVC_ERR_GONE && kvc_truncate(cache, 0, 0) == KVC_OK);
    feed(cache, 0, 0, 40, 0, NULL);
    restore(cache, 0, window_layers, 36, 40, SINKS);
    CHECK_FAILS(begin_at(cache, 0, 40), KVC_ERR_GONE, "layer 1 lacks, from 33 to 35", "position 40");
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Layers with a window alone: what lies before the rows that were given is gone, but for what no query could miss. */
static void test_windows_alone(void)
{
    const kvc_layer layer = {
        .num_kv_heads = 1, .k_dim = DIM, .v_dim = DIM, .policy = {.kind = KVC_SLIDING, .window = WINDOW}};
    static const uint8_t all[] = {1};
    static pair p;
    int32_t positions[WINDOW + 2];
    int64_t ids[WINDOW + 2] = {0};
    for (int32_t n = WINDOW - 2; n <= WINDOW + 2; n++) {
        p = (pair){.config.block_size = 4};
        pair_new(&p, 1, &layer);
        for (int32_t t = 0; t < n; t++)
            positions[t] = 50 + t;
        CHECK(pair_begin_with(&p, n, positions, ids, all) == KVC_OK);
        pair_put_all(&p);
        pair_commit(&p);
        pair_check(&p);
        const int32_t next = 50 + n;
        CHECK(kvc_can_resume(p.cache, 0, next));
        CHECK(kvc_can_resume(p.cache, 0, next - 1) == (n >= WINDOW));
        CHECK(!kvc_can_resume(p.cache, 0, next - 3));
        CHECK(pair_feed(&p, 0, next, next + 5) == KVC_OK);
        pair_check(&p);
        pair_free(&p);
    }
}

/* ---- what is replaced, and what stays ---------------------------------------------------------------------------- */

static const uint8_t first_layer[] = {1, 0};

/* Forks keep what they share; deltas of what is replaced are forgotten; an abort leaves everything. */
static void test_others_keep_theirs(void)
{
    static pair p;
    kvc_layer layers[] = {layer_with(full_policy), layer_with(sliding_policy(5, 1, 0))};
    for (int l = 0; l < 2; l++)
        layers[l].rope = (kvc_rope){.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 1, .inv_freq = right_angles};
    p = (pair){.config.block_size = 4};
    pair_new(&p, 2, layers);
    pair_feed(&p, 0, 0, 13);
    pair_fork(&p, 0, 1);
    pair_shift(&p, 0, 4, KVC_END, 9);
    pair_check(&p);
    for (int commits = 0; commits < 2; commits++) {
        CHECK(pair_begin_with(&p, 5, (int32_t[]){7, 3, 0, 8, 4}, (int64_t[]){0, 0, 0, 0, 0}, first_layer) == KVC_OK);
        pair_put_all(&p);
        pair_check(&p);
        CHECK(pair_shift(&p, 0, 0, 5, 1) == KVC_ERR_BUSY && pair_shift(&p, 1, 0, 5, 1) == KVC_OK);
        if (commits)
            pair_commit(&p);
        else
            pair_abort(&p);
        pair_check(&p);
    }
    CHECK(kvc_seq_len(p.cache, 0, 0) == 5 && kvc_seq_len(p.cache, 0, 1) == p.sequences[0].layers[1].num);
    pair_free(&p);
}

/* kvc_commit_kept: a sequence of which nothing is kept stays as it was. */
static void test_kept(void)
{
    static pair p;
    p = (pair){.config.block_size = 4};
    pair_new(&p, 2, (const kvc_layer[]){layer_with(full_policy), layer_with(sliding_policy(5, 1, 0))});
    pair_feed(&p, 0, 0, 6);
    pair_feed(&p, 1, 0, 6);
    CHECK(pair_begin_with(&p, 6, (int32_t[]){5, 4, 3, 2, 1, 0}, (int64_t[]){0, 1, 0, 1, 0, 1}, first_layer) == KVC_OK);
    pair_put_all(&p);
    CHECK(pair_commit_kept(&p, (int32_t[]){4, 0}, 2) == KVC_OK);
    pair_check(&p);
    CHECK(kvc_seq_len(p.cache, 0, 0) == 2 && kvc_seq_len(p.cache, 1, 0) == 6);
    pair_free(&p);
}

/* capacity and max_seq_len count what there is once the batch is committed; utilization never passes 1. */
static void test_limits(void)
{
    static pair p;
    int32_t positions[21];
    int64_t ids[21] = {0};
    for (int32_t t = 0; t < 21; t++)
        positions[t] = t;
    p = (pair){.config = {.block_size = 4, .max_seq_len = 20, .capacity = 30}};
    pair_new(&p, 2, (const kvc_layer[]){layer_with(full_policy), layer_with(sliding_policy(5, 1, 0))});
    pair_feed(&p, 0, 0, 20);
    pair_feed(&p, 1, 0, 10);
    CHECK_FAILS(pair_begin_with(&p, 21, positions, ids, first_layer), KVC_ERR_FULL, "21 tokens of sequence 0",
                "max_seq_len is 20");
    CHECK(pair_begin_with(&p, 20, positions, ids, first_layer) == KVC_OK);
    CHECK(kvc_utilization(p.cache) == 1);
    pair_put_all(&p);
    pair_check(&p);
    pair_commit(&p);
    pair_check(&p);
    CHECK(kvc_utilization(p.cache) == 1);
    pair_fork(&p, 0, 2); /* what another shares is not freed */
    CHECK_FAILS(pair_begin_with(&p, 1, positions, ids, first_layer), KVC_ERR_FULL, "1 more tokens", "capacity 30");
    pair_check(&p);
    pair_free(&p);
}

/* Tokens of which no replaced layer keeps rows need no room: those of a batch that restores an encoder's rows alone. */
static void test_cross_alone(void)
{
    const kvc_layer cross = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_CROSS, .max_len = 3}};
    static pair p;
    kvc_batch *batch = NULL;
    p = (pair){.config = {.block_size = 4, .capacity = 3}};
    pair_new(&p, 2, (const kvc_layer[]){layer_with(full_policy), cross});
    kvc_begin_args args = {.struct_size = sizeof args,
                           .num_tokens = 4,
                           .positions = (int32_t[]){0, 1, 2, 3},
                           .seq_ids = (int64_t[]){5, 5, 5, 5},
                           .replaced = (uint8_t[]){0, 1}};
    const float rows[8] = {0};
    const kvc_put_args put = {.struct_size = sizeof put, .k = rows, .v = rows, .num_tokens = 2, .seq_id = 5};
    CHECKF(kvc_begin_with(p.cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    CHECK(kvc_put(batch, 1, &put) == KVC_OK && kvc_commit(batch) == KVC_OK && kvc_seq_len(p.cache, 5, 1) == 2);
    args.replaced = (uint8_t[]){1, 0};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_FULL, "4 more tokens", "capacity 3");
    pair_free(&p);
}

static void test_refused(void)
{
    const kvc_layer cross = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_CROSS, .max_len = 3}},
                    none = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_NONE}},
                    window = {.num_kv_heads = 1, .k_dim = 4, .v_dim = 4, .policy = {.kind = KVC_SLIDING, .window = 3}};
    kvc_layer shared = window;
    shared.share = 2;
    static pair p;
    kvc_batch *batch = NULL;
    p = (pair){.config.block_size = 4};
    pair_new(&p, 6, (const kvc_layer[]){none, window, shared, window, cross, layer_with(full_policy)});
    kvc_begin_args args = {.struct_size = sizeof args,
                           .num_tokens = 3,
                           .positions = (int32_t[]){2, 0, 2},
                           .seq_ids = (int64_t[]){5, 5, 6},
                           .replaced = (uint8_t[]){0, 1, 0, 0, 0, 0}};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "not layer 3", "names layer 1");
    args.replaced = (uint8_t[]){1, 0, 1, 0, 0, 0};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "replaced names no layer", "rows of its own");
    args.replaced = (uint8_t[]){1, 1, 0, 1, 1, 0};
    args.parents = (int32_t[]){-1, -1, -1};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "parents", "NULL");
    args.parents = NULL;
    args.unstored = (uint8_t[]){0, 0, 0};
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "unstored", "NULL");
    args.unstored = NULL;
    const int32_t *positions = args.positions;
    args.positions = NULL;
    CHECK_FAILS(kvc_begin_with(p.cache, &args, &batch), KVC_ERR_INVALID, "positions", "NULL");
    args.positions = positions;
    CHECKF(kvc_begin_with(p.cache, &args, &batch) == KVC_OK, "%s", kvc_last_error());
    const float row[16] = {0};
    const kvc_put_args put = {.struct_size = sizeof put, .k = row, .v = row};
    kvc_span span;
    CHECK_FAILS(kvc_put(batch, 5, &put), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK_FAILS(kvc_slots(batch, 5, 0, &span, sizeof span, NULL), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK_FAILS(kvc_written(batch, 5, 0, 1), KVC_ERR_INVALID, "layer 5", "restores");
    CHECK(kvc_put(batch, 1, &put) == KVC_OK);
    CHECK_FAILS(kvc_commit(batch), KVC_ERR_INVALID, "token 0", "layer 3");
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 1, .num_heads = 1};
    const kvc_attend_args attend = {.struct_size = sizeof attend, .q = row, .out = (float[16]){0}};
    const kvc_dense_args dense = {.struct_size = sizeof dense};
    kvc_plan *made = NULL;
    int64_t num;
    int32_t some;
    CHECK_FAILS(kvc_plan_new(batch, &plan, &made), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_attend(batch, &plan, &attend), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense_rows(batch, 1, &num), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense_sequences(batch, 1, &some, &num), KVC_ERR_INVALID, "restores", "attend");
    CHECK_FAILS(kvc_dense(batch, 1, &dense), KVC_ERR_INVALID, "restores", "attend");
    CHECK(kvc_put(batch, 3, &put) == KVC_OK);
    kvc_put_args encoded = put;
    encoded.num_tokens = 2;
    encoded.seq_id = 6;
    CHECK(kvc_put(batch, 4, &encoded) == KVC_OK && kvc_commit(batch) == KVC_OK);
    CHECK(kvc_validate(p.cache) == KVC_OK);
    CHECK(kvc_seq_len(p.cache, 6, 4) == 2 && kvc_seq_len(p.cache, 5, 3) == 2 && kvc_seq_len(p.cache, 5, 5) == 0);
    pair_free(&p);
}

int main(void)
{
    for (int shares = 0; shares < 2; shares++)
        for (int32_t sinks = 0; sinks <= SINKS; sinks += SINKS) {
            test_state(sinks, shares);
            test_checkpoint(sinks, shares);
        }
    test_left_out();
    test_windows_alone();
    test_others_keep_theirs();
    test_kept();
    test_limits();
    test_cross_alone();
    test_refused();
    return test_result();
}

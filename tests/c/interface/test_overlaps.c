/* Outputs whose rows would overlap are refused, and nothing is written.  The message names the stride, and its least
 * value.  Arrays with heads outside, or backwards with gaps, are taken. */
#include "support/test.h"

enum { DIM = 32, HEADS = 3, INNER = 3, TOKENS = 2 * INNER, WIDTH = 4, SPACE = 1 << 13 };

/* Everything that the calls write. */
static struct {
    uint8_t out[SPACE], lse[SPACE], k[SPACE], v[SPACE], mask[SPACE], seen[SPACE], weights[SPACE], chosen[SPACE],
        scores[SPACE];
} to;

static float q[TOKENS * HEADS * DIM];
static kvc_cache *cache;
static kvc_batch *batch;

/* ---- the calls, without strides ---------------------------------------------------------------------------------- */

static const kvc_plan_args attention = {.struct_size = sizeof attention, .num_heads = HEADS, .num_threads = 1};
static const kvc_plan_args choice = {
    .struct_size = sizeof choice, .layer = 1, .num_heads = HEADS, .num_threads = 1, .num_choices = HEADS};
static kvc_attend_args attend = {
    .struct_size = sizeof attend, .q = q, .out = to.out, .lse = (float *)(void *)to.lse, .tokens_per_sequence = INNER};
static kvc_rows_out dense_rows = {.struct_size = sizeof dense_rows, .k = to.k, .v = to.v};
static kvc_dense_args dense = {.struct_size = sizeof dense,
                               .rows = &dense_rows,
                               .mask = (float *)(void *)to.mask,
                               .seen = to.seen,
                               .num_rows = INNER,
                               .by_sequence = 1};
static kvc_choose_args choose = {.struct_size = sizeof choose,
                                 .q = q,
                                 .chosen = (int32_t *)(void *)to.chosen,
                                 .scores = (float *)(void *)to.scores,
                                 .tokens_per_sequence = INNER,
                                 .num_choices = HEADS,
                                 .width = WIDTH};
static kvc_rows_out raw = {.struct_size = sizeof raw, .k = to.k, .v = to.v, .raw = 1}; /* q8_0: 34 bytes */
static kvc_rows_out floats = {.struct_size = sizeof floats, .k = to.k, .v = to.v};
static kvc_weights_args weights = {.struct_size = sizeof weights,
                                   .q = q,
                                   .weights = (float *)(void *)to.weights,
                                   .num_rows = INNER,
                                   .num_queries = 1,
                                   .num_heads = HEADS};

static kvc_status call_attend(void) { return kvc_attend(batch, &attention, &attend); }
static kvc_status call_dense(void) { return kvc_dense(batch, 0, &dense); }
static kvc_status call_choose(void) { return kvc_choose(batch, &choice, &choose); }
static kvc_status call_gather(void) { return kvc_gather(cache, 0, 0, 0, INNER, &raw); }
static kvc_status call_gather_floats(void) { return kvc_gather(cache, 0, 0, 0, INNER, &floats); }
static kvc_status call_extract(void) { return kvc_extract(cache, 0, 0, 0, INNER, &raw); }
static kvc_status call_weights(void) { return kvc_weights(cache, 0, 0, &weights); }

static kvc_status call_plan_run(void) {
    kvc_plan *plan = NULL;
    CHECK(kvc_plan_new(batch, &attention, &plan) == KVC_OK);
    const kvc_status status = kvc_plan_run(plan, 0, &attend, 0);
    kvc_plan_free(plan);
    return status;
}

static kvc_status call_plan_choose(void) {
    kvc_plan *plan = NULL;
    CHECK(kvc_plan_new(batch, &choice, &plan) == KVC_OK);
    const kvc_status status = kvc_plan_choose(plan, 1, &choose, 0);
    kvc_plan_free(plan);
    return status;
}

/* ---- what they refuse -------------------------------------------------------------------------------------------- */

typedef struct refused {
    int64_t *stride, given;
    const char *named;
    int least;
} refused;

#define ROW(field, given, named, least) {&field, given, named " is " #given " bytes", least}

static const refused of_attend[] = {
    ROW(attend.out_head_stride, 124, "out: out_head_stride", 4 * DIM),
    ROW(attend.out_head_stride, -124, "out: out_head_stride", 4 * DIM),
    ROW(attend.out_token_stride, 128, "out: out_token_stride", HEADS * 4 * DIM),
    ROW(attend.out_batch_stride, 384, "out: out_batch_stride", INNER * HEADS * 4 * DIM),
    ROW(attend.lse_token_stride, 4, "lse: lse_token_stride", HEADS * 4),
    ROW(attend.lse_batch_stride, 4, "lse: lse_batch_stride", HEADS * 4),
};
static const refused of_heads_outside[] = {ROW(attend.out_head_stride, 256, "out: out_head_stride", INNER * 4 * DIM)};
static const refused of_dense[] = {
    ROW(dense_rows.k_head_stride, 64, "rows: k_head_stride", 4 * DIM),
    ROW(dense_rows.v_row_stride, 64, "rows: v_row_stride", 4 * DIM),
    ROW(dense.v_batch_stride, 384, "rows: v_batch_stride", INNER * HEADS * 4 * DIM),
    ROW(dense.mask_token_stride, 8, "mask: mask_token_stride", INNER * 4),
    ROW(dense.seen_token_stride, 2, "seen: seen_token_stride", INNER),
};
static const refused of_choose[] = {
    ROW(choose.chosen_choice_stride, 4, "chosen: chosen_choice_stride", WIDTH * 4),
    ROW(choose.chosen_token_stride, 16, "chosen: chosen_token_stride", HEADS * WIDTH * 4),
    ROW(choose.chosen_batch_stride, 48, "chosen: chosen_batch_stride", INNER * HEADS * WIDTH * 4),
    ROW(choose.scores_choice_stride, 12, "scores: scores_choice_stride", WIDTH * 4),
    ROW(choose.scores_token_stride, 16, "scores: scores_token_stride", HEADS * WIDTH * 4),
    ROW(choose.scores_batch_stride, 48, "scores: scores_batch_stride", INNER * HEADS * WIDTH * 4),
};
static const refused of_raw[] = {
    ROW(raw.k_head_stride, 33, "out: k_head_stride", 34),
    ROW(raw.k_row_stride, 34, "out: k_row_stride", HEADS * 34),
};
static const refused of_floats[] = {ROW(floats.v_row_stride, 128, "out: v_row_stride", HEADS * 128)};
static const refused of_weights[] = {ROW(weights.weights_head_stride, 8, "weights: weights_head_stride", INNER * 4)};

static void check(kvc_status (*call)(void), const refused *rows, size_t size) {
    memset(&to, 0x7f, sizeof to);
    for (const refused *row = rows; row < rows + size / sizeof *rows; row++) {
        const int64_t good = *row->stride;
        char least[64];
        snprintf(least, sizeof least, "at least %d,", row->least);
        *row->stride = row->given;
        CHECK_FAILS(call(), KVC_ERR_INVALID, row->named, least);
        *row->stride = good;
    }
    for (size_t i = 0; i < sizeof to; i++) CHECK(((const uint8_t *)&to)[i] == 0x7f);
    CHECKF(call() == KVC_OK, "%s", kvc_last_error());
}

int main(void) {
    const kvc_layer layers[] = {{.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_Q8_0},
                                {.num_kv_heads = 1, .k_dim = DIM}};
    const int64_t ids[TOKENS] = {0, 0, 0, 1, 1, 1};
    const kvc_put_args rows = zero_rows(0, 0);
    kvc_put_args keys = rows;
    keys.v = NULL;
    cache = cache_of(layers, 2, (kvc_config){.num_threads = 1});
    CHECK(kvc_begin(cache, TOKENS, NULL, ids, NULL, &batch) == KVC_OK);
    CHECKF(kvc_put(batch, 0, &rows) == KVC_OK && kvc_put(batch, 1, &keys) == KVC_OK, "%s", kvc_last_error());
    check(call_attend, of_attend, sizeof of_attend);
    check(call_plan_run, of_attend, sizeof of_attend);
    check(call_dense, of_dense, sizeof of_dense);
    check(call_choose, of_choose, sizeof of_choose);
    check(call_plan_choose, of_choose, sizeof of_choose);
    attend.out_head_stride = TOKENS * 4 * DIM;
    attend.out_token_stride = 4 * DIM;
    attend.out_batch_stride = INNER * 4 * DIM;
    check(call_attend, of_heads_outside, sizeof of_heads_outside);
    check(call_plan_run, of_heads_outside, sizeof of_heads_outside);
    CHECK(kvc_commit(batch) == KVC_OK);
    raw.k_row_stride = -HEADS * 34 - 1; /* backwards, with gaps */
    raw.k = to.k + INNER * (HEADS * 34 + 1);
    check(call_gather, of_raw, sizeof of_raw);
    check(call_extract, of_raw, sizeof of_raw);
    check(call_gather_floats, of_floats, sizeof of_floats);
    check(call_weights, of_weights, sizeof of_weights);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return test_result();
}

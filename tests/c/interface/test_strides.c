/* Arrays whose rows lie side by side need no strides: each call does the same without them as with them.  Outputs whose
 * rows overlap are refused by name, and nothing is written. */
#include "support/test.h"

enum {
    DIM = 32,
    HEADS = 3,
    GROUP = 2,
    INNER = 3,
    SEQUENCES = 2,
    TOKENS = SEQUENCES * INNER,
    WIDTH = 4,
    SPACE = 1 << 14
};

/* Everything that the calls write. */
typedef struct results {
    uint8_t out[SPACE], lse[SPACE], k[SPACE], v[SPACE], dense_k[SPACE], dense_v[SPACE], mask[SPACE], seen[SPACE];
    uint8_t gathered_k[SPACE], gathered_v[SPACE], weights[SPACE], chosen[SPACE], scores[SPACE];
} results;

/* A layer, and the tokens that a batch has in it.  inner: tokens_per_sequence. */
typedef struct shape {
    kvc_layer layer;
    int32_t num_tokens, inner;
    int raw;
} shape;

static uint8_t given[4][SPACE];
static results got[2];
static int leaves_out; /* strides of arrays without gaps */

static int64_t by(int64_t stride) { return leaves_out ? 0 : stride; }

static int64_t k_row(const shape *s, int raw) { return (int64_t)kvc_row_bytes(raw ? s->layer.k_type : KVC_F32, DIM); }
static int64_t v_row(const shape *s, int raw) {
    return (int64_t)kvc_row_bytes(raw ? s->layer.v_type : KVC_F32, s->layer.v_dim);
}
static int has_values(const shape *s) { return s->layer.v_dim && !s->layer.value_in_key; }

static kvc_put_args put_of(const shape *s, int32_t rows_of_sequence) {
    const int64_t heads = s->layer.num_kv_heads, k = k_row(s, s->raw), v = v_row(s, s->raw);
    return (kvc_put_args){.struct_size = sizeof(kvc_put_args),
                          .k = given[0],
                          .v = has_values(s) ? given[1] : NULL,
                          .k_type = s->raw ? s->layer.k_type : KVC_F32,
                          .v_type = s->raw ? s->layer.v_type : KVC_F32,
                          .k_head_stride = by(k),
                          .k_token_stride = by(heads * k),
                          .k_batch_stride = by(rows_of_sequence * heads * k),
                          .v_head_stride = by(v),
                          .v_token_stride = by(heads * v),
                          .v_batch_stride = by(rows_of_sequence * heads * v),
                          .tokens_per_sequence = s->inner};
}

static kvc_rows_out rows_out(const shape *s, int raw, void *k, void *v) {
    const int64_t heads = s->layer.num_kv_heads, k_bytes = k_row(s, raw), v_bytes = v_row(s, raw);
    return (kvc_rows_out){.struct_size = sizeof(kvc_rows_out),
                          .k = k,
                          .v = s->layer.v_dim ? v : NULL,
                          .k_head_stride = by(k_bytes),
                          .k_row_stride = by(heads * k_bytes),
                          .v_head_stride = by(v_bytes),
                          .v_row_stride = by(heads * v_bytes),
                          .raw = raw};
}

static void attend(kvc_batch *batch, const shape *s, results *r) {
    const int64_t heads = GROUP * s->layer.num_kv_heads, q = DIM * 2, out = s->layer.v_dim * 2, lse = sizeof(float);
    static int32_t positions[TOKENS * HEADS * WIDTH];
    const int64_t choice = WIDTH * sizeof *positions, choices = s->layer.num_kv_heads;
    for (int i = 0; i < TOKENS * HEADS * WIDTH; i++) positions[i] = i % 5 ? i % INNER : -1;
    const kvc_chosen chosen = {.struct_size = sizeof chosen,
                               .positions = positions,
                               .choice_stride = by(choice),
                               .token_stride = by(choices * choice),
                               .batch_stride = by(s->inner * choices * choice),
                               .num_choices = s->layer.num_kv_heads,
                               .width = WIDTH};
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = (int32_t)heads};
    kvc_attend_args args = {.struct_size = sizeof args,
                            .q = given[2],
                            .out = r->out,
                            .lse = (float *)(void *)r->lse,
                            .q_type = KVC_F16,
                            .scale = 1,
                            .q_head_stride = by(q),
                            .q_token_stride = by(heads * q),
                            .q_batch_stride = by(s->inner * heads * q),
                            .out_head_stride = by(out),
                            .out_token_stride = by(heads * out),
                            .out_batch_stride = by(s->inner * heads * out),
                            .lse_head_stride = by(lse),
                            .lse_token_stride = by(heads * lse),
                            .lse_batch_stride = by(s->inner * heads * lse),
                            .tokens_per_sequence = s->inner};
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    args.prior_out = r->out;
    args.prior_lse = args.lse;
    args.chosen = &chosen;
    args.out = r->out + SPACE / 2;
    args.lse = (float *)(void *)(r->lse + SPACE / 2);
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
}

static void copy_dense(kvc_batch *batch, const shape *s, results *r) {
    const int64_t row = s->layer.num_kv_heads * k_row(s, s->raw), v = s->layer.num_kv_heads * v_row(s, s->raw);
    const kvc_rows_out rows = rows_out(s, s->raw, r->dense_k, r->dense_v);
    kvc_dense_args args = {.struct_size = sizeof args,
                           .rows = &rows,
                           .mask = (float *)(void *)r->mask,
                           .seen = r->seen,
                           .by_sequence = s->inner != 0};
    int32_t num_sequences;
    CHECK((s->inner ? kvc_dense_sequences(batch, 0, &num_sequences, &args.num_rows)
                    : kvc_dense_rows(batch, 0, &args.num_rows)) == KVC_OK);
    args.mask_token_stride = by(args.num_rows * (int64_t)sizeof *args.mask);
    args.seen_token_stride = by(args.num_rows);
    args.k_batch_stride = by(args.num_rows * row);
    args.v_batch_stride = by(args.num_rows * v);
    CHECKF(kvc_dense(batch, 0, &args) == KVC_OK, "%s", kvc_last_error());
}

static void choose(kvc_batch *batch, const shape *s, results *r) {
    enum { CHOICES = HEADS };
    static const int32_t among[TOKENS][CHOICES][WIDTH] = {{{0, 1, 2, 3}, {1}}, {{0, 2}}, {{1, 0, 2}}, {{0, 1}, {1, 0}}};
    const int64_t heads = HEADS * GROUP * s->layer.num_kv_heads, row = sizeof among[0][0];
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = (int32_t)heads};
    const kvc_choose_args args = {.struct_size = sizeof args,
                                  .q = given[2],
                                  .weights = (const float *)(const void *)given[3],
                                  .among = among[0][0],
                                  .chosen = (int32_t *)(void *)r->chosen,
                                  .scores = (float *)(void *)r->scores,
                                  .q_head_stride = by(DIM * 2),
                                  .q_token_stride = by(heads * DIM * 2),
                                  .q_batch_stride = by(s->inner * heads * DIM * 2),
                                  .weights_head_stride = by(sizeof(float)),
                                  .weights_token_stride = by(heads * (int64_t)sizeof(float)),
                                  .weights_batch_stride = by(s->inner * heads * (int64_t)sizeof(float)),
                                  .among_choice_stride = by(row),
                                  .among_token_stride = by(CHOICES * row),
                                  .among_batch_stride = by(s->inner * CHOICES * row),
                                  .chosen_choice_stride = by(row),
                                  .chosen_token_stride = by(CHOICES * row),
                                  .chosen_batch_stride = by(s->inner * CHOICES * row),
                                  .scores_choice_stride = by(row),
                                  .scores_token_stride = by(CHOICES * row),
                                  .scores_batch_stride = by(s->inner * CHOICES * row),
                                  .tokens_per_sequence = s->inner,
                                  .q_type = KVC_F16,
                                  .num_choices = CHOICES,
                                  .width = WIDTH,
                                  .among_width = WIDTH};
    CHECKF(kvc_choose(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
}

static void weigh(kvc_cache *cache, const shape *s, results *r) {
    const int64_t heads = GROUP * s->layer.num_kv_heads;
    kvc_weights_args args = {.struct_size = sizeof args,
                             .q = given[2],
                             .weights = (float *)(void *)r->weights,
                             .q_head_stride = by(DIM * 2),
                             .q_token_stride = by(heads * DIM * 2),
                             .num_rows = kvc_seq_len(cache, 0, 0),
                             .num_queries = 3,
                             .num_heads = (int32_t)heads,
                             .q_type = KVC_F16,
                             .scale = 1};
    args.weights_head_stride = by(args.num_rows * (int64_t)sizeof *args.weights);
    CHECKF(kvc_weights(cache, 0, 0, &args) == KVC_OK, "%s", kvc_last_error());
}

static void read_and_replace(kvc_cache *cache, const shape *s, results *r) {
    const int32_t end = kvc_next_position(cache, 0);
    const kvc_put_args put = put_of(s, 0);
    const kvc_rows_out all = rows_out(s, s->raw, r->k, r->v), after = rows_out(s, 1, r->gathered_k, r->gathered_v);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = given[3],
                            .v = put.v ? given[2] : NULL,
                            .k_type = put.k_type,
                            .v_type = put.v_type,
                            .k_head_stride = put.k_head_stride,
                            .k_row_stride = put.k_token_stride,
                            .v_head_stride = put.v_head_stride,
                            .v_row_stride = put.v_token_stride,
                            .skip_missing = 1};
    CHECKF(kvc_extract(cache, 0, 0, 0, end, &all) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_inject(cache, 0, 0, 0, end, &in) == KVC_OK, "%s", kvc_last_error());
    CHECKF(kvc_gather(cache, 0, 0, 0, kvc_seq_len(cache, 0, 0), &after) == KVC_OK, "%s", kvc_last_error());
}

/* Begins a batch of sequences, in lock step or not, and puts its rows.  A sequence begins at its own position, so that
 * one may complete more strides than the other. */
static kvc_batch *begin(kvc_cache *cache, const shape *s) {
    static const int32_t lengths[] = {0, 1};
    const int32_t inner = s->inner ? s->inner : s->num_tokens,
                  stride = s->layer.policy.stride ? s->layer.policy.stride : 1;
    int32_t positions[TOKENS], most = 0;
    int64_t ids[TOKENS];
    kvc_batch *batch = NULL;
    for (int32_t t = 0; t < s->num_tokens; t++) ids[t] = t / inner, positions[t] = lengths[t / inner] + t % inner;
    for (int32_t m = 0; m < s->num_tokens / inner; m++) {
        const int32_t rows = (lengths[m] + inner) / stride - lengths[m] / stride;
        if (rows > most) most = rows;
    }
    CHECKF(kvc_begin(cache, s->num_tokens, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    const kvc_put_args put = put_of(s, most), other = zero_rows(0, 0);
    CHECKF(kvc_put(batch, 0, &put) == KVC_OK && kvc_put(batch, 1, &other) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

/* Makes all calls that the layer takes, and returns what they write. */
static void run(const shape *s, results *r) {
    const kvc_layer layers[] = {s->layer, {.num_kv_heads = 1, .k_dim = 1, .v_dim = 1}};
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){.block_size = 16, .num_threads = 1});
    memset(r, 0x7f, sizeof *r);
    kvc_batch *batch = begin(cache, s);
    if (s->layer.v_dim) {
        attend(batch, s, r);
        copy_dense(batch, s, r);
    } else {
        choose(batch, s, r);
    }
    CHECKF(kvc_commit(batch) == KVC_OK, "%s", kvc_last_error());
    if (s->layer.v_dim) weigh(cache, s, r);
    read_and_replace(cache, s, r);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static void check_shape(const shape *s) {
    for (leaves_out = 0; leaves_out < 2; leaves_out++) run(s, &got[leaves_out]);
    leaves_out = 0;
    CHECKF(!memcmp(&got[0], &got[1], sizeof *got), "types %d and %d, %d heads, %d tokens, inner %d, stride %d, raw %d",
           s->layer.k_type, s->layer.v_type, s->layer.num_kv_heads, s->num_tokens, s->inner, s->layer.policy.stride,
           s->raw);
}

static void fill_given(int raw) {
    for (int a = 0; a < 4; a++)
        for (int i = 0; i < SPACE / 4; i++) {
            const float x = (float)random_int(-8, 9);
            const uint32_t bytes = (uint32_t)random_bits() & 0x3b3b3b3b; /* no float or f16 in them is NaN */
            memcpy(given[a] + 4 * i, raw ? (const void *)&bytes : (const void *)&x, 4);
        }
}

static void test_defaults(void) {
    static const int32_t types[] = {KVC_F32, KVC_F16, KVC_BF16, KVC_Q8_0, KVC_Q4_0, KVC_INT8, KVC_INT4};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (int way = 0; way < 2 * 2 * 3; way++) {
            shape s = {.raw = way % 2, .layer = {.num_kv_heads = way / 2 % 2 ? HEADS : 1, .k_dim = DIM, .v_dim = DIM}};
            s.layer.k_type = types[i];
            s.layer.v_type = types[(i + 1) % (sizeof types / sizeof *types)];
            s.num_tokens = way / 4 == 0 ? 1 : way / 4 == 1 ? INNER : TOKENS;
            s.inner = way / 4 == 2 ? INNER : 0;
            fill_given(s.raw);
            check_shape(&s);
            shape keys = s, strided = s, latent = s;
            keys.layer.v_dim = 0;
            check_shape(&keys);
            strided.layer.policy.stride = 2;
            check_shape(&strided);
            latent.layer.value_in_key = 1;
            latent.layer.v_type = s.layer.k_type;
            check_shape(&latent);
        }
}

/* ---- outputs that overlap ---------------------------------------------------------------------------------------- */

/* Makes a call with one field changed: it is refused by the field's name, and what has to be given instead. */
#define REFUSES(call, field, value, ...)                                 \
    do {                                                                 \
        char instead_[64];                                               \
        __VA_ARGS__;                                                     \
        snprintf(instead_, sizeof instead_, "at least %d,", (int)value); \
        CHECK_FAILS(call, KVC_ERR_INVALID, field, instead_);             \
    } while (0)

static int is_untouched(const results *r) {
    static results untouched;
    memset(&untouched, 0x7f, sizeof untouched);
    return !memcmp(r, &untouched, sizeof untouched);
}

/* Checks that attention refuses overlapping results, in one call or in tasks. */
static void check_attention(kvc_batch *batch, results *r) {
    const kvc_plan_args plan_args = {.struct_size = sizeof plan_args, .num_heads = HEADS, .num_threads = 1};
    const kvc_attend_args good = {.struct_size = sizeof good,
                                  .q = given[2],
                                  .out = r->out,
                                  .lse = (float *)(void *)r->lse,
                                  .tokens_per_sequence = INNER};
    kvc_plan *plan = NULL;
    CHECK(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK);
    for (int tasks = 0; tasks < 2; tasks++) {
        kvc_attend_args args;
#define ATTEND (tasks ? kvc_plan_run(plan, 0, &args, 0) : kvc_attend(batch, &plan_args, &args))
        REFUSES(ATTEND, "out: out_head_stride is 124 bytes", 4 * DIM, args = good, args.out_head_stride = 4 * DIM - 4);
        REFUSES(ATTEND, "out: out_head_stride is -124 bytes", 4 * DIM, args = good, args.out_head_stride = 4 - 4 * DIM);
        REFUSES(ATTEND, "out: out_token_stride is 128 bytes", HEADS * 4 * DIM, args = good,
                args.out_token_stride = 4 * DIM);
        REFUSES(ATTEND, "out: out_batch_stride is 384 bytes", INNER * HEADS * 4 * DIM, args = good,
                args.out_batch_stride = HEADS * 4 * DIM);
        REFUSES(ATTEND, "out: out_head_stride is 256 bytes", INNER * 4 * DIM, args = good,
                args.out_head_stride = 2 * 4 * DIM, args.out_token_stride = 4 * DIM,
                args.out_batch_stride = INNER * 4 * DIM); /* heads outside, too near */
        REFUSES(ATTEND, "lse: lse_token_stride is 4 bytes", HEADS * 4, args = good, args.lse_token_stride = 4);
        REFUSES(ATTEND, "lse: lse_batch_stride is 4 bytes", HEADS * 4, args = good, args.lse_batch_stride = 4);
        CHECK(is_untouched(r));
        args = good;
        args.out_head_stride = TOKENS * 4 * DIM;
        args.out_token_stride = 4 * DIM;
        args.out_batch_stride = INNER * 4 * DIM;
        CHECKF(ATTEND == KVC_OK, "%s", kvc_last_error()); /* heads outside */
        memset(r, 0x7f, sizeof *r);
#undef ATTEND
    }
    kvc_plan_free(plan);
}

static void check_dense(kvc_batch *batch, results *r) {
    const kvc_rows_out good_rows = {.struct_size = sizeof good_rows, .k = r->k, .v = r->v};
    const kvc_dense_args good = {.struct_size = sizeof good,
                                 .mask = (float *)(void *)r->mask,
                                 .seen = r->seen,
                                 .num_rows = INNER,
                                 .by_sequence = 1};
    kvc_rows_out rows;
    kvc_dense_args args;
#define FROM_GOOD rows = good_rows, args = good, args.rows = &rows
    REFUSES(kvc_dense(batch, 0, &args), "rows: k_head_stride is 64 bytes", 4 * DIM, FROM_GOOD, rows.k_head_stride = 64);
    REFUSES(kvc_dense(batch, 0, &args), "rows: v_row_stride is 64 bytes", 4 * DIM, FROM_GOOD, rows.v_row_stride = 64);
    REFUSES(kvc_dense(batch, 0, &args), "rows: v_batch_stride is 384 bytes", INNER * HEADS * 4 * DIM, FROM_GOOD,
            args.v_batch_stride = HEADS * 4 * DIM);
    REFUSES(kvc_dense(batch, 0, &args), "mask: mask_token_stride is 8 bytes", INNER * 4, FROM_GOOD,
            args.mask_token_stride = 8);
    REFUSES(kvc_dense(batch, 0, &args), "seen: seen_token_stride is 2 bytes", INNER, FROM_GOOD,
            args.seen_token_stride = 2);
    CHECK(is_untouched(r));
    FROM_GOOD;
    CHECKF(kvc_dense(batch, 0, &args) == KVC_OK, "%s", kvc_last_error());
#undef FROM_GOOD
    memset(r, 0x7f, sizeof *r);
}

static void check_reading(kvc_cache *cache, results *r) {
    const kvc_rows_out good = {.struct_size = sizeof good, .k = r->k, .v = r->v, .raw = 1}; /* q8_0: 34 bytes */
    const kvc_weights_args good_weights = {.struct_size = sizeof good_weights,
                                           .q = given[2],
                                           .weights = (float *)(void *)r->weights,
                                           .num_rows = INNER,
                                           .num_queries = 1,
                                           .num_heads = HEADS};
    for (int by_position = 0; by_position < 2; by_position++) {
        kvc_rows_out out;
#define READ (by_position ? kvc_extract(cache, 0, 0, 0, INNER, &out) : kvc_gather(cache, 0, 0, 0, INNER, &out))
        REFUSES(READ, "out: k_head_stride is 33 bytes", 34, out = good, out.k_head_stride = 33);
        REFUSES(READ, "out: k_row_stride is 34 bytes", HEADS * 34, out = good, out.k_row_stride = 34);
        REFUSES(READ, "out: v_row_stride is 128 bytes", HEADS * 128, out = good, out.v_row_stride = 128, out.raw = 0);
        CHECK(is_untouched(r));
        out = good;
        out.k_row_stride = -HEADS * 34 - 1;
        out.k = r->k + INNER * (HEADS * 34 + 1);
        CHECKF(READ == KVC_OK, "%s", kvc_last_error()); /* backwards, with gaps */
        memset(r, 0x7f, sizeof *r);
#undef READ
    }
    kvc_weights_args args;
    REFUSES(kvc_weights(cache, 0, 0, &args), "weights: weights_head_stride is 8 bytes", INNER * 4, args = good_weights,
            args.weights_head_stride = 8);
    CHECK(is_untouched(r));
}

static void check_choice(kvc_batch *batch, results *r) {
    const kvc_plan_args plan_args = {
        .struct_size = sizeof plan_args, .layer = 1, .num_heads = HEADS, .num_threads = 1, .num_choices = HEADS};
    const kvc_choose_args good = {.struct_size = sizeof good,
                                  .q = given[2],
                                  .chosen = (int32_t *)(void *)r->chosen,
                                  .scores = (float *)(void *)r->scores,
                                  .num_choices = HEADS,
                                  .width = WIDTH};
    kvc_plan *plan = NULL;
    CHECKF(kvc_plan_new(batch, &plan_args, &plan) == KVC_OK, "%s", kvc_last_error());
    for (int tasks = 0; tasks < 2; tasks++) {
        kvc_choose_args args;
#define CHOOSE (tasks ? kvc_plan_choose(plan, 1, &args, 0) : kvc_choose(batch, &plan_args, &args))
        REFUSES(CHOOSE, "chosen: chosen_choice_stride is 4 bytes", WIDTH * 4, args = good,
                args.chosen_choice_stride = 4);
        REFUSES(CHOOSE, "chosen: chosen_token_stride is 16 bytes", HEADS * WIDTH * 4, args = good,
                args.chosen_token_stride = WIDTH * 4);
        REFUSES(CHOOSE, "chosen: chosen_batch_stride is 48 bytes", INNER * HEADS * WIDTH * 4, args = good,
                args.tokens_per_sequence = INNER, args.chosen_batch_stride = HEADS * WIDTH * 4);
        REFUSES(CHOOSE, "scores: scores_batch_stride is 48 bytes", INNER * HEADS * WIDTH * 4, args = good,
                args.tokens_per_sequence = INNER, args.scores_batch_stride = HEADS * WIDTH * 4);
        REFUSES(CHOOSE, "scores: scores_choice_stride is 12 bytes", WIDTH * 4, args = good,
                args.scores_choice_stride = 12);
        REFUSES(CHOOSE, "scores: scores_token_stride is 16 bytes", HEADS * WIDTH * 4, args = good,
                args.scores_token_stride = WIDTH * 4);
        CHECK(is_untouched(r));
        args = good;
        CHECKF(CHOOSE == KVC_OK, "%s", kvc_last_error());
        memset(r, 0x7f, sizeof *r);
#undef CHOOSE
    }
    kvc_plan_free(plan);
}

static void test_overlaps(void) {
    const kvc_layer layers[] = {{.num_kv_heads = HEADS, .k_dim = DIM, .v_dim = DIM, .k_type = KVC_Q8_0},
                                {.num_kv_heads = 1, .k_dim = DIM}};
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){.num_threads = 1});
    kvc_batch *batch = NULL;
    int64_t ids[TOKENS];
    const kvc_put_args rows = zero_rows(0, 0);
    kvc_put_args keys = rows;
    keys.v = NULL;
    for (int t = 0; t < TOKENS; t++) ids[t] = t / INNER;
    fill_given(0);
    memset(&got[0], 0x7f, sizeof got[0]);
    CHECK(kvc_begin(cache, TOKENS, NULL, ids, NULL, &batch) == KVC_OK);
    CHECKF(kvc_put(batch, 0, &rows) == KVC_OK && kvc_put(batch, 1, &keys) == KVC_OK, "%s", kvc_last_error());
    check_attention(batch, &got[0]);
    check_dense(batch, &got[0]);
    check_choice(batch, &got[0]);
    CHECK(kvc_commit(batch) == KVC_OK);
    check_reading(cache, &got[0]);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

int main(void) {
    test_defaults();
    test_overlaps();
    return test_result();
}

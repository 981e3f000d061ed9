/* A call gives the right results with any of its optional inputs, and the same bits whichever optional outputs it is
 * asked for.  Every combination is tried. */
#include <math.h>

#include "support/test.h"
#include "world/attention.h"

enum { STORED = 9, NEW = 5, ROWS = STORED + NEW, KV = 2, HEADS = 4, DIM = 4, WIDTH = 6, CANARY = 0x5a };

static kvc_cache *cache;
static kvc_batch *batch;
static float k[ROWS][KV][DIM], v[ROWS][KV][DIM], q[NEW][HEADS][DIM];

/* Fills an output with bytes that no call writes, and tells whether they are still there. */
#define FILL(x) memset(&(x), CANARY, sizeof(x))
static int is_untouched(const void *x, size_t size) {
    for (size_t i = 0; i < size; i++)
        if (((const uint8_t *)x)[i] != CANARY) return 0;
    return 1;
}
#define UNTOUCHED(x) is_untouched(&(x), sizeof(x))

/* Checks that an output is as it was once all were given, or untouched if it was left out. */
#define CHECK_OUTPUT(is_given, x, whole) \
    CHECKF((is_given) ? !memcmp(&(x), &(whole), sizeof(x)) : UNTOUCHED(x), "left out: %#x, %s", left_out, #x)

/* Layer 0 holds keys and values, layer 1 keys alone; `put`: the batch's rows of layer 0 are put. */
static void open_stage(int put) {
    const kvc_layer layers[] = {{.num_kv_heads = KV, .k_dim = DIM, .v_dim = DIM},
                                {.num_kv_heads = KV, .k_dim = DIM, .v_dim = 0}};
    cache = cache_of(layers, 2, (kvc_config){.block_size = 4, .num_threads = 1});
    for (int pass = 0; pass < 2; pass++) {
        const int first = pass ? STORED : 0, num = pass ? NEW : STORED;
        CHECK(kvc_begin(cache, num, NULL, NULL, NULL, &batch) == KVC_OK);
        if (!pass || put) put_floats(batch, 0, 0, num, KV, DIM, DIM, k[first], v[first]);
        put_floats(batch, 1, 0, num, KV, DIM, 0, k[first], NULL);
        if (!pass) CHECK(kvc_commit(batch) == KVC_OK);
    }
}

static void close_stage(void) {
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* ---- kvc_attend -------------------------------------------------------------------------------------------------- */

enum { SINKS = 1, ALIBI = 2, CHOSEN = 4, PRIOR = 8, MASKED = 16, NON_CAUSAL = 32, INPUTS = 64 };
enum { NO_LSE = 1, CANCEL = 2, PUT = 4, WAYS = 8 };

static float sinks[HEADS] = {1, -2, 0.5f, 3}, alibi[HEADS] = {0.5f, 0.1f, -0.2f, 0};
static float prior[NEW][HEADS][DIM], prior_lse[NEW][HEADS];
static int32_t entries[NEW][KV][WIDTH];
static const kvc_masked masked = {0, 2, 4};
static const uint8_t non_causal[NEW] = {0, 1, 0, 0, 1};

typedef struct attended {
    float out[NEW][HEADS][DIM], lse[NEW][HEADS];
} attended;

static const kvc_chosen chosen = {.struct_size = sizeof chosen,
                                  .positions = **entries,
                                  .token_stride = sizeof *entries,
                                  .choice_stride = sizeof **entries,
                                  .num_choices = KV,
                                  .width = WIDTH};

/* Compares a result with plain arithmetic. */
static void check_attended(int inputs, const attended *a) {
    for (int t = 0; t < NEW; t++)
        for (int h = 0; h < HEADS; h++) {
            const int kv = h * KV / HEADS, position = STORED + t;
            double wide_q[DIM], wide_k[ROWS][DIM], wide_v[ROWS][DIM];
            seen_row seen[ROWS];
            sight s = {.q = doubles(wide_q, q[t][h], DIM), .k_dim = DIM, .v_dim = DIM, .rows = seen};
            for (int row = 0; row < ROWS; row++) {
                const int is_later = row > position && !(inputs & NON_CAUSAL && non_causal[t]);
                if (is_later || (inputs & CHOSEN && !names_row(&chosen, t, kv, position, row, 1))) continue;
                if (inputs & MASKED && hides_row(&masked, 1, 0, row)) continue;
                seen[s.num++] = (seen_row){.k = doubles(wide_k[row], k[row][kv], DIM),
                                           .v = doubles(wide_v[row], v[row][kv], DIM),
                                           .apart = abs(position - row)};
            }
            if (inputs & ALIBI) s.alibi = (double)alibi[h];
            if (inputs & SINKS) s.sink = &sinks[h];
            if (inputs & PRIOR) s.prior_out = prior[t][h], s.prior_lse = &prior_lse[t][h];
            attend_plainly(&s);
            CHECKF(fabs((double)a->lse[t][h] - s.lse) < 1e-5, "inputs %#x: lse of token %d", inputs, t);
            for (int d = 0; d < DIM; d++)
                CHECKF(fabs((double)a->out[t][h][d] - s.out[d]) < 1e-5, "inputs %#x: token %d", inputs, t);
        }
}

/* Attends with these inputs, in one way. */
static void attend(int inputs, int way, attended *to) {
    static const int32_t cancel = 0;
    const kvc_put_args put = float_rows(0, NEW, KV, DIM, DIM, k[STORED], v[STORED]);
    kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = HEADS};
    kvc_attend_args args = float_queries(HEADS, DIM, DIM, q, to->out);
    FILL(*to);
    if (way & PUT) {
        kvc_abort(batch);
        CHECK(kvc_begin(cache, NEW, NULL, NULL, NULL, &batch) == KVC_OK);
        args.put = &put;
    }
    if (way & CANCEL) args.cancel = &cancel;
    if (!(way & NO_LSE)) args.lse = *to->lse;
    if (!(way & NO_LSE) || inputs & PRIOR)
        args.lse_token_stride = sizeof *to->lse, args.lse_head_stride = sizeof(float);
    if (inputs & SINKS) args.sinks = sinks;
    if (inputs & ALIBI) args.alibi = alibi;
    if (inputs & CHOSEN) args.chosen = &chosen;
    if (inputs & PRIOR) args.prior_out = prior, args.prior_lse = *prior_lse;
    if (inputs & MASKED) plan.masked = &masked, plan.masked_size = sizeof masked, plan.num_masked = 1;
    if (inputs & NON_CAUSAL) plan.non_causal = non_causal;
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "inputs %#x, way %#x: %s", inputs, way, kvc_last_error());
}

static void test_attend(void) {
    for (int t = 0; t < NEW; t++)
        for (int kv = 0; kv < KV; kv++)
            for (int i = 0; i < WIDTH; i++) entries[t][kv][i] = i ? random_int(-1, ROWS) : STORED + t;
    open_stage(1);
    for (int inputs = 0; inputs < INPUTS; inputs++) {
        static attended whole, part;
        attend(inputs, 0, &whole);
        check_attended(inputs, &whole);
        for (int left_out = 1; left_out < WAYS; left_out++) {
            attend(inputs, left_out, &part);
            CHECK_OUTPUT(1, part.out, whole.out);
            CHECK_OUTPUT(!(left_out & NO_LSE), part.lse, whole.lse);
        }
    }
    close_stage();
}

/* ---- kvc_choose -------------------------------------------------------------------------------------------------- */

typedef struct choice {
    int32_t chosen[NEW][KV][WIDTH];
    float scores[NEW][KV][WIDTH];
} choice;

enum { WEIGHTS = 1, AMONG = 2, RELU = 4, LOCAL = 8, CHOOSE_INPUTS = 16 };

static float head_weights[NEW][HEADS];
static int32_t among[NEW][KV][ROWS];

/* Compares a choice with scores in double, which differ by more than their errors. */
static void check_chosen(const kvc_choose_args *a, int inputs, const choice *of) {
    for (int t = 0; t < NEW; t++)
        for (int c = 0; c < KV; c++) {
            candidate list[ROWS];
            int num = 0;
            for (int row = 0; row <= STORED + t; row++) {
                candidate e = {.id = row, .is_forced = must_choose(a, STORED + t, 1, row)};
                for (int h = c * HEADS / KV; h < (c + 1) * HEADS / KV; h++) {
                    double product = 0;
                    for (int d = 0; d < DIM; d++) product += (double)q[t][h][d] * (double)k[row][c][d];
                    e.score += head_score(a, DIM, product, a->weights ? (double)head_weights[t][h] : 1);
                }
                if (may_choose(a, among[t][c], 1, row)) list[num++] = e;
            }
            num = choose_plainly(list, num, WIDTH);
            for (int i = 0; i < WIDTH; i++) {
                const int right = i < num ? list[i].id : -1;
                CHECKF(of->chosen[t][c][i] == right, "inputs %#x: token %d chooses %d, not %d", inputs, t,
                       of->chosen[t][c][i], right);
                CHECK(i < num ? fabs((double)of->scores[t][c][i] - list[i].score) < 1e-5
                              : of->scores[t][c][i] == -INFINITY);
            }
        }
}

static kvc_choose_args choose(int inputs, int way, choice *to) {
    static const int32_t cancel = 0;
    const kvc_plan_args plan = {.struct_size = sizeof plan, .layer = 1, .num_heads = HEADS};
    kvc_choose_args args = {.struct_size = sizeof args,
                            .q = q,
                            .chosen = **to->chosen,
                            .q_token_stride = sizeof *q,
                            .q_head_stride = sizeof **q,
                            .chosen_token_stride = sizeof *to->chosen,
                            .chosen_choice_stride = sizeof **to->chosen,
                            .scores_token_stride = -(int64_t)sizeof *to->scores, /* nothing, without scores */
                            .scores_choice_stride = sizeof **to->scores,
                            .num_choices = KV,
                            .width = WIDTH};
    FILL(*to);
    if (way & CANCEL) args.cancel = &cancel;
    if (!(way & NO_LSE)) args.scores = **to->scores, args.scores_token_stride = sizeof *to->scores;
    if (inputs & WEIGHTS)
        args.weights = *head_weights, args.weights_token_stride = sizeof *head_weights,
        args.weights_head_stride = sizeof(float);
    if (inputs & AMONG)
        args.among = **among, args.among_token_stride = sizeof *among, args.among_choice_stride = sizeof **among,
        args.among_width = ROWS;
    args.relu = inputs & RELU;
    args.num_local = inputs & LOCAL ? 1 : 0;
    CHECKF(kvc_choose(batch, &plan, &args) == KVC_OK, "inputs %#x, way %#x: %s", inputs, way, kvc_last_error());
    return args;
}

static void test_choose(void) {
    for (int t = 0; t < NEW; t++) {
        for (int h = 0; h < HEADS; h++) head_weights[t][h] = random_float();
        for (int i = 0; i < KV * ROWS; i++) among[t][i / ROWS][i % ROWS] = random_int(0, 3) ? i % ROWS : -1;
    }
    open_stage(1);
    for (int inputs = 0; inputs < CHOOSE_INPUTS; inputs++) {
        static choice whole, part;
        const kvc_choose_args args = choose(inputs, 0, &whole);
        check_chosen(&args, inputs, &whole);
        for (int left_out = 1; left_out < PUT; left_out++) {
            choose(inputs, left_out, &part);
            CHECK_OUTPUT(1, part.chosen, whole.chosen);
            CHECK_OUTPUT(!(left_out & NO_LSE), part.scores, whole.scores);
        }
    }
    close_stage();
}

/* ---- kvc_weights ------------------------------------------------------------------------------------------------- */

/* Queries stand where the next token does unless positions are given.  A sink of -inf has no weight. */
static void test_weights(void) {
    static const float no_sinks[HEADS] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
    static const int32_t behind[NEW] = {STORED, STORED, STORED, STORED, STORED};
    float of[2][2][KV][STORED];
    open_stage(1);
    for (int reduction = 0; reduction < 2; reduction++) {
        for (int given = 0; given < 4; given++) {
            kvc_weights_args args = {.struct_size = sizeof args,
                                     .q = q,
                                     .weights = *of[given / 2][given % 2],
                                     .positions = given / 2 ? behind : NULL,
                                     .sinks = given % 2 ? no_sinks : NULL,
                                     .q_token_stride = sizeof *q,
                                     .q_head_stride = sizeof **q,
                                     .weights_head_stride = sizeof ***of,
                                     .num_rows = STORED,
                                     .num_queries = NEW,
                                     .num_heads = HEADS,
                                     .reduction = reduction};
            CHECKF(kvc_weights(cache, 0, 0, &args) == KVC_OK, "%s", kvc_last_error());
            CHECKF(!memcmp(of[given / 2][given % 2], of[0][0], sizeof of[0][0]), "given: %d", given);
        }
    }
    close_stage();
}

/* ---- rows -------------------------------------------------------------------------------------------------------- */

enum {
    NO_K = 1,
    NO_V = 2,
    NO_POSITIONS = 4,
    NO_NUMBER = 8,
    ROWS_WAYS = 16,
    NO_MASK = 16,
    NO_SEEN = 32,
    DENSE_WAYS = 64
};
enum { GATHER, EXTRACT, OF_BATCH, DENSE, NUM_READERS };

typedef struct read {
    float k[KV][ROWS][DIM], v[KV][ROWS][DIM], mask[NEW][ROWS];
    uint8_t seen[NEW][ROWS];
    int32_t positions[ROWS];
    int64_t num;
} read_rows;

static void read_as(int reader, int left_out, read_rows *to) {
    kvc_rows_out out = {.struct_size = sizeof out,
                        .k_head_stride = sizeof *to->k,
                        .k_row_stride = sizeof **to->k,
                        .v_head_stride = sizeof *to->v,
                        .v_row_stride = sizeof **to->v,
                        .batch = reader == OF_BATCH ? batch : NULL};
    FILL(*to);
    if (!(left_out & NO_K)) out.k = to->k;
    if (!(left_out & NO_V)) out.v = to->v;
    if (!(left_out & NO_POSITIONS)) out.positions = to->positions;
    if (!(left_out & NO_NUMBER)) out.num_stored = &to->num;
    kvc_dense_args args = {.struct_size = sizeof args,
                           .rows = &out,
                           .num_rows = ROWS,
                           .mask_token_stride = sizeof *to->mask,
                           .seen_token_stride = sizeof *to->seen,
                           .mask = left_out & NO_MASK ? NULL : *to->mask,
                           .seen = left_out & NO_SEEN ? NULL : *to->seen};
    const kvc_status status = reader == GATHER     ? kvc_gather(cache, 0, 0, 0, STORED, &out)
                              : reader == EXTRACT  ? kvc_extract(cache, 0, 0, 0, STORED, &out)
                              : reader == OF_BATCH ? kvc_gather(cache, 0, 0, 0, ROWS, &out)
                                                   : kvc_dense(batch, 0, &args);
    CHECKF(status == KVC_OK, "reader %d, left out: %#x: %s", reader, left_out, kvc_last_error());
}

static void test_rows(void) {
    open_stage(1);
    for (int reader = 0; reader < NUM_READERS; reader++) {
        static read_rows whole, part;
        const int num = reader < OF_BATCH ? STORED : ROWS, is_dense = reader == DENSE;
        read_as(reader, 0, &whole);
        CHECK(whole.num == num);
        for (int row = 0; row < num; row++) {
            CHECK(whole.positions[row] == row);
            for (int h = 0; h < KV; h++)
                CHECK(!memcmp(whole.k[h][row], k[row][h], sizeof **k) &&
                      !memcmp(whole.v[h][row], v[row][h], sizeof **v));
            for (int t = 0; t < NEW && is_dense; t++)
                CHECK(whole.seen[t][row] == (row <= STORED + t) && (whole.mask[t][row] == 0) == whole.seen[t][row]);
        }
        for (int left_out = 1; left_out < (is_dense ? DENSE_WAYS : ROWS_WAYS); left_out++) {
            read_as(reader, left_out, &part);
            CHECK_OUTPUT(!(left_out & NO_K), part.k, whole.k);
            CHECK_OUTPUT(!(left_out & NO_V), part.v, whole.v);
            CHECK_OUTPUT(!(left_out & NO_POSITIONS), part.positions, whole.positions);
            CHECK_OUTPUT(!(left_out & NO_NUMBER), part.num, whole.num);
            CHECK_OUTPUT(is_dense && !(left_out & NO_MASK), part.mask, whole.mask);
            CHECK_OUTPUT(is_dense && !(left_out & NO_SEEN), part.seen, whole.seen);
        }
    }
    close_stage();
}

int main(void) {
    for (int row = 0; row < ROWS; row++)
        for (int h = 0; h < KV; h++)
            for (int d = 0; d < DIM; d++)
                k[row][h][d] = element_of(0, h, row, d), v[row][h][d] = element_of(1, h, row, d);
    for (int t = 0; t < NEW; t++)
        for (int h = 0; h < HEADS; h++) {
            prior_lse[t][h] = 2 * element_of(3, h, t, 0);
            for (int d = 0; d < DIM; d++)
                q[t][h][d] = 2 * element_of(2, h, t, d), prior[t][h][d] = element_of(3, h, t, d);
        }
    test_attend();
    test_choose();
    test_weights();
    test_rows();
    return test_result();
}

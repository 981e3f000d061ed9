/* Rows selected by sketches of keys (kvc_plan_args.select_rows).  Plain arithmetic in double says which rows these are.
 * Attention to them has the bits of an attention to the same rows, chosen by their positions.  These bits do not depend
 * on threads, blocks or company, nor on how rows came to the cache.
 */
#define _POSIX_C_SOURCE 200809L /* setenv */
#include <math.h>

#include "attend/work.h"
#include "support/aligned.h"
#include "support/isas.h"
#include "support/sketches.h"
#include "support/test.h"

enum { MOST_ROWS = 9000, MOST_NEW = 3, MOST_HEADS = 40, MOST_WIDTH = 128, MOST_LISTED = 3000, COMPANY = 20 };

/* `num_new` tokens attend behind `stored` tokens of sequence 0. */
typedef struct world {
    kvc_layer layer;
    int heads, stored, num_new, select;
    float softcap;
    int has_alibi, has_holes, is_moved;
} world;

/* How it is stored and asked. */
typedef enum way { PLAIN, BY_TASKS, IN_PLACE, RESTORED, FORKED, CLONED, WITH_COMPANY, AMONG_FORKS, NUM_WAYS } way;

static float given_q[MOST_NEW + COMPANY + 1][MOST_HEADS * MOST_WIDTH];
static float given_k[MOST_ROWS * MOST_WIDTH], given_v[MOST_ROWS * MOST_WIDTH];
static const float alibi[MOST_HEADS] = {0.01f, 0.001f, 0, -0.002f, 0.03f};

/* Keys have large elements, and the first ones are large: some heads give nearly all of their weight to them. */
static void fill(float *to, int what, int first, int n, int width) {
    for (int i = 0; i < n; i++)
        for (int d = 0; d < width; d++) {
            const int factor = what ? 1 : (d % 32 < 2 ? 6 : 1) * (first + i < 4 ? 3 : 1);
            to[i * width + d] = element_of(what, 0, first + i, d) * (float)factor;
        }
}

/* ---- storing ----------------------------------------------------------------------------------------------------- */

static kvc_batch *begin(kvc_cache *cache, int n, const int32_t *positions, const int64_t *ids) {
    kvc_batch *batch = NULL;
    CHECKF(kvc_begin(cache, n, positions, ids, NULL, &batch) == KVC_OK, "%s", kvc_last_error());
    return batch;
}

static void put(kvc_batch *batch, const world *w, int first, int from, int n) {
    const int width = w->layer.num_kv_heads * w->layer.k_dim;
    fill(given_k, 0, from, n, width);
    fill(given_v, 1, from, n, width);
    put_floats(batch, 0, first, n, w->layer.num_kv_heads, w->layer.k_dim, w->layer.k_dim, given_k, given_v);
}

/* Writes the rows of a batch where they lie, as floats. */
static void write_in_place(kvc_batch *batch, const world *w, int from, int n) {
    const size_t dim = (size_t)w->layer.k_dim, width = (size_t)w->layer.num_kv_heads * dim;
    fill(given_k, 0, from, n, (int)width);
    fill(given_v, 1, from, n, (int)width);
    for (int t = 0, m; t < n; t += m) {
        kvc_span span;
        CHECKF(kvc_slots(batch, 0, t, &span, sizeof span, NULL) == KVC_OK, "%s", kvc_last_error());
        m = (int)span.num_rows;
        for (int h = 0; h < w->layer.num_kv_heads; h++)
            for (int i = 0; i < m; i++) {
                const size_t at = (size_t)(t + i) * width + (size_t)h * dim;
                memcpy((char *)span.k + h * span.k_head_stride + i * span.k_row_stride, given_k + at,
                       dim * sizeof(float));
                memcpy((char *)span.v + h * span.v_head_stride + i * span.v_row_stride, given_v + at,
                       dim * sizeof(float));
            }
        CHECKF(kvc_written(batch, 0, t, m) == KVC_OK, "%s", kvc_last_error());
    }
}

static int32_t next_of(kvc_cache *cache, int64_t id) { return last_position(cache, id) + 1; }

static void store(kvc_cache *cache, const world *w, way how) {
    enum { PASS = 512 };
    for (int from = 0; from < w->stored; from += PASS) {
        const int n = w->stored - from < PASS ? w->stored - from : PASS;
        int32_t positions[PASS];
        for (int i = 0; i < n; i++) positions[i] = from + i;
        kvc_batch *batch = begin(cache, n, positions, NULL);
        if (how == IN_PLACE && w->layer.k_type == KVC_F32)
            write_in_place(batch, w, from, n);
        else
            put(batch, w, 0, from, n);
        CHECK(kvc_commit(batch) == KVC_OK);
    }
    for (int i = 0; w->has_holes && i < 3; i++)
        CHECK(kvc_remove(cache, 0, 19 + 50 * i, 26 + 51 * i, w->is_moved) == KVC_OK);
}

/* A saved state in memory. */
typedef struct state {
    char *bytes;
    size_t size;
} state;

static int32_t append(void *user, const void *data, size_t size) {
    state *to = user;
    to->bytes = realloc(to->bytes, to->size + size);
    memcpy(to->bytes + to->size, data, size);
    to->size += size;
    return 0;
}

/* Returns a cache with the world in it; sequence *id is to be asked. */
static kvc_cache *build(const world *w, way how, int block_size, int64_t *id) {
    const kvc_config config = {.block_size = block_size, .num_threads = how == PLAIN || how == AMONG_FORKS ? 1 : 3};
    kvc_cache *cache = cache_of(&w->layer, 1, config);
    store(cache, w, how);
    *id = 0;
    if (how == FORKED) CHECK(kvc_fork(cache, 0, *id = 7) == KVC_OK);
    if (how == CLONED) {
        kvc_cache *copy = NULL;
        CHECK(kvc_cache_clone(cache, &copy) == KVC_OK && kvc_cache_free(cache) == KVC_OK);
        cache = copy;
    }
    if (how == RESTORED && !KVC_IS_BIG_ENDIAN) { /* which saves nothing */
        state file = {NULL, 0};
        const kvc_save_args save = {.struct_size = sizeof save, .write = append, .user = &file};
        CHECK(kvc_save(cache, &save) == KVC_OK && kvc_clear(cache) == KVC_OK);
        const kvc_load_args load = {.struct_size = sizeof load, .data = file.bytes, .size = (int64_t)file.size};
        CHECKF(kvc_restore(cache, &load) == KVC_OK, "%s", kvc_last_error());
        free(file.bytes);
    }
    return cache;
}

/* ---- asking ------------------------------------------------------------------------------------------------------ */

static kvc_plan_args plan_of(const world *w, int select) {
    return (kvc_plan_args){
        .struct_size = sizeof(kvc_plan_args), .num_tokens = w->num_new, .num_heads = w->heads, .select_rows = select};
}

static kvc_attend_args args_of(const world *w, void *out) {
    kvc_attend_args args = float_queries(w->heads, w->layer.k_dim, w->layer.k_dim, given_q, out);
    args.q_token_stride = sizeof given_q[0];
    args.softcap = w->softcap;
    args.alibi = w->has_alibi ? alibi : NULL;
    return args;
}

/* Opens a batch whose first tokens are asked.  With company, a prompt and a short sequence follow.  Among forks, some
 * forks lack the last rows. */
static kvc_batch *open_batch(kvc_cache *cache, const world *w, way how, int64_t id) {
    int32_t positions[MOST_NEW + COMPANY + 1];
    int64_t ids[MOST_NEW + COMPANY + 1];
    int n = w->num_new;
    for (int t = 0; t < n; t++) positions[t] = next_of(cache, id) + t, ids[t] = id;
    for (int t = 0; how == AMONG_FORKS && t < COMPANY; t += 2)
        for (int i = 0; i < 2; i++, n++) {
            if (!i) CHECK(kvc_fork(cache, id, ids[n] = 200 + t) == KVC_OK);
            if (!i && t % 3) CHECK(kvc_remove(cache, 200 + t, w->stored - 5 * t, INT32_MAX, 0) == KVC_OK);
            positions[n] = next_of(cache, 200 + t) + i, ids[n] = 200 + t;
        }
    for (int t = 0; how == WITH_COMPANY && t <= COMPANY; t++, n++)
        positions[n] = t % COMPANY, ids[n] = t < COMPANY ? 100 : 101;
    kvc_batch *batch = begin(cache, n, positions, ids);
    put(batch, w, 0, w->stored, n);
    return batch;
}

/* Attends with selection.  BY_TASKS runs the tasks of a plan for many threads, backwards.  AMONG_FORKS does so for one
 * thread, whose tasks score the first chunk for several forks. */
static void select_rows(kvc_batch *batch, const world *w, way how, float *out) {
    kvc_plan_args plan = plan_of(w, w->select);
    const kvc_attend_args args = args_of(w, out);
    kvc_plan *tasks = NULL;
    if (how == WITH_COMPANY || how == AMONG_FORKS) plan.num_tokens = 0;
    if (how != BY_TASKS && how != AMONG_FORKS) {
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        return;
    }
    plan.num_threads = how == BY_TASKS ? 16 : 1;
    CHECKF(kvc_plan_new(batch, &plan, &tasks) == KVC_OK, "%s", kvc_last_error());
    if (how == AMONG_FORKS && w->stored > KVC_CHUNK_ROWS + 5 * COMPANY && w->heads <= 8 * w->layer.num_kv_heads)
        CHECK(tasks->jobs.num * 2 <= tasks->num_slices);
    for (int64_t i = kvc_plan_num_tasks(tasks) - 1; i >= 0; i--)
        CHECKF(kvc_plan_run(tasks, 0, &args, i) == KVC_OK, "%s", kvc_last_error());
    kvc_plan_free(tasks);
}

/* ---- the rows that are to be selected ---------------------------------------------------------------------------- */

/* Makes a key what its sketch stands for.  Returns whether rounding may give an element another code. */
static int sketch(double *x, int dim) {
    double square = 0, product = 0;
    int is_unsure = 0;
    mix(x, dim);
    const double most = threshold_of(x, dim);
    for (int d = 0; d < dim; d++) {
        const double level = (fabs(x[d]) > most ? 1.5 : 0.5) * (x[d] > 0 ? 1 : -1);
        is_unsure |= fabs(x[d]) < 1e-6 * most || fabs(fabs(x[d]) - most) < 1e-6 * most;
        square += x[d] * x[d];
        product += level * x[d];
        x[d] = level;
    }
    int exponent;
    const double scale = frexp(square / product, &exponent),
                 rounded = ldexp(rint(scale * 2048), exponent - 11); /* f16 */
    for (int d = 0; d < dim; d++) x[d] *= rounded;
    return is_unsure;
}

/* Lists the positions that token t selects for a KV head, of n rows that it sees; -1 behind them.  Returns 0 if
 * rounding may decide which. */
static int list_selected(const world *w, const float *keys, const int32_t *at, int n, int t, int head, int32_t *to) {
    static double k[MOST_ROWS][MOST_WIDTH], scores[MOST_HEADS * MOST_ROWS];
    static uint8_t reads[MOST_ROWS];
    const int dim = w->layer.k_dim, group = w->heads / w->layer.num_kv_heads;
    const selecting by = {16, 64, w->select};
    int num = 0, is_unsure = 0;
    for (int j = 0; j < n; j++) {
        for (int d = 0; d < dim; d++) k[j][d] = (double)keys[j * dim + d];
        is_unsure |= sketch(k[j], dim);
    }
    for (int h = head * group; h < (head + 1) * group; h++) {
        const rounded_query q = round_query(&w->layer, given_q[t] + h * dim, 0);
        for (int j = 0; j < n; j++) {
            double score = 0;
            for (int d = 0; d < dim; d++) score += q.codes[d] * k[j][d];
            scores[(h - head * group) * n + j] = score_from(score * q.unit / sqrt(dim), (double)w->softcap,
                                                            w->has_alibi ? (double)alibi[h] : 0, at[n - 1] - at[j]);
        }
    }
    const int is_sure = mark_selected(&by, n, scores, group, 9e-5, reads);
    for (int i = 0; i < MOST_LISTED; i++) to[i] = -1;
    for (int j = 0; j < n; j++)
        if (reads[j]) to[num++] = at[j];
    return is_sure && !is_unsure;
}

/* Attends to what is to be selected, by positions.  Returns the number of tokens and heads that rounding decides, which
 * *unsure names. */
static int attend_to_listed(kvc_batch *batch, kvc_cache *cache, const world *w, int64_t id, float *out,
                            int unsure[MOST_NEW][MOST_HEADS]) {
    static int32_t lists[MOST_NEW][MOST_HEADS][MOST_LISTED], at[MOST_ROWS];
    const int kv = w->layer.num_kv_heads, dim = w->layer.k_dim;
    int64_t num = 0;
    int num_unsure = 0;
    kvc_rows_out rows = {.struct_size = sizeof rows, .batch = batch, .num_stored = &num};
    kvc_gather(cache, id, 0, 0, 0, &rows);
    float *keys = malloc((size_t)(num * kv * dim) * sizeof *keys);
    rows.k = keys;
    rows.k_row_stride = dim * (int64_t)sizeof *keys;
    rows.k_head_stride = num * rows.k_row_stride;
    rows.positions = at;
    CHECKF(num <= MOST_ROWS && kvc_gather(cache, id, 0, 0, num, &rows) == KVC_OK, "%s", kvc_last_error());
    for (int t = 0; t < w->num_new; t++)
        for (int h = 0; h < kv; h++) {
            unsure[t][h] =
                !list_selected(w, keys + num * dim * h, at, (int)num - w->num_new + t + 1, t, h, lists[t][h]);
            num_unsure += unsure[t][h];
        }
    kvc_plan_args plan = plan_of(w, 0);
    const kvc_chosen chosen = {.struct_size = sizeof chosen,
                               .positions = &lists[0][0][0],
                               .token_stride = sizeof lists[0],
                               .choice_stride = sizeof lists[0][0],
                               .num_choices = kv,
                               .width = MOST_LISTED};
    kvc_attend_args args = args_of(w, out);
    args.chosen = &chosen;
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    free(keys);
    return num_unsure;
}

/* ---- checks ------------------------------------------------------------------------------------------------------ */

/* Returns whether two results agree, except where rounding decides. */
static int agree(const world *w, const float *a, const float *b, int unsure[MOST_NEW][MOST_HEADS]) {
    const int group = w->heads / w->layer.num_kv_heads, dim = w->layer.k_dim;
    for (int t = 0; t < w->num_new; t++)
        for (int h = 0; h < w->heads; h++, a += dim, b += dim)
            if (!unsure[t][h / group] && memcmp(a, b, (size_t)dim * sizeof *a)) return 0;
    return 1;
}

/* Returns how many tokens and heads are left out because rounding decides. */
static int check_world(const world *w, int block_size) {
    enum { ROOM = (MOST_NEW + COMPANY + 1) * MOST_HEADS * MOST_WIDTH };
    static float right[ROOM], out[ROOM];
    const size_t size = (size_t)(w->num_new * w->heads * w->layer.k_dim) * sizeof *out;
    int unsure[MOST_NEW][MOST_HEADS] = {{0}}, none[MOST_NEW][MOST_HEADS] = {{0}}, num = 0;
    for (int t = 0; t <= MOST_NEW + COMPANY; t++) fill(given_q[t], 2, t, 1, w->heads * w->layer.k_dim);
    for (int how = PLAIN; how < NUM_WAYS; how++) {
        int64_t id;
        kvc_cache *cache = build(w, (way)how, how % 2 ? 64 : block_size, &id);
        kvc_batch *batch = open_batch(cache, w, (way)how, id);
        const int32_t first = next_of(cache, id);
        CHECK(kvc_exact_to(cache, id) == INT32_MAX || w->has_holes);
        memset(out, 0xff, size);
        select_rows(batch, w, (way)how, how == PLAIN ? right : out);
        CHECK(kvc_exact_to(cache, id) <= first);
        if (how == PLAIN && !w->is_moved) {
            num = attend_to_listed(batch, cache, w, id, out, unsure);
            CHECKF(agree(w, out, right, unsure), "%s, type %d, %d heads of %d", kvc_isa(), w->layer.k_type, w->heads,
                   w->layer.k_dim);
        } else if (how != PLAIN) {
            CHECKF(agree(w, out, right, none), "%s, way %d, type %d", kvc_isa(), how, w->layer.k_type);
        }
        CHECK(kvc_commit(batch) == KVC_OK && kvc_exact_to(cache, id) <= first);
        CHECKF(kvc_validate(cache) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
    return num;
}

static world world_of(int type, int dim, int kv, int group, int stored, int select) {
    return (world){.layer = {.num_kv_heads = kv,
                             .k_dim = dim,
                             .v_dim = dim,
                             .k_type = type,
                             .v_type = type,
                             .rope = {.kind = KVC_ROPE_NONE},
                             .sketch_bits = 2},
                   .heads = kv * group,
                   .stored = stored,
                   .num_new = 1,
                   .select = select};
}

/* All types, dimensions and groups of heads; with holes, softcap and ALiBi. */
static void test_worlds(void) {
    static const int dims[] = {64, 128, 32, 96}, groups[] = {1, 4, 3, 8, 20};
    int unsure = 0, all = 0;
    for (int i = 0; i < KVC_STORED_TYPES; i++) {
        world w = world_of(i, dims[i % 4], 1 + i % 2, groups[i % 5], i % 3 ? 300 + 13 * i : 150, i % 3 ? 40 + i : 8);
        w.num_new = 1 + i % MOST_NEW;
        w.softcap = i % 4 == 3 ? 5 : 0;
        w.has_alibi = i % 3 == 2;
        w.has_holes = i % 2;
        unsure += check_world(&w, 1 + i * 9);
        all += w.num_new * w.layer.num_kv_heads;
    }
    CHECKF(unsure * 3 <= all, "of %d choices %d are decided by rounding", all, unsure);
}

/* Rows of several chunks, which are scored by several tasks, or for several forks. */
static void test_long(void) {
    world w = world_of(KVC_F16, 64, 2, 4, 4600, 1024);
    w.num_new = 2;
    check_world(&w, 1000);
    w = world_of(KVC_INT8, 32, 1, 3, 8300, 100);
    w.has_alibi = w.has_holes = 1;
    check_world(&w, 64);
}

/* Forks that see exactly a chunk, as their own rows are hidden: for several threads, too, each has one split. */
static void test_a_chunk_of_forks(void) {
    static float out[2][4 * 32];
    const world w = world_of(KVC_F32, 32, 1, 4, KVC_CHUNK_ROWS, 100);
    int64_t id;
    for (int t = 0; t < 2; t++) fill(given_q[t], 2, 0, 1, 4 * 32);
    kvc_cache *cache = build(&w, PLAIN, 4, &id);
    CHECK(kvc_fork(cache, 0, 1) == KVC_OK);
    const int32_t positions[2] = {w.stored, w.stored};
    const int64_t ids[2] = {0, 1};
    const kvc_masked hidden[2] = {{0, w.stored, w.stored + 1}, {1, w.stored, w.stored + 1}};
    kvc_batch *batch = begin(cache, 2, positions, ids);
    put(batch, &w, 0, w.stored, 2);
    for (int threads = 1; threads <= 8; threads *= 2) {
        kvc_plan_args plan = plan_of(&w, w.select);
        plan.num_tokens = plan.num_masked = 2;
        plan.masked = hidden;
        plan.masked_size = sizeof *hidden;
        plan.num_threads = threads;
        const kvc_attend_args args = args_of(&w, out);
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        CHECKF(!memcmp(out[0], out[1], sizeof out[0]), "%d threads", threads);
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A fork whose later rows were moved, in their slots.  In company, each token selects what it selects alone. */
static void test_a_fork_moved_in_part(void) {
    static float alone[2][4 * 32], out[2][4 * 32];
    world w = world_of(KVC_F32, 32, 1, 4, 2 * KVC_CHUNK_ROWS + 100, 100);
    int64_t id;
    w.has_alibi = 1;
    for (int t = 0; t < 2; t++) fill(given_q[t], 2, 0, 1, 4 * 32);
    kvc_cache *cache = build(&w, PLAIN, 16, &id);
    CHECK(kvc_fork(cache, 0, 1) == KVC_OK && kvc_shift(cache, 1, KVC_CHUNK_ROWS * 3 / 2, KVC_END, 4000) == KVC_OK);
    const int32_t positions[2] = {next_of(cache, 0), next_of(cache, 1)};
    const int64_t ids[2] = {0, 1};
    for (int t = 0; t < 3; t++) { /* each alone, then both */
        kvc_batch *batch = begin(cache, t < 2 ? 1 : 2, positions + t % 2, ids + t % 2);
        kvc_plan_args plan = plan_of(&w, w.select);
        const kvc_attend_args args = args_of(&w, t < 2 ? alone[t] : out[0]);
        put(batch, &w, 0, w.stored + t % 2, t < 2 ? 1 : 2);
        plan.num_tokens = 0;
        plan.num_threads = 1;
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        kvc_abort(batch);
    }
    for (int t = 0; t < 2; t++) CHECKF(!memcmp(alone[t], out[t], sizeof out[t]), "token %d", t);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* Keys that are off by deltas, which change within pieces, with a rope and without. */
static void test_moved(void) {
    static double inv_freq[16];
    for (int i = 0; i < 16; i++) inv_freq[i] = pow(100, -i / 16.0);
    for (int i = 0; i < 2; i++) {
        world w = world_of(i ? KVC_INT8 : KVC_F32, 64, 2, 3, 400, 60);
        if (i) w.layer.rope = (kvc_rope){.kind = KVC_ROPE_FREQUENCIES, .num_freqs = 16, .inv_freq = inv_freq};
        w.has_holes = w.is_moved = 1;
        check_world(&w, 16);
    }
}

/* A token that sees few rows reads all of them.  It gets the bits of dense attention, and stays exact. */
static void test_all_rows(void) {
    static float right[MOST_HEADS * MOST_WIDTH], out[MOST_HEADS * MOST_WIDTH];
    for (int stored = 118; stored < 121; stored++) {
        world w = world_of(KVC_F32, 64, 1, 2, stored, 20);
        int64_t id;
        fill(given_q[0], 2, 0, 1, w.heads * 64);
        kvc_cache *cache = build(&w, PLAIN, 16, &id);
        kvc_batch *batch = open_batch(cache, &w, PLAIN, id);
        const kvc_plan_args dense = plan_of(&w, 0);
        const kvc_attend_args args = args_of(&w, right);
        CHECK(kvc_attend(batch, &dense, &args) == KVC_OK);
        select_rows(batch, &w, PLAIN, out);
        const int is_same = !memcmp(right, out, (size_t)w.heads * 64 * sizeof *out);
        CHECK(is_same == (stored < 120) && (kvc_exact_to(cache, 0) == INT32_MAX) == (stored < 120));
        kvc_abort(batch);
        CHECK(kvc_exact_to(cache, 0) == INT32_MAX);
        kvc_cache_free(cache);
    }
}

/* A token that sees few rows because others are masked reads all, too, and stays exact. */
static void test_masked(void) {
    static float out[2 * 64];
    const kvc_masked masked = {0, 10, 100};
    world w = world_of(KVC_F32, 64, 1, 2, 200, 20);
    int64_t id;
    kvc_cache *cache = build(&w, PLAIN, 16, &id);
    kvc_batch *batch = open_batch(cache, &w, PLAIN, id);
    kvc_plan_args plan = plan_of(&w, 20);
    const kvc_attend_args args = args_of(&w, out);
    plan.masked = &masked;
    plan.masked_size = sizeof masked;
    plan.num_masked = 1;
    CHECK(kvc_attend(batch, &plan, &args) == KVC_OK && kvc_exact_to(cache, 0) == INT32_MAX);
    kvc_abort(batch);
    kvc_cache_free(cache);
}

/* Attends, with hidden rows masked or removed.  Returns from where on the tokens are not exact. */
static int32_t attend_hiding(const world *w, kvc_masked hidden, int is_removed, way how, float *out) {
    int64_t id;
    kvc_cache *cache = build(w, how, 16, &id);
    if (is_removed) CHECK(kvc_remove(cache, 0, hidden.begin, hidden.end, 0) == KVC_OK);
    kvc_batch *batch = open_batch(cache, w, how, id);
    kvc_plan_args plan = plan_of(w, w->select);
    const kvc_attend_args args = args_of(w, out);
    plan.masked = &hidden;
    plan.masked_size = sizeof hidden;
    plan.num_masked = !is_removed;
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    const kvc_batch_sequence *member = &batch->sequences[0];
    const int32_t selected_from = member->selected_from;
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
    return selected_from;
}

/* Hidden rows change nothing: tokens select as without them, and results have the same bits. */
static void test_hidden(void) {
    enum { SELECT = 20, READ_ALL = 80 + 2 * SELECT };
    static const int heads[] = {1, 8, 40};
    static float right[MOST_NEW * MOST_HEADS * 64], out[MOST_NEW * MOST_HEADS * 64];
    for (int i = 0; i < 6 * 3 * 3; i++) {
        const int num_hidden = i % 2 ? 5 : 300, num_new = 1 + i / 6 % 3, seen = READ_ALL - 3 + i % 6; /* by the last */
        world w = world_of(KVC_F32, 64, 1, heads[i / 18], seen - num_new + num_hidden, SELECT);
        const kvc_masked hidden = {0, 10, 10 + num_hidden};
        w.num_new = num_new;
        for (int t = 0; t < num_new; t++) fill(given_q[t], 2, t, 1, w.heads * 64);
        const int32_t first = attend_hiding(&w, hidden, 1, PLAIN, right), last = w.stored + num_new - 1;
        CHECK(attend_hiding(&w, hidden, 0, PLAIN, out) == first);
        CHECKF(first == (seen > READ_ALL ? last - kvc_smaller(seen - READ_ALL, num_new) + 1 : INT32_MAX), "%d", i);
        CHECKF(!memcmp(out, right, (size_t)(num_new * w.heads * 64) * sizeof *out), "%d", i);
    }
}

/* A key that is no number is read, whatever others weigh. */
static void test_no_number(void) {
    world w = world_of(KVC_F32, 64, 1, 2, 300, 4);
    int64_t id;
    float out[2 * 64];
    fill(given_q[0], 2, 0, 1, w.heads * 64);
    for (int i = 0; i < 2; i++) {
        kvc_cache *cache = build(&w, PLAIN, 16, &id);
        float k[64] = {i ? INFINITY : NAN}, v[64] = {1};
        const kvc_rows_in in = {.struct_size = sizeof in, .k = k, .v = v};
        CHECKF(kvc_inject(cache, 0, 0, 123, 124, &in) == KVC_OK, "%s", kvc_last_error());
        kvc_batch *batch = open_batch(cache, &w, PLAIN, id);
        select_rows(batch, &w, PLAIN, out);
        CHECK(out[0] != out[0]);
        kvc_abort(batch);
        kvc_cache_free(cache);
    }
}

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

static void *take_dirty(void *user, size_t size, size_t alignment, const kvc_memory_hint *hint) {
    void *memory = aligned_new(alignment, size);
    (void)user, (void)hint;
    return memory ? memset(memory, 0x55, size) : NULL;
}

static void give_back(void *user, void *memory, size_t size, const kvc_memory_hint *hint) {
    (void)user, (void)size, (void)hint;
    aligned_free(memory);
}

/* A task that reads all rows comes before one that scores a later split.  That split has no segments yet. */
static void test_next_task(void) {
    enum { PROMPT = 120 };
    static const kvc_allocator dirty = {.struct_size = sizeof dirty, .alloc = take_dirty, .free = give_back};
    static float out[(PROMPT + 1) * 32], zeros[(PROMPT + 1) * 32];
    const world w = world_of(KVC_F32, 32, 1, 1, 4200, 100);
    kvc_cache *cache = cache_of(&w.layer, 1, (kvc_config){.block_size = 100, .allocator = &dirty});
    int32_t positions[PROMPT + 1] = {4200};
    int64_t ids[PROMPT + 1] = {0};
    for (int t = 0; t < PROMPT; t++) positions[t + 1] = t, ids[t + 1] = 1;
    store(cache, &w, PLAIN);
    kvc_batch *batch = begin(cache, PROMPT + 1, positions, ids);
    put(batch, &w, 0, 4200, PROMPT + 1);
    const kvc_plan_args plan = {.struct_size = sizeof plan, .num_heads = 1, .num_threads = 2, .select_rows = 100};
    const kvc_attend_args args = float_queries(1, 32, 32, zeros, out);
    CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

static volatile int32_t cancel;
static int cancels;
static kvc_weigh_pieces_fn *weigh_pieces;

static void weigh_and_cancel(float *pieces, int64_t stride, int first, const float *scores, int num_q, float *exponents,
                             float *sums) {
    weigh_pieces(pieces, stride, first, scores, num_q, exponents, sums);
    cancel = cancels;
}

/* The task that selects is cancelled once all rows are scored.  Run again, it attends, also in a round of reruns. */
static void test_cancelled(void) {
    static float right[2 * 64], out[2][2 * 64];
    const world w = world_of(KVC_F32, 64, 1, 2, 4200, 100);
    int64_t id;
    fill(given_q[0], 2, 0, 1, w.heads * 64);
    kvc_cache *cache = build(&w, PLAIN, 100, &id);
    kvc_batch *batch = open_batch(cache, &w, PLAIN, id);
    select_rows(batch, &w, PLAIN, right);
    kvc_kernels kernels = *cache->kernels;
    weigh_pieces = kernels.weigh_pieces;
    kernels.weigh_pieces = weigh_and_cancel;
    cache->kernels = &kernels;
    kvc_plan_args args = plan_of(&w, w.select);
    kvc_plan *plan = NULL;
    args.num_threads = 16;
    CHECK(kvc_plan_new(batch, &args, &plan) == KVC_OK && kvc_plan_num_tasks(plan) == 2);
    for (int reruns = 0; reruns < 2; reruns++) {
        kvc_attend_args attend = args_of(&w, out[reruns]);
        attend.cancel = &cancel;
        cancels = cancel = 0;
        CHECK(kvc_plan_run(plan, 0, &attend, 0) == KVC_OK && (!reruns || kvc_plan_run(plan, 0, &attend, 0) == KVC_OK));
        cancels = 1;
        CHECK(kvc_plan_run(plan, 0, &attend, 1) == KVC_ERR_CANCELLED);
        cancels = cancel = 0;
        CHECK(kvc_plan_run(plan, 0, &attend, 1) == KVC_OK);
        CHECKF(!memcmp(out[reruns], right, sizeof right), "%d", reruns);
    }
    kvc_abort(batch);
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* ---- bad input, and memory --------------------------------------------------------------------------------------- */

static void test_bad_layers(void) {
    kvc_cache *cache;
    const kvc_layer good = world_of(KVC_F32, 64, 1, 1, 0, 0).layer;
    kvc_layer bad[] = {good, good, good, good, good, good, good};
    kvc_config config = {.struct_size = sizeof config, .layer_size = sizeof *bad, .num_layers = 1};
    bad[0].sketch_bits = 3;
    bad[1].v_dim = 0;
    bad[2].value_in_key = 1;
    bad[3].k_dim = bad[3].v_dim = 40;
    bad[4].policy = (kvc_policy){.kind = KVC_SLIDING, .window = 4096};
    bad[5].policy = (kvc_policy){.kind = KVC_CROSS, .max_len = 9};
    bad[6].k_dim = bad[6].v_dim = 2048;
    const char *says[] = {"sketch_bits is 3", "keys alone",      "lie in the keys", "k_dim is 40",
                          "fewer than 8192",  "cross-attention", "at most 1024"};
    for (int i = 0; i < 7; i++) {
        config.layers = &bad[i];
        const int is_unsupported = i == 1 || i == 2 || i == 4 || i == 5;
        CHECK_FAILS(kvc_cache_new(&config, &cache), is_unsupported ? KVC_ERR_UNSUPPORTED : KVC_ERR_INVALID, "layers[0]",
                    says[i]);
    }
    kvc_layer shared[] = {good, good};
    shared[1].share = 1;
    shared[1].sketch_bits = 0;
    config.layers = shared;
    config.num_layers = 2;
    CHECK_FAILS(kvc_cache_new(&config, &cache), KVC_ERR_INVALID, "layers[1]", "sketches");
}

static void test_bad_calls(void) {
    world w = world_of(KVC_F32, 64, 1, 2, 200, 4);
    static float out[2 * 64];
    int64_t id;
    kvc_cache *cache = build(&w, PLAIN, 16, &id);
    kvc_batch *batch = open_batch(cache, &w, PLAIN, id);
    kvc_plan_args plan = plan_of(&w, -1);
    const kvc_attend_args args = args_of(&w, out);
    CHECK_FAILS(kvc_attend(batch, &plan, &args), KVC_ERR_INVALID, "select_rows", "is -1");
    plan.select_rows = 4;
    plan.max_chosen = 3;
    CHECK_FAILS(kvc_attend(batch, &plan, &args), KVC_ERR_INVALID, "max_chosen 3", "select_rows is 4");
    kvc_abort(batch);
    kvc_cache_free(cache);
    w.layer.sketch_bits = 0;
    cache = build(&w, PLAIN, 16, &id);
    batch = open_batch(cache, &w, PLAIN, id);
    plan.max_chosen = 0;
    CHECK_FAILS(kvc_attend(batch, &plan, &args), KVC_ERR_UNSUPPORTED, "layer 0 has no sketches", "select_rows is 4");
    CHECK(kvc_exact_to(cache, 0) == INT32_MAX);
    kvc_abort(batch);
    kvc_cache_free(cache);
}

/* A plan that selects serves layers with sketches alone; tokens that are dropped leave a sequence exact. */
static void test_other_layers(void) {
    world w = world_of(KVC_F32, 64, 1, 2, 200, 4);
    kvc_layer layers[] = {w.layer, w.layer};
    static float out[MOST_NEW * 2 * 64];
    kvc_plan *plan = NULL;
    layers[1].sketch_bits = 0;
    kvc_cache *cache = cache_of(layers, 2, (kvc_config){.block_size = 16});
    int32_t positions[200];
    for (int i = 0; i < 200; i++) positions[i] = i;
    for (int pass = 0; pass < 2; pass++) {
        const int n = pass ? 3 : 200;
        for (int i = 0; i < 3 && pass; i++) positions[i] = 200 + i;
        kvc_batch *batch = begin(cache, n, positions, NULL);
        const int width = 64;
        fill(given_k, 0, pass * 200, n, width);
        for (int l = 0; l < 2; l++) put_floats(batch, l, 0, n, 1, 64, 64, given_k, given_k);
        if (!pass) {
            CHECK(kvc_commit(batch) == KVC_OK);
            continue;
        }
        kvc_plan_args args = plan_of(&w, 4);
        args.first = 1;
        args.num_tokens = 2;
        const kvc_attend_args attend = args_of(&w, out);
        CHECKF(kvc_plan_new(batch, &args, &plan) == KVC_OK, "%s", kvc_last_error());
        CHECK_FAILS(kvc_plan_run(plan, 1, &attend, 0), KVC_ERR_UNSUPPORTED, "layer 1", "sketches");
        for (int64_t i = 0; i < kvc_plan_num_tasks(plan); i++) CHECK(kvc_plan_run(plan, 0, &attend, i) == KVC_OK);
        kvc_plan_free(plan);
        CHECK(kvc_exact_to(cache, 0) == 201);
        const int32_t kept[] = {0};
        CHECKF(kvc_commit_kept(batch, kept, 1) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_exact_to(cache, 0) == INT32_MAX);
    }
    CHECK(kvc_cache_free(cache) == KVC_OK);
}

/* A guess that selected rows ends what is exact if it is kept, and not if another token at its position is. */
static void test_guesses(void) {
    const world w = world_of(KVC_F32, 64, 1, 2, 200, 4);
    const int32_t positions[] = {200, 201, 201, 202}, parents[] = {-1, 0, 0, 2},
                  kept[][3] = {{0, 1}, {0, 2}, {0, 2, 3}};
    static float out[MOST_NEW * 2 * 64];
    for (int i = 0; i < 4; i++) {
        int64_t id;
        kvc_batch *batch = NULL;
        kvc_cache *cache = build(&w, PLAIN, 16, &id);
        CHECK(kvc_begin(cache, 4, positions, NULL, parents, &batch) == KVC_OK);
        put(batch, &w, 0, 200, 4);
        kvc_plan_args plan = plan_of(&w, 4);
        const kvc_attend_args args = args_of(&w, out);
        plan.first = i == 3 ? 3 : 2;
        CHECKF(kvc_attend(batch, &plan, &args) == KVC_OK, "%s", kvc_last_error());
        CHECK(kvc_exact_to(cache, 0) == 201);
        CHECK(kvc_commit_kept(batch, kept[i % 3], i % 3 == 2 ? 3 : 2) == KVC_OK);
        CHECKF(kvc_exact_to(cache, 0) == (i == 0 || i == 3 ? INT32_MAX : 201), "%d: %d", i, kvc_exact_to(cache, 0));
        CHECK(kvc_cache_free(cache) == KVC_OK);
    }
}

static void test_answers(void) {
    test_worlds();
    test_long();
    test_a_chunk_of_forks();
    test_a_fork_moved_in_part();
    test_moved();
}

int main(void) {
    test_all_rows();
    test_masked();
    test_hidden();
    test_no_number();
    test_next_task();
    test_cancelled();
    test_bad_layers();
    test_bad_calls();
    test_other_layers();
    test_guesses();
    for_some_isas(test_answers);
    return test_result();
}

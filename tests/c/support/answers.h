/* answers.h: scenes by chance (scene.h), and attention over them against plain arithmetic in double over the decoded
 * rows. */
#ifndef KVC_TEST_ANSWERS_H
#define KVC_TEST_ANSWERS_H

#include <float.h>

#include "base/dtype.h"
#include "kernels/dispatch.h"
#include "support/scene.h"

/* ---- what a token sees ------------------------------------------------------------------------------------------- */

/* Whether token t of a batch sees a row at a position; token: the row's in the batch, -1: it is stored. */
static inline int sees(const stage *st, int t, int32_t position, int token) {
    const int32_t at = st->tokens.positions[t];
    const int is_later =
        st->scene->is_tree && token >= 0 ? !descends_from(st->tokens.parents, t, token) : position > at;
    return !is_later && !is_masked(st->scene, st->tokens.ids[t], position) &&
           shows_row(&st->scene->layer.policy, at, position);
}

/* Not NULL: whether token t of the batch chooses a position, in a KV head. */
static int (*chooses)(int t, int kv_head, int32_t position);

/* The rows that one member has in one layer. */
typedef struct rows {
    int64_t num;
    int32_t positions[MAX_POSITIONS], stored[MAX_POSITIONS]; /* of all rows; of the stored rows */
    int tokens[MAX_POSITIONS];                               /* index in the batch; -1: stored */
    double k[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM], v[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM];
    double largest[MAX_POSITIONS][MAX_KV_HEADS]; /* magnitude of an element of a value */
    /* What a code of 1 of a key, and of a value, stands for in bytes, and the sum of a key's squares. */
    double k_unit[MAX_POSITIONS][MAX_KV_HEADS], v_unit[MAX_POSITIONS][MAX_KV_HEADS],
        k_size[MAX_POSITIONS][MAX_KV_HEADS];
} rows;

static inline double sum_of_squares(const double *row, int dim) {
    double sum = 0;
    for (int d = 0; d < dim; d++) sum += row[d] * row[d];
    return sum;
}

/* Returns what a code of 1 of a row in bytes stands for at most, whether a Hadamard matrix mixes the row or not. */
static inline double unit_of(const double *row, int dim) {
    double mixed[MAX_DIM], largest = 0;
    for (int d = 0; d < dim; d++) largest = fmax(largest, fabs(mixed[d] = row[d]));
    for (int width = 1; dim % (2 * width) == 0; width *= 2)
        for (int d = 0; d < dim; d++) {
            const double x = mixed[d], y = mixed[d | width];
            if (d & width) continue;
            mixed[d] = (x + y) * sqrt(0.5);
            mixed[d | width] = (x - y) * sqrt(0.5);
        }
    for (int d = 0; d < dim; d++) largest = fmax(largest, fabs(mixed[d]));
    return largest / 127;
}

static inline void find_units(rows *r, const scene *s, int i, int h) {
    r->k_unit[i][h] = unit_of(r->k[i][h], s->layer.k_dim);
    r->v_unit[i][h] = unit_of(r->v[i][h], s->layer.v_dim);
    r->k_size[i][h] = sum_of_squares(r->k[i][h], s->layer.k_dim);
}

/* Checks that a decoded row is the row that was put, except for the rounding of its type. */
static inline void check_decoded(const kvc_layer *layer, int type, int transform, float put, float got) {
    static const double steps[] = {0, 0x1p-11, 0x1p-8};
    if (isnan(put) ? isnan(got) : fabsf(put) > 1 && put == got) return; /* whole numbers may be larger */
    const double step = is_float(type)                  ? steps[type]
                        : type == KVC_Q8_0              ? 0.02
                        : transform || type == KVC_INT4 ? 0.6
                                                        : 0.2;
    CHECKF(isinf(put) || fabs(put - got) <= step, "types %d and %d: %g is decoded as %g", layer->k_type, layer->v_type,
           (double)put, (double)got);
}

/* Gathers the rows of a member, with the rows of the batch.  Checks that rows that are not masked are the put rows, if
 * they did not move and none has expired. */
static inline const rows *rows_of(const stage *st, int layer, int m) {
    static rows r;
    static float k[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM], v[MAX_POSITIONS][MAX_KV_HEADS][MAX_DIM];
    const scene *s = st->scene;
    kvc_rows_out out = {.struct_size = sizeof out, .num_stored = &r.num, .batch = st->batch};
    CHECKF(kvc_gather(st->cache, m, layer, 0, 0, &out) == KVC_OK && r.num <= MAX_POSITIONS, "%s", kvc_last_error());
    out.k = k, out.positions = r.positions;
    out.k_head_stride = sizeof **k;
    out.k_row_stride = sizeof *k;
    if (s->layer.v_dim) out.v = v, out.v_head_stride = sizeof **v, out.v_row_stride = sizeof *v;
    CHECKF(kvc_gather(st->cache, m, layer, 0, r.num, &out) == KVC_OK, "%s", kvc_last_error());
    for (int i = 0; i < r.num; i++)
        for (int h = 0; h < s->layer.num_kv_heads; h++) {
            doubles(r.k[i][h], k[i][h], s->layer.k_dim);
            doubles(r.v[i][h], v[i][h], s->layer.v_dim);
            r.largest[i][h] = 0;
            for (int d = 0; d < s->layer.v_dim; d++)
                if (fabs(r.v[i][h][d]) > r.largest[i][h]) r.largest[i][h] = fabs(r.v[i][h][d]);
            if (precision) find_units(&r, s, i, h);
        }
    for (int i = (int)r.num - 1, t = st->tokens.n - 1; i >= 0; i--) {
        while (t >= 0 && (st->tokens.ids[t] != m || !has_row(s, st->tokens.positions[t]))) t--;
        r.tokens[i] = t >= 0 ? t-- : -1;
    }
    for (int row = 0; row < s->members[m].num_stored; row++) r.stored[row] = position_of(s, m, row);
    if (s->num_moves || r.num != s->members[m].num_stored + s->members[m].num_new) return &r;
    for (int i = 0; i < r.num; i++)
        for (int h = 0; h < s->layer.num_kv_heads && !is_masked(s, m, r.positions[i]); h++) {
            for (int d = 0; d < s->layer.k_dim; d++)
                check_decoded(&s->layer, s->layer.k_type, s->layer.k_transform, key_element(s, layer, m, i, h, d),
                              k[i][h][d]);
            for (int d = 0; d < s->layer.v_dim && !s->layer.value_in_key; d++)
                check_decoded(&s->layer, s->layer.v_type, s->layer.v_transform,
                              scene_element(s, IS_V, layer, m, i, h, d), v[i][h][d]);
        }
    return &r;
}

/* Returns what query head h of token t sees, with the answer. */
static inline const sight *answer_to(const stage *st, int layer, const rows *r, int t, int h) {
    static seen_row seen[MAX_POSITIONS];
    static double q[MAX_DIM];
    static sight a;
    const scene *s = st->scene;
    const int kv_head = h * s->layer.num_kv_heads / s->num_heads;
    a = (sight){.q = q,
                .k_dim = s->layer.k_dim,
                .v_dim = s->layer.v_dim,
                .scale = (double)s->scale,
                .softcap = (double)s->softcap,
                .alibi = s->alibi ? (double)s->alibi[h] : 0,
                .sink = s->sinks ? &s->sinks[h] : NULL,
                .rows = seen};
    for (int d = 0; d < a.k_dim; d++)
        q[d] = (double)query_element(s, layer, (int)st->tokens.ids[t], st->tokens.rows[t], h, d);
    for (int j = 0; j < r->num; j++)
        if (sees(st, t, r->positions[j], r->tokens[j]) && (!chooses || chooses(t, kv_head, r->positions[j])))
            seen[a.num++] = (seen_row){.id = j,
                                       .k = r->k[j][kv_head],
                                       .v = r->v[j][kv_head],
                                       .apart = abs(r->positions[j] - st->tokens.positions[t])};
    attend_plainly(&a);
    return &a;
}

/* ---- how far off sums in floats may be --------------------------------------------------------------------------- */

typedef struct errors {
    double out[MAX_DIM], lse;
} errors;

static inline double score_error(const scene *s, const sight *a, const seen_row *row) {
    const double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt(s->layer.k_dim);
    double size = row->size * (s->layer.k_dim + 4), coarse = 0;
    if (!is_float(s->layer.k_type))
        coarse = 3e-5 * row->size; /* queries are rounded to integers */
    else if ((s->layer.k_type != KVC_F32 && !strncmp(kvc_isa(), "amx", 3)) ||
             (s->layer.k_type == KVC_BF16 && !strcmp(kvc_isa(), "neonbf16")))
        coarse = 0x1.8p-17 * row->size; /* 16 bits of a query times the scale count; products of lower parts do not */
    size += (s->softcap > 0 ? 4 * a->softcap : 0) + 3 * fabs(a->alibi * row->apart);
    /* Queries are rotated, or transformed, in place of keys. */
    return size * FLT_EPSILON / 2 + coarse + (s->num_moves || s->layer.k_transform ? 3e-5 * (1 + fabs(scale)) : 0);
}

/* Relative error of rounding to the type of q. */
static inline double rounding_of(int type) {
    return type == KVC_F32 ? FLT_EPSILON / 2 : type == KVC_F16 ? 0x1p-11 : 0x1p-8;
}

/* Returns the errors that the answer to a query head may have, all 0 if it sees nothing. */
static inline errors errors_of(const stage *st, const rows *r, const sight *a, int h) {
    const scene *s = st->scene;
    double top = a->sink ? (double)*a->sink : -INFINITY, low = INFINITY, worst = 0, spread = 0, square = 0;
    errors e = {.lse = 0};
    if (a->lse == -INFINITY) return e;
    for (int i = 0; i < a->num; i++) {
        const seen_row *row = &a->rows[i];
        if (row->score == -INFINITY) continue;
        top = fmax(top, row->score);
        low = fmin(low, row->score);
        worst = fmax(worst, score_error(s, a, row));
        if (row->weight > 0) spread += row->weight * r->largest[row->id][h * s->layer.num_kv_heads / s->num_heads];
    }
    /* Off are the scores, exp (2 ulp, and what its argument is rounded by), and the sums. */
    const double relative = 2 * worst + ((double)r->num + 16 + (low < top ? fmin(top - low, 100) : 0)) * FLT_EPSILON;
    for (int d = 0; d < s->layer.v_dim; d++) square += a->out[d] * a->out[d];
    /* Weights of quantised values are rounded further; a transformed row is, before it is transformed back. */
    for (int d = 0; d < s->layer.v_dim; d++)
        e.out[d] = 2 * relative * a->out_size[d] + (is_float(s->layer.v_type) ? 0x1p-24 : 1e-4 + 3e-4 * spread) +
                   rounding_of(s->q_type) * (s->layer.v_transform ? 2 * sqrt(square) : fabs(a->out[d]));
    e.lse = relative + 4 * FLT_EPSILON * (1 + fabs(a->lse));
    return e;
}

/* ---- how far off products of bytes may be ------------------------------------------------------------------------ */

static inline int has_row_scale(int type) { return type >= KVC_INT8; }

/* Whether token t of a question is attended to in bytes. */
static inline int is_in_bytes(const question *a, int t) {
    const scene *s = a->stage->scene;
    const char *unknown;
    int num = 0;
    for (int u = 0; u < a->n; u++) num += a->stage->tokens.ids[a->first + u] == a->stage->tokens.ids[a->first + t];
    return precision == KVC_PRECISION_INT8 && num > 8 && s->layer.k_dim % 32 == 0 && s->layer.v_dim % 32 == 0 &&
           kvc_cpu_kernels(&unknown)->bytes.score;
}

/* Errors in bytes that one in ten thousand million results exceeds, if roundings are independent. */
static const double MOST_DEVIATIONS = 6.5;

/* The score of a row is off by the rounding of the query, and of a key that is not stored as bytes.  A weight is off by
 * half a step of the tile's heaviest weight times value, here of all rows', or it is lost.  A value that is not stored
 * as bytes is rounded.  Of random rows these errors add up as their squares do.  A transformed row of few levels is
 * rounded alike in many elements. */
static inline void add_byte_errors(const scene *s, const rows *r, const sight *a, int h, errors *e) {
    static double score_spread[MAX_POSITIONS];
    const int kv_head = h * s->layer.num_kv_heads / s->num_heads;
    const double scale = s->scale != 0 ? (double)s->scale : 1 / sqrt(s->layer.k_dim), q_unit = unit_of(a->q, a->k_dim);
    const double q_size = sum_of_squares(a->q, a->k_dim);
    const double k_alike = s->layer.k_transform ? 4 : 1, v_alike = s->layer.v_transform ? 4 : 1;
    const int rounds_keys = !has_row_scale(s->layer.k_type) || s->num_moves,
              rounds_values = !has_row_scale(s->layer.v_type);
    double most = 0, heaviest = 0, of_sum = 0;
    for (int i = 0; i < a->num; i++) {
        const seen_row *row = &a->rows[i];
        const double k_unit = rounds_keys ? r->k_unit[row->id][kv_head] : 0, unit = r->v_unit[row->id][kv_head];
        const double squares = q_unit * q_unit * r->k_size[row->id][kv_head] + k_alike * k_unit * k_unit * q_size;
        score_spread[i] = fabs(scale) * sqrt(squares / 12);
        of_sum += pow(row->weight * score_spread[i], 2);
        heaviest = fmax(heaviest, row->weight * unit);
        if (row->weight > 1e-6) most = fmax(most, score_spread[i]);
    }
    const double margin = MOST_DEVIATIONS * exp(MOST_DEVIATIONS * most);
    for (int d = 0; d < s->layer.v_dim; d++) {
        double squares = 0;
        for (int i = 0; i < a->num; i++) {
            const seen_row *row = &a->rows[i];
            const double w = row->weight, unit = r->v_unit[row->id][kv_head];
            if (w <= 0 || unit <= 0) continue;
            squares += pow(w * score_spread[i] * (row->v[d] - a->out[d]), 2) +
                       (rounds_values ? v_alike * pow(w * unit, 2) / 12 : 0);
            squares += pow(fmin(heaviest / 255 / 2, w * unit) * row->v[d] / unit, 2);
        }
        e->out[d] += margin * sqrt(squares);
    }
    e->lse += margin * sqrt(of_sum) + most * most;
}

/* Squares of errors in bytes, over those that are allowed.  Small ones say that the errors are no larger than what
 * rounding makes. */
static struct {
    double squares;
    int64_t num;
} byte_errors;

/* How many times the error of one call a result may be off: results of several calls in one softmax are rounded more
 * often. */
static double leniency = 1;

/* Not NULL: the call whose result the question has as prior_out, rounded to the type of q.  It may be much larger than
 * the joint result. */
static const question *joined_with;

/* The result for token t of the question, head h. */
static inline void check_answer(const question *a, const rows *r, int t, int h) {
    const scene *s = a->stage->scene;
    float out[MAX_DIM], prior[MAX_DIM] = {0};
    const sight *right = answer_to(a->stage, a->layer, r, a->first + t, h);
    const int in_bytes = is_in_bytes(a, t);
    errors may = errors_of(a->stage, r, right, h);
    if (in_bytes && right->lse > -INFINITY) add_byte_errors(s, r, right, h, &may);
    read_out(a, t, h, out);
    for (int d = 0; in_bytes && d < s->layer.v_dim; d++, byte_errors.num++)
        byte_errors.squares += may.out[d] > 0 ? pow((out[d] - right->out[d]) / may.out[d], 2) : 0;
    if (joined_with) read_out(joined_with, t, h, prior);
    for (int d = 0; d < s->layer.v_dim; d++)
        CHECKF(fabs(out[d] - right->out[d]) <= leniency * may.out[d] + rounding_of(s->q_type) * fabs((double)prior[d]),
               "%s: types %d and %d, %d rows, token %d, head %d, out[%d] is %g, not %g, off by %g of %g", kvc_isa(),
               s->layer.k_type, s->layer.v_type, (int)r->num, t, h, d, (double)out[d], right->out[d],
               fabs(out[d] - right->out[d]), may.out[d]);
    const float lse = a->lse[t * s->num_heads + h];
    CHECKF(lse == right->lse || fabs(lse - right->lse) <= leniency * may.lse,
           "%s: types %d and %d, %d rows, token %d, head %d, lse is %g, not %g, off by %g of %g", kvc_isa(),
           s->layer.k_type, s->layer.v_type, (int)r->num, t, h, (double)lse, right->lse, fabs(lse - right->lse),
           may.lse);
}

/* Checks that the stored rows which a token sees are there. */
static inline void check_seen(const stage *st, const rows *r, int m, int t) {
    int num = 0;
    for (int j = 0; j < r->num; j++) num += r->tokens[j] < 0 && sees(st, t, r->positions[j], -1);
    for (int row = 0; row < st->scene->members[m].num_stored; row++)
        num -= has_row(st->scene, r->stored[row]) && sees(st, t, r->stored[row], -1);
    CHECKF(!num, "token %d sees %d rows too many", t, num);
}

static inline void check_answers(const question *a) {
    const scene *s = a->stage->scene;
    for (int m = 0; m < s->num_members; m++) {
        const rows *r = rows_of(a->stage, a->layer, m);
        for (int t = 0; t < a->n; t++) {
            if (a->stage->tokens.ids[a->first + t] != m) continue;
            check_seen(a->stage, r, m, a->first + t);
            for (int h = 0; h < s->num_heads; h++) check_answer(a, r, t, h);
        }
    }
}

/* Tokens [first, first + n) of the batch. */
static inline void check_range(const stage *st, int first, int n) {
    question a = question_new(st, 0, first, n);
    a.plan.masked = st->scene->masked;
    a.plan.masked_size = sizeof *st->scene->masked;
    a.plan.num_masked = st->scene->num_masked;
    CHECKF(ask(&a) == KVC_OK, "%s", kvc_last_error());
    check_answers(&a);
    question_free(&a);
}

static inline void check_scene(const scene *s, const setting *how) {
    stage *st = stage_new(s, how);
    const int first = random_int(0, st->tokens.n);
    check_range(st, 0, st->tokens.n);
    if (first) check_range(st, first, random_int(1, st->tokens.n - first + 1));
    stage_free(st);
}

/* ---- scenes by chance -------------------------------------------------------------------------------------------- */

static inline int one_of(const int *numbers, int n) { return numbers[random_int(0, n)]; }

/* A dimension that a type has, from first_dim on. */
static inline int random_dim(int type, int least) {
    static const int dims[] = {1, 3, 8, 33, 40, 64, 80, 128}, blocks[] = {32, 64, 96, 128, 192, 256};
    int dim;
    do dim = kvc_type_elements(type) > 1 ? one_of(blocks, 6) : one_of(dims, 8);
    while (dim < least || dim % kvc_type_elements(type));
    return dim;
}

static inline kvc_policy random_policy(int is_irregular) {
    static const int windows[] = {1, 2, 7, 64, 65, 200}, num_sinks[] = {0, 1, 4, 70};
    static const int sizes[] = {1, 7, 64, 100, 290, 1000};
    const int window = one_of(windows, 6), resume = is_irregular ? MAX_POSITIONS : random_int(0, 2) * 210;
    switch (random_int(0, 4)) {
    case 0:
        return (kvc_policy){
            .kind = KVC_SLIDING, .window = window, .num_sink_tokens = one_of(num_sinks, 4), .resume_window = resume};
    case 1:
        return (kvc_policy){.kind = KVC_CHUNKED,
                            .attention_chunk_size = one_of(sizes, 6),
                            .resume_window = is_irregular ? MAX_POSITIONS : random_int(0, 2) * 100};
    default: return (kvc_policy){.kind = KVC_FULL};
    }
}

/* Types, dimensions and the rope of layer i: all pairs of types come in turn. */
static inline kvc_layer random_layer(int i, int moves) {
    kvc_layer layer = {.num_kv_heads = random_int(1, MAX_KV_HEADS + 1),
                       .k_type = i % KVC_STORED_TYPES,
                       .v_type = i / KVC_STORED_TYPES % KVC_STORED_TYPES,
                       .k_transform = random_int(0, 2),
                       .v_transform = random_int(0, 2)};
    layer.k_dim = random_dim(layer.k_type, moves ? 8 : 1);
    layer.v_dim = random_dim(layer.v_type, 1);
    if (moves) {
        const int first_dim = random_int(0, layer.k_dim - 1);
        layer.rope = rope_of(first_dim, random_int(1, (layer.k_dim - first_dim) / 2 + 1), random_int(0, 2));
    }
    return layer;
}

/* Positions with gaps, that repeat, and that fall. */
static inline void make_irregular(member *m) {
    for (int i = 0; i < m->num_stored + m->num_new; i++) {
        const int32_t moved =
            m->positions[i] + 20 * (i > 70) + (i < m->num_stored ? random_int(-5, 6) : random_int(-20, 20));
        m->positions[i] = moved > 0 ? moved : 0;
    }
}

/* Scene i: lengths around the edges of tiles (64 rows) and parts (512), and numbers of tokens, come in turn. */
static inline scene random_scene(int i) {
    static const int edges[] = {0, 64, 128, 512, 1024, 1536}, groups[] = {1, 2, 3, 4, 7, 8, 16};
    static const float sinks[MAX_HEADS] = {0.5f, -3, 20, -INFINITY, 0, 1}, scales[] = {0, 0, 1, -0.3f, 4};
    static const float alibi[MAX_HEADS] = {0.5f, 0.01f, -0.1f, 0, 2, 1}, softcaps[] = {0, 0, 30, 0.5f};
    const int edge = edges[i % 6], is_long = edge > 200, is_irregular = !random_int(0, 6);
    const int moves = random_int(0, 3) || is_irregular ? 0 : random_int(0, 5) ? random_int(1, 4) : 40;
    scene s = {.layer = random_layer(i, moves), .num_moves = moves, .num_members = random_int(1, is_long ? 2 : 5)};
    s.num_heads = s.layer.num_kv_heads * one_of(groups, is_long ? 4 : 7);
    s.q_type = random_int(0, 2) ? KVC_F32 : random_int(0, 3);
    s.scale = scales[random_int(0, 5)];
    s.softcap = softcaps[random_int(0, 4)];
    s.sinks = random_int(0, 3) ? NULL : sinks;
    s.alibi = random_int(0, 3) ? NULL : alibi;
    s.is_tree = !is_irregular && !random_int(0, 3);
    s.layer.policy = moves ? (kvc_policy){.kind = KVC_FULL} : random_policy(is_irregular);
    for (int m = 0; m < s.num_members; m++) {
        const int num_new = m ? random_int(1, 12) : is_long ? (i / 6 % 2 ? 1 : 18) : 1 + i % 70;
        const int stored = edge + i / 6 % 3 - 1 - (i % 4 ? 0 : num_new);
        s.members[m] = member_of_length(m ? random_int(0, 120) : stored > 0 ? stored : 0, num_new);
        if (is_irregular) make_irregular(&s.members[m]);
    }
    return s;
}

static inline setting random_setting(void) {
    static const int block_sizes[] = {1, 3, 7, 16, 64, 1000}, passes[] = {0, 11, 30};
    return (setting){.block_size = one_of(block_sizes, 6),
                     .num_threads = random_int(1, 3),
                     .pass = one_of(passes, 3),
                     .scattered = !random_int(0, 4)};
}

/* Gives the layers a row for every n-th token, if they show everything and nothing moves. */
static inline void add_stride(scene *s) {
    if (s->layer.policy.kind == KVC_FULL && !s->num_moves) s->layer.policy.stride = random_int(2, 6);
}

#endif

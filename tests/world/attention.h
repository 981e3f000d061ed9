/* attention.h: attention in double, written from include/kvcache.h alone.  It is the only softmax of the tests in C.
 *
 * A test knows by a model of its own which rows there are.  It lists the rows that one query row of one head sees, and
 * attend_plainly() answers the result, its lse, and the weight of each row.  The list is all that attention needs to
 * know of sequences, strides and cross-attention.  Four functions say what a policy, a mask, a tree and a choice show:
 * shows_row(), hides_row(), descends_from(), names_row().  A causal token at position 7 is asked about like this:
 *
 *     for (int row = 0; row < num_rows; row++)
 *         if (row <= 7 && shows_row(&layer.policy, 7, row))
 *             seen[num++] = (seen_row){.k = k[row], .v = v[row], .apart = 7 - row};
 *     sight s = {.q = q, .k_dim = DIM, .v_dim = DIM, .scale = 0.5, .sink = &sinks[h], .num = num, .rows = seen};
 *     attend_plainly(&s);
 *
 * In a layer of keys alone, tokens choose rows: choose_plainly() answers which.
 */
#ifndef KVC_WORLD_ATTENTION_H
#define KVC_WORLD_ATTENTION_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kvcache.h"

enum { SIGHT_DIM = 576 };

/* A row that a query sees.  Its key is rotated for the position where the row stands now. */
typedef struct seen_row {
    int id;               /* the test's own: which row this is */
    const double *k, *v;  /* [k_dim] and [v_dim].  v is k if keys hold the values (value_in_key). */
    double apart;         /* positions between the query and the row, 0 or more, for ALiBi */
    double score, weight; /* answers.  The weights of all rows, the sink and the prior result add up to 1. */
    double size;          /* answer: the magnitudes of the products that the score is the sum of */
} seen_row;

/* A query row of one head, the rows that it sees, and the answers.  Inputs that a call lacks are 0 or NULL. */
typedef struct sight {
    const double *q;
    int k_dim, v_dim, num;
    double scale, softcap, alibi; /* scale 0: 1 / sqrt(k_dim) */
    const float *sink, *prior_out, *prior_lse;
    seen_row *rows;
    double lse, out[SIGHT_DIM]; /* answers.  If the query sees nothing, lse is -inf, and out is 0. */
    double out_size[SIGHT_DIM]; /* answer: the result, if each value were its magnitude */
} sight;

/* Copies n floats to doubles.  Returns `to`. */
static inline const double *doubles(double *to, const float *from, int n) {
    for (int i = 0; i < n; i++) to[i] = (double)from[i];
    return to;
}

/* Reads a number of type f16. */
static inline double from_half(const void *at) {
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double number = exponent == 31 ? (fraction ? NAN : INFINITY)
                          : exponent     ? ldexp(1024 + fraction, exponent - 25)
                                         : ldexp(fraction, -24);
    return bits >> 15 ? -number : number;
}

/* ---- the softmax ------------------------------------------------------------------------------------------------- */

/* Returns the log of exp(a) + exp(b). */
static inline double join_logs(double a, double b) {
    const double top = fmax(a, b);
    return top == -INFINITY ? top : top + log(exp(a - top) + exp(b - top));
}

/* Turns the scores of rows into weights beside `others`, the log of what else takes part.  Returns lse. */
static inline double weigh_seen(seen_row *rows, int num, double others) {
    double top = others;
    for (int i = 0; i < num; i++) top = fmax(top, rows[i].score);
    if (top == -INFINITY) top = 0; /* nothing takes part, and all weights are 0 */
    double sum = exp(others - top);
    for (int i = 0; i < num; i++) sum += rows[i].weight = exp(rows[i].score - top);
    for (int i = 0; i < num && sum > 0; i++) rows[i].weight /= sum;
    return top + log(sum);
}

/* Returns the score of a row from its key's product with the query, times the scale. */
static inline double score_from(double product, double softcap, double alibi, double apart) {
    return (softcap > 0 ? softcap * tanh(product / softcap) : product) - alibi * apart;
}

static inline void score_seen(const sight *s, seen_row *row) {
    const double scale = s->scale != 0 ? s->scale : 1 / sqrt(s->k_dim);
    double product = 0;
    row->size = 0;
    for (int d = 0; d < s->k_dim; d++) {
        const double term = s->q[d] * row->k[d] * scale;
        product += term;
        row->size += fabs(term);
    }
    row->score = score_from(product, s->softcap, s->alibi, row->apart);
}

/* Adds a value to the result. */
static inline void add_seen(sight *s, double weight, double x, int d) {
    s->out[d] += weight * x;
    s->out_size[d] += weight * fabs(x);
}

/* Fills in the answers.  A value of no weight may be infinite or no number. */
static inline void attend_plainly(sight *s) {
    const double sink = s->sink ? (double)*s->sink : -INFINITY,
                 prior = s->prior_lse ? (double)*s->prior_lse : -INFINITY;
    for (int i = 0; i < s->num; i++) score_seen(s, &s->rows[i]);
    s->lse = weigh_seen(s->rows, s->num, join_logs(sink, prior));
    for (int d = 0; d < s->v_dim; d++) s->out[d] = s->out_size[d] = 0;
    for (int d = 0; d < s->v_dim && prior > -INFINITY; d++)
        add_seen(s, exp(prior - s->lse), (double)s->prior_out[d], d);
    for (int i = 0; i < s->num; i++)
        for (int d = 0; d < s->v_dim && s->rows[i].weight > 0; d++) add_seen(s, s->rows[i].weight, s->rows[i].v[d], d);
}

/* ---- which rows a query sees ------------------------------------------------------------------------------------- */

/* Whether a layer's policy shows a query at position `at` a row at a position.  Causality is another question: the row
 * may be a later one. */
static inline int shows_row(const kvc_policy *policy, int32_t at, int32_t position) {
    const int32_t size = policy->attention_chunk_size;
    if (policy->kind == KVC_CHUNKED) return position >= at / size * size;
    return policy->kind != KVC_SLIDING || position > at - policy->window || position < policy->num_sink_tokens;
}

/* Whether some range hides a position of a sequence. */
static inline int hides_row(const kvc_masked *masked, int num, int64_t seq_id, int32_t position) {
    for (int i = 0; i < num; i++)
        if (masked[i].seq_id == seq_id && position >= masked[i].begin && position < masked[i].end) return 1;
    return 0;
}

/* Whether a token of a tree is another token or descends from it. */
static inline int descends_from(const int32_t *parents, int32_t token, int32_t ancestor) {
    while (token > ancestor) token = parents[token];
    return token == ancestor;
}

/* Whether a choice names a row for a KV head of token t, which stands at position `at`.  A row of a layer with a stride
 * stands for `stride` positions up to its own, and any of them names it. */
static inline int names_row(const kvc_chosen *chosen, int64_t t, int kv_head, int32_t at, int32_t position,
                            int32_t stride) {
    const int32_t block = chosen->block ? chosen->block : 1, choice = chosen->num_choices > 1 ? kv_head : 0;
    const char *list = (const char *)chosen->positions + t * chosen->token_stride + choice * chosen->choice_stride;
    if (chosen->tail && position >= (at + 1) / block * block) return 1;
    for (int i = 0; i < chosen->width; i++) {
        const int32_t entry = ((const int32_t *)(const void *)list)[i];
        if (entry >= (position - stride + 1) / block && entry <= position / block) return 1;
    }
    return 0;
}

/* ---- what a token chooses in a layer of keys alone --------------------------------------------------------------- */

/* An entry that a token may choose: the position of a row, or the number of a block.  A test lists one for each row
 * that the token sees and may_choose() allows; choose_plainly() says which are chosen. */
typedef struct candidate {
    int32_t id;
    int is_forced;
    double score, error; /* error: how far off the core's score may be, by the test's own rule */
} candidate;

static inline int32_t entry_of(const kvc_choose_args *a, int32_t position) {
    return position / (a->block > 1 ? a->block : 1);
}

/* Whether kvc_choose may choose the row at a position, in a layer with this stride.  among: the token's list. */
static inline int may_choose(const kvc_choose_args *a, const int32_t *among, int32_t stride, int32_t position) {
    const int32_t unit = a->block > 1 ? 1 : stride; /* positions that name the same entry */
    for (int i = 0; i < a->among_width && a->among; i++)
        if (among[i] >= 0 && among[i] / unit == entry_of(a, position) / unit) return 1;
    return !a->among;
}

/* Whether a token at position `at` chooses the row in any case: num_first and num_local count rows, or blocks. */
static inline int must_choose(const kvc_choose_args *a, int32_t at, int32_t stride, int32_t position) {
    const int32_t size = a->block > 1 ? a->block : stride, last = (at + 1) / stride * stride - 1;
    const int32_t own = last < 0 ? -1 : last / size, number = position / size;
    return number < a->num_first || (number <= own && number > own - a->num_local);
}

/* Returns what a head adds to the score of a row whose key has this product with its query. */
static inline double head_score(const kvc_choose_args *a, int k_dim, double product, double weight) {
    const double scaled = product * (a->scale != 0 ? (double)a->scale : 1 / sqrt(k_dim));
    return a->relu && scaled < 0 ? 0 : weight * scaled;
}

static inline int by_entry(const void *a, const void *b) {
    return ((const candidate *)a)->id - ((const candidate *)b)->id;
}

/* NaN is the largest score. */
static inline int better_first(const void *a, const void *b) {
    const candidate *x = a, *y = b;
    const int x_nan = isnan(x->score) != 0, y_nan = isnan(y->score) != 0;
    if (x->is_forced != y->is_forced) return y->is_forced - x->is_forced;
    if (x_nan != y_nan) return y_nan - x_nan;
    if (!x_nan && x->score != y->score) return x->score < y->score ? 1 : -1;
    return x->id - y->id;
}

/* Joins the rows of each entry, of which the best one counts, and moves the `width` chosen entries to the front, by
 * number.  Returns how many entries there are. */
static inline int choose_plainly(candidate *list, int num_rows, int width) {
    int num = 0;
    qsort(list, (size_t)num_rows, sizeof *list, by_entry);
    for (int i = 0; i < num_rows; i++) {
        candidate *last = num ? &list[num - 1] : NULL;
        if (!last || last->id != list[i].id) {
            list[num++] = list[i];
            continue;
        }
        const double error = fmax(last->error, list[i].error);
        if (better_first(&list[i], last) < 0) *last = list[i];
        last->error = error;
    }
    qsort(list, (size_t)num, sizeof *list, better_first);
    qsort(list, (size_t)(num < width ? num : width), sizeof *list, by_entry);
    return num;
}

#endif

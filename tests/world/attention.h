/* attention.h: attention in double, written from include/kvcache.h alone.  It is the only softmax of the tests in C.
 *
 * A test knows by a model of its own which rows there are.  It lists the rows that one query row sees, and
 * attend_plainly() answers what comes out.  Which rows a policy, a mask, a tree or a choice shows are questions of
 * their own: shows_row(), hides_row(), descends_from(), names_row().  An example, for head h of a token at position 7:
 *
 *     for (int row = 0; row < num_rows; row++)
 *         if (row <= 7 && shows_row(&layer.policy, 7, row))
 *             seen[num++] = (seen_row){.k = k[row][h], .v = v[row][h], .apart = 7 - row};
 *     sight s = {.q = q[h], .k_dim = DIM, .v_dim = DIM, .scale = 0.5, .sink = &sinks[h], .num = num, .rows = seen};
 *     attend_plainly(&s);
 */
#ifndef KVC_WORLD_ATTENTION_H
#define KVC_WORLD_ATTENTION_H

#include <math.h>
#include <stdint.h>

#include "kvcache.h"

enum { SIGHT_DIM = 576 };

/* A row that a query sees.  Its key is as the query sees it, rotated for the distance between them. */
typedef struct seen_row {
    int id;               /* the test's own: which row this is */
    const double *k, *v;  /* [k_dim] and [v_dim].  Where keys hold the values (value_in_key), v is k. */
    double apart;         /* positions between the query and the row, 0 or more, for ALiBi */
    double score, weight; /* answers.  The weights of all rows, the sink and the prior result add up to 1. */
    double size;          /* answer: the score, were all its products positive.  Errors are relative to it. */
} seen_row;

/* What a query row of one head sees, and what comes out.  Numbers are 0, and pointers NULL, for what a call lacks. */
typedef struct sight {
    const double *q;
    int k_dim, v_dim, num;
    double scale, softcap, alibi; /* scale 0: 1 / sqrt(k_dim) */
    const float *sink, *prior_out, *prior_lse;
    seen_row *rows;
    double lse, out[SIGHT_DIM]; /* answers.  If the query sees nothing, lse is -inf, and out is 0. */
    double out_size[SIGHT_DIM]; /* answer: the result, were all its values positive */
} sight;

/* Copies n floats to doubles.  Returns `to`. */
static inline const double *doubles(double *to, const float *from, int n) {
    for (int i = 0; i < n; i++) to[i] = (double)from[i];
    return to;
}

/* ---- the softmax ------------------------------------------------------------------------------------------------- */

/* Returns the log of exp(a) + exp(b). */
static inline double join_logs(double a, double b) {
    const double top = fmax(a, b);
    return top == -INFINITY ? top : top + log(exp(a - top) + exp(b - top));
}

/* Turns the scores of rows into weights beside `others`, the log of what else takes part.  Returns lse. */
static inline double weigh_seen(seen_row *rows, int num, double others) {
    double top = others, sum = 0;
    for (int i = 0; i < num; i++) top = fmax(top, rows[i].score);
    for (int i = 0; i < num; i++) sum += rows[i].weight = top == -INFINITY ? 0 : exp(rows[i].score - top);
    sum += top == -INFINITY ? 0 : exp(others - top);
    for (int i = 0; i < num && sum > 0; i++) rows[i].weight /= sum;
    return sum > 0 ? top + log(sum) : -INFINITY;
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

#endif

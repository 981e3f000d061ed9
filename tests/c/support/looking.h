/* looking.h: what queries see, and attention over it: kvc_attend and kvc_dense on an open batch against plain
 * arithmetic in double over the rows of the oracle (oracle.h). */
#ifndef KVC_TEST_LOOKING_H
#define KVC_TEST_LOOKING_H

#include <math.h>
#include <stdlib.h>

#include "support/random_steps.h"
#include "world/attention.h"

enum { MOST_ENTRIES = MAX_ROWS + MAX_BATCH, MOST_HEADS = 9, MOST_MASKED = 9 };

/* A row that a layer has for a sequence of the batch. */
typedef struct entry {
    int32_t position, token; /* token: its index in the batch; -1: stored */
    int arrived;
    double k[MAX_ROW], v[MAX_ROW]; /* [num_kv_heads][dim] */
} entry;

typedef struct entry_list {
    int num;
    entry entries[MOST_ENTRIES];
} entry_list;

/* The positions that are masked from the batch's queries. */
static kvc_masked masked[MOST_MASKED];
static int num_masked;

static int num_looks, num_attends, num_refused, num_weighed;

/* ---- the rows there are ------------------------------------------------------------------------------------------ */

static inline void add_entry(const pair *p, int l, entry_list *list, int32_t position, int32_t token, int32_t tag,
                             int32_t moved) {
    const kvc_layer *layer = &p->layers[l];
    entry *e = &list->entries[list->num];
    *e = (entry){.position = position, .token = token, .arrived = list->num++};
    for (int h = 0; h < layer->num_kv_heads; h++) {
        moved_key(p, l, tag, moved, h, &e->k[h * layer->k_dim]);
        for (int d = 0; d < layer->v_dim; d++) e->v[h * layer->v_dim + d] = element(tag, l, !layer->value_in_key, h, d);
    }
}

static inline const cross_put *find_cross_put(const pair *p, int l, int64_t id) {
    for (int i = 0; i < p->num_cross_puts; i++)
        if (p->cross_puts[i].layer == l && p->cross_puts[i].id == id) return &p->cross_puts[i];
    return NULL;
}

/* In order of arrival: what is stored, then the batch's own that were put; in a cross-attention layer one or the
 * other. */
static inline const entry_list *list_entries(const pair *p, int layer, int64_t id) {
    static entry_list list;
    int l = source_of(p, layer);
    const sequence *s = find_sequence(p, id);
    const cross_put *put = find_cross_put(p, l, id);
    list.num = 0;
    for (int i = 0; s && !put && i < s->layers[l].num; i++) {
        const row *r = &s->layers[l].rows[i];
        add_entry(p, l, &list, r->position, -1, r->tag, r->position - r->base);
    }
    for (int32_t i = 0; put && i < put->n; i++) add_entry(p, l, &list, i, -1, put->tag + i, 0);
    for (int32_t t = 0; t < p->num_tokens; t++)
        if (p->ids[t] == id && p->written[l][t] && gets_row(p, l, p->positions[t]))
            add_entry(p, l, &list, p->positions[t], t, p->batch_tag + t, 0);
    return &list;
}

static inline int is_masked(int64_t id, int32_t position) { return hides_row(masked, num_masked, id, position); }

/* Whether a token sees a row of its sequence. */
static inline int sees(const pair *p, int l, int32_t token, const entry *e, int sees_all) {
    const kvc_policy *policy = &p->layers[l].policy;
    int32_t position = p->positions[token];
    if (is_masked(p->ids[token], e->position)) return 0;
    if (policy->kind == KVC_CROSS) return 1;
    if (p->parents && e->token >= 0 ? !descends_from(p->parents, token, e->token) : !sees_all && e->position > position)
        return 0;
    return shows_row(policy, position, e->position);
}

/* ---- dense rows -------------------------------------------------------------------------------------------------- */

static inline int by_position(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return x->position != y->position ? (x->position > y->position) - (x->position < y->position)
                                      : x->arrived - y->arrived;
}

static inline int by_id(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* The batch's sequences by rising id; returns how many. */
static inline int members_of(const pair *p, int64_t *ids) {
    int num = 0;
    for (int t = 0; t < p->num_tokens; t++)
        if (!count_id(p->ids[t], t, p->ids)) ids[num++] = p->ids[t];
    qsort(ids, (size_t)num, sizeof *ids, by_id);
    return num;
}

/* The arrays that kvc_dense wrote. */
typedef struct dense {
    int64_t num;
    float k[MAX_SEQUENCES * MOST_ENTRIES * 16], v[MAX_SEQUENCES * MOST_ENTRIES * 16];
    float mask[MAX_BATCH * MOST_ENTRIES * 3 + 1];
    uint8_t seen[MAX_BATCH * MOST_ENTRIES * 3 + 1];
} dense;

/* Calls kvc_dense, which must write the masks of so many tokens and nothing past them. */
static inline void fill_dense(kvc_batch *batch, int l, const kvc_dense_args *args, int num_tokens) {
    const int64_t end = num_tokens * args->num_rows;
    args->mask[end] = args->seen[end] = 7;
    CHECKF(kvc_dense(batch, l, args) == KVC_OK, "%s", kvc_last_error());
    CHECK(args->mask[end] == 7 && args->seen[end] == 7);
}

static inline void get_dense(pair *p, int l, const uint8_t *non_causal, dense *out) {
    CHECKF(kvc_dense_rows(p->batch, l, &out->num) == KVC_OK, "%s", kvc_last_error());
    CHECK(out->num <= MOST_ENTRIES * 3);
    const kvc_rows_out rows = room_for(p, l, (int32_t)out->num, out->k, out->v);
    kvc_dense_args args = {.struct_size = sizeof args,
                           .rows = &rows,
                           .mask = out->mask,
                           .mask_token_stride = out->num * (int64_t)sizeof(float),
                           .num_rows = out->num,
                           .non_causal = non_causal,
                           .seen = out->seen,
                           .seen_token_stride = out->num,
                           .masked = masked,
                           .masked_size = sizeof *masked,
                           .num_masked = num_masked};
    fill_dense(p->batch, l, &args, p->num_tokens);
    for (int64_t i = 0; i < p->num_tokens * out->num; i++) CHECK(out->seen[i] == (out->mask[i] == 0));
    args.num_rows++;
    CHECK_FAILS(kvc_dense(p->batch, l, &args), KVC_ERR_INVALID, "num_rows", "there are");
}

static inline void check_dense_row(const pair *p, int l, const dense *got, int64_t i, const entry *e) {
    const kvc_layer *layer = &p->layers[l];
    for (int h = 0; h < layer->num_kv_heads; h++) {
        const float *k = &got->k[(h * got->num + i) * layer->k_dim], *v = &got->v[(h * got->num + i) * layer->v_dim];
        for (int d = 0; d < layer->k_dim; d++)
            CHECKF(fabs(k[d] - e->k[h * layer->k_dim + d]) <= p->roundings * 1e-4, "layer %d, k[%d] is %g, not %g", l,
                   d, (double)k[d], e->k[h * layer->k_dim + d]);
        for (int d = 0; d < layer->v_dim; d++) CHECK(v[d] == e->v[h * layer->v_dim + d]);
    }
}

/* The sequences apart: each has the rows and masks that it has among all, at `first`, and zeros that nobody sees. */
static inline void check_slice(const pair *p, int l, const dense *all, int64_t first, int64_t num, const dense *got,
                               int s, int tokens) {
    const kvc_layer *layer = &p->layers[l];
    const size_t k_size = (size_t)layer->k_dim * sizeof(float), v_size = (size_t)layer->v_dim * sizeof(float);
    static const float zeros[64];
    for (int64_t i = 0; i < got->num; i++) {
        for (int h = 0; h < layer->num_kv_heads; h++) {
            const int64_t to = (s * layer->num_kv_heads + h) * got->num + i, from = h * all->num + first + i;
            CHECK(!memcmp(&got->k[to * layer->k_dim], i < num ? &all->k[from * layer->k_dim] : zeros, k_size));
            CHECK(!memcmp(&got->v[to * layer->v_dim], i < num ? &all->v[from * layer->v_dim] : zeros, v_size));
        }
        for (int t = s * tokens; t < (s + 1) * tokens; t++) {
            CHECK(got->mask[t * got->num + i] == (i < num ? all->mask[t * all->num + first + i] : -INFINITY));
            CHECK(got->seen[t * got->num + i] == (i < num && all->seen[t * all->num + first + i]));
        }
    }
}

static inline void check_apart(pair *p, int l, const uint8_t *non_causal, const dense *all) {
    static dense got;
    static entry_list sorted;
    static int32_t positions[MAX_SEQUENCES * MOST_ENTRIES];
    const kvc_layer *layer = &p->layers[l];
    int32_t num_sequences;
    int64_t ids[MAX_BATCH], first = 0;
    if (kvc_dense_sequences(p->batch, l, &num_sequences, &got.num) != KVC_OK) {
        CHECK(strstr(kvc_last_error(), "each by itself"));
        return;
    }
    CHECK(members_of(p, ids) == num_sequences && num_sequences * got.num <= MAX_SEQUENCES * MOST_ENTRIES);
    kvc_rows_out rows = room_for(p, l, (int32_t)got.num, got.k, got.v);
    rows.positions = positions;
    const kvc_dense_args args = {.struct_size = sizeof args,
                                 .rows = &rows,
                                 .mask = got.mask,
                                 .mask_token_stride = got.num * (int64_t)sizeof(float),
                                 .num_rows = got.num,
                                 .non_causal = non_causal,
                                 .seen = got.seen,
                                 .seen_token_stride = got.num,
                                 .by_sequence = 1,
                                 .k_batch_stride = layer->num_kv_heads * rows.k_head_stride,
                                 .v_batch_stride = layer->num_kv_heads * rows.v_head_stride,
                                 .masked = masked,
                                 .masked_size = sizeof *masked,
                                 .num_masked = num_masked};
    fill_dense(p->batch, l, &args, p->num_tokens);
    for (int m = 0; m < num_sequences; m++) { /* by rising id; s: as the batch names them */
        const int tokens = p->num_tokens / num_sequences, num = list_entries(p, l, ids[m])->num;
        int s = 0;
        while (p->ids[s * tokens] != ids[m]) s++;
        check_slice(p, l, all, first, num, &got, s, tokens);
        sorted = *list_entries(p, l, ids[m]);
        qsort(sorted.entries, (size_t)num, sizeof *sorted.entries, by_position);
        for (int64_t i = 0; i < got.num; i++)
            CHECK(positions[s * got.num + i] == (i < num ? sorted.entries[i].position : -1));
        first += num;
    }
}

/* Checks that no dense rows are to be had of a layer of keys alone. */
static inline void refuse_dense(pair *p, int l) {
    static float k[MAX_ROW];
    const kvc_rows_out rows = room_for(p, l, 0, k, NULL);
    const kvc_dense_args args = {.struct_size = sizeof args, .rows = &rows};
    int32_t num_sequences;
    int64_t num;
    CHECK_FAILS(kvc_dense_rows(p->batch, l, &num), KVC_ERR_UNSUPPORTED, "keys alone", "gather these keys");
    CHECK_FAILS(kvc_dense_sequences(p->batch, l, &num_sequences, &num), KVC_ERR_UNSUPPORTED, "keys alone",
                "attend in the layer");
    CHECK_FAILS(kvc_dense(p->batch, l, &args), KVC_ERR_UNSUPPORTED, "keys alone", "their spans");
}

static inline void check_dense(pair *p, int l, const uint8_t *non_causal) {
    static dense got;
    static entry_list sorted;
    int64_t ids[MAX_BATCH], row = 0;
    if (p->layers[l].policy.kind == KVC_NONE) {
        CHECK_FAILS(kvc_dense_rows(p->batch, l, &got.num), KVC_ERR_INVALID, "layer", "no attention");
        return;
    }
    if (!p->layers[l].v_dim) {
        refuse_dense(p, l);
        return;
    }
    get_dense(p, l, non_causal, &got);
    for (int m = 0, n = members_of(p, ids); m < n; m++) {
        const entry_list *list = list_entries(p, l, ids[m]);
        sorted.num = list->num;
        memcpy(sorted.entries, list->entries, (size_t)list->num * sizeof(entry));
        qsort(sorted.entries, (size_t)sorted.num, sizeof(entry), by_position);
        for (int i = 0; i < sorted.num && row < got.num; i++, row++) {
            const entry *e = &sorted.entries[i];
            check_dense_row(p, l, &got, row, e);
            for (int t = 0; t < p->num_tokens; t++) {
                int right = p->ids[t] == ids[m] && sees(p, l, t, e, non_causal && non_causal[t]);
                float mask = got.mask[t * got.num + row];
                CHECKF(mask == (right ? 0 : -INFINITY), "layer %d, token %d at %d, a row at %d: %g", l, t,
                       p->positions[t], e->position, (double)mask);
            }
        }
    }
    CHECKF(row == got.num, "%lld rows, not %lld", (long long)got.num, (long long)row);
    check_apart(p, l, non_causal, &got);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Some tokens of the batch in a layer. */
typedef struct query {
    int l, first, n, num_heads, inner;
    const uint8_t *non_causal; /* one byte per token of the range */
    float scale, *alibi;
    float *q, *out, *lse;
} query;

/* Returns where the row of a token and head lies in an array with rows of `dim`: token major, or head major in groups.
 */
static inline int64_t at(const query *a, int t, int h, int dim) {
    if (!a->inner) return (int64_t)(t * a->num_heads + h) * dim;
    return (int64_t)((t / a->inner * a->num_heads + h) * a->inner + t % a->inner) * dim;
}

static inline double query_element(const pair *p, const query *a, int t, int h, int d) {
    return (double)(element(p->batch_tag + a->first + t, a->l + 20, 1, h, d) / 128);
}

static inline query query_new(const pair *p, int l, int first, int n) {
    static float alibi[MOST_HEADS] = {0.01f, -0.02f, 0, 0.003f, 0.1f, 0, 0.01f, 0.02f, 0.03f};
    const kvc_layer *layer = &p->layers[l];
    query a = {.l = l, .first = first, .n = n, .num_heads = layer->num_kv_heads * random_int(1, 4), .scale = 0.006f};
    for (int inner = random_int(2, 7); inner > 1 && n > 1 && !a.inner && random_int(0, 2); inner--)
        a.inner = n % inner ? 0 : inner;
    a.alibi = random_int(0, 4) ? NULL : alibi;
    a.q = malloc((size_t)(n * a.num_heads * layer->k_dim) * sizeof *a.q);
    a.out = malloc((size_t)(n * a.num_heads * layer->v_dim) * sizeof *a.out);
    a.lse = malloc((size_t)(n * a.num_heads) * sizeof *a.lse);
    for (int t = 0; t < n; t++)
        for (int h = 0; h < a.num_heads; h++)
            for (int d = 0; d < layer->k_dim; d++)
                a.q[at(&a, t, h, layer->k_dim) + d] = (float)query_element(p, &a, t, h, d);
    return a;
}

static inline void query_free(query *a) {
    free(a->q);
    free(a->out);
    free(a->lse);
}

static inline kvc_status run_query(const pair *p, const query *a, int num_threads) {
    const kvc_layer *layer = &p->layers[a->l];
    const int64_t f = sizeof(float), group = a->num_heads * a->inner * f, inner = a->inner ? 1 : 0;
    const int64_t token = inner ? f : f * a->num_heads, head = inner ? f * a->inner : f;
    const kvc_plan_args plan = {.struct_size = sizeof plan,
                                .layer = a->l,
                                .first = a->first,
                                .num_tokens = a->n,
                                .num_heads = a->num_heads,
                                .num_threads = num_threads,
                                .non_causal = a->non_causal,
                                .masked = masked,
                                .masked_size = sizeof *masked,
                                .num_masked = num_masked};
    const kvc_attend_args args = {.struct_size = sizeof args,
                                  .q = a->q,
                                  .out = a->out,
                                  .lse = a->lse,
                                  .alibi = a->alibi,
                                  .q_token_stride = token * layer->k_dim,
                                  .q_head_stride = head * layer->k_dim,
                                  .out_token_stride = token * layer->v_dim,
                                  .out_head_stride = head * layer->v_dim,
                                  .lse_token_stride = token,
                                  .lse_head_stride = head,
                                  .scale = a->scale,
                                  .tokens_per_sequence = a->inner,
                                  .q_batch_stride = group * layer->k_dim,
                                  .out_batch_stride = group * layer->v_dim,
                                  .lse_batch_stride = group};
    return kvc_attend(p->batch, &plan, &args);
}

/* Describes a query row of a head.  see_entry() adds the rows that it sees. */
static inline sight sight_of(const pair *p, const query *a, int t, int h) {
    static double q[MAX_ROW];
    static seen_row rows[MOST_ENTRIES];
    const kvc_layer *layer = &p->layers[a->l];
    for (int d = 0; d < layer->k_dim; d++) q[d] = query_element(p, a, t, h, d);
    return (sight){.q = q,
                   .k_dim = layer->k_dim,
                   .v_dim = layer->v_dim,
                   .scale = (double)a->scale,
                   .alibi = a->alibi ? (double)a->alibi[h] : 0,
                   .rows = rows};
}

static inline void see_entry(const pair *p, const query *a, sight *s, int h, const entry *e, int i, int32_t position) {
    const kvc_layer *layer = &p->layers[a->l];
    const int kv = h * layer->num_kv_heads / a->num_heads;
    s->rows[s->num++] = (seen_row){.id = i,
                                   .k = &e->k[kv * layer->k_dim],
                                   .v = &e->v[kv * layer->v_dim],
                                   .apart = fabs((double)e->position - position)};
}

/* Attends, and returns the error that a score may have because queries are rounded for quantised keys. */
static inline double attend_to_entries(const pair *p, const query *a, sight *s) {
    double size = 0;
    attend_plainly(s);
    for (int i = 0; i < s->num; i++) size = fmax(size, s->rows[i].size);
    return p->layers[a->l].k_type < KVC_FLOAT_TYPES ? 0 : 1e-4 * size;
}

/* Token t of the query, head h, over the rows of its sequence. */
static inline void check_head(const pair *p, const query *a, const entry_list *list, int t, int h) {
    const kvc_layer *layer = &p->layers[a->l];
    const double rounded = layer->v_type < KVC_FLOAT_TYPES ? 0 : 128 * 5e-4; /* weights, for quantised values */
    const int token = a->first + t;
    sight s = sight_of(p, a, t, h);
    for (int i = 0; i < list->num; i++)
        if (sees(p, a->l, token, &list->entries[i], a->non_causal && a->non_causal[t]))
            see_entry(p, a, &s, h, &list->entries[i], i, p->positions[token]);
    const double off = attend_to_entries(p, a, &s);
    for (int d = 0; d < layer->v_dim; d++) {
        float got = a->out[at(a, t, h, layer->v_dim) + d];
        CHECKF(fabs(got - s.out[d]) <= 128 * (1e-5 + 2 * off) + rounded,
               "layer %d, token %d at %d, head %d of %d: out[%d] is %g, not %g", a->l, token, p->positions[token], h,
               a->num_heads, d, (double)got, s.out[d]);
    }
    float lse = a->lse[at(a, t, h, 1)];
    CHECKF(lse == s.lse || fabs(lse - s.lse) <= 1e-5 * (1 + fabs(s.lse)) + off, "lse is %g, not %g", (double)lse,
           s.lse);
}

static inline void check_answers(const pair *p, const query *a) {
    int64_t ids[MAX_BATCH];
    for (int m = 0, n = members_of(p, ids); m < n; m++) {
        const entry_list *list = list_entries(p, a->l, ids[m]);
        for (int t = 0; t < a->n; t++)
            for (int h = 0; h < a->num_heads && p->ids[a->first + t] == ids[m]; h++) check_head(p, a, list, t, h);
    }
}

/* Whether the batch's rows are there that a query sees; or, of all it may have a part in, one is missing. */
static inline void find_missing(const pair *p, const query *a, int *seen, int *any) {
    int l = source_of(p, a->l);
    *seen = *any = p->layers[l].policy.kind == KVC_NONE;
    for (int t = a->first; t < a->first + a->n; t++) {
        if (p->layers[l].policy.kind == KVC_CROSS && !list_entries(p, l, p->ids[t])->num) *seen = *any = 1;
        for (int32_t i = 0; keeps_tokens(p, l) && i < p->num_tokens; i++) {
            const entry e = {.position = p->positions[i], .token = i};
            if (p->ids[i] != p->ids[t] || p->written[l][i] || !gets_row(p, l, p->positions[i])) continue;
            *any |= !is_masked(p->ids[t], e.position) && (!p->parents || descends_from(p->parents, t, i));
            *seen |= sees(p, l, t, &e, a->non_causal && a->non_causal[t - a->first]);
        }
    }
}

/* One thread and several give the same bits. */
static inline void check_threads(const pair *p, const query *a) {
    size_t size = (size_t)(a->n * a->num_heads * p->layers[a->l].v_dim) * sizeof *a->out;
    float *before = malloc(size);
    memcpy(before, a->out, size);
    CHECK(run_query(p, a, 3) == KVC_OK && !memcmp(before, a->out, size));
    free(before);
}

static inline void check_attend(pair *p, int l, int first, int n, const uint8_t *non_causal) {
    query a = query_new(p, l, first, n);
    a.non_causal = non_causal ? non_causal + first : NULL;
    int seen_missing, any_missing;
    find_missing(p, &a, &seen_missing, &any_missing);
    kvc_status status = run_query(p, &a, 1);
    if (!p->layers[l].v_dim && p->layers[l].policy.kind != KVC_NONE) {
        CHECKF(status == KVC_ERR_UNSUPPORTED && strstr(kvc_last_error(), "keys alone"), "%s", kvc_last_error());
    } else if (status == KVC_OK) {
        CHECKF(!seen_missing, "layer %d", l);
        check_answers(p, &a);
        check_threads(p, &a);
        num_attends++;
    } else { /* rows between others may be required though no query sees them */
        CHECKF(any_missing && status == KVC_ERR_INVALID, "layer %d: %s", l, kvc_last_error());
        num_refused++;
    }
    query_free(&a);
}

/* ---- weights of stored rows -------------------------------------------------------------------------------------- */

enum { MOST_ASKED = 5 };

/* Adds the weights that a query at a position gives to a layer's stored rows.  Returns the error that its scores may
 * have. */
static inline double add_weights(const pair *p, const query *a, const entry *entries, int num, int t, int h,
                                 int32_t position, double *sums) {
    const kvc_policy *policy = &p->layers[a->l].policy;
    sight s = sight_of(p, a, t, h);
    for (int i = 0; i < num; i++)
        if (policy->kind == KVC_CROSS ||
            (entries[i].position <= position && shows_row(policy, position, entries[i].position)))
            see_entry(p, a, &s, h, &entries[i], i, position);
    const double off = attend_to_entries(p, a, &s);
    for (int i = 0; i < s.num; i++) sums[s.rows[i].id] += s.rows[i].weight;
    return off;
}

/* Whether a query at a position sees some positions of a range. */
static inline int sees_some(const kvc_policy *policy, int32_t position, range r) {
    const int32_t end = position < r.end - 1 ? position + 1 : r.end;
    for (int32_t at = r.begin; at < end; at++)
        if (shows_row(policy, position, at)) return 1;
    return 0;
}

/* Asks for the weights that queries give to the stored rows of a sequence in a layer. */
static inline void check_weights(const pair *p, int l, int64_t id) {
    static float found[MAX_ROW * MOST_ENTRIES];
    static double right[MOST_ENTRIES];
    const kvc_layer *layer = &p->layers[l];
    const sequence *s = find_sequence(p, id);
    const entry *stored = list_entries(p, l, id)->entries;
    int num = list_entries(p, l, id)->num;
    query a = {.l = l, .n = random_int(1, MOST_ASKED + 1), .num_heads = layer->num_kv_heads * random_int(1, 4)};
    int32_t positions[MOST_ASKED], next = kvc_next_position(p->cache, id);
    while (num && stored[num - 1].token >= 0) num--;
    if (find_cross_put(p, source_of(p, l), id) || !layer->v_dim || layer->policy.kind == KVC_NONE) return;
    a.scale = 0.006f;
    a.q = malloc((size_t)(a.n * a.num_heads * layer->k_dim) * sizeof *a.q);
    const row_list *rows = s ? &s->layers[source_of(p, l)] : NULL;
    const int is_behind = random_int(0, 2), is_near = random_int(0, 2);
    int is_gone = 0;
    for (int t = 0; t < a.n; t++) {
        positions[t] = is_near ? not_negative(next + random_int(-4, 3)) : random_int(0, next + 1);
        const int32_t position = is_behind ? next : positions[t];
        is_gone |=
            rows && num &&
            (sees_some(&layer->policy, position, rows->lost) || sees_some(&layer->policy, position, rows->missing));
        for (int h = 0; h < a.num_heads; h++)
            for (int d = 0; d < layer->k_dim; d++)
                a.q[at(&a, t, h, layer->k_dim) + d] = (float)query_element(p, &a, t, h, d);
    }
    const int64_t size = sizeof(float);
    const kvc_weights_args args = {.struct_size = sizeof args,
                                   .q = a.q,
                                   .weights = found,
                                   .positions = is_behind ? NULL : positions,
                                   .q_token_stride = a.num_heads * layer->k_dim * size,
                                   .q_head_stride = layer->k_dim * size,
                                   .weights_head_stride = num * size,
                                   .num_rows = num,
                                   .num_queries = a.n,
                                   .num_heads = a.num_heads,
                                   .scale = a.scale};
    const kvc_status status = kvc_weights(p->cache, id, l, &args);
    for (int kv = 0; status == KVC_OK && kv < layer->num_kv_heads; kv++) {
        const int group = a.num_heads / layer->num_kv_heads;
        double off = 0;
        memset(right, 0, sizeof right);
        for (int t = 0; t < a.n; t++)
            for (int h = kv * group; h < (kv + 1) * group; h++)
                off += 2e-5 + 3 * add_weights(p, &a, stored, num, t, h, is_behind ? next : positions[t], right);
        for (int i = 0; i < num; i++) {
            const float got = found[kv * num + i];
            CHECKF(fabs((double)got - right[i]) <= off, "layer %d, a row at %d: weight %g, not %g", l,
                   stored[i].position, (double)got, right[i]);
        }
    }
    CHECKF(status == (is_gone ? KVC_ERR_GONE : KVC_OK), "layer %d: %d: %s", l, status, kvc_last_error());
    num_weighed += status == KVC_OK && num;
    free(a.q);
}

/* ---- a look ------------------------------------------------------------------------------------------------------ */

/* Hides ranges of some of the batch's sequences, or nothing. */
static inline void hide_some(const pair *p) {
    num_masked = random_int(0, 2) ? random_int(1, MOST_MASKED + 1) : 0;
    for (int i = 0; i < num_masked; i++) {
        int t = random_int(0, p->num_tokens), all = !random_int(0, 12);
        int32_t near = p->positions[t] - random_int(-3, 60), begin = all ? 0 : not_negative(near);
        all |= begin > KVC_END - 20 || !random_int(0, 12);
        masked[i] = (kvc_masked){p->ids[t], begin, all ? KVC_END : begin + random_int(0, 20)};
    }
}

static inline void look(pair *p) {
    uint8_t non_causal[MAX_BATCH];
    int some = random_int(0, 4);
    num_looks++;
    hide_some(p);
    for (int t = 0; t < p->num_tokens; t++) non_causal[t] = some == 0 ? 1 : (uint8_t)random_int(0, 2);
    for (int l = 0; l < p->config.num_layers; l++) {
        const uint8_t *given = some < 2 ? non_causal : NULL;
        int first = random_int(0, p->num_tokens), n = random_int(1, p->num_tokens - first + 1);
        check_dense(p, l, given);
        check_attend(p, l, 0, p->num_tokens, given);
        check_attend(p, l, first, n, given);
        check_attend(p, l, first, n, NULL); /* a plan for the other is not taken */
        hide_some(p);
        check_attend(p, l, first, n, NULL);
        check_weights(p, l, random_id());
    }
}

#endif

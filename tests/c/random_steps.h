/* random_steps.h: random operations on a cache and its model, and views held meanwhile. */
#ifndef KVC_RANDOM_STEPS_H
#define KVC_RANDOM_STEPS_H

#include "model.h"

/* ---- views ------------------------------------------------------------------------------------------------------ */

/* A view of a sequence's rows, and what they were when it was taken. */
typedef struct view {
    kvc_hold *hold;
    kvc_span spans[MAX_ROWS];
    int64_t num_spans;
    int layer;
    row rows[MAX_ROWS];
} view;

static inline kvc_status view_new(view *v, pair *p, int64_t id, int layer)
{
    const sequence *s = find_sequence(p, id);
    kvc_status status = kvc_spans(p->cache, id, layer, v->spans, sizeof *v->spans, MAX_ROWS, &v->num_spans, &v->hold);
    agree(p, "spans", status, KVC_OK);
    CHECK(status != KVC_OK || !v->hold == !v->num_spans);
    v->layer = layer;
    if (!v->hold)
        return status;
    p->num_holds++;
    memcpy(v->rows, s->layers[layer].rows, (size_t)s->layers[layer].num * sizeof *v->rows);
    return status;
}

static inline void view_check(const view *v, const pair *p)
{
    const row *rows = v->rows;
    for (int64_t i = 0; i < v->num_spans; rows += v->spans[i++].num_rows)
        check_span(p, v->layer, &v->spans[i], rows);
}

static inline void view_free(view *v, pair *p)
{
    if (!v->hold)
        return;
    view_check(v, p);
    kvc_hold_free(v->hold);
    v->hold = NULL;
    p->num_holds--;
}

/* ---- steps ------------------------------------------------------------------------------------------------------ */

enum { NUM_IDS = 6 };

static const int64_t some_ids[NUM_IDS] = {0, 1, -7, INT64_MAX, INT64_MIN, 1 << 20};

static inline int64_t random_id(void)
{
    return some_ids[random_int(0, NUM_IDS)];
}

static inline int32_t random_position(const pair *p, int64_t id)
{
    return random_int(0, next_of(p, find_sequence(p, id)) + 3);
}

/* An edit of any sequence, also of those of an open batch, which is refused. */
static inline void random_edit(pair *p)
{
    int64_t id = random_id(), other = random_id();
    int32_t begin = random_position(p, id), end = begin + random_int(0, 20);
    int choice = random_int(0, 100);
    if (choice < 25)
        pair_remove(p, id, begin, choice % 5 ? end : KVC_END, choice % 7 == 0);
    else if (choice < 40)
        pair_truncate(p, id, begin);
    else if (choice < 60 && id != other)
        pair_fork(p, id, other);
    else if (choice < 85 && id != other)
        pair_copy_prefix(p, id, other, begin);
    else if (choice < 93)
        pair_clear_sequence(p, id);
    else if (choice < 94)
        pair_keep(p, id);
    else if (choice < 95)
        pair_clear(p);
    else
        pair_compact(p);
}

/* Tokens of up to three sequences: mostly those that follow, now and then with gaps, repeated, or from further back. */
static inline int random_tokens(const pair *p, int32_t *positions, int64_t *ids)
{
    int64_t members[3] = {random_id(), random_id(), random_id()};
    int32_t next[3];
    int n = random_int(0, 4) ? random_int(1, 8) : random_int(1, 40), irregular = !random_int(0, 5);
    for (int m = 0; m < 3; m++)
        next[m] = next_of(p, find_sequence(p, members[m]));
    for (int t = 0; t < n; t++) {
        int m = t * 3 / n; /* one after the other, or mixed */
        if (irregular)
            m = random_int(0, 3);
        ids[t] = members[m];
        positions[t] = next[m];
        for (int i = 0; i < 3; i++)
            next[i] += members[i] == members[m];
        if (irregular && !random_int(0, 3))
            positions[t] = not_negative(positions[t] + random_int(-6, 7));
    }
    return n;
}

static inline void random_pass(pair *p)
{
    int32_t positions[MAX_BATCH];
    int64_t ids[MAX_BATCH];
    int n = random_tokens(p, positions, ids);
    kvc_status status = pair_begin(p, n, positions, ids);
    int64_t bytes = kvc_nbytes(p->cache);
    CHECKF(status != KVC_OK || !p->config.max_bytes || bytes <= p->config.max_bytes, "%lld bytes, max_bytes is %lld",
           (long long)bytes, (long long)p->config.max_bytes);
    if (status != KVC_OK)
        return;
    for (int i = random_int(-2, 3); i > 0; i--) {
        random_edit(p);
        pair_check(p);
    }
    if (random_int(0, 10)) {
        pair_put_all(p);
        pair_commit(p);
    } else {
        pair_abort(p);
    }
}

static inline void keep_small(pair *p)
{
    for (int i = 0; i < NUM_IDS; i++)
        if (rows_of(p, find_sequence(p, some_ids[i])) > 150 || next_of(p, find_sequence(p, some_ids[i])) > 1000)
            pair_clear_sequence(p, some_ids[i]);
}

static inline kvc_policy random_policy(void)
{
    int32_t window = random_int(1, 9), resume = random_int(0, 2) ? 0 : window + random_int(0, 6);
    return random_int(0, 3) ? sliding_policy(window, random_int(0, 2) * random_int(0, 6), resume) : full_policy;
}

/* A new cache of random layers and limits; its block size is set before. */
static inline void random_pair(pair *p)
{
    kvc_layer layers[MAX_LAYERS];
    int num_layers = random_int(1, MAX_LAYERS);
    for (int l = 0; l < num_layers; l++)
        layers[l] = (kvc_layer){.num_kv_heads = random_int(1, 3),
                                .k_dim = random_int(1, 5),
                                .v_dim = random_int(1, 5),
                                .k_type = random_int(0, 3),
                                .v_type = random_int(0, 3),
                                .policy = l && random_int(0, 2) ? layers[l - 1].policy : random_policy()};
    if (!random_int(0, 3))
        p->config.max_seq_len = random_int(30, 80);
    if (!random_int(0, 3))
        p->config.max_sequences = random_int(2, 6);
    if (!random_int(0, 3))
        p->config.capacity = random_int(40, 150);
    if (!random_int(0, 3))
        p->config.max_bytes = random_int(20, 80) << 10;
    p->config.num_threads = random_int(0, 4) ? 1 : 3;
    pair_new(p, num_layers, layers);
}

/* An edit, a pass, or a view taken and let go. */
static inline void random_step(pair *p, view *v)
{
    if (random_int(0, 2))
        random_pass(p);
    else
        random_edit(p);
    keep_small(p);
    if (random_int(0, 8))
        return;
    view_free(v, p);
    if (random_int(0, 2))
        view_new(v, p, random_id(), random_int(0, p->config.num_layers));
}

#endif

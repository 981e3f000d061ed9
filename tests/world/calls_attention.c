/* calls_attention.c: how attention is drawn and asked for, in batches and without. */
#include "calls.h"
#include "questions.h"

/* ---- attending and choosing -------------------------------------------------------------------------------------- */

/* Whether all tokens of the batch have rows in the layer. */
static int are_put(const batch *b, int l) {
    for (int t = 0; t < b->num; t++)
        if (is_own(&w.o, l) && !b->is_put[l][t]) return 0;
    return 1;
}

/* Now and then in a batch that restores, or before rows are put.  flag: the call puts rows first. */
int draw_attend(call *c) {
    const batch *b = &w.o.batches[me->number];
    if (!b->is_open || (b->restores && pick(20))) return 0;
    if (pick(2) && draw_put(c)) return c->flag = may_put(&w.o, b, c) == KVC_OK && w.o.layers[c->layer].v_dim;
    c->begin = c->num = 0;
    c->layer = pick(w.o.num_layers);
    if (w.o.layers[c->layer].policy.kind == KVC_NONE) return 0;
    return (w.o.layers[c->layer].v_dim || !pick(20)) && (are_put(b, c->layer) || !pick(8));
}

int draw_choose(call *c) {
    const batch *b = &w.o.batches[me->number];
    c->layer = pick(w.o.num_layers);
    if (!b->is_open || b->restores || w.o.layers[c->layer].policy.kind == KVC_NONE) return 0;
    return (!w.o.layers[c->layer].v_dim || !pick(40)) && (are_put(b, c->layer) || !pick(8));
}

/* Asks for tokens of the client's batch. */
static void ask(question *q, const batch *b, int layer) {
    const int first = pick(3) ? 0 : pick(b->num), num = pick(3) ? b->num - first : 1 + pick(b->num - first);
    make_plan(q, b, layer, first, num);
    make_question(q);
    if (pick(2)) q->plan.max_chosen = 0; /* as the choice says */
    if (pick(2)) q->plan.chosen_width = q->chosen.width;
}

static unsigned statuses_of(const question *q, int is_supported) {
    const unsigned right = right_statuses(q);
    if (!is_supported) return (right & ~(1u << KVC_OK)) | 1u << KVC_ERR_UNSUPPORTED;
    return right | (q->cancel ? 1u << KVC_ERR_CANCELLED : 0);
}

/* Tokens that have selected rows are inexact.  Whether a call that failed has selected rows is open, so the call
 * is made again until it succeeds. */
static void note_selected(call *c, const question *q) {
    shown rows[MOST_SHOWN];
    for (int t = q->first; t < q->first + q->num && q->plan.select_rows; t++)
        c->marks[t] = (uint8_t)(is_known(q->of, t) && select_plainly(q, t, list_seen(q, t, rows)));
}

void run_attend(call *c) {
    static _Thread_local question q;
    packed k, v;
    kvc_put_args put;
    batch b = w.o.batches[c->client];
    const kvc_status puts = c->flag ? may_put(&w.o, &b, c) : KVC_OK;
    if (c->flag) make_put(c, &put, &k, &v);
    if (c->flag && !puts) memset(&b.is_put[c->layer][c->begin], 1, (size_t)c->num);
    ask(&q, &b, c->layer);
    if (c->flag) q.args.put = &put;
    c->more = puts ? 1u << puts : statuses_of(&q, w.o.layers[c->layer].v_dim);
    q.batch = w.batches[c->client];
    if (q.plan.select_rows) q.cancel = 0;
    do c->status = kvc_attend(w.batches[c->client], &q.plan, &q.args);
    while (q.plan.select_rows &&
           (c->status == KVC_ERR_NOMEM || c->status == KVC_ERR_CANCELLED)); /* see note_selected */
    if (c->status) return;
    note_selected(c, &q);
    if (!c->is_disturbed && right_statuses(&q) == 1u << KVC_OK) check_alone(&q);
    check_answers(&q, 0);
}

void run_choose(call *c) {
    static _Thread_local question q;
    const int is_supported = !w.o.layers[c->layer].v_dim;
    ask(&q, &w.o.batches[c->client], c->layer);
    if (!is_supported) q.num_choices = 1, q.plan.max_chosen = q.plan.chosen_width = 0, make_choosing(&q);
    c->more = statuses_of(&q, is_supported);
    c->status = kvc_choose(w.batches[c->client], &q.plan, &q.choosing);
    if (!c->status) check_answers(&q, 0);
}

/* ---- weights of rows --------------------------------------------------------------------------------------------- */

/* Asks for queries at any positions, or all at the next one.  flag: bits. */
enum weighs { AT_POSITIONS = 1, ROTATES = 2, WRONG_NUMBER = 4 };

int draw_weights(call *c) {
    c->s = own_slot();
    c->layer = pick(w.o.num_layers);
    c->num = 1 + pick(4);
    c->flag = pick(4) | (pick(20) ? 0 : WRONG_NUMBER);
    for (int i = 0; i < c->num; i++) c->positions[i] = any_position(c->s);
    return w.o.layers[c->layer].policy.kind != KVC_NONE && (w.o.layers[c->layer].v_dim || !pick(20));
}

/* Queries of a sequence without a batch, and the right weights. */
typedef struct weighing {
    array q;
    float numbers[TOKENS][QUERY_HEADS][DIM], sinks[QUERY_HEADS], weights[HEADS * (ROWS + 1)];
    kvc_weights_args args;
    int32_t cancel, next; /* next: where the sequence goes on, as the call begins */
} weighing;

static void make_weighing(weighing *x, const call *c, int64_t num_rows) {
    const kvc_layer *layer = &w.o.layers[c->layer];
    const int num_heads = layer->num_kv_heads * (1 + pick(2)), type = pick(3);
    const int has_scale = layer->value_in_key || pick(2);
    x->args = (kvc_weights_args){.struct_size = sizeof x->args,
                                 .positions = c->flag & AT_POSITIONS ? c->positions : NULL,
                                 .num_rows = num_rows,
                                 .num_queries = c->num,
                                 .num_heads = num_heads,
                                 .q_type = type,
                                 .reduction = pick(2),
                                 .rotates = (c->flag & ROTATES) != 0,
                                 .scale = has_scale ? 0x1p-13f : 0,
                                 .softcap = pick(4) ? 0 : 5,
                                 .weights = x->weights};
    x->next = next_of(&w.o, &w.o.sequences[c->s]);
    make_numbers(x->numbers, c->num, num_heads, has_scale ? 1 : 0x1p-11f, 0);
    write_numbers(&x->q, x->numbers, c->num, 0, num_heads, layer->k_dim, type);
    x->args.q = row_in(&x->q, 0, 0);
    x->args.q_token_stride = x->q.token_stride;
    x->args.q_head_stride = x->q.head_stride;
    if (pick(2)) x->args.weights_head_stride = (ROWS + 1) * (int64_t)sizeof(float);
    for (int h = 0; h < num_heads; h++) x->sinks[h] = (float)(pick(9) - 4);
    if (!pick(3)) x->args.sinks = x->sinks;
    x->cancel = !pick(10);
    if (pick(2) || x->cancel) x->args.cancel = &x->cancel;
}

/* Adds the weights that a query's head gives the rows of a list. */
static void weigh(const weighing *x, const call *c, const rows *list, int t, int h, double *sums) {
    const int source = source_of(&w.o, c->layer);
    const kvc_layer *layer = &w.o.layers[source];
    const int32_t at = x->args.positions ? c->positions[t] : x->next;
    seen_row seen[ROWS];
    float q[DIM];
    double k[ROWS][DIM], numbers[DIM];
    memcpy(q, x->numbers[t][h], sizeof q);
    if (x->args.rotates && layer->rope.kind == KVC_ROPE_FREQUENCIES) turn(layer->rope.interleaved, at, q);
    sight s = {.q = doubles(numbers, q, layer->k_dim),
               .k_dim = layer->k_dim,
               .scale = (double)x->args.scale,
               .softcap = (double)x->args.softcap,
               .sink = x->args.sinks ? &x->sinks[h] : NULL,
               .rows = seen};
    for (int i = 0; i < list->num; i++) {
        const row *r = &list->at[i];
        float key[DIM];
        if (layer->policy.kind != KVC_CROSS && (r->position > at || !shows_row(&layer->policy, at, r->position)))
            continue;
        make_key(layer, r->tag, source, h * layer->num_kv_heads / x->args.num_heads, r->position - tokens[r->tag].base,
                 key);
        seen[s.num++] = (seen_row){.id = i, .k = doubles(k[s.num], key, layer->k_dim)};
    }
    attend_plainly(&s);
    for (int i = 0; i < s.num; i++) {
        double *sum = &sums[seen[i].id];
        *sum = x->args.reduction == KVC_REDUCE_MAX ? fmax(*sum, seen[i].weight) : *sum + seen[i].weight;
    }
}

static void check_weights(const weighing *x, const call *c, const rows *list) {
    const int group = x->args.num_heads / w.o.layers[c->layer].num_kv_heads;
    const double coarse = is_transformed(&w.o.layers[c->layer], 0) ? 5e-2 : 1e-4; /* of rounded queries */
    const int64_t stride = x->args.weights_head_stride ? ROWS + 1 : list->num;
    for (int kv = 0; kv < w.o.layers[c->layer].num_kv_heads; kv++) {
        double sums[ROWS] = {0};
        for (int t = 0; t < c->num; t++)
            for (int h = kv * group; h < (kv + 1) * group; h++) weigh(x, c, list, t, h, sums);
        for (int i = 0; i < list->num; i++)
            if (!(fabs((double)x->weights[kv * stride + i] - sums[i]) <= coarse * (1 + sums[i])))
                wrong("layer %d: row %d of %d of sequence %lld weighs %g, not %g", c->layer, i, list->num,
                      (long long)w.ids[c->s], (double)x->weights[kv * stride + i], sums[i]);
    }
}

/* Returns bits of the statuses that are right. */
static unsigned right_weighing(const weighing *x, const call *c, const rows *list) {
    const kvc_layer *layer = &w.o.layers[c->layer];
    const sequence *s = &w.o.sequences[c->s];
    const unsigned cancelled = x->cancel ? 1u << KVC_ERR_CANCELLED : 0;
    unsigned gone = 0;
    const int is_cross = layer->policy.kind == KVC_CROSS, rope = layer->rope.kind;
    if (!layer->v_dim) return 1u << KVC_ERR_UNSUPPORTED;
    if (x->args.rotates && (rope == KVC_ROPE_UNKNOWN || rope == KVC_ROPE_FUNCTION)) return 1u << KVC_ERR_UNSUPPORTED;
    if (x->args.rotates && is_cross && rope == KVC_ROPE_FREQUENCIES) return 1u << KVC_ERR_UNSUPPORTED;
    if (x->args.num_rows != list->num) return 1u << KVC_ERR_INVALID;
    for (int t = 0; t < c->num && !is_cross; t++) {
        const int32_t at = x->args.positions ? c->positions[t] : x->next;
        if (misses_in(&w.o, s, source_of(&w.o, c->layer), at, at < INT32_MAX ? at + 1 : at)) gone = 1u << KVC_ERR_GONE;
    }
    return cancelled | gone | (gone && list->num ? 0 : 1u << KVC_OK);
}

void run_weights(call *c) {
    static _Thread_local weighing x;
    const rows list = w.o.sequences[c->s].layers[source_of(&w.o, c->layer)];
    const int kind = w.o.layers[c->layer].policy.kind;
    const int is_sure = !w.o.crowded || (!w.is_wild && !w.o.sequences[c->s].is_open && kind == KVC_FULL);
    int is_far = 0;
    make_weighing(&x, c, is_sure ? list.num : kvc_seq_len(w.cache, w.ids[c->s], c->layer));
    if (c->flag & WRONG_NUMBER) x.args.num_rows += x.args.num_rows < ROWS ? 1 : -1;
    c->more = is_sure ? right_weighing(&x, c, &list) : ~0u;
    for (int i = 0; i < list.num; i++)
        is_far |= list.at[i].position > FAR || is_far_off(list.at[i].position, list.at[i].tag);
    c->status = kvc_weights(w.cache, w.ids[c->s], c->layer, &x.args);
    if (!c->status && is_sure && !is_far) check_weights(&x, c, &list);
}

/* ---- rows side by side ------------------------------------------------------------------------------------------- */

enum { MOST_MEMBERS = 3, MOST_DENSE = MOST_MEMBERS * MOST_SHOWN };

/* Rows of all sequences of a batch, or as many of each. */
typedef struct dense {
    float k[HEADS * MOST_DENSE * DIM], v[HEADS * MOST_DENSE * DIM], mask[TOKENS][MOST_DENSE];
    int32_t positions[MOST_DENSE];
    uint8_t seen[TOKENS][MOST_DENSE];
    int64_t num;
    int by_sequence, has_mask, has_seen;
} dense;

/* Lists the rows that were put of a sequence of the batch, by position, then by arrival. */
static int list_dense(const batch *b, int s, int l, shown *to) {
    const int all = list_shown(b, s, l, to);
    int num = 0;
    for (int i = 0; i < all; i++)
        if (to[i].token < 0 || b->is_put[l][to[i].token]) to[num++] = to[i];
    sort_by_position(to, num);
    return num;
}

/* Lists the sequences of a batch: as it names them, or by rising id. */
static int list_members(const batch *b, int by_id, int *members) {
    int num = 0;
    for (int t = 0; t < b->num; t++) {
        int j = num, is_new = 1;
        for (int i = 0; i < num; i++) is_new &= members[i] != b->slots[t];
        if (!is_new) continue;
        for (; by_id && j && w.ids[members[j - 1]] > w.ids[b->slots[t]]; j--) members[j] = members[j - 1];
        members[j] = b->slots[t];
        num++;
    }
    return num;
}

/* Compares the rows of the m-th sequence, which begin at a place. */
static void check_dense(const question *q, const dense *d, int s, int m, int64_t from) {
    const kvc_layer *layer = &w.o.layers[source_of(&w.o, q->layer)];
    shown list[MOST_SHOWN];
    const int num = list_dense(q->of, s, source_of(&w.o, q->layer), list);
    const int64_t base = d->by_sequence ? m * layer->num_kv_heads * d->num : from, column = d->by_sequence ? 0 : from,
                  end = d->by_sequence ? d->num : num;
    for (int64_t i = 0; i < end; i++) {
        const int32_t position = d->positions[from + i];
        if (position != (i < num ? list[i].position : -1))
            wrong("dense row %d stands at %d", (int)(from + i), position);
        const row r = {position, i < num ? list[i].tag : 0, 0, 0, 0};
        if (i < num)
            check_row_of(source_of(&w.o, q->layer), &r, d->k + (base + i) * layer->k_dim,
                         d->v + (base + i) * layer->v_dim, d->num * layer->k_dim, d->num * layer->v_dim);
        for (int t = 0; t < q->num; t++) {
            const int is_own = q->of->slots[t] == s, right = is_own && i < num && sees(q, t, &list[i]);
            if (!is_own && d->by_sequence) continue;
            if ((d->has_seen && d->seen[t][column + i] != right) ||
                (d->has_mask && d->mask[t][column + i] != (right ? 0 : -INFINITY)))
                wrong("token %d sees dense row %d at %d: %d, not %d", t, (int)(from + i), position,
                      d->seen[t][column + i], right);
        }
    }
}

int draw_dense(call *c) {
    c->flag = pick(2);
    return draw_dense_rows(c);
}

/* flag: as many rows of each sequence. */
void run_dense(call *c) {
    static _Thread_local question q;
    static _Thread_local dense d;
    const batch *b = &w.o.batches[c->client];
    const kvc_layer *layer = &w.o.layers[c->layer];
    int members[TOKENS], is_sure = !w.o.crowded || layer->policy.kind == KVC_FULL;
    int32_t num_members = 1;
    for (int t = 0; t < b->num; t++) is_sure &= is_known(b, t);
    make_plan(&q, b, c->layer, 0, b->num);
    d.by_sequence = c->flag;
    c->status = c->flag ? kvc_dense_sequences(w.batches[c->client], c->layer, &num_members, &d.num)
                        : kvc_dense_rows(w.batches[c->client], c->layer, &d.num);
    c->more = 1u << KVC_OK;
    if (c->flag && c->status == KVC_ERR_INVALID) c->more = 1u << KVC_ERR_INVALID; /* see run_dense_rows */
    if (c->status || num_members * d.num > MOST_DENSE) return;
    kvc_rows_out rows = room_for(c->layer, d.num, d.k, d.v);
    rows.positions = d.positions;
    kvc_dense_args args = {.struct_size = sizeof args,
                           .rows = &rows,
                           .mask = *d.mask,
                           .mask_token_stride = sizeof *d.mask,
                           .num_rows = d.num + !pick(20),
                           .non_causal = q.plan.non_causal,
                           .seen = *d.seen,
                           .seen_token_stride = sizeof *d.seen,
                           .by_sequence = c->flag,
                           .k_batch_stride = d.num * layer->num_kv_heads * layer->k_dim * (int64_t)sizeof *d.k,
                           .v_batch_stride = d.num * layer->num_kv_heads * layer->v_dim * (int64_t)sizeof *d.v,
                           .masked = q.plan.masked,
                           .masked_size = q.plan.masked_size,
                           .num_masked = q.plan.num_masked};
    const int is_default = layer->num_kv_heads == 1 && pick(2); /* otherwise heads lie farther apart than rows */
    if (!args.by_sequence || is_default) args.k_batch_stride = args.v_batch_stride = 0;
    if (!pick(4)) args.mask = NULL;
    if (!pick(4)) args.seen = NULL;
    if (args.num_rows != d.num) c->more = 1u << KVC_ERR_INVALID;
    d.has_mask = args.mask != NULL, d.has_seen = args.seen != NULL;
    c->status = kvc_dense(w.batches[c->client], c->layer, &args);
    const int num = list_members(b, !c->flag, members);
    int64_t from = 0;
    for (int m = 0; m < num && is_sure && !c->status; m++) {
        shown list[MOST_SHOWN];
        check_dense(&q, &d, members[m], m, from);
        from += c->flag ? d.num : list_dense(b, members[m], source_of(&w.o, c->layer), list);
    }
    if (is_sure && !c->status && !c->flag && from != d.num) wrong("%d dense rows, not %d", (int)d.num, (int)from);
}

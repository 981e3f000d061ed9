/* calls_edits.c: how edits of sequences, and calls about rows and room, are drawn and run. */
#include "packing.h"

/* ---- edits ------------------------------------------------------------------------------------------------------- */

/* Returns a position, usually one where no row of a layer with a stride is cut, at times where a block begins. */
static int32_t usually_whole(int32_t position) {
    const int32_t unit = pick(4) ? w.o.unit : w.o.block_size;
    return pick(6) ? position / unit * unit : position;
}

/* Draws a position behind this one, by less than `most` and at most KVC_END. */
static int32_t behind(int32_t position, int most) {
    const int distance = pick(most);
    return distance < KVC_END - position ? position + distance : KVC_END;
}

static int draw_one(call *c) {
    c->s = own_slot();
    return 1;
}

static int draw_two(call *c) {
    c->s = own_slot();
    c->to = own_slot();
    c->begin = any_position(c->s);
    c->flag = pick(2);
    return c->to < ACQUIRED || w.o.sequences[c->to].prefix; /* ids of the others are not the world's */
}

void run_copy(call *c) {
    c->status = c->flag ? kvc_fork(w.cache, w.ids[c->s], w.ids[c->to])
                        : kvc_copy_prefix(w.cache, w.ids[c->s], w.ids[c->to], c->begin);
}

/* From anywhere on, or behind what `to` holds. */
int draw_share(call *c) {
    if (!draw_two(c)) return 0;
    const int32_t next = next_of(&w.o, &w.o.sequences[c->to]);
    c->begin = usually_whole(pick(3) ? pick(2) ? next : any_position(c->s) : 0);
    c->end = pick(2) ? behind(c->begin, 40) : KVC_END;
    return w.o.sequences[c->s].layers[0].num + w.o.sequences[c->to].layers[0].num < ROWS - TOKENS;
}

int draw_copy(call *c) {
    if (!draw_two(c)) return 0;
    c->flag |= w.theme == ATTENTION && pick(2);
    return 1;
}

void run_share(call *c) {
    c->status = kvc_share(w.cache, w.ids[c->s], w.ids[c->to], c->begin, c->end);
    c->result = kvc_exact_to(w.cache, w.ids[c->to]);
}

static int draw_positions(call *c) {
    draw_one(c);
    c->begin = usually_whole(any_position(c->s));
    c->end = pick(w.theme == ATTENTION ? 2 : 3) ? usually_whole(behind(c->begin, 20)) : KVC_END;
    if (c->end < c->begin) c->end = c->begin;
    return 1;
}

int draw_remove(call *c) {
    draw_positions(c);
    c->flag = pick(2);
    return 1;
}

void run_remove(call *c) { c->status = kvc_remove(w.cache, w.ids[c->s], c->begin, c->end, c->flag); }

int draw_truncate(call *c) {
    draw_one(c);
    c->begin = any_position(c->s);
    return 1;
}

void run_truncate(call *c) { c->status = kvc_truncate(w.cache, w.ids[c->s], c->begin); }

/* Now and then to the largest positions that there are. */
int draw_shift(call *c) {
    draw_positions(c);
    c->delta = usually_whole(pick(25)) * (pick(2) ? 1 : -1);
    if (!pick(60) && w.num_clients == 1) c->delta = (INT32_MAX - 60 - pick(80)) / w.o.unit * w.o.unit;
    return 1;
}

void run_shift(call *c) { c->status = kvc_shift(w.cache, w.ids[c->s], c->begin, c->end, c->delta); }

int draw_divide(call *c) {
    draw_positions(c);
    c->flag = 1;
    return c->delta = 1 + pick(4);
}

void run_divide(call *c) { c->status = kvc_divide(w.cache, w.ids[c->s], c->begin, c->end, c->delta); }

/* Returns the next position with a row of the sequence, or with an expired one among the first positions.  INT32_MAX:
 * no position follows. */
static int32_t next_known(const sequence *s, int32_t position) {
    int32_t next = INT32_MAX;
    for (int l = 0; l < w.o.num_layers; l++) {
        const rows *list = &s->layers[l];
        for (int i = 0; is_own(&w.o, l) && i < list->num; i++)
            if (list->at[i].position > position && list->at[i].position < next) next = list->at[i].position;
        const int32_t lost = position + 1 > list->lost.begin ? position + 1 : list->lost.begin;
        if (lost < list->lost.end && lost < next && lost < ROWS) next = lost;
    }
    return next;
}

/* Keeps all positions, none, every second one, or some by chance; now and then one without a row, or an earlier end. */
int draw_keep_positions(call *c) {
    const int kind = pick(6);
    draw_one(c);
    const sequence *s = &w.o.sequences[c->s];
    for (int32_t at = pick(3); s->is_open && at < 40; at += 1 + pick(3)) c->positions[c->num++] = at;
    const int32_t end = pick(4) ? next_of(&w.o, s) : any_position(c->s);
    for (int32_t at = next_known(s, -1); at <= end && at < KVC_END && c->num < ROWS;) {
        const int stays = kind == 2 ? at % 2 : kind > 2 ? pick(kind) > 0 : !kind;
        if (stays || !pick(30)) c->positions[c->num++] = at;
        at = !pick(8) && at < end ? at + 1 : next_known(s, at);
    }
    return 1;
}

void run_keep_positions(call *c) {
    c->status = kvc_keep_positions(w.cache, w.ids[c->s], c->num || pick(2) ? c->positions : NULL, c->num);
}

int draw_inject(call *c) {
    draw_one(c);
    const int32_t first = extreme_of(&w.o, &w.o.sequences[c->s], -1), at = any_position(c->s);
    c->layer = pick(w.o.num_layers);
    c->begin = at < first && pick(3) ? first : at;
    c->end = behind(c->begin, 10);
    c->flag = pick(2);
    c->tag = new_tags(10);
    const int stride = stride_of(&w.o, c->layer); /* others may find the rows before the call returns */
    for (int i = 0; i < 10; i++)
        tokens[c->tag + i] =
            (token){.base = (int32_t)(((int64_t)c->begin / stride + i + 1) * stride - 1), .time = c->began};
    return 1;
}

void run_inject(call *c) {
    packed k, v;
    int64_t num = -1;
    int32_t tags[ROWS];
    const int l = c->layer, stride = stride_of(&w.o, l), n = c->end / stride - c->begin / stride, counts = pick(2);
    for (int i = 0; i < n; i++) tags[i] = c->tag + i;
    pack_rows(&k, l, 0, tags, n, 0);
    pack_rows(&v, l, 1, tags, n, 0);
    const kvc_rows_in in = {.struct_size = sizeof in,
                            .k = k.start,
                            .v = v.start,
                            .k_head_stride = k.head_stride,
                            .k_row_stride = k.token_stride,
                            .v_head_stride = v.head_stride,
                            .v_row_stride = v.token_stride,
                            .k_type = k.type,
                            .v_type = v.type,
                            .skip_missing = c->flag,
                            .num_replaced = counts ? &num : NULL};
    int stored = 0;
    for (int32_t at = c->begin; at < c->end; at++) stored += find_row(&w.o.sequences[c->s].layers[l], at) != NULL;
    c->status = kvc_inject(w.cache, w.ids[c->s], l, c->begin, c->end, &in);
    if (counts && !c->status && !w.o.crowded && num != stored) wrong("%d rows are replaced, not %d", (int)num, stored);
}

/* Often of a sequence of the open batch. */
int draw_mark_inexact(call *c) {
    const batch *b = &w.o.batches[me->number];
    draw_truncate(c);
    if (b->is_open && pick(2)) c->s = b->slots[pick(b->num)];
    return 1;
}
void run_mark_inexact(call *c) { c->status = kvc_mark_inexact(w.cache, w.ids[c->s], c->begin); }

int draw_sequence(call *c) {
    if (me->is_within && w.num_clients == 1 && pick(2)) {
        c->s = me->call->s; /* that a call on the way is about */
        return 1;
    }
    return draw_one(c);
}
void run_clear_sequence(call *c) { c->status = kvc_clear_sequence(w.cache, w.ids[c->s]); }
void run_keep(call *c) { c->status = kvc_keep(w.cache, w.ids[c->s]); }
void run_clear(call *c) { c->status = kvc_clear(w.cache); }

/* ---- room -------------------------------------------------------------------------------------------------------- */

int draw_anything(call *c) {
    (void)c;
    return 1;
}

void run_compact(call *c) { c->status = kvc_compact(w.cache); }
void run_validate(call *c) { c->status = kvc_validate(w.cache); }

int draw_reserve(call *c) {
    draw_one(c);
    c->num = pick(3) || w.o.crowded ? 1 + pick(TOKENS) : 0;
    return next_of(&w.o, &w.o.sequences[c->s]) <
           INT32_MAX - TOKENS; /* memory for positions that do not exist is open */
}

/* Seldom while a batch is open, as it fails then. */
int draw_room(call *c) { return (!w.o.batches[me->number].is_open || !pick(8)) && draw_sequence(c); }

enum { MOST_ROOM = 400 }; /* tokens for which memory is taken */

/* Reserves all the room that there is, unless it is very much, and not a token more. */
static kvc_status reserve_all(call *c) {
    const int64_t id = w.ids[c->s];
    const kvc_status status = kvc_room(w.cache, id, &c->result);
    if (status || c->result > MOST_ROOM) return status ? status : kvc_reserve(w.cache, id, TOKENS);
    const kvc_status more = kvc_reserve(w.cache, id, c->result + 1);
    c->more = !more;
    return c->result && more != KVC_ERR_NOMEM ? kvc_reserve(w.cache, id, c->result) : more;
}

/* num 0: as many tokens as there is room for. */
void run_reserve(call *c) { c->status = c->num ? kvc_reserve(w.cache, w.ids[c->s], c->num) : reserve_all(c); }
void run_room(call *c) { c->status = kvc_room(w.cache, w.ids[c->s], &c->result); }

/* ---- reading ----------------------------------------------------------------------------------------------------- */

int draw_view(call *c) {
    c->s = pick(4) ? own_slot() : pick(SLOTS);
    c->layer = pick(w.o.num_layers);
    c->flag = pick(8); /* 0: only as many spans as there are places */
    return !w.views[me->number].hold;
}

/* Takes a view of rows, which stay as they are. */
void run_view(call *c) {
    view *v = &w.views[c->client];
    const sequence *s = &w.o.sequences[c->s];
    const int most = c->flag ? VIEW_SPANS : 1;
    if (v->hold) return; /* when calls are repeated */
    lock_world();
    w.o.num_holds++;
    unlock_world();
    c->status = kvc_spans(w.cache, w.ids[c->s], c->layer, v->spans, sizeof *v->spans, most, &v->num_spans, &v->hold);
    lock_world();
    w.o.num_holds -= !v->hold;
    v->layer = source_of(&w.o, c->layer);
    v->num = w.o.crowded ? 0 : s->layers[v->layer].num;
    memcpy(v->rows, s->layers[v->layer].at, (size_t)v->num * sizeof *v->rows);
    unlock_world();
    if (c->status) v->num_spans = 0;
    if (!c->status && !v->hold != (!v->num_spans || v->num_spans > most))
        wrong("a view of %d spans", (int)v->num_spans);
    if (!v->hold) v->num_spans = 0;
    v->sum = w.o.crowded ? 0 : sum_of_view(v);
}

int draw_hold_free(call *c) {
    (void)c;
    return w.views[me->number].hold != NULL;
}

void run_hold_free(call *c) {
    kvc_hold *ends = w.views[c->client].hold;
    w.views[c->client].hold = NULL; /* for the child of a fork() meanwhile */
    kvc_hold_free(ends);
    lock_world();
    w.o.num_holds--;
    unlock_world();
    c->status = KVC_OK;
}

int draw_extract(call *c) {
    draw_positions(c);
    c->layer = pick(w.o.num_layers);
    c->end = behind(c->begin, 30);
    c->flag = pick(16); /* the pointers that are left out, as bits */
    return 1;
}

/* Reads rows by position, with some pointers left out. */
void run_extract(call *c) {
    static _Thread_local float k[ROWS * HEADS * DIM], v[ROWS * HEADS * DIM];
    const int l = c->layer, stride = stride_of(&w.o, l), n = c->end / stride - c->begin / stride;
    const kvc_layer *layer = &w.o.layers[l];
    int32_t positions[ROWS];
    int64_t stored = -1;
    kvc_rows_out out = room_for(l, n, k, v);
    if (c->flag & 1) out.k = NULL;
    if (c->flag & 2) out.v = NULL;
    out.positions = c->flag & 4 ? NULL : positions;
    out.num_stored = c->flag & 8 ? NULL : &stored;
    memset(k, 1, sizeof k);
    memset(v, 1, sizeof v);
    c->status = kvc_extract(w.cache, w.ids[c->s], l, c->begin, c->end, &out);
    if (c->status || w.o.crowded) return;
    const rows *list = &w.o.sequences[c->s].layers[source_of(&w.o, l)];
    if (out.num_stored && stored != list->num) wrong("%d rows are stored, not %d", (int)stored, list->num);
    for (int i = 0; i < n; i++) {
        const int32_t at = (c->begin / stride + i) * stride + stride - 1;
        const row *r = find_row(list, at);
        const float *own_k = k + i * layer->k_dim, *own_v = v + i * layer->v_dim;
        if (out.positions && positions[i] != (r ? at : -1)) wrong("row %d stands at %d, not %d", i, positions[i], at);
        if (r)
            check_row_of(source_of(&w.o, l), r, out.k ? own_k : NULL, out.v ? own_v : NULL, (int64_t)n * layer->k_dim,
                         (int64_t)n * layer->v_dim);
        for (int d = 0; !r && d < layer->k_dim && out.k; d++)
            if (own_k[d] != 0) wrong("there is no row at %d, and element %d is %g", at, d, (double)own_k[d]);
    }
}

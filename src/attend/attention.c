/* attention.c: runs the tasks that plan.c cut, and merges their results.
 *
 * A task goes over its rows in tiles of KVC_TILE row pointers, so that blocks, holes, one-slot runs and sharing are one
 * path.  The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention): a running maximum and sum per
 * query row, what was accumulated being scaled whenever the maximum rises.  Parts are merged by log-sum-exp
 * (Flash-Decoding).  Rows that several sequences share are scored for the queries of all of them at once (as in
 * Hydragen, but without a change of order: a query's tiles are those it has when it is alone).
 */
#include "attend/attention.h"

#include <math.h>
#include <string.h>

#include "store/sheet.h"

/* What all tasks of one call share. */
typedef struct call {
    kvc_plan *plan;
    const kvc_attend_args *args;
    const kvc_kernels *kernels;
    const kvc_layer *layer;
    const kvc_layout *layout;
    const kvc_sheet *sheet; /* where loose units have their rows */
    const kvc_policy *policy;
    const kvc_rope *rope; /* what keys that are off are off by; NULL: nothing */
    const float *angles;  /* [plan->num_deltas][plan->angles_stride] for that */
    int level;            /* kvc_ahead */
    int again, was_done;  /* of a task of kvc_plan_run: it runs in such a round; it was done in it before */
    float scale;
    kvc_watch watch;   /* asked by kvc_attend's tasks, and those of it that are long */
    atomic_int status; /* of the first task that did not succeed */
} call;

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Walks some rows of a unit, from the beginning of a window on: those are KVC_TILE rows each, and no tile passes one.
 */
typedef struct cursor {
    const kvc_layout *at;
    const uint8_t *rows; /* of all pieces; NULL: each has its own */
    const kvc_piece *piece;
    int32_t offset, head; /* KV head */
    int64_t rest;         /* rows */
    int32_t most_turns;   /* with as many changes of turn, or more, a window is one tile; 0: there are none */
    int32_t window;       /* rows that are left of the window */
    int32_t is_mixed;     /* it is one tile, of several turns */
} cursor;

enum { MIXED = -2 }; /* turns: keys are turned, not queries */

/* Rows that are worked on together: the first n from a place on. */
typedef struct tile {
    const kvc_layout *at;
    const uint8_t *rows;
    const kvc_piece *piece;
    int32_t offset, head, n;
    int32_t min_position, max_position;
    int32_t turn;     /* of all its rows, or MIXED */
    int32_t is_batch; /* its last row, so perhaps others, is the batch's own */
    int32_t is_known; /* what follows is filled in: only masks and ALiBi ask */
    int32_t position[KVC_TILE];
    int32_t token[KVC_TILE]; /* of the batch; -1: a stored row */
} tile;

static int32_t smaller(int64_t a, int32_t b) { return a < b ? (int32_t)a : b; }

/* Begins the next window. */
static void open_window(cursor *c) {
    c->window = smaller(c->rest, KVC_TILE);
    c->is_mixed = 0;
    if (!c->most_turns || !c->window) return;
    const kvc_piece *piece = c->piece;
    int32_t changes = 0;
    for (int32_t n = piece->count - c->offset; n < c->window; n += piece->count) {
        changes += piece[1].turn != piece->turn;
        piece++;
    }
    c->is_mixed = changes >= c->most_turns;
}

/* The next rows, of which there may be none, up to a change of turn, if those are not too many.  k: their keys; past n,
 * as often as needed, the last.  A single walk, in registers: in a cache full of holes each row is a piece. */
static void next_tile(tile *t, const void *k[KVC_TILE], cursor *c) {
    const kvc_layout *at = c->at;
    if (!c->window) open_window(c);
    const size_t begin = at->k_offset + (size_t)c->head * at->head_stride;
    const int32_t most = c->window, is_mixed = c->is_mixed, turn = !most ? 0 : is_mixed ? MIXED : c->piece->turn;
    const kvc_piece *piece = c->piece;
    int32_t offset = c->offset, n = 0, min_position = INT32_MAX, max_position = -1, is_batch = 0;
    while (n < most && (is_mixed || piece->turn == turn)) {
        const int32_t end = n + smaller(piece->count - offset, most - n), position = piece->position + offset;
        const uint8_t *row =
            (c->rows ? c->rows : piece->rows) + begin + (size_t)(piece->slot + offset) * at->k_row_bytes;
        if (position < min_position) min_position = position;
        if (position + (end - n) > max_position) max_position = position + (end - n) - 1;
        is_batch = piece->token >= 0;
        offset += end - n;
        for (; n < end; n++, row += at->k_row_bytes) k[n] = row;
        if (offset == piece->count) piece++, offset = 0;
    }
    for (int32_t i = n; n && i < KVC_TILE; i++) k[i] = k[n - 1];
    t->at = at;
    t->rows = c->rows;
    t->piece = c->piece;
    t->offset = c->offset;
    t->head = c->head;
    t->n = n;
    t->min_position = min_position;
    t->max_position = max_position;
    t->turn = turn;
    t->is_batch = is_batch;
    t->is_known = 0;
    c->piece = piece;
    c->offset = offset;
    c->rest -= n;
    c->window -= n;
}

/* Its values, k being its keys: where rows of both are as long, one is as far from the other everywhere. */
static void point_at_values(const void *v[KVC_TILE], const tile *t, const void *const k[KVC_TILE]) {
    const kvc_layout *at = t->at;
    if (at->k_row_bytes == at->v_row_bytes) {
        for (int32_t i = 0; i < KVC_TILE; i++) v[i] = (const uint8_t *)k[i] + (at->v_offset - at->k_offset);
        return;
    }
    const size_t begin = at->v_offset + (size_t)t->head * at->head_stride;
    const kvc_piece *piece = t->piece;
    for (int32_t i = 0, offset = t->offset; i < t->n; piece++, offset = 0) {
        const int32_t end = i + smaller(piece->count - offset, t->n - i);
        const uint8_t *row =
            (t->rows ? t->rows : piece->rows) + begin + (size_t)(piece->slot + offset) * at->v_row_bytes;
        for (; i < end; i++, row += at->v_row_bytes) v[i] = row;
    }
    for (int32_t i = t->n; i < KVC_TILE; i++) v[i] = v[t->n - 1];
}

/* Fills in where its rows stand, and which tokens of the batch they are. */
static void locate_rows(tile *t, const int32_t *order) {
    const kvc_piece *piece = t->piece;
    int32_t offset = t->offset;
    for (int32_t i = 0; i < t->n && !t->is_known; i++, offset++) {
        if (offset == piece->count) piece++, offset = 0;
        t->position[i] = piece->position + offset;
        t->token[i] = piece->token < 0 ? -1 : order[piece->token + offset];
    }
    t->is_known = 1;
}

/* ---- one task ---------------------------------------------------------------------------------------------------- */

/* The query rows of a job's members, one member after the other; or a view of those of one member. */
typedef struct task {
    call *call;
    const kvc_job *job;
    const kvc_unit *unit; /* the member, or the first one */
    int64_t index;
    int32_t head, part; /* KV head */
    int32_t num_q;      /* query rows: row r is token r / heads_per_kv, head r % heads_per_kv of the group */
    float *lane;        /* scratch */
    float *scores, *acc, *max, *sum, *factor;
    float *q;        /* the query rows as score wants them, for keys that are off by ... */
    int32_t turn;    /* ... this of the plan's deltas; 0: for those that are not; MIXED; -1: not made yet */
    int32_t *tokens; /* of the batch */
} task;

static int32_t token_of(const task *t, int32_t r) { return t->tokens[r / t->call->plan->heads_per_kv]; }

static int32_t query_head_of(const task *t, int32_t r) {
    const int32_t group = t->call->plan->heads_per_kv;
    return t->head * group + r % group;
}

/* The query rows as f32. */
static void load_queries(const task *t) {
    const call *c = t->call;
    const kvc_attend_args *a = c->args;
    for (int32_t r = 0; r < t->num_q; r++) {
        const char *q = (const char *)a->q +
                        kvc_token_offset(token_of(t, r) - c->plan->args.first, a->inner_tokens, a->q_token_stride,
                                         a->q_batch_stride) +
                        query_head_of(t, r) * a->q_head_stride;
        c->kernels->convert[a->q_type][KVC_F32](t->q + (size_t)r * (size_t)c->plan->lane.q_stride, 0, q, 0, 1,
                                                c->plan->k_dim);
    }
}

/* What a tile's keys are off by, where that matters. */
static int32_t turn_of(const task *t, const tile *tile) { return t->call->rope ? tile->turn : 0; }

/* The angles that turn queries back where keys are off by the plan's delta `turn`. */
static const float *angles_of(const call *c, int32_t turn) {
    return c->angles + (size_t)(turn - 1) * (size_t)c->plan->angles_stride;
}

/* Where keys are off, the query rows are turned back by as much. */
static void turn_queries(const task *t, int32_t turn) {
    const call *c = t->call;
    const kvc_plan *plan = c->plan;
    const float *angles = angles_of(c, turn);
    for (int32_t r = 0; r < t->num_q; r++)
        kvc_rope_turn(c->rope, angles, t->q + (size_t)r * (size_t)plan->lane.q_stride);
}

/* A tile's keys as they are multiplied: as they lie, or, of several turns, decoded and turned to where they stand.
 * turned: KVC_TILE pointers to fill then. */
static const void *const *keys_for(const task *t, const tile *tile, const void *const *k, const void **turned) {
    const call *c = t->call;
    const int32_t dim = c->plan->k_dim, stride = c->plan->lane.q_stride;
    if (turn_of(t, tile) != MIXED) return k;
    float *to = t->lane + c->plan->lane.turned;
    const kvc_piece *piece = tile->piece;
    for (int32_t i = 0, offset = tile->offset; i < tile->n; piece++, offset = 0)
        for (const int32_t end = i + smaller(piece->count - offset, tile->n - i); i < end; i++, to += stride) {
            c->kernels->convert[c->layer->k_type][KVC_F32](to, 0, k[i], 0, 1, dim);
            if (piece->turn) kvc_rope_turn_back(c->rope, angles_of(c, piece->turn), to);
            turned[i] = to;
        }
    for (int32_t i = tile->n; i < KVC_TILE; i++) turned[i] = turned[i - 1];
    return turned;
}

/* What a tile's keys are multiplied as. */
static int32_t key_type(const task *t, const tile *tile) {
    return turn_of(t, tile) == MIXED ? KVC_F32 : t->call->layer->k_type;
}

/* The kernel that scores a tile for few query rows. */
static const kvc_scorer *scorer_of(const task *t, const tile *tile) {
    const kvc_kernels *kernels = t->call->kernels;
    const int type = key_type(t, tile);
    const int is_bf16 = type == KVC_BF16 && t->call->args->q_type == KVC_BF16 && !turn_of(t, tile);
    return is_bf16 && kernels->score_bf16.score ? &kernels->score_bf16 : &kernels->score[type];
}

/* How its rows are multiplied by many query rows: as keys and as values. */
static const kvc_tiler *key_tiler(const task *t, const tile *tile) {
    return &t->call->kernels->tiler[key_type(t, tile)];
}
static const kvc_tiler *value_tiler(const task *t) { return &t->call->kernels->tiler[t->call->layer->v_type]; }

/* The query rows as that, or what scores it, wants them. */
static const float *queries_for(task *t, const tile *tile) {
    const kvc_plan *plan = t->call->plan;
    const int32_t turn = turn_of(t, tile);
    if (turn == t->turn) return t->q;
    load_queries(t);
    if (turn > 0) turn_queries(t, turn);
    kvc_prepare_fn *prepare = t->unit->tiled ? key_tiler(t, tile)->prepare : scorer_of(t, tile)->prepare;
    prepare(t->q, plan->lane.q_stride, t->num_q, plan->k_dim, t->call->scale);
    t->turn = turn;
    return t->q;
}

/* A query token and which positions it sees, where order alone decides. */
typedef struct sight {
    int32_t token, low, sinks, last;
} sight;

static sight sight_of(const call *c, int32_t token) {
    const int32_t position = c->plan->batch->positions[token];
    return (sight){.token = token,
                   .low = kvc_policy_lowest(c->policy, position),
                   .sinks = kvc_policy_sinks(c->policy),
                   .last = kvc_plan_sees_all(c->plan, token) ? INT32_MAX : position};
}

/* Whether the tile has rows that the batch's tree, and not their order, may hide: its own come last. */
static int has_branches(const call *c, const tile *t) { return c->plan->batch->parents && t->is_batch; }

static int sees_all(const call *c, const tile *t, const sight *s) {
    return c->policy->kind == KVC_CROSS ||
           (!has_branches(c, t) && t->max_position <= s->last && t->min_position >= s->low);
}

static int sees_none(const call *c, const tile *t, int32_t token) {
    const sight s = sight_of(c, token);
    return c->policy->kind != KVC_CROSS && !has_branches(c, t) &&
           (t->min_position > s.last || (t->max_position < s.low && t->min_position >= s.sinks));
}

/* The scores of what is not seen become -inf. */
static void hide(const call *c, tile *t, float *scores, const sight *s) {
    const kvc_batch *batch = c->plan->batch;
    const int is_tree = has_branches(c, t);
    locate_rows(t, batch->order);
    for (int32_t j = 0; j < t->n; j++) {
        const int32_t p = t->position[j];
        const int in_order = is_tree && t->token[j] >= 0 ? kvc_descends(batch, s->token, t->token[j]) : p <= s->last;
        scores[j] = in_order && (p >= s->low || p < s->sinks) ? scores[j] : -INFINITY;
    }
}

/* Softcap and ALiBi, of the scores of one query row over a tile. */
static void bend(const call *c, tile *t, float *scores, int32_t token, int32_t head) {
    const kvc_batch *batch = c->plan->batch;
    if (c->args->softcap > 0)
        for (int32_t j = 0; j < t->n; j++) scores[j] = c->args->softcap * tanhf(scores[j] / c->args->softcap);
    if (!c->args->alibi) return;
    locate_rows(t, batch->order);
    for (int32_t j = 0; j < t->n; j++)
        scores[j] += c->args->alibi[head] * (float)(t->position[j] - batch->positions[token]);
}

/* Scores become weights. */
static void weigh(const task *t, tile *tile) {
    const call *c = t->call;
    const int32_t group = c->plan->heads_per_kv;
    for (int32_t r = 0; r < t->num_q;) {
        const sight s = sight_of(c, token_of(t, r));
        const int hides = !sees_all(c, tile, &s);
        for (int32_t h = 0; h < group; h++, r++) {
            float *scores = t->scores + (size_t)r * KVC_TILE;
            bend(c, tile, scores, s.token, t->head * group + h);
            if (hides) hide(c, tile, scores, &s);
        }
    }
    c->kernels->softmax(t->scores, t->num_q, tile->n, t->max, t->sum, t->factor);
}

/* Few query rows: each stored row is read once, for all of them.  k: the tile's keys; then those of the next, from
 * `rest` on.  Rows are pointed at just before they are read, or asked for: a tile fills the L1 cache. */
static void stream_tile(task *t, tile *now, tile *next, const void *k[KVC_TILE], cursor *rest) {
    const call *c = t->call;
    const kvc_plan *plan = c->plan;
    const void *v[KVC_TILE], *turned[KVC_TILE];
    point_at_values(v, now, k);
    const void *const *keys = keys_for(t, now, k, turned);
    scorer_of(t, now)->score(t->scores, queries_for(t, now), plan->lane.q_stride, t->num_q, keys, now->n, plan->k_dim,
                             (kvc_ahead){v, (int)c->layout->v_stored, c->level});
    weigh(t, now);
    next_tile(next, k, rest);
    c->kernels->accumulate[c->layer->v_type](t->acc, plan->lane.acc_stride, t->factor, t->scores, t->num_q, v, now->n,
                                             plan->v_dim,
                                             (kvc_ahead){next->n ? k : NULL, (int)c->layout->k_row_bytes, c->level});
}

/* Asks for what will be read next. */
static void prefetch(const void *p, size_t bytes) {
#if defined(__GNUC__)
    for (size_t i = 0; i < bytes; i += KVC_CACHE_LINE) __builtin_prefetch((const char *)p + i, 0, 2);
#else
    (void)p, (void)bytes;
#endif
}

/* to = from * by, or to += it: [query rows][n], [query rows][k] and [k][n], rows so many floats apart. */
typedef struct product {
    kvc_matmul_fn *matmul;
    float *to;
    const float *from, *by;
    int32_t to_stride, from_stride, by_stride, n, k, adds;
    int32_t rows; /* at once */
} product;

/* Multiplies some query rows at a time, and between these asks for the rows of the next tile. */
static void multiply(const task *t, const product *p, const void *const *next, int32_t num_next, size_t next_bytes) {
    for (int32_t r = 0; r < t->num_q; r += p->rows) {
        const int32_t rows = t->num_q - r < p->rows ? t->num_q - r : p->rows;
        for (int32_t j = num_next * r / t->num_q; j < num_next * (r + rows) / t->num_q; j++)
            prefetch(next[j], next_bytes);
        p->matmul(p->to + (size_t)r * (size_t)p->to_stride, p->to_stride, p->from + (size_t)r * (size_t)p->from_stride,
                  p->from_stride, p->by, p->by_stride, rows, p->n, p->k, p->adds);
    }
}

/* A view of num_q query rows of a task, from row `first` on. */
static task view_of(const task *t, int32_t first, int32_t num_q) {
    const kvc_plan *plan = t->call->plan;
    task view = *t;
    view.num_q = num_q;
    view.tokens += first / plan->heads_per_kv;
    view.q += (size_t)first * (size_t)plan->lane.q_stride;
    view.scores += (size_t)first * KVC_TILE;
    view.acc += (size_t)first * (size_t)plan->lane.acc_stride;
    view.max += first;
    view.sum += first;
    view.factor += first;
    return view;
}

/* The query rows from the first to the last that see anything of a tile: of the tile at the end of a prompt, or of a
 * window, that may be few. */
static task seeing(const task *t, const tile *tile) {
    const int32_t group = t->call->plan->heads_per_kv;
    int32_t first = 0, end = t->num_q / group;
    while (first < end && sees_none(t->call, tile, t->tokens[first])) first++;
    while (first < end && sees_none(t->call, tile, t->tokens[end - 1])) end--;
    return view_of(t, first * group, (end - first) * group);
}

/* Many query rows: the tile is decoded once, and multiplied.  k: as above. */
static void multiply_tile(task *all, tile *now, tile *next, const void *k[KVC_TILE], cursor *rest) {
    const call *c = all->call;
    const kvc_plan *plan = c->plan;
    const kvc_lane_layout *lane = &plan->lane;
    queries_for(all, now);
    const task seen = seeing(all, now), *t = &seen;
    const kvc_tiler *keys = key_tiler(t, now), *values = value_tiler(t);
    const void *v[KVC_TILE], *turned[KVC_TILE];
    const product scores = {.matmul = keys->score,
                            .rows = keys->rows,
                            .to = t->scores,
                            .to_stride = KVC_TILE,
                            .from = t->q,
                            .from_stride = lane->q_stride,
                            .by = t->lane + lane->keys,
                            .by_stride = KVC_TILE,
                            .n = now->n,
                            .k = plan->k_dim};
    const product sums = {.matmul = values->accumulate,
                          .rows = values->rows,
                          .to = t->acc,
                          .to_stride = lane->acc_stride,
                          .from = t->scores,
                          .from_stride = KVC_TILE,
                          .by = t->lane + lane->values,
                          .by_stride = lane->acc_stride,
                          .n = plan->v_dim,
                          .k = now->n,
                          .adds = 1};
    point_at_values(v, now, k);
    keys->pack_keys(t->lane + lane->keys, keys_for(t, now, k, turned), now->n, plan->k_dim);
    multiply(t, &scores, v, now->n, c->layout->v_stored);
    weigh(t, now);
    next_tile(next, k, rest);
    for (int32_t r = 0; r < t->num_q; r++)
        if (t->factor[r] != 1)
            c->kernels->scale(t->acc + (size_t)r * (size_t)lane->acc_stride, 0, 1, plan->v_dim, t->factor[r]);
    values->pack_values(t->lane + lane->values, lane->acc_stride, v, now->n, plan->v_dim);
    multiply(t, &sums, k, next->n, c->layout->k_row_bytes);
}

/* ---- the rows of a task ------------------------------------------------------------------------------------------ */

/* `count` rows of a part of a unit, from its row `row` on. */
static cursor cursor_at(const call *c, const kvc_unit *unit, int32_t part, int32_t head, int64_t row, int64_t count) {
    const kvc_plan *plan = c->plan;
    const kvc_start *start = &plan->starts[unit->first_start + part];
    const kvc_piece *piece = plan->pieces + start->piece;
    int64_t offset = start->offset + row;
    while (count && offset >= piece->count) offset -= piece++->count;
    const int32_t most_turns = !plan->num_deltas ? 0 : unit->tiled ? KVC_TILED_TURNS : KVC_STREAM_TURNS;
    cursor at = {.at = c->layout,
                 .piece = piece,
                 .offset = (int32_t)offset,
                 .head = head,
                 .rest = count,
                 .most_turns = most_turns};
    if (unit->is_loose && count) at.at = &c->sheet->layout, at.rows = kvc_sheet_block(c->sheet)->rows;
    return at;
}

static const kvc_unit *unit_of(const kvc_plan *plan, const kvc_job *job, int32_t member) {
    return &plan->units[plan->members[job->first_member + member]];
}

/* What member m of a job has to itself. */
static int64_t own_rows(const kvc_plan *plan, const kvc_job *job, int32_t m) {
    return kvc_part_rows(unit_of(plan, job, m), job->part) - job->shared;
}

/* The first rows of task i. */
static cursor first_rows(const call *c, int64_t i) {
    const kvc_plan *plan = c->plan;
    if (i >= kvc_plan_num_tasks(plan)) return (cursor){.at = c->layout};
    const kvc_job *job = kvc_job_of(plan, i);
    const int64_t rows = job->shared ? job->shared : own_rows(plan, job, 0);
    return cursor_at(c, unit_of(plan, job, 0), job->part, kvc_head_of(plan, i), 0, rows);
}

/* What comes after the rows that all members of a task share, and those of its members before m: at its end, the task
 * that this thread will probably take next, as threads take turns. */
static cursor rows_after(const task *t, int32_t m) {
    const kvc_plan *plan = t->call->plan;
    for (; m < t->job->num_members; m++) {
        const int64_t rest = own_rows(plan, t->job, m);
        if (rest) return cursor_at(t->call, unit_of(plan, t->job, m), t->part, t->head, t->job->shared, rest);
    }
    return first_rows(t->call, t->index + plan->args.num_threads);
}

/* Reads `cancel` atomically, as another thread may be setting it. */
static int is_cancelled(call *c) {
    const volatile int32_t *cancel = c->args->cancel;
    if (cancel && atomic_load_explicit((const volatile _Atomic int32_t *)cancel, memory_order_relaxed)) return 1;
    return kvc_watch_ask(&c->watch);
}

/* Whether it got to the end. */
static int attend_rows(task *t, cursor rows, cursor after) {
    void (*const attend_tile)(task *, tile *, tile *, const void *[KVC_TILE], cursor *) =
        t->unit->tiled ? multiply_tile : stream_tile;
    const void *k[KVC_TILE];
    tile tiles[2];
    int now = 0;
    next_tile(&tiles[now], k, &rows);
    for (int is_last = 0; tiles[now].n && !is_last; now = !now) {
        if (t->unit->tiled && is_cancelled(t->call)) return 0; /* streamed tasks are short */
        is_last = !rows.rest;
        attend_tile(t, &tiles[now], &tiles[!now], k, is_last ? &after : &rows);
    }
    return 1;
}

/* Asks for the first keys while the task is made ready, where no task before did so. */
static void prefetch_keys(const task *t) {
    const call *c = t->call;
    if (t->index >= c->plan->args.num_threads) return;
    const void *k[KVC_TILE];
    cursor first = first_rows(c, t->index);
    tile tile;
    next_tile(&tile, k, &first);
    for (int32_t i = 0; i < tile.n; i++) prefetch(k[i], c->layout->k_row_bytes);
}

/* Member m's share of a task; its rows begin at `first`. */
static task member_of(const task *t, int32_t m, int32_t first) {
    const kvc_plan *plan = t->call->plan;
    const kvc_unit *unit = unit_of(plan, t->job, m);
    task own = view_of(t, first, kvc_num_q(plan, unit));
    own.unit = unit;
    return own;
}

/* The rows that all members share, then what each has left.  Whether it got to the end. */
static int attend_part(task *t) {
    const kvc_plan *plan = t->call->plan;
    int going = 1;
    prefetch_keys(t);
    memset(t->acc, 0, (size_t)t->num_q * (size_t)plan->lane.acc_stride * sizeof(float));
    for (int32_t r = 0; r < t->num_q; r++) t->max[r] = -INFINITY, t->sum[r] = 0;
    if (t->job->shared) going = attend_rows(t, first_rows(t->call, t->index), rows_after(t, 0));
    for (int32_t m = 0, first = 0; going && m < t->job->num_members; m++) {
        task own = member_of(t, m, first);
        first += own.num_q;
        const int64_t rest = own_rows(plan, t->job, m);
        if (rest)
            going = attend_rows(&own, cursor_at(t->call, own.unit, t->part, t->head, t->job->shared, rest),
                                rows_after(t, m + 1));
    }
    return going;
}

/* ---- merging ----------------------------------------------------------------------------------------------------- */

/* The results of a unit's parts, for one KV head; a single part lies in the lane. */
typedef struct results {
    const float *max, *sum, *acc; /* of part 0 */
    uint64_t stride;              /* from part to part, in floats */
} results;

/* By what a sum over scores of this maximum is multiplied to be one over scores of maximum `max`. */
static float share_of(float own, float max) { return own == -INFINITY ? 0 : expf(own - max); }

/* Adds the parts of query row r up in their order, each by its share: `out` becomes their acc, returned is their sum.
 */
static float add_parts(const task *t, const results *all, int32_t r, float max, float *out) {
    const kvc_plan *plan = t->call->plan;
    const size_t stride = (size_t)plan->lane.acc_stride, row = (size_t)r * stride;
    float factor = share_of(all->max[r], max), sum = factor * all->sum[r];
    if (t->unit->num_parts == 1 && factor == 1) return sum;
    if (t->unit->num_parts > 1) memcpy(out, all->acc + row, stride * sizeof *out);
    int32_t p = 1, n;
    do { /* once even if there is one part: out is multiplied by the factor */
        float weights[KVC_TILE];
        const void *rows[KVC_TILE];
        for (n = 0; n < KVC_TILE && p < t->unit->num_parts; n++, p++) {
            const uint64_t part = (uint64_t)p * all->stride;
            weights[n] = share_of(all->max[part + (size_t)r], max);
            sum += weights[n] * all->sum[part + (size_t)r];
            rows[n] = all->acc + part + row;
        }
        t->call->kernels->accumulate[KVC_F32](out, (int)stride, &factor, weights, 1, rows, n, plan->v_dim,
                                              (kvc_ahead){.rows = NULL});
        factor = 1;
    } while (p < t->unit->num_parts);
    return sum;
}

/* Merges the parts of query row r, and divides by their sum: the output row, in acc's place in the lane. */
static float *merge_row(const task *t, const results *all, int32_t r, float *lse) {
    const kvc_plan *plan = t->call->plan;
    const float *sinks = t->call->args->sinks;
    const float sink = sinks ? sinks[query_head_of(t, r)] : -INFINITY;
    float *out = t->acc + (size_t)r * (size_t)plan->lane.acc_stride, max = sink;
    for (int32_t p = 0; p < t->unit->num_parts; p++) max = fmaxf(max, all->max[(size_t)p * all->stride + (size_t)r]);
    const float sum = add_parts(t, all, r, max, out) + share_of(sink, max);
    t->call->kernels->scale(out, 0, 1, plan->v_dim, sum == 0 ? 1 : 1 / sum); /* 0: nothing was visible, out is 0 */
    *lse = sum == 0 ? -INFINITY : max + logf(sum);
    return out;
}

static void write_out(const task *t, const results *all) {
    const call *c = t->call;
    const kvc_attend_args *a = c->args;
    for (int32_t r = 0; r < t->num_q; r++) {
        const int32_t token = token_of(t, r) - c->plan->args.first, head = query_head_of(t, r);
        float lse;
        const float *row = merge_row(t, all, r, &lse);
        char *out = (char *)a->out +
                    kvc_token_offset(token, a->inner_tokens, a->out_token_stride, a->out_batch_stride) +
                    head * a->out_head_stride;
        c->kernels->convert[KVC_F32][a->q_type](out, 0, row, 0, 1, c->plan->v_dim);
        if (!a->lse) continue;
        char *to = (char *)a->lse + kvc_token_offset(token, a->inner_tokens, a->lse_token_stride, a->lse_batch_stride) +
                   head * a->lse_head_stride;
        *(float *)(void *)to = lse;
    }
}

/* Where part p of the task's unit and head leaves its result. */
static float *partial_of(const task *t, int32_t p) {
    const kvc_plan *plan = t->call->plan;
    const uint64_t size = kvc_partial_size(t->num_q, plan->lane.acc_stride);
    return plan->partials + t->unit->partials + ((size_t)t->head * (size_t)t->unit->num_parts + (size_t)p) * size;
}

static void keep_partial(const task *t) {
    float *partial = partial_of(t, t->part);
    const size_t q = (size_t)t->num_q;
    memcpy(partial, t->max, q * sizeof *partial);
    memcpy(partial + q, t->sum, q * sizeof *partial);
    memcpy(partial + kvc_align_up(2 * q, KVC_LANES), t->acc,
           q * (size_t)t->call->plan->lane.acc_stride * sizeof *partial);
}

static results results_of(const task *t) {
    if (t->unit->num_parts == 1) return (results){t->max, t->sum, t->acc, 0};
    const size_t q = (size_t)t->num_q;
    const float *partial = partial_of(t, 0);
    return (results){partial, partial + q, partial + kvc_align_up(2 * q, KVC_LANES),
                     kvc_partial_size(t->num_q, t->call->plan->lane.acc_stride)};
}

/* ---- running tasks ----------------------------------------------------------------------------------------------- */

/* Scratch that nobody uses at the moment.  There is one for each thread that was announced; a further one waits. */
static int32_t take_lane(kvc_plan *plan) {
    for (;;) {
        for (int32_t i = 0; i < plan->num_lanes; i++)
            if (!atomic_flag_test_and_set_explicit(&plan->lane_taken[i], memory_order_acquire)) return i;
        kvc_pause();
    }
}

static task make_task(call *c, int64_t i, float *lane) {
    const kvc_plan *plan = c->plan;
    const kvc_lane_layout *at = &plan->lane;
    const kvc_job *job = kvc_job_of(plan, i);
    task t = {.call = c,
              .job = job,
              .unit = unit_of(plan, job, 0),
              .index = i,
              .head = kvc_head_of(plan, i),
              .part = job->part,
              .lane = lane,
              .q = lane + at->q,
              .scores = lane + at->scores,
              .acc = lane + at->acc,
              .max = lane + at->max,
              .sum = lane + at->sum,
              .factor = lane + at->factor,
              .turn = -1,
              .tokens = (void *)(lane + at->tokens)};
    int32_t num_tokens = 0;
    for (int32_t m = 0; m < job->num_members; m++) {
        const kvc_unit *unit = unit_of(plan, job, m);
        memcpy(t.tokens + num_tokens, plan->batch->order + unit->first, (size_t)unit->num_tokens * sizeof *t.tokens);
        num_tokens += unit->num_tokens;
    }
    t.num_q = num_tokens * plan->heads_per_kv;
    return t;
}

/* A member's part is done; the last of its unit and head to end writes the result, and so does each that is run again.
 */
static void end_part(const task *t) {
    const call *c = t->call;
    const kvc_unit *unit = t->unit;
    atomic_int *remaining = &c->plan->remaining[unit->first_counter + t->head];
    if (unit->num_parts > 1) keep_partial(t);
    const int new_parts = c->was_done ? 0 : 1;
    if (atomic_fetch_sub(remaining, new_parts) != new_parts) return;
    if (!c->again) atomic_store(remaining, unit->num_parts); /* for the next layer */
    const results all = results_of(t);
    write_out(t, &all);
}

static void end_parts(const task *t) {
    for (int32_t m = 0, first = 0; m < t->job->num_members; m++) {
        const task own = member_of(t, m, first);
        first += own.num_q;
        end_part(&own);
    }
}

static void lock_round(kvc_round *round) {
    while (atomic_flag_test_and_set_explicit(&round->lock, memory_order_acquire)) kvc_pause();
}

static void unlock_round(kvc_round *round) { atomic_flag_clear_explicit(&round->lock, memory_order_release); }

static kvc_status run_task(call *c, int64_t i) {
    kvc_plan *plan = c->plan;
    const int32_t l = take_lane(plan);
    task t = make_task(c, i, plan->lanes + (size_t)l * plan->lane.size);
    const int cancelled = is_cancelled(c) || !attend_part(&t);
    if (!cancelled && c->again) lock_round(&plan->round);
    if (!cancelled) end_parts(&t);
    if (!cancelled && c->again) unlock_round(&plan->round);
    atomic_flag_clear_explicit(&plan->lane_taken[l], memory_order_release);
    return cancelled ? kvc_fail(KVC_ERR_CANCELLED, "the attention was cancelled") : KVC_OK;
}

/* ---- rounds ------------------------------------------------------------------------------------------------------ */

/* Another layer, or other arrays, begin a round: what was run of the one before is forgotten. */
static kvc_status join_round(kvc_plan *plan, int32_t layer, const kvc_attend_args *args) {
    kvc_round *round = &plan->round;
    if (round->layer == layer && round->q == args->q && round->out == args->out && round->lse == args->lse)
        return KVC_OK;
    if (round->num_running)
        return kvc_fail(KVC_ERR_BUSY, "tasks are being run for layer %d: a plan serves one layer at a time",
                        round->layer);
    if (round->num_done) kvc_plan_reset(plan);
    round->again = round->failed = 0;
    round->layer = layer;
    round->q = args->q;
    round->out = args->out;
    round->lse = args->lse;
    return KVC_OK;
}

/* Says whether this task is the first of those that are run again. */
static int begins_again(const kvc_round *round, int64_t task) {
    return !round->again && (round->failed || round->states[task] == KVC_TASK_DONE);
}

/* Begins a task; sets in *c whether it was done before, and how the call is to end it. */
static kvc_status begin_task(call *c, int32_t layer, const kvc_attend_args *args, int64_t task) {
    kvc_plan *plan = c->plan;
    kvc_round *round = &plan->round;
    lock_round(round);
    kvc_status status = join_round(plan, layer, args);
    while (status == KVC_OK && begins_again(round, task) && round->num_running) { /* none of these waits */
        unlock_round(round);
        kvc_pause();
        lock_round(round);
        status = join_round(plan, layer, args); /* another layer may have begun meanwhile */
    }
    if (status == KVC_OK && begins_again(round, task)) {
        kvc_plan_recount(plan); /* what is counted of a unit from now on is which of its parts there are */
        round->again = 1;
        round->failed = 0;
    }
    if (status == KVC_OK && round->states[task] == KVC_TASK_RUNNING)
        status = kvc_fail(KVC_ERR_BUSY, "task %lld is being run by another thread", (long long)task);
    if (status == KVC_OK) {
        c->again = round->again;
        c->was_done = round->states[task] == KVC_TASK_DONE;
        round->states[task] = KVC_TASK_RUNNING;
        round->num_running++;
    }
    unlock_round(round);
    return status;
}

/* A part that was there stays, where its task is cancelled when it is run again. */
static void end_task(const call *c, int64_t task, int is_done) {
    const int64_t num_tasks = kvc_plan_num_tasks(c->plan);
    kvc_round *round = &c->plan->round;
    lock_round(round);
    round->states[task] = is_done || c->was_done ? KVC_TASK_DONE : KVC_TASK_OPEN;
    round->num_running--;
    round->num_done += is_done && !c->was_done;
    if (round->num_done == num_tasks && !round->again) { /* the next round */
        memset(round->states, KVC_TASK_OPEN, (size_t)num_tasks);
        round->num_done = 0;
    }
    unlock_round(round);
}

/* ---- the public functions ---------------------------------------------------------------------------------------- */

/* Checks the strides when inner_tokens is set. */
static kvc_status check_inner(const kvc_attend_args *args, int32_t num_tokens) {
    kvc_status status = kvc_check_inner(args->inner_tokens, num_tokens);
    if (status == KVC_OK) status = kvc_check_array(args->q_type, args->q_batch_stride, 0, "q");
    if (status == KVC_OK) status = kvc_check_array(args->q_type, args->out_batch_stride, 0, "out");
    return status == KVC_OK ? kvc_check_array(KVC_F32, args->lse_batch_stride, 0, "lse") : status;
}

static kvc_status check_args(const kvc_layer *layer, int32_t num_tokens, const kvc_attend_args *args) {
    if (!args->q || !args->out) return kvc_fail(KVC_ERR_INVALID, "%s is NULL", args->q ? "out" : "q");
    kvc_status status = kvc_check_array(args->q_type, args->q_token_stride, args->q_head_stride, "q");
    if (status == KVC_OK) status = kvc_check_array(args->q_type, args->out_token_stride, args->out_head_stride, "out");
    if (status == KVC_OK) status = kvc_check_array(KVC_F32, args->lse_token_stride, args->lse_head_stride, "lse");
    if (status == KVC_OK && args->inner_tokens) status = check_inner(args, num_tokens);
    if (status != KVC_OK) return status;
    if (layer->value_in_key && args->scale == 0)
        return kvc_fail(
            KVC_ERR_INVALID,
            "scale is 0: where values lie in the keys, it is that of the heads before they were compressed, "
            "and must be given");
    if (!isfinite(args->scale)) return kvc_fail(KVC_ERR_INVALID, "scale is %g: it must be finite", (double)args->scale);
    if (!(args->softcap >= 0) || isinf(args->softcap))
        return kvc_fail(KVC_ERR_INVALID, "softcap is %g: it must be positive, or 0 for none", (double)args->softcap);
    return KVC_OK;
}

/* A plan made for one layer serves others. */
static kvc_status check_plan_layer(const kvc_plan *plan, int32_t layer) {
    const kvc_cache *cache = plan->batch->cache;
    const kvc_status status = kvc_check_layer(cache, layer);
    if (status != KVC_OK) return status;
    const kvc_layer *config = &cache->layers[layer];
    if (cache->group_of[layer] != plan->group || config->num_kv_heads != plan->num_kv_heads ||
        config->k_dim != plan->k_dim || config->v_dim != plan->v_dim)
        return kvc_fail(KVC_ERR_INVALID,
                        "layer %d has not the policy and shapes of the plan's layer, %d: make one for it", layer,
                        plan->args.layer);
    if (!kvc_plan_is_current(plan))
        return kvc_fail(KVC_ERR_INVALID, "the rows of layer %d were put after the plan was made: make another", layer);
    return KVC_OK;
}

/* The batch's own rows that a unit's queries see must have been put, or be among those that are about to be. */
static kvc_status check_seen(const kvc_plan *plan, const kvc_unit *unit, int32_t layer, const kvc_put_args *put,
                             const kvc_sheet *sheet) {
    const kvc_batch *batch = plan->batch;
    if (plan->group >= batch->cache->num_token_groups && !unit->num_rows)
        return kvc_fail(KVC_ERR_INVALID, "sequence %lld has no rows in cross-attention layer %d: put k and v first",
                        (long long)batch->sequences[unit->sequence].sequence->id, layer);
    const uint8_t *written = kvc_written_in(batch, kvc_source_of(batch->cache, layer));
    for (int64_t p = unit->first_own_piece; p < unit->end_piece; p++) {
        const kvc_piece *piece = &plan->pieces[p];
        for (int32_t i = 0; piece->token >= 0 && i < piece->count; i++) {
            const int32_t t = batch->order[piece->token + i];
            int has = written[t];
            if (put && t >= put->first && t < put->first + put->num_tokens) continue;
            if (unit->is_loose) {
                const kvc_status status = kvc_sheet_has(batch, sheet, layer, t, piece->slot + i, &has);
                if (status != KVC_OK) return status;
            }
            if (!has)
                return kvc_fail(KVC_ERR_INVALID,
                                "token %d of the batch is seen but was not put in layer %d: put k and v first", t,
                                layer);
        }
    }
    return KVC_OK;
}

/* Checks the units of one task. */
static kvc_status check_task(const kvc_plan *plan, int32_t layer, int64_t task, const kvc_sheet *sheet) {
    const kvc_job *job = kvc_job_of(plan, task);
    kvc_status status = KVC_OK;
    for (int32_t m = 0; status == KVC_OK && m < job->num_members; m++)
        status = check_seen(plan, unit_of(plan, job, m), layer, NULL, sheet);
    return status;
}

static void make_call(call *c, kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_sheet *sheet) {
    const kvc_cache *cache = plan->batch->cache;
    c->plan = plan;
    c->again = c->was_done = 0;
    c->args = args;
    c->kernels = cache->kernels;
    c->level = cache->prefetch_level;
    c->layer = &cache->layers[layer];
    c->layout = &cache->layouts[cache->layout_of[layer]];
    c->sheet = sheet;
    c->policy = &cache->policies[plan->group];
    c->rope = kvc_rope_of(cache, layer);
    c->angles = plan->angles;
    if (c->rope) c->angles += (size_t)cache->rope_of[layer] * (size_t)plan->num_deltas * (size_t)plan->angles_stride;
    c->scale = args->scale != 0 ? args->scale : 1 / sqrtf((float)plan->k_dim);
    kvc_watch_init(&c->watch, NULL, NULL);
    atomic_init(&c->status, KVC_OK);
}

static kvc_status run_planned(kvc_plan *plan, int32_t layer, const kvc_attend_args *given, int64_t task) {
    kvc_attend_args args;
    call c;
    kvc_status status = KVC_READ(kvc_attend_args, &args, given, "args");
    if (status == KVC_OK) status = check_plan_layer(plan, layer);
    if (status == KVC_OK) status = check_args(&plan->batch->cache->layers[layer], plan->args.num_tokens, &args);
    if (status == KVC_OK && args.put)
        status = kvc_fail(KVC_ERR_INVALID, "args->put is not NULL: rows are stored by kvc_put before tasks are run");
    const int64_t num_tasks = kvc_plan_num_tasks(plan);
    if (status == KVC_OK && (task < 0 || task >= num_tasks))
        status = kvc_fail(KVC_ERR_INDEX, "task is %lld: the plan has %lld", (long long)task, (long long)num_tasks);
    kvc_sheet *sheet = NULL;
    if (status == KVC_OK) status = kvc_sheet_enter(plan->batch, layer, KVC_SHEET_READ, &sheet);
    if (status == KVC_OK) status = check_task(plan, layer, task, sheet);
    if (status == KVC_OK) {
        make_call(&c, plan, layer, &args, sheet);
        status = begin_task(&c, layer, &args, task);
        if (status == KVC_OK) {
            status = run_task(&c, task);
            end_task(&c, task, status == KVC_OK);
        }
    }
    kvc_sheet_leave(plan->batch->cache, sheet);
    return status;
}

kvc_status kvc_plan_run(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, int64_t task) {
    const kvc_status status = run_planned(plan, layer, args, task);
    if (status == KVC_OK) return status;
    lock_round(&plan->round);
    plan->round.failed |= plan->round.layer == layer;
    unlock_round(&plan->round);
    return status;
}

static void run_one(void *context, int64_t i) {
    call *c = context;
    const kvc_status status = run_task(c, i);
    if (status != KVC_OK) atomic_store(&c->status, status);
}

static kvc_status run_all(call *c) {
    /* Below this many multiply-adds, about 20 microseconds, waking threads costs more than they save. */
    static const double WORTH_THREADS = 1 << 19;
    const kvc_plan *plan = c->plan;
    kvc_cache_watch(plan->batch->cache, plan->work, &c->watch);
    kvc_parallel(plan->work < WORTH_THREADS ? 1 : plan->args.num_threads, kvc_plan_num_tasks(plan), run_one, c);
    const kvc_status status = (kvc_status)atomic_load(&c->status);
    return status == KVC_OK ? KVC_OK : kvc_fail(status, "the attention was cancelled");
}

/* sheet: the layer's, if it has one before or after. */
static kvc_status attend(kvc_plan *plan, int32_t layer, const kvc_attend_args *args, const kvc_put_args *put,
                         kvc_sheet **sheet) {
    call c;
    kvc_batch *batch = plan->batch;
    kvc_status status = KVC_OK;
    for (int32_t u = 0; status == KVC_OK && u < plan->num_units; u++)
        status = check_seen(plan, &plan->units[u], layer, put, *sheet);
    if (status == KVC_OK && put && !*sheet && kvc_any_loose(batch, layer, put->first, put->num_tokens))
        status = kvc_sheet_enter(batch, layer, KVC_SHEET_PASS, sheet);
    if (status == KVC_OK && put) status = kvc_put_rows(batch, layer, put, *sheet);
    if (status != KVC_OK) return status;
    make_call(&c, plan, layer, args, *sheet);
    status = run_all(&c);
    if (status != KVC_OK && put) kvc_mark_written(batch, layer, put->first, put->num_tokens, *sheet, 0);
    return status;
}

kvc_status kvc_attend(kvc_batch *batch, const kvc_plan_args *given_plan, const kvc_attend_args *given) {
    kvc_attend_args args;
    kvc_plan_args plan_args;
    kvc_put_args put;
    kvc_plan *plan;
    kvc_status status = KVC_READ(kvc_attend_args, &args, given, "args");
    if (status == KVC_OK) status = kvc_plan_check(batch, given_plan, &plan_args);
    if (status == KVC_OK) status = check_args(&batch->cache->layers[plan_args.layer], plan_args.num_tokens, &args);
    if (status == KVC_OK && args.put) status = kvc_put_check(batch, plan_args.layer, args.put, &put);
    if (status != KVC_OK) return status;
    const int32_t layer = plan_args.layer;
    int puts = args.put != NULL;
    if (puts && !kvc_keeps_tokens(batch->cache, layer)) { /* there, a plan goes over the rows that were put before */
        status = kvc_put_rows(batch, layer, &put, NULL);
        puts = 0;
    }
    kvc_sheet *sheet = NULL;
    if (status == KVC_OK) status = kvc_plan_new(batch, &plan_args, &plan);
    if (status != KVC_OK) return status;
    status = kvc_sheet_enter(batch, layer, KVC_SHEET_READ, &sheet);
    if (status == KVC_OK) status = attend(plan, layer, &args, puts ? &put : NULL, &sheet);
    kvc_sheet_leave(batch->cache, sheet);
    kvc_plan_free(plan);
    return status;
}

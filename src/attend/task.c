/* task.c: runs one task.
 *
 * A task goes over its rows in tiles of KVC_TILE row pointers, so that blocks, holes, one-slot runs and sharing are one
 * path.  The softmax is the online one (Milakov and Gimelshein 2018; FlashAttention): a running maximum and sum per
 * query row, what was accumulated being scaled whenever the maximum rises.  Parts are merged by log-sum-exp
 * (Flash-Decoding).  Rows that several sequences share are scored for the queries of all of them at once (as in
 * Hydragen, but without a change of order: a query's tiles are those it has when it is alone).
 */
#include "attend/task.h"

#include <math.h>
#include <string.h>

kvc_task kvc_make_task(kvc_call *c, int64_t i, float *lane) {
    const kvc_plan *plan = c->plan;
    const kvc_lane_layout *at = &plan->lane;
    const kvc_job *job = kvc_job_of(plan, i);
    kvc_task t = {.call = c,
                  .job = job,
                  .unit = kvc_unit_of(plan, job, 0),
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
        const kvc_unit *unit = kvc_unit_of(plan, job, m);
        memcpy(t.tokens + num_tokens, plan->batch->order + unit->first, (size_t)unit->num_tokens * sizeof *t.tokens);
        num_tokens += unit->num_tokens;
    }
    t.num_q = num_tokens * plan->heads_per_kv;
    return t;
}

/* The query rows as f32. */
static void load_queries(const kvc_task *t) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    for (int32_t r = 0; r < t->num_q; r++) {
        const char *q = (const char *)a->q +
                        kvc_token_offset(kvc_token_of(t, r) - c->plan->args.first, a->inner_tokens, a->q_token_stride,
                                         a->q_batch_stride) +
                        kvc_query_head_of(t, r) * a->q_head_stride;
        c->kernels->convert[a->q_type][KVC_F32](t->q + (size_t)r * (size_t)c->plan->lane.q_stride, 0, q, 0, 1,
                                                c->plan->k_dim);
    }
}

/* What a tile's keys are off by, where that matters. */
static int32_t turn_of(const kvc_task *t, const kvc_tile *tile) { return t->call->rope ? tile->turn : 0; }

/* The angles that turn queries back where keys are off by the plan's delta `turn`. */
static const float *angles_of(const kvc_call *c, int32_t turn) {
    return c->angles + (size_t)(turn - 1) * (size_t)c->plan->angles_stride;
}

/* Where keys are off, the query rows are turned back by as much. */
static void turn_queries(const kvc_task *t, int32_t turn) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const float *angles = angles_of(c, turn);
    for (int32_t r = 0; r < t->num_q; r++)
        kvc_rope_rotate(c->rope, angles, t->q + (size_t)r * (size_t)plan->lane.q_stride);
}

/* A tile's keys as they are multiplied: as they lie, or, of several turns, decoded and turned to where they stand.
 * turned: KVC_TILE pointers to fill then. */
static const void *const *keys_for(const kvc_task *t, const kvc_tile *tile, const void *const *k, const void **turned) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim, stride = c->plan->lane.q_stride;
    if (turn_of(t, tile) != KVC_MIXED) return k;
    float *to = t->lane + c->plan->lane.turned;
    const kvc_piece *piece = tile->piece;
    for (int32_t i = 0, offset = tile->offset; i < tile->n; piece++, offset = 0)
        for (const int32_t end = i + kvc_smaller(piece->count - offset, tile->n - i); i < end; i++, to += stride) {
            c->kernels->convert[c->layer->k_type][KVC_F32](to, 0, k[i], 0, 1, dim);
            if (piece->turn) kvc_rope_rotate_back(c->rope, angles_of(c, piece->turn), to);
            turned[i] = to;
        }
    for (int32_t i = tile->n; i < KVC_TILE; i++) turned[i] = turned[i - 1];
    return turned;
}

/* What a tile's keys are multiplied as. */
static int32_t key_type(const kvc_task *t, const kvc_tile *tile) {
    return turn_of(t, tile) == KVC_MIXED ? KVC_F32 : t->call->layer->k_type;
}

/* The kernel that scores a tile for few query rows. */
static const kvc_scorer *scorer_of(const kvc_task *t, const kvc_tile *tile) {
    const kvc_kernels *kernels = t->call->kernels;
    const int type = key_type(t, tile);
    const int is_bf16 = type == KVC_BF16 && t->call->args->q_type == KVC_BF16 && !turn_of(t, tile);
    return is_bf16 && kernels->score_bf16.score ? &kernels->score_bf16 : &kernels->score[type];
}

/* How its rows are multiplied by many query rows: as keys and as values. */
static const kvc_tiler *key_tiler(const kvc_task *t, const kvc_tile *tile) {
    return &t->call->kernels->tiler[key_type(t, tile)];
}
static const kvc_tiler *value_tiler(const kvc_task *t) { return &t->call->kernels->tiler[t->call->layer->v_type]; }

/* The query rows as that, or what scores it, wants them. */
static const float *queries_for(kvc_task *t, const kvc_tile *tile) {
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

static sight sight_of(const kvc_call *c, int32_t token) {
    const int32_t position = c->plan->batch->positions[token];
    return (sight){.token = token,
                   .low = kvc_policy_lowest(c->policy, position),
                   .sinks = kvc_policy_sinks(c->policy),
                   .last = kvc_plan_sees_all(c->plan, token) ? INT32_MAX : position};
}

/* Whether the tile has rows that the batch's tree, and not their order, may hide: its own come last. */
static int has_branches(const kvc_call *c, const kvc_tile *t) { return c->plan->batch->parents && t->is_batch; }

static int sees_all(const kvc_call *c, const kvc_tile *t, const sight *s) {
    return c->policy->kind == KVC_CROSS ||
           (!has_branches(c, t) && t->max_position <= s->last && t->min_position >= s->low);
}

static int sees_none(const kvc_call *c, const kvc_tile *t, int32_t token) {
    const sight s = sight_of(c, token);
    return c->policy->kind != KVC_CROSS && !has_branches(c, t) &&
           (t->min_position > s.last || (t->max_position < s.low && t->min_position >= s.sinks));
}

/* The scores of what is not seen become -inf. */
static void hide(const kvc_call *c, kvc_tile *t, float *scores, const sight *s) {
    const kvc_batch *batch = c->plan->batch;
    const int is_tree = has_branches(c, t);
    kvc_locate_rows(t, batch->order);
    for (int32_t j = 0; j < t->n; j++) {
        const int32_t p = t->position[j];
        const int in_order = is_tree && t->token[j] >= 0 ? kvc_descends(batch, s->token, t->token[j]) : p <= s->last;
        scores[j] = in_order && (p >= s->low || p < s->sinks) ? scores[j] : -INFINITY;
    }
}

/* Softcap and ALiBi, of the scores of one query row over a tile. */
static void bend(const kvc_call *c, kvc_tile *t, float *scores, int32_t token, int32_t head) {
    const kvc_batch *batch = c->plan->batch;
    if (c->args->softcap > 0)
        for (int32_t j = 0; j < t->n; j++) scores[j] = c->args->softcap * tanhf(scores[j] / c->args->softcap);
    if (!c->args->alibi) return;
    kvc_locate_rows(t, batch->order);
    for (int32_t j = 0; j < t->n; j++)
        scores[j] += c->args->alibi[head] * (float)(t->position[j] - batch->positions[token]);
}

/* Scores become weights. */
static void weigh(const kvc_task *t, kvc_tile *tile) {
    const kvc_call *c = t->call;
    const int32_t group = c->plan->heads_per_kv;
    for (int32_t r = 0; r < t->num_q;) {
        const sight s = sight_of(c, kvc_token_of(t, r));
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
static void stream_tile(kvc_task *t, kvc_tile *now, kvc_tile *next, const void *k[KVC_TILE], kvc_cursor *rest) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const void *v[KVC_TILE], *turned[KVC_TILE];
    kvc_point_at_values(v, now, k);
    const void *const *keys = keys_for(t, now, k, turned);
    scorer_of(t, now)->score(t->scores, queries_for(t, now), plan->lane.q_stride, t->num_q, keys, now->n, plan->k_dim,
                             (kvc_ahead){v, (int)c->layout->v_stored, c->level});
    weigh(t, now);
    kvc_next_tile(next, k, rest);
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
static void multiply(const kvc_task *t, const product *p, const void *const *next, int32_t num_next,
                     size_t next_bytes) {
    for (int32_t r = 0; r < t->num_q; r += p->rows) {
        const int32_t rows = t->num_q - r < p->rows ? t->num_q - r : p->rows;
        for (int32_t j = num_next * r / t->num_q; j < num_next * (r + rows) / t->num_q; j++)
            prefetch(next[j], next_bytes);
        p->matmul(p->to + (size_t)r * (size_t)p->to_stride, p->to_stride, p->from + (size_t)r * (size_t)p->from_stride,
                  p->from_stride, p->by, p->by_stride, rows, p->n, p->k, p->adds);
    }
}

/* A view of num_q query rows of a task, from row `first` on. */
static kvc_task view_of(const kvc_task *t, int32_t first, int32_t num_q) {
    const kvc_plan *plan = t->call->plan;
    kvc_task view = *t;
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
static kvc_task seeing(const kvc_task *t, const kvc_tile *tile) {
    const int32_t group = t->call->plan->heads_per_kv;
    int32_t first = 0, end = t->num_q / group;
    while (first < end && sees_none(t->call, tile, t->tokens[first])) first++;
    while (first < end && sees_none(t->call, tile, t->tokens[end - 1])) end--;
    return view_of(t, first * group, (end - first) * group);
}

/* Many query rows: the tile is decoded once, and multiplied.  k: as above. */
static void multiply_tile(kvc_task *all, kvc_tile *now, kvc_tile *next, const void *k[KVC_TILE], kvc_cursor *rest) {
    const kvc_call *c = all->call;
    const kvc_plan *plan = c->plan;
    const kvc_lane_layout *lane = &plan->lane;
    queries_for(all, now);
    const kvc_task seen = seeing(all, now), *t = &seen;
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
    kvc_point_at_values(v, now, k);
    keys->pack_keys(t->lane + lane->keys, keys_for(t, now, k, turned), now->n, plan->k_dim);
    multiply(t, &scores, v, now->n, c->layout->v_stored);
    weigh(t, now);
    kvc_next_tile(next, k, rest);
    for (int32_t r = 0; r < t->num_q; r++)
        if (t->factor[r] != 1)
            c->kernels->scale(t->acc + (size_t)r * (size_t)lane->acc_stride, 0, 1, plan->v_dim, t->factor[r]);
    values->pack_values(t->lane + lane->values, lane->acc_stride, v, now->n, plan->v_dim);
    multiply(t, &sums, k, next->n, c->layout->k_row_bytes);
}

/* ---- the rows of a task ------------------------------------------------------------------------------------------ */

/* `count` rows of a part of a unit, from its row `row` on. */
static kvc_cursor cursor_at(const kvc_call *c, const kvc_unit *unit, int32_t part, int32_t head, int64_t row,
                            int64_t count) {
    const kvc_plan *plan = c->plan;
    const kvc_start *start = &plan->starts[unit->first_start + part];
    const kvc_piece *piece = plan->pieces + start->piece;
    int64_t offset = start->offset + row;
    while (count && offset >= piece->count) offset -= piece++->count;
    const int32_t most_turns = !plan->num_deltas ? 0 : unit->tiled ? KVC_TILED_TURNS : KVC_STREAM_TURNS;
    kvc_cursor at = {.at = c->layout,
                     .piece = piece,
                     .offset = (int32_t)offset,
                     .head = head,
                     .rest = count,
                     .most_turns = most_turns};
    if (unit->is_loose && count) at.at = &c->sheet->layout, at.rows = kvc_sheet_block(c->sheet)->rows;
    return at;
}

/* What member m of a job has to itself. */
static int64_t own_rows(const kvc_plan *plan, const kvc_job *job, int32_t m) {
    return kvc_part_rows(kvc_unit_of(plan, job, m), job->part) - job->shared;
}

/* The first rows of task i. */
static kvc_cursor first_rows(const kvc_call *c, int64_t i) {
    const kvc_plan *plan = c->plan;
    if (i >= kvc_plan_num_tasks(plan)) return (kvc_cursor){.at = c->layout};
    const kvc_job *job = kvc_job_of(plan, i);
    const int64_t rows = job->shared ? job->shared : own_rows(plan, job, 0);
    return cursor_at(c, kvc_unit_of(plan, job, 0), job->part, kvc_head_of(plan, i), 0, rows);
}

/* What comes after the rows that all members of a task share, and those of its members before m: at its end, the task
 * that this thread will probably take next, as threads take turns. */
static kvc_cursor rows_after(const kvc_task *t, int32_t m) {
    const kvc_plan *plan = t->call->plan;
    for (; m < t->job->num_members; m++) {
        const int64_t rest = own_rows(plan, t->job, m);
        if (rest) return cursor_at(t->call, kvc_unit_of(plan, t->job, m), t->part, t->head, t->job->shared, rest);
    }
    return first_rows(t->call, t->index + plan->args.num_threads);
}

/* Reads `cancel` atomically, as another thread may be setting it. */
int kvc_is_cancelled(kvc_call *c) {
    const volatile int32_t *cancel = c->args->cancel;
    if (cancel && atomic_load_explicit((const volatile _Atomic int32_t *)cancel, memory_order_relaxed)) return 1;
    return kvc_watch_ask(&c->watch);
}

/* Whether it got to the end. */
static int attend_rows(kvc_task *t, kvc_cursor rows, kvc_cursor after) {
    void (*const attend_tile)(kvc_task *, kvc_tile *, kvc_tile *, const void *[KVC_TILE], kvc_cursor *) =
        t->unit->tiled ? multiply_tile : stream_tile;
    const void *k[KVC_TILE];
    kvc_tile tiles[2];
    int now = 0;
    kvc_next_tile(&tiles[now], k, &rows);
    for (int is_last = 0; tiles[now].n && !is_last; now = !now) {
        if (t->unit->tiled && kvc_is_cancelled(t->call)) return 0; /* streamed tasks are short */
        is_last = !rows.rest;
        attend_tile(t, &tiles[now], &tiles[!now], k, is_last ? &after : &rows);
    }
    return 1;
}

/* Asks for the first keys while the task is made ready, where no task before did so. */
static void prefetch_keys(const kvc_task *t) {
    const kvc_call *c = t->call;
    if (t->index >= c->plan->args.num_threads) return;
    const void *k[KVC_TILE];
    kvc_cursor first = first_rows(c, t->index);
    kvc_tile tile;
    kvc_next_tile(&tile, k, &first);
    for (int32_t i = 0; i < tile.n; i++) prefetch(k[i], c->layout->k_row_bytes);
}

/* Member m's share of a task; its rows begin at `first`. */
kvc_task kvc_member_of(const kvc_task *t, int32_t m, int32_t first) {
    const kvc_plan *plan = t->call->plan;
    const kvc_unit *unit = kvc_unit_of(plan, t->job, m);
    kvc_task own = view_of(t, first, kvc_num_q(plan, unit));
    own.unit = unit;
    return own;
}

/* The rows that all members share, then what each has left.  Whether it got to the end. */
int kvc_attend_part(kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    int going = 1;
    prefetch_keys(t);
    memset(t->acc, 0, (size_t)t->num_q * (size_t)plan->lane.acc_stride * sizeof(float));
    for (int32_t r = 0; r < t->num_q; r++) t->max[r] = -INFINITY, t->sum[r] = 0;
    if (t->job->shared) going = attend_rows(t, first_rows(t->call, t->index), rows_after(t, 0));
    for (int32_t m = 0, first = 0; going && m < t->job->num_members; m++) {
        kvc_task own = kvc_member_of(t, m, first);
        first += own.num_q;
        const int64_t rest = own_rows(plan, t->job, m);
        if (rest)
            going = attend_rows(&own, cursor_at(t->call, own.unit, t->part, t->head, t->job->shared, rest),
                                rows_after(t, m + 1));
    }
    return going;
}

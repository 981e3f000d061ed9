/* select.c: rows that a token selects by the sketches of their keys: see select.h.
 *
 * The rule for selected rows.  A token's rows are counted by position, and at one position by arrival.  They are cut
 * into pieces of KVC_PIECE_ROWS by that count, so that nothing depends on where rows lie.  A sketch gives each row a
 * score for each query head of a KV head, and so, by the softmax over all rows, a weight.  A piece counts by the sum of
 * the weights of its rows and heads.  The token reads the pieces with its first KVC_FIRST_READ and its last
 * KVC_LAST_READ rows.  It also reads the other pieces that count most; if pieces are equal, the first.  It reads
 * all rows if it sees at most kvc_most_unselected.
 *
 * Rows are scored in chunks of KVC_CHUNK_ROWS.  A chunk gives an exponent and a sum for each head, and the weights of
 * its pieces for each head, relative to that power of two.  Sums are made in the same order for any number of threads.
 *
 * A slice is one token here, with the rows that it may see, which are cut into splits of whole chunks.  A task is a job
 * for one KV head: one split of a slice, or of several, for example of forks.  The leading chunks whose rows all of
 * these see are scored once, for the query rows of all.  A slice's results have the bits that they have alone.  A view
 * is a task with fewer of its query rows.  A segment is rows of one run.
 */
#include "attend/select.h"

#include <math.h>
#include <string.h>

#include "attend/seen.h"
#include "attend/step.h"
#include "attend/topk.h"
#include "rows/rope.h"
#include "rows/sketch.h"

/* ---- queries ----------------------------------------------------------------------------------------------------- */

/* Returns where the query rows of a view are, rounded to int8. */
static kvc_sketch_query query_of(const kvc_task *t) {
    const kvc_plan *plan = t->call->plan;
    const kvc_selecting *at = &plan->selecting;
    const int32_t stride = (int32_t)kvc_sketch_query_bytes(plan->k_dim), first = t->first_query_row;
    return (kvc_sketch_query){.codes = (int8_t *)(t->workspace + at->codes) + first * stride,
                              .scales = t->workspace + at->scales + first,
                              .offsets = t->workspace + at->offsets + first,
                              .stride = stride};
}

/* Rounds query row r of the task, which lies at q, to int8. */
static void round_query(const kvc_task *t, int32_t r, const float *q) {
    const kvc_plan *plan = t->call->plan;
    const int32_t dim = plan->k_dim, stride = query_of(t).stride;
    const kvc_selecting *at = &plan->selecting;
    int8_t *codes = (int8_t *)(t->workspace + at->codes) + r * stride;
    float unit;
    int32_t sum = 0;
    t->call->kernels->round(codes, &unit, q, 0, 1, dim);
    for (int32_t d = 0; d < dim; d++) sum += codes[d];
    memset(codes + dim, 0, (size_t)(stride - dim));
    t->workspace[at->scales + (uint64_t)r] = unit * t->call->scale;
    t->workspace[at->offsets + (uint64_t)r] = -1.5f * (float)sum;
}

/* Rotates query rows by a delta, given by its number (0: none), and rounds them, unless that is done. */
static void prepare(kvc_task *t, int32_t delta_index) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    if (t->delta_index == delta_index) return;
    kvc_load_query_rows(t, KVC_F32);
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *const q = t->q + (size_t)r * (size_t)plan->attending.q_stride;
        if (delta_index)
            kvc_rope_rotate(c->rope, c->angles + (size_t)(delta_index - 1) * (size_t)plan->deltas.angles_stride, q);
        c->kernels->hadamard(q, q, plan->k_dim, kvc_sketch_mixing(plan->k_dim));
        round_query(t, t->first_query_row + r, q);
    }
    t->delta_index = delta_index;
}

/* ---- a tile: up to KVC_PANEL rows -------------------------------------------------------------------------------- */

/* Returns the index of the score of row j of a tile, whose scores are [KVC_PIECE_ROWS rows of a piece][pieces]. */
static int32_t score_at(int32_t j) { return j % KVC_PIECE_ROWS * KVC_LANES + j / KVC_PIECE_ROWS; }

/* Returns where the sketches of the rows at a place are. */
static const uint8_t *sketches_at(const kvc_task *t, const kvc_row_place *at) {
    return kvc_sketch_at(t->call->layout, at->segment->rows, at->segment->slot + at->offset, kvc_kv_head_of(t));
}

/* Returns the sketches of n rows from a place on: where they lie if they are KVC_PANEL rows of one segment, otherwise
 * copied to the workspace.  Kernels read KVC_PANEL rows; what follows the n rows may be anything. */
static const uint8_t *take_sketches(const kvc_task *t, kvc_row_place at, int32_t n) {
    const size_t bytes = kvc_sketch_bytes(t->call->plan->k_dim);
    uint8_t *const copies = (uint8_t *)(t->workspace + t->call->plan->attending.rows), *to = copies;
    for (int32_t some; n; n -= some) {
        const uint8_t *const sketches = sketches_at(t, &at);
        some = kvc_rows_here(&at, n);
        if (some == KVC_PANEL) return sketches;
        memcpy(to, sketches, (size_t)some * bytes);
        to += (size_t)some * bytes;
        kvc_go_on(&at, some);
    }
    return copies;
}

/* Rows of a split, as they are listed. */
typedef struct listed {
    kvc_row_place at, ahead; /* the next tile, and the next rows to prefetch */
    int64_t left;            /* rows from `ahead` on */
} listed;

/* Prefetches into the L1 cache, which a few tiles do not fill.  Do so for half a tile at a time: more lines at once
 * than the processor keeps track of make it wait. */
static void prefetch_near(const uint8_t *begin, int32_t bytes) {
#if defined(__GNUC__)
    for (int32_t i = 0; i < bytes; i += KVC_CACHE_LINE) __builtin_prefetch(begin + i, 0, 3);
#else
    (void)begin, (void)bytes;
#endif
}

/* Prefetches the sketches of the next rows, up to `most`. */
static void prefetch_sketches(const kvc_task *t, listed *rows, int64_t most) {
    const int32_t bytes = (int32_t)kvc_sketch_bytes(t->call->plan->k_dim);
    int32_t n = (int32_t)kvc_smaller(rows->left, most);
    rows->left -= n;
    for (int32_t some; n; n -= some) {
        some = kvc_rows_here(&rows->ahead, n);
        prefetch_near(sketches_at(t, &rows->ahead), some * bytes);
        kvc_go_on(&rows->ahead, some);
    }
}

/* Scores n rows from a place on for all query rows.  If they have several deltas, scores them once for each further
 * delta, to `others`, and copies the scores of the rows that have it. */
static void score_rows(kvc_task *t, kvc_row_place at, int32_t n) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim, first = c->rope ? at.segment->delta_index : 0;
    const uint8_t *sketches = take_sketches(t, at, n);
    float *const others = t->scores + KVC_PANEL; /* scores of a tile take half of their rows */
    for (int32_t j = 0, some; j < n; j += some) {
        const int32_t delta_index = c->rope ? at.segment->delta_index : 0;
        some = kvc_rows_here(&at, n - j);
        kvc_go_on(&at, some);
        if (j && delta_index == first) continue;
        prepare(t, delta_index);
        const kvc_sketch_query q = query_of(t);
        c->kernels->sketch(j ? others : t->scores, &q, t->num_query_rows, sketches, (int64_t)kvc_sketch_bytes(dim),
                           dim);
        for (int32_t r = 0; j && r < t->num_query_rows; r++)
            for (int32_t i = j; i < j + some; i++)
                t->scores[r * KVC_SCORES + score_at(i)] = others[r * KVC_SCORES + score_at(i)];
    }
}

/* Applies softcap and ALiBi to the scores of n rows from a place on.  Sets the scores of a tile past these to -inf. */
static void finish_scores(const kvc_task *t, kvc_row_place at, int32_t n) {
    int32_t positions[KVC_PANEL] = {0};
    for (int32_t j = 0, some; t->call->args->alibi && j < n; j += some) {
        some = kvc_rows_here(&at, n - j);
        for (int32_t i = 0; i < some; i++) positions[score_at(j + i)] = at.segment->position + at.offset + i;
        kvc_go_on(&at, some);
    }
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *const scores = t->scores + r * KVC_SCORES;
        const int32_t token = t->tokens[r / t->call->plan->parts.heads];
        if (t->call->changes_scores)
            kvc_bend_scores(t->call, scores, positions, KVC_PANEL, token, kvc_query_head_of(t, r));
        for (int32_t j = n; j < KVC_PANEL; j++) scores[score_at(j)] = -INFINITY;
    }
}

/* ---- a chunk ----------------------------------------------------------------------------------------------------- */

/* The results of a chunk.  First, for each query row of the task, an exponent of 2, to which weights are relative.
 * Then, for each, the sum of weights.  Then, for each, the weights of its pieces. */
typedef struct found {
    float *exponents, *sums, *pieces;
} found;

/* Returns the part of the results of chunk i that is a view's. */
static found found_at(const kvc_task *t, float *chunks, int64_t i) {
    const int32_t num_q = t->job->num_slices * t->call->plan->parts.heads, first = t->first_query_row;
    float *const at = chunks + (uint64_t)i * kvc_chunk_size(num_q);
    float *const pieces = at + kvc_align_up(2 * (uint64_t)num_q, KVC_LANES);
    return (found){at + first, at + num_q + first, pieces + (ptrdiff_t)first * KVC_PIECES_STRIDE};
}

/* Returns where the task keeps what it finds of its split. */
static float *found_in_split(const kvc_task *t) { return t->workspace + t->call->plan->selecting.found; }

/* Returns what is found of chunk i of a slice, once all are scored; of several splits, in plan->partials. */
static found found_of(const kvc_task *t, int64_t i) {
    const kvc_plan *plan = t->call->plan;
    const uint64_t part = (uint64_t)t->part * kvc_found_size(plan->parts.heads, t->slice->num_rows);
    return found_at(t, t->slice->num_splits == 1 ? found_in_split(t) : plan->partials + t->slice->partials + part, i);
}

/* Returns the factor that makes weights relative to 2^exponent of weights relative to 2^own. */
static float rescale(float own, float exponent) { return own == exponent ? 1 : exp2f(own - exponent); }

/* Scores a chunk: the next num_rows listed rows, which it steps over.  Takes the processor's tile registers for one
 * chunk only: asking whether the call is cancelled, between chunks, may run the user's code. */
static void score_chunk(kvc_task *t, listed *rows, int64_t num_rows, const found *to) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t num_q = t->num_query_rows, num_tiles = (int32_t)KVC_DIVIDE_UP(num_rows, KVC_PANEL);
    float *const sums = t->workspace + t->call->plan->selecting.sums; /* of every KVC_LANES-th weight */
    for (int32_t r = 0; r < num_q; r++) to->exponents[r] = -INFINITY;
    memset(sums, 0, (size_t)num_q * KVC_LANES * sizeof *sums);
    const int is_tiled = kernels->tiled_sketches && num_q >= kernels->tiled_sketches;
    kvc_former former;
    if (is_tiled) kernels->begin(&former);
    for (int32_t tile = 0; tile < num_tiles; tile++) {
        const int32_t n = (int32_t)kvc_smaller(num_rows - (int64_t)tile * KVC_PANEL, KVC_PANEL);
        prefetch_sketches(t, rows, KVC_PANEL / 2);
        score_rows(t, rows->at, n);
        if (n < KVC_PANEL || t->call->changes_scores) finish_scores(t, rows->at, n);
        kernels->weigh_pieces(to->pieces, KVC_PIECES_STRIDE, tile * KVC_LANES, t->scores, num_q, to->exponents, sums);
        prefetch_sketches(t, rows, KVC_PANEL / 2);
        for (int32_t left = n, some; left; left -= some) kvc_go_on(&rows->at, some = kvc_rows_here(&rows->at, left));
    }
    if (is_tiled) kernels->end(&former);
    for (int32_t r = 0; r < num_q; r++) to->sums[r] = kvc_add_up(sums + r * KVC_LANES);
}

/* ---- a split ----------------------------------------------------------------------------------------------------- */

/* Returns the rows of its split that a slice scores: none if its token reads all rows. */
static kvc_row_range rows_to_score(const kvc_task *t) {
    const int64_t first = t->job->split * t->slice->split_rows;
    const int64_t end = first + kvc_split_rows(t->slice, t->job->split);
    return (kvc_row_range){first, kvc_smaller(end, kvc_selecting_rows(t->call->plan, t->slice))};
}

/* Returns a view of slice m, which has one token: a query row for each head. */
static kvc_task slice_view(const kvc_task *t, int32_t m) {
    return kvc_view_of_slice(t, m, m * t->call->plan->parts.heads);
}

/* The two lists of rows that a task has room for: the rows to score, and rows to compare them with. */
typedef enum purpose { TO_SCORE, TO_COMPARE } purpose;

static kvc_segment *list_at(const kvc_task *t, purpose of) {
    return kvc_chosen_segments(t) + of * t->call->plan->listing.most_segments;
}

/* Writes a list of the rows in a range that the first token of a view sees.  Returns their number. */
static int64_t write_list(const kvc_task *t, purpose of, kvc_row_range range) {
    kvc_row_lister list = kvc_list_seen(t, &range, 1);
    return range.begin < range.end ? kvc_list_next(&list, list_at(t, of), range.end - range.begin) : 0;
}

/* Counts the leading rows of two segments that are the same, at the same positions: their deltas are, too. */
static int32_t count_same(const kvc_segment *a, const kvc_segment *b) {
    const int begin_alike = a->rows == b->rows && a->slot == b->slot && a->position == b->position;
    return begin_alike ? kvc_lower(a->count, b->count) : 0;
}

/* Counts the leading rows, of num_rows, that two lists have alike. */
static int64_t count_alike(const kvc_segment *a, const kvc_segment *b, int64_t num_rows) {
    int64_t alike = 0;
    for (int is_whole = 1; alike < num_rows && is_whole; a++, b++) {
        const int32_t count = count_same(a, b);
        is_whole = count == a->count && count == b->count; /* otherwise, the rows after these differ */
        alike += count;
    }
    return kvc_smaller(alike, num_rows);
}

/* Lists the rows of the split that the first slice scores.  Returns how many leading ones all score, in whole chunks.
 */
static int64_t list_shared(const kvc_task *t) {
    int64_t shared = write_list(t, TO_SCORE, rows_to_score(t));
    for (int32_t m = 1; m < t->job->num_slices; m++) {
        const kvc_task view = slice_view(t, m);
        const int64_t num = write_list(&view, TO_COMPARE, rows_to_score(&view));
        shared = count_alike(list_at(t, TO_SCORE), list_at(t, TO_COMPARE), kvc_smaller(num, shared));
    }
    return shared / KVC_CHUNK_ROWS * KVC_CHUNK_ROWS;
}

/* Scores the first num_rows listed rows for all slices of a view.  before: rows of the split that were scored before
 * them, in whole chunks.  Returns 0 if the call was cancelled. */
static int score_listed(kvc_task *t, int64_t before, int64_t num_rows) {
    enum { TILES_AHEAD = 2 }; /* that are prefetched */
    const kvc_row_place begin = {list_at(t, TO_SCORE), 0};
    listed rows = {begin, begin, num_rows};
    prefetch_sketches(t, &rows, TILES_AHEAD * KVC_PANEL);
    for (int64_t row = 0; row < num_rows; row += KVC_CHUNK_ROWS) {
        const found to = found_at(t, found_in_split(t), (before + row) / KVC_CHUNK_ROWS);
        if (kvc_is_cancelled(t->call)) return 0;
        score_chunk(t, &rows, kvc_smaller(num_rows - row, KVC_CHUNK_ROWS), &to);
    }
    return 1;
}

int kvc_score_sketches(kvc_task *t) {
    const int64_t shared = t->job->num_slices > 1 ? list_shared(t) : 0; /* leading rows of the split */
    if (!score_listed(t, /* before */ 0, shared)) return 0;
    for (int32_t m = 0; m < t->job->num_slices; m++) {
        kvc_task view = slice_view(t, m);
        kvc_row_range own = rows_to_score(&view);
        own.begin += shared;
        const int64_t num_own = write_list(&view, TO_SCORE, own);
        if (!score_listed(&view, shared, num_own)) return 0;
    }
    t->delta_index = KVC_UNPREPARED; /* attention takes query rows in another form */
    return 1;
}

void kvc_keep_found(const kvc_task *t) {
    const int64_t first = t->job->split * t->slice->split_rows;
    const uint64_t size = kvc_found_size(t->call->plan->parts.heads, kvc_split_rows(t->slice, t->job->split));
    memcpy(found_of(t, first / KVC_CHUNK_ROWS).exponents, found_in_split(t), (size_t)size * sizeof(float));
}

/* ---- selecting --------------------------------------------------------------------------------------------------- */

/* Finds each query row's largest exponent of all chunks, t->max, and 1 over its weights' sum relative to it, t->sum. */
static void add_up_chunks(const kvc_task *t, int64_t num_chunks) {
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        t->max[r] = -INFINITY, t->sum[r] = 0;
        for (int64_t i = 0; i < num_chunks; i++)
            if (found_of(t, i).exponents[r] > t->max[r]) t->max[r] = found_of(t, i).exponents[r];
        for (int64_t i = 0; i < num_chunks; i++)
            t->sum[r] += found_of(t, i).sums[r] * rescale(found_of(t, i).exponents[r], t->max[r]);
        /* A weight that is no number makes its own piece the best, and no other. */
        t->sum[r] = t->sum[r] > 0 ? 1 / t->sum[r] : 0;
    }
}

/* Adds to each piece of a chunk its mass by `num` query rows, from row r on: the weights of its rows over the sum of
 * all weights.  num: 4, or 1 for what is left; a constant once this is inlined. */
static inline void add_masses(const kvc_task *t, const found *from, int32_t r, int num, float *masses) {
    const float *pieces = from->pieces + r * KVC_PIECES_STRIDE;
    float by[4];
    for (int i = 0; i < num; i++) by[i] = rescale(from->exponents[r + i], t->max[r + i]) * t->sum[r + i];
    for (int32_t i = 0; i < KVC_CHUNK_PIECES; i++)
        for (int h = 0; h < num; h++) {
            const float mass = pieces[h * KVC_PIECES_STRIDE + i] * by[h];
            masses[i] += mass;
        }
}

/* Writes the keys of the first `num` pieces of a chunk: their masses, as integers of the same order (topk.h). */
static void rank_pieces(const kvc_task *t, const found *from, uint32_t *keys, int64_t num) {
    float masses[KVC_CHUNK_PIECES] = {0};
    int32_t r = 0;
    for (; r + 4 <= t->num_query_rows; r += 4) add_masses(t, from, r, 4, masses);
    for (; r < t->num_query_rows; r++) add_masses(t, from, r, 1, masses);
    for (int64_t i = 0; i < num; i++) keys[i] = kvc_key_of(masses[i]);
}

/* Selects pieces of rows that were scored, in ascending order.  Returns where their numbers are, and sets *num. */
static const int32_t *select_pieces(const kvc_task *t, int64_t num_rows, int32_t *num) {
    const kvc_selecting *at = &t->call->plan->selecting;
    const int64_t num_pieces = KVC_DIVIDE_UP(num_rows, KVC_PIECE_ROWS);
    const int64_t num_chunks = KVC_DIVIDE_UP(num_rows, KVC_CHUNK_ROWS);
    uint32_t *const keys = (uint32_t *)(void *)(t->workspace + at->keys);
    int32_t *const pieces = (int32_t *)(void *)(t->workspace + at->pieces);
    add_up_chunks(t, num_chunks);
    for (int64_t i = 0, first = 0; i < num_chunks; i++, first += KVC_CHUNK_PIECES) {
        const found from = found_of(t, i);
        rank_pieces(t, &from, keys + first, kvc_smaller(num_pieces - first, KVC_CHUNK_PIECES));
    }
    const kvc_entries entries = {.keys = keys,
                                 .num = num_pieces,
                                 .first = KVC_FIRST_READ / KVC_PIECE_ROWS,
                                 .local = (num_rows - KVC_LAST_READ) / KVC_PIECE_ROWS,
                                 .local_end = num_pieces};
    const int64_t most = entries.first + kvc_selected_pieces(&t->call->plan->args) + num_pieces - entries.local;
    *num = kvc_topk(&entries, (int32_t)most, pieces);
    return pieces;
}

kvc_row_lister kvc_list_selected(const kvc_task *t, int64_t *num_rows) {
    static const kvc_row_range all = {0, INT64_MAX};
    const int64_t num_seen = kvc_selecting_rows(t->call->plan, t->slice);
    const kvc_selecting *at = &t->call->plan->selecting;
    const uint64_t before = (uint64_t)kvc_slice_number(t) * (uint64_t)at->most_ranges; /* of other slices */
    kvc_row_range *const ranges = (kvc_row_range *)(void *)(t->workspace + at->ranges) + before, *to;
    int32_t num;
    *num_rows = t->slice->num_seen;
    if (!num_seen) return kvc_list_seen(t, &all, 1);
    const int32_t *pieces = select_pieces(t, num_seen, &num);
    *(to = ranges) = (kvc_row_range){0, 0};
    *num_rows = 0;
    for (int32_t i = 0; i < num; i++) {
        const int64_t begin = (int64_t)pieces[i] * KVC_PIECE_ROWS;
        if (begin != to->end) *++to = (kvc_row_range){begin, begin};
        to->end = kvc_smaller(begin + KVC_PIECE_ROWS, num_seen);
        *num_rows += to->end - begin;
    }
    return kvc_list_seen(t, ranges, to + 1 - ranges);
}

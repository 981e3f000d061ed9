/* step.c: steps of the online softmax, for few query rows: see step.h.
 *
 * A tile lists its rows as stretches: rows at equal distances in memory.  A walk goes over a tile's keys, or values,
 * and a place is where it is.  Kernels take rows of one type (k_as, v_as, kernel_type) at equal distances.  Other rows
 * are copied to the workspace first.  A kvc_ahead is memory of the next tile, to be prefetched during work on this one.
 *
 * A delta is how far rows were moved since their keys were rotated, and delta_index its number, 0 for none.  Query rows
 * are rotated for the delta of a tile.  If a tile is KVC_MIXED, keys of several deltas are rotated instead.
 * k_mixing is the Hadamard matrix by which keys were multiplied before they were stored, if its order is not 0.
 */
#include "attend/step.h"

#include <string.h>

#include "attend/minima.h"

/* ---- the rows of a tile as kernels take them --------------------------------------------------------------------- */

/* Kernels take rows that lie evenly.  Others are copied to the workspace, or given a few at a time. */
enum {
    LEAST_STRETCH = 8, /* rows of a stretch of floats that a kernel is given by themselves */
    /* Rows of floats in shorter stretches that a kernel is given at once.  Fewer rows prefetch the rows ahead more
     * evenly.  But sums are loaded and stored each time. */
    FEW_ROWS = 16,
    LEAST_AHEAD = 4,                 /* rows of a stretch that is worth prefetching by itself */
    NARROW_HOLE = 3 * KVC_CACHE_LINE /* most bytes between rows that are prefetched with them */
};

kvc_walk kvc_walk_keys(const kvc_task *t, const kvc_tile *tile) {
    const size_t bytes = tile->layout->k_row_bytes;
    const int32_t type = t->call->layer->k_type;
    return (kvc_walk){{tile->stretches, 0}, tile->n, bytes, bytes, type, t->k_as, t->call->plan->k_dim, 0};
}

kvc_walk kvc_walk_values(const kvc_task *t, const kvc_tile *tile) {
    const size_t bytes = tile->layout->v_row_bytes, stored = tile->layout->v_stored;
    const int32_t type = t->call->layer->v_type;
    return (kvc_walk){{tile->stretches, 0}, tile->n, bytes, stored, type, t->v_as, t->call->plan->v_dim, 1};
}

void kvc_prefetch(kvc_ahead ahead) {
#if defined(__GNUC__)
    for (int32_t i = 0; i < ahead.bytes; i += KVC_CACHE_LINE) __builtin_prefetch((const char *)ahead.begin + i, 0, 2);
#else
    (void)ahead;
#endif
}

static const uint8_t *row_at(const kvc_walk *w, const kvc_walk_place *p) {
    return p->at->first[w->is_value] + p->offset * p->at->step[w->is_value];
}

/* Returns where the scale of the row at a place is; NULL if rows have none. */
static const uint8_t *scales_at(const kvc_walk *w, const kvc_walk_place *p) {
    const uint8_t *scales = p->at->scales[w->is_value];
    return scales ? scales + p->offset * p->at->scale_step : NULL;
}

/* Counts the rows from a place on to the end of the stretch. */
static int64_t rows_behind(const kvc_walk_place *p) { return p->at->n - p->offset; }

/* Moves a place by up to `most` rows, to the end of the stretch at most; returns their number. */
static int64_t step_on(kvc_walk_place *p, int64_t most) {
    int64_t rows = rows_behind(p);
    if (rows > most) rows = most;
    p->offset += rows;
    if (p->offset == p->at->n) p->at++, p->offset = 0;
    return rows;
}

/* Copies rows.  Keeps the place in registers, as each row may be a stretch. */
static void copy_rows(kvc_walk *w, uint8_t *to, int64_t rows) {
    const size_t bytes = w->row_bytes;
    kvc_walk_place p = w->place;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *from = row_at(w, &p);
        const ptrdiff_t step = p.at->step[w->is_value];
        some = step == (ptrdiff_t)bytes ? step_on(&p, rows) : step_on(&p, 1);
        memcpy(to, from, (size_t)some * bytes);
        to += (size_t)some * bytes;
    }
    w->place = p;
}

/* Copies rows to the workspace, unpacked or decoded, `stride` bytes apart. */
static void decode_rows(const kvc_task *t, kvc_walk *w, int64_t rows, int64_t stride) {
    const kvc_call *c = t->call;
    const kvc_attending *workspace = &c->plan->attending;
    uint8_t *const to = (uint8_t *)(t->workspace + workspace->rows);
    for (int64_t done = 0, some; done < rows; done += some) {
        const kvc_stretch *at = w->place.at;
        const uint8_t *from = row_at(w, &w->place), *scales = scales_at(w, &w->place);
        const ptrdiff_t step = at->step[w->is_value];
        some = step_on(&w->place, rows - done);
        if (w->kernel_type == KVC_F32) {
            const kvc_rows rows_here = {w->type,       (char *)from, step, 0, (char *)(scales ? scales : from),
                                        at->scale_step};
            kvc_decode_rows(c->kernels, (float *)(void *)(to + done * stride), stride, &rows_here, some, w->dim);
        } else {
            c->kernels->unpack(w->type, to + done * stride, from, step, w->kernel_type == KVC_INT8 ? NULL : scales,
                               at->scale_step, some, w->dim, t->workspace + workspace->minima + done);
        }
    }
}

kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows) {
    uint8_t *const workspace = (uint8_t *)(t->workspace + t->call->plan->attending.rows);
    w->left -= rows;
    if (w->kernel_type != w->type) {
        const int64_t stride = (int64_t)kvc_blocks_bytes(w->kernel_type, w->dim);
        decode_rows(t, w, rows, stride);
        return (kvc_kernel_rows){workspace, stride, rows};
    }
    if (rows_behind(&w->place) < rows) {
        copy_rows(w, workspace, rows);
        return (kvc_kernel_rows){workspace, (int64_t)w->row_bytes, rows};
    }
    const kvc_kernel_rows in_place = {row_at(w, &w->place), w->place.at->step[w->is_value], rows};
    step_on(&w->place, rows);
    return in_place;
}

/* Takes as many keys, or values of floats, as a kernel is best given next.  These are all rows if the rest lies in one
 * stretch or is converted, otherwise the rest of a long stretch, otherwise a few rows, which are copied.  Quantised
 * rows are a multiple of KVC_ROW_GROUP, which kernels score at once. */
static kvc_kernel_rows take_some(const kvc_task *t, kvc_walk *w) {
    const int64_t in_place = rows_behind(&w->place), left = w->left;
    const int is_quantised = w->type >= KVC_FLOAT_TYPES, is_same = w->kernel_type == w->type;
    if (in_place >= left || !is_same) return kvc_take_rows(t, w, left);
    if (!is_quantised && in_place >= LEAST_STRETCH) return kvc_take_rows(t, w, in_place);
    if (is_quantised && in_place >= KVC_ROW_GROUP) return kvc_take_rows(t, w, in_place / KVC_ROW_GROUP * KVC_ROW_GROUP);
    const int64_t few = is_quantised ? KVC_ROW_GROUP : FEW_ROWS;
    return kvc_take_rows(t, w, few < left ? few : left);
}

/* Takes all quantised values of a tile as a kvc_accumulate_fn does, in pieces of KVC_PANEL rows; returns row_stride.
 * Copies a piece whose rows do not follow each other, so that sums do not depend on where they lie. */
static int64_t take_values(const kvc_task *t, kvc_walk *w, kvc_value_piece *piece) {
    if (w->kernel_type != w->type || rows_behind(&w->place) >= w->left) {
        const kvc_kernel_rows rows = kvc_take_rows(t, w, w->left);
        for (int64_t i = 0; i < rows.num; i += KVC_PANEL) piece++->rows = (const uint8_t *)rows.first + i * rows.stride;
        return rows.stride;
    }
    uint8_t *copies = (uint8_t *)(t->workspace + t->call->plan->attending.rows);
    for (int64_t n; w->left; w->left -= n, copies += KVC_PANEL * w->row_bytes) {
        n = kvc_smaller(w->left, KVC_PANEL);
        const int is_even = rows_behind(&w->place) >= n && w->place.at->step[1] == (ptrdiff_t)w->row_bytes;
        piece++->rows = is_even ? row_at(w, &w->place) : copies;
        if (is_even)
            step_on(&w->place, n);
        else
            copy_rows(w, copies, n);
    }
    return (int64_t)w->row_bytes;
}

/* Returns the memory from first to end, to be prefetched; MOST_BYTES of it, if it is longer. */
static kvc_ahead ahead_of(const kvc_call *c, const uint8_t *first, const uint8_t *end) {
    enum { MOST_BYTES = 1 << 24 };
    const ptrdiff_t bytes = end - first;
    return (kvc_ahead){first, bytes < MOST_BYTES ? (int32_t)bytes : MOST_BYTES, c->prefetch_level};
}

/* Prefetches the scales of a tile, which lie apart from its rows.  Leaves out scales that do not follow each other. */
static void prefetch_scales(const kvc_call *c, const kvc_tile *tile) {
    int32_t n = 0;
    for (const kvc_stretch *at = tile->stretches; n < tile->n; n += (int32_t)at++->n)
        for (int i = 0; i < 2 && at->scale_step == KVC_SCALE_BYTES; i++)
            if (at->scales[i]) kvc_prefetch(ahead_of(c, at->scales[i], at->scales[i] + at->n * KVC_SCALE_BYTES));
}

void kvc_times_scales(const kvc_task *t, const kvc_tile *tile, int is_value) {
    uint8_t copies[KVC_TILE][KVC_SCALE_BYTES];
    t->call->kernels->times(t->scores, t->num_query_rows, tile->n, kvc_scales_of(tile, is_value, copies));
}

/* Returns the most bytes between rows that are prefetched with them: the processor fetches narrow holes all the same
 * where rows share lines with them. */
static ptrdiff_t narrow_hole(const kvc_walk *w) { return w->row_bytes % KVC_CACHE_LINE ? NARROW_HOLE : 0; }

/* Whether the next rows, up to `most`, lie in several stretches, which are better prefetched a few rows at a time.
 * Rows with holes of more than narrow_hole bytes between them count as stretches, too.  Returns 0 if the first stretch
 * has less than LEAST_AHEAD rows: kernels would have too few rows at a time to prefetch evenly. */
static int is_in_stretches(const kvc_walk *w, int64_t most) {
    const kvc_walk_place *p = &w->place;
    const int64_t rows = w->left ? rows_behind(p) : 0;
    if (rows < LEAST_AHEAD) return 0;
    return rows < kvc_smaller(w->left, most) || p->at->step[w->is_value] - (ptrdiff_t)w->row_bytes > narrow_hole(w);
}

/* Rows with holes of at most `narrow` bytes between them are prefetched as one range.  [first, end) is the range that
 * rows are added to, and empty before the first row.  A range is prefetched when the next one begins. */
kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows) {
    const ptrdiff_t bytes = (ptrdiff_t)w->row_bytes, narrow = narrow_hole(w);
    const uint8_t *first = NULL, *end = NULL;
    kvc_walk_place p = w->place;
    if (rows > w->left) rows = w->left;
    if (!w->ahead_bytes) rows = 0;
    w->left -= rows;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *row = row_at(w, &p);
        const ptrdiff_t step = p.at->step[w->is_value];
        some = step_on(&p, step - bytes <= narrow ? rows : 1);
        if ((uintptr_t)row - (uintptr_t)end > (uintptr_t)narrow) {
            kvc_prefetch(ahead_of(c, first, end));
            first = row;
        }
        end = row + (some - 1) * step + bytes;
    }
    w->place = p;
    return ahead_of(c, first, end);
}

/* Takes as many rows to prefetch as fill `lines` lines; none, unless all rows that are left follow each other. */
static kvc_ahead take_few_ahead(const kvc_call *c, kvc_walk *w, int64_t lines) {
    const int is_even =
        w->left && rows_behind(&w->place) >= w->left && w->place.at->step[w->is_value] == (ptrdiff_t)w->row_bytes;
    return kvc_take_ahead(c, w, is_even ? lines * KVC_CACHE_LINE / (int64_t)w->row_bytes : 0);
}

/* ---- query rows -------------------------------------------------------------------------------------------------- */

/* Rows that keep their type are copied here: `convert` begins copying too slowly for rows in the L1 cache. */
void kvc_convert_query_rows(const kvc_call *c, int32_t from, int32_t to, void *dst, int64_t dst_stride, const void *src,
                            int64_t src_stride, int32_t dim) {
    const int32_t num = c->plan->parts.heads;
    if (from != to) {
        c->kernels->convert(from, to, dst, dst_stride, src, src_stride, num, dim);
        return;
    }
    const size_t bytes = kvc_row_bytes(to, dim);
    for (int32_t i = 0; i < num; i++) memcpy((char *)dst + i * dst_stride, (const char *)src + i * src_stride, bytes);
}

void kvc_load_query_rows(const kvc_task *t, int32_t to) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t dim = c->plan->k_dim, heads = c->plan->parts.heads;
    const int64_t stride = c->plan->attending.q_stride * (int64_t)sizeof(float);
    const int32_t padding = (KVC_CHUNK - dim % KVC_CHUNK) % KVC_CHUNK; /* elements */
    const size_t bytes = padding ? kvc_row_bytes(to, dim) : 0;
    const size_t padding_bytes = padding ? kvc_row_bytes(to, padding) : 0;
    char *row = (char *)t->q;
    for (int32_t i = 0; i < t->num_query_rows / heads; i++) {
        const char *q =
            (const char *)a->q + kvc_token_offset(t->tokens[i] - c->plan->args.first, a->tokens_per_sequence,
                                                  a->q_token_stride, a->q_batch_stride);
        kvc_convert_query_rows(c, a->q_type, to, row, stride, q + t->part * heads * a->q_head_stride, a->q_head_stride,
                               dim);
        for (int32_t h = 0; h < heads; h++, row += stride)
            if (padding) memset(row + bytes, 0, padding_bytes);
    }
}

int32_t kvc_delta_index_of(const kvc_task *t, const kvc_tile *tile) { return t->call->rope ? tile->delta_index : 0; }

/* Returns the angles that rotate a query row for keys that are off by the delta with this index. */
static const float *angles_of(const kvc_call *c, int32_t delta_index) {
    return c->angles + (size_t)(delta_index - 1) * (size_t)c->plan->deltas.angles_stride;
}

static void rotate_query_rows(const kvc_task *t, int32_t delta_index) {
    const kvc_call *c = t->call;
    const kvc_plan *plan = c->plan;
    const float *angles = angles_of(c, delta_index);
    for (int32_t r = 0; r < t->num_query_rows; r++)
        kvc_rope_rotate(c->rope, angles, t->q + (size_t)r * (size_t)plan->attending.q_stride);
}

/* Decodes the next n keys of a mixed tile to the workspace, transforms them back, and rotates them. */
static const float *rotate_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, int32_t n) {
    const kvc_call *c = t->call;
    const int32_t dim = c->plan->k_dim;
    const int64_t stride = c->plan->attending.q_stride * (int64_t)sizeof(float);
    float *const first = t->workspace + c->plan->attending.rows, *to = first;
    for (int32_t i = 0, count; i < n; i += count) {
        const kvc_segment *segment = at->segment;
        count = kvc_rows_here(at, n - i);
        const kvc_rows keys = kvc_keys_in(tile, c->layer, segment, at->offset);
        kvc_decode_rows(c->kernels, to, stride, &keys, count, dim);
        for (int32_t j = 0; j < count; j++, to += c->plan->attending.q_stride) {
            if (c->k_mixing.order) c->kernels->hadamard(to, to, dim, c->k_mixing);
            if (segment->delta_index) kvc_rope_rotate_back(c->rope, angles_of(c, segment->delta_index), to);
        }
        kvc_go_on(at, count);
    }
    return first;
}

int kvc_rotates_keys(const kvc_task *t, const kvc_tile *tile) { return kvc_delta_index_of(t, tile) == KVC_MIXED; }

kvc_kernel_rows kvc_take_keys(const kvc_task *t, const kvc_tile *tile, kvc_row_place *at, kvc_walk *keys, int64_t n) {
    if (!kvc_rotates_keys(t, tile)) return kvc_take_rows(t, keys, n);
    const int64_t stride = t->call->plan->attending.q_stride * (int64_t)sizeof(float);
    return (kvc_kernel_rows){rotate_keys(t, tile, at, (int32_t)n), stride, n};
}

/* ---- kernels and prepared query rows ----------------------------------------------------------------------------- */

int kvc_key_minima_apart(const kvc_task *t, const kvc_tile *tile) {
    return kvc_delta_index_of(t, tile) != KVC_MIXED && t->k_lacks_minima;
}

/* Returns the kernels that score a tile for few query rows. */
static const kvc_scorer *scorer_of(const kvc_task *t, const kvc_tile *tile) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t delta_index = kvc_delta_index_of(t, tile), type = delta_index == KVC_MIXED ? KVC_F32 : t->k_as;
    const int is_same = type == t->call->args->q_type && !delta_index;
    return is_same && kernels->score_16[type].score ? &kernels->score_16[type] : &kernels->score[type];
}

/* Multiplies the query rows by the matrix that keys were multiplied by.  Scores stay as they are. */
static void transform_query_rows(const kvc_task *t, kvc_mixing mixing) {
    const kvc_call *c = t->call;
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *q = t->q + (size_t)r * (size_t)c->plan->attending.q_stride;
        c->kernels->hadamard(q, q, c->plan->k_dim, mixing);
    }
}

/* Rounds query rows of f32 to bytes, in place: a kvc_byte_query, then the codes, as a kvc_score_bytes_fn takes them. */
static void round_query_rows(const kvc_task *t) {
    const kvc_call *c = t->call;
    const kvc_attending *at = &c->plan->attending;
    const int32_t dim = c->plan->k_dim;
    const size_t padded = (size_t)kvc_align_up((uint64_t)dim, KVC_BYTE_CODES);
    int8_t *const codes = (int8_t *)(t->workspace + at->rows); /* no rows are there yet */
    memset(codes + dim, 0, padded - (size_t)dim);
    for (int32_t r = 0; r < t->num_query_rows; r++) {
        float *const row = t->q + (size_t)r * (size_t)at->q_stride;
        kvc_byte_query query = {0, 0};
        c->kernels->round(codes, &query.unit, row, 0, 1, dim);
        query.unit *= c->scale;
        for (int32_t d = 0; d < dim; d++) query.sum += codes[d];
        memcpy(row, &query, sizeof query);
        memcpy((char *)row + KVC_BYTE_CODES, codes, padded);
    }
}

const float *kvc_query_rows_for(kvc_task *t, const kvc_tile *tile) {
    const kvc_plan *plan = t->call->plan;
    const int32_t delta_index = kvc_delta_index_of(t, tile);
    if (delta_index == t->delta_index) return t->q;
    const kvc_scorer *scorer = scorer_of(t, tile);
    const int in_bytes = t->slice->tiled == KVC_IN_BYTES;
    kvc_prepare_fn *prepare = t->slice->tiled ? kvc_product_of(t, delta_index).prepare : scorer->prepare;
    const int is_as_16 = !t->slice->tiled && scorer == &t->call->kernels->score_16[t->call->args->q_type];
    const kvc_mixing mixing = in_bytes ? t->call->byte_mixing : t->call->k_mixing;
    t->delta_index = delta_index;
    kvc_load_query_rows(t, in_bytes || (prepare && !is_as_16) ? KVC_F32 : t->call->args->q_type);
    if (!in_bytes && !prepare) return t->q; /* they are multiplied as the caller has them */
    if (delta_index > 0) rotate_query_rows(t, delta_index);
    if (mixing.order && (in_bytes || delta_index != KVC_MIXED)) transform_query_rows(t, mixing);
    if (in_bytes) {
        round_query_rows(t);
        return t->q;
    }
    if (kvc_key_minima_apart(t, tile)) kvc_add_up_blocks(t);
    prepare(t->q, plan->attending.q_stride, t->num_query_rows, plan->k_dim, t->call->scale);
    return t->q;
}

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Scores a tile: gives each query row a score for each key, in t->scores.  Prefetches the tile's values. */
static void score_tile(kvc_task *t, const kvc_tile *tile) {
    const kvc_call *c = t->call;
    const int32_t stride = c->plan->attending.q_stride, dim = c->plan->k_dim;
    kvc_score_fn *const score = scorer_of(t, tile)->score;
    const float *q = kvc_query_rows_for(t, tile);
    kvc_walk keys = kvc_walk_keys(t, tile), values = kvc_walk_values(t, tile);
    if (kvc_delta_index_of(t, tile) == KVC_MIXED) {
        kvc_row_place at = {tile->segment, tile->offset};
        score(t->scores, q, stride, t->num_query_rows, rotate_keys(t, tile, &at, tile->n), stride * (int64_t)sizeof *q,
              tile->n, dim, kvc_take_ahead(c, &values, tile->n));
        return;
    }
    float *scores = t->scores;
    while (keys.left) {
        const kvc_kernel_rows k = take_some(t, &keys);
        score(scores, q, stride, t->num_query_rows, k.first, k.stride, (int)k.num, dim,
              kvc_take_ahead(c, &values, k.num));
        scores += k.num;
    }
    if (KVC_TYPES[t->k_as].has_row_scale) kvc_times_scales(t, tile, KVC_KEYS);
    if (kvc_key_minima_apart(t, tile)) kvc_score_minima(t, tile->n);
}

/* Adds a tile's quantised values, weighted, to acc.  Prefetches the remaining keys of the next tile, a piece of keys
 * with each piece of values.  Kernels prefetch evenly only keys that lie one after the other.  If keys lie in several
 * stretches, kernels are given a part of the columns at a time, and a part of the keys is prefetched before each. */
static void accumulate_quantised(const kvc_task *t, kvc_walk *values, kvc_walk *keys) {
    enum { PARTS = 4 };
    const kvc_call *c = t->call;
    const int32_t type = t->v_as, dim = c->plan->v_dim, n = (int32_t)values->left;
    kvc_value_piece pieces[KVC_TILE / KVC_PANEL];
    const int64_t stride = take_values(t, values, pieces);
    const int is_cut = is_in_stretches(keys, KVC_PANEL),
              is_even = keys->left && rows_behind(&keys->place) >= keys->left;
    const int32_t parts = is_cut ? PARTS : 1, ahead = is_cut ? KVC_PANEL / PARTS : is_even ? KVC_TILE : KVC_PANEL;
    const int32_t columns = (dim / parts + KVC_QUANT_ELEMENTS - 1) / KVC_QUANT_ELEMENTS * KVC_QUANT_ELEMENTS;
    for (int32_t d = 0, some; d < dim; d += some) {
        some = (int32_t)kvc_smaller(columns, dim - d);
        for (int32_t i = 0; i < n; i += KVC_PANEL) {
            const int is_last = d + some == dim && i + KVC_PANEL >= n;
            kvc_value_piece *const piece = &pieces[i / KVC_PANEL];
            piece->rows = (const uint8_t *)piece->rows + (d ? kvc_blocks_bytes(type, columns) : 0);
            piece->next = kvc_take_ahead(c, keys, is_last ? KVC_TILE : ahead);
        }
        c->kernels->accumulate[type](t->acc + d, c->plan->attending.acc_stride, t->factor, t->scores, t->num_query_rows,
                                     pieces, stride, n, some);
    }
}

/* Adds a tile's values of floats, which are taken stretch by stretch. */
static void accumulate_floats(const kvc_task *t, kvc_walk *values, kvc_walk *keys) {
    const kvc_call *c = t->call;
    const float *weights = t->scores;
    while (values->left) {
        const kvc_kernel_rows v = take_some(t, values);
        kvc_value_piece piece = {v.first, kvc_take_ahead(c, keys, values->left ? v.num : KVC_TILE)};
        c->kernels->accumulate[t->v_as](t->acc, c->plan->attending.acc_stride, t->factor, weights, t->num_query_rows,
                                        &piece, v.stride, (int)v.num, c->plan->v_dim);
        weights += v.num;
        for (int32_t r = 0; values->left && r < t->num_query_rows; r++) t->factor[r] = 1; /* acc is multiplied once */
    }
}

/* Adds a tile's values, weighted, to acc, and prefetches the remaining keys of the next tile. */
static void accumulate_tile(const kvc_task *t, const kvc_tile *tile, kvc_walk *keys) {
    kvc_walk values = kvc_walk_values(t, tile);
    if (KVC_TYPES[t->v_as].has_row_scale) kvc_times_scales(t, tile, KVC_VALUES);
    if (t->v_as < KVC_FLOAT_TYPES)
        accumulate_floats(t, &values, keys);
    else
        accumulate_quantised(t, &values, keys);
    if (t->v_lacks_minima) kvc_accumulate_minima(t, tile->n);
}

void kvc_stream_tile(kvc_task *t, kvc_tile *current, kvc_tile *next, kvc_cursor *upcoming) {
    score_tile(t, current);
    kvc_next_tile(next, upcoming);
    kvc_walk keys = kvc_walk_keys(t, next);
    if (next->layout->num_scales) prefetch_scales(t->call, next);
    const kvc_ahead ahead = take_few_ahead(t->call, &keys, t->num_query_rows * (current->n / KVC_LANES));
    if (!current->is_seen || t->call->changes_scores)
        kvc_change_scores(t, current, 0, t->num_query_rows, t->scores, KVC_SCORES);
    t->call->kernels->softmax(t->scores, t->num_query_rows, current->n, t->max, t->sum, t->factor, ahead);
    accumulate_tile(t, current, &keys);
}

int kvc_is_cancelled(kvc_call *c) {
    const volatile int32_t *cancel = c->args->cancel;
    if (cancel && atomic_load_explicit((const volatile _Atomic int32_t *)cancel, memory_order_relaxed)) return 1;
    return kvc_poll_timer_ask(&c->timer);
}

void kvc_prefetch_keys(const kvc_task *t, kvc_cursor rows) {
    kvc_tile tile;
    kvc_next_tile(&tile, &rows);
    kvc_walk keys = kvc_walk_keys(t, &tile);
    kvc_prefetch(kvc_take_ahead(t->call, &keys, tile.n));
}

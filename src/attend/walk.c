/* walk.c: see walk.h. */
#include "attend/walk.h"

#include <string.h>

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

/* Goes on by up to `most` rows of one stretch; returns their number. */
static int64_t step_on(kvc_walk_place *p, int64_t most) {
    int64_t rows = kvc_rows_behind(p);
    if (rows > most) rows = most;
    p->offset += rows;
    if (p->offset == p->at->n) p->at++, p->offset = 0;
    return rows;
}

/* Copies rows.  Walks in registers: each row may be a stretch. */
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
    if (kvc_rows_behind(&w->place) < rows) {
        copy_rows(w, workspace, rows);
        return (kvc_kernel_rows){workspace, (int64_t)w->row_bytes, rows};
    }
    const kvc_kernel_rows in_place = {row_at(w, &w->place), w->place.at->step[w->is_value], rows};
    step_on(&w->place, rows);
    return in_place;
}

kvc_kernel_rows kvc_take_some(const kvc_task *t, kvc_walk *w) {
    const int64_t in_place = kvc_rows_behind(&w->place), left = w->left;
    const int is_quantised = w->type >= KVC_FLOAT_TYPES, is_same = w->kernel_type == w->type;
    if (in_place >= left || !is_same) return kvc_take_rows(t, w, left);
    if (!is_quantised && in_place >= LEAST_STRETCH) return kvc_take_rows(t, w, in_place);
    if (is_quantised && in_place >= KVC_ROW_GROUP) return kvc_take_rows(t, w, in_place / KVC_ROW_GROUP * KVC_ROW_GROUP);
    const int64_t few = is_quantised ? KVC_ROW_GROUP : FEW_ROWS;
    return kvc_take_rows(t, w, few < left ? few : left);
}

int64_t kvc_take_values(const kvc_task *t, kvc_walk *w, kvc_value_piece *piece) {
    if (w->kernel_type != w->type || kvc_rows_behind(&w->place) >= w->left) {
        const kvc_kernel_rows rows = kvc_take_rows(t, w, w->left);
        for (int64_t i = 0; i < rows.num; i += KVC_PANEL) piece++->rows = (const uint8_t *)rows.first + i * rows.stride;
        return rows.stride;
    }
    uint8_t *copies = (uint8_t *)(t->workspace + t->call->plan->attending.rows);
    for (int64_t n; w->left; w->left -= n, copies += KVC_PANEL * w->row_bytes) {
        n = kvc_smaller(w->left, KVC_PANEL);
        const int is_even = kvc_rows_behind(&w->place) >= n && w->place.at->step[1] == (ptrdiff_t)w->row_bytes;
        piece++->rows = is_even ? row_at(w, &w->place) : copies;
        if (is_even)
            step_on(&w->place, n);
        else
            copy_rows(w, copies, n);
    }
    return (int64_t)w->row_bytes;
}

/* Returns what lies from first to end; of very large rows, the beginning. */
static kvc_ahead ahead_of(const kvc_call *c, const uint8_t *first, const uint8_t *end) {
    enum { MOST_BYTES = 1 << 24 };
    const ptrdiff_t bytes = end - first;
    return (kvc_ahead){first, bytes < MOST_BYTES ? (int32_t)bytes : MOST_BYTES, c->prefetch_level};
}

void kvc_prefetch_scales(const kvc_call *c, const kvc_tile *tile) {
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

int kvc_is_in_stretches(const kvc_walk *w, int64_t most) {
    const kvc_walk_place *p = &w->place;
    const int64_t rows = w->left ? kvc_rows_behind(p) : 0;
    if (rows < LEAST_AHEAD) return 0;
    return rows < kvc_smaller(w->left, most) || p->at->step[w->is_value] - (ptrdiff_t)w->row_bytes > narrow_hole(w);
}

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

kvc_ahead kvc_take_few_ahead(const kvc_call *c, kvc_walk *w, int64_t lines) {
    const int is_even =
        w->left && kvc_rows_behind(&w->place) >= w->left && w->place.at->step[w->is_value] == (ptrdiff_t)w->row_bytes;
    return kvc_take_ahead(c, w, is_even ? lines * KVC_CACHE_LINE / (int64_t)w->row_bytes : 0);
}

/* rows.c: see rows.h. */
#include "attend/rows.h"

#include <string.h>

enum {
    LEAST_STRETCH = 8, /* rows of a stretch of floats that a kernel is given by themselves */
    /* Rows of floats in shorter stretches that a kernel is given at once.  The fewer, the more evenly those ahead are
     * prefetched; but each time, sums are loaded and stored. */
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

/* Returns how far apart the rows of a stretch lie. */
static ptrdiff_t step_of(const kvc_walk *w, const kvc_stretch *stretch) { return stretch->step[w->is_value]; }

static const uint8_t *row_at(const kvc_walk *w, const kvc_row_place *p) {
    return p->at->first[w->is_value] + p->offset * step_of(w, p->at);
}

/* Counts the rows from a place on to the end of the stretch. */
static int64_t rows_behind(const kvc_row_place *p) { return p->at->n - p->offset; }

/* Goes on by up to `most` rows of one stretch; returns their number. */
static int64_t step_on(kvc_row_place *p, int64_t most) {
    int64_t rows = rows_behind(p);
    if (rows > most) rows = most;
    p->offset += rows;
    if (p->offset == p->at->n) p->at++, p->offset = 0;
    return rows;
}

/* Copies rows to the workspace.  Walks in registers: each row may be a stretch. */
static void copy_rows(const kvc_task *t, kvc_walk *w, int64_t rows) {
    uint8_t *to = (uint8_t *)(t->workspace + t->call->plan->workspace.rows);
    const size_t bytes = w->row_bytes;
    kvc_row_place p = w->place;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *from = row_at(w, &p);
        const ptrdiff_t step = step_of(w, p.at);
        some = step == (ptrdiff_t)bytes ? step_on(&p, rows) : step_on(&p, 1);
        memcpy(to, from, (size_t)some * bytes);
        to += (size_t)some * bytes;
    }
    w->place = p;
}

/* Copies rows to the workspace, unpacked or decoded, `stride` bytes apart. */
static void decode_rows(const kvc_task *t, kvc_walk *w, int64_t rows, int64_t stride) {
    const kvc_call *c = t->call;
    const kvc_workspace_layout *workspace = &c->plan->workspace;
    uint8_t *const to = (uint8_t *)(t->workspace + workspace->rows);
    for (int64_t done = 0, some; done < rows; done += some) {
        const uint8_t *from = row_at(w, &w->place);
        const ptrdiff_t step = step_of(w, w->place.at);
        some = step_on(&w->place, rows - done);
        if (w->kernel_type == KVC_F32)
            c->kernels->convert(w->type, KVC_F32, to + done * stride, stride, from, step, some, w->dim);
        else
            c->kernels->unpack(w->type, to + done * stride, from, step, some, w->dim,
                               t->workspace + workspace->minima + done);
    }
}

kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows) {
    const void *const workspace = t->workspace + t->call->plan->workspace.rows;
    w->left -= rows;
    if (w->kernel_type != w->type) {
        const int64_t stride = (int64_t)kvc_row_bytes(w->kernel_type, w->dim);
        decode_rows(t, w, rows, stride);
        return (kvc_kernel_rows){workspace, stride, rows};
    }
    if (rows_behind(&w->place) < rows) {
        copy_rows(t, w, rows);
        return (kvc_kernel_rows){workspace, (int64_t)w->row_bytes, rows};
    }
    const kvc_kernel_rows in_place = {row_at(w, &w->place), step_of(w, w->place.at), rows};
    step_on(&w->place, rows);
    return in_place;
}

/* Returns how many rows kvc_take_some takes. */
static int64_t rows_at_once(const kvc_walk *w) {
    const int64_t in_place = rows_behind(&w->place), left = w->left;
    const int is_quantised = w->type >= KVC_FLOAT_TYPES;
    if (in_place >= left || w->kernel_type != w->type || (is_quantised && w->is_value)) return left;
    if (!is_quantised && in_place >= LEAST_STRETCH) return in_place;
    if (is_quantised && in_place >= KVC_ROW_GROUP) return in_place / KVC_ROW_GROUP * KVC_ROW_GROUP;
    const int64_t few = is_quantised ? KVC_ROW_GROUP : FEW_ROWS;
    return few < left ? few : left;
}

kvc_kernel_rows kvc_take_some(const kvc_task *t, kvc_walk *w) { return kvc_take_rows(t, w, rows_at_once(w)); }

/* Returns what lies from first to end; of very large rows, the beginning. */
static kvc_ahead ahead_of(const kvc_call *c, const uint8_t *first, const uint8_t *end) {
    enum { MOST_BYTES = 1 << 24 };
    const ptrdiff_t bytes = end - first;
    return (kvc_ahead){first, bytes < MOST_BYTES ? (int32_t)bytes : MOST_BYTES, c->prefetch_level};
}

/* Returns the most bytes between rows that are prefetched with them: the processor fetches narrow holes all the same
 * where rows share lines with them. */
static ptrdiff_t narrow_hole(const kvc_walk *w) { return w->row_bytes % KVC_CACHE_LINE ? NARROW_HOLE : 0; }

int kvc_is_in_stretches(const kvc_walk *w) {
    const kvc_row_place *p = &w->place;
    const int64_t rows = w->left ? rows_behind(p) : 0;
    if (rows < LEAST_AHEAD) return 0;
    return rows < w->left || step_of(w, p->at) - (ptrdiff_t)w->row_bytes > narrow_hole(w);
}

kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows) {
    const ptrdiff_t bytes = (ptrdiff_t)w->row_bytes, narrow = narrow_hole(w);
    const uint8_t *first = NULL, *end = NULL;
    kvc_row_place p = w->place;
    if (rows > w->left) rows = w->left;
    if (!w->ahead_bytes) rows = 0;
    w->left -= rows;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *row = row_at(w, &p);
        const ptrdiff_t step = step_of(w, p.at);
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
        w->left && rows_behind(&w->place) >= w->left && step_of(w, w->place.at) == (ptrdiff_t)w->row_bytes;
    return kvc_take_ahead(c, w, is_even ? lines * KVC_CACHE_LINE / (int64_t)w->row_bytes : 0);
}

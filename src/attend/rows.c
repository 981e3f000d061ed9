/* rows.c: see rows.h. */
#include "attend/rows.h"

#include <string.h>

#include "attend/minima.h"

enum {
    LEAST_STRETCH = 8, /* rows of a stretch of floats that a kernel is given by themselves */
    /* Rows of floats in shorter stretches that a kernel is given at once.  The fewer, the more evenly those ahead are
     * prefetched; but each time, sums are loaded and stored. */
    FEW_ROWS = 16,
    NARROW_HOLE = 3 * KVC_CACHE_LINE /* most bytes between rows that are prefetched with them */
};

kvc_walk kvc_walk_keys(const kvc_task *t, const kvc_tile *tile) {
    const size_t bytes = tile->layout->k_row_bytes;
    const int32_t type = t->call->layer->k_type;
    return (kvc_walk){{tile->stretches, 0}, tile->n, bytes, bytes, type, kvc_kernel_type(t, type),
                      t->call->plan->k_dim, 0};
}

kvc_walk kvc_walk_values(const kvc_task *t, const kvc_tile *tile) {
    const size_t bytes = tile->layout->v_row_bytes, stored = tile->layout->v_stored;
    const int32_t type = t->call->layer->v_type;
    return (kvc_walk){{tile->stretches, 0}, tile->n, bytes, stored, type, kvc_kernel_type(t, type),
                      t->call->plan->v_dim, 1};
}

void kvc_prefetch(kvc_ahead ahead) {
#if defined(__GNUC__)
    for (int32_t i = 0; i < ahead.bytes; i += KVC_CACHE_LINE) __builtin_prefetch((const char *)ahead.begin + i, 0, 2);
#else
    (void)ahead;
#endif
}

/* Returns the first row of a stretch. */
static const uint8_t *first_of(const kvc_walk *w, const kvc_stretch *stretch) {
    return w->is_value ? stretch->v : stretch->k;
}

static const uint8_t *row_at(const kvc_walk *w, const kvc_row_place *p) {
    return first_of(w, p->at) + (size_t)p->offset * w->row_bytes;
}

/* Counts the rows from a place on to the end of the stretch. */
static int64_t rows_behind(const kvc_row_place *p) { return p->at->n - p->offset; }

/* Goes on by up to `most` rows of one stretch; returns their number. */
static int64_t step_on(kvc_row_place *p, int64_t most) {
    const int64_t rows = kvc_smaller(rows_behind(p), most);
    p->offset += rows;
    if (p->offset == p->at->n) p->at++, p->offset = 0;
    return rows;
}

int64_t kvc_rows_at_once(const kvc_walk *w) {
    const int64_t in_place = kvc_smaller(rows_behind(&w->place), w->left);
    const int is_quantised = w->type >= KVC_FLOAT_TYPES;
    if (in_place == w->left || w->kernel_type != w->type || (is_quantised && w->is_value)) return w->left;
    if (!is_quantised && in_place >= LEAST_STRETCH) return in_place;
    if (!is_quantised) return kvc_smaller(FEW_ROWS, w->left);
    return in_place >= KVC_ROW_GROUP ? in_place / KVC_ROW_GROUP * KVC_ROW_GROUP : kvc_smaller(KVC_ROW_GROUP, w->left);
}

/* Returns how far apart the next rows lie, where that is the same for all: in one stretch, every second slot, or blocks
 * of one slot.  Else 0. */
static int64_t stride_of(const kvc_walk *w, int64_t rows) {
    const kvc_stretch *const at = w->place.at;
    if (rows_behind(&w->place) >= rows) return (int64_t)w->row_bytes;
    if (rows_behind(&w->place) > 1) return 0;
    const uint8_t *row = row_at(w, &w->place);
    const int64_t stride = first_of(w, at + 1) - row;
    for (int64_t i = 1; i < rows; i++) {
        const int is_one = at[i].n == 1 || i == rows - 1;
        if (!is_one || first_of(w, at + i) - row != i * stride) return 0;
    }
    return stride;
}

/* Copies rows to the lane.  Walks in registers: each row may be a stretch. */
static void copy_rows(const kvc_task *t, kvc_walk *w, int64_t rows) {
    uint8_t *to = (uint8_t *)(t->lane + t->call->plan->lane.rows);
    kvc_row_place p = w->place;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *from = row_at(w, &p);
        some = step_on(&p, rows);
        memcpy(to, from, (size_t)some * w->row_bytes);
        to += (size_t)some * w->row_bytes;
    }
    w->place = p;
}

/* Copies rows to the lane, unpacked or decoded, `stride` bytes apart. */
static void decode_rows(const kvc_task *t, kvc_walk *w, int64_t rows, int64_t stride) {
    const kvc_call *c = t->call;
    const kvc_lane_layout *lane = &c->plan->lane;
    uint8_t *const to = (uint8_t *)(t->lane + lane->rows);
    for (int64_t done = 0, some; done < rows; done += some) {
        const uint8_t *from = row_at(w, &w->place);
        some = step_on(&w->place, rows - done);
        if (w->kernel_type == KVC_F32)
            c->kernels->convert(w->type, KVC_F32, to + done * stride, stride, from, (int64_t)w->row_bytes, some,
                                w->dim);
        else
            c->kernels->unpack(w->type, to + done * stride, from, (int64_t)w->row_bytes, some, w->dim,
                               t->lane + lane->minima + done);
    }
}

kvc_kernel_rows kvc_take_rows(const kvc_task *t, kvc_walk *w, int64_t rows) {
    const void *const lane = t->lane + t->call->plan->lane.rows;
    w->left -= rows;
    if (w->kernel_type != w->type) {
        const int64_t stride = (int64_t)kvc_row_bytes(w->kernel_type, w->dim);
        decode_rows(t, w, rows, stride);
        return (kvc_kernel_rows){lane, stride};
    }
    const kvc_kernel_rows in_place = {row_at(w, &w->place), stride_of(w, rows)};
    if (!in_place.stride) {
        copy_rows(t, w, rows);
        return (kvc_kernel_rows){lane, (int64_t)w->row_bytes};
    }
    if (rows_behind(&w->place) < rows) { /* each row but the last is a stretch */
        w->place = (kvc_row_place){w->place.at + rows - 1, 0};
        rows = 1;
    }
    step_on(&w->place, rows);
    return in_place;
}

/* Returns what lies from first to end; of very large rows, the beginning. */
static kvc_ahead ahead_of(const kvc_call *c, const uint8_t *first, const uint8_t *end) {
    enum { MOST_BYTES = 1 << 24 };
    return (kvc_ahead){first, (int32_t)kvc_smaller(end - first, MOST_BYTES), c->prefetch_level};
}

/* Narrow holes between rows that share lines with them count as rows: the processor fetches them all the same. */
kvc_ahead kvc_take_ahead(const kvc_call *c, kvc_walk *w, int64_t rows) {
    const size_t row_bytes = w->row_bytes;
    const uintptr_t narrow = row_bytes % KVC_CACHE_LINE ? NARROW_HOLE : 0;
    const uint8_t *first = NULL, *end = NULL;
    kvc_row_place p = w->place;
    rows = w->ahead_bytes ? kvc_smaller(rows, w->left) : 0;
    w->left -= rows;
    for (int64_t some; rows; rows -= some) {
        const uint8_t *row = row_at(w, &p);
        some = step_on(&p, rows);
        if ((uintptr_t)row - (uintptr_t)end > narrow) {
            kvc_prefetch(ahead_of(c, first, end));
            first = row;
        }
        end = row + (size_t)some * row_bytes;
    }
    w->place = p;
    return ahead_of(c, first, end);
}

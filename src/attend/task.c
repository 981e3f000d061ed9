/* task.c: a task, and its rows in tiles: see task.h.
 *
 * A cursor walks over segments, which are rows of one run each.  It hands rows out in tiles, which are rows that are
 * attended to together.  A tile lists them as stretches: rows at equal distances in memory.
 *
 * A delta is how far rows were moved since their keys were rotated, and delta_index its number, 0 for none.  A frame is
 * the next frame_rows rows of a cursor; no tile reaches past its end.  Within a frame, each change of the delta ends a
 * tile, because query rows are rotated for one delta.  With changes_to_mix changes or more, the frame is mixed: it is
 * one tile, whose keys are rotated instead.
 */
#include "attend/task.h"

kvc_task kvc_view_of(const kvc_task *t, int32_t first, int32_t num_query_rows) {
    const kvc_plan *plan = t->call->plan;
    kvc_task view = *t;
    view.num_query_rows = num_query_rows;
    view.first_query_row += first;
    view.tokens += first / plan->parts.heads; /* a token has so many query rows in a task */
    view.q += (size_t)first * (size_t)plan->attending.q_stride;
    view.q_blocks += (size_t)first * (size_t)plan->attending.block_stride;
    view.scores += (size_t)first * KVC_SCORES;
    view.acc += (size_t)first * (size_t)plan->attending.acc_stride;
    view.max += first;
    view.sum += first;
    view.factor += first;
    return view;
}

kvc_task kvc_view_of_slice(const kvc_task *t, int32_t m, int32_t first) {
    const kvc_plan *plan = t->call->plan;
    const kvc_query_slice *slice = kvc_slice_of(plan, t->job, m);
    kvc_task view = kvc_view_of(t, first, kvc_num_query_rows(plan, slice));
    view.slice = slice;
    return view;
}

/* ---- its rows ---------------------------------------------------------------------------------------------------- */

/* Begins the next frame, and decides whether it is mixed.  If no key is off by a delta, changes_to_mix is 0. */
static void open_frame(kvc_cursor *c) {
    c->frame = c->num_rows < c->frame_rows ? (int32_t)c->num_rows : c->frame_rows;
    c->is_mixed = 0;
    if (!c->changes_to_mix || !c->frame) return;
    const kvc_segment *segment = c->segment;
    int32_t changes = 0;
    for (int32_t n = segment->count - c->offset; n < c->frame; n += segment->count) {
        changes += segment[1].delta_index != segment->delta_index;
        segment++;
    }
    c->is_mixed = changes >= c->changes_to_mix;
}

/* Counts the segments from p on, up to `most`, that have one row each and lie evenly in one block, for example if
 * every second token was removed.  Returns 1 if they are too few to gain anything. */
static int32_t num_even_singles(const kvc_segment *p, int32_t most) {
    enum { LEAST = 4 };
    if (most < LEAST || p[0].count > 1 || p[1].count > 1 || p[2].count > 1) return 1;
    const int32_t step = p[1].slot - p[0].slot;
    int32_t n = 1;
    while (n < most && p[n].count == 1 && p[n].slot - p[n - 1].slot == step && p[n].rows == p->rows &&
           p[n].delta_index == p->delta_index)
        n++;
    return n >= LEAST && step > 0 ? n : 1;
}

/* Notes where the scales of a stretch are: one of each row, from `slot` on, every `step` slots.  head: bytes before
 * the KV head's part of a block. */
static void find_scales(const kvc_tile *t, kvc_stretch *stretch, const uint8_t *head, size_t slot, ptrdiff_t step) {
    const kvc_layout *layout = t->layout;
    if (layout->k_scales) stretch->scales[0] = head + layout->k_scales + slot * KVC_SCALE_BYTES;
    if (layout->v_scales) stretch->scales[1] = head + layout->v_scales + slot * KVC_SCALE_BYTES;
    stretch->scale_step = step * KVC_SCALE_BYTES;
}

/* Lists segments of one row each that lie evenly as stretches, from the tile's first segment on, up to `most` rows;
 * widens the tile's range of positions.  Stops at the first other segment.  Returns the number of stretches, and sets
 * t->n to the number of rows, which is that of segments, too. */
static int32_t list_singles(kvc_tile *t, int32_t most, size_t head) {
    const size_t k_begin = t->layout->k_offset + head, v_begin = t->layout->v_offset + head;
    const size_t k_bytes = t->layout->k_row_bytes, v_bytes = t->layout->v_row_bytes;
    const kvc_segment *segment = t->segment;
    int32_t num = 0;
    for (int32_t rows; t->n < most && (t->delta_index == KVC_MIXED || segment->delta_index == t->delta_index);
         segment += rows, t->n += rows) {
        rows = num_even_singles(segment, most - t->n);
        if (rows == 1) break;
        const uint8_t *from = segment->rows;
        const size_t slot = (size_t)segment->slot;
        const ptrdiff_t step = segment[1].slot - segment->slot;
        t->stretches[num] = (kvc_stretch){{from + k_begin + slot * k_bytes, from + v_begin + slot * v_bytes},
                                          {step * (ptrdiff_t)k_bytes, step * (ptrdiff_t)v_bytes},
                                          rows,
                                          {NULL, NULL},
                                          0};
        find_scales(t, &t->stretches[num++], from + head, slot, step);
        for (int32_t i = 0; i < rows; i++) {
            if (segment[i].position < t->min_position) t->min_position = segment[i].position;
            if (segment[i].position > t->max_position) t->max_position = segment[i].position;
        }
    }
    return num;
}

/* Walks over the segments once, with all that changes in registers: in a cache full of holes, each row is a segment. */
void kvc_next_tile(kvc_tile *t, kvc_cursor *c) {
    const kvc_layout *layout = c->layout;
    if (!c->frame) open_frame(c);
    const size_t head = (size_t)c->head * layout->head_stride;
    const size_t k_begin = layout->k_offset + head, v_begin = layout->v_offset + head;
    const size_t k_bytes = layout->k_row_bytes, v_bytes = layout->v_row_bytes;
    const int32_t most = c->frame, is_mixed = c->is_mixed, has_scales = layout->num_scales;
    const int32_t delta_index = !most ? 0 : is_mixed ? KVC_MIXED : c->segment->delta_index;
    const uint8_t *k_end = NULL, *v_end = NULL;
    t->layout = layout;
    t->segment = c->segment;
    t->offset = c->offset;
    t->head = c->head;
    t->n = 0;
    t->min_position = INT32_MAX;
    t->max_position = -1;
    t->delta_index = delta_index;
    kvc_stretch *next = t->stretches + (c->offset ? 0 : list_singles(t, most, head));
    int32_t offset = c->offset, n = t->n, min_position = t->min_position, max_position = t->max_position;
    const kvc_segment *segment =
        n ? c->segment + n : c->segment; /* which may be NULL: to that C lets nothing be added */
    while (n < most && (is_mixed || segment->delta_index == delta_index)) {
        const int32_t left = segment->count - offset, count = left < most - n ? left : most - n;
        const int32_t position = segment->position + offset;
        const uint8_t *rows = segment->rows;
        const size_t slot = (size_t)(segment->slot + offset);
        const uint8_t *k = rows + k_begin + slot * k_bytes, *v = rows + v_begin + slot * v_bytes;
        if (k == k_end && v == v_end)
            next[-1].n += count;
        else {
            *next = (kvc_stretch){{k, v}, {(ptrdiff_t)k_bytes, (ptrdiff_t)v_bytes}, count, {NULL, NULL}, 0};
            if (has_scales) find_scales(t, next, rows + head, slot, 1);
            next++;
        }
        k_end = k + (size_t)count * k_bytes;
        v_end = v + (size_t)count * v_bytes;
        if (position < min_position) min_position = position;
        if (position + count > max_position) max_position = position + count - 1;
        offset += count;
        n += count;
        if (offset == segment->count) segment++, offset = 0;
    }
    t->n = n;
    t->min_position = min_position;
    t->max_position = max_position;
    t->is_batch = n && (offset ? segment : segment - 1)->token >= 0;
    t->is_located = t->is_seen = 0;
    c->segment = segment;
    c->offset = offset;
    c->num_rows -= n;
    c->frame -= n;
}

kvc_rows kvc_keys_in(const kvc_tile *t, const kvc_layer *layer, const kvc_segment *segment, int32_t offset) {
    const kvc_rows keys = kvc_stored_rows(layer, t->layout, segment->rows, segment->slot + offset, KVC_KEYS);
    return kvc_row_of(&keys, 0, t->head);
}

const void *kvc_scales_of(const kvc_tile *t, int is_value, uint8_t copies[KVC_TILE][KVC_SCALE_BYTES]) {
    const kvc_stretch *at = t->stretches;
    if (at->n >= t->n && at->scale_step == KVC_SCALE_BYTES && t->n % KVC_PANEL == 0) return at->scales[is_value];
    int32_t n = 0;
    for (; n < t->n; at++)
        for (int64_t i = 0, some; i < at->n; i += some, n += (int32_t)some) {
            some = at->scale_step == KVC_SCALE_BYTES ? at->n : 1;
            memcpy(copies[n], at->scales[is_value] + i * at->scale_step, (size_t)some * KVC_SCALE_BYTES);
        }
    memset(copies[n], 0, (size_t)(KVC_TILE - n) * KVC_SCALE_BYTES);
    return copies;
}

void kvc_locate_rows(kvc_tile *t, const int32_t *order) {
    const kvc_segment *segment = t->segment;
    int32_t offset = t->offset;
    for (int32_t i = 0; i < t->n && !t->is_located; i++, offset++) {
        if (offset == segment->count) segment++, offset = 0;
        t->position[i] = segment->position + offset;
        t->token[i] = segment->token < 0 ? -1 : order[segment->token + offset];
    }
    t->is_located = 1;
}

/* Returns the kernels that multiply rows of a stored type by many query rows. */
static const kvc_tiler *tiler_of(const kvc_task *t, int32_t type) {
    const kvc_kernels *kernels = t->call->kernels;
    const int32_t kernel_type = kvc_taken_as(kernels, type, KVC_TILED);
    return kernel_type != type && kernels->decoded.score ? &kernels->decoded : &kernels->tiler[kernel_type];
}

const kvc_tiler *kvc_value_tiler(const kvc_task *t) { return tiler_of(t, t->call->layer->v_type); }

kvc_key_product kvc_product_of(const kvc_task *t, int32_t delta_index) {
    const kvc_call *c = t->call;
    const kvc_attend_args *a = c->args;
    const int32_t type = delta_index == KVC_MIXED ? KVC_F32 : c->layer->k_type;
    const kvc_tiler *tiler = tiler_of(t, type), *f16 = &c->kernels->tiler_f16;
    const int is_changed = delta_index > 0 || (c->k_mixing.order && delta_index != KVC_MIXED);
    if (!is_changed && c->scale > 0 && !(a->softcap > 0) && !a->alibi) {
        if (a->q_type == KVC_F16 && type == KVC_F16 && f16->score)
            return (kvc_key_product){NULL, f16->pack_keys, f16->score, c->scale};
        if (a->q_type == KVC_BF16 && tiler->score_bf16)
            return (kvc_key_product){NULL, tiler->pack_keys, tiler->score_bf16, c->scale};
    }
    return (kvc_key_product){tiler->prepare, tiler->pack_keys, tiler->score, 1};
}

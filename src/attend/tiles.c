/* tiles.c: see tiles.h. */
#include "attend/tiles.h"

static int32_t min32(int64_t a, int64_t b) { return (int32_t)kvc_smaller(a, b); }

/* Begins the next window, and decides whether it is mixed. */
static void open_window(kvc_cursor *c) {
    c->window = min32(c->num_rows, KVC_TILE);
    c->is_mixed = 0;
    if (!c->changes_to_mix || !c->window) return;
    const kvc_piece *piece = c->piece;
    int32_t changes = 0;
    for (int32_t n = piece->count - c->offset; n < c->window; n += piece->count) {
        changes += piece[1].delta_index != piece->delta_index;
        piece++;
    }
    c->is_mixed = changes >= c->changes_to_mix;
}

/* Walks over the pieces once, with all that changes in registers: in a cache full of holes, each row is a piece. */
void kvc_next_tile(kvc_tile *t, kvc_cursor *c) {
    const kvc_layout *layout = c->layout;
    if (!c->window) open_window(c);
    const size_t begin = layout->k_offset + (size_t)c->head * layout->head_stride;
    const int32_t most = c->window, is_mixed = c->is_mixed;
    const int32_t delta_index = !most ? 0 : is_mixed ? KVC_MIXED : c->piece->delta_index;
    const kvc_piece *piece = c->piece;
    int32_t offset = c->offset, n = 0, min_position = INT32_MAX, max_position = -1, is_batch = 0;
    while (n < most && (is_mixed || piece->delta_index == delta_index)) {
        const int32_t end = n + min32(piece->count - offset, most - n), position = piece->position + offset;
        const uint8_t *row = (c->buffer_rows ? c->buffer_rows : piece->rows) + begin +
                             (size_t)(piece->slot + offset) * layout->k_row_bytes;
        if (position < min_position) min_position = position;
        if (position + (end - n) > max_position) max_position = position + (end - n) - 1;
        is_batch = piece->token >= 0;
        offset += end - n;
        for (; n < end; n++, row += layout->k_row_bytes) t->k[n] = row;
        if (offset == piece->count) piece++, offset = 0;
    }
    const void *const last = n ? t->k[n - 1] : NULL;
    for (int32_t i = n; i < KVC_TILE; i++) t->k[i] = last;
    t->layout = layout;
    t->buffer_rows = c->buffer_rows;
    t->piece = c->piece;
    t->offset = c->offset;
    t->head = c->head;
    t->n = n;
    t->min_position = min_position;
    t->max_position = max_position;
    t->delta_index = delta_index;
    t->is_batch = is_batch;
    t->is_located = 0;
    c->piece = piece;
    c->offset = offset;
    c->num_rows -= n;
    c->window -= n;
}

void kvc_point_at_values(const void *v[KVC_TILE], const kvc_tile *t) {
    const kvc_layout *layout = t->layout;
    if (layout->k_row_bytes == layout->v_row_bytes) { /* the distance from key to value is the same for every row */
        for (int32_t i = 0; i < KVC_TILE; i++) v[i] = (const uint8_t *)t->k[i] + (layout->v_offset - layout->k_offset);
        return;
    }
    const size_t begin = layout->v_offset + (size_t)t->head * layout->head_stride;
    const kvc_piece *piece = t->piece;
    for (int32_t i = 0, offset = t->offset; i < t->n; piece++, offset = 0) {
        const int32_t end = i + min32(piece->count - offset, t->n - i);
        const uint8_t *row = (t->buffer_rows ? t->buffer_rows : piece->rows) + begin +
                             (size_t)(piece->slot + offset) * layout->v_row_bytes;
        for (; i < end; i++, row += layout->v_row_bytes) v[i] = row;
    }
    for (int32_t i = t->n; i < KVC_TILE; i++) v[i] = v[t->n - 1];
}

void kvc_locate_rows(kvc_tile *t, const int32_t *order) {
    const kvc_piece *piece = t->piece;
    int32_t offset = t->offset;
    for (int32_t i = 0; i < t->n && !t->is_located; i++, offset++) {
        if (offset == piece->count) piece++, offset = 0;
        t->position[i] = piece->position + offset;
        t->token[i] = piece->token < 0 ? -1 : order[piece->token + offset];
    }
    t->is_located = 1;
}

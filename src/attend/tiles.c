/* tiles.c: see tiles.h. */
#include "attend/tiles.h"

/* Begins the next window. */
static void open_window(kvc_cursor *c) {
    c->window = kvc_smaller(c->rest, KVC_TILE);
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
void kvc_next_tile(kvc_tile *t, const void *k[KVC_TILE], kvc_cursor *c) {
    const kvc_layout *at = c->at;
    if (!c->window) open_window(c);
    const size_t begin = at->k_offset + (size_t)c->head * at->head_stride;
    const int32_t most = c->window, is_mixed = c->is_mixed, turn = !most ? 0 : is_mixed ? KVC_MIXED : c->piece->turn;
    const kvc_piece *piece = c->piece;
    int32_t offset = c->offset, n = 0, min_position = INT32_MAX, max_position = -1, is_batch = 0;
    while (n < most && (is_mixed || piece->turn == turn)) {
        const int32_t end = n + kvc_smaller(piece->count - offset, most - n), position = piece->position + offset;
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
void kvc_point_at_values(const void *v[KVC_TILE], const kvc_tile *t, const void *const k[KVC_TILE]) {
    const kvc_layout *at = t->at;
    if (at->k_row_bytes == at->v_row_bytes) {
        for (int32_t i = 0; i < KVC_TILE; i++) v[i] = (const uint8_t *)k[i] + (at->v_offset - at->k_offset);
        return;
    }
    const size_t begin = at->v_offset + (size_t)t->head * at->head_stride;
    const kvc_piece *piece = t->piece;
    for (int32_t i = 0, offset = t->offset; i < t->n; piece++, offset = 0) {
        const int32_t end = i + kvc_smaller(piece->count - offset, t->n - i);
        const uint8_t *row =
            (t->rows ? t->rows : piece->rows) + begin + (size_t)(piece->slot + offset) * at->v_row_bytes;
        for (; i < end; i++, row += at->v_row_bytes) v[i] = row;
    }
    for (int32_t i = t->n; i < KVC_TILE; i++) v[i] = v[t->n - 1];
}

/* Fills in where its rows stand, and which tokens of the batch they are. */
void kvc_locate_rows(kvc_tile *t, const int32_t *order) {
    const kvc_piece *piece = t->piece;
    int32_t offset = t->offset;
    for (int32_t i = 0; i < t->n && !t->is_known; i++, offset++) {
        if (offset == piece->count) piece++, offset = 0;
        t->position[i] = piece->position + offset;
        t->token[i] = piece->token < 0 ? -1 : order[piece->token + offset];
    }
    t->is_known = 1;
}
